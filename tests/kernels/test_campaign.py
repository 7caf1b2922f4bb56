"""What tuning a whole model does: lazily, in a time budget, interrupted, beside a busy process."""

from __future__ import annotations

import itertools
import warnings

import pytest
from by_hand import linear

from ucudnn.benchmark.statistics import median_ns
from ucudnn.config import Config
from ucudnn.errors import PlanError, TuningInterruptedError, UntunedWarning
from ucudnn.kernels.choose import Finalist, choose
from ucudnn.kernels.deadline import Deadline
from ucudnn.kernels.tune import tune_problems
from ucudnn.plan import Chunk, Plan, Split, Timing
from ucudnn.problem import Problem

MIB = 1 << 20
MS = 1_000_000
WIDE = Problem("fprop", 16, 2, 2, (8, 8), (1, 1))
NARROW = Problem("fprop", 16, 2, 2, (4, 4), (1, 1))


def is_default(plan: Plan, problem: Problem) -> bool:
    return plan.split(problem).is_default


@pytest.fixture
def clock(monkeypatch):
    """Time that passes by a second whenever the budget is looked at."""
    ticks = itertools.count()
    monkeypatch.setattr("ucudnn.kernels.deadline.monotonic", lambda: float(next(ticks)))
    return ticks


@pytest.mark.slow
def test_when_the_time_is_over_the_rest_runs_torch(scripted, clock):
    scripted(torch_default=linear(2.0), fast=linear(1.0))
    layers = [("narrow", NARROW), ("wide", WIDE)]
    whole = tune_problems(layers, Config(effort="thorough"))
    assert not is_default(whole, WIDE)
    assert not is_default(whole, NARROW)
    decided = set()
    for seconds in range(1, 60):
        scripted(torch_default=linear(2.0), fast=linear(1.0))
        config = Config(time_budget_s=seconds, cache=f"{Config().cache}-{seconds}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UntunedWarning)
            plan = tune_problems(layers, config)
        for kernel in plan.kernels:
            assert kernel.split(16).size == 16
        decided.add(tuple(kernel.is_default for kernel in plan.kernels))
        untuned = [k for k in plan.kernels if "not tuned: the time was over" in k.notes]
        assert all(kernel.is_default for kernel in untuned)
    assert () in decided  # not even looked at
    assert (True, True) in decided  # looked at, not tuned
    assert (False, False) in decided  # as without a budget


def test_kernels_that_were_not_looked_at_are_told_with_the_budget_that_was_set(scripted):
    scripted(torch_default=linear(2.0))
    layers, sentence = [("a", NARROW), ("b", WIDE)], "2 kernels are not in the plan.* of 20 s was"
    with pytest.warns(UntunedWarning, match=sentence):
        plan = tune_problems(layers, Config(time_budget_s=20), deadline=Deadline.within(0.0))
    assert plan.kernels == ()


def test_the_costliest_kernel_comes_first(scripted):
    backend = scripted(torch_default=linear(2.0), fast=linear(1.0))
    events = []
    once, often = ("once", WIDE), [(str(number), NARROW) for number in range(3)]
    tune_problems([once, *often], Config(), events.append)
    order = list(dict.fromkeys(event.kernel for event in events if event.kernel))
    assert order == [str(NARROW), str(WIDE)]
    assert backend.runs


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(0, 30, 3))
def test_ctrl_c_keeps_the_plan_so_far(scripted, moment):
    scripted(torch_default=linear(2.0), fast=linear(1.0))
    events = itertools.count()

    def interrupt(event):
        if next(events) == moment:
            raise KeyboardInterrupt

    layers = [("a", NARROW), ("b", WIDE)]
    try:
        plan = tune_problems(layers, Config(), interrupt)
    except TuningInterruptedError as interrupted:
        plan = interrupted.plan
    for kernel in plan.kernels:
        assert kernel.split(16).size == 16
    assert len(plan.kernels) == 2 or moment < 4
    finished = tune_problems(layers, Config())
    fresh = tune_problems(layers, Config(cache=f"{Config().cache}-fresh"))
    for problem in (NARROW, WIDE):
        assert finished.split(problem) == fresh.split(problem)


def test_max_error_excludes_what_is_less_exact(scripted, monkeypatch):
    """A candidate that is right, but not as exact as asked for."""
    from ucudnn.benchmark import bench

    scripted(torch_default=linear(2.0), fast=linear(1.0))

    def error(check, reference):
        del reference
        return 1e-4 if check._executable._algorithm == "fast" else 1e-7

    monkeypatch.setattr(bench.Check, "error", error)
    assert not is_default(tune_problems([("a", NARROW)], Config()), NARROW)
    exact = tune_problems([("a", NARROW)], Config(max_error=1e-5))
    assert is_default(exact, NARROW)
    with pytest.raises(PlanError, match="within max_error=1e-09; the most exact one has 1e-07"):
        tune_problems([("a", NARROW)], Config(max_error=1e-9))


