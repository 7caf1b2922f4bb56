"""Cliffs that a scan found, as values and in sentences. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from ucudnn.measurement import Device
from ucudnn.plan import Plan
from ucudnn.problem import Problem
from ucudnn.split import Split
from ucudnn.units import format_bytes, format_ns

CHANNELS_LAST = "channels_last"


@dataclass(frozen=True, slots=True)
class Cliff:
    """One convolution that is far slower than it has to be.

    Args:
        problem: as the step computes it.
        layers: names of the layers, one per call.
        kind: what the cost is due to: "strided data gradient", "layout copy", "heuristics switch",
            "allocator threshold", "2^31 elements", "dtype" or "slow kernel".
        remedy: what removes it.
        time_ns: of one call by torch, the mean of all calls where it was timed in steps.
        remedied_ns: of one call with the remedy, timed in turn with it.
        workspace_bytes: of one call by torch.
        remedied_bytes: workspace with the remedy.
        split: that is the remedy; None where another layout, dtype or malloc is.
    """

    problem: Problem
    layers: tuple[str, ...]
    kind: str
    remedy: str
    time_ns: int
    remedied_ns: int
    workspace_bytes: int
    remedied_bytes: int
    split: Split | None = None

    @property
    def saved_ns(self) -> int:
        """Time that the remedy saves in a step, over all calls."""
        return (self.time_ns - self.remedied_ns) * len(self.layers)

    def __str__(self) -> str:
        return (
            f"{self.kind}: {self.problem} takes {format_ns(self.time_ns)} in "
            f"{format_bytes(self.workspace_bytes)}, {self.time_ns / self.remedied_ns:.1f} times "
            f"the {format_ns(self.remedied_ns)} in {format_bytes(self.remedied_bytes)} with "
            f"{self.remedy}; that saves {format_ns(self.saved_ns)} of a step "
            f"({len(self.layers)} calls)"
        )


@dataclass(frozen=True, slots=True)
class Cliffs:
    """Result of a scan; of several cliffs of one kernel the savings do not add up.

    Args:
        found: those that save most in a step first.
        device: that it holds for.
        convolutions_ns: time of all scanned convolutions of a step, by torch.
        scanned: number of distinct convolutions that were timed.
        total: number of distinct convolutions of the step.
        is_perturbed: others used the processors meanwhile, so that times are too long.
        plan: all scanned kernels, with the splits that are proposed; None where nothing was
            scanned.
        step_ns: time of a step by torch; 0 where none was run, so that times are of kernels alone.
        no_step: reason why none was run; "" where none was asked for.
        unnamed: cliffs that were found and save too little of a step.
    """

    found: tuple[Cliff, ...]
    device: Device
    convolutions_ns: int
    scanned: int
    total: int
    is_perturbed: bool = False
    plan: Plan | None = None
    step_ns: int = 0
    no_step: str = ""
    unnamed: int = 0

    def sentences(self) -> list[str]:
        """Each cliff, and how much was looked at."""
        said = [f"{cliff}." for cliff in self.found]
        looked = (
            f"Scanned {self.scanned} of {self.total} convolutions, which take "
            f"{format_ns(self.convolutions_ns)} of a step on {self.device}"
        )
        said += self._applied_by()
        said.append(f"{looked}{'.' if self.found else ': no cliffs.'}")
        said += self._timed_in()
        if self.is_perturbed:
            said.append("Other processes used the machine: scan again when it is quiet.")
        return said

    def _applied_by(self) -> list[str]:
        """How to apply each kind of remedy that was found."""
        remedies = dict.fromkeys(one.remedy for one in self.found if one.split is None)
        lines = {
            CHANNELS_LAST: "model.to(memory_format=torch.channels_last), in 3-D channels_last_3d",
            "float32": "model.float(), without autocast",
        }
        said = [f"Apply {one}: {lines[one]}." for one in remedies if one in lines]
        # A setting of the process, which is read before Python runs.
        said += [f"Apply: {one} python SCRIPT." for one in remedies if one not in lines]
        if any(one.split is not None for one in self.found):
            said.append(
                "Apply splits and algorithms: add --output cliffs.plan.json to this command, then "
                "ucudnn run --plan cliffs.plan.json -- SCRIPT, or in Python "
                'ucudnn.installed("cliffs.plan.json").'
            )
        return said

    def _timed_in(self) -> list[str]:
        """Say what was timed: steps, or kernels alone."""
        if self.step_ns:
            said = [f"Times are medians of calls in whole steps of {format_ns(self.step_ns)}."]
            return [*said, *[f"{self.unnamed} more save too little of it."] * (self.unnamed > 0)]
        why = f" because {self.no_step}" if self.no_step else ""
        alone = f"No step was run{why}: a kernel may take another time there than alone."
        return [alone] if self.found or why else []

    def to_dict(self) -> dict[str, Any]:
        """All but the plan, as JSON values."""
        listed = [
            {**asdict(one), "problem": one.problem.to_dict(), "saved_ns": one.saved_ns}
            for one in self.found
        ]
        values = asdict(replace(self, found=(), plan=None))
        del values["plan"]
        return {**values, "found": listed, "device": str(self.device)}
