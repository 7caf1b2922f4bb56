"""Axes: what chunks are measured as is what they are, wherever they begin."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ucudnn.axis import BatchAxis, RowAxis
from ucudnn.plan import Step
from ucudnn.problem import OPS, Problem
from ucudnn.slabs import row_count, slab, slabs

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
    split = axis.split([Step(8, "a"), Step(4, "b"), Step(2, "a")])
    assert split.axis == "spatial"
    assert [step.size for step in split.steps] == [24, 12, 4]
    assert [step.algorithm for step in split.steps] == ["a", "b", "a"]


def test_batches_are_as_the_policy_says() -> None:
    axis = BatchAxis(CONV.with_batch(6))
    assert axis.sizes("undivided") == (6,)
    assert axis.sizes("all") == (1, 2, 3, 4, 5, 6)
    assert axis.part(4) == CONV.with_batch(4)
    assert axis.ends(4) == ()
    assert axis.split([Step(4, "a"), Step(2, "a")]).size == 6
