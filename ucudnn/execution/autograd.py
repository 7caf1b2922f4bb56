"""The differentiable convolution of layers with a plan: the plan or torch computes each pass.

A convolution of an input x with a filter w has three passes: forward, the gradient of x, and the
gradient of w. A pass for which the plan has a split is computed by the chunks of this split;
torch's own operator computes every other pass. Modes, tensor subclasses, torch.func and tracers
observe or transform operators, so under any of them torch's operator computes all passes.
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
from ucudnn.backends.tensors import PLAIN, memory_format, uses_channels_last
from ucudnn.errors import RefusedError
from ucudnn.execution.compiling import untraced
from ucudnn.execution.execute import Call, as_kernel
from ucudnn.execution.selective import Selective
from ucudnn.execution.statistics import NormsByStatistics
from ucudnn.problem import OPS, Problem, strides_of
from ucudnn.system.processes import ForkSafeLock

_aten = torch.ops.aten
# The largest number of combinations of operand shapes that a runner remembers. Training has few; a
# server that accepts inputs of any size has many. A runner that remembers this many forgets them
# all before it adds one.
_MOST_SHAPES = 4096
# Function modes that are not concerned with convolutions: `with torch.device(...)` changes only new
# tensors, `Selective` repeats only normalisations and activation functions, and `NormsByStatistics`
# computes only normalisations.
_UNCONCERNED = (DeviceContext, Selective, NormsByStatistics)
_keys_of: Any = torch._C._dispatch_keys


def _odd_keys() -> int:
    """Bit mask of the dispatch keys that a plain tensor on a backend's device does not have."""
    # Every ordinary tensor has the autograd and autocast keys of its device, even while autograd
    # and autocast are disabled.
    names = ["ADInplaceOrView", "Conjugate"]
    for entry in BACKENDS.values():
        key = entry.dispatch_key
        names += [key, f"Autograd{key}", f"Autocast{key}"]
    # All keys are combined in one integer, so that a call can test the keys of a tensor by a single
    # bitwise operation.
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
    """Finds out, once for each combination of operand shapes, which passes a plan computes."""

    def __init__(self) -> None:
        self._bounds: dict[Hashable, Bound] = {}
        self._lock = ForkSafeLock()  # autograd runs backward in threads of its own

    def bound(self, x: Tensor, w: Tensor, geometry: Geometry) -> Bound:
        """The `Bound` for operands like x and w (shape, strides, dtype); made at the first call."""
        # The key consists of attributes of the tensors. A Problem would do as well, but to build
        # one at each call would take longer than to launch a small GPU kernel. The key also has
        # the only settings of torch on which a problem or its algorithms depend.
        now = aten.setting_of(x)
        key = (x.shape, x.stride(), x.dtype, w.shape, w.stride(), w.dtype, x.device, geometry, now)
        try:
            return self._bounds[key]
        except KeyError:
            bound = Bound(self, geometry, self.problems(x, w, geometry), x, w, now)
        # The Bound was made outside the lock. If two threads have made a Bound for the same key,
        # `setdefault` returns the first Bound to both of them, so that they share the calls that
        # are looked up later.
        with self._lock:
            if len(self._bounds) >= _MOST_SHAPES:
                self._bounds.clear()
            return self._bounds.setdefault(key, bound)

    @abstractmethod
    def problems(self, x: Tensor, w: Tensor, geometry: Geometry) -> dict[str, Problem]:
        """The problem of each pass that may be planned, by the name of the pass."""

    @abstractmethod
    def bind(self, which: str, bound: Bound, has_bias: bool = False) -> Pass | None:
        """Look up a plan's call for a pass, kept in `bound`; None: torch computes the pass."""

    @abstractmethod
    def decline(self, problem: Problem, sentence: str) -> None:
        """Say why torch computes a problem that is planned, or raise a PlanError."""


