"""Files of one kind of device: X.h5, compacted, and X.h5.d/ with a segment for each write since.

No file is ever changed or written over, so nothing is lost without locks. A writer publishes a new
file under a name of its own, and a reader takes the union of all files. The lock only keeps two
processes from doing the same work twice.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from ucudnn.cache.hdf5.files import (
    SEGMENTS,
    SUFFIX,
    is_set_aside,
    may_be_ours,
    names_in,
    read_envelope,
    unique_name,
    write_file,
)
from ucudnn.system.files import is_temporary, sync_folder

_LEFTOVER_AGE_S = 3600.0


class DeviceFiles:
    """Paths of the files of one kind of device, and the steps by which they change.

    Args:
        root: the cache's folder.
        kind: beginning of the file names.
        use_locks: False: never try a file lock.

    Attributes:
        kind: beginning of the file names.
        compacted: path of X.h5.
        segments: path of X.h5.d.
    """

    def __init__(self, root: Path, kind: str, use_locks: bool) -> None:
        self.kind = kind
        self.compacted = root / f"{kind}{SUFFIX}"
        self.segments = root / f"{kind}{SEGMENTS}"
        self._use_locks = use_locks

    def paths(self) -> list[Path]:
        """Paths of the files with measurements, as they are now."""
        names: list[str] = []
        with suppress(OSError):
            names = self.segment_names()
        paths = [self.compacted, *(self.segments / name for name in names)]
        return [path for path in paths if path.is_file() and may_be_ours(path)]

    def segment_names(self) -> list[str]:
        """Names of the segments, oldest first.

        Raises:
            OSError: the folder cannot be read.
        """
        return [name for name in names_in(self.segments) if name.endswith(SUFFIX)]

    def strays(self) -> list[Path]:
        """Damaged files that were set aside, and leftovers of killed writers."""
        root = self.compacted.parent
        beside = [root / name for name in names_in(root) if name.startswith(self.compacted.name)]
        inside = [self.segments / name for name in names_in(self.segments)]
        # A young temporary file may belong to a writer that has not finished.
        return [
            path
            for path in (*beside, *inside)
            if is_set_aside(path.name)
            or (is_temporary(path.name) and _age_s(path) > _LEFTOVER_AGE_S)
        ]

    def publish(self, content: bytes, stored_ns: int) -> str:
        """Write a new segment, durably; return its name.

        Args:
            content: the file, with its envelope.
            stored_ns: time of its newest entry.

        Raises:
            OSError: it cannot be written.
        """
        name = unique_name(stored_ns)
        write_file(self.segments / name, content)
        return name

    def remove(self, names: Iterable[str]) -> None:
        """Remove segments; another process may have done so before."""
        for name in names:
            (self.segments / name).unlink(missing_ok=True)

    def retire_compacted(self, envelope: bytes | None) -> bool:
        """Remove X.h5 if it is still the file that was read; return whether it was.

        Args:
            envelope: first bytes of the file that was read.

        Raises:
            OSError: it cannot be removed.
        """
        if envelope is None or read_envelope(self.compacted) != envelope:
            return False
        # Another process may replace X.h5 between the comparison and its removal. So it is first
        # moved to a name that nobody else uses, and compared again there; if it is another file, it
        # stays as a segment.
        moved = self.segments / unique_name(time.time_ns())
        with suppress(FileNotFoundError):
            os.rename(self.compacted, moved)
            if read_envelope(moved) == envelope:
                moved.unlink()
        return True

    def promote(self, name: str) -> bool:
        """Let a segment become X.h5, beside its own name; False if that cannot be done.

        Raises:
            OSError: the disk has failed.
        """
        try:
            # Unlike a rename, a link never replaces what is there.
            os.link(self.segments / name, self.compacted)
        except OSError:
            return False  # another process was first, or the file system has no links
        sync_folder(self.compacted.parent)
        return True

    @contextmanager
    def lock(self, timeout_s: float) -> Iterator[bool]:
        """Try to be the only process that removes files; True also where locks do not exist."""
        lock = FileLock(f"{self.compacted}.lock", timeout=timeout_s)
        held = True
        if self._use_locks:
            try:
                lock.acquire()
            except Timeout:
                held = False
            except (OSError, NotImplementedError):
                pass  # a file system without locks, on which nothing is lost either
        try:
            yield held
        finally:
            lock.release()


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
