"""Slabs: a problem, cut along its outermost spatial axis into problems on fewer rows.

A slab of fprop or dgrad is some rows (planes in 3-D, elements in 1-D) of the result, together with
all rows of x (for dgrad: of dy) from which they are computed. A slab of wgrad is some rows of dy,
with the rows of x that they are multiplied with. A slab is a `Problem` of its own with fewer rows.
In fprop and wgrad it has padding only where it reaches an end of the whole tensor. In dgrad,
padding also stands in for rows that belong to other slabs. Tensors are not copied: the tensors of a
slab are views of the whole tensors, with the same strides, fewer rows, and a pointer that is offset
by whole rows.

Slabs that together have all rows compute the problem exactly, for every stride and dilation: each
slab of fprop or dgrad writes its own rows of the result, and the results of wgrad's slabs are added
up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from ucudnn.errors import ProblemError
from ucudnn.problem import Problem

RowRange = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Slab:
    """One slab: its problem, and its rows [begin, end) of the whole tensors.

    A library that accepts strides can compute a slab on views of the whole tensors. This is the
    second half of a 3-D convolution:

    >>> whole = Problem("fprop", 1, 8, 16, (6, 4, 4), (3, 3, 3), padding=((1, 1),) * 3)
    >>> second = slab(whole, 3, 6)
    >>> second.problem.x_shape, second.problem.padding  # no padding where rows go on
    ((1, 8, 4, 4, 4), ((0, 1), (1, 1), (1, 1)))
    >>> x_strides = (8 * 6 * 4 * 4, 6 * 4 * 4, 4 * 4, 4, 1)  # those of the whole x, in elements
    >>> second.x_rows[0] * x_strides[2]  # offset of the slab's first element in the whole x
    32
    >>> second.y_rows  # where its result goes in the whole y
    (3, 6)
    """

    # The problem on views of `x_rows` and `y_rows`. None if the result of the slab is known to be
    # zero: in fprop and wgrad if the slab reads only padding, in dgrad if no output reads its rows.
    problem: Problem | None
    x_rows: RowRange  # read by fprop and wgrad, written by dgrad
    y_rows: RowRange  # written by fprop, read by dgrad and wgrad


def row_count(problem: Problem) -> int:
    """Number of rows that slabs divide: of dx for dgrad, of y for fprop, of dy for wgrad.

    >>> row_count(Problem("dgrad", 1, 4, 4, (9, 5), (3, 3))), row_count(
    ...     Problem("wgrad", 1, 4, 4, (9, 5), (3, 3)))
    (9, 7)
    """
    return problem.input_size[0] if problem.op == "dgrad" else problem.output_size[0]


def row_alignment(problem: Problem) -> int:
    """The number of rows at whose multiples slabs should begin: 1, or the stride for dgrad.

    Inner slabs (far from both ends) of one size have equal problems if each of them begins at a
    multiple of this number.

    >>> row_alignment(Problem("dgrad", 1, 4, 4, (9, 5), (3, 3), stride=(2, 1)))
    2
    """
    return problem.stride[0] if problem.op == "dgrad" else 1


def slab(problem: Problem, begin: int, end: int) -> Slab:
    """The slab of the rows [begin, end).

    >>> p = Problem("fprop", 1, 4, 4, (9,), (3,), padding=((1, 1),))
    >>> [slab(p, *rows).x_rows for rows in [(0, 3), (3, 6), (6, 9)]]
    [(0, 4), (2, 7), (5, 9)]
    """
    if not 0 <= begin < end <= row_count(problem):
        raise ProblemError(
            f"rows of a slab must be within [0, {row_count(problem)}), got [{begin}, {end}) "
            f"of {problem}"
        )
    if problem.op == "dgrad":
        return _written_by_dgrad(problem, begin, end)
    return _of_outputs(problem, begin, end)


def slabs(problem: Problem, sizes: Iterable[int]) -> tuple[Slab, ...]:
    """Consecutive slabs of the given sizes in rows, from row 0 on.

    >>> p = Problem("wgrad", 1, 4, 4, (9,), (3,))
    >>> [entry.y_rows for entry in slabs(p, [4, 3])]
    [(0, 4), (4, 7)]
    """
    return tuple(slab(problem, *rows) for rows in pairwise(accumulate(sizes, initial=0)))


def inner_problem(problem: Problem, size: int) -> Problem:
    """The problem of an inner slab of `size` rows that begins at a multiple of `row_alignment`.

    >>> inner_problem(Problem("dgrad", 1, 4, 4, (64,), (3,), padding=((1, 1),)), 8).padding
    ((2, 2),)
    """
    extent, stride = _extent(problem), problem.stride[0]
    # The slab is cut out of a tensor that is long enough. It begins at a multiple of the alignment,
    # and is so far from both ends that it reads no padding.
    begin = stride * (extent + sum(problem.padding[0]))
    endless = replace(
        problem, input_size=(stride * (2 * begin + size) + extent, *problem.input_size[1:])
    )
    inner = slab(endless, begin, begin + size).problem
    # The slab is not zero. For dgrad `size` is a multiple of the stride, and of that many
    # consecutive rows an output reads at least one.
    assert inner is not None
    return inner


def _of_outputs(problem: Problem, begin: int, end: int) -> Slab:
    """The slab of y rows [begin, end): row o reads x rows o * stride - padding + tap * dilation."""
    stride, (before, _) = problem.stride[0], problem.padding[0]
    first = begin * stride - before
    last = (end - 1) * stride - before + _extent(problem)  # one past the last row that is read
    # Of the rows from `first` to `last`, those outside the tensor are padding of the whole problem,
    # and become padding of this slab.
    rows = max(first, 0), min(last, problem.input_size[0])
    if rows[0] >= rows[1]:
        return Slab(None, (0, 0), (begin, end))
    part = _part(problem, rows, (rows[0] - first, last - rows[1]))
    return Slab(part, rows, (begin, end))


def _written_by_dgrad(problem: Problem, begin: int, end: int) -> Slab:
    """The slab of dx rows [begin, end), with all dy rows that contribute to them.

    Row o of dy contributes through those taps (rows of the filter) for which begin <= o * stride -
    padding + tap * dilation < end. The first dy row of the slab must have its tap 0 no later than
    row `begin`, because otherwise the padding before the slab would be negative. So the first dy
    row may be one that contributes nothing.
    """
    stride, (before, _) = problem.stride[0], problem.padding[0]
    extent = _extent(problem)
    # `first` is the first output (row of dy) whose last tap is at row `begin` or later. `last` is
    # one past the last output whose tap 0 is before row `end`.
    first = max(0, -((extent - 1 - begin - before) // stride))  # rounded up
    last = min(problem.output_size[0], (end - 1 + before) // stride + 1)
    if first >= last:
        return Slab(None, (begin, end), (0, 0))
    first = min(first, (begin + before) // stride)
    # In the whole problem these outputs also read x rows outside the slab. In the slab's problem
    # such rows are padding, so that dgrad does not write them. If the last tap of the last output
    # is within the slab, there are no such rows behind the slab.
    pad_begin = begin + before - first * stride
    pad_end = max(0, (last - first - 1) * stride + extent - (end - begin) - pad_begin)
    part = _part(problem, (begin, end), (pad_begin, pad_end))
    return Slab(part, (begin, end), (first, last))


def _part(problem: Problem, x_rows: RowRange, padding: RowRange) -> Problem:
    return replace(
        problem,
        input_size=(x_rows[1] - x_rows[0], *problem.input_size[1:]),
        padding=(padding, *problem.padding[1:]),
    )


def _extent(problem: Problem) -> int:
    """Number of input rows from the first to the last tap of one output."""
    return problem.dilation[0] * (problem.kernel_size[0] - 1) + 1
