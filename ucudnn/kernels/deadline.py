"""The moment at which time is over: one value, made once and handed down in parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from time import monotonic


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
