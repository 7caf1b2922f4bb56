"""Weight gradients of depthwise convolutions by matrix products whose diagonals are summed.

For one channel, an element of the weight gradient is the sum of x * dy over all pairs of a place of
x and a place of dy whose distance is that of the element. For one filter row, a matrix product of x
and dy adds up all rows and samples. It has an element for each pair of a column of x and a column
of dy. The pairs of the same distance lie on a diagonal of this matrix, so for each filter column
one diagonal is added up. Most of the matrix is not needed. But code that computes only the needed
elements cannot use fast matrix products, so for wide filters this algorithm is faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ucudnn.backends._base import Cost, Executable
from ucudnn.backends.tensors import ComputedExecutable, torch_dtype
from ucudnn.backends.torch_cpu.algorithm import AbstractAlgorithm, FilterAxis, direct_cost
from ucudnn.problem import Problem

# Least number of columns of dy in a block, because products of narrower matrices are far from peak
# speed.
_LEAST_BLOCK = 14
# Least number of columns of a filter. For narrower filters, torch's own kernels were faster in
# every trial.
_LEAST_WIDTH = 5


class DiagonalGemm(AbstractAlgorithm):
    """One matrix product per channel and filter row, over blocks of columns."""

    name = "diagonal_gemm"

    def refusal(self, problem: Problem) -> str | None:
        if (
            problem.op != "wgrad"
            or not problem.in_channels == problem.out_channels == problem.groups
        ):
            return "it computes weight gradients of depthwise convolutions only"
        if problem.rank == 3:
            return "it computes 1-D and 2-D problems only"
        if problem.kernel_size[-1] < _LEAST_WIDTH:
            return f"it computes filters of at least {_LEAST_WIDTH} columns only"
        return None

    def cost(self, problem: Problem) -> Cost:
        """Cost of the products of blocks; the blocks are copies, written once and read once."""
        flat = problem.as_2d()
        blocks, element = _blocks(flat), max(problem.bytes_per_element, 4)
        places = problem.groups * problem.batch * blocks.number
        copied = flat.output_size[0] * blocks.block
        # The copy of x may have more rows than x, so that their number is a multiple of the stride.
        # The additional rows are neither written nor read.
        written = places * (copied + flat.input_size[0] * blocks.columns) * element
        copies = places * (copied + blocks.x_rows * blocks.columns) * element
        summed = places * sum(tap.rows for tap in blocks.taps)
        row = problem.groups * blocks.block * element
        products = flat.kernel_size[0] * blocks.window * row
        # The product of one filter row is a temporary until it is copied to its place. The result
        # does not exist yet at that time, so the bytes of the result are subtracted here.
        one = blocks.columns * row - problem.result_bytes if blocks.taps else 0
        return Cost(
            2 * summed * blocks.columns * blocks.block,
            direct_cost(problem).traffic_bytes + 2 * written,
            copies + products + max(one, 0),
        )

    def executable(self, problem: Problem) -> Executable:
        return _DiagonalGemm(problem)


class _RowTap(NamedTuple):
    """Rows of x and dy that a filter row combines, numbered as in the copies."""

    position: int
    x_begin: int
    y_begin: int
    rows: int


class _Blocks(NamedTuple):
    """A division of the columns of dy into blocks, each with the columns of x that it needs."""

    number: int  # of blocks
    block: int  # columns of dy in each block; the last one is padded with zeros
    window: int  # columns of x that a block needs, padding included
    columns: int  # columns of the window that are copied: not the padding if there is one block
    skipped: int  # columns of padding before the copied columns
    x_rows: int  # rows of the copy of x: as many as x has, rounded up to a multiple of the stride
    taps: tuple[_RowTap, ...]


@lru_cache(maxsize=4096)
def _blocks(problem: Problem) -> _Blocks:
    """The division of a 2-D problem, in blocks that are about as wide as the filter."""
    extent = problem.dilation[1] * (problem.kernel_size[1] - 1) + 1
    places, size, begin = problem.output_size[1], problem.input_size[1], problem.padding[1][0]
    # The wider the blocks, the larger is the part of the product that is not needed. The narrower
    # they are, the more columns of x are copied twice, because neighbouring windows overlap.
    count = max(1, places // max(extent, _LEAST_BLOCK))
    # The width is rounded up, so that all blocks are equal. Then fewer blocks may be enough for all
    # columns.
    block = -(-places // count)
    count = -(-places // block)
    window = (block - 1) * problem.stride[1] + extent
    skipped, columns = 0, window
    if count == 1:
        skipped = min(begin, window)
        columns = max(0, min(window, begin + size) - skipped)
    per_phase = -(-problem.input_size[0] // problem.stride[0])
    return _Blocks(
        count,
        block,
        window,
        columns,
        skipped,
        per_phase * problem.stride[0],
        tuple(_row_taps(problem, per_phase)),
    )


def _row_taps(problem: Problem, per_phase: int) -> Iterator[_RowTap]:
    rows = FilterAxis.of(problem, 0)
    for position in range(rows.kernel):
        tap = rows.tap(position)
        # A filter row that meets only padding is left out, and its gradient stays zero.
        if tap is not None:
            outputs, inputs = tap
            # Rows of x with the same remainder modulo the stride form a phase, in which they are
            # numbered.
            number, phase = divmod(inputs.start, rows.stride)
            count = outputs.stop - outputs.start
            yield _RowTap(position, phase * per_phase + number, outputs.start, count)


class _DiagonalGemm(ComputedExecutable):
    """Executable on copies of x and dy, as matrices with one row per (row, sample, block)."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._flat = problem.as_2d()
        self._blocks = _blocks(self._flat)
        # Operands in half precision are multiplied in float32, so that sums are rounded only once,
        # at the end.
        self._dtype = torch.promote_types(torch_dtype(problem), torch.float32)

    def compute(self, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        del bias  # a weight gradient has none
        x, dy = (a, b) if self.problem.rank == 2 else (a.unsqueeze(2), b.unsqueeze(2))
        flat, blocks = self._flat, self._blocks
        left, right = self._x_rows(x), self._y_rows(dy)
        shape = (flat.groups, flat.kernel_size[0], blocks.window, blocks.block)
        # The products begin as zeros, because those with columns of padding are skipped and stay
        # zero.
        products = left.new_zeros(shape)
        kept = slice(blocks.skipped, blocks.skipped + blocks.columns)
        each = x.shape[0] * blocks.number
        for position, x_begin, y_begin, height in blocks.taps:
            x_rows = left[:, x_begin * each : (x_begin + height) * each]
            y_rows = right[:, y_begin * each : (y_begin + height) * each]
            products[:, position, kept] = torch.bmm(x_rows.mT, y_rows)
        return self._diagonals(products).sum(-1).view(self.problem.w_shape)

    def _diagonals(self, products: Tensor) -> Tensor:
        """A view of the products: (channel, filter row, filter column, column of the block)."""
        channel, row, column, one = products.stride()
        (_, stride), (_, dilation) = self._flat.stride, self._flat.dilation
        shape = (*products.shape[:2], self._flat.kernel_size[1], self._blocks.block)
        # At filter column k, column j of dy is multiplied with column j * stride + k * dilation of
        # x. These pairs lie on a diagonal, and the sum of their products over j is one element of
        # the gradient.
        return products.as_strided(shape, (channel, row, dilation * column, stride * column + one))

    def _x_rows(self, x: Tensor) -> Tensor:
        blocks, stride, begin = self._blocks, self._flat.stride, self._flat.padding[1][0]
        rows = self._rows(x, blocks.x_rows, blocks.columns)
        # Rows are sorted by phase, so that the rows that one filter row uses are consecutive and
        # form a matrix.
        per_phase = blocks.x_rows // stride[0]
        for phase in range(stride[0]):
            source = x.permute(1, 2, 0, 3)[:, phase :: stride[0]]
            target = rows[:, phase * per_phase :][:, : source.shape[1]]
            for index in range(blocks.number):
                first = index * blocks.block * stride[1] + blocks.skipped - begin
                _copy_columns(source, target[:, :, :, index], first)
        return rows.flatten(1, 3)

    def _y_rows(self, dy: Tensor) -> Tensor:
        blocks = self._blocks
        rows = self._rows(dy, self._flat.output_size[0], blocks.block)
        for index in range(blocks.number):
            _copy_columns(dy.permute(1, 2, 0, 3), rows[:, :, :, index], index * blocks.block)
        return rows.flatten(1, 3)

    def _rows(self, like: Tensor, height: int, columns: int) -> Tensor:
        shape = (self._flat.groups, height, like.shape[0], self._blocks.number, columns)
        return like.new_empty(shape, dtype=self._dtype)


def _copy_columns(source: Tensor, target: Tensor, begin: int) -> None:
    """Copy the source's columns from `begin` on; columns outside the source become zero."""
    wanted, there = target.shape[-1], source.shape[-1]
    first = min(max(0, -begin), wanted)
    last = max(first, min(wanted, there - begin))
    target[..., :first] = 0
    target[..., first:last] = source[..., begin + first : begin + last]
    target[..., last:] = 0
