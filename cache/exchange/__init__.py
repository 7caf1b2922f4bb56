"""Entries as text files, for people, spreadsheets and other programs; no value is lost.

csv.py      one line per entry
json.py     one object per entry
probe.py    the tables that a probe of a GPU leaves; only read
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ucudnn.cache.entries import Entry
from ucudnn.cache.exchange.csv import from_csv, to_csv
from ucudnn.cache.exchange.json import from_json, to_json
from ucudnn.cache.exchange.parsing import read_text
from ucudnn.errors import CacheError, TableError
from ucudnn.system.files import make_folder, replacing

_WRITERS = {".csv": to_csv, ".json": to_json}
_READERS = {".csv": from_csv, ".json": from_json}


def write_entries(path: str | os.PathLike[str], entries: Iterable[Entry]) -> int:
    """Write entries to a .csv or .json file, and count them.

    >>> import tempfile
    >>> write_entries(f"{tempfile.mkdtemp()}/timings.csv", [])
    0

    Args:
        path: the file; it is replaced as a whole, and its folder is made.
        entries: every one becomes a line or an object.

    Raises:
        CacheError: another suffix, or the file cannot be written.
    """
    target = Path(path)
    # Entries may be an iterator, and are counted after they are written.
    listed = list(entries)
    text = _WRITERS[_suffix(target)](listed)
    try:
        make_folder(target.parent)
        with replacing(target) as stream:
            stream.write(text.encode("utf-8", "surrogatepass"))
    except OSError as error:
        raise CacheError(f"cannot write {target}: {error.strerror}; choose another path") from error
    return len(listed)


def read_entries(path: str | os.PathLike[str]) -> list[Entry]:
    """Read a .csv or .json file of entries.

    >>> import tempfile
    >>> path = f"{tempfile.mkdtemp()}/timings.json"
    >>> _ = write_entries(path, [])
    >>> read_entries(path)
    []

    Args:
        path: the file.

    Raises:
        CacheError: the file cannot be read, is of a later version, or holds a bad value; the
            message names the line.
    """
    source = Path(path)
    suffix = _suffix(source)
    return _READERS[suffix](source, read_text(source))


def _suffix(path: Path) -> str:
    suffix = path.suffix.lower()
    if suffix not in _WRITERS:
        raise TableError(
            f"measurements are exported and imported as {' or '.join(_WRITERS)}, got {path.name!r}"
        )
    return suffix
