"""Memory of a whole step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ucudnn.errors import PlanError
from ucudnn.units import TOO_LARGE, format_bytes


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
            convolutions in a step by the plan, in order; empty in files of versions before.

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
        # Values may come from a plan file that anybody wrote.
        sizes = [value for name, value in asdict(self).items() if name.endswith("_bytes")]
        if not all(type(size) is int and 0 <= size < TOO_LARGE for size in sizes):
            raise PlanError(f"sizes of a step's memory must be ints from 0, got {sizes}")
        numbers = [number for call in self.calls for number in call]
        if not all(type(number) is int and 0 <= number < TOO_LARGE for number in numbers):
            raise PlanError(
                f"calls of a step's memory must be pairs of ints from 0, got {self.calls}"
            )
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
