"""The differentiable convolution of planned layers, which looks up each of its passes.

A pass (forward, gradient of x, gradient of w) with a plan is computed by the plan's call, and every
other pass by torch's own operator. Modes, tensor subclasses, torch.func and tracers observe or
transform operators. They always see torch's operator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import DispatchKey, DispatchKeySet, Tensor
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from ucudnn.backends import aten
from ucudnn.backends.registry import BACKENDS
from ucudnn.backends.tensors import memory_format, uses_channels_last
from ucudnn.execution.compiling import untraced
from ucudnn.execution.execute import Call, as_kernel
from ucudnn.problem import OPS, Problem, strides_of
from ucudnn.system.processes import ForkSafeLock

_aten = torch.ops.aten
# The largest number of shapes that are remembered. Training has few shapes; a server for inputs of
# any size has many.
_MOST_SHAPES = 4096
# Tensors must be of exactly one of these types, because a subclass may redefine its convolution
# (__torch_function__).
_PLAIN = (Tensor, torch.nn.Parameter)
_keys_of: Any = torch._C._dispatch_keys


def _odd_keys() -> int:
    """Bit mask of the dispatch keys that a plain tensor on a backend's device does not have."""
    # Autograd and autocast keys are on every ordinary tensor, also where neither is enabled.
    names = ["ADInplaceOrView", "Conjugate"]
    for entry in BACKENDS.values():
        key = entry.dispatch_key
        names += [key, f"Autograd{key}", f"Autocast{key}"]
    # The keys are one integer, so that each call tests those of a tensor by a single bitwise
    # operation.
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


class AbstractRunner(ABC):
    """Looks up the calls of convolutions, once for each shape of the operands."""

    def __init__(self) -> None:
        self._bounds: dict[Hashable, Bound] = {}
        self._lock = ForkSafeLock()  # autograd runs backward in threads of its own

    def bound(self, x: Tensor, w: Tensor, geometry: Geometry) -> Bound:
        """The `Bound` for operands of these shapes, made at the first call with them."""
        # The key consists of tensors' attributes, because building a Problem takes longer than
        # launching a small kernel. TF32 is the only setting of torch that a problem depends on.
        tf32 = x.is_cuda and aten.tf32_allowed()
        key = (x.shape, x.stride(), x.dtype, w.shape, w.stride(), w.dtype, x.device, geometry, tf32)
        try:
            return self._bounds[key]
        except KeyError:
            bound = Bound(self, geometry, self.problems(x, w, geometry), x, w)
        # The Bound was made outside the lock. If two threads made a Bound for the same key,
        # `setdefault` gives both threads the first Bound, so that they share what is looked up.
        with self._lock:
            if len(self._bounds) >= _MOST_SHAPES:
                self._bounds.clear()
            return self._bounds.setdefault(key, bound)

    @abstractmethod
    def problems(self, x: Tensor, w: Tensor, geometry: Geometry) -> dict[str, Problem]:
        """The passes of a convolution that may be planned."""

    @abstractmethod
    def bind(self, which: str, bound: Bound, has_bias: bool = False) -> Pass | None:
        """Look up the call that computes a pass, and keep it; None if torch computes the pass."""


