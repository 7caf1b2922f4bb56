"""Algorithms that call aten's operators: torch's own convolution, oneDNN, and `slow_conv2d`."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from ucudnn.backends import aten
from ucudnn.backends._base import Cost, Executable, add_bias
from ucudnn.backends.tensors import ComputedExecutable, memory_format, padded, symmetric
from ucudnn.backends.torch_cpu.algorithm import (
    COLUMN_KERNELS,
    AbstractAlgorithm,
    FilterAxis,
    columns_bytes,
    counts_of,
    direct_cost,
    outline,
    phantom,
)
from ucudnn.backends.torch_cpu.processor import has_instructions
from ucudnn.problem import Problem

_aten = torch.ops.aten
# Short names for the members of torch's enumeration ConvBackend. Notes of cached measurements
# contain them, so they must not change.
_KERNELS = {
    "Mkldnn": "onednn",
    "MkldnnEmpty": "onednn",
    "Slow2d": "slow_conv2d",
    "Slow3d": "slow_conv3d",
    "SlowDilated2d": "slow_conv_dilated2d",
    "SlowDilated3d": "slow_conv_dilated3d",
    "NnpackSpatial": "nnpack",
    "Winograd3x3Depthwise": "winograd_depthwise",
    "Xnnpack2d": "xnnpack",
}


_HALF = ("float16", "bfloat16")
# Masks for aten's backward operators: whether to compute the gradients of x, w and the bias.
_DGRAD, _WGRAD = [True, False, False], [False, True, False]


@lru_cache(maxsize=4096)
def _chosen_kernel(problem: Problem, threads: int, has_onednn: bool) -> str:
    del threads, has_onednn  # arguments only for the cache: aten's choice depends on them
    # aten itself chooses by this function, which reads shapes, dtypes and layouts, but no values.
    backend = torch._C._select_conv_backend(
        outline(problem, problem.x_shape),
        outline(problem, problem.w_shape),
        None,
        *aten.geometry_of(problem),
    )
    return _KERNELS.get(backend.name, backend.name.lower())


def chosen_kernel(problem: Problem) -> str:
    """Name of the kernel that aten picks for a problem with the current threads and settings.

    >>> chosen_kernel(Problem("fprop", 8, 4, 4, (9, 9), (3, 3), dtype="float64"))
    'slow_conv2d'
    """
    # aten never gets different padding at both ends: `padded` makes the surplus a part of the input
    # first.
    has_onednn = torch._C._get_mkldnn_enabled()
    return _chosen_kernel(symmetric(problem), torch.get_num_threads(), has_onednn)


class TorchDefault(AbstractAlgorithm):
    """torch's own convolution, with the kernel that torch picks."""

    name = "torch_default"

    def refusal(self, problem: Problem) -> str | None:
        del problem
        return None

    def cost(self, problem: Problem) -> Cost:
        return _kernel_cost(problem, chosen_kernel(problem))

    def executable(self, problem: Problem) -> Executable:
        build = partial(_Aten, forward=aten.convolution, backward=aten.convolution_backward)
        return padded(problem, build)

    def is_deterministic(self, problem: Problem) -> bool:
        """True unless aten picks oneDNN and oneDNN reads memory outside its operands."""
        return chosen_kernel(problem) != "onednn" or cramped_refusal(problem) is None

    def kernels(self, problem: Problem) -> Iterable[tuple[Problem, str]]:
        return ((problem, chosen_kernel(problem)),)


class OneDnn(AbstractAlgorithm):
    """oneDNN in the layout of the operands, also if aten would pick another kernel.

    For fprop and dgrad, torch has operators that always use oneDNN. There is none for wgrad, but
    for operands in oneDNN's own format aten picks nothing else.
    """

    name = "onednn"

    def refusal(self, problem: Problem) -> str | None:
        return onednn_refusal(problem)

    def cost(self, problem: Problem) -> Cost:
        return _kernel_cost(problem, self.name)

    def executable(self, problem: Problem) -> Executable:
        return padded(problem, _onednn_executable)

    def is_deterministic(self, problem: Problem) -> bool:
        """True unless oneDNN reads memory outside its operands."""
        return cramped_refusal(problem) is None


