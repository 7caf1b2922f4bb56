"""Problem: shapes agree with PyTorch's own convolution, and what cannot exist is refused."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, asdict
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.nn import functional

from ucudnn.errors import ProblemError
from ucudnn.problem import BYTES_BY_DTYPE, Problem

CONVOLUTIONS = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}


def problem(**changes: Any) -> Problem:
    """A small valid problem with some fields changed."""
    fields: dict[str, Any] = {
        "op": "fprop",
        "batch": 4,
        "in_channels": 6,
        "out_channels": 8,
        "input_size": (9, 7),
        "kernel_size": (3, 3),
    }
    return Problem(**{**fields, **changes})


@st.composite
def geometries(draw: st.DrawFn) -> dict[str, Any]:
    """Fields of a problem, possible or with a kernel larger than its input."""
    rank = draw(st.integers(1, 3))
    groups = draw(st.sampled_from([1, 1, 2, 3]))

    def axes(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.lists(st.integers(low, high), min_size=rank, max_size=rank)))

    return {
        "batch": draw(st.integers(1, 3)),
        "in_channels": groups * draw(st.integers(1, 2)),
        "out_channels": groups * draw(st.integers(1, 3)),
        "input_size": axes(1, 8),
        "kernel_size": axes(1, 4),
        "stride": axes(1, 3),
        "padding": tuple(zip(axes(0, 2), axes(0, 3), strict=True)),
        "dilation": axes(1, 3),
        "groups": groups,
    }


def torch_output(fields: dict[str, Any]) -> torch.Tensor:
    """The convolution as PyTorch computes it, on explicitly padded zeros."""
    x = torch.zeros(fields["batch"], fields["in_channels"], *fields["input_size"])
    w = torch.zeros(
        fields["out_channels"], fields["in_channels"] // fields["groups"], *fields["kernel_size"]
    )
    # functional.pad takes the innermost axis first.
    x = functional.pad(x, tuple(chain.from_iterable(reversed(fields["padding"]))))
    return CONVOLUTIONS[len(fields["input_size"])](
        x, w, stride=fields["stride"], dilation=fields["dilation"], groups=fields["groups"]
    )


@given(geometries())
def test_output_size_is_what_torch_computes_and_impossible_is_what_torch_refuses(
    fields: dict[str, Any],
) -> None:
    try:
        y = torch_output(fields)
    except RuntimeError:
        with pytest.raises(ProblemError, match="kernel_size must fit the padded input"):
            Problem("fprop", **fields)
        return
    assert Problem("fprop", **fields).y_shape == y.shape


@given(geometries(), st.sampled_from(["fprop", "dgrad", "wgrad"]))
def test_operands_and_result_have_the_shapes_of_torchs_backward(
    fields: dict[str, Any], op: str
) -> None:
    try:
        value = Problem(op, **fields)
    except ProblemError:
        assume(False)
    # aten's backward takes symmetric padding only; the shapes do not depend on which side.
    assume(all(begin == end for begin, end in value.padding))
    x, w, dy = (torch.zeros(shape) for shape in (value.x_shape, value.w_shape, value.y_shape))
    padding = [begin for begin, _ in value.padding]
    dx, dw, _ = torch.ops.aten.convolution_backward(
        dy,
        x,
        w,
        None,
        value.stride,
        padding,
        value.dilation,
        False,
        [0] * value.rank,
        value.groups,
        [True, True, False],
    )
    operands = {"fprop": (x, w), "dgrad": (dy, w), "wgrad": (x, dy)}[op]
    result = {"fprop": dy, "dgrad": dx, "wgrad": dw}[op]
    assert value.operand_shapes == tuple(operand.shape for operand in operands)
    assert value.result_shape == result.shape
    assert value.result_bytes == result.numel() * result.element_size()


@given(geometries())
def test_flops_are_two_per_term_of_the_direct_sum(fields: dict[str, Any]) -> None:
    try:
        value = Problem("fprop", **fields)
    except ProblemError:
        assume(False)
    # A convolution of ones without padding counts its terms: every output is their number.
    size = torch_output(fields).shape
    ones = torch.ones(1, *value.w_shape[1:], dtype=torch.float64)
    terms = CONVOLUTIONS[value.rank](ones, ones).item()
    assert value.flops == 2 * terms * size.numel()


@pytest.mark.parametrize("dtype", BYTES_BY_DTYPE)
def test_bytes_per_element_are_torchs(dtype: str) -> None:
    assert problem(dtype=dtype).bytes_per_element == getattr(torch, dtype).itemsize


REFUSED = [
    ({"op": "forward"}, "op must be one of fprop, dgrad, wgrad, got 'forward'"),
    ({"dtype": "float8"}, "dtype must be one of float64, float32, bfloat16, float16, got 'float8'"),
    ({"dtype": torch.float32}, "dtype must be one of .*, got torch.float32"),
    ({"layout": "NCHW"}, "layout must be one of nchw, nhwc, got 'NCHW'"),
    ({"math": "fast"}, "math must be one of strict, tf32, got 'fast'"),
    ({"batch": 0}, "batch must be an int of at least 1, got 0"),
    ({"batch": 2**63}, "batch must be below 2\\^63, got 9223372036854775808"),
    ({"padding": ((0, 0), (0, 2**63))}, "padding must hold ints of at least 0 and below 2\\^63"),
    ({"batch": True}, "batch must be an int of at least 1, got True"),
    ({"batch": 4.0}, r"batch must be an int of at least 1, got 4\.0"),
    ({"out_channels": 0}, "out_channels must be an int of at least 1, got 0"),
    ({"groups": 0}, "groups must be an int of at least 1, got 0"),
    ({"groups": 4}, r"in_channels \(=6\) must be divisible by groups \(=4\)"),
    ({"groups": 3}, r"out_channels \(=8\) must be divisible by groups \(=3\)"),
    ({"input_size": ()}, r"input_size must have 1, 2 or 3 spatial axes, got \(\)"),
    ({"input_size": 9}, "input_size must be a tuple with one int per spatial axis, got 9"),
    ({"input_size": (9, 0)}, "input_size must be an int of at least 1, got 0"),
    ({"kernel_size": (3,)}, r"kernel_size must have one entry per spatial axis \(2"),
    ({"stride": (1, 1, 1)}, r"stride must have one entry per spatial axis \(2"),
    ({"stride": 2}, "stride must be a tuple with one int per spatial axis, got 2"),
    ({"dilation": (1, -1)}, "dilation must be an int of at least 1, got -1"),
    ({"padding": ((0, 0),)}, r"padding must have one entry per spatial axis \(2"),
    ({"padding": ((0, 0), (-1, 0))}, "padding must hold ints of at least 0"),
    ({"padding": ((0, 0), (False, 0))}, "padding must hold ints of at least 0"),
    ({"padding": (1, 1)}, r"padding must be one \(begin, end\) pair per spatial axis"),
    ({"padding": 1}, r"padding must be \(\(begin, end\), ...\), got 1"),
    (
        {"kernel_size": (3, 8)},
        r"on axis 1 the dilated kernel spans 8 but the input is 7 \+ 0 \+ 0 = 7",
    ),
    (
        {"kernel_size": (5, 3), "dilation": (3, 1), "padding": ((1, 2), (0, 0))},
        r"on axis 0 the dilated kernel spans 13 but the input is 9 \+ 1 \+ 2 = 12; enlarge",
    ),
]


@pytest.mark.parametrize(("changes", "sentence"), REFUSED, ids=lambda value: str(value)[:50])
def test_refuses_what_cannot_exist(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ProblemError, match=sentence) as caught:
        problem(**changes)
    assert "\n" not in str(caught.value)


def test_sizes_default_to_one_and_padding_to_zero() -> None:
    assert problem() == problem(
        stride=(1, 1), padding=((0, 0), (0, 0)), dilation=(1, 1), groups=1, dtype="float32"
    )


def test_is_frozen_hashable_and_equal_by_value() -> None:
    value = problem()
    with pytest.raises((FrozenInstanceError, AttributeError)):
        value.batch = 8  # type: ignore[misc]
    assert len({value, problem(), problem(batch=8)}) == 2
    assert pickle.loads(pickle.dumps(value)) == value


def test_with_batch_changes_the_batch_and_nothing_else() -> None:
    value = problem(stride=(2, 1), padding=((1, 0), (0, 2)), groups=2, layout="nhwc")
    fields, other = asdict(value), asdict(value.with_batch(100))
    assert other.pop("batch") == 100
    assert fields.pop("batch") == 4
    assert fields == other
    with pytest.raises(ProblemError, match="batch must be an int of at least 1, got 0"):
        value.with_batch(0)


def test_lists_as_json_gives_them_become_tuples() -> None:
    value = problem(stride=(2, 1), padding=((1, 0), (0, 2)))
    lists = Problem(**{**asdict(value), "stride": [2, 1], "padding": [[1, 0], [0, 2]]})
    assert (lists, hash(lists)) == (value, hash(value))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "fprop conv2d(6->8, k3, 9x7) at batch 4"),
        ({"input_size": (9,), "kernel_size": (1,)}, "fprop conv1d(6->8, k1, 9) at batch 4"),
        (
            {"op": "dgrad", "kernel_size": (3, 1), "stride": (2, 2), "groups": 2},
            "dgrad conv2d(6->8, k3x1, 9x7, s2, g2) at batch 4",
        ),
        (
            {"op": "wgrad", "dilation": (1, 2), "dtype": "bfloat16", "layout": "nhwc"},
            "wgrad conv2d(6->8, k3, 9x7, d1x2, bfloat16, nhwc) at batch 4",
        ),
    ],
)
def test_reads_as_one_line(changes: dict[str, Any], text: str) -> None:
    assert str(problem(**changes)) == text
