"""The last word on a plan: whole steps, on a device with a scripted clock and on real models.

Then: what rounds of steps show, of whole steps and of the kernels inside them; and the layout of a
model, by scripted times of steps.
"""

from __future__ import annotations

import itertools
import random
from contextlib import contextmanager
from dataclasses import replace
from math import inf

import pytest
import torch
from by_hand import in_chunks, kernel, plan_of
from torch import nn

import ucudnn
from ucudnn.backends import Span, open_backend
from ucudnn.config import Config
from ucudnn.errors import TuningInterruptedError
from ucudnn.kernels.deadline import Deadline
from ucudnn.measurement import Device
from ucudnn.plan import Timing
from ucudnn.steps.judge import Judge, StepJudge, judge_layouts, layout_ways, winner
from ucudnn.steps.race import StepMeter, StepTimes, raced_inside

MIB = 1 << 20
STEP_NS = 1_000_000
KERNEL_NS = 50_000


def limited(*kernels, limit="2MiB"):
    return plan_of(*kernels, config=Config(workspace_limit=limit))


class Machine:
    """Steps take a base time and what each planned kernel adds to it or saves, with noise.

    Inside them, kernels that are timed take what they save there, with the noise of each.
    """

    def __init__(self, saved_ns_by_size, noise=0.001, inside_ns_by_size=None, seed=1):
        self.saved, self.noise = saved_ns_by_size, noise
        self.inside = saved_ns_by_size if inside_ns_by_size is None else inside_ns_by_size
        self.chance, self.plan, self.races = random.Random(seed), None, []
        self.now_s, self.is_timed = 0.0, False

    def device(self):
        return Device("cpu", "scripted")

    @contextmanager
    def following(self, plan, is_timed=True):
        kernels_ns, self.plan = {}, plan
        self.races.append(self.sizes(plan))
        yield kernels_ns
        self.plan = None
        for size, saved in self.inside.items() if is_timed and self.is_timed else ():
            time_ns = KERNEL_NS - saved * (size in self.sizes(plan))
            kernels_ns[kernel(size).problem] = int(time_ns * self.chance.uniform(0.98, 1.02))

    @staticmethod
    def sizes(plan):
        kernels = plan.kernels if plan else ()
        return {one.problem.input_size[0] for one in kernels if not one.is_default}

    def noisy_ns(self, base_ns):
        saved = sum(self.saved[size] for size in self.sizes(self.plan))
        return int((base_ns - saved) * self.chance.uniform(1 - self.noise, 1 + self.noise))

    def elapsed_ns(self, run):
        run()
        time_ns = self.noisy_ns(STEP_NS)
        self.now_s += time_ns / 1e9
        return time_ns

    def clock_s(self):
        return self.now_s

    def judge(self, plan, until_ns=None, is_timed=False, step_ns=0):
        self.is_timed = is_timed
        seconds = inf if until_ns is None else until_ns / 1e9
        deadline = Deadline.within(seconds, clock=self.clock_s)
        return StepJudge(lambda: None, self.meter(deadline, step_ns)).judge(plan)

    def meter(self, deadline, step_ns=0):
        """A meter of this machine, on which no convolution is really computed."""
        meter = StepMeter(self, [], deadline, step_ns)
        meter.following = self.following
        return meter

    def span(self, run):
        run()
        return Span(7 if self.plan else 9, 0)


def test_a_plan_that_wins_stays_and_says_by_how_much():
    machine = Machine({4: 100_000, 8: 200_000})
    plan = plan_of(kernel(4), kernel(8))
    judged = machine.judge(plan)
    assert judged.kernels == plan.kernels
    assert judged.hash == plan.hash
    race = judged.step_race
    assert race.high < 1
    assert race.ratio == pytest.approx(0.7, abs=0.01)
    assert (race.torch_peak_bytes, race.plan_peak_bytes) == (9, 7)


@pytest.mark.parametrize("guilty", [{4}, {8, 32}, {4, 8, 16, 32, 64}, {64}])
def test_kernels_that_slow_a_step_down_are_found_by_halving(guilty):
    saved = {size: -90_000 if size in guilty else 10_000 for size in (4, 8, 16, 32, 64)}
    machine = Machine(saved)
    judged = machine.judge(plan_of(*map(kernel, saved)))
    assert machine.sizes(judged) == set(saved) - guilty
    assert len(judged.step_race.dropped) == len(guilty)
    assert not judged.step_race.is_loss
    for one in judged.kernels:
        if one.problem.input_size[0] in guilty:
            assert one.split(1).is_default
            assert one.timing == one.default


