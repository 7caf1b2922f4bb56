"""Cache in a folder, shared by any number of processes and machines.

Each kind of device has a folder of segments. In memory, its store has the union of their rows; of
rows with the same key the one that was stored last is kept. Other processes may read, write and
merge the same segments at the same time.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from operator import itemgetter
from pathlib import Path
from time import time_ns

from filelock import FileLock, Timeout

from ucudnn.cache.base import AbstractCache
from ucudnn.cache.entries import LATEST_NS, CacheInfo, CheckReport, Entry, info_of
from ucudnn.cache.schema import (
    FIELD_BY_NAME,
    KEY_FIELDS,
    NONSENSE,
    Row,
    entry_of,
    key_row,
    matches,
    measurement_of,
    parse_where,
    row_of,
)
from ucudnn.cache.segments import (
    SUFFIX,
    DamagedError,
    OtherVersionError,
    encode,
    is_ours,
    names_in,
    publish,
    read,
    segments_in,
    set_aside,
)
from ucudnn.errors import CacheError, CacheWarning, TableError, warn
from ucudnn.measurement import Device, Measurement, MeasurementKey
from ucudnn.system.files import is_writable
from ucudnn.system.processes import ForkSafeLock

_FOLDER = ".h5.d"
_GONE = (errno.ENOENT, errno.ESTALE)
_LISTINGS = 8
_MANY_SEGMENTS = 64
_LOCK_WAIT_S = 10.0
# Most characters of a kind: a file name may have 255 bytes, and suffixes follow the kind.
_KIND_LENGTH = 100
# If two rows were stored at the same time, the one with the longer measured time is kept, so that
# all machines keep the same one.
_COLUMNS = list(FIELD_BY_NAME)
_age = itemgetter(_COLUMNS.index("stored_ns"), _COLUMNS.index("time_ns"))


class DeviceStore:
    """Measurements of one kind of device, in memory and in a folder of segments.

    If the store is not writable, damaged files stay where they are.
    """

    def __init__(self, folder: Path, writable: bool, report: Callable[[str], None]) -> None:
        self.folder = folder
        self._writable = writable
        self._report = report
        self._reported: set[str] = set()
        self._listed = False
        self._rows: dict[Row, Row] = {}
        self._newest_ns = 0
        # By name of a segment: True if its rows are in memory, so that a merge may remove it.
        self._is_held: dict[str, bool] = {}
        # Rows that this process has put: those in `_pending` could not be written yet; the others
        # are in `_own`, by the name of their segment, until they are merged with others' rows.
        self._pending: list[Row] = []
        self._own: dict[str, list[Row]] = {}

    def find(self, key: MeasurementKey) -> Measurement | None:
        """The latest measurement with this key."""
        self._read()
        row = self._rows.get(key_row(key))
        if row is None:
            return None
        try:
            return measurement_of(row, key)
        except NONSENSE as error:
            self._report_nonsense(error)
            return None

    def rows(self) -> list[Row]:
        """All rows, sorted by key."""
        self._read()
        return sorted(self._rows.values(), key=lambda row: row[: len(KEY_FIELDS)])

    def entries(self, rows: Iterable[Row]) -> Iterator[Entry]:
        """The entries of some rows, without those rows of which there is none."""
        for row in rows:
            try:
                yield entry_of(row)
            except NONSENSE as error:
                self._report_nonsense(error)

    def _report_nonsense(self, error: Exception) -> None:
        self._report_once(
            "nonsense",
            f"{self.folder} holds a measurement that makes no sense ({error}): it is not used",
        )

    def _report_once(self, subject: str, sentence: str) -> None:
        if subject not in self._reported:
            self._reported.add(subject)
            self._report(sentence)

    def _read(self) -> None:
        if not self._listed:
            self.refresh()

    def refresh(self) -> None:
        """Read the segments that are new, and forget what another process has pruned."""
        self._listed = True
        seen = None
        # A list may miss rows that a merge has just moved to another segment. So the segments are
        # listed until two lists agree.
        for _ in range(_LISTINGS):
            names = self._names()
            if names == seen:
                break
            seen = names
            # The rows of a segment that is gone are in another one, or were pruned.
            if any(is_held and name not in names for name, is_held in self._is_held.items()):
                self._is_held = {name: False for name, held in self._is_held.items() if not held}
                self._rows = {}
                self._add(self._pending)
            for name in names:
                if name not in self._is_held:
                    self._is_held[name] = self._load(self.folder / name)

    def paths(self) -> list[Path]:
        """Paths of the files with measurements, as they are now."""
        paths = (self.folder / name for name in self._names())
        # Unlike `Path.is_file`, `isfile` raises no error in a folder that the user must not search.
        return [path for path in paths if os.path.isfile(path)]

    def _names(self) -> list[str]:
        try:
            return segments_in(self.folder)
        except OSError as error:
            self._report_once(
                "listing", f"{self.folder} cannot be read ({error.strerror}): it is not used"
            )
            return []

    def _load(self, path: Path) -> bool:
        """Add the rows of a segment; False if it is gone, or cannot be used and was reported."""
        try:
            self._add(read(path))
        except DamagedError as error:
            self._put_aside(path, error)
        except OtherVersionError as error:
            self._report_once(
                "version", f"{path} is not used: {error}; it was left as it is; move it elsewhere"
            )
        except OSError as error:
            # A segment that is gone is not reported: a merge has moved its rows to another one,
            # which the next list shows.
            if error.errno not in _GONE:
                self._report(
                    f"{path} cannot be read ({error.strerror}): its measurements are not used"
                )
        else:
            return True
        return False

    def _add(self, rows: Iterable[Row]) -> None:
        for row in rows:
            key = row[: len(KEY_FIELDS)]
            known = self._rows.get(key)
            if known is None or _age(known) <= _age(row):
                self._rows[key] = row
            self._newest_ns = max(self._newest_ns, _age(row)[0])

    def _put_aside(self, path: Path, error: DamagedError) -> None:
        if not is_ours(path):
            self._report(
                f"{path} is not a file of this cache, or is damaged beyond recognition: it was "
                f"left as it is and is not used; move it elsewhere"
            )
            return
        aside = None
        if self._writable:
            # Renaming fails if the folder is read-only, or another process has moved the file.
            with suppress(OSError):
                aside = set_aside(path)
        where = f"it was kept as {aside.name}" if aside else "it was left where it is"
        self._report(f"{path} cannot be used: {error}; {where}, and what it held is measured anew")

    def put(self, entries: Iterable[Entry]) -> None:
        """Keep entries on disk, or in memory if that fails; if this raises an error, keep none."""
        self._read()
        # New entries must be later than all that are there, even if those were written by a machine
        # whose clock is ahead. But readers refuse times after `LATEST_NS`.
        now = min(max(time_ns(), self._newest_ns + 1), LATEST_NS)
        rows = [
            row_of(entry if entry.stored_ns else replace(entry, stored_ns=min(now + n, LATEST_NS)))
            for n, entry in enumerate(entries)
        ]
        # The rows are encoded before anything is changed, because encoding may raise.
        content = encode([*self._pending, *rows])
        self._add(rows)
        self._pending += rows
        self._write(content)
        if len(self._own) >= _MANY_SEGMENTS:
            self._merge_own()

    def _write(self, content: bytes) -> None:
        """Write the rows that wait to be written, of which these are the contents of a segment."""
        try:
            self._own[self._publish(content)] = self._pending
            self._pending = []
        except OSError as error:
            self._report_once(
                "writing",
                f"measurements cannot be written to {self.folder} ({error.strerror}) and are kept "
                f"in memory until this process ends; set UCUDNN_CACHE to a folder with room that "
                f"can be written",
            )

    def _publish(self, content: bytes) -> str:
        name = publish(self.folder, content)
        self._is_held[name] = True
        return name

    def _remove(self, names: Iterable[str]) -> None:
        """Remove segments, as far as another process has not removed them."""
        for name in names:
            (self.folder / name).unlink(missing_ok=True)
            self._is_held.pop(name, None)

    def close(self) -> None:
        """Write rows that could not be written so far, and merge the segments into one."""
        if self._pending:
            self._write(encode(self._pending))
        # First this process's own segments are merged, so that it leaves only one even if `merge`
        # cannot get the lock.
        self._merge_own()
        # Processes that were killed may have left many.
        if self._own or len(self._held()) >= _MANY_SEGMENTS:
            self.merge()

    def _merge_own(self) -> None:
        """Replace this process's segments by one; this needs neither a lock nor reading."""
        names = self._names()
        # Segments that are gone were merged, or pruned, by another process.
        self._own = {name: rows for name, rows in self._own.items() if name in names}
        if len(self._own) > 1:
            rows = list(chain.from_iterable(self._own.values()))
            with suppress(OSError):
                name = self._publish(encode(rows))
                self._remove(self._own)
                self._own = {name: rows}

    def merge(self) -> None:
        """Replace all segments by one, unless another process is doing so."""
        with suppress(OSError), self._lock(0) as held:
            if held:
                self.refresh()
                if len(self._held()) > 1:
                    self._replace(self.rows())

    def remove(self, where: Mapping[str, str]) -> int:
        """Remove the entries that match a filter, and count them."""
        with self._lock(_LOCK_WAIT_S) as held:
            if not held:
                raise CacheError(
                    f"another process is merging the files in {self.folder}; prune again when it "
                    f"is done"
                )
            # All segments are read under the lock, because entries that were not read would not be
            # removed.
            self.refresh()
            entries = self.entries(self.rows())
            gone = {key_row(one.measurement.key) for one in entries if matches(one, where)}
            if gone:
                stays = {key: row for key, row in self._rows.items() if key not in gone}
                self._replace(list(stays.values()))
                self._rows = stays
            return len(gone)

    def _held(self) -> list[str]:
        """The segments on the disk whose rows are in memory."""
        return [name for name in self._names() if self._is_held.get(name)]

    def _replace(self, rows: list[Row]) -> None:
        """Replace all segments by one with these rows, which are all that are kept."""
        replaced = self._held()
        if rows:
            self._publish(encode(rows))
        self._remove(replaced)
        # This process's rows are in that segment, or were pruned and must not be written any more.
        self._pending, self._own = [], {}

    @contextmanager
    def _lock(self, timeout_s: float) -> Iterator[bool]:
        """Yield True if no other process holds the lock, or if the file system has no locks.

        The lock only prevents that two processes do the same work, and that one of them brings back
        what the other removes.
        """
        lock = FileLock(self.folder / "lock", timeout=timeout_s)
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

    def after_fork(self) -> None:
        """In a forked child, leave unwritten rows to the parent, and list the files again."""
        self._pending, self._own, self._listed = [], {}, False


