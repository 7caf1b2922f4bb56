"""The two axes along which a kernel is split, batch and rows, and the problem timed for a chunk.

A batch of one or two, as in 3-D and high-resolution networks, leaves nothing to split along the
batch. Rows are tried if the batch is that small and the workspace limit excludes an algorithm.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ucudnn.problem import Problem
from ucudnn.slabs import inner_problem, row_alignment, row_count, slab
from ucudnn.split import Chunk, Split

# The largest batch that is split along rows, too: chunks of a larger one are small enough.
MOST_SAMPLES = 8


class AbstractAxis(ABC):
    """An axis of one kernel and the unit of its chunks; picklable, for workers.

    Law: chunks whose sizes add up to `extent` together compute the problem. `part` is the problem
    of a chunk of some size, except for a chunk near an end.
    """

    name: str  # as in `Split`
    problem: Problem  # the kernel at its largest batch

    @property
    @abstractmethod
    def extent(self) -> int:
        """Sum of the sizes of all chunks."""

    @abstractmethod
    def part(self, size: int) -> Problem:
        """The problem that is measured for a chunk of this size."""

    @abstractmethod
    def ends(self, size: int) -> tuple[Problem, ...]:
        """The problems of the first and the last chunk if they differ from `part`."""

    @abstractmethod
    def sizes(self, policy: str) -> tuple[int, ...]:
        """Chunk sizes that a policy allows, in ascending order."""

    @abstractmethod
    def split(self, chunks: Iterable[Chunk]) -> Split:
        """The split whose chunks have these sizes."""

    @abstractmethod
    def size_of(self, chunk: Chunk) -> int:
        """The size of the problem of a chunk; the last chunk may have fewer rows than that."""

    def __str__(self) -> str:
        return f"the {self.name} axis"


@dataclass(frozen=True, slots=True)
class BatchAxis(AbstractAxis):
    """Chunks are samples.

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
        """The micro-batch sizes, and the whole batch."""
        if policy == "undivided":
            return (self.extent,)
        if policy == "all":
            return tuple(range(1, self.extent + 1))
        # The undivided batch competes with every split, also where it is no power of two.
        return (*_powers_of_two_below(self.extent), self.extent)

    def split(self, chunks: Iterable[Chunk]) -> Split:
        return Split("batch", tuple(chunks))

    def size_of(self, chunk: Chunk) -> int:
        return chunk.size


@dataclass(frozen=True, slots=True)
class RowAxis(AbstractAxis):
    """Chunks are slabs: rows of the result (of dy for wgrad), of all samples.

    A unit is one row; for dgrad it is as many rows as the stride, so that all inner slabs of one
    size have equal problems.

    >>> axis = RowAxis(Problem("dgrad", 2, 8, 8, (27, 9), (3, 3), (2, 1)))
    >>> axis.extent, axis.sizes("all"), axis.part(4).input_size
    (14, (1, 2, 4, 6, 8), (8, 9))
    """

    problem: Problem
    name = "spatial"

    @property
    def extent(self) -> int:
        """The units; the last one may have fewer rows."""
        return -(-row_count(self.problem) // self._unit)

    @property
    def _unit(self) -> int:
        return row_alignment(self.problem)

    def part(self, size: int) -> Problem:
        return inner_problem(self.problem, size * self._unit)

    def ends(self, size: int) -> tuple[Problem, ...]:
        """Problems of the first and the last slab, which have padding at one end."""
        rows, inner = row_count(self.problem), self.part(size)
        first = slab(self.problem, 0, size * self._unit).problem
        last = slab(self.problem, (self.extent - size) * self._unit, rows).problem
        # An end without padding is an inner slab; where only padding is read there is no problem.
        ends = (end for end in (first, last) if end is not None and end != inner)
        return tuple(dict.fromkeys(ends))

    def sizes(self, policy: str) -> tuple[int, ...]:
        """Powers of two and the remainders that they leave; none if slabs cannot matter.

        There are few of them, however many rows there are, with any policy. The tensors must have
        room for an inner slab of each size, with all rows that it reads.
        """
        if policy == "undivided" or self.problem.batch > MOST_SAMPLES:
            return ()
        powers = _powers_of_two_below(self.extent)
        sizes = {*powers, *(self.extent % size for size in powers)} - {0}
        return tuple(size for size in sorted(sizes) if self._is_inside(size))

    def _is_inside(self, size: int) -> bool:
        # `inner_problem` takes the tensor to be endless; this one may be too short for the slab.
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
        """The number of units that its rows fill, rounded up."""
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
