"""How engines are run: addresses, strides, beta, copies and packs, with memory of the CPU.

The runtime here does what cuDNN's contract says, by float64: it is given nothing but addresses, and
reads and writes through them as the plan's strides say.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ucudnn.backends.cudnn import runtime as cudnn_runtime
from ucudnn.backends.cudnn.backend import CudnnBackend
from ucudnn.backends.cudnn.executable import DefaultExecutable, EngineExecutable
from ucudnn.backends.cudnn.graph import View
from ucudnn.errors import RefusedError, UnsupportedError
from ucudnn.execution.execute import bind
from ucudnn.problem import OPS, Problem
from ucudnn.split import Chunk, Split

DTYPES = {"float64": 1e-14, "float32": 1e-6, "float16": 8e-4}


def relative_error(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


@dataclass
class Plan:
    """What a runtime builds."""

    problem: Problem
    alpha: float
    beta: float
    views: object
    workspace_bytes: int


@dataclass
class Runtime:
    """cuDNN's contract in float64 on the CPU."""

    cudnn: ClassVar = SimpleNamespace(version=91900)
    exact: object
    refuses: object = lambda *_: False
    launches_at: object = lambda *_: True
    plans: list = field(default_factory=list)
    packs: list = field(default_factory=list)
    launches: int = 0
    loops: int = 0
    workspace_bytes: int = 40

    def build_plan(self, _device, problem, _identity, alpha, beta, views):
        if self.refuses(problem, views):
            raise UnsupportedError("not so")
        self.plans.append(Plan(problem, alpha, beta, views, self.workspace_bytes))
        return self.plans[-1]

    def pack(self, plan, pointers, workspace):
        assert bool(workspace) == bool(plan.workspace_bytes)
        self.packs.append(pointers)
        return pointers

    def launch(self, _device, launches):
        self.loops += 1
        for plan, pack in launches:
            self._compute(plan, pack)

    def _compute(self, plan, pack):
        if not all(map(self.launches_at, pack)):
            raise UnsupportedError("misaligned")
        self.launches += 1
        problem = plan.problem
        shapes = {"x": problem.x_shape, "w": problem.w_shape, "y": problem.y_shape}
        order = {"fprop": "xwy", "dgrad": "ywx", "wgrad": "xyw"}[problem.op]
        a, b, out = (
            self._at(pointer, getattr(plan.views, name), shapes[name], problem.dtype)
            for name, pointer in zip(order, pack[:3], strict=True)
        )
        result = plan.alpha * self.exact(problem, a, b)
        for pointer in pack[3:]:  # the bias of the fused pattern
            shape = (problem.out_channels, *[1] * problem.rank)
            view = View((1,) * len(shape), alignment_bytes=16)
            result += self._at(pointer, view, shape, problem.dtype).double()
        out.copy_(result + plan.beta * out.double() if plan.beta else result)

    @staticmethod
    def _at(pointer, view, shape, dtype):
        assert pointer % view.alignment_bytes == 0
        dtype = getattr(torch, dtype)
        last = sum((size - 1) * stride for size, stride in zip(shape, view.strides, strict=True))
        memory = (ctypes.c_char * ((last + 1) * dtype.itemsize)).from_address(pointer)
        return torch.frombuffer(memory, dtype=dtype).as_strided(shape, view.strides)


@pytest.fixture
def runtime(exact):
    return Runtime(exact)


def problem_of(op, geometry, dtype="float32", layout="nchw", batch=5):
    return Problem(op, batch, 4, 8, groups=2, dtype=dtype, layout=layout, **geometry)


@pytest.mark.parametrize("op", OPS)
def test_an_engine_reads_and_writes_where_the_tensors_are(backend, exact, geometry, runtime, op):
    for dtype, tolerance in DTYPES.items():
        for layout in ("nchw", "nhwc")[: len(geometry["input_size"])]:
            problem = problem_of(op, geometry, dtype, layout)
            a, b = backend.operands(problem, 5)
            result = EngineExecutable(runtime, problem, "eng0").alone(a, b)
            assert relative_error(result, exact(problem, a, b)) < tolerance
            assert result.shape == problem.result_shape