class Bound:
    """A convolution of operands of certain shapes, with the calls of its passes."""

    __slots__ = ("_bias", "_dy", "_is_last", "_passes", "_runner", "geometry", "problems")

    def __init__(
        self,
        runner: AbstractRunner,
        geometry: Geometry,
        problems: dict[str, Problem],
        x: Tensor,
        w: Tensor,
    ) -> None:
        self._runner = runner
        self.geometry = geometry
        self.problems = problems
        # The passes that were looked up; None means that torch computes the pass. Passes that
        # cannot be planned are None from the start.
        self._passes: dict[str, Pass | None] = {op: None for op in OPS if op not in problems}
        if not problems:
            return
        some = next(iter(problems.values()))
        # A transposed convolution is planned as dgrad of a convolution whose input is its output.
        output_shape = some.x_shape if geometry.transposed else some.y_shape
        self._bias = (output_shape[1:2], x.dtype, x.device)
        self._dy = (output_shape, x.dtype, x.device)
        self._is_last = uses_channels_last(x, w, geometry, x.device.type)

    def planned(self, which: str, has_bias: bool = False) -> Pass | None:
        """The planned call of a pass; None if torch's own convolution computes it."""
        try:
            return self._passes[which]
        except KeyError:
            return self._runner.bind(which, self, has_bias)

    def knows(self, which: str) -> bool:
        """True if the call of a pass was looked up."""
        return which in self._passes

    def follow(self, which: str, call: Call | None) -> None:
        """Set the call that computes a pass from now on; None: torch computes it."""
        if call is None:
            self._passes[which] = None
        else:
            strides = strides_of(call.problem.result_shape, self._is_last)
            self._passes[which] = Pass(call, memory_format(call.problem), strides)

    def takes(self, bias: Tensor | None) -> bool:
        """False for a bias of wrong shape, dtype or device, which torch's operator then refuses."""
        return bias is None or _signature(bias) == self._bias

    def is_planned(self, x: Tensor, w: Tensor, bias: Tensor | None, graph: bool) -> bool:
        """True if a plan computes a pass of this call, or of its backward if there is a graph."""
        some = (
            self.planned("fprop", bias is not None)
            or (graph and x.requires_grad and self.planned("dgrad"))
            or (graph and w.requires_grad and self.planned("wgrad"))
        )
        return bool(some) and self.takes(bias)

    def forward(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the output, without recording a graph."""
        fprop = self.planned("fprop", bias is not None)
        if fprop is None or not self.takes(bias):
            return aten.convolution(x, w, bias, *self.geometry)
        return as_kernel(fprop, x, w, bias)

    def backward(
        self, dy: Tensor, x: Tensor, w: Tensor, bias_sizes: list[int] | None, mask: list[bool]
    ) -> tuple[Tensor | None, ...]:
        """Compute the gradients of x, w and bias that the mask asks for, without a graph."""
        dgrad = self.planned("dgrad") if mask[0] else None
        wgrad = self.planned("wgrad") if mask[1] else None
        # torch computes all gradients in two cases. If a caller of aten's operator passes a dy of
        # another shape, torch raises its error. If neither dx nor dw is planned, db must also be
        # torch's, to the bit.
        if not (dgrad or wgrad) or _signature(dy) != self._dy:
            return aten.convolution_backward(dy, x, w, bias_sizes, *self.geometry, mask)
        rest = [mask[0] and dgrad is None, mask[1] and wgrad is None, mask[2]]
        dx = dw = db = None
        if True in rest:
            dx, dw, db = self._torchs_gradients(dy, x, w, bias_sizes, rest)
        own_dx, own_dw = as_kernel(self._gradients, dgrad, wgrad, dy, x, w)
        return own_dx if dgrad else dx, own_dw if wgrad else dw, db

    def _torchs_gradients(
        self, dy: Tensor, x: Tensor, w: Tensor, bias_sizes: list[int] | None, mask: list[bool]
    ) -> tuple[Tensor | None, ...]:
        """Compute gradients that no plan computes; torch's operator computes db only with dw."""
        dx = dw = db = None
        # If torch were asked for db alone, oneDNN would compute dw as well. So db is computed by
        # the sum below.
        if mask[0] or mask[1]:
            asked = [*mask[:2], mask[1] and mask[2]]
            dx, dw, db = aten.convolution_backward(dy, x, w, bias_sizes, *self.geometry, asked)
        if mask[2] and not mask[1]:
            db = dy.sum((0, *range(2, dy.dim())))
        return dx, dw, db

    def _gradients(
        self, dgrad: Pass | None, wgrad: Pass | None, dy: Tensor, x: Tensor, w: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        dx = dgrad(dy, w) if dgrad else None
        # In the problem that is planned for a transposed convolution, x and dy change places.
        a, b = (dy, x) if self.geometry.transposed else (x, dy)
        return dx, wgrad(a, b) if wgrad else None


def _signature(tensor: Tensor) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass that a plan computes, for operands of any strides; the result has torch's strides."""

    call: Call
    layout: torch.memory_format  # in which `call` takes its operands
    strides: tuple[int, ...]  # of torch's own result

    def __call__(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute the pass, and add the bias if there is one."""
        a, b = a.contiguous(memory_format=self.layout), b.contiguous(memory_format=self.layout)
        if bias is not None:  # operators expect a contiguous bias
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


@untraced
def convolution(
    runner: AbstractRunner, x: Tensor, w: Tensor, bias: Tensor | None, geometry: Geometry
) -> Tensor:
    """A convolution whose forward, backward-data and backward-filter follow the runner's plan."""
    if not _only_plain_tensors(*((x, w) if bias is None else (x, w, bias))):
        return _torchs(x, w, bias, geometry)
    # torch accepts an unbatched input (C, *spatial); it is planned as a batch of one.
    if x.dim() == len(geometry.stride) + 1 and x.numel() > 0:
        return convolution(runner, x.unsqueeze(0), w, bias, geometry).squeeze(0)
    # Planned calls run below autocast's dispatch key, so its casts must be made here.
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, w = _cast(x, dtype), _cast(w, dtype)
        bias = None if bias is None else _cast(bias, dtype)
    bound = runner.bound(x, w, geometry)
    graph = torch.is_grad_enabled()
    # if torch computes every pass of this call, torch's own autograd node is cheaper
    if not bound.is_planned(x, w, bias, graph):
        return _torchs(x, w, bias, geometry)
    if not graph:
        return bound.forward(x, w, bias)
    # During a backward pass, a forward is mostly a recomputation by torch.utils.checkpoint, which
    # ends as soon as everything that was saved is saved again. Saving the operands first avoids
    # computing a convolution whose result nobody needs; torch's own operator saves first, too.
    saved = _save(x, w) if torch._C._current_graph_task_id() != -1 else None
    result: Tensor = _apply(bound, x, w, bias, saved)
    return result


def _only_plain_tensors(*tensors: Tensor) -> bool:
    """False if a mode, subclass or transform is active, which must see torch's operator.

    It is also False for tensors whose values are not simply the elements of their memory: lazily
    negated, zero without memory, sparse, nested, or on different devices. Modes and subclasses
    include fake tensors, counters, selective checkpoints, torch.func, forward-mode differentiation
    and torch.jit.trace.
    """
    for tensor in tensors:
        if type(tensor) not in _PLAIN or _keys_of(tensor).raw_repr() & _ODD_KEYS:
            return False
    # `get_device` is -1 on a CPU. It is faster than `device`, which makes a new object each time.
    device = tensors[0].get_device()
    for tensor in tensors[1:]:
        if tensor.get_device() != device:
            return False
    c = torch._C
    # Modes, transforms and tracers act on operators, and would not see a planned kernel.
    return (
        not c._len_torch_dispatch_stack()
        and (not c._len_torch_function_stack() or _only_default_devices())
        and not c._are_functorch_transforms_active()
        and c._get_tracing_state() is None
        and forward_ad._current_level < 0
    )


def _only_default_devices() -> bool:
    """True if all function modes are `with torch.device(...)`, which only affects factories."""
    return all(type(mode) is DeviceContext for mode in _get_current_function_mode_stack())


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    # Integers and float64 are left as they are, as autocast itself does.
    if not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)


def _torchs(x: Tensor, w: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    stride, padding, dilation, transposed, output_padding, groups = geometry
    if transposed:
        function = _TRANSPOSED_FUNCTIONS[len(stride) - 1]
        return function(x, w, bias, stride, padding, output_padding, groups, dilation)
    return _FUNCTIONS[len(stride) - 1](x, w, bias, stride, padding, dilation, groups)


class _Operands(torch.autograd.Function):
    """Saves the operands of a convolution that is computed afterwards; the output is empty."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        del ctx, grads
        return None, None


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, bound: Bound, x: Tensor, w: Tensor, bias: Tensor | None, saved: Tensor | None
    ) -> Tensor:
        if saved is None:
            ctx.save_for_backward(x, w)
        ctx.operands = None if saved is None else saved.grad_fn
        ctx.bound = bound
        ctx.bias_sizes = None if bias is None else list(bias.shape)
        return bound.forward(x, w, bias)

    @staticmethod
    @untraced
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        x, w = (ctx.operands or ctx).saved_tensors
        # The first entry belongs to `bound`, which is no tensor, and the last one to `saved`.
        _, *mask, _ = ctx.needs_input_grad
        # Double backward and observers of operators need aten's own operator, because planned calls
        # have no gradient. x and w are tested as well, because hooks on saved tensors may have
        # replaced them.
        if torch.is_grad_enabled() or not _only_plain_tensors(dy, x, w):
            geometry = ctx.bound.geometry
            backward = _aten.convolution_backward.default
            return None, *backward(dy, x, w, ctx.bias_sizes, *geometry, mask), None
        return None, *ctx.bound.backward(dy, x, w, ctx.bias_sizes, mask), None


# These bypass `Function.apply`, whose additional steps serve transforms, under which no plan acts.
_apply: Any = super(torch.autograd.Function, _Convolution).apply
_save: Any = super(torch.autograd.Function, _Operands).apply
