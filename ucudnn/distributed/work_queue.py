"""Work items on the job's store: claimed one by one, adopted when their owner goes silent.

No rank waits for another while there is work. A rank shows that it lives by counting up a key; who
has watched it stand still for the length of a lease, by a clock of their own, takes its item. An
owner that was only slow or stopped may come back: of two results of one item the first counts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store


class Pulse:
    """Shows the others that this process lives, and watches them.

    Args:
        store: keys of one meeting.
        rank: of this process.
        lease_s: a rank that stands still for so long counts as lost.
    """

    def __init__(self, store: Store, rank: int, lease_s: float) -> None:
        self._store, self._rank, self._lease_s = store, rank, lease_s
        self._seen: dict[int, tuple[int, float]] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="ucudnn-pulse", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end.set()
        self._thread.join()

    def _beat(self) -> None:
        try:
            while not self._end.is_set():
                self._store.add(f"pulse/{self._rank}", 1)
                self._end.wait(self._lease_s / 6)
        except dist.DistError:  # the main thread meets the same error, and says so
            return

    def is_lost(self, rank: int) -> bool:
        """True if a rank stood still for a lease, as far as this process has watched it."""
        count, now = self._store.add(f"pulse/{rank}", 0), time.monotonic()
        known, since = self._seen.get(rank, (-1, now))
        if count != known:
            self._seen[rank] = (count, now)
            return False
        return rank != self._rank and now - since > self._lease_s


class Board:
    """Items from 0 on, each done once as far as anyone can know.

    Args:
        store: keys of one meeting and one team.
        rank: of this process.
        order: all items, those that this rank prefers first.
        pulse: tells who is lost.
    """

    def __init__(self, store: Store, rank: int, order: Sequence[int], pulse: Pulse) -> None:
        self._store, self._rank, self._pulse = store, rank, pulse
        self._free = list(reversed(order))
        # Leases of others: "0:3" is the first of an item, and rank 3's.
        self._leases: dict[int, str] = {}

    def claim(self) -> int | None:
        """An item for this rank: one that nobody had, else one whose owner is lost, else None."""
        while self._free:
            item = self._free.pop()
            lease = self._swap(item, "", f"0:{self._rank}")
            if lease == f"0:{self._rank}":
                return item
            self._leases[item] = lease
        for item, lease in list(self._leases.items()):
            number, owner = map(int, lease.split(":"))
            if not self._pulse.is_lost(owner):
                continue
            if self.is_done(item):
                del self._leases[item]
                continue
            mine = f"{number + 1}:{self._rank}"
            self._leases[item] = self._swap(item, lease, mine)
            if self._leases[item] == mine:
                del self._leases[item]
                return item
        return None

    def _swap(self, item: int, expected: str, desired: str) -> str:
        return self._store.compare_set(f"lease/{item}", expected, desired).decode()

    def finish(self, item: int, result: bytes) -> bool:
        """Publish a result; False where another rank's was first and counts."""
        # bytes are as good as the text that torch's hints ask for
        self._store.set(f"result/{item}/{self._rank}", result)  # type: ignore[arg-type]
        first = self._store.compare_set(f"done/{item}", "", str(self._rank))
        return int(first) == self._rank

    def is_done(self, item: int) -> bool:
        """True if an item has a result."""
        return self._store.check([f"done/{item}"])

    def are_done(self, items: Sequence[int]) -> bool:
        """True if all of some items have results."""
        return self._store.check([f"done/{item}" for item in items])

    def count_done(self, items: Sequence[int]) -> int:
        """Number of some items that have results."""
        return sum(self.is_done(item) for item in items)

    def result(self, item: int) -> bytes:
        """The result that counts, of an item that is done."""
        first = self._store.get(f"done/{item}").decode()
        return self._store.get(f"result/{item}/{first}")


class Turns:
    """Ranks that share processors measure in turn, one item each; one rank alone always may.

    Args:
        store: keys of one meeting.
        name: of the processors.
        ranks: those that share them.
        rank: of this process.
        pulse: tells whose turn is skipped.
    """

    def __init__(
        self, store: Store, name: str, ranks: Sequence[int], rank: int, pulse: Pulse
    ) -> None:
        self._store, self._key, self._pulse = store, f"turn/{name}", pulse
        self._ranks, self._rank = ranks, rank

    def is_mine(self) -> bool:
        """True if this rank may measure now; skips who is lost."""
        if len(self._ranks) == 1:
            return True
        turn = self._turn()
        holder = self._ranks[turn % len(self._ranks)]
        if holder != self._rank and self._pulse.is_lost(holder):
            self._set(turn)
        return holder == self._rank

    def pass_on(self) -> None:
        """Let the next one measure."""
        if len(self._ranks) > 1:
            turn = self._turn()
            if self._ranks[turn % len(self._ranks)] == self._rank:  # not while it was skipped
                self._set(turn)

    def _turn(self) -> int:
        return int(self._store.compare_set(self._key, "", "0"))

    def _set(self, turn: int) -> None:
        self._store.compare_set(self._key, str(turn), str(turn + 1))
