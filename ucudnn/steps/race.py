"""Rounds of whole steps by several contestants in turn, and what they show.

The convolutions of a step may be timed inside it. Their times show the gain of a plan in fewer
rounds than times of whole steps, whose noise may be larger than the gain of all convolutions.
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

# Largest number of rounds of one race; it is small because steps are long. The 95 % interval of so
# few pairs reaches from the smallest ratio to the largest, so one perturbed round can hide a
# difference.
_MOST_ROUNDS = 7

# Confidence of the intervals that decide whether steps are faster. With it, the interval of six or
# seven pairs leaves out the smallest and the largest ratio, so that one perturbed round cannot hide
# a difference. The interval of fewer pairs spans all ratios.
CONFIDENCE = 0.75

_Times = TypeVar("_Times")


class StepTimes(NamedTuple):
    """Time of a step, and of its kernels.

    On a GPU kernels are not timed inside steps: a step would have to wait for each of them, and
    would take longer.
    """

    step_ns: int
    # For each kernel, the time of all its calls in the step together; empty: they were not timed.
    kernels_ns: Mapping[Problem, int]


Samples = Sequence[Sequence[StepTimes]]


class Raced(NamedTuple):
    """A race of steps with its verdict."""

    # Times of steps by a plan and by torch's own convolutions.
    race: StepRace
    # True if steps by the plan are faster beyond the noise, or if its kernels, all together, are
    # faster inside the steps. Also True if there were too few rounds to know, and no clear loss.
    pays: bool
    # The kernels whose own median ratio over the rounds is below 1. None: it is not known which
    # ones are, or the steps are slower for another reason than the kernels.
    faster: frozenset[Problem] | None = None


def race(
    runs: Sequence[Callable[[], _Times]],
    is_over: Callable[[int], bool],
    is_decided: Callable[[Sequence[Sequence[_Times]]], bool],
    is_warm: bool = False,
) -> list[list[_Times]]:
    """Time several ways to compute a step in turn, until it is clear which is faster.

    Each way is timed once per round. After the first counted round, another one begins only if
    there is time for its steps (`is_over`). The first round warms up and does not count; it is left
    out if all ways have just run (`is_warm`).
    """
    samples: list[list[_Times]] = [[] for _ in runs]
    order = list(range(len(runs)))
    # The order is random, so that no contestant always runs after the same other one and finds that
    # one's data in the caches.
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
    """The times of whole steps, as one list for each contestant.

    >>> steps_ns([[StepTimes(3, {})], [StepTimes(4, {})]])
    [[3], [4]]
    """
    return [[one.step_ns for one in times] for times in samples]


def tells(ones: Sequence[int], others: Sequence[int]) -> bool:
    """True if the interval of the ratio of times clearly shows a gain, a loss or no difference.

    >>> tells([90, 91, 90], [100, 101, 99]), tells([90, 110, 100], [100, 100, 100])
    (True, False)
    """
    _, low, high = ratio_interval(ones, others)
    return high < 1 or low > 1 + TOLERATED or (low > 1 - TOLERATED and high < 1 + TOLERATED)


def raced_of(by_torch: Sequence[int], by_plan: Sequence[int]) -> Raced:
    """The outcome of a race of steps by torch and by a plan.

    >>> raced_of([100, 101, 99], [90, 91, 90]).pays, raced_of([100, 90, 99], [90, 91, 90]).pays
    (True, False)
    """
    ratio, low, high = ratio_interval(by_plan, by_torch)
    rounds = len(by_plan)
    outcome = StepRace(median_ns(by_torch), median_ns(by_plan), ratio, low, high, rounds)
    # So few rounds prove nothing. But each of the plan's kernels has won a race before, so the plan
    # is given up only for a clear loss.
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

    Only `kernels` are compared: those kernels of the plan that are torch's own in the steps
    `by_torch`.
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
    # The sum over all kernels can show a gain where the noise hides the small gain of each kernel.
    ones, others = (
        list(map(sum, zip(*times, strict=True))) for times in zip(*pairs.values(), strict=True)
    )
    raced = raced._replace(race=replace(raced.race, inside=ratio_interval(ones, others)))
    is_faster, is_slower = _is_faster(ones, others), _is_faster(others, ones)
    # In so few rounds whole steps may be slower by chance. The times of kernels vary less, so the
    # plan also pays if they are faster.
    if raced.race.rounds < LEAST_ROUNDS:
        return raced._replace(pays=raced.pays or is_faster)
    # The steps are slower although these kernels are not: something else slows them down.
    if raced.race.is_loss and not is_slower:
        return raced
    # Each kernel has won a race of its own before, so here a median ratio below 1 is enough.
    faster = frozenset(problem for problem, pair in pairs.items() if ratio_interval(*pair)[0] < 1)
    # A few rounds of whole steps may be faster by chance. So the plan does not pay if its kernels
    # are clearly slower.
    return raced._replace(pays=is_faster or (raced.pays and not is_slower), faster=faster)


def _is_faster(ones: Sequence[int], others: Sequence[int]) -> bool:
    """True if the times `ones` are shorter than the times `others`, beyond the noise."""
    _, _, most = ratio_interval(ones, others, CONFIDENCE)
    return most < 1


def _kernel_times(plan: Plan, steps: Sequence[StepTimes]) -> dict[Problem, list[int]]:
    """Times in ns of the kernels of a plan that ran in all of these steps, one time per step."""
    times: dict[Problem, list[int]] = {}
    for number, step in enumerate(steps):
        for problem, time_ns in step.kernels_ns.items():
            # The strides of a single sample do not show its layout, so both layouts are looked up
            # in the plan.
            for one in (problem, replace(problem, layout="nhwc")):
                if plan.covers(one):
                    of_kernel = times.setdefault(plan.kernel(one).problem, [0] * len(steps))
                    of_kernel[number] += time_ns
                    break
    return {problem: of_kernel for problem, of_kernel in times.items() if all(of_kernel)}
