"""Matrix-multiplication algorithms: 1x1 filters directly, other filters by im2col columns."""

from __future__ import annotations

from abc import abstractmethod
from math import prod
from types import EllipsisType

import torch
from torch import Tensor

from ucudnn.backends._base import Cost, Executable, add_bias
from ucudnn.backends.torch_cpu.algorithm import (
    AbstractAlgorithm,
    OpsExecutable,
    columns_bytes,
    direct_cost,
    empty,
    taps,
)
from ucudnn.backends.torch_cpu.processor import product_dtype
from ucudnn.problem import Problem

_ALL = slice(None)
_Index = tuple[int | slice | EllipsisType, ...]


class Gemm(AbstractAlgorithm):
    """Matrix products for 1x1 filters: one per sample, or one per chunk in channels-last."""

    name = "gemm"

    def refusal(self, problem: Problem) -> str | None:
        if prod(problem.kernel_size) > 1 or any(map(sum, problem.padding)):
            return "it computes filters of size 1 without padding only"
        return _places_refusal(problem) if problem.layout == "nhwc" else None

    def cost(self, problem: Problem) -> Cost:
        """Cost of the products; copies, if needed, are made for one sample at a time."""
        if problem.layout == "nhwc":
            return _places_cost(problem)
        # A 1x1 filter reads only every stride-th place of x, so it reads as many places as y has.
        x_sample = problem.in_channels * prod(problem.output_size)
        y_sample = prod(problem.y_shape[1:])
        workspace = 0
        # wgrad in half precision converts x and dy of a sample to float32, and sums dw in float32.
        # Only the bytes by which this sum exceeds the result in half precision are workspace.
        if problem.op == "wgrad" and problem.bytes_per_element < 4:
            dw_growth = (4 - problem.bytes_per_element) * prod(problem.w_shape)
            workspace = 4 * (x_sample + y_sample) + dw_growth
        # With a stride, the places of x that filters read are copied together, one sample after
        # another.
        elif problem.input_size != problem.output_size and problem.in_channels > 1:
            workspace = problem.bytes_per_element * x_sample
        return direct_cost(problem)._replace(workspace_bytes=workspace)

    def executable(self, problem: Problem) -> Executable:
        return _PlacesGemm(problem) if problem.layout == "nhwc" else _Gemm(problem)


class Im2colGemm(AbstractAlgorithm):
    """One matrix product per chunk, over the im2col columns of the whole chunk.

    Source: Chellapilla, Puri, Simard, "High Performance Convolutional Neural Networks for
    Document Processing" (2006), section 3.
    """

    name = "im2col_gemm"

    def refusal(self, problem: Problem) -> str | None:
        if prod(problem.kernel_size) == 1 and not any(map(sum, problem.padding)):
            return "a filter of size 1 needs no columns; gemm computes it"
        return _places_refusal(problem) if problem.layout == "nhwc" else None

    def cost(self, problem: Problem) -> Cost:
        """Cost of the product, padding included; columns are written once and read once."""
        if problem.layout == "nhwc":
            return _places_cost(problem)
        direct, columns = direct_cost(problem), columns_bytes(problem)
        # In the matrix of y (or dy), channels come before samples. If there are several of both,
        # putting them in order takes a copy.
        y = 0
        if problem.batch > 1 and problem.out_channels > 1:
            y = prod(problem.y_shape) * problem.bytes_per_element
        if problem.op == "fprop":
            workspace = max(columns, y)  # the columns are freed before the result is put in order
        else:
            workspace = columns + (y if prod(problem.output_size) > 1 else 0)
        return Cost(problem.flops, direct.traffic_bytes + 2 * columns, workspace)

    def executable(self, problem: Problem) -> Executable:
        return _PlacesGemm(problem) if problem.layout == "nhwc" else _Im2colGemm(problem)


