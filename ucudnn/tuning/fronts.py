"""Fronts of time over workspace of one kernel. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ucudnn.solvers._base import undominated


class Point(NamedTuple):
    """The best split within some workspace.

    Args:
        workspace_bytes: that it needs.
        time_ns: that it takes.
        below: bytes from which on another split is taken, though a slower one: one of chunks that
            are worth their launch; None: never.
    """

    workspace_bytes: int
    time_ns: int
    below: int | None = None


# Workspace rising and time falling.
Front = tuple[Point, ...]


def pareto(points: Iterable[Point]) -> Front:
    """The points that no other one beats in both, workspace rising and time falling.

    >>> front = pareto([Point(4, 9), Point(0, 20), Point(8, 9), Point(2, 20)])
    >>> [point[:2] for point in front]
    [(0, 20), (4, 9)]

    Args:
        points: of any splits.
    """
    listed = tuple(points)
    return tuple(listed[place] for place in undominated([point[:2] for point in listed]))
