"""Effort by worth: what is measured first, what not at all, and what a budget leaves."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from by_hand import linear

from ucudnn.config import Config
from ucudnn.kernels.budget import EFFORTS, Budget, Effort
from ucudnn.kernels.tuner import tune_problems
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
@pytest.mark.parametrize("seconds", [1000, 1e-9])
def test_what_is_reserved_for_steps_goes_first_to_kernels_over_their_limit(
    scripted, monkeypatch, seconds
):
    begin = Budget.begin_tuning

    def begin_too_late(self, *arguments):
        begin(self, *arguments)
        self.deadline = 0.0  # all but the reserve

    monkeypatch.setattr(Budget, "begin_tuning", begin_too_late)
    scripted(torch_default=linear(1, 1))
    config = Config(workspace_limit=4 * MIB, time_budget_s=seconds)
    plan = tune_problems([("layer", problem(8))], config)
    assert len(plan.kernels) == (seconds > 1)


@pytest.mark.parametrize(
    ("reserved_s", "now_s", "race_s", "deadline_s"),
    [(30, 10, 25, 70), (30, 10, 35, 100), (30, 80, 15, 70), (30, 80, 25, 100), (0, 10, 0, 100)],
)
def test_what_is_reserved_for_steps_stays_so_if_they_fit(
    monkeypatch, reserved_s, now_s, race_s, deadline_s
):
    """Of 100 s; the race of steps can begin when kernels are done, but not before now."""
    clock = [0.0]
    monkeypatch.setattr("ucudnn.kernels.budget.monotonic", lambda: clock[0])
    budget = Budget(100.0)
    budget.begin_tuning(100.0, reserved_s)
    clock[0] = now_s
    assert budget.go_on(race_s)
    assert budget.deadline == deadline_s


def test_a_default_budget_does_not_count_the_start_of_a_process_to_measure_in(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("ucudnn.kernels.budget.monotonic", lambda: clock[0])
    for seconds, deadline_s in ((None, 18.0), (10.0, 10.0)):
        clock[0] = 0.0
        budget = Budget(seconds)
        clock[0] = 9.0  # of which starting took eight
        budget.begin_tuning(10.0, 0.0, started_s=8.0)
        assert budget.deadline == deadline_s


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


@pytest.mark.filterwarnings("ignore::ucudnn.errors.UntunedWarning")
@pytest.mark.parametrize(
    ("budgets", "extended"),
    [([0.0, 1000.0], [1000.0]), ([0.0, 0.0], [0.0, None]), ([None, None], [])],
)
def test_kernels_without_a_plan_get_a_second_default_budget(
    scripted, monkeypatch, budgets, extended
):
    """What is over the limit gets as long again, and only then whatever it takes."""
    answers, seen = iter(budgets), []
    monkeypatch.setattr(Effort, "budget_s", lambda *_, **__: next(answers))
    extend = Budget.extend
    monkeypatch.setattr(
        Budget, "extend", lambda self, seconds: (seen.append(seconds), extend(self, seconds))
    )
    scripted(torch_default=linear(1, 1))
    plan = tune_problems([("a", problem(8)), ("b", problem(4))], Config(workspace_limit=4 * MIB))
    assert len(plan.kernels) == 2
    assert seen == extended


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


def test_time_is_kept_for_every_kernel_that_must_have_a_plan(monkeypatch):
    now, session = [0.0], SimpleNamespace()
    monkeypatch.setattr("ucudnn.kernels.budget.monotonic", lambda: now[0])
    gains_ns, allotted = [10_000, 1_000, 100, 10, 1, 1], []
    budget = Budget(12.0)
    budget.keep_for(len(gains_ns))
    for begun, gain_ns in enumerate(gains_ns):
        waiting = len(gains_ns) - begun
        budget.allot(session, gain_ns / sum(gains_ns[begun:]), 1, waiting)
        allotted.append(session.race_until - now[0])
        now[0] = session.race_until
    # Half of the time is kept, in equal parts; the largest gain has most of the other half.
    assert min(allotted) >= 0.999
    assert allotted[0] > 6
    assert now[0] <= 12.001
