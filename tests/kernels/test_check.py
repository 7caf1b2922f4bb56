"""`check` says what of a plan no longer holds, on a machine whose clock the test writes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from by_hand import linear

from ucudnn.backends import open_backend
from ucudnn.check import check
from ucudnn.config import Config
from ucudnn.errors import ConfigError, PlanError, UnsupportedError
from ucudnn.execution.validity import require_real
from ucudnn.kernels.tune import tune_problems
from ucudnn.measurement import Device
from ucudnn.outcomes import Origin
from ucudnn.plan import Plan
from ucudnn.problem import Problem

MIB = 1 << 20
MS = 1_000_000
SMALL, LARGE = (Problem("fprop", 8, 2, 2, (side, side), (1, 1)) for side in (4, 9))


@pytest.fixture
def here(scripted, monkeypatch):
    """The machine, whose `fast` takes a third of torch's time and whose limit lets it split."""
    backend = scripted(torch_default=linear(3, 0.5), fast=linear(1, 2))
    monkeypatch.setattr("ucudnn.check.open_backend", lambda _: backend)
    return backend


@pytest.fixture
def plan(here) -> Plan:
    layers = [("a", SMALL), ("b", LARGE), ("c", LARGE)]
    found = tune_problems(layers, Config(workspace_limit="4MiB"))
    assert {str(found.split(problem)) for problem in (SMALL, LARGE)} == {"4x2 fast"}
    return found


def said(plan, **more) -> dict[str, tuple[bool | None, str]]:
    return {one.about: (one.is_true, one.said) for one in check(plan, **more)}


def test_a_new_plan_is_true(plan):
    found = said(plan)
    names = ["device", "versions", "conditions", "build", "canary 1", "canary 0"]
    assert list(found) == names  # the larger saving first: two layers run kernel 1
    assert all(is_true for is_true, _ in found.values())
    assert "torch's own convolution 3.00 times that" in found["canary 1"][1]
    assert "3.00 when it was tuned" in found["canary 1"][1]


def test_nothing_is_written_to_the_cache(plan, here):
    here.runs.clear()
    said(plan)
    assert here.runs
    here.runs.clear()
    assert tune_problems([("a", SMALL), ("b", LARGE)], Config(workspace_limit="4MiB"))
    assert here.runs == []


def test_canaries_are_as_many_as_asked_for(plan, here):
    here.runs.clear()
    assert said(plan, canaries=0)["canary"] == (None, "not timed: none was asked for")
    assert here.runs == []
    assert [name for name in said(plan, canaries=1) if name.startswith("canary")] == ["canary 1"]
    with pytest.raises(ConfigError, match="canaries must be at least 0, got -1"):
        said(plan, canaries=-1)


def test_a_plan_of_torchs_own_has_nothing_to_time(here, scripted):
    here.costs = {"torch_default": linear(1, 0)}
    plan = tune_problems([("a", SMALL)], Config())
    assert said(plan)["canary"] == (None, "not timed: every kernel is torch's own convolution")


def test_another_device_ends_it(plan):
    found = said(replace(plan, device=Device("cpu", "abacus", cores=10)))
    assert list(found) == ["device"]
    is_true, sentence = found["device"]
    assert not is_true
    assert "the plan is for abacus, 10 cores, this is scripted" in sentence


def test_a_device_that_is_not_here_ends_it(plan, monkeypatch):
    def refuse(_):
        raise UnsupportedError("there is no NVIDIA GPU here")

    monkeypatch.setattr("ucudnn.check.open_backend", refuse)
    ((name, (is_true, sentence)),) = said(plan).items()
    assert (name, is_true) == ("device", False)
    assert "there is no NVIDIA GPU here" in sentence


@pytest.mark.parametrize(
    ("room", "field", "value", "sentence"),
    [
        ("software", "torch", "1.0", "torch 1.0 there and 0 here"),
        ("software", "cudnn", "9.1", "cudnn 9.1 there and unknown here"),
        ("conditions", "threads", 64, "threads 64 there and 1 here"),
        ("conditions", "allocator", "tcmalloc", "allocator tcmalloc there and"),
    ],
)
def test_what_is_different_here_is_named(plan, room, field, value, sentence):
    other = replace(plan, **{room: replace(getattr(plan, room), **{field: value})})
    found = said(other)
    name = "versions" if room == "software" else room
    assert found[name][0] is False
    assert sentence in found[name][1]
    assert [one for one, (is_true, _) in found.items() if is_true is False] == [name]


