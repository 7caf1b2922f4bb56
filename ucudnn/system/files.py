"""Atomic file writes, and safe reading of JSON."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

from ucudnn.errors import OutputError

# The largest number of nested levels of a JSON document. Documents of this package have fewer
# levels, and Python could read many more.
_DEEPEST = 32
_LEVELS = {"[": 1, "{": 1, "]": -1, "}": -1}
# Matches all that is no bracket of the JSON structure: a string, even if its end is missing, or
# other characters outside of strings.
_NO_BRACKET = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)|[^"\[\]{}]+', re.DOTALL)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a new file, which replaces the file at `path` if the block ends without an error.

    Readers see the old contents or the new ones, never a part, even after a power failure. A device
    or a named pipe, such as /dev/stdout, is not replaced but written to.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "plan.json"
    >>> with replacing(path) as stream:
    ...     count = stream.write(b"{}")
    ...     path.exists()
    False
    >>> path.read_bytes()
    b'{}'
    """
    # A device or pipe is written to directly, because a rename would put a file in its place.
    if path.exists() and not path.is_file() and not path.is_dir():
        with path.open("wb") as stream:
            yield stream
        return
    # The temporary file is in the same folder: a rename is atomic only within a file system.
    temporary = path.parent / f".new-{os.getpid()}-{os.urandom(4).hex()}"
    try:
        with temporary.open("xb") as stream:
            yield stream
            stream.flush()
            # The contents must reach the disk before the new name does.
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents, durably; an existing folder is left as it is."""
    if not folder.is_dir():
        make_folder(folder.parent)
        # Another process may create the folder at the same time.
        with suppress(FileExistsError):
            folder.mkdir()
        sync_folder(folder.parent)


def is_writable(folder: Path) -> bool:
    """True if a folder can be written, or made in its nearest parent that exists."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    return existing.is_dir() and os.access(existing, os.W_OK)


def sync_folder(folder: Path) -> None:
    """Write the names in a folder to the disk, so that they survive a power failure."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        return  # a folder that may be written but not listed cannot be synced
    try:
        os.fsync(handle)
    except OSError as error:
        # Some file systems refuse to sync a folder, and do not need it.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(handle)


def write(path: str | os.PathLike[str], content: bytes, what: str) -> None:
    """Write a file for the user and replace an existing one as a whole, or raise an OutputError.

    >>> import tempfile
    >>> write(f"{tempfile.mkdtemp()}/missing/plan.json", b"{}", "the plan")
    Traceback (most recent call last):
    ucudnn.errors.OutputError: cannot write the plan to ...
    """
    try:
        with replacing(Path(path)) as stream:
            stream.write(content)
    except OSError as error:
        raise OutputError(
            f"cannot write {what} to {path}: {error.strerror}; choose another path"
        ) from error


def parse_json(text: str) -> Any:
    """Parse JSON from an untrusted source; if it is refused, a ValueError says what is wrong.

    >>> parse_json('{"a": ["[[["]}')
    {'a': ['[[[']}
    """
    # Much deeper nesting would exhaust Python's stack when the document is read or written.
    brackets = _NO_BRACKET.sub("", text)
    if max(accumulate(map(_LEVELS.__getitem__, brackets)), default=0) > _DEEPEST:
        raise ValueError(f"its brackets are nested deeper than {_DEEPEST} levels")
    return json.loads(text)
