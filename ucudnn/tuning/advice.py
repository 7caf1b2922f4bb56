"""Advice on a model: whether to tune it, to use channels_last, or to leave it as it is. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from msgspec import to_builtins

from ucudnn.measurement import Device
from ucudnn.outcomes import TOLERATED
from ucudnn.plan import Timing
from ucudnn.problem import Problem
from ucudnn.units import format_bytes, format_ns

# A kernel lies on a cliff, far slower than convolutions of similar shapes, where torch takes this
# many times a direct convolution at the roofline. Good kernels miss the roofline, too, so the
# factor is large ...
_CLIFF = 5.0
# ... or this many times what it takes in channels_last: both are measured, so less will do.
_LAYOUT_CLIFF = 2.0
# Fractions of a step's time and of its peak of memory; smaller savings are not worth tuning for.
_WORTHWHILE = 0.05
_WORTHWHILE_MEMORY = 0.1
# A suggested limit leaves kernels alone that take this part of the convolutions' time.
_UNTOUCHED = 0.8
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class KernelAdvice:
    """One convolution of the step as torch runs it.

    Args:
        problem: what is computed.
        layers: names of the layers, one per call.
        timing: of one call; None if the time ran out before it was timed.
        channels_last: timing in channels_last; None in 1-D, which has no such layout, if the
            problem is in channels_last already, and if it was not timed.
        direct_ns: time of a direct convolution at the full speed of the machine; 0: not known.
        least_ns: lower bound of one call by any algorithm; 0: none is known.
    """

    problem: Problem
    layers: tuple[str, ...]
    timing: Timing | None
    channels_last: Timing | None
    direct_ns: int
    least_ns: int

    def best(self, is_last: bool) -> Timing | None:
        """The timing in the layout asked for if there is one, else in its own."""
        return self.channels_last if is_last and self.channels_last else self.timing

    def time_ns(self, is_last: bool = False) -> int:
        """Time of all calls; 0 if it is not known."""
        timing = self.best(is_last)
        return 0 if timing is None else timing.time_ns * len(self.layers)

    def gain_ns(self) -> int:
        """Upper bound of what any algorithm could save of that time; 0 if none is known."""
        # Without a bound from below nothing is known of what could be saved.
        if not self.least_ns:
            return 0
        # A kernel that was not timed counts as 0 ns, which is less than its bound.
        return max(0, self.time_ns() - self.least_ns * len(self.layers))

    def excess_ns(self, is_last: bool = False) -> int:
        """Time that all calls lose because the kernel is on a cliff; 0 if it is on none."""
        if not self.is_cliff(is_last):
            return 0
        # The larger of the two references, so that the loss is not overstated.
        other = self.channels_last
        in_other_layout = 0 if other is None or is_last else other.time_ns
        return self.time_ns(is_last) - max(self.direct_ns, in_other_layout) * len(self.layers)

    def is_cliff(self, is_last: bool = False) -> bool:
        """True if torch's own kernel is far slower than it should be."""
        timing, other = self.best(is_last), self.channels_last
        if timing is None:
            return False
        # A kernel that is judged in channels_last has no other layout to be compared with.
        if other is not None and not is_last and timing.time_ns >= _LAYOUT_CLIFF * other.time_ns:
            return True
        return bool(self.direct_ns) and timing.time_ns >= _CLIFF * self.direct_ns


