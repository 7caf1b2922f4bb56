"""Parse the texts and values of a file into entries; every error names the place in the file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ucudnn.cache.entries import Entry
from ucudnn.cache.table.schema import FIELD_BY_NAME, entry_from_values
from ucudnn.errors import CacheError, TableError, shortened


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        CacheError: it cannot be read, or is not text.
    """
    try:
        # Python's strings may hold half a surrogate pair, and `write_entries` keeps it.
        return path.read_bytes().decode("utf-8", "surrogatepass")
    except OSError as error:
        raise TableError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TableError(f"{path} is not a table of measurements: it is not text") from error


def parse_values(place: str, texts: Mapping[str, str]) -> dict[str, Any]:
    """Values of texts by field name; fields of later versions stay texts.

    Args:
        place: beginning of errors, such as "timings.csv line 3".
        texts: by field name.

    Raises:
        CacheError: a text is no value of its field.
    """
    values: dict[str, Any] = {}
    for name, text in texts.items():
        field = FIELD_BY_NAME.get(name)
        try:
            values[name] = text if field is None else field.kind.load(text)
        except ValueError:
            kind = field.type if field else "text"
            raise TableError(f"{place}: {name} must be {kind}, got {shortened(text)!r}") from None
    return values


def parse_entry(place: str, values: Mapping[str, Any]) -> Entry:
    """The entry with these values by field name.

    Args:
        place: beginning of errors, such as "timings.csv line 3".
        values: by field name.

    Raises:
        CacheError: a value is missing or impossible, or the key has a field of a later version.
    """
    try:
        return entry_from_values(values)
    except CacheError as error:
        raise TableError(f"{place}: {shortened(str(error))}") from error
