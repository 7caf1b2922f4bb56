"""Divide one pool of workspace among the kernels of a model. Pure.

If kernels own parts of a pool, their workspaces add up, so they cannot be planned one by one. First
the front of each kernel is found, then one point per front by integer programming. This is the WD
method of mu-cuDNN (Oyama et al., CLUSTER 2018, section III). Kernels of one stream follow one
another, so that they need only one part together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ucudnn.errors import PlanError
from ucudnn.problem import Problem
from ucudnn.solvers import CurveKernel, divide, network_curve
from ucudnn.tuning.fronts import Front, Point
from ucudnn.units import format_bytes


@dataclass(frozen=True, slots=True)
class Group:
    """Kernels that run one after the other, in one workspace.

    Args:
        problems: the kernels.
        copies: how many such workspaces there are: one per call, or one per stream.
    """

    problems: tuple[Problem, ...]
    copies: int


@dataclass(frozen=True, slots=True)
class Overlap:
    """Groups of kernels that may run at the same time, and memory for all their workspaces.

    >>> first, second = (Problem("fprop", n, 4, 4, (9,), (3,)) for n in (1, 2))
    >>> overlap = Overlap.of_calls({first: 2, second: 1}, 64)
    >>> overlap.workspace_bytes({first: 10, second: 30})
    50

    Args:
        groups: each kernel is in one of them.
        total_bytes: of all workspaces together.
        budget_bytes: memory budget of the step, where that decides `total_bytes`; None: the user
            has set `total_workspace`.
    """

    groups: tuple[Group, ...]
    total_bytes: int
    budget_bytes: int | None = None

    @classmethod
    def of_calls(
        cls, calls: Mapping[Problem, int], total_bytes: int, budget_bytes: int | None = None
    ) -> Overlap:
        """Kernels of which every call owns its workspace.

        Args:
            calls: number of calls of each kernel.
            total_bytes: as for `Overlap`, as is the next.
            budget_bytes: memory budget.
        """
        groups = tuple(Group((problem,), count) for problem, count in calls.items())
        return cls(groups, total_bytes, budget_bytes)

    @classmethod
    def of_streams(
        cls, calls: Iterable[tuple[Problem, int]], total_bytes: int, budget_bytes: int | None = None
    ) -> Overlap | None:
        """Kernels that share a workspace with the others of their stream; None for one stream.

        Streams that run the same kernel get workspaces of one size, because it has one plan.

        >>> one, two, both = (Problem("fprop", n, 4, 4, (9,), (3,)) for n in (1, 2, 3))
        >>> overlap = Overlap.of_streams([(one, 0), (two, 1), (both, 1), (both, 2)], 64)
        >>> [(len(group.problems), group.copies) for group in overlap.groups]
        [(1, 1), (2, 2)]

        Args:
            calls: each kernel with its stream, in any order.
            total_bytes: as for `Overlap`, as is the next.
            budget_bytes: memory budget.
        """
        found: list[tuple[dict[Problem, None], set[int]]] = []
        for problem, stream in calls:
            alike = [one for one in found if problem in one[0] or stream in one[1]]
            problems = {p: None for one in alike for p in one[0]} | {problem: None}
            streams = {stream}.union(*(one[1] for one in alike))
            found = [one for one in found if one not in alike] + [(problems, streams)]
        groups = tuple(Group(tuple(problems), len(streams)) for problems, streams in found)
        if sum(group.copies for group in groups) < 2:
            return None
        return cls(groups, total_bytes, budget_bytes)

    def copies(self, problem: Problem) -> int:
        """The number of workspaces that a kernel's group has."""
        return next(group.copies for group in self.groups if problem in group.problems)

    def workspace_bytes(self, sizes: Mapping[Problem, int]) -> int:
        """All workspaces together.

        Args:
            sizes: workspace of one call of each kernel, as far as known.
        """
        return sum(group.copies * _largest(group, sizes) for group in self.groups)

    def beside_bytes(self, problem: Problem, sizes: Mapping[Problem, int]) -> int:
        """All workspaces but the one of a call.

        Args:
            problem: the kernel that is called.
            sizes: as for `workspace_bytes`.
        """
        own = next((group for group in self.groups if problem in group.problems), None)
        return self.workspace_bytes(sizes) - (0 if own is None else _largest(own, sizes))

    def refusal(self, count: int, smallest_bytes: int) -> PlanError:
        """The error for a pool that is too small.

        Args:
            count: number of the kernels.
            smallest_bytes: pool that the smallest plans need.
        """
        if self.budget_bytes is None:
            return PlanError(
                f"no plans of these {count} kernels fit total_workspace="
                f"{format_bytes(self.total_bytes)} together; the smallest need "
                f"{format_bytes(smallest_bytes)}; raise it, or set workspace_limit instead if the "
                f"kernels run one after the other",
                smallest_bytes,
            )
        missing = smallest_bytes - self.total_bytes
        return PlanError(
            f"no plans of these {count} kernels, which may overlap, fit memory_budget="
            f"{format_bytes(self.budget_bytes)} together: it leaves "
            f"{format_bytes(self.total_bytes)} for their workspaces, and the smallest need "
            f"{format_bytes(smallest_bytes)}; raise the budget to "
            f"{format_bytes(self.budget_bytes + missing)}",
            self.budget_bytes + missing,
        )


