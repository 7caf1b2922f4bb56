"""Judge a plan by whole training steps, which make the last decision on it.

A plan whose kernels are all faster can still slow down a step: planned calls take longer to start,
and in a step the caches hold other data. If steps are not faster beyond the noise, the kernels that
make them faster are found by their times inside the steps, or by halving the set of kernels. All
other kernels are given back to torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

from ucudnn.kernels.deadline import Deadline
from ucudnn.outcomes import LEAST_ROUNDS, StepRace
from ucudnn.plan import KernelPlan, Plan
from ucudnn.problem import Problem
from ucudnn.steps.race import Raced, Samples, StepTimes, race, raced_inside, steps_ns, tells

# Least number of steps in a race of two contestants: each runs one step to warm up, and one in a
# round. A step that is run to measure its peak warms up, too.
LEAST_STEPS = 4

# Reasons why steps were not raced: the time is over, or the plan has only torch's own convolutions.
NO_ROOM = "the time budget has no room for them"
NOTHING = "it changes nothing"

Step = Callable[[], None]


@dataclass(slots=True)
class StepMeter:
    """Measures steps of a model on one device, by plans or by torch's own convolutions."""

    # Lets the convolutions of this process follow a plan while its context is open.
    install: Callable[[Plan], AbstractContextManager[object]]
    # `elapsed` runs a step and returns the time in ns that it took on the device; `peak` returns
    # the peak of allocated memory in bytes instead.
    elapsed: Callable[[Step], int]
    peak: Callable[[Step], int]
    # When the last step must end; and the time of one step in ns, from which the end of further
    # steps is estimated.
    deadline: Deadline = field(default_factory=Deadline)
    step_ns: int = 0
    # Shortest times so far of a step by torch (False) and by a plan (True). The shortest ones are
    # kept, because the first step may take much longer than the next ones.
    shortest_ns: dict[bool, int] = field(default_factory=dict)
    # Like `install`, but also times kernels inside steps; None if that would slow the steps down.
    timed: Callable[[Plan | None], AbstractContextManager[Mapping[Problem, int]]] | None = None

    def is_over(self, steps: int = 0) -> bool:
        """True if there is no time for `steps` more steps."""
        return not self.deadline.has_time(steps, self.step_ns)

    def elapsed_ns(self, step: Step, plan: Plan | None) -> int:
        """Time of one step by a plan; None: by torch's own convolutions."""
        with self._following(plan):
            time_ns = self.elapsed(step)
        self._note(time_ns, plan)
        return time_ns

    def times(self, step: Step, plan: Plan | None) -> StepTimes:
        """Time of one step, and of its kernels if these can be timed inside it."""
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
        """Peak of allocated memory of one step by a plan; None: by torch's own convolutions."""
        times = list[int]()
        with self._following(plan):
            peak = self.peak(lambda: times.append(self.elapsed(step)))
        # Watching memory makes a step longer, so its time counts only if no shorter one is known.
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
        """The plan with the outcome of its race, and without kernels that make steps no faster.

        At least one kernel of the plan must not be torch's own. A kernel that torch's own
        convolution may not replace keeps its plan, even if that slows steps down. `raced` is the
        plan's race against torch, with peaks, if that race was run already.
        """
        # All kernels but the free ones must stay planned: torch's own convolutions would exceed the
        # workspace limit, or would not be deterministic.
        free = replaceable(plan)
        rest = _without(plan, free)
        raced = raced or self._raced_with_peaks(plan)
        if raced is None:
            return replace(plan, step_race=StepRace(reason=NO_ROOM))
        # Kernels that must stay planned stay even if they slow the step down. So the plan is
        # compared with steps in which only these kernels are planned.
        against_rest = raced
        if free and not _is_torchs(rest):
            if self.meter.is_over(LEAST_STEPS):
                return replace(plan, step_race=raced.race)
            against_rest = self._race(plan, rest)
        if not free or against_rest.pays:
            return replace(plan, step_race=raced.race)
        if against_rest.faster is not None:
            kept = [one for one in free if one.problem in against_rest.faster]
        else:
            kept = self._kept(plan, free)
        dropped = [one for one in free if one not in kept]
        # If steps by the whole plan are slower although no kernel was found that slows them down,
        # all kernels are dropped.
        if _is_torchs(rest) and raced.race.is_loss:
            dropped = dropped or free
        return self._judged_without(dropped, plan, raced)

    def _raced_with_peaks(self, plan: Plan) -> Raced | None:
        """A race of the plan against torch, with the peaks of both; None if there is no time."""
        peaks = list[int]()
        # The steps that are run to measure the peaks also warm up. Their times say more about the
        # next steps than the time of the very first step, which may take a third longer.
        for one in (None, plan):
            if self.meter.is_over(3):
                return None
            peaks.append(self.meter.peak_bytes(self.step, one))
        if self.meter.is_over(2):
            return None
        raced = self._race(plan, is_warm=True)
        race = replace(raced.race, torch_peak_bytes=peaks[0], plan_peak_bytes=peaks[1])
        return raced._replace(race=race)

    def _judged_without(self, dropped: Sequence[KernelPlan], plan: Plan, raced: Raced) -> Plan:
        """The plan without the dropped kernels, with the race of what is left of it."""
        # Nothing is dropped if the kernels were faster in parts, although the whole plan was not.
        if not dropped:
            return replace(plan, step_race=raced.race)
        left, race = _without(plan, dropped), raced.race
        torch_peak, plan_peak = race.torch_peak_bytes, race.plan_peak_bytes
        if _is_torchs(left):
            # All kernels are torch's own now, so there is nothing to race.
            race, plan_peak = StepRace(race.torch_ns, race.torch_ns, rounds=race.rounds), torch_peak
        elif self.meter.is_over(LEAST_STEPS):
            race = StepRace(reason="the time budget has no room for steps without what did not pay")
        else:
            # The first race was of the plan with the dropped kernels, so the rest is raced anew.
            again, others = self._race(left), _changed(left)
            race, is_loss = again.race, again.race.is_loss and not again.pays
            if is_loss and len(replaceable(left)) == len(others):
                return self._judged_without([*dropped, *others], plan, raced)
        names = tuple(str(kernel.problem) for kernel in dropped)
        race = replace(race, torch_peak_bytes=torch_peak, plan_peak_bytes=plan_peak, dropped=names)
        return replace(left, step_race=race)

    def _kept(self, plan: Plan, kernels: Sequence[KernelPlan]) -> list[KernelPlan]:
        """Find, by halving, the kernels with whose plans a step is faster than without."""
        if len(kernels) == 1:
            return []
        middle, kept = len(kernels) // 2, list[KernelPlan]()
        for half in (kernels[:middle], kernels[middle:]):
            # No time is left: kernels that were not shown to make steps faster are given back to
            # torch. Steps by the rest of the plan are raced at the end.
            if self.meter.is_over(2 * LEAST_STEPS):
                break
            # All replaceable kernels outside this half run torch's own convolutions, so that only
            # this half is judged. The rival has only the kernels that must stay planned.
            others = [kernel for kernel in plan.kernels if kernel not in half]
            with_half = _without(plan, [one for one in others if has_default(plan, one)])
            alone = _without(with_half, half)
            raced = self._race(with_half, None if _is_torchs(alone) else alone)
            # In too few rounds, a half does not count as paying.
            is_proven = raced.pays and raced.race.rounds >= LEAST_ROUNDS
            kept += half if is_proven else self._kept(plan, half)
        return kept

    def _race(self, plan: Plan, other: Plan | None = None, is_warm: bool = False) -> Raced:
        """Run timed steps until it is clear whether a plan is faster than another one, or torch."""
        kernels = replaceable(plan)

        def is_decided(samples: Samples) -> bool:
            raced = raced_inside(samples[0], samples[1], plan, kernels)
            # If the kernels are faster but the steps seem slower, it is not clear yet.
            is_clear = raced.pays and raced.race.ratio <= 1
            by_other, by_plan = steps_ns(samples)
            return is_clear or tells(by_plan, by_other)

        runs = [partial(self.meter.times, self.step, one) for one in (other, plan)]
        by_other, by_plan = race(runs, self.meter.is_over, is_decided, is_warm)
        return raced_inside(by_other, by_plan, plan, kernels)


