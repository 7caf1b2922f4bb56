"""What cuDNN understood: a plan's own JSON, held against torch's tensors of the same problem."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from ucudnn.backends.cudnn.graph import View, views_of
from ucudnn.problem import OPS, Problem
from ucudnn.slabs import row_count, slab

Inside = Callable[..., Any]
MEMORY_FORMATS = {"nchw": None, 4: torch.channels_last, 5: torch.channels_last_3d}
NAMES = {
    "float64": "CUDNN_DATA_DOUBLE",
    "float32": "CUDNN_DATA_FLOAT",
    "bfloat16": "CUDNN_DATA_BFLOAT16",
    "float16": "CUDNN_DATA_HALF",
}
OPERANDS = {"fprop": ("X", "W", "Y"), "dgrad": ("dX", "W", "dY"), "wgrad": ("X", "dW", "dY")}
UNEVEN = Problem(
    *("fprop", 8, 64, 32, (15, 18), (3, 5)),
    stride=(2, 1),
    padding=((0, 1), (2, 1)),
    dilation=(1, 2),
    groups=4,
)


def tensor_of(problem: Problem, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor as torch lays it out; it has no memory."""
    dtype = getattr(torch, problem.dtype)
    tensor = torch.empty(shape, dtype=dtype, device="meta")
    if problem.layout == "nhwc":
        tensor = tensor.to(memory_format=MEMORY_FORMATS[len(shape)])
    return tensor


def described(inside: Inside, problem: Problem, **options: Any) -> tuple[list[Any], Any, Any]:
    """Tensors, operations and engine of the first plan that cuDNN makes."""
    plan = inside("serialized", problem=asdict(problem), **options)
    graph = plan["operationGraph"]
    tensors = sorted(graph["tensors"], key=lambda tensor: int(tensor["name"]))
    return tensors, graph["nodes"], plan["engine"]


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("op", OPS)
def test_cudnn_is_told_the_problem(inside, op, dtype, layout):
    problem = replace(UNEVEN, op=op, dtype=dtype, layout=layout)
    tensors, (node,), _ = described(inside, problem, alpha=0.25, beta=0.5)
    for tensor, shape in zip(
        tensors, (problem.x_shape, problem.w_shape, problem.y_shape), strict=True
    ):
        assert tuple(tensor["dim"]) == shape
        assert tuple(tensor["stride"]) == tensor_of(problem, shape).stride()
        assert tensor["dataType"] == NAMES[dtype]
        assert tensor["ptrAlignment"] == 16
        assert not tensor["isVirtual"]
    assert [node[name] for name in OPERANDS[op]] == ["1", "2", "3"]
    assert node["mode"] == "CUDNN_CROSS_CORRELATION"
    assert node["mathPrec"] == NAMES["float64" if dtype == "float64" else "float32"]
    assert node["pad_lower"] == [0, 2]
    assert node["pad_upper"] == [1, 1]
    assert node["stride"] == [2, 1]
    assert node["dilation"] == [1, 2]
    assert (node["alpha"], node["beta"]) == (0.25, 0.5)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_one_dimension_is_told_as_two(inside, layout):
    problem = Problem("fprop", 4, 8, 16, (20,), (5,), padding=((3, 1),), layout=layout)
    flat = Problem(*("fprop", 4, 8, 16, (1, 20), (1, 5)), padding=((0, 0), (3, 1)), layout=layout)
    tensors, (node,), _ = described(inside, problem)
    for tensor, shape in zip(tensors, (flat.x_shape, flat.w_shape, flat.y_shape), strict=True):
        assert tuple(tensor["dim"]) == shape
        assert tuple(tensor["stride"]) == tensor_of(flat, shape).stride()
    assert node["pad_lower"] == [0, 3]
    assert node["pad_upper"] == [0, 1]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_bias_is_added_to_a_sum_in_float32(inside, dtype):
    problem = replace(UNEVEN, dtype=dtype, groups=1)
    (*_, y, bias, total), (convolution, addition), _ = described(inside, problem, bias=True)
    assert total["isVirtual"]
    assert total["dataType"] == "CUDNN_DATA_FLOAT"
    assert total["dim"] == y["dim"] == list(problem.y_shape)
    assert (bias["dim"], bias["dataType"]) == ([1, 32, 1, 1], NAMES[dtype])
    assert (convolution["Y"], addition["X"]) == ("5", "5")
    assert (addition["B"], addition["Y"]) == ("4", "3")
    assert addition["pointwiseMode"] == "CUDNN_POINTWISE_ADD"


@pytest.mark.parametrize("op", OPS)
def test_the_plan_is_of_the_engine_and_knobs_of_its_name(inside, op):
    problem = replace(UNEVEN, op=op, groups=1)
    for identity, *_ in inside("found", problem=asdict(problem))[:12]:
        _, _, engine = described(inside, problem, identity=identity)
        assert identity.startswith(f"eng{engine['engineId']}")
        values = [int(value) for value in re.findall(r"=(-?\d+)", identity)]
        assert sorted(engine["knobChoices"].values()) == sorted(values)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("size", [(32, 10), (32, 6, 5)], ids=["2d", "3d"])
@pytest.mark.parametrize("op", OPS)
def test_a_slab_is_a_view_of_the_whole(inside, op, size, layout):
    """As torch slices it: the same strides, an address that is as aligned as is claimed."""
    rank = len(size)
    whole = Problem(
        *(op, 2, 4, 8, size, (3,) * rank), padding=((1, 1),) * rank, layout=layout, dtype="float16"
    )
    cuts = (0, 7, 14, row_count(whole))
    for begin, end in pairwise(cuts):
        part = slab(whole, begin, end)
        assert part.problem is not None
        tensors, _, _ = described(inside, part.problem, within=asdict(whole))
        rows = (part.x_rows, None, part.y_rows)
        shapes = (whole.x_shape, whole.w_shape, whole.y_shape)
        for tensor, cut, shape in zip(tensors, rows, shapes, strict=True):
            view = tensor_of(whole, shape)
            if cut is not None:
                view = view[:, :, slice(*cut)]
            assert tuple(tensor["dim"]) == view.shape
            assert tuple(tensor["stride"]) == view.stride()
            assert view.storage_offset() * 2 % tensor["ptrAlignment"] == 0


def test_a_chunk_claims_the_alignment_of_its_size():
    odd = Problem("fprop", 1, 3, 8, (5, 5), (3, 3), dtype="float16")  # 150 bytes per sample of x
    claimed = [views_of(odd.with_batch(batch)).x.alignment_bytes for batch in (1, 2, 4, 8, 16, 6)]
    assert claimed == [2, 4, 8, 16, 16, 4]
    assert views_of(odd).w == View((27, 9, 3, 1), 16)
