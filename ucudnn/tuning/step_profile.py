"""Profile of the memory of a step: what is allocated at each of its convolutions."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ucudnn.backends import AbstractBackend, Span
from ucudnn.errors import UnsupportedError
from ucudnn.execution.observers import Watcher
from ucudnn.execution.override import Installation
from ucudnn.execution.runner import Runner
from ucudnn.execution.stepping import Steps, gradient_mode, undisturbed
from ucudnn.plan import Plan
from ucudnn.problem import Problem
from ucudnn.segment import WHOLE, StepDivision


@dataclass(frozen=True, slots=True)
class Held:
    """Memory in bytes that is allocated all through a step."""

    parameters: int
    # Of parameters that have some before the step.
    gradients: int
    # State of the optimisers of its parameters.
    optimizers: int
    # Buffers and inputs, and what else the allocator knows of.
    others: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizers + self.others


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Allocated memory at the convolutions of a step, with what is held all through it."""

    held: Held
    # For each kernel the most that is allocated beside the workspace of a call.
    live_bytes: Mapping[Problem, int]
    # For each kernel the most that is allocated in any of its calls.
    call_peaks: Mapping[Problem, int]
    # The most at any moment: without the workspace of convolutions, and with it.
    own_peak_bytes: int
    peak_bytes: int
    # Kernels in the order of the step, each with what is allocated beside its workspace.
    calls: tuple[tuple[Problem, int], ...] = ()


@dataclass(eq=False)
class StepProfiler:
    """Runs steps of a model, and profiles memory where the backend can say what is allocated."""

    model: nn.Module
    inputs: Any
    backend: AbstractBackend
    # Forward and backward; else forward without a graph, as for inference.
    is_training: bool
    memory_format: str = "keep"
    division: StepDivision = WHOLE

    def profile(self, plan: Plan | None = None) -> StepProfile:
        """Profile a step by a plan, or by torch's own convolutions."""
        before = self.backend.allocated_bytes()
        runner = None
        if plan is not None:
            # A kernel that was left out is an error of the plan's users, not of this step.
            config = replace(plan.config, unplanned="torch")
            runner = Runner(plan, config)
        with undisturbed(self.model):
            step = Steps(
                self.model, self.inputs, self.is_training, self.memory_format, self.division
            )
            with gradient_mode(self.is_training):
                # The first step finds kernels and fills caches, which later ones have.
                self._watched(step, runner, lambda: None)
                watcher, spans = self._spans(step, runner)
        return _profile(self._held(before), watcher, spans)

    def _spans(self, step: Steps, runner: Runner | None) -> tuple[Watcher, list[Span]]:
        watchers: list[Watcher] = []
        # What a cycle of references holds is freed at an arbitrary moment.
        gc.collect()
        spans = self.backend.spans(lambda mark: watchers.append(self._watched(step, runner, mark)))
        assert spans is not None
        return watchers[0], spans

    def _watched(self, step: Steps, runner: Runner | None, mark: Callable[[], None]) -> Watcher:
        watcher = Watcher(mark, runner)
        with Installation(self.backend.device().type, watcher):
            step()
        return watcher

    def _held(self, allocated: int) -> Held:
        """Memory held before a step, of which so many bytes were seen by the allocator."""
        parameters = list(self.model.parameters())
        gradients = [one.grad for one in parameters if one.grad is not None]
        inputs = [leaf for leaf in tree_leaves(self.inputs) if isinstance(leaf, Tensor)]
        named = Held(
            _bytes_of(parameters),
            _bytes_of(gradients),
            _bytes_of(_optimizer_state(parameters)),
            _bytes_of([*self.model.buffers(), *inputs]),
        )
        rest = max(0, allocated - named.total)
        return Held(named.parameters, named.gradients, named.optimizers, named.others + rest)


def _profile(held: Held, watcher: Watcher, spans: list[Span]) -> StepProfile:
    live: dict[Problem, int] = {}
    call_peaks: dict[Problem, int] = {}
    calls: list[tuple[Problem, int]] = []
    if len(spans) != 3 * len(watcher.calls) + 1:
        # torch's profiler sees nothing of threads that the model starts.
        raise UnsupportedError(
            "its convolutions run in several threads, in which memory cannot be seen"
        )
    # Mark n ends span n. What is between two marks of a call is no part of the rest of the step.
    inside = {n for call in watcher.calls for n in range(call.marks[0] + 1, call.marks[2] + 1)}
    rest = [span.peak_bytes for n, span in enumerate(spans) if n not in inside]
    own_peak = peak = max(rest)
    # In the order of their begins, as they are in a step of one thread.
    for copied, (_, began, ended) in sorted(watcher.calls, key=lambda call: call.marks[1]):
        peak_bytes = max(span.peak_bytes for span in spans[began + 1 : ended + 1])
        end_bytes = spans[ended].end_bytes
        peak = max(peak, peak_bytes)
        # A call that no plan can be made for is, with its workspace, part of the rest of the step.
        if not copied:
            own_peak = max(own_peak, peak_bytes)
        for problem, copied_bytes in copied.items():
            # At its end the results of all kernels of the call are there. A little more than what
            # is live while the first of two runs, whichever that is.
            beside = held.total + end_bytes + copied_bytes
            calls.append((problem, beside))
            live[problem] = max(live.get(problem, 0), beside)
            call_peaks[problem] = max(call_peaks.get(problem, 0), held.total + peak_bytes)
            own_peak = max(own_peak, end_bytes + copied_bytes)
    return StepProfile(
        held,
        live,
        call_peaks,
        own_peak_bytes=held.total + own_peak,
        peak_bytes=held.total + peak,
        calls=tuple(calls),
    )


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory that tensors lie in, each counted once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _optimizer_state(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Tensors in the state of all optimisers of these parameters."""
    ids, found = set(map(id, parameters)), list[Tensor]()
    # Nothing leads from a parameter to its optimiser.
    for one in gc.get_objects():
        # `isinstance` would read `__class__`, which lazy proxies among these objects may implement.
        if issubclass(type(one), torch.optim.Optimizer):
            states = (state for parameter, state in one.state.items() if id(parameter) in ids)
            found += [leaf for state in states for leaf in tree_leaves(state)]
    return [leaf for leaf in found if isinstance(leaf, Tensor)]
