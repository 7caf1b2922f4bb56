"""Engine configurations by real cuDNN: which there are, their names, and building by name."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from ucudnn.backends.cudnn.engine import Configuration
from ucudnn.problem import OPS, Problem

EXPECTED = Path(__file__).parent / "expected"
CONV2 = Problem("fprop", 256, 64, 192, (27, 27), (5, 5), padding=((2, 2), (2, 2)))
SMALL = Problem("fprop", 8, 64, 64, (14, 14), (3, 3), padding=((1, 1), (1, 1)))
GEOMETRIES = {
    "1d": {"input_size": (100,), "kernel_size": (5,), "padding": ((2, 2),)},
    "2d": {"input_size": (14, 14), "kernel_size": (3, 3)},
    "3d": {"input_size": (9, 14, 14), "kernel_size": (3, 3, 3), "stride": (2, 2, 2)},
    "groups": {"input_size": (14, 14), "kernel_size": (3, 3), "groups": 4},
    "depthwise": {"input_size": (14, 14), "kernel_size": (3, 3), "groups": 64},
    "dilation": {"input_size": (14, 14), "kernel_size": (3, 3), "dilation": (2, 2)},
    "asymmetric": {"input_size": (14, 14), "kernel_size": (3, 3), "padding": ((0, 1), (2, 1))},
}


def of(problem: Problem, **changes: Any) -> dict[str, Any]:
    """A problem, changed, as JSON values."""
    return asdict(replace(problem, **changes))


def test_lists_are_those_of_another_program(inside):
    """Expected lists come from a program without a line of this package, for aligned tensors."""
    entries = json.loads((EXPECTED / f"{inside('version')}.json").read_text())
    for entry in entries:
        assert inside("found", problem=entry["problem"], alignment=16) == entry["found"]


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_every_geometry_dtype_and_layout_has_engines_that_build(inside, geometry, dtype, layout):
    for op in OPS:
        problem = Problem(op, 8, 64, 64, dtype=dtype, layout=layout, **GEOMETRIES[geometry])
        plans = inside("rebuilt", problem=asdict(problem))
        assert plans
        for identity, proposed, built in plans:
            assert built == proposed, (op, identity)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_identity_found_at_64_builds_at_other_batches(inside, dtype, op):
    """Only a weight gradient that was split more often than one sample allows is refused."""
    for problem in (CONV2, SMALL):
        source = of(problem, op=op, dtype=dtype, batch=64)
        for batch in (1, 8, 32, 256):
            target = of(problem, op=op, dtype=dtype, batch=batch)
            plans = inside("rebuilt", problem=target, source=source)
            refused = [identity for identity, _, built in plans if built is None]
            assert len(plans) > 20
            if batch > 1 or op != "wgrad":
                assert not refused
            assert len(refused) <= len(plans) / 8


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_every_wgrad_configuration_also_accumulates(inside, dtype, layout):
    problem = replace(SMALL, op="wgrad", dtype=dtype, layout=layout)
    written = inside("rebuilt", problem=asdict(problem))
    added = inside("rebuilt", problem=asdict(problem), beta=1.0)
    assert written
    copy_bytes = prod(problem.w_shape) * problem.bytes_per_element + 16
    for (identity, _, alone), (same, _, more) in zip(written, added, strict=True):
        assert identity == same
        assert more is not None, identity
        assert alone <= more <= alone + copy_bytes


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_a_bias_is_added_by_precompiled_engines(inside, dtype, layout):
    problem = of(SMALL, dtype=dtype, layout=layout)
    plans = inside("rebuilt", problem=problem, bias=True)
    assert len(plans) > 20
    for identity, proposed, built in plans:
        assert identity.startswith("bias_eng")
        assert built == proposed


@pytest.mark.parametrize(
    "identity", ["eng9999", "eng67_k2=99999", "eng67_k77=1", "eng3", "bias_eng41_k2=99999"]
)
def test_what_cannot_be_rebuilt_is_a_miss(inside, identity):
    kind, message = inside("refusal", problem=asdict(CONV2), identity=identity)
    assert kind == "UnsupportedError"
    assert identity in message
    assert "at batch 256" in message


@pytest.mark.parametrize("identity", ["", "gemm", "eng", "eng1_k2", "eng1_k2=", "eng1 "])
def test_what_is_no_identity_is_refused(inside, identity):
    kind, message = inside("refusal", problem=asdict(CONV2), identity=identity)
    assert kind == "UnsupportedError"
    assert repr(identity) in message


def test_a_name_of_another_version_builds_or_is_a_miss(inside, newest):
    built = 0
    for identity, *_ in newest("found", problem=asdict(CONV2)):
        refusal = inside("refusal", problem=asdict(CONV2), identity=identity)
        assert not refusal or refusal[0] == "UnsupportedError"
        built += not refusal
    assert built > 10


def test_a_tensor_over_2_to_the_31_elements_is_refused(inside):
    huge = Problem("fprop", 1024, 64, 64, (224, 224), (3, 3), padding=((1, 1), (1, 1)))
    _, message = inside("refusal", problem=asdict(huge), identity=None)
    assert "x of fprop conv2d(64->64, k3, 224x224) at batch 1024 spans 3288334336" in message
    assert "smaller batch" in message
    assert inside("found", problem=asdict(huge.with_batch(512)))


def test_a_misaligned_view_is_refused(inside):
    views = [[[12544, 196, 14, 1], 2], [[576, 9, 3, 1], 16], [[12544, 196, 14, 1], 16]]
    kind, message = inside("refusal", problem=asdict(SMALL), identity="eng0", views=views)
    assert kind == "UnsupportedError"
    assert "lignment" in message


def test_errors_carry_status_name_and_what_was_attempted(inside):
    status, name, doing, _ = inside("error_of_a_wrong_attribute")
    assert 2000 <= status < 4000
    assert name.startswith("CUDNN_STATUS_")
    assert doing == "set ENGINEHEUR_MODE"


def test_listing_and_building_leave_no_memory_behind(newest):
    assert newest("descriptors_kept", problem=asdict(SMALL)) < 4 << 20


@pytest.mark.parametrize(
    ("notes", "dtype", "math", "deterministic", "allowed"),
    [
        (("TENSOR_CORE",), "float32", "tf32", False, True),
        (("TENSOR_CORE",), "float32", "strict", False, False),
        (("TENSOR_CORE",), "float16", "strict", False, True),
        (("TENSOR_CORE", "DOWN_CONVERT_INPUTS"), "float32", "tf32", False, False),
        (("DOWN_CONVERT_INPUTS",), "float64", "strict", False, True),
        (("NONDETERMINISTIC",), "float32", "strict", False, True),
        (("NONDETERMINISTIC",), "float32", "strict", True, False),
        ((), "float32", "strict", True, True),
    ],
)
def test_rules_are_those_of_pytorch(notes, dtype, math, deterministic, allowed):
    problem = replace(SMALL, dtype=dtype, math=math)
    assert Configuration("eng1", 0, "A", 0, notes).is_allowed(problem, deterministic) is allowed
