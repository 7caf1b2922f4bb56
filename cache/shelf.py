"""The files of one kind of device: X.h5, compacted, and X.h5.d/, what was put since.

Nothing is lost without locks, because no file is ever changed or written over. A writer publishes a
new file under a name of its own; a reader takes the union of all files. Compaction publishes that
union as one more file, and only then removes the files it was made from, each by its own name; X.h5
is first moved to such a name and looked at again, since another process may have replaced it. The
lock only keeps two processes from doing the same work.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from time import time_ns

from filelock import FileLock, Timeout

from ucudnn.cache.folder import (
    SEGMENTS,
    SUFFIX,
    names_in,
    read_file,
    read_frame,
    set_aside,
    sync_folder,
    unique_name,
    write_file,
)
from ucudnn.cache.frame import FRAME_BYTES, DamagedError, NewerError, framed, unframed
from ucudnn.cache.image import from_image, to_image
from ucudnn.cache.table import Table, stored_ns
from ucudnn.cache.tabulate import merged, tabulate
from ucudnn.cache.values import Entry
from ucudnn.measurement import Measurement, MeasurementKey

_READ_ROUNDS = 8
_MANY_SEGMENTS = 64
_WORTH_COMPACTING = 4


class Shelf:
    """Reads and writes the files of one kind of device.

    Args:
        root: the cache's folder.
        kind: what the file names begin with.
        writable: False: nothing is written, and damaged files stay where they are.
        use_locks: whether to try file locks.
        say: told, in a sentence, what was not kept or could not be read.
    """

    def __init__(
        self,
        root: Path,
        kind: str,
        writable: bool,
        use_locks: bool,
        say: Callable[[str], None],
    ) -> None:
        self.compacted = root / f"{kind}{SUFFIX}"
        self.segments = root / f"{kind}{SEGMENTS}"
        self._writable = writable
        self._use_locks = use_locks
        self._say = say
        self._base = tabulate(())
        self._base_frame: bytes | None = None
        self._recent = self._base
        self._unmerged: list[Table] = []
        self._tables: list[Table] = []
        self._loaded = self._settled = False
        self._pending: list[Table] = []
        # Segments that were read; those which hold more than was understood must stay.
        self._complete_by_name: dict[str, bool] = {}
        self._base_complete = True
        self._newest_ns = 0
        self._puts = 0
        self._said_unwritable = False

    @property
    def files(self) -> list[Path]:
        """The files with measurements, as they are now."""
        segments = [self.segments / name for name in _segment_names(self.segments)]
        return [self.compacted, *segments] if self.compacted.is_file() else segments

    @property
    def incomplete_files(self) -> list[Path]:
        """Files read that hold more than this version understands."""
        names = [name for name, complete in self._complete_by_name.items() if not complete]
        paths = [self.segments / name for name in names]
        return paths if self._base_complete else [self.compacted, *paths]

    def find(self, key: MeasurementKey) -> Measurement | None:
        """The latest measurement with this key."""
        found, latest_ns = None, -1
        for table in self._searched():
            row = table.find(key)
            if row is not None and stored_ns(row) > latest_ns:
                found, latest_ns = table.measurement(row, key), stored_ns(row)
        return found

    def table(self) -> Table:
        """Everything, as one table."""
        tables = self._searched()
        return tables[0] if len(tables) == 1 else merged(tables)

    def _searched(self) -> list[Table]:
        """What to look in: few tables, none of them empty."""
        if not self._settled:
            if not self._loaded:
                self.refresh()
            self._recent = merged([self._recent, *self._unmerged])
            self._unmerged.clear()
            self._tables = [table for table in (self._recent, self._base) if len(table)]
            self._settled = True
        return self._tables

    def refresh(self) -> None:
        """Read the files that are new.

        Compaction may move data between two looks, so it ends with two looks that show the same.
        """
        self._loaded, self._settled = True, False
        self._require_folder()
        seen = None
        for _ in range(_READ_ROUNDS):
            listing = (read_frame(self.compacted), _segment_names(self.segments))
            if listing == seen:
                return
            seen = listing
            self._read_compacted(listing[0])
            for name in listing[1]:
                self._read_segment(name)

    def _require_folder(self) -> None:
        if os.path.lexists(self.segments) and not self.segments.is_dir():
            self._put_aside(self.segments, DamagedError("it is not a folder"))

    def _read_compacted(self, frame: bytes | None) -> None:
        if frame is None or frame == self._base_frame:
            return
        self._base_frame = frame
        loaded = self._load(self.compacted)
        if loaded is not None:
            self._base, self._base_complete, self._base_frame = loaded
            self._newest_ns = max(self._newest_ns, self._base.newest_ns)

    def _read_segment(self, name: str) -> None:
        if name in self._complete_by_name:
            return
        loaded = self._load(self.segments / name)
        if loaded is not None:
            table, self._complete_by_name[name], _ = loaded
            self._unmerged.append(table)
            self._newest_ns = max(self._newest_ns, table.newest_ns)

    def _load(self, path: Path) -> tuple[Table, bool, bytes] | None:
        """The table of a file, whether it is complete, and its frame; None where there is none."""
        try:
            data = read_file(path)
            return *from_image(unframed(data)), data[:FRAME_BYTES]
        except NewerError as error:
            self._say(f"{path} was left alone: {error}; upgrade ucudnn to use it")
            return tabulate(()), False, data[:FRAME_BYTES]
        except DamagedError as error:
            self._put_aside(path, error)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE):
                return None  # moved by a compaction; the next look shows where to
            self._say(f"{path} cannot be read ({error.strerror}): its measurements are not used")
        return tabulate(()), False, b""

    def _put_aside(self, path: Path, error: DamagedError) -> None:
        aside = None
        if self._writable:
            with suppress(OSError):
                aside = set_aside(path)
        if aside is not None and self._is_sound(aside):
            return
        where = f"it was kept as {aside.name}" if aside else "it was left where it is"
        self._say(
            f"{path} is damaged ({error}) and is not used: {where}; "
            f"`ucudnn cache check --fix` recovers what it can"
        )

    def _is_sound(self, aside: Path) -> bool:
        """Whether another process replaced a damaged file by a sound one just before the move."""
        try:
            unframed(read_file(aside))
            os.rename(aside, self.segments / unique_name(time_ns()))
        except (OSError, DamagedError, NewerError):
            return False
        return True

    def put(self, entries: Iterable[Entry]) -> None:
        """Keep entries, on the disk where that is possible.

        Raises:
            CacheError: a number needs more than 64 bits; nothing was kept then.
        """
        self._searched()  # to know the newest
        now = max(time_ns(), self._newest_ns + 1)
        table = tabulate(
            entry if entry.stored_ns else replace(entry, stored_ns=now + index)
            for index, entry in enumerate(entries)
        )
        image = to_image(merged([*self._pending, table]))
        self._newest_ns = max(self._newest_ns, table.newest_ns)
        self._unmerged.append(table)
        self._settled = False
        self._pending.append(table)
        self._write(image)
        self._puts += 1
        if self._puts >= _MANY_SEGMENTS:
            self.compact()

    def _write(self, image: bytes) -> None:
        name = unique_name(self._newest_ns)
        try:
            write_file(self.segments / name, framed(image))
        except OSError as error:
            if not self._said_unwritable:
                self._said_unwritable = True
                self._say(
                    f"measurements cannot be written to {self.segments} ({error.strerror}) and "
                    f"are kept in memory until this process ends; set UCUDNN_CACHE to a folder "
                    f"with room that can be written"
                )
            return
        self._complete_by_name[name] = True
        self._pending.clear()

    def add_file(self, data: bytes) -> None:
        """Publish the bytes of another cache's file, with what this version may not know.

        Raises:
            OSError: it cannot be written.
        """
        write_file(self.segments / unique_name(time_ns()), data)

    def close(self) -> None:
        """Write what could not be written so far; compact where that is little work."""
        if self._pending:
            self._write(to_image(merged(self._pending)))
        if self._puts:
            self._searched()
            many = len(self._complete_by_name) >= _MANY_SEGMENTS
            if many or len(self._recent) * _WORTH_COMPACTING >= len(self._base):
                self.compact()

    def compact(self) -> None:
        """Make one file of all, unless another process is at it; failing loses nothing."""
        with suppress(OSError), self.lock(0) as held:
            if held and not self._pending:
                self.refresh()
                self.replace_all(self.table())

    @contextmanager
    def lock(self, timeout_s: float) -> Iterator[bool]:
        """Try to be the only one who removes files; True also where locks do not exist."""
        lock = FileLock(f"{self.compacted}.lock", timeout=timeout_s)
        held = True
        if self._use_locks:
            try:
                lock.acquire()
            except Timeout:
                held = False
            except (OSError, NotImplementedError):
                pass  # a file system without locks
        try:
            yield held
        finally:
            lock.release()

    def replace_all(self, table: Table) -> None:
        """Put one table in the place of every file that was read and understood.

        Raises:
            OSError: it cannot be written; the files are as before.
        """
        inputs = [name for name, complete in self._complete_by_name.items() if complete]
        base_frame = self._base_frame if self._base_complete else None
        name = unique_name(table.newest_ns)
        if len(table):
            write_file(self.segments / name, framed(to_image(table)))
            self._complete_by_name[name] = True
        for old in inputs:
            (self.segments / old).unlink(missing_ok=True)
            del self._complete_by_name[old]
        if base_frame is not None:
            self._retire_compacted(base_frame)
        self._base, self._recent, self._puts = table, tabulate(()), 0
        self._unmerged.clear()
        self._settled = False
        with suppress(OSError):  # X.h5 is there again, or no links on this file system: it stays
            os.link(self.segments / name, self.compacted)
            sync_folder(self.compacted.parent)
            (self.segments / name).unlink()
            self._base_frame, self._base_complete = read_frame(self.compacted), True
            del self._complete_by_name[name]

    def _retire_compacted(self, frame: bytes) -> None:
        moved = self.segments / unique_name(time_ns())
        with suppress(FileNotFoundError):
            os.rename(self.compacted, moved)
            if read_frame(moved) == frame:
                moved.unlink()

    def after_fork(self) -> None:
        """In a child: what waits to be written is the parent's; read anew what there is."""
        self._pending.clear()
        self._loaded = self._settled = False


def _segment_names(folder: Path) -> list[str]:
    return [name for name in names_in(folder) if name.endswith(SUFFIX)]