@dataclass(frozen=True, slots=True)
class Advice:
    """Time, workspace and memory of a training step by kernel, with a recommendation.

    `print(advice)` shows the sentences; `ucudnn advise` shows them below a table of kernels.

    Args:
        kernels: one per distinct convolution, in the order of the model.
        device: the device that was measured.
        step_ns: median time of a step in the model's own layout; 0 if none was run.
        step_peak_bytes: its peak of memory beyond parameters and inputs.
        last_step_ns: median time with model and inputs in channels_last; 0 if none was run.
        last_step_peak_bytes: its peak.
        last_ratio: ratio of the two times and its 95 % interval, measured in turn.
        reason: why steps of one or both layouts were not run; "" if they were.
    """

    kernels: tuple[KernelAdvice, ...]
    device: Device
    step_ns: int = 0
    step_peak_bytes: int = 0
    last_step_ns: int = 0
    last_step_peak_bytes: int = 0
    last_ratio: tuple[float, float, float] | None = None
    reason: str = ""

    @property
    def convolutions_ns(self) -> int:
        """Time of all convolutions of a step in the model's own layout."""
        return sum(kernel.time_ns() for kernel in self.kernels)

    @property
    def workspace_bytes(self) -> int:
        """The largest workspace of any convolution in the model's own layout."""
        return _workspace_bytes(self.kernels, False)

    @property
    def is_last_better(self) -> bool:
        """True if a step is faster in channels_last, beyond the noise."""
        return self.last_ratio is not None and self.last_ratio[2] < 1 - TOLERATED

    def share(self, time_ns: int) -> float:
        """A time as a fraction of the step; if no step was run, of its convolutions."""
        # Kernels are timed one by one: with noise their sum may exceed the step that holds them.
        whole = max(self.step_ns, self.convolutions_ns)
        return time_ns / whole if whole else 0.0

    @property
    def suggested_limit(self) -> int | None:
        """A workspace limit in bytes that would save memory and affect few kernels; None: none."""
        is_last = self.is_last_better
        known = [
            (timing.workspace_bytes, kernel.time_ns(is_last))
            for kernel in self.kernels
            if (timing := kernel.best(is_last))
        ]
        limit, most = _limit_for(known), _workspace_bytes(self.kernels, is_last)
        # A limit counts for the layout that is advised, so the peak is that of its step. Where no
        # step was run there is no peak to compare the saving with.
        peak = (is_last and self.last_step_peak_bytes) or self.step_peak_bytes
        return limit if peak and most - limit >= _WORTHWHILE_MEMORY * peak else None

    @property
    def verdict(self) -> str:
        """Recommendation in one sentence."""
        is_last = self.is_last_better
        cliffs = [kernel for kernel in self.kernels if kernel.is_cliff(is_last)]
        gain = self.share(sum(kernel.excess_ns(is_last) for kernel in cliffs))
        # "tune it so": in channels_last, which the sentence has advised just before.
        limit, advised, tune = self.suggested_limit, [], "tune it"
        if is_last and self.last_ratio is not None:
            ratio, tune = self.last_ratio[0], "tune it so"
            advised.append(f"use channels_last, with which a step takes {ratio:.2f} times as long")
        # Time comes before memory: a limit could exclude the algorithms that leave a cliff.
        if gain >= _WORTHWHILE:
            advised.append(
                f"{tune} without a limit: {_count(cliffs)} on a cliff, which costs up to "
                f"{gain:.0%} of the step"
            )
        elif limit is not None:
            most = format_bytes(_workspace_bytes(self.kernels, is_last))
            advised.append(
                f"{tune} with workspace_limit='{format_bytes(limit).replace(' ', '')}', which "
                f"touches few kernels and lowers workspace from {most}"
            )
        if not advised:
            return "leave it as it is: no kernel stands out, and workspace is little of the memory."
        return f"{', then '.join(advised)}."

    def sentences(self) -> list[str]:
        """Sentences on the step, the memory, the bound and the verdict."""
        found = []
        convolutions = format_ns(self.convolutions_ns)
        if self.step_ns:
            found.append(
                f"A step takes {format_ns(self.step_ns)}; its convolutions, timed one by one, "
                f"{convolutions}."
            )
        else:
            found.append(f"The convolutions of a step take {convolutions}.")
        if self.last_ratio is not None:
            ratio, low, high = self.last_ratio
            found.append(
                f"In channels_last a step takes {ratio:.2f} ({low:.2f} to {high:.2f}) times as "
                f"long, {format_ns(self.last_step_ns)}, and allocates "
                f"{format_bytes(self.last_step_peak_bytes)} at its peak."
            )
        if self.reason:
            found.append(f"Not all steps were run: {self.reason}.")
        if self.step_peak_bytes:
            part = self.workspace_bytes / self.step_peak_bytes
            found.append(
                f"Workspace is up to {format_bytes(self.workspace_bytes)}, at most {part:.0%} of "
                f"the {format_bytes(self.step_peak_bytes)} that a step allocates at its peak."
            )
        else:
            found.append(f"Workspace is up to {format_bytes(self.workspace_bytes)}.")
        bound = self.share(sum(kernel.gain_ns() for kernel in self.kernels))
        if any(kernel.least_ns for kernel in self.kernels):
            found.append(
                f"No plan can save more than {bound:.0%} of the step, even if its algorithms "
                f"reached the full speed of this machine, which none does."
            )
        untimed = [kernel for kernel in self.kernels if kernel.timing is None]
        if untimed:
            found.append(f"{len(untimed)} of {len(self.kernels)} kernels were not timed.")
        return [*found, f"Verdict: {self.verdict}"]

    def __str__(self) -> str:
        return "\n".join(self.sentences())

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON values."""
        values = asdict(self)
        values["kernels"] = [
            {
                "problem": asdict(kernel.problem),
                "layers": list(kernel.layers),
                "timing": to_builtins(kernel.timing),
                "channels_last": to_builtins(kernel.channels_last),
                "direct_ns": kernel.direct_ns,
                "least_ns": kernel.least_ns,
                "share": round(self.share(kernel.time_ns()), 4),
                "is_cliff": kernel.is_cliff(),
            }
            for kernel in self.kernels
        ]
        values["device"] = str(self.device)
        return {**values, "suggested_limit": self.suggested_limit, "verdict": self.verdict}


def _workspace_bytes(kernels: Iterable[KernelAdvice], is_last: bool) -> int:
    timings = (kernel.best(is_last) for kernel in kernels)
    return max((timing.workspace_bytes for timing in timings if timing), default=0)


def _limit_for(known: Sequence[tuple[int, int]]) -> int:
    """The smallest limit, in whole MiB, that leaves the kernels with most of the time unaffected.

    Args:
        known: workspace in bytes and time in ns of each kernel.
    """
    total, taken = sum(time_ns for _, time_ns in known), 0
    # By rising workspace: the kernels up to the limit keep torch's own convolution.
    for size, time_ns in sorted(known):
        taken += time_ns
        if taken >= _UNTOUCHED * total:
            # Kernels may need no workspace at all, and a limit of 0 would be no useful setting.
            return max(1, ceil(size / _MIB)) * _MIB
    return 0


def _count(kernels: Sequence[KernelAdvice]) -> str:
    return "1 kernel is" if len(kernels) == 1 else f"{len(kernels)} kernels are"
