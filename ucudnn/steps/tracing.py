"""Find the convolutions of a model's forward and backward, without computing them.

Convolutions are recorded at torch's dispatcher, below autograd and autocast. There, convolutions of
modules and of functional calls look alike, and have the dtype and the layout in which they would be
computed.
"""

from __future__ import annotations

import logging
import signal
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import FrameType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_leaves, tree_map_only

from ucudnn.backends.tensors import CHANNELS_LAST_BY_RANK, problem_of, uses_channels_last
from ucudnn.errors import ConfigError, UnsupportedError, first_line
from ucudnn.execution.channels_last import lay_out_copy
from ucudnn.execution.compiling import is_compiled, original_of, uncompiled
from ucudnn.execution.micro_batching import segment_
from ucudnn.problem import OPS, Problem, strides_of
from ucudnn.segment import WHOLE, Segment, StepDivision
from ucudnn.steps.copying import copied
from ucudnn.steps.run import MODEL_ERRORS, parts_of, run_step, same_random_states, tensors_of
from ucudnn.steps.strays import Watched, without_strays

# Where operators are that exchange tensors between ranks.
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
# Below autograd and autocast every convolution of torch is one of these two operators.
_CONVOLUTION = torch.ops.aten.convolution.default
_CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default
# Operators whose result loses the channels_last layout on fake tensors, but keeps it on real
# tensors (torch 2.13).
_PADS = (torch.ops.aten.reflection_pad3d.default, torch.ops.aten.replication_pad3d.default)
_VIEW = torch.ops.aten.view.default


def trace(
    model: nn.Module, example_inputs: Any, *, real: bool = False, device_type: str | None = None
) -> list[Problem]:
    """List every convolution that one training step would compute, in order, without computing it.

    Runs a copy of the model on fake tensors, which need neither memory nor a device; the model is
    not touched, and random states (torch's, Python's, NumPy's) are restored. Hooks are called with
    fake tensors. If no parameter or input requires a gradient, there are no backward problems.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1))
    >>> [problem.op for problem in trace(model, torch.empty(4, 3, 9, 9))]
    ['fprop', 'fprop', 'dgrad', 'wgrad', 'wgrad']

    Args:
        model: any module; autocast applies if it is active. Parts compiled by torch.compile are
            traced as they were written.
        example_inputs: a tensor, a tuple of positional inputs or a dict of keyword inputs; or a
            list of these for several input sizes.
        real: True: compute one step by a real copy of the model, for a model whose control flow or
            hooks need values. What forward stores in globals and in classes stays there.
        device_type: "cpu" or "cuda": the kind of device to trace for, which decides on layouts and
            TF32; default: that of the tensors.

    Raises:
        ConfigError: the model does not accept the inputs, cannot be copied, or stores fake tensors
            in a place that cannot be restored.
    """
    traced = trace_layers(model, example_inputs, real=real, device_type=device_type)
    return traced.problems


class Traced(NamedTuple):
    """The convolutions of a model's step."""

    layers: list[tuple[str, Problem]]  # (name of the module, problem) of each call, in order
    biased: frozenset[Problem] = frozenset()  # problems to whose result a layer adds a bias

    @property
    def problems(self) -> list[Problem]:
        """The problem of each call, in order."""
        return [problem for _, problem in self.layers]


