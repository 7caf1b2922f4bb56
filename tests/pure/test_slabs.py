"""Slabs: every product of the whole convolution is in exactly one slab, for every geometry."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucudnn.axis import RowAxis
from ucudnn.errors import ProblemError
from ucudnn.plan import Chunk
from ucudnn.problem import OPS, Problem
from ucudnn.slabs import Slab, inner_problem, row_alignment, row_count, slab, slabs

Product = tuple[int, int, int]


def products(problem: Problem) -> Iterator[Product]:
    """(row of y, tap, row of x) of every product of a 1-D convolution, from its definition."""
    (size,), (stride,), (dilation,) = problem.input_size, problem.stride, problem.dilation
    ((before, _),) = problem.padding
    for y, tap in product(range(problem.output_size[0]), range(problem.kernel_size[0])):
        x = y * stride + tap * dilation - before
        if 0 <= x < size:
            yield y, tap, x


def of_whole(entry: Slab) -> list[Product]:
    """The products of a slab in the rows of the whole."""
    if entry.problem is None:
        return []
    first_x, first_y = entry.x_rows[0], entry.y_rows[0]
    return [(y + first_y, tap, x + first_x) for y, tap, x in products(entry.problem)]


def lines(op: str) -> Iterator[Problem]:
    """Every small 1-D geometry."""
    for size, kernel, stride, dilation, before, after in product(
        range(1, 8), range(1, 4), range(1, 5), range(1, 3), range(5), range(0, 5, 2)
    ):
        try:
            yield Problem(
                op, 1, 1, 1, (size,), (kernel,), (stride,), ((before, after),), (dilation,)
            )
        except ProblemError:
            continue


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_a_slab_holds_the_products_of_its_rows_and_no_others(op: str) -> None:
    position = 2 if op == "dgrad" else 0
    for problem in lines(op):
        whole = list(products(problem))
        rows = row_count(problem)
        for begin, end in product(range(rows), range(1, rows + 1)):
            if begin >= end:
                continue
            entry = slab(problem, begin, end)
            expected = [item for item in whole if begin <= item[position] < end]
            assert sorted(of_whole(entry)) == sorted(expected), f"{problem} [{begin}, {end})"
            if entry.problem is not None:
                assert entry.problem.input_size[0] == entry.x_rows[1] - entry.x_rows[0]
                assert entry.problem.output_size[0] == entry.y_rows[1] - entry.y_rows[0]
                assert 0 <= entry.y_rows[0] < entry.y_rows[1] <= problem.output_size[0]


@pytest.mark.parametrize("op", OPS)
def test_rows_that_depend_on_nothing_have_no_problem(op: str) -> None:
    lonely = Problem(op, 1, 1, 1, (5,), (1,), stride=(3,), padding=((4, 0),))
    entry = slab(lonely, 0, 1)  # padding, and a row that no output reads
    assert entry.problem is None
    assert entry.y_rows == ((0, 0) if op == "dgrad" else (0, 1))
    assert entry.x_rows == ((0, 1) if op == "dgrad" else (0, 0))


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_slabs_far_from_the_ends_are_one_problem(op: str) -> None:
    for line in lines(op):
        problem = replace(line, input_size=(90,))
        step = row_alignment(problem)
        for size in (step, 2 * step):
            inner = inner_problem(line, size)
            far = 12 * step  # further than the padding and the kernel reach
            found = {slab(problem, far + n * step, far + n * step + size).problem for n in range(3)}
            assert found == {inner}, line


@pytest.mark.slow
@given(st.data())
def test_other_axes_and_everything_else_stay(data: st.DataObject) -> None:
    problem = Problem(
        data.draw(st.sampled_from(OPS)),
        *(3, 4, 8, (11, 6, 5), (3, 2, 1), (2, 1, 2), ((1, 1), (1, 0), (0, 0)), (1, 2, 1), 2),
        dtype="float16",
        layout="nhwc",
    )
    begin = data.draw(st.integers(0, row_count(problem) - 1))
    part = slab(problem, begin, data.draw(st.integers(begin + 1, row_count(problem)))).problem
    assert part is not None
    back = replace(part, input_size=(11, *part.input_size[1:]), padding=((1, 1), *part.padding[1:]))
    assert back == problem


@pytest.mark.parametrize("rows", [(-1, 2), (2, 2), (3, 1), (0, 8), (7, 8)])
def test_rows_that_the_problem_has_not_are_refused(rows: tuple[int, int]) -> None:
    with pytest.raises(ProblemError, match=r"must be within \[0, 7\), got \["):
        slab(Problem("fprop", 1, 1, 1, (9,), (3,)), *rows)


# Axes: what chunks are measured as is what they are, wherever they begin

CONV = Problem("fprop", 2, 8, 8, (40, 9), (3, 3), padding=((1, 1), (1, 1)))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("dilation", [1, 2])
def test_slabs_are_measured_as_what_they_are(op: str, stride: int, dilation: int) -> None:
    problem = replace(CONV, op=op, stride=(stride, 1), dilation=(dilation, 1))
    axis = RowAxis(problem)
    unit = stride if op == "dgrad" else 1
    for size in axis.sizes("powers-of-two"):
        assert row_count(axis.part(size)) == size * unit
        count = row_count(problem) // (size * unit)
        first, *inner = slabs(problem, [size * unit] * count)
        measured = {axis.part(size), *axis.ends(size)}
        assert first.problem in measured
        last = slab(problem, (axis.extent - size) * unit, row_count(problem))
        assert last.problem in measured
        # within the reach of the kernel from an end there are others, with less padding
        reach = -(-9 // size)
        assert {entry.problem for entry in inner[reach:-reach]} <= {axis.part(size)}


def test_sizes_are_few_and_inside() -> None:
    many = replace(CONV, input_size=(5001, 9))
    assert len(RowAxis(many).sizes("all")) <= 26
    assert RowAxis(replace(CONV, input_size=(27, 9))).sizes("all") == (1, 2, 3, 4, 8, 11, 16)
    assert RowAxis(replace(CONV, input_size=(5, 9))).sizes("all") == (1, 2)
    assert RowAxis(replace(CONV, input_size=(1, 9))).sizes("all") == ()


def test_rows_are_left_alone_where_they_cannot_matter() -> None:
    assert RowAxis(CONV.with_batch(9)).sizes("powers-of-two") == ()
    assert RowAxis(CONV).sizes("undivided") == ()


def test_the_last_slab_of_a_strided_gradient_may_be_smaller() -> None:
    axis = RowAxis(replace(CONV, op="dgrad", stride=(3, 1)))
    assert axis.extent == 14
    split = axis.split([Chunk(8, "a"), Chunk(4, "b"), Chunk(2, "a")])
    assert split.axis == "spatial"
    assert [chunk.size for chunk in split.chunks] == [24, 12, 4]
    assert [chunk.algorithm for chunk in split.chunks] == ["a", "b", "a"]
