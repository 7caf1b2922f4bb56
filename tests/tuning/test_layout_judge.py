"""The layout of a model: decided by scripted times of steps, by sums, and on real models."""

from __future__ import annotations

import random
from contextlib import contextmanager
from dataclasses import replace

import pytest
from by_hand import kernel, plan_of

from ucudnn.config import Config
from ucudnn.outcomes import LayoutRace
from ucudnn.plan import Timing
from ucudnn.tuning.layout import LayoutJudge, by_sums, entrants, winner
from ucudnn.tuning.step_judge import StepMeter

MIB = 1 << 20
LAYOUTS = {"keep": "nchw", "channels_last": "nhwc"}


def plans_of(own, last, limit=None):
    """Plans in either layout of kernels of these sizes; an empty one changes nothing."""
    plans = {}
    for memory_format, layout, sizes in (("keep", "nchw", own), ("channels_last", "nhwc", last)):
        kernels = [kernel(size, width=3, layout=layout) for size in sizes]
        kernels = kernels or [kernel(4, width=3, layout=layout).by_default(every_batch=True)]
        config = Config(workspace_limit=limit, layout="auto")
        plans[memory_format] = plan_of(*kernels, config=config, memory_format=memory_format)
    return plans


class Machine:
    """Steps of each layout take a base time, less what each planned kernel saves, with noise."""

    def __init__(self, own_ns, last_ns, saved_ns_by_size, noise=0.001):
        self.base = {"keep": own_ns, "channels_last": last_ns}
        self.saved, self.noise = saved_ns_by_size, noise
        self.chance, self.plan, self.runs = random.Random(1), None, 0

    @contextmanager
    def install(self, plan):
        self.plan = plan
        yield
        self.plan = None

    def elapsed_ns(self, run):
        self.layout = None
        run()
        self.runs += 1
        kernels = self.plan.kernels if self.plan else ()
        assert all(one.problem.layout == LAYOUTS[self.layout] for one in kernels)
        saved = sum(self.saved[k.problem.input_size[0]] for k in kernels if not k.is_default)
        noise = self.chance.uniform(1 - self.noise, 1 + self.noise)
        return int((self.base[self.layout] - saved) * noise)

    def judge(self, plans, until=None):
        steps = {which: lambda which=which: setattr(self, "layout", which) for which in plans}
        meter = StepMeter(self.install, self.elapsed_ns, self.peak_bytes, until)
        return LayoutJudge(steps, meter).judge(plans)

    def peak_bytes(self, run):
        run()
        return (7 if self.plan else 9) * (1 if self.layout == "keep" else 2)


CASES = {
    "torch in channels_last": (
        1000,
        700,
        {4: -300, 5: -400},
        "channels_last",
        set(),
    ),
    "the plan in channels_last": (1000, 900, {4: 50, 5: 200}, "channels_last", {5}),
    "the plan in the model's own layout": (1000, 1100, {4: 200, 5: 250}, "keep", {4}),
    "torch in the model's own layout": (1000, 1100, {4: -200, 5: -250}, "keep", set()),
}


@pytest.mark.parametrize("case", CASES)
def test_the_fastest_contestant_is_what_the_plan_stands_for(case):
    own_ns, last_ns, saved, memory_format, changed = CASES[case]
    saved = {size: 1000 * ns for size, ns in saved.items()}
    machine = Machine(1000 * own_ns, 1000 * last_ns, saved)
    plan = machine.judge(plans_of([4], [5]))
    assert plan.memory_format == plan.layout_race.memory_format == memory_format
    assert {k.problem.input_size[0] for k in plan.kernels if not k.is_default} == changed
    assert all(k.problem.layout == LAYOUTS[memory_format] for k in plan.kernels)
    race = plan.layout_race
    assert [one.name for one in race.contestants] == [
        *("torch", "plan", "torch in channels_last", "plan in channels_last")
    ]
    fastest = min(race.contestants, key=lambda one: one.time_ns)
    assert race.contestants[race.winner] == fastest
    assert [one.peak_bytes for one in race.contestants] == [9, 7, 18, 14]
    truth = 1000 * (own_ns if memory_format == "keep" else last_ns)
    assert plan.step_race.torch_ns == pytest.approx(truth, rel=0.01)
    assert not plan.step_race.is_loss
    assert race.rounds >= 3
    assert not race.is_by_sums


