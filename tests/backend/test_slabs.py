"""Splits along rows: the sum of slabs is the whole, on views of whole tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ucudnn.errors import ProblemError, UnsupportedError
from ucudnn.execution.execute import bind
from ucudnn.plan import Chunk, Split
from ucudnn.problem import BYTES_BY_DTYPE, OPS, Problem
from ucudnn.slabs import row_count, slab

few = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def rows_of(problem, *sizes, algorithm="torch_default"):
    assert sum(sizes) == row_count(problem)
    return Split("spatial", tuple(Chunk(size, algorithm) for size in sizes))


def relative_error(result, expected):
    return ((result.double() - expected).norm() / max(expected.norm().item(), 1e-30)).item()


@st.composite
def problems(draw):
    """Small geometries of 1 to 3 axes, the outermost with much variety."""
    rank, groups = draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2]))
    outer = (
        draw(st.integers(1, 9)),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 4)),
        (draw(st.integers(0, 5)), draw(st.integers(0, 5))),
        draw(st.integers(1, 3)),
    )
    inner = ((4, 2, 1, (1, 0), 1), (3, 1, 2, (0, 0), 1))
    sizes, kernel, stride, padding, dilation = zip(outer, *inner[: rank - 1], strict=True)
    layout = "nchw" if rank == 1 else draw(st.sampled_from(["nchw", "nhwc"]))
    try:
        return Problem(
            *(draw(st.sampled_from(OPS)), draw(st.integers(1, 2)), 2 * groups, 4),
            *(sizes, kernel, stride, padding, dilation, groups),
            dtype="float64",
            layout=layout,
        )
    except ProblemError:
        assume(False)


@pytest.mark.slow
@given(st.data(), problems())
@few
@pytest.mark.usefixtures("poisoned")
def test_every_division_into_rows_gives_the_whole(backend, exact, data, problem):
    """Any slabs, by any algorithms, compared with float64."""
    chunks, rows, begin = [], row_count(problem), 0
    while begin < rows:
        end = data.draw(st.integers(begin + 1, rows))
        part = slab(problem, begin, end).problem or problem
        algorithms = [
            candidate.algorithm
            for candidate in backend.candidates(part)
            if backend.slab_refusal(part, candidate.algorithm) is None
        ]
        chunks.append(Chunk(end - begin, data.draw(st.sampled_from(algorithms))))
        begin = end
    a, b = backend.operands(problem, problem.batch)
    split = Split("spatial", tuple(chunks))
    result, expected = bind(backend, problem, split)(a, b), exact(problem, a, b)
    assert result.shape == problem.result_shape
    # Where only padding is read the rounding errors of a transform are all that there is.
    assume(bool(expected.any()))
    assert relative_error(result, expected) < 1e-14


@pytest.mark.parametrize("op", OPS)
def test_seams_are_bitwise_where_each_output_is_one_product(backend, op):
    """With one channel and one tap there is nothing to round in another order."""
    problem = Problem(op, 1, 1, 1, (7, 3), (1, 1), padding=((2, 3), (0, 0)))
    a, b = backend.operands(problem, 1)
    if op == "wgrad":
        a, b = a.round(), b.round()  # sums of small integers are exact
    whole = bind(backend, problem, rows_of(problem, row_count(problem)))(a, b)
    sizes = [1] * row_count(problem)
    assert torch.equal(bind(backend, problem, rows_of(problem, *sizes))(a, b), whole)


def test_weights_that_meet_padding_only_have_no_gradient(backend):
    problem = Problem("wgrad", 2, 2, 2, (1,), (1,), stride=(3,), padding=((1, 2),))
    a, b = backend.operands(problem, 2)
    dw = bind(backend, problem, rows_of(problem, 1, 1))(a, b)
    assert torch.equal(dw, torch.zeros(problem.w_shape))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_every_algorithm_runs_on_slabs_of_any_dtype(backend, exact, tolerance, op, layout):
    for dtype in BYTES_BY_DTYPE:
        for kernel in (1, 3):
            padding = ((kernel // 2,) * 2,) * 2
            sizes = ((9, 5), (kernel, kernel), (1, 1), padding)
            problem = Problem(op, 2, 4, 4, *sizes, groups=2, dtype=dtype, layout=layout)
            a, b = backend.operands(problem, 2)
            expected = exact(problem, a, b)
            for candidate in backend.candidates(problem):
                split = rows_of(problem, 3, 3, 3, algorithm=candidate.algorithm)
                result = bind(backend, problem, split)(a, b)
                assert relative_error(result, expected) < tolerance[dtype] * 2, candidate
                if layout == "nhwc" and op != "wgrad":
                    assert result.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "geometry",
    [
        (2, 16, 32, (4, 1), (1, 3), (2, 2), ((1, 1), (2, 2))),
        (3, 8, 8, (6, 2), (1, 3), (2, 3), ((1, 1), (2, 2))),
        (4, 8, 4, (7, 2), (2, 5), (1, 3), ((2, 2), (3, 3)), (1, 1), 2),
        (2, 8, 8, (9, 9), (3, 3), (2, 2), ((1, 1), (1, 1))),
    ],
    ids=["k1x3", "k1x3 s2x3", "k2x5 g2", "k3"],
)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_slabs_in_bfloat16_are_right_or_refused(backend, exact, op, geometry, layout):
    """torch's own kernels give wrong gradients on some that are narrower than the filter."""
    problem = Problem(op, *geometry, dtype="bfloat16", layout=layout)
    a, b = backend.operands(problem, problem.batch)
    rows, bound = row_count(problem), 0
    for size in range(1, rows):
        sizes = [size] * (rows // size) + [rows % size] * bool(rows % size)
        try:
            call = bind(backend, problem, rows_of(problem, *sizes))
        except UnsupportedError:
            continue
        bound += 1
        assert relative_error(call(a, b), exact(problem, a, b)) < 2e-2
    is_narrow = any(k > n for k, n in zip(problem.kernel_size, problem.input_size, strict=True))
    assert bound or is_narrow


@pytest.mark.parametrize("op", OPS)
def test_operands_are_not_changed_and_inner_slabs_share_an_executable(backend, op):
    problem = Problem(op, 1, 4, 4, (16, 6), (3, 3), padding=((1, 1), (1, 1)))
    a, b = backend.operands(problem, 1)
    before = a.clone(), b.clone()
    call = bind(backend, problem, rows_of(problem, *[4] * 4))
    call(a, b)
    assert torch.equal(a, before[0])
    assert torch.equal(b, before[1])
    assert len({id(chunk.executable) for chunk in call.chunks}) == 3
    assert call.chunks[1].executable is call.chunks[2].executable


def test_slow_conv2d_takes_views_of_x_for_wgrad(backend, exact):
    """torch's own kernel reads x as if it were contiguous."""
    problem = Problem("wgrad", 6, 2, 3, (7, 4), (4, 4), padding=((0, 0), (1, 1)), dtype="float64")
    a, b = backend.operands(problem, 6)
    split = rows_of(problem, 1, 3, algorithm="slow_conv2d")
    assert relative_error(bind(backend, problem, split)(a, b), exact(problem, a, b)) < 1e-14
