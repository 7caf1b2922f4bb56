"""Too little memory is a fact about a way to compute: tuning goes on, and measures what fits."""

from __future__ import annotations

import re
import resource
import warnings

import pytest

from ucudnn.benchmark.failures import CandidateError, is_out_of_memory
from ucudnn.cache import MemoryCache
from ucudnn.config import Config
from ucudnn.errors import PlanError, UntunedWarning
from ucudnn.kernels.tune import tune_problems
from ucudnn.measurement import FailureKind, Subject
from ucudnn.problem import Problem

MIB = 1 << 20
MS = 1_000_000
FPROP = Problem("fprop", 16, 2, 2, (4, 4), (1, 1))
SMALL = Problem("fprop", 4, 2, 2, (4, 4), (1, 1))
limited = pytest.mark.skipif(not hasattr(resource, "RLIMIT_AS"), reason="no limits of a process")


@pytest.fixture(autouse=True)
def _given_back(monkeypatch):
    """Large blocks that a process has freed take no addresses, of which RLIMIT_AS is a limit."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "131072")


# Defines `limit`, which lets the process take so many more MiB of addresses.
LIMIT = """
import os, re, resource, sys
from pathlib import Path
import torch
from torch.nn.functional import conv2d
from ucudnn.benchmark.failures import free_after, is_out_of_memory

torch.set_num_threads(1)  # a second thread would reserve addresses of its own

