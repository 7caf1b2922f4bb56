"""The two axes along which a kernel is split, batch and rows, and the problem timed for a chunk.

A batch of one or two, as in 3-D and high-resolution networks, leaves little to split along the
batch. Rows are tried if the batch has at most `MOST_SAMPLES` samples and the workspace limit
excludes torch's own convolution.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ucudnn.problem import Problem
from ucudnn.slabs import inner_problem, row_alignment, row_count, slab
from ucudnn.split import Chunk, Split

# The largest batch that may be split along rows. Of larger batches the micro-batches are small
# enough.
MOST_SAMPLES = 8


class AbstractAxis(ABC):
    """An axis of one kernel, and the unit in which the sizes of its chunks are counted.

    Law: chunks whose sizes add up to `extent` together compute the problem. `part` is the problem
    of a chunk of a given size, unless the chunk is near an end of the axis.
    """

    name: str  # the `axis` of the splits: "batch" or "spatial"
    problem: Problem  # the kernel at its largest batch

    @property
    @abstractmethod
    def extent(self) -> int:
        """Length of the axis: the sum of the sizes of all chunks of a split."""

    @abstractmethod
    def part(self, size: int) -> Problem:
        """The problem that is measured for a chunk of this size."""

    @abstractmethod
    def ends(self, size: int) -> tuple[Problem, ...]:
        """The problems of the first and the last chunk of this size, if they differ from `part`."""

    @abstractmethod
    def sizes(self, policy: str) -> tuple[int, ...]:
        """Chunk sizes that a policy allows, in ascending order."""

    @abstractmethod
    def split(self, chunks: Iterable[Chunk]) -> Split:
        """The split that consists of these chunks, whose sizes are in units of the axis."""

    @abstractmethod
    def size_of(self, chunk: Chunk) -> int:
        """The size of a chunk of a split in units of the axis; its last unit may be incomplete."""

    def __str__(self) -> str:
        return f"the {self.name} axis"


@dataclass(frozen=True, slots=True)
class BatchAxis(AbstractAxis):
    """The batch axis: a chunk is a micro-batch, and the unit is one sample.

    >>> axis = BatchAxis(Problem("fprop", 6, 4, 4, (9,), (3,)))
    >>> axis.extent, axis.part(2).batch, axis.sizes("powers-of-two")
    (6, 2, (1, 2, 4, 6))
    """

    problem: Problem
    name = "batch"

    @property
    def extent(self) -> int:
        return self.problem.batch

    def part(self, size: int) -> Problem:
        return self.problem.with_batch(size)

    def ends(self, size: int) -> tuple[Problem, ...]:
        del size
        return ()

    def sizes(self, policy: str) -> tuple[int, ...]:
        """The micro-batch sizes that a policy allows, including the whole batch."""
        if policy == "undivided":
            return (self.extent,)
        if policy == "all":
            return tuple(range(1, self.extent + 1))
        # The undivided batch competes with every split, even if it is not a power of two.
        return (*_powers_of_two_below(self.extent), self.extent)

    def split(self, chunks: Iterable[Chunk]) -> Split:
        return Split("batch", tuple(chunks))

    def size_of(self, chunk: Chunk) -> int:
        return chunk.size


@dataclass(frozen=True, slots=True)
class RowAxis(AbstractAxis):
    """The row axis: a chunk is a slab, with rows of the result (of dy for wgrad) in all samples.

    The unit is one row. For dgrad the unit is as many rows as the stride, so that all inner slabs
    of one size have equal problems.

    >>> axis = RowAxis(Problem("dgrad", 2, 8, 8, (27, 9), (3, 3), (2, 1)))
    >>> axis.extent, axis.sizes("all"), axis.part(4).input_size
    (14, (1, 2, 4, 6, 8), (8, 9))
    """

    problem: Problem
    name = "spatial"

    @property
    def extent(self) -> int:
        """Number of units; the last unit may have fewer rows than the others."""
        return -(-row_count(self.problem) // self._unit)

    @property
    def _unit(self) -> int:
        return row_alignment(self.problem)

    def part(self, size: int) -> Problem:
        return inner_problem(self.problem, size * self._unit)

    def ends(self, size: int) -> tuple[Problem, ...]:
        """The problems of the first and the last slab of this size, if they differ from `part`."""
        rows, inner = row_count(self.problem), self.part(size)
        first = slab(self.problem, 0, size * self._unit).problem
        last = slab(self.problem, (self.extent - size) * self._unit, rows).problem
        # Ends that equal an inner slab are left out, and ends without a problem, whose result is
        # zero.
        ends = (end for end in (first, last) if end is not None and end != inner)
        return tuple(dict.fromkeys(ends))

    def sizes(self, policy: str) -> tuple[int, ...]:
        """Powers of two, and the remainders after slabs of these sizes; none if rows are not split.

        The policies other than "undivided" allow the same sizes, which are few even for many rows.
        A size is left out if the tensors are too short for an inner slab and all rows that it
        reads.
        """
        if policy == "undivided" or self.problem.batch > MOST_SAMPLES:
            return ()
        powers = _powers_of_two_below(self.extent)
        sizes = {*powers, *(self.extent % size for size in powers)} - {0}
        return tuple(size for size in sorted(sizes) if self._is_inside(size))

    def _is_inside(self, size: int) -> bool:
        # `inner_problem` assumes an endless tensor; the real tensor may be too short for the slab.
        inner, whole = self.part(size), self.problem
        return (
            inner.input_size[0] <= whole.input_size[0]
            and inner.output_size[0] <= whole.output_size[0]
        )

    def split(self, chunks: Iterable[Chunk]) -> Split:
        left, found = row_count(self.problem), []
        for chunk in chunks:
            # The last unit of dgrad may have fewer rows than the stride.
            rows = min(chunk.size * self._unit, left)
            found.append(replace(chunk, size=rows))
            left -= rows
        return Split("spatial", tuple(found))

    def size_of(self, chunk: Chunk) -> int:
        """The number of units in the rows of a chunk, rounded up."""
        return -(-chunk.size // self._unit)


def axis_of(problem: Problem, split: Split) -> AbstractAxis:
    """The axis along which a split divides a problem.

    >>> problem = Problem("fprop", 6, 4, 4, (9,), (3,))
    >>> axis_of(problem, Split("spatial", (Chunk(7, "gemm"),))).extent
    7
    """
    return RowAxis(problem) if split.axis == RowAxis.name else BatchAxis(problem)


def _powers_of_two_below(extent: int) -> list[int]:
    return [1 << k for k in range(extent.bit_length()) if 1 << k < extent]
