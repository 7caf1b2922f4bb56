"""Entries of a cache, and the results of its operations: plain values."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields

from ucudnn.errors import CacheError
from ucudnn.measurement import Device, Measurement, MeasurementKey, Software
from ucudnn.units import Count

# The latest time that is accepted, in the year 2116. No clock shows a later time, and numbers in
# files end at 2^63.
LATEST_NS = 2**62


@dataclass(frozen=True, slots=True)
class Entry:
    """A measurement as a cache keeps it.

    Args:
        measurement: the key and the numbers.
        stored_ns: time of storage in ns since 1970 (UTC); of two entries with one key the later
            one counts. 0: not stored yet, `put_entries` sets the present time.

    Raises:
        CacheError: the time is before 1970 or after 2116.
    """

    measurement: Measurement
    stored_ns: Count = 0

    def __post_init__(self) -> None:
        if not 0 <= self.stored_ns <= LATEST_NS:
            raise CacheError(f"stored_ns must be from 0 to 2^62, got {self.stored_ns}")


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """Summary of the entries of one device.

    Args:
        device: the hardware.
        records: number of measurements.
        records_by_status: (status, number of entries) pairs, commonest first.
        versions: (software as text, number of entries) pairs, commonest first.
    """

    device: Device
    records: int
    records_by_status: tuple[tuple[str, int], ...]
    versions: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """Location and contents of a cache.

    Args:
        location: its folder, or "memory".
        writable: True if the location can be written, even if this cache was opened for reading.
        files: number of files with measurements.
        file_bytes: total size of these files in bytes.
        devices: one summary per device, sorted by type and name of the device.
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
    """Findings of a check of a cache.

    Args:
        records: measurements that can be read.
        files: number of files, those in `problems` included.
        problems: a sentence for each file that cannot be used.
    """

    records: int
    files: int
    problems: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        """True if every file can be used."""
        return not self.problems


@dataclass(frozen=True, slots=True)
class MergeReport:
    """Result of merging another cache.

    Args:
        read: number of measurements in the other cache.
        added: number of measurements whose key was new in this cache.
    """

    read: int
    added: int


@dataclass(frozen=True, slots=True)
class KeyDifference:
    """A field in which the nearest entry differs from the key asked for, with both values as text.

    Args:
        field: name of the field, such as "software.cudnn".
        wanted: value asked for.
        found: value of the nearest entry.
    """

    field: str
    wanted: str
    found: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """Explanation of why a key is, or is not, in a cache.

    Args:
        entries: number of keys that were compared.
        nearest: the key that differs in the fewest fields, None in an empty cache.
        differences: the fields in which the nearest key differs; empty for a hit.
    """

    entries: int
    nearest: MeasurementKey | None
    differences: tuple[KeyDifference, ...] = ()

    @property
    def found(self) -> bool:
        """True if an entry has every value that was asked for."""
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


def info_of(
    location: str, writable: bool, file_bytes: Sequence[int], entries: Iterable[Entry]
) -> CacheInfo:
    """Count entries by device, status and versions; `file_bytes` holds the size of each file."""
    statuses: defaultdict[Device, Counter[str]] = defaultdict(Counter)
    versions: defaultdict[Device, Counter[Software]] = defaultdict(Counter)
    for entry in entries:
        key = entry.measurement.key
        statuses[key.device][entry.measurement.status] += 1
        versions[key.device][key.software] += 1
    devices = tuple(
        DeviceInfo(
            device=device,
            records=statuses[device].total(),
            records_by_status=tuple(statuses[device].most_common()),
            versions=tuple((_words(one), count) for one, count in versions[device].most_common()),
        )
        for device in sorted(statuses, key=astuple)
    )
    return CacheInfo(location, writable, len(file_bytes), sum(file_bytes), devices)


def _words(software: Software) -> str:
    values = ((field.name, getattr(software, field.name)) for field in fields(software))
    return ", ".join(f"{name} {value}" for name, value in values if value)
