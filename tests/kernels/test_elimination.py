"""Which algorithms are ruled out before they run, against what they would really have taken."""

from __future__ import annotations

from collections import defaultdict

import pytest
from by_hand import linear

from ucudnn.backends import Cost, Roofline
from ucudnn.config import Config
from ucudnn.kernels.tune import tune_problems
from ucudnn.problem import Problem

MS = 1_000_000
PROBLEM = Problem("fprop", 64, 2, 2, (16, 16), (3, 3))


def stated(cost, operations_per_ns=1.0):
    """A cost that is true to a time: so many operations, no traffic."""
    return lambda size: Cost(int(cost(size)[0] * operations_per_ns), 0, cost(size)[1])


@pytest.fixture
def costed(scripted):
    """A scripted device whose algorithms state what they do."""

    def install(roofline=None, states=None, **costs):
        backend = scripted(**costs)
        states = states or {name: stated(cost) for name, cost in costs.items()}
        backend.cost = lambda problem, name: states[name](problem.batch) if name in states else None
        backend.roofline = lambda _: roofline
        return backend

    return install


def sizes_run(backend):
    found = defaultdict(set)
    for name, size in backend.runs:
        found[name].add(size)
    return found


def tune(**settings):
    (kernel,) = tune_problems([("layer", PROBLEM)], Config(**settings)).kernels
    return kernel


def test_a_slow_algorithm_runs_small_chunks_alone(costed):
    backend = costed(torch_default=linear(1.0), crawl=linear(4.0), fast=linear(0.5))
    kernel = tune()
    assert kernel.split(64).chunks[0].algorithm == "fast"
    run = sizes_run(backend)
    assert max(run["crawl"]) <= 2
    assert max(run["fast"]) == 64
    assert any("crawl is ruled out: it is expected to take" in note for note in kernel.notes)


@pytest.mark.parametrize("whole_ms", [0.9, 1.1, 8.0])
def test_what_a_race_has_timed_is_not_said_to_be_ruled_out(costed, whole_ms):
    """Torch's own convolution is slow for one sample, and may win as a whole."""
    backend = costed(torch_default=linear(8.0), crawl=linear(9.0), fast=linear(1.0))
    is_timed = iter([False])
    backend.costs["torch_default"] = lambda size: linear(
        whole_ms if size == 64 and next(is_timed, True) else 8.0
    )(size)
    kernel = tune(workspace_limit="1GiB")
    assert kernel.is_default == (whole_ms < 1)
    said = [note for note in kernel.notes if "is ruled out" in note]
    assert [note.split()[0] for note in said] == ["crawl"]


def test_a_fixed_cost_that_large_chunks_share_rules_nothing_out(costed):
    """20 times slower for one sample, twice as fast for all 64."""
    costs = {"torch_default": linear(1.0), "spectral": linear(0.1, fixed_ms=19.0)}
    backend = costed(**costs)
    kernel = tune()
    assert kernel.split(64).chunks[0].algorithm == "spectral"
    assert 64 in sizes_run(backend)["spectral"]


def test_what_needs_more_memory_than_a_candidate_may_take_never_runs(costed):
    backend = costed(torch_default=linear(1.0), greedy=linear(0.1, mib_per_sample=300.0))
    kernel = tune()
    assert "greedy" not in sizes_run(backend)
    assert any("greedy is ruled out: it needs 300 MiB at least" in note for note in kernel.notes)


def test_a_roofline_rules_out_what_it_proves_too_slow(costed):
    roofline = Roofline(1e9, 1e9)  # an operation takes 1 ns
    states = {
        "torch_default": lambda size: Cost(size * MS // 2, 0, 0),
        "heavy": lambda size: Cost(3 * size * MS, 0, 0),
    }
    backend = costed(roofline, states, torch_default=linear(1.0), heavy=linear(3.0))
    kernel = tune()
    assert kernel.is_default
    assert "heavy" not in sizes_run(backend)


def test_a_kernel_at_the_roofline_is_looked_at_once(costed):
    roofline = Roofline(1e9, 1e9)
    backend = costed(roofline, torch_default=linear(1.0), other=linear(1.0))
    kernel = tune()
    assert kernel.is_default
    assert sizes_run(backend) == {"torch_default": {64}}
    assert any("looked at once" in note for note in kernel.notes)


@pytest.mark.parametrize(
    ("per_s", "effort"),
    [
        (1e6, "thorough"),  # as if nothing could ever be faster
        (1e8, "normal"),  # which something beats: taken while other processes used the machine
    ],
)
def test_a_roofline_is_not_trusted_by_thorough_tuning_or_where_something_beats_it(
    costed, per_s, effort
):
    backend = costed(Roofline(per_s, per_s), torch_default=linear(1.0), fast=linear(0.5))
    assert tune(effort=effort).split(64).chunks[0].algorithm == "fast"
    assert backend.runs


@pytest.mark.parametrize("limit", [None, "9MiB", "3MiB"])
def test_a_second_tune_measures_nothing(costed, limit):
    costs = {
        "torch_default": linear(2.0, 0.5),
        "greedy": linear(1.0, 1.0, fixed_ms=0.5),
        "crawl": linear(9.0),
    }
    costed(Roofline(1e9, 1e9), **costs)
    first = tune_problems([("layer", PROBLEM)], Config(workspace_limit=limit))
    backend = costed(Roofline(2e9, 3e9), **costs)  # the speed is that of the first time
    again = tune_problems([("layer", PROBLEM)], Config(workspace_limit=limit))
    assert again.hash == first.hash
    assert not backend.runs
