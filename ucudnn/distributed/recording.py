"""Record of the look-ups and writes of tuning one kernel: enough to decide again elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ucudnn.cache import AbstractCache, CacheInfo, CheckReport, Entry, MemoryCache, MergeReport
from ucudnn.measurement import Measurement, MeasurementKey


@dataclass(frozen=True, slots=True)
class Records:
    """The measurements behind the plan of one kernel.

    Args:
        measured: new ones.
        reused: those that were known.
    """

    measured: tuple[Entry, ...]
    reused: tuple[Entry, ...]


class AbstractWrapper(AbstractCache):
    """A cache that is another one, but for what a wrapper changes."""

    def __init__(self, inner: AbstractCache) -> None:
        self._inner = inner

    def put_entries(self, entries: Iterable[Entry]) -> None:
        """Keep entries in the wrapped cache."""
        self._inner.put_entries(entries)

    def entries(self) -> Iterator[Entry]:
        """Every entry of the wrapped cache."""
        return self._inner.entries()

    def merge(self, path: str | os.PathLike[str]) -> MergeReport:
        """Add what another cache holds to the wrapped one."""
        return self._inner.merge(path)

    def prune(self, where: Mapping[str, object], before_ns: int | None = None) -> int:
        """Remove entries of the wrapped cache."""
        return self._inner.prune(where, before_ns)

    def check(self, fix: bool = False) -> CheckReport:
        """Check the wrapped cache."""
        return self._inner.check(fix)

    def info(self) -> CacheInfo:
        """Location and contents of the wrapped cache."""
        return self._inner.info()

    def refresh(self) -> None:
        """Refresh the wrapped cache."""
        self._inner.refresh()

    def close(self) -> None:
        """Close the wrapped cache."""
        self._inner.close()


class RecordingCache(AbstractWrapper):
    """Notes what was found and what was put."""

    def __init__(self, inner: AbstractCache) -> None:
        super().__init__(inner)
        self._measured: dict[MeasurementKey, Entry] = {}
        self._reused: dict[MeasurementKey, Entry] = {}

    def get(self, key: MeasurementKey) -> Measurement | None:
        """The latest measurement with this key, which is noted."""
        found = self._inner.get(key)
        if found is not None and key not in self._measured:
            self._reused[key] = Entry(found)
        return found

    def put_entries(self, entries: Iterable[Entry]) -> None:
        """Keep entries and note them."""
        listed = list(entries)
        self._inner.put_entries(listed)
        for entry in listed:
            self._measured[entry.measurement.key] = entry
            self._reused.pop(entry.measurement.key, None)

    def records(self) -> Records:
        """The records."""
        return Records(tuple(self._measured.values()), tuple(self._reused.values()))


class SealedCache(AbstractWrapper):
    """Answers every question, so that nothing is measured any more, on no rank.

    What nobody measured, for want of memory or time, counts as failed: that is one answer for all
    ranks, whatever their memory and time would have allowed.
    """

    def __init__(self, records: Iterable[Records]) -> None:
        inner = MemoryCache()
        for kernel in records:
            inner.put(entry.measurement for entry in (*kernel.reused, *kernel.measured))
        super().__init__(inner)

    def get(self, key: MeasurementKey) -> Measurement | None:
        """The measurement with this key, or that there is none."""
        missing = Measurement(key, "failed", reason="it was not measured")
        return self._inner.get(key) or missing