def has_default(plan: Plan, kernel: KernelPlan) -> bool:
    """True if torch's own convolution may replace a kernel's plan.

    It must be within the workspace limit, and deterministic if the plan must be. With a pool it
    must need no more workspace than the kernel's plan.
    """
    if plan.config.deterministic and not kernel.default_is_deterministic:
        return False
    limit = plan.limit_bytes(kernel)
    # With a pool, the other calls of the step own the rest of the workspace.
    if plan.config.total_bytes is not None:
        limit = kernel.timing.workspace_bytes
    return kernel.default is not None and (limit is None or kernel.default.workspace_bytes <= limit)


def replaceable(plan: Plan) -> list[KernelPlan]:
    """The kernels that do not run torch's own convolution, although they could."""
    return [kernel for kernel in _changed(plan) if has_default(plan, kernel)]


def _changed(plan: Plan) -> list[KernelPlan]:
    """The kernels that do not run torch's own convolution."""
    return [kernel for kernel in plan.kernels if not kernel.is_default]


def _is_torchs(plan: Plan) -> bool:
    return not _changed(plan)


def _without(plan: Plan, dropped: Sequence[KernelPlan]) -> Plan:
    """The plan with torch's own convolution for some kernels."""
    # If there is a limit, smaller batches keep their splits: it was not measured whether torch's
    # own convolutions of these batches fit.
    settings = plan.config
    limits = (settings.limit_bytes, settings.total_bytes, plan.memory)
    every_batch = all(limit is None for limit in limits)
    kernels = (
        kernel.by_default(every_batch) if kernel in dropped else kernel for kernel in plan.kernels
    )
    return replace(plan, kernels=tuple(kernels))
