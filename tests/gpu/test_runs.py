"""How splits run on a GPU: streams, threads, capture, odd operands."""

from __future__ import annotations

import pickle
import threading
from dataclasses import replace

import pytest
import torch
from torch.backends import cudnn

from ucudnn.backends.cudnn.backend import CudnnBackend
from ucudnn.errors import UnsupportedError
from ucudnn.execution.execute import bind
from ucudnn.plan import DEFAULT_ALGORITHM, Chunk, Split
from ucudnn.problem import OPS, Problem

LAYER = Problem("fprop", 10, 16, 32, (14, 14), (3, 3), padding=((1, 1), (1, 1)), math="tf32")


def relative_error(result, expected):
    return ((result.double().cpu() - expected).norm() / expected.norm()).item()


def engine(backend, problem, *others):
    """The first engine that cuDNN proposes, and builds at other numbers of samples, too."""
    return next(
        one.algorithm
        for one in backend.candidates(problem)[1:]
        if all(
            backend.build_refusal(problem.with_batch(size), one.algorithm) is None
            for size in others
        )
    )


def chunked(backend, problem):
    """A call by cuDNN's first engine, whose remainder is smaller."""
    sizes = (4, 4, 2)
    name = engine(backend, problem.with_batch(4), *sizes)
    return bind(backend, problem, Split("batch", tuple(Chunk(size, name) for size in sizes)))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_slabs_of_rows_give_the_whole(backend, exact, tolerance, op, layout):
    """All engines of an inner slab, on views; 14 rows as 5 + 5 + 4."""
    problem = replace(LAYER, op=op, batch=2, layout=layout)
    inner = replace(problem, input_size=(7, 14), padding=((0, 0), (1, 1)))
    a, b = backend.operands(problem, 2)
    expected = exact(problem, a, b)
    for candidate in backend.candidates(inner):
        split = Split("spatial", tuple(Chunk(size, candidate.algorithm) for size in (5, 5, 4)))
        try:
            result = bind(backend, problem, split)(a, b)
        except UnsupportedError:  # at the edges, whose padding differs
            continue
        assert relative_error(result, expected) < 2 * tolerance(problem), candidate.algorithm


@pytest.mark.hardware("streams beside the host")
@pytest.mark.parametrize("op", OPS)
def test_a_call_follows_the_current_stream(backend, exact, tolerance, op):
    problem = replace(LAYER, op=op)
    a, b = backend.operands(problem, 10)
    call, stream = chunked(backend, problem), torch.cuda.Stream()
    call(a, b)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late = a * 2
        result = call(late, b)
    busy = not stream.query()
    torch.cuda.current_stream().wait_stream(stream)
    assert busy, "the call waited for its stream"
    assert relative_error(result, 2 * exact(problem, a, b)) < 2 * tolerance(problem)


@pytest.mark.hardware("graphs")
@pytest.mark.parametrize("op", OPS)
def test_a_call_can_be_captured_and_replayed(backend, exact, tolerance, op):
    problem = replace(LAYER, op=op)
    a, b = backend.operands(problem, 10)
    call, side = chunked(backend, problem), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call(a, b)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call(a, b)
    for factor in (1.0, -3.0):
        a.mul_(factor)
        graph.replay()
        assert relative_error(result, exact(problem, a, b)) < 2 * tolerance(problem)
    # after a capture, eager calls go on
    assert relative_error(call(a, b), exact(problem, a, b)) < 2 * tolerance(problem)


