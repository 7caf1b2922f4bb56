"""Files of a cache: per kind X of device a compacted X.h5, and X.h5.d/ with a segment per write.

A file is complete or absent. No file is ever changed or written over, so nothing is lost without
locks: a writer publishes a new file under a unique name, and a reader takes the union of all files.
The only feature that the file system must have is an atomic rename. A file is renamed or removed
only if its contents or its name show that a cache made it, because a user may give a folder of
other HDF5 files by mistake.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from ucudnn.cache.hdf5.codec import ENVELOPE_BYTES, HEAD_BYTES, DamagedError, has_envelope
from ucudnn.system.files import make_folder, replacing, sync_folder

SUFFIX = ".h5"
SEGMENTS = ".h5.d"
# Names that only a cache makes.
_SEGMENT_NAME = re.compile(r"\d{20}-\d+-[0-9a-f]{8}\.h5")
# Errors for paths that are no regular file: a circle of symbolic links, a device without a driver,
# a socket, a folder.
_NO_FILE = {errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EISDIR}


def read_file(path: Path, size: int = -1) -> bytes:
    """All bytes of a regular file, or the first `size`; a DamagedError for anything else."""
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
    """The first bytes of a file; they hold a checksum, and so differ if the contents differ.

    None if there is no file; b"" if there is a file that cannot be read.
    """
    try:
        return read_file(path, ENVELOPE_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, DamagedError):
        return b""


def unique_name(stored_ns: int) -> str:
    """A file name that no other process makes; names with later times sort after earlier ones."""
    return f"{stored_ns:020d}-{os.getpid()}-{os.urandom(4).hex()}{SUFFIX}"


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
    """True for a file that a cache certainly wrote, even if it was damaged since."""
    try:
        head = read_file(path, HEAD_BYTES)
    except DamagedError:
        return False
    # The name of a segment shows that a cache wrote it. A file X.h5 may be one of the user's, so
    # its contents must show that a cache wrote it.
    is_segment = path.parent.name.endswith(SEGMENTS) and _SEGMENT_NAME.fullmatch(path.name)
    return bool(is_segment) or has_envelope(head)


def may_be_ours(path: Path) -> bool:
    """True if a cache wrote a file, or if the file cannot be read; its reader will report that."""
    try:
        return is_ours(path)
    except OSError:
        return True


def kinds_in(root: Path) -> tuple[list[str], list[Path]]:
    """The kinds of device that have files in a folder, and the HDF5 files that no cache wrote."""
    names = names_in(root)
    files = [name for name in names if name.endswith(SUFFIX)]
    kinds = {name.removesuffix(SEGMENTS) for name in names if name.endswith(SEGMENTS)}
    kinds |= {name.removesuffix(SUFFIX) for name in files if may_be_ours(root / name)}
    foreign = [root / name for name in files if name.removesuffix(SUFFIX) not in kinds]
    return sorted(kinds), foreign


def set_aside(path: Path) -> Path:
    """Rename a damaged file, so that no reader looks at it again; return its new path."""
    target = path.with_name(f"{path.name}.damaged-{os.urandom(4).hex()}")
    os.rename(path, target)
    return target


class DeviceFiles:
    """Paths of the files of one kind of device, and the operations that add and remove files.

    `lock` only prevents that two processes do the same work; entries are safe without it.
    """

    def __init__(self, root: Path, kind: str) -> None:
        self.compacted = root / f"{kind}{SUFFIX}"
        self.segments = root / f"{kind}{SEGMENTS}"

    def paths(self) -> list[Path]:
        """Paths of the files with measurements, as they are now."""
        names: list[str] = []
        with suppress(OSError):
            names = self.segment_names()
        paths = [self.compacted, *(self.segments / name for name in names)]
        # Unlike `Path.is_file`, `isfile` raises no error in a folder that the user must not search.
        return [path for path in paths if os.path.isfile(path) and may_be_ours(path)]

    def segment_names(self) -> list[str]:
        """Names of the segments, oldest first."""
        return [name for name in names_in(self.segments) if name.endswith(SUFFIX)]

    def publish(self, content: bytes, stored_ns: int) -> str:
        """Write a new segment, durably; return its name, which begins with `stored_ns`."""
        name = unique_name(stored_ns)
        make_folder(self.segments)
        with replacing(self.segments / name) as stream:
            stream.write(content)
        return name

    def remove(self, names: Iterable[str]) -> None:
        """Remove segments, as far as another process has not removed them."""
        for name in names:
            (self.segments / name).unlink(missing_ok=True)

    def retire_compacted(self, envelope: bytes | None) -> bool:
        """Remove X.h5 if it still has the given envelope; False if X.h5 has another or is gone."""
        if envelope is None or read_envelope(self.compacted) != envelope:
            return False
        # Another process may replace X.h5 between this comparison and the removal. So X.h5 is first
        # moved to a unique name, and compared again there. If it is another file by then, it stays
        # as a segment.
        self.segments.mkdir(exist_ok=True)
        moved = self.segments / unique_name(time.time_ns())
        with suppress(FileNotFoundError):
            os.rename(self.compacted, moved)
            if read_envelope(moved) == envelope:
                moved.unlink()
        return True

    def promote(self, name: str) -> bool:
        """Give a segment the second name X.h5; False if that cannot be done."""
        try:
            # Unlike a rename, a link never replaces what is there.
            os.link(self.segments / name, self.compacted)
        except OSError:
            return False  # another process was first, or the file system has no links
        sync_folder(self.compacted.parent)
        return True

    @contextmanager
    def lock(self, timeout_s: float) -> Iterator[bool]:
        """Yield True if no other process holds the lock, or if the file system has no locks."""
        lock = FileLock(f"{self.compacted}.lock", timeout=timeout_s)
        held = True
        try:
            lock.acquire()
        except Timeout:
            held = False
        except (OSError, NotImplementedError):
            pass  # a file system without locks: no entry is lost without them
        try:
            yield held
        finally:
            lock.release()
