"""Error of a candidate's result, found by comparing a part of the result with float64 values.

Each candidate is checked once for each problem that it computes, on the operands with which it is
timed. Some elements of its result, a crop, are compared with values computed in float64
(`Reference`). The whole result is searched for elements that are not finite. Except for torch's own
convolution, the memory of the result is filled with NaN before the run, so that an element that was
not written is still NaN.

Computing the whole result in float64 would take many times as long as the candidate. A wrong
implementation is wrong in whole samples, channels or rows, mostly at a border, so a crop is enough
to show it. The crop has the first, a middle and the last sample and channel. Along each spatial
axis it has positions at both ends and in the middle. Each element is computed from its definition
as a sum of products, with gathered operands, on the device that holds them. No code is shared with
the convolutions of torch or cuDNN.

A crop takes at most 2**23 multiplications, or as many as the smallest crop, with three positions
per axis. At most 2**21 gathered values are held at a time, which take less than 64 MiB together
with their indices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from ucudnn.backends import Executable
from ucudnn.backends.tensors import torch_dtype
from ucudnn.benchmark.protocol import Ring, empty_total
from ucudnn.execution.execute import empty_result
from ucudnn.measurement import Role
from ucudnn.problem import Problem

# In a check, a later chunk of a weight gradient is added to a sum with this value. It is not 0, so
# that the check notices if the chunk overwrites the sum or adds nothing.
_BASE = 1.0
# Limits of the time and of the memory that one reference takes; the module docstring explains them.
_MOST_PRODUCTS = 1 << 23
_MOST_COLUMNS = 1 << 21
# The largest number of positions along each axis of a result, by its number of spatial axes. There
# are few, so that an error at one position makes the relative error of the whole crop large.
_POSITIONS_BY_RANK = {1: 11, 2: 11, 3: 5}
# A crop has at least this many positions per axis: the first, a middle and the last one.
_LEAST_POSITIONS = 3
_DOUBLE = torch.float64


class Check:
    """A run of one candidate in one role, whose result is judged afterwards.

    While torch's own convolution runs, new memory is not filled with NaN: torch can fill memory
    only in its deterministic mode, in which it may choose another implementation on a GPU.
    """

    def __init__(
        self, ring: Ring, executable: Executable, part: Problem, role: Role, is_torch: bool = False
    ) -> None:
        self._ring = ring
        self._executable = executable
        self._part = part
        self._role = role
        self._poison = (lambda run: run()) if is_torch else _poisoned
        self._result: Tensor | None = None
        # The tensor that the run writes into or adds to is allocated here, before the run, because
        # it is no part of the workspace.
        if role == Role.LATER and part.op == "wgrad":
            self._result = empty_total(part, ring.a).fill_(_BASE)
        elif role == Role.LATER:
            self._result = empty_result(part, ring.a).fill_(float("nan"))

    def run(self) -> Tensor | None:
        """Run once; return the result if the run has made a new tensor for it, else None."""
        a, b = self._ring.operands(self._part, 0)
        executable = self._executable
        if self._role != Role.LATER:
            compute = executable.alone if self._role == Role.ALONE else executable.begin
            self._result = self._poison(lambda: compute(a, b))
            return self._result
        result = self._total()
        write = executable.add if self._part.op == "wgrad" else executable.write
        self._poison(lambda: write(a, b, result))
        return None

    def _total(self) -> Tensor:
        assert self._result is not None
        return self._result

    def error(self, reference: Reference) -> float:
        """Relative error (L2) of the result of `run`; infinite if any element is not finite."""
        found = self._total()
        adds = self._role == Role.LATER and self._part.op == "wgrad"
        # If nothing was added to the sum, all its elements are finite all the same, so this has a
        # test of its own. Adding nothing may be right if all expected values are zero.
        untouched = adds and bool(reference.expected.any()) and _keeps_base(found)
        if untouched or not _is_finite(found):
            return float("inf")
        picked = reference.crop.pick(found) - (_BASE if adds else 0.0)
        return compare(picked, reference.expected)


def allowed_error(problem: Problem) -> float:
    """Largest relative error of a result that counts as correct: half of its digits are right.

    >>> allowed_error(Problem("fprop", 1, 1, 1, (9,), (3,)))
    0.000345...

    Rounding errors are far smaller. In a sum of random terms they grow with the square root of the
    number of terms, and a TF32 or Winograd kernel loses only a few digits.
    """
    eps = torch.finfo(torch_dtype(problem)).eps
    if problem.math == "tf32":  # uses ten bits of the operands' mantissas
        eps = 2.0**-10
    return float(eps**0.5)


def compare(found: Tensor, expected: Tensor) -> float:
    """The relative error of one float64 tensor against another, in the L2 norm.

    >>> compare(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0]))
    0.2
    """
    difference, scale = float((found - expected).norm()), float(expected.norm())
    # If all expected values are zero, the relative error of any other value is not defined. It
    # counts as infinite.
    if scale == 0.0:
        return float("inf") if difference else 0.0
    return difference / scale


def _is_finite(result: Tensor) -> bool:
    """True if all elements are finite, which their sum shows without a temporary tensor."""
    # The sum is computed at least in float32, because in half precision a sum of finite values
    # could overflow.
    total = result.sum(dtype=torch.promote_types(result.dtype, torch.float32))
    return bool(total.isfinite())


def _keeps_base(total: Tensor) -> bool:
    """True if there is a filter or channel in which every element still has the value `_BASE`."""
    # Whole filters and channels are tested, because a wrong implementation leaves out whole ones,
    # and the gradient of a single element may be 0 by chance.
    kept = (total == _BASE).flatten(2).all(2)
    return bool((kept.all(0).any() | kept.all(1).any()).item())


def _poisoned(run: Callable[[], Tensor | None]) -> Tensor | None:
    """Run while torch fills every new tensor with NaN, so that unwritten elements show."""
    settings: Any = torch.utils.deterministic  # Any: type checkers do not find its attribute
    before = settings.fill_uninitialized_memory
    level = torch.get_deterministic_debug_mode()
    settings.fill_uninitialized_memory = True
    # torch fills new memory only in its deterministic mode. `warn_only` is set, because some
    # candidates have no deterministic implementation and would raise an error.
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    try:
        return run()
    finally:
        torch.set_deterministic_debug_mode(level)
        settings.fill_uninitialized_memory = before


@dataclass(frozen=True, slots=True)
class Crop:
    """The elements of a result that are compared: the same positions in each of a few planes.

    >>> Crop.of(Problem("fprop", 8, 4, 4, (9, 40), (3, 3))).planes
    ((0, 0), (4, 2), (7, 3))
    """

    planes: tuple[tuple[int, int], ...]  # (sample, channel), or for wgrad (filter, channel)
    positions: tuple[tuple[int, ...], ...]  # along each spatial axis

    @classmethod
    def of(cls, problem: Problem) -> Crop:
        """The crop of a problem's result."""
        rows, columns, *sizes = problem.result_shape
        ends = zip(*((0, extent // 2, extent - 1) for extent in (rows, columns)), strict=True)
        # If an axis has only one or two elements, the same plane occurs several times.
        planes = tuple(dict.fromkeys(ends))
        products = len(planes) * _terms(problem)
        # Take as many positions per axis as `_MOST_PRODUCTS` allows, but at least
        # `_LEAST_POSITIONS`.
        for most in range(_POSITIONS_BY_RANK[problem.rank], _LEAST_POSITIONS, -1):
            positions = tuple(spread(size, most) for size in sizes)
            if products * prod(map(len, positions)) <= _MOST_PRODUCTS:
                return cls(planes, positions)
        return cls(planes, tuple(spread(size, _LEAST_POSITIONS) for size in sizes))

    def pick(self, result: Tensor) -> Tensor:
        """The elements of this crop, taken from a result, in float64 on the CPU."""
        first, second = torch.tensor(self.planes, device=result.device).T
        picked = result[first, second]
        for axis, positions in enumerate(self.positions, 1):
            picked = picked.index_select(axis, torch.tensor(positions, device=result.device))
        return picked.to("cpu", _DOUBLE)


class Reference:
    """The float64 values of the crop of one problem's result for given operands.

    The attribute `expected` holds the values, on the CPU, in the order of `Crop.pick`.
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
    """Up to `most` indices of an axis: runs at its beginning, in its middle and at its end.

    The indices are taken in runs of neighbours, because the gradient of a strided convolution is
    computed differently at neighbouring positions.

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
    """Spatial extents over which the sum for one element of the result runs."""
    return problem.output_size if problem.op == "wgrad" else problem.kernel_size


def _terms(problem: Problem) -> int:
    """Number of products in the sum for one element, including products with padding."""
    summed = {
        "fprop": problem.in_channels // problem.groups,
        "dgrad": problem.out_channels // problem.groups,
        "wgrad": problem.batch,
    }[problem.op]
    return summed * prod(_summed_axes(problem))


def _operands(problem: Problem, a: Tensor, b: Tensor, plane: tuple[int, int]) -> tuple[Tensor, ...]:
    """The parts of both operands for a plane of the result, as (summed axis, flat positions)."""
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
    """Find which elements of the first operand the positions of a crop read, in blocks of terms.

    Yields for each block the flat indices, whether each index lies outside the operand (both by
    position and term), and the slice of terms.
    """
    extents = _summed_axes(problem)
    sources = problem.output_size if problem.op == "dgrad" else problem.input_size
    count = prod(map(len, crop.positions))
    for terms in _blocks(prod(extents), _MOST_COLUMNS // count):
        # Terms are numbered in row-major order over the summed axes. The number of a term is split
        # into one index per axis, beginning with the last axis.
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
            # A term outside of the tensor needs a valid index, too; its value is set to 0 later.
            index = index + (source.clamp(0, sources[axis] - 1) * stride).view(shape)
            outside = outside | is_outside.view(shape)
            left, stride = left // extents[axis], stride * sources[axis]
        yield index.view(count, -1), outside.view(count, -1), terms


def _source(problem: Problem, axis: int, position: Tensor, term: Tensor) -> tuple[Tensor, int]:
    """Index along an axis of the first operand for a position and a term, as a fraction.

    The first value is the index times a divisor, the second value is the divisor. A term exists
    only if the index is an integer: in a strided convolution an input is read by some outputs only.
    """
    stride, dilation = problem.stride[axis], problem.dilation[axis]
    # Output o and tap k of the filter read the input at
    #     i = o * stride - padding + k * dilation.
    # dgrad solves this for o, which exists where the stride divides i + padding - k * dilation.
    begin = problem.padding[axis][0]
    if problem.op == "dgrad":
        return position + begin - term * dilation, stride
    output, tap = (position, term) if problem.op == "fprop" else (term, position)
    return output * stride - begin + tap * dilation, 1


def _dot(data: Tensor, index: Tensor, outside: Tensor, weights: Tensor) -> Tensor:
    """For each position the sum over rows and terms of gathered data times weights."""
    columns = data[:, index].to(_DOUBLE).masked_fill_(outside, 0.0)
    columns *= weights[:, None].to(_DOUBLE)
    return columns.sum((0, 2))


def _blocks(extent: int, most: int) -> Iterator[slice]:
    """Consecutive slices of an extent, each no longer than `most`, or than 1 if `most` is less."""
    size = max(most, 1)
    for begin in range(0, extent, size):
        yield slice(begin, min(begin + size, extent))
