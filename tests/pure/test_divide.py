"""Division: exact against exhaustive search and against integer programming, with honest bounds."""

from __future__ import annotations

import random

import pytest
from exhaustive import divide_exhaustively
from hypothesis import given, settings
from hypothesis import strategies as st

from ucudnn.errors import PlanError
from ucudnn.solvers import Division, divide
from ucudnn.solvers._base import Pool
from ucudnn.solvers.exact import divide_exactly

Fronts = tuple[tuple[tuple[int, int], ...], ...]

POINTS = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 30)), min_size=1, max_size=5)
FRONTS = st.lists(POINTS.map(tuple), min_size=1, max_size=6).map(tuple)


def smallest_bytes(fronts: Fronts) -> int:
    return sum(min(front)[0] for front in fronts)


def random_network(seed: int, kernels: int, bytes_: int, ns: int) -> tuple[Fronts, int]:
    """Fronts whose workspaces are odd numbers of bytes, and a pool that binds."""
    draw = random.Random(seed)
    fronts = []
    for _ in range(kernels):
        count = draw.randint(1, 12)
        workspaces = sorted(draw.sample(range(bytes_), count))
        times = sorted(draw.sample(range(1, ns), count), reverse=True)
        fronts.append(tuple(zip(workspaces, times, strict=True)))
    largest = sum(front[-1][0] for front in fronts)
    return tuple(fronts), draw.randint(smallest_bytes(tuple(fronts)), largest)


def assert_adds_up(division: Division, fronts: Fronts, total_bytes: int) -> None:
    points = [front[place] for front, place in zip(fronts, division.choice, strict=True)]
    assert division.time_ns == sum(point[1] for point in points)
    assert division.workspace_bytes == sum(point[0] for point in points) <= total_bytes
    assert division.lower_bound_ns <= division.time_ns
    assert division.gap_ns == division.time_ns - division.lower_bound_ns


@pytest.mark.slow
@settings(max_examples=1000)
@given(FRONTS, st.integers(0, 40), st.sampled_from([1, 1, 1, 10**9, 10**16, 10**17, 10**18]))
def test_exact_is_what_exhaustive_search_finds(fronts: Fronts, room: int, scale: int) -> None:
    fronts = tuple(tuple((w * scale, t * scale + 1) for w, t in front) for front in fronts)
    total_bytes = smallest_bytes(fronts) + room * scale
    division = divide(fronts, total_bytes, "exact")
    assert_adds_up(division, fronts, total_bytes)
    assert division.gap_ns == 0
    assert division.time_ns == divide_exhaustively(Pool(fronts, total_bytes)).time_ns
    assert all(type(value) is int for value in (division.time_ns, *division.choice))


NETWORKS = [(seed, 8 + 2 * seed, 10 ** (4 + seed // 2)) for seed in range(12)]
# In raw bytes and ns the CBC that PuLP bundles calls a slower division of these optimal.
NETWORKS += [(seed, 4 + seed % 24, 10**10) for seed in (8, 9, 13, 35, 38, 142, 192, 337, 725)]


@pytest.mark.parametrize("solver", ["highs", "cbc"])
@pytest.mark.parametrize(("seed", "count", "most_bytes"), NETWORKS)
def test_integer_programming_agrees_on_networks(solver, seed, count, most_bytes):
    """Bytes up to 10^10 and ns up to 10^9: unscaled, solvers call suboptimal points optimal."""
    fronts, total_bytes = random_network(seed, count, most_bytes, 10**9)
    exact, other = divide(fronts, total_bytes, "exact"), divide(fronts, total_bytes, solver)
    assert_adds_up(other, fronts, total_bytes)
    assert other.solver == solver
    assert exact.gap_ns == other.gap_ns == 0
    assert other.time_ns == exact.time_ns


def test_an_optimum_below_the_tolerance_of_a_solver_is_not_claimed() -> None:
    fronts = (((0, 3 * 10**18), (8, 10**18)), ((0, 2 * 10**18), (8, 7)))
    division = divide(fronts, 12, "highs")
    assert division.time_ns == divide(fronts, 12, "exact").time_ns
    assert 0 < division.gap_ns < 10**6


@pytest.mark.parametrize("seed", range(30))
def test_exact_is_optimal_where_choices_are_many(seed: int) -> None:
    """By weak duality: the bound of the relaxation, closed by the search, from below."""
    fronts, total_bytes = random_network(seed, 120, 10**8, 10**7)
    division = divide(fronts, total_bytes)
    assert_adds_up(division, fronts, total_bytes)
    assert division.gap_ns == 0
    assert division.solver == "exact"


def test_an_improvement_of_one_ns_is_found() -> None:
    """What greed finds takes 50, and the bound leaves room for 49."""
    fronts = [[(1, 23), (4, 12)], [(1, 23)], [(8, 28), (9, 8), (0, 15), (7, 3)]]
    assert divide(fronts, 9, "exact").time_ns == 49


def proportional(kernels: int) -> Pool:
    """Every byte saves one ns, so that no bound can tell subsets apart."""
    draw = random.Random(1)
    sizes = [draw.randint(1, 1 << 34) for _ in range(kernels)]
    return Pool(tuple(((0, size + 1), (size, 1)) for size in sizes), sum(sizes) // 2)


def test_what_is_not_proven_has_a_gap() -> None:
    pool = proportional(40)
    division = divide_exactly(pool, state_limit=100)
    assert_adds_up(division, pool.fronts, pool.total_bytes)
    assert division.gap_ns > 0


@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_a_solver_that_proves_nothing_gives_no_division(
    solver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The status of a problem that was not solved is that nothing was found.
    monkeypatch.setattr("pulp.LpProblem.solve", lambda *_: None)
    with pytest.raises(PlanError, match=f"{solver} proved no division of 4 choices optimal; use"):
        divide([[(0, 9), (8, 5)]] * 2, 8, solver)
