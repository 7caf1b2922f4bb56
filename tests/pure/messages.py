"""Collectives as their messages, sent one by one: the truth that the formulas must equal."""

from __future__ import annotations

from ucudnn.solvers import Link

RANKS = [1, 2, 3, 4, 5, 8, 16]
LINK = Link(700, 0.25)


class Ranks:
    """Ranks that send messages: each sends one at a time, and receives one at a time."""

    def __init__(self, ranks: int, link: Link) -> None:
        self.link = link
        self.now = [0.0] * ranks
        self._receives = [0.0] * ranks

    def send(self, messages: list[tuple[int, int, float]]) -> None:
        """One round of messages (from, to, bytes) that all start when their senders are ready."""
        began = list(self.now)
        for source, target, size in messages:
            start = max(began[source], self._receives[target])
            began[source] = self._receives[target] = start + self.link.message_ns(size)
            self.now[source] = max(self.now[source], began[source])
            self.now[target] = max(self.now[target], began[source])


def ring_by_messages(ranks: int, size: float, link: Link, rounds: int) -> float:
    all_ranks = Ranks(ranks, link)
    for _ in range(rounds):
        all_ranks.send([(r, (r + 1) % ranks, size) for r in range(ranks)])
    return max(all_ranks.now)
