"""Rounds of whole steps by several contestants in turn, and what they show.

The convolutions of a step may be timed inside it. What a plan gains there is seen in fewer rounds
than in the time of the whole step, whose noise may be larger than all of its convolutions gain.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from ucudnn.benchmark.statistics import median_ns, ratio_interval
from ucudnn.outcomes import LEAST_ROUNDS, TOLERATED, StepRace
from ucudnn.plan import KernelPlan, Plan
from ucudnn.problem import Problem

# Rounds of one race. Steps are long, so there are few: the 95 % interval of up to seven pairs
# reaches from the smallest ratio to the largest, and one perturbed round can hide a difference.
_MOST_ROUNDS = 7

# With it one perturbed round of seven is forgiven, and of fewer none.
CONFIDENCE = 0.75

_Times = TypeVar("_Times")


class StepTimes(NamedTuple):
    """Times of a step, or means of several.

    On a GPU a step waits for each kernel that is timed, which takes time, too.
    """

    step_ns: int
    # All calls of a kernel in the step together.
    kernels_ns: Mapping[Problem, int]


Samples = Sequence[Sequence[StepTimes]]


class Raced(NamedTuple):
    """A race of steps with its verdict."""

    # Times of steps by a plan and by torch's own convolutions.
    race: StepRace
    # Steps are faster by the plan beyond the noise, or its kernels inside them, all together; or
    # there was no time for the rounds that it takes to know.
    pays: bool
    # The kernels that are faster inside most steps, each by itself; None: not known, or of no use,
    # because the steps are slower all the same.
    faster: frozenset[Problem] | None = None
    # Times of steps by the kernels that must stay planned and by torch, if those took part; then
    # the plan was compared with these.
    rest: StepRace | None = None


def race(
    runs: Sequence[Callable[[], _Times]],
    is_over: Callable[[int], bool],
    is_decided: Callable[[Sequence[Sequence[_Times]]], bool],
    is_warm: bool = False,
) -> list[list[_Times]]:
    """Times of several ways to compute a step in turn, until it is clear which is faster.

    Each has one time per round. No round begins if `is_over` says that there is no time for so many
    steps. The first round does not count unless all have just run (`is_warm`).
    """
    samples: list[list[_Times]] = [[] for _ in runs]
    order = list(range(len(runs)))
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
            times = runs[which]()
            if number:
                samples[which].append(times)
        if number >= LEAST_ROUNDS and is_decided(samples):
            break
    return samples


def steps_ns(samples: Samples) -> list[list[int]]:
    """Times of whole steps, of each contestant.

    >>> steps_ns([[StepTimes(3, {})], [StepTimes(4, {})]])
    [[3], [4]]
    """
    return [[one.step_ns for one in times] for times in samples]


def tells(ones: Sequence[int], others: Sequence[int]) -> bool:
    """True if the interval of the ratio shows a gain, a loss, or that there is neither.

    >>> tells([90, 91, 90], [100, 101, 99]), tells([90, 110, 100], [100, 100, 100])
    (True, False)
    """
    _, low, high = ratio_interval(ones, others)
    return high < 1 or low > 1 + TOLERATED or (low > 1 - TOLERATED and high < 1 + TOLERATED)


def raced_of(by_torch: Sequence[int], by_plan: Sequence[int]) -> Raced:
    """The outcome of a race.

    >>> raced_of([100, 101, 99], [90, 91, 90]).pays, raced_of([100, 90, 99], [90, 91, 90]).pays
    (True, False)
    """
    ratio, low, high = ratio_interval(by_plan, by_torch)
    rounds = len(by_plan)
    outcome = StepRace(median_ns(by_torch), median_ns(by_plan), ratio, low, high, rounds)
    # Too few rounds prove nothing. The kernels are faster by races of their own.
    if rounds < LEAST_ROUNDS:
        return Raced(outcome, not outcome.is_loss)
    return Raced(outcome, _is_faster(by_plan, by_torch))


def raced_inside(
    by_torch: Sequence[StepTimes],
    by_plan: Sequence[StepTimes],
    plan: Plan,
    kernels: Collection[KernelPlan],
) -> Raced:
    """The outcome of a race in which the kernels of steps were timed, too.

    Compared are those kernels of the plan that torch computes in the other steps.
    """
    raced = raced_of(*steps_ns([by_torch, by_plan]))
    planned, torchs = (_kernel_times(plan, times) for times in (by_plan, by_torch))
    pairs = {
        one.problem: (planned[one.problem], torchs[one.problem])
        for one in kernels
        if one.problem in planned and one.problem in torchs
    }
    if not pairs:
        return raced
    # Many small gains are seen together, where each of them is hidden by its noise.
    ones, others = (
        list(map(sum, zip(*times, strict=True))) for times in zip(*pairs.values(), strict=True)
    )
    raced = raced._replace(race=replace(raced.race, inside=ratio_interval(ones, others)))
    is_faster, is_slower = _is_faster(ones, others), _is_faster(others, ones)
    # In so few rounds steps may be slower by chance, which kernels are less.
    if raced.race.rounds < LEAST_ROUNDS:
        return raced._replace(pays=raced.pays or is_faster)
    # Something else than these kernels slows the steps down.
    if raced.race.is_loss and not is_slower:
        return raced
    # Each has won a race of its own before, so that it need not prove once more that it is faster.
    faster = frozenset(problem for problem, pair in pairs.items() if ratio_interval(*pair)[0] < 1)
    # Whole steps may be faster by chance in a few rounds, though their kernels are slower.
    return raced._replace(pays=is_faster or (raced.pays and not is_slower), faster=faster)


def _is_faster(ones: Sequence[int], others: Sequence[int]) -> bool:
    """True if one is faster than the other beyond the noise."""
    _, _, most = ratio_interval(ones, others, CONFIDENCE)
    return most < 1


def _kernel_times(plan: Plan, steps: Sequence[StepTimes]) -> dict[Problem, list[int]]:
    """Times in ns of the kernels of a plan, one per step; of those that ran in all of the steps."""
    times: dict[Problem, list[int]] = {}
    for number, step in enumerate(steps):
        for problem, time_ns in step.kernels_ns.items():
            # Strides of a single sample do not tell in which layout it is.
            for one in (problem, replace(problem, layout="nhwc")):
                if plan.covers(one):
                    of_kernel = times.setdefault(plan.kernel(one).problem, [0] * len(steps))
                    of_kernel[number] += time_ns
                    break
    return {problem: of_kernel for problem, of_kernel in times.items() if all(of_kernel)}
