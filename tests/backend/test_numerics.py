"""Every algorithm x op x geometry x dtype x layout against float64."""

from __future__ import annotations

import pytest
import torch

from ucudnn.problem import BYTES_BY_DTYPE, OPS, Problem

BATCH = 5


def problems(op, geometry, groups):
    for dtype in BYTES_BY_DTYPE:
        for layout in ("nchw", "nhwc"):
            if layout == "nchw" or len(geometry["input_size"]) > 1:
                yield Problem(
                    op, BATCH, 4, 8, groups=groups, dtype=dtype, layout=layout, **geometry
                )


def relative_error(result, expected):
    return ((result.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.usefixtures("poisoned")
def test_alone_agrees_with_float64(backend, exact, tolerance, geometry, op, groups):
    for problem in problems(op, geometry, groups):
        a, b = backend.operands(problem, BATCH)
        expected = exact(problem, a, b)
        for candidate in backend.candidates(problem):
            executable = backend.executable(problem, candidate.algorithm)
            result = executable.alone(a, b)
            assert result.shape == problem.result_shape
            assert result.dtype == a.dtype
            error = relative_error(result, expected)
            assert error < tolerance[problem.dtype], f"{candidate.algorithm} on {problem}"


@pytest.mark.parametrize("op", ["fprop", "dgrad"])
def test_write_fills_every_element_of_the_slice_and_no_other(
    backend, exact, tolerance, geometry, op
):
    for problem in problems(op, geometry, 2):
        a, b = backend.operands(problem, BATCH)
        expected = exact(problem, a, b)
        for candidate in backend.candidates(problem):
            whole = torch.full((BATCH + 2, *problem.result_shape[1:]), torch.nan, dtype=a.dtype)
            executable = backend.executable(problem, candidate.algorithm)
            executable.write(a, b, whole[1:-1])
            error = relative_error(whole[1:-1], expected)
            assert error < tolerance[problem.dtype], f"{candidate.algorithm} on {problem}"
            assert whole[0].isnan().all()
            assert whole[-1].isnan().all()


@pytest.mark.parametrize("op", ["fprop", "dgrad"])
def test_a_bias_is_added_to_every_channel_of_a_slice_and_of_a_new_result(
    backend, exact, tolerance, geometry, op
):
    for problem in problems(op, geometry, 2):
        a, b = backend.operands(problem, BATCH)
        bias = torch.randn(problem.result_shape[1]).to(a.dtype)
        expected = exact(problem, a, b) + bias.double().view(-1, *[1] * problem.rank)
        for candidate in backend.candidates(problem):
            executable = backend.executable(problem, candidate.algorithm)
            whole = torch.full((BATCH + 2, *problem.result_shape[1:]), torch.nan, dtype=a.dtype)
            executable.write_biased(a, b, whole[1:-1], bias)
            for found in (whole[1:-1], executable.alone_biased(a, b, bias)):
                error = relative_error(found, expected)
                assert error < tolerance[problem.dtype], f"{candidate.algorithm} on {problem}"
            assert whole[0].isnan().all()
            assert whole[-1].isnan().all()


def test_add_keeps_what_was_there(backend, exact, tolerance, geometry):
    for problem in problems("wgrad", geometry, 2):
        a, b = backend.operands(problem, BATCH)
        dtype = torch.promote_types(a.dtype, torch.float32)
        before = torch.arange(1.0, 9.0, dtype=dtype).view(-1, 1, *[1] * problem.rank)
        expected = exact(problem, a, b)
        for candidate in backend.candidates(problem):
            total = before.expand(problem.w_shape).clone()
            backend.executable(problem, candidate.algorithm).add(a, b, total)
            error = relative_error(total - before, expected)
            assert error < tolerance[problem.dtype] * 4, f"{candidate.algorithm} on {problem}"


ASYMMETRIC = {
    "1d": ((9,), (3,), (1,), ((2, 0),)),
    "2d": ((9, 8), (3, 2), (1, 1), ((0, 2), (1, 0))),
    "2d-strided": ((9, 8), (3, 3), (2, 2), ((1, 0), (1, 2))),
    "3d": ((6, 5, 4), (3, 2, 1), (1, 1, 2), ((2, 1), (0, 1), (0, 0))),
}


@pytest.mark.parametrize(
    ("sizes", "kernel", "stride", "padding"), ASYMMETRIC.values(), ids=ASYMMETRIC
)
@pytest.mark.parametrize("op", OPS)
def test_every_algorithm_computes_asymmetric_padding(
    backend, exact, tolerance, op, sizes, kernel, stride, padding
):
    tried = set()
    for dtype in ("float32", "float64", "bfloat16"):
        for layout in ("nchw", "nhwc")[: len(sizes)]:
            problem = Problem(
                op, BATCH, 4, 8, sizes, kernel, stride, padding, dtype=dtype, layout=layout
            )
            a, b = backend.operands(problem, BATCH)
            expected = exact(problem, a, b)
            for candidate in backend.candidates(problem):
                tried.add(candidate.algorithm)
                executable = backend.executable(problem, candidate.algorithm)
                result = executable.alone(a, b)
                assert result.shape == problem.result_shape
                assert relative_error(result, expected) < tolerance[dtype], candidate
                if op != "wgrad":
                    out = torch.full_like(result, torch.nan)
                    executable.write(a, b, out)
                    assert torch.equal(out, result), candidate
    assert tried >= {"torch_default", "im2col_gemm", "fft"}


def test_every_algorithm_was_tried(backend):
    """The tests above loop over candidates: no algorithm may be refused everywhere."""
    tried = set()
    for kernel in (1, 3):
        for dtype in BYTES_BY_DTYPE:
            for batch in (1, 5):
                problem = Problem("fprop", batch, 4, 8, (13, 11), (kernel, kernel), dtype=dtype)
                tried |= {candidate.algorithm for candidate in backend.candidates(problem)}
    # aten runs oneDNN itself on this machine; it is a candidate of its own only where aten does not
    small = Problem("fprop", 1, 4, 8, (13, 11), (3, 3))
    assert backend.refusal(small, "onednn") is None
    assert tried == set(backend.algorithms())
