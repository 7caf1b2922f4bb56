"""Workspace division: every kernel that overlaps with others owns its part of one pool.

Workspaces add up, so kernels can no longer be solved one by one. The task is to choose one point of
each kernel's front so that the workspaces fit in the pool and the sum of the times is minimal. This
is the WD method of mu-cuDNN (Oyama et al., CLUSTER 2018), a multiple-choice knapsack. Only kernels
that run at the same time need it; for kernels of one stream sharing one workspace is never slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ucudnn.errors import ConfigError, PlanError
from ucudnn.solvers._base import AbstractDivider, Division, Front, Pool, require_int
from ucudnn.solvers.auto import Auto
from ucudnn.solvers.exact import Exact
from ucudnn.solvers.integer import IntegerProgram

# By name, from the time limit in seconds, None for none; their names are `ucudnn.config.SOLVERS`.
_DIVIDERS: dict[str, Callable[[float | None], AbstractDivider]] = {
    "auto": lambda limit: Auto() if limit is None else Auto(limit),
    "exact": lambda _: Exact(),
    "highs": lambda limit: IntegerProgram("highs", limit),
    "cbc": lambda limit: IntegerProgram("cbc", limit),
}


def divide(
    fronts: Iterable[Sequence[tuple[int, int]]],
    total_bytes: int,
    solver: str = "auto",
    *,
    cliques: Iterable[Iterable[int]] | None = None,
    time_limit_s: float | None = None,
) -> Division:
    """Choose a point of every kernel's front that minimizes the total time within the pool.

    >>> fronts = [[(0, 9), (8, 5)], [(0, 7), (8, 1)]]
    >>> division = divide(fronts, total_bytes=8)
    >>> division.choice, division.time_ns, division.lower_bound_ns
    ((0, 1), 10, 10)
    >>> divide(fronts, total_bytes=8, cliques=[[0], [1]]).choice  # they do not overlap
    (1, 1)

    Args:
        fronts: per kernel its choices as (workspace in bytes, time in ns), as `front(n)` of a
            table gives them.
        total_bytes: the pool.
        solver: "auto", "exact" (always available), "highs" or "cbc" (through PuLP).
        cliques: kernels, by index, that overlap in time; each kernel is in one clique, and cliques
            follow one another in the same pool. None: all kernels overlap.
        time_limit_s: seconds for HiGHS or CBC; None: no limit, but 10 s for HiGHS in "auto".
            "exact" ignores it.

    Returns:
        The choices, with a lower bound that equals the time if they are proven optimal. The
        workspace is that of the largest clique.

    Raises:
        PlanError: the pool is too small, and the error carries the smallest sufficient one; or the
            solver did not prove its answer, in time or at all.
        ConfigError: an argument is out of range, or the solver is not installed.
    """
    divider = _divider(solver, time_limit_s)
    listed = tuple(tuple(map(_point, front)) for front in fronts)
    groups = _groups(len(listed), cliques)
    # Cliques do not overlap in time, so each has the whole pool to itself and is solved by itself.
    pools = _pools([tuple(listed[kernel] for kernel in group) for group in groups], total_bytes)
    parts = [divider.divide(pool) for pool in pools]
    # Back from the order of cliques to the caller's order of kernels.
    choice = {
        kernel: place
        for group, part in zip(groups, parts, strict=True)
        for kernel, place in zip(group, part.choice, strict=True)
    }
    return Division(
        choice=tuple(choice[kernel] for kernel in range(len(listed))),
        time_ns=sum(part.time_ns for part in parts),
        # Within a clique workspaces add up; cliques follow one another in the same memory.
        workspace_bytes=max(part.workspace_bytes for part in parts),
        lower_bound_ns=sum(part.lower_bound_ns for part in parts),
        solver=" and ".join(sorted({part.solver for part in parts})),
    )


def _divider(solver: str, time_limit_s: float | None) -> AbstractDivider:
    if time_limit_s is not None and not (_is_number(time_limit_s) and time_limit_s > 0):
        raise ConfigError(f"time_limit_s must be None or a number above 0, got {time_limit_s!r}")
    # a tuple, because what is not a name need not be hashable
    if solver not in tuple(_DIVIDERS):
        raise ConfigError(f"solver must be one of {', '.join(_DIVIDERS)}, got {solver!r}")
    return _DIVIDERS[solver](time_limit_s)


def _point(point: Any) -> Any:
    """A list of two, as from JSON, as a tuple; anything else is left for the pool to refuse."""
    return tuple(point) if type(point) is list else point


def _is_number(value: object) -> bool:
    # A bool is an int for Python, but no number of seconds.
    return isinstance(value, int | float) and not isinstance(value, bool)


def _groups(count: int, cliques: Iterable[Iterable[int]] | None) -> list[tuple[int, ...]]:
    # Without kernels this gives one empty group, which `Pool` refuses with its own message.
    if cliques is None or not count:
        return [tuple(range(count))]
    groups = [tuple(clique) for clique in cliques]
    named = [kernel for group in groups for kernel in group]
    for kernel in named:
        require_int("a kernel in cliques", kernel, 0)
    # A kernel in two cliques would get two choices, one in no clique none.
    if sorted(named) != list(range(count)):
        raise ConfigError(
            f"cliques must name each of the {count} kernels once, by its index from 0; got "
            f"{groups!r}"
        )
    # An empty clique constrains nothing, and `Pool` would refuse it.
    return [group for group in groups if group]


def _pools(members: Sequence[tuple[Front, ...]], total_bytes: int) -> list[Pool]:
    """One pool per clique; if several are too small, the error is about the one that needs most."""
    pools, errors = [], []
    # All are tried before one is refused: `smallest_bytes` must suffice for every clique.
    for fronts in members:
        try:
            pools.append(Pool(fronts, total_bytes))
        except PlanError as error:
            errors.append(error)
    if errors:
        raise max(errors, key=lambda error: error.smallest_bytes or 0)
    return pools
