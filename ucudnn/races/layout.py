"""Steps of a model in its own layout and in channels_last: a hint, and the race of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from ucudnn.errors import PlanError
from ucudnn.units import TOO_LARGE, format_ns

MEMORY_FORMATS = ("keep", "channels_last")
# As a fraction of a step's time: a smaller difference of the medians of a hint's few rounds is
# noise.
_HINTED = 0.05


@dataclass(frozen=True, slots=True)
class LayoutHint:
    """Steps in channels_last beside those of a plan that keeps the model's layout.

    >>> LayoutHint(channels_last_ns=80, plan_ns=100, rounds=2).ratio
    0.8
    >>> print(LayoutHint(reason="it fails there"))
    channels_last was not tried: it fails there

    Args:
        channels_last_ns: median time of a step by torch's own convolutions in channels_last.
        plan_ns: the same by the plan, in the model's own layout.
        rounds: in which both ran one step.
        reason: why they did not, "" where they did.

    Raises:
        PlanError: a value is of another type or out of range.
    """

    channels_last_ns: int = 0
    plan_ns: int = 0
    rounds: int = 0
    reason: str = ""

    def __post_init__(self) -> None:
        # Values may come from a plan file that anybody wrote. Exact types, because True passes for
        # an int.
        counts = (self.channels_last_ns, self.plan_ns, self.rounds)
        if not all(type(count) is int and 0 <= count < TOO_LARGE for count in counts):
            raise PlanError(f"counts of a layout hint must be ints from 0, got {counts}")
        if not isinstance(self.reason, str) or (not self.reason and 0 in counts):
            raise PlanError(f"a layout hint has times or a reason, got {counts}, {self.reason!r}")

    @property
    def ratio(self) -> float:
        """Time of a step in channels_last over that by the plan; 1 where neither was run."""
        return self.channels_last_ns / self.plan_ns if self.plan_ns else 1.0

    def __str__(self) -> str:
        if self.reason:
            return f"channels_last was not tried: {self.reason}"
        text = (
            f"a step by torch in channels_last takes {self.ratio:.2f} times as long as by this "
            f"plan ({format_ns(self.channels_last_ns)} against {format_ns(self.plan_ns)}, median "
            f"of {self.rounds} round{'s' * (self.rounds > 1)})"
        )
        if self.ratio < 1 - _HINTED:
            text += ': layout="auto" would make a plan for channels_last, too'
        return text

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LayoutHint:
        """Build one from the JSON values of `to_dict`."""
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way to compute the steps of a model: by torch or by a plan, in one layout.

    >>> Contestant("channels_last", True, 90).name
    'plan in channels_last'

    Args:
        memory_format: "keep", as the model was, or "channels_last".
        is_plan: True: by the plan made for that layout; False: by torch's own convolutions.
        time_ns: median time of a step; if no step was run, the sum of its kernels.
        ratio: median over the rounds of its time over torch's in the model's own layout.
        low: lower end of its 95 % interval.
        high: upper end.
        peak_bytes: peak of allocated memory in a step; 0 if none was run.
        is_allowed: False for torch's own convolutions if they exceed the workspace limit: they are
            timed, but never chosen.

    Raises:
        PlanError: a value is of another type or out of range.
    """

    memory_format: str
    is_plan: bool
    time_ns: int
    ratio: float = 1.0
    low: float = 1.0
    high: float = 1.0
    peak_bytes: int = 0
    is_allowed: bool = True

    def __post_init__(self) -> None:
        if self.memory_format not in MEMORY_FORMATS:
            raise PlanError(
                f"the memory format of a contestant must be one of {', '.join(MEMORY_FORMATS)}, "
                f"got {self.memory_format!r}"
            )
        # Values may come from a plan file that anybody wrote. Exact types, because True passes for
        # an int; Python's JSON reader accepts NaN and Infinity.
        counts = (self.time_ns, self.peak_bytes)
        if not all(type(count) is int and 0 <= count < TOO_LARGE for count in counts):
            raise PlanError(f"counts of a contestant must be ints from 0, got {counts}")
        ratios = (self.ratio, self.low, self.high)
        if not all(type(ratio) is float and isfinite(ratio) and ratio > 0 for ratio in ratios):
            raise PlanError(f"ratios of a contestant must be above 0, got {ratios}")
        if not all(type(switch) is bool for switch in (self.is_plan, self.is_allowed)):
            raise PlanError("is_plan and is_allowed of a contestant must be true or false")

    @property
    def name(self) -> str:
        """Name in tables."""
        who = "plan" if self.is_plan else "torch"
        return who if self.memory_format == "keep" else f"{who} in channels_last"