def test_a_busy_process_in_the_middle_of_tuning_changes_no_plan(scripted):
    """It takes two thirds of the processor for some rounds, from small chunks more: 10 times."""
    costs = {
        "torch_default": linear(2.0, 1.0),
        "many": lambda size: (int((1.0 * size + 0.3) * MS), size * MIB // 2),
        "few": lambda size: (int((0.98 * size + 2.0) * MS), 2 * size * MIB),
    }
    backend = scripted(**costs)
    calm = tune_problems([("a", NARROW)], Config(workspace_limit="7MiB"))
    ran = len(backend.runs)
    for first in range(0, ran, max(1, ran // 6)):
        backend = scripted(**costs)
        sampled = itertools.count()

        def hog(first=first, backend=backend, sampled=sampled):
            if first <= next(sampled) < first + ran // 8:
                return 10.0 if backend.runs[-1][1] <= 2 else 3.0
            return 1.0

        backend.disturbance = hog
        config = Config(workspace_limit="7MiB", cache=f"{Config().cache}-{first}")
        busy = tune_problems([("a", NARROW)], config)
        backend.disturbance = lambda: 1.0
        retimed = sum(costs[chunk.algorithm](chunk.size)[0] for chunk in busy.split(NARROW).chunks)
        assert retimed <= 1.05 * calm.kernels[0].timing.time_ns


def finalist(split: Split, samples, workspace=0, is_deterministic=True) -> Finalist:
    timing = Timing(median_ns(samples), 0, workspace, len(samples))
    return Finalist(split, timing, tuple(samples), is_deterministic)


def test_ties_go_to_less_workspace_then_fewer_chunks_then_deterministic():
    halves = Split("batch", (Chunk(4, "a"), Chunk(4, "a")))
    whole, other = Split("batch", (Chunk(8, "b"),)), Split("batch", (Chunk(8, "c"),))
    same = [100] * 9
    lean = finalist(halves, same, workspace=1)
    assert choose([finalist(whole, same, workspace=2), lean], None) == lean
    single = finalist(whole, same, workspace=1)
    assert choose([lean, single], None) == single
    sure = finalist(other, same, workspace=1)
    assert choose([finalist(whole, same, 1, is_deterministic=False), sure], None) == sure
    # one that is slower beyond the noise is no tie, and no more is one that is only uncertain
    quick = finalist(other, [90] * 9, workspace=9)
    assert choose([quick, single], None) == quick
    shaky = finalist(halves, [80, 130, 130] * 3, workspace=0)
    assert choose([quick, shaky], None) == quick


def test_a_planned_call_costs_more_than_was_timed_of_it():
    default = finalist(Split.default(8), [100] * 9)
    other = finalist(Split("batch", (Chunk(8, "b"),)), [80] * 9)
    assert choose([default, other], None, overhead_ns=10) == other
    assert choose([default, other], None, overhead_ns=19) == default
    # where torch's own does not fit, nothing but the kernels themselves can be compared
    large = finalist(default.split, [100] * 9, workspace=2)
    assert choose([large, other], 1, overhead_ns=50) == other


@pytest.mark.parametrize(("blocks_host", "winner"), [(True, "torch_default"), (False, "fast")])
def test_a_gain_below_the_cost_of_a_planned_call_counts_where_the_host_waits(
    blocks_host, winner, scripted
):
    backend = scripted(
        torch_default=lambda size: (50_000 * size, 0), fast=lambda size: (47_000 * size, 0)
    )
    backend.blocks_host = blocks_host
    plan = tune_problems([("layer", NARROW.with_batch(8))], Config(policy="undivided"))
    assert plan.kernels[0].split(8).chunks[0].algorithm == winner


@pytest.mark.parametrize("more_mib", [1, 3, 7])
def test_where_a_call_needs_more_than_its_chunks_smaller_chunks_are_tried(more_mib, scripted):
    backend = scripted(torch_default=linear(2.0, 1.0), fast=linear(1.0, 1.5))
    backend.beside_bytes = lambda sizes: more_mib * MIB if len(sizes) > 1 else 0
    config = Config(workspace_limit="8MiB")
    plan = tune_problems([("layer", NARROW)], config)
    assert {chunk.size for chunk in plan.split(NARROW).chunks} == {{1: 4, 3: 2, 7: 1}[more_mib]}
    assert plan.workspace_bytes <= 8 * MIB
    smallest = (1 + more_mib) * MIB
    with pytest.raises(PlanError, match=f"the smallest needs {1 + more_mib} MiB") as caught:
        tune_problems([("layer", NARROW)], Config(workspace_limit=smallest - 1))
    assert caught.value.smallest_bytes == smallest
    assert tune_problems([("layer", NARROW)], Config(workspace_limit=smallest))


def test_a_default_whose_call_needs_more_than_its_chunk_is_split(scripted):
    backend = scripted(torch_default=linear(1.0, 1.0))
    backend.beside_bytes = lambda sizes: MIB // 4 if sum(sizes) == 8 else 0
    plan = tune_problems([("layer", NARROW.with_batch(8))], Config(workspace_limit="8.1MiB"))
    assert plan.workspace_bytes <= 8.1 * MIB


@pytest.mark.parametrize("policy", ["powers-of-two", "all"])
@pytest.mark.parametrize("op", ["fprop", "dgrad", "wgrad"])
def test_ever_smaller_limits_on_one_cache(op, policy, scripted):
    """What did not fit a larger limit does not keep a smaller one from finding what does."""
    scripted(torch_default=linear(2.0, 0.1))
    problem = Problem(op, 12, 2, 2, (4, 4), (1, 1))
    for limit in (3_122_375, 1_258_290, 314_571, 150_000):
        config = Config(workspace_limit=limit, policy=policy)
        assert tune_problems([("layer", problem)], config).workspace_bytes <= limit
    assert {
        chunk.size for chunk in tune_problems([("l", problem)], config).split(problem).chunks
    } == {1}


def test_equal_geometries_share_measurements_and_settle_together(scripted):
    """Two batches of one layer: a second tune measures nothing, whichever came first."""
    scripted(torch_default=linear(2.0), fast=linear(1.0, 1.0))
    layers = [("a", NARROW), ("b", NARROW.with_batch(24)), ("c", NARROW.with_batch(5))]
    events = []
    first = tune_problems(layers, Config(workspace_limit="9MiB"), events.append)
    second = tune_problems(layers[::-1], Config(workspace_limit="9MiB"), events.append)
    assert events[-1].measured == 0
    assert second.hash == first.hash