def limit(more):
    size = re.search(r"VmSize:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]
    resource.setrlimit(resource.RLIMIT_AS, ((int(size) << 10) + int(more * 2**20),) * 2)
"""

RUNS = (
    LIMIT
    + """
def grown(a):
    a.requires_grad_()
    (a * a).sum().backward()

def computed(a):  # no page for the code that oneDNN writes, but for its objects: it never asks
    room, above = [bytes(1 << 16) for _ in range(16)], bytes(1 << 16)
    limit(0)
    del room
    conv2d(a.view(-1, 32, 64, 64), torch.ones(32, 32, 3, 3))

runs = {
    "convolution": lambda a: conv2d(a.view(-1, 32, 64, 64), torch.ones(32, 32, 3, 3)),
    "code": computed,
    "product": lambda a: a.view(4096, -1) @ a.view(-1, 4096),
    "transform": lambda a: torch.fft.rfft2(a.view(-1, 64, 64)),
    "backward": grown,
    "list": lambda a: [0] * (1 << 26),
    "numpy": lambda a: a.numpy() + 1,
}
a = torch.ones(1 << 22)
conv2d(torch.ones(1, 4, 9, 9), torch.ones(4, 4, 3, 3))
for name, run in runs.items():
    child = os.fork()
    if not child:
        limit(4)
        try:
            run(a)
        except (RuntimeError, MemoryError) as error:
            print(name, is_out_of_memory(error), type(error).__name__, error, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
)


@pytest.mark.process
@limited
def test_errors_for_lack_of_memory_are_known(python):
    said = python("-c", RUNS).stdout
    names = ["convolution", "code", "product", "transform", "backward", "list", "numpy"]
    assert re.findall(r"^(\w+) True ", said, re.M) == names, said


FREED = (
    LIMIT
    + """
def step(count):
    blocks = [torch.ones(MIB) for _ in range(count)]
    kept = blocks, lambda: kept  # only the collector frees a cycle
    def last():
        mine = torch.ones(MIB)
        return [mine, *(torch.ones(MIB) for _ in range(count))]
    return len(blocks) + len(last())

MIB = 1 << 18  # of four bytes each
limit(200)
failed = []
try:
    step(160)
except RuntimeError as error:
    assert is_out_of_memory(error)
    failed.append(error)  # as a caller may that tells of it later
    free_after(error)
print(step(80))
"""
)


@pytest.mark.process
@limited
def test_after_a_failed_step_a_smaller_one_fits(python):
    assert python("-c", FREED).stdout == "161\n"
    kept = FREED.replace("    free_after(error)\n", "")
    assert "can't allocate memory" in python("-c", kept, status=1).stderr


def test_texts_that_have_other_causes_are_no_lack_of_memory(monkeypatch):
    error = RuntimeError("could not create a primitive descriptor for this operation")
    for was_short in (False, True):
        monkeypatch.setattr(
            "ucudnn.benchmark.failures.was_short_of_memory", lambda was_short=was_short: was_short
        )
        assert is_out_of_memory(error) == was_short
        assert not is_out_of_memory(RuntimeError("no such kernel"))
    assert is_out_of_memory(OSError(12, "Cannot allocate memory"))
    assert not is_out_of_memory(OSError(2, "no such file"))
    assert is_out_of_memory(CandidateError("too large", FailureKind.OUT_OF_MEMORY))


TUNED = (
    LIMIT
    + """
from ucudnn.cache import MemoryCache
from ucudnn.config import Config
from ucudnn.kernels.tune import tune_problems
from ucudnn.measurement import Subject
from ucudnn.problem import Problem
op, more = sys.argv[1:]
problem = Problem(op, 64, 16, 16, (128, 128), (3, 3), padding=((1, 1), (1, 1)))
other = Problem(op, 2, 4, 4, (9, 9), (3, 3))
config = Config(effort="quick", time_budget_s=8)
tune_problems([("other", other)], config, measurements=MemoryCache())
limit(float(more))
cache = MemoryCache()
plan = tune_problems([("layer", problem), ("other", other)], config, measurements=cache)
assert [kernel.problem for kernel in plan.kernels] == [problem, other], plan
kernel = plan.kernels[0]
keys = [entry.key for entry in cache if entry.time_ns]
sizes = {key.problem.batch for key in keys if key.problem.with_batch(64) == problem}
raced = any(key.subject == Subject.CALL and key.problem == problem for key in keys)
print(max(sizes), raced, kernel.timing.samples, kernel.default)
"""
)


@pytest.mark.process
@limited
@pytest.mark.parametrize(
    "op", [*(pytest.param(op, marks=pytest.mark.nightly) for op in ("fprop", "dgrad")), "wgrad"]
)
def test_chunks_that_fit_are_timed_where_the_whole_does_not(python, op):
    """Operands and result of the whole take 128 MiB, and half of what is free is for them."""
    done = python("-W", "ignore", "-c", TUNED, op, 160)
    largest, raced, samples, default = done.stdout.split()
    assert 4 <= int(largest) <= 32
    assert (raced, samples, default) == ("False", "0", "None")


@pytest.mark.slow
def test_a_ring_of_fewer_samples_serves_smaller_chunks(scripted, monkeypatch):
    backend = scripted(torch_default=lambda size: (size * MS, 0))
    operands, asked = backend.operands, []

    def limited_operands(problem, samples):
        asked.append(samples)
        if samples > 4:
            raise MemoryError
        return operands(problem, samples)

    monkeypatch.setattr(backend, "operands", limited_operands)
    measurements = MemoryCache()
    plan = tune_problems([("layer", FPROP)], Config(), measurements=measurements)
    assert asked[:3] == [16, 8, 4]
    (kernel,) = plan.kernels
    assert kernel.default is None
    assert (kernel.timing.samples, kernel.timing.time_ns) == (0, 16 * MS)
    assert max(entry.key.problem.batch for entry in measurements) == 4
    assert all(entry.key.subject == Subject.CHUNK for entry in measurements)


@pytest.mark.slow
def test_a_kernel_that_nothing_fits_is_left_to_torch(scripted, monkeypatch):
    backend = scripted(torch_default=lambda size: (size * MS, 0))
    operands = backend.operands

    def limited_operands(problem, samples):
        if problem.in_channels > 2:
            raise RuntimeError("CUDA out of memory")
        return operands(problem, samples)

    monkeypatch.setattr(backend, "operands", limited_operands)
    wide = Problem("fprop", 4, 3, 2, (4, 4), (1, 1))
    with pytest.warns(UntunedWarning, match="1 of 2 kernels .* there was too little memory"):
        plan = tune_problems([("wide", wide), ("layer", SMALL)], Config())
    assert [kernel.problem for kernel in plan.kernels] == [SMALL]
    assert plan.left_out == (str(wide),)
    with pytest.raises(PlanError, match="there was too little memory"):
        tune_problems([("wide", wide), ("layer", SMALL)], Config(unplanned="error"))


@pytest.mark.slow
def test_memory_for_operands_is_not_looked_for_by_each_candidate(scripted, monkeypatch):
    """They would all fail as the first did, each after as long a search."""
    backend = scripted(
        torch_default=lambda size: (size * MS, 0),
        **{f"engine{number}": lambda size: (size * MS, 0) for number in range(3)},
    )
    asked, operands = list[int](), backend.operands

    def limited_operands(problem, samples):
        if problem.in_channels > 2:
            asked.append(samples)
            raise RuntimeError("CUDA out of memory")
        return operands(problem, samples)

    monkeypatch.setattr(backend, "operands", limited_operands)
    wide = Problem("fprop", 4, 3, 2, (4, 4), (1, 1))
    with pytest.warns(UntunedWarning, match=r"too little memory \(CUDA out of memory\)"):
        tune_problems([("wide", wide), ("layer", SMALL)], Config(effort="thorough"))
    # Once to look at the candidates, and once to race them.
    assert asked == [4, 2, 1] * 2


def test_tuning_ends_where_trials_lack_memory(scripted):
    """A trial is small, and is not run again and again."""
    scripted(torch_default=lambda size: (size * MS, 0), hungry=_hungry)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = tune_problems([("layer", FPROP)], Config(workspace_limit=MIB))
    assert plan.kernels[0].is_default


def _hungry(size):
    raise MemoryError(size)
