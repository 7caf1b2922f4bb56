"""Entries as CSV files, for people, spreadsheets and other programs; no value is lost.

A file has one line per entry and one column per field of `ucudnn.cache.schema`.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from msgspec import ValidationError, convert

from ucudnn.cache.entries import Entry
from ucudnn.cache.schema import FIELD_BY_NAME, FIELDS
from ucudnn.errors import CacheError, TableError, UcudnnError, shortened
from ucudnn.system.files import make_folder, replacing


def write_entries(path: str | os.PathLike[str], entries: Iterable[Entry]) -> int:
    """Write entries to a .csv file, and count them; make its folder if it is missing."""
    target = _csv_path(path)
    # With newline="" the stream does not translate line ends, which the csv module writes itself.
    stream = io.StringIO(newline="")
    writer = csv.writer(stream)
    writer.writerow(FIELD_BY_NAME)
    count = 0
    for entry in entries:
        writer.writerow([field.text(entry) for field in FIELDS])
        count += 1
    try:
        make_folder(target.parent)
        with replacing(target) as file:
            file.write(stream.getvalue().encode("utf-8", "surrogatepass"))
    except OSError as error:
        raise CacheError(f"cannot write {target}: {error.strerror}; choose another path") from error
    return count


def read_entries(path: str | os.PathLike[str]) -> list[Entry]:
    """Read a .csv file of entries."""
    source = _csv_path(path)
    reader = csv.reader(io.StringIO(_read_text(source), newline=""))
    try:
        header = next(reader, [])
        if sorted(header) != sorted(FIELD_BY_NAME):
            raise TableError(
                f"{source} line 1: a table of measurements has the columns "
                f"{', '.join(FIELD_BY_NAME)}; export it with this ucudnn"
            )
        entries = []
        for row in reader:
            place = f"{source} line {reader.line_num}"
            if len(row) != len(header):
                raise TableError(f"{place}: {len(header)} values are needed, got {len(row)}")
            entries.append(_entry(place, dict(zip(header, row, strict=True))))
    except csv.Error as error:
        raise TableError(f"{source} line {reader.line_num}: {error}") from error
    return entries


def _csv_path(path: str | os.PathLike[str]) -> Path:
    found = Path(path)
    if found.suffix.lower() != ".csv":
        raise TableError(f"measurements are exported and imported as .csv, got {found.name!r}")
    return found


def _read_text(path: Path) -> str:
    try:
        # "surrogatepass" is needed because `write_entries` writes a lone surrogate of a Python
        # string as it is.
        return path.read_bytes().decode("utf-8", "surrogatepass")
    except OSError as error:
        raise TableError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TableError(f"{path} is not a table of measurements: it is not text") from error


def _entry(place: str, texts: Mapping[str, str]) -> Entry:
    """The entry whose fields have these texts by name; errors begin with the place of the row."""
    document: dict[str, Any] = {}
    for name, text in texts.items():
        field = FIELD_BY_NAME[name]
        *rooms, own_name = field.path.split(".")
        room = document
        for one in rooms:
            room = room.setdefault(one, {})
        try:
            room[own_name] = field.kind.load(text)
        except ValueError:
            raise TableError(
                f"{place}: {name} must be {field.kind.name}, got {shortened(text)!r}"
            ) from None
    try:
        return convert(document, Entry)
    # If a field that allows only a few words, such as a role, has text that is not valid Unicode,
    # `convert` raises a ValueError.
    except (ValidationError, ValueError, UcudnnError) as error:
        raise TableError(f"{place}: {shortened(str(error))}") from error
