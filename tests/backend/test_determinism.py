"""An algorithm gives the same bits in every run, or says that it does not."""

from __future__ import annotations

import pytest
import torch

from ucudnn.problem import BYTES_BY_DTYPE, OPS, Problem

BATCH, RUNS = 5, 4
# Large enough that kernels share the work among threads, and sums among them.
LARGE = {
    "3x3": Problem("fprop", 6, 24, 40, (18, 20), (3, 3), padding=((1, 1), (1, 1))),
    "strided": Problem("fprop", 6, 24, 40, (18, 20), (3, 3), (2, 2), ((1, 1), (1, 1))),
    "1x1": Problem("fprop", 6, 64, 96, (20, 20), (1, 1)),
    "depthwise": Problem("fprop", 6, 48, 48, (20, 20), (7, 7), padding=((3, 3),) * 2, groups=48),
    "1d": Problem("fprop", 6, 32, 64, (400,), (9,), padding=((4, 4),)),
    "3d": Problem("fprop", 2, 16, 24, (8, 10, 8), (3, 3, 3), padding=((1, 1),) * 3),
}


def results(executable, problem, a, b, turn):
    """The result by every method that a split may call."""
    # What lies in the memory that the run allocates is another thing each time.
    scraps = [torch.full((1000 * (turn + 1) + 17 * n,), float("nan")) for n in range(9)]
    del scraps
    whole = executable.alone(a, b)
    if problem.op == "wgrad":
        total = executable.begin(a, b)
        executable.add(a, b, total)
        return whole, total
    out = torch.empty_like(whole)
    executable.write(a, b, out)
    return whole, out


def check(backend, problem):
    a, b = backend.operands(problem, problem.batch)
    listed = backend.candidates(problem)
    for candidate in listed:
        if not candidate.is_deterministic:
            continue
        executable = backend.executable(problem, candidate.algorithm)
        first = results(executable, problem, a, b, 0)
        for turn in range(1, RUNS):
            if turn == RUNS - 1:  # built anew, as in another process
                executable = backend.executable(problem, candidate.algorithm)
            for before, now in zip(first, results(executable, problem, a, b, turn), strict=True):
                assert torch.equal(before, now), f"{candidate.algorithm} on {problem}"
    return {candidate.algorithm for candidate in listed}


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
@pytest.mark.usefixtures("one_thread")
def test_small_problems(backend, geometry, op):
    for groups in (1, 4):
        for dtype in BYTES_BY_DTYPE:
            for layout in ("nchw", "nhwc")[: len(geometry["input_size"])]:
                check(
                    backend,
                    Problem(op, BATCH, 4, 8, groups=groups, dtype=dtype, layout=layout, **geometry),
                )


@pytest.mark.slow
@pytest.mark.parametrize("problem", LARGE.values(), ids=LARGE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_problems_that_threads_share(backend, problem, dtype):
    from dataclasses import replace

    threads = torch.get_num_threads()
    tried = set()
    try:
        torch.set_num_threads(2)
        for op in OPS:
            for layout in ("nchw", "nhwc")[: problem.rank]:
                tried |= check(backend, replace(problem, op=op, dtype=dtype, layout=layout))
    finally:
        torch.set_num_threads(threads)
    # On a poorer processor fewer algorithms compute half precision.
    assert tried > {"torch_default"}


def test_torchs_own_says_where_it_varies(backend):
    """oneDNN's half-precision kernels read foreign memory where a filter hangs over the input."""
    cramped = Problem("fprop", 2, 4, 8, (3, 3), (5, 5), padding=((3, 3), (2, 2)), dtype="bfloat16")
    is_onednn = backend.implementation_of(cramped, "torch_default") == "onednn"
    assert backend.candidates(cramped)[0].is_deterministic is not is_onednn
    plain = Problem("fprop", 2, 4, 8, (9, 9), (3, 3), dtype="bfloat16")
    assert backend.candidates(plain)[0].is_deterministic