@lru_cache
def device_kind(device: Device) -> str:
    """Beginning of the name of a device's folder; the exact device is written in the files.

    >>> device_kind(Device("cuda", "NVIDIA H200", compute_capability="9.0"))
    'cuda-nvidia-h200-9.0'
    """
    # Devices of one kind, such as GPUs with different power limits, share their files.
    words = f"{device.type} {device.name} {device.compute_capability}".lower()
    return re.sub(r"[^a-z0-9.]+", "-", words).strip("-.")[:_KIND_LENGTH] or "unnamed"


class HDF5Cache(AbstractCache):
    """Cache in a folder, which the first `put` creates; `ucudnn.cache.open` returns such caches."""

    def __init__(self, path: Path, mode: str = "a") -> None:
        self._path = path.absolute()
        self._mode = mode
        self._store_by_kind: dict[str, DeviceStore] = {}
        # Files that are not used and were reported; each is reported once.
        self._foreign: set[str] = set()
        self._lock = ForkSafeLock(self._after_fork)

    def get(self, key: MeasurementKey) -> Measurement | None:
        """The latest measurement with this key, or None."""
        with self._lock:
            kind = device_kind(key.device)
            if kind not in self._store_by_kind:
                # Tuning lists the folder nowhere else.
                with suppress(OSError):
                    self._kinds()
            return self._store(kind).find(key)

    def put_entries(self, entries: Iterable[Entry]) -> None:
        """Keep entries with their times of storage; those without a time get the present one."""
        self._require_writable()
        by_store: dict[DeviceStore, list[Entry]] = {}
        with self._lock:
            # The iterable is read to its end before any entry is kept, because it may raise, and
            # then no entry may stay.
            for entry in entries:
                store = self._store(device_kind(entry.measurement.key.device))
                by_store.setdefault(store, []).append(entry)
            for store, its_entries in by_store.items():
                store.put(its_entries)

    def entries(self) -> Iterator[Entry]:
        """Every entry, one per key; entries of one problem and kind of device are neighbours."""
        # Entries put meanwhile are left out, so iterating needs no lock.
        with self._lock:
            found = [(store, store.rows()) for store in self._stores()]
        for store, rows in found:
            yield from store.entries(rows)

    def prune(self, where: Mapping[str, object]) -> int:
        """Remove the entries that match, and count them.

        Args:
            where: values by field name, such as {"software.cudnn": "9.27"}; {}: every entry.

        Raises:
            ConfigError: entries do not have a field that `where` names.
            CacheError: the cache is read-only or another process holds it.
        """
        self._require_writable()
        texts = parse_where(where)
        try:
            with self._lock:
                return sum(store.remove(texts) for store in self._stores())
        except OSError as error:
            raise CacheError(
                f"cannot write to the cache {self._path}: {error.strerror}; nothing was removed"
            ) from error

    def check(self) -> CheckReport:
        """Read every file and report what is wrong."""
        problems: list[str] = []
        records = files = 0
        with self._lock:
            for store in self._stores():
                # A new store is made, because it reads the files as the next process would.
                fresh = DeviceStore(store.folder, False, problems.append)
                records += sum(1 for _ in fresh.entries(fresh.rows()))
                files += len(store.paths())
        return CheckReport(records, files, tuple(problems))

    def info(self) -> CacheInfo:
        """Location and contents of the cache."""
        with self._lock:
            files = [file for store in self._stores() for file in store.paths()]
            # Another process may merge files meanwhile, so some may be gone.
            sizes = [file.stat().st_size for file in files if file.exists()]
            return info_of(str(self._path), is_writable(self._path), sizes, self.entries())

    def refresh(self) -> None:
        """Read entries that other processes have put since."""
        with self._lock:
            for store in self._stores():
                store.refresh()

    def close(self) -> None:
        """Write entries that could not be written so far, and merge files; reading still works."""
        if self._mode == "a":
            with self._lock:
                for store in self._store_by_kind.values():
                    store.close()

    def _after_fork(self) -> None:
        for store in self._store_by_kind.values():
            store.after_fork()

    def _store(self, kind: str) -> DeviceStore:
        if kind not in self._store_by_kind:
            folder = self._path / f"{kind}{_FOLDER}"
            self._store_by_kind[kind] = DeviceStore(folder, self._mode == "a", _warn)
        return self._store_by_kind[kind]

    def _stores(self) -> list[DeviceStore]:
        """One store per kind of device, in memory or on the disk."""
        try:
            kinds = self._kinds()
        except OSError as error:
            raise CacheError(
                f"cannot read the cache {self._path}: {error.strerror}; let this user read it"
            ) from error
        for kind in kinds:
            self._store(kind)
        return [self._store_by_kind[kind] for kind in sorted(self._store_by_kind)]

    def _kinds(self) -> list[str]:
        """The kinds of device on the disk; other HDF5 files are reported."""
        names = names_in(self._path)
        for name in names:
            if name.endswith(SUFFIX) and name not in self._foreign:
                self._foreign.add(name)
                _warn(
                    f"{self._path / name} is not a file of this cache, or an earlier version of "
                    f"ucudnn wrote it: it was left as it is; move it elsewhere"
                )
        return [name.removesuffix(_FOLDER) for name in names if name.endswith(_FOLDER)]

    def _require_writable(self) -> None:
        if self._mode != "a":
            raise CacheError(
                f"the cache {self._path} was opened for reading; open it with mode='a'"
            )


def _warn(sentence: str) -> None:
    warn(sentence, CacheWarning)


def open_existing(path: str | os.PathLike[str]) -> HDF5Cache:
    """Open a cache that exists, for reading."""
    if not os.path.isdir(path):
        raise TableError(f"there is no cache in {path}: it is not a folder; name one that is")
    return HDF5Cache(Path(path), "r")
