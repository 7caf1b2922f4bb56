"""Whole steps of a model in two layouts, which decide the plan that it follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from ucudnn.outcomes import StepRace
from ucudnn.plan import Plan
from ucudnn.tuning.layout import entrants, is_decided, outcome
from ucudnn.tuning.step_judge import Step, StepJudge, StepMeter, replaceable
from ucudnn.tuning.step_rounds import race, raced_inside, steps_ns


class LayoutJudge:
    """Races steps of one model in its own layout and in channels_last.

    Args:
        steps: by memory format, the object that computes a step.
        meter: measures steps by plans.
    """

    def __init__(self, steps: Mapping[str, Step], meter: StepMeter) -> None:
        self._steps = steps
        self._meter = meter

    def judge(self, plans: Mapping[str, Plan]) -> Plan:
        """The plan of the better layout, judged by `StepJudge`, with the race of the layouts.

        Args:
            plans: by memory format, the model's own first.
        """
        all_of_them = entrants(plans)
        # Taking the peaks runs every contestant once, so the race needs no round to warm up.
        ways = [(self._steps[one.memory_format], one.plan) for one in all_of_them]
        peaks = [self._meter.peak_bytes(*way) for way in ways]
        samples = race(
            [partial(self._meter.times, *way) for way in ways],
            self._meter.is_over,
            lambda times: is_decided(all_of_them, steps_ns(times)),
            is_warm=True,
        )
        layouts = outcome(all_of_them, steps_ns(samples), peaks)
        chosen = plans[layouts.memory_format]
        # In the chosen layout: torch's own, and the plan if it changes anything.
        run = [i for i, one in enumerate(all_of_them) if one.memory_format == layouts.memory_format]
        judge = StepJudge(self._steps[layouts.memory_format], self._meter)
        # Steps by this plan would be steps by torch.
        if len(run) == 1:
            judged = replace(chosen, step_race=StepRace(reason="it changes nothing"))
        else:
            # The plan has run against torch's own in this race already, in the same rounds. Only
            # where it lost are further steps run, to find the kernels responsible.
            torchs, planned = run
            raced = raced_inside(samples[torchs], samples[planned], chosen, replaceable(chosen))
            peaked = replace(
                raced.race, torch_peak_bytes=peaks[torchs], plan_peak_bytes=peaks[planned]
            )
            judged = judge.judge(chosen, raced._replace(race=peaked))
        return replace(judged, layout_race=layouts)