class OneDnnNhwc(AbstractAlgorithm):
    """oneDNN on operands that are copied to channels-last; the result is copied back."""

    name = "onednn_nhwc"

    def refusal(self, problem: Problem) -> str | None:
        if problem.layout == "nhwc":
            return "the operands are channels-last already"
        # A 1-D problem is checked as 2-D, because torch has no channels-last layout in 1-D.
        problem = problem.as_2d()
        if reason := cramped_refusal(problem) or onednn_refusal(problem):
            return reason
        if problem.op == "wgrad" and (kernel := chosen_kernel(problem)) != "onednn":
            return f"aten runs wgrad of this problem by {kernel}; oneDNN's format is channels-first"
        return None

    def cost(self, problem: Problem) -> Cost:
        """Cost of oneDNN and of copies of operands and result, each written once and read once."""
        inner = _kernel_cost(problem, "onednn")
        *operands, result = (
            0 if _is_both(shape) else prod(shape) * problem.bytes_per_element
            for shape in (*problem.operand_shapes, problem.result_shape)
        )
        # the operands' copies are freed before the result is copied
        return Cost(
            inner.operations,
            inner.traffic_bytes + 2 * (sum(operands) + result),
            max(sum(operands), result),
        )

    def executable(self, problem: Problem) -> Executable:
        return _lifted(problem, _Nhwc)


class OneDnnFloat32(AbstractAlgorithm):
    """oneDNN on float32 copies of half-precision operands; the result is rounded once.

    Without instructions for half precision, torch's own kernels take up to 200 times as long.
    """

    name = "onednn_float32"

    def refusal(self, problem: Problem) -> str | None:
        if problem.dtype not in _HALF:
            return "it computes half precision only"
        # With such instructions, float32 took twice as long in nearly every trial.
        if has_instructions(problem.dtype):
            return f"this processor has instructions for {problem.dtype}"
        return onednn_refusal(_in_float32(problem))

    def cost(self, problem: Problem) -> Cost:
        """Cost of oneDNN in float32, and of copies of the operands and of the result."""
        inner = direct_cost(_in_float32(problem))
        elements = sum(map(prod, (*problem.operand_shapes, problem.result_shape)))
        # Each element is read in one precision and written in the other.
        copies = (4 + problem.bytes_per_element) * elements
        # All float32 copies are there at once; only the one of the result may take its place.
        workspace = 4 * elements - problem.result_bytes
        return Cost(inner.operations, inner.traffic_bytes + copies, workspace)

    def executable(self, problem: Problem) -> Executable:
        return _InFloat32(problem)

    def kernels(self, problem: Problem) -> Iterable[tuple[Problem, str]]:
        return ((_in_float32(problem), "onednn"),)


class SlowConv2d(AbstractAlgorithm):
    """aten's own im2col and matrix product of each sample, in parallel over the batch."""

    name = "slow_conv2d"

    def refusal(self, problem: Problem) -> str | None:
        if problem.rank == 3 or problem.groups > 1 or set(problem.dilation) != {1}:
            return "it computes 1-D and 2-D problems without groups and dilation only"
        # torch's kernel derives the layout from the strides. With a single channel, both layouts
        # have the same strides.
        if problem.layout == "nhwc" and problem.in_channels == 1:
            return "channels-last it computes several input channels only"
        return None

    def cost(self, problem: Problem) -> Cost:
        return _kernel_cost(problem, self.name)

    def executable(self, problem: Problem) -> Executable:
        is_last = problem.layout == "nhwc"
        forward = partial(_slow_conv2d, is_last)
        backward = partial(_slow_conv2d_backward, is_last)
        return _lifted(problem, partial(_Aten, forward=forward, backward=backward))


def _is_both(shape: tuple[int, ...]) -> bool:
    """True if both layouts put the elements of a tensor of this shape in the same order."""
    return shape[1] == 1 or prod(shape[2:]) == 1


def _kernel_cost(problem: Problem, kernel: str) -> Cost:
    if kernel in COLUMN_KERNELS:
        return _columns_cost(problem, kernel)
    direct = direct_cost(problem)
    # On x86 oneDNN computes convolutions directly; elsewhere it may use Winograd.
    is_direct = kernel == "onednn" and platform.machine() in ("x86_64", "AMD64")
    if is_direct or {*problem.stride, *problem.dilation} != {1}:
        return direct
    # Kernels that transform tiles (Winograd or Fourier, in NNPACK and in oneDNN on ARM) compute at
    # least one product per output and pair of channels.
    tiled = problem.flops // prod(problem.kernel_size)
    return direct._replace(operations=min(direct.operations, tiled))


