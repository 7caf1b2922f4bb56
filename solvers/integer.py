"""Division of a pool by integer programming: HiGHS or CBC, through the modeller PuLP.

It is an independent check of the exact solver. HiGHS and CBC compute in floating point with
absolute tolerances of about 1e-6. If a model is written in bytes and ns, such solvers may report
points as optimal that are not (GLPK does so for mu-cuDNN's own model at 23 of 100 limits). Here the
objective and the memory constraint are scaled, so that one byte and one ns are far above the
tolerance. The time and the memory of the answer are then added up in integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ucudnn.errors import ConfigError, PlanError
from ucudnn.solvers._base import Division, Integers, Pool
from ucudnn.solvers.exact import Choices, relax

# Number of binary digits of the largest scaled coefficient: in the objective, and in the memory
# constraint.
_DIGITS_TIME = 24
_DIGITS_WORKSPACE = 20
# Largest error of a solver's optimum, in units of the scaled objective.
_TOLERANCE = 1e-6
# Statuses that mean that the answer is proven optimal: 1 is "optimal", and -7 in PuLP 4 "within the
# gap that was asked for", which is 0.
_PROVEN = (1, -7)


def divide_by_program(pool: Pool, solver: str) -> Division:
    """Divide a pool by a solver of integer programs, "highs" or "cbc", that proves its answer.

    The division is optimal up to the tolerance.

    >>> pool = Pool((((0, 9), (8, 5)), ((0, 7), (8, 1))), total_bytes=8)
    >>> divide_by_program(pool, "highs").choice
    (0, 1)
    """
    try:
        import pulp
    except ImportError as error:
        raise ConfigError(_missing(solver)) from error
    choices = Choices.of(pool)
    scale = _Scale.of(choices, pool.total_bytes)
    values = _solve(pulp, choices, scale, solver)
    ends = zip(choices.starts[:-1], choices.starts[1:], strict=True)
    # The values of the variables are floats near 0 or 1, so the largest value of a kernel's
    # variables marks its choice.
    picked = np.array([start + values[start:end].argmax() for start, end in ends])
    division = pool.divided(choices.places[picked].tolist(), 0, solver)
    if division.workspace_bytes > pool.total_bytes:
        raise PlanError(
            f"{solver} found a division of {division.workspace_bytes} bytes for "
            f"total_bytes={pool.total_bytes}, which its tolerance allows and we do not; "
            f"use solver='exact'"
        )
    # The solver's optimum may be wrong by its tolerance; the relaxation's bound may be tighter.
    proven = max(relax(pool).bound_ns, division.time_ns - scale.doubt_ns)
    return pool.divided(division.choice, min(proven, division.time_ns), solver)


def _solve(pulp: Any, choices: Choices, scale: _Scale, solver: str) -> Integers:
    """The value of every choice's variable."""
    problem = pulp.LpProblem("division", pulp.LpMinimize)
    # PuLP before 3.3 has no `add_variable`; in PuLP 4 it is the only way to add a variable.
    add_variable = getattr(problem, "add_variable", pulp.LpVariable)
    uses = [add_variable(f"x{i}", cat="Binary") for i in range(len(choices.places))]
    problem += pulp.lpDot(scale.times, uses)
    problem += pulp.lpDot(scale.workspaces, uses) <= scale.room
    for start, end in zip(choices.starts[:-1], choices.starts[1:], strict=True):
        problem += pulp.lpSum(uses[start:end]) == 1
    try:
        outcome = problem.solve(_backend(pulp, solver))
    except pulp.PulpSolverError as error:
        raise PlanError(f"{solver} failed ({error}); use solver='exact'") from error
    status = getattr(problem, "sol_status", getattr(outcome, "status", None))
    if status not in _PROVEN:
        raise PlanError(
            f"{solver} proved no division of {len(choices.places)} choices optimal; use "
            f"solver='exact'"
        )
    return np.array([use.value() or 0 for use in uses])


def _backend(pulp: Any, solver: str) -> Any:
    """The solver, with a gap of 0, and one thread so that equal inputs give equal answers."""
    options: dict[str, Any] = {"msg": False, "gapRel": 0.0, "gapAbs": 0.0, "threads": 1}
    if solver == "highs":
        backend = pulp.HiGHS(**options)
    else:
        # PuLP 3 comes with an executable whose path only PULP_CBC_CMD knows. That class is
        # deprecated, so only its path is used.
        bundled = getattr(pulp, "PULP_CBC_CMD", None)
        backend = pulp.COIN_CMD(path=getattr(bundled, "pulp_cbc_path", None), **options)
    if not backend.available():
        raise ConfigError(_missing(solver))
    return backend


@dataclass(frozen=True, eq=False)
class _Scale:
    """Times and workspaces of all choices, scaled, above the smallest ones of the same kernel."""

    times: list[float]
    workspaces: list[float]
    room: float  # the most that the workspaces may sum up to
    doubt_ns: int  # largest difference between the solver's optimum and the true one

    @classmethod
    def of(cls, choices: Choices, total_bytes: int) -> _Scale:
        """Scale all coefficients by powers of two, which is exact in floats."""
        starts, sizes = choices.starts[:-1], np.diff(choices.starts)
        fastest = np.minimum.reduceat(choices.times, starts)
        smallest = np.minimum.reduceat(choices.workspaces, starts)
        times = (choices.times - np.repeat(fastest, sizes)).tolist()
        workspaces = (choices.workspaces - np.repeat(smallest, sizes)).tolist()
        unit_ns = _unit(max(times), _DIGITS_TIME)
        unit_bytes = _unit(max(workspaces), _DIGITS_WORKSPACE)
        # `room` is at most the sum of all workspaces, so that it has the same scale. At that size,
        # as at any larger one, it excludes no choice.
        return cls(
            times=[time / unit_ns for time in times],
            workspaces=[workspace / unit_bytes for workspace in workspaces],
            room=min(total_bytes - sum(smallest.tolist()), sum(workspaces)) / unit_bytes,
            doubt_ns=int(unit_ns * _TOLERANCE),
        )


def _unit(largest: int, digits: int) -> int:
    return 1 << max(0, largest.bit_length() - digits)


def _missing(solver: str) -> str:
    packages = {"highs": "pulp highspy", "cbc": "'pulp[cbc]'"}[solver]
    return f"solver={solver!r} is not installed; run `pip install {packages}` or use solver='exact'"