def test_an_algorithm_that_is_no_longer_there(plan, here, monkeypatch):
    known = here.executable

    def executable(problem, algorithm):
        if algorithm == "fast":
            raise UnsupportedError("fast was removed")
        return known(problem, algorithm)

    monkeypatch.setattr(here, "executable", executable)
    found = said(plan)
    assert found["build"][0] is False
    assert "kernel 0, fprop" in found["build"][1]
    assert "fast was removed (and 1 more)" in found["build"][1]


def test_an_algorithm_that_does_not_exist_at_one_smaller_batch(plan, here):
    kernel = plan.kernels[0]
    names = (*kernel.algorithms, "plan[8 fast] run first")
    odd = replace(kernel, algorithms=names, alone=(len(names) - 1, *kernel.alone[1:]))
    is_true, sentence = said(replace(plan, kernels=(odd, plan.kernels[1])), canaries=0)["build"]
    assert not is_true
    assert "plan[8 fast] run first does not compute" in sentence
    assert "at batch 1: there is none" in sentence
    with pytest.raises(PlanError, match=r"the plan of .* cannot be followed: plan\[8 fast\]"):
        require_real([odd], here)
    require_real([kernel], here)


@pytest.mark.parametrize(
    ("ms", "ratio", "reason"),
    [(4, "0.75", "it fits and is faster now"), (2, "1.50", "is much slower than it was")],
)
def test_a_kernel_that_became_slower(plan, here, ms, ratio, reason):
    here.costs["fast"] = linear(ms, 2)
    found = said(plan)
    assert found["canary 0"][0] is found["canary 1"][0] is False
    assert f"{ratio} times that" in found["canary 0"][1]
    assert f"{reason}: tune again" in found["canary 0"][1]


def test_slower_than_torchs_is_no_fault_where_torchs_does_not_fit(here):
    here.costs |= {"fast": linear(4, 2), "torch_default": lambda size: (3 * size * MS, 8 * MIB)}
    plan = tune_problems([("a", SMALL)], Config(workspace_limit="4MiB"))
    found = said(plan)
    assert found["canary 0"][0] is True
    assert "0.75 times that" in found["canary 0"][1]


def test_a_kernel_that_needs_more_workspace_than_the_limit(plan, here):
    here.costs["fast"] = linear(1, 3)
    assert said(plan)["canary 0"][0] is False
    assert "needs 6 MiB of workspace, over 4 MiB" in said(plan)["canary 0"][1]


def test_a_kernel_that_fails(plan, here):
    here.costs["fast"] = lambda _: (None, 0)
    assert said(plan)["canary 0"][0] is False
    assert "cannot be run: fast does not work" in said(plan)["canary 0"][1]


def test_of_a_pool_a_kernel_may_take_what_is_left(here):
    here.costs["torch_default"] = linear(3, 4)
    layers = [("a", SMALL), ("b", LARGE), ("c", LARGE)]
    plan = tune_problems(layers, Config(total_workspace="14MiB"))
    assert plan.workspace_bytes == 12 * MIB
    assert said(plan)["canary 1"][0] is True
    here.costs["fast"] = linear(1, 2.5)  # of each call 5 MiB of 4, and 2 MiB are left for two calls
    assert said(plan)["canary 1"][0] is True
    here.costs["fast"] = linear(1, 2.6)
    assert said(plan)["canary 1"][0] is False


def test_a_partial_plan_is_said_to_be_one_and_no_reason_to_say_no():
    backend = open_backend("torch_cpu")
    origin = Origin(left_out=("fprop conv1d(3->4, k3, 9) at batch 2",))
    plan = Plan((), backend.device(), backend.software(), backend.conditions(), Config())
    assert "complete" not in {finding.about for finding in check(plan, 0)}
    findings = {one.about: one for one in check(replace(plan, origin=origin), 0)}
    assert findings["complete"].is_true is None
    assert "it lacks 1 kernel, or some batches of it" in findings["complete"].said