def trace_layers(
    model: nn.Module,
    example_inputs: Any,
    passes: Collection[str] = OPS,
    *,
    real: bool = False,
    device_type: str | None = None,
    memory_format: str = "keep",
    division: StepDivision = WHOLE,
) -> Traced:
    """Trace as `trace` does, and return each problem with the name of the module that computes it.

    With `memory_format="channels_last"`, trace the model as if `convert_` had converted it to that
    layout.
    """
    recorder = StepRecorder(passes, device_type)
    several = example_inputs if isinstance(example_inputs, list) else [example_inputs]
    several = [part for one in several for part in parts_of(one, division.micro_batch)]
    step = partial(run_step, backward=set(passes) != {"fprop"})
    with uninterrupted(), as_written(model):
        for inputs in several:
            require_tensors(inputs)
            with nullcontext() if real else without_strays(model) as recorder.watched:
                # If torch.compile has wrapped the model, the module inside the wrapper is traced,
                # because `convert_` uses the names of modules in that one.
                record_step(
                    *(original_of(model), inputs, recorder, step, memory_format, division.segments),
                    real=real,
                )
    return Traced(recorder.layers, frozenset(recorder.biased))


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Context that delays Ctrl-C to its end; a second Ctrl-C takes effect at once.

    For fake tensors, torch calls Python in places where an exception would end the process.
    """
    before = signal.getsignal(signal.SIGINT)
    # Signal handlers run in the main thread, and can be changed only there. So nothing is delayed
    # if this is another thread, or if no handler in Python is set.
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    waiting = list[tuple[int, FrameType | None]]()

    def wait(number: int, frame: FrameType | None) -> None:
        waiting.append((number, frame))
        if len(waiting) > 1:
            before(number, frame)

    signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if len(waiting) == 1:
            before(*waiting[0])


def require_tensors(inputs: Any) -> None:
    """Raise a ConfigError for numbers in place of tensors."""
    # The most likely mistake is to pass a shape, for which torch's own error would name no
    # argument.
    is_shape = isinstance(inputs, (tuple, torch.Size)) and inputs
    if is_shape and all(isinstance(size, int) for size in inputs):
        raise ConfigError(
            f"example_inputs must hold tensors, got the numbers {tuple(inputs)}; for a shape give "
            f"torch.empty{tuple(inputs)}"
        )


def record_step(
    model: nn.Module,
    inputs: Any,
    recorder: StepRecorder,
    step: Callable[[nn.Module, Any], object],
    memory_format: str = "keep",
    segments: Sequence[Segment] = (),
    *,
    real: bool = False,
) -> None:
    """Run a step of a copy of a model on fake tensors, under a recorder.

    Args:
        model: any module.
        inputs: one example input.
        recorder: sees every operator that the step calls.
        step: runs the step; it is called with the copies of model and inputs, and must not keep
            them.
        memory_format: as for `trace_layers`.
        segments: segments that the copy has.
        real: True: the copy and its inputs have real tensors.

    Raises:
        ConfigError: the model cannot be copied, or the step fails.
    """
    # `allow_non_fake_inputs`: real tensors that a model keeps outside of its parameters and buffers
    # become fake when they are used.
    fake_mode = None if real else FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with (
            # The caller may have disabled gradients, and then there would be no backward.
            torch.inference_mode(False),
            torch.enable_grad(),
            # Anomaly detection reads the values of gradients, which fake tensors do not have.
            torch.autograd.set_detect_anomaly(False),
            same_random_states(on_devices=real),
            _without_log(),
        ):
            twin, own_inputs = copied(model, inputs, fake_mode)
            segment_(twin, segments)
            if fake_mode is not None:
                recorder.watch([*twin.parameters(), *twin.buffers()])
            if memory_format == "channels_last":
                lay_out_copy(twin)
            # The recorder is entered after the fake mode, so that it sees each call first: torch
            # passes a call to the mode that was entered last.
            with fake_mode or nullcontext(), recorder, _module_names(recorder, twin):
                step(twin, own_inputs)
    except UnsupportedError as error:
        raise ConfigError(f"no step can be traced: {error}") from error
    except MODEL_ERRORS as error:
        shapes = [tuple(leaf.shape) for leaf in tensors_of(inputs)]
        remedy = "" if real else "; if it needs values and not shapes alone, use real=True"
        raise ConfigError(
            f"the model does not accept example inputs of shapes {shapes}: {first_line(error)}"
            f"{remedy}"
        ) from error


@contextmanager
def _without_log() -> Iterator[None]:
    """Context in which torch does not log errors of fake tensors, because it also raises them."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


