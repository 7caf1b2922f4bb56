"""Collectives: formulas for the time in which ranks add up or gather data.

Each message takes a latency and a time for each byte. A rank sends one message at a time, and can
receive one at the same time. Adding up takes no time. The collectives are named as in Ben-Nun and
Hoefler, "Demystifying Parallel and Distributed Deep Learning", ACM Computing Surveys 2019. The
formula of `ring` is from Thakur, Rabenseifner, Gropp, IJHPCA 2005.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ucudnn.errors import ConfigError, quoted
from ucudnn.solvers._base import require_int
from ucudnn.solvers.overlap import Curve


@dataclass(frozen=True, slots=True)
class Link:
    """Cost of a message between two ranks: a latency, and a time for each byte.

    >>> Link(latency_ns=30_000, per_byte_ns=0.8).message_ns(1000)
    30800.0

    Args:
        latency_ns: time in ns of a message of no bytes.
        per_byte_ns: additional time in ns for each byte; 0.8 is 1.25 GB/s.

    Raises:
        ConfigError: a number is negative.
    """

    latency_ns: float
    per_byte_ns: float

    def __post_init__(self) -> None:
        if not (self.latency_ns >= 0 and self.per_byte_ns >= 0):
            raise ConfigError(f"a link must have no negative part, got {quoted(self)}")

    def message_ns(self, size_bytes: float) -> float:
        """Time of one message in ns."""
        return self.latency_ns + self.per_byte_ns * size_bytes


# A formula: the time in ns for a number of ranks, a number of bytes and a link.
Collective = Callable[[int, float, Link], float]


def ring(ranks: int, size_bytes: float, link: Link) -> float:
    """All-reduce in a ring: each of `ranks` parts goes round twice, to be added up, then copied.

    >>> ring(4, 4000, Link(1000, 1.0))
    12000.0
    """
    return 2 * (ranks - 1) * link.message_ns(size_bytes / ranks)


def gather(ranks: int, size_bytes: float, link: Link) -> float:
    """All-gather in a ring: the message of each rank goes round once.

    >>> gather(4, 400, Link(1000, 1.0))
    4200.0

    Args:
        ranks: number of ranks of the job.
        size_bytes: bytes of the message of one rank.
        link: link between neighbours in the ring.
    """
    return (ranks - 1) * link.message_ns(size_bytes)


def line(collective: Collective, ranks: int, link: Link) -> Curve:
    """The time of a collective, as a straight line over its bytes.

    >>> line(ring, 4, Link(1000, 1.0)).time_ns(4000)
    12000

    Args:
        collective: `ring`, or another formula of this module.
        ranks: number of ranks of the job.
        link: link between the ranks.
    """
    require_int("ranks", ranks, 1)
    fixed = collective(ranks, 0, link)
    return Curve.line(fixed, collective(ranks, 1, link) - fixed)
