"""Effort by worth: what is measured first, what not at all, and what a budget leaves."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from by_hand import linear

from ucudnn.config import Config
from ucudnn.kernels.deadline import EFFORTS, Deadline
from ucudnn.kernels.device import Session
from ucudnn.kernels.limits import Limits
from ucudnn.kernels.shares import Stake, StepShares
from ucudnn.kernels.tune import tune_problems
from ucudnn.measurement import Device
from ucudnn.problem import Problem

MIB = 1 << 20


def problem(size):
    return Problem("fprop", 16, 2, 2, (size, size), (1, 1))


def per_shape(scripted, ms_by_size):
    """A device on which torch's own and a faster algorithm take times by the input's size."""

    backend = scripted(torch_default=linear(1), fast=linear(0.5))
    plain = backend.charged

    def charged(algorithm, one):
        time_ns, workspace = plain(algorithm, one)
        return int(time_ns * ms_by_size[one.input_size[0]]), workspace

    backend.charged = charged
    return backend


def test_a_kernel_below_one_percent_of_the_step_is_looked_at_once(scripted):
    per_shape(scripted, {8: 1.0, 4: 0.005})
    plan = tune_problems([("large", problem(8)), ("small", problem(4))], Config())
    assert not plan.kernel(problem(8)).is_default
    small = plan.kernel(problem(4))
    assert small.is_default
    assert small.timing.samples == 1
    assert any("looked at once" in note for note in small.notes)


@pytest.mark.parametrize("settings", [{"time_budget_s": 600}, {"effort": "thorough"}])
def test_a_budget_that_was_set_and_thorough_tuning_are_also_for_small_gains(scripted, settings):
    per_shape(scripted, {8: 1.0, 4: 0.005})
    layers = [("large", problem(8)), ("small", problem(4))]
    plan = tune_problems(layers, Config(**settings))
    assert not plan.kernel(problem(8)).is_default
    assert not plan.kernel(problem(4)).is_default


@pytest.mark.filterwarnings("ignore::ucudnn.errors.UntunedWarning")
@pytest.mark.parametrize(
    ("limit", "last", "planned"),
    [
        (4 * MIB, None, 2),
        (4 * MIB, Deadline.never(), 2),
        (4 * MIB, Deadline.within(0.0), 0),
        (None, None, 0),
    ],
)
def test_after_a_deadline_only_kernels_over_a_limit_go_on_to_their_first_plan(
    scripted, limit, last, planned
):
    scripted(torch_default=linear(1, 1), lean=linear(3, 0))
    layers, over = [("a", problem(8)), ("b", problem(4))], Deadline.within(0.0)
    config = Config(workspace_limit=limit)
    plan = tune_problems(layers, config, deadline=over, last=last)
    assert len(plan.kernels) == planned
    assert all(kernel.timing.workspace_bytes <= limit for kernel in plan.kernels)


def test_a_default_budget_does_not_count_the_start_of_a_process_to_measure_in(
    scripted, monkeypatch
):
    began, ends = 100.0, []
    monkeypatch.setattr("ucudnn.kernels.deadline.monotonic", lambda: began)
    monkeypatch.setattr(Session, "started_s", 8.0)
    stop_at = Session.stop_at
    monkeypatch.setattr(
        Session, "stop_at", lambda *args: (ends.append(args[1].at_s), stop_at(*args))
    )
    scripted(torch_default=linear(1))
    for seconds, end_s in ((None, 3708.0), (10.0, 110.0)):
        ends.clear()
        tune_problems([("layer", problem(8))], Config(time_budget_s=seconds))
        assert ends[0] == end_s


@pytest.mark.filterwarnings("ignore::ucudnn.errors.UntunedWarning")
def test_no_default_time_budget_leaves_a_kernel_over_the_limit(scripted, monkeypatch):
    hurried = replace(EFFORTS["quick"], least_budget_s=0.0, budget_steps=0)
    monkeypatch.setitem(EFFORTS, "quick", hurried)
    scripted(torch_default=linear(1, 1))
    # 16 samples at once do not fit
    layers, limit = [("layer", problem(8))], 4 * MIB
    (kernel,) = tune_problems(layers, Config(workspace_limit=limit, effort="quick")).kernels
    assert kernel.timing.workspace_bytes <= limit
    # a time that the user sets holds
    hasty = Config(workspace_limit=limit, effort="quick", time_budget_s=1e-9)
    assert tune_problems(layers, hasty).kernels == ()


def test_the_default_budget_is_told_and_follows_from_the_step(scripted, monkeypatch):
    usual = replace(EFFORTS["normal"], least_budget_s=10.0, most_budget_s=45.0)
    monkeypatch.setitem(EFFORTS, "normal", usual)
    backend = per_shape(scripted, {8: 10.0})
    events = []
    tune_problems([("layer", problem(8))], Config(), events.append)
    (told,) = {event.budget_s for event in events if event.budget_s is not None}
    assert told == pytest.approx(100 * 0.160)  # 16 samples of 10 ms
    events.clear()
    backend.device = lambda: Device("cuda", "scripted")
    tune_problems([("layer", problem(8))], Config(), events.append)
    assert {event.budget_s for event in events} == {None, 45.0}
    events.clear()
    tune_problems([("layer", problem(8))], Config(effort="thorough"), events.append)
    assert {event.budget_s for event in events} == {None}


def test_time_is_kept_for_every_kernel_that_must_have_a_plan():
    now = [0.0]
    gains_ns, allotted = [10_000, 1_000, 100, 10, 1, 1], []
    waiting = [problem(1 + place) for place in range(len(gains_ns))]
    tunings = {one: SimpleNamespace(step_ns=ns) for one, ns in zip(waiting, gains_ns, strict=True)}
    shares = StepShares(None, tunings, Limits(None))
    shares.stakes = {one: Stake(ns, 0, True) for one, ns in zip(waiting, gains_ns, strict=True)}
    deadline = Deadline.within(12.0, clock=lambda: now[0])
    turns = []
    for group, part in shares.in_turn(deadline, waiting):
        turns += group
        allotted.append(part.left_s())
        now[0] = part.at_s
    assert turns == waiting
    # Half of the time is kept, in equal parts; the largest gain has most of the other half.
    assert min(allotted) >= 0.999
    assert allotted[0] > 6
    assert now[0] <= 12.001
