"""Judge a plan by whole training steps, which make the last decision on it.

A plan whose kernels are all faster can still slow down a step, because planned calls cost the host
more, and because the caches hold other data. If steps are not faster beyond the noise, the kernels
that pay are found by halving, and the others are given back to torch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic
from typing import NamedTuple

from ucudnn.benchmark.statistics import median_ns, ratio_interval
from ucudnn.plan import KernelPlan, Plan
from ucudnn.races import LEAST_ROUNDS, TOLERATED, StepRace

# Rounds of one race. Steps are long, so there are few: the 95 % interval of up to seven pairs
# reaches from the smallest ratio to the largest, and one perturbed round can hide a difference.
_MOST_ROUNDS = 7

# With it one perturbed round of seven is forgiven, and of fewer none.
CONFIDENCE = 0.75
# Steps that a race of two takes at least: each warms up, and one round. Peaks warm up, too.
LEAST_STEPS = 4

Step = Callable[[], None]
Decided = Callable[[Sequence[Sequence[int]]], bool]


class Raced(NamedTuple):
    """A race of steps with its verdict.

    Args:
        race: times of steps by a plan and by torch's own convolutions.
        pays: True if steps are faster by the plan beyond the noise. The plan must prove this,
            because torch's own convolutions cost nothing to keep; unless there was no time for the
            rounds that it takes.
        rest: times of steps by the kernels that must stay planned and by torch, if those took part;
            then the plan was compared with these.
    """

    race: StepRace
    pays: bool
    rest: StepRace | None = None


@dataclass(slots=True)
class StepMeter:
    """Measures steps of a model on one device, by plans or by torch's own convolutions.

    Args:
        install: lets the convolutions of this process follow a plan while its context is open.
        elapsed: runs something once and returns the time in ns that it took on the device.
        peak: the same for its peak of allocated memory in bytes.
        until: the `time.monotonic` at which steps must end; None: no limit.
        step_ns: time of a step, by which this is foreseen.
        shortest_ns: shortest times so far, of steps by torch and of those by plans: the first step
            may take much longer than the others.
    """

    install: Callable[[Plan], AbstractContextManager[object]]
    elapsed: Callable[[Step], int]
    peak: Callable[[Step], int]
    until: float | None = None
    step_ns: int = 0
    shortest_ns: dict[bool, int] = field(default_factory=dict)

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
        is_planned = plan is not None
        self.shortest_ns[is_planned] = min(time_ns, self.shortest_ns.get(is_planned, time_ns))
        self.step_ns = max(self.shortest_ns.values())
        return time_ns

    def peak_bytes(self, step: Step, plan: Plan | None) -> int:
        """Peak of memory of one step, likewise."""
        with self._following(plan):
            return self.peak(step)

    def _following(self, plan: Plan | None) -> AbstractContextManager[object]:
        return nullcontext() if plan is None else self.install(plan)


class StepJudge:
    """Races steps of one model.

    Args:
        step: computes a step.
        meter: measures steps by plans.
    """

    def __init__(self, step: Step, meter: StepMeter) -> None:
        self._step = step
        self._meter = meter

    def judge(self, plan: Plan, raced: Raced | None = None) -> Plan:
        """The plan with the outcome of its race, without the kernels that do not pay in a step.

        A kernel whose default exceeds the workspace limit keeps its plan, whatever it costs.

        Args:
            plan: the plan to judge.
            raced: its race against torch, with peaks, if that was run already.
        """
        changed = _changed(plan)
        if not changed:
            return plan
        # The rest must stay planned: without a plan they would exceed the workspace limit.
        replaceable = [kernel for kernel in changed if has_default(plan, kernel)]
        rest = _without(plan, replaceable)
        raced = raced or self._raced_with_peaks(plan, rest)
        if not replaceable or self._pays(plan, rest, raced):
            return replace(plan, step_race=raced.race)
        kept = self._kept(plan, replaceable)
        return self._judged_without([one for one in replaceable if one not in kept], plan, raced)

    def _raced_with_peaks(self, plan: Plan, rest: Plan) -> Raced:
        # Taking a peak runs a step, which warms up both.
        peaks = [self._meter.peak_bytes(self._step, one) for one in (None, plan)]
        if _is_torchs(rest) or rest.kernels == plan.kernels:
            raced = self._race(plan, is_warm=True)
        else:
            raced = self._race_of_three(plan, rest)
        race = replace(raced.race, torch_peak_bytes=peaks[0], plan_peak_bytes=peaks[1])
        return raced._replace(race=race)

    def _race_of_three(self, plan: Plan, rest: Plan) -> Raced:
        """A race of torch's own, a plan, and those of its kernels that must stay planned."""
        self._meter.elapsed_ns(self._step, rest)
        runs = [partial(self._meter.elapsed_ns, self._step, one) for one in (None, rest, plan)]
        by_torch, by_rest, by_plan = race(
            runs, self._meter.is_over, True, lambda times: tells(times[2], times[1])
        )
        # Those that must stay planned may cost time, for which the others are not to blame.
        pays = raced_of(by_rest, by_plan).pays
        return Raced(raced_of(by_torch, by_plan).race, pays, raced_of(by_torch, by_rest).race)

    def _judged_without(self, dropped: Sequence[KernelPlan], plan: Plan, raced: Raced) -> Plan:
        """The plan without some kernels, and the race of what is left of it."""
        # All of it pays by halves, in shorter races than the one of the whole.
        if not dropped:
            return replace(plan, step_race=raced.race)
        left, race = _without(plan, dropped), raced.race
        torch_peak, plan_peak = race.torch_peak_bytes, race.plan_peak_bytes
        if _is_torchs(left):
            # The plan is torch's own now, so that there is nothing to race.
            race, plan_peak = StepRace(race.torch_ns, race.torch_ns, rounds=race.rounds), torch_peak
        elif raced.rest is not None and not any(has_default(plan, one) for one in _changed(left)):
            race = raced.rest
        elif self._meter.is_over(LEAST_STEPS):
            race = StepRace(reason="the time budget has no room for steps without what did not pay")
        else:
            # The first race was of another plan: steps without the dropped kernels are timed anew.
            race = self._race(left).race
        names = tuple(str(kernel.problem) for kernel in dropped)
        race = replace(race, torch_peak_bytes=torch_peak, plan_peak_bytes=plan_peak, dropped=names)
        return replace(left, step_race=race)

    def _pays(self, plan: Plan, rest: Plan, raced: Raced) -> bool:
        """True if steps are faster by the plan than without its replaceable kernels."""
        if raced.rest is not None or _is_torchs(rest):
            return raced.pays
        return not self._meter.is_over(LEAST_STEPS) and _is_proven(self._race(plan, rest))

    def _kept(self, plan: Plan, kernels: Sequence[KernelPlan]) -> list[KernelPlan]:
        """Find the kernels with which a step is faster than without them, by halving."""
        if len(kernels) == 1:
            return []
        middle, kept = len(kernels) // 2, list[KernelPlan]()
        for half in (kernels[:middle], kernels[middle:]):
            # What could not be shown to pay is given back to torch. Steps by what is left of the
            # plan are raced at the end.
            if self._meter.is_over(2 * LEAST_STEPS):
                break
            # torch's own convolutions for all that may be replaced but these, so that only these
            # are judged, against those that must stay planned alone.
            others = [kernel for kernel in plan.kernels if kernel not in half]
            with_half = _without(plan, [one for one in others if has_default(plan, one)])
            alone = _without(with_half, half)
            raced = self._race(with_half, None if _is_torchs(alone) else alone)
            kept += half if _is_proven(raced) else self._kept(plan, half)
        return kept

    def _race(self, plan: Plan, other: Plan | None = None, is_warm: bool = False) -> Raced:
        """Time steps by a plan and by another plan in turn; None: by torch's own convolutions."""
        runs = [partial(self._meter.elapsed_ns, self._step, one) for one in (other, plan)]
        return raced_of(*race(runs, self._meter.is_over, is_warm))