def test_a_limit_that_torchs_own_exceeds_is_kept_whatever_it_costs():
    machine = Machine({4: -500_000, 8: -100_000})
    frugal, free = kernel(4), replace(kernel(8), default=Timing(20, 0, MIB, 5))
    judged = machine.judge(limited(frugal, free))
    assert machine.sizes(judged) == {4}
    assert judged.step_race.is_loss


def test_what_is_given_back_takes_no_more_of_a_pool():
    machine = Machine({4: -500_000, 8: -500_000})
    frugal, generous = (
        kernel(size, timing=Timing(10, 0, mib * MIB, 5)) for size, mib in ((4, 1), (8, 4))
    )
    plan = plan_of(frugal, generous, config=Config(total_workspace="5MiB"))
    judged = machine.judge(plan)
    assert machine.sizes(judged) == {4}
    assert judged.workspace_bytes == plan.workspace_bytes


def test_a_gain_that_noise_hides_is_not_kept():
    machine = Machine({4: -2_000, 8: 1_000}, noise=0.02, seed=0)
    judged = machine.judge(plan_of(kernel(4), kernel(8)))
    assert all(one.is_default for one in judged.kernels)
    assert (judged.step_race.ratio, len(judged.step_race.dropped)) == (1.0, 2)


def test_what_the_noise_of_steps_hides_is_seen_inside_them():
    saved = {4: 10_000, 8: 15_000}
    plan, kept, kept_blindly = plan_of(kernel(4), kernel(8)), 0, 0
    for seed in range(20):
        judged = Machine(saved, noise=0.1, seed=seed).judge(plan, is_timed=True)
        # Steps may seem to be slower, by chance.
        if judged.kernels == plan.kernels:
            kept += 1
            ratio, low, high = judged.step_race.inside
            assert low <= ratio <= high < 1
            assert ratio == pytest.approx(1 - 25_000 / (2 * KERNEL_NS), abs=0.03)
        blind = Machine(saved, noise=0.1, seed=seed).judge(plan)
        kept_blindly += blind.kernels == plan.kernels
        assert blind.step_race.inside is None
    assert kept_blindly < 10
    assert kept > 15


@pytest.mark.parametrize("guilty", [{4}, {8, 32}, {4, 8, 16, 32, 64}, {64}])
def test_kernels_that_are_slower_inside_steps_are_given_back_without_halving(guilty):
    saved = {size: -25_000 if size in guilty else 5_000 for size in (4, 8, 16, 32, 64)}
    machine = Machine(saved, noise=0.1)
    judged = machine.judge(plan_of(*map(kernel, saved)), is_timed=True)
    assert machine.sizes(judged) == set(saved) - guilty
    assert not judged.step_race.is_loss
    # Steps were run by torch, the plan and what is left of it, and by no other part of it.
    assert {*map(frozenset, machine.races)} <= {
        *map(frozenset, (set(), saved, set(saved) - guilty))
    }


def test_a_loss_that_is_spread_over_all_kernels_is_not_kept_by_halves():
    saved = dict.fromkeys((4, 8, 16, 32), -8_000)
    for seed in range(10):
        inside = dict.fromkeys(saved, 20_000)
        machine = Machine(saved, noise=0.004, inside_ns_by_size=inside, seed=seed)
        judged = machine.judge(plan_of(*map(kernel, saved)), is_timed=True)
        assert not judged.step_race.is_loss
        assert len(machine.sizes(judged)) < 4


def test_steps_that_seem_to_lose_are_raced_on_though_their_kernels_win():
    """Three rounds that are slower by the plan, 3 to 30 %, and equal ones from then on."""
    machine = Machine({4: 0}, inside_ns_by_size={4: 20_000})
    slower = iter([1, 1, 1.03, 1.3, 1.1])  # after the peaks

    def elapsed_ns(run):
        run()
        return int(STEP_NS * (next(slower, 1.0) if machine.plan else 1.0))

    machine.elapsed_ns = elapsed_ns
    assert machine.judge(plan_of(kernel(4)), is_timed=True).step_race.rounds > 3


