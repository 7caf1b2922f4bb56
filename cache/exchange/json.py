"""Entries as a JSON document, with the field names of `ucudnn.cache.table.schema`.

It is {"format": "ucudnn-measurements", "version": 1, "measurements": [{"problem.op": ..., ...}]}.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ucudnn.cache.entries import Entry
from ucudnn.cache.exchange.parsing import parse_entry, parse_values
from ucudnn.cache.table.schema import FIELDS, split_to_text
from ucudnn.errors import TableError, shortened
from ucudnn.split import Split
from ucudnn.system.files import parse_json

FORMAT = "ucudnn-measurements"
VERSION = 1


def to_json(entries: Iterable[Entry]) -> str:
    """The text of a JSON document.

    >>> to_json([]).splitlines()[0]
    '{"format": "ucudnn-measurements", "version": 1, "measurements": ['
    """
    records = [{field.name: _to_value(field.read(entry)) for field in FIELDS} for entry in entries]
    # One entry per line, so that the file can be searched and compared by line.
    lines = ",\n".join(json.dumps(record) for record in records)
    return f'{{"format": "{FORMAT}", "version": {VERSION}, "measurements": [\n{lines}\n]}}\n'


def _to_value(value: Any) -> Any:
    if isinstance(value, Split):
        return split_to_text(value)
    # JSON has no infinity and no nan; an error against the reference can be either.
    is_special = isinstance(value, float) and not math.isfinite(value)
    return repr(value) if is_special else value


def from_json(path: Path, text: str) -> list[Entry]:
    """The entries of a JSON document.

    >>> from_json(Path("timings.json"), to_json([]))
    []

    Args:
        path: name of the file in errors.
        text: contents of the file.

    Raises:
        CacheError: it is another document, of a later version, or holds a bad value.
    """
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
        # `_to_value` writes a split, and an infinite error, as text.
        for name in ("error", "split"):
            if isinstance(values.get(name), str):
                values.update(parse_values(place, {name: values[name]}))
        entries.append(parse_entry(place, values))
    return entries
