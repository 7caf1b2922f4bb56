"""What is said of a plan: faster and slower kernels apart, pools, races."""

from __future__ import annotations

from dataclasses import replace

import by_hand

from ucudnn.config import Config
from ucudnn.outcomes import LayoutRace, StepMemory, StepRace, Way
from ucudnn.plan import Timing
from ucudnn.reports.cards import cards, payback, steps_to_pay_back
from ucudnn.reports.text import plan_verdict

MIB, MS = 1 << 20, 1_000_000


def kernel(size, default_ms, default_mib, plan_ms):
    timing = Timing(plan_ms * MS, 0, MIB, 5)
    default = Timing(default_ms * MS, 0, default_mib * MIB, 5)
    return by_hand.kernel(size, batch=1, timing=timing, default=default)


def plan_of(*kernels):
    return by_hand.plan_of(*kernels, config=Config(workspace_limit="1MiB"))


def test_faster_and_slower_kernels_are_named_apart():
    plan = plan_of(kernel(4, 10, 8, 6), kernel(8, 10, 8, 7), kernel(16, 20, 64, 21))
    said = plan_verdict(plan)
    assert said[0] == "Faster kernels: 2, by 7.00 ms in all."
    assert said[1].startswith("Slower kernels: 1, by 1.00 ms in all")
    assert said[2:] == ["Noise: no sign of noise in the times of 3 kernels."]


def test_plan_verdict_names_the_pool_that_makes_kernels_slower():
    plan = plan_of(kernel(4, 50, 8, 74), kernel(8, 50, 64, 56))
    plan = replace(plan, config=Config(total_workspace="6MiB"))
    slower = plan_verdict(plan)[0]
    assert slower.endswith("where torch's own convolution exceeds its part of the pool.")


def test_the_race_of_steps_is_part_of_it():
    plan, race = plan_of(kernel(4, 10, 8, 10)), StepRace(reason="step_race is off")
    step, *_ = cards(replace(plan, step_race=race))
    assert step == ("Step", "not timed", "the plan was not judged by whole steps: step_race is off")
    peaks = 90 * MIB, 70 * MIB
    race = StepRace(100 * MS, 90 * MS, 0.9, 0.88, 0.93, 5, *peaks, ("a", "b"), inside=(0.8,) * 3)
    step, peak, *_ = cards(replace(plan, step_race=race))
    assert step == ("Step", "100 ms → 90.0 ms", "0.90 (0.88 to 0.93) times as long")
    assert peak == ("Peak memory", "90 MiB → 70 MiB", "78% of torch's")
    assert plan_verdict(replace(plan, step_race=race))[:2] == [
        "Inside steps, the kernels that the plan changes take 0.80 (0.80 to 0.80) times as long.",
        "2 kernels did not pay in whole steps, so torch's own convolution is kept.",
    ]
    # one or two rounds tell no interval
    step, *_ = cards(replace(plan, step_race=replace(race, rounds=2)))
    assert step.note == "0.90 times as long"


def test_the_layout_is_part_of_it():
    torchs = Way("torch", "torch", time_ns=110, rounds=5)
    last = Way("plan", "plan in channels_last", time_ns=90, memory_format="channels_last")
    ways = (torchs, replace(last, ratio=0.8, low=0.79, high=0.82, rounds=5))
    plan = replace(
        plan_of(kernel(4, 10, 8, 10)),
        memory_format="channels_last",
        layout_race=LayoutRace(ways, 1),
        step_race=StepRace(100, 90, 0.9, 0.88, 0.93, 5),
    )
    layout, _ = plan_verdict(plan)
    assert layout.startswith(
        "The layout is channels_last: a step by plan in channels_last takes 0.8"
    )
    # from the model's own layout to that of the plan
    step, *_ = cards(plan)
    assert step == ("Step", "110 ns → 90 ns", "0.80 (0.79 to 0.82) times as long in channels_last")
    same = replace(plan, memory_format="keep", layout_race=LayoutRace(ways, 0))
    assert plan_verdict(same)[0].endswith("torch's own steps are the fastest, 110 ns.")


def test_what_tuning_cost_and_what_it_bought():
    same = plan_of(kernel(4, 10, 8, 10))
    torchs = replace(same.kernels[0], algorithms=("torch_default",))
    kept, faster = plan_of(torchs), plan_of(kernel(4, 30, 8, 10))
    assert payback(kept, 9).endswith(": nothing is gained, all stays torch's own convolution.")
    assert payback(same, 9).endswith(": the plan saves no time that would pay it back.")
    assert steps_to_pay_back(faster, 9) == 450
    assert payback(faster, 9).endswith(
        "paid back after 450 steps, if a step gains what its convolutions do."
    )
    # whole steps are truer than the sum of kernels
    race = StepRace(100 * MS, 90 * MS, 0.9, 0.88, 0.93, 5)
    assert payback(replace(faster, step_race=race), 9).endswith("paid back after 900 steps.")
    for slow in (replace(race, ratio=1.6, low=1.5, high=1.7), replace(race, high=1.1)):
        assert "saves no time" in payback(replace(faster, step_race=slow), 9)
        assert steps_to_pay_back(replace(faster, step_race=slow), 9) is None


def test_what_a_memory_budget_bought():
    kept = replace(kernel(4, 10, 8, 10), algorithms=("torch_default",))
    memory = StepMemory(
        *(20 * MIB, MIB, 0, 0, 0, 30 * MIB, 40 * MIB, 16 * MIB),
        torch_foreseen_ns=100 * MS,
        plan_ns=130 * MS,
    )
    plan = replace(plan_of(kept), memory=memory)
    said = "Tuning cost 156.0 s and bought 24 MiB (60% of the peak) for"
    assert payback(plan, 156) == f"{said} about 1.30 times the time of a step."
    race = StepRace(100 * MS, 162 * MS, 1.62, 1.62, 1.62, 1)
    assert payback(replace(plan, step_race=race), 156) == f"{said} 1.62 times the time of a step."
    # a budget that torch's own step keeps buys nothing
    enough = replace(memory, plan_peak_bytes=40 * MIB)
    assert "nothing is gained" in payback(replace(plan, memory=enough), 156)