class _Gemm(OpsExecutable):
    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._dtype = product_dtype(problem)
        self._groups = problem.groups
        # A 1x1 filter with a stride reads every stride-th place of x and ignores the rest.
        self._sampled = (slice(None), *(slice(None, None, step) for step in problem.stride))
        self._strided = set(problem.stride) != {1}

    def fprop(self, x: Tensor, w: Tensor) -> Tensor:
        y = empty(self.problem, (x.shape[0], *self.problem.y_shape[1:]))
        self.write(x, w, y)
        return y

    def dgrad(self, dy: Tensor, w: Tensor) -> Tensor:
        dx = empty(self.problem, (dy.shape[0], *self.problem.x_shape[1:]))
        self.write(dy, w, dx)
        return dx

    def wgrad(self, x: Tensor, dy: Tensor) -> Tensor:
        # The products of samples are summed in float32, because rounding the sum to half precision
        # after each sample would lose bits.
        dtype = torch.promote_types(x.dtype, torch.float32)
        dw = x.new_zeros(self.problem.w_shape, dtype=dtype)
        self.add(x, dy, dw)
        return dw

    def write(self, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
        # There is one product per sample, because channels-first operands are matrices (channels,
        # places) only within a sample. The groups are the batch dimension of bmm.
        filters = self._grouped(b).to(self._dtype)
        if self.problem.op == "dgrad":
            filters = filters.mT
        for source, target in zip(a, out, strict=True):
            self._write_sample(source, filters, target)
        add_bias(out, bias)

    def _write_sample(self, source: Tensor, filters: Tensor, target: Tensor) -> None:
        # dgrad with a stride writes to every stride-th place of dx; the places between get zero.
        scattered = self._strided and self.problem.op == "dgrad"
        if self._strided and not scattered:
            source = source[self._sampled].contiguous()
        columns = self._grouped(source.to(self._dtype))
        # If the result needs neither a conversion nor zeros between its places, bmm writes directly
        # into it.
        if target.dtype == self._dtype and not scattered:
            torch.bmm(filters, columns, out=self._grouped(target))
            return
        values = torch.bmm(filters, columns).view(target.shape[0], *source.shape[1:])
        if scattered:
            target.zero_()[self._sampled] = values
        else:
            target.copy_(values)

    def add(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        total = self._grouped(out)
        for x, dy in zip(a, b, strict=True):
            columns = self._grouped(x[self._sampled].contiguous().to(out.dtype))
            rows = self._grouped(dy.to(out.dtype))
            # `baddbmm` adds the product to dw in place, without a temporary as large as dw.
            torch.baddbmm(total, rows, columns.mT, out=total)

    def _grouped(self, tensor: Tensor) -> Tensor:
        return tensor.view(self._groups, tensor.shape[0] // self._groups, -1)


class _ColumnGemm(OpsExecutable):
    """Base of executables that multiply by columns, a matrix of the inputs that each output reads.

    Subclasses choose the layout of the columns: `_shape` is their shape for a batch, and `_of_tap`
    returns the columns of one filter position as a view of the shape (N, C, *output_size).
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._dtype = product_dtype(problem)
        self._taps = tuple(taps(problem))

    @abstractmethod
    def _shape(self, batch: int) -> tuple[int, ...]: ...

    @abstractmethod
    def _of_tap(self, columns: Tensor, tap: tuple[int, ...]) -> Tensor: ...

    @abstractmethod
    def _write_dx(self, dy: Tensor, w: Tensor, dx: Tensor) -> None: ...

    def dgrad(self, dy: Tensor, w: Tensor) -> Tensor:
        dx = empty(self.problem, (dy.shape[0], *self.problem.x_shape[1:]))
        self._write_dx(dy, w, dx)
        return dx

    def write(self, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
        if self.problem.op == "dgrad":
            self._write_dx(a, b, out)
            add_bias(out, bias)
        else:
            super().write(a, b, out, bias)

    def _filled(self, x: Tensor) -> Tensor:
        # A filter position that meets only padding is no tap, and its columns are zero.
        every_tap = len(self._taps) == prod(self.problem.kernel_size)
        new = x.new_empty if every_tap else x.new_zeros
        columns = new(self._shape(x.shape[0]), dtype=self._dtype)
        every_output = tuple(slice(0, size) for size in self.problem.output_size)
        for tap, outputs, inputs in self._taps:
            column = self._of_tap(columns, tap)
            if outputs != every_output:  # padding
                column.zero_()
            column[(_ALL, _ALL, *outputs)] = x[(_ALL, _ALL, *inputs)]
        return columns

    def _add_up(self, columns: Tensor, dx: Tensor) -> None:
        """Add up the columns' elements that belong to the same input: the transpose of im2col."""
        # a half-precision dx is summed in float32 and rounded once
        total = dx if dx.dtype.itemsize > 2 else dx.float()
        total.zero_()
        for tap, outputs, inputs in self._taps:
            into = total[(_ALL, _ALL, *inputs)]
            into += self._of_tap(columns, tap)[(_ALL, _ALL, *outputs)]
        if total is not dx:
            dx.copy_(total)


class _Im2colGemm(_ColumnGemm):
    """One matrix product over columns of the shape (C, *kernel_size, N, *output_size)."""

    def _shape(self, batch: int) -> tuple[int, ...]:
        problem = self.problem
        return (problem.in_channels, *problem.kernel_size, batch, *problem.output_size)

    def _of_tap(self, columns: Tensor, tap: tuple[int, ...]) -> Tensor:
        where: _Index = (_ALL, *tap)
        return columns[where].transpose(0, 1)

    def fprop(self, x: Tensor, w: Tensor) -> Tensor:
        problem = self.problem
        y = torch.bmm(self._filters(w), self._column_rows(self._filled(x)))
        # The product has channels outermost; the transpose is a view, which the base class copies.
        return y.view(problem.out_channels, x.shape[0], *problem.output_size).transpose(0, 1)

    def _write_dx(self, dy: Tensor, w: Tensor, dx: Tensor) -> None:
        rows = torch.bmm(self._filters(w).mT, self._output_rows(dy))
        self._add_up(rows.view(self._shape(dy.shape[0])), dx)

    def wgrad(self, x: Tensor, dy: Tensor) -> Tensor:
        dw = torch.bmm(self._output_rows(dy), self._column_rows(self._filled(x)).mT)
        return dw.view(self.problem.w_shape)

    def add(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        # `baddbmm` takes one dtype only. So the base class adds half-precision products to `out`.
        if out.dtype != self._dtype:
            super().add(a, b, out)
            return
        rows = self._output_rows(b)
        total = out.view(self.problem.groups, rows.shape[1], -1)
        torch.baddbmm(total, rows, self._column_rows(self._filled(a)).mT, out=total)

    def _column_rows(self, columns: Tensor) -> Tensor:
        channels = self.problem.in_channels // self.problem.groups
        rows = channels * prod(self.problem.kernel_size)
        return columns.view(self.problem.groups, rows, -1)

    def _output_rows(self, dy: Tensor) -> Tensor:
        rows = self.problem.out_channels // self.problem.groups
        channels_first = dy.transpose(0, 1).to(self._dtype, memory_format=torch.contiguous_format)
        return channels_first.reshape(self.problem.groups, rows, -1)

    def _filters(self, w: Tensor) -> Tensor:
        filters = w.reshape(self.problem.groups, w.shape[0] // self.problem.groups, -1)
        return filters.to(self._dtype)


# In channels-last, tensors are matrices of positions by channels. So a 1x1 convolution at stride 1
# is a single product of the operands themselves for the whole chunk. Other filters need columns,
# which have for each output the channels of every input that its filter covers.
def _needs_columns(problem: Problem) -> bool:
    """True unless each output reads only the input at its own position.

    >>> _needs_columns(Problem("fprop", 2, 4, 8, (9, 9), (1, 1), layout="nhwc"))
    False
    """
    # With padding or a stride, an output may read other places even if input and output have the
    # same size.
    moves = set(problem.stride) != {1} or any(map(sum, problem.padding))
    return moves or prod(problem.kernel_size) > 1


def _places_refusal(problem: Problem) -> str | None:
    """Reason why matrix products do not compute a channels-last problem; None if they do."""
    # In channels-last, the channels of the other groups lie between the rows of a group's matrix.
    if problem.groups > 1:
        return "it computes channels-last operands without groups only"
    return None


def _places_cost(problem: Problem) -> Cost:
    """Cost of the product with padding; columns, if any, are written and read once."""
    direct = direct_cost(problem)
    if not _needs_columns(problem):
        return direct
    columns = columns_bytes(problem)
    return Cost(problem.flops, direct.traffic_bytes + 2 * columns, columns)


class _PlacesGemm(_ColumnGemm):
    """One matrix product over columns of the shape (N, *output_size, *kernel_size, C)."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._needs_columns = _needs_columns(problem)

    def fprop(self, x: Tensor, w: Tensor) -> Tensor:
        y = empty(self.problem, (x.shape[0], *self.problem.y_shape[1:]))
        self.write(x, w, y)
        return y

    def wgrad(self, x: Tensor, dy: Tensor) -> Tensor:
        problem = self.problem
        # dw = dy^T * columns, which sums over all places of all samples in one product.
        dw = torch.mm(self._matrix(dy).t(), self._columns(x))
        channels = problem.in_channels
        return dw.view(problem.out_channels, *problem.kernel_size, channels).movedim(-1, 1)

    def write(self, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
        if self.problem.op == "fprop":
            # y = columns * filters^T: (places, taps * channels) by (taps * channels, channels out).
            self._product(self._columns(a), self._filters(b).t(), out)
            add_bias(out, bias)
        else:
            super().write(a, b, out, bias)

    def _write_dx(self, dy: Tensor, w: Tensor, dx: Tensor) -> None:
        rows, filters = self._matrix(dy), self._filters(w)
        if not self._needs_columns:
            self._product(rows, filters, dx)
            return
        columns = torch.mm(rows, filters).view(self._shape(dy.shape[0]))
        self._add_up(columns, dx)

    def _product(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        """Multiply into a tensor, without a temporary if its layout and dtype are the product's."""
        # With channels moved last, a channels-last tensor is contiguous: a matrix without a copy.
        target = out.movedim(1, -1)
        if out.dtype == self._dtype and target.is_contiguous():
            torch.mm(left, right, out=target.view(left.shape[0], right.shape[1]))
        else:
            target.copy_(torch.mm(left, right).view(target.shape))

    def _shape(self, batch: int) -> tuple[int, ...]:
        problem = self.problem
        return (batch, *problem.output_size, *problem.kernel_size, problem.in_channels)

    def _of_tap(self, columns: Tensor, tap: tuple[int, ...]) -> Tensor:
        where: _Index = (..., *tap, _ALL)
        return columns[where].movedim(-1, 1)

    def _columns(self, x: Tensor) -> Tensor:
        if not self._needs_columns:
            return self._matrix(x)
        places = x.shape[0] * prod(self.problem.output_size)
        return self._filled(x).view(places, prod(self.problem.kernel_size) * x.shape[1])

    def _matrix(self, tensor: Tensor) -> Tensor:
        """A matrix of positions by channels; a view if no copy is needed."""
        batch, channels, *sizes = tensor.shape
        matrix = tensor.movedim(1, -1).reshape(batch * prod(sizes), channels)
        return matrix.to(self._dtype)

    def _filters(self, w: Tensor) -> Tensor:
        return w.movedim(1, -1).reshape(w.shape[0], -1).to(self._dtype)
