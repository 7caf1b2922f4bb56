"""What a step would take, in memory and in time, found out without running it.

The step's own code runs on fake tensors, and the storages that are alive are counted: parameters,
activations and gradients have the sizes that they would have. What an operator allocates inside
itself, and how long it takes, is measured by calling this operator alone on real tensors of these
shapes, once per process. So at no time more than one operator's operands are in memory.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from ucudnn.backends import AbstractBackend, Span
from ucudnn.backends.tensors import memory_format, problem_of
from ucudnn.benchmark.failures import is_out_of_memory
from ucudnn.errors import first_line
from ucudnn.execution.compiling import original_of
from ucudnn.execution.override import Installation
from ucudnn.execution.runner import Layer, Runner
from ucudnn.plan import Plan
from ucudnn.problem import OPS, Problem
from ucudnn.segment import WHOLE, StepDivision
from ucudnn.steps.profile import (
    ConvolutionCall,
    Held,
    ModuleCall,
    ModuleWatcher,
    StepProfile,
    bytes_of,
    held_by,
)
from ucudnn.steps.run import batch_of, drop_gradients, gradient_mode, parts_of, run_step
from ucudnn.steps.strays import without_strays
from ucudnn.steps.tracing import StepRecorder, as_written, record_step, uninterrupted

# An operator with fewer bytes of operands and results is not measured: it allocates nothing beside
# its results that matters, and takes about `_SMALL_NS`.
_SMALL, _SMALL_NS = 1 << 16, 5_000
# Operators of at least this time are timed once, shorter ones in `_ROUNDS` rounds.
_LONG_NS, _ROUNDS = 10_000_000, 3
# Errors of an operator that is called alone.
_ERRORS = (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError, MemoryError)
_CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)


class Inside(NamedTuple):
    """What one operator needs: bytes beside its operands and results, and time in ns."""

    workspace_bytes: int
    time_ns: int


class OperatorTable:
    """What operators need inside, measured one at a time and kept.

    Args:
        backend: backend of the device that computes them.
    """

    def __init__(self, backend: AbstractBackend) -> None:
        self._backend = backend
        self._known: dict[Hashable, Inside] = {}
        # Operators that could not be called alone, with the reason.
        self.failed: dict[str, str] = {}

    def inside(
        self,
        operator: Any,
        args: Any,
        kwargs: Any,
        way: Hashable = None,
        context: AbstractContextManager[object] | None = None,
    ) -> Inside:
        """What a call needs inside.

        Args:
            operator: an operator of torch's dispatcher.
            args: its arguments, with fake tensors.
            kwargs: its keyword arguments.
            way: tells calls apart that are computed in different ways.
            context: context in which it is computed.
        """
        key = (operator, way, _settings(), *map(_key, tree_leaves((args, kwargs))))
        if key not in self._known:
            with context or nullcontext():
                self._known[key] = self._measured(operator, args, kwargs)
        return self._known[key]

    def _measured(self, operator: Any, args: Any, kwargs: Any) -> Inside:
        try:
            return self._run(operator, args, kwargs)
        except _ERRORS as error:
            if not is_out_of_memory(error):
                # Some operators need values that are not known here, such as a range of indices.
                self.failed[str(operator)] = first_line(error)
                return Inside(0, _SMALL_NS)
            del error
        # Half and a quarter of the samples show how an operator's needs grow with the batch.
        count = batch_of(args)
        try:
            half, quarter = (
                self._run(operator, *tree_map(partial(_cut, count, count // part), (args, kwargs)))
                for part in (2, 4)
            )
        except _ERRORS as error:
            self.failed[str(operator)] = first_line(error)
            return Inside(0, _SMALL_NS)
        return Inside(
            *(max(0, 3 * large - 2 * small) for large, small in zip(half, quarter, strict=True))
        )

    def _run(self, operator: Any, args: Any, kwargs: Any) -> Inside:
        # What reaches an operator in a step has passed autocast; called alone, it would be cast
        # once more.
        with (
            _disable_current_modes(),
            torch.no_grad(),
            torch._C.DisableTorchFunction(),
            torch.autocast("cpu", enabled=False),
            torch.autocast("cuda", enabled=False),
        ):
            args, kwargs = tree_map(_real, (args, kwargs))
            run, results = partial(operator, *args, **kwargs), list[Any]()

            def elapsed_ns() -> int:
                results.clear()  # as in a step, the results lie in fresh memory
                return self._backend.elapsed_ns(lambda: results.append(run()))

            # The first call also looks up what is kept for later ones.
            times = [elapsed_ns()]
            results.clear()
            spans = self._backend.spans(lambda _: results.append(run()))
            assert spans is not None
            if times[0] < _LONG_NS:
                times = [elapsed_ns() for _ in range(_ROUNDS)]
        workspace = max(span.peak_bytes for span in spans) - spans[-1].end_bytes
        return Inside(max(0, workspace), sorted(times)[len(times) // 2])


@lru_cache
def _table(backend: AbstractBackend) -> OperatorTable:
    return OperatorTable(backend)


def _settings() -> Hashable:
    """Settings of torch that decide how an operator is computed."""
    backends = torch.backends
    return (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        backends.mkldnn.enabled,  # type: ignore[attr-defined]
        backends.cudnn.enabled,
        backends.cudnn.benchmark,
        backends.cudnn.deterministic,
        torch.get_float32_matmul_precision(),
    )


def _key(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return (*leaf.shape, leaf.stride(), leaf.dtype, leaf.device)
    return leaf if isinstance(leaf, (int, float, bool, str, type(None))) else repr(leaf)


def _real(leaf: Any) -> Any:
    """A tensor with memory of its own in place of a fake one; indices are 0, all else is 1."""
    if not isinstance(leaf, FakeTensor):
        return leaf
    sizes = zip(leaf.shape, leaf.stride(), strict=True)
    count = 1 + sum((size - 1) * stride for size, stride in sizes) if leaf.numel() else 0
    is_index = not (leaf.is_floating_point() or leaf.is_complex() or leaf.dtype == torch.bool)
    fill = torch.zeros if is_index else torch.ones
    return fill(count, dtype=leaf.dtype, device=leaf.device).as_strided(leaf.shape, leaf.stride())


def _cut(count: int, size: int, leaf: Any) -> Any:
    """An argument of a call with `size` instead of `count` samples; strides stay."""
    if isinstance(leaf, FakeTensor) and leaf.dim() and len(leaf) == count:
        return leaf[:size]
    return leaf


class _Event(NamedTuple):
    """What happened in a step: a change of the storages, an operator, or a mark.

    An operator has `inside`; a mark has neither `change` nor `inside`.
    """

    change: int = 0
    inside: Inside | None = None
    # The module at whose call it happened; "" in backward.
    module: str = ""
    # For a convolution, its kernels, with the bytes of operands that a kernel copies first.
    kernels: Mapping[Problem, int] = MappingProxyType({})


class _StepLog(StepRecorder):
    """Logs the storages that a step on fake tensors allocates and frees, and its operators."""

    def __init__(
        self, passes: Collection[str], backend: AbstractBackend, plan: Plan | None
    ) -> None:
        super().__init__(passes, None)
        self.events: list[_Event] = []
        self._table = _table(backend)
        self._plan, self._device_type = plan, backend.device().type
        self._rounding = backend.rounding_bytes
        self._seen = weakref.WeakKeyDictionary[Any, bool]()
        self._called: set[Any] = set()
        self._runner = None
        if plan is not None:
            self._runner = Runner(plan, replace(plan.config, unplanned="torch"))

    def hold(self, tensors: Collection[Tensor]) -> None:
        """Leave out storages that are held all through the step."""
        for one in tensors:
            self._seen[one.untyped_storage()] = True

    def mark(self) -> None:
        """Make a mark."""
        self.events.append(_Event())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and log it."""
        result = super().__torch_dispatch__(func, types, args, kwargs)
        module = self.modules[-1] if self.modules else ""
        moved = 0
        for one in tree_leaves(result):
            if isinstance(one, Tensor):
                storage = one.untyped_storage()
                moved += storage.nbytes()
                if storage not in self._seen:
                    self._seen[storage] = True
                    self._allocated(storage, module)
        if not func.is_view:
            kernels = self._kernels(func, args)
            inside = self._inside(func, args, kwargs or {}, moved, kernels)
            self.events.append(_Event(0, inside, module, kernels))
        return result

    def _kernels(self, func: Any, args: Any) -> dict[Problem, int]:
        """The kernels of a convolution, with the bytes of operands that each copies first."""
        if func not in _CONVOLUTIONS:
            return {}
        if func is _CONVOLUTIONS[0]:
            x, w, _, *geometry = args
            operands = {"fprop": (x, w)}
        else:
            dy, x, w, _, *geometry, mask = args
            both = {"dgrad": (dy, w), "wgrad": (x, dy)}
            operands = {op: both[op] for op, is_asked in zip(both, mask, strict=False) if is_asked}
        found = {}
        for op, tensors in operands.items():
            problem = problem_of(op, x, w, *geometry, self._device_type)
            if problem is not None:
                form = memory_format(problem)
                found[problem] = sum(
                    one.numel() * one.element_size()
                    for one in tensors
                    if not one.is_contiguous(memory_format=form)
                )
        return found

    def _allocated(self, storage: Any, module: str) -> None:
        size = -(-storage.nbytes() // self._rounding) * self._rounding
        self.events.append(_Event(size, None, module))
        freed = weakref.finalize(storage, self.events.append, _Event(-size, None, module))
        freed.atexit = False

    def _inside(
        self, func: Any, args: Any, kwargs: Any, moved: int, kernels: Mapping[Problem, int]
    ) -> Inside:
        operands = (one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor))
        self._called.add(func)
        if moved + sum(one.numel() * one.element_size() for one in operands) < _SMALL:
            return Inside(0, _SMALL_NS)
        if self._plan is None or func not in _CONVOLUTIONS:
            return self._table.inside(func, args, kwargs)
        # A call that the plan leaves to torch is the same as without the plan.
        splits = tuple(
            self._plan.split(one)
            for one in kernels
            if self._plan.covers(one) and not self._plan.split(one).is_default
        )
        if not splits:
            return self._table.inside(func, args, kwargs)
        context = Installation(self._device_type, self._runner)
        return self._table.inside(func, args, kwargs, splits, context)

    @property
    def notes(self) -> tuple[str, ...]:
        """Operators that could not be measured, which count as if they needed nothing inside."""
        found = {str(func) for func in self._called} & self._table.failed.keys()
        return tuple(f"{one} was not measured ({self._table.failed[one]})" for one in sorted(found))