def _columns_cost(problem: Problem, kernel: str) -> Cost:
    """Cost of im2col, which makes the columns of one group at a time, for one sample or for all."""
    # Only a 1x1 filter at stride 1 without padding needs no columns.
    geometry = zip(problem.kernel_size, problem.stride, problem.padding, strict=True)
    if all(axis == (1, 1, (0, 0)) for axis in geometry):
        return direct_cost(problem)  # the columns are the input itself
    traffic, columns = direct_cost(problem).traffic_bytes, columns_bytes(problem)
    # These kernels make the columns of all samples at once. The other kernels make columns for one
    # sample after another.
    if kernel == "slow_conv3d" or (kernel == "slow_conv2d" and problem.op != "dgrad"):
        workspace = columns // problem.groups
        # With several groups, the memory of the columns may still be in a cache, from the previous
        # group. So no traffic is counted.
        traffic += 2 * columns if problem.groups == 1 else 0
    else:
        workspace = columns // problem.groups // problem.batch
    return Cost(problem.flops, traffic, workspace)


def _is_cramped(problem: Problem) -> bool:
    """True if oneDNN may compute a problem wrongly in half precision, because of its filter.

    This is so if, along some axis, the filter is larger than the input, there is a single output at
    a stride above 1, or some filter position meets only padding. Then oneDNN's half-precision
    kernels read memory outside their operands (torch 2.13, oneDNN 3.12, AVX-512), mostly in
    channels-last. Results then change from run to run, or the process ends.
    """
    return any(
        axis.dilation * (axis.kernel - 1) >= axis.size
        or (axis.places == 1 and axis.stride > 1)
        or counts_of(axis).positions < axis.kernel
        for axis in (FilterAxis.of(problem, number) for number in range(problem.rank))
    )


def cramped_refusal(problem: Problem) -> str | None:
    """Reason why oneDNN does not compute a problem correctly; None if it does."""
    if problem.dtype in _HALF and _is_cramped(symmetric(problem)):
        return f"oneDNN's {problem.dtype} kernels take filters inside the input only"
    return None


def onednn_refusal(problem: Problem) -> str | None:
    """Reason why oneDNN does not compute a problem on this machine; None if it does."""
    if not torch.backends.mkldnn.is_available():
        return "this build of torch has no oneDNN"
    if not torch._C._get_mkldnn_enabled():
        return "torch.backends.mkldnn.enabled is False"
    if problem.dtype == "float64":
        return "oneDNN has no float64 convolution"
    kernel = chosen_kernel(problem)
    if problem.dtype in _HALF and kernel != "onednn":
        return f"oneDNN computes {problem.dtype} only with instructions that this processor lacks"
    return None


def _in_float32(problem: Problem) -> Problem:
    return replace(problem, dtype="float32")


def _lifted(problem: Problem, build: Callable[[Problem], Executable]) -> Executable:
    # A 1-D problem is computed with a height of 1, as torch itself does.
    executable = padded(problem.as_2d(), build)
    return _Lifted(executable) if problem.rank == 1 else executable


