"""Every engine configuration that cuDNN proposes, run on the GPU and held against float64.

A test goes through all geometries and collects what is wrong: one run on a GPU tells everything.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from ucudnn.plan import DEFAULT_ALGORITHM
from ucudnn.problem import OPS, Problem

BATCH = 5


def relative_error(result, expected):
    return ((result.double().cpu() - expected).norm() / expected.norm()).item()


@pytest.fixture
def layers(backend, geometries, kind):
    """A function of an op: each geometry's problem with operands that begin at the second sample.

    After one sample of an odd size they are not aligned to 16 bytes.
    """
    dtype, layout, math = kind

    def of(op):
        for fields in geometries.values():
            if layout == "nchw" or len(fields["input_size"]) > 1:
                problem = Problem(op, BATCH, dtype=dtype, layout=layout, math=math, **fields)
                a, b = backend.operands(problem, BATCH + 1)
                yield problem, a[1:], b[1:] if op == "wgrad" else b

    return of


@pytest.fixture
def noted(backend):
    """A context in which what a candidate raises is one more entry of a list."""

    @contextmanager
    def noted(wrong, algorithm, problem):
        try:
            yield
        except RuntimeError as error:
            if backend.is_broken():
                raise
            wrong.append(f"{algorithm} on {problem}: {error}")

    return noted


def wrong_by(error, most, algorithm, problem):
    return [] if error < most else [f"{algorithm} on {problem} is wrong by {error:.2g}"]


@pytest.mark.parametrize("op", OPS)
def test_every_engine_agrees_with_float64(backend, exact, tolerance, layers, noted, op):
    wrong = []
    for problem, a, b in layers(op):
        expected, candidates = exact(problem, a, b), backend.candidates(problem)
        assert candidates[0].algorithm == DEFAULT_ALGORITHM
        for candidate in candidates:
            with noted(wrong, candidate.algorithm, problem):
                result = backend.executable(problem, candidate.algorithm).alone(a, b)
                assert result.shape == problem.result_shape
                error = relative_error(result, expected)
                wrong += wrong_by(error, tolerance(problem), candidate.algorithm, problem)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("op", ["fprop", "dgrad"])
def test_every_engine_fills_its_slice_and_nothing_else(
    backend, exact, tolerance, layers, noted, op
):
    wrong = []
    formats = {2: torch.channels_last, 3: torch.channels_last_3d}
    for problem, a, b in layers(op):
        expected = exact(problem, a, b)
        layout = formats[problem.rank] if problem.layout == "nhwc" else torch.contiguous_format
        shape = (BATCH + 2, *problem.result_shape[1:])
        for candidate in backend.candidates(problem):
            whole = torch.full(shape, torch.nan, dtype=a.dtype, device=a.device)
            whole = whole.contiguous(memory_format=layout)
            with noted(wrong, candidate.algorithm, problem):
                backend.executable(problem, candidate.algorithm).write(a, b, whole[1:-1])
                error = relative_error(whole[1:-1], expected)
                wrong += wrong_by(error, tolerance(problem), candidate.algorithm, problem)
            if not (whole[0].isnan().all() and whole[-1].isnan().all()):
                wrong.append(f"{candidate.algorithm} on {problem} writes beyond its slice")
    assert not wrong, "\n".join(wrong)


def test_every_engine_adds_to_a_gradient(backend, exact, tolerance, layers, noted):
    wrong = []
    for problem, x, dy in layers("wgrad"):
        expected = exact(problem, x, dy)
        dtype = torch.promote_types(x.dtype, torch.float32)
        for candidate in backend.candidates(problem):
            with noted(wrong, candidate.algorithm, problem):
                executable = backend.executable(problem, candidate.algorithm)
                total = executable.alone(x, dy).fill_(3.0).to(dtype)
                executable.add(x, dy, total)
                error = relative_error(total - 3.0, expected)
                wrong += wrong_by(error, 4 * tolerance(problem), candidate.algorithm, problem)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("op", OPS)
def test_the_workspace_is_what_was_promised(backend, kind, op):
    dtype, layout, math = kind
    problem = Problem(op, BATCH, 64, 64, (28, 28), (3, 3), dtype=dtype, layout=layout, math=math)
    a, b = backend.operands(problem, BATCH)
    for candidate in backend.candidates(problem)[1:]:
        executable = backend.executable(problem, candidate.algorithm)
        used = backend.workspace_bytes(
            lambda run=executable: run.alone(a, b), [(problem, candidate.algorithm)]
        )
        assert used <= candidate.workspace_bytes, candidate.algorithm


@pytest.mark.parametrize("op", OPS)
def test_an_identity_found_at_64_samples_runs_at_others(backend, exact, tolerance, noted, op):
    problem = Problem(op, 64, 16, 24, (14, 12), (3, 3), padding=((1, 1), (1, 1)), math="tf32")
    a, b = backend.operands(problem, 64)
    refused, wrong, candidates = 0, [], backend.candidates(problem)
    for candidate in candidates:
        executable = backend.executable(problem, candidate.algorithm)
        for size in (1, 3, 8):
            part, second = problem.with_batch(size), b[:size] if op == "wgrad" else b
            reason = backend.build_refusal(part, candidate.algorithm)
            if reason is not None:  # a miss, which the runner computes by torch's own
                refused += 1
                continue
            with noted(wrong, candidate.algorithm, part):
                result = executable.alone(a[:size], second)
                error = relative_error(result, exact(part, a[:size], second))
                wrong += wrong_by(error, tolerance(problem), candidate.algorithm, part)
    assert not wrong, "\n".join(wrong)
    # cuDNN 9.19 refuses 12 of 96 for wgrad
    assert refused <= len(candidates) / 2


def test_every_engine_that_adds_a_bias_agrees_with_float64(
    backend, exact, tolerance, layers, noted
):
    wrong = []
    for problem, x, w in layers("fprop"):
        bias = torch.randn(problem.out_channels + 1, device=x.device).to(x.dtype)
        expected = exact(problem, x, w)
        # the second one is not aligned
        cases = [(None, expected)] + [
            (one, expected + one.double().cpu().view(-1, *[1] * problem.rank))
            for one in (bias[:-1], bias[1:])
        ]
        candidates = backend.candidates(problem, adds_bias=True)
        # for 3 channels to 5 in half precision, cuDNN 9.19 has only one that it would compile
        is_usual = problem.rank == 2 and problem.groups == 1 and problem.in_channels % 8 == 0
        if is_usual and not candidates:
            wrong.append(f"nothing adds a bias to {problem}")
        for candidate in candidates:
            executable = backend.executable(problem, candidate.algorithm)
            for one, sums in cases:
                with noted(wrong, candidate.algorithm, problem):
                    error = relative_error(executable.alone(x, w, one), sums)
                    wrong += wrong_by(error, tolerance(problem), candidate.algorithm, problem)
    assert not wrong, "\n".join(wrong)
