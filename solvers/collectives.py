"""Collectives: how long many ranks take to add up or gather data, by formulas.

Each message takes a latency and a time for each byte; a rank sends one message at a time and
receives another meanwhile. Adding up costs nothing. The names are those of the survey: Ben-Nun and
Hoefler, "Demystifying Parallel and Distributed Deep Learning", ACM Computing Surveys 2019; ring and
halving are from Thakur, Rabenseifner, Gropp, IJHPCA 2005.
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
    """What a message between two ranks costs.

    >>> Link(latency_ns=30_000, per_byte_ns=0.8).message_ns(1000)
    30800.0

    Args:
        latency_ns: of a message, whatever its size.
        per_byte_ns: for each byte; 0.8 is 1.25 GB/s.

    Raises:
        ConfigError: a number is negative.
    """

    latency_ns: float
    per_byte_ns: float

    def __post_init__(self) -> None:
        if not (self.latency_ns >= 0 and self.per_byte_ns >= 0):
            raise ConfigError(f"a link must have no negative part, got {quoted(self)}")

    def message_ns(self, size_bytes: float) -> float:
        """Time of one message."""
        return self.latency_ns + self.per_byte_ns * size_bytes


# The time in ns among some ranks for some bytes.
Collective = Callable[[int, float, Link], float]


def ring(ranks: int, size_bytes: float, link: Link) -> float:
    """All-reduce in a ring: parts of 1/ranks go round twice, added up and then copied.

    >>> ring(4, 4000, Link(1000, 1.0))
    12000.0
    """
    return 2 * (ranks - 1) * link.message_ns(size_bytes / ranks)


def tree(ranks: int, size_bytes: float, link: Link) -> float:
    """All-reduce up and down a binomial tree, everything in each message.

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
    """All-reduce to one rank of each node, then a ring of these, and back.

    >>> two_level(8, 4000, Link(1000, 1.0), per_node=2, inside=Link(10, 0.1))
    12820.0

    Args:
        ranks: of all nodes.
        size_bytes: what is added up.
        link: between nodes.
        per_node: ranks of a node.
        inside: link between ranks of a node; None: the same.
    """
    nodes = ceil(ranks / per_node)
    return ring(nodes, size_bytes, link) + tree(per_node, size_bytes, inside or link)


def server(ranks: int, size_bytes: float, link: Link, shards: int = 1) -> float:
    """Parameter server: all ranks send gradients to each shard, and get parameters back.

    A shard takes one message after the other; ranks send to different shards at first.

    >>> server(4, 4000, Link(1000, 1.0), shards=2)
    24000.0

    Args:
        ranks: without the servers.
        size_bytes: of all gradients.
        link: between a rank and a server.
        shards: servers, each with a part of the parameters; at most as many as ranks.
    """
    return 2 * ranks * link.message_ns(size_bytes / shards)


def gather(ranks: int, size_bytes: float, link: Link) -> float:
    """All-gather in a ring: the message of each rank goes round once.

    >>> gather(4, 400, Link(1000, 1.0))
    4200.0

    Args:
        ranks: of the job.
        size_bytes: of the message of one rank.
        link: between neighbours.
    """
    return (ranks - 1) * link.message_ns(size_bytes)


def line(collective: Collective, ranks: int, link: Link) -> Line:
    """The time of a collective over its bytes.

    >>> line(ring, 4, Link(1000, 1.0))
    Line(fixed_ns=6000.0, per_byte_ns=1.5)

    Args:
        collective: `ring`, or another one of these.
        ranks: of the job.
        link: between them.
    """
    require_int("ranks", ranks, 1)
    fixed = collective(ranks, 0, link)
    return Line(fixed, collective(ranks, 1, link) - fixed)
