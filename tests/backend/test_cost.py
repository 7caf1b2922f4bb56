"""Lower bounds: what algorithms state is never more than what torch does and allocates."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from operator import ge

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ucudnn.backends import Roofline
from ucudnn.backends.torch_cpu import processor
from ucudnn.backends.torch_cpu.algorithm import direct_cost
from ucudnn.problem import BYTES_BY_DTYPE, OPS, Problem

# Beside the geometries that all algorithms are tried on: where copies or columns are not needed.
SPECIAL = {
    "asymmetric": {"input_size": (9, 10), "kernel_size": (3, 2), "padding": ((0, 1), (1, 0))},
    "one-element": {"input_size": (1, 1), "kernel_size": (1, 1)},
    "one-output": {"input_size": (8, 8), "kernel_size": (8, 8)},
    "nothing-cut-away": {"input_size": (32,), "kernel_size": (5,)},
    "wide": {"input_size": (9, 40), "kernel_size": (3, 7), "padding": ((1, 1), (3, 3))},
    "wide-strided": {"input_size": (9, 10), "kernel_size": (2, 5), "stride": (2, 2)},
    "padded-pointwise": {"input_size": (9, 9), "kernel_size": (1, 1), "padding": ((1, 1), (1, 1))},
}
# Batch, channels in and out, groups.
CASES = ((3, 8, 4, 2), (1, 4, 8, 1), (3, 6, 6, 6), (3, 1, 6, 1), (3, 6, 1, 1))


def problem_of(op, case, geometry, dtype="float32", layout="nchw"):
    return Problem(op, *case[:3], groups=case[3], dtype=dtype, layout=layout, **geometry)


def costs(backend, problem):
    """Each algorithm that computes the problem with its cost."""
    for candidate in backend.candidates(problem):
        cost = backend.cost(problem, candidate.algorithm)
        assert cost is not None
        assert min(cost) >= 0
        yield candidate.algorithm, cost


def measured(backend, problem, algorithm):
    operands = backend.operands(problem, problem.batch)
    run = partial(backend.executable(problem, algorithm).alone, *operands)
    return backend.workspace_bytes(run, [(problem, algorithm)])


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_the_direct_algorithm_counts_what_meets_the_input(exact, geometry, op):
    """Convolutions of ones count: each product adds one to an element of the result."""
    case = (3, 4, 6, 2)
    problem = problem_of(op, case, geometry)
    x, w, y = (torch.ones(shape) for shape in (problem.x_shape, problem.w_shape, problem.y_shape))
    counts = {
        "x": exact(problem_of("dgrad", case, geometry), y, w),
        "w": exact(problem_of("wgrad", case, geometry), x, y),
        "y": exact(problem_of("fprop", case, geometry), x, w),
    }
    cost = direct_cost(problem)
    assert cost.operations == 2 * counts["y"].sum().item()
    operands = {"fprop": "xw", "dgrad": "yw", "wgrad": "xy"}[op]
    met = sum(counts[name].count_nonzero().item() for name in operands)
    assert cost.traffic_bytes == 4 * met + problem.result_bytes


@pytest.mark.parametrize("op", OPS)
def test_operations_are_those_of_torchs_counter_where_nothing_is_padded(backend, op):
    problem = Problem(op, 2, 8, 16, (12, 10), (3, 3), stride=(2, 1), dtype="float64")
    x = torch.ones(problem.x_shape, requires_grad=op == "dgrad")
    w = torch.ones(problem.w_shape, requires_grad=op == "wgrad")
    with FlopCounterMode(display=False) as counter:
        y = torch.conv2d(x, w, stride=problem.stride)
        operations = counter.get_total_flops()
        if op != "fprop":
            y.sum().backward()
            operations = counter.get_total_flops() - operations
    for algorithm in ("torch_default", "slow_conv2d"):
        assert backend.cost(problem, algorithm).operations == operations


def assert_needed(backend, problem):
    """No algorithm states more workspace than it is measured to need."""
    for algorithm, cost in costs(backend, problem):
        most = measured(backend, problem, algorithm)
        assert cost.workspace_bytes <= most, f"{algorithm} on {problem}"


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_stated_workspace_is_never_more_than_the_measured_one(backend, geometry, op):
    for case in CASES:
        assert_needed(backend, problem_of(op, case, geometry))
    for dtype in BYTES_BY_DTYPE:
        assert_needed(backend, problem_of(op, CASES[0], geometry, dtype))
    if len(geometry["input_size"]) > 1:
        assert_needed(backend, problem_of(op, CASES[0], geometry, "float64", "nhwc"))
        assert_needed_in_channels_last(backend, op, geometry)


def assert_needed_in_channels_last(backend, op, geometry):
    for case, dtype in product(CASES, ("float32", "bfloat16")):
        assert_needed(backend, problem_of(op, case, geometry, dtype, "nhwc"))


@pytest.mark.slow
@pytest.mark.parametrize("special", SPECIAL.values(), ids=SPECIAL)
@pytest.mark.parametrize("op", OPS)
def test_stated_workspace_where_copies_are_left_out(backend, special, op):
    for case in CASES:
        assert_needed(backend, problem_of(op, case, special))
    if len(special["input_size"]) > 1:
        assert_needed_in_channels_last(backend, op, special)


def test_stated_workspace_of_diagonals_and_phases_is_most_of_the_measured_one(backend):
    # oneDNN's own copies, of which nothing is stated, are left out by the dtype and the layout
    for dtype, layout in (("float64", "nchw"), ("float32", "nhwc")):
        sizes = ((20, 60), (7, 7), (1, 1), ((3, 3), (3, 3)))
        wide = Problem("wgrad", 4, 16, 16, *sizes, groups=16, dtype=dtype, layout=layout)
        least = 0.95 * measured(backend, wide, "diagonal_gemm")
        assert backend.cost(wide, "diagonal_gemm").workspace_bytes >= least
        sizes = ((40, 40), (3, 3), (2, 2), ((1, 1), (1, 1)))
        strided = Problem("dgrad", 4, 32, 32, *sizes, dtype=dtype, layout=layout)
        least = 0.4 * measured(backend, strided, "phases")
        assert backend.cost(strided, "phases").workspace_bytes >= least


@pytest.mark.parametrize("op", OPS)
def test_stated_workspace_of_columns_and_spectra_is_most_of_the_measured_one(backend, geometry, op):
    """All of the columns, at least half of what Fourier transforms take."""
    for case in ((4, 16, 32, 1), (4, 32, 16, 1), (4, 32, 32, 32)):
        problem = problem_of(op, case, geometry)
        for algorithm, cost in costs(backend, problem):
            if algorithm in ("im2col_gemm", "fft"):
                least = {"im2col_gemm": 0.99, "fft": 0.5}[algorithm]
                assert cost.workspace_bytes >= least * measured(backend, problem, algorithm)


@pytest.mark.parametrize("op", OPS)
def test_costs_grow_with_the_batch(backend, geometry, op):
    for case in CASES:
        problem = problem_of(op, case, geometry)
        for algorithm, cost in costs(backend, problem.with_batch(1)):
            before = cost
            for batch in range(2, 9):
                after = backend.cost(problem.with_batch(batch), algorithm)
                kernels = {
                    backend.implementation_of(problem.with_batch(size), algorithm)
                    for size in (batch - 1, batch)
                }
                if len(kernels) == 1:
                    assert all(map(ge, after, before)), f"{algorithm} on {problem}"
                before = after


def test_a_larger_batch_shares_the_transforms_of_the_filters(backend):
    one, eight = (
        backend.cost(Problem("fprop", batch, 64, 64, (20, 20), (5, 5)), "fft") for batch in (1, 8)
    )
    assert all(larger < 8 * smaller for smaller, larger in zip(one, eight, strict=True))


def test_hopeless_spectra_are_known_without_a_run(backend):
    """Transforming 512 x 512 filters of 3 taps to the length of a sound takes gigabytes."""
    problem = Problem("fprop", 4, 512, 512, (6400,), (3,), stride=(2,))
    assert backend.cost(problem, "fft").workspace_bytes > 5 << 30
    roofline = Roofline(operations_per_s=1e12, bytes_per_s=1e11)
    times = {name: roofline.time_ns(cost) for name, cost in costs(backend, problem)}
    assert times["fft"] > 10 * times["torch_default"]


def test_nothing_is_stated_of_what_is_not_computed(backend):
    assert backend.cost(Problem("fprop", 2, 4, 4, (9, 9), (3, 3)), "gemm") is None
    assert backend.cost(Problem("fprop", 2, 4, 4, (9, 9), (3, 3)), "winograd") is None


def test_a_roofline_is_measured_once_by_however_many_threads(backend, monkeypatch):
    runs = []
    monkeypatch.setattr(processor, "_shortest_ns", lambda run: runs.append(run) or 1_000)
    for measure in (processor._operations_per_s, processor._bytes_per_s):
        measure.cache_clear()
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(backend.roofline, ["float64"] * 16))
    once = len(runs)
    backend.roofline("float64")
    for measure in (processor._operations_per_s, processor._bytes_per_s):
        measure.cache_clear()  # of times that were made up
    assert len(found) == 1
    assert len(runs) == once == len(processor._PRODUCTS) + 1


@pytest.mark.slow
def test_measuring_a_roofline_leaves_torch_as_it_was(backend):
    processor._operations_per_s.cache_clear()
    state = torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16), torch.enable_grad(), torch.device("meta"):
        rooflines = {dtype: backend.roofline(dtype) for dtype in BYTES_BY_DTYPE}
        assert torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(torch.get_rng_state(), state)
    for dtype in ("float16", "bfloat16"):
        assert rooflines[dtype].operations_per_s >= rooflines["float32"].operations_per_s
    assert all(roofline.bytes_per_s > 0 for roofline in rooflines.values())
