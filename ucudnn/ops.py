"""The convolution that layers call: forward and both backward passes each follow their own plan."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Hashable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ucudnn.backends import open_backend
from ucudnn.config import Config
from ucudnn.errors import PlanError, UnsupportedError
from ucudnn.execute import Call, bind, memory_format
from ucudnn.plan import Plan
from ucudnn.problem import Problem
from ucudnn.tracing import is_channels_last, problem_of

_aten = torch.ops.aten
# Shapes whose split is remembered; a training run has few, a server with free sizes may have many.
_MOST_CALLS = 4096


class Geometry(NamedTuple):
    """The arguments of a convolution that are not tensors, one entry per spatial axis."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


class Runner:
    """Runs convolutions by a plan: looks a split up once per shape, then reuses it.

    Args:
        plan: None: every shape is unplanned.
        config: what to do with unplanned shapes, and how to tune them; default: the plan's.
    """

    def __init__(self, plan: Plan | None, config: Config | None = None) -> None:
        self.plan = plan
        self.config = config or (plan.config if plan else Config())
        self._backend = open_backend(plan.backend if plan else self.config.backend)
        self._calls: dict[Hashable, Call | None] = {}
        self._lock = threading.RLock()  # autograd runs backward in threads of its own
        self._warned = False

    def __reduce__(self) -> tuple[type[Runner], tuple[Plan | None, Config]]:
        return type(self), (self.plan, self.config)

    def __deepcopy__(self, memo: object) -> Runner:
        return self  # plans are values: copies of a model may share one

    def find(self, op: str, x: Tensor, w: Tensor, geometry: Geometry) -> Call | None:
        """What computes one operation on these tensors; None where torch's own convolution does.

        Raises:
            PlanError: the shape has no plan and `unplanned` is "error".
        """
        # looked up by what torch sees, because building a Problem costs more than a small launch
        nhwc = is_channels_last(x) or is_channels_last(w)
        key = (op, x.shape, w.shape, x.dtype, w.dtype, geometry, nhwc)
        try:
            return self._calls[key]
        except KeyError:
            problem = problem_of(op, x, w, *_aten_arguments(geometry))
        with self._lock:
            if key not in self._calls:
                if len(self._calls) >= _MOST_CALLS:
                    self._calls.clear()
                self._calls[key] = None if problem is None else self._bind(problem)
            return self._calls[key]

    def _bind(self, problem: Problem) -> Call | None:
        if problem.op not in self.config.ops:
            return None
        if self.plan is None or not self.plan.covers(problem):
            self._unplanned(problem)
        if self.plan is None or not self.plan.covers(problem):
            return None
        split = self.plan.split(problem)
        # torch's own call fuses the bias and computes both gradients at once
        if split.is_default:
            return None
        try:
            return bind(self._backend, problem, split)
        except UnsupportedError as error:  # other threads or versions than it was planned for
            self._warn(f"{error}: torch's own convolution computes it; tune again")
            return None

    def _warn(self, sentence: str) -> None:
        if not self._warned:
            warnings.warn(f"{sentence} (further ones are not reported)", UserWarning, stacklevel=4)
        self._warned = True

    def _unplanned(self, problem: Problem) -> None:
        if self.config.unplanned == "error":
            raise PlanError(
                f"{problem} has no plan and unplanned='error'; tune with an example input of this "
                f"shape and at least this batch, or set unplanned='torch'"
            )
        if self.config.unplanned == "torch":
            self._warn(
                f"{problem} has no plan: torch's own convolution computes it; tune with an example "
                f"input of this shape and at least this batch, or set unplanned='tune'"
            )
            return
        from ucudnn.tuner import tune_problems  # layers that never tune need no solver

        tuned = tune_problems([("", problem)], self.config)
        kernels = (*self.plan.kernels, *tuned.kernels) if self.plan else tuned.kernels
        self.plan = replace(self.plan or tuned, kernels=kernels)


