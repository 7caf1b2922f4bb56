"""Tuning on a backend whose every time and workspace is known: what is run, and what is chosen."""

from __future__ import annotations

import gc
import itertools
import random
import warnings
import weakref
from dataclasses import replace

import pytest
import torch
from by_hand import chunks_of, front, least_ns, linear, random_costs

from ucudnn import cache as caches
from ucudnn.backends import Elapsed
from ucudnn.config import Config
from ucudnn.errors import PlanError, UntunedWarning
from ucudnn.kernels.candidates import Kernel
from ucudnn.kernels.deadline import Deadline
from ucudnn.kernels.device import Session
from ucudnn.kernels.measure import KernelTuning
from ucudnn.kernels.tune import tune_problems
from ucudnn.measurement import Device
from ucudnn.plan import Chunk
from ucudnn.problem import Problem

MIB = 1 << 20
MS = 1_000_000
FPROP = Problem("fprop", 16, 2, 2, (4, 4), (1, 1))


class Counts:
    """The last progress event of a tuning run."""

    measured = reused = 0

    def __call__(self, event):
        self.measured, self.reused = event.measured, event.reused


@pytest.fixture
def _no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collector")
def test_operands_of_one_kernel_at_a_time_are_in_memory(scripted, monkeypatch):
    """Without waiting for the collector, which comes when it likes."""
    backend = scripted(torch_default=linear(2.0, 1.0), lean=linear(1.0, 0.5))
    alive, together = weakref.WeakSet(), []
    operands = backend.operands

    def watched(problem, samples):
        a, b = operands(problem, samples)
        alive.add(a)
        together.append(len(alive))
        return a, b

    monkeypatch.setattr(backend, "operands", watched)
    problems = [replace(FPROP, in_channels=channels) for channels in (2, 4, 6, 8)]
    tune_problems([("", problem) for problem in problems], Config())
    assert len(together) >= 2 * len(problems)
    assert max(together) == 1


def tune(problem=FPROP, **settings):
    counts = Counts()
    return tune_problems([("layer", problem)], Config(**settings), counts), counts


COSTS = {
    "torch_default": linear(2.0, 0.1),
    "greedy": linear(1.0, 4.0, fixed_ms=0.5),
    "frugal": linear(1.6, 1.0),
}


@pytest.mark.parametrize("limit_mib", [None, 64, 33, 16, 9, 4, 2, 1])
@pytest.mark.parametrize(
    "policy", ["powers-of-two", pytest.param("all", marks=pytest.mark.slow), "undivided"]
)
def test_chooses_the_fastest_split_within_the_limit(scripted, policy, limit_mib):
    scripted(**COSTS)
    limit = None if limit_mib is None else limit_mib * MIB
    sizes = {"powers-of-two": (1, 2, 4, 8, 16), "all": range(1, 17), "undivided": (16,)}[policy]
    best = least_ns(front(chunks_of(COSTS, sizes), 16), limit)
    if best is None:
        with pytest.raises(PlanError, match="the smallest needs"):
            tune(workspace_limit=limit, policy=policy)
        return
    plan, _ = tune(workspace_limit=limit, policy=policy)
    (kernel,) = plan.kernels
    assert kernel.timing.time_ns == best
    assert limit is None or kernel.timing.workspace_bytes <= limit
    assert kernel.predicted_time_ns == kernel.timing.time_ns


@pytest.fixture
def on_a_gpu(scripted, monkeypatch):
    """As `scripted`, but the device is a GPU, for which the host launches in no time."""

    def install(**costs):
        backend = scripted(**costs)
        monkeypatch.setattr(backend, "device", lambda: Device("cuda", "scripted"))
        timed = backend.elapsed_ns
        monkeypatch.setattr(backend, "elapsed_apart", lambda run, _: Elapsed(timed(run), 0))
        return backend

    return install


