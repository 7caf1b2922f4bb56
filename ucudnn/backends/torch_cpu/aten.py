"""Algorithms that aten has: torch's own choice, oneDNN and the slow convolution by their names."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ucudnn.backends._base import Executable
from ucudnn.backends.torch_cpu._base import (
    AbstractAlgorithm,
    OpsExecutable,
    memory_format,
    phantom,
)
from ucudnn.problem import Problem

_aten = torch.ops.aten
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


@lru_cache(maxsize=4096)
def _chosen_kernel(problem: Problem, threads: int) -> str:
    del threads  # part of the key: aten's choice depends on it
    backend = torch._C._select_conv_backend(
        phantom(problem, problem.x_shape),
        phantom(problem, problem.w_shape),
        None,
        problem.stride,
        [begin for begin, _ in problem.padding],
        problem.dilation,
        False,
        [0] * problem.rank,
        problem.groups,
    )
    return _KERNELS.get(backend.name, backend.name.lower())


def chosen_kernel(problem: Problem) -> str:
    """Name of the kernel that aten picks for a problem with this many threads.

    >>> chosen_kernel(Problem("fprop", 8, 4, 4, (9, 9), (3, 3), dtype="float64"))
    'slow_conv2d'
    """
    return _chosen_kernel(problem, torch.get_num_threads())


def asymmetric_padding(problem: Problem) -> str | None:
    """The reason aten's operators refuse a problem whose paddings differ at the two ends."""
    if any(begin != end for begin, end in problem.padding):
        return f"aten pads both ends alike, got padding {problem.padding}"
    return None


class TorchDefault(AbstractAlgorithm):
    """torch's own convolution, whatever kernel it picks."""

    name = "torch_default"

    def refusal(self, problem: Problem) -> str | None:
        """Refuses only what aten cannot express."""
        return asymmetric_padding(problem)

    def executable(self, problem: Problem) -> Executable:
        """Build for a problem that is not refused."""
        return _TorchDefault(problem)


class OneDnn(AbstractAlgorithm):
    """oneDNN in the layout of the operands, also where aten would pick another kernel.

    fprop has an operator of its own; backward has none, so there it is what aten picks or nothing.
    """

    name = "onednn"

    def refusal(self, problem: Problem) -> str | None:
        """Needs a dtype oneDNN computes here, and for dgrad and wgrad aten's own choice."""
        return asymmetric_padding(problem) or onednn_refusal(problem)

    def executable(self, problem: Problem) -> Executable:
        """Build for a problem that is not refused."""
        return _OneDnn(problem)


class OneDnnNhwc(AbstractAlgorithm):
    """oneDNN on operands copied to channels-last, the result copied back."""

    name = "onednn_nhwc"

    def refusal(self, problem: Problem) -> str | None:
        """Needs channels-first operands and what oneDNN needs."""
        if problem.layout == "nhwc":
            return "the operands are channels-last already"
        return asymmetric_padding(problem) or onednn_refusal(as_2d(problem))

    def executable(self, problem: Problem) -> Executable:
        """Build for a problem that is not refused."""
        lifted = as_2d(problem)
        executable = _OneDnnNhwc(replace(lifted, layout="nhwc"))
        return executable if lifted is problem else Lifted(executable)


class SlowConv2d(AbstractAlgorithm):
    """aten's own im2col and GEMM per sample, threads over the batch."""

    name = "slow_conv2d"

    def refusal(self, problem: Problem) -> str | None:
        """Two axes at most, no groups, no dilation, channels first."""
        if problem.rank == 3 or problem.groups > 1 or set(problem.dilation) != {1}:
            return "it computes 1-D and 2-D problems without groups and dilation only"
        if problem.layout == "nhwc":
            return "it computes channels-first operands only"
        return asymmetric_padding(problem)

    def executable(self, problem: Problem) -> Executable:
        """Build for a problem that is not refused."""
        lifted = as_2d(problem)
        executable = _SlowConv2d(lifted)
        return executable if lifted is problem else Lifted(executable)


def onednn_refusal(problem: Problem) -> str | None:
    """Why oneDNN does not compute a problem here; None where it does."""
    if problem.dtype == "float64":
        return "oneDNN has no float64 convolution"
    kernel = chosen_kernel(problem)
    if problem.dtype in ("float16", "bfloat16") and kernel != "onednn":
        return f"oneDNN computes {problem.dtype} only with instructions that this processor lacks"
    if problem.op != "fprop" and kernel != "onednn":
        return f"aten runs {problem.op} of this problem by {kernel}, and names no other operator"
    return None


