"""The contract of a measurement cache, and the values that its operations return."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from time import time_ns
from types import TracebackType
from typing import Self

from ucudnn.measurement import Device, Measurement, MeasurementKey


class CacheWarning(UserWarning):
    """Something was not kept or could not be read, and tuning goes on without it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A measurement as a cache keeps it.

    Args:
        measurement: the key and the numbers.
        stored_ns: when it was stored, in ns since 1970 (UTC); of two for one key the later counts.
        device_uuid: product UUID of the very GPU it was taken on, "" where unknown; not in the key.
    """

    measurement: Measurement
    stored_ns: int
    device_uuid: str = ""


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What a cache holds for one device.

    Args:
        device: the hardware.
        records: number of measurements.
        records_by_status: (status, number) pairs, commonest first.
        versions: (software as text, number) pairs, commonest first.
        oldest_ns: when the first was stored, in ns since 1970.
        newest_ns: when the last was stored.
    """

    device: Device
    records: int
    records_by_status: tuple[tuple[str, int], ...]
    versions: tuple[tuple[str, int], ...]
    oldest_ns: int
    newest_ns: int


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """What a cache is and holds.

    Args:
        location: its folder, or "memory".
        writable: whether it can be added to.
        files: number of files with measurements.
        file_bytes: their size in bytes.
        devices: one per device, by name.
    """

    location: str
    writable: bool
    files: int
    file_bytes: int
    devices: tuple[DeviceInfo, ...]

    @property
    def records(self) -> int:
        """Number of measurements of all devices."""
        return sum(device.records for device in self.devices)


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What a check of a cache found.

    Args:
        records: measurements that can be read.
        files: sound files.
        problems: one sentence per thing that is wrong.
        notes: one sentence per thing that is worth knowing and not wrong: files of a later
            version, damaged files that were set aside before, leftovers of killed writers.
        fixed: one sentence per thing that was put right.
    """

    records: int
    files: int
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        """True where nothing is wrong, or everything wrong was put right."""
        return not self.problems


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What merging another cache brought.

    Args:
        read: measurements in the other cache.
        added: those whose key was not here.
    """

    read: int
    added: int


@dataclass(frozen=True, slots=True)
class Difference:
    """A field in which the nearest entry differs from what was asked for, both as text."""

    field: str
    wanted: str
    found: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a key is, or is not, in a cache.

    Args:
        entries: number of keys that were compared.
        nearest: the key that differs in the fewest fields, None in an empty cache.
        differences: the fields in which it does; none of them: a hit.
    """

    entries: int
    nearest: MeasurementKey | None
    differences: tuple[Difference, ...] = ()

    @property
    def found(self) -> bool:
        """True where an entry has every value asked for."""
        return self.nearest is not None and not self.differences

    def __str__(self) -> str:
        if self.nearest is None:
            return "a miss: the cache is empty"
        if self.found:
            return f"a hit: {self.nearest.problem}, {self.nearest.algorithm}"
        listed = ", ".join(
            f"{one.field} ({one.wanted or 'none'} wanted, {one.found or 'none'} there)"
            for one in self.differences
        )
        return f"a miss: the nearest of {self.entries} entries differs in {listed}"


class AbstractCache(ABC):
    """Measurements by key. Laws, which `ucudnn.testing` checks:

    What `put` returned from is there for `get`, in this process and every later one; of two
    measurements with one key the later counts; nothing else changes what `get` returns. Writing
    fails only where the cache was opened for reading; a place that cannot be written costs one
    warning, and what was put stays available in memory.
    """

    @abstractmethod
    def get(self, key: MeasurementKey) -> Measurement | None:
        """The latest measurement with this key, or None."""

    @abstractmethod
    def put_entries(self, entries: Iterable[Entry]) -> None:
        """Keep entries made elsewhere with the times at which they were stored.

        Raises:
            CacheError: the cache is read-only, or a number needs more than 64 bits.
        """

    @abstractmethod
    def entries(self) -> Iterator[Entry]:
        """Every entry, one per key, in an order that depends on the contents alone."""

    @abstractmethod
    def merge(self, path: str | os.PathLike[str]) -> MergeReport:
        """Add everything that another cache holds; it is only read.

        Raises:
            CacheError: there is no cache, or this one is read-only.
        """

    @abstractmethod
    def prune(self, where: Mapping[str, object], before_ns: int | None = None) -> int:
        """Remove the entries that match, and count them.

        Args:
            where: values by field name, such as {"software.cudnn": "9.27"}; {}: any.
            before_ns: only what was stored before this time, in ns since 1970.

        Raises:
            CacheError: there is no such field, the cache is read-only or another process holds it.
        """

    @abstractmethod
    def check(self, fix: bool = False) -> CheckReport:
        """Read everything and say what is wrong; with `fix`, put right what can be."""

    @abstractmethod
    def info(self) -> CacheInfo:
        """What the cache is and holds."""

    @abstractmethod
    def refresh(self) -> None:
        """Take in what other processes have put since."""

    @abstractmethod
    def close(self) -> None:
        """Write what could not be written so far, and tidy up. Reading goes on to work."""

    def put(self, measurements: Iterable[Measurement], device_uuid: str = "") -> None:
        """Keep measurements: all or none, and durable when this returns.

        Args:
            measurements: of any devices; what one device shows is one atomic step.
            device_uuid: product UUID of the GPU they were taken on; kept, not part of the key.

        Raises:
            CacheError: the cache is read-only, or a number needs more than 64 bits.
        """
        now = time_ns()
        self.put_entries(
            [Entry(measurement, now, device_uuid) for measurement in measurements]
        )

    def __iter__(self) -> Iterator[Measurement]:
        return (entry.measurement for entry in self.entries())

    def __len__(self) -> int:
        return sum(1 for _ in self.entries())

    def __bool__(self) -> bool:
        return True  # an empty cache is still a cache

    def select(self, where: Mapping[str, object]) -> Iterator[Measurement]:
        """The measurements that match, such as {"problem.op": "fprop", "status": "failed"}.

        Raises:
            CacheError: there is no such field; the message lists them.
        """
        from ucudnn.cache.fields import matches, parse_where

        texts = parse_where(where)
        return (entry.measurement for entry in self.entries() if matches(entry, texts))

    def export(self, path: str | os.PathLike[str], where: Mapping[str, object] | None = None) -> int:
        """Write entries to a file, .csv or .json, and count them; `import_` reads it back.

        Args:
            path: a reader sees the old file or the new one, never half.
            where: only the entries that match.

        Raises:
            CacheError: another suffix, an unknown field, or the file cannot be written.
        """
        from ucudnn.cache.fields import matches, parse_where
        from ucudnn.cache.text import write_entries

        texts = parse_where(where or {})
        return write_entries(path, (one for one in self.entries() if matches(one, texts)))

    def import_(self, path: str | os.PathLike[str]) -> int:
        """Read a file that `export` wrote, and count its entries; all are kept, or none.

        Raises:
            CacheError: the file cannot be read; the message names the line.
        """
        from ucudnn.cache.text import read_entries

        entries = read_entries(path)
        self.put_entries(entries)
        return len(entries)

    def explain(self, key: MeasurementKey) -> Explanation:
        """Say whether a key is there, and if not, in which fields the nearest entry differs."""
        from ucudnn.cache.explain import explain, key_texts

        return explain(key_texts(key), (measurement.key for measurement in self))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
