"""Results of whole_steps.py: the ways of both processes together, and which are the fastest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ucudnn.benchmark.statistics import median_ns, ratio_interval, spread_ns
from ucudnn.units import format_ns

# Of a way whose process has a malloc that keeps large blocks.
SUFFIX = "+malloc"


@dataclass(frozen=True, slots=True)
class Way:
    """A way to compute the steps of a model.

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

    Args:
        ways: one entry for each; those that failed have a reason.
        is_training: forward, loss and backward; else forward alone, without gradients.
    """

    ways: tuple[TimedSteps, ...]
    is_training: bool

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        ways = [{**asdict(one), "way": one.way.name} for one in self.ways]
        return {"ways": ways, "is_training": self.is_training}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StepBench:
        """Build one from JSON values."""
        return cls(tuple(_timed_steps(one) for one in values["ways"]), values["is_training"])


def _timed_steps(values: Mapping[str, Any]) -> TimedSteps:
    way, samples_ns = WAYS[values["way"]], tuple(values["samples_ns"])
    return TimedSteps(**{**values, "way": way, "samples_ns": samples_ns})


class Named(NamedTuple):
    """Steps by one way, with its name in tables."""

    name: str
    steps: TimedSteps


class Found:
    """One entry of a file of whole_steps.py.

    Args:
        values: the entry.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        own = StepBench.from_dict(values["bench"])
        # Files of earlier versions have no such process.
        other = (values.get("malloc") or {}).get("bench")
        kept = StepBench.from_dict(other).ways if other else ()
        self.own = [Named(one.way.name, one) for one in own.ways]
        self.ways = [*self.own, *(Named(one.way.name + SUFFIX, one) for one in kept)]

    def fastest(self, is_planned: bool, with_malloc: bool = True) -> Named | None:
        """The fastest by the plan, or without one; None where none was timed.

        Args:
            is_planned: by the plan.
            with_malloc: out of all ways; else out of those with malloc as it comes.
        """
        ways = self.ways if with_malloc else self.own
        able = [one for one in ways if one.steps.samples_ns]
        able = [one for one in able if one.steps.way.is_planned == is_planned]
        return min(able, key=lambda one: one.steps.time_ns, default=None)

    @property
    def followed(self) -> dict[str, Any]:
        """Facts about the plan of the fastest planned way, with malloc as it comes."""
        planned = self.fastest(is_planned=True, with_malloc=False)
        is_compiled = planned is not None and planned.steps.way.is_compiled
        # In some files, compiled models have a plan of their own.
        return self.values.get("plan_of_compiled", self.values) if is_compiled else self.values

    def ratio(self, with_malloc: bool = True) -> tuple[float, float, float]:
        """Time of the fastest way with a plan over that of the fastest without it.

        Args:
            with_malloc: as for `fastest`.

        Returns:
            (median, low, high) with the 95 % interval; ones where either is missing.
        """
        other, planned = (self.fastest(on, with_malloc) for on in (False, True))
        if other is None or planned is None:
            return 1.0, 1.0, 1.0
        samples = planned.steps.samples_ns, other.steps.samples_ns
        # A process that ended early has fewer rounds.
        count = min(map(len, samples))
        return ratio_interval(samples[0][:count], samples[1][:count])

    def sentence(self) -> str:
        """The outcome in words."""
        other, planned = self.fastest(is_planned=False), self.fastest(is_planned=True)
        if other is None or planned is None:
            return "nothing to compare"
        middle, low, high = self.ratio()
        return (
            f"a step by {planned.name} takes {middle:.2f} ({low:.2f} to {high:.2f}) times as long "
            f"as by {other.name}, the fastest without a plan: {format_ns(planned.steps.time_ns)} "
            f"against {format_ns(other.steps.time_ns)}"
        )
