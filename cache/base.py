"""The contract of a measurement cache."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping

from ucudnn.cache.entries import CacheInfo, CheckReport, Entry, Explanation, MergeReport
from ucudnn.cache.exchange.text import read_entries, write_entries
from ucudnn.cache.explain import explain, key_texts
from ucudnn.cache.table.schema import matches, parse_where
from ucudnn.measurement import Measurement, MeasurementKey
from ucudnn.system.closing import AbstractClosable


class AbstractCache(AbstractClosable):
    """Measurements by key, under laws that `ucudnn.testing` checks.

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
        """Every entry, one per key; those of one problem are neighbours in a file."""

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
            ConfigError: there is no such field.
            CacheError: the cache is read-only or another process holds it.
        """

    @abstractmethod
    def check(self, fix: bool = False) -> CheckReport:
        """Read everything and say what is wrong; with `fix`, put right what can be."""

    @abstractmethod
    def info(self) -> CacheInfo:
        """Location and contents of the cache."""

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
        self.put_entries([Entry(measurement, 0, device_uuid) for measurement in measurements])

    def __iter__(self) -> Iterator[Measurement]:
        return (entry.measurement for entry in self.entries())

    def __len__(self) -> int:
        return sum(1 for _ in self.entries())

    def __bool__(self) -> bool:
        return True  # an empty cache is still a cache

    def select(self, where: Mapping[str, object]) -> Iterator[Measurement]:
        """The measurements that match, such as {"problem.op": "fprop", "status": "failed"}.

        Raises:
            ConfigError: there is no such field; the message lists them.
        """
        texts = parse_where(where)
        return (entry.measurement for entry in self.entries() if matches(entry, texts))

    def export(
        self, path: str | os.PathLike[str], where: Mapping[str, object] | None = None
    ) -> int:
        """Write entries to a file, .csv or .json, and count them; `import_` reads it back.

        Args:
            path: a reader sees the old file or the new one, never half.
            where: only the entries that match.

        Raises:
            ConfigError: an unknown field.
            CacheError: another suffix, or the file cannot be written.
        """
        texts = parse_where(where or {})
        return write_entries(path, (one for one in self.entries() if matches(one, texts)))

    def import_(self, path: str | os.PathLike[str]) -> int:
        """Read a file that `export` wrote, and count its entries; all are kept, or none.

        Raises:
            CacheError: the file cannot be read; the message names the line.
        """
        entries = read_entries(path)
        self.put_entries(entries)
        return len(entries)

    def explain(self, key: MeasurementKey) -> Explanation:
        """Say whether a key is there, and if not, in which fields the nearest entry differs."""
        return explain(key_texts(key), (measurement.key for measurement in self))
