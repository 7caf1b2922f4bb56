"""The time budget of one tuning run, and each kernel's part of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import monotonic

from ucudnn.tuning.session import Session

# Of the time that a group of kernels gets, this fraction is kept for timing whole calls: without
# it its plans would rest on predictions, the sums of their chunks.
_RACING = 0.4
# However little it could gain, a group gets this fraction of the time that is left.
_LEAST_PART = 0.05
# Steps that a race of whole steps takes at least: one that warms up and tells how long steps are,
# the peaks of two contestants, and one round.
LEAST_RACE_STEPS = 5


class Budget:
    """The time budget, counted from the creation of this object.

    Args:
        seconds: that tuning may take; None: not known yet, or no limit.
    """

    def __init__(self, seconds: float | None) -> None:
        self._began = self._counts_from = monotonic()
        self.seconds = seconds
        # A default budget, which is not known yet, has no end that must be kept.
        self._end = self.deadline = None if seconds is None else self._began + seconds
        self._least_s = self._race_from = 0.0

    def begin_tuning(
        self, seconds: float | None, reserved_s: float, started_s: float = 0.0
    ) -> None:
        """Set the budget, now that the time of a step is known, and count progress from now on.

        Args:
            seconds: from the creation of this object; None: no limit.
            reserved_s: seconds of these to leave for the race of whole steps; at most half.
            started_s: seconds in which a process to measure in was started. A default budget does
                not count them, or it could be over before anything was measured on a GPU.
        """
        # The first runs of torch's own convolutions tell nothing about how fast tuning proceeds.
        self._counts_from = monotonic()
        self.seconds = seconds
        if self._end is None:
            self._began += started_s
        if seconds is not None:
            # Half at most, or the race would leave a small budget nothing to measure in.
            self.deadline = self._race_from = self._began + seconds - min(seconds / 2, reserved_s)

    def extend(self, seconds: float | None) -> None:
        """Go on beyond the budget, if there is one, for some seconds; None: without a limit."""
        self.seconds = None
        if self.deadline is not None:
            self.deadline = None if seconds is None else monotonic() + seconds

    def extensions(self, default_s: float | None) -> list[Callable[[], None]]:
        """Functions that extend the deadline for kernels that exceed their limit without a plan.

        Of a budget that was set they get what is reserved for the race of steps. Otherwise they get
        as long again as the default budget, and then what they need for any plan at all.

        Args:
            default_s: the default budget in seconds.
        """
        if self._end is not None:
            return [self._use_reserve]
        return [partial(self.extend, seconds) for seconds in (default_s, None)]

    def go_on(self, race_s: float) -> bool:
        """Set the deadline for what is left of a budget that was set.

        What is reserved for the race of whole steps stays reserved if it is long enough for one.

        Args:
            race_s: seconds that the race takes at least.

        Returns:
            False if no budget was set.
        """
        if self._end is None:
            return False
        is_too_short = self._end - max(monotonic(), self._race_from) < race_s
        self.deadline = self._end if is_too_short else self._race_from
        return True

    @property
    def last_moment(self) -> float | None:
        """The `time.monotonic` at which a budget that was set ends, with all that is reserved."""
        return self._end

    def _use_reserve(self) -> None:
        self.deadline = self._end

    @property
    def is_over(self) -> bool:
        """True after the deadline."""
        return self.deadline is not None and monotonic() >= self.deadline

    def keep_for(self, count: int) -> None:
        """Keep half of the time that is left for so many kernels, which get equal parts of it.

        Finding any plan of a kernel takes some time, however little the kernel could gain.
        """
        if self.deadline is not None and count:
            self._least_s = max(0.0, self.deadline - monotonic()) / 2 / count

    def allot(self, session: Session, part: float, kept: int, waiting: int) -> None:
        """Give a session its part of the time that is left.

        Args:
            session: of the device that is to measure a group of kernels.
            part: of the time that is not kept, as a fraction.
            kept: number of kernels of this group for which time is kept.
            waiting: the same of all that are not finished.
        """
        if self.deadline is None:
            return
        left_s = max(0.0, self.deadline - monotonic())
        free_s = max(0.0, left_s - waiting * self._least_s)
        own_s = min(left_s, kept * self._least_s + max(part, _LEAST_PART) * free_s)
        session.race_until = monotonic() + own_s
        session.until = session.race_until - _RACING * own_s

    def seconds_left(self, done_ns: int, total_ns: int) -> float | None:
        """Estimated seconds until the end, or at most; None if nothing tells.

        Args:
            done_ns: time of torch's own convolution in the kernels that are finished.
            total_ns: time of torch's own convolution in all kernels.
        """
        most_s = None if self.deadline is None else max(0.0, self.deadline - monotonic())
        if not done_ns:
            return most_s
        # Tuning a kernel is taken to last in proportion to the time of torch's own convolution.
        left_s = (monotonic() - self._counts_from) * (total_ns - done_ns) / done_ns
        return left_s if most_s is None else min(left_s, most_s)
