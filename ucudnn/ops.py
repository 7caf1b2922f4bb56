"""The convolution that layers and `installed` call: each of its passes follows its own plan."""

from __future__ import annotations

import warnings
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import DispatchKey, DispatchKeySet, Tensor
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from ucudnn.backends import AbstractBackend, open_backend, original
from ucudnn.backends.tensors import memory_format, strides_of
from ucudnn.config import Config
from ucudnn.errors import BusyError, PlanError, UcudnnError, UnsupportedError
from ucudnn.execute import Call, as_kernel, build
from ucudnn.forking import ForkSafeLock
from ucudnn.plan import Plan
from ucudnn.problem import OPS, Problem
from ucudnn.tracing import problem_of, uses_channels_last
from ucudnn.untraced import untraced

_aten = torch.ops.aten
# Shapes whose split is remembered; a training run has few, a server with free sizes may have many.
_MOST_SHAPES = 4096
_MOST_WARNINGS = 8
_PLAIN = (Tensor, torch.nn.Parameter)
_keys_of: Any = torch._C._dispatch_keys


def _odd_keys() -> int:
    """Bits of all dispatch keys but those of tensors that are simply their memory's elements."""
    names = ["ADInplaceOrView", "Conjugate"]
    for device in original.DISPATCH_KEYS.values():
        names += [device, f"Autograd{device}", f"Autocast{device}"]
    plain = 0
    for name in names:
        plain |= DispatchKeySet(getattr(DispatchKey, name)).raw_repr()
    return ~plain


_ODD_KEYS = _odd_keys()
_FUNCTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)
_TRANSPOSED_FUNCTIONS = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)


