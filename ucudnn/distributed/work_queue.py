"""Work queue on the job's store: items are claimed one by one, under leases that can be taken over.

No rank waits for another while there is an item left to claim. Every rank increments a heartbeat
counter; if a counter has not changed for the length of a lease, by the clock of the rank that
watches it, that rank takes the item over. The owner may only have been slow or stopped, and finish
the item later. If an item gets two results, the first one counts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Self

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store


class Heartbeat:
    """A thread that shows the other ranks that this process is alive, and a watch on theirs.

    Args:
        store: keys of one rendezvous.
        rank: number of this process.
        lease_s: a rank whose heartbeat stops for this long counts as lost.
    """

    def __init__(self, store: Store, rank: int, lease_s: float) -> None:
        self._store, self._rank, self._lease_s = store, rank, lease_s
        self._seen: dict[int, tuple[int, float]] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="ucudnn-heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._end.set()
        self._thread.join()

    def _beat(self) -> None:
        # Six beats per lease, so that a few late ones are no reason to take a rank for lost.
        try:
            while not self._end.is_set():
                self._store.add(f"heartbeat/{self._rank}", 1)
                self._end.wait(self._lease_s / 6)
        except dist.DistError:
            # The store is gone; the main thread gets the same error and reports it.
            return

    def is_lost(self, rank: int) -> bool:
        """True if a rank's heartbeat has not changed for a lease, as observed by this process.

        The lease begins with the first call for that rank, which returns False.
        """
        # Adding 0 reads the counter also where it was never written.
        count, now = self._store.add(f"heartbeat/{rank}", 0), time.monotonic()
        last, since = self._seen.get(rank, (-1, now))
        if count != last:
            self._seen[rank] = (count, now)
            return False
        return rank != self._rank and now - since > self._lease_s


class WorkQueue:
    """Items 0, 1, ..., each computed once, or again only if its owner seems to be lost.

    >>> from torch._C._distributed_c10d import HashStore
    >>> store = HashStore()
    >>> queue = WorkQueue(store, 0, [1, 0], Heartbeat(store, 0, lease_s=30))
    >>> queue.claim(), queue.claim(), queue.claim()
    (1, 0, None)
    >>> queue.finish(1, b"result"), queue.result(1), queue.is_done(0)
    (True, b'result', False)

    Args:
        store: keys of one rendezvous and one team.
        rank: number of this process.
        order: all items, in the order in which this rank claims them.
        heartbeat: tells which owners are lost.
    """

    def __init__(self, store: Store, rank: int, order: Sequence[int], heartbeat: Heartbeat) -> None:
        self._store, self._rank, self._heartbeat = store, rank, heartbeat
        self._unclaimed = list(reversed(order))
        # Leases of other ranks by item: "0:3" is the first lease of an item, held by rank 3.
        self._leases: dict[int, str] = {}

    def claim(self) -> int | None:
        """An unclaimed item, or else one whose owner is lost; None if there is neither."""
        while self._unclaimed:
            item = self._unclaimed.pop()
            lease = self._swap(item, "", f"0:{self._rank}")
            if lease == f"0:{self._rank}":
                return item
            self._leases[item] = lease
        for item, lease in list(self._leases.items()):
            number, owner = map(int, lease.split(":"))
            if not self._heartbeat.is_lost(owner):
                continue
            if self.is_done(item):
                del self._leases[item]
                continue
            # The number makes every lease different, so that of several ranks which take over at
            # the same time the compare-and-swap lets exactly one succeed.
            mine = f"{number + 1}:{self._rank}"
            self._leases[item] = self._swap(item, lease, mine)
            if self._leases[item] == mine:
                del self._leases[item]
                return item
        return None

    def _swap(self, item: int, expected: str, desired: str) -> str:
        return self._store.compare_set(f"lease/{item}", expected, desired).decode()

    def finish(self, item: int, result: bytes) -> bool:
        """Publish a result; False if another rank's result was first, and counts."""
        # The result is stored before the item is marked as done: whoever sees the mark can read
        # it. torch's hints ask for text, and bytes work as well.
        self._store.set(f"result/{item}/{self._rank}", result)  # type: ignore[arg-type]
        first = self._store.compare_set(f"done/{item}", "", str(self._rank))
        return int(first) == self._rank

    def is_done(self, item: int) -> bool:
        """True if an item has a result."""
        return self._store.check([f"done/{item}"])

    def are_done(self, items: Sequence[int]) -> bool:
        """True if all of these items have results."""
        return self._store.check([f"done/{item}" for item in items])

    def count_done(self, items: Sequence[int]) -> int:
        """Number of these items that have results."""
        return sum(self.is_done(item) for item in items)

    def result(self, item: int) -> bytes:
        """The first result of an item that is done."""
        first = self._store.get(f"done/{item}").decode()
        return self._store.get(f"result/{item}/{first}")


class TurnLock:
    """Round-robin lock of ranks that share CPUs: one of them measures at a time.

    >>> from torch._C._distributed_c10d import HashStore
    >>> store = HashStore()
    >>> turn = TurnLock(store, "cpus 0-3", [0, 1], 0, Heartbeat(store, 0, lease_s=30))
    >>> turn.is_held(), turn.release(), turn.is_held()
    (True, None, False)

    Args:
        store: keys of one rendezvous.
        name: identifies the shared CPUs.
        ranks: the ranks that share them; a single one always holds the lock.
        rank: number of this process.
        heartbeat: tells whose turn is skipped.
    """

    def __init__(
        self, store: Store, name: str, ranks: Sequence[int], rank: int, heartbeat: Heartbeat
    ) -> None:
        self._store, self._key, self._heartbeat = store, f"turn/{name}", heartbeat
        self._ranks, self._rank = ranks, rank

    def is_held(self) -> bool:
        """True if it is this rank's turn; a lost holder's turn is skipped."""
        if len(self._ranks) == 1:
            return True
        turn = self._turn()
        holder = self._ranks[turn % len(self._ranks)]
        if holder != self._rank and self._heartbeat.is_lost(holder):
            self._advance(turn)
        return holder == self._rank

    def release(self) -> None:
        """Give the turn to the next rank."""
        if len(self._ranks) > 1:
            turn = self._turn()
            # A rank that was taken for lost no longer holds the turn, and must not end another's.
            if self._ranks[turn % len(self._ranks)] == self._rank:
                self._advance(turn)

    def _turn(self) -> int:
        return int(self._store.compare_set(self._key, "", "0"))

    def _advance(self, turn: int) -> None:
        self._store.compare_set(self._key, str(turn), str(turn + 1))
