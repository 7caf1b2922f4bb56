"""Kernels of several streams: groups that divide what a memory budget leaves, by brute force."""

from __future__ import annotations

import itertools
import random
import threading

import pytest
import torch
from torch import nn

import ucudnn
from ucudnn.backends import open_backend
from ucudnn.backends.torch_cpu.backend import TorchCpuBackend
from ucudnn.config import Config
from ucudnn.errors import PlanError
from ucudnn.plan import Plan
from ucudnn.problem import Problem
from ucudnn.races import StepMemory
from ucudnn.tuning.division import Choices, Group, Overlap, divided
from ucudnn.tuning.fronts import Point, pareto
from ucudnn.tuning.limits import Limits
from ucudnn.tuning.memory_budget import MemoryBudget
from ucudnn.tuning.step_profile import StepProfiler
from ucudnn.tuning.tuner import tune_problems

pytestmark = [
    pytest.mark.filterwarnings("ignore::ucudnn.errors.UntunedWarning"),
    pytest.mark.filterwarnings("ignore::ucudnn.errors.NoiseWarning"),
]
MIB, MS = 1 << 20, 1_000_000
KERNELS = [Problem("fprop", n, 4, 4, (9,), (3,)) for n in range(1, 6)]


def random_front(chance):
    points = (Point(chance.randint(0, 9), chance.randint(1, 30)) for _ in range(4))
    return pareto(points)


def fastest(front, size):
    return min((point.time_ns for point in front if point.workspace_bytes <= size), default=None)


def best_ns(choices, overlap):
    """The least time of a step, by trying every size of every group's workspace."""
    times = []
    for sizes in itertools.product(range(overlap.total_bytes + 1), repeat=len(overlap.groups)):
        copies = [group.copies for group in overlap.groups]
        if sum(n * size for n, size in zip(copies, sizes, strict=True)) > overlap.total_bytes:
            continue
        found = [
            (choices[problem].calls, fastest(choices[problem].front, size))
            for group, size in zip(overlap.groups, sizes, strict=True)
            for problem in group.problems
        ]
        if all(time_ns is not None for _, time_ns in found):
            times.append(sum(calls * time_ns for calls, time_ns in found))
    return min(times, default=None)


@pytest.mark.parametrize("seed", range(60))
def test_groups_of_kernels_divide_a_pool_as_well_as_any_division(seed):
    chance = random.Random(seed)
    calls = [(one, chance.randrange(3)) for one in KERNELS for _ in range(chance.randint(1, 2))]
    total = chance.randint(0, 24)
    overlap = Overlap.of_streams(calls, total)
    if overlap is None:
        overlap = Overlap.of_calls(dict.fromkeys(KERNELS, 1), total)
    counts = {one: sum(kernel is one for kernel, _ in calls) for one in KERNELS}
    choices = {one: Choices(counts[one], total, random_front(chance)) for one in KERNELS}
    best = best_ns(choices, overlap)
    if best is None:
        with pytest.raises(PlanError, match="the smallest need") as error:
            divided(choices, overlap, "exact")
        enough = Overlap(overlap.groups, error.value.smallest_bytes)
        assert divided(choices, enough, "exact")
        return
    parts = divided(choices, overlap, "exact")
    assert overlap.workspace_bytes(parts) <= total
    assert best == sum(counts[one] * fastest(choices[one].front, parts[one]) for one in KERNELS)


@pytest.mark.parametrize("seed", range(40))
def test_streams_that_run_the_same_kernel_are_one_group(seed):
    chance = random.Random(seed)
    calls = [(chance.choice(KERNELS), chance.randrange(4)) for _ in range(chance.randint(1, 7))]
    overlap = Overlap.of_streams(calls, 1)
    streams_of = {one: {stream for kernel, stream in calls if kernel is one} for one, _ in calls}
    count = len({stream for _, stream in calls})
    assert (overlap is None) == (count == 1)
    if overlap is None:
        return
    # each kernel and each stream is in one group
    assert sorted(map(str, streams_of)) == sorted(
        str(problem) for group in overlap.groups for problem in group.problems
    )
    taken = [set().union(*(streams_of[p] for p in group.problems)) for group in overlap.groups]
    assert [len(one) for one in taken] == [group.copies for group in overlap.groups]
    assert sum(map(len, taken)) == count
    # what the groups count is what streams that each keep their largest workspace take
    sizes = dict.fromkeys(streams_of, 7)
    assert overlap.workspace_bytes(sizes) == 7 * count


