"""The split of a call into chunks, its time, and the splits of one kernel for every batch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

from ucudnn.errors import PlanError
from ucudnn.problem import Problem
from ucudnn.slabs import row_count
from ucudnn.units import Count, Positive

# Values in `KernelPlan.alone` for batches that are split: along the batch, or into slabs.
BY_BATCH, BY_SLABS = -1, -2
_PERTURBED = "timed while others used the processors"
# Torch's own convolution, by whichever implementation torch chooses for the shape.
DEFAULT_ALGORITHM = "torch_default"


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk of a split: its extent along the split axis, and the algorithm that computes it.

    >>> Chunk(32, "onednn").size
    32
    """

    size: int
    algorithm: str

    @property
    def is_default(self) -> bool:
        """True if torch's own convolution computes the chunk."""
        return self.algorithm == DEFAULT_ALGORITHM


@dataclass(frozen=True, slots=True)
class Split:
    """The chunks of one call, in order, along one axis: "batch" or the outermost "spatial" one.

    Along the spatial axis a chunk's size is a number of rows (planes in 3-D) of the result; of dy
    for wgrad.

    >>> Split("batch", (Chunk(4, "gemm"), Chunk(2, "gemm"))).size
    6
    >>> print(Split("batch", (Chunk(4, "gemm"), Chunk(2, "gemm"))))
    4 gemm + 2 gemm
    >>> print(Split("spatial", (Chunk(8, "onednn"), Chunk(8, "onednn"))))
    slabs of 2x8 onednn
    """

    axis: str
    chunks: tuple[Chunk, ...]

    @classmethod
    def undivided(cls, batch: int, algorithm: str) -> Split:
        """The whole batch as one chunk."""
        return cls("batch", (Chunk(batch, algorithm),))

    @classmethod
    def default(cls, batch: int) -> Split:
        """Torch's own convolution on the undivided batch."""
        return cls.undivided(batch, DEFAULT_ALGORITHM)

    @property
    def size(self) -> int:
        """The extent of the axis: the sum of the chunks' sizes."""
        return sum(chunk.size for chunk in self.chunks)

    @property
    def is_default(self) -> bool:
        """True if the split is torch's own convolution on the undivided batch."""
        return len(self.chunks) == 1 and self.chunks[0].is_default

    def __str__(self) -> str:
        # Equal chunks in a row are written once with their count, because a split may have
        # hundreds.
        runs = ((chunk, len(list(equal))) for chunk, equal in groupby(self.chunks))
        described = " + ".join(
            f"{count}x{chunk.size} {chunk.algorithm}"
            if count > 1
            else f"{chunk.size} {chunk.algorithm}"
            for chunk, count in runs
        )
        return f"slabs of {described}" if self.axis == "spatial" else described


