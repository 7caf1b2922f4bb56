"""A deterministic plan holds no algorithm whose result may vary, and repeats a training bitwise."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest
import torch
from torch import nn

import ucudnn
from ucudnn import cache as caches
from ucudnn.backends.recorded import RecordedBackend
from ucudnn.check import check
from ucudnn.config import Config
from ucudnn.errors import PlanError
from ucudnn.kernels import choose
from ucudnn.kernels.tune import tune_problems
from ucudnn.problem import Problem
from ucudnn.steps.judge import has_default

MS, MIB = 1_000_000, 1 << 20
PROBLEM = Problem("fprop", 8, 2, 2, (9, 9), (1, 1))
LAYERS = [("layer", PROBLEM)]


def cost(ms_per_sample):
    return lambda size: (int(ms_per_sample * size * MS), MIB)


@pytest.fixture
def here(scripted, monkeypatch):
    """A machine whose fastest algorithm varies, as those do that a test adds to `varying`."""
    backend = scripted(torch_default=cost(3), exact=cost(2), atomic=cost(1))
    backend.varying = {"atomic"}
    listed = backend.candidates

    def candidates(problem, adds_bias=False):
        return tuple(
            replace(one, is_deterministic=False) if one.algorithm in backend.varying else one
            for one in listed(problem, adds_bias)
        )

    monkeypatch.setattr(backend, "candidates", candidates)
    return backend


def algorithms(plan):
    return {chunk.algorithm for chunk in plan.kernels[0].split(8).chunks}


def test_what_varies_is_not_planned(here):
    assert algorithms(tune_problems(LAYERS, Config())) == {"atomic"}
    plan = tune_problems(LAYERS, Config(deterministic=True))
    assert algorithms(plan) == {"exact"}
    assert "atomic" not in plan.kernels[0].algorithms


def test_the_default_follows_torch_when_tuning_begins(here):
    config = Config()
    torch.use_deterministic_algorithms(True)
    try:
        plan = tune_problems(LAYERS, config)
        assert plan.config.deterministic is True
        assert algorithms(plan) == {"exact"}
        assert algorithms(tune_problems(LAYERS, Config(deterministic=False))) == {"atomic"}
    finally:
        torch.use_deterministic_algorithms(False)
    assert algorithms(tune_problems(LAYERS, config)) == {"atomic"}


def test_torchs_own_that_varies_is_a_baseline_and_never_the_plan(here):
    here.costs = {"torch_default": cost(1), "exact": cost(2)}
    here.varying = {"torch_default"}
    plan = tune_problems(LAYERS, Config(deterministic=True))
    kernel = plan.kernels[0]
    assert {chunk.algorithm for chunk in kernel.split(8).chunks} == {"exact"}
    assert kernel.default.time_ns == 8 * MS
    # nor does a race of whole steps give the kernel back to it
    assert not has_default(plan, kernel)
    assert has_default(plan, replace(kernel, default_is_deterministic=True))
    # neither is it what runs where there is no time for anything else
    with pytest.warns(UserWarning, match="1 kernel is not in the plan"):
        plan = tune_problems(LAYERS, Config(deterministic=True, time_budget_s=1e-9))
    assert plan.kernels == ()


def test_where_all_vary_there_is_no_plan(here):
    here.varying = set(here.costs)
    with pytest.raises(PlanError, match="no deterministic algorithm computes fprop conv2d"):
        tune_problems(LAYERS, Config(deterministic=True))


def test_where_the_deterministic_splits_fail_as_whole_calls_the_error_says_so(here, monkeypatch):
    here.varying = {"torch_default", "atomic"}

    def race(*arguments):
        here.costs = here.costs | {"exact": lambda _: (None, 0)}
        return race_of_splits(*arguments)

    race_of_splits = choose.race_calls
    monkeypatch.setattr(choose, "race_calls", race)
    with pytest.raises(PlanError, match="every deterministic split of fprop .* failed as a whole"):
        tune_problems(LAYERS, Config(deterministic=True, policy="undivided"))


def test_a_recording_is_replayed_without_what_varies(here, tmp_path):
    config = Config(cache=str(tmp_path / "cache"))
    tune_problems(LAYERS, config)
    tune_problems(LAYERS, replace(config, deterministic=True))
    with caches.open(config.cache, "r") as cache:
        recorded = RecordedBackend(cache)
        plans = [
            tune_problems(LAYERS, replace(config, deterministic=flag), None, cache, recorded)
            for flag in (False, True)
        ]
    assert [algorithms(plan) for plan in plans] == [{"atomic"}, {"exact"}]


def test_check_says_what_varies_by_now(here, monkeypatch):
    monkeypatch.setattr("ucudnn.check.open_backend", lambda _: here)
    plan = tune_problems(LAYERS, Config(deterministic=True))
    assert {one.about: one.is_true for one in check(plan, 0)}["determinism"] is True
    here.varying = {"exact"}
    (found,) = [one for one in check(plan, 0) if one.about == "determinism"]
    assert found.is_true is False
    assert "exact of fprop conv2d" in found.said
    monkeypatch.setattr("ucudnn.execution.runner.open_backend", lambda _: here)
    with pytest.warns(UserWarning, match="the plan is deterministic, and exact of fprop"):
        ucudnn.installed(plan)


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 7, 2, 3),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, groups=4),
        nn.Conv2d(16, 24, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(24, 24, 5, padding=2, groups=24),
        nn.Conv2d(24, 16, 1, 2),
        nn.ConvTranspose2d(16, 8, 3, 2, 1),
    )


def trained(model, plan, steps=10):
    """The weights after some steps by a plan, of a copy."""
    model = copy.deepcopy(model)
    ucudnn.convert_(model, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    numbers = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 3, 21, 19, generator=numbers)).square().mean().backward()
        optimizer.step()
    return [value.clone() for value in model.state_dict().values()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tuned", 0, 1, 2])
def test_two_trainings_give_the_same_bits(random_plan, kind):
    model, x = network(), torch.randn(4, 3, 21, 19)
    config = Config(deterministic=True, effort="quick", step_race=False, workspace_limit="256KiB")
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        if kind == "tuned":
            plan = ucudnn.tune(model, x, config)
        else:  # any split and any algorithm
            plan = random_plan(model, x, random.Random(kind), config)
        runs = [trained(model, plan) for _ in range(2)]
    finally:
        torch.set_num_threads(threads)
    # Which algorithms are the fastest here is no matter of this test.
    assert kind == "tuned" or any(not kernel.is_default for kernel in plan.kernels)
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)
