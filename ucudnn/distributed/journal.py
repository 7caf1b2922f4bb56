"""Journals: one folder per rank for its measurements, beside the cache that one rank writes to.

A measurement is on disk as soon as it is put, in a folder with a single writer. When all ranks have
agreed on a plan, one rank adds everything to the cache and the journals are removed. The journals
of a job that was killed stay; the next job adds them to the cache before it measures anything.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from filelock import FileLock, Timeout

from ucudnn import cache as caches
from ucudnn.cache import AbstractCache, LayeredCache
from ucudnn.cache.entries import Entry
from ucudnn.distributed.rendezvous import Rendezvous

_JOURNALS = "journals"
_LOCK = "alive.lock"


class Journal:
    """The journal of this rank, on top of the cache.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> with Rendezvous("example") as rendezvous, Journal(rendezvous, folder) as journal:
    ...     len(journal.cache), journal.peers
    (0, (0,))

    Args:
        rendezvous: the ranks that keep journals now.
        path: folder of the cache, as `ucudnn.cache.open` takes it.

    Attributes:
        cache: finds what this rank has measured and what the cache holds; writes to the journal.
        peers: the ranks whose journals are beside the same cache, this one included.
    """

    cache: AbstractCache
    peers: tuple[int, ...]

    def __init__(self, rendezvous: Rendezvous, path: str | None) -> None:
        self._rendezvous, self._path = rendezvous, path
        self._root = caches.default_path(path) / _JOURNALS
        self._folder = self._root / f"{rendezvous.nonce}-{rendezvous.rank}"
        self._open = ExitStack()

    def __enter__(self) -> Self:
        self._lock(self._folder)
        # After this exchange the folders of all ranks exist, so those that this rank can see tell
        # which ranks share its file system.
        self._rendezvous.exchange("journals", "created")
        self.peers = self._find_peers()
        if self._rendezvous.rank == self.peers[0]:
            self._merge_orphans()
        self._rendezvous.exchange("orphans", "merged")
        shared = self._open.enter_context(caches.open(self._path, "r"))
        own = self._open.enter_context(caches.open(self._folder))
        self.cache = LayeredCache(own, shared)
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()

    def _lock(self, folder: Path) -> bool:
        """Lock a folder until the end; False if another process holds it, or if locks do not work.

        The lock shows that the owner of a journal is running, because the system releases it
        whenever a process ends.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._open.enter_context(FileLock(folder / _LOCK, blocking=False))
        except (OSError, Timeout, NotImplementedError):
            # If the folder cannot be written to, the cache warns of it and keeps measurements in
            # memory.
            return False
        return True

    def _find_peers(self) -> tuple[int, ...]:
        prefix = f"{self._rendezvous.nonce}-"
        names = {path.name for path in self._folders()}
        found = (rank for rank in self._rendezvous.ranks if f"{prefix}{rank}" in names)
        return tuple(found) or (self._rendezvous.rank,)

    def _folders(self) -> list[Path]:
        return [path for path in self._root.glob("*-*") if path.is_dir()]

    def _merge_orphans(self) -> None:
        """Add the journals of processes that have ended to the cache, and remove them."""
        nonce = self._rendezvous.nonce
        others = [path for path in self._folders() if path.name.partition("-")[0] != nonce]
        orphans = [path for path in others if self._lock(path)]
        if orphans:
            with caches.open(self._path) as cache:
                for path in orphans:
                    cache.merge(path)
            for path in orphans:
                shutil.rmtree(path, ignore_errors=True)

    def publish(self, entries: Iterable[Entry], team: Sequence[int]) -> None:
        """Add all measurements of a team to the cache, and remove this rank's journal.

        Args:
            entries: all measurements of the ranks of the team; equal on all of them.
            team: ranks that share the work, this one among them.
        """
        # One writer per cache: of the team's ranks with this cache the first.
        if self._rendezvous.rank == next(rank for rank in self.peers if rank in team):
            with caches.open(self._path) as cache:
                cache.put_entries(
                    entry
                    for entry in entries
                    if cache.get(entry.measurement.key) != entry.measurement
                )
        # A journal goes only after its measurements are in the cache.
        self._rendezvous.exchange("measurements", "published")
        self._open.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        with suppress(OSError):  # not empty: other ranks have not removed theirs yet
            self._root.rmdir()