def test_a_limit_that_torch_in_channels_last_exceeds_keeps_it_from_winning():
    machine = Machine(1_000_000, 400_000, {4: 0, 5: -800_000})  # the plan there takes 1,200,000
    plan = machine.judge(plans_of([4], [5], limit="2MiB"))
    assert plan.memory_format == "keep"
    table = {one.name: one for one in plan.layout_race.contestants}
    assert not table["torch in channels_last"].is_allowed
    assert not table["torch"].is_allowed
    assert table["plan in channels_last"].is_allowed
    # within the limit both defaults may win
    assert machine.judge(plans_of([4], [5], limit="4MiB")).memory_format == "channels_last"


def test_a_plan_within_the_limit_wins_though_torchs_default_beyond_it_is_faster():
    machine = Machine(1_000_000, 400_000, {4: 0, 5: -200_000})
    plan = machine.judge(plans_of([4], [5], limit="2MiB"))
    assert plan.memory_format == "channels_last"
    assert not plan.kernels[0].is_default
    assert plan.step_race.is_loss


@pytest.mark.parametrize(
    ("last", "chosen"),
    [
        ([90] * 3, "channels_last"),
        ([90, 90, 110], "keep"),
        ([90] * 6 + [300], "channels_last"),
        ([90] * 5 + [101, 300], "keep"),
        ([99.5] * 7, "keep"),
    ],
    ids=str,
)
def test_one_perturbed_round_of_seven_is_forgiven(last, chosen):
    of = entrants(plans_of([], []))
    samples = [[1000] * len(last), [int(10 * one) for one in last]]
    assert of[winner(of, samples)].memory_format == chosen


def test_plans_that_change_nothing_leave_two_contestants():
    plan = Machine(1_000_000, 800_000, {}).judge(plans_of([], []))
    assert plan.memory_format == "channels_last"
    assert all(one.is_default for one in plan.kernels)
    assert plan.step_race.reason == "it changes nothing"
    assert [one.name for one in plan.layout_race.contestants] == ["torch", "torch in channels_last"]


def test_where_the_time_is_over_one_round_decides():
    machine = Machine(1_000_000, 500_000, {4: 0, 5: 0})
    plan = machine.judge(plans_of([4], [5]), until=0.0)
    assert plan.memory_format == "channels_last"
    assert plan.layout_race.rounds == 1
    # Peaks of the four contestants, and a round.
    assert machine.runs == 8


@pytest.mark.parametrize(
    ("own", "last", "chosen"), [(10, 8, "channels_last"), (8, 10, "keep"), (1000, 995, "keep")]
)
def test_sums_decide_where_no_steps_can_be_run(own, last, chosen):
    plans = plans_of([4], [5])
    for which, time_ns in (("keep", own), ("channels_last", last)):
        one = replace(plans[which].kernels[0], timing=Timing(time_ns, 0, 0, 5), layers=("a", "b"))
        plans[which] = replace(plans[which], kernels=(one,))
    race = by_sums(plans, {"keep": 2, "channels_last": 2}, "step_race is off")
    assert race.is_by_sums
    assert race.memory_format == chosen
    assert [one.time_ns for one in race.contestants] == [2 * own, 2 * last]
    assert "by the sums of kernels, because no steps were compared (step_race is off)" in str(race)


def test_sums_of_other_kernels_are_not_compared():
    race = by_sums(plans_of([4], [5]), {"keep": 1, "channels_last": 2}, "step_race is off")
    assert race == LayoutRace(
        reason="not all kernels have a plan in both layouts, and step_race is off"
    )
