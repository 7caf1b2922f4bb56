"""Entries as CSV and JSON, for people, spreadsheets and other programs; nothing is lost on the way.

Both use the field names of `ucudnn.cache.table.schema`. A CSV has one column per field. A JSON
document is {"format": "ucudnn-measurements", "version": 1, "measurements": [{"problem.op": ...}]}.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ucudnn.cache.entries import Entry
from ucudnn.cache.table.schema import FIELD_BY_NAME, FIELDS, entry_from_values
from ucudnn.errors import CacheError, shortened
from ucudnn.system.files import make_folder, parse_json, replacing

FORMAT = "ucudnn-measurements"
VERSION = 1
_SUFFIXES = (".csv", ".json")


def write_entries(path: str | os.PathLike[str], entries: Iterable[Entry]) -> int:
    """Write entries to a .csv or .json file, and count them.

    Raises:
        CacheError: another suffix, or the file cannot be written.
    """
    target = Path(path)
    listed = list(entries)
    text = (_to_csv if _suffix(target) == ".csv" else _to_json)(listed)
    try:
        make_folder(target.parent)
        with replacing(target) as stream:
            stream.write(text.encode("utf-8", "surrogatepass"))
    except OSError as error:
        raise CacheError(f"cannot write {target}: {error.strerror}; choose another path") from error
    return len(listed)


def _suffix(path: Path) -> str:
    suffix = path.suffix.lower()
    if suffix not in _SUFFIXES:
        raise CacheError(
            f"measurements are exported and imported as {' or '.join(_SUFFIXES)}, got {path.name!r}"
        )
    return suffix


def _to_csv(entries: Iterable[Entry]) -> str:
    stream = io.StringIO(newline="")
    writer = csv.writer(stream)
    writer.writerow([field.name for field in FIELDS])
    writer.writerows([field.text(entry) for field in FIELDS] for entry in entries)
    return stream.getvalue()


def _to_json(entries: Iterable[Entry]) -> str:
    records = [{field.name: _to_value(field.read(entry)) for field in FIELDS} for entry in entries]
    lines = ",\n".join(json.dumps(record) for record in records)
    return f'{{"format": "{FORMAT}", "version": {VERSION}, "measurements": [\n{lines}\n]}}\n'


def _to_value(value: Any) -> Any:
    # JSON has no infinity and no nan; an error against the reference can be either.
    is_special = isinstance(value, float) and not math.isfinite(value)
    return repr(value) if is_special else value


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        CacheError: it cannot be read, or is not text.
    """
    try:
        return path.read_bytes().decode("utf-8", "surrogatepass")
    except OSError as error:
        raise CacheError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CacheError(f"{path} is not a table of measurements: it is not text") from error


def read_entries(path: str | os.PathLike[str]) -> list[Entry]:
    """Read a .csv or .json file of entries.

    Raises:
        CacheError: the file cannot be read, is of a later version, or holds a bad value; the
            message names the line.
    """
    source = Path(path)
    suffix, text = _suffix(source), read_text(source)
    return _from_csv(source, text) if suffix == ".csv" else _from_json(source, text)


def _from_csv(path: Path, text: str) -> list[Entry]:
    reader = csv.reader(io.StringIO(text, newline=""))
    try:
        header = next(reader, [])
        if "problem.op" not in header:
            raise CacheError(
                f"{path} line 1: a table of measurements has the columns "
                f"{', '.join(FIELD_BY_NAME)}; import a probe's timings.csv with its layer tables"
            )
        entries = []
        for row in reader:
            where = f"{path} line {reader.line_num}"
            if len(row) != len(header):
                raise CacheError(f"{where}: {len(header)} values are needed, got {len(row)}")
            entries.append(_entry(where, _values(where, dict(zip(header, row, strict=True)))))
    except csv.Error as error:
        raise CacheError(f"{path} line {reader.line_num}: {error}") from error
    return entries


def _values(where: str, texts: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, text in texts.items():
        field = FIELD_BY_NAME.get(name)
        try:
            values[name] = text if field is None else field.kind.load(text)
        except ValueError:
            kind = field.type if field else "text"
            raise CacheError(f"{where}: {name} must be {kind}, got {shortened(text)!r}") from None
    return values


def _from_json(path: Path, text: str) -> list[Entry]:
    try:
        document = parse_json(text)
    except ValueError as error:
        raise CacheError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CacheError(f"{path} is no table of measurements: it has no format={FORMAT!r}")
    version, records = document.get("version"), document.get("measurements")
    if version != VERSION:
        raise CacheError(
            f"{path} has format version {shortened(repr(version))}, this ucudnn reads {VERSION}; "
            f"import it with the ucudnn that wrote it"
        )
    if not isinstance(records, list) or not all(isinstance(one, dict) for one in records):
        raise CacheError(f"{path}: measurements must be a list of objects")
    entries = []
    for number, record in enumerate(records, start=1):
        values = dict(record)
        if isinstance(values.get("error"), str):
            values.update(_values(f"{path} measurement {number}", {"error": values["error"]}))
        entries.append(_entry(f"{path} measurement {number}", values))
    return entries


def _entry(where: str, values: Mapping[str, Any]) -> Entry:
    try:
        return entry_from_values(values)
    except CacheError as error:
        raise CacheError(f"{where}: {shortened(str(error))}") from error
