"""A backend with algorithms that misbehave; a worker imports it by this name."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ucudnn.backends import AbstractBackend, DeviceState, Executable, open_backend
from ucudnn.errors import UcudnnError
from ucudnn.measurement import Candidate, Conditions, Device, Software
from ucudnn.problem import Problem

_CPU = open_backend("torch_cpu")
# As a GPU after a kernel has faulted: nothing works until the process ends.
_faults: list[str] = []


class Misbehaving(Executable):
    """Torch's convolution, with something wrong."""

    def __init__(self, problem: Problem, algorithm: str) -> None:
        self._right = _CPU.executable(problem, "torch_default")
        self._algorithm = algorithm
        self._calls = 0

    def alone(self, a: Tensor, b: Tensor) -> Tensor:
        result = self._right.alone(a, b)
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


class HostileBackend(AbstractBackend):
    """Lists torch's default and whatever misbehaviour it is asked for."""

    name = "hostile"
    in_worker = True
    candidate_timeout_s = 3.0

    def __init__(self, *algorithms: str, device: str = "scripted") -> None:
        self._names = ("torch_default", *algorithms)
        self._device = device

    def device(self) -> Device:
        return Device("cpu", self._device, cores=1)

    def software(self) -> Software:
        return Software("0")

    def conditions(self) -> Conditions:
        return Conditions(threads=1)

    def refusal(self, problem: Problem, algorithm: str) -> str | None:
        del problem
        return None if algorithm in self._names else "there is none"

    def candidates(self, problem: Problem) -> tuple[Candidate, ...]:
        return tuple(Candidate(problem, name, workspace_bytes=0) for name in self._names)

    def kernel(self, problem: Problem, algorithm: str) -> str:
        del problem
        return algorithm

    def executable(self, problem: Problem, algorithm: str) -> Executable:
        return Misbehaving(problem, algorithm)

    def operands(self, problem: Problem, samples: int) -> tuple[Tensor, Tensor]:
        return _CPU.operands(problem, samples)

    def workspace_bytes(
        self, run: Callable[[], Tensor | None], parts: Iterable[tuple[Problem, str]]
    ) -> int:
        del parts
        run()
        return 0

    def elapsed_ns(self, run: Callable[[], object]) -> int:
        start = time.perf_counter_ns()
        run()
        return time.perf_counter_ns() - start

    def is_broken(self) -> bool:
        return bool(_faults)

    def state(self) -> DeviceState:
        return DeviceState(notes=("throttled=by_itself",))

    def cache_bytes(self) -> int:
        return 1 << 16

    def memory_bytes(self) -> int:
        return 1 << 30
