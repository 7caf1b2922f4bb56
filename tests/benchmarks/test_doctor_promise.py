"""What benchmarks/doctor_promise.py concludes from its samples, and how it applies a remedy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any, ClassVar

import pytest

from ucudnn.problem import Problem

PROBLEM = Problem("dgrad", 8, 2, 2, (9, 9), (1, 1), stride=(2, 2))


@pytest.fixture
def promise(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("doctor_promise")


def test_a_promise_and_what_was_saved(promise: ModuleType) -> None:
    own, remedied = [200, 220, 240, 200, 200, 200], [120, 140, 160, 120, 120, 120]
    kept = promise.kept(own, remedied, 88)
    assert (kept.saved_ns, kept.low_ns, kept.high_ns) == (80, 80, 80)
    assert kept.ratio == pytest.approx(80 / 88)
    assert kept.is_kept
    for promised, is_kept in ((64, False), (68, True), (99, True), (101, False)):
        assert promise.kept(own, remedied, promised).is_kept == is_kept
    slower = promise.kept([1, 1, 1], [4, 4, 4], 10)
    assert slower.cells() == ("10 ns", "-3 ns", "-0.30 (-0.30 to -0.30)", "no")


def test_splits_save_in_their_kernels_and_malloc_in_the_whole_step(promise: ModuleType) -> None:
    kernels = {"torch": [9, 9, 9], "splits": [4, 4, 4], "malloc": [1, 1, 1]}
    found = {
        "promised": {"saved_ns": {"splits": 10, "malloc": 60}},
        "steps_ns": {"torch": [100, 110, 120], "splits": [1, 1, 1], "malloc": [50, 50, 50]},
        "cliffs": [
            {"split": {}, "remedy": "", "samples_ns": kernels},
            {"split": {}, "remedy": "", "samples_ns": kernels},
            {"split": None, "remedy": "GLIBC_TUNABLES=a", "samples_ns": kernels},
        ],
    }
    assert promise.kept_by(found, "splits").saved_ns == 10
    assert promise.kept_by(found, "malloc").saved_ns == 60


@pytest.mark.parametrize(
    ("cliff", "way"),
    [
        ({"split": {}, "remedy": "the algorithm phases"}, "splits"),
        ({"split": None, "remedy": "channels_last"}, "channels_last"),
        ({"split": None, "remedy": "GLIBC_TUNABLES=a=1"}, "malloc"),
    ],
)
def test_a_remedy_is_applied_in_its_way(
    promise: ModuleType, cliff: dict[str, Any], way: str
) -> None:
    assert promise.way_of(cliff) == way


def test_the_time_of_a_kernel_is_found_in_either_layout(promise: ModuleType) -> None:
    class Timer:
        times_ns: ClassVar = {replace(PROBLEM, layout="nhwc"): 5, replace(PROBLEM, batch=3): 7}

    assert promise.time_of(Timer(), PROBLEM) == 5
    assert promise.time_of(Timer(), PROBLEM.with_batch(3)) == 7
    assert promise.time_of(Timer(), PROBLEM.with_batch(4)) == 0