def test_what_loses_only_beside_others_is_given_back_altogether():
    class Crowded(Machine):
        def elapsed_ns(self, run):
            alone = self.plan is None or len(self.sizes(self.plan)) != 2
            return super().elapsed_ns(run) + (0 if alone else 200_000)

    saved = {4: 10_000, 8: 10_000, 16: -90_000}
    judged = Crowded(saved).judge(plan_of(*map(kernel, saved)), is_timed=True)
    assert all(one.is_default for one in judged.kernels)
    assert len(judged.step_race.dropped) == 3


def test_within_a_limit_kernels_are_compared_inside_steps_of_what_must_stay():
    machine = Machine({4: -500_000, 8: 5_000, 16: -10_000, 32: 4_000}, noise=0.05)
    free = [replace(kernel(size), default=Timing(20, 0, MIB, 5)) for size in (8, 16, 32)]
    judged = machine.judge(limited(kernel(4), *free), is_timed=True)
    assert machine.sizes(judged) == {4, 8, 32}


def test_where_the_time_is_over_nothing_undecided_stays():
    machine = Machine({4: -300_000, 8: 100_000})
    # Time for peaks and a round, which loses 20 %, and not for halves.
    judged = machine.judge(plan_of(kernel(4), kernel(8)), until_ns=5.5 * STEP_NS)
    assert machine.sizes(judged) == set()


def test_further_steps_are_expected_to_take_as_long_as_the_slower_way():
    machine = Machine({4: -STEP_NS}, noise=0.0)
    meter = machine.meter(Deadline.within(9.5 * STEP_NS / 1e9, clock=machine.clock_s))
    for plan in (None, plan_of(kernel(4))):
        meter.times(lambda: None, plan)
    # Of 9.5 steps by torch 6.5 are left; a step by the plan takes as long as two.
    assert [meter.is_over(steps) for steps in (3, 4)] == [False, True]