class Geometry(NamedTuple):
    """The arguments of a convolution that are not tensors, in aten's order."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int


class Layer(NamedTuple):
    """What kernels of one layer have in common, whatever its input and dtype are."""

    in_channels: int
    out_channels: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int

    @classmethod
    def of(cls, problem: Problem) -> Layer:
        """The layer that a problem could belong to.

        >>> Layer.of(Problem("wgrad", 2, 3, 8, (9, 9), (3, 3))).kernel_size
        (3, 3)
        """
        return cls(*(getattr(problem, name) for name in cls._fields))


class Bound:
    """A convolution of operands of certain shapes, with what computes each of its passes.

    Args:
        runner: whose plan it follows.
        geometry: stride, padding and so on.
        problems: by pass ("fprop", "dgrad", "wgrad"); without those that only torch computes.
        x: an input of these shapes.
        w: a filter of these shapes.
    """

    __slots__ = ("_bias", "_dy", "_is_last", "_passes", "_runner", "geometry", "problems")

    def __init__(
        self, runner: Runner, geometry: Geometry, problems: dict[str, Problem], x: Tensor, w: Tensor
    ) -> None:
        self._runner = runner
        self.geometry = geometry
        self.problems = problems
        self._passes: dict[str, _Pass | None] = {op: None for op in OPS if op not in problems}
        if not problems:
            return
        some = next(iter(problems.values()))
        output_shape = some.x_shape if geometry.transposed else some.y_shape
        self._bias = (output_shape[1:2], x.dtype, x.device)
        self._dy = (output_shape, x.dtype, x.device)
        self._is_last = uses_channels_last(x, w, geometry, x.device.type)

    def planned(self, which: str, has_bias: bool = False) -> _Pass | None:
        """What computes a pass; None where torch's own convolution does.

        Raises:
            PlanError: it has no plan and `unplanned` is "error".
        """
        try:
            return self._passes[which]
        except KeyError:
            return self._runner.bind(which, self, has_bias)

    def knows(self, which: str) -> bool:
        """Whether it was looked up what computes a pass."""
        return which in self._passes

    def follow(self, which: str, call: Call | None) -> None:
        """Let a pass be computed by a call from now on, or by torch."""
        if call is None:
            self._passes[which] = None
        else:
            strides = strides_of(call.problem.result_shape, self._is_last)
            self._passes[which] = _Pass(call, memory_format(call.problem), strides)

    def takes(self, bias: Tensor | None) -> bool:
        """False for a bias that torch refuses, and that torch must see to say so."""
        return bias is None or _signature(bias) == self._bias

    def forward(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        """The output, without a graph."""
        fprop = self.planned("fprop", bias is not None)
        if fprop is None or not self.takes(bias):
            return original.convolution(x, w, bias, *self.geometry)
        return as_kernel(fprop, x, w, bias)

    def backward(
        self, dy: Tensor, x: Tensor, w: Tensor, bias_sizes: list[int] | None, mask: list[bool]
    ) -> tuple[Tensor | None, ...]:
        """The gradients of x, w and bias that the mask asks for, without a graph."""
        dgrad = self.planned("dgrad") if mask[0] else None
        wgrad = self.planned("wgrad") if mask[1] else None
        if (dgrad or wgrad) and _signature(dy) != self._dy:
            dgrad = wgrad = None
        rest = [mask[0] and dgrad is None, mask[1] and wgrad is None, mask[2]]
        # the bias alone is torch's too where nothing is planned, to the last bit
        if rest[0] or rest[1] or not (dgrad or wgrad):
            dx, dw, db = original.convolution_backward(dy, x, w, bias_sizes, *self.geometry, rest)
        else:
            dx, dw, db = None, None, dy.sum((0, *range(2, dy.dim()))) if rest[2] else None
        if dgrad or wgrad:
            own_dx, own_dw = as_kernel(self._gradients, dgrad, wgrad, dy, x, w)
            dx, dw = own_dx if dgrad else dx, own_dw if wgrad else dw
        return dx, dw, db

    def _gradients(
        self, dgrad: _Pass | None, wgrad: _Pass | None, dy: Tensor, x: Tensor, w: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        dx = dgrad(dy, w) if dgrad else None
        a, b = (dy, x) if self.geometry.transposed else (x, dy)
        return dx, wgrad(a, b) if wgrad else None


def _signature(tensor: Tensor) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


@dataclass(frozen=True, slots=True)
class _Pass:
    """A pass that a plan computes: takes operands of any strides, returns what torch's has.

    Args:
        call: the split, bound.
        layout: that its operands must have.
        strides: of torch's own result.
    """

    call: Call
    layout: torch.memory_format
    strides: tuple[int, ...]

    def __call__(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        a, b = a.contiguous(memory_format=self.layout), b.contiguous(memory_format=self.layout)
        if bias is not None:  # which operators take for granted
            bias = bias.contiguous()
        result = self.call(a, b, bias)
        found, strides = result.stride(), self.strides
        if found == strides:
            return result
        shape = result.shape
        # along an axis of one element any stride addresses the same memory
        if all(n == 1 or s == t for n, s, t in zip(shape, found, strides, strict=True)):
            return result.as_strided(shape, strides)
        return result.new_empty_strided(shape, strides).copy_(result)


class Runner:
    """Runs convolutions by a plan: looks a split up once per shape, then reuses it.

    Args:
        plan: None: every shape is unplanned.
        config: what to do with unplanned shapes, and how to tune them; default: the plan's.
    """

    def __init__(self, plan: Plan | None, config: Config | None = None) -> None:
        self.config = config or (plan.config if plan else Config())
        self._bounds: dict[Hashable, Bound] = {}
        self._backend: AbstractBackend | None = None
        self._lock = ForkSafeLock()  # autograd runs backward in threads of its own
        self._tuning = False
        self._warned: set[Problem] = set()
        self._follow(plan)

    def _follow(self, plan: Plan | None) -> None:
        self.plan = plan
        kernels = plan.kernels if plan else ()
        self._layers = {Layer.of(kernel.problem) for kernel in kernels}
        self.filter_shapes = {kernel.problem.w_shape for kernel in kernels}

    def __reduce__(self) -> tuple[type[Runner], tuple[Plan | None, Config]]:
        return type(self), (self.plan, self.config)

    def __deepcopy__(self, memo: object) -> Runner:
        return self  # plans are values: copies of a model may share one

    def bound(self, x: Tensor, w: Tensor, geometry: Geometry) -> Bound:
        """The convolution of these operands, made when such are first met."""
        # looked up by what torch sees, because building a Problem costs more than a small launch
        # TF32 is the one thing that a problem depends on beside its tensors
        tf32 = x.is_cuda and original.tf32_allowed()
        key = (x.shape, x.stride(), x.dtype, w.shape, w.stride(), w.dtype, x.device, geometry, tf32)
        try:
            return self._bounds[key]
        except KeyError:
            bound = Bound(self, geometry, self._problems(x, w, geometry), x, w)
        with self._lock:
            if len(self._bounds) >= _MOST_SHAPES:
                self._bounds.clear()
            return self._bounds.setdefault(key, bound)

    def _problems(self, x: Tensor, w: Tensor, geometry: Geometry) -> dict[str, Problem]:
        here = x.device.type
        found = {which: problem_of(which, x, w, *geometry) for which in OPS}
        problems = {
            which: self._as_planned(problem, x)
            for which, problem in found.items()
            if problem is not None and which in self.config.ops
        }
        planned_for = self.plan.device.type if self.plan else here
        if problems and planned_for != here:
            self._warn(
                next(iter(problems.values())),
                f"the plan was made for {planned_for} and the tensors are on {here}: torch's own "
                f"convolution computes them; tune with the model there",
            )
            return {}
        return problems

    def _as_planned(self, problem: Problem, x: Tensor) -> Problem:
        """The problem channels-last, where that is planned and how its input lies in memory.

        Strides of a single sample do not show it: torch takes some for channels first, though it
        takes larger batches of the same layer for channels-last.
        """
        last = replace(problem, layout="nhwc") if problem.rank > 1 else problem
        if self.plan is None or self.plan.covers(problem) or not self.plan.covers(last):
            return problem
        return last if x.is_contiguous(memory_format=memory_format(last)) else problem

    def bind(self, which: str, bound: Bound, has_bias: bool = False) -> _Pass | None:
        """Look up what computes a pass, and let it be computed so from now on."""
        problem = bound.problems[which]
        with self._lock:
            if self._tuning:  # what tuning itself computes is torch's own
                return None
            if not bound.knows(which):
                try:
                    bound.follow(which, as_kernel(self._bind, problem, has_bias))
                except BusyError as error:  # the next call tries again
                    self._warn(problem, f"{error}: torch's own convolution computes it until then")
                    return None
        return bound.planned(which)

    def _bind(self, problem: Problem, has_bias: bool) -> Call | None:
        if self.plan is None or not self.plan.covers(problem):
            self._unplanned(problem, has_bias)
        if self.plan is None or not self.plan.covers(problem):
            return None
        split = self.plan.split(problem)
        # torch's own call fuses the bias and computes both gradients at once
        if split.is_default:
            return None
        if self._backend is None:
            self._backend = open_backend(self.plan.backend)
        try:
            return build(self._backend, problem, split)
        except UnsupportedError as error:  # other threads or versions than it was planned for
            self._warn(problem, f"{error}: torch's own convolution computes it; tune again")
            return None

    def _warn(self, problem: Problem, sentence: str) -> None:
        """Say it once for each shape, whatever its pass and batch, and not for ever."""
        same = replace(problem, op="fprop", batch=1)
        if same in self._warned or len(self._warned) >= _MOST_WARNINGS:
            return
        self._warned.add(same)
        last = len(self._warned) == _MOST_WARNINGS
        rest = " (there may be more of these, which are not reported)" if last else ""
        warnings.warn(sentence + rest, UserWarning, stacklevel=4)

    def _unplanned(self, problem: Problem, has_bias: bool) -> None:
        if self.plan is not None and Layer.of(problem) not in self._layers:
            return  # of a layer that the plan was not made for
        if self.config.unplanned == "error":
            raise PlanError(
                f"{problem} has no plan and unplanned='error'; tune with an example input of this "
                f"shape and at least this batch, or set unplanned='torch'"
            )
        if self.config.unplanned == "torch":
            self._warn(
                problem,
                f"{problem} has no plan: torch's own convolution computes it; tune with an example "
                f"input of this shape and at least this batch, or set unplanned='tune'",
            )
            return
        self._tune(problem, has_bias)

    def _tune(self, problem: Problem, has_bias: bool) -> None:
        _require_idle(problem)
        # a child forked from now on, where nobody tunes, keeps this and torch's own convolution
        self._tuning = True
        try:
            from ucudnn.tuning.tuner import tune_problems  # layers that never tune need no solver

            biased = [problem] if has_bias else []
            tuned = tune_problems([("", problem)], self.config, biased=biased)
        except BusyError:
            raise
        except (UcudnnError, OSError, RuntimeError) as error:  # which must not end a training step
            self._warn(
                problem,
                f"torch's own convolution computes {problem}, because tuning failed: {error}",
            )
            return
        finally:
            self._tuning = False
        kernels = (*self.plan.kernels, *tuned.kernels) if self.plan else tuned.kernels
        self._follow(replace(self.plan or tuned, kernels=kernels))


def _require_idle(problem: Problem) -> None:
    """Refuse to tune what would get into somebody's recording.

    Raises:
        BusyError: a CUDA graph is captured or torch's profiler runs.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        what = "a CUDA graph is captured"
    elif torch._C._autograd._profiler_enabled():
        what = "torch's profiler runs"
    else:
        return
    raise BusyError(f"{problem} has no plan and cannot be tuned while {what}")