@pytest.mark.parametrize("op", ["fprop", "dgrad"])
def test_chunks_fill_their_slices_and_nothing_else(backend, exact, geometry, runtime, op):
    """5 = 2 + 2 + 1: the remainder has a plan of its own."""
    problem = problem_of(op, geometry)
    a, b = backend.operands(problem, 5)
    whole = torch.full((7, *problem.result_shape[1:]), torch.nan)
    executable = EngineExecutable(runtime, problem, "eng0")
    for begin, end in ((0, 2), (2, 4), (4, 5)):
        executable.write(a[begin:end], b, whole[1 + begin : 1 + end])
    assert relative_error(whole[1:-1], exact(problem, a, b)) < 1e-6
    assert whole[0].isnan().all()
    assert whole[-1].isnan().all()
    assert {plan.problem.batch for plan in runtime.plans} == {1, 2}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_gradients_are_added_by_the_engine_itself(backend, exact, geometry, runtime, dtype):
    problem = problem_of("wgrad", geometry, dtype)
    x, dy = backend.operands(problem, 5)
    executable = EngineExecutable(runtime, problem, "eng0")
    total = executable.alone(x[:2], dy[:2])
    executable.add(x[2:4], dy[2:4], total)
    executable.add(x[4:], dy[4:], total)
    assert relative_error(total, exact(problem, x, dy)) < 4 * DTYPES[dtype]
    assert {plan.beta for plan in runtime.plans} == {0.0, 1.0}


def test_a_chunk_beyond_float16_is_no_infinity_where_the_sum_is_within(runtime):
    """The gradients of two chunks are 98304 and -98304 + 3; a GradScaler would skip the step."""
    problem = Problem("wgrad", 2, 1, 1, (12288,), (1,), dtype="float16")
    x = torch.full(problem.x_shape, 8.0, dtype=torch.float16)
    dy = torch.ones(problem.y_shape, dtype=torch.float16)
    dy[1] = -1
    x[1, 0, 0] = 5
    executable = EngineExecutable(runtime, problem, "eng0")
    total = executable.begin(x[:1], dy[:1])
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(98304, abs=64)
    executable.add(x[1:], dy[1:], total)
    assert total.item() == pytest.approx(3.0, abs=64)  # as float16 rounds numbers of that size