@pytest.mark.parametrize("steps", [5, 8, 11, 30])
def test_kernels_that_gain_beside_one_that_must_stay_are_kept_however_short_the_time(steps):
    machine = Machine({4: -500_000, 8: 80_000, 16: 60_000})
    free = [replace(kernel(size), default=Timing(20, 0, MIB, 5)) for size in (8, 16)]
    judged = machine.judge(limited(kernel(4), *free), steps * STEP_NS * 3 // 2)
    assert machine.sizes(judged) == {4, 8, 16}


@pytest.mark.parametrize("steps", [0, 4, 7, 9, 12, 20, 40, 100])
@pytest.mark.parametrize("limit", [None, "2MiB"])
def test_no_race_begins_that_would_not_end_in_time(steps, limit):
    machine = Machine({4: -500_000, 8: 50_000, 16: -100_000, 32: 40_000})
    free = [replace(kernel(size), default=Timing(20, 0, MIB, 5)) for size in (8, 16, 32)]
    # Steps by the first kernel take half as long again.
    step_ns = STEP_NS * 3 // 2
    plan = machine.judge(limited(kernel(4), *free, limit=limit), steps * step_ns, step_ns=step_ns)
    assert machine.now_s * 1e9 <= steps * step_ns * 1.001
    # Peaks, which warm up, and one round.
    is_judged = steps >= 4
    assert (not plan.step_race.reason or bool(plan.step_race.dropped)) == is_judged
    assert machine.sizes(plan) >= ({4} if limit else set())
    assert 4 not in machine.sizes(plan) or limit or not is_judged
    if steps == 100:
        assert machine.sizes(plan) == ({4, 8, 32} if limit else {8, 32})


@pytest.mark.parametrize(
    ("saved_ns", "stays"), [(50_000, True), (-50_000, True), (-200_000, False)]
)
def test_less_than_three_rounds_give_back_only_what_clearly_loses(saved_ns, stays):
    machine = Machine({4: saved_ns})
    # Time for two peaks and a round, and for most of another one.
    judged = machine.judge(plan_of(kernel(4)), until_ns=5.7 * STEP_NS)
    assert machine.sizes(judged) == ({4} if stays else set())
    assert judged.step_race.rounds == 1
    assert not judged.step_race.is_loss


def test_no_step_is_run_where_not_even_the_convolutions_fit(monkeypatch):
    monkeypatch.setattr("ucudnn.steps.judge.Steps", None)
    slow = replace(kernel(4), default=Timing(2 * 10**9, 0, 0, 5))
    judge = Judge(nn.Conv2d(2, 2, 1), torch.ones(2, 2, 4, 4), Config(), Deadline.within(9))
    judged_plan = judge.judge(plan_of(slow))
    assert judged_plan.step_race.reason == "the time budget has no room for them"
    assert judged_plan.layout_race.reason == "the time budget was used up"


def test_a_plan_that_changes_nothing_runs_no_step():
    plan = plan_of(kernel(4).by_default(every_batch=True))
    found = Judge(nn.Conv2d(2, 2, 1), torch.ones(2, 2, 4, 4), Config()).judge(plan)
    assert found.step_race.reason == "it changes nothing"


@pytest.mark.slow
def test_a_race_that_is_off_says_so():
    config = Config(policy="undivided", step_race=False)
    plan = ucudnn.tune(nn.Conv2d(2, 2, 3), torch.ones(1, 2, 8, 8), config)
    assert plan.step_race.reason == "step_race is off"


@pytest.mark.slow
def test_a_model_that_cannot_run_a_step_is_planned_all_the_same(monkeypatch):
    class Fails(nn.Conv2d):
        def forward(self, x):
            y = super().forward(x)
            if type(y) is torch.Tensor:
                raise RuntimeError("only on real tensors\nof which it says more")
            return y

    plan = ucudnn.tune(Fails(2, 2, 3), torch.ones(1, 2, 8, 8), Config(policy="undivided"))
    assert plan.kernels
    assert plan.step_race.reason == "a step could not be computed (only on real tensors)"


def test_ctrl_c_in_the_race_keeps_the_plan(monkeypatch):
    moments = itertools.count()

    class Interrupted(nn.Conv2d):
        def forward(self, x):
            y = super().forward(x)
            if type(y) is torch.Tensor and next(moments) == 2:
                raise KeyboardInterrupt
            return y

    plan_of_one = plan_of(kernel(4))
    monkeypatch.setattr("ucudnn.steps.tune.tune_problems", lambda *_, **__: plan_of_one)
    monkeypatch.setattr("ucudnn.steps.race.Installation", lambda *_: torch.no_grad())
    with pytest.raises(TuningInterruptedError) as caught:
        ucudnn.tune(Interrupted(2, 2, 3), torch.ones(1, 2, 8, 8))
    assert caught.value.plan == plan_of_one


def test_ctrl_c_in_another_layout_keeps_the_verdict_on_the_plan(monkeypatch):
    model, x = nn.Conv2d(2, 4, 3), torch.ones(2, 2, 9, 9)
    plan = in_chunks(open_backend("torch_cpu"), [("", one) for one in ucudnn.trace(model, x)], 1)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("ucudnn.steps.judge.Judge._hint", interrupted)
    judge = Judge(model, x, Config())
    with pytest.raises(TuningInterruptedError) as caught:
        judge.judge(plan)
    assert caught.value.plan.step_race.rounds
    assert caught.value.plan.layout_race is None


def test_what_a_plan_changes_is_timed_inside_the_steps_of_all_ways(monkeypatch):
    model, x = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3)), torch.ones(2, 2, 9, 9)
    traced, seen = [("", one) for one in ucudnn.trace(model, x)], []
    # The two samples of every kernel are computed one by one.
    plan = in_chunks(open_backend("torch_cpu"), traced, 1)
    changed = [one for one in plan.kernels if one.problem.in_channels == 4]
    plan = replace(plan, kernels=tuple(changed))
    original = ucudnn.steps.judge.raced_inside

    def spy(by_torch, by_plan, *args):
        seen.append((by_torch, by_plan))
        return original(by_torch, by_plan, *args)

    monkeypatch.setattr("ucudnn.steps.judge.raced_inside", spy)
    Judge(model, x, Config(layout="auto")).judge(plan)
    by_torch, by_plan = seen[0]
    assert len(by_torch) == len(by_plan) >= 3
    for times in (*by_torch, *by_plan):
        assert set(times.kernels_ns) == {one.problem for one in changed}
        assert 0 < sum(times.kernels_ns.values()) < times.step_ns


def test_steps_of_an_inference_build_no_graph():
    seen = []

    class Watched(nn.Conv2d):
        def forward(self, x):
            seen.append(super().forward(x).requires_grad)
            return super().forward(x)

    model, x = Watched(2, 4, 3), torch.ones(2, 2, 9, 9)
    plan = in_chunks(open_backend("torch_cpu"), [("", ucudnn.trace(model, x)[0])], 1)
    assert seen.pop()
    found = Judge(model, x, Config(ops=("fprop",))).judge(plan)
    assert found.step_race.rounds
    assert found.layout_race.rounds
    assert not any(seen)