@dataclass(frozen=True, slots=True)
class LayoutRace:
    """How the layout of a model was decided.

    >>> torchs, plans = Contestant("keep", False, 100), Contestant("channels_last", True, 80, 0.8)
    >>> LayoutRace((torchs, plans), winner=1, rounds=5).memory_format
    'channels_last'
    >>> print(LayoutRace(reason="it has no tensors of four or five axes"))
    the model keeps its layout: it has no tensors of four or five axes

    Args:
        contestants: the contestants; empty if there was nothing to compare.
        winner: index of the contestant that won.
        rounds: number of rounds, in each of which every contestant ran one step; 0: the sums of the
            kernels' times were compared.
        reason: why the model keeps its layout, or why no steps were run; "" if steps were run.

    Raises:
        PlanError: a value is of another type or out of range.
    """

    contestants: tuple[Contestant, ...] = ()
    winner: int = 0
    rounds: int = 0
    reason: str = ""

    def __post_init__(self) -> None:
        if type(self.rounds) is not int or not 0 <= self.rounds < TOO_LARGE:
            raise PlanError(f"rounds of a race of layouts must be an int from 0, got {self.rounds}")
        # Without contestants the index is 0, its default.
        most = max(1, len(self.contestants))
        if type(self.winner) is not int or not 0 <= self.winner < most:
            raise PlanError(f"winner must be the index of a contestant, got {self.winner!r}")
        if not isinstance(self.reason, str):
            raise PlanError(f"reason must be a string, got {self.reason!r}")

    @property
    def memory_format(self) -> str:
        """The layout that won; the model's own if nothing was compared."""
        # A race that did not take place changes nothing about the model.
        return self.contestants[self.winner].memory_format if self.contestants else "keep"

    @property
    def is_by_sums(self) -> bool:
        """True if no step was run, and the sums of the kernels' times decided."""
        return bool(self.contestants) and self.rounds == 0

    def __str__(self) -> str:
        if not self.contestants:
            return f"the model keeps its layout: {self.reason}"
        winner = self.contestants[self.winner]
        chosen = "the model's own" if winner.memory_format == "keep" else winner.memory_format
        if self.is_by_sums:
            sums = (f"{one.name} {format_ns(one.time_ns)}" for one in self.contestants)
            return (
                f"the layout is {chosen} by the sums of kernels, because no steps were compared "
                f"({self.reason}): {', '.join(sums)}"
            )
        # Torch in the model's own layout comes first: all ratios are to it.
        first = self.contestants[0]
        if winner is first:
            least = format_ns(first.time_ns)
            return f"the layout is {chosen}: torch's own steps are the fastest, {least}"
        return (
            f"the layout is {chosen}: a step by {winner.name} takes {winner.ratio:.2f} "
            f"({winner.low:.2f} to {winner.high:.2f}) times as long as by {first.name}, "
            f"{format_ns(winner.time_ns)} against {format_ns(first.time_ns)}"
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {**asdict(self), "contestants": [asdict(one) for one in self.contestants]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LayoutRace:
        """Build one from the JSON values of `to_dict`."""
        contestants = tuple(Contestant(**one) for one in values["contestants"])
        return cls(**{**values, "contestants": contestants})
