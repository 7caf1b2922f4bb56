"""From a model to a plan: problems, candidates, measurements through the cache, solver, finals."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ucudnn import cache as cache_room
from ucudnn.backends import AbstractBackend, open_backend
from ucudnn.benchmark.finals import choose, race
from ucudnn.benchmark.kernel import KernelMeasurer, Session
from ucudnn.config import Config
from ucudnn.errors import ConfigError, PlanError
from ucudnn.measurement import Measurement
from ucudnn.plan import DEFAULT_ALGORITHM, KernelPlan, Plan
from ucudnn.problem import Problem
from ucudnn.solve import KernelOf, smallest_workspace, solve
from ucudnn.units import format_bytes

if TYPE_CHECKING:
    from torch import nn

_log = logging.getLogger("ucudnn")
# Threads that measure would time each other, and torch has one profiler per process.
_measuring = threading.RLock()


@dataclass(frozen=True, slots=True)
class Progress:
    """How far tuning is.

    Args:
        kernel: the kernel at work.
        done: kernels finished.
        total: kernels in all.
        measured: candidates timed so far.
        reused: candidates found in the cache so far.
    """

    kernel: str
    done: int
    total: int
    measured: int
    reused: int


def tune(
    model: nn.Module,
    example_inputs: Any,
    config: Config | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Plan:
    """Measure the convolutions of a model's training step and plan each; the model is unchanged.

    >>> import tempfile
    >>> model = torch.nn.Conv2d(3, 8, 3)
    >>> config = Config(workspace_limit="1MiB", policy="undivided", cache=tempfile.mkdtemp())
    >>> plan = tune(model, torch.empty(2, 3, 9, 9), config)
    >>> sorted(kernel.problem.op for kernel in plan.kernels)
    ['fprop', 'wgrad']

    Args:
        model: any module.
        example_inputs: a tensor, a tuple of positional inputs or a dict of keyword inputs; their
            batch is the largest planned, every smaller one is planned with it.
        config: the settings; default: `Config()`.
        on_progress: called after every measurement.

    Raises:
        ConfigError: the model does not accept the inputs or computes no convolution.
        PlanError: no plan of some kernel fits the workspace limit.
    """
    from ucudnn.tracing import trace_layers

    return tune_problems(trace_layers(model, example_inputs), config, on_progress)


def tune_problems(
    layers: Iterable[tuple[str, Problem]],
    config: Config | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Plan:
    """Measure and plan a list of problems; equal ones are measured once.

    Args:
        layers: the name of a layer and its problem, once per call.
        config: the settings; default: `Config()`.
        on_progress: called after every measurement.

    Raises:
        ConfigError: there is no problem to plan.
        PlanError: no plan of some problem fits the workspace limit.
    """
    config = config or Config()
    names: dict[Problem, list[str]] = {}
    for name, problem in layers:
        if problem.op in config.ops:
            names.setdefault(problem, []).append(name)
    if not names:
        raise ConfigError(
            "there is no convolution to plan: the model computes none on these inputs "
            f"for ops={','.join(config.ops)}"
        )
    backend = open_backend(config.backend)
    with _measuring, cache_room.open(config.cache) as cache:
        session = Session(backend, cache)
        kernels: list[KernelPlan] = []
        for problem, layer_names in names.items():
            _report(session, on_progress, str(problem), len(kernels), len(names))
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                kernels.append(_plan_kernel(session, problem, tuple(layer_names), config))
        _report(session, on_progress, "", len(kernels), len(names))
    _log.info("measured %d candidates, reused %d", session.measured, session.reused)
    return Plan(
        kernels=tuple(kernels),
        device=backend.device(),
        software=backend.software(),
        conditions=backend.conditions(),
        config=config,
        backend=backend.name,
    )


def _report(
    session: Session,
    on_progress: Callable[[Progress], None] | None,
    kernel: str,
    done: int,
    total: int,
) -> None:
    if on_progress is None:
        return
    report = on_progress

    def update() -> None:
        report(Progress(kernel, done, total, session.measured, session.reused))

    session.on_run = update
    update()


def micro_batch_sizes(policy: str, batch: int) -> tuple[int, ...]:
    """The micro-batch sizes that a policy allows for a batch.

    >>> micro_batch_sizes("powers-of-two", 6)
    (1, 2, 4, 6)
    """
    if policy == "undivided":
        return (batch,)
    if policy == "all":
        return tuple(range(1, batch + 1))
    return (*(1 << k for k in range(batch.bit_length()) if 1 << k < batch), batch)


def _plan_kernel(
    session: Session, problem: Problem, layers: tuple[str, ...], config: Config
) -> KernelPlan:
    limit = config.limit_bytes
    measurer = KernelMeasurer(session, problem, limit)
    measurements = measurer.measure(micro_batch_sizes(config.policy, problem.batch))
    timed = [entry for entry in measurements if entry.status == "ok"]
    kernel_of = partial(_kernel_of, session.backend)
    if not timed:
        raise _nothing_fits(problem, measurements, kernel_of, config)
    solved = solve(problem, timed, kernel_of, limit)
    default_applies = kernel_of(problem, DEFAULT_ALGORITHM) is not None
    finalists = race(session, measurer, problem, solved.finalists(default_applies))
    winner = choose(finalists, limit)
    if winner is None:
        raise _nothing_fits(problem, measurements, kernel_of, config)
    default = next((entry.timing for entry in finalists if entry.split.is_default), None)
    notes = tuple(f"default {note}" for note in session.backend.candidates(problem)[0].notes)
    return solved.kernel_plan(layers, winner.split, winner.timing, default, notes)


def _kernel_of(backend: AbstractBackend, problem: Problem, algorithm: str) -> str | None:
    if backend.refusal(problem, algorithm) is not None:
        return None
    return backend.kernel(problem, algorithm)


def _nothing_fits(
    problem: Problem, measurements: Sequence[Measurement], kernel_of: KernelOf, config: Config
) -> PlanError:
    reasons = [entry.reason for entry in measurements if entry.status == "failed"]
    known = [entry for entry in measurements if entry.workspace_bytes is not None]
    smallest = smallest_workspace(problem, known, kernel_of) if known else None
    if smallest is None:
        return PlanError(f"no algorithm could be run on {problem}: {'; '.join(reasons)}")
    least, step = smallest
    return PlanError(
        f"no plan for {problem} fits workspace_limit={format_bytes(config.limit_bytes or 0)}; the "
        f"smallest needs {format_bytes(least)} (micro-batch {step.size}, {step.algorithm}); "
        f"raise the limit" + ("" if config.policy == "all" else " or allow more sizes by policy"),
        least,
    )
