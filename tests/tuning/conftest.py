"""A backend whose clock and memory the test writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from ucudnn.backends import AbstractBackend, Activity, Executable
from ucudnn.measurement import Candidate, Conditions, Device, Software
from ucudnn.problem import Problem


class ScriptedExecutable(Executable):
    """Computes torch's convolution and charges the backend's clock and memory for it."""

    def __init__(self, backend: ScriptedBackend, problem: Problem, algorithm: str) -> None:
        self._backend = backend
        self._problem = problem
        self._algorithm = algorithm

    def alone(self, a: Tensor, b: Tensor) -> Tensor:
        del b
        size = a.shape[0]
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
        return torch.zeros(part.result_shape)

    def alone_biased(self, a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
        if self._algorithm not in self._backend.fused:
            self._backend.clock += self._backend.bias_ns * a.shape[0]
        return self.alone(a, b).add_(bias.view(-1, *[1] * (a.dim() - 2)))

    def write_biased(self, a: Tensor, b: Tensor, out: Tensor, bias: Tensor) -> None:
        out.copy_(self.alone_biased(a, b, bias))

    def add(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        self._backend.clock += self._backend.adding_ns.get(self._algorithm, 0)
        super().add(a, b, out)


class ScriptedBackend(AbstractBackend):
    """Algorithms with a cost per chunk size: name -> (size -> (time in ns, workspace in bytes))."""

    name = "scripted"

    def __init__(self, costs: dict[str, Callable[[int], tuple[int | None, int]]]) -> None:
        self.costs = costs
        self.clock = self.processor = self.switches = 0
        self.kernels: dict[tuple[str, int], str] = {}
        self.fused: set[str] = set()  # algorithms that add a bias at once
        self.bias_ns = 0  # per sample, of the others
        self.adding_ns: dict[str, int] = {}  # of an algorithm, to add a chunk to a sum
        self.disturbance: Callable[[], float] = lambda: 1.0
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

    def candidates(self, problem: Problem) -> tuple[Candidate, ...]:
        return tuple(Candidate(problem, name) for name in self.costs if name not in self.fused)

    def bias_candidates(self, problem: Problem) -> tuple[Candidate, ...]:
        return tuple(
            Candidate(problem, name, adds_bias=True) for name in self.costs if name in self.fused
        )

    def kernel(self, problem: Problem, algorithm: str) -> str:
        return self.kernels.get((algorithm, problem.batch), algorithm)

    def executable(self, problem: Problem, algorithm: str) -> Executable:
        return ScriptedExecutable(self, problem, algorithm)

    def operands(self, problem: Problem, samples: int) -> tuple[Tensor, Tensor]:
        shapes = problem.with_batch(samples).operand_shapes
        return torch.zeros(shapes[0]), torch.zeros(shapes[1])

    def workspace_bytes(
        self, run: Callable[[], Tensor | None], parts: Iterable[tuple[Problem, str]]
    ) -> int:
        del parts
        self.peak = 0
        run()
        return self.peak

    def elapsed_ns(self, run: Callable[[], object]) -> int:
        before = self.clock
        run()
        return self.clock - before

    def activity(self) -> Activity:
        return Activity(self.clock, self.processor, self.switches)

    def cache_bytes(self) -> int:
        return 1

    def memory_bytes(self) -> int:
        return 1 << 30


@pytest.fixture
def scripted(monkeypatch) -> Callable[..., ScriptedBackend]:
    """Install a scripted backend as the one that tuning opens."""

    def install(**costs: Callable[[int], tuple[int | None, int]]) -> ScriptedBackend:
        backend = ScriptedBackend(costs)
        monkeypatch.setattr("ucudnn.tuning.tuner.open_backend", lambda _: backend)
        return backend

    return install
