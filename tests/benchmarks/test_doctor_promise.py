"""What benchmarks/doctor_promise.py concludes from its samples, and how it applies a remedy."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from ucudnn.problem import Problem

PROBLEM = Problem("dgrad", 8, 2, 2, (9, 9), (1, 1), stride=(2, 2))


@pytest.fixture
def promise(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("doctor_promise")


def test_a_promise_and_what_was_saved(promise: ModuleType) -> None:
    samples = {"torch": [100, 110, 120, 100, 100, 100], "plan": [60, 70, 80, 60, 60, 60]}
    kept = promise.kept(samples, "plan", 2 * 44, calls=2)
    assert (kept.saved_ns, kept.low_ns, kept.high_ns) == (80, 80, 80)
    assert kept.ratio == pytest.approx(80 / 88)
    assert kept.is_kept
    for promised, is_kept in ((64, False), (68, True), (99, True), (101, False)):
        assert promise.kept(samples, "plan", promised, 2).is_kept == is_kept
    slower = promise.kept({"torch": [1, 1, 1], "plan": [4, 4, 4]}, "plan", 10)
    assert slower.cells() == ("10 ns", "-3 ns", "-0.30 (-0.30 to -0.30)", "no")


@pytest.mark.parametrize(
    ("cliff", "way", "layout"),
    [
        ({"split": {}, "remedy": "the algorithm phases"}, "plan", "nchw"),
        ({"split": None, "remedy": "channels_last"}, "model", "nhwc"),
        ({"split": None, "remedy": "GLIBC_TUNABLES=a=1"}, "malloc", "nchw"),
    ],
)
def test_a_remedy_is_applied_in_its_way(
    promise: ModuleType, cliff: dict[str, Any], way: str, layout: str
) -> None:
    cliff["problem"] = PROBLEM.to_dict()
    assert promise.way_of(cliff) == way

    class Phases:
        def split(self, problem: Problem) -> str:
            return f"phases of {problem.op}"

    problem, split = promise.kernel_of(Phases(), cliff, way)
    assert problem.layout == layout
    assert (split == "phases of dgrad") == (way == "plan")
    # torch's own stands beside it
    problem, split = promise.kernel_of(Phases(), cliff, "torch")
    assert problem == PROBLEM
    assert split.is_default