def wide(size, layout="nchw"):
    return kernel(size, batch=8, width=3, layout=layout)


def rounds(steps_ns, **kernels_ns):
    """One step per round, with times of kernels of sizes such as k8."""
    problems = {name: wide(int(name[1:])).problem for name in kernels_ns}
    return [
        StepTimes(step_ns, {problems[name]: times[i] for name, times in kernels_ns.items()})
        for i, step_ns in enumerate(steps_ns)
    ]


NOISY, QUIET = [100, 130, 100], [110, 100, 120]


def test_small_gains_count_together():
    plan = plan_of(wide(8), wide(9))
    by_torch = rounds(NOISY, k8=[10, 10, 10], k9=[10, 10, 10])
    # Of each kernel one round is slower; of both together none.
    by_plan = rounds(QUIET, k8=[8, 8, 11], k9=[8, 11, 8])
    raced = raced_inside(by_torch, by_plan, plan, plan.kernels)
    assert raced.pays
    assert raced.race.inside == (0.95, 0.8, 0.95)
    # and the other way round
    assert not raced_inside(by_plan, by_torch, plan, plan.kernels).pays


@pytest.mark.parametrize(
    ("step_ns", "plan_ns", "pays", "faster"),
    [
        (NOISY, [9, 9, 9], True, {8}),
        (NOISY, [11, 9, 9], False, {8}),
        (NOISY, [11, 9, 11], False, set()),
        (NOISY, [12, 12, 12], False, set()),
        # Steps that are faster in every round by chance: the kernels are not.
        ([130] * 3, [12, 12, 12], False, set()),
        ([130] * 3, [12, 9, 12], True, set()),
        # Steps that are slower in every round: because of the kernel, or not.
        ([50, 50, 50], [12, 12, 12], False, set()),
        ([50, 50, 50], [12, 9, 12], False, None),
        ([50, 50, 50], [9, 9, 9], False, None),
        # Two rounds show only what loses much, in steps and inside them.
        ([100, 100], [12, 12], True, None),
        ([50, 50], [12, 12], False, None),
        ([50, 50], [12, 9], False, None),
        ([50, 50], [9, 9], True, None),
    ],
)
def test_what_a_kernel_gains_inside_steps(step_ns, plan_ns, pays, faster):
    plan, count = plan_of(wide(8)), len(step_ns)
    by_torch = rounds(step_ns, k8=[10] * count)
    by_plan = rounds(QUIET[:count], k8=plan_ns)
    raced = raced_inside(by_torch, by_plan, plan, plan.kernels)
    assert raced.pays == pays
    sizes = None if raced.faster is None else {one.input_size[0] for one in raced.faster}
    assert sizes == faster


def test_kernels_that_were_not_timed_in_every_step_show_nothing():
    plan = plan_of(wide(8))
    by_torch, by_plan = rounds(NOISY, k8=[10] * 3), rounds(QUIET, k8=[5] * 3)
    by_plan[1] = by_plan[1]._replace(kernels_ns={})
    raced = raced_inside(by_torch, by_plan, plan, plan.kernels)
    assert not raced.pays
    assert raced.faster is None
    assert raced.race.inside is None


def test_smaller_batches_and_single_samples_in_channels_last_count_for_their_kernel():
    last = wide(8, layout="nhwc")
    plan = plan_of(last)
    for batch, layout in ((8, "nhwc"), (3, "nhwc"), (1, "nchw")):
        problem = replace(last.problem, batch=batch, layout=layout)
        by_torch, by_plan = (
            [StepTimes(ns, {problem: time_ns}) for ns in steps]
            for steps, time_ns in ((NOISY, 10), (QUIET, 5))
        )
        assert raced_inside(by_torch, by_plan, plan, [last]).race.inside == (0.5, 0.5, 0.5)
    # of another layer
    other = {wide(7).problem: 5}
    steps = [StepTimes(ns, other) for ns in NOISY]
    assert raced_inside(steps, steps, plan, [last]).race.inside is None


# Layouts

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


