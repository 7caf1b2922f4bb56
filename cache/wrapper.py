"""A cache that wraps another one."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping

from ucudnn.cache.base import AbstractCache
from ucudnn.cache.entries import CacheInfo, CheckReport, Entry, MergeReport


class AbstractWrapper(AbstractCache):
    """A cache that passes every call on to another one, for subclasses to change some of them."""

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

    def check(self) -> CheckReport:
        """Check the wrapped cache."""
        return self._inner.check()

    def info(self) -> CacheInfo:
        """Location and contents of the wrapped cache."""
        return self._inner.info()

    def refresh(self) -> None:
        """Refresh the wrapped cache."""
        self._inner.refresh()

    def close(self) -> None:
        """Close the wrapped cache."""
        self._inner.close()
