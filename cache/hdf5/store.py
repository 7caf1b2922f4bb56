"""The files of one kind of device: X.h5, compacted, and X.h5.d/, what was put since.

Nothing is lost without locks, because no file is ever changed or written over. A writer publishes a
new file under a name of its own; a reader takes the union of all files. Compaction publishes that
union as one more file, and only then removes the files it was made from, each by its own name; X.h5
is first moved to such a name and looked at again, since another process may have replaced it. The
lock only keeps two processes from doing the same work: a writer compacts its own files as it goes,
which needs neither lock nor reading, and everything when it is done.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from time import time_ns

from filelock import FileLock, Timeout

from ucudnn.cache.entries import LATEST_NS, Entry
from ucudnn.cache.hdf5.codec import to_image
from ucudnn.cache.hdf5.envelope import framed
from ucudnn.cache.hdf5.files import read_frame, unique_name, write_file
from ucudnn.cache.hdf5.reader import Reader, Say, Severity
from ucudnn.cache.table.builder import merged, tabulate
from ucudnn.cache.table.table import Table, stored_ns
from ucudnn.measurement import Measurement, MeasurementKey
from ucudnn.system.files import sync_folder

_MANY_SEGMENTS = 64
_WORTH_COMPACTING = 4


class Shelf:
    """Reads and writes the files of one kind of device.

    Args:
        root: the cache's folder.
        kind: what the file names begin with.
        writable: False: nothing is written, and damaged files stay where they are.
        use_locks: whether to try file locks.
        say: told what was not kept or could not be read.
    """

    def __init__(self, root: Path, kind: str, writable: bool, use_locks: bool, say: Say) -> None:
        self._reader = Reader(root, kind, writable, say)
        self._use_locks = use_locks
        self._say = say
        self._said_unwritable = False
        # What was put here and not written yet, because the disk does not take it.
        self._pending: Table | None = None
        self._searched: list[Table] | None = None
        # What this process wrote, by the segment it is in, until that is compacted.
        self._own: dict[str, Table] = {}

    @property
    def compacted(self) -> Path:
        """X.h5."""
        return self._reader.compacted

    @property
    def segments(self) -> Path:
        """X.h5.d."""
        return self._reader.segments

    @property
    def files(self) -> list[Path]:
        """The files with measurements, as they are now."""
        return self._reader.files()

    @property
    def partial_files(self) -> list[Path]:
        """Files that hold more than this version understands."""
        return self._reader.partial_files()

    def find(self, key: MeasurementKey) -> Measurement | None:
        """The latest measurement with this key."""
        found, latest_ns = None, -1
        for table in self._tables():
            row = table.find(key)
            if row is not None and stored_ns(row) > latest_ns:
                found, latest_ns = table.measurement(row, key), stored_ns(row)
        return found

    def table(self) -> Table:
        """Everything, as one table."""
        tables = self._tables()
        return tables[0] if len(tables) == 1 else merged(tables)

    def _tables(self) -> list[Table]:
        """Tables to search: few, none of them empty."""
        if self._searched is None:
            self._searched = [table for table in self._reader.tables() if len(table)]
        return self._searched

    def refresh(self) -> None:
        """Read the files that are new."""
        self._reader.refresh()
        self._searched = None

    def put(self, entries: Iterable[Entry]) -> None:
        """Keep entries, on the disk where that is possible.

        Raises:
            CacheError: a number needs more than 64 bits; nothing was kept then.
        """
        self._tables()  # so that the newest entry is known, whatever clock stamped it
        # no later than a reader believes: another machine's clock may have been far ahead
        now = min(max(time_ns(), self._reader.newest_ns + 1), LATEST_NS)
        table = tabulate(
            entry if entry.stored_ns else replace(entry, stored_ns=min(now + index, LATEST_NS))
            for index, entry in enumerate(entries)
        )
        waiting = table if self._pending is None else merged([self._pending, table])
        data = framed(to_image(waiting))
        self._reader.add(table)
        self._searched = None
        self._pending = waiting
        self._write(waiting, data)
        if len(self._own) >= _MANY_SEGMENTS:
            self._compact_own()

    def _write(self, table: Table, data: bytes) -> None:
        name = unique_name(table.newest_ns)
        try:
            write_file(self.segments / name, data)
        except OSError as error:
            if not self._said_unwritable:
                self._said_unwritable = True
                self._say(
                    f"measurements cannot be written to {self.segments} ({error.strerror}) and "
                    f"are kept in memory until this process ends; set UCUDNN_CACHE to a folder "
                    f"with room that can be written",
                    Severity.WRONG,
                )
            return
        self._reader.note_own(name)
        self._own[name] = table
        self._pending = None

    def add_file(self, data: bytes) -> None:
        """Publish the bytes of another cache's file, with what this version may not know.

        Raises:
            OSError: it cannot be written.
        """
        write_file(self.segments / unique_name(time_ns()), data)

    def close(self) -> None:
        """Write what could not be written so far; make one file of many, and of what was put."""
        if self._pending is not None:
            self._write(self._pending, framed(to_image(self._pending)))
        if len(self._own) > 1:
            self._compact_own()
        if self._own or len(self._reader.whole_segments()) >= _MANY_SEGMENTS:
            self.compact()

    def _compact_own(self) -> None:
        table = merged(list(self._own.values()))
        name = unique_name(table.newest_ns)
        with suppress(OSError):
            write_file(self.segments / name, framed(to_image(table)))
            self._reader.note_own(name)
            self._remove(self._own)
            self._own = {name: table}

    def compact(self) -> None:
        """Make one file of the small ones, unless another process is at it.

        X.h5 takes part where it is not much larger than they are. Failing loses nothing.
        """
        with suppress(OSError), self.lock(0) as held:
            if held and self._pending is None:
                self.refresh()
                recent, base = self._reader.recent, self._reader.base
                if len(recent) * _WORTH_COMPACTING >= len(base):
                    self.replace_all(merged([base, recent]))
                else:
                    self._replace_segments(recent)

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
        name = self._replace_segments(table)
        self._retire_compacted()
        if name is None:
            return
        try:
            os.link(self.segments / name, self.compacted)
        except OSError:
            return  # another process was first, or there are no links here: it stays a segment
        sync_folder(self.compacted.parent)
        self._reader.promote(name, read_frame(self.segments / name))
        self._remove([name])

    def _replace_segments(self, table: Table) -> str | None:
        """Put one table in the place of the segments; the name of its file, None where empty."""
        inputs = self._reader.whole_segments()
        name = unique_name(table.newest_ns)
        if len(table):
            write_file(self.segments / name, framed(to_image(table)))
        self._remove(inputs)
        self._reader.replace_recent(table, [name] if len(table) else [])
        self._searched, self._own = None, {}
        return name if len(table) else None

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            (self.segments / name).unlink(missing_ok=True)

    def _retire_compacted(self) -> None:
        frame = self._reader.base_frame
        # what stands there now may be newer, or somebody else's
        if frame is None or read_frame(self.compacted) != frame:
            return
        moved = self.segments / unique_name(time_ns())
        with suppress(FileNotFoundError):
            os.rename(self.compacted, moved)
            if read_frame(moved) == frame:
                moved.unlink()
        self._reader.drop_base()

    def after_fork(self) -> None:
        """In a child: what waits to be written is the parent's; read anew what there is."""
        self._pending, self._own = None, {}
        self._reader.forget_listing()
        self._searched = None