class _Operators(TorchDispatchMode):
    """Notes the operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def test_a_sum_of_bfloat16_begins_without_a_factor(backend, exact, runtime):
    """Each operator would be one more small kernel; bfloat16 has the range of float32."""
    problem = Problem("wgrad", 2, 3, 4, (9,), (3,), dtype="bfloat16")
    x, dy = backend.operands(problem, 2)
    with _Operators() as called:
        total = EngineExecutable(runtime, problem, "eng0").begin(x, dy)
    assert total.dtype == torch.float32
    assert relative_error(total, exact(problem, x, dy)) < 1e-2
    assert "mul_" not in called.names


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_a_slab_is_run_where_it_lies(backend, exact, runtime, layout):
    """Rows 2 to 5 of the output read rows 2 to 7 of the input; nothing is copied."""
    whole = Problem("fprop", 3, 4, 8, (9, 6), (3, 3), layout=layout)
    x, w = backend.operands(whole, 3)
    slab = Problem("fprop", 3, 4, 8, (6, 6), (3, 3), layout=layout)
    y = torch.full_like(exact(whole, x, w).float(), torch.nan)
    executable = EngineExecutable(runtime, slab, "eng0")
    executable.write(x[:, :, 2:8], w, y[:, :, 2:6])
    assert relative_error(y[:, :, 2:6], exact(whole, x, w)[:, :, 2:6]) < 1e-6
    assert y[:, :, :2].isnan().all()
    assert y[:, :, 6:].isnan().all()
    assert runtime.plans[0].views.x.strides == x.stride()
    assert len(runtime.plans) == 1


def test_what_the_engine_does_not_take_as_it_lies_is_copied(backend, exact, runtime):
    whole = Problem("wgrad", 3, 4, 8, (9, 6), (3, 3))
    x, dy = backend.operands(whole, 3)
    slab = Problem("wgrad", 3, 4, 8, (6, 6), (3, 3))
    packed = EngineExecutable(runtime, slab, "eng0")
    total = packed.alone(x[:, :, 2:8].contiguous(), dy[:, :, 2:6].contiguous())
    runtime.refuses = lambda _, views: views.x.strides[0] != 4 * 6 * 6
    EngineExecutable(runtime, slab, "eng0").add(x[:, :, 2:8], dy[:, :, 2:6], total)
    expected = 2 * exact(slab, x[:, :, 2:8], dy[:, :, 2:6])
    assert relative_error(total, expected) < 1e-6


@pytest.mark.parametrize("op", OPS)
def test_what_the_engine_refuses_only_when_it_is_launched_is_copied(backend, exact, runtime, op):
    problem = Problem(op, 3, 1, 1, (5, 5), (3, 3))
    a, b = backend.operands(problem, 4)
    runtime.launches_at = lambda pointer: pointer % 16 == 0
    executable = EngineExecutable(runtime, problem, "eng0")
    second = b[1:] if op == "wgrad" else b  # the second sample is not aligned
    for _ in range(2):
        result = executable.alone(a[1:], second)
        assert relative_error(result, exact(problem, a[1:], second)) < 1e-6
    assert runtime.launches == 2
    runtime.launches_at = lambda _: False
    with pytest.raises(UnsupportedError, match="misaligned"):
        executable.alone(a[:3], b[:3])


def test_an_engine_that_takes_nothing_is_a_miss(backend, runtime):
    runtime.refuses = lambda *_: True
    problem = Problem("fprop", 3, 4, 8, (9, 6), (3, 3))
    a, b = backend.operands(problem, 3)
    with pytest.raises(UnsupportedError, match="not so"):
        EngineExecutable(runtime, problem, "eng0").alone(a, b)
    with pytest.raises(UnsupportedError, match="not so"):
        EngineExecutable(runtime, problem, "eng0").alone(a.transpose(2, 3).clone().mT, b)


@pytest.mark.parametrize("spoil", [torch.Tensor.double, lambda tensor: tensor.to("meta")])
def test_operands_of_two_kinds_are_refused(backend, runtime, spoil):
    problem = Problem("fprop", 3, 4, 8, (9, 6), (3, 3))
    a, b = backend.operands(problem, 3)
    with pytest.raises(ValueError, match="must be float32 on one device"):
        EngineExecutable(runtime, problem, "eng0").alone(a, spoil(b))
    assert runtime.launches == 0


def test_an_address_is_not_read_beyond_its_tensor(backend, runtime):
    problem = Problem("fprop", 3, 4, 8, (9, 6), (3, 3))
    a, b = backend.operands(problem, 3)
    executable = EngineExecutable(runtime, problem, "eng0")
    executable.alone(a, b)
    with pytest.raises(ValueError, match="must have the shapes"):
        executable.alone(a[:, :, :8], b)
    assert runtime.launches == 1


def test_packs_and_plans_are_kept_while_addresses_stay(backend, runtime):
    problem = Problem("fprop", 4, 4, 8, (9, 6), (3, 3))
    a, b = backend.operands(problem, 4)
    out = torch.empty(problem.result_shape)
    executable = EngineExecutable(runtime, problem, "eng0")
    for _ in range(3):
        for start in (0, 2):
            executable.write(a[start : start + 2], b, out[start : start + 2])
    assert runtime.launches == 6
    # the workspace's address may differ from call to call, those of the tensors do not
    assert {pointers[0] - a.data_ptr() for pointers in runtime.packs} == {0, 2 * 4 * 54 * 4}
    assert len(runtime.plans) == 1


class Pack(list):
    """The addresses of a launch; it can be noticed when nobody keeps it any more."""

    __hash__ = object.__hash__


def test_a_program_that_never_repeats_an_address_does_not_fill_the_memory(runtime):
    """And the newest addresses are kept, whatever came before them."""
    problem = Problem("fprop", 1, 1, 1, (1,), (1,))
    executable = EngineExecutable(runtime, problem, "eng0")
    alive, pack = weakref.WeakSet(), runtime.pack

    def counted(plan, pointers, workspace):
        alive.add(found := Pack(pack(plan, pointers, workspace)))
        return found

    runtime.pack = counted
    runtime.workspace_bytes = 0
    x, w = torch.ones(3000, 1, 4), torch.ones(1, 1, 1)
    y = torch.zeros(3000, 1, 4)
    for sample in range(3000):
        executable.write(x[sample : sample + 1, :, :1], w, y[sample : sample + 1, :, :1])
        assert len(alive) <= 512
    assert y[:, 0, 0].eq(1).all()
    for sample in range(2500, 3000):
        executable.write(x[sample : sample + 1, :, :1], w, y[sample : sample + 1, :, :1])
    assert len(runtime.packs) == 3000


@pytest.mark.parametrize("shape", [(1, 4, 5, 5), (3, 1, 5, 5), (3, 4, 1, 5), (3, 4, 5, 1)])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_an_axis_of_size_one_has_the_stride_that_the_layout_gives_it(runtime, shape, layout):
    """torch calls such tensors contiguous in both layouts; cuDNN tells layouts by strides."""
    batch, channels, *sizes = shape
    problem = Problem("fprop", batch, channels, 8, tuple(sizes), (1, 1), layout=layout)
    other = torch.channels_last if layout == "nchw" else torch.contiguous_format
    format_ = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    x = torch.randn(shape).contiguous(memory_format=other).contiguous(memory_format=format_)
    w = torch.randn(8, channels, 1, 1).contiguous(memory_format=format_)
    executable = EngineExecutable(runtime, problem, "eng0")
    y = executable.alone(x, w)
    torch.testing.assert_close(y, torch.conv2d(x, w), rtol=1e-5, atol=1e-5)
    plan = runtime.plans[-1]
    expected = torch.empty(
        (max(batch, 2), max(channels, 2), *(max(size, 2) for size in sizes))
    ).contiguous(memory_format=format_)
    order = sorted(range(4), key=lambda axis: -expected.stride(axis))
    strides = [plan.views.x.strides[axis] for axis in order]
    assert strides == sorted(strides, reverse=True)
    assert strides[-1] == 1


@pytest.fixture
def engines(runtime):
    """A function that binds a problem to chunks by these engines, each with its size."""
    gpu = object.__new__(CudnnBackend)  # its constructor asks for a GPU
    gpu.runtime = runtime

    def bound(problem, *chunks, axis="batch"):
        return bind(gpu, problem, Split(axis, tuple(Chunk(size, name) for size, name in chunks)))

    return bound


@pytest.mark.parametrize("op", OPS)
def test_a_call_launches_all_its_chunks_in_one_loop(backend, exact, geometry, runtime, engines, op):
    """With the packs of the last call at these addresses, which is all that a loop needs."""
    for dtype, tolerance in DTYPES.items():
        for layout in ("nchw", "nhwc")[: len(geometry["input_size"])]:
            problem = problem_of(op, geometry, dtype, layout)
            a, b = backend.operands(problem, 5)
            call = engines(problem, (2, "eng0"), (2, "eng0"), (1, "eng1"))
            if op == "wgrad" and dtype == "float16":  # torch adds the chunks
                assert call.launcher is None
                continue
            runtime.loops, runtime.plans, runtime.packs = 0, [], []
            for _ in range(2):
                result = call(a, b)
                assert relative_error(result, exact(problem, a, b)) < 4 * tolerance
                a.mul_(-2)  # in place
            assert runtime.loops == 2
            places = {pointers[:2] for pointers in runtime.packs}
            assert len(places) == 3
            chunks = [(plan.problem.batch, plan.beta) for plan in runtime.plans]
            sums = [(2, 0.0), (2, 1.0), (1, 1.0)]
            assert chunks == (sums if op == "wgrad" else [(2, 0.0), (1, 0.0)])


@pytest.mark.parametrize(
    ("op", "first", "last"),
    [
        ("dgrad", "eng0", "eng1"),
        ("fprop", "eng0", "eng1"),
        ("fprop", "eng0", "bias_eng1"),
        ("fprop", "bias_eng0", "bias_eng1"),
    ],
)
def test_a_call_adds_a_bias_once(backend, exact, runtime, engines, op, first, last):
    problem = Problem(op, 5, 4, 8, (9, 6), (3, 3))
    a, b = backend.operands(problem, 5)
    call = engines(problem, (3, first), (2, last))
    channels = problem.result_shape[1]
    for bias in (None, torch.randn(channels), torch.randn(2 * channels + 1)[1::2]):
        expected = exact(problem, a, b)
        if bias is not None:
            expected = expected + bias.double().view(-1, 1, 1)
        assert relative_error(call(a, b, bias), expected) < 1e-6
    assert runtime.loops == 3


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_a_call_by_slabs_is_launched_where_they_lie(backend, exact, runtime, engines, op, layout):
    """9 rows as 5 + 4; an engine that takes only whole tensors gets copies, slab by slab."""
    problem = Problem(op, 3, 4, 8, (9, 6), (3, 3), padding=((1, 1), (1, 1)), layout=layout)
    a, b = backend.operands(problem, 3)
    sizes, expected = ((5, "eng0"), (4, "eng0")), exact(problem, a, b)
    assert relative_error(engines(problem, *sizes, axis="spatial")(a, b), expected) < 1e-6
    assert runtime.loops == 1
    runtime.refuses = lambda part, views: views.x.strides != contiguous(part.x_shape, layout)
    call = engines(problem, *sizes, axis="spatial")
    for _ in range(2):
        plans, loops = len(runtime.plans), runtime.loops
        assert relative_error(call(a, b), expected) < 1e-6
    assert len(runtime.plans) == plans
    assert runtime.loops == loops + 2


def contiguous(shape, layout):
    memory = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    return torch.empty(shape).contiguous(memory_format=memory).stride()


@pytest.mark.parametrize("op", OPS)
def test_a_call_whose_chunks_are_refused_at_their_launch_is_computed_on_copies(
    backend, exact, runtime, engines, op
):
    """The first chunk is launched twice, and yet the sum has it once."""
    problem = Problem(op, 4, 1, 1, (5, 5), (3, 3))
    a, b = backend.operands(problem, 4)
    runtime.launches_at = lambda pointer: pointer % 16 == 0
    call = engines(problem, (1, "eng0"), (3, "eng0"))
    for _ in range(2):
        assert relative_error(call(a, b), exact(problem, a, b)) < 1e-6
    runtime.launches_at = lambda _: False
    with pytest.raises(RefusedError, match="misaligned"):
        call(a, b)


def test_a_call_with_a_chunk_of_torchs_own_is_no_loop(backend, exact, runtime, engines):
    problem = Problem("fprop", 5, 4, 8, (9, 6), (3, 3))
    a, b = backend.operands(problem, 5)
    call = engines(problem, (3, "eng0"), (2, "torch_default"))
    assert call.launcher is None
    assert relative_error(call(a, b), exact(problem, a, b)) < 1e-6


def test_the_workspace_of_a_call_is_that_of_its_largest_chunk(backend, runtime, engines):
    problem = Problem("fprop", 5, 4, 8, (9, 6), (3, 3))
    a, b = backend.operands(problem, 5)
    build_plan, found = runtime.build_plan, []

    def built(*arguments):
        plan = build_plan(*arguments)
        plan.workspace_bytes = 1000 * plan.problem.batch
        return plan

    class Bytes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if result.dtype == torch.uint8:
                found.append(result.numel())
            return result

    runtime.build_plan = built
    call = engines(problem, (1, "eng0"), (3, "eng0"), (1, "eng0"))
    with Bytes():
        call(a, b)
    assert found == [3000]


class Handle:
    """Notes the streams it was set to."""

    def __init__(self):
        self.streams = []

    def set_stream(self, stream):
        self.streams.append(stream)


def test_a_handle_belongs_to_one_thread_and_device_and_follows_the_stream(monkeypatch):
    stream = {0: 7, 1: 7}
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(cudnn_runtime, "Handle", lambda _: Handle())
    monkeypatch.setattr(cudnn_runtime, "_current_stream", stream.__getitem__)
    handle_of = cudnn_runtime.Runtime(None)._handle
    mine = handle_of(0)
    assert handle_of(0) is mine
    assert mine.streams == [7]
    stream[0] = 8
    assert handle_of(0) is mine
    assert mine.streams == [7, 8]
    assert handle_of(1) is not mine
    barrier, others = threading.Barrier(4), []

    def work():
        barrier.wait()
        others.append(handle_of(0))
        barrier.wait()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(handle) for handle in (mine, *others)}) == 5
    assert all(handle.streams == [8] for handle in others)


def test_one_thread_at_a_time_launches_a_plan(backend, exact, runtime):
    """Others launch other plans meanwhile: here those of another number of samples."""
    problem = Problem("fprop", 4, 4, 8, (9, 6), (3, 3))
    a, b = backend.operands(problem, 4)
    executable = EngineExecutable(runtime, problem, "eng0")
    busy, together = set(), threading.Barrier(2)
    launch = runtime.launch

    def slow_launch(device, launches):
        ((plan, _),) = launches
        assert id(plan) not in busy
        busy.add(id(plan))
        together.wait(timeout=60)  # two plans are in their launch at once
        launch(device, launches)
        busy.remove(id(plan))

    results = {}

    def work(thread):
        samples = 1 + thread % 2
        results[thread] = executable.alone(a[:samples], b)

    for samples in (1, 2):  # built before: two threads may build one plan each
        executable.alone(a[:samples], b)
    runtime.launch = slow_launch
    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    for result in results.values():
        expected = exact(problem.with_batch(len(result)), a[: len(result)], b)
        assert relative_error(result, expected) < 1e-6


@pytest.mark.parametrize("place", ["aligned", "odd", "strided"])
@pytest.mark.parametrize("identity", ["eng0", "bias_eng0"])
def test_a_bias_is_added_wherever_it_lies(backend, exact, geometry, runtime, identity, place):
    problem = problem_of("fprop", geometry)
    x, w = backend.operands(problem, 5)
    memory = torch.randn(2 * problem.out_channels + 1)
    begin, step = {"aligned": (0, 1), "odd": (1, 1), "strided": (0, 2)}[place]
    bias = memory[begin::step][: problem.out_channels]
    executable = EngineExecutable(runtime, problem, identity)
    expected = exact(problem, x, w) + bias.double().view(-1, *[1] * problem.rank)
    assert relative_error(executable.alone(x, w, bias), expected) < 1e-6
    whole = torch.full((7, *problem.result_shape[1:]), torch.nan)
    for samples in (slice(0, 3), slice(3, 5)):
        out = whole[1:-1][samples]
        executable.write(x[samples], w, out, bias)
    assert relative_error(whole[1:-1], expected) < 1e-6
    fused = identity == "bias_eng0"
    assert {len(pointers) for pointers in runtime.packs} == {4 if fused else 3}


class _Zeros(TorchDispatchMode):
    """Notes the sizes of zeros that are made."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "new_zeros" in str(function):
            self.made.append(args[1])
        return function(*args, **(kwargs or {}))


