"""What the CPU backend does not compute is refused in one sentence."""

from __future__ import annotations

from dataclasses import replace

import pytest

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
        (replace(PLAIN, layout="nhwc"), "onednn_nhwc", "already"),
        (replace(PLAIN, layout="nhwc"), "im2col_gemm", "channels-first"),
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


def test_no_algorithm_at_all(backend):
    with pytest.raises(UnsupportedError, match="no algorithm of torch_cpu computes"):
        backend.candidates(replace(PLAIN, math="tf32"))


def test_the_default_comes_first_with_the_kernel_that_aten_picks(backend):
    first = backend.candidates(replace(PLAIN, dtype="float64"))[0]
    assert first.algorithm == "torch_default"
    assert first.notes == ("kernel=slow_conv2d",)


def test_torch_picks_the_kernel_that_the_note_names(backend):
    """aten's own record of which operator ran, from its profiler."""
    import torch
    from torch.autograd.profiler import profile

    for dtype, batch in (("float32", 8), ("float64", 8), ("float32", 1)):
        problem = replace(PLAIN, dtype=dtype, batch=batch)
        x, w = backend.operands(problem, batch)
        with profile(use_kineto=True) as profiler:
            torch.conv2d(x, w)
        ran = {event.name for event in profiler.function_events}
        note = backend.candidates(problem)[0].notes[0].removeprefix("kernel=")
        operator = {"onednn": "mkldnn_convolution", "slow_conv2d": "_slow_conv2d_forward"}[note]
        assert f"aten::{operator}" in ran
