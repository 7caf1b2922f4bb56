"""Operations on single files of a cache, which are complete or absent, never on other files.

Nothing here relies on locks or on anything of a file system beyond an atomic rename. A file is
renamed or removed only if its contents or its name show that a cache made it, because a user may
give a folder of other HDF5 files by mistake.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

from ucudnn.cache.hdf5.envelope import ENVELOPE_BYTES, HEAD_BYTES, DamagedError, has_envelope
from ucudnn.system.files import make_folder, replacing

SUFFIX = ".h5"
SEGMENTS = ".h5.d"
_DAMAGED, _SALVAGED = ".damaged-", ".salvaged-"
# Names that nobody else makes: of segments, and of files that were set aside.
_SEGMENT_NAME = re.compile(r"\d{20}-\d+-[0-9a-f]{8}\.h5")
_SET_ASIDE_NAME = re.compile(r"(.+)\.h5(\.d)?\.damaged-[0-9a-f]{8}")
# A symbolic link that leads nowhere, or round in a circle; a device without a driver.
_NO_FILE = {errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EISDIR}


def read_file(path: Path, size: int = -1) -> bytes:
    """All bytes of a regular file, or the first `size`.

    Raises:
        DamagedError: something else is there: a folder, a loop of links, a pipe.
        OSError: it cannot be read, or is not there.
    """
    try:
        # Opening a pipe that nobody writes to would wait for ever without O_NONBLOCK.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise DamagedError(f"it is not a file ({error.strerror})") from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise DamagedError("it is not a file")
        with os.fdopen(os.dup(handle), "rb") as stream:
            return stream.read(size)
    finally:
        os.close(handle)


def read_envelope(path: Path) -> bytes | None:
    """The first bytes of a file, which differ where the contents differ.

    None if there is no file; b"" if there is something that cannot be read.
    """
    try:
        return read_file(path, ENVELOPE_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, DamagedError):
        return b""


def unique_name(stored_ns: int) -> str:
    """A file name that no other process makes; later ones sort after earlier ones."""
    return f"{stored_ns:020d}-{os.getpid()}-{os.urandom(4).hex()}{SUFFIX}"


def write_file(path: Path, content: bytes) -> None:
    """Write a file so that all of it is on the disk before its name appears.

    Raises:
        OSError: it cannot be written; the old contents are still there.
    """
    make_folder(path.parent)
    with replacing(path) as stream:
        stream.write(content)


def names_in(folder: Path) -> list[str]:
    """The names in a folder, sorted; none if there is no folder."""
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        if error.errno in _NO_FILE:
            return []
        raise


def is_ours(path: Path) -> bool:
    """True for a file that a cache certainly wrote, even if it was damaged since.

    Raises:
        OSError: it cannot be read, or is not there.
    """
    try:
        head = read_file(path, HEAD_BYTES)
    except DamagedError:
        return False
    # The name of a segment proves its origin. Anybody may have named a file X.h5, so there the
    # contents must.
    is_segment = path.parent.name.endswith(SEGMENTS) and _SEGMENT_NAME.fullmatch(path.name)
    return bool(is_segment) or has_envelope(head)


def may_be_ours(path: Path) -> bool:
    """True also for a file that cannot be read, because its reader will say so."""
    try:
        return is_ours(path)
    except OSError:
        return True


def kinds_in(root: Path) -> list[str]:
    """The kinds of device that a cache's folder has files of, including those set aside."""
    kinds = set()
    for name in names_in(root):
        aside = _SET_ASIDE_NAME.fullmatch(name)
        if aside:
            kinds.add(aside[1])
        elif name.endswith(SEGMENTS):
            kinds.add(name.removesuffix(SEGMENTS))
        elif name.endswith(SUFFIX) and may_be_ours(root / name):
            kinds.add(name.removesuffix(SUFFIX))
    return sorted(kinds)


def foreign_in(root: Path) -> list[Path]:
    """HDF5 files in a cache's folder that are not the cache's."""
    kinds = kinds_in(root)
    names = [name for name in names_in(root) if name.endswith(SUFFIX)]
    return [root / name for name in names if name.removesuffix(SUFFIX) not in kinds]


def set_aside(path: Path) -> Path:
    """Rename a damaged file, so that no reader looks at it again; return its new path.

    Raises:
        OSError: the folder cannot be written.
    """
    target = path.with_name(f"{path.name}{_DAMAGED}{os.urandom(4).hex()}")
    os.rename(path, target)
    return target


def is_set_aside(name: str) -> bool:
    """True for a name that `set_aside` made."""
    return _SET_ASIDE_NAME.fullmatch(name) is not None


def mark_salvaged(path: Path) -> None:
    """Rename a file that was set aside, after its sound entries were recovered."""
    os.rename(path, path.with_name(path.name.replace(_DAMAGED, _SALVAGED)))