@untraced
def convolution(
    runner: Runner, x: Tensor, w: Tensor, bias: Tensor | None, geometry: Geometry
) -> Tensor:
    """A convolution whose forward, backward-data and backward-filter follow the runner's plan.

    Args:
        runner: the plan.
        x: shape (N, C, *spatial) or without N.
        w: shape (K, C / groups, *kernel); transposed (C, K / groups, *kernel).
        bias: shape (K,) or None.
        geometry: stride, padding and so on.
    """
    if not _only_plain_tensors(*((x, w) if bias is None else (x, w, bias))):
        return _torchs(x, w, bias, geometry)
    if x.dim() == len(geometry.stride) + 1 and x.numel() > 0:
        return convolution(runner, x.unsqueeze(0), w, bias, geometry).squeeze(0)
    device_type = x.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        x, w = _cast(x, dtype), _cast(w, dtype)
        bias = None if bias is None else _cast(bias, dtype)
    bound = runner.bound(x, w, geometry)
    graph = torch.is_grad_enabled()
    # where every pass that this call leads to is torch's own, torch's node is cheaper
    is_planned = (
        bound.planned("fprop", bias is not None)
        or (graph and x.requires_grad and bound.planned("dgrad"))
        or (graph and w.requires_grad and bound.planned("wgrad"))
    )
    if not (is_planned and bound.takes(bias)):
        return _torchs(x, w, bias, geometry)
    if not graph:
        return bound.forward(x, w, bias)
    result: Tensor = _Convolution.apply(bound, x, w, bias)
    return result