def test_on_a_gpu_slow_candidates_are_run_once_and_not_raced(scripted, on_a_gpu):
    costs = {
        "torch_default": linear(0.1),
        "near": linear(0.12),
        "farther": linear(0.14),
        "far": linear(0.2),
    }
    # Each candidate runs once to be checked, and one to three times to see how long it takes.
    least = {"near": 5, "farther": 4, "far": 2}
    for install in (scripted, on_a_gpu):
        backend = install(**costs)
        tune(policy="undivided", cache=f"{Config().cache}-{install is scripted}")
        ran = {name: backend.runs.count((name, 16)) for name in least}
        assert ran["near"] >= least["near"]
        if install is on_a_gpu:
            assert (ran["farther"], ran["far"]) == (least["farther"], least["far"])
        else:
            assert min(ran.values()) >= least["near"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("scale", [0.02, 1.0])
def test_on_a_gpu_fewer_runs_find_the_fastest_split(on_a_gpu, seed, scale):
    costs = {
        name: lambda size, cost=cost: (int(scale * cost(size)[0]), cost(size)[1])
        for name, cost in random_costs(seed).items()
    }
    on_a_gpu(**costs)
    points = front(chunks_of(costs, (1, 2, 4, 8, 16)), 16)
    for limit in {workspace for workspace, _ in points}:
        plan, _ = tune(workspace_limit=limit)
        # Short chunks and further launches cost the host some time, so they must gain a little.
        assert plan.kernels[0].timing.time_ns <= 1.1 * least_ns(points, limit)


def test_on_a_gpu_a_slow_candidate_is_timed_if_the_fast_ones_take_too_little_time(on_a_gpu):
    """Four samples by `brisk` take 0.08 ms, which is too short for a launch of its own."""
    on_a_gpu(torch_default=linear(1.0, 1.0), brisk=linear(0.02, 1.0), calm=linear(0.03, 1.0))
    plan, _ = tune(workspace_limit=4 * MIB)
    assert plan.split(FPROP).chunks == (Chunk(4, "calm"),) * 4


@pytest.mark.slow
@pytest.mark.parametrize("limit_mib", [None, 3])
def test_batches_that_there_was_no_time_for_are_named(scripted, tmp_path, limit_mib):
    """Looks at the clock take a second each; each batch has an implementation of its own."""
    partial = 0
    for budget in range(1, 120, 3):
        ticks = itertools.count()
        deadline = Deadline.within(budget, clock=lambda ticks=ticks: float(next(ticks)))
        backend = scripted(**COSTS)
        backend.kernels = {(name, n): f"{name} {n}" for name in COSTS for n in range(1, 17)}
        limit = None if limit_mib is None else limit_mib * MIB
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UntunedWarning)
            cache = str(tmp_path / f"{budget}")
            config = Config(workspace_limit=limit, time_budget_s=budget, cache=cache)
            plan = tune_problems([("layer", FPROP)], config, deadline=deadline, last=deadline)
        for kernel in plan.kernels:
            missing = [str(FPROP.with_batch(n)) for n in kernel.uncovered()]
            partial += bool(missing)
            assert plan.left_out == tuple(missing[-1:])
    assert partial or limit is None


def test_a_candidate_above_the_limit_is_run_once_for_its_workspace_and_no_larger(scripted):
    backend = scripted(torch_default=linear(2.0, 0.0), greedy=linear(1.0, 4.0))
    tune(workspace_limit=10 * MIB)
    sizes = [size for name, size in backend.runs if name == "greedy"]
    # 1 and 2 samples fit and are timed; 4 samples need 16 MiB, on the line through them
    assert set(sizes) <= {1, 2}


def test_torchs_own_convolution_is_not_raced_alone(scripted):
    scripted(torch_default=linear(1.0, 0.0), slow=linear(9.0, 0.0))
    plan, _ = tune(workspace_limit="9MiB")
    (kernel,) = plan.kernels
    assert kernel.is_default
    # Timed like every chunk, 16 samples of 1 ms.
    assert kernel.timing.time_ns == kernel.default.time_ns == 16 * MS
    assert kernel.timing.samples >= 2
    with caches.open(Config().cache) as cache:
        assert not [entry for entry in cache if entry.key.subject == "call"]


@pytest.mark.parametrize("limit", [None, 2 * MIB])
@pytest.mark.parametrize("has_time_for_races", [True, False])
def test_time_for_races_is_used_where_a_kernel_must_have_a_plan(
    scripted, limit, has_time_for_races
):
    backend = scripted(torch_default=linear(1.0, 1.0), lean=linear(2.0, 0.0))
    session = Session(backend, caches.MemoryCache())
    tuning = KernelTuning(session, Config(), Kernel(FPROP), is_limited=limit is not None)
    tuning.look_at_default()
    assert tuning.default.workspace_bytes == 16 * MIB
    over = Deadline.within(0.0)
    session.stop_at(over, Deadline.never() if has_time_for_races else over)
    micro_batches = tuning.measure_within(limit)[0]
    assert bool(micro_batches.measurements) == (has_time_for_races and limit is not None)
    session.close()


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 20))]
)
def test_a_second_tune_measures_nothing_however_noisy_the_first_was(scripted, seed):
    """Medians are not the first samples: no decision may flip when they replace them."""
    backend = scripted(**COSTS, slow=linear(5.0, 0.0), slower=linear(6.2, 0.5))
    chance = random.Random(seed)
    backend.disturbance = lambda: chance.choice([0.5, 0.8, 1.0, 1.0, 1.5, 4.0])
    for limit in ("40MiB", "9MiB"):
        first, _ = tune(workspace_limit=limit)
        ran = len(backend.runs)
        second, counts = tune(workspace_limit=limit)
        assert counts.measured == 0
        assert counts.reused > 0
        assert len(backend.runs) == ran
        assert second == first


