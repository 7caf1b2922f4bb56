"""The curve of a network against every combination of its kernels' choices."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucudnn.errors import ConfigError, PlanError
from ucudnn.races import Curve
from ucudnn.solvers import CurveKernel, network_curve

POINTS = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 20)), min_size=1, max_size=4)
KERNELS = st.lists(
    st.builds(CurveKernel, POINTS, st.integers(1, 3), st.integers(0, 9)), min_size=1, max_size=4
)


def every_division(kernels):
    """Memory and time of all combinations of choices."""
    for chosen in itertools.product(*(kernel.front for kernel in kernels)):
        pairs = list(zip(kernels, chosen, strict=True))
        yield (
            max(workspace + kernel.live_bytes for kernel, (workspace, _) in pairs),
            sum(kernel.calls * time_ns for kernel, (_, time_ns) in pairs),
        )


@given(KERNELS)
def test_the_curve_is_the_front_of_all_combinations(kernels):
    expected = {}
    for size, time_ns in sorted(every_division(kernels)):
        if not expected or time_ns < min(expected.values()):
            expected[size] = time_ns
    curve = network_curve(kernels)
    assert curve == tuple(expected.items())
    # it is one that a plan may hold
    Curve(curve, curve)


def test_numbers_beyond_64_bits_are_added_exactly():
    huge = CurveKernel([(0, 10**18), (7, 10**18 - 1)], calls=10**3)
    assert network_curve([huge, huge]) == ((0, 2 * 10**21), (7, 2 * 10**21 - 2000))


@pytest.mark.parametrize(
    ("kernels", "reason"),
    [
        ([], "must not be empty"),
        ([CurveKernel([])], "at least one"),
        ([CurveKernel([(0, 1)], calls=0)], "calls"),
        ([CurveKernel([(0, 1)], live_bytes=-1)], "live_bytes"),
        ([CurveKernel([(0.5, 1)])], "workspace_bytes"),
    ],
)
def test_wrong_kernels_are_refused(kernels, reason):
    with pytest.raises(ConfigError, match=reason):
        network_curve(kernels)


def test_the_time_within_a_limit():
    curve = Curve(((4, 90), (8, 50)))
    assert [curve.time_ns(size) for size in (3, 4, 7, 8, 100)] == [None, 90, 90, 50, 50]


@pytest.mark.parametrize(
    "points", [((0, 9), (0, 8)), ((0, 9), (1, 9)), ((0, True),), ((0, -1),), ((0, 2.5),)]
)
def test_a_curve_from_a_file_is_checked(points):
    with pytest.raises(PlanError, match="curve"):
        Curve(points)