def _only_plain_tensors(*tensors: Tensor) -> bool:
    """False where something looks on or transforms, to which torch's own operator must be shown.

    That is: tensor subclasses and modes (fake tensors, counters, selective checkpoints),
    torch.func, forward-mode differentiation, torch.jit.trace, and tensors that are not simply their
    memory's elements: negated lazily, zero without memory, sparse, nested, on different devices.
    """
    for tensor in tensors:
        if type(tensor) not in _PLAIN or _keys_of(tensor).raw_repr() & _ODD_KEYS:
            return False
        if tensor.device != tensors[0].device:
            return False
    c = torch._C
    return (
        not c._len_torch_dispatch_stack()
        and (not c._len_torch_function_stack() or _only_default_devices())
        and not c._are_functorch_transforms_active()
        and c._get_tracing_state() is None
        and forward_ad._current_level < 0
    )


def _only_default_devices() -> bool:
    """Whether all function modes are `with torch.device(...)`, which only acts on factories."""
    return all(type(mode) is DeviceContext for mode in _get_current_function_mode_stack())


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)


def _torchs(x: Tensor, w: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    stride, padding, dilation, transposed, output_padding, groups = geometry
    if transposed:
        function = _TRANSPOSED_FUNCTIONS[len(stride) - 1]
        return function(x, w, bias, stride, padding, output_padding, groups, dilation)
    return _FUNCTIONS[len(stride) - 1](x, w, bias, stride, padding, dilation, groups)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bound: Bound, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.bound = bound
        ctx.bias_sizes = None if bias is None else list(bias.shape)
        return bound.forward(x, w, bias)

    @staticmethod
    @untraced
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        x, w = ctx.saved_tensors
        _, *mask = ctx.needs_input_grad
        # aten's own operator differentiates again and is seen by others; planned calls are not
        if torch.is_grad_enabled() or not _only_plain_tensors(dy, x, w):
            geometry = ctx.bound.geometry
            backward = _aten.convolution_backward.default
            return None, *backward(dy, x, w, ctx.bias_sizes, *geometry, mask)
        return None, *ctx.bound.backward(dy, x, w, ctx.bias_sizes, mask)


def require_same_device(plan: Plan) -> None:
    """Refuse a plan for other hardware; warn of one for other versions or threads.

    Raises:
        PlanError: the plan was made for another device.
    """
    backend = open_backend(plan.backend)
    device, software = backend.device(), backend.software()
    threads = backend.conditions().threads
    if plan.device != device:
        raise PlanError(
            f"the plan was made for {plan.device}, this process runs on {device}; tune here, "
            f"or load a plan made for this device"
        )
    if plan.software != software:
        warnings.warn(
            f"the plan was made with {plan.software}, this process runs {software}: its results "
            f"are right, its times may not be; tune again to renew it",
            UserWarning,
            stacklevel=3,
        )
    if plan.conditions.threads != threads:
        warnings.warn(
            f"the plan was made for {plan.conditions.threads} threads, this process has {threads}: "
            f"its results are right, its times may not be; set torch.set_num_threads or tune again",
            UserWarning,
            stacklevel=3,
        )