@dataclass
class Foreseer:
    """Foresees steps of one model.

    Args:
        model: any module; it is not changed.
        inputs: an example input, or a list of these.
        backend: backend of the model's device.
        is_training: True: a step is forward and backward; False: forward without a graph.
        torchs: layers that torch computes, whatever a plan says.
    """

    model: nn.Module
    inputs: Any
    backend: AbstractBackend
    is_training: bool = True
    torchs: Collection[Layer] = ()

    def __post_init__(self) -> None:
        examples = self.inputs if isinstance(self.inputs, list) else [self.inputs]
        self._examples = examples
        self.batch = batch_of(examples[0])
        self.held = held_by(self.model, examples, self.backend.allocated_bytes())
        # Modules without children keep their result and little else.
        modules = original_of(self.model).named_modules()
        self._names = [name for name, one in modules if any(one.children())]

    def step(
        self,
        division: StepDivision = WHOLE,
        memory_format: str = "keep",
        plan: Plan | None = None,
        *,
        batch: int | None = None,
        names: Collection[str] | None = None,
    ) -> StepProfile:
        """What a step takes.

        Args:
            division: its segments and micro-batches.
            memory_format: "keep" or "channels_last".
            plan: how its convolutions are computed; None: by torch.
            batch: samples of the step; None: those of the example.
            names: modules whose calls are noted; None: all modules that hold others.

        Raises:
            ConfigError: the step does not run on fake tensors.
        """
        passes = OPS if self.is_training else ("fprop",)
        log = _StepLog(passes, self.backend, plan)
        roots: list[ModuleCall] = []
        held = self.held

        def run(model: nn.Module, examples: list[Any]) -> None:
            nonlocal held
            if batch is not None and batch != self.batch:
                before = bytes_of(examples)
                examples[:] = [resized(one, self.batch, batch) for one in examples]
                held = replace(held, others=held.others + bytes_of(examples) - before)
            inputs = [one for one in tree_leaves(examples) if isinstance(one, Tensor)]
            log.hold([*model.parameters(), *model.buffers(), *inputs])
            watcher = ModuleWatcher(model, self._names if names is None else names, log.mark)
            roots.append(watcher.root)
            with gradient_mode(self.is_training):
                watcher.run(partial(_run_all, model, examples, division, self.is_training))

        # Garbage is collected now, else tensors in cycles of references would be freed at an
        # arbitrary moment of the step.
        gc.collect()
        with uninterrupted(), as_written(self.model), without_strays(self.model) as log.watched:
            record_step(
                *(original_of(self.model), self._examples, log, run),
                *(memory_format, division.segments),
            )
        return _profile(log, roots[0], held, self.torchs)


