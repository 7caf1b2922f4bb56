"""Whether an algorithm can still matter for a kernel, judged before its large chunks are run.

Two bounds, both from what an algorithm states that it does at least (`Cost`). The roofline of the
machine bounds the time of a chunk that never ran. A small chunk that was timed bounds the larger
ones: their time grows at least as the slower growing of operations and traffic. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ucudnn.roofline import Cost, Roofline

# An algorithm is ruled out where it is expected to take this many times the best known, per sample.
HOPELESS = 1.5
# A call takes this long on the host whatever its size, which does not grow with the chunk.
CALL_NS = 50_000
# Shorter times say more about the call than about the algorithm.
LEAST_TELLING_NS = 200_000

CostOf = Callable[[int, str], Cost | None]


@dataclass(frozen=True, slots=True)
class Prospects:
    """Bounds of what chunks of one kernel take.

    Args:
        cost_of: what an algorithm does at least for a chunk of a size; None where nobody knows.
        roofline: of the machine; None: times are bounded by smaller chunks alone.
    """

    cost_of: CostOf
    roofline: Roofline | None = None

    def expected_ns(self, size: int, algorithm: str, timed: Iterable[tuple[int, int]]) -> int:
        """The least time in ns that a chunk is expected to take; 0 where nothing is known.

        >>> prospects = Prospects(lambda size, algorithm: Cost(100 * size, 10 * size, 0))
        >>> prospects.expected_ns(8, "gemm", [(2, 1_050_000)])
        4050000

        Args:
            size: of the chunk.
            algorithm: that computes it.
            timed: (size, ns) of chunks that the same implementation computed.
        """
        cost = self.cost_of(size, algorithm)
        if cost is None:
            return 0
        bounds = [0 if self.roofline is None else self.roofline.time_ns(cost)]
        for smaller, time_ns in timed:
            known = self.cost_of(smaller, algorithm) if smaller <= size else None
            if known is not None and time_ns >= LEAST_TELLING_NS:
                bounds.append(CALL_NS + int((time_ns - CALL_NS) * growth(known, cost)))
        return max(bounds)


def growth(small: Cost, large: Cost) -> float:
    """The factor by which the time of a chunk grows at least, from one cost to a larger one.

    >>> growth(Cost(100, 50, 0), Cost(400, 100, 0))
    2.0
    """
    terms = ((large.operations, small.operations), (large.traffic_bytes, small.traffic_bytes))
    return min((more / less for more, less in terms if less), default=1.0)