def test_another_limit_times_only_what_was_not_timed(scripted):
    scripted(**COSTS)
    _, small = tune(workspace_limit="9MiB")
    _, large = tune(workspace_limit="64MiB")
    assert large.reused > small.measured // 2
    for limit in ("9MiB", "64MiB"):
        assert tune(workspace_limit=limit)[1].measured == 0


def test_a_limit_then_a_larger_one_equals_the_larger_one_alone(scripted, tmp_path):
    scripted(**COSTS)
    tune(workspace_limit="2MiB", cache=tmp_path / "both")
    after, _ = tune(workspace_limit="40MiB", cache=tmp_path / "both")
    fresh, _ = tune(workspace_limit="40MiB", cache=tmp_path / "fresh")
    # smaller batches are composed of what happens to be known; the planned one is not
    assert after.split(FPROP) == fresh.split(FPROP)
    assert after.kernels[0].timing == fresh.kernels[0].timing


def test_the_default_wins_a_tie_for_every_batch(scripted):
    scripted(torch_default=linear(1.0, 4.0), twin=linear(1.0, 0.0))
    plan, _ = tune()
    (kernel,) = plan.kernels
    assert kernel.is_default
    for n in range(1, 17):
        assert plan.split(FPROP.with_batch(n)).chunks == (Chunk(n, "torch_default"),)


def test_a_failing_algorithm_is_kept_with_its_reason_and_not_tried_again(scripted):
    backend = scripted(torch_default=linear(1.0, 0.0), broken=lambda _: (None, 0))
    plan, _ = tune()
    assert plan.kernels[0].is_default
    tried = backend.runs.count(("broken", 1))
    assert tried == 1
    tune()
    assert backend.runs.count(("broken", 1)) == tried


def test_equal_problems_are_measured_once_and_counted_per_call(scripted):
    scripted(torch_default=linear(1.0, 0.0))
    plan = tune_problems([("a", FPROP), ("b", FPROP)], Config())
    (kernel,) = plan.kernels
    assert kernel.layers == ("a", "b")
    assert plan.predicted_time_ns == 2 * kernel.predicted_time_ns


def test_short_chunks_are_not_worth_their_launch(scripted):
    """At 0.05 ms a sample a chunk of one or two takes less than ten calls from Python."""
    scripted(torch_default=linear(0.06, 1.0), quick=lambda size: (int(0.05 * MS * size), 0))
    plan, _ = tune()
    split = plan.split(FPROP)
    assert min(chunk.size for chunk in split.chunks) >= 4
    tight, _ = tune(workspace_limit=0)  # nothing else fits: then short chunks are allowed
    assert tight.split(FPROP).size == 16


def test_the_smallest_workspace_that_is_named_suffices(scripted):
    scripted(torch_default=linear(1.0, 9.0), other=linear(1.0, 7.0))
    for problem in (FPROP, Problem("wgrad", 8, 64, 64, (8, 8), (8, 8), dtype="float16")):
        with pytest.raises(PlanError) as caught:
            tune(problem, workspace_limit=1)
        tune(problem, workspace_limit=caught.value.smallest_bytes)


def test_a_batch_that_another_kernel_computes_keeps_the_limit(scripted):
    """At one sample torch picks a kernel with much workspace: no bound, no default holds there."""
    odd = {1: (5 * MS, 90 * MIB)}
    backend = scripted(torch_default=lambda size: odd.get(size, (size * MS, 8 * MIB)))
    backend.kernels[("torch_default", 1)] = "another"
    plan, _ = tune(workspace_limit="10MiB")
    assert plan.split(FPROP.with_batch(16)).is_default
    assert plan.split(FPROP.with_batch(2)).size == 2
    assert not plan.covers(FPROP.with_batch(1))
    with pytest.raises(PlanError, match="no plan for batch 1: nothing that was timed computes it"):
        plan.split(FPROP.with_batch(1))
    every, _ = tune()
    assert every.covers(FPROP.with_batch(1))


def test_running_out_of_memory_is_not_remembered(scripted, monkeypatch):
    backend = scripted(torch_default=linear(1.0, 0.0))
    works = backend.costs["torch_default"]

    def exhausted(size):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    backend.costs["torch_default"] = exhausted
    with pytest.raises(
        PlanError, match="no algorithm could be run on .*: there was too little memory"
    ):
        tune()
    backend.costs["torch_default"] = works
    plan, _ = tune()
    assert plan.kernels[0].is_default


