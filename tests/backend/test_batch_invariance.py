"""Chunks of one size give a sample the same bits in a batch of any size, the last chunk padded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ucudnn.execution.execute import bind
from ucudnn.problem import Problem
from ucudnn.tuning.invariant import invariant_split

N = 64
PROBLEMS = {
    "3x3": Problem("fprop", N, 6, 10, (9, 7), (3, 3), padding=((1, 1), (1, 1))),
    "strided": Problem("fprop", N, 3, 8, (11, 9), (5, 3), (2, 2), padding=((2, 1), (1, 1))),
    "1x1": Problem("fprop", N, 16, 24, (6, 5), (1, 1)),
    "grouped": Problem("fprop", N, 8, 8, (8, 9), (3, 3), groups=4),
    "depthwise": Problem("fprop", N, 6, 6, (12, 9), (5, 5), padding=((2, 2),) * 2, groups=6),
    "1d": Problem("fprop", N, 4, 6, (31,), (5,), dilation=(2,)),
    "3d": Problem("fprop", N, 2, 3, (5, 4, 6), (2, 3, 2), padding=((1, 0), (1, 1), (0, 0))),
}
pytestmark = pytest.mark.usefixtures("one_thread")


def operands(backend, problem):
    """Operands whose samples all differ: the backend's own repeat."""
    numbers = torch.Generator().manual_seed(3)
    return [
        operand.copy_(torch.randn(operand.shape, generator=numbers))
        for operand in backend.operands(problem, problem.batch)
    ]


def call(backend, problem, n, micro_batch, algorithm):
    split = invariant_split(n, micro_batch, algorithm)
    return bind(backend, problem.with_batch(n), split)


def check(backend, exact, tolerance, problem, micro_batch):
    a, b = operands(backend, problem)
    bias = torch.randn(problem.result_shape[1]).to(a)
    truth = exact(problem, a, b)
    for candidate in backend.candidates(problem.with_batch(micro_batch)):
        algorithm = candidate.algorithm
        whole = call(backend, problem, N, micro_batch, algorithm)(a, b)
        biased = call(backend, problem, N, micro_batch, algorithm)(a, b, bias)
        assert (whole.double() - truth).norm() < tolerance[problem.dtype] * truth.norm()
        for n in range(1, N + 1):
            part = call(backend, problem, n, micro_batch, algorithm)
            assert torch.equal(part(a[:n], b), whole[:n]), f"{algorithm}, {n} of {problem}"
            if n % 7 == 1:
                assert torch.equal(part(a[:n], b, bias), biased[:n]), f"{algorithm}, {n}"


@pytest.mark.slow
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("op", ["fprop", "dgrad"])
def test_samples_are_the_same_in_every_batch(backend, exact, tolerance, name, op):
    problem = replace(PROBLEMS[name], op=op)
    check(backend, exact, tolerance, problem, 6)
    check(backend, exact, tolerance, replace(problem, dtype="bfloat16"), 24)
    if problem.rank > 1:
        check(backend, exact, tolerance, replace(problem, layout="nhwc"), 24)


@pytest.mark.slow
@pytest.mark.parametrize("op", ["fprop", "dgrad"])
@pytest.mark.parametrize("micro_batch", [1, N])
def test_single_samples_and_the_whole_batch(backend, exact, tolerance, op, micro_batch):
    check(backend, exact, tolerance, replace(PROBLEMS["strided"], op=op), micro_batch)


def test_without_it_a_sample_depends_on_its_batch(backend):
    """The test above can fail: torch's own convolution and others differ from batch to batch."""
    differing = set()
    for problem in PROBLEMS.values():
        for op in ("fprop", "dgrad"):
            whole = replace(problem, op=op)
            a, b = operands(backend, whole)
            for candidate in backend.candidates(whole):
                executable = backend.executable(whole, candidate.algorithm)
                if not torch.equal(executable.alone(a, b)[:1], executable.alone(a[:1], b)):
                    differing.add(candidate.algorithm)
    assert differing


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_a_weight_gradient_goes_on_where_that_of_fewer_chunks_ended(backend, exact, name, dtype):
    """It sums over the batch; each chunk adds the same bits, and padding adds nothing."""
    problem, size = replace(PROBLEMS[name], op="wgrad", dtype=dtype, batch=15), 4
    x, dy = operands(backend, problem)
    truth, least = exact(problem, x, dy), 2e-6 if dtype == "float32" else 1e-2
    last = [torch.cat([operand[12:], torch.zeros_like(operand[:1])]) for operand in (x, dy)]
    for candidate in backend.candidates(problem.with_batch(size)):
        algorithm = candidate.algorithm
        executable = backend.executable(problem.with_batch(size), algorithm)
        total = executable.begin(x[:4], dy[:4]).contiguous()
        for begin in (4, 8):
            executable.add(x[begin : begin + 4], dy[begin : begin + 4], total)
        twelve = call(backend, problem, 12, size, algorithm)(x[:12], dy[:12])
        assert torch.equal(twelve, total.to(x)), f"{algorithm} on {problem}"
        executable.add(*last, total)
        fifteen = call(backend, problem, 15, size, algorithm)(x, dy)
        assert torch.equal(fifteen, total.to(x)), f"{algorithm} on {problem}"
        assert (fifteen.double() - truth).norm() < least * truth.norm()
        three = call(backend, problem, 3, size, algorithm)(x[:3], dy[:3])
        truth_of_three = exact(problem.with_batch(3), x[:3], dy[:3])
        assert (three.double() - truth_of_three).norm() < least * truth_of_three.norm()
