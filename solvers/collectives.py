"""Collectives: formulas for the time in which ranks add up or gather data.

Each message takes a latency and a time for each byte. A rank sends one message at a time, and can
receive one at the same time. Adding up takes no time. The names are from Ben-Nun and Hoefler,
"Demystifying Parallel and Distributed Deep Learning", ACM Computing Surveys 2019. The formulas of
ring and halving are from Thakur, Rabenseifner, Gropp, IJHPCA 2005.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, log2

from ucudnn.errors import ConfigError, quoted
from ucudnn.solvers._base import require_int
from ucudnn.solvers.overlap import Line


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
    """All-reduce in a ring: each 1 / ranks of the data goes round twice: added up, then copied.

    >>> ring(4, 4000, Link(1000, 1.0))
    12000.0
    """
    return 2 * (ranks - 1) * link.message_ns(size_bytes / ranks)


def tree(ranks: int, size_bytes: float, link: Link) -> float:
    """All-reduce up and down a binomial tree, with all bytes in each message.

    >>> tree(4, 4000, Link(1000, 1.0))
    20000.0
    """
    return 2 * ceil(log2(ranks)) * link.message_ns(size_bytes)


def halving(ranks: int, size_bytes: float, link: Link) -> float:
    """All-reduce by recursive halving and doubling (Rabenseifner); exact for powers of two.

    >>> halving(4, 4000, Link(1000, 1.0))
    10000.0
    """
    bytes_sent = 2 * size_bytes * (ranks - 1) / ranks
    return 2 * ceil(log2(ranks)) * link.latency_ns + link.per_byte_ns * bytes_sent


def two_level(
    ranks: int, size_bytes: float, link: Link, per_node: int = 1, inside: Link | None = None
) -> float:
    """All-reduce in two levels: a tree within each node, and a ring of one rank per node.

    >>> two_level(8, 4000, Link(1000, 1.0), per_node=2, inside=Link(10, 0.1))
    12820.0

    Args:
        ranks: number of ranks in all nodes.
        size_bytes: bytes of each rank that are added up.
        link: link between nodes.
        per_node: number of ranks in a node.
        inside: link between ranks of a node; None: the same link as between nodes.
    """
    nodes = ceil(ranks / per_node)
    return ring(nodes, size_bytes, link) + tree(per_node, size_bytes, inside or link)


def server(ranks: int, size_bytes: float, link: Link, shards: int = 1) -> float:
    """Parameter server: all ranks send gradients to each shard, and get parameters back.

    A shard receives one message after the other. Ranks begin with different shards, so that all
    shards are busy.

    >>> server(4, 4000, Link(1000, 1.0), shards=2)
    24000.0

    Args:
        ranks: number of ranks, without the servers.
        size_bytes: bytes of all gradients of a rank.
        link: link between a rank and a server.
        shards: number of servers, each with a part of the parameters; at most as many as ranks.
    """
    return 2 * ranks * link.message_ns(size_bytes / shards)


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


def line(collective: Collective, ranks: int, link: Link) -> Line:
    """The time of a collective, as a straight line over its bytes.

    >>> line(ring, 4, Link(1000, 1.0))
    Line(fixed_ns=6000.0, per_byte_ns=1.5)

    Args:
        collective: `ring`, or another formula of this module.
        ranks: number of ranks of the job.
        link: link between the ranks.
    """
    require_int("ranks", ranks, 1)
    fixed = collective(ranks, 0, link)
    return Line(fixed, collective(ranks, 1, link) - fixed)
