"""Judge a plan by whole training steps, which make the last decision on it.

A plan whose kernels are all faster can still slow down a step, because planned calls cost the host
more, and because the caches hold other data. If steps are not faster beyond the noise, the kernels
that pay are found by their times inside the steps, or by halving, and the others are given back to
torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic

from ucudnn.outcomes import LEAST_ROUNDS, StepRace
from ucudnn.plan import KernelPlan, Plan
from ucudnn.problem import Problem
from ucudnn.tuning.step_rounds import (
    Raced,
    Samples,
    StepTimes,
    race,
    raced_inside,
    raced_of,
    steps_ns,
    tells,
)

# Steps that a race of two takes at least: each warms up, and one round. Peaks warm up, too.
LEAST_STEPS = 4

# Reasons why steps were not raced: the budget has no time for them, or all of the plan is torch's.
NO_ROOM = "the time budget has no room for them"
NOTHING = "it changes nothing"

Step = Callable[[], None]


@dataclass(slots=True)
class StepMeter:
    """Measures steps of a model on one device, by plans or by torch's own convolutions."""

    # Lets the convolutions of this process follow a plan while its context is open.
    install: Callable[[Plan], AbstractContextManager[object]]
    # Runs a step and returns the time in ns that it took on the device, or its peak of allocated
    # memory in bytes.
    elapsed: Callable[[Step], int]
    peak: Callable[[Step], int]
    # The `time.monotonic` at which steps must end, and the time of a step, by which to foresee it.
    until: float | None = None
    step_ns: int = 0
    # Shortest times so far, of steps by torch and by plans: the first step may take much longer.
    shortest_ns: dict[bool, int] = field(default_factory=dict)
    # Like `install`, and times kernels inside the step; None: that would slow the step down.
    timed: Callable[[Plan | None], AbstractContextManager[Mapping[Problem, int]]] | None = None

    def is_over(self, steps: int = 0) -> bool:
        """True if there is no time for so many more steps."""
        return self.until is not None and monotonic() + steps * self.step_ns / 1e9 >= self.until

    def earlier(self, steps: int) -> StepMeter:
        """The same meter, that leaves time for so many steps."""
        if self.until is None:
            return self
        return replace(self, until=self.until - steps * self.step_ns / 1e9)

    def elapsed_ns(self, step: Step, plan: Plan | None) -> int:
        """Time of one step by a plan; None: by torch's own convolutions."""
        with self._following(plan):
            time_ns = self.elapsed(step)
        self._note(time_ns, plan)
        return time_ns

    def times(self, step: Step, plan: Plan | None) -> StepTimes:
        """Times of one step and of its kernels, as far as they can be timed."""
        if self.timed is None:
            return StepTimes(self.elapsed_ns(step, plan), {})
        with self.timed(plan) as kernels_ns:
            time_ns = self.elapsed(step)
        self._note(time_ns, plan)
        return StepTimes(time_ns, kernels_ns)

    def _note(self, time_ns: int, plan: Plan | None) -> None:
        is_planned = plan is not None
        self.shortest_ns[is_planned] = min(time_ns, self.shortest_ns.get(is_planned, time_ns))
        self.step_ns = max(self.shortest_ns.values())

    def peak_bytes(self, step: Step, plan: Plan | None) -> int:
        """Peak of memory of one step, likewise."""
        times = list[int]()
        with self._following(plan):
            peak = self.peak(lambda: times.append(self.elapsed(step)))
        # Looking at memory takes time, too, so that this tells only where it was shorter.
        if not self.step_ns or times[0] < self.step_ns:
            self._note(times[0], plan)
        return peak

    def _following(self, plan: Plan | None) -> AbstractContextManager[object]:
        return nullcontext() if plan is None else self.install(plan)