def _largest(group: Group, sizes: Mapping[Problem, int]) -> int:
    return max((sizes.get(problem, 0) for problem in group.problems), default=0)


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
        """Bytes that a call owns of its group's workspace.

        Args:
            size: of the workspace that the division gave the group.
            left: bytes of the pool that the division did not use, per workspace.
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
    choices: Mapping[Problem, Choices], overlap: Overlap, solver: str
) -> dict[Problem, int]:
    """Workspace of each call of each kernel that minimises the total time.

    >>> slow, fast = (Problem("fprop", n, 4, 4, (9,), (3,)) for n in (1, 2))
    >>> from ucudnn.tuning.fronts import Point
    >>> fronts = (Point(0, 9), Point(4, 8)), (Point(0, 9), Point(6, 2))
    >>> choices = {slow: Choices(2, 4, fronts[0]), fast: Choices(1, 6, fronts[1])}
    >>> overlap = Overlap.of_calls({slow: 2, fast: 1}, 8)
    >>> list(divided(choices, overlap, "auto").values())  # 2 bytes are left over, for three calls
    [0, 6]

    Args:
        choices: of each kernel; a kernel without choices gets no workspace.
        overlap: the kernels that share a workspace, and the pool.
        solver: as `ucudnn.solvers.divide` takes it.

    Raises:
        PlanError: the pool is too small.
    """
    # A front is empty where the time ended before anything of the kernel was measured.
    named = {problem: one for problem, one in choices.items() if one.front}
    groups = [
        (group.copies, known)
        for group in overlap.groups
        for known in [[problem for problem in group.problems if problem in named]]
        if known
    ]
    if not groups:
        return {}
    fronts = [
        [
            (copies * size, time_ns)
            for size, time_ns in network_curve(
                CurveKernel(named[problem].points, named[problem].calls) for problem in problems
            )
        ]
        for copies, problems in groups
    ]
    try:
        division = divide(fronts, overlap.total_bytes, solver)
    except PlanError as error:
        # Anything but a pool that is too small is reported as the solver says it.
        if error.smallest_bytes is None:
            raise
        raise overlap.refusal(len(named), error.smallest_bytes) from error
    # Every workspace gets an equal part of what is left over: as a whole a call may need more than
    # its chunks, of which the front was made.
    left = (overlap.total_bytes - division.workspace_bytes) // sum(copies for copies, _ in groups)
    return {
        problem: named[problem].part(front[place][0] // copies, left)
        for (copies, problems), front, place in zip(groups, fronts, division.choice, strict=True)
        for problem in problems
    }