class Bound:
    """A convolution of operands of fixed shapes, with the plan's calls for its passes."""

    __slots__ = (
        *("_bias", "_dy", "_is_last", "_passes", "_runner", "_setting"),
        *("geometry", "problems"),
    )

    def __init__(
        self,
        runner: AbstractRunner,
        geometry: Geometry,
        problems: dict[str, Problem],
        x: Tensor,
        w: Tensor,
        setting: tuple[bool, ...],
    ) -> None:
        self._runner = runner
        self._setting = setting
        self.geometry = geometry
        self.problems = problems
        # The plan's calls for the passes that were looked up so far; None means that torch computes
        # the pass. Passes that no plan can compute are None from the start.
        self._passes: dict[str, Pass | None] = {op: None for op in OPS if op not in problems}
        if not problems:
            return
        some = next(iter(problems.values()))
        # A transposed convolution is planned as the dgrad of a convolution. The output of the
        # transposed convolution is then the input x of that convolution.
        output_shape = some.x_shape if geometry.transposed else some.y_shape
        self._bias = (output_shape[1:2], x.dtype, x.device)
        self._dy = (output_shape, x.dtype, x.device)
        self._is_last = uses_channels_last(x, w, geometry, x.device.type)

    def now(self, x: Tensor, w: Tensor) -> Bound:
        """The `Bound` of the same operands by torch's present settings, mostly this one."""
        is_same = self._setting == aten.setting_of(x)
        return self if is_same else self._runner.bound(x, w, self.geometry)

    def planned(self, which: str, has_bias: bool = False) -> Pass | None:
        """The plan's call for a pass, looked up at first use; None if torch computes the pass."""
        try:
            return self._passes[which]
        except KeyError:
            return self._runner.bind(which, self, has_bias)

    def knows(self, which: str) -> bool:
        """True if a pass was looked up already, whether the plan or torch computes it."""
        return which in self._passes

    def follow(self, which: str, call: Call | None) -> None:
        """Set the plan's call that computes a pass from now on; None: torch computes the pass."""
        if call is None:
            self._passes[which] = None
        else:
            strides = strides_of(call.problem.result_shape, self._is_last)
            self._passes[which] = Pass(call, memory_format(call.problem), strides)

    def takes(self, bias: Tensor | None) -> bool:
        """True if the bias is None, or has the shape, dtype and device that planned calls need."""
        return bias is None or _signature(bias) == self._bias

    def is_planned(self, x: Tensor, w: Tensor, bias: Tensor | None, graph: bool) -> bool:
        """True if the plan computes the output, or with `graph` a gradient that x or w requires."""
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
        result = as_kernel(self._run, "fprop", fprop, x, w, bias)
        return aten.convolution(x, w, bias, *self.geometry) if result is None else result

    def backward(
        self, dy: Tensor, x: Tensor, w: Tensor, bias_sizes: list[int] | None, mask: list[bool]
    ) -> tuple[Tensor | None, ...]:
        """Compute the gradients of x, w and bias that the mask asks for, without a graph."""
        dgrad = self.planned("dgrad") if mask[0] else None
        wgrad = self.planned("wgrad") if mask[1] else None
        # torch computes all gradients in two cases. If neither dx nor dw is planned, db must be
        # torch's, too, to the bit. If dy does not have the shape, dtype and device of the output,
        # which happens if someone calls aten's operator directly, torch raises its own error.
        if not (dgrad or wgrad) or _signature(dy) != self._dy:
            return aten.convolution_backward(dy, x, w, bias_sizes, *self.geometry, mask)
        rest = [mask[0] and dgrad is None, mask[1] and wgrad is None, mask[2]]
        dx = dw = db = None
        if True in rest:
            dx, dw, db = self._torchs_gradients(dy, x, w, bias_sizes, rest)
        own_dx, own_dw = as_kernel(self._gradients, dgrad, wgrad, dy, x, w)
        if (dgrad and own_dx is None) or (wgrad and own_dw is None):
            # What was refused is torch's from now on, so this happens only once.
            return self.backward(dy, x, w, bias_sizes, mask)
        return own_dx if dgrad else dx, own_dw if wgrad else dw, db

    def _torchs_gradients(
        self, dy: Tensor, x: Tensor, w: Tensor, bias_sizes: list[int] | None, mask: list[bool]
    ) -> tuple[Tensor | None, ...]:
        """Compute by torch the gradients that `mask` selects; db without dw is a sum of dy."""
        dx = dw = db = None
        # If torch's operator were asked for db without dw, oneDNN would compute dw all the same. So
        # db is then computed by the sum below.
        if mask[0] or mask[1]:
            asked = [*mask[:2], mask[1] and mask[2]]
            dx, dw, db = aten.convolution_backward(dy, x, w, bias_sizes, *self.geometry, asked)
        if mask[2] and not mask[1]:
            db = dy.sum((0, *range(2, dy.dim())))
        return dx, dw, db

    def _gradients(
        self, dgrad: Pass | None, wgrad: Pass | None, dy: Tensor, x: Tensor, w: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        dx = self._run("dgrad", dgrad, dy, w) if dgrad else None
        # A transposed convolution is planned as the dgrad of a convolution. In the wgrad problem of
        # that convolution, x and dy have changed places.
        a, b = (dy, x) if self.geometry.transposed else (x, dy)
        return dx, self._run("wgrad", wgrad, a, b) if wgrad else None

    def _run(
        self, which: str, planned: Pass, a: Tensor, b: Tensor, bias: Tensor | None = None
    ) -> Tensor | None:
        """Compute a pass by the plan; None if its algorithm refuses the operands after all."""
        try:
            return planned(a, b, bias)
        except RefusedError as error:
            said = f"{error}: torch's own convolution computes it; tune again"
            self._runner.decline(self.problems[which], said)
            self.follow(which, None)
            return None


def _signature(tensor: Tensor) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


@dataclass(frozen=True, slots=True)
class Pass:
    """The plan's call for a pass; it accepts any strides, and returns those that torch would."""

    call: Call
    layout: torch.memory_format  # the layout that `call` needs its operands in
    strides: tuple[int, ...]  # the strides that torch's own result would have

    def __call__(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute the pass for operands a and b, and add the bias if there is one."""
        a, b = a.contiguous(memory_format=self.layout), b.contiguous(memory_format=self.layout)
        if bias is not None:  # operators expect a contiguous bias
            bias = bias.contiguous()
        result = self.call(a, b, bias)
        found, strides = result.stride(), self.strides
        if found == strides:
            return result
        shape = result.shape
        # If the strides differ only along axes of one element, where any stride addresses the same
        # memory, nothing needs to be copied.
        if all(n == 1 or s == t for n, s, t in zip(shape, found, strides, strict=True)):
            return result.as_strided(shape, strides)
        return result.new_empty_strided(shape, strides).copy_(result)


@untraced
def planned_convolution(
    runner: AbstractRunner, x: Tensor, w: Tensor, bias: Tensor | None, geometry: Geometry
) -> Tensor:
    """A convolution whose forward, backward-data and backward-filter follow the runner's plan."""
    if not _only_plain_tensors(*((x, w) if bias is None else (x, w, bias))):
        return _torchs(x, w, bias, geometry)
    # torch accepts an unbatched input (C, *spatial); it is planned as a batch of one.
    if x.dim() == len(geometry.stride) + 1 and x.numel() > 0:
        return planned_convolution(runner, x.unsqueeze(0), w, bias, geometry).squeeze(0)
    # Planned calls run below autocast's dispatch key, so the casts of autocast must be made here.
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, w = _cast(x, dtype), _cast(w, dtype)
        bias = None if bias is None else _cast(bias, dtype)
    bound = runner.bound(x, w, geometry)
    graph = torch.is_grad_enabled()
    # If torch computes every pass of this call, the whole call is left to torch, because torch's
    # own autograd node is cheaper than ours.
    if not bound.is_planned(x, w, bias, graph):
        return _torchs(x, w, bias, geometry)
    if not graph:
        return bound.forward(x, w, bias)
    # A recomputation by torch.utils.checkpoint stops as soon as every tensor that the first forward
    # saved has been saved again. So, as torch's own operator does, the operands are saved before
    # the convolution is computed: if they are the last tensors, it need not be computed again.
    saved = _save(x, w) if torch._C._current_graph_task_id() != -1 else None
    result: Tensor = _apply(bound, x, w, bias, saved)
    return result


def _only_plain_tensors(*tensors: Tensor) -> bool:
    """True if a plan may compute with these tensors; False if torch's own operator must do so.

    It is False while a mode, tensor subclass, transform or tracer must see the operator: for
    example with fake tensors, FLOP counters, selective checkpoints, torch.func, forward-mode
    differentiation and torch.jit.trace. It is also False for tensors on different devices, and for
    tensors whose values are not simply the elements of their memory: lazily negated, zero without
    memory, sparse or nested.
    """
    for tensor in tensors:
        if type(tensor) not in PLAIN or _keys_of(tensor).raw_repr() & _ODD_KEYS:
            return False
    # `get_device()` returns -1 for a CPU. It is faster than `device`, which makes a new object each
    # time.
    device = tensors[0].get_device()
    for tensor in tensors[1:]:
        if tensor.get_device() != device:
            return False
    c = torch._C
    # Modes, transforms and tracers act on torch's operators, and would not see a planned call.
    return (
        not c._len_torch_dispatch_stack()
        and (not c._len_torch_function_stack() or _only_unconcerned())
        and not c._are_functorch_transforms_active()
        and c._get_tracing_state() is None
        and forward_ad._current_level < 0
    )


def _only_unconcerned() -> bool:
    """True if no function mode needs to see convolutions."""
    return all(type(mode) in _UNCONCERNED for mode in _get_current_function_mode_stack())


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    # Integers and float64 keep their dtype, as under autocast itself.
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
    """An autograd node that only saves a convolution's operands; its output is an empty tensor."""

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
        # The first entry is that of `bound`, which is no tensor, and the last one that of `saved`.
        _, *mask, _ = ctx.needs_input_grad
        # aten's own operator is called in two cases: for double backward, because planned calls
        # cannot be differentiated; and if a mode or a tensor subclass must see the operator. x and
        # w are tested as well as dy, because hooks on saved tensors may have replaced them.
        if torch.is_grad_enabled() or not _only_plain_tensors(dy, x, w):
            geometry = ctx.bound.geometry
            backward = _aten.convolution_backward.default
            return None, *backward(dy, x, w, ctx.bias_sizes, *geometry, mask), None
        bound = ctx.bound.now(x, w)
        return None, *bound.backward(dy, x, w, ctx.bias_sizes, mask), None


# Both functions call the `apply` of the base class and bypass `Function.apply`. What
# `Function.apply` does in addition serves the transforms of torch.func, under which no plan acts.
_apply: Any = super(torch.autograd.Function, _Convolution).apply
_save: Any = super(torch.autograd.Function, _Operands).apply
