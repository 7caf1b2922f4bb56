"""Cache that lasts as long as the process: for tests, dry runs, and machines without a disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from time import time_ns

from ucudnn.cache.base import AbstractCache
from ucudnn.cache.entries import Entry
from ucudnn.measurement import Measurement, MeasurementKey


class MemoryCache(AbstractCache):
    """Measurements in a dictionary.

    >>> from ucudnn.measurement import Conditions, Device, Software
    >>> from ucudnn.problem import Problem
    >>> key = MeasurementKey(
    ...     Problem("fprop", 8, 4, 4, (9,), (3,)), "gemm", Device("cpu", "any"),
    ...     Software("2.13"), Conditions(), protocol=1,
    ... )
    >>> with MemoryCache() as cache:
    ...     cache.put([Measurement(key, "ok", time_ns=1000)])
    ...     cache.get(key).time_ns
    1000
    """

    def __init__(self) -> None:
        self._entries: dict[MeasurementKey, Entry] = {}
        self._newest_ns = 0

    def get(self, key: MeasurementKey) -> Measurement | None:
        """The latest measurement with this key, or None."""
        entry = self._entries.get(key)
        return entry.measurement if entry else None

    def put_entries(self, entries: Iterable[Entry]) -> None:
        """Keep entries with their times of storage; those without a time get the present one."""
        # If the clock was set back, new entries must still be later than old ones.
        now = max(time_ns(), self._newest_ns + 1)
        for index, given in enumerate(list(entries)):
            entry = given if given.stored_ns else replace(given, stored_ns=now + index)
            # The entry stored later is kept, as in caches on disk, where files are merged in any
            # order.
            known = self._entries.get(entry.measurement.key)
            if known is None or known.stored_ns <= entry.stored_ns:
                self._entries[entry.measurement.key] = entry
            self._newest_ns = max(self._newest_ns, entry.stored_ns)

    def entries(self) -> Iterator[Entry]:
        """Every entry, one per key."""
        return iter(list(self._entries.values()))