def race(
    runs: Sequence[Callable[[], int]],
    is_over: Callable[[int], bool],
    is_warm: bool = False,
    is_decided: Decided | None = None,
) -> list[list[int]]:
    """Time several ways to compute a step in turn, until it is clear which is faster.

    Args:
        runs: each runs a step and returns its time in ns.
        is_over: tells for a number of steps that there is no time for them; then no more rounds
            begin.
        is_warm: True if all have just run; else the first round does not count.
        is_decided: called with the times so far, in the order of `runs`; True ends the race.
            Default: it ends when one of two is clearly faster, or clearly neither.

    Returns:
        Times of each, one of each per round.
    """
    samples: list[list[int]] = [[] for _ in runs]
    order = list(range(len(runs)))
    is_decided = is_decided or (lambda times: tells(times[1], times[0]))
    # In random order no contestant always runs after the same other one, whose data is in the
    # caches.
    chance = random.Random(0)  # noqa: S311 - an order, not a secret
    # Round 0 warms up and does not count.
    for number in range(is_warm, _MOST_ROUNDS + 1):
        # One round is always taken, since a ratio needs a pair.
        if number > 1 and is_over(len(runs)):
            break
        chance.shuffle(order)
        for which in order:
            time_ns = runs[which]()
            if number:
                samples[which].append(time_ns)
        if number >= LEAST_ROUNDS and is_decided(samples):
            break
    return samples


