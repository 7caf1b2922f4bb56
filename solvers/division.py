"""Workspace division: every kernel that overlaps with others owns its part of one pool.

The parts add up, so kernels can no longer be solved one by one. The task is to choose one point of
each kernel's front so that the workspaces together fit in the pool and the sum of the times is
minimal. This is the WD method of mu-cuDNN (Oyama et al., CLUSTER 2018), a multiple-choice knapsack.
Only kernels that run at the same time need it. Kernels of one stream can use the same workspace one
after the other (reuse), which is never slower.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ucudnn.errors import ConfigError, PlanError
from ucudnn.solvers._base import AbstractDivider, Division, Pool
from ucudnn.solvers.exact import Exact
from ucudnn.solvers.integer import IntegerProgram


@dataclass(frozen=True, slots=True)
class Auto(AbstractDivider):
    """Divides a pool with the solver that this table names.

    | instance | solver | why |
    |---|---|---|
    | `exact` proves its division | exact | it does so for every known network, faster than HiGHS |
    | `exact` dropped states, HiGHS's division is no slower | highs | it may close the gap |
    | `exact` dropped states, HiGHS's is slower or none | exact | its gap is still certified |

    >>> pool = Pool((((0, 9), (8, 5)), ((0, 7), (8, 1))), total_bytes=8)
    >>> Auto().divide(pool).solver
    'exact'
    """

    time_limit_s: float = 10.0  # for HiGHS
    state_limit: int = 1 << 18

    def divide(self, pool: Pool) -> Division:
        """Divide one pool among the kernels that overlap; `Division.solver` is the solver taken."""
        own = Exact(self.state_limit).divide(pool)
        # A proven division cannot be improved, so HiGHS is asked only if `exact` leaves a gap.
        if own.is_optimal:
            return own
        try:
            other = IntegerProgram("highs", self.time_limit_s).divide(pool)
        # Both errors are expected: HiGHS is optional, and may prove nothing within its time limit.
        except (ConfigError, PlanError):
            return own
        # Both are lower bounds for the same pool, so the higher bound holds for either division.
        bound = max(own.lower_bound_ns, other.lower_bound_ns)
        faster = other if other.time_ns <= own.time_ns else own
        return replace(faster, lower_bound_ns=bound)


# Solvers by name; `ucudnn.config.Solver` lists the same names.
_DIVIDERS: dict[str, AbstractDivider] = {
    "auto": Auto(),
    "exact": Exact(),
    "highs": IntegerProgram("highs"),
    "cbc": IntegerProgram("cbc"),
}


def divide(
    fronts: Iterable[Sequence[tuple[int, int]]], total_bytes: int, solver: str = "auto"
) -> Division:
    """Choose a point of every kernel's front that minimizes the total time within the pool.

    >>> fronts = [[(0, 9), (8, 5)], [(0, 7), (8, 1)]]
    >>> division = divide(fronts, total_bytes=8)
    >>> division.choice, division.time_ns, division.lower_bound_ns
    ((0, 1), 10, 10)

    Args:
        fronts: per kernel its choices as (workspace in bytes, time in ns), as `front(n)` of a
            table gives them.
        total_bytes: size of the pool in bytes.
        solver: "auto", "exact" (always available), "highs" or "cbc" (both need PuLP).

    Returns:
        The choices, with a lower bound that equals the time if they are proven optimal.

    Raises:
        PlanError: the pool is too small, and the error carries the smallest sufficient size; or
            the solver did not prove its answer.
        ConfigError: an argument is out of range, or the solver is not installed.
    """
    # Looked up in a tuple, because a wrong argument need not be hashable.
    if solver not in tuple(_DIVIDERS):
        raise ConfigError(f"solver must be one of {', '.join(_DIVIDERS)}, got {solver!r}")
    pool = Pool(tuple(tuple(map(_point, front)) for front in fronts), total_bytes)
    return _DIVIDERS[solver].divide(pool)


def _point(point: Any) -> Any:
    """A list, as JSON has it, as a tuple; any other value as it is, for `Pool` to check."""
    return tuple(point) if type(point) is list else point
