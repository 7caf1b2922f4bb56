"""Times and peaks of whole steps by several ways, and who is the fastest. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ucudnn.benchmark.statistics import median_ns, ratio_interval, spread_ns
from ucudnn.errors import ConfigError
from ucudnn.units import format_ns


@dataclass(frozen=True, slots=True)
class Way:
    """A way to compute the steps of a model.

    >>> Way("channels_last", is_compiled=True).name, Way("keep", is_planned=True).name
    ('channels_last+compile', 'plan')

    Args:
        memory_format: "keep", as the model is, or "channels_last"; of a plan, the plan's own.
        is_planned: convolutions follow the plan; else they are torch's own.
        is_compiled: by torch.compile.
    """

    memory_format: str = "keep"
    is_planned: bool = False
    is_compiled: bool = False

    @property
    def name(self) -> str:
        """Name in tables and on command lines."""
        layout = "" if self.memory_format == "keep" else self.memory_format
        parts = ("plan" if self.is_planned else layout, "compile" if self.is_compiled else "")
        return "+".join(part for part in parts if part) or "eager"


# Torch's own first: what a user has without a plan.
WAYS = {
    way.name: way
    for way in (
        *(
            Way(layout, is_compiled=on)
            for on in (False, True)
            for layout in ("keep", "channels_last")
        ),
        *(Way(is_planned=True, is_compiled=on) for on in (False, True)),
    )
}


def ways_of(text: str) -> tuple[Way, ...]:
    """Read names of ways.

    >>> [way.name for way in ways_of("eager,plan")]
    ['eager', 'plan']

    Raises:
        ConfigError: there is no such way, or one is named twice.
    """
    names = text.split(",")
    if not set(names) <= set(WAYS) or len(set(names)) < len(names):
        raise ConfigError(f"ways must be some of {', '.join(WAYS)}, each once, got {text!r}")
    return tuple(WAYS[name] for name in names)


@dataclass(frozen=True, slots=True)
class TimedSteps:
    """Steps of a model by one way.

    Args:
        way: how they were computed.
        samples_ns: times of steps in ns, one per round.
        first_s: seconds of the first step, which compiles where the way is compiled.
        peak_bytes: peak of what torch allocated in a step, beyond what there was before it.
        process_bytes: the most memory that the process gained in a step; None where unknown.
        reason: why there are no times, "" where there are.
    """

    way: Way
    samples_ns: tuple[int, ...] = ()
    first_s: float = 0.0
    peak_bytes: int = 0
    process_bytes: int | None = None
    reason: str = ""

    @property
    def time_ns(self) -> int:
        """Median time of a step in ns."""
        return median_ns(self.samples_ns)

    @property
    def spread_ns(self) -> int:
        """Interquartile range of the times in ns."""
        return spread_ns(self.samples_ns)


@dataclass(frozen=True, slots=True)
class StepBench:
    """Steps of one model by several ways, interleaved in one run.

    >>> eager = TimedSteps(WAYS["eager"], (100, 102, 101))
    >>> planned = TimedSteps(WAYS["plan"], (80, 82, 81))
    >>> bench = StepBench((eager, planned), is_training=True)
    >>> bench.fastest(is_planned=False).way.name, round(bench.ratio()[0], 1)
    ('eager', 0.8)

    Args:
        ways: one entry for each; those that failed have a reason.
        is_training: forward, loss and backward; else forward alone, without gradients.
    """

    ways: tuple[TimedSteps, ...]
    is_training: bool

    def fastest(self, is_planned: bool) -> TimedSteps | None:
        """The fastest by the plan, or without one; None where none was timed."""
        able = [one for one in self.ways if one.samples_ns and one.way.is_planned == is_planned]
        return min(able, key=lambda one: one.time_ns, default=None)

    def ratio(self) -> tuple[float, float, float] | None:
        """Time of the fastest way with the plan over that of the fastest without.

        Returns:
            (median, low, high) of the ratio with its 95 % interval; None where either is missing.
        """
        planned, other = self.fastest(True), self.fastest(False)
        if planned is None or other is None:
            return None
        return ratio_interval(planned.samples_ns, other.samples_ns)

    def sentence(self) -> str:
        """The outcome in words."""
        planned, other, ratio = self.fastest(True), self.fastest(False), self.ratio()
        if planned is None or other is None or ratio is None:
            failed = "; ".join(f"{one.way.name}: {one.reason}" for one in self.ways if one.reason)
            return f"nothing to compare{f' ({failed})' if failed else ''}"
        middle, low, high = ratio
        return (
            f"a step by {planned.way.name} takes {middle:.2f} ({low:.2f} to {high:.2f}) times as "
            f"long as by {other.way.name}, the fastest without a plan: "
            f"{format_ns(planned.time_ns)} against {format_ns(other.time_ns)}"
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        ways = [{**asdict(one), "way": one.way.name} for one in self.ways]
        return {"ways": ways, "is_training": self.is_training}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StepBench:
        """Build one from JSON values.

        >>> bench = StepBench((TimedSteps(WAYS["compile"], (5, 6)),), is_training=False)
        >>> StepBench.from_dict(bench.to_dict()) == bench
        True
        """
        return cls(tuple(_timed_steps(one) for one in values["ways"]), values["is_training"])


def _timed_steps(values: Mapping[str, Any]) -> TimedSteps:
    samples: Sequence[int] = values["samples_ns"]
    return TimedSteps(**{**values, "way": WAYS[values["way"]], "samples_ns": tuple(samples)})
