"""The two axes along which a kernel can be split (batch and rows), and the problem of each chunk.

A batch of one or two samples, as in 3-D and high-resolution networks, leaves little to split along
the batch. Then a kernel can be split along its rows instead. This is tried only if the batch has at
most `MOST_SAMPLES` samples, and there is a workspace limit that torch's own convolution exceeds or
may exceed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ucudnn.problem import Problem
from ucudnn.slabs import inner_problem, row_alignment, row_count, slab
from ucudnn.split import Chunk, Split

# The largest batch, in samples, that may be split along rows. Larger batches can be split into
# micro-batches that are small enough.
MOST_SAMPLES = 8


class AbstractAxis(ABC):
    """An axis along which one kernel can be split; it has a unit, in which chunk sizes are counted.

    Law: chunks whose sizes add up to `extent` together compute the kernel's problem. A chunk of a
    given size computes the problem `part(size)`, unless it is near an end of the axis. `ends(size)`
    has the problems of the first and the last chunk if these differ from `part(size)`.
    """

    name: str  # `Split.axis` of splits along this axis: "batch" or "spatial"
    problem: Problem  # the problem of the kernel at its largest batch

    @property
    @abstractmethod
    def extent(self) -> int:
        """Length of the axis: the sum of the sizes of all chunks of a split."""

    @abstractmethod
    def part(self, size: int) -> Problem:
        """The problem that a chunk of this size computes, and that is therefore measured for it."""

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
        """The size of a split's chunk in units of the axis; an incomplete last unit counts as 1."""


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
        # The whole batch is listed even if it is not a power of two, because the undivided call
        # competes with every split.
        return (*_powers_of_two_below(self.extent), self.extent)

    def split(self, chunks: Iterable[Chunk]) -> Split:
        return Split("batch", tuple(chunks))

    def size_of(self, chunk: Chunk) -> int:
        return chunk.size


@dataclass(frozen=True, slots=True)
class RowAxis(AbstractAxis):
    """The row axis: a chunk is a slab, that is, some rows of the result (of dy for wgrad).

    A slab has these rows in all samples of the batch. The unit is one row; for dgrad it is as many
    rows as the stride, because only then all slabs of one size have equal problems, apart from
    those near the ends.

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
        # An end slab is left out if its problem is that of an inner slab. It is also left out if it
        # has no problem, because its result is known to be zero.
        ends = (end for end in (first, last) if end is not None and end != inner)
        return tuple(dict.fromkeys(ends))

    def sizes(self, policy: str) -> tuple[int, ...]:
        """Sizes that are powers of two, and their remainders; empty if rows are not to be split.

        A remainder is what is left of the extent after as many slabs of such a size as possible.
        The policies "powers-of-two" and "all" give the same sizes, so that there are few of them
        even for many rows. A size is left out if a slab of this size that touches neither end
        of the tensors would need more rows than the tensors have.
        """
        if policy == "undivided" or self.problem.batch > MOST_SAMPLES:
            return ()
        powers = _powers_of_two_below(self.extent)
        sizes = {*powers, *(self.extent % size for size in powers)} - {0}
        return tuple(size for size in sorted(sizes) if self._is_inside(size))

    def _is_inside(self, size: int) -> bool:
        # `inner_problem` assumes an endless tensor. The real tensors may have too few rows for
        # such a slab.
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
        """The number of units that the chunk's rows fill, rounded up."""
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
