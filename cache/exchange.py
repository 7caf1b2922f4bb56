"""Entries as CSV and JSON files, for people, spreadsheets and other programs; no value is lost.

A CSV file has one line per entry and one column per field of `ucudnn.cache.schema`. A JSON document
is {"format": "ucudnn-measurements", "version": 1, "measurements": [{"problem.op": ..., ...}]}.
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
from ucudnn.cache.schema import FIELD_BY_NAME, FIELDS, entry_from_values, split_to_text
from ucudnn.errors import CacheError, TableError, shortened
from ucudnn.split import Split
from ucudnn.system.files import make_folder, parse_json, replacing

FORMAT = "ucudnn-measurements"
VERSION = 1


def write_entries(path: str | os.PathLike[str], entries: Iterable[Entry]) -> int:
    """Write entries to a .csv or .json file, and count them; make its folder if it is missing."""
    target = Path(path)
    # Entries are put into a list, because an iterator could not be counted after it was written.
    listed = list(entries)
    text = _to_csv(listed) if _suffix(target) == ".csv" else _to_json(listed)
    try:
        make_folder(target.parent)
        with replacing(target) as stream:
            stream.write(text.encode("utf-8", "surrogatepass"))
    except OSError as error:
        raise CacheError(f"cannot write {target}: {error.strerror}; choose another path") from error
    return len(listed)


def read_entries(path: str | os.PathLike[str]) -> list[Entry]:
    """Read a .csv or .json file of entries."""
    source = Path(path)
    read = _from_csv if _suffix(source) == ".csv" else _from_json
    return read(source, _read_text(source))


def _suffix(path: Path) -> str:
    suffix = path.suffix.lower()
    if suffix not in (".csv", ".json"):
        raise TableError(
            f"measurements are exported and imported as .csv or .json, got {path.name!r}"
        )
    return suffix


def _read_text(path: Path) -> str:
    try:
        # "surrogatepass" is needed because `write_entries` writes a lone surrogate of a Python
        # string as it is.
        return path.read_bytes().decode("utf-8", "surrogatepass")
    except OSError as error:
        raise TableError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TableError(f"{path} is not a table of measurements: it is not text") from error


def _to_csv(entries: Iterable[Entry]) -> str:
    # With newline="" the stream does not translate line ends, which the csv module writes itself.
    stream = io.StringIO(newline="")
    writer = csv.writer(stream)
    writer.writerow(FIELD_BY_NAME)
    writer.writerows([field.text(entry) for field in FIELDS] for entry in entries)
    return stream.getvalue()


def _from_csv(path: Path, text: str) -> list[Entry]:
    reader = csv.reader(io.StringIO(text, newline=""))
    try:
        header = next(reader, [])
        if sorted(header) != sorted(FIELD_BY_NAME):
            raise TableError(
                f"{path} line 1: a table of measurements has the columns "
                f"{', '.join(FIELD_BY_NAME)}; export it with this ucudnn"
            )
        entries = []
        for row in reader:
            place = f"{path} line {reader.line_num}"
            if len(row) != len(header):
                raise TableError(f"{place}: {len(header)} values are needed, got {len(row)}")
            texts = zip(header, row, strict=True)
            entries.append(_entry(place, {name: _value(place, name, one) for name, one in texts}))
    except csv.Error as error:
        raise TableError(f"{path} line {reader.line_num}: {error}") from error
    return entries


def _to_json(entries: Iterable[Entry]) -> str:
    records = [{field.name: _to_value(field.read(entry)) for field in FIELDS} for entry in entries]
    # One entry per line, so that the file can be searched and compared by line.
    lines = ",\n".join(json.dumps(record) for record in records)
    return f'{{"format": "{FORMAT}", "version": {VERSION}, "measurements": [\n{lines}\n]}}\n'


def _to_value(value: Any) -> Any:
    if isinstance(value, Split):
        return split_to_text(value)
    # Infinity and nan are written as text, because JSON does not have them, and a measured error
    # can be either.
    is_special = isinstance(value, float) and not math.isfinite(value)
    return repr(value) if is_special else value


def _from_json(path: Path, text: str) -> list[Entry]:
    try:
        document = parse_json(text)
    except ValueError as error:
        raise TableError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise TableError(f"{path} is no table of measurements: it has no format={FORMAT!r}")
    version, records = document.get("version"), document.get("measurements")
    if version != VERSION:
        raise TableError(
            f"{path} has format version {shortened(repr(version))}, this ucudnn reads {VERSION}; "
            f"import it with the ucudnn that wrote it"
        )
    if not isinstance(records, list) or not all(isinstance(one, dict) for one in records):
        raise TableError(f"{path}: measurements must be a list of objects")
    entries = []
    for number, record in enumerate(records, start=1):
        place = f"{path} measurement {number}"
        values = dict(record)
        # `_to_value` writes a split as text, and an error that is infinite or nan.
        for name in ("error", "split"):
            if isinstance(values.get(name), str):
                values[name] = _value(place, name, values[name])
        entries.append(_entry(place, values))
    return entries


def _value(place: str, name: str, text: str) -> Any:
    kind = FIELD_BY_NAME[name].kind
    try:
        return kind.load(text)
    except ValueError:
        raise TableError(f"{place}: {name} must be {kind.name}, got {shortened(text)!r}") from None


def _entry(place: str, values: Mapping[str, Any]) -> Entry:
    try:
        return entry_from_values(values)
    except CacheError as error:
        raise TableError(f"{place}: {shortened(str(error))}") from error