def test_what_a_call_has_beside_its_workspace():
    first, second, third = KERNELS[:3]
    overlap = Overlap((Group((first, second), 1), Group((third,), 2)), 100)
    sizes = {first: 3, second: 5, third: 4}
    assert [overlap.beside_bytes(one, sizes) for one in (first, second, third)] == [8, 8, 9]


N = 8
NARROW, MIDDLE, WIDE = (Problem("fprop", N, 2, 2, (side, side), (1, 1)) for side in (4, 6, 8))
LAYERS = [("a", NARROW), ("b", MIDDLE), ("c", WIDE), ("d", MIDDLE)]


def cost(ms_per_sample, mib_per_sample, fixed_ms=0.0):
    return lambda size: (
        int((fixed_ms + ms_per_sample * size) * MS),
        int(mib_per_sample * size * MIB),
    )


@pytest.mark.slow
@pytest.mark.parametrize("total_mib", [2, 5, 9, 20, 40])
def test_kernels_of_a_stream_share_and_streams_divide(total_mib, scripted):
    scripted(torch_default=cost(4, 0.25), fast=cost(2, 1), faster=cost(1, 2))
    overlap = Overlap.of_streams(
        [(NARROW, 0), (MIDDLE, 0), (MIDDLE, 0), (WIDE, 1)], total_mib * MIB, 1 << 40
    )
    config = Config(memory_budget=1 << 40)
    limits = Limits(None, 1 << 40, {}, overlap)
    plan = tune_problems(LAYERS, config, limits=limits)
    workspace = {kernel.problem: kernel.timing.workspace_bytes for kernel in plan.kernels}
    assert overlap.workspace_bytes(workspace) <= total_mib * MIB
    # Chunks of one sample of an algorithm take these MiB, and as long per sample as larger ones.
    fits = {4 * N: MIB // 4, 2 * N: MIB, N: 2 * MIB}
    best = min(
        3 * one + other
        for one, other in itertools.product(fits, repeat=2)
        if fits[one] + fits[other] <= total_mib * MIB
    )
    took = sum(kernel.timing.time_ns * len(kernel.layers) for kernel in plan.kernels)
    assert best * MS <= took <= 1.04 * best * MS


def test_a_budget_too_small_for_kernels_that_overlap_says_what_suffices(scripted):
    scripted(torch_default=cost(4, 1), fast=cost(1, 3))
    overlap = Overlap.of_streams([(NARROW, 0), (MIDDLE, 0), (WIDE, 1)], MIB, 31 * MIB)
    limits = Limits(None, 31 * MIB, {}, overlap)
    with pytest.raises(PlanError, match="which may overlap, fit memory_budget=31 MiB") as error:
        tune_problems(LAYERS, Config(memory_budget=31 * MIB), limits=limits)
    # one sample at a time on each of two streams
    assert error.value.smallest_bytes == 32 * MIB


class Branches(nn.Module):
    """Three convolutions; `on` is told which one runs."""

    def __init__(self, on=lambda _: None):
        super().__init__()
        self.left = nn.Conv2d(4, 8, 3, padding=1)
        self.right = nn.Conv2d(4, 8, 5, padding=2)
        self.last = nn.Conv2d(8, 6, 3)
        self.on = on

    def forward(self, x):
        self.on(0)
        left = self.left(x).relu()
        self.on(1)
        right = self.right(x).relu()
        self.on(0)
        return self.last(left + right)


@pytest.fixture
def streams(monkeypatch):
    """A step of `Branches` whose branch on the right runs on a stream of its own."""
    current = [0]
    monkeypatch.setattr(TorchCpuBackend, "stream", lambda _: 4711 + current[0])
    return lambda stream: current.__setitem__(0, stream)


def test_the_profile_says_on_which_stream_each_call_runs(streams):
    model, x = Branches(streams), torch.randn(2, 4, 12, 12)
    found = StepProfiler(model, x, open_backend("torch_cpu"), is_training=False).profile()
    assert found.streams == (0, 1, 0)
    assert [problem.kernel_size for problem, _ in found.calls] == [(3, 3), (5, 5), (3, 3)]


def infer(model, x, **settings):
    config = Config(ops="fprop", effort="quick", step_race=False, policy="undivided", **settings)
    return ucudnn.tune(model, x, config)


@pytest.mark.slow
def test_a_step_on_two_streams_is_planned_within_the_budget(streams, tmp_path):
    torch.manual_seed(0)
    model, x = Branches(streams), torch.randn(2, 4, 24, 24)
    cache = str(tmp_path / "cache")
    least = infer(model, x, memory_budget="+0", cache=cache)
    assert least.memory.streams == (0, 1, 0)
    assert "2 streams and may overlap" in str(least.memory)
    for more in (0, 40_000, 10 * MIB):
        budget = least.memory.budget_bytes + more
        plan = infer(model, x, memory_budget=budget, cache=cache)
        memory = plan.memory
        left, right, last = (one.timing.workspace_bytes for one in plan.kernels)
        assert plan.workspace_bytes == max(left, last) + right
        # whatever runs at the same time, at the fullest moment too
        assert memory.own_peak_bytes + plan.workspace_bytes <= budget
        for kernel in plan.kernels:
            assert kernel.timing.workspace_bytes <= plan.limit_bytes(kernel)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").memory == plan.memory
    if least.memory.budget_bytes > least.memory.own_peak_bytes:
        with pytest.raises(PlanError, match="which may overlap") as error:
            infer(model, x, memory_budget=least.memory.budget_bytes - 1, cache=cache)
        assert error.value.smallest_bytes == least.memory.budget_bytes


@pytest.mark.slow
def test_calls_that_keep_their_workspace_fit_the_budget_together(tmp_path):
    torch.manual_seed(0)
    model, x = Branches(), torch.randn(2, 4, 24, 24)
    cache = str(tmp_path / "cache")
    unlimited = infer(model, x, memory_budget="1GiB", total_workspace="1GiB", cache=cache)
    peak = unlimited.memory.own_peak_bytes
    least = infer(model, x, memory_budget="+0", total_workspace="1GiB", cache=cache)
    assert least.memory.budget_bytes == peak + least.workspace_bytes
    budget = (least.memory.budget_bytes + peak + unlimited.workspace_bytes) // 2
    plan = infer(model, x, memory_budget=budget, total_workspace="1GiB", cache=cache)
    assert peak + plan.workspace_bytes <= budget
    # the pool of the user holds, too
    pool = least.workspace_bytes
    plan = infer(model, x, memory_budget="1GiB", total_workspace=pool, cache=cache)
    assert plan.workspace_bytes <= pool


def test_a_step_on_one_stream_has_no_kernels_that_overlap():
    model, x = Branches(), torch.randn(2, 4, 12, 12)
    config = Config(memory_budget="1GiB", ops="fprop")
    budget = MemoryBudget(model, x, config)
    traced = ucudnn.tracing.trace_layers(model, x, config.ops)
    assert budget.limits("keep", traced).overlap is None
    both = MemoryBudget(model, x, Config(memory_budget="1GiB", ops="fprop", total_workspace=64))
    overlap = both.limits("keep", traced).overlap
    assert (overlap.total_bytes, overlap.budget_bytes) == (64, None)
    assert [group.copies for group in overlap.groups] == [1, 1, 1]


class InThread(nn.Module):
    """A convolution in a thread of its own."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        found = []
        thread = threading.Thread(target=lambda: found.append(self.conv(x.detach())))
        thread.start()
        thread.join()
        return found[0]


def test_threads_whose_memory_cannot_be_seen_are_refused():
    model, x = InThread(), torch.randn(1, 3, 9, 9)
    config = Config(memory_budget="1GiB", ops="fprop")
    traced = ucudnn.tracing.trace_layers(nn.Conv2d(3, 4, 3), x, config.ops)
    with pytest.raises(PlanError, match="its convolutions run in several threads"):
        MemoryBudget(model, x, config).limits("keep", traced)


def test_streams_of_a_plan_file():
    sizes = dict.fromkeys(StepMemory.__slots__[:7], 1)
    with pytest.raises(PlanError, match="one stream per call, got 1 for 2"):
        StepMemory(**sizes, calls=((0, 1), (1, 1)), streams=(0,))
    with pytest.raises(PlanError, match="streams ints from 0"):
        StepMemory(**sizes, calls=((0, 1),), streams=("a",))
    memory = StepMemory(**sizes, calls=((0, 1), (9, 1)), streams=(0, 1))
    assert StepMemory.from_dict(memory.to_dict()) == memory
    # of a kernel that the plan does not have nothing is known
    assert memory.workspace_bytes([5]) == 5
