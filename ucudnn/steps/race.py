"""Whole steps in turn: how they are timed, by plans and by torch, and what their rounds show.

The convolutions of a step may be timed inside it. Their times show the gain of a plan in fewer
rounds than times of whole steps, whose noise may be larger than the gain of all convolutions.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

from ucudnn.backends import AbstractBackend
from ucudnn.benchmark.statistics import median_ns, ratio_interval
from ucudnn.execution.observers import KernelTimer
from ucudnn.execution.override import Installation
from ucudnn.execution.runner import Runner
from ucudnn.kernels.deadline import Deadline
from ucudnn.outcomes import StepRace, Way
from ucudnn.plan import KernelPlan, Plan
from ucudnn.problem import Problem
from ucudnn.verdict import CONFIDENCE, LEAST_ROUNDS, is_clear, is_faster

# Largest number of rounds of one race; it is small because steps are long. The 95 % interval of so
# few pairs reaches from the smallest ratio to the largest, so one perturbed round can hide a
# difference.
_MOST_ROUNDS = 7

Step = Callable[[], None]
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

    def with_peaks(self, torchs: int, plans: int) -> Raced:
        """The same, with the peaks of steps by torch and by the plan."""
        race = replace(self.race, torch_peak_bytes=torchs, plan_peak_bytes=plans)
        return self._replace(race=race)


class StepMeter:
    """Measures steps of a model by plans, or by torch's own convolutions, until a deadline.

    Args:
        backend: runs the steps.
        plans: the plans that steps will follow.
        deadline: when the last step must end.
        step_ns: time of one step, from which the end of further steps is estimated; 0: not known.
        held_bytes: memory that is allocated all through each step.
    """

    def __init__(
        self,
        backend: AbstractBackend,
        plans: Iterable[Plan],
        deadline: Deadline,
        step_ns: int = 0,
        held_bytes: int = 0,
    ) -> None:
        self._backend, self.deadline, self.step_ns = backend, deadline, step_ns
        self._held_bytes = held_bytes
        # Shortest times so far of a step by torch (False) and by a plan (True). The shortest ones
        # are kept, because the first step may take much longer than the next ones.
        self._shortest_ns: dict[bool, int] = {}
        # Runners by the id of their plan, with the calls that were looked up: otherwise each step
        # would look up all its calls again, and that would count as time of the step. A runner
        # holds its plan, so that no other plan can get the same id.
        self._runners: dict[int, Runner] = {}
        kernels = (kernel for plan in plans for kernel in plan.kernels)
        self._changed = {one.problem.w_shape for one in kernels if not one.is_default}

    def is_over(self, steps: int = 0) -> bool:
        """True if there is no time for `steps` more steps."""
        return not self.deadline.has_time(steps, self.step_ns)

    def race(
        self,
        runs: Sequence[tuple[Step, Plan | None]],
        is_decided: Callable[[Samples], bool],
        is_warm: bool = False,
        most_rounds: int = _MOST_ROUNDS,
    ) -> Samples:
        """Time steps in turn, each by a plan or, if that is None, by torch: see `race`."""
        timed = [partial(self.times, *run) for run in runs]
        return race(timed, self.is_over, is_decided, is_warm, most_rounds)

    def times(self, step: Step, plan: Plan | None) -> StepTimes:
        """Time of one step, and of its kernels if these can be timed inside it."""
        with self.following(plan) as kernels_ns:
            time_ns = self._backend.elapsed_ns(step)
        self._note(time_ns, plan)
        return StepTimes(time_ns, kernels_ns)

    def peak_bytes(self, step: Step, plan: Plan | None) -> int:
        """Peak of one step by a plan, with all that is held; None: by torch's own convolutions."""
        times = list[int]()
        with self.following(plan, is_timed=False):
            span = self._backend.span(lambda: times.append(self._backend.elapsed_ns(step)))
        # Watching memory makes a step longer, so its time counts only if no shorter one is known.
        if not self.step_ns or times[0] < self.step_ns:
            self._note(times[0], plan)
        return self._held_bytes + span.peak_bytes

    def _note(self, time_ns: int, plan: Plan | None) -> None:
        is_planned = plan is not None
        self._shortest_ns[is_planned] = min(time_ns, self._shortest_ns.get(is_planned, time_ns))
        self.step_ns = max(self._shortest_ns.values())

    @contextmanager
    def following(
        self, plan: Plan | None, is_timed: bool = True
    ) -> Iterator[Mapping[Problem, int]]:
        """Follow a plan, or torch, and time the convolutions that any of the plans changes."""
        runner = None if plan is None else self._runner(plan)
        device = self._backend.device().type
        timer = KernelTimer(self._backend.elapsed_ns, runner, self._changed)
        # On a GPU kernels are not timed inside a step: the host goes on while the GPU computes, and
        # a step would have to wait for each kernel that is timed.
        watcher = timer if is_timed and device == "cpu" else runner
        with nullcontext() if watcher is None else Installation(device, watcher):
            yield timer.times_ns

    def _runner(self, plan: Plan) -> Runner:
        if id(plan) not in self._runners:
            # A step of a race may have shapes that the plan does not cover: torch computes them,
            # whatever the user's setting `unplanned` is.
            self._runners[id(plan)] = Runner(plan, replace(plan.config, unplanned="torch"))
        return self._runners[id(plan)]


def race(
    runs: Sequence[Callable[[], _Times]],
    is_over: Callable[[int], bool],
    is_decided: Callable[[Sequence[Sequence[_Times]]], bool],
    is_warm: bool = False,
    most_rounds: int = _MOST_ROUNDS,
) -> list[list[_Times]]:
    """Time several ways to compute a step in turn, until it is clear which is faster.

    Each way is timed once per round. After the first counted round, another one begins only if
    there is time for its steps (`is_over`). The first round warms up and does not count; it is left
    out if all ways have just run (`is_warm`).
    """
    samples: list[list[_Times]] = [[] for _ in runs]
    order = list(range(len(runs)))
    # The order is random, so that no way always runs after the same other one and finds that one's
    # data in the caches.
    chance = random.Random(0)  # noqa: S311 - an order, not a secret
    # Round 0 warms up and does not count.
    for number in range(is_warm, most_rounds + 1):
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


def timed(ways: Iterable[Way], samples: Sequence[Sequence[int]]) -> tuple[Way, ...]:
    """The ways with the times of their race; ratios are to the first way.

    >>> timed([Way("torch", "torch"), Way("plan", "plan")], [[100], [80]])[1].ratios
    (0.8, 0.8, 0.8)
    """
    found = []
    for way, times in zip(ways, samples, strict=True):
        ratio, low, high = ratio_interval(times, samples[0])
        one = replace(way, time_ns=median_ns(times), rounds=len(times))
        found.append(replace(one, ratio=ratio, low=low, high=high))
    return tuple(found)


def steps_ns(samples: Samples) -> list[list[int]]:
    """The times of whole steps, as one list for each way.

    >>> steps_ns([[StepTimes(3, {})], [StepTimes(4, {})]])
    [[3], [4]]
    """
    return [[one.step_ns for one in times] for times in samples]


def tells(ones: Sequence[int], others: Sequence[int]) -> bool:
    """True if the interval of the ratio of times clearly shows a gain, a loss or no difference.

    >>> tells([90, 91, 90], [100, 101, 99]), tells([90, 110, 100], [100, 100, 100])
    (True, False)
    """
    return is_clear(ratio_interval(ones, others))


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
    return is_faster(ratio_interval(ones, others, CONFIDENCE))


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