class _Lifted(Executable):
    """Runs a 1-D problem through an executable of the 2-D one."""

    def __init__(self, inner: Executable) -> None:
        self._inner = inner

    def alone(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._inner.alone(a.unsqueeze(2), b.unsqueeze(2), bias).squeeze(2)


class _Nhwc(ComputedExecutable):
    """Runs a channels-first problem through an executable of the channels-last one."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        last = replace(problem, layout="nhwc")
        self._last = memory_format(last)
        self._inner = _onednn_executable(last)

    def compute(self, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        a, b = a.contiguous(memory_format=self._last), b.contiguous(memory_format=self._last)
        return self._inner.alone(a, b, bias)


class _InFloat32(ComputedExecutable):
    """Runs a half-precision problem through an executable of the float32 one."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._inner = padded(_in_float32(problem), _onednn_executable)

    def compute(self, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        return self._inner.alone(a.float(), b.float(), None if bias is None else bias.float())


class _Aten(ComputedExecutable):
    """A forward and a backward operator with the arguments of aten's convolutions."""

    def __init__(
        self, problem: Problem, forward: Callable[..., Any], backward: Callable[..., Any]
    ) -> None:
        super().__init__(problem)
        self._forward = forward
        self._backward = backward
        self._geometry = aten.geometry_of(problem)
        # aten reads only the shape of the operand whose gradient it computes.
        like = {"dgrad": problem.x_shape, "wgrad": problem.w_shape}.get(problem.op)
        self._like = None if like is None else phantom(problem, like)

    def compute(self, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        # aten's forward operators start their sums from the bias, so adding it takes no additional
        # time.
        if self._like is None:
            return _tensor(self._forward(a, b, bias, *self._geometry))
        if self.problem.op == "dgrad":
            return add_bias(self._dgrad(a, b, self._like), bias)
        return _tensor(self._backward(b, a, self._like, None, *self._geometry, _WGRAD)[1])

    def _dgrad(self, dy: Tensor, w: Tensor, x_like: Tensor) -> Tensor:
        if x_like.shape[0] < dy.shape[0]:  # this executable was built for a smaller chunk
            x_like = phantom(self.problem, (dy.shape[0], *self.problem.x_shape[1:]))
        x_like = x_like[: dy.shape[0]]
        return _tensor(self._backward(dy, x_like, w, None, *self._geometry, _DGRAD)[0])


def _onednn(x: Tensor, w: Tensor, bias: Tensor | None, *geometry: Any) -> Any:
    stride, padding, dilation, *_, groups = geometry
    return _aten.mkldnn_convolution.default(x, w, bias, padding, stride, dilation, groups)


def _onednn_executable(problem: Problem) -> Executable:
    # An executable also computes smaller batches, at which aten may choose otherwise.
    is_chosen = lru_cache(None)(lambda n: chosen_kernel(problem.with_batch(n)) == "onednn")
    return _Aten(problem, _onednn, partial(_onednn_backward, is_chosen))


def _onednn_backward(
    is_chosen: Callable[[int], bool], dy: Tensor, x: Tensor, w: Tensor, *more: Any
) -> Any:
    _, *geometry, mask = more
    if is_chosen(dy.shape[0]):
        return aten.convolution_backward(dy, x, w, *more)
    if mask == _DGRAD:
        return _onednn_dgrad(dy, x, w, *geometry), None
    return aten.convolution_backward(dy.to_mkldnn(), x.to_mkldnn(), w, *more)


def _onednn_dgrad(dy: Tensor, x: Tensor, w: Tensor, *geometry: Any) -> Tensor:
    """Gradient of x, as the transposed convolution that torch compiles ConvTranspose to."""
    stride, padding, dilation, *_, groups = geometry
    axes = zip(x.shape[2:], dy.shape[2:], w.shape[2:], stride, padding, dilation, strict=True)
    # The rows of x behind the last one that an output reads.
    behind = [
        extent - ((outputs - 1) * step + span * (taps - 1) + 1 - 2 * begin)
        for extent, outputs, taps, step, begin, span in axes
    ]
    run = torch.ops.mkldnn._convolution_transpose_pointwise.default
    return _tensor(run(dy, w, None, padding, behind, stride, dilation, groups, "none", [], ""))


def _slow_conv2d(
    is_last: bool,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    *_: object,
) -> Any:
    if is_last:
        x, w = (_plain(operand, is_last) for operand in (x, w))
    return _aten._slow_conv2d_forward.default(x, w, w.shape[2:], bias, stride, padding)


def _slow_conv2d_backward(is_last: bool, dy: Tensor, x: Tensor, w: Tensor, *more: Any) -> Any:
    _, stride, padding, *_, mask = more
    # torch's kernel assumes that x is contiguous, but slabs are not contiguous.
    x = _plain(x, is_last)
    if is_last:
        dy, w = (_plain(operand, is_last) for operand in (dy, w))
    return _aten._slow_conv2d_backward.output_mask(dy, x, w, w.shape[2:], stride, padding, mask)


def _plain(tensor: Tensor, is_last: bool) -> Tensor:
    """A contiguous tensor with ordered strides, also along axes of size 1.

    With other strides, torch's kernel would mistake one layout for the other, for example if there
    is one column. Viewing the tensor as 1-D and back sets ordered strides.
    """
    if not is_last:
        return tensor.contiguous().view(-1).view(tensor.shape)
    last = tensor.movedim(1, -1)
    return last.contiguous().view(-1).view(last.shape).movedim(-1, 1)


def _tensor(value: Any) -> Tensor:
    assert isinstance(value, Tensor)
    return value