class LayoutMachine(Machine):
    """Steps of each layout take a base time of their own."""

    def __init__(self, own_ns, last_ns, saved_ns_by_size):
        super().__init__(saved_ns_by_size)
        self.base, self.runs = {"keep": own_ns, "channels_last": last_ns}, 0

    def elapsed_ns(self, run):
        self.layout = None
        run()
        self.runs += 1
        kernels = self.plan.kernels if self.plan else ()
        assert all(one.problem.layout == LAYOUTS[self.layout] for one in kernels)
        return self.noisy_ns(self.base[self.layout])

    def judge(self, plans, deadline=None):
        steps = {which: lambda which=which: setattr(self, "layout", which) for which in plans}
        return judge_layouts(plans, steps, self.meter(deadline or Deadline.never()))

    def span(self, run):
        peak = super().span(run).peak_bytes
        return Span(peak * (1 if self.layout == "keep" else 2), 0)


CASES = {
    "torch in channels_last": (1000, 700, {4: -300, 5: -400}, "channels_last", set()),
    "the plan in channels_last": (1000, 900, {4: 50, 5: 200}, "channels_last", {5}),
    "the plan in the model's own layout": (1000, 1100, {4: 200, 5: 250}, "keep", {4}),
    "torch in the model's own layout": (1000, 1100, {4: -200, 5: -250}, "keep", set()),
}


@pytest.mark.parametrize("case", CASES)
def test_the_fastest_way_is_what_the_plan_stands_for(case):
    own_ns, last_ns, saved, memory_format, changed = CASES[case]
    saved = {size: 1000 * ns for size, ns in saved.items()}
    machine = LayoutMachine(1000 * own_ns, 1000 * last_ns, saved)
    plan = machine.judge(plans_of([4], [5]))
    assert plan.memory_format == plan.layout_race.memory_format == memory_format
    assert machine.sizes(plan) == changed
    assert all(k.problem.layout == LAYOUTS[memory_format] for k in plan.kernels)
    race = plan.layout_race
    assert [one.name for one in race.ways] == [
        *("torch", "plan", "torch in channels_last", "plan in channels_last")
    ]
    fastest = min(race.ways, key=lambda one: one.time_ns)
    assert race.ways[race.winner] == fastest
    assert [one.peak_bytes for one in race.ways] == [9, 7, 18, 14]
    truth = 1000 * (own_ns if memory_format == "keep" else last_ns)
    assert plan.step_race.torch_ns == pytest.approx(truth, rel=0.01)
    assert not plan.step_race.is_loss
    assert race.rounds >= 3


def test_a_limit_that_torch_in_channels_last_exceeds_keeps_it_from_winning():
    # The plan there takes 1,200,000.
    machine = LayoutMachine(1_000_000, 400_000, {4: 0, 5: -800_000})
    plan = machine.judge(plans_of([4], [5], limit="2MiB"))
    assert plan.memory_format == "keep"
    table = {one.name: one for one in plan.layout_race.ways}
    assert not table["torch in channels_last"].is_allowed
    assert not table["torch"].is_allowed
    assert table["plan in channels_last"].is_allowed
    # within the limit both defaults may win
    assert machine.judge(plans_of([4], [5], limit="4MiB")).memory_format == "channels_last"


def test_a_plan_within_the_limit_wins_though_torchs_default_beyond_it_is_faster():
    machine = LayoutMachine(1_000_000, 400_000, {4: 0, 5: -200_000})
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
    ways = layout_ways(plans_of([], []))
    samples = [[1000] * len(last), [int(10 * one) for one in last]]
    assert ways[winner(ways, samples)].memory_format == chosen


def test_plans_that_change_nothing_leave_two_ways():
    plan = LayoutMachine(1_000_000, 800_000, {}).judge(plans_of([], []))
    assert plan.memory_format == "channels_last"
    assert all(one.is_default for one in plan.kernels)
    assert plan.step_race.reason == "it changes nothing"
    assert [one.name for one in plan.layout_race.ways] == ["torch", "torch in channels_last"]


def test_where_the_time_is_over_one_round_decides():
    machine = LayoutMachine(1_000_000, 500_000, {4: 0, 5: 0})
    plan = machine.judge(plans_of([4], [5]), Deadline.within(0.0))
    assert plan.memory_format == "channels_last"
    assert plan.layout_race.rounds == 1
    # Peaks of the four ways, and a round.
    assert machine.runs == 8
