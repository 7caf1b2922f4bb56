"""Every algorithm x op x geometry x dtype x layout against float64."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from ucudnn.backends.tensors import memory_format
from ucudnn.backends.torch_cpu.backend import ALGORITHMS
from ucudnn.backends.torch_cpu.processor import has_instructions
from ucudnn.problem import BYTES_BY_DTYPE, OPS, Problem, strides_of

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


@pytest.fixture
def tried(backend, exact):
    """A function of problems: each by each algorithm, with operands and their exact result."""

    def tried(listed):
        for problem in listed:
            a, b = backend.operands(problem, BATCH)
            expected = exact(problem, a, b)
            for candidate in backend.candidates(problem):
                name = candidate.algorithm
                yield problem, name, backend.executable(problem, name), a, b, expected

    return tried


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.usefixtures("poisoned")
def test_alone_agrees_with_float64(tried, tolerance, geometry, op, groups):
    listed = problems(op, geometry, groups)
    for problem, algorithm, executable, a, b, expected in tried(listed):
        result = executable.alone(a, b)
        assert result.shape == problem.result_shape
        assert result.dtype == a.dtype
        error = relative_error(result, expected)
        assert error < tolerance[problem.dtype], f"{algorithm} on {problem}"


@pytest.mark.parametrize("op", ["fprop", "dgrad"])
def test_every_element_of_a_slice_is_written_with_and_without_a_bias_and_no_other(
    tried, tolerance, geometry, op
):
    for problem, algorithm, executable, a, b, expected in tried(problems(op, geometry, 2)):
        most, said = tolerance[problem.dtype], f"{algorithm} on {problem}"
        whole = torch.full((BATCH + 2, *problem.result_shape[1:]), torch.nan, dtype=a.dtype)
        executable.write(a, b, whole[1:-1])
        assert relative_error(whole[1:-1], expected) < most, said
        bias = torch.randn(problem.result_shape[1]).to(a.dtype)
        biased = expected + bias.double().view(-1, *[1] * problem.rank)
        whole[1:-1] = torch.nan
        executable.write(a, b, whole[1:-1], bias)
        for found in (whole[1:-1], executable.alone(a, b, bias)):
            # Torch's own rounds before the bias is added, and after.
            assert relative_error(found, biased) < 2 * most, said
        assert whole[0].isnan().all()
        assert whole[-1].isnan().all()


def test_add_keeps_what_was_there(tried, tolerance, geometry):
    for problem, algorithm, executable, a, b, expected in tried(problems("wgrad", geometry, 2)):
        dtype = torch.promote_types(a.dtype, torch.float32)
        before = torch.arange(1.0, 9.0, dtype=dtype).view(-1, 1, *[1] * problem.rank)
        total = before.expand(problem.w_shape).clone()
        executable.add(a, b, total)
        error = relative_error(total - before, expected)
        assert error < tolerance[problem.dtype] * 4, f"{algorithm} on {problem}"


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.usefixtures("poisoned")
def test_half_precision_by_float32_is_rounded_once(backend, exact, geometry, op, groups):
    """It has the error of the exact result rounded, the least of any; a sum of chunks has none."""
    for problem in problems(op, geometry, groups):
        if backend.refusal(problem, "onednn_float32") is not None:
            continue
        a, b = backend.operands(problem, BATCH)
        expected = exact(problem, a, b)
        least = relative_error(expected.to(a.dtype), expected)
        executable = backend.executable(problem, "onednn_float32")
        own = relative_error(executable.alone(a, b), expected)
        torchs = backend.executable(problem, "torch_default").alone(a, b)
        assert own <= 1.01 * min(least, relative_error(torchs, expected)), problem
        if op == "wgrad":
            total = executable.begin(a[:2], b[:2])
            executable.add(a[2:], b[2:], total)
            assert relative_error(total, expected) < 1e-6, problem


# Filters of at least five columns: with blocks of columns, and with one.
DEPTHWISE = {
    "1d": ((90,), (5,), (1,), ((2, 2),), (1,)),
    "1d-strided-dilated": ((95,), (6,), (2,), ((3, 4),), (3,)),
    "2d": ((13, 11), (7, 7), (1, 1), ((3, 3), (3, 3)), (1, 1)),
    "2d-blocks": ((6, 64), (3, 5), (1, 1), ((1, 1), (2, 2)), (1, 1)),
    "2d-blocks-strided": ((13, 77), (3, 5), (3, 2), ((1, 2), (0, 3)), (1, 2)),
    "2d-dilated": ((13, 11), (4, 5), (2, 1), ((2, 3), (5, 5)), (2, 2)),
    "2d-kernel-above-input": ((3, 3), (7, 7), (1, 1), ((3, 3), (3, 3)), (1, 1)),
    "2d-taps-in-padding-alone": ((1, 2), (5, 5), (1, 1), ((5, 2), (9, 1)), (1, 1)),
}


@pytest.mark.parametrize("geometry", DEPTHWISE.values(), ids=DEPTHWISE)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.usefixtures("poisoned")
def test_gradients_of_depthwise_filters(backend, exact, tolerance, geometry, layout):
    if layout == "nhwc" and len(geometry[0]) == 1:
        return
    for dtype in BYTES_BY_DTYPE:
        problem = Problem("wgrad", BATCH, 6, 6, *geometry, groups=6, dtype=dtype, layout=layout)
        x, dy = backend.operands(problem, BATCH)
        before, expected = (x.clone(), dy.clone()), exact(problem, x, dy)
        executable = backend.executable(problem, "diagonal_gemm")
        first = executable.begin(x, dy)
        assert first.dtype == torch.promote_types(x.dtype, torch.float32)
        assert relative_error(executable.alone(x, dy), expected) < tolerance[dtype]
        executable.add(x, dy, first)
        # not rounded to half precision: it is the sum of a batch
        assert relative_error(first / 2, expected) < min(tolerance[dtype], 1e-6)
        executable.add(x[:0], dy[:0], first)
        assert relative_error(first / 2, expected) < min(tolerance[dtype], 1e-6)
        assert torch.equal(x, before[0])
        assert torch.equal(dy, before[1])


# Phases without a filter position, without an output, and of different lengths.
STRIDED = {
    "1d": ((19,), (3,), (2,), ((1, 1),), (1,)),
    "1d-ends-unread": ((23,), (2,), (5,), ((0, 0),), (1,)),
    "1d-dilation-and-stride-share-a-factor": ((40,), (5,), (6,), ((7, 3),), (4,)),
    "1d-dilation-is-the-stride": ((40,), (4,), (3,), ((2, 0),), (3,)),
    "2d": ((13, 12), (5, 4), (2, 3), ((2, 1), (0, 3)), (1, 1)),
    "2d-one-axis": ((13, 12), (3, 3), (2, 1), ((1, 1), (1, 1)), (2, 1)),
    "2d-padding-above-kernel": ((5, 6), (3, 2), (2, 2), ((6, 5), (0, 4)), (1, 3)),
    "2d-stride-above-input": ((3, 4), (2, 2), (7, 5), ((0, 0), (1, 1)), (1, 1)),
    "3d": ((6, 7, 5), (3, 2, 3), (2, 2, 2), ((1, 1), (0, 0), (2, 1)), (1, 1, 1)),
}


@pytest.mark.parametrize("geometry", STRIDED.values(), ids=STRIDED)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.usefixtures("poisoned")
def test_phases_of_strided_gradients(backend, exact, tolerance, geometry, layout):
    if layout == "nhwc" and len(geometry[0]) == 1:
        return
    tried = 0
    for dtype, groups in product(BYTES_BY_DTYPE, (1, 2, 4)):
        problem = Problem(
            "dgrad", BATCH, 4, 8, *geometry, groups=groups, dtype=dtype, layout=layout
        )
        if backend.refusal(problem, "phases") is not None:
            continue
        tried += 1
        dy, w = backend.operands(problem, BATCH)
        before, expected = (dy.clone(), w.clone()), exact(problem, dy, w)
        executable = backend.executable(problem, "phases")
        result = executable.alone(dy, w)
        assert result.stride() == torch.empty_like(result).stride()
        assert result.is_contiguous(memory_format=memory_format(problem))
        assert relative_error(result, expected) < tolerance[dtype]
        whole = torch.full((BATCH + 2, *result.shape[1:]), torch.nan, dtype=dy.dtype)
        executable.write(dy[:3], w, whole[1:4])
        assert relative_error(whole[1:4], expected[:3]) < tolerance[dtype]
        assert whole[0].isnan().all()
        assert whole[4:].isnan().all()
        assert executable.alone(dy[:0], w).shape == (0, *result.shape[1:])
        assert torch.equal(dy, before[0])
        assert torch.equal(w, before[1])
    assert tried


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("op", OPS)
def test_channels_last_results_have_torchs_strides(backend, exact, tolerance, op, kernel):
    names = ["fft", "im2col_gemm", "slow_conv2d"] if kernel > 1 else ["gemm", "slow_conv2d"]
    for dtype, stride, name in product(BYTES_BY_DTYPE, (1, 2), names):
        sizes = ((9, 8), (kernel, kernel), (stride, stride))
        problem = Problem(op, BATCH, 4, 8, *sizes, dtype=dtype, layout="nhwc")
        if name == "fft" and problem.bytes_per_element < 4:
            continue
        a, b = backend.operands(problem, BATCH)
        # rows of a larger tensor, as a slab is given
        larger = a.new_zeros((*a.shape[:2], a.shape[2] + 3, a.shape[3])).contiguous(
            memory_format=torch.channels_last
        )
        larger[:, :, 2:-1] = a
        for operand in (a, larger[:, :, 2:-1]):
            result = backend.executable(problem, name).alone(operand, b)
            strides = strides_of(problem.result_shape, is_channels_last=True)
            assert [s for s, n in zip(result.stride(), result.shape, strict=True) if n > 1] == [
                s for s, n in zip(strides, result.shape, strict=True) if n > 1
            ]
            error = relative_error(result, exact(problem, a, b))
            assert error < tolerance[dtype], f"{name} on {problem}"


@pytest.mark.parametrize("op", ["dgrad", "wgrad"])
def test_onednn_computes_gradients_where_aten_picks_another_kernel(
    backend, exact, tolerance, geometry, op
):
    """Of a single small sample, aten computes only large filters by oneDNN."""
    for layout in ("nchw", "nhwc")[: len(geometry["input_size"])]:
        problem = Problem(op, 1, 4, 8, layout=layout, **geometry)
        is_large = max(geometry["kernel_size"]) > 3
        assert (backend.implementation_of(problem, "torch_default") == "onednn") is is_large
        a, b = backend.operands(problem, 1)
        # By oneDNN's copies to channels-last there is no wgrad then.
        is_copied = layout == "nchw" and (op == "dgrad" or is_large)
        for algorithm in ("onednn", "onednn_nhwc")[: 1 + is_copied]:
            result = backend.executable(problem, algorithm).alone(a, b)
            assert relative_error(result, exact(problem, a, b)) < tolerance["float32"]


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
    gradients = (
        Problem("dgrad", 2, 4, 8, (13, 11), (3, 3), (2, 2)),
        Problem("wgrad", 2, 4, 4, (13, 11), (5, 5), groups=4),
    )
    for problem in gradients:
        tried |= {candidate.algorithm for candidate in backend.candidates(problem)}
    assert backend.refusal(small, "onednn") is None
    is_half_native = has_instructions("bfloat16") and has_instructions("float16")
    assert tried == set(ALGORITHMS) - ({"onednn_float32"} if is_half_native else set())
