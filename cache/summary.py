"""Summary of a cache: counts by device, status and versions."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import astuple, fields

from ucudnn.cache.entries import CacheInfo, DeviceInfo, Entry
from ucudnn.measurement import Device, Software


def info_of(
    location: str, writable: bool, file_bytes: Sequence[int], entries: Iterable[Entry]
) -> CacheInfo:
    """Count entries by device, status and versions.

    Args:
        location: the cache's folder, or "memory".
        writable: True if measurements can be added.
        file_bytes: size of each file.
        entries: one per key.
    """
    statuses: defaultdict[Device, Counter[str]] = defaultdict(Counter)
    versions: defaultdict[Device, Counter[Software]] = defaultdict(Counter)
    times: dict[Device, tuple[int, int]] = {}
    for entry in entries:
        key = entry.measurement.key
        statuses[key.device][entry.measurement.status] += 1
        versions[key.device][key.software] += 1
        oldest, newest = times.get(key.device, (entry.stored_ns, entry.stored_ns))
        times[key.device] = min(oldest, entry.stored_ns), max(newest, entry.stored_ns)
    devices = tuple(
        DeviceInfo(
            device=device,
            records=statuses[device].total(),
            records_by_status=tuple(statuses[device].most_common()),
            versions=tuple((_words(one), count) for one, count in versions[device].most_common()),
            oldest_ns=times[device][0],
            newest_ns=times[device][1],
        )
        for device in sorted(times, key=astuple)
    )
    return CacheInfo(location, writable, len(file_bytes), sum(file_bytes), devices)


def _words(software: Software) -> str:
    values = ((field.name, getattr(software, field.name)) for field in fields(software))
    return ", ".join(f"{name} {value}" for name, value in values if value)