def _aten_arguments(geometry: Geometry) -> tuple[Any, ...]:
    stride, padding, dilation, groups = geometry
    return stride, padding, dilation, False, [0] * len(stride), groups


def convolution(
    runner: Runner, x: Tensor, w: Tensor, bias: Tensor | None, geometry: Geometry
) -> Tensor:
    """A convolution whose forward, backward-data and backward-filter follow the runner's plan.

    Args:
        runner: the plan.
        x: shape (N, C, *spatial) or without N.
        w: shape (K, C / groups, *kernel).
        bias: shape (K,) or None.
        geometry: stride, padding, dilation, groups.
    """
    if not _plannable(x, w):
        return _torch_convolution(x, w, bias, geometry)
    if torch.is_autocast_enabled("cpu"):
        x, w = _autocast(x), _autocast(w)
        bias = None if bias is None else _autocast(bias)
    if not _follows_a_plan(runner, x, w, geometry):
        return _torch_convolution(x, w, bias, geometry)
    result: Tensor = _Convolution.apply(runner, x, w, bias, geometry)
    return result


def _follows_a_plan(runner: Runner, x: Tensor, w: Tensor, geometry: Geometry) -> bool:
    """Whether any pass that this call leads to is not torch's own; then torch's node is cheaper."""
    wanted = {"fprop": True}
    if torch.is_grad_enabled():
        wanted |= {"dgrad": x.requires_grad, "wgrad": w.requires_grad}
    return any(need and runner.find(op, x, w, geometry) for op, need in wanted.items())


def _plannable(x: Tensor, w: Tensor) -> bool:
    """False for what only torch's own operator handles, or reports as an error."""
    plain = type(x) is Tensor and type(w) in (Tensor, torch.nn.Parameter)
    return (
        plain
        and x.device.type == w.device.type == "cpu"
        and x.dim() == w.dim()
        and x.numel() > 0
        and not torch._C._are_functorch_transforms_active()
    )


def _autocast(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype("cpu"))


def _torch_convolution(x: Tensor, w: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    function = (torch.conv1d, torch.conv2d, torch.conv3d)[w.dim() - 3]
    return function(x, w, bias, *geometry)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, runner: Runner, x: Tensor, w: Tensor, bias: Tensor | None, geometry: Geometry
    ) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.runner, ctx.geometry = runner, geometry
        ctx.bias_sizes = None if bias is None else list(bias.shape)
        call = runner.find("fprop", x, w, geometry)
        if call is None:
            return _torch_convolution(x, w, bias, geometry)
        y = _planned(call, x, w)
        if bias is not None:
            y += bias.view(-1, *[1] * (x.dim() - 2))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        x, w = ctx.saved_tensors
        _, need_x, need_w, need_bias, _ = ctx.needs_input_grad
        calls = (
            ctx.runner.find("dgrad", x, w, ctx.geometry) if need_x else None,
            ctx.runner.find("wgrad", x, w, ctx.geometry) if need_w else None,
        )
        # aten's own operator differentiates again; planned calls do not record a graph
        if torch.is_grad_enabled():
            calls = (None, None)
        mask = [need_x and calls[0] is None, need_w and calls[1] is None, need_bias]
        rest: tuple[Tensor | None, ...] = (None, None, None)
        if any(mask):
            arguments = _aten_arguments(ctx.geometry)
            rest = _aten.convolution_backward(dy, x, w, ctx.bias_sizes, *arguments, mask)
        dx = rest[0] if calls[0] is None else _planned(calls[0], dy, w)
        dw = rest[1] if calls[1] is None else _planned(calls[1], x, dy)
        return None, dx, dw, rest[2], None


def _planned(call: Call, a: Tensor, b: Tensor) -> Tensor:
    layout = memory_format(call.problem)
    # backward may be called inside autocast, which would round what the plan computes in float32
    with torch.autocast("cpu", enabled=False):
        return call(a.contiguous(memory_format=layout), b.contiguous(memory_format=layout))