@dataclass(frozen=True, slots=True)
class StepJudge:
    """Races steps of one model."""

    step: Step
    meter: StepMeter

    def judge(self, plan: Plan, raced: Raced | None = None) -> Plan:
        """The plan with the outcome of its race, without the kernels that do not pay in a step.

        A kernel whose default exceeds the workspace limit keeps its plan, whatever it costs.
        `raced` is the plan's race against torch, with peaks, if that was run already.
        """
        changed = _changed(plan)
        if not changed:
            return plan
        # The rest must stay planned: without a plan they would exceed the workspace limit.
        free = replaceable(plan)
        rest = _without(plan, free)
        raced = raced or self._raced_with_peaks(plan, rest)
        if raced is None:
            return replace(plan, step_race=StepRace(reason=NO_ROOM))
        # Kernels whose default exceeds the limit stay planned even if they slow the step down, so
        # the others are compared with a step that already contains these.
        against_rest: Raced | None = raced
        if free and raced.rest is None and not _is_torchs(rest):
            has_time = not self.meter.is_over(LEAST_STEPS)
            against_rest = _proven(self._race(plan, rest)) if has_time else None
        if not free or (against_rest is not None and against_rest.pays):
            return replace(plan, step_race=raced.race)
        if against_rest is not None and against_rest.faster is not None:
            kept = [one for one in free if one.problem in against_rest.faster]
        else:
            kept = self._kept(plan, free)
        dropped = [one for one in free if one not in kept]
        # The whole plan may be a proven loss although neither half is: then drop all of it.
        if _is_torchs(rest) and raced.race.is_loss:
            dropped = dropped or free
        return self._judged_without(dropped, plan, raced)

    def _raced_with_peaks(self, plan: Plan, rest: Plan) -> Raced | None:
        """A race against torch, with the peaks of both; None if there is no time for one."""
        of_three = bool(_changed(rest)) and rest.kernels != plan.kernels
        # What must stay planned takes part by itself: a step to warm up, and one in the round.
        round_steps = 2 + 2 * of_three
        peaks = list[int]()
        # Taking a peak runs a step, which warms up, and tells more about how long steps are than
        # the very first one, which may take a third longer.
        for one in (None, plan):
            if self.meter.is_over(round_steps + 1):
                return None
            peaks.append(self.meter.peak_bytes(self.step, one))
        if self.meter.is_over(round_steps):
            return None
        raced = self._race_of_three(plan, rest) if of_three else self._race(plan, is_warm=True)
        race = replace(raced.race, torch_peak_bytes=peaks[0], plan_peak_bytes=peaks[1])
        return raced._replace(race=race)

    def _race_of_three(self, plan: Plan, rest: Plan) -> Raced:
        """A race of torch's own, a plan, and those of its kernels that must stay planned."""
        self.meter.elapsed_ns(self.step, rest)
        contestants = (None, rest, plan)
        by_torch, by_rest, by_plan = self._samples(contestants, 1, is_warm=True)
        against_rest = raced_inside(by_rest, by_plan, plan, replaceable(plan))
        torch_ns, rest_ns = steps_ns([by_torch, by_rest])
        return against_rest._replace(
            race=raced_inside(by_torch, by_plan, plan, _changed(plan)).race,
            rest=raced_of(torch_ns, rest_ns).race,
        )

    def _judged_without(self, dropped: Sequence[KernelPlan], plan: Plan, raced: Raced) -> Plan:
        """The plan without some kernels, and the race of what is left of it."""
        # All of it pays by parts, in shorter races than the one of the whole.
        if not dropped:
            return replace(plan, step_race=raced.race)
        left, race = _without(plan, dropped), raced.race
        torch_peak, plan_peak = race.torch_peak_bytes, race.plan_peak_bytes
        if _is_torchs(left):
            # The plan is torch's own now, so that there is nothing to race.
            race, plan_peak = StepRace(race.torch_ns, race.torch_ns, rounds=race.rounds), torch_peak
        elif raced.rest is not None and not replaceable(left):
            race = raced.rest
        elif self.meter.is_over(LEAST_STEPS):
            race = StepRace(reason="the time budget has no room for steps without what did not pay")
        else:
            # The first race was of another plan: steps without the dropped kernels are timed anew.
            again, others = self._race(left), _changed(left)
            race, is_loss = again.race, again.race.is_loss and not again.pays
            if is_loss and len(replaceable(left)) == len(others):
                return self._judged_without([*dropped, *others], plan, raced)
        names = tuple(str(kernel.problem) for kernel in dropped)
        race = replace(race, torch_peak_bytes=torch_peak, plan_peak_bytes=plan_peak, dropped=names)
        return replace(left, step_race=race)

    def _kept(self, plan: Plan, kernels: Sequence[KernelPlan]) -> list[KernelPlan]:
        """Find the kernels with which a step is faster than without them, by halving."""
        if len(kernels) == 1:
            return []
        middle, kept = len(kernels) // 2, list[KernelPlan]()
        for half in (kernels[:middle], kernels[middle:]):
            # What could not be shown to pay is given back to torch. Steps by what is left of the
            # plan are raced at the end.
            if self.meter.is_over(2 * LEAST_STEPS):
                break
            # torch's own convolutions for all that may be replaced but these, so that only these
            # are judged, against those that must stay planned alone.
            others = [kernel for kernel in plan.kernels if kernel not in half]
            with_half = _without(plan, [one for one in others if has_default(plan, one)])
            alone = _without(with_half, half)
            raced = self._race(with_half, None if _is_torchs(alone) else alone)
            kept += half if _proven(raced).pays else self._kept(plan, half)
        return kept

    def _race(self, plan: Plan, other: Plan | None = None, is_warm: bool = False) -> Raced:
        by_other, by_plan = self._samples((other, plan), 0, is_warm)
        return raced_inside(by_other, by_plan, plan, replaceable(plan))

    def _samples(
        self, contestants: Sequence[Plan | None], rival: int, is_warm: bool
    ) -> list[list[StepTimes]]:
        """Time steps until it is clear whether the last plan is faster than a rival of it."""
        plan = contestants[-1]
        assert plan is not None

        def is_decided(samples: Samples) -> bool:
            by_rival, by_plan = samples[rival], samples[-1]
            raced = raced_inside(by_rival, by_plan, plan, replaceable(plan))
            # Kernels that gain inside steps which seem to lose: more rounds tell.
            is_clear = raced.pays and raced.race.ratio <= 1
            return is_clear or tells(*steps_ns([by_plan, by_rival]))

        runs = [partial(self.meter.times, self.step, one) for one in contestants]
        return race(runs, self.meter.is_over, is_decided, is_warm)