@pytest.mark.hardware("an allocator that has an end")
@pytest.mark.parametrize("op", OPS)
def test_a_call_that_finds_no_memory_leaves_the_next_one_as_it_is(backend, exact, tolerance, op):
    problem = replace(LAYER, op=op)
    a, b = backend.operands(problem, 10)
    call = chunked(backend, problem)
    call(a, b)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    most = torch.cuda.memory_reserved() + (32 << 20)
    torch.cuda.set_per_process_memory_fraction(most / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            _ = [call(a, b) for _ in range(10_000)]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert relative_error(call(a, b), exact(problem, a, b)) < 2 * tolerance(problem)


@pytest.mark.parametrize("op", OPS)
def test_threads_share_an_executable(backend, exact, tolerance, op):
    problem = replace(LAYER, op=op)
    a, b = backend.operands(problem, 10)
    call, expected, errors = chunked(backend, problem), exact(problem, a, b), []

    def work(number):
        with torch.cuda.stream(torch.cuda.Stream()):
            own = a * number
            torch.cuda.current_stream().synchronize()
            results = [call(own, b) for _ in range(20)]
            torch.cuda.current_stream().synchronize()
        errors.extend(relative_error(result, number * expected) for result in results)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(number,)) for number in (1, 2, 4, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 80
    assert max(errors) < 2 * tolerance(problem)


@pytest.mark.parametrize("op", OPS)
def test_operands_of_any_strides(backend, exact, tolerance, op):
    problem = replace(LAYER, op=op, batch=4)
    a, b = backend.operands(problem, 4)
    executable = backend.executable(problem, engine(backend, problem))
    odd = a.mT.contiguous().mT
    assert not odd.is_contiguous()
    assert relative_error(executable.alone(odd, b), exact(problem, a, b)) < tolerance(problem)


def test_backends_of_a_process_share_its_handles(backend):
    assert CudnnBackend().runtime is backend.runtime


def test_no_engine_is_listed_while_cudnn_is_switched_off(backend):
    """Nor is it used by the worker that measures for this process."""
    listed = backend.candidates(LAYER)
    assert len(listed) > 1
    with cudnn.flags(enabled=False):
        assert [one.algorithm for one in backend.candidates(LAYER)] == [DEFAULT_ALGORITHM]
        assert backend.candidates(LAYER, adds_bias=True) == ()
        sent = pickle.dumps(backend)
    assert backend.candidates(LAYER) == listed
    with cudnn.flags(enabled=True):
        pickle.loads(sent)  # as the worker does
        assert not cudnn.enabled


def test_nan_in_a_filter_arrives(backend):
    a, b = backend.operands(LAYER, 10)
    b[3].fill_(torch.nan)
    result = chunked(backend, LAYER)(a, b)
    assert result[:, 3].isnan().all()
    assert result[:, :3].isfinite().all()


@pytest.mark.hardware("speed")
def test_tensors_beyond_32_bits_are_computed_in_chunks(backend):
    problem = Problem("fprop", 2100, 1, 1, (1024, 1024), (1, 1), dtype="float16")
    name = engine(backend, problem.with_batch(300))
    assert "32 bits" in backend.refusal(problem, name)
    x = torch.ones(problem.x_shape, dtype=torch.float16, device="cuda")
    w = torch.full(problem.w_shape, 2.0, dtype=torch.float16, device="cuda")
    y = bind(backend, problem, Split("batch", (Chunk(300, name),) * 7))(x, w)
    assert y.eq(2).all()


@pytest.mark.hardware("NVML")
def test_who_the_gpu_is(backend):
    device, software = backend.device(), backend.software()
    assert device.type == "cuda"
    assert device.name == torch.cuda.get_device_name()
    assert device.cores > 0
    assert device.power_limit_w > 0
    assert software.cudnn.startswith("9.")
    assert software.driver
    assert software.cuda == torch.version.cuda
    assert any(note.startswith("sm_clock_mhz=") for note in backend.state().notes)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_operands_of_a_benchmark_are_no_memory_of_torchs(backend, dtype, layout):
    pytest.importorskip("cupy", reason="raw memory needs CuPy, which is not installed")
    problem = replace(LAYER, dtype=dtype, layout=layout, math="strict")
    backend.operands(problem, 10)  # the random numbers' own state comes once
    before = torch.cuda.memory_allocated()
    a, b = backend.operands(problem, 10)
    assert torch.cuda.memory_allocated() == before
    layout_of_torch = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    for operand, shape in zip((a, b), problem.operand_shapes, strict=True):
        assert operand.shape == shape
        assert operand.dtype == getattr(torch, dtype)
        assert operand.is_contiguous(memory_format=layout_of_torch)
        assert operand.isfinite().all()
        assert abs(operand.float().std().item() - 1) < 0.1


@pytest.mark.hardware("torch's allocator, which counts")
def test_the_memory_of_a_run(backend):
    kept = []

    def work():
        kept.append(torch.empty(4 << 20, dtype=torch.uint8, device="cuda"))
        torch.empty(8 << 20, dtype=torch.uint8, device="cuda").zero_()

    before = backend.allocated_bytes()
    assert backend.span(work) == (12 << 20, 4 << 20)
    assert backend.allocated_bytes() == before + (4 << 20)
