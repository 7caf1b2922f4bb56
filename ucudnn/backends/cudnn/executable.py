"""Executables of the cuDNN backend: engines, by their identities, and torch's own convolution.

No function here waits for the device. Results, workspace and temporary copies come from torch's
allocator on the current stream.
"""

from __future__ import annotations

from collections.abc import Hashable
from math import gcd
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ucudnn.backends import aten
from ucudnn.backends._base import Executable
from ucudnn.backends.cudnn.engine import parse_identity
from ucudnn.backends.cudnn.graph import ALIGNMENT_BYTES, View, Views, views_of
from ucudnn.backends.tensors import memory_format, torch_dtype
from ucudnn.errors import UnsupportedError
from ucudnn.problem import Problem
from ucudnn.system.processes import ForkSafeLock

if TYPE_CHECKING:
    from ucudnn.backends.cudnn.engine import ExecutionPlan
    from ucudnn.backends.cudnn.runtime import Runtime

# The most variant packs (sets of addresses) that are kept for an execution plan. Training steps
# repeat their addresses. A program that never repeats any would otherwise keep one pack per call.
_MOST_PACKS = 256
# The gradient of a chunk may exceed the largest float16 number, 65504, even if the sum of all
# chunks does not. So each chunk writes a sixteenth of its gradient, which overflows only from a
# million on. In exchange, float16 has its full precision from 2**-10 on instead of from 2**-14.
FLOAT16_HEADROOM = 16.0
_cudnn: Any = torch.backends.cudnn  # `Any`, because torch replaces this module by an object
# aten's output mask: gradients of x, w and bias
_DGRAD, _WGRAD = [True, False, False], [False, True, False]


# Two base classes, because tuning expects an UnsupportedError if a candidate cannot run, and a
# training step expects a RuntimeError, which torch's own operators raise.
class RefusedError(UnsupportedError, RuntimeError):
    """An engine's first run has shown that it does not compute these operands."""


