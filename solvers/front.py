"""Pareto fronts of (workspace in bytes, time in ns): removal of dominated points, combination."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import merge

Point = tuple[int, int]


def undominated(points: Sequence[Point]) -> list[int]:
    """Indices of the points that no other point dominates, by ascending workspace.

    >>> undominated([(8, 5), (0, 9), (8, 7), (16, 5)])
    [1, 0]

    If points are equal, the first is kept.
    """
    kept: list[int] = []
    # By workspace, then time: a point is dominated unless it is faster than all before it.
    for index in sorted(range(len(points)), key=lambda i: (*points[i], i)):
        if not kept or points[index][1] < points[kept[-1]][1]:
            kept.append(index)
    return kept


def shared(fronts: Iterable[Sequence[Point]]) -> list[Point]:
    """The front of kernels that run one after the other and share one workspace.

    Under every limit each kernel takes its own best point. Times add up, and the workspace is the
    largest one.

    >>> shared([[(0, 9), (8, 5)], [(4, 7), (8, 3)]])
    [(4, 16), (8, 8)]

    Args:
        fronts: per kernel its choices as (workspace in bytes, time in ns).
    """
    lists = [[front[place] for place in undominated(front)] for front in fronts]
    times: list[int | None] = [None] * len(lists)
    waiting = len(lists)
    found: dict[int, int] = {}
    steps = [[(*point, kernel) for point in front] for kernel, front in enumerate(lists)]
    for workspace_bytes, time_ns, kernel in merge(*steps):
        waiting -= times[kernel] is None
        times[kernel] = time_ns
        # Below this workspace some kernel cannot run at all. Several kernels may change their point
        # at one workspace: the sum with the last of them overwrites those before.
        if not waiting:
            found[workspace_bytes] = sum(time for time in times if time is not None)
    return list(found.items())
