"""Workspace division: kernels that overlap in time own one part each of one pool.

The parts add up, so kernels cannot be solved one by one. The task is to choose one point of each
kernel's front so that the workspaces together fit in the pool and the sum of the times is minimal.
This is the WD method of mu-cuDNN (Oyama et al., CLUSTER 2018), a multiple-choice knapsack. Only
kernels that run at the same time need division. Kernels of one stream can use the same workspace
one after the other (reuse), which is never slower than division.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from ucudnn.errors import ConfigError
from ucudnn.solvers._base import Divider, Division, Pool
from ucudnn.solvers.exact import divide_exactly
from ucudnn.solvers.integer import divide_by_program

# Solvers by name; `ucudnn.config.Solver` lists the same names. `auto` is `exact`, which is faster
# than the others on every known network, and needs no other package.
_DIVIDERS: dict[str, Divider] = {
    "auto": divide_exactly,
    "exact": divide_exactly,
    "highs": partial(divide_by_program, solver="highs"),
    "cbc": partial(divide_by_program, solver="cbc"),
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
        fronts: for each kernel its choices as (workspace in bytes, time in ns);
            `ReuseTable.front` returns such a list.
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
    return _DIVIDERS[solver](pool)


def _point(point: Any) -> Any:
    """The point as a tuple if it is a list (from JSON); else unchanged, for `Pool` to check."""
    return tuple(point) if type(point) is list else point