def _proven(raced: Raced) -> Raced:
    """The same race, in which too few rounds show no gain."""
    return raced._replace(pays=raced.pays and raced.race.rounds >= LEAST_ROUNDS)


def has_default(plan: Plan, kernel: KernelPlan) -> bool:
    """True if torch's own convolution may replace a kernel's plan.

    It must be within the workspace limit, and deterministic if the plan is. With a pool it
    must need no more than the plan.
    """
    if plan.config.deterministic and not kernel.default_is_deterministic:
        return False
    limit = plan.limit_bytes(kernel)
    # The other calls of the step own the rest.
    if plan.config.total_bytes is not None:
        limit = kernel.timing.workspace_bytes
    return kernel.default is not None and (limit is None or kernel.default.workspace_bytes <= limit)


def replaceable(plan: Plan) -> list[KernelPlan]:
    """The kernels that are not torch's own and that torch may compute all the same."""
    return [kernel for kernel in _changed(plan) if has_default(plan, kernel)]


def _changed(plan: Plan) -> list[KernelPlan]:
    """The kernels that are not torch's own."""
    return [kernel for kernel in plan.kernels if not kernel.is_default]


def _is_torchs(plan: Plan) -> bool:
    return not _changed(plan)


def _without(plan: Plan, dropped: Sequence[KernelPlan]) -> Plan:
    """The plan with torch's own convolution for some kernels."""
    # Within a limit smaller batches keep their splits, because whether their defaults fit was not
    # measured.
    settings = plan.config
    limits = (settings.limit_bytes, settings.total_bytes, plan.memory)
    every_batch = all(limit is None for limit in limits)
    kernels = (
        kernel.by_default(every_batch) if kernel in dropped else kernel for kernel in plan.kernels
    )
    return replace(plan, kernels=tuple(kernels))
