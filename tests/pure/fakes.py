"""Backends of tests: one has a clock and a memory that the test writes, one misbehaves.

A worker imports this module by its name.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from ucudnn.backends import (
    AbstractBackend,
    Activity,
    DeviceState,
    Executable,
    add_bias,
    open_backend,
)
from ucudnn.backends.torch_cpu.backend import TorchCpuBackend
from ucudnn.errors import UcudnnError
from ucudnn.measurement import Candidate, Conditions, Device, Software
from ucudnn.problem import Problem

_CPU = open_backend("torch_cpu")
# As a GPU after a kernel has faulted: nothing works until the process ends.
_faults: list[str] = []


class ScriptedExecutable(Executable):
    """Computes torch's convolution and charges the backend's clock and memory for it."""

    def __init__(self, backend: ScriptedBackend, problem: Problem, algorithm: str) -> None:
        self._backend = backend
        self._problem = problem
        self._algorithm = algorithm

    def alone(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        del b
        size = a.shape[0]
        if bias is not None and self._algorithm not in self._backend.fused:
            self._backend.clock += self._backend.bias_ns * size
        part = self._problem.with_batch(size)
        time_ns, workspace = self._backend.charged(self._algorithm, part)
        self._backend.runs.append((self._algorithm, size))
        if time_ns is None:
            raise RuntimeError(f"{self._algorithm} does not work\nand says so at length")
        slowdown = self._backend.disturbance()
        self._backend.clock += max(1, int(time_ns * slowdown))
        self._backend.processor += time_ns
        self._backend.switches += slowdown > 1
        self._backend.peak = max(self._backend.peak, workspace)
        return add_bias(torch.zeros(part.result_shape), bias)

    def add(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        self._backend.clock += self._backend.adding_ns.get(self._algorithm, 0)
        super().add(a, b, out)


class ScriptedBackend(AbstractBackend):
    """Algorithms with a cost per chunk size: name -> (size -> (time in ns, workspace in bytes))."""

    name = "scripted"
    disturbance: Callable[[], float] = staticmethod(lambda: 1.0)
    # What a call takes beside its chunks, by their sizes; of the class, as backends are pickled.
    beside_bytes: Callable[[list[int]], int] = staticmethod(lambda _: 0)

    def __init__(self, costs: dict[str, Callable[[int], tuple[int | None, int]]]) -> None:
        self.costs = costs
        self.clock = self.processor = self.switches = 0
        self.kernels: dict[tuple[str, int], str] = {}
        self.fused: set[str] = set()  # algorithms that add a bias at once
        self.bias_ns = 0  # per sample, of the others
        self.adding_ns: dict[str, int] = {}  # of an algorithm, to add a chunk to a sum
        self.peak = 0
        self.runs: list[tuple[str, int]] = []

    def charged(self, algorithm: str, problem: Problem) -> tuple[int | None, int]:
        """Time and workspace of a chunk; a test may put another function in its place."""
        return self.costs[algorithm](problem.batch)

    def device(self) -> Device:
        return Device("cpu", "scripted", cores=1)

    def software(self) -> Software:
        return Software("0")

    def conditions(self) -> Conditions:
        return Conditions(threads=1)

    def refusal(self, problem: Problem, algorithm: str) -> str | None:
        del problem
        return None if algorithm in self.costs else "there is none"

    def candidates(self, problem: Problem, adds_bias: bool = False) -> tuple[Candidate, ...]:
        return tuple(
            Candidate(problem, name, adds_bias=adds_bias)
            for name in self.costs
            if (name in self.fused) == adds_bias
        )

    def implementation_of(self, problem: Problem, algorithm: str) -> str:
        return self.kernels.get((algorithm, problem.batch), algorithm)

    def executable(self, problem: Problem, algorithm: str) -> Executable:
        return ScriptedExecutable(self, problem, algorithm)

    def operands(self, problem: Problem, samples: int) -> tuple[Tensor, Tensor]:
        shapes = problem.with_batch(samples).operand_shapes
        return torch.zeros(shapes[0]), torch.zeros(shapes[1])

    def workspace_bytes(
        self, run: Callable[[], Tensor | None], parts: Iterable[tuple[Problem, str]]
    ) -> int:
        self.peak = 0
        run()
        return self.peak + self.beside_bytes([problem.batch for problem, _ in parts])

    def elapsed_ns(self, run: Callable[[], object]) -> int:
        before = self.clock
        run()
        return self.clock - before

    def activity(self) -> Activity:
        return Activity(self.clock, self.processor, self.switches)

    def cache_bytes(self) -> int:
        return 1

    def available_bytes(self) -> int:
        return 2 << 30


class Misbehaving(Executable):
    """Torch's convolution, with something wrong."""

    def __init__(self, problem: Problem, algorithm: str) -> None:
        self._right = _CPU.executable(problem, "torch_default")
        self._algorithm = algorithm
        self._calls = 0

    def alone(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        result = self._right.alone(a, b, bias)
        self._calls += 1
        self._end_or_raise()
        if self._algorithm == "wrong":
            return result * 1.01
        if self._algorithm == "half":
            part = torch.empty_like(result)
            half = result.shape[-1] // 2
            part[..., :half] = result[..., :half]
            return part
        return result

    def _end_or_raise(self) -> None:
        is_late = self._calls > 3
        if self._algorithm == "raises":
            raise RuntimeError("this never works\nat length")
        if self._algorithm == "hungry":
            torch.empty(1 << 60)
        if self._algorithm == "forgetful":
            raise RuntimeError("could not create a memory object")
        if self._algorithm == "tires" and is_late:
            raise RuntimeError("once too often")
        if self._algorithm == "hangs":
            time.sleep(1000)
        if self._algorithm == "kills" or (self._algorithm == "kills_later" and is_late):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._algorithm == "exits":
            os._exit(7)
        self._fault(is_late)

    def _fault(self, is_late: bool) -> None:
        if self._algorithm == "faults" or (self._algorithm == "faults_later" and is_late):
            _faults.append(self._algorithm)
        if self._algorithm == "faults_in_cudnn":
            _faults.append(self._algorithm)
            raise UcudnnError("cuDNN could not execute: an illegal memory access")
        if _faults:
            raise RuntimeError("an illegal memory access was encountered")


class CountedBackend(TorchCpuBackend):
    """The CPU, measured in a worker; whenever it gets to a process, that adds its id to a file."""

    in_worker = True
    candidate_timeout_s = 60.0

    def __init__(self, log: Path) -> None:
        super().__init__()
        self.log = log

    def __reduce__(self) -> tuple[Callable[[Path], CountedBackend], tuple[Path]]:
        return _received, (self.log,)

    def started(self) -> list[int]:
        """The ids of the processes, each once."""
        return list(dict.fromkeys(map(int, self.log.read_text().split())))


def _received(log: Path) -> CountedBackend:
    with log.open("a") as file:
        print(os.getpid(), file=file)
    return CountedBackend(log)


class HostileBackend(ScriptedBackend):
    """Lists torch's default and whatever misbehaviour it is asked for."""

    name = "hostile"
    in_worker = True
    candidate_timeout_s = 3.0

    def __init__(self, *algorithms: str) -> None:
        super().__init__(dict.fromkeys(("torch_default", *algorithms)))

    def executable(self, problem: Problem, algorithm: str) -> Executable:
        return Misbehaving(problem, algorithm)

    def operands(self, problem: Problem, samples: int) -> tuple[Tensor, Tensor]:
        return _CPU.operands(problem, samples)

    def elapsed_ns(self, run: Callable[[], object]) -> int:
        start = time.perf_counter_ns()
        run()
        return time.perf_counter_ns() - start

    def activity(self) -> None:
        return None

    def is_broken(self) -> bool:
        return bool(_faults)

    def state(self) -> DeviceState:
        return DeviceState(notes=("throttled=by_itself",))

    def cache_bytes(self) -> int:
        return 1 << 16
