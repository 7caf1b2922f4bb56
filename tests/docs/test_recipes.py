"""Each recipe of docs/architecture.md, followed step by step with a toy.

A test names the steps that it follows; where a recipe says something else, the test must, too.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import laws
import pytest
import torch
from exhaustive import divide_exhaustively
from fakes import HostileBackend
from torch import Tensor

from ucudnn import Config, config
from ucudnn.backends import Cost, Executable, open_backend, registry
from ucudnn.backends.torch_cpu import backend as torch_cpu
from ucudnn.backends.torch_cpu.algorithm import AbstractAlgorithm, OpsExecutable
from ucudnn.cache import MemoryCache
from ucudnn.kernels.tune import tune_problems
from ucudnn.measurement import Measurement, MeasurementKey
from ucudnn.problem import OPS, Problem
from ucudnn.solvers import Division, divide, division
from ucudnn.solvers._base import Pool

LINES = 10
PROBLEM = Problem("fprop", 4, 2, 3, (8, 8), (3, 3), padding=((1, 1), (1, 1)))
Step = Callable[[str], None]


@pytest.fixture
def step(request: pytest.FixtureRequest, repository: Path) -> Iterator[Step]:
    """A function that takes the next step of the recipe, and fails where that does not begin so."""
    title = request.node.name.removeprefix("test_").replace("_", " ").capitalize()
    text = (repository / "docs" / "architecture.md").read_text()
    (recipe,) = re.findall(rf"^### {title}\n\n(.*?)\n(?:\n|\Z)", text, re.M | re.S)
    assert len(recipe.splitlines()) <= LINES
    steps = [" ".join(part.split()) for part in re.split(r"^\d+\. ", recipe, flags=re.M)[1:]]

    def take(words: str) -> None:
        assert steps, f"the recipe has no such step: {words}"
        assert steps[0].startswith(words)
        del steps[0]

    yield take
    assert not steps, "the recipe goes on"


def own_backend() -> HostileBackend:
    """A kind of device on which torch computes, by nothing else, in this process."""
    backend = HostileBackend()
    backend.in_worker = False
    return backend


def test_add_a_backend(
    step: Step, monkeypatch: pytest.MonkeyPatch, exact: Callable[..., Tensor]
) -> None:
    step("Subclass `AbstractBackend` in a module or folder of its own in `ucudnn/backends/`.")
    backend = own_backend()
    step("Return an `Executable` from `executable`; only its method `alone` must be written.")
    a, b = backend.operands(PROBLEM, PROBLEM.batch)
    result = backend.executable(PROBLEM, "torch_default").alone(a, b)
    step("Add its name to `Backend` of `ucudnn/config.py`, and an entry for it to `_ENTRIES` of")
    known = config.SETTINGS["backend"]
    named = known._replace(choices=(*known.choices, "hostile"))
    monkeypatch.setitem(config.SETTINGS, "backend", named)
    entry = registry.BackendEntry("hostile", "cpu", "CPU", lambda: backend)
    monkeypatch.setitem(registry.BACKENDS, "hostile", entry)
    assert open_backend("hostile") is backend
    step("Compare each candidate with float64, as `tests/backend` does.")
    torch.testing.assert_close(result.double(), exact(PROBLEM, a, b), rtol=1e-5, atol=1e-5)
    step("Tune a problem by it: `tune_problems(layers, backend=MyBackend())`.")
    plan = tune_problems([("layer", PROBLEM)], backend=backend)
    assert {chunk.algorithm for chunk in plan.split(PROBLEM).chunks} == {"torch_default"}
    assert plan.device == backend.device()
    assert tune_problems([("layer", PROBLEM)], Config(backend="hostile")).backend == "hostile"


class Tapwise(AbstractAlgorithm):
    """One matrix product for each element of the filter, where nothing is padded or strided."""

    name = "tapwise"

    def refusal(self, problem: Problem) -> str | None:
        is_plain = problem.op == "fprop" and problem.rank == 1 and problem.layout == "nchw"
        uneven = set(problem.stride) | set(problem.dilation) | {problem.groups} != {1}
        if not is_plain or uneven or any(map(sum, problem.padding)):
            return "it computes forward passes of plain 1-D filters only"
        return None

    def cost(self, problem: Problem) -> Cost:
        return Cost(problem.flops, 0, 0)

    def executable(self, problem: Problem) -> Executable:
        return TapwiseExecutable(problem)


class TapwiseExecutable(OpsExecutable):
    """The sum over the filter's elements."""

    def fprop(self, x: Tensor, w: Tensor) -> Tensor:
        (places,) = self.problem.output_size
        taps = range(self.problem.kernel_size[0])
        return sum((w[..., tap] @ x[..., tap : tap + places] for tap in taps), start=torch.zeros(1))

    def dgrad(self, dy: Tensor, w: Tensor) -> Tensor:
        del dy, w
        raise AssertionError("it is refused")

    def wgrad(self, x: Tensor, dy: Tensor) -> Tensor:
        del x, dy
        raise AssertionError("it is refused")


