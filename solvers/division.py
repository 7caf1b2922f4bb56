"""Workspace division: every kernel that overlaps with others owns its part of one pool.

Workspaces add up, so kernels can no longer be solved one by one. The task is to choose one point of
each kernel's front so that the workspaces fit in the pool and the sum of the times is minimal. This
is the WD method of mu-cuDNN (Oyama et al., CLUSTER 2018), a multiple-choice knapsack. Only kernels
that run at the same time need it; for kernels of one stream sharing one workspace is never slower.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ucudnn.errors import ConfigError
from ucudnn.solvers._base import AbstractDivider, Division, Pool
from ucudnn.solvers.auto import Auto
from ucudnn.solvers.exact import Exact
from ucudnn.solvers.integer import IntegerProgram

# Their names are `ucudnn.config.Solver`.
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
        total_bytes: the pool.
        solver: "auto", "exact" (always available), "highs" or "cbc" (through PuLP).

    Returns:
        The choices, with a lower bound that equals the time if they are proven optimal.

    Raises:
        PlanError: the pool is too small, and the error carries the smallest sufficient one; or the
            solver did not prove its answer.
        ConfigError: an argument is out of range, or the solver is not installed.
    """
    # A tuple, because what is not a name need not be hashable.
    if solver not in tuple(_DIVIDERS):
        raise ConfigError(f"solver must be one of {', '.join(_DIVIDERS)}, got {solver!r}")
    pool = Pool(tuple(tuple(map(_point, front)) for front in fronts), total_bytes)
    return _DIVIDERS[solver].divide(pool)


def _point(point: Any) -> Any:
    """A list of two, as from JSON, as a tuple; anything else is left for the pool to refuse."""
    return tuple(point) if type(point) is list else point