class EngineExecutable(Executable):
    """A cuDNN engine for operands with any number of samples, strides and alignment.

    An execution plan of cuDNN is for one number of samples, strides and alignments, and is built
    when these first occur. If cuDNN does not support the strides or alignments, the engine runs on
    copies of the tensors.
    """

    def __init__(self, runtime: Runtime, problem: Problem, identity: str) -> None:
        self._runtime = runtime
        self._problem = problem
        self._identity = identity
        self._adds_bias = parse_identity(identity)[2]
        self._built: dict[Hashable, _Built | None] = {}

    def alone(self, a: Tensor, b: Tensor) -> Tensor:
        return self._new(a, b)

    def alone_biased(self, a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
        if not self._adds_bias:
            return super().alone_biased(a, b, bias)
        return self._new(a, b, bias=bias)

    def write_biased(self, a: Tensor, b: Tensor, out: Tensor, bias: Tensor) -> None:
        if not self._adds_bias:
            super().write_biased(a, b, out, bias)
        else:
            self._run(a, b, out, bias=bias)

    def _new(self, a: Tensor, b: Tensor, alpha: float = 1.0, bias: Tensor | None = None) -> Tensor:
        shape = self._problem.result_shape
        if self._problem.op != "wgrad":
            shape = (a.shape[0], *shape[1:])
        out = torch.empty(
            shape, dtype=a.dtype, device=a.device, memory_format=memory_format(self._problem)
        )
        self._run(a, b, out, alpha, bias=bias)
        return out

    def begin(self, a: Tensor, b: Tensor) -> Tensor:
        if a.dtype.itemsize >= 4:
            return self._new(a, b)
        scale = _headroom(a)
        return self._new(a, b, alpha=1.0 / scale).float().mul_(scale)

    def write(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        self._run(a, b, out)

    def add(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        if out.dtype == a.dtype:
            self._run(a, b, out, beta=1.0)
            return
        # torch adds the chunk, because no engine writes a float32 gradient of half operands.
        scale = _headroom(a)
        out.add_(self._new(a, b, alpha=1.0 / scale), alpha=scale)

    def _run(
        self,
        a: Tensor,
        b: Tensor,
        out: Tensor,
        alpha: float = 1.0,
        beta: float = 0.0,
        bias: Tensor | None = None,
    ) -> None:
        pointers: tuple[int, ...] = (a.data_ptr(), b.data_ptr(), out.data_ptr())
        # `place` is all that a plan depends on. Of an address only the remainder modulo 16 bytes
        # counts, because no engine asks for a larger alignment. So many addresses share a plan.
        kinds = (a.shape, b.shape, a.dtype, b.dtype, a.get_device())
        strides = (a.stride(), b.stride(), out.stride())
        offsets = tuple(pointer % ALIGNMENT_BYTES for pointer in pointers)
        place = (kinds, strides, offsets, alpha, beta)
        try:
            built = self._built[place]
        except KeyError:
            # None is remembered, too, so that a refused layout is not tried again in every step.
            built = self._built[place] = self._build(a, b, out, alpha, beta)
        if built is not None:
            if self._adds_bias:
                bias = self._usable_bias(a, bias)
                pointers = (*pointers, bias.data_ptr())
            try:
                built.launch(a, pointers)
            except UnsupportedError as error:
                # Some engines accept an alignment when a plan is built, and not at the launch.
                if not any(offsets):
                    raise RefusedError(str(error)) from error
                built = self._built[place] = None
        if built is None:
            # Copies are contiguous and fully aligned: for such tensors `_build` returns a plan or
            # raises, so that the nested call never gets to this branch.
            layout = memory_format(self._problem)
            inner = torch.empty_like(out, memory_format=layout)
            # With beta = 0 cuDNN does not read the old result.
            if beta:
                inner.copy_(out)
            a, b = a.clone(memory_format=layout), b.clone(memory_format=layout)
            self._run(a, b, inner, alpha, beta, bias)
            out.copy_(inner)

    def _usable_bias(self, like: Tensor, bias: Tensor | None) -> Tensor:
        """A contiguous, aligned bias on the operands' device; zeros if there is none."""
        # Zeros are made anew for each call. Kept zeros could be read by a stream that does not wait
        # for the stream that wrote them. If made in a capture, they would belong to a CUDA graph.
        if bias is None:
            return like.new_zeros(self._problem.out_channels)
        if (bias.device, bias.dtype) != (like.device, like.dtype):
            raise RefusedError(
                f"the bias must be {like.dtype} on {like.device} as the operands of "
                f"{self._problem}, got {bias.dtype} on {bias.device}"
            )
        is_usable = bias.is_contiguous() and bias.data_ptr() % ALIGNMENT_BYTES == 0
        return bias if is_usable else bias.clone(memory_format=torch.contiguous_format)

    def _build(self, a: Tensor, b: Tensor, out: Tensor, alpha: float, beta: float) -> _Built | None:
        """A plan for tensors of these strides and alignments; None if cuDNN needs copies."""
        problem = self._problem.with_batch(a.shape[0])
        _require_one_kind(problem, (a, b, out))
        tensors = _as_xwy(problem, a, b, out)
        views = Views(*(_view(tensor, problem.layout) for tensor in tensors))
        device = a.get_device()
        try:
            plan = self._runtime.build_plan(device, problem, self._identity, alpha, beta, views)
        except UnsupportedError as error:
            if views == Views(*(View(view.strides) for view in views_of(problem))):
                raise RefusedError(str(error)) from error  # a copy would have the same layout
            return None
        return _Built(self._runtime, device, plan)


def _headroom(like: Tensor) -> float:
    return FLOAT16_HEADROOM if like.dtype == torch.float16 else 1.0


class _Built:
    """An execution plan and the variant packs of its launches; one thread at a time launches it.

    cuDNN does not guarantee for all engines that two threads may execute one plan at once. So
    PyTorch keeps plans per thread. Here a lock is used instead, which costs a tenth of a
    microsecond: plans per thread would be built again in each thread, even during a graph capture.
    """

    def __init__(self, runtime: Runtime, device: int, plan: ExecutionPlan) -> None:
        self._runtime = runtime
        self._device = device
        self._plan = plan
        self._packs: dict[tuple[int, ...], Any] = {}
        self._launching = ForkSafeLock()

    def launch(self, like: Tensor, pointers: tuple[int, ...]) -> None:
        size, workspace, address = self._plan.workspace_bytes, None, 0
        if size:
            # The workspace is freed when the launch is enqueued, not when it has run. This is safe:
            # the memory is reused only by later launches on this stream.
            workspace = torch.empty(size, dtype=torch.uint8, device=like.device)
            address = workspace.data_ptr()
        key = (*pointers, address)
        with self._launching:
            pack = self._packs.get(key)
            if pack is None:
                # All packs are dropped: finding the least recently used would slow every launch.
                if len(self._packs) >= _MOST_PACKS:
                    self._packs.clear()
                pack = self._packs[key] = self._runtime.pack(self._plan, pointers, address)
            self._runtime.launch(self._device, self._plan, pack)
        del workspace


def _require_one_kind(problem: Problem, tensors: tuple[Tensor, Tensor, Tensor]) -> None:
    kinds = {(tensor.device, tensor.dtype) for tensor in tensors}
    if len(kinds) > 1 or torch_dtype(problem) not in {tensor.dtype for tensor in tensors}:
        there = ", ".join(f"{tensor.dtype} on {tensor.device}" for tensor in tensors)
        raise RefusedError(
            f"operands and result of {problem} must be {problem.dtype} on one device, got {there}"
        )
    shapes = (*problem.operand_shapes, problem.result_shape)
    found = tuple(tuple(tensor.shape) for tensor in tensors)
    if found != shapes:
        raise RefusedError(
            f"operands and result of {problem} must have the shapes {shapes}, got {found}"
        )


def _as_xwy(problem: Problem, a: Tensor, b: Tensor, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if problem.op == "fprop":
        return a, b, out
    return (out, b, a) if problem.op == "dgrad" else (a, out, b)


def _view(tensor: Tensor, layout: str) -> View:
    """Layout of a tensor in memory.

    torch does not define the stride of an axis of size 1, but cuDNN derives the layout from that
    stride. So this function sets it.
    """
    axes = range(tensor.dim())
    inward = [1, *reversed(axes[2:]), 0] if layout == "nhwc" else [*reversed(axes)]
    strides, packed = list(tensor.stride()), 1
    for axis in inward:
        if tensor.shape[axis] == 1:
            strides[axis] = packed
        packed = strides[axis] * tensor.shape[axis]
    return View(tuple(strides), gcd(ALIGNMENT_BYTES, tensor.data_ptr()))


class DefaultExecutable(Executable):
    """torch's own convolution, by the engine that torch picks; TF32 only if `math` says so."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        none = [0] * problem.rank
        # Only problems with equal padding at both ends get here: `padded` writes an excess at one
        # end out as zeros.
        begins = [begin for begin, _ in problem.padding]
        stride, dilation = list(problem.stride), list(problem.dilation)
        self._geometry = (stride, begins, dilation, False, none, problem.groups)

    def alone(self, a: Tensor, b: Tensor) -> Tensor:
        return self._compute(a, b, None)

    def alone_biased(self, a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
        if self._problem.op != "fprop":
            return super().alone_biased(a, b, bias)
        return self._compute(a, b, bias)

    def _compute(self, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        problem, precision = self._problem, _cudnn.conv
        if problem.dtype != "float32" or aten.tf32_allowed() == (problem.math == "tf32"):
            return self._torchs(a, b, bias)
        # Only a measurement gets here: in training, a problem has the math that torch is set to.
        before = precision.fp32_precision
        precision.fp32_precision = "tf32" if problem.math == "tf32" else "ieee"
        try:
            return self._torchs(a, b, bias)
        finally:
            precision.fp32_precision = before

    def _torchs(self, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        problem = self._problem
        if problem.op == "fprop":
            return aten.convolution(a, b, bias, *self._geometry)
        # aten reads only the shape of the operand whose gradient is asked for
        if problem.op == "dgrad":
            x_like = a.new_empty(1).expand(a.shape[0], *problem.x_shape[1:])
            found = aten.convolution_backward(a, x_like, b, None, *self._geometry, _DGRAD)[0]
        else:
            w_like = torch.empty(
                problem.w_shape,
                dtype=a.dtype,
                device=a.device,
                memory_format=memory_format(problem),
            )
            found = aten.convolution_backward(b, a, w_like, None, *self._geometry, _WGRAD)[1]
        assert isinstance(found, Tensor)
        return found