def test_add_an_algorithm(
    step: Step, monkeypatch: pytest.MonkeyPatch, exact: Callable[..., Tensor]
) -> None:
    step("Subclass `AbstractAlgorithm` in `ucudnn/backends/torch_cpu/`:")
    algorithm = Tapwise()
    step("Return an `OpsExecutable` from `executable`: it has a method for each of")
    assert isinstance(algorithm.executable(PROBLEM), OpsExecutable)
    step("Enter it in `ALGORITHMS` of `ucudnn/backends/torch_cpu/backend.py`.")
    monkeypatch.setitem(torch_cpu.ALGORITHMS, "tapwise", algorithm)
    step("Run `tests/backend`: it compares every candidate with float64")
    backend = open_backend("torch_cpu")
    problems = [Problem(op, 4, 2, 3, (9,), (3,)) for op in OPS]
    able = [
        problem
        for problem in problems
        if "tapwise" in [candidate.algorithm for candidate in backend.candidates(problem)]
    ]
    assert [problem.op for problem in able] == ["fprop"]
    a, b = backend.operands(able[0], 4)
    result = backend.executable(able[0], "tapwise").alone(a, b)
    torch.testing.assert_close(result.double(), exact(able[0], a, b), rtol=1e-5, atol=1e-5)


def divide_smallest(pool: Pool) -> Division:
    """Take the smallest workspace of each kernel."""
    choice = [min(range(len(front)), key=front.__getitem__) for front in pool.fronts]
    bound = sum(min(time for _, time in front) for front in pool.fronts)
    return pool.divided(choice, bound, "smallest")


def test_add_a_solver(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    step("Write a function in a module of its own in `solvers/` that takes a `Pool`,")
    step("Return `pool.divided(choice, lower_bound_ns, name)`.")
    step("Add its name to `Solver` of `ucudnn/config.py`, and the function to `_DIVIDERS` of")
    known = config.SETTINGS["solver"]
    named = known._replace(choices=(*known.choices, "smallest"))
    monkeypatch.setitem(config.SETTINGS, "solver", named)
    monkeypatch.setitem(division._DIVIDERS, "smallest", divide_smallest)
    assert Config(solver="smallest").solver == "smallest"
    step("Compare it with `divide_exhaustively` of `tests/pure/exhaustive.py` on random pools,")
    chance = random.Random(0)
    for _ in range(50):
        fronts = [
            [(chance.randrange(9), chance.randrange(1, 30)) for _ in range(3)] for _ in range(4)
        ]
        total = sum(min(front)[0] for front in fronts) + chance.randrange(12)
        found = divide(fronts, total, "smallest")
        best = divide_exhaustively(Pool(tuple(map(tuple, fronts)), total))
        assert found.solver == "smallest"
        assert found.workspace_bytes <= total
        assert found.lower_bound_ns <= best.time_ns <= found.time_ns


class Counting(MemoryCache):
    """Counts the look-ups."""

    lookups = 0

    def get(self, key: MeasurementKey) -> Measurement | None:
        self.lookups += 1
        return super().get(key)


def test_add_a_cache(step: Step) -> None:
    step("Subclass `AbstractCache` in a module of its own in `cache/`; or `MemoryCache`,")
    step("Every cache must keep the laws of `tests/cache/laws.py`: add your class to")
    for law in laws.LAWS:
        cache = Counting()
        law(lambda cache=cache: cache)
    step("Hand it to the tuner: `tune_problems(layers, measurements=MyCache())`.")
    cache = Counting()
    tune_problems([("layer", PROBLEM)], measurements=cache, backend=own_backend())
    assert cache.lookups
    assert len(cache)