def as_2d(problem: Problem) -> Problem:
    """A 1-D problem as the 2-D one with a leading axis of size 1; others unchanged."""
    if problem.rank != 1:
        return problem
    return replace(
        problem,
        input_size=(1, *problem.input_size),
        kernel_size=(1, *problem.kernel_size),
        stride=(1, *problem.stride),
        padding=((0, 0), *problem.padding),
        dilation=(1, *problem.dilation),
    )


class Lifted(Executable):
    """Runs a 1-D problem through an executable of the 2-D one."""

    def __init__(self, inner: Executable) -> None:
        self._inner = inner

    def alone(self, a: Tensor, b: Tensor) -> Tensor:
        """Compute the result of these operands into a new tensor."""
        return self._inner.alone(a.unsqueeze(2), b.unsqueeze(2)).squeeze(2)


class _AtenExecutable(OpsExecutable):
    """Shared by the executables below: the geometry as aten's operators take it."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._padding = [begin for begin, _ in problem.padding]
        self._stride = list(problem.stride)
        self._dilation = list(problem.dilation)
        self._geometry = (self._stride, self._padding, self._dilation)
        self._w_like = phantom(problem, problem.w_shape) if problem.op == "wgrad" else None
        self._x_like = phantom(problem, problem.x_shape) if problem.op == "dgrad" else None

    def fprop(self, x: Tensor, w: Tensor) -> Tensor:
        """y from x and w."""
        zeros = [0] * self.problem.rank
        y = _aten.convolution.default(
            x, w, None, *self._geometry, False, zeros, self.problem.groups
        )
        return _tensor(y)

    def dgrad(self, dy: Tensor, w: Tensor) -> Tensor:
        """dx from dy and w."""
        x_like = self._x_like
        assert x_like is not None
        if x_like.shape[0] < dy.shape[0]:
            x_like = phantom(self.problem, (dy.shape[0], *self.problem.x_shape[1:]))
        return self._backward(dy, x_like[: dy.shape[0]], w, [True, False, False])

    def wgrad(self, x: Tensor, dy: Tensor) -> Tensor:
        """dw from x and dy."""
        return self._backward(dy, x, self._w_like, [False, True, False])

    def _backward(self, dy: Tensor, x: Tensor, w: Tensor | None, mask: list[bool]) -> Tensor:
        zeros = [0] * self.problem.rank
        results = _aten.convolution_backward.default(
            dy, x, w, None, *self._geometry, False, zeros, self.problem.groups, mask
        )
        return _tensor(results[mask.index(True)])


class _TorchDefault(_AtenExecutable):
    pass


class _OneDnn(_AtenExecutable):
    def fprop(self, x: Tensor, w: Tensor) -> Tensor:
        return _tensor(
            _aten.mkldnn_convolution.default(
                x, w, None, self._padding, self._stride, self._dilation, self.problem.groups
            )
        )


class _OneDnnNhwc(_OneDnn):
    def alone(self, a: Tensor, b: Tensor) -> Tensor:
        return self._nhwc(a, b).contiguous()

    def write(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        out.copy_(self._nhwc(a, b))

    def add(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        out.add_(self._nhwc(a, b))

    def _nhwc(self, a: Tensor, b: Tensor) -> Tensor:
        layout = memory_format(self.problem)
        return super().alone(a.contiguous(memory_format=layout), b.contiguous(memory_format=layout))


class _SlowConv2d(_AtenExecutable):
    def fprop(self, x: Tensor, w: Tensor) -> Tensor:
        return _tensor(
            _aten._slow_conv2d_forward.default(
                x, w, self.problem.kernel_size, None, self._stride, self._padding
            )
        )

    def _backward(self, dy: Tensor, x: Tensor, w: Tensor | None, mask: list[bool]) -> Tensor:
        results = _aten._slow_conv2d_backward.output_mask(
            dy, x, w, self.problem.kernel_size, self._stride, self._padding, mask
        )
        return _tensor(results[mask.index(True)])


def _tensor(value: Any) -> Tensor:
    assert isinstance(value, Tensor)
    return value
