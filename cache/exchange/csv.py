"""Entries as CSV, with one column per field of `ucudnn.cache.table.schema`."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path

from ucudnn.cache.entries import Entry
from ucudnn.cache.exchange.parsing import parse_entry, parse_values
from ucudnn.cache.table.schema import FIELD_BY_NAME, FIELDS
from ucudnn.errors import TableError


def to_csv(entries: Iterable[Entry]) -> str:
    """The text of a CSV file.

    >>> to_csv([]).startswith("problem.op,problem.batch,")
    True
    """
    # newline="": the csv module writes line ends itself, which must not be translated.
    stream = io.StringIO(newline="")
    writer = csv.writer(stream)
    writer.writerow([field.name for field in FIELDS])
    writer.writerows([field.text(entry) for field in FIELDS] for entry in entries)
    return stream.getvalue()


def from_csv(path: Path, text: str) -> list[Entry]:
    """The entries of a CSV file.

    >>> from_csv(Path("timings.csv"), to_csv([]))
    []

    Args:
        path: name of the file in errors.
        text: contents of the file.

    Raises:
        CacheError: it is no table of measurements, or a line holds a bad value.
    """
    reader = csv.reader(io.StringIO(text, newline=""))
    try:
        header = next(reader, [])
        if "problem.op" not in header:
            raise TableError(
                f"{path} line 1: a table of measurements has the columns "
                f"{', '.join(FIELD_BY_NAME)}; import a probe's timings.csv with its layer tables"
            )
        entries = []
        for row in reader:
            place = f"{path} line {reader.line_num}"
            if len(row) != len(header):
                raise TableError(f"{place}: {len(header)} values are needed, got {len(row)}")
            values = parse_values(place, dict(zip(header, row, strict=True)))
            entries.append(parse_entry(place, values))
    except csv.Error as error:
        raise TableError(f"{path} line {reader.line_num}: {error}") from error
    return entries