class StepRecorder(TorchDispatchMode):
    """Records every convolution that reaches the dispatcher, below autograd and autocast."""

    def __init__(self, passes: Collection[str], device_type: str | None) -> None:
        super().__init__()
        self.passes = passes
        self.layers: list[tuple[str, Problem]] = []
        self.biased: set[Problem] = set()
        self.modules: list[str] = []
        # Weak references to all fake tensors of a trace; None while a real step is traced.
        self.watched: Watched | None = None
        # True if modules run where the recorder does not see their operators.
        self.is_bypassed = False
        self._device_type = device_type
        self._forward_names: dict[Problem, list[str]] = {}

    @property
    def module(self) -> str:
        """The innermost module that runs, for people."""
        return self.modules[-1] or "the model" if self.modules else "backward"

    def watch(self, tensors: Iterable[Tensor]) -> None:
        """Keep weak references to fake tensors."""
        if self.watched is not None:
            self.watched += map(ref, tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self._dispatched(func, args, kwargs)
        self.watch(tensors_of(result))
        return result

    def _dispatched(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func.namespace in _COLLECTIVES:
            raise UnsupportedError(
                f"it exchanges tensors with other ranks ({func}), which do not run the step"
            )
        if func is _CONVOLUTION:
            x, w, bias, *geometry = args
            self._record_forward(x, w, bias, geometry)
            result = func(*args, **(kwargs or {}))
            if self._device_type in (None, x.device.type):
                return result
            # The trace is for another kind of device than that of x. The result gets the layout
            # that it would have there, because the next operators must see that layout.
            nhwc = uses_channels_last(x, w, geometry, self._device_type)
            form = CHANNELS_LAST_BY_RANK[x.dim() - 2] if nhwc else torch.contiguous_format
            return result.contiguous(memory_format=form)
        if func is _CONVOLUTION_BACKWARD:
            _, x, w, _, *geometry, mask = args
            self._record_backward(x, w, geometry, mask)
        result = func(*args, **(kwargs or {}))
        if func in _PADS:
            return result.contiguous(memory_format=suggest_memory_format(args[0]))
        is_simple = func is _VIEW or torch.Tag.pointwise in func.tags
        if is_simple and isinstance(result, FakeTensor) and 1 in result.shape:
            return result.as_strided(result.shape, _real_strides(func, args, kwargs, result))
        return result

    def _problem(self, which: str, x: Tensor, w: Tensor, geometry: list[Any]) -> Problem | None:
        arguments = [*geometry, self._device_type]
        return problem_of(which, x, w, *arguments)

    def _record_forward(
        self, x: Tensor, w: Tensor, bias: Tensor | None, geometry: list[Any]
    ) -> None:
        problem = self._problem("fprop", x, w, geometry)
        if problem is not None:
            # The innermost running module computes the convolution. Its name is kept even if only
            # backward is asked for, because backward looks the name up.
            name = self.modules[-1] if self.modules else ""
            self._forward_names.setdefault(problem, []).append(name)
            if "fprop" in self.passes:
                self.layers.append((name, problem))
                if bias is not None:
                    self.biased.add(problem)

    def _record_backward(self, x: Tensor, w: Tensor, geometry: list[Any], mask: list[bool]) -> None:
        forward = self._problem("fprop", x, w, geometry)
        if forward is None:
            return
        # Backward reaches the calls of one shape in the reverse order of forward, so the last name
        # is the right one.
        names = self._forward_names.get(forward)
        name = names.pop() if names else ""
        for which, wanted in zip(OPS[1:], mask, strict=False):
            problem = self._problem(which, x, w, geometry)
            if wanted and which in self.passes and problem is not None:
                self.layers.append((name, problem))


def _real_strides(func: Any, args: Any, kwargs: Any, fake: Tensor) -> tuple[int, ...]:
    """The strides that an operator's result would have on real tensors.

    On fake tensors, an axis of one element may get another stride than on real tensors. If a batch
    has a single sample, or images have one pixel, torch chooses the layout of later results by such
    a stride.
    """
    if func._schema.is_mutable:
        return fake.stride()
    operands = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    # If all operands are contiguous and have the shape of the result, torch's real elementwise
    # kernels return a contiguous result, but its meta kernels may not. The rule does not hold for
    # a call that has a number in place of a tensor operand.
    is_alike = len(operands) == sum(str(one.type) == "Tensor" for one in func._schema.arguments)
    if is_alike and all(one.shape == fake.shape and one.is_contiguous() for one in operands):
        return strides_of(fake.shape, is_channels_last=False)

    def without_memory(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    # The fake mode and the recorder are disabled here, because they would treat this call as one by
    # the model.
    with _disable_current_modes():
        args, kwargs = tree_map_only(Tensor, without_memory, (args, kwargs or {}))
        try:
            found: Tensor = func(*args, **kwargs)
        except NotImplementedError:  # there is no meta kernel: a real kernel has made `fake`
            found = fake
    return found.stride()


@contextmanager
def as_written(model: nn.Module) -> Iterator[None]:
    """Context in which compiled modules run as they were written, without a warning about hooks."""
    with uncompiled(is_compiled(model)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*when there are global hooks on modules")
        yield


@contextmanager
def _module_names(recorder: StepRecorder, model: nn.Module) -> Iterator[None]:
    """Context that keeps the names of the running modules as a stack in the recorder."""
    names = {id(module): name for name, module in model.named_modules()}

    def enter(module: nn.Module, inputs: object) -> None:
        del inputs
        # Another thread has no modes of this one.
        if id(module) in names and recorder not in _get_current_dispatch_mode_stack():
            recorder.is_bypassed = True
        recorder.modules.append(names.get(id(module), ""))

    def leave(module: nn.Module, inputs: object, output: object) -> None:
        del module, inputs, output
        recorder.modules.pop()

    with (
        register_module_forward_pre_hook(enter),
        # With `always_call` the hook is also called if forward raises, because the name must not
        # stay on the stack.
        register_module_forward_hook(leave, always_call=True),
    ):
        yield
