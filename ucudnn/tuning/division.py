"""Divide one pool of workspace among the kernels of a model. Pure.

If kernels own parts of a pool, their workspaces add up, so they cannot be planned one by one. First
the front of each kernel is found, then one point per front by integer programming. This is the WD
method of mu-cuDNN (Oyama et al., CLUSTER 2018, section III).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ucudnn.errors import PlanError
from ucudnn.problem import Problem
from ucudnn.solvers import divide
from ucudnn.tuning.fronts import Front, Point
from ucudnn.units import format_bytes


@dataclass(frozen=True, slots=True)
class Choices:
    """Options of a kernel in a division of a pool.

    Args:
        calls: number of calls of the kernel in a step.
        most: largest part in bytes that one call may own.
        front: points of one call that fit, including the surplus.
        surplus: measured workspace of a whole call minus that of its chunks, in bytes.
    """

    calls: int
    most: int
    front: Front
    surplus: int = 0

    @property
    def points(self) -> list[tuple[int, int]]:
        """(Workspace in bytes, time in ns) of one call."""
        return [(point.workspace_bytes + self.surplus, point.time_ns) for point in self.front]

    def part(self, size: int, left: int) -> int:
        """Bytes of the pool that a call owns.

        Args:
            size: workspace that the division gave the call.
            left: bytes of the pool that the division did not use, per call.
        """
        point = max(
            (point for point in self.front if point.workspace_bytes + self.surplus <= size),
            key=_workspace_bytes,
        )
        least = point.workspace_bytes + self.surplus
        left += size - least
        # From `below` on the kernel would take another, slower split, of longer chunks.
        if point.below is not None:
            left = min(left, point.below - 1 - point.workspace_bytes)
        return min(least + left, self.most)


def _workspace_bytes(point: Point) -> int:
    return point.workspace_bytes


def require_solver(solver: str) -> None:
    """Refuse a solver that is not installed, before anything is measured for it.

    Raises:
        ConfigError: it is not installed.
    """
    # The smallest possible division: a solver's package is imported only when it solves.
    divide([[(0, 1)]], 0, solver)


def divided(
    choices: Mapping[Problem, Choices], total_bytes: int, solver: str
) -> dict[Problem, int]:
    """Workspace of each call of each kernel that minimises the total time.

    >>> slow, fast = (Problem("fprop", n, 4, 4, (9,), (3,)) for n in (1, 2))
    >>> from ucudnn.tuning.fronts import Point
    >>> fronts = (Point(0, 9), Point(4, 8)), (Point(0, 9), Point(6, 2))
    >>> choices = {slow: Choices(2, 4, fronts[0]), fast: Choices(1, 6, fronts[1])}
    >>> list(divided(choices, 8, "auto").values())  # 2 bytes are left over, for three calls
    [0, 6]

    Args:
        choices: of each kernel; a kernel without choices gets no workspace.
        total_bytes: size of the pool.
        solver: as `ucudnn.solvers.divide` takes it.

    Raises:
        PlanError: the pool is too small.
    """
    # A front is empty where the time ended before anything of the kernel was measured.
    named = {problem: one for problem, one in choices.items() if one.front}
    if not named:
        return {}
    fronts = [
        [(one.calls * size, one.calls * time_ns) for size, time_ns in one.points]
        for one in named.values()
    ]
    try:
        division = divide(fronts, total_bytes, solver)
    except PlanError as error:
        # Anything but a pool that is too small is reported as the solver says it.
        if error.smallest_bytes is None:
            raise
        raise PlanError(
            f"no plans of these {len(named)} kernels fit total_workspace="
            f"{format_bytes(total_bytes)} together; the smallest need "
            f"{format_bytes(error.smallest_bytes)}; raise it, or set workspace_limit instead if "
            f"the kernels run one after the other",
            error.smallest_bytes,
        ) from error
    # Every call gets an equal part of what is left over: as a whole it may need more than its
    # chunks, of which the front was made.
    calls = sum(one.calls for one in named.values())
    left = (total_bytes - division.workspace_bytes) // calls
    return {
        problem: one.part(front[place][0] // one.calls, left)
        for (problem, one), front, place in zip(named.items(), fronts, division.choice, strict=True)
    }
