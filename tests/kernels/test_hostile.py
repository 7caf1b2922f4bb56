"""Candidates that are wrong, write half, hang or kill: each is named, and the rest goes on."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace

import pytest
from fakes import HostileBackend

from ucudnn import cache as caches
from ucudnn.axis import BatchAxis
from ucudnn.benchmark.bench import Arm
from ucudnn.benchmark.worker import Worker, WorkerBench
from ucudnn.config import Config
from ucudnn.errors import UcudnnError, WrongResultWarning
from ucudnn.kernels.tune import tune_problems
from ucudnn.measurement import FailureKind, Role
from ucudnn.problem import Problem

CONFIG = {"policy": "undivided", "backend": "torch_cpu"}
FPROP = Problem("fprop", 4, 3, 5, (12, 12), (3, 3), padding=((1, 1), (1, 1)))


def failures() -> dict[str, tuple[str, FailureKind | None]]:
    """What the cache has of failed candidates: reasons and kinds, by algorithm."""
    with caches.open(mode="r") as cache:
        failed = [entry for entry in cache if entry.status == "failed"]
    return {entry.key.algorithm: (entry.reason, entry.failure) for entry in failed}


@pytest.mark.parametrize(
    ("op", "policy"), [("fprop", "undivided"), ("dgrad", "undivided"), ("wgrad", "powers-of-two")]
)
def test_wrong_results_disqualify_loudly(op, policy):
    backend = HostileBackend("wrong", "half")
    backend.in_worker = False
    problem = replace(FPROP, op=op)
    with pytest.warns(WrongResultWarning, match="disqualified") as caught:
        plan = tune_problems([("layer", problem)], Config(policy=policy), backend=backend)
    assert {chunk.algorithm for chunk in plan.split(problem).chunks} == {"torch_default"}
    said = " ".join(str(warning.message) for warning in caught)
    assert "wrong is disqualified for" in said
    assert "half is disqualified for" in said
    found = failures()
    assert set(found) == {"wrong", "half"}
    assert "is wrong by 0.01 relative to float64" in found["wrong"][0]
    assert "unwritten" in found["half"][0]
    assert {kind for _, kind in found.values()} == {FailureKind.WRONG}


@pytest.mark.process
def test_one_that_hangs_and_some_that_end_the_process_are_failed_and_the_rest_goes_on():
    backend = HostileBackend("hangs", "kills", "exits", "raises", "right")
    plan = tune_problems([("layer", FPROP)], Config(**CONFIG), backend=backend)
    assert plan.split(FPROP).size == 4
    assert failures() == {
        "hangs": ("it did not end within 3 s", FailureKind.HANG),
        "kills": ("it ended its process by SIGKILL", FailureKind.CRASH),
        "exits": ("it ended its process with exit status 7", FailureKind.CRASH),
        "raises": ("this never works", FailureKind.ERROR),
    }
    with caches.open(mode="r") as cache:
        timed = {entry.key.algorithm for entry in cache if entry.time_ns is not None}
    assert {"torch_default", "right"} <= timed


@pytest.mark.process
def test_a_fault_that_spoils_the_device_ends_its_process_and_blames_nobody_else():
    """As on a GPU, where CUDA refuses everything after a kernel has faulted."""
    faulty = {"faults", "faults_in_cudnn", "faults_later"}
    backend = HostileBackend("fine", *faulty, "good")
    tune_problems([("layer", FPROP)], Config(**CONFIG), backend=backend)
    found = failures()
    assert set(found) == faulty
    assert {kind for _, kind in found.values()} == {FailureKind.CRASH}
    assert all("illegal memory access" in reason for reason, _ in found.values())


def test_the_state_of_the_device_is_kept_with_the_times():
    backend = HostileBackend("fine")
    backend.in_worker = False
    tune_problems([("layer", FPROP)], Config(**CONFIG), backend=backend)
    with caches.open(mode="r") as cache:
        timed = [entry for entry in cache if entry.status == "ok"]
    assert timed
    assert all("throttled=by_itself" in entry.notes for entry in timed)


@pytest.mark.process
@pytest.mark.parametrize("in_worker", [True, False])
def test_a_lack_of_memory_alone_is_not_remembered(in_worker):
    """Also of an error that mentions memory and came from another process."""
    backend = HostileBackend("hungry", "forgetful")
    backend.in_worker = in_worker
    tune_problems([("layer", FPROP)], Config(**CONFIG), backend=backend)
    assert failures() == {"forgetful": ("could not create a memory object", FailureKind.ERROR)}


@pytest.mark.process
def test_one_that_fails_between_rounds_is_failed_and_the_others_are_timed():
    backend = HostileBackend("kills_later", "tires", "right")
    tune_problems([("layer", FPROP)], Config(**CONFIG), backend=backend)
    assert failures() == {
        "kills_later": ("it ended its process by SIGKILL", FailureKind.CRASH),
        "tires": ("once too often", FailureKind.ERROR),
    }


@pytest.mark.process
def test_a_second_tune_starts_no_process(monkeypatch):
    backend = HostileBackend("kills", "right")
    first = tune_problems([("layer", FPROP)], Config(**CONFIG), backend=backend)

    def refuse(*_, **__):
        raise AssertionError("a process was started")

    monkeypatch.setattr("ucudnn.benchmark.worker.subprocess.Popen", refuse)
    assert tune_problems([("layer", FPROP)], Config(**CONFIG), backend=backend) == first


@pytest.mark.process
def test_a_process_that_ends_between_two_questions_is_no_candidates_fault():
    arm = Arm(4, "torch_default", Role.ALONE)
    with Worker() as worker:
        bench = WorkerBench(worker, HostileBackend(), BatchAxis(FPROP))
        assert bench.look(arm, None).error < 1e-6
        first_s = worker.started_s
        worker._child.kill()
        worker._child.wait()
        assert bench.look(arm, None).error < 1e-6
        assert worker.started_s > first_s > 0


@pytest.mark.process
@pytest.mark.parametrize("ending", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_request_is_not_answered_later(ending, monkeypatch):
    def end(*_):
        raise ending

    before = signal.signal(signal.SIGTERM, end)
    monkeypatch.setattr("ucudnn.benchmark.worker._START_S", 5.0)
    backend = HostileBackend("hangs")
    backend.candidate_timeout_s = 5.0
    default, hangs = (Arm(4, name, Role.ALONE) for name in ("torch_default", "hangs"))
    with Worker() as worker:
        bench = WorkerBench(worker, backend, BatchAxis(FPROP))
        bench.look(default, None)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        try:
            with pytest.raises(ending):
                bench.look(hangs, None)
        finally:
            signal.signal(signal.SIGTERM, before)
        worker.rest()
        assert bench.look(default, None).error < 1e-6


def test_a_worker_that_cannot_start_says_so(monkeypatch):
    monkeypatch.setattr("ucudnn.benchmark.worker._PROGRAM", "import sys; sys.exit(5)")
    backend = HostileBackend()
    with pytest.raises(UcudnnError, match="could not start: it ended .* exit status 5"):
        tune_problems([("layer", FPROP)], Config(**CONFIG), backend=backend)
