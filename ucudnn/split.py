"""The steps of one call - their extents along an axis, and their algorithms - and its time."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ucudnn.errors import PlanError
from ucudnn.system.documents import require_count

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
    for wgrad. Such a split may be nested: micro-batches of one size, each of them split along the
    spatial axis in the same way.

    >>> Split("batch", (Step(4, "gemm"), Step(2, "gemm"))).size
    6
    >>> print(Split("batch", (Step(4, "gemm"), Step(2, "gemm")), micro_batch=4))
    4 gemm + 2 gemm, padded to 4
    >>> print(Split("spatial", (Step(8, "onednn"), Step(8, "onednn"))))
    slabs of 2x8 onednn
    >>> print(Split("spatial", (Step(8, "onednn"), Step(8, "onednn")), samples=2))
    slabs of 2x8 onednn, 2 samples at a time
    """

    axis: str
    steps: tuple[Step, ...]
    # Every chunk is computed as one of so many samples; a smaller one is filled up with zeros.
    # 0: each as it is.
    micro_batch: int = 0
    # Of a nested split: samples of a micro-batch, of which the last may have fewer. 0: slabs have
    # all samples of the call.
    samples: int = 0

    @property
    def size(self) -> int:
        """The extent of the axis: the sum of the steps' sizes."""
        return sum(step.size for step in self.steps)

    @property
    def is_default(self) -> bool:
        """True if the split is torch's own convolution on the undivided batch."""
        # Torch's own is not padded, and computes all samples at once.
        return (
            len(self.steps) == 1
            and self.steps[0].algorithm == DEFAULT_ALGORITHM
            and not self.micro_batch
            and not self.samples
        )

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
        if self.micro_batch:
            described += f", padded to {self.micro_batch}"
        if self.samples:
            described += f", {self.samples} sample{'s' * (self.samples > 1)} at a time"
        return f"slabs of {described}" if self.axis == "spatial" else described


@dataclass(frozen=True, slots=True)
class Timing:
    """A time with its spread and workspace, measured or predicted.

    Args:
        time_ns: median; if predicted, the sum of parts that were timed one by one.
        spread_ns: interquartile range.
        workspace_bytes: peak that the allocator saw beyond the result.
        samples: number of samples; 0: the time is predicted.

    Raises:
        PlanError: a value is not an int of at least 0.
    """

    time_ns: int
    spread_ns: int
    workspace_bytes: int
    samples: int

    def __post_init__(self) -> None:
        for item in fields(self):
            require_count(item.name, getattr(self, item.name))
        # Reports and checks divide by it.
        if self.time_ns == 0:
            raise PlanError("time_ns must be at least 1, got 0")

    @property
    def is_predicted(self) -> bool:
        """True if the call as a whole was never run."""
        return self.samples == 0
