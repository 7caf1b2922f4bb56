"""Possible gain of each kernel in a training step, which decides how much it is measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ucudnn.backends import Cost, Roofline
from ucudnn.tuning.effort import Effort

# A kernel below this many times the ignored share of the step is not measured beyond its default:
# to save the ignored share it would have to become faster by more than a tenth of its time.
_LOOKED_AT_ONCE = 10
# However small a kernel's share is, a known gain of this fraction of its time is taken.
_MOST_TOLERANCE = 0.25


def least_ns(costs: Iterable[Cost | None], roofline: Roofline | None) -> int:
    """Lower bound of a kernel's time by any of its algorithms; 0 if nothing is known.

    >>> least_ns([Cost(2000, 0, 0), Cost(0, 400, 0)], Roofline(1e9, 1e9, 0))
    400

    Args:
        costs: of all its algorithms.
        roofline: of the machine.
    """
    known = list(costs)
    # An algorithm whose cost is not known may be faster than all the others.
    if roofline is None or not all(known):
        return 0
    return min((roofline.time_ns(cost) for cost in known if cost is not None), default=0)


@dataclass(frozen=True, slots=True)
class Stake:
    """The part of one kernel in a step.

    Args:
        time_ns: time of all its calls by torch's own convolution.
        least_ns: lower bound of the time of these calls by any algorithm.
        is_forced: torch's own exceeds the workspace limit, so another plan must be found.
    """

    time_ns: int
    least_ns: int
    is_forced: bool

    @property
    def gain_ns(self) -> int:
        """Upper bound of the time that a plan saves; all of the time if a plan must be found."""
        return self.time_ns if self.is_forced else max(0, self.time_ns - self.least_ns)

    def is_ignored(self, step_ns: int, effort: Effort) -> bool:
        """True if torch's own convolution is kept without measuring anything else.

        >>> from ucudnn.tuning.effort import EFFORTS
        >>> Stake(900, 100, False).is_ignored(100_000, EFFORTS["normal"])  # 0.9 % of the step
        True

        Args:
            step_ns: of all kernels together.
            effort: which gains are too small to look for.
        """
        ignored_ns = effort.ignored_share * step_ns
        is_small = self.time_ns < _LOOKED_AT_ONCE * ignored_ns or self.gain_ns < ignored_ns
        return is_small and not self.is_forced

    def tolerance(self, step_ns: int, effort: Effort) -> float:
        """Fraction of the kernel's time: smaller possible gains are ignored.

        >>> from ucudnn.tuning.effort import EFFORTS
        >>> Stake(50_000, 0, True).tolerance(1_000_000, EFFORTS["normal"])
        0.06

        Args:
            step_ns: of all kernels together.
            effort: which gains are too small to look for.
        """
        if self.time_ns == 0:
            return 0.0
        # A fraction of the step, as a fraction of what the kernel takes of it.
        return min(_MOST_TOLERANCE, effort.tolerated_share * step_ns / self.time_ns)