def tells(ones: Sequence[int], others: Sequence[int]) -> bool:
    """True if the interval of the ratio shows a gain, a loss, or that there is neither.

    >>> tells([90, 91, 90], [100, 101, 99]), tells([90, 110, 100], [100, 100, 100])
    (True, False)

    Args:
        ones: times in ns, one per round.
        others: those of the other, in the same order.
    """
    _, low, high = ratio_interval(ones, others)
    return high < 1 or low > 1 + TOLERATED or (low > 1 - TOLERATED and high < 1 + TOLERATED)


def raced_of(by_torch: Sequence[int], by_plan: Sequence[int]) -> Raced:
    """The outcome of a race.

    >>> raced_of([100, 101, 99], [90, 91, 90]).pays, raced_of([100, 90, 99], [90, 91, 90]).pays
    (True, False)

    Args:
        by_torch: times of steps by torch's own convolutions in ns, one per round.
        by_plan: those by the plan.
    """
    ratio, low, high = ratio_interval(by_plan, by_torch)
    rounds, medians = len(by_plan), (median_ns(by_torch), median_ns(by_plan))
    outcome = StepRace(*medians, ratio, low, high, rounds)
    # Too few rounds prove nothing. The kernels are faster by races of their own.
    if rounds < LEAST_ROUNDS:
        return Raced(outcome, not outcome.is_loss)
    _, _, most = ratio_interval(by_plan, by_torch, CONFIDENCE)
    return Raced(outcome, most < 1)


def _is_proven(raced: Raced) -> bool:
    """True if steps are faster beyond the noise, which takes some rounds to know."""
    return raced.pays and raced.race.rounds >= LEAST_ROUNDS


def least_steps(plan: Plan) -> int:
    """Steps that judging a plan takes at least."""
    changed = _changed(plan)
    replaceable = sum(has_default(plan, kernel) for kernel in changed)
    # Kernels that must stay planned take part by themselves: one step to warm up, one in a round.
    return LEAST_STEPS + 2 * (0 < replaceable < len(changed))


def has_default(plan: Plan, kernel: KernelPlan) -> bool:
    """True if torch's own convolution may replace a kernel's plan.

    It must be within the workspace limit, and deterministic if the plan is. With a pool, or on
    several streams, it must need no more than the plan. It is never batch-invariant.

    Args:
        plan: the plan of the kernel.
        kernel: the kernel, with the measurement of its default.
    """
    if plan.config.deterministic and not kernel.default_is_deterministic:
        return False
    if kernel.micro_batch:
        return False
    limit = plan.limit_bytes(kernel)
    # The other calls of the step, or the other streams, own the rest.
    if plan.config.total_bytes is not None or (plan.memory and plan.memory.streams):
        limit = kernel.timing.workspace_bytes
    return kernel.default is not None and (limit is None or kernel.default.workspace_bytes <= limit)


def _changed(plan: Plan) -> list[KernelPlan]:
    """The kernels that are not torch's own."""
    return [kernel for kernel in plan.kernels if not kernel.is_default]


def _is_torchs(plan: Plan) -> bool:
    """True for a plan that changes nothing."""
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