@pytest.mark.parametrize("good_runs", range(2, 12))
def test_running_out_of_memory_later_is_not_remembered_either(scripted, good_runs):
    """In the rounds of chunks, or in the race of whole calls."""
    backend = scripted(torch_default=linear(2.0, 0.0), fast=linear(1.0, 0.0))
    works, left = backend.costs["fast"], [good_runs]

    def exhausted(size):
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED (4004)")
        return works(size)

    backend.costs["fast"] = exhausted
    assert tune(policy="undivided")[0].kernels[0].is_default
    backend.costs["fast"] = works
    plan, _ = tune(policy="undivided")
    assert plan.kernels[0].algorithms[0] == "fast"


def test_what_the_whole_needs_alone_is_not_guessed_from_what_chunks_need(scripted):
    """Written into a larger result a chunk needs its own result beside; alone it does not."""
    backend = scripted(torch_default=linear(2.0, 2.0), lean=linear(1.0, 0.0))
    result = FPROP.with_batch(1).result_bytes
    write_costs = 3 * MIB // 4 - result  # more than the result that a copy needs

    def write(executable, a, b, out):
        out.copy_(executable.alone(a, b))
        if executable._algorithm == "lean":
            backend.peak = max(backend.peak, a.shape[0] * (result + write_costs))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(backend.executable(FPROP, "lean")), "write", write)
        plan, _ = tune(workspace_limit="8MiB")
    assert plan.split(FPROP).chunks == (Chunk(16, "lean"),)
    assert {size for name, size in backend.runs if name == "torch_default"} <= {1, 2, 4, 16}


@pytest.mark.parametrize(
    ("has_bias", "bias_ms", "winner"),
    [(False, 9, "plain"), (True, 0, "plain"), (True, 0.1, "plain"), (True, 0.5, "fused")],
)
def test_what_adds_the_bias_at_once_races_what_adds_it_afterwards(
    scripted, has_bias, bias_ms, winner
):
    backend = scripted(
        torch_default=linear(1, 4), plain=linear(0.5, 1), fused=linear(0.7, 1), fusing=linear(2, 0)
    )
    backend.fused, backend.bias_ns = {"fused", "fusing"}, int(bias_ms * MS)
    config = Config(workspace_limit="8MiB")
    biased = {FPROP} if has_bias else set()
    (kernel,) = tune_problems([("layer", FPROP)], config, biased=biased).kernels
    assert {chunk.algorithm for chunk in kernel.split(FPROP.batch).chunks} == {winner}
    per_sample = {"plain": 0.5 + bias_ms * has_bias, "fused": 0.7}[winner]
    assert kernel.timing.time_ns == pytest.approx(per_sample * MS * FPROP.batch, rel=1e-3)
    assert any(name == "fused" for name, _ in backend.runs) == has_bias
    for batch in range(1, FPROP.batch):  # which ones were not timed there decides
        algorithms = {chunk.algorithm for chunk in kernel.split(batch).chunks}
        assert algorithms <= (backend.fused if winner == "fused" else {"torch_default", "plain"})


def test_a_layer_with_a_bias_is_tuned_once(scripted):
    backend = scripted(torch_default=linear(1, 4), fused=linear(0.5, 1))
    backend.fused, backend.bias_ns = {"fused"}, MS
    first = tune_problems([("layer", FPROP)], Config(), biased={FPROP})
    again = Counts()
    assert tune_problems([("layer", FPROP)], Config(), again, biased={FPROP}) == first
    assert again.measured == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", ["fprop", "wgrad"])
def test_chunks_fit_though_the_whole_does_not(scripted, op, dtype):
    backend = scripted(torch_default=linear(1, 1), slow=linear(3, 0))
    plain = backend.operands
    backend.operands = lambda *asked: tuple(one.to(getattr(torch, dtype)) for one in plain(*asked))
    plan, _ = tune(Problem(op, 8, 2, 2, (4, 4), (1, 1), dtype=dtype), workspace_limit="5MiB")
    (kernel,) = plan.kernels
    assert kernel.split(8).chunks == (Chunk(4, "torch_default"),) * 2


def test_a_batch_that_nothing_computes_does_not_keep_others_from_a_plan(scripted):
    """At one sample torch picks a kernel with much workspace, at two a third one that fits."""
    odd = {1: (MS, 9 * MIB), 2: (2 * MS, 0)}
    backend = scripted(torch_default=lambda size: odd.get(size, (size * MS, MIB // 2)))
    backend.kernels |= {("torch_default", 1): "one", ("torch_default", 2): "two"}
    plan, _ = tune(FPROP.with_batch(4), workspace_limit="1MiB")
    (kernel,) = plan.kernels
    assert [kernel.covers(n) for n in range(1, 5)] == [False, True, True, True]
