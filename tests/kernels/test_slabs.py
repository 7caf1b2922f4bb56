"""Tuning along the rows: where the batch is too small to be split, and nothing else fits."""

from __future__ import annotations

import copy
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch
from by_hand import chunks_of, front, least_ns
from torch import nn

import ucudnn
from ucudnn.axis import RowAxis
from ucudnn.backends import AbstractBackend, Executable, open_backend
from ucudnn.config import Config
from ucudnn.errors import PlanError, UnsupportedError
from ucudnn.execution.execute import bind
from ucudnn.kernels.tune import tune_problems
from ucudnn.plan import Chunk, Plan, Split
from ucudnn.problem import OPS, Problem
from ucudnn.slabs import row_count

MIB, MS = 1 << 20, 1_000_000
# 21 rows of y and of dx: no power of two
CONV = Problem("fprop", 2, 2, 2, (21, 3), (3, 3), padding=((1, 1), (1, 1)))


COSTS = {
    "torch_default": lambda rows: (4 * MS * rows, 8 * MIB * rows),
    "greedy": lambda rows: (MS * rows + MS // 2, 4 * MIB * rows),
    "frugal": lambda rows: (3 * MS * rows, MIB * rows),
}


class Rows:
    """A scripted backend whose algorithms cost by rows, and what of it a test may spoil."""

    def __init__(self, backend) -> None:
        self.backend, self._executable = backend, backend.executable
        self.end_bytes = 0  # what a slab with padding at one end takes in addition
        self.refused: set[tuple[str, Problem]] = set()
        self.unbuildable: set[tuple[str, Problem]] = set()
        backend.charged, backend.refusal, backend.executable = (
            self.charged,
            self.refusal,
            self.executable,
        )

    def charged(self, algorithm: str, problem: Problem) -> tuple[int, int]:
        time_ns, workspace = COSTS[algorithm](row_count(problem))
        return time_ns, workspace + self.end_bytes * (len(set(problem.padding[0])) > 1)

    def refusal(self, problem: Problem, algorithm: str) -> str | None:
        return "it is refused" if (algorithm, problem) in self.refused else None

    def executable(self, problem: Problem, algorithm: str) -> Executable:
        if (algorithm, problem) in self.unbuildable:
            raise UnsupportedError(f"{algorithm} cannot be built for {problem}")
        return self._executable(problem, algorithm)


@pytest.fixture
def rows(scripted) -> Rows:
    return Rows(scripted(**COSTS))


def tune(problem: Problem, **settings: object) -> Plan:
    return tune_problems([("layer", problem)], Config(**settings))


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("limit_mib", [70, 40, 16, 9, 4, 1])
def test_slabs_are_the_fastest_that_fit(rows, op, limit_mib):
    problem = Problem(**{**asdict(CONV), "op": op})
    plan = tune(problem, workspace_limit=limit_mib * MIB)
    (kernel,) = plan.kernels
    sizes = RowAxis(problem).sizes("powers-of-two")
    best = least_ns(front(chunks_of(COSTS, sizes), 21), limit_mib * MIB)
    undivided = [cost(21) for cost in COSTS.values()]
    fitting = [time_ns for time_ns, workspace in undivided if workspace <= limit_mib * MIB]
    expected = min(time_ns for time_ns in (best, *fitting) if time_ns is not None)
    assert kernel.timing.time_ns == expected
    assert kernel.timing.workspace_bytes <= limit_mib * MIB
    assert kernel.predicted_time_ns == expected
    assert plan.split(problem).axis == ("batch" if expected in fitting else "spatial")


def test_a_strided_gradient_is_cut_at_multiples_of_the_stride(rows):
    problem = Problem("dgrad", 1, 2, 2, (21, 3), (3, 3), stride=(2, 1))
    split = tune(problem, workspace_limit=9 * MIB).split(problem)
    assert split.axis == "spatial"
    assert split.size == 21
    assert all(chunk.size % 2 == 0 for chunk in split.chunks[:-1])


def test_rows_are_not_tried_where_the_default_fits_or_the_batch_is_large(rows):
    for problem, limit in ((CONV, None), (CONV, "1GiB"), (CONV.with_batch(9), "30MiB")):
        plan = tune(problem, workspace_limit=limit)
        assert plan.split(problem).axis == "batch"
        assert not any("spatial" in note for note in plan.kernels[0].notes)
    with pytest.raises(PlanError, match="micro-batch 2, frugal"):
        tune(CONV, workspace_limit="1MiB", policy="undivided")


def test_the_same_slabs_serve_smaller_batches_unless_another_kernel_runs_them(rows):
    plan = tune(CONV, workspace_limit="9MiB")
    assert plan.split(CONV.with_batch(1)) == plan.split(CONV)
    rows.backend.kernels["greedy", 1] = "another"
    plan = tune(CONV, workspace_limit="9MiB")
    assert plan.split(CONV).chunks[0].algorithm == "greedy"
    assert not plan.covers(CONV.with_batch(1))


@pytest.mark.parametrize("when", ["refused", "unbuildable"])
def test_what_cannot_compute_the_ends_is_left_out(rows, when):
    axis = RowAxis(CONV)
    for size in axis.sizes("all"):
        getattr(rows, when).add(("greedy", axis.ends(size)[0]))
    split = tune(CONV, workspace_limit="9MiB").split(CONV)
    assert {chunk.algorithm for chunk in split.chunks} == {"frugal"}


def test_what_computes_the_whole_but_no_slab_is_left_out(rows, monkeypatch):
    def refusal(problem, algorithm):
        return "it computes no slab" if algorithm == "greedy" else None

    monkeypatch.setattr(rows.backend, "slab_refusal", refusal)
    split = tune(CONV, workspace_limit="9MiB").split(CONV)
    assert {chunk.algorithm for chunk in split.chunks} == {"frugal"}
    assert tune(CONV, workspace_limit="90MiB").split(CONV).chunks == (Chunk(2, "greedy"),)
    with pytest.raises(UnsupportedError, match="greedy does not compute the slab .*: it computes"):
        bind(rows.backend, CONV, Split("spatial", (Chunk(10, "greedy"), Chunk(11, "frugal"))))


def test_slabs_at_the_ends_keep_the_limit_too(rows):
    rows.end_bytes = 6 * MIB
    plan = tune(CONV, workspace_limit="9MiB")
    assert {chunk.algorithm for chunk in plan.split(CONV).chunks} == {"frugal"}
    assert plan.workspace_bytes == 8 * MIB  # two rows at an end


def test_a_limit_that_no_slab_fits_names_one_that_suffices(rows):
    with pytest.raises(
        PlanError, match=r"the smallest needs 1 MiB \(slabs of 21x1 frugal"
    ) as error:
        tune(CONV, workspace_limit=MIB - 1)
    assert tune(CONV, workspace_limit=error.value.smallest_bytes).split(CONV).axis == "spatial"


def test_a_second_tune_measures_nothing(rows):
    first = tune(CONV, workspace_limit="9MiB")
    before = rows.backend.clock
    assert tune(CONV, workspace_limit="9MiB") == first
    assert rows.backend.clock == before


def smallest_undivided(backend: AbstractBackend, problem: Problem) -> int:
    """The least workspace in bytes that any algorithm takes for all of a problem."""
    a, b = backend.operands(problem, problem.batch)
    calls = [
        bind(backend, problem, Split("batch", (Chunk(problem.batch, candidate.algorithm),)))
        for candidate in backend.candidates(problem)
    ]
    return min(backend.workspace_bytes(partial(call, a, b), call.parts) for call in calls)


@pytest.mark.slow
def test_a_volume_at_batch_one_is_computed_in_slabs(tmp_path):
    """The real thing on this machine: no undivided algorithm fits, and the sums are torch's."""
    backend, kernels = open_backend("torch_cpu"), []
    sizes = ((24, 12, 8), (3, 3, 3), (1, 1, 1), ((1, 1),) * 3)
    for op in OPS:
        problem = Problem(op, 1, 16, 16, *sizes)
        limit = smallest_undivided(backend, problem) * 3 // 5
        plan = tune_problems([("conv", problem)], Config(workspace_limit=limit, cache=tmp_path))
        assert plan.split(problem).axis == "spatial"
        assert plan.kernels[0].timing.workspace_bytes <= limit
        call = bind(backend, problem, plan.split(problem))
        operands = backend.operands(problem, 1)
        assert backend.workspace_bytes(partial(call, *operands), call.parts) <= limit
        kernels += plan.kernels
    replace(plan, kernels=tuple(kernels)).save(tmp_path / "volume.plan.json")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv3d(16, 16, 3, padding=1))
    exact = copy.deepcopy(model).double()
    conversion = ucudnn.convert_(model, Plan.load(tmp_path / "volume.plan.json"))
    assert list(conversion.swapped) == ["0"]
    x = torch.randn(1, 16, 24, 12, 8)
    results = []
    for net, leaf in ((model, x.clone()), (exact, x.double())):
        leaf.requires_grad_()
        y = net(leaf)
        y.square().sum().backward()
        results.append((y.detach(), leaf.grad, net[0].weight.grad))
    for found, expected in zip(*results, strict=True):
        assert (found.double() - expected).norm() / expected.norm() < 1e-6
