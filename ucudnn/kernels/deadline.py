"""Time for tuning: the moment at which it is over, and what an effort spends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from time import monotonic

from ucudnn.benchmark.protocol import FINALS, Protocol

# The least number of steps in a race of whole steps: one to warm up and to see how long steps are,
# two for the peaks of torch and of the plan, and two for one round.
LEAST_RACE_STEPS = 5


@dataclass(frozen=True, order=True, slots=True)
class Deadline:
    """A moment at which time is over, or never; of two deadlines, `min` is the earlier one.

    >>> whole = Deadline.within(8.0, clock=lambda: 100.0)
    >>> whole.left_s(), whole.part(0.25).left_s()
    (8.0, 2.0)
    >>> whole.has_time(4, 10**9), whole.has_time(4, 3 * 10**9)
    (True, False)
    >>> Deadline.never().part(0.25) == Deadline.never()
    True

    Args:
        at_s: the reading of the clock at which time is over; infinity: never.
        clock: tells the time in seconds; a test may hand in one of its own.
    """

    at_s: float = inf
    clock: Callable[[], float] = field(default_factory=lambda: monotonic, compare=False, repr=False)

    @classmethod
    def within(cls, seconds: float, clock: Callable[[], float] | None = None) -> Deadline:
        """The deadline in so many seconds from now."""
        return cls.never(clock).at_most(seconds)

    @classmethod
    def never(cls, clock: Callable[[], float] | None = None) -> Deadline:
        """No deadline."""
        return cls() if clock is None else cls(clock=clock)

    def left_s(self) -> float:
        """Seconds that are left, at least 0; infinity if time is never over."""
        return max(0.0, self.at_s - self.clock())

    @property
    def is_over(self) -> bool:
        """True from the deadline on."""
        return self.clock() >= self.at_s

    def has_time(self, steps: float, step_ns: float) -> bool:
        """True if so many steps, of so many ns each, are expected to end in time."""
        return self.clock() + steps * step_ns / 1e9 <= self.at_s

    def part(self, share: float) -> Deadline:
        """The deadline for this share, above 0, of the time that is left."""
        return self.at_most(share * self.left_s())

    def at_most(self, seconds: float) -> Deadline:
        """The deadline in so many seconds from now, but not after this one."""
        return replace(self, at_s=min(self.at_s, self.clock() + seconds))

    def later(self, seconds: float) -> Deadline:
        """The deadline so many seconds after this one."""
        return replace(self, at_s=self.at_s + seconds)


@dataclass(frozen=True, slots=True)
class EffortLimits:
    """The limits of one value of `Config.effort`; here a step means only its convolutions."""

    # The default time budget in training steps, None for no budget, and its bounds in seconds.
    budget_steps: int | None
    least_budget_s: float
    most_budget_s: float
    # Only torch's own convolution is measured for a kernel that could gain less than this fraction
    # of a step's time, or that takes less than ten times this fraction.
    ignored_share: float
    # A kernel is measured no further when a better split could gain no more than this fraction of a
    # step's time.
    tolerated_share: float
    # How chunks are timed, and how whole calls are timed.
    chunks: Protocol
    wholes: Protocol

    def budget_s(self, step_ns: int, *, on_gpu: bool = False) -> float | None:
        """The default time budget in seconds, for everything that `tune` does.

        >>> [EFFORTS["normal"].budget_s(step_ns) for step_ns in (1_000, 400_000_000, 2 * 10**9)]
        [10.0, 40.0, 45.0]
        """
        if self.budget_steps is None:
            return None
        # The time of a step on a GPU says little about that of tuning: steps are short, and each
        # candidate costs milliseconds on the host.
        if on_gpu:
            return self.most_budget_s
        budget_s = max(self.least_budget_s, self.budget_steps * step_ns / 1e9)
        return min(budget_s, self.most_budget_s)


# Rounds of whole calls: with nine pairs, the 95 % interval leaves out the smallest and the largest
# ratio. With eight or fewer it spans all ratios, so one perturbed pair can hide a gain. With three,
# noise can look like a gain, which the race of whole steps then rejects.
EFFORTS = {
    "quick": EffortLimits(
        budget_steps=25,
        least_budget_s=5.0,
        most_budget_s=30.0,
        ignored_share=0.005,
        tolerated_share=0.01,
        chunks=Protocol(least_rounds=2, most_rounds=3, target=0.1, enough_ns=200_000_000),
        wholes=replace(FINALS, least_rounds=3, most_rounds=5, warm_ups=2, stops_when_decided=True),
    ),
    "normal": EffortLimits(
        budget_steps=100,
        least_budget_s=10.0,
        most_budget_s=45.0,
        ignored_share=0.001,
        tolerated_share=0.003,
        chunks=Protocol(least_rounds=2, most_rounds=4, enough_ns=200_000_000),
        wholes=replace(FINALS, least_rounds=3, most_rounds=7, warm_ups=2, stops_when_decided=True),
    ),
    # With "thorough", no gain is too small to be searched for. No algorithm is ruled out by a
    # roofline either, because the session uses a roofline only if `ignored_share` is above 0.
    "thorough": EffortLimits(
        budget_steps=None,
        least_budget_s=0.0,
        most_budget_s=0.0,
        ignored_share=0.0,
        tolerated_share=0.0,
        chunks=Protocol(),
        wholes=FINALS,
    ),
}