@dataclass(frozen=True, slots=True)
class Timing:
    """A time with its spread and workspace, measured or predicted.

    Args:
        time_ns: median; if predicted, the sum of the times of chunks that were timed one by one.
        spread_ns: interquartile range.
        workspace_bytes: the most memory that was allocated during the call, beyond the result.
        samples: how many times were measured; 0: the time is predicted.
    """

    time_ns: Positive
    spread_ns: Count
    workspace_bytes: Count
    samples: Count

    @property
    def is_predicted(self) -> bool:
        """True if the call as a whole was never run."""
        return self.samples == 0


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """The splits of one kernel for batches n from 1 to `problem.batch`; smaller ones may have none.

    A batch is computed undivided, by slabs, or by micro-batches. With micro-batches, `last[n - 1]`
    is the last chunk of batch n. The chunks before it are those of the batch of n - size samples,
    whose last chunk is found in the same way, until 0 samples are left.

    Args:
        problem: the kernel at the largest planned batch N.
        layers: names of the layers that run it, one per call.
        algorithms: names of algorithms; `alone`, `last` and `slabs` hold indices into this tuple.
        alone: for n = 1..N the index of the algorithm that computes batch n undivided; -1: batch n
            is split along the batch; -2: batch n is split by slabs.
        last: for n = 1..N the last chunk, which may be the only one, of a split of n samples along
            the batch, as (size, algorithm index); size 0 if there is no such split.
        predicted_time_ns: sum of the times of the chunks into which batch N is split.
        timing: timing of a whole call of N samples by the plan; predicted if the device was not
            there to time the call.
        default: timing of torch's own convolution at N, measured in the same rounds as `timing`;
            None if torch cannot compute the problem, or if a replayed recording has no such
            measurement.
        notes: further remarks, for people, such as "default kernel=onednn".
        slabs: (rows, algorithm index) of each slab; the same for every batch that is split by
            slabs.
        is_perturbed: whether other processes used the processors while the kernel was timed.
        default_is_deterministic: whether torch's own convolution computes the same bits each time.
        live_bytes: the most bytes that a step has allocated during a call of the kernel, beside the
            workspace of the call; None if there was no memory budget.

    Raises:
        PlanError: the fields do not describe valid splits, or have none of batch N.
    """

    problem: Problem
    layers: tuple[str, ...]
    algorithms: tuple[str, ...]
    alone: tuple[int, ...]
    last: tuple[tuple[int, int], ...]
    predicted_time_ns: Count
    timing: Timing
    default: Timing | None
    notes: tuple[str, ...] = ()
    slabs: tuple[tuple[int, int], ...] = ()
    is_perturbed: bool = False
    default_is_deterministic: bool = True
    live_bytes: Count | None = None

    def __post_init__(self) -> None:
        # Slabs are part of the plan's hash, so they are checked even if no batch uses them.
        if self.slabs or BY_SLABS in self.alone:
            self._require_slabs()
        if not len(self.alone) == len(self.last) == self.problem.batch:
            raise PlanError(
                f"the plan of {self.problem} must have one entry per batch "
                f"({self.problem.batch}), got {len(self.alone)} and {len(self.last)}"
            )
        self._require_chains()
        # Batches below the planned batch may lack a split, but the planned batch must have one.
        if not self.covers(self.problem.batch):
            raise PlanError(f"the plan of {self.problem} has no valid split of its own batch")

    def _require_slabs(self) -> None:
        rows, indices = row_count(self.problem), range(len(self.algorithms))
        named = all(size > 0 and index in indices for size, index in self.slabs)
        if not named or sum(size for size, _ in self.slabs) != rows:
            raise PlanError(
                f"the plan of {self.problem} must have slabs of {rows} rows altogether, got "
                f"{self.slabs}"
            )

    def _require_chains(self) -> None:
        # Batches that `last` divides completely: taking last chunks away, one after another, leaves
        # exactly 0 samples. A plan in which `last` has a chunk for any other batch is refused,
        # because `split` might never end.
        reachable = {0}
        for n, (alone, (size, index)) in enumerate(zip(self.alone, self.last, strict=True), 1):
            if not BY_SLABS <= alone < len(self.algorithms):
                raise PlanError(f"the plan of {self.problem} names no algorithm for batch {n}")
            if size == 0:
                continue
            is_named = 0 <= index < len(self.algorithms)
            if not (0 < size <= n and n - size in reachable and is_named):
                raise PlanError(f"the plan of {self.problem} has no valid split of batch {n}")
            reachable.add(n)

    @property
    def remarks(self) -> tuple[str, ...]:
        """The notes, with a remark if other processes perturbed the times."""
        return (*self.notes, _PERTURBED) if self.is_perturbed else self.notes

    def split(self, batch: int) -> Split:
        """The split of a batch from 1 to `problem.batch`.

        Raises:
            PlanError: the batch is outside that range, or has no plan.
        """
        if not 1 <= batch <= self.problem.batch:
            raise PlanError(
                f"{self.problem} is planned for batches 1 to {self.problem.batch}, got {batch}; "
                f"tune with a larger example input"
            )
        if not self.covers(batch):
            raise PlanError(
                f"{self.problem} has no plan for batch {batch}: nothing that was timed computes it "
                f"within the workspace limit; tune with a larger limit or time budget"
            )
        index = self.alone[batch - 1]
        if index >= 0:
            return Split.undivided(batch, self.algorithms[index])
        if index == BY_SLABS:
            rows = tuple(Chunk(size, self.algorithms[index]) for size, index in self.slabs)
            return Split("spatial", rows)
        # By `last` the chunks are found in reverse order, the final one first.
        chunks = []
        while batch:
            size, index = self.last[batch - 1]
            chunks.append(Chunk(size, self.algorithms[index]))
            batch -= size
        return Split("batch", tuple(reversed(chunks)))

    def by_default(self, every_batch: bool) -> KernelPlan:
        """The plan with torch's own convolution for the largest batch only, or for every batch."""
        assert self.default is not None
        # The name of torch's own convolution is appended, because the splits of smaller batches
        # refer to algorithms by index.
        algorithms = (*self.algorithms, DEFAULT_ALGORITHM)
        index = len(self.algorithms)
        # Slabs are left out if no batch uses them any more, because they would change the plan's
        # hash.
        has_slabs = not every_batch and BY_SLABS in self.alone[:-1]
        return replace(
            self,
            algorithms=(DEFAULT_ALGORITHM,) if every_batch else algorithms,
            alone=(0,) * self.problem.batch if every_batch else (*self.alone[:-1], index),
            last=((0, -1),) * self.problem.batch if every_batch else self.last,
            slabs=self.slabs if has_slabs else (),
            timing=self.default,
            predicted_time_ns=self.default.time_ns,
        )

    def uncovered(self) -> list[int]:
        """The batches without a split, the smallest first."""
        return [n for n in range(1, self.problem.batch + 1) if not self.covers(n)]

    def with_default(self, batches: Collection[int]) -> KernelPlan:
        """The same plan with torch's own undivided convolution for the given batches."""
        algorithms = tuple(dict.fromkeys((*self.algorithms, DEFAULT_ALGORITHM)))
        index = algorithms.index(DEFAULT_ALGORITHM)
        alone = (index if n in batches else known for n, known in enumerate(self.alone, start=1))
        return replace(self, algorithms=algorithms, alone=tuple(alone))

    def completed_by(self, smaller: KernelPlan) -> KernelPlan:
        """This plan, with splits from a smaller batch's plan for batches that this one lacks.

        A plan can hold one list of slabs. So if both plans have slabs, splits by slabs are not
        taken from the smaller batch's plan.
        """
        algorithms = tuple(dict.fromkeys((*self.algorithms, *smaller.algorithms)))
        takes_slabs = not self.slabs and BY_SLABS in smaller.alone

        def index(number: int) -> int:
            return number if number < 0 else algorithms.index(smaller.algorithms[number])

        alone, last = list(self.alone), list(self.last)
        for n, (own, (size, number)) in enumerate(zip(smaller.alone, smaller.last, strict=True)):
            # `last` is completed even if batch n + 1 is computed undivided, because a larger batch
            # without its last chunks may be n + 1 samples.
            if not last[n][0]:
                last[n] = (size, index(number))
            if not self.covers(n + 1) and (own != BY_SLABS or takes_slabs):
                alone[n] = index(own)
        slabs = tuple((size, index(number)) for size, number in smaller.slabs)
        return replace(
            self,
            algorithms=algorithms,
            alone=tuple(alone),
            last=tuple(last),
            slabs=slabs if takes_slabs else self.slabs,
        )

    def decisions(self) -> list[Any]:
        """The problem and its splits, with algorithms by name, as JSON values."""
        names = {BY_BATCH: None, BY_SLABS: BY_SLABS, **dict(enumerate(self.algorithms))}
        # Algorithms are given by name instead of by index, because the order of `algorithms` must
        # not change the hash.
        alone = [names[index] for index in self.alone]
        last = [[size, self.algorithms[index]] if size else None for size, index in self.last]
        slabs = [[size, self.algorithms[index]] for size, index in self.slabs]
        return [asdict(self.problem), alone, last, slabs]

    def covers(self, batch: int) -> bool:
        """True if there is a split of this batch; batches below `problem.batch` may have none."""
        if not 1 <= batch <= self.problem.batch:
            return False
        return self.alone[batch - 1] != BY_BATCH or self.last[batch - 1][0] > 0

    def is_derived(self, batch: int) -> bool:
        """True if the split of this batch was not timed as a whole, but only its chunks."""
        return batch != self.problem.batch or self.timing.is_predicted

    @property
    def is_default(self) -> bool:
        """True if the plan of the largest batch is torch's own undivided convolution."""
        return self.split(self.problem.batch).is_default

    @property
    def saved_ns(self) -> int:
        """Time that all calls save over torch's own convolution; 0 if torch's was not timed."""
        # Torch's own convolution saves nothing over itself: its two times differ by noise.
        if self.is_default or self.default is None:
            return 0
        return (self.default.time_ns - self.timing.time_ns) * len(self.layers)
