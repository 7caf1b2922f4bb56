"""The loop over steps: any split gives the same sum, and the sum is the right one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from ucudnn.backends import Executable
from ucudnn.backends.torch_cpu.workspace import allocated_peak_bytes
from ucudnn.execution.execute import Call, bind
from ucudnn.measurement import Role, positions, role_of
from ucudnn.plan import Chunk, Split
from ucudnn.problem import OPS, Problem

SPLITS = {
    "undivided": ((7, "torch_default"),),
    "even-and-rest": ((3, "torch_default"), (3, "torch_default"), (1, "torch_default")),
    "singles": ((1, "slow_conv2d"),) * 7,
    "mixed": ((4, "onednn_nhwc"), (2, "im2col_gemm"), (1, "fft")),
}


def split_of(chunks):
    return Split("batch", tuple(Chunk(size, algorithm) for size, algorithm in chunks))


def relative_error(result, expected):
    return ((result.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("steps", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("op", OPS)
def test_every_split_gives_the_undivided_result(backend, exact, op, steps):
    problem = Problem(op, 7, 6, 4, (12, 9), (3, 3), padding=((1, 1), (1, 1)))
    a, b = backend.operands(problem, 7)
    result = bind(backend, problem, split_of(steps))(a, b)
    assert result.dtype == torch.float32
    assert relative_error(result, exact(problem, a, b)) < 1e-6


class Noting(Executable):
    """Computes by another executable and notes in which role each chunk was run."""

    def __init__(self, real, notes):
        self._real = real
        self._notes = notes

    def alone(self, a, b, bias=None):
        self._notes.append(Role.ALONE)
        return self._real.alone(a, b, bias)

    def write(self, a, b, out, bias=None):
        self._notes.append(Role.LATER)
        self._real.write(a, b, out, bias)

    def begin(self, a, b):
        result = self._real.begin(a, b)
        # Where nothing is converted it is an ordinary call.
        self._notes.append(Role.ALONE if result.dtype == a.dtype else Role.FIRST)
        return result

    def add(self, a, b, out):
        self._notes.append(Role.LATER)
        self._real.add(a, b, out)


@pytest.mark.parametrize("steps", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", OPS)
def test_each_chunk_runs_in_the_role_in_which_it_is_timed(backend, op, dtype, steps):
    problem = Problem(op, 7, 6, 4, (12, 9), (3, 3), dtype=dtype)
    split = split_of([(size, "torch_default") for size, _ in steps])
    call, ran = bind(backend, problem, split), []
    noting = [replace(one, executable=Noting(one.executable, ran)) for one in call.chunks]
    Call(problem, split, tuple(noting))(*backend.operands(problem, 7))
    assert ran == [role_of(problem, place) for place in positions(len(steps))]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_rounded_once_per_chunk_and_once_more(backend, exact, op, dtype):
    problem = Problem(op, 64, 8, 8, (6, 6), (3, 3), dtype=dtype)
    a, b = backend.operands(problem, 64)
    expected = exact(problem, a, b)
    whole = bind(backend, problem, split_of([(64, "torch_default")]))(a, b)
    parts = bind(backend, problem, split_of([(1, "torch_default")] * 64))(a, b)
    assert parts.dtype == a.dtype
    # Each chunk and the sum are rounded once: sqrt(2) times one rounding. A running sum in half
    # precision would be rounded 64 times.
    assert relative_error(parts, expected) <= 2 * relative_error(whole, expected)


@pytest.mark.parametrize(
    "algorithm", ["torch_default", "onednn_nhwc", "slow_conv2d", "im2col_gemm"]
)
def test_weight_gradient_is_the_sum_over_all_chunks(backend, algorithm):
    """The bug of the released mu-cuDNN: with beta = 0 only the last chunk was left."""
    problem = Problem("wgrad", 4, 2, 2, (6, 6), (3, 3))
    x = torch.stack([torch.full((2, 6, 6), 10.0**sample) for sample in range(4)])
    dy = torch.ones(4, 2, 4, 4)
    dw = bind(backend, problem, split_of([(1, algorithm)] * 4))(x, dy)
    assert torch.equal(dw, torch.full((2, 2, 3, 3), 16 * 1111.0))


@pytest.mark.parametrize("beta", [0.0, 1.0, 0.5])
def test_weight_gradient_accumulates_into_what_is_there(backend, beta):
    """beta dW0 + the sum of all chunks, not beta^k dW0 + a weighted sum."""
    problem = Problem("wgrad", 4, 2, 2, (6, 6), (3, 3), dtype="float64")
    x, dy = backend.operands(problem, 4)
    start = torch.full(problem.w_shape, 3.0, dtype=torch.float64)
    total = beta * start
    for sample, name in enumerate(("torch_default", "slow_conv2d", "im2col_gemm", "fft")):
        chunk = slice(sample, sample + 1)
        backend.executable(problem, name).add(x[chunk], dy[chunk], total)
    whole = bind(backend, problem, split_of([(4, "torch_default")]))(x, dy)
    torch.testing.assert_close(total, beta * start + whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("op", OPS)
def test_channels_last_stays_channels_last(backend, exact, op):
    problem = Problem(op, 6, 4, 4, (8, 8), (3, 3), layout="nhwc")
    a, b = backend.operands(problem, 6)
    result = bind(backend, problem, split_of([(4, "torch_default"), (2, "torch_default")]))(a, b)
    assert result.is_contiguous(memory_format=torch.channels_last)
    assert relative_error(result, exact(problem, a, b)) < 1e-6


@pytest.mark.parametrize("second", ["im2col_gemm", "slow_conv2d"])
@pytest.mark.parametrize("first", ["torch_default", "onednn_nhwc", "slow_conv2d", "fft"])
def test_wgrad_adds_up_where_the_strides_of_one_pixel_say_channels_last(
    backend, exact, first, second
):
    """Such an x is contiguous as well; aten's operators lay their result out by its strides."""
    problem = Problem("wgrad", 2, 2, 1, (1, 1), (3, 1), padding=((2, 2), (0, 0)))
    x, dy = backend.operands(problem, 2)
    x = torch.empty_strided(x.shape, (2, 1, 2, 2)).copy_(x)
    assert x.is_contiguous()
    split = Split("batch", (Chunk(1, first), Chunk(1, second)))
    result = bind(backend, problem, split)(x, dy)
    torch.testing.assert_close(result.double(), exact(problem, x, dy), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("op", OPS)
def test_a_micro_batch_runs_what_was_measured_for_it(backend, op, layout):
    """All micro-batches of a call share an executable; at the small batch torch takes no oneDNN."""
    whole = Problem(op, 8, 16, 32, (16, 16), (3, 3), padding=((1, 1), (1, 1)), layout=layout)
    part = whole.with_batch(1)
    a, b = backend.operands(part, 1)
    for algorithm in (candidate.algorithm for candidate in backend.candidates(part)):
        if backend.refusal(whole, algorithm):
            continue
        measured, shared = (backend.executable(one, algorithm) for one in (part, whole))
        assert torch.equal(measured.alone(a, b), shared.alone(a, b)), algorithm
        peaks = [allocated_peak_bytes(partial(one.alone, a, b)) for one in (measured, shared)]
        assert peaks[0] == peaks[1], algorithm
