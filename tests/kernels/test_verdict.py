"""What is said of a plan: faster and slower kernels apart, pools, races."""

from __future__ import annotations

from dataclasses import replace

import by_hand

from ucudnn.config import Config
from ucudnn.outcomes import LayoutRace, StepRace, Way
from ucudnn.plan import Timing
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
    race = StepRace(reason="step_race is off")
    said = plan_verdict(replace(plan_of(kernel(4, 10, 8, 10)), step_race=race))
    assert said[0] == "The plan was not judged by whole steps: step_race is off."


def test_the_layout_is_part_of_it():
    torchs = Way("torch", "torch", time_ns=110)
    last = Way("plan", "plan in channels_last", time_ns=90, memory_format="channels_last")
    ways = (torchs, replace(last, ratio=0.8))
    plan = replace(
        plan_of(kernel(4, 10, 8, 10)),
        memory_format="channels_last",
        layout_race=LayoutRace(ways, 1),
        step_race=StepRace(100, 90, 0.9, 0.88, 0.93, 5),
    )
    layout, step, _ = plan_verdict(plan)
    assert layout.startswith(
        "The layout is channels_last: a step by plan in channels_last takes 0.8"
    )
    assert step.endswith(" 90 ns against 100 ns (both in channels_last).")
    same = replace(plan, memory_format="keep", layout_race=LayoutRace(ways, 0))
    assert plan_verdict(same)[0].endswith("torch's own steps are the fastest, 110 ns.")
