"""Cache in a folder of HDF5 files, shared by any number of processes and machines."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from ucudnn.cache.base import AbstractCache
from ucudnn.cache.entries import CacheInfo, CheckReport, Entry, info_of
from ucudnn.cache.hdf5.device_files import DeviceFiles, kinds_in
from ucudnn.cache.hdf5.store import DeviceStore
from ucudnn.cache.schema import matches, parse_where
from ucudnn.cache.table import select_rows
from ucudnn.errors import CacheError, CacheWarning, TableError, warn
from ucudnn.measurement import Device, Measurement, MeasurementKey
from ucudnn.system.files import is_writable
from ucudnn.system.processes import ForkSafeLock

_LOCK_WAIT_S = 10.0
# Most characters of a kind: a file name may have 255 bytes, and suffixes follow the kind.
_KIND_LENGTH = 100


def device_kind(device: Device) -> str:
    """Beginning of the names of a device's files; the exact device is written in the files.

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
        # Stores by device, so that `get` need not compute the kind of a device each time.
        self._store_by_device: dict[Device, DeviceStore] = {}
        # Files that no cache wrote and that were reported; each is reported once.
        self._foreign: set[Path] = set()
        self._lock = ForkSafeLock(self._after_fork)

    def get(self, key: MeasurementKey) -> Measurement | None:
        """The latest measurement with this key, or None."""
        with self._lock:
            return self._store_of(key.device).find(key)

    def put_entries(self, entries: Iterable[Entry]) -> None:
        """Keep entries with their times of storage; those without a time get the present one."""
        self._require_writable()
        by_store: dict[DeviceStore, list[Entry]] = {}
        with self._lock:
            # The iterable is read to its end before any entry is kept, because it may raise, and
            # then no entry may stay.
            for entry in entries:
                store = self._store_of(entry.measurement.key.device)
                by_store.setdefault(store, []).append(entry)
            for store, its_entries in by_store.items():
                store.put(its_entries)

    def entries(self) -> Iterator[Entry]:
        """Every entry, one per key; entries of one problem and kind of device are neighbours."""
        # Tables do not change, so iterating needs no lock. Entries put meanwhile are left out.
        with self._lock:
            tables = [store.table() for store in self._stores()]
        for table in tables:
            yield from table.entries()

    def __len__(self) -> int:
        with self._lock:
            return sum(len(store.table()) for store in self._stores())

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
        with self._lock:
            return sum(self._prune(store, texts) for store in self._stores())

    def _prune(self, store: DeviceStore, where: Mapping[str, str]) -> int:
        with store.files.lock(_LOCK_WAIT_S) as held:
            if not held:
                raise CacheError(
                    f"another process is compacting {store.files.compacted}; prune again when it "
                    f"is done"
                )
            # All files are read under the lock, because entries that were not read would not be
            # removed.
            store.refresh()
            table = store.table()
            stays = np.fromiter(
                (not matches(entry, where) for entry in table.entries()), bool, len(table)
            )
            # If no entry is removed, no file needs to be written.
            if stays.all():
                return 0
            try:
                store.replace_all(select_rows(table, stays))
            except OSError as error:
                raise CacheError(
                    f"cannot write to the cache {self._path}: {error.strerror}; nothing was removed"
                ) from error
            return int((~stays).sum())

    def check(self) -> CheckReport:
        """Read every file and report what is wrong."""
        problems: list[str] = []
        records = files = 0
        with self._lock:
            for store in self._stores():
                # A new store is made, because it reads the files as the next process would.
                table = DeviceStore(store.files, False, problems.append).table()
                records, files = records + len(table), files + len(store.files.paths())
        return CheckReport(records, files, tuple(problems))

    def info(self) -> CacheInfo:
        """Location and contents of the cache."""
        with self._lock:
            files = [file for store in self._stores() for file in store.files.paths()]
            # Another process may compact files meanwhile, so some may be gone.
            sizes = [file.stat().st_size for file in files if file.exists()]
            return info_of(str(self._path), is_writable(self._path), sizes, self.entries())

    def refresh(self) -> None:
        """Read entries that other processes have put since."""
        with self._lock:
            for store in self._stores():
                store.refresh()

    def close(self) -> None:
        """Write entries that could not be written so far, and compact; reading still works."""
        if self._mode == "a":
            with self._lock:
                for store in self._store_by_kind.values():
                    store.close()

    def _after_fork(self) -> None:
        for store in self._store_by_kind.values():
            store.after_fork()

    def _store_of(self, device: Device) -> DeviceStore:
        store = self._store_by_device.get(device)
        if store is None:
            store = self._store_by_device[device] = self._store(device_kind(device))
        return store

    def _store(self, kind: str) -> DeviceStore:
        if kind not in self._store_by_kind:
            files = DeviceFiles(self._path, kind)
            self._store_by_kind[kind] = DeviceStore(files, self._mode == "a", _warn)
        return self._store_by_kind[kind]

    def _stores(self) -> list[DeviceStore]:
        """One store per kind of device, in memory or on the disk."""
        try:
            kinds, foreign = kinds_in(self._path)
        except OSError as error:
            raise CacheError(
                f"cannot read the cache {self._path}: {error.strerror}; let this user read it"
            ) from error
        for path in foreign:
            if path not in self._foreign:
                self._foreign.add(path)
                _warn(f"{path} is not a file of this cache: it was left as it is")
        for kind in kinds:
            self._store(kind)
        return [self._store_by_kind[kind] for kind in sorted(self._store_by_kind)]

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
