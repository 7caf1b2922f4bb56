"""The steps of one call: their extents along an axis, and their algorithms."""

from __future__ import annotations

from dataclasses import dataclass

# Torch's own convolution, by whichever implementation torch chooses for the shape.
DEFAULT_ALGORITHM = "torch_default"


@dataclass(frozen=True, slots=True)
class Step:
    """One chunk of a split: its extent along the split axis, and the algorithm that computes it.

    >>> Step(32, "onednn").size
    32
    """

    size: int
    algorithm: str


@dataclass(frozen=True, slots=True)
class Split:
    """The steps of one call, in order, along one axis: "batch" or the outermost "spatial" one.

    Along the spatial axis a step's size is a number of rows (planes in 3-D) of the result; of dy
    for wgrad.

    >>> Split("batch", (Step(4, "gemm"), Step(2, "gemm"))).size
    6
    >>> print(Split("spatial", (Step(8, "onednn"), Step(8, "onednn"))))
    slabs of 2x8 onednn
    """

    axis: str
    steps: tuple[Step, ...]

    @property
    def size(self) -> int:
        """The extent of the axis: the sum of the steps' sizes."""
        return sum(step.size for step in self.steps)

    @property
    def is_default(self) -> bool:
        """True if the split is torch's own convolution on the undivided batch."""
        return len(self.steps) == 1 and self.steps[0].algorithm == DEFAULT_ALGORITHM

    def __str__(self) -> str:
        # Equal steps in sequence are written once: a split may have hundreds.
        runs: list[tuple[Step, int]] = []
        for step in self.steps:
            if runs and runs[-1][0] == step:
                runs[-1] = (step, runs[-1][1] + 1)
            else:
                runs.append((step, 1))
        described = " + ".join(
            f"{count}x{step.size} {step.algorithm}"
            if count > 1
            else f"{step.size} {step.algorithm}"
            for step, count in runs
        )
        return f"slabs of {described}" if self.axis == "spatial" else described
