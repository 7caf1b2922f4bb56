"""What a step would take, in memory and in time, found out without running it.

The step's own code runs on fake tensors, and the storages that are alive are counted: parameters,
activations and gradients have the sizes that they would have. What an operator allocates inside
itself, and how long it takes, is measured by calling this operator alone on real tensors of these
shapes. So at no time more than one operator's operands are in memory.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import count
from time import monotonic
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ucudnn.backends import AbstractBackend, Span, open_backend
from ucudnn.backends.tensors import memory_format, problem_of
from ucudnn.backends.torch_cpu.processor import give_back_free_blocks
from ucudnn.benchmark.operators import SMALL_NS, Inside, TensorSpec, operators_of
from ucudnn.config import Config, require_config
from ucudnn.errors import ConfigError, first_line, quoted
from ucudnn.execution.compiling import original_of
from ucudnn.execution.micro_batching import batch_of, is_sequence
from ucudnn.execution.override import Installation
from ucudnn.execution.runner import Layer, Runner
from ucudnn.outcomes import Foresight
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
from ucudnn.steps.run import drop_gradients, gradient_mode, parts_of, run_step
from ucudnn.steps.same_numbers import EXTREMES, SingleNumbers
from ucudnn.steps.strays import without_strays
from ucudnn.steps.tracing import (
    StepRecorder,
    Traced,
    as_written,
    record_step,
    require_tensors,
    uninterrupted,
)
from ucudnn.timeline import Block, largest
from ucudnn.units import format_bytes

# An operator with fewer bytes of operands and results is not measured: it allocates nothing beside
# its results that matters.
_SMALL = 1 << 12
# Samples of a real step that shows how much memory one of the batch would need.
_FEW = 2
_DEVICE, _ITEM = torch.ops.prim.device.default, torch.ops.aten._local_scalar_dense.default
_CAST = torch.ops.aten._to_copy.default
# The most bytes of the operands of an operator that is called with a part of the samples.
_PART_BYTES = 64 << 20
# Each of so many trials for the largest batch halves what is left.
_HALVED = 3
# No larger batch is looked for.
_MOST_BATCH = 1 << 24
Operators = Literal["whole", "in part", "none"]
# The most chunks into which a convolution is assumed to be divided, so that it needs a part of its
# workspace. More of them take time.
_CHUNKS = 8
_CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)


class _Event(NamedTuple):
    """What happened in a step: a change of the storages, an operator, or a mark."""

    change: int = 0
    inside: Inside | None = None
    # The innermost module at whose call it happened.
    module: str = "backward"
    # For a convolution, its kernels, with the bytes of operands that a kernel copies first.
    kernels: Mapping[Problem, int] = MappingProxyType({})
    is_mark: bool = False
    # The number of the storage that is allocated or freed.
    storage: int = 0


class _StepLog(StepRecorder):
    """Logs the storages that a step on fake tensors allocates and frees, and its operators."""

    def __init__(
        self,
        passes: Collection[str],
        backend: AbstractBackend,
        plan: Plan | None,
        operators: Operators,
        sole: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(passes, None)
        self.events: list[_Event] = []
        self._table = operators_of(backend)
        self._plan, self._kind = plan, backend.device().type
        self._rounding = backend.rounding_bytes
        self._seen = weakref.WeakKeyDictionary[Any, bool]()
        # What weights lie in, in any dtype: they have no samples.
        self._weights = weakref.WeakKeyDictionary[Any, bool]()
        self._has_begun = False
        self._failed: dict[str, str] = {}
        # Numbers that forward reads, by module, and how many of them were read.
        self.values: Mapping[str, Sequence[Any]] = {}
        self._read: dict[str, int] = {}
        # References to the first operand of each addition in backward; and how many there are if
        # autograd alone refers to it.
        self.counts: list[tuple[int, int]] = []
        self._sole = sole
        self._operators = operators
        settings = Config() if plan is None else plan.config
        self._runner = Runner(plan, replace(settings, unplanned="torch"))

    def begin(self, weights: Collection[Tensor], inputs: Collection[Tensor]) -> None:
        """Begin to log; what weights, buffers and inputs lie in is held all through the step."""
        for one in weights:
            self._weights[one.untyped_storage()] = True
        for one in (*weights, *inputs):
            self._seen[one.untyped_storage()] = True
        self._has_begun = True

    def keep(self, state: Tensor) -> None:
        """Log a tensor that no operator has made, and that lies in the memory of the host."""
        if self._kind == state.device.type:
            self._log(state, self.module)

    def mark(self) -> None:
        """Make a mark."""
        self.events.append(_Event(is_mark=True))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and log it."""
        if func is _DEVICE:
            return func(*args, **(kwargs or {}))
        if not self._has_begun:
            return super().__torch_dispatch__(func, types, args, kwargs)
        if func is _ITEM and self.values and isinstance(args[0], FakeTensor):
            return self._value()
        if self._adds_in_place(func, args):
            func = torch.ops.aten.add_.Tensor
        result = super().__torch_dispatch__(func, types, args, kwargs)
        module = self.module
        if func.is_view:
            self._log(result, module)
            return result
        kernels = self._kernels(func, args)
        inside = self._inside(func, args, kwargs or {}, result, kernels)
        result = self._as_really(result, inside.results)
        self._log(result, module)
        self.events.append(_Event(0, inside, module, kernels))
        if func is _CAST and self._is_weight(args[0]):
            self._weights[result.untyped_storage()] = True
        return result

    def _is_weight(self, tensor: Tensor) -> bool:
        return tensor.layout is torch.strided and tensor.untyped_storage() in self._weights

    def _value(self) -> Any:
        """A number that forward reads: the one that the real forward has read there."""
        module = self.module
        known = self.values.get(module) or next(iter(self.values.values()))
        number = self._read[module] = self._read.get(module, -1) + 1
        return known[number % len(known)]

    def _adds_in_place(self, func: Any, args: Any) -> bool:
        """True if autograd would add two gradients in place here.

        It does so if nothing else refers to the first one, but never inside a dispatch mode.
        """
        if func is not torch.ops.aten.add.Tensor or torch._C._current_graph_task_id() == -1:
            return False
        one, other = args[0], args[1]
        is_alike = isinstance(other, Tensor) and one.shape == other.shape
        if torch.is_grad_enabled() or not is_alike or one.dtype != other.dtype:
            return False
        storage = one.untyped_storage()
        count = one._use_count(), torch._C._storage_Use_Count(storage._cdata)
        self.counts.append(count)
        return self._sole is not None and count == self._sole

    def _as_really(self, result: Any, real: Sequence[TensorSpec]) -> Any:
        """The result of an operator with the layout, dtype and storage that real tensors have."""
        leaves = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
        if len(leaves) != len(real) or not all(isinstance(one, FakeTensor) for one in leaves):
            return result
        changed: dict[int, Tensor] = {}
        for one, found in zip(leaves, real, strict=True):
            is_new = one.untyped_storage() not in self._seen and one.shape == found.shape
            if is_new and TensorSpec.of(one) != found:
                size = found.storage_bytes // found.dtype.itemsize
                room = torch.empty(size, dtype=found.dtype, device=one.device)
                changed[id(one)] = room.as_strided(found.shape, found.stride)
        if not changed:
            return result
        self.watch(changed.values())
        return tree_map_only(Tensor, lambda one: changed.get(id(one), one), result)

    def _log(self, result: Any, module: str) -> None:
        """Log the storages that are new."""
        for one in tree_leaves(result):
            if isinstance(one, Tensor) and one.layout is torch.strided:
                storage = one.untyped_storage()
                if storage not in self._seen:
                    self._seen[storage] = True
                    self._allocated(storage, module)

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
            arguments = [*geometry, self._kind]
            problem = problem_of(op, x, w, *arguments)
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
        number = len(self.events)
        self.events.append(_Event(size, None, module, storage=number))
        free = _Event(-size, None, module, storage=number)
        freed = weakref.finalize(storage, self.events.append, free)
        freed.atexit = False

    def _inside(
        self, func: Any, args: Any, kwargs: Any, result: Any, kernels: Mapping[Problem, int]
    ) -> Inside:
        moved = [one for one in tree_leaves((args, kwargs, result)) if isinstance(one, Tensor)]
        if self._operators == "none":
            return Inside(0, 0)
        most_bytes = _PART_BYTES if self._operators == "in part" else None
        if sum(one.numel() * one.element_size() for one in moved) < _SMALL:
            return Inside(0, SMALL_NS)
        # A call that the plan leaves to torch is the same as without the plan.
        plan = self._plan
        covered = [] if plan is None else [plan.split(one) for one in kernels if plan.covers(one)]
        splits = tuple(one for one in covered if not one.is_default)
        with Installation(self._kind, self._runner) if splits else nullcontext():
            inside = self._table.inside(func, args, kwargs, splits, most_bytes, self._is_weight)
        if inside.failure:
            self._failed[str(func)] = inside.failure
        return inside

    @property
    def notes(self) -> tuple[str, ...]:
        """Operators that could not be measured, which count as if they needed nothing inside."""
        return tuple(
            f"{name} was not measured ({why})" for name, why in sorted(self._failed.items())
        )


