"""A chunk is measured as it runs in a whole call: the same memory, the same place in the result."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import ucudnn
from ucudnn.axis import BatchAxis, RowAxis
from ucudnn.backends import Executable, open_backend
from ucudnn.backends.tensors import memory_format
from ucudnn.backends.torch_cpu.backend import TorchCpuBackend
from ucudnn.backends.torch_cpu.processor import usable_cache_bytes
from ucudnn.benchmark.accuracy import Reference
from ucudnn.benchmark.bench import Arm, LocalBench
from ucudnn.benchmark.protocol import ChunkLoop, Ring, WholeLoop, ring_samples
from ucudnn.config import Config
from ucudnn.execution.execute import bind
from ucudnn.measurement import Role
from ucudnn.plan import DEFAULT_ALGORITHM, Chunk, Split
from ucudnn.problem import Problem

PADDED = {"padding": ((1, 1), (1, 1))}


@pytest.mark.parametrize("op", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("algorithm", [DEFAULT_ALGORITHM, "onednn_nhwc", "im2col_gemm"])
def test_workspace_of_a_chunk_is_what_a_call_of_such_chunks_takes(op, algorithm):
    problem = Problem(op, 8, 16, 16, (40, 40), (3, 3), **PADDED)
    bench = LocalBench(open_backend("torch_cpu"), BatchAxis(problem))
    roles = (Role.FIRST, Role.LATER) if op == "wgrad" else (Role.LATER,)
    with torch.no_grad():
        looks = [bench.look(Arm(2, algorithm, role), None) for role in roles]
        whole = bench.whole([Split("batch", (Chunk(2, algorithm),) * 4)])[0]
    assert max(look.workspace_bytes for look in looks) == whole.workspace_bytes


@pytest.mark.parametrize(("spare", "is_timed"), [(0, True), (-1, False)])
def test_a_candidate_over_the_limit_is_not_timed(spare, is_timed):
    problem = Problem("wgrad", 4, 8, 8, (20, 20), (3, 3), **PADDED)
    bench = LocalBench(open_backend("torch_cpu"), BatchAxis(problem))
    arm = Arm(4, "im2col_gemm", Role.ALONE)
    with torch.no_grad():
        needed = bench.look(arm, None).workspace_bytes
        look = bench.look(arm, needed + spare)
    assert (look.workspace_bytes, look.time_ns is not None) == (needed, is_timed)


@pytest.mark.slow
def test_no_kernel_of_a_plan_exceeds_the_limit_when_run():
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 1))
    # Within the default budget a busy machine may not get to smaller batches.
    config = Config(workspace_limit="200KiB", time_budget_s=600)
    plan, backend = ucudnn.tune(model, torch.empty(8, 3, 24, 24), config), open_backend("auto")
    for kernel in plan.kernels:
        for batch in (8, 7, 3, 1):
            problem = kernel.problem.with_batch(batch)
            split = plan.split(problem)
            call = bind(backend, problem, split)
            loop = WholeLoop(Ring.allocate(backend, problem), call)
            taken = backend.workspace_bytes(loop.once, call.parts)
            assert taken <= config.limit_bytes, f"{problem}: {split}"


@pytest.mark.parametrize("op", ["fprop", "dgrad"])
def test_chunks_of_different_algorithms_do_not_add_up(op):
    """slow_conv2d takes columns from malloc itself for dgrad, which no allocator shows."""
    problem = Problem(op, 8, 16, 16, (40, 40), (3, 3), **PADDED)
    bench = LocalBench(open_backend("torch_cpu"), BatchAxis(problem))
    names = ("slow_conv2d", "onednn_nhwc")
    with torch.no_grad():
        looks = [bench.look(Arm(4, name, Role.LATER), None) for name in names]
        mixed = Split("batch", tuple(Chunk(4, name) for name in names))
        (whole,) = bench.whole([mixed])
    most = max(look.workspace_bytes for look in looks)
    # poisoning takes an element
    assert whole.workspace_bytes == pytest.approx(most, abs=8)


class Painter(Executable):
    """Counts how often each element of each result is written."""

    def __init__(self) -> None:
        self.results: dict[int, Tensor] = {}

    def alone(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    def write(self, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
        del a, b, bias
        whole = out._base if out._base is not None else out
        if id(whole) not in self.results:
            self.results[id(whole)] = whole.zero_()
        out += 1


@pytest.mark.parametrize("op", ["fprop", "dgrad"])
@pytest.mark.parametrize("axis", [BatchAxis, RowAxis])
def test_chunks_fill_a_new_result_in_each_call(scripted, op, axis):
    problem = Problem(op, 4, 1, 1, (6, 5), (1, 1))
    ring = Ring.allocate(scripted(), problem)
    part = axis(problem).part(2)
    painter = Painter()
    loop = ChunkLoop(ring, painter, part, Role.LATER)
    calls = ring.chunks_per_call(part)
    loop.prepare(3 * calls)()
    assert len(painter.results) == 3
    for result in painter.results.values():
        assert result.shape == problem.result_shape
        assert torch.equal(result, torch.ones_like(result))


class SmallCache(TorchCpuBackend):
    """Needs few operands, where nothing is timed."""

    def cache_bytes(self) -> int:
        return 1


def test_all_algorithms_and_roles_of_a_size_share_one_reference(monkeypatch):
    computed = []

    def compute(problem, a, b):
        computed.append(problem.batch)
        return Reference(problem, a, b)

    monkeypatch.setattr("ucudnn.benchmark.bench.Reference", compute)
    problem = Problem("wgrad", 4, 4, 4, (8, 8), (3, 3), **PADDED)
    bench = LocalBench(SmallCache(), BatchAxis(problem))
    for algorithm in (DEFAULT_ALGORITHM, "onednn_nhwc", "im2col_gemm"):
        for size, role in ((2, Role.ALONE), (2, Role.LATER), (4, Role.ALONE)):
            assert bench.look(Arm(size, algorithm, role), None).error < 1e-6
    assert computed == [2, 4]


def test_a_candidate_is_checked_and_timed_by_one_executable(monkeypatch):
    backend, built = SmallCache(), []
    build = backend.executable

    def counted(problem, algorithm):
        built.append((problem.batch, algorithm))
        return build(problem, algorithm)

    monkeypatch.setattr(backend, "executable", counted)
    bench = LocalBench(backend, BatchAxis(Problem("wgrad", 4, 4, 4, (8, 8), (3, 3), **PADDED)))
    arms = [Arm(2, DEFAULT_ALGORITHM, role) for role in (Role.FIRST, Role.LATER)]
    arms.append(Arm(4, DEFAULT_ALGORITHM, Role.ALONE))
    for arm in arms:
        bench.look(arm, None)
    bench.rounds(arms, {})
    assert built == [(2, DEFAULT_ALGORITHM), (4, DEFAULT_ALGORITHM)]


class IgnoresPadding(SmallCache):
    """Is right where the rows are not padded, and shifts them where they are."""

    def executable(self, problem: Problem, algorithm: str) -> Executable:
        begin, end = problem.padding[0]
        shifted = ((begin + end, 0), *problem.padding[1:])
        return super().executable(replace(problem, padding=shifted), algorithm)


@pytest.mark.parametrize("op", ["fprop", "wgrad"])
def test_slabs_at_the_ends_are_judged_too(op):
    problem = Problem(op, 2, 4, 4, (24, 8), (3, 3), **PADDED)
    arm = Arm(4, DEFAULT_ALGORITHM, Role.LATER)
    right, wrong = (
        LocalBench(backend, RowAxis(problem)).look(arm, None).error
        for backend in (SmallCache(), IgnoresPadding())
    )
    assert right < 1e-6
    assert wrong > 0.1


@pytest.mark.parametrize("role", list(Role))
def test_nothing_but_the_chunks_is_left_to_time(scripted, monkeypatch, role):
    problem = Problem("wgrad", 4, 1, 1, (6, 5), (1, 1))
    backend = open_backend("torch_cpu")
    ring = Ring.allocate(scripted(), problem)
    executable = backend.executable(problem, "gemm")
    run = ChunkLoop(ring, executable, problem.with_batch(2), role).prepare(8)

    def fail(*_: object) -> None:
        raise AssertionError("worked out while the clock runs")

    monkeypatch.setattr(Ring, "places", fail)
    run()
    if role == Role.LATER:  # four times both chunks of the batch
        assert ring.samples == 4
        assert ring.total is not None
        expected = 4 * torch.einsum("nchw,nkhw->kc", ring.a, ring.b)
        torch.testing.assert_close(ring.total.view(1, 1), expected)


def test_operands_exceed_the_cache_and_hold_the_batch():
    problem = Problem("fprop", 4, 1, 1, (1 << 18,), (1,))  # 2 MiB a sample
    mib = 1 << 20
    assert ring_samples(problem, 32 * mib) == 32
    assert ring_samples(problem.with_batch(200), 32 * mib) == 200


@pytest.mark.parametrize(("reported", "mib"), [("480M", 64), ("24576K", 24), ("", 32)])
def test_a_virtual_machine_does_not_have_all_the_cache_that_it_reports(tmp_path, reported, mib):
    (tmp_path / "index3").mkdir()
    (tmp_path / "index3" / "size").write_text(reported)
    assert usable_cache_bytes(tmp_path) == mib << 20


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_operands_are_random_and_no_two_samples_alike(layout):
    # A power of two for each sample, many of which are more numbers than are drawn.
    problem = Problem("wgrad", 2, 16, 32, (64, 64), (3, 3), layout=layout)
    a, b = TorchCpuBackend().operands(problem, 40)
    assert a.shape == (40, 16, 64, 64)
    assert a.is_contiguous(memory_format=memory_format(problem))
    for tensor in (a, b):
        rows = tensor.flatten(1)
        assert len({tuple(row[:64].tolist()) for row in rows}) == 40
        assert abs(float(rows.mean())) < 0.02
        assert abs(float(rows.std()) - 1) < 0.02
    assert not torch.equal(a[0], b[0, :16])
