"""What the CPU backend does not compute is refused in one sentence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ucudnn.backends.torch_cpu.operators import chosen_kernel
from ucudnn.errors import UnsupportedError
from ucudnn.problem import Problem

PLAIN = Problem("fprop", 8, 4, 8, (9, 9), (3, 3))


@pytest.mark.parametrize(
    ("problem", "algorithm", "reason"),
    [
        (replace(PLAIN, math="tf32"), "torch_default", "full precision"),
        (Problem("fprop", 8, 4, 8, (9,), (3,), layout="nhwc"), "torch_default", "channels-last"),
        (replace(PLAIN, dtype="float64"), "onednn", "float64"),
        (replace(PLAIN, dtype="float16"), "fft", "float16"),
        (replace(PLAIN, dtype="bfloat16"), "fft", "bfloat16"),
        (PLAIN, "onednn_float32", "half precision only"),
        (replace(PLAIN, layout="nhwc"), "onednn_nhwc", "already"),
        (replace(PLAIN, layout="nhwc", groups=2), "im2col_gemm", "without groups"),
        (replace(PLAIN, layout="nhwc", groups=2, kernel_size=(1, 1)), "gemm", "without groups"),
        (replace(PLAIN, layout="nhwc", in_channels=1), "slow_conv2d", "several input channels"),
        (PLAIN, "phases", "strided"),
        (replace(PLAIN, op="dgrad"), "phases", "strided"),
        (replace(PLAIN, op="wgrad"), "diagonal_gemm", "depthwise"),
        (Problem("wgrad", 8, 4, 4, (9, 9), (9, 3), groups=4), "diagonal_gemm", "5 columns"),
        (Problem("wgrad", 8, 4, 4, (9,) * 3, (5,) * 3, groups=4), "diagonal_gemm", "1-D and 2-D"),
        (replace(PLAIN, groups=2), "slow_conv2d", "groups"),
        (PLAIN, "gemm", "size 1"),
        (replace(PLAIN, kernel_size=(1, 1)), "im2col_gemm", "gemm"),
        (replace(PLAIN, kernel_size=(1, 1)), "fft", "gemm"),
        (PLAIN, "winograd", "torch_default, onednn"),
    ],
)
def test_refusal_names_the_reason(backend, problem, algorithm, reason):
    assert reason in backend.refusal(problem, algorithm)
    with pytest.raises(UnsupportedError, match=reason):
        backend.executable(problem, algorithm)


# Each one ended the process or read foreign memory, in bfloat16 on AVX-512.
CRAMPED = {
    "a filter beside the input": Problem(
        "fprop", 2, 2, 3, (8, 1), (1, 1), (1, 2), ((2, 2), (1, 1)), dtype="bfloat16"
    ),
    "a filter larger than the input": Problem(
        "wgrad", 1, 48, 48, (7, 1, 2), (3, 3, 3), (2, 2, 1), ((2, 2), (1, 1), (2, 2)), groups=3
    ),
    "a tap that meets no input": Problem(
        "fprop", 4, 9, 6, (6, 6, 1), (3, 1, 1), (1, 1, 2), ((0, 0), (0, 0), (1, 1)), groups=3
    ),
    "a stride with one place": Problem("fprop", 3, 3, 9, (9, 4), (2, 3), (1, 2), groups=3),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("problem", CRAMPED.values(), ids=CRAMPED)
def test_kernels_of_onednn_that_read_foreign_memory(backend, problem, dtype):
    half = replace(problem, dtype=dtype)
    assert "take filters inside the input" in backend.refusal(half, "onednn_nhwc")
    assert backend.refusal(half, "torch_default") is None
    assert backend.refusal(replace(problem, dtype="float32"), "onednn_nhwc") is None
    for slab in (half, replace(half, layout="nhwc")):
        assert backend.refusal(slab, "torch_default") is None
        reason = backend.slab_refusal(slab, "torch_default") or ""
        # without bfloat16 instructions torch picks a kernel of its own
        assert ("take filters inside the input" in reason) == (chosen_kernel(slab) == "onednn")
        assert backend.slab_refusal(replace(slab, dtype="float32"), "torch_default") is None
    assert backend.slab_refusal(half, "im2col_gemm") == backend.refusal(half, "im2col_gemm")


def test_padding_that_is_written_out_is_inside_the_input(backend):
    filters = Problem("fprop", 2, 4, 4, (2, 9), (3, 3), dtype="bfloat16", padding=((1, 0), (1, 1)))
    assert "filters inside the input" not in (backend.refusal(filters, "onednn_nhwc") or "")
    alike = replace(filters, padding=((1, 1), (1, 1)))
    assert "filters inside the input" in backend.refusal(alike, "onednn_nhwc")


def test_no_algorithm_at_all(backend):
    with pytest.raises(UnsupportedError, match="no algorithm of torch_cpu computes"):
        backend.candidates(replace(PLAIN, math="tf32"))


def test_torchs_default_comes_first_and_runs_the_kernel_that_its_note_names(backend):
    """aten's own record of which operator ran, from its profiler."""
    import torch
    from torch.autograd.profiler import profile

    for dtype, batch in (("float32", 8), ("float64", 8), ("float32", 1)):
        problem = replace(PLAIN, dtype=dtype, batch=batch)
        x, w = backend.operands(problem, batch)
        with profile(use_kineto=True) as profiler:
            torch.conv2d(x, w)
        ran = {event.name for event in profiler.function_events}
        first = backend.candidates(problem)[0]
        assert first.algorithm == "torch_default"
        operators = {"onednn": "mkldnn_convolution", "slow_conv2d": "_slow_conv2d_forward"}
        operator = operators[first.implementation]
        assert f"aten::{operator}" in ran
