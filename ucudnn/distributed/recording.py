"""Caches that record what tuning one kernel looks up and writes, and replay it on another rank.

The measurements behind a plan determine it. With them, another rank makes the same decisions
without measuring anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ucudnn.cache import AbstractCache, Entry, MemoryCache
from ucudnn.cache.wrapper import AbstractWrapper
from ucudnn.measurement import Measurement, MeasurementKey


@dataclass(frozen=True, slots=True)
class Records:
    """The measurements behind the plan of one kernel.

    Args:
        measured: taken in this job.
        reused: found in the cache.
    """

    measured: tuple[Entry, ...]
    reused: tuple[Entry, ...]


class RecordingCache(AbstractWrapper):
    """A cache that records which measurements were found in the wrapped one and which were put.

    Args:
        inner: the cache to wrap.
    """

    def __init__(self, inner: AbstractCache) -> None:
        super().__init__(inner)
        self._measured: dict[MeasurementKey, Entry] = {}
        self._reused: dict[MeasurementKey, Entry] = {}

    def get(self, key: MeasurementKey) -> Measurement | None:
        """The latest measurement with this key, which is recorded as reused."""
        found = self._inner.get(key)
        # What this tuning has put itself is measured, not reused.
        if found is not None and key not in self._measured:
            self._reused[key] = Entry(found)
        return found

    def put_entries(self, entries: Iterable[Entry]) -> None:
        """Keep entries in the wrapped cache and record them as measured."""
        # Read twice below, and it may be an iterator.
        listed = list(entries)
        self._inner.put_entries(listed)
        for entry in listed:
            self._measured[entry.measurement.key] = entry
            # Found in the cache first and then measured anew: only the new one decides.
            self._reused.pop(entry.measurement.key, None)

    def records(self) -> Records:
        """The measurements recorded so far."""
        return Records(tuple(self._measured.values()), tuple(self._reused.values()))


class SealedCache(AbstractWrapper):
    """A cache with an answer for every key, so that tuning with it measures nothing.

    A candidate that no rank measured, for lack of memory or time, counts as failed. So all ranks
    decide alike, even if one of them would have had the memory or the time to measure it.

    Args:
        records: those of all kernels.
    """

    # Each rank would judge by its own load whether what was taken under load is to be taken anew.
    is_final = True

    def __init__(self, records: Iterable[Records]) -> None:
        inner = MemoryCache()
        for one in records:
            # Of two with one key the later counts: what was measured in this job.
            inner.put(entry.measurement for entry in (*one.reused, *one.measured))
        super().__init__(inner)

    def get(self, key: MeasurementKey) -> Measurement | None:
        """The measurement with this key, or a failed one where there is none."""
        # For None the tuner would measure; for a failure it leaves the candidate out.
        missing = Measurement(key, "failed", reason="it was not measured")
        return self._inner.get(key) or missing
