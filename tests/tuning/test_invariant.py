"""A batch-invariant plan: one algorithm and one micro-batch, the fastest; its cost is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import ucudnn
from ucudnn import cache as caches
from ucudnn.backends.recorded import RecordedBackend
from ucudnn.check import check
from ucudnn.config import Config
from ucudnn.errors import ConfigError, PlanError
from ucudnn.plan import Plan
from ucudnn.problem import Problem
from ucudnn.reports.text import kernel_table, plan_summary, plan_table
from ucudnn.tuning.tuner import tune_problems

MS, MIB = 1_000_000, 1 << 20
N = 24
PROBLEM = Problem("fprop", N, 2, 2, (9, 9), (1, 1))
LAYERS = [("layer", PROBLEM)]
INVARIANT = Config(batch_invariant=True, policy="all")


def cost(ms_per_sample, mib_per_sample, fixed_ms=1.0):
    return lambda size: (
        int((fixed_ms + ms_per_sample * size) * MS),
        int(mib_per_sample * size * MIB),
    )


@pytest.fixture
def here(scripted):
    return scripted(
        torch_default=cost(3, 0), fast=cost(1, 2), lean=cost(2, 0.25), stepwise=cost(9, 0)
    )


def fastest(costs, limit):
    """Time of the best micro-batch in ns, by trying all of them."""
    found = []
    for algorithm, of in costs.items():
        for size in range(1, N + 1):
            time_ns, workspace = of(size)
            # x and y of 2 channels and 81 places, in float32
            padding = 2 * 2 * 81 * 4 * size if size > 1 else 0
            if limit is None or workspace + padding <= limit:
                found.append((-(-N // size) * time_ns, size, algorithm))
    return min(found)


@pytest.mark.parametrize("limit", [None, 1 << 30, 20 * MIB, 11 * MIB, 5 * MIB, 2 * MIB, 1 * MIB])
def test_the_fastest_micro_batch_is_found(here, limit):
    (kernel,) = tune_problems(LAYERS, replace(INVARIANT, workspace_limit=limit)).kernels
    time_ns, _, algorithm = fastest(here.costs, limit)
    assert kernel.algorithms == (algorithm,)
    assert kernel.timing.time_ns <= 1.02 * time_ns
    assert limit is None or kernel.timing.workspace_bytes <= limit
    for n in range(1, N + 1):
        split = kernel.split(n)
        *full, last = (step.size for step in split.steps)
        assert set(full) <= {kernel.micro_batch}
        assert split.size == n
        assert last <= kernel.micro_batch == split.micro_batch
        assert not split.is_default


def test_of_micro_batches_that_tie_the_smallest_is_taken(here):
    here.costs = {"torch_default": cost(1, 0, fixed_ms=0)}
    (kernel,) = tune_problems(LAYERS, INVARIANT).kernels
    assert kernel.micro_batch < N
    assert not kernel.is_default


def test_the_cost_is_measured_and_shown(here):
    # 16 samples fit the limit at once: the fastest split takes these and then the other 8
    here.costs = {"torch_default": cost(3, 0), "fast": cost(1, 2, fixed_ms=5)}
    config = Config(workspace_limit="33MiB")
    plan = tune_problems(LAYERS, replace(config, batch_invariant=True))
    free = tune_problems(LAYERS, config)
    (kernel,) = plan.kernels
    assert kernel.free == free.kernels[0].timing
    ratio = kernel.timing.time_ns / kernel.free.time_ns
    assert ratio == 39 / 34
    assert f"{ratio:.2f} times the" in plan_summary(plan)
    assert "Batch-invariant" not in plan_summary(free)
    assert "batch-invariant" in plan_table(plan).title
    padded = [str(cell) for cell in kernel_table(kernel).columns[1].cells]
    assert all(f"padded to {kernel.micro_batch}" in cell for cell in padded)


def test_padding_counts_as_workspace(here):
    here.costs = {"torch_default": cost(3, 8), "lean": cost(2, 0)}
    padding = 2 * 2 * 81 * 4
    for limit, size in ((0, 1), (2 * padding - 1, 1), (2 * padding, 2), (7 * padding, 6)):
        config = replace(INVARIANT, workspace_limit=limit)
        (kernel,) = tune_problems(LAYERS, config).kernels
        assert kernel.micro_batch == size
        assert kernel.timing.workspace_bytes == (0 if size == 1 else size * padding)


def test_nothing_fits(here):
    here.costs = {"torch_default": cost(3, 1), "lean": cost(2, 0.5)}
    with pytest.raises(PlanError, match=r"no batch-invariant plan .* fits workspace_limit=1 KiB; "):
        tune_problems(LAYERS, replace(INVARIANT, workspace_limit="1KiB"))
    with pytest.raises(PlanError, match=r"needs 512 KiB \(micro-batch 1, lean, with the padding"):
        tune_problems(LAYERS, replace(INVARIANT, workspace_limit="1KiB"))


def test_without_time_torchs_own_is_padded(here):
    del here
    plan = tune_problems(LAYERS, replace(INVARIANT, time_budget_s=0.02, policy="undivided"))
    (kernel,) = plan.kernels
    assert kernel.micro_batch == N
    assert str(kernel.split(5)).endswith(f", padded to {N}")


@pytest.mark.parametrize("op", ["dgrad", "wgrad"])
def test_other_passes(here, op):
    del here
    (kernel,) = tune_problems([("layer", replace(PROBLEM, op=op))], INVARIANT).kernels
    assert kernel.micro_batch
    assert {step.algorithm for step in kernel.split(N - 1).steps} == {"fast"}


@pytest.mark.parametrize("limit", [None, 12 * MIB, 3 * MIB])
@pytest.mark.parametrize("adding_ms", [0.1, 0.3, 1, 5])
@pytest.mark.parametrize("effort", ["normal", "thorough"])
def test_no_algorithm_is_the_fastest_in_all_chunks(here, limit, adding_ms, effort):
    here.costs = {"torch_default": cost(9, 0), "first": cost(1, 1), "later": cost(1.2, 1)}
    here.adding_ns = {"torch_default": MS, "first": int(adding_ms * MS)}
    problem = replace(PROBLEM, op="wgrad")
    config = replace(INVARIANT, workspace_limit=limit, effort=effort)
    (kernel,) = tune_problems([("layer", problem)], config).kernels
    # x of 2 channels and 81 places, in float32; y is not smaller
    times = [
        (-(-N // size) * (of(size)[0] + adding) - adding, size, name)
        for name, adding in (("torch_default", MS), ("first", int(adding_ms * MS)), ("later", 0))
        for of in [here.costs[name]]
        for size in range(1, N + 1)
        if limit is None or of(size)[1] + 2 * 2 * 81 * 4 * size * (size > 1) <= limit
    ]
    assert kernel.algorithms == (min(times)[2],)
    assert kernel.timing.time_ns <= 1.02 * min(times)[0]


def test_a_recording_is_replayed(here, tmp_path):
    del here
    config = replace(INVARIANT, cache=str(tmp_path / "cache"), workspace_limit="9MiB")
    live = tune_problems(LAYERS, config)
    with caches.open(config.cache, "r") as cache:
        replayed = tune_problems(LAYERS, config, None, cache, [RecordedBackend(cache)])
        # other settings than it was made with: not raced, so predicted
        whole = replace(config, workspace_limit="6MiB")
        predicted = tune_problems(LAYERS, whole, None, cache, [RecordedBackend(cache)])
    # how good the best split is known to be, only a device that measured says
    assert [replace(one, notes=()) for one in replayed.kernels] == [
        replace(one, notes=()) for one in live.kernels
    ]
    assert predicted.kernels[0].micro_batch
    assert predicted.kernels[0].timing.workspace_bytes <= 6 * MIB


def test_the_file_holds_it(here, tmp_path, monkeypatch):
    plan = tune_problems(LAYERS, INVARIANT)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert loaded.hash == plan.hash
    free = replace(plan, config=Config(policy="all"))
    assert free.hash != plan.hash
    monkeypatch.setattr("ucudnn.check.open_backend", lambda _: here)
    assert all(finding.is_true is not False for finding in check(plan))
    last = ((1, 0), *plan.kernels[0].last[1:])
    if plan.kernels[0].micro_batch > 1:
        last = (*last[:1], (1, 0), *last[2:])
    with pytest.raises(PlanError, match="must compute every batch in chunks of"):
        replace(plan.kernels[0], last=last)


def test_it_excludes_a_pool():
    with pytest.raises(ConfigError, match="batch_invariant chooses one micro-batch for each"):
        Config(batch_invariant=True, total_workspace="1MiB")


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_the_first_sample_of_a_network_is_the_same_in_every_batch():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(8, 6, 3, 2), nn.Conv2d(6, 4, 1)
    )
    x = torch.randn(64, 3, 10, 9)
    config = Config(batch_invariant=True, effort="quick", workspace_limit="8MiB")
    plan = ucudnn.tune(model, x.clone().requires_grad_(), config)
    assert plan.step_race.rounds
    assert not plan.step_race.dropped
    ucudnn.convert_(model, plan)

    def first(n):
        batch = x[:n].clone().requires_grad_()
        y = model(batch)
        y.square().sum().backward()
        return y[0].detach(), batch.grad[0]

    whole = first(64)
    for n in range(1, 64):
        for ours, in_whole in zip(first(n), whole, strict=True):
            assert torch.equal(ours, in_whole)
