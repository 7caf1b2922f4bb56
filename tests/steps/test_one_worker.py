"""One process measures all passes and layouts of a `tune`, and it ends with it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from fakes import CountedBackend
from torch import nn

import ucudnn
from ucudnn.axis import BatchAxis
from ucudnn.backends.torch_cpu.backend import TorchCpuBackend
from ucudnn.benchmark.bench import Arm
from ucudnn.benchmark.worker import Worker, WorkerBench
from ucudnn.kernels.tune import tune_problems
from ucudnn.measurement import Role
from ucudnn.problem import Problem

pytestmark = [pytest.mark.process, pytest.mark.slow]
MIB = 1 << 20
BATCH = torch.randn(8, 4, 32, 32)


@pytest.fixture
def counted(tmp_path, monkeypatch):
    backend = CountedBackend(tmp_path / "processes")
    monkeypatch.setattr("ucudnn.kernels.tune.open_backend", lambda _: backend)
    return backend


def net():
    return nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))


def is_there(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("budget", [None, "100%"])
def test_both_layouts_and_all_passes_are_measured_in_one_process(counted, monkeypatch, budget):
    passes = []

    def watched(*arguments, **options):
        passes.append(arguments)
        return tune_problems(*arguments, **options)

    monkeypatch.setattr("ucudnn.steps.tune.tune_problems", watched)
    config = ucudnn.Config(
        layout="auto", memory_budget=budget, policy="undivided", effort="quick", unplanned="torch"
    )
    ucudnn.tune(net(), BATCH, config)
    assert len(passes) >= 2
    (process,) = counted.started()
    assert not is_there(process)


def test_a_process_that_ends_between_the_layouts_is_replaced(counted, monkeypatch):
    def ended_before(*arguments, **options):
        for process in counted.started() if passes else []:
            os.kill(process, 9)
        passes.append(arguments)
        return tune_problems(*arguments, **options)

    passes = []
    monkeypatch.setattr("ucudnn.steps.tune.tune_problems", ended_before)
    config = ucudnn.Config(layout="auto", policy="undivided", effort="quick")
    plan = ucudnn.tune(net(), BATCH, config)
    assert len(passes) == len(counted.started()) == 2
    assert len(plan.kernels) == 5


@pytest.mark.parametrize(
    ("budget", "available", "is_kept"),
    [(None, 1 << 40, False), ("100%", 1 << 40, True), ("100%", 0, False)],
)
def test_no_process_takes_memory_that_steps_need(counted, monkeypatch, budget, available, is_kept):
    there = []

    def watched(judge, plan):
        there.extend(map(is_there, counted.started()))
        return plan

    monkeypatch.setattr(TorchCpuBackend, "available_bytes", lambda _: available)
    monkeypatch.setattr(CountedBackend, "available_bytes", lambda _: 1 << 40)
    monkeypatch.setattr("ucudnn.steps.tune.Judge.judge", watched)
    config = ucudnn.Config(memory_budget=budget, policy="undivided", effort="quick")
    ucudnn.tune(net(), BATCH, config)
    assert there == [is_kept]


def test_an_error_ends_the_process(counted, monkeypatch):
    def refuse(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr("ucudnn.steps.tune.Judge.judge", refuse)
    with pytest.raises(ZeroDivisionError):
        ucudnn.tune(net(), BATCH, ucudnn.Config(policy="undivided", effort="quick"))
    (process,) = counted.started()
    assert not is_there(process)


def test_operands_are_freed_between_two_sessions(counted):
    """The model's steps need the memory meanwhile."""
    problem = Problem("fprop", 64, 16, 16, (128, 128), (1, 1))  # 64 MiB of x
    arm = Arm(64, "torch_default", Role.ALONE)

    def resident_bytes():
        (process,) = counted.started()
        pages = Path(f"/proc/{process}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    with Worker() as worker:
        bench = WorkerBench(worker, counted, BatchAxis(problem))
        bench.look(arm, None)
        before = resident_bytes()
        worker.rest()
        assert resident_bytes() <= before - 60 * MIB
        # The same process goes on, by a backend that says anew how much memory it may take.
        assert bench.look(arm, None).error < 1e-6
        assert counted.log.read_text().split() == [str(*counted.started())] * 2
