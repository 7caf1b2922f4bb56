"""Writable cache over read-only ones, such as an image that a fleet shares."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from ucudnn.cache.base import AbstractCache
from ucudnn.cache.entries import CacheInfo, CheckReport, Entry, MergeReport, info_of
from ucudnn.measurement import Measurement, MeasurementKey


class LayeredCache(AbstractCache):
    """Cache that looks a key up in one cache after another, and writes to the first.

    >>> from ucudnn.cache import MemoryCache
    >>> len(LayeredCache(MemoryCache(), MemoryCache()))
    0

    Args:
        top: the cache that is written to.
        below: caches that are only read, the nearest first.
    """

    def __init__(self, top: AbstractCache, *below: AbstractCache) -> None:
        self._top = top
        self._below = below

    def get(self, key: MeasurementKey) -> Measurement | None:
        """The measurement of the first cache that has this key, or None."""
        # The first cache's measurement is used, even if a cache below it has a later one: what was
        # measured on this machine describes it better than the measurements of an image do.
        for layer in (self._top, *self._below):
            found = layer.get(key)
            if found is not None:
                return found
        return None

    def put_entries(self, entries: Iterable[Entry]) -> None:
        """Keep entries in the top cache."""
        self._top.put_entries(entries)

    def entries(self) -> Iterator[Entry]:
        """Every entry that `get` can find, one per key."""
        seen: set[MeasurementKey] = set()
        for layer in (self._top, *self._below):
            for entry in layer.entries():
                if entry.measurement.key not in seen:
                    seen.add(entry.measurement.key)
                    yield entry

    def merge(self, path: str | os.PathLike[str]) -> MergeReport:
        """Add the entries of the cache in a folder to the top cache."""
        return self._top.merge(path)

    def prune(self, where: Mapping[str, object], before_ns: int | None = None) -> int:
        """Remove entries of the top cache that match, and count them."""
        return self._top.prune(where, before_ns)

    def check(self) -> CheckReport:
        """Check every cache."""
        reports = [layer.check() for layer in (self._top, *self._below)]
        return CheckReport(
            records=sum(report.records for report in reports),
            files=sum(report.files for report in reports),
            problems=tuple(one for report in reports for one in report.problems),
        )

    def info(self) -> CacheInfo:
        """Contents of all caches, and the paths and sizes of their files."""
        # Entries are counted anew, because a key that several caches have must be counted once.
        infos = [layer.info() for layer in (self._top, *self._below)]
        location = os.pathsep.join(info.location for info in infos)
        return replace(
            info_of(location, infos[0].writable, (), self.entries()),
            files=sum(info.files for info in infos),
            file_bytes=sum(info.file_bytes for info in infos),
        )

    def refresh(self) -> None:
        """Read entries that other processes have put since, in every cache."""
        for layer in (self._top, *self._below):
            layer.refresh()

    def close(self) -> None:
        """Close every cache."""
        for layer in (self._top, *self._below):
            layer.close()
