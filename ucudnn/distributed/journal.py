"""One folder per rank for what it measures, beside the cache that one of the ranks writes to.

What a rank puts is on the disk at once, in a folder that nobody else writes to; when all ranks have
agreed on a plan the writer adds everything to the cache and the folders go. The folders of a job
that was killed are still there when the next one begins, whose writer adds them first.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from filelock import FileLock, Timeout

from ucudnn import cache as caches
from ucudnn.cache import AbstractCache, LayeredCache
from ucudnn.cache.entries import Entry
from ucudnn.distributed.meeting import Meeting

_JOURNALS = "journals"
_LOCK = "alive.lock"


class Journal:
    """This rank's folder, and the cache below it.

    Args:
        meeting: who else writes journals now.
        path: of the cache, as `ucudnn.cache.open` takes it.

    Attributes:
        cache: what this rank measured, over what the cache holds.
        mates: the ranks whose journals lie in the same cache.
    """

    cache: AbstractCache
    mates: tuple[int, ...]

    def __init__(self, meeting: Meeting, path: str | None) -> None:
        self._meeting, self._path = meeting, path
        self._root = caches.default_path(path) / _JOURNALS
        self._own = self._root / f"{meeting.name}-{meeting.rank}"
        self._open = ExitStack()

    def __enter__(self) -> Self:
        self._lock(self._own)
        # All have made their folders when they have said so.
        self._meeting.exchange("journals", "made")
        self.mates = self._find_mates()
        if self._meeting.rank == self.mates[0]:
            self._adopt_orphans()
        self._meeting.exchange("orphans", "adopted")
        below = self._open.enter_context(caches.open(self._path, "r"))
        own = self._open.enter_context(caches.open(self._own))
        self.cache = LayeredCache(own, below)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.close()

    def _lock(self, folder: Path) -> bool:
        """Hold a folder until the end; False where another process holds it, or nothing can."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._open.enter_context(FileLock(folder / _LOCK, blocking=False))
        except (OSError, Timeout, NotImplementedError):
            # Where nothing can be written the cache says so itself, and keeps things in memory.
            return False
        return True

    def _find_mates(self) -> tuple[int, ...]:
        prefix = f"{self._meeting.name}-"
        names = {path.name for path in self._folders()}
        there = (rank for rank in self._meeting.ranks if f"{prefix}{rank}" in names)
        return tuple(there) or (self._meeting.rank,)

    def _folders(self) -> list[Path]:
        return [path for path in self._root.glob("*-*") if path.is_dir()]

    def _adopt_orphans(self) -> None:
        """Add the journals of processes that have ended, and remove them."""
        orphans = [path for path in self._folders() if path.name[:16] != self._meeting.name]
        taken = [path for path in orphans if self._lock(path)]
        if taken:
            with caches.open(self._path) as cache:
                for path in taken:
                    cache.merge(path)
            for path in taken:
                shutil.rmtree(path, ignore_errors=True)

    def publish(self, entries: Iterable[Entry], team: Sequence[int]) -> None:
        """Add what a team knows now to the cache, and remove this rank's folder.

        Of the team's ranks with the same cache the first one writes: one file has one writer.
        """
        if self._meeting.rank == next(rank for rank in self.mates if rank in team):
            with caches.open(self._path) as cache:
                cache.put_entries(
                    entry
                    for entry in entries
                    if cache.get(entry.measurement.key) != entry.measurement
                )
        self._meeting.exchange("measurements", "published")
        self._open.close()
        shutil.rmtree(self._own, ignore_errors=True)
        with suppress(OSError):  # others are still there
            os.rmdir(self._root)
