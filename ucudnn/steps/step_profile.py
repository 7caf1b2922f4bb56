"""Profile of the memory of a step: what is allocated at each of its convolutions."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ucudnn.backends import AbstractBackend, Span
from ucudnn.errors import UnsupportedError
from ucudnn.execution.channels_last import optimizer_states
from ucudnn.execution.observers import Watcher
from ucudnn.execution.override import Installation
from ucudnn.execution.runner import Layer, Runner
from ucudnn.outcomes import StepMemory
from ucudnn.plan import Plan
from ucudnn.problem import Problem
from ucudnn.segment import WHOLE, StepDivision
from ucudnn.steps.run import Steps, gradient_mode, undisturbed


@dataclass(frozen=True, slots=True)
class Held:
    """Memory in bytes that is allocated all through a step."""

    parameters: int
    # Gradients that the parameters have before the step.
    gradients: int
    # State of the optimisers of the model's parameters.
    optimizers: int
    # Buffers and inputs, and everything else that was allocated before the step.
    others: int

    @property
    def total(self) -> int:
        """The sum of all these parts."""
        return self.parameters + self.gradients + self.optimizers + self.others


@dataclass(frozen=True, slots=True)
class StepProfile:
    """The memory that is allocated at each convolution of a step, and all through the step."""

    held: Held
    # For each kernel, the most bytes that are allocated beside the workspace in any of its calls.
    live_bytes: Mapping[Problem, int]
    # For each kernel, the most bytes that are allocated in any of its calls, with workspace.
    call_peaks: Mapping[Problem, int]
    # The peak of the step: without the workspace of convolutions, and with it.
    own_peak_bytes: int
    peak_bytes: int
    # For each call, in the order of the step, the kernel and what is allocated beside its
    # workspace.
    calls: tuple[tuple[Problem, int], ...] = ()

    def memory(self, budget_bytes: int, is_training: bool) -> StepMemory:
        """This memory in the form that a plan keeps; the profiled step is torch's, undivided."""
        return StepMemory(
            budget_bytes=budget_bytes,
            parameters_bytes=self.held.parameters,
            gradients_bytes=self.held.gradients,
            optimizer_bytes=self.held.optimizers,
            other_bytes=self.held.others,
            own_peak_bytes=self.own_peak_bytes,
            torch_peak_bytes=self.peak_bytes,
            is_training=is_training,
        )


@dataclass(eq=False)
class StepProfiler:
    """Runs steps of a model and profiles their memory, which the backend must be able to report."""

    model: nn.Module
    inputs: Any
    backend: AbstractBackend
    # True: a step is forward and backward; False: forward without a graph, as for inference.
    is_training: bool
    memory_format: str = "keep"
    division: StepDivision = WHOLE
    # Layers that may be computed by torch's own convolution, whatever a plan says.
    torchs: Collection[Layer] = ()

    def profile(self, plan: Plan | None = None) -> StepProfile:
        """Profile a step by a plan, or by torch's own convolutions."""
        before = self.backend.allocated_bytes()
        runner = None
        if plan is not None:
            # In this step torch computes the kernels that the plan leaves out, even if the user's
            # setting is unplanned="error".
            config = replace(plan.config, unplanned="torch")
            runner = Runner(plan, config)
        with undisturbed(self.model):
            step = Steps(
                self.model, self.inputs, self.is_training, self.memory_format, self.division
            )
            with gradient_mode(self.is_training):
                # The first step also looks up each call in the plan and fills torch's caches. Only
                # the second step, which need not do that, is profiled.
                copied = self.backend.allocated_bytes()
                self._watched(step, runner, lambda: None)
                # A first step leaves memory allocated, such as the workspace of cuBLAS.
                before += self.backend.allocated_bytes() - copied
                watcher, spans = self._spans(step, runner)
        return _profile(self._held(before), watcher, spans, self.torchs)

    def _spans(self, step: Steps, runner: Runner | None) -> tuple[Watcher, list[Span]]:
        watchers: list[Watcher] = []
        # Memory that a cycle of references holds would be freed at an arbitrary moment of the step.
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
        """The memory held before a step; `allocated` is what the allocator has counted by then."""
        parameters = list(self.model.parameters())
        gradients = [one.grad for one in parameters if one.grad is not None]
        states = [state for _, state in optimizer_states(set(map(id, parameters)))]
        named = Held(
            _bytes_of(parameters),
            _bytes_of(gradients),
            _bytes_of(states),
            _bytes_of([*self.model.buffers(), self.inputs]),
        )
        return replace(named, others=named.others + max(0, allocated - named.total))


def _profile(
    held: Held, watcher: Watcher, spans: list[Span], torchs: Collection[Layer]
) -> StepProfile:
    live: dict[Problem, int] = {}
    call_peaks: dict[Problem, int] = {}
    calls: list[tuple[Problem, int]] = []
    if len(spans) != 3 * len(watcher.calls) + 1:
        # torch's profiler does not see memory in threads that the model starts.
        raise UnsupportedError(
            "its convolutions run in several threads, in which memory cannot be seen"
        )
    # Mark n ends span n. The spans between the first and the last mark of a call belong to that
    # call, all others to the rest of the step.
    inside = {n for call in watcher.calls for n in range(call.marks[0] + 1, call.marks[2] + 1)}
    rest = [span.peak_bytes for n, span in enumerate(spans) if n not in inside]
    own_peak = peak = max(rest)
    # The calls are sorted by their beginning, which is their order in a step.
    for copied, (_, began, ended) in sorted(watcher.calls, key=lambda call: call.marks[1]):
        peak_bytes = max(span.peak_bytes for span in spans[began + 1 : ended + 1])
        end_bytes = spans[ended].end_bytes
        peak = max(peak, peak_bytes)
        # If no plan can be made for a call, or none may act on it, its workspace cannot be limited,
        # so it counts as part of the rest of the step.
        if not copied or any(Layer.of(problem) in torchs for problem in copied):
            own_peak = max(own_peak, peak_bytes)
        for problem, copied_bytes in copied.items():
            # At the end of a call the results of all its kernels are allocated. If there are two
            # kernels, this is a little more than what is live while the first of them runs.
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


def _bytes_of(tree: Any) -> int:
    """Bytes of the memory that tensors lie in; memory that tensors share is counted once."""
    storages = (leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
