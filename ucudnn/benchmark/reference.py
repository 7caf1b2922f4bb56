"""Float64 values of some elements of a convolution's result, to judge candidates by.

A whole result in float64 would cost many times as much as the candidate. A wrong implementation is
wrong in whole samples, channels or rows, mostly at a border, so a crop of the result shows it: the
first, a middle and the last sample and channel, and along each spatial axis some positions at both
ends and in the middle. Each element is computed from its definition as a sum of products, with
gathered operands, on the device that holds them. Nothing is shared with any convolution of torch or
cuDNN.

The cost is bounded for every problem. A crop takes at most 2**23 multiplications, unless three
positions per axis take more: an element of a weight gradient sums over all samples and positions.
At most 2**21 gathered values are held at a time: 16 MiB in float64, and with their indices and the
values as they were gathered less than 64 MiB.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ucudnn.problem import Problem

# Bounds of the time and of the memory of one reference, see above.
_MOST_PRODUCTS = 1 << 23
_MOST_COLUMNS = 1 << 21
# Positions along an axis of a result with one, two or three. They are few, so that an error at one
# of them is a large part of the whole.
_POSITIONS_BY_RANK = {1: 11, 2: 11, 3: 5}
# The first, a middle and the last one.
_LEAST_POSITIONS = 3
_DOUBLE = torch.float64


@dataclass(frozen=True, slots=True)
class Crop:
    """The elements of a result that are computed: all positions in all planes.

    >>> Crop.of(Problem("fprop", 8, 4, 4, (9, 40), (3, 3))).planes
    ((0, 0), (4, 2), (7, 3))

    Args:
        planes: indices of the first two axes, as (sample, channel) or, of wgrad, (filter, channel).
        positions: indices along each spatial axis.
    """

    planes: tuple[tuple[int, int], ...]
    positions: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, problem: Problem) -> Crop:
        """The crop of a problem's result."""
        rows, columns, *sizes = problem.result_shape
        ends = zip(*((0, extent // 2, extent - 1) for extent in (rows, columns)), strict=True)
        # Axes with one or two elements give the same plane several times.
        planes = tuple(dict.fromkeys(ends))
        products = len(planes) * _terms(problem)
        # As many positions per axis as the products allow, but never less than the three.
        for most in range(_POSITIONS_BY_RANK[problem.rank], _LEAST_POSITIONS, -1):
            positions = tuple(spread(size, most) for size in sizes)
            if products * prod(map(len, positions)) <= _MOST_PRODUCTS:
                return cls(planes, positions)
        return cls(planes, tuple(spread(size, _LEAST_POSITIONS) for size in sizes))

    def pick(self, result: Tensor) -> Tensor:
        """These elements of a result, in float64 on the CPU."""
        rank = len(self.positions)
        first, second = torch.tensor(self.planes, device=result.device).T
        index = [_facing(values, 0, rank + 1) for values in (first, second)]
        for axis, positions in enumerate(self.positions, 1):
            index.append(_facing(torch.tensor(positions, device=result.device), axis, rank + 1))
        return result[tuple(index)].to("cpu", _DOUBLE)


class Reference:
    """The float64 values of the crop of one problem's result for given operands.

    Args:
        problem: with the operands' batch.
        a: x for fprop and wgrad, dy for dgrad.
        b: w for fprop and dgrad, dy for wgrad.

    Attributes:
        crop: which elements.
        expected: their values, on the CPU, in the order of `Crop.pick`.
    """

    def __init__(self, problem: Problem, a: Tensor, b: Tensor) -> None:
        self.crop = Crop.of(problem)
        planes = [_operands(problem, a, b, plane) for plane in self.crop.planes]
        sums = a.new_zeros((len(planes), prod(map(len, self.crop.positions))), dtype=_DOUBLE)
        for index, outside, terms in _gathers(problem, self.crop, a.device):
            for place, (data, weights) in enumerate(planes):
                # Gathering copies every term of every position, so it is done in blocks of rows.
                for rows in _blocks(len(data), _MOST_COLUMNS // index.numel()):
                    sums[place] += _dot(data[rows], index, outside, weights[rows, terms])
        self.expected = sums.view(len(planes), *map(len, self.crop.positions)).cpu()


def spread(extent: int, most: int) -> tuple[int, ...]:
    """Some indices of an axis: runs at its beginning, in the middle and at its end.

    They are runs, because a strided gradient is computed differently at neighbouring positions.

    >>> spread(4, 5), spread(40, 7)
    ((0, 1, 2, 3), (0, 1, 2, 19, 20, 38, 39))
    """
    if extent <= most:
        return tuple(range(extent))
    middle = most // 3
    first = (most - middle + 1) // 2
    begin = extent // 2 - middle // 2
    last = extent - (most - middle - first)
    return (*range(first), *range(begin, begin + middle), *range(last, extent))


def _summed_axes(problem: Problem) -> tuple[int, ...]:
    """Spatial extents of the sum of one element."""
    return problem.output_size if problem.op == "wgrad" else problem.kernel_size


def _terms(problem: Problem) -> int:
    """Number of products in the sum of one element, including those with padding."""
    summed = {
        "fprop": problem.in_channels // problem.groups,
        "dgrad": problem.out_channels // problem.groups,
        "wgrad": problem.batch,
    }[problem.op]
    return summed * prod(_summed_axes(problem))


def _operands(problem: Problem, a: Tensor, b: Tensor, plane: tuple[int, int]) -> tuple[Tensor, ...]:
    """Operands of a plane of the result, each as (summed axis, flattened positions)."""
    row, column = plane
    inputs, outputs = (
        channels // problem.groups for channels in (problem.in_channels, problem.out_channels)
    )
    if problem.op == "fprop":
        begin = column // outputs * inputs
        found = a[row, begin : begin + inputs], b[column]
    elif problem.op == "dgrad":
        begin = column // inputs * outputs
        filters = slice(begin, begin + outputs)
        found = a[row, filters], b[filters, column % inputs]
    else:
        found = a[:, row // outputs * inputs + column], b[:, row]
    return tuple(operand.flatten(1) for operand in found)


def _gathers(
    problem: Problem, crop: Crop, device: torch.device
) -> Iterator[tuple[Tensor, Tensor, slice]]:
    """Elements of the first operand that the positions of a crop read, some terms at a time.

    Yields:
        Flat indices, and whether each lies outside, both by (position, term); and the terms.
    """
    extents = _summed_axes(problem)
    sources = problem.output_size if problem.op == "dgrad" else problem.input_size
    count = prod(map(len, crop.positions))
    for terms in _blocks(prod(extents), _MOST_COLUMNS // count):
        # Terms are numbered in row-major order over the summed axes, and taken apart into one index
        # per axis from the last axis on.
        left, stride = torch.arange(terms.start, terms.stop, device=device), 1
        index = torch.zeros((), dtype=torch.long, device=device)
        outside = torch.zeros((), dtype=torch.bool, device=device)
        for axis in reversed(range(problem.rank)):
            positions = torch.tensor(crop.positions[axis], device=device)
            scaled, step = _source(problem, axis, positions[:, None], left % extents[axis])
            source = scaled // step
            is_outside = (scaled % step != 0) | (source < 0) | (source >= sources[axis])
            shape = [1] * problem.rank + [left.numel()]
            shape[axis] = len(positions)
            # A term outside must still have an index that can be gathered; it is set to 0
            # afterwards.
            index = index + (source.clamp(0, sources[axis] - 1) * stride).view(shape)
            outside = outside | is_outside.view(shape)
            left, stride = left // extents[axis], stride * sources[axis]
        yield index.view(count, -1), outside.view(count, -1), terms


def _source(problem: Problem, axis: int, position: Tensor, term: Tensor) -> tuple[Tensor, int]:
    """Place of a term of a position along an axis of the first operand, times a divisor.

    The term exists where the divisor divides it: outputs of a strided convolution read some inputs.
    """
    stride, dilation = problem.stride[axis], problem.dilation[axis]
    # Output o and tap k of the kernel read the input at
    #     i = o * stride - padding + k * dilation.
    # dgrad solves this for o, which exists where the stride divides i + padding - k * dilation.
    begin = problem.padding[axis][0]
    if problem.op == "dgrad":
        return position + begin - term * dilation, stride
    output, tap = (position, term) if problem.op == "fprop" else (term, position)
    return output * stride - begin + tap * dilation, 1


def _dot(data: Tensor, index: Tensor, outside: Tensor, weights: Tensor) -> Tensor:
    """Sums over rows and terms of gathered data times weights, one for each position."""
    columns = data[:, index].to(_DOUBLE).masked_fill_(outside, 0.0)
    columns *= weights[:, None].to(_DOUBLE)
    return columns.sum((0, 2))


def _blocks(extent: int, most: int) -> Iterator[slice]:
    """Consecutive slices of an extent, each of at most some length, which is at least 1."""
    size = max(most, 1)
    for begin in range(0, extent, size):
        yield slice(begin, min(begin + size, extent))


def _facing(values: Tensor, axis: int, rank: int) -> Tensor:
    """A list of indices as a tensor along one of several axes."""
    return values.view([-1 if place == axis else 1 for place in range(rank)])
