"""Cliffs that a scan found, as values and in sentences. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ucudnn.measurement import Device
from ucudnn.plan import Plan
from ucudnn.problem import Problem
from ucudnn.split import Split
from ucudnn.units import format_bytes, format_ns

# Settings in which steps are timed: by torch, in another layout, by the splits and algorithms that
# are proposed, and where malloc keeps large blocks.
TORCH, CHANNELS_LAST, SPLITS, MALLOC = "torch", "channels_last", "splits", "malloc"
# Another dtype would be another model, whose steps are not timed.
DTYPE = "dtype"


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
        remedied_ns: of one call with the remedy.
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

    @property
    def setting(self) -> str:
        """Setting that applies the remedy to a step; "dtype" for what is another model then.

        All but the splits change more of the step than this convolution.
        """
        if self.split is not None:
            return SPLITS
        if self.kind == "allocator threshold":
            return MALLOC
        return CHANNELS_LAST if self.remedy == CHANNELS_LAST else DTYPE

    def __str__(self) -> str:
        return (
            f"{self.kind}: {self.problem} takes {format_ns(self.time_ns)} in "
            f"{format_bytes(self.workspace_bytes)}, {self.time_ns / self.remedied_ns:.1f} times "
            f"the {format_ns(self.remedied_ns)} in {format_bytes(self.remedied_bytes)} with "
            f"{self.remedy}; {format_ns(self.saved_ns)} less in a step "
            f"({len(self.layers)} calls)"
        )


@dataclass(frozen=True, slots=True)
class Cliffs:
    """Result of a scan; of several remedies of one kernel the savings do not add up.

    Args:
        found: those that save most in a step first.
        device: that it holds for.
        convolutions_ns: time of all scanned convolutions of a step, by torch.
        scanned: number of distinct convolutions that were timed.
        total: number of distinct convolutions of the step.
        is_perturbed: others used the processors during the scan, so that times are too long.
        plan: all scanned kernels, with the splits that are proposed; None where nothing was
            scanned.
        steps_ns: time of a step in each setting; empty where none was run, so that times are of
            kernels alone.
        failures: reasons why the step fails, by setting.
        unlisted: number of cliffs that would save too little of a step.
    """

    found: tuple[Cliff, ...]
    device: Device
    convolutions_ns: int
    scanned: int
    total: int
    is_perturbed: bool = False
    plan: Plan | None = None
    steps_ns: Mapping[str, int] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)
    unlisted: int = 0

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

    def saved_ns(self, setting: str) -> int:
        """Time that the remedies of one setting save in a step.

        Another layout, and malloc that keeps blocks, change the whole step: theirs is the
        difference of two steps. Splits change their kernels alone, whose times are more precise.

        Args:
            setting: of some of the cliffs.
        """
        if setting != SPLITS and setting in self.steps_ns:
            return self.steps_ns[TORCH] - self.steps_ns[setting]
        return sum(one.saved_ns for one in self.found if one.setting == setting)

    def _applied_by(self) -> list[str]:
        """Say how to apply the remedies of each setting, and how much of a step that saves."""
        remedies = {one.setting: one.remedy for one in self.found}
        lines = {
            CHANNELS_LAST: "model.to(memory_format=torch.channels_last), in 3-D channels_last_3d",
            # A setting of the process, which is read before Python runs.
            MALLOC: f"{remedies.get(MALLOC)} python SCRIPT",
            SPLITS: "splits and algorithms: add --output cliffs.plan.json to this command, then "
            "ucudnn run --plan cliffs.plan.json -- SCRIPT, or in Python "
            'ucudnn.installed("cliffs.plan.json")',
            DTYPE: "float32: model.float(), without autocast",
        }
        said = []
        for setting in remedies:
            saved_ns = self.saved_ns(setting)
            whose = "a step takes" if setting in (CHANNELS_LAST, MALLOC) else "their kernels take"
            saves = f": {whose} {format_ns(saved_ns)} less" if saved_ns > 0 else ""
            said.append(f"Apply {lines[setting]}{saves}.")
        return said

    def _timed_in(self) -> list[str]:
        """Say in which steps the times were taken, and in which the step fails."""
        said = []
        if self.steps_ns:
            by = ", ".join(f"{format_ns(ns)} ({name})" for name, ns in self.steps_ns.items())
            said.append(f"Times are of calls in whole steps, which take {by}.")
            if any(one.kind == "dtype" for one in self.found):
                said.append("Those of another dtype are of kernels alone.")
        elif self.found:
            said.append("No step was timed: a kernel may take another time there than alone.")
        said += [f"The step fails ({name}): {why}." for name, why in self.failures.items()]
        if self.unlisted:
            more = f"{self.unlisted} more cliff{'s' if self.unlisted > 1 else ''}"
            said.append(f"{more} would save less than 0.2 % of a step each.")
        return said

    def to_dict(self) -> dict[str, Any]:
        """All but the plan, as JSON values."""
        listed = [
            {**asdict(one), "problem": one.problem.to_dict(), "saved_ns": one.saved_ns}
            for one in self.found
        ]
        values = asdict(replace(self, found=(), plan=None))
        del values["plan"]
        saved = {one.setting: self.saved_ns(one.setting) for one in self.found}
        return {**values, "found": listed, "saved_ns": saved, "device": str(self.device)}
