"""Outcomes that a plan keeps: its origin, races of steps and of layouts, the memory of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from ucudnn.errors import PlanError
from ucudnn.units import TOO_LARGE, format_bytes, format_ns

MEMORY_FORMATS = ("keep", "channels_last")
# As a fraction of a step's time: a smaller difference, either way, decides nothing.
TOLERATED = 0.01
# Fewer rounds do not show how large the noise is; then only a loss of more than this counts.
LEAST_ROUNDS = 3
_CLEAR_LOSS = 0.1
# As a fraction of a step's time: a smaller difference of the medians of a hint's few rounds is
# noise.
_HINTED = 0.05


# Values may come from a plan file that anybody wrote. Exact types, because True passes for an int;
# Python's JSON reader accepts NaN and Infinity.
def _require_counts(what: str, *counts: object) -> None:
    if not all(type(count) is int and 0 <= count < TOO_LARGE for count in counts):
        raise PlanError(f"counts of {what} must be ints from 0, got {counts}")


def _require_ratios(what: str, *ratios: object) -> None:
    if not all(type(ratio) is float and isfinite(ratio) and ratio > 0 for ratio in ratios):
        raise PlanError(f"ratios of {what} must be above 0, got {ratios}")


def _require_texts(what: str, *texts: object) -> None:
    if not all(isinstance(text, str) for text in texts):
        raise PlanError(f"names and reasons of {what} must be strings, got {texts}")


@dataclass(frozen=True, slots=True)
class Origin:
    """How a plan came about, for whoever finds its file; no part of what it decides.

    >>> Origin.from_dict(Origin("net.py:net").to_dict()).model
    'net.py:net'

    Args:
        model: its class, or its name on the command line; "" where layers were tuned without one.
        inputs: shapes and dtypes, such as "8x3x224x224 float32".
        made: date and time in UTC, as 2026-01-31T12:00:00Z.
        ucudnn: version of this package.
        protocol: number of the way in which times were taken.
        effort: setting.
        budget: seconds that tuning might take, "" without an end.
        seconds: that it took, rounded.
        load: of the machine at the end: processes that were ready to run, on average of a minute.
        left_out: kernels without a plan, because the time was over before they had one.
        over_limit: kernels without a plan, because nothing fits the workspace limit.

    Raises:
        PlanError: a value is of another type or out of range.
    """

    model: str = ""
    inputs: tuple[str, ...] = ()
    made: str = ""
    ucudnn: str = ""
    protocol: int = 0
    effort: str = ""
    budget: str = ""
    seconds: int = 0
    load: str = ""
    left_out: tuple[str, ...] = ()
    over_limit: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _require_counts("an origin", self.protocol, self.seconds)
        texts = (self.model, self.made, self.ucudnn, self.effort, self.budget, self.load)
        _require_texts("an origin", *texts, *self.inputs, *self.left_out, *self.over_limit)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Origin:
        """Build one from the JSON values of `to_dict`."""
        lists = {name: tuple(values[name]) for name in ("inputs", "left_out", "over_limit")}
        return cls(**{**values, **lists})

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        about = [self.model, *(f"on {text}" for text in self.inputs), f"made {self.made}"]
        with_what = f"ucudnn {self.ucudnn}, protocol {self.protocol}, effort {self.effort}"
        took = f"tuned in {self.seconds} s" + (f" of {self.budget} s" if self.budget else "")
        return ", ".join(filter(None, [*about, with_what, took, f"load {self.load}"]))


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
        peaks = (self.torch_peak_bytes, self.plan_peak_bytes)
        _require_counts("a race of steps", self.torch_ns, self.plan_ns, self.rounds, *peaks)
        _require_ratios("a race of steps", self.ratio, self.low, self.high, *(self.inside or ()))
        _require_texts("a race of steps", self.reason, *self.dropped)
        if self.inside is not None and len(self.inside) != 3:
            raise PlanError(f"inside must be a ratio with its interval, got {self.inside}")

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


@dataclass(frozen=True, slots=True)
class Compilation:
    """Steps by torch.compile that judged a plan, or the reason why they were not compiled.

    >>> print(Compilation(seconds=34))
    the steps that judged it were compiled by torch.compile, which took 34 s beside the time budget
    >>> Compilation(reason="no C++ compiler").is_compiled
    False

    Args:
        seconds: of compiling and of the first compiled steps, which no time of a step includes.
        reason: why steps of a compiled model were not compiled; "" if they were.
        relaid: convolutions of a compiled step in another layout than the plan has them in, which
            do not follow it.

    Raises:
        PlanError: a value is of another type or out of range.
    """

    seconds: int = 0
    reason: str = ""
    relaid: int = 0

    def __post_init__(self) -> None:
        _require_counts("a compilation", self.seconds, self.relaid)
        _require_texts("a compilation", self.reason)

    @property
    def is_compiled(self) -> bool:
        """True if the steps were compiled."""
        return not self.reason

    def __str__(self) -> str:
        if not self.is_compiled:
            return (
                f"the model is compiled, but the steps that judged its plan were not: {self.reason}"
            )
        text = (
            f"the steps that judged it were compiled by torch.compile, which took {self.seconds} s "
            f"beside the time budget"
        )
        if self.relaid:
            text += (
                f"; there {self.relaid} convolutions are in another layout than in the plan, which "
                f"does not act on them: tune with layout='auto', or in the other layout"
            )
        return text

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Compilation:
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
        _require_counts("a contestant", self.time_ns, self.peak_bytes)
        _require_ratios("a contestant", self.ratio, self.low, self.high)
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
        _require_counts("a race of layouts", self.rounds)
        _require_texts("a race of layouts", self.reason)
        # Without contestants the index is 0, its default.
        most = max(1, len(self.contestants))
        if type(self.winner) is not int or not 0 <= self.winner < most:
            raise PlanError(f"winner must be the index of a contestant, got {self.winner!r}")

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
        counts = (self.channels_last_ns, self.plan_ns, self.rounds)
        _require_counts("a layout hint", *counts)
        _require_texts("a layout hint", self.reason)
        if not self.reason and 0 in counts:
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
        calls: (index of a kernel in the plan, bytes live beside its workspace) of each of its
            convolutions in a step by the plan, in order.

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
    calls: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        sizes = [value for name, value in asdict(self).items() if name.endswith("_bytes")]
        _require_counts("a step's memory", *sizes, *(one for call in self.calls for one in call))
        if type(self.is_training) is not bool:
            raise PlanError(
                f"is_training of a step's memory must be a bool, got {self.is_training!r}"
            )

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
        return f"{text}; the budget is {format_bytes(self.budget_bytes)}"

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StepMemory:
        """Build one from the JSON values of `to_dict`."""
        calls = tuple((kernel, live) for kernel, live in values["calls"])
        return cls(**{**values, "calls": calls})
