"""Matrix products of channels-last tensors, which are matrices of positions by channels.

A 1x1 convolution at stride 1 is one product of the operands themselves, for the whole chunk. Other
filters take columns: for each output the channels of every input that its filter covers.
"""

from __future__ import annotations

from math import prod
from types import EllipsisType

import torch
from torch import Tensor

from ucudnn.backends._base import Cost
from ucudnn.backends.torch_cpu._base import OpsExecutable, empty
from ucudnn.backends.torch_cpu.instructions import product_dtype
from ucudnn.backends.torch_cpu.taps import columns_bytes, direct_cost, taps
from ucudnn.problem import Problem

_ALL = slice(None)
_Index = tuple[int | slice | EllipsisType, ...]


def needs_columns(problem: Problem) -> bool:
    """True unless each output reads only the input at its own position.

    >>> needs_columns(Problem("fprop", 2, 4, 8, (9, 9), (1, 1), layout="nhwc"))
    False
    """
    # Padding and a stride may cancel out in the size of the output, but not in its places.
    moves = set(problem.stride) != {1} or any(map(sum, problem.padding))
    return moves or prod(problem.kernel_size) > 1


def places_refusal(problem: Problem) -> str | None:
    """Reason why the products do not compute a channels-last problem; None if they do."""
    # In channels-last the other groups' channels lie between the rows of one group's matrix.
    if problem.groups > 1:
        return "it computes channels-last operands without groups only"
    return None


def places_cost(problem: Problem) -> Cost:
    """Cost of the product with padding; columns, if any, are written and read once."""
    direct = direct_cost(problem)
    if not needs_columns(problem):
        return direct
    columns = columns_bytes(problem)
    return Cost(problem.flops, direct.traffic_bytes + 2 * columns, columns)


class PlacesGemm(OpsExecutable):
    """One matrix product over columns of the shape (N, *output_size, *kernel_size, C)."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._dtype = product_dtype(problem)
        self._taps = tuple(taps(problem))
        self._needs_columns = needs_columns(problem)

    def fprop(self, x: Tensor, w: Tensor) -> Tensor:
        """y from x and w."""
        y = empty(self.problem, (x.shape[0], *self.problem.y_shape[1:]))
        # y = columns * filters^T: (places, taps * channels) by (taps * channels, channels out).
        self._product(self._columns(x), self._filters(w).t(), y)
        return y

    def dgrad(self, dy: Tensor, w: Tensor) -> Tensor:
        """dx from dy and w."""
        dx = empty(self.problem, (dy.shape[0], *self.problem.x_shape[1:]))
        self._write_dx(dy, w, dx)
        return dx

    def wgrad(self, x: Tensor, dy: Tensor) -> Tensor:
        """dw from x and dy."""
        problem = self.problem
        # dw = dy^T * columns, which sums over all places of all samples in one product.
        dw = torch.mm(self._matrix(dy).t(), self._columns(x)).to(x.dtype)
        channels = problem.in_channels
        return dw.view(problem.out_channels, *problem.kernel_size, channels).movedim(-1, 1)

    def write(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        """Compute into a slice of an existing result (fprop, dgrad)."""
        if self.problem.op == "fprop":
            self._product(self._columns(a), self._filters(b).t(), out)
        else:
            self._write_dx(a, b, out)

    def _write_dx(self, dy: Tensor, w: Tensor, dx: Tensor) -> None:
        rows, filters = self._matrix(dy), self._filters(w)
        if not self._needs_columns:
            self._product(rows, filters, dx)
            return
        # The transpose of im2col: the product gives each output's contribution to the inputs that
        # its filter covers, and the loop below adds up those that fall on the same input.
        columns = torch.mm(rows, filters).view(self._columns_shape(dy.shape[0]))
        # a half-precision dx is summed in float32 and rounded once
        total = dx if dx.dtype.itemsize > 2 else dx.float()
        total.zero_()
        for tap, outputs, inputs in self._taps:
            into = total.movedim(1, -1)[(_ALL, *inputs)]
            where: _Index = (_ALL, *outputs, *tap)
            into += columns[where]
        if total is not dx:
            dx.copy_(total)

    def _product(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        """Multiply into a tensor, without a temporary if it has the layout of the product."""
        # With channels moved last, a channels-last tensor is contiguous: a matrix without a copy.
        target = out.movedim(1, -1)
        if out.dtype == self._dtype and target.is_contiguous():
            torch.mm(left, right, out=target.view(left.shape[0], right.shape[1]))
        else:
            target.copy_(torch.mm(left, right).view(target.shape))

    def _columns_shape(self, batch: int) -> tuple[int, ...]:
        problem = self.problem
        return (batch, *problem.output_size, *problem.kernel_size, problem.in_channels)

    def _columns(self, x: Tensor) -> Tensor:
        if not self._needs_columns:
            return self._matrix(x)
        # a filter position that only ever meets padding is no tap, and its columns are zero
        every_tap = len(self._taps) == prod(self.problem.kernel_size)
        new = x.new_empty if every_tap else x.new_zeros
        columns = new(self._columns_shape(x.shape[0]), dtype=self._dtype)
        every_output = tuple(slice(0, size) for size in self.problem.output_size)
        for tap, outputs, inputs in self._taps:
            where: _Index = (..., *tap, _ALL)
            column = columns[where]
            if outputs != every_output:  # padding
                column.zero_()
            column[(_ALL, *outputs)] = x.movedim(1, -1)[(_ALL, *inputs)]
        places = x.shape[0] * prod(self.problem.output_size)
        return columns.view(places, prod(self.problem.kernel_size) * self.problem.in_channels)

    def _matrix(self, tensor: Tensor) -> Tensor:
        """A matrix of positions by channels; a view if the tensor is contiguous."""
        batch, channels, *sizes = tensor.shape
        matrix = tensor.movedim(1, -1).reshape(batch * prod(sizes), channels)
        return matrix.to(self._dtype)

    def _filters(self, w: Tensor) -> Tensor:
        """A matrix of channels out by (*kernel_size, channels in)."""
        return w.movedim(1, -1).reshape(w.shape[0], -1).to(self._dtype)
