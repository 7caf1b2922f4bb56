"""Store of one kind of device: the union of its files in memory, and the entries put here.

Other processes may read, write and compact the same files at the same time. So a list of the files
may miss entries that a compaction has just moved, and the files are listed until two lists agree. A
compaction publishes the union of several files as one more file, and only then removes these files.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import time_ns

from ucudnn.cache.entries import LATEST_NS, Entry
from ucudnn.cache.hdf5.codec import ENVELOPE_BYTES, DamagedError, decode, encode, verify, wrap
from ucudnn.cache.hdf5.device_files import (
    DeviceFiles,
    is_ours,
    read_envelope,
    read_file,
    set_aside,
    unique_name,
)
from ucudnn.cache.table import EMPTY, Table, build_table, merge_tables
from ucudnn.measurement import Measurement, MeasurementKey

_GONE = (errno.ENOENT, errno.ESTALE)

_MANY_SEGMENTS = 64
# X.h5 is rewritten only if the segments have at least a fourth as many entries.
_REWRITE_RATIO = 4
_LISTINGS = 8


class DeviceStore:
    """Measurements of one kind of device, in memory and in its files.

    If the store is not writable, damaged files stay where they are.
    """

    def __init__(self, files: DeviceFiles, writable: bool, report: Callable[[str], None]) -> None:
        self.files = files
        self._writable = writable
        self._report = report
        self._listed = False
        # `_base` holds the contents of X.h5, and `_recent` those of the segments.
        self._base = self._recent = EMPTY
        # Tables that are not in `_recent` yet; the next search merges them into it.
        self._unmerged: list[Table] = []
        self._searched: list[Table] | None = None
        # The envelope of the X.h5 that `_base` was read from, and that of the X.h5 that this store
        # has last tried to read.
        self._base_envelope: bytes | None = None
        self._tried_envelope: bytes | None = None
        # By name of a segment: True if this store has its entries, so that a compaction may remove
        # the segment.
        self._is_held: dict[str, bool] = {}
        self._newest_ns = 0
        # Entries that this process has put: those in `_pending` could not be written yet; all
        # others are in `_own`, by the name of their segment.
        self._pending: Table | None = None
        self._own: dict[str, Table] = {}
        self._warned = False

    def find(self, key: MeasurementKey) -> Measurement | None:
        """The latest measurement with this key."""
        found, latest_ns = None, -1
        for table in self._tables():
            row = table.find(key)
            # Several files may hold the same key, and a segment is not always newer than X.h5.
            if row is not None and row.stored_ns > latest_ns:
                found, latest_ns = table.measurement(row, key), row.stored_ns
        return found

    def table(self) -> Table:
        """All entries, as one table."""
        # A cache is usually one file, whose table needs no merging.
        tables = self._tables()
        return tables[0] if len(tables) == 1 else merge_tables(tables)

    def _tables(self) -> list[Table]:
        """The tables to search, at most two and none of them empty; read the files if need be."""
        if not self._listed:
            self.refresh()
        if self._searched is None:
            if self._unmerged:
                self._recent = merge_tables([self._recent, *self._unmerged])
                self._unmerged.clear()
            self._searched = [table for table in (self._recent, self._base) if len(table)]
        return self._searched

    def refresh(self) -> None:
        """Read the files that are new."""
        if not self._listed:
            self._listed = True
            folder = self.files.segments
            # `lexists`, because `exists` is False for a symbolic link to nothing.
            if os.path.lexists(folder) and not folder.is_dir():
                self._report(
                    f"{folder} is not a folder: it was left as it is; move it elsewhere, so that "
                    f"measurements can be kept there"
                )
        seen = None
        for _ in range(_LISTINGS):
            listing = self._listing()
            if listing == seen:
                break
            seen = listing
            self._read(*listing)
        # The tables are merged now, because a compaction uses `_recent`.
        self._searched = None
        self._tables()

    def _listing(self) -> tuple[bytes | None, list[str]]:
        """Envelope of X.h5, and the names of the segments."""
        envelope = read_envelope(self.files.compacted)
        try:
            return envelope, self.files.segment_names()
        except OSError as error:
            self._report(f"{self.files.segments} cannot be read ({error.strerror}): it is not used")
            return envelope, []

    def _read(self, envelope: bytes | None, names: list[str]) -> None:
        known = (None, self._base_envelope, self._tried_envelope)
        # `_tried_envelope` is known, too, so that a damaged X.h5 that cannot be set aside is
        # reported only once.
        if envelope not in known:
            self._tried_envelope = envelope
            self._load(self.files.compacted)
        for name in names:
            if name not in self._is_held:
                self._is_held[name] = self._load(self.files.segments / name)

    def _load(self, path: Path) -> bool:
        """Add the entries of a file to this store; True if the file could be used."""
        loaded = self._loaded(path)
        if loaded is None:
            return False
        table, envelope = loaded
        if path == self.files.compacted:
            self._base, self._base_envelope = table, envelope
        else:
            self._unmerged.append(table)
        self._newest_ns = max(self._newest_ns, table.newest_ns)
        return True

    def _loaded(self, path: Path) -> tuple[Table, bytes] | None:
        """Table and envelope of a file; None if it is gone, or cannot be used and was reported."""
        try:
            # This is checked first, because a file that no cache wrote must never be renamed.
            if not is_ours(path):
                self._report(
                    f"{path} is not a file of this cache, or is damaged beyond recognition: it was "
                    f"left as it is and is not used; move it elsewhere"
                )
                return None
            content = read_file(path)
            verify(content)
            return decode(content), content[:ENVELOPE_BYTES]
        except DamagedError as error:
            self._put_aside(path, error)
        except OSError as error:
            # A file that is gone is not reported: a compaction has moved its entries to another
            # file, which the next listing shows.
            if error.errno not in _GONE:
                self._report(
                    f"{path} cannot be read ({error.strerror}): its measurements are not used"
                )
        return None

    def _put_aside(self, path: Path, error: DamagedError) -> None:
        aside = None
        if self._writable:
            # Renaming fails if the folder is read-only, or another process has moved the file.
            with suppress(OSError):
                aside = set_aside(path)
        if aside is not None and self._put_back(aside):
            return
        where = f"it was kept as {aside.name}" if aside else "it was left where it is"
        self._report(f"{path} cannot be used: {error}; {where}, and what it held is measured anew")

    def _put_back(self, aside: Path) -> bool:
        """Turn a file that was set aside into a segment if it is sound; False if it is not."""
        # The file is sound if another process has replaced it between the moments when this process
        # read and renamed it.
        try:
            content = read_file(aside)
            verify(content)
            decode(content)
            os.rename(aside, self.files.segments / unique_name(time_ns()))
        except (OSError, DamagedError):
            return False
        return True

    def put(self, entries: Iterable[Entry]) -> None:
        """Keep entries on disk, or in memory if that fails; if this raises an error, keep none."""
        # New entries must be later than all that are there, even if those were written by a machine
        # whose clock is ahead. But readers refuse times after `LATEST_NS`.
        self._tables()
        now = min(max(time_ns(), self._newest_ns + 1), LATEST_NS)
        table = build_table(
            entry if entry.stored_ns else replace(entry, stored_ns=min(now + index, LATEST_NS))
            for index, entry in enumerate(entries)
        )
        # The table is encoded before anything is changed, because encoding may raise.
        waiting = table if self._pending is None else merge_tables([self._pending, table])
        content = _content(waiting)
        self._unmerged.append(table)
        self._newest_ns = max(self._newest_ns, table.newest_ns)
        self._searched = None
        self._pending = waiting
        self._write(waiting, content)
        if len(self._own) >= _MANY_SEGMENTS:
            self._compact_own()

    def _write(self, table: Table, content: bytes) -> None:
        try:
            name = self.files.publish(content, table.newest_ns)
        except OSError as error:
            if not self._warned:
                self._warned = True
                self._report(
                    f"measurements cannot be written to {self.files.segments} ({error.strerror}) "
                    f"and are kept in memory until this process ends; set UCUDNN_CACHE to a folder "
                    f"with room that can be written"
                )
            return
        self._is_held[name] = True
        self._own[name] = table
        self._pending = None

    def close(self) -> None:
        """Write entries that could not be written so far, and compact the segments."""
        if self._pending is not None:
            self._write(self._pending, _content(self._pending))
        # First this process's own segments are compacted, without the lock, so that it leaves only
        # one segment even if `compact` cannot get the lock.
        if len(self._own) > 1:
            self._compact_own()
        if self._own or len(self._held_segments()) >= _MANY_SEGMENTS:
            self.compact()

    def _held_segments(self) -> list[str]:
        return [name for name, is_held in self._is_held.items() if is_held]

    def _compact_own(self) -> None:
        """Replace this process's segments by one; this needs neither a lock nor reading."""
        table = merge_tables(list(self._own.values()))
        with suppress(OSError):
            name = self.files.publish(_content(table), table.newest_ns)
            self._is_held[name] = True
            self.files.remove(self._own)
            self._own = {name: table}

    def compact(self) -> None:
        """Replace all segments, or all files, by one, unless another process is doing so."""
        with suppress(OSError), self.files.lock(0) as held:
            if held:
                self.refresh()
                if len(self._recent) * _REWRITE_RATIO >= len(self._base):
                    self.replace_all(merge_tables([self._base, self._recent]))
                else:
                    self._replace_segments(self._recent)

    def replace_all(self, table: Table) -> None:
        """Replace all files that this store has read by one new file that holds this table."""
        name = self._replace_segments(table)
        if self.files.retire_compacted(self._base_envelope):
            self._base, self._base_envelope = EMPTY, None
        if name is not None and self.files.promote(name):
            self._base, self._recent = self._recent, EMPTY
            self._base_envelope = read_envelope(self.files.segments / name)
            del self._is_held[name]
            self.files.remove([name])

    def _replace_segments(self, table: Table) -> str | None:
        """Replace the segments by one with this table; return its name, None for an empty table."""
        replaced = self._held_segments()
        name = self.files.publish(_content(table), table.newest_ns) if len(table) else None
        self.files.remove(replaced)
        for old in replaced:
            del self._is_held[old]
        if name is not None:
            self._is_held[name] = True
        self._recent, self._searched, self._own = table, None, {}
        # Entries that were waiting to be written are in this table, or were pruned and must not be
        # written any more.
        self._pending = None
        return name

    def after_fork(self) -> None:
        """In a forked child, leave unwritten entries to the parent, and list the files again."""
        self._pending, self._own = None, {}
        # These two are reset, because the parent may have been changing them when it forked.
        self._listed, self._searched = False, None


def _content(table: Table) -> bytes:
    return wrap(encode(table))
