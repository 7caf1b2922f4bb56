"""Whole steps of a model in two layouts, which decide the plan that it follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from time import monotonic

from ucudnn.plan import Plan
from ucudnn.races import StepRace
from ucudnn.tuning.layout import Entrant, entrants, is_decided, outcome
from ucudnn.tuning.step_judge import Installer, StepJudge, race, raced_of


class LayoutJudge:
    """Races steps of one model in its own layout and in channels_last.

    Args:
        steps: by memory format, the object that computes a step.
        install: returns a context in which the convolutions of this process follow a plan.
        elapsed_ns: runs something once and returns the time in ns that it took on the device.
        peak_bytes: runs something once and returns its peak of allocated memory.
        until: the `time.monotonic` after which no more rounds begin; None: no limit.
    """

    def __init__(
        self,
        steps: Mapping[str, Callable[[], None]],
        install: Installer,
        elapsed_ns: Callable[[Callable[[], None]], int],
        peak_bytes: Callable[[Callable[[], None]], int],
        until: float | None = None,
    ) -> None:
        self._steps = steps
        self._install = install
        self._elapsed_ns = elapsed_ns
        self._peak_bytes = peak_bytes
        self._until = until

    def judge(self, plans: Mapping[str, Plan]) -> Plan:
        """The plan of the better layout, judged by `StepJudge`, with the race of the layouts.

        Args:
            plans: by memory format, the model's own first.
        """
        all_of_them = entrants(plans)
        # Taking the peaks runs every contestant once, so the race needs no round to warm up.
        peaks = [self._run(self._peak_bytes, one) for one in all_of_them]
        samples = race(
            [partial(self._run, self._elapsed_ns, one) for one in all_of_them],
            lambda: self._until is not None and monotonic() >= self._until,
            is_warm=True,
            is_decided=partial(is_decided, all_of_them),
        )
        layouts = outcome(all_of_them, samples, peaks)
        chosen = plans[layouts.memory_format]
        # In the chosen layout: torch's own, and the plan if it changes anything.
        run = [i for i, one in enumerate(all_of_them) if one.memory_format == layouts.memory_format]
        judge = StepJudge(
            self._steps[layouts.memory_format],
            self._install,
            self._elapsed_ns,
            self._peak_bytes,
            self._until,
        )
        # Steps by this plan would be steps by torch.
        if len(run) == 1:
            judged = replace(chosen, step_race=StepRace(reason="it changes nothing"))
        else:
            # The plan has run against torch's own in this race already, in the same rounds. Only
            # where it lost are further steps run, to find the kernels responsible.
            torchs, planned = run
            raced = raced_of(samples[torchs], samples[planned])
            peaked = replace(
                raced.race, torch_peak_bytes=peaks[torchs], plan_peak_bytes=peaks[planned]
            )
            judged = judge.judge(chosen, raced._replace(race=peaked))
        return replace(judged, layout_race=layouts)

    def _run(self, measure: Callable[[Callable[[], None]], int], one: Entrant) -> int:
        with self._following(one.plan):
            return measure(self._steps[one.memory_format])

    def _following(self, plan: Plan | None) -> AbstractContextManager[object]:
        return nullcontext() if plan is None else self._install(plan)
