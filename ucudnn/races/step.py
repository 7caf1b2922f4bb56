"""Races of whole steps by a plan against torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any, NamedTuple

from ucudnn.errors import PlanError
from ucudnn.problem import Problem
from ucudnn.units import TOO_LARGE, format_bytes, format_ns

# As a fraction of a step's time: a smaller difference, either way, decides nothing.
TOLERATED = 0.01
# Fewer rounds do not show how large the noise is; then only a loss of more than this counts.
LEAST_ROUNDS = 3
_CLEAR_LOSS = 0.1


class StepTimes(NamedTuple):
    """Times of a step, or means of several.

    Args:
        step_ns: of the step; on a GPU it has to wait for each kernel that is timed, which takes
            time, too.
        kernels_ns: of each kernel that was timed, all of its calls in the step together.
    """

    step_ns: int
    kernels_ns: Mapping[Problem, int]


@dataclass(frozen=True, slots=True)
class StepRace:
    """The outcome of a race of whole training steps, or the reason why there was none.

    >>> print(StepRace(110, 100, 0.91, 0.9, 0.92, 5))
    a step takes 0.91 (0.90 to 0.92) times as long as by torch's own: 100 ns against 110 ns

    Args:
        torch_ns: median time of a step by torch's own convolutions.
        plan_ns: median time of a step by the plan.
        ratio: median over the rounds of the plan's time over torch's.
        low: lower end of its 95 % interval.
        high: upper end.
        rounds: pairs of steps that were timed.
        torch_peak_bytes: peak of what a step by torch's own convolutions allocates.
        plan_peak_bytes: peak of what a step by the plan allocates.
        dropped: kernels given back to torch, because steps were not faster with their plans.
        reason: why no step was run; "" if steps were run.
        inside: ratio, low and high of the kernels that the plan changes, timed inside the steps of
            both, all of them together; None where they were not timed.

    Raises:
        PlanError: a value is of another type or out of range.
    """

    torch_ns: int = 0
    plan_ns: int = 0
    ratio: float = 1.0
    low: float = 1.0
    high: float = 1.0
    rounds: int = 0
    torch_peak_bytes: int = 0
    plan_peak_bytes: int = 0
    dropped: tuple[str, ...] = ()
    reason: str = ""
    inside: tuple[float, float, float] | None = None

    def __post_init__(self) -> None:
        # Values may come from a plan file that anybody wrote. Exact types, because True passes for
        # an int; Python's JSON reader accepts NaN and Infinity.
        peaks = (self.torch_peak_bytes, self.plan_peak_bytes)
        counts = (self.torch_ns, self.plan_ns, self.rounds, *peaks)
        if not all(type(count) is int and 0 <= count < TOO_LARGE for count in counts):
            raise PlanError(f"counts of a race of steps must be ints from 0, got {counts}")
        ratios = (self.ratio, self.low, self.high, *(self.inside or ()))
        if not all(type(ratio) is float and isfinite(ratio) and ratio > 0 for ratio in ratios):
            raise PlanError(f"ratios of a race of steps must be above 0, got {ratios}")
        if self.inside is not None and len(self.inside) != 3:
            raise PlanError(f"inside must be a ratio with its interval, got {self.inside}")
        if not all(isinstance(text, str) for text in (*self.dropped, self.reason)):
            raise PlanError("names and reasons of a race of steps must be strings")

    @property
    def is_loss(self) -> bool:
        """True if steps are slower by the plan, beyond the noise."""
        # The whole interval must lie above: noise is no reason to give a plan up.
        least = TOLERATED if self.rounds >= LEAST_ROUNDS else _CLEAR_LOSS
        return self.rounds > 0 and self.low > 1 + least

    def __str__(self) -> str:
        if self.reason:
            return f"the plan was not judged by whole steps: {self.reason}{self._about_dropped()}"
        text = (
            f"a step takes {self.ratio:.2f} ({self.low:.2f} to {self.high:.2f}) times as long as "
            f"by torch's own: {format_ns(self.plan_ns)} against {format_ns(self.torch_ns)}"
        )
        if self.plan_peak_bytes:
            planned, default = format_bytes(self.plan_peak_bytes), self.torch_peak_bytes
            text += (
                f", and its peak is {planned} above what was allocated before it, against "
                f"{format_bytes(default)}"
            )
        if self.inside is not None:
            ratio, low, high = self.inside
            text += (
                f"; inside steps the kernels that the plan changes take {ratio:.2f} "
                f"({low:.2f} to {high:.2f}) times as long"
            )
        return text + self._about_dropped()

    def _about_dropped(self) -> str:
        if not self.dropped:
            return ""
        several = len(self.dropped) > 1
        return (
            f"; {len(self.dropped)} kernel{'s' * several} did not pay there and "
            f"{'are' if several else 'is'} torch's own"
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {**asdict(self), "dropped": list(self.dropped)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StepRace:
        """Build one from the JSON values of `to_dict`."""
        inside = None if values["inside"] is None else tuple(values["inside"])
        return cls(**{**values, "inside": inside, "dropped": tuple(values["dropped"])})
