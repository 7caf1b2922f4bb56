"""Bounds: never above the truth, equal to it where they can be, and easy to check by hand."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucudnn.errors import PlanError
from ucudnn.solvers import Item, divide, reuse
from ucudnn.solvers._base import Pool
from ucudnn.solvers.bounds import network_bound_ns, split_bound_ns
from ucudnn.solvers.front import shared, undominated
from ucudnn.solvers.relaxation import relax

ITEMS = st.lists(
    st.builds(Item, st.integers(1, 9), st.integers(0, 3), st.integers(1, 50), st.just("any")),
    min_size=1,
    max_size=9,
)
POINTS = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 30)), min_size=1, max_size=5)
FRONTS = st.lists(POINTS.map(tuple), min_size=1, max_size=6).map(tuple)


@given(ITEMS, st.sampled_from([None, 0, 1, 2]), st.sampled_from([0, 5]))
def test_no_split_beats_its_bound(items: list[Item], limit: int | None, launch_ns: int) -> None:
    table = reuse(items, 20, launch_ns=launch_ns)
    for n in range(1, 21):
        time_ns = table.time_ns(n, limit)
        bound_ns = split_bound_ns(items, n, limit, launch_ns=launch_ns)
        assert time_ns is None or (bound_ns is not None and bound_ns <= time_ns)


@given(ITEMS, ITEMS, ITEMS, st.sampled_from([None, 0, 1, 2]))
def test_no_split_of_three_lists_beats_its_bound(
    single: list[Item], first: list[Item], later: list[Item], limit: int | None
) -> None:
    table = reuse(single, 20, first=first, accumulate=later, launch_ns=1)
    for n in range(1, 21):
        time_ns = table.time_ns(n, limit)
        bound_ns = split_bound_ns(single, n, limit, first=first, accumulate=later, launch_ns=1)
        assert time_ns is None or (bound_ns is not None and bound_ns <= time_ns)


@given(ITEMS)
def test_the_bound_is_met_where_the_best_size_divides_the_batch(items: list[Item]) -> None:
    best = min(items, key=lambda item: Fraction(item.time_ns, item.batch))
    table = reuse(items, 3 * best.batch)
    for n in (best.batch, 2 * best.batch, 3 * best.batch):
        fitting = [item for item in items if item.batch <= n]
        if best == min(fitting, key=lambda item: Fraction(item.time_ns, item.batch)):
            assert table.time_ns(n) == split_bound_ns(items, n)


@given(FRONTS, st.integers(0, 40), st.sampled_from([1, 10**18]))
def test_no_division_beats_its_bound(
    fronts: tuple[tuple[tuple[int, int], ...], ...], room: int, scale: int
) -> None:
    fronts = tuple(tuple((w * scale, t * scale) for w, t in front) for front in fronts)
    total_bytes = sum(min(front)[0] for front in fronts) + room * scale
    division = divide(fronts, total_bytes, "exact")
    assert network_bound_ns(fronts, total_bytes) <= division.time_ns
    greedy = relax(Pool(fronts, total_bytes))
    assert sum(greedy.choices.workspaces[greedy.greedy].tolist()) <= total_bytes


def test_the_bound_of_a_network_is_its_linear_relaxation() -> None:
    # The first kernel saves 4 ns with 8 bytes, the second 6 with 8; of 12 bytes the second gets 8
    # and the first half of what it wants: 9 - 2 + 7 - 6.
    assert network_bound_ns([[(0, 9), (8, 5)], [(0, 7), (8, 1)]], 12) == 8
    # A point above the hull is worth nothing in a mixture: 20 - 4 * (16 / 8).
    assert network_bound_ns([[(0, 20), (4, 19), (8, 12)]], 4) == 16
    # Two hulls of several steps, by hand: slopes 5, 3 and 4, 1; 3 bytes buy 5 + 4 + 3.
    fronts = [[(0, 30), (1, 25), (2, 22)], [(0, 30), (1, 26), (2, 25)]]
    assert network_bound_ns(fronts, 3) == 48 == divide(fronts, 3).time_ns


def test_a_pool_that_is_too_small_has_no_bound() -> None:
    with pytest.raises(PlanError) as caught:
        network_bound_ns([[(5, 1)], [(6, 1)]], 10)
    assert caught.value.smallest_bytes == 11


def test_no_bound_where_nothing_fits() -> None:
    items = [Item(4, 8, 10, "a")]
    assert split_bound_ns(items, 3) is None
    assert split_bound_ns(items, 4, 7) is None
    assert split_bound_ns([], 4, first=items, accumulate=items) is None
    assert split_bound_ns([], 8, first=items, accumulate=items) == 20


@given(POINTS)
def test_undominated_points_are_a_front(points: list[tuple[int, int]]) -> None:
    kept = [points[place] for place in undominated(points)]
    assert all(a[0] < b[0] and a[1] > b[1] for a, b in pairwise(kept))
    for workspace, time_ns in points:
        assert any(w <= workspace and t <= time_ns for w, t in kept)


@given(FRONTS)
def test_kernels_that_share_take_their_own_best_points(
    fronts: tuple[tuple[tuple[int, int], ...], ...],
) -> None:
    front = dict(shared(fronts))
    for limit in range(13):
        best = [min((t for w, t in points if w <= limit), default=None) for points in fronts]
        known = [time_ns for time_ns in best if time_ns is not None]
        times = [time_ns for workspace, time_ns in front.items() if workspace <= limit]
        assert (min(times) if times else None) == (sum(known) if len(known) == len(best) else None)