def _run_all(
    model: nn.Module, examples: list[Any], division: StepDivision, is_training: bool
) -> None:
    for inputs in examples:
        for part in parts_of(inputs, division.micro_batch):
            run_step(model, part, is_training)
        drop_gradients(model)


def _profile(log: _StepLog, root: ModuleCall, held: Held, torchs: Collection[Layer]) -> StepProfile:
    """What the events of a step add up to."""
    now = own_peak = peak = time_ns = top = 0
    spans, times, calls = list[Span](), list[int](), list[ConvolutionCall]()
    highest = 0  # since the last mark
    for number, event in enumerate(log.events):
        if event.inside is None and not event.change:
            spans.append(Span(highest, now))
            times.append(time_ns)
            highest = now
            continue
        now += event.change
        within = now
        if event.inside is not None:
            within += event.inside.workspace_bytes
            time_ns += event.inside.time_ns
            beside = now
            for problem, copied in event.kernels.items():
                live = held.total + now + copied
                calls.append(ConvolutionCall(problem, live, held.total + within))
                beside = max(beside, now + copied)
            # If no plan can be made for a call, or none may act on it, its workspace cannot be
            # limited.
            is_limited = event.kernels and not any(Layer.of(one) in torchs for one in event.kernels)
            own_peak = max(own_peak, beside if is_limited else within)
        own_peak, highest = max(own_peak, now), max(highest, within)
        if within > peak:
            peak, top = within, number
    spans.append(Span(highest, now))
    return StepProfile(
        held=held,
        root=root,
        spans=spans,
        times_ns=times,
        own_peak_bytes=held.total + own_peak,
        calls=tuple(calls),
        alive=_alive(log.events[: top + 1]),
        notes=log.notes,
    )


def _alive(events: Sequence[_Event]) -> dict[str, int]:
    """Bytes that each module has allocated at the last of these events."""
    found: dict[str, int] = {}
    for event in events:
        found[event.module] = found.get(event.module, 0) + event.change
    if events and events[-1].inside is not None:
        found["inside an operator"] = events[-1].inside.workspace_bytes
    return {name: size for name, size in found.items() if size}


def resized(inputs: Any, count: int, batch: int) -> Any:
    """Inputs with another number of samples, without their values.

    >>> resized(torch.ones(3, 2), 3, 5).shape
    torch.Size([5, 2])

    Args:
        inputs: tensors in nested containers.
        count: their samples: tensors with so many rows are resized.
        batch: samples of the result.
    """

    def change(one: Tensor) -> Tensor:
        if not one.dim() or len(one) != count:
            return one
        order = sorted(range(one.dim()), key=one.stride, reverse=True)
        places = sorted(range(one.dim()), key=order.__getitem__)
        shape = (batch, *one.shape[1:])
        room = one.detach().new_empty([shape[axis] for axis in order]).permute(places)
        return room.requires_grad_(one.requires_grad)

    return tree_map_only(Tensor, change, inputs)