def test_a_call_without_a_bias_reads_zeros_of_its_own(backend, exact, runtime):
    """Those of another call may be written by another stream, or belong to a CUDA graph."""
    problem = Problem("fprop", 3, 4, 8, (9, 6), (3, 3))
    x, w = backend.operands(problem, 3)
    executable = EngineExecutable(runtime, problem, "bias_eng0")
    executable.alone(x, w, torch.ones(8))
    for _ in range(2):
        with _Zeros() as zeros:
            result = executable.alone(x, w)
        assert zeros.made == [[8]]
        assert relative_error(result, exact(problem, x, w)) < 1e-6


class _Precision(TorchDispatchMode):
    """Notes the setting of TF32 at each convolution."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "convolution" in str(function):
            self.found.append(torch.backends.cudnn.conv.fp32_precision)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("setting", ["tf32", "ieee", "none"])
@pytest.mark.parametrize("math", ["tf32", "strict"])
def test_the_default_computes_in_the_math_of_the_problem(backend, op, math, setting):
    """A table may ask for float32 without TF32 in a process that allows it."""
    settings = torch.backends.cudnn.conv
    before = settings.fp32_precision
    problem = Problem(op, 3, 4, 8, (9, 6), (3, 3), math=math)
    a, b = backend.operands(replace(problem, math="strict"), 3)
    settings.fp32_precision = setting
    try:
        with _Precision() as seen:
            DefaultExecutable(problem).alone(a, b)
        assert settings.fp32_precision == setting
    finally:
        settings.fp32_precision = before
    assert {one == "tf32" for one in seen.found} == {math == "tf32"}


def test_a_bias_of_another_dtype_is_refused(backend, runtime):
    problem = Problem("fprop", 3, 4, 8, (9, 6), (3, 3))
    x, w = backend.operands(problem, 3)
    with pytest.raises(ValueError, match="bias must be torch.float32 on cpu.*torch.float64"):
        EngineExecutable(runtime, problem, "bias_eng0").alone(x, w, torch.ones(8).double())
