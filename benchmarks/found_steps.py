"""Results of whole_steps.py: the ways of both processes together, and which are the fastest."""

from __future__ import annotations

from typing import Any, NamedTuple

from ucudnn.benchmark.statistics import ratio_interval
from ucudnn.steps.result import StepBench, TimedSteps
from ucudnn.units import format_ns

# Of a way whose process has a malloc that keeps large blocks.
SUFFIX = "+malloc"


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

    def gain(self, with_malloc: bool = True) -> tuple[float, float, float]:
        """Time of the fastest way without a plan over that of the fastest with it.

        Args:
            with_malloc: as for `fastest`.

        Returns:
            (median, low, high) with the 95 % interval; ones where either is missing.
        """
        other, planned = (self.fastest(on, with_malloc) for on in (False, True))
        if other is None or planned is None:
            return 1.0, 1.0, 1.0
        samples = other.steps.samples_ns, planned.steps.samples_ns
        # A process that ended early has fewer rounds.
        count = min(map(len, samples))
        return ratio_interval(samples[0][:count], samples[1][:count])

    def sentence(self) -> str:
        """The outcome in words."""
        other, planned = self.fastest(is_planned=False), self.fastest(is_planned=True)
        if other is None or planned is None:
            return "nothing to compare"
        middle, low, high = self.gain()
        return (
            f"a step by {planned.name} is {middle:.2f} ({low:.2f} to {high:.2f}) times as fast as "
            f"by {other.name}, the fastest without a plan: {format_ns(planned.steps.time_ns)} "
            f"against {format_ns(other.steps.time_ns)}"
        )
