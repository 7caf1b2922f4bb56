"""What every test shares: the repository's root, a clean environment, deterministic Hypothesis."""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from fakes import ScriptedBackend
    from torch import Tensor

    from ucudnn.backends import AbstractBackend
    from ucudnn.config import Config
    from ucudnn.plan import KernelPlan, Plan
    from ucudnn.problem import Problem
    from ucudnn.split import Split

# A process that a shell started in the background ignores Ctrl-C, which some tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples on every run and no time limits: a busy machine must not fail a test.
settings.register_profile(
    "ucudnn",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ucudnn")
# Other examples on every run, and many: pytest --hypothesis-profile=thorough
settings.register_profile(
    "thorough", settings(derandomize=False, print_blob=True), max_examples=2000
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """How much is tried where there is no end of cases."""
    group = parser.getgroup("ucudnn")
    group.addoption(
        "--mutations", type=int, default=60, help="of each kind of file (default: %(default)s)"
    )
    group.addoption(
        "--mutation-seed", type=int, default=0, help="another one gives other mutations"
    )
    group.addoption(
        "--complete",
        action="store_true",
        help="every case of PyTorch's operator database and every network, not a part of them",
    )


# Marks of whole folders; tests/README.md says why.
MARKS_BY_FOLDER = {
    "benchmarks": "slow",
    "conformance": "nightly",
    "cudnn": "process",
    "distributed": "process",
    "fuzz": "nightly",
    "gpu": "gpu",
    "models": "nightly",
    "simulated_gpu": "gpu",
}


# Folders of whose tests, but for slow ones, coverage counts the lines on each push.
COVERED = {"pure", "cache", "kernels"}


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of a folder."""
    tests = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(tests):
            folder = item.path.relative_to(tests).parts[0]
            # Starting ranks takes seconds; one test has a mark of its own, and runs on each push.
            starts_ranks = {"launch", "torchrun"} & set(getattr(item, "fixturenames", ()))
            if folder == "distributed" and starts_ranks and not item.get_closest_marker("process"):
                item.add_marker("nightly")
            # A nightly folder may hold a few tests for each push, marked as slow.
            is_pushed = folder == "models" and item.get_closest_marker("slow")
            if folder in MARKS_BY_FOLDER and not is_pushed:
                item.add_marker(MARKS_BY_FOLDER[folder])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Let coverage count the lines of some tests only: it makes Python several times slower."""
    is_quick = not item.get_closest_marker("slow") and item.path.parent.name in COVERED
    if is_quick or item.config.getoption("--complete"):
        return (yield)
    # The mark `no_cover` of pytest-cov has no effect in processes of pytest-xdist.
    tracer = sys.gettrace()
    sys.settrace(None)
    try:
        return (yield)
    finally:
        sys.settrace(tracer)


def pytest_report_header() -> str:
    """Say which ucudnn is under test: the checkout's or an installed one."""
    spec = find_spec("ucudnn")
    return f"ucudnn: {spec.origin if spec else 'not importable'}"


@pytest.fixture(scope="session")
def repository() -> Path:
    """The checkout's root, where README.md and the examples are."""
    return Path(__file__).parents[1]


@pytest.fixture(scope="session")
def checkout(repository: Path) -> Path:
    """The same; skips in a source distribution, where links to `solvers/` lead nowhere."""
    if not (repository / "solvers").is_dir():
        pytest.skip("a source distribution has solvers/ and cache/ inside ucudnn/ alone")
    return repository


@pytest.fixture(scope="session")
def package() -> Path:
    """The folder of the package under test."""
    spec = find_spec("ucudnn")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


Python = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def python(package: Path) -> Python:
    """A function that runs this interpreter on the package under test, until it ends well."""

    def run(
        *words: object, cwd: Path | None = None, status: int = 0, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, *map(str, words)],
            check=False,
            capture_output=True,
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(package.parent), **environment},
            text=True,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done

    return run


@pytest.fixture
def script(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A function that imports a script of these folders, which import each other by name."""
    for folder in ("examples", "docs", "benchmarks"):
        monkeypatch.syspath_prepend(str(repository / folder))
    return importlib.import_module


@pytest.fixture(scope="session", autouse=True)
def _clean_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No setting of the caller's reaches a test; nothing is written to the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("UCUDNN_")]:
            patch.delenv(name)
        patch.setenv("UCUDNN_CACHE", str(tmp_path_factory.mktemp("session-cache")))
        yield


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test starts with an empty measurement cache."""
    monkeypatch.setenv("UCUDNN_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No default time budget ends a tuning: what a test sees hangs on no clock.

    Nor does it need exact times. So samples are short, and the operands to be measured on are not
    larger than the processor's cache.
    """
    from ucudnn.benchmark import protocol
    from ucudnn.kernels.deadline import EFFORTS

    for name, one in EFFORTS.items():
        chunks, wholes = (replace(how, sample_ns=200_000) for how in (one.chunks, one.wholes))
        patient = replace(
            one, least_budget_s=3600.0, most_budget_s=3600.0, chunks=chunks, wholes=wholes
        )
        monkeypatch.setitem(EFFORTS, name, patient)
    samples = protocol.ring_samples
    monkeypatch.setattr(protocol, "ring_samples", lambda one, cache: samples(one, cache >> 7))


@pytest.fixture(scope="module", autouse=True)
def _small_heap() -> None:
    """What was imported is left out when the collector, or a search for tensors, goes through all.

    A process that has run many tests has a heap many times as large as that of a user.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test sees hangs on nobody else's load."""
    from ucudnn.backends.torch_cpu.processor import LoadMeter

    monkeypatch.setattr(LoadMeter, "others", lambda _: 0.0)


@pytest.fixture
def in_child() -> Callable[[Callable[[], object]], None]:
    """A function that does something in a forked child, which is killed where it hangs."""
    return _in_child


def _in_child(work: Callable[[], object]) -> None:
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        try:
            work()
        except BaseException:  # noqa: BLE001 - pytest's own failures too, which are none
            os.write(2, traceback.format_exc().encode())
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status != signal.SIGALRM, "the child hangs"
    assert status == 0, "see what the child wrote"


@pytest.fixture(scope="session")
def random_plan() -> Callable[..., Plan]:
    """Makes a plan of a model by chance alone: any splits, any algorithms, nothing measured."""
    return _random_plan


def _random_plan(
    model: Any, inputs: Any, chance: random.Random, config: Config | None = None
) -> Plan:
    # here, because most tests need no framework
    from ucudnn.backends import open_backend
    from ucudnn.config import Config
    from ucudnn.plan import Plan
    from ucudnn.steps.tracing import trace_layers

    names: dict[Problem, list[str]] = {}
    for name, problem in trace_layers(model, inputs).layers:
        names.setdefault(problem, []).append(name)
    backend = open_backend("torch_cpu")
    return Plan(
        kernels=tuple(
            _random_kernel(backend, problem, tuple(layers), chance)
            for problem, layers in names.items()
        ),
        device=backend.device(),
        software=backend.software(),
        conditions=backend.conditions(),
        config=config or Config(unplanned="error"),
        backend="torch_cpu",
    )


def _random_kernel(
    backend: AbstractBackend, problem: Problem, layers: tuple[str, ...], chance: random.Random
) -> KernelPlan:
    from ucudnn.backends.torch_cpu.backend import ALGORITHMS
    from ucudnn.plan import BY_BATCH, BY_SLABS, KernelPlan, Timing

    timing = Timing(time_ns=1, spread_ns=0, workspace_bytes=0, samples=1)
    # the plan may be for a larger batch than the one that runs
    planned = problem.with_batch(problem.batch + chance.choice([0, 0, 1, 3]))
    batches = range(1, planned.batch + 1)
    algorithms = tuple(
        name
        for name in ALGORITHMS
        if all(backend.refusal(problem.with_batch(n), name) is None for n in batches)
    )
    slabs = _random_slabs(backend, planned, algorithms, chance)
    ways = [BY_BATCH, BY_BATCH, BY_SLABS if slabs else BY_BATCH]
    alone, last = [], []
    for batch in batches:
        alone.append(chance.choice([*ways, chance.randrange(len(algorithms))]))
        last.append((chance.randrange(batch) + 1, chance.randrange(len(algorithms))))
    return KernelPlan(
        problem=planned,
        layers=layers,
        algorithms=algorithms,
        alone=tuple(alone),
        last=tuple(last),
        predicted_time_ns=1,
        timing=timing,
        default=timing,
        slabs=slabs,
    )


def _random_slabs(
    backend: AbstractBackend, planned: Problem, algorithms: Sequence[str], chance: random.Random
) -> tuple[tuple[int, int], ...]:
    """Any partition of the rows, each slab by an algorithm that computes it at every batch."""
    from ucudnn.slabs import row_count, slab

    slabs, begin = [], 0
    while begin < row_count(planned):
        end = begin + 1 + chance.randrange(row_count(planned) - begin)
        part = slab(planned, begin, end).problem
        able = [
            index
            for index, name in enumerate(algorithms)
            if part is None
            or all(
                backend.slab_refusal(part.with_batch(n), name) is None
                for n in range(1, planned.batch + 1)
            )
        ]
        if not able:
            return ()
        slabs.append((end - begin, chance.choice(able)))
        begin = end
    return tuple(slabs)


@pytest.fixture(scope="session")
def forced() -> Callable[[str, str], AbstractContextManager[Counter[str]]]:
    """A function in whose context every convolution is divided and computed as told.

    Its arguments are a division ("whole", "single samples", "uneven batches", "single rows",
    "uneven rows") and an algorithm, or "mixed" for any. Where the algorithm refuses a part, torch's
    own computes that. The context's value counts the axes and algorithms of what was planned.
    """
    return _forced


@contextmanager
def _forced(division: str, algorithm: str) -> Iterator[Counter[str]]:
    import ucudnn
    from ucudnn.backends import open_backend
    from ucudnn.config import Config
    from ucudnn.plan import Plan

    backend, used = open_backend("torch_cpu"), Counter()

    def split(_: Plan, problem: Problem) -> Split:
        chosen = _forced_split(backend, problem, division, algorithm)
        used.update([chosen.axis, *(chunk.algorithm for chunk in chosen.chunks)])
        return chosen

    plan = Plan((), backend.device(), backend.software(), backend.conditions(), Config())
    with pytest.MonkeyPatch.context() as patch, ucudnn.installed(plan) as installation:
        patch.setattr(Plan, "covers", lambda *_: True)
        patch.setattr(Plan, "split", split)
        patch.setattr(installation.runner, "filter_shapes", [mock.ANY])
        yield used


def _forced_split(
    backend: AbstractBackend, problem: Problem, division: str, algorithm: str
) -> Split:
    from ucudnn.backends.torch_cpu.backend import ALGORITHMS
    from ucudnn.slabs import row_count, slabs
    from ucudnn.split import DEFAULT_ALGORITHM, Chunk, Split

    chance = random.Random(f"{problem!r} {division} {algorithm}")
    is_rows = division.endswith("rows")
    extent = row_count(problem) if is_rows else problem.batch
    sizes = _sizes(extent, division.split(maxsplit=1)[0])
    if is_rows:
        parts = [slab.problem for slab in slabs(problem, sizes)]
        refusal = backend.slab_refusal
    else:
        parts = [problem.with_batch(size) for size in sizes]
        refusal = backend.refusal
    chunks = []
    for size, part in zip(sizes, parts, strict=True):
        wanted = ALGORITHMS if algorithm == "mixed" else (algorithm,)
        able = [name for name in wanted if part is None or refusal(part, name) is None]
        if not able and refusal(part, DEFAULT_ALGORITHM) is not None:
            return Split.default(problem.batch)
        chunks.append(Chunk(size, chance.choice(able or [DEFAULT_ALGORITHM])))
    return Split("spatial" if is_rows else "batch", tuple(chunks))


def _sizes(extent: int, division: str) -> list[int]:
    """Sizes that add up to an extent."""
    if division == "whole":
        return [extent]
    if division == "single":
        return [1] * extent
    sizes: list[int] = []
    while extent:
        sizes.append(min(extent, 3 if len(sizes) % 2 else 2))
        extent -= sizes[-1]
    return sizes


@pytest.fixture(scope="session")
def exact() -> Callable[[Problem, Tensor, Tensor], Tensor]:
    """The result in float64 on the CPU, by torch's functional convolution and its autograd."""
    return _exact


def _exact(problem: Problem, a: Tensor, b: Tensor) -> Tensor:
    import torch

    a, b = a.double().cpu(), b.double().cpu()
    function = (torch.conv1d, torch.conv2d, torch.conv3d)[problem.rank - 1]

    def forward(x: Tensor, w: Tensor) -> Tensor:
        padding = [amount for pair in reversed(problem.padding) for amount in pair]
        padded = torch.nn.functional.pad(x, padding)
        return function(padded, w, None, problem.stride, 0, problem.dilation, problem.groups)

    if problem.op == "fprop":
        return forward(a, b)
    if problem.op == "dgrad":
        x = torch.zeros(problem.x_shape, dtype=torch.float64, requires_grad=True)
        return torch.autograd.grad(forward(x, b), x, a)[0]
    w = torch.zeros(problem.w_shape, dtype=torch.float64, requires_grad=True)
    return torch.autograd.grad(forward(a, w), w, b)[0]


@pytest.fixture(scope="session")
def counting_malloc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A malloc that counts live bytes, to be loaded by LD_PRELOAD."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to build the counting malloc")
    library = tmp_path_factory.mktemp("malloc") / "counting_malloc.so"
    source = Path(__file__).parent / "backend" / "counting_malloc.c"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


@pytest.fixture(scope="session")
def under_malloc(python: Python, counting_malloc: Path) -> Callable[..., list[Any]]:
    """A function that runs a script under the counting malloc, whose path the script is told first.

    It returns what the script's lines of JSON say.
    """

    def run(script: Path, *words: object, **environment: str) -> list[Any]:
        # On a busy machine spinning threads only cost time.
        special = {"LD_PRELOAD": str(counting_malloc), "OMP_WAIT_POLICY": "passive", **environment}
        output = python(script, counting_malloc, *words, **special).stdout
        return [json.loads(line) for line in output.splitlines()]

    return run


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For tiny tensors: on a busy machine a team of threads waits for its last."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ScriptedBackend]:
    """Install a backend, whose clock and memory the test writes, as the one that tuning opens."""
    from fakes import ScriptedBackend

    def install(**costs: Callable[[int], tuple[int | None, int]]) -> ScriptedBackend:
        backend = ScriptedBackend(costs)
        monkeypatch.setattr("ucudnn.kernels.tune.open_backend", lambda _: backend)
        return backend

    return install