@cache
def _sole(kind: type[AbstractBackend]) -> tuple[int, int] | None:
    """References to a gradient that autograd alone refers to, as an operator's call shows them."""
    log = _StepLog(OPS, kind(), None, "none")
    log.begin((), ())
    with FakeTensorMode(), log:
        x = torch.ones(3, requires_grad=True)
        y = x * 2
        (y.exp() + y.sin()).sum().backward()
    return log.counts[0] if log.counts else None


class _Reader(StepRecorder):
    """Notes the numbers that forward reads from tensors, by module."""

    def __init__(self) -> None:
        super().__init__(("fprop",), None)
        self.values: dict[str, list[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and note the number that it reads."""
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func is _ITEM:
            self.values.setdefault(self.module, []).append(result)
        return result


@dataclass
class Foreseer:
    """Foresees steps of one model.

    Args:
        model: any module; it is not changed.
        inputs: an example input, or a list of these.
        backend: backend of the model's device.
        is_training: True: a step is forward and backward; False: forward without a graph.
        swappable: classes of the modules on which a plan acts; None: it acts on any.
        operators: whether operators are called alone on all samples, on some of them, from which
            what they need is extrapolated, or not at all.
    """

    model: nn.Module
    inputs: Any
    backend: AbstractBackend
    is_training: bool = True
    swappable: Collection[type[nn.Module]] | None = None
    operators: Operators = "whole"

    def __post_init__(self) -> None:
        examples = self.inputs if isinstance(self.inputs, list) else [self.inputs]
        for one in examples:
            require_tensors(one)
        self._examples = examples
        # Samples of the examples, and of the steps that are foreseen.
        self._given = self.batch = batch_of(examples[0])
        self._steps: dict[Hashable, StepProfile] = {}
        # Numbers that forward reads; None: not read yet.
        self._values: dict[str, list[Any]] | None = None
        # True: steps are run on real tensors, because fake ones fail.
        self._is_real = False
        # The state of `SingleNumbers` in real steps.
        self._state = EXTREMES[0]
        self.took_s = 0.0  # seconds that it took to foresee the latest step
        self.held = held_by(self.model, examples, self.backend.allocated_bytes())
        # Modules without children keep their result and little else, but a stretch of a sequence
        # may begin or end with one.
        self.modules = dict(original_of(self.model).named_modules())
        self.holders = {name for name, one in self.modules.items() if any(one.children())}
        names = set(self.holders)
        for name, one in self.modules.items():
            if is_sequence(one):
                names |= {f"{name}.{child}".lstrip(".") for child, _ in one.named_children()}
        self._names = names
        # Names of modules that write to their arguments, as far as it is known.
        self.writers = set[str]()

    @property
    def free_bytes(self) -> int:
        """Bytes that a step can allocate here now, beside a copy of the model and its inputs."""
        give_back_free_blocks()
        copied = bytes_of([*self.model.parameters(), *self.model.buffers(), *self._examples])
        return max(0, self.backend.available_bytes() - copied)

    def can_run(self, peak_bytes: int) -> bool:
        """True if there is memory here for a real step with this peak, what is held included."""
        return peak_bytes - self.held.total <= self.free_bytes

    def of_batch(self, batch: int) -> Foreseer:
        """A foreseer of steps with another number of samples."""
        found = copy.copy(self)
        found.batch = batch
        return found

    def torchs(self, calls: Sequence[tuple[str, Problem]] | None = None) -> list[tuple[str, Layer]]:
        """(Name of the module, layer) of each call that torch computes, whatever a plan says.

        Args:
            calls: as `Traced.layers`; None: those of the undivided step.
        """
        if self.swappable is None:
            return []
        calls = self.step().traced.layers if calls is None else calls
        return [
            (name or "the model itself", Layer.of(problem))
            for name, problem in calls
            if type(self.modules[name]) not in self.swappable
        ]

    def step(
        self,
        division: StepDivision = WHOLE,
        memory_format: str = "keep",
        plan: Plan | None = None,
        *,
        names: Collection[str] | None = None,
    ) -> StepProfile:
        """What a step takes.

        Args:
            division: its segments and micro-batches.
            memory_format: "keep" or "channels_last".
            plan: how its convolutions are computed; None: by torch.
            names: modules whose calls are noted; None: of torch's undivided step, all modules that
                hold others or belong to a sequence, and else none, because noting calls inside a
                segment may change what it keeps.

        Raises:
            ConfigError: the step does not run on fake tensors.
        """
        # What compiled code takes cannot be foreseen: the step is foreseen as it was written.
        division = division._replace(compiled=None)
        if names is None and (division != WHOLE or plan is not None):
            names = ()
        noted = None if names is None else frozenset(names)
        key = division, memory_format, self.batch, noted
        if plan is None and key in self._steps:
            return self._steps[key]
        arguments, began = (division, memory_format, plan, names), monotonic()
        try:
            found = self._foreseen(*arguments)
        except ConfigError as error:
            if self._is_real or not isinstance(error.__cause__, RuntimeError):
                raise
            if self._values is None and isinstance(error.__cause__, DataDependentOutputException):
                with suppress(ConfigError):  # which the next attempt raises, too
                    self._take_larger("_values", [*map(self._read_values, EXTREMES)])
                return self.step(*arguments[:3], names=names)
            self._require_room(error)
            self._is_real = True
            self._take_larger("_state", EXTREMES)
            found = self._foreseen(*arguments)
        self.took_s = monotonic() - began
        if plan is None:
            self._steps[key] = found
        return found

    def _take_larger(self, name: str, options: Sequence[Any]) -> None:
        """Set an attribute so that a step needs more memory: layers may be left out by chance."""
        peaks = []
        for one in options:
            setattr(self, name, one)
            peaks.append(self._foreseen(WHOLE, "keep", None, ()).peak_bytes)
        setattr(self, name, options[peaks.index(max(peaks))])

    def _require_room(self, error: ConfigError) -> None:
        """Raise the error, unless there is memory to run real steps where fake ones fail."""
        if self.batch > self._given:
            raise error
        few = self.of_batch(min(self.batch, _FEW))
        few._is_real = True
        needed = few.step(names=()).own_bytes * self.batch / few.batch
        if needed > self.free_bytes:
            raise ConfigError(
                f"a step of this model cannot be foreseen without running it, and it would need "
                f"about {format_bytes(round(needed))}, which is more than there is: "
                f"{first_line(error.__cause__ or error)}"
            ) from error

    def _read_values(self, state: int) -> dict[str, list[Any]]:
        """The numbers that forward reads from tensors: it is run, without a graph."""
        reader = _Reader()

        def run(model: nn.Module, examples: list[Any]) -> None:
            with torch.no_grad(), SingleNumbers(state):
                for inputs in examples:
                    run_step(model, inputs, backward=False)

        with uninterrupted(), as_written(self.model):
            record_step(original_of(self.model), self._examples, reader, run, real=True)
        return reader.values

    def _foreseen(
        self,
        division: StepDivision,
        memory_format: str,
        plan: Plan | None,
        names: Collection[str] | None,
    ) -> StepProfile:
        passes = OPS if self.is_training else ("fprop",)
        log = _StepLog(passes, self.backend, plan, self.operators, _sole(type(self.backend)))
        log.values = self._values or {}
        roots: list[ModuleCall] = []
        held, known = self.held, len(self.writers)

        def run(model: nn.Module, examples: list[Any]) -> None:
            nonlocal held
            if self.batch != self._given:
                before = bytes_of(examples)
                examples[:] = [
                    next(parts_of(one, self.batch))
                    if self._is_real
                    else resized(one, self._given, self.batch)
                    for one in examples
                ]
                held = replace(held, others=held.others + bytes_of(examples) - before)
            inputs = [one for one in tree_leaves(examples) if isinstance(one, Tensor)]
            log.begin([*model.parameters(), *model.buffers()], inputs)
            noted = self._names if names is None else names
            watcher = ModuleWatcher(noted, log.mark, self.writers)
            roots.append(watcher.root)
            singles = SingleNumbers(self._state) if self._is_real else nullcontext()
            with gradient_mode(self.is_training), _with_random_states(log), singles:
                watcher.run(model, partial(_run_all, model, examples, division, self.is_training))

        with (
            _without_garbage(),
            uninterrupted(),
            as_written(self.model),
            nullcontext() if self._is_real else without_strays(self.model) as log.watched,
        ):
            record_step(
                *(original_of(self.model), self._examples, log, run),
                *(memory_format, division.segments),
                real=self._is_real,
            )
        if log.is_bypassed:
            raise ConfigError(
                "what a step allocates cannot be foreseen: its modules run in several threads"
            )
        if len(self.writers) > known:
            return self._foreseen(division, memory_format, plan, names)
        # Of a forward that is repeated in backward, the names of modules are not known.
        torchs = self.torchs(log.layers if division == WHOLE else None)
        found = _profile(log, roots[0], held, {layer for _, layer in torchs})
        # Of the many other steps that a search foresees, no plan tells what they hold.
        is_told = division == WHOLE or plan is not None
        return replace(
            found,
            traced=Traced(log.layers, frozenset(log.biased)),
            blocks=largest(_blocks(log.events)) if is_told else (),
        )


@contextmanager
def _without_garbage() -> Iterator[None]:
    """Context in which tensors in cycles of references stay; else they would be freed by chance."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


@contextmanager
def _with_random_states(log: _StepLog) -> Iterator[None]:
    """Context in which a log sees the random states that a step keeps, which no operator makes."""
    read = torch.get_rng_state

    def state() -> Tensor:
        found = read()
        log.keep(found)
        return found

    torch.get_rng_state = torch.random.get_rng_state = state
    try:
        yield
    finally:
        torch.get_rng_state = torch.random.get_rng_state = read


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
    spans, split_spans = list[Span](), list[Span]()
    times, calls = list[int](), list[ConvolutionCall]()
    highest = highest_split = 0  # since the last mark
    for number, event in enumerate(log.events):
        if event.is_mark:
            spans.append(Span(highest, now))
            split_spans.append(Span(highest_split, now))
            times.append(time_ns)
            highest = highest_split = now
            continue
        now += event.change
        within = split = now
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
            split = within
            if is_limited:
                chunks = min(_CHUNKS, *(one.batch for one in event.kernels))
                split = beside + max(0, within - beside) // chunks
        own_peak = max(own_peak, now)
        highest, highest_split = max(highest, within), max(highest_split, split)
        if within > peak:
            peak, top = within, number
    spans.append(Span(highest, now))
    split_spans.append(Span(highest_split, now))
    return StepProfile(
        held=held,
        root=root,
        spans=spans,
        split_spans=split_spans,
        times_ns=times,
        own_peak_bytes=held.total + own_peak,
        calls=tuple(calls),
        alive=_alive(log.events[: top + 1]),
        notes=log.notes,
    )


def _blocks(events: Sequence[_Event]) -> Iterator[Block]:
    """What is allocated and freed; the number of an event is its place, from 1 on."""
    ends = {one.storage: place for place, one in enumerate(events, 1) if one.change < 0}
    for place, event in enumerate(events, 1):
        if event.change > 0:
            yield Block(event.module or "the model", event.change, place, ends.get(place - 1, 0))
        if event.inside is not None and event.inside.workspace_bytes:
            name = f"inside an operator of {event.module or 'the model'}"
            yield Block(name, event.inside.workspace_bytes, place, place + 1)


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


# Bytes of state that optimisers keep for each byte of a trained parameter.
OPTIMIZERS = {
    **dict.fromkeys(("sgd",), 0),
    **dict.fromkeys(("momentum", "rmsprop", "adagrad", "lion"), 1),
    **dict.fromkeys(("adam", "adamw"), 2),
}


def foresee(
    model: nn.Module,
    example_inputs: Any,
    plan: Plan | None = None,
    config: Config | None = None,
    *,
    optimizer: str | None = None,
    batch: int | None = None,
    operators: Operators = "whole",
) -> Foresight:
    """Foresee the peak memory and the time of a step, without running it.

    The model's own code runs on tensors without memory; each of its operators is called once,
    alone, to measure what it allocates inside and how long it takes. The model and the states of
    random generators do not change.

    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())
    >>> found = foresee(model, torch.ones(4, 3, 32, 32))
    >>> found.batch, found.peak_bytes > 4 * 8 * 30 * 30 * 4
    (4, True)

    Args:
        model: any module, compiled or not; a compiled model is foreseen as it was written.
        example_inputs: a tensor, a tuple of positional inputs or a dict of keyword inputs; or a
            list of these for several input sizes.
        plan: the plan that the step follows; None: torch's own step.
        config: the settings; only `ops` and `backend` matter; default: `Config()`.
        optimizer: its state counts, too: sgd, momentum, rmsprop, adagrad, lion, adam or adamw;
            None: the state that optimisers of the model have now.
        batch: samples of the step; None: those of the example.
        operators: "whole": call each operator on all samples; "in part": on as many as fit 64 MiB;
            "none": call none, which leaves out what operators need inside, and all times.

    Raises:
        ConfigError: the model does not accept the inputs, or a setting is not known.
    """
    config = require_config(config)
    foreseer = foreseer_of(model, example_inputs, plan, config, optimizer, operators)
    foreseer = foreseer.of_batch(batch or foreseer.batch)
    if plan is None:
        found = foreseer.step()
    else:
        found = foreseer.step(plan.division, plan.memory_format, plan)
        if plan.compiles:
            why = "the plan has the model compiled, and its step is foreseen as it was written"
            found = replace(found, notes=(*found.notes, why))
    return found.foresight(foreseer.batch, foreseer.is_training)


def foreseer_of(
    model: nn.Module,
    inputs: Any,
    plan: Plan | None,
    config: Config,
    optimizer: str | None,
    operators: Operators,
) -> Foreseer:
    """A foreseer of steps with these settings; its arguments are as for `foresee`."""
    backend = open_backend(config.backend if plan is None else plan.backend)
    found = Foreseer(model, inputs, backend, config.ops != ("fprop",), operators=operators)
    if optimizer is not None:
        found.held = with_state(found.held, model, optimizer)
    return found


def largest_batch(peak_at: Callable[[int], int], batch: int, budget: int) -> tuple[int, int]:
    """The largest batch within a budget, and its peak; (0, 0) if not even one sample fits.

    >>> largest_batch(lambda batch: 10 + 10 * batch, 4, 125)
    (11, 120)

    Args:
        peak_at: peak in bytes of a step of a batch; it must not fall with the batch.
        batch: where to begin.
        budget: memory budget in bytes.
    """
    fits, exceeds = (0, 0), 0
    peaks: dict[int, int] = {}
    for trial in count(1):
        if exceeds and exceeds - fits[0] <= 1:
            break
        peaks[batch] = peak_at(batch)
        if peaks[batch] <= budget:
            fits = batch, peaks[batch]
        else:
            exceeds = batch
        # Peaks grow nearly in a line, which the two batches nearest to the budget show.
        near = sorted(peaks, key=lambda one: abs(peaks[one] - budget))[:2]
        most = exceeds - 1 if exceeds else _MOST_BATCH
        # Where they do not, halving or doubling does not take long.
        if len(near) == 1 or trial % _HALVED == 0:
            batch = (fits[0] + exceeds) // 2 if exceeds else 2 * batch
        else:
            slope = (peaks[near[1]] - peaks[near[0]]) / (near[1] - near[0])
            batch = near[0] + int((budget - peaks[near[0]]) / max(1.0, slope))
        batch = min(max(batch, fits[0] + 1), most)
        if fits[0] >= most:
            break
    return fits


def with_state(held: Held, model: nn.Module, optimizer: str) -> Held:
    """What is held with the state of an optimiser of this name.

    Raises:
        ConfigError: the name is not known.
    """
    if optimizer not in OPTIMIZERS:
        raise ConfigError(
            f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {quoted(optimizer)}"
        )
    trained = [one for one in model.parameters() if one.requires_grad]
    return replace(held, optimizers=OPTIMIZERS[optimizer] * bytes_of(trained))
