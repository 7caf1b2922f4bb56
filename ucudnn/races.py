"""Whole steps: races of a plan against torch and of two layouts, and the memory of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import isfinite
from typing import Any

from ucudnn.errors import PlanError
from ucudnn.units import format_bytes, format_ns

# As a fraction of a step's time: a smaller difference, either way, decides nothing.
TOLERATED = 0.01
MEMORY_FORMATS = ("keep", "channels_last")
# Numbers in plan files stay below this, so that 64-bit readers can hold them.
_LARGEST = 1 << 63


@dataclass(frozen=True, slots=True)
class StepRace:
    """The outcome of a race of whole steps, or the reason why there was none.

    >>> print(StepRace(110, 100, 0.91, 0.9, 0.92, 5))
    a step takes 0.91 (0.90 to 0.92) times as long as by torch's own: 100 ns against 110 ns

    Args:
        torch_ns: median time of a step by torch's own convolutions.
        plan_ns: the same by the plan.
        ratio: median over the rounds of the plan's time over torch's.
        low: lower end of its 95 % interval.
        high: upper end.
        rounds: pairs of steps that were timed.
        torch_peak_bytes: peak of allocated memory of a step by torch's own.
        plan_peak_bytes: the same by the plan.
        dropped: kernels given back to torch because steps were slower by their plans.
        reason: why no step was run, "" where some were.

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

    def __post_init__(self) -> None:
        # Values may come from a plan file that anybody wrote. Exact types, because True passes for
        # an int; Python's JSON reader accepts NaN and Infinity.
        peaks = (self.torch_peak_bytes, self.plan_peak_bytes)
        counts = (self.torch_ns, self.plan_ns, self.rounds, *peaks)
        if not all(type(count) is int and 0 <= count < 1 << 63 for count in counts):
            raise PlanError(f"counts of a race of steps must be ints from 0, got {counts}")
        ratios = (self.ratio, self.low, self.high)
        if not all(type(ratio) is float and isfinite(ratio) and ratio > 0 for ratio in ratios):
            raise PlanError(f"ratios of a race of steps must be above 0, got {ratios}")
        if not all(isinstance(text, str) for text in (*self.dropped, self.reason)):
            raise PlanError("names and reasons of a race of steps must be strings")

    @property
    def is_loss(self) -> bool:
        """True where steps are slower by the plan, beyond the noise."""
        # The whole interval must lie above: noise is no reason to give a plan up.
        return self.rounds > 0 and self.low > 1 + TOLERATED

    def __str__(self) -> str:
        if self.reason:
            return f"the plan was not judged by whole steps: {self.reason}"
        text = (
            f"a step takes {self.ratio:.2f} ({self.low:.2f} to {self.high:.2f}) times as long as "
            f"by torch's own: {format_ns(self.plan_ns)} against {format_ns(self.torch_ns)}"
        )
        if self.plan_peak_bytes:
            planned, default = format_bytes(self.plan_peak_bytes), self.torch_peak_bytes
            text += f", and allocates {planned} at its peak against {format_bytes(default)}"
        if self.dropped:
            text += f"; {len(self.dropped)} kernels did not pay there and are torch's own"
        return text

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {**asdict(self), "dropped": list(self.dropped)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StepRace:
        """Build one from JSON values; fields of later versions are left out."""
        known = {name: values[name] for name in cls.__slots__ if name in values}
        return cls(**{**known, "dropped": tuple(values["dropped"])})


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Memory of a whole step: the budget, what is live all along, and peaks.

    >>> memory = StepMemory(100, 20, 0, 40, 10, 90, 130, 98, is_training=True)
    >>> memory.workspace_share  # of torch's peak
    0.3076923076923077

    Args:
        budget_bytes: that the step may have allocated at any moment.
        parameters_bytes: parameters of the model.
        gradients_bytes: gradients that existed when tuning began.
        optimizer_bytes: state of the optimisers that existed then.
        other_bytes: buffers and inputs; on a GPU also what else the process had allocated.
        own_peak_bytes: peak of a step without any workspace of its convolutions.
        torch_peak_bytes: peak by torch's own convolutions.
        plan_peak_bytes: peak by the plan; 0 where it was not taken yet.
        is_training: of forward and backward; else of forward without a graph.
        forced_by: the kernel whose smallest plan decided the budget, where the settings asked for
            less than is possible; "" elsewhere.

    Raises:
        PlanError: a value is of another type or out of range.
    """

    budget_bytes: int
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    other_bytes: int
    own_peak_bytes: int
    torch_peak_bytes: int
    plan_peak_bytes: int = 0
    is_training: bool = True
    forced_by: str = ""

    def __post_init__(self) -> None:
        # Values may come from a plan file that anybody wrote.
        sizes = [value for name, value in asdict(self).items() if name.endswith("_bytes")]
        if not all(type(size) is int and 0 <= size < _LARGEST for size in sizes):
            raise PlanError(f"sizes of a step's memory must be ints from 0, got {sizes}")
        if type(self.is_training) is not bool or not isinstance(self.forced_by, str):
            raise PlanError("is_training of a step's memory must be a bool, forced_by a string")

    @property
    def workspace_share(self) -> float:
        """Fraction of torch's peak that is there because of workspace."""
        if not self.torch_peak_bytes:
            return 0.0
        return max(0, self.torch_peak_bytes - self.own_peak_bytes) / self.torch_peak_bytes

    def __str__(self) -> str:
        parts = {
            "parameters": self.parameters_bytes,
            "gradients": self.gradients_bytes,
            "optimiser state": self.optimizer_bytes,
            "buffers, inputs and others": self.other_bytes,
        }
        held = ", ".join(f"{format_bytes(size)} of {name}" for name, size in parts.items() if size)
        kind = "a training step" if self.is_training else "an inference"
        text = (
            f"{kind} has at most {format_bytes(self.own_peak_bytes)} allocated without any "
            f"workspace ({held or 'nothing'} all along), {format_bytes(self.torch_peak_bytes)} by "
            f"torch's own convolutions, of which workspace is {self.workspace_share:.0%}"
        )
        if self.plan_peak_bytes:
            text += f", and {format_bytes(self.plan_peak_bytes)} by the plan"
        text += f"; the budget is {format_bytes(self.budget_bytes)}"
        if self.forced_by:
            text += f", because the smallest plan of {self.forced_by} needs as much"
        return text

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StepMemory:
        """Build one from JSON values; fields of later versions are left out."""
        return cls(**{name: values[name] for name in cls.__slots__ if name in values})


@dataclass(frozen=True, slots=True)
class Curve:
    """The least predicted time of all convolutions of a step, for every size of the memory.

    >>> Curve(((0, 90), (8, 50))).time_ns(7)
    90

    Args:
        by_workspace: (bytes that each kernel may use, ns) of all points that no other one beats.
        by_peak: (bytes that the whole step may have allocated, ns), where there is a memory budget.

    Raises:
        PlanError: the points are no pairs of ints, or neither fall nor rise as they must.
    """

    by_workspace: tuple[tuple[int, int], ...]
    by_peak: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        # Values may come from a plan file that anybody wrote.
        for points in (self.by_workspace, self.by_peak):
            numbers = [number for point in points for number in point]
            if not all(type(number) is int and 0 <= number < _LARGEST for number in numbers):
                raise PlanError(f"points of a curve must be pairs of ints from 0, got {points}")
            for one, other in pairwise(points):
                if not (one[0] < other[0] and one[1] > other[1]):
                    raise PlanError("along a curve the memory must rise and the time fall")

    def time_ns(self, workspace_bytes: int) -> int | None:
        """The least time within a workspace limit for every kernel; None where nothing fits."""
        fitting = [time_ns for size, time_ns in self.by_workspace if size <= workspace_bytes]
        return min(fitting, default=None)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Curve:
        """Build one from JSON values; fields of later versions are left out."""
        known = {name: values.get(name, ()) for name in cls.__slots__}
        return cls(**{name: tuple((x, y) for x, y in points) for name, points in known.items()})


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way to compute the steps of a model: by torch or by a plan, in one layout.

    >>> Contestant("channels_last", True, 90).name
    'plan in channels_last'

    Args:
        memory_format: "keep", as the model was, or "channels_last".
        is_plan: by the plan made for that layout; else by torch's own convolutions.
        time_ns: median time of a step; where no step was run, the sum of its kernels.
        ratio: median over the rounds of its time over torch's in the model's own layout.
        low: lower end of its 95 % interval.
        high: upper end.
        peak_bytes: peak of allocated memory of a step; 0 where none was run.
        is_allowed: False for torch's own convolutions where they exceed the workspace limit: they
            are timed, and never chosen.

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
        if not all(type(count) is int and 0 <= count < _LARGEST for count in counts):
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
        contestants: those that were compared; none where there was nothing to compare.
        winner: index of the one that the plan stands for.
        rounds: in which each ran one step; 0: the sums of their kernels were compared.
        reason: why the model keeps its layout, or why no steps were run; "" where they were.

    Raises:
        PlanError: a value is of another type or out of range.
    """

    contestants: tuple[Contestant, ...] = ()
    winner: int = 0
    rounds: int = 0
    reason: str = ""

    def __post_init__(self) -> None:
        if type(self.rounds) is not int or not 0 <= self.rounds < _LARGEST:
            raise PlanError(f"rounds of a race of layouts must be an int from 0, got {self.rounds}")
        # Without contestants the index is 0, its default.
        most = max(1, len(self.contestants))
        if type(self.winner) is not int or not 0 <= self.winner < most:
            raise PlanError(f"winner must be the index of a contestant, got {self.winner!r}")
        if not isinstance(self.reason, str):
            raise PlanError(f"reason must be a string, got {self.reason!r}")

    @property
    def memory_format(self) -> str:
        """The layout that won; the model's own where nothing was compared."""
        # A race that did not take place changes nothing about the model.
        return self.contestants[self.winner].memory_format if self.contestants else "keep"

    @property
    def is_by_sums(self) -> bool:
        """True where the sums of kernels decided, and no step was run."""
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
        """Build one from JSON values; fields of later versions are left out."""
        # By name, so that a field which a later version added is ignored.
        known = {name: values[name] for name in cls.__slots__ if name in values}
        names = Contestant.__slots__
        contestants = tuple(
            Contestant(**{name: one[name] for name in names if name in one})
            for one in values["contestants"]
        )
        return cls(**{**known, "contestants": contestants})
