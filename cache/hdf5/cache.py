"""A cache in a folder of HDF5 files, shared by any number of processes and machines."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from ucudnn.cache.base import AbstractCache
from ucudnn.cache.entries import (
    CacheInfo,
    CacheWarning,
    CheckReport,
    Entry,
    MergeReport,
)
from ucudnn.cache.hdf5.check import inspect
from ucudnn.cache.hdf5.envelope import DamagedError, NewerError, verify
from ucudnn.cache.hdf5.files import foreign_in, kinds_in, read_file
from ucudnn.cache.hdf5.reader import Severity
from ucudnn.cache.hdf5.store import Shelf
from ucudnn.cache.summary import info_of
from ucudnn.cache.table.builder import only
from ucudnn.cache.table.schema import matches, parse_where
from ucudnn.errors import CacheError
from ucudnn.measurement import Device, Measurement, MeasurementKey
from ucudnn.system.forking import ForkSafeLock

_LOCK_WAIT_S = 10.0
_KIND_LENGTH = 100


def device_kind(device: Device) -> str:
    """Name of the files of a device; the device itself is recorded in them.

    >>> device_kind(Device("cuda", "NVIDIA H200", compute_capability="9.0"))
    'cuda-nvidia-h200-9.0'
    """
    words = f"{device.type} {device.name} {device.compute_capability}".lower()
    return re.sub(r"[^a-z0-9.]+", "-", words).strip("-.")[:_KIND_LENGTH] or "unnamed"


class HDF5Cache(AbstractCache):
    """A cache in a folder; `ucudnn.cache.open` makes one.

    Args:
        path: the folder; it is made when something is first put.
        mode: "a": read and add; "r": only read.
        use_locks: False: never try a file lock.
    """

    def __init__(self, path: Path, mode: str = "a", use_locks: bool = True) -> None:
        self._path = path.absolute()
        self._mode = mode
        self._use_locks = use_locks
        self._shelf_by_kind: dict[str, Shelf] = {}
        self._shelf_by_device: dict[Device, Shelf] = {}
        self._foreign: set[Path] = set()  # that were named
        self._lock = ForkSafeLock(self._begin_anew)

    def get(self, key: MeasurementKey) -> Measurement | None:
        """The latest measurement with this key, or None."""
        with self._lock:
            return self._shelf_of(key.device).find(key)

    def put_entries(self, entries: Iterable[Entry]) -> None:
        """Keep entries made elsewhere with the times at which they were stored."""
        self._require_writable()
        by_shelf: dict[Shelf, list[Entry]] = {}
        with self._lock:
            for entry in entries:
                shelf = self._shelf_of(entry.measurement.key.device)
                by_shelf.setdefault(shelf, []).append(entry)
            for shelf, its_entries in by_shelf.items():
                shelf.put(its_entries)

    def entries(self) -> Iterator[Entry]:
        """Every entry, one per key; those of one problem are neighbours."""
        with self._lock:
            tables = [shelf.table() for shelf in self._shelves()]
        for table in tables:
            yield from table.entries()

    def __len__(self) -> int:
        with self._lock:
            return sum(len(shelf.table()) for shelf in self._shelves())

    def merge(self, path: str | os.PathLike[str]) -> MergeReport:
        """Add everything that another cache holds; its files are copied as they are."""
        self._require_writable()
        other = open_existing(path)
        before = len(self)
        with self._lock:
            for kind in kinds_in(other._path):
                self._copy(other._shelf(kind), self._shelf(kind))
            self.refresh()
            for shelf in self._shelves():
                shelf.compact()
            return MergeReport(read=len(other), added=len(self) - before)

    def _copy(self, source: Shelf, target: Shelf) -> None:
        for file in source.files:
            try:
                data = read_file(file)
                verify(data)
            except NewerError:
                pass  # copied: a later version will read it here as there
            except DamagedError:
                continue  # named when `source` is counted
            except OSError as error:
                raise CacheError(f"cannot read {file}: {error.strerror}; merge again") from error
            try:
                target.add_file(data)
            except OSError as error:
                raise CacheError(
                    f"cannot write to the cache {self._path}: {error.strerror}; make room or "
                    f"merge into another folder"
                ) from error

    def prune(self, where: Mapping[str, object], before_ns: int | None = None) -> int:
        """Remove the entries that match, and count them."""
        self._require_writable()
        texts = parse_where(where)
        removed = 0
        with self._lock:
            for shelf in self._shelves():
                removed += self._prune(shelf, texts, before_ns)
        return removed

    def _prune(self, shelf: Shelf, where: Mapping[str, str], before_ns: int | None) -> int:
        with shelf.lock(_LOCK_WAIT_S) as held:
            if not held:
                raise CacheError(
                    f"another process is compacting {shelf.compacted}; prune again when it is done"
                )
            shelf.refresh()
            table = shelf.table()
            stays = np.fromiter(
                (not matches(entry, where, before_ns) for entry in table.entries()),
                bool,
                len(table),
            )
            if stays.all():
                return 0
            try:
                shelf.replace_all(only(table, stays))
            except OSError as error:
                raise CacheError(
                    f"cannot write to the cache {self._path}: {error.strerror}; nothing was removed"
                ) from error
            for file in shelf.partial_files:
                self._say(
                    f"{file} was left as it is: a later version of ucudnn wrote it", Severity.NOTE
                )
            return int((~stays).sum())

    def check(self, fix: bool = False) -> CheckReport:
        """Read everything on the disk and say what is wrong; with `fix`, put right what can be."""
        if fix:
            self._require_writable()
        with self._lock:
            try:
                report = inspect(self._path, self._use_locks, fix)
            except OSError as error:
                raise CacheError(
                    f"cannot {'fix' if fix else 'read'} the cache {self._path}: {error.strerror}; "
                    f"let this user {'write' if fix else 'read'} it"
                ) from error
            if fix:
                self.refresh()
        return report

    def info(self) -> CacheInfo:
        """Location and contents of the cache."""
        with self._lock:
            files = [file for shelf in self._shelves() for file in shelf.files]
            sizes = [file.stat().st_size for file in files if file.exists()]
            return info_of(str(self._path), self._is_writable(), sizes, self.entries())

    def refresh(self) -> None:
        """Take in what other processes have put since."""
        with self._lock:
            for shelf in self._shelves():
                shelf.refresh()

    def close(self) -> None:
        """Write what could not be written so far, and tidy up. Reading goes on to work."""
        if self._mode == "a":
            with self._lock:
                for shelf in self._shelf_by_kind.values():
                    shelf.close()

    def _begin_anew(self) -> None:
        for shelf in self._shelf_by_kind.values():
            shelf.after_fork()

    def _shelf_of(self, device: Device) -> Shelf:
        shelf = self._shelf_by_device.get(device)
        if shelf is None:
            shelf = self._shelf_by_device[device] = self._shelf(device_kind(device))
        return shelf

    def _shelf(self, kind: str) -> Shelf:
        if kind not in self._shelf_by_kind:
            self._shelf_by_kind[kind] = Shelf(
                self._path, kind, self._mode == "a", self._use_locks, self._say
            )
        return self._shelf_by_kind[kind]

    def _shelves(self) -> list[Shelf]:
        """One per kind of device, those on the disk among them."""
        try:
            kinds, foreign = kinds_in(self._path), foreign_in(self._path)
        except OSError as error:
            raise CacheError(f"cannot read the cache {self._path}: {error.strerror}") from error
        for path in foreign:
            if path not in self._foreign:
                self._foreign.add(path)
                self._say(
                    f"{path} is not a file of this cache: it was left as it is", Severity.NOTE
                )
        for kind in kinds:
            self._shelf(kind)
        return [self._shelf_by_kind[kind] for kind in sorted(self._shelf_by_kind)]

    def _require_writable(self) -> None:
        if self._mode != "a":
            raise CacheError(
                f"the cache {self._path} was opened for reading; open it with mode='a'"
            )

    def _is_writable(self) -> bool:
        folder = self._path.absolute()
        while not folder.exists():
            folder = folder.parent
        return self._mode == "a" and folder.is_dir() and os.access(folder, os.W_OK)

    def _say(self, sentence: str, severity: Severity) -> None:  # noqa: ARG002 - as Say has it
        warnings.warn(sentence, CacheWarning, stacklevel=2)


def open_existing(path: str | os.PathLike[str]) -> HDF5Cache:
    """A cache for reading, which must be there.

    Raises:
        CacheError: there is no such folder.
    """
    if not os.path.isdir(path):
        raise CacheError(f"there is no cache in {path}: it is not a folder; name one that is")
    return HDF5Cache(Path(path), "r")
