"""Conversions of calls to problems, and of problems to torch's dtypes and layouts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

# `suggest_memory_format` would import `symbolic_shapes` on its first call, which takes seconds. If
# another thread forked meanwhile, the child would inherit the import's lock and wait forever.
import torch.fx.experimental.symbolic_shapes
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch.nn.functional import pad

from ucudnn.backends._base import Executable
from ucudnn.backends.aten import tf32_allowed
from ucudnn.errors import ProblemError
from ucudnn.problem import BYTES_BY_DTYPE, Problem

Slices = tuple[slice, ...]
# Only tensors of exactly these classes are computed by a plan, laid out or restored. A subclass may
# redefine its convolution (__torch_function__), or not own the memory of its values, as a sharded
# DTensor of FSDP2.
PLAIN = (Tensor, torch.nn.Parameter)
# torch's channels-last layouts by the number of spatial axes. There is none in 1-D.
CHANNELS_LAST_BY_RANK = {2: torch.channels_last, 3: torch.channels_last_3d}
# A transposed convolution is the gradient of a convolution: its forward pass is a dgrad problem.
_TRANSPOSED = {"fprop": "dgrad", "dgrad": "fprop", "wgrad": "wgrad"}


def memory_format(problem: Problem) -> torch.memory_format:
    """torch's memory format for the problem's layout.

    >>> memory_format(Problem("fprop", 1, 4, 4, (9, 9), (3, 3), layout="nhwc"))
    torch.channels_last
    """
    if problem.layout == "nhwc":
        return CHANNELS_LAST_BY_RANK[problem.rank]
    return torch.contiguous_format


def in_channels_last(tensor: Tensor) -> Tensor:
    """Convert a 4-D or 5-D tensor to channels-last; return any other tensor unchanged.

    >>> in_channels_last(torch.empty(8, 4, 1, 1)).stride(), in_channels_last(torch.ones(3)).stride()
    ((4, 1, 4, 4), (1,))
    """
    layout = CHANNELS_LAST_BY_RANK.get(tensor.dim() - 2)
    # torch chooses the layout by strides, and `contiguous` would not change those of a 1x1 filter.
    return tensor if layout is None else tensor.to(memory_format=layout)


def repeat_into(memory: Tensor, values: Tensor) -> None:
    """Write values to a tensor of one axis, again and again until it is full."""
    for part in memory.split(len(values)):
        part.copy_(values[: len(part)])


def torch_dtype(problem: Problem) -> torch.dtype:
    """The problem's dtype in torch.

    >>> torch_dtype(Problem("fprop", 1, 4, 4, (9, 9), (3, 3), dtype="float16"))
    torch.float16
    """
    dtype = getattr(torch, problem.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def problem_of(
    which: str,
    x: Tensor,
    w: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool = False,
    output_padding: Sequence[int] = (0,),
    groups: int = 1,
    device_type: str | None = None,
) -> Problem | None:
    """The problem that one pass of an aten convolution with these arguments computes.

    None if the pass cannot be planned: it is empty, impossible, or of a dtype that no backend
    computes. For a transposed convolution, the forward pass is a dgrad problem, and the gradient of
    x is an fprop problem. Without a device type, the problem is computed on the device of x.

    >>> x, w = torch.empty(2, 3, 8, 8), torch.empty(4, 3, 3, 3)
    >>> print(problem_of("wgrad", x, w, [1, 1], [0, 0], [1, 1]))
    wgrad conv2d(3->4, k3, 8x8) at batch 2
    >>> print(problem_of("fprop", x, w[:3], [2, 2], [0, 0], [1, 1], True, [1, 1]))
    dgrad conv2d(3->3, k3, 18x18, s2) at batch 2
    """
    dtype = str(x.dtype).removeprefix("torch.")
    if dtype not in BYTES_BY_DTYPE or x.dtype != w.dtype or x.dim() not in (3, 4, 5):
        return None
    # Filters have the shape (K, C / groups, ...); those of a transposed convolution have the shape
    # (C, K / groups, ...).
    channels = w.shape[0] if transposed else w.shape[1] * groups
    if x.dim() != w.dim() or x.shape[1] != channels or x.device != w.device:
        return None
    geometry = (stride, padding, dilation, transposed, output_padding, groups)
    try:
        return _problem(which, x, w, geometry, device_type or x.device.type)
    # If no convolution has this geometry, torch raises its own error when it computes the call.
    except ProblemError:
        return None


def _problem(which: str, x: Tensor, w: Tensor, geometry: Any, where: str) -> Problem | None:
    *per_axis, transposed, output_padding, groups = geometry
    rank = x.dim() - 2
    of_axis = [_per_axis(values, rank) for values in (*per_axis, output_padding)]
    x_size, k_size = tuple(map(int, x.shape[2:])), tuple(map(int, w.shape[2:]))
    dtype = str(x.dtype).removeprefix("torch.")
    problem = Problem(
        op=_TRANSPOSED[which] if transposed else which,
        batch=int(x.shape[0]),
        in_channels=int(w.shape[1]) * groups,
        out_channels=int(w.shape[0]),
        input_size=_transposed_size(x_size, k_size, *of_axis) if transposed else x_size,
        kernel_size=k_size,
        stride=of_axis[0],
        padding=tuple((amount, amount) for amount in of_axis[1]),
        dilation=of_axis[2],
        groups=int(groups),
        dtype=dtype,
        layout="nhwc" if rank > 1 and uses_channels_last(x, w, geometry, where) else "nchw",
        math="tf32" if where == "cuda" and dtype == "float32" and tf32_allowed() else "strict",
    )
    # If output_padding is not below the stride, this call is not the gradient of any convolution.
    return problem if not transposed or problem.output_size == x_size else None


def _transposed_size(
    size: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    output_padding: tuple[int, ...],
) -> tuple[int, ...]:
    axes = zip(size, kernel, stride, padding, dilation, output_padding, strict=True)
    # A convolution has the output size n = (size + 2p - d(k-1) - 1) // s + 1. Here this formula is
    # solved for the input size. Because it rounds, s input sizes have the same n; o chooses one.
    return tuple((n - 1) * s - 2 * p + d * (k - 1) + o + 1 for n, k, s, p, d, o in axes)


def uses_channels_last(
    x: Tensor, w: Tensor, geometry: Sequence[Any], device_type: str = "cpu"
) -> bool:
    """True if torch computes a convolution in channels-last and returns the result in this layout.

    The geometry is that of `aten.convolution`. In 1-D the filter alone decides.

    >>> x, w = torch.empty(2, 3, 8, 8), torch.empty(4, 3, 3, 3)
    >>> last = w.to(memory_format=torch.channels_last)
    >>> geometry = [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    >>> uses_channels_last(x, w, geometry), uses_channels_last(x, last, geometry)
    (False, True)
    """
    if x.dim() == 3:
        # torch computes a 1-D convolution as 2-D, on a contiguous copy of x.
        x, w = x.new_empty(x.shape).unsqueeze(2), w.unsqueeze(2)
        stride, padding, dilation, transposed, output_padding, groups = geometry
        geometry = (
            [1, *stride],
            [0, *padding],
            [1, *dilation],
            transposed,
            [0, *output_padding],
            groups,
        )
    if x.dim() not in (4, 5) or CHANNELS_LAST_BY_RANK[x.dim() - 2] not in (
        suggest_memory_format(x),
        suggest_memory_format(w),
    ):
        return False
    if device_type == "cuda":
        # torch's rule for cuDNN: if either operand is in channels-last, so is the result, except in
        # float64.
        return x.dtype != torch.float64
    if device_type != "cpu" or x.numel() == 0 or w.numel() == 0:
        return True
    # On a CPU the layout of the result depends on the implementation that torch picks: oneDNN keeps
    # channels-last, others may not.
    backend = torch._C._select_conv_backend(x, w, None, *geometry)
    form = torch._C._conv_determine_backend_memory_format(x, w, backend)
    return bool(form == CHANNELS_LAST_BY_RANK[x.dim() - 2])


def _per_axis(values: Sequence[int], rank: int) -> tuple[int, ...]:
    sizes = tuple(map(int, values))
    # aten accepts a single value for all axes.
    return sizes * rank if len(sizes) == 1 else sizes


# aten's operators pad both ends of an axis by the same number of zeros. If the two paddings of a
# problem differ, the surplus of one end is added to a copy of the input as zeros, as torch does for
# `padding="same"`. The copy counts as workspace, and its time as time of the algorithm.
def symmetric(problem: Problem) -> Problem:
    """The same problem with equal padding at both ends and the surplus as part of the input.

    >>> p = symmetric(Problem("fprop", 1, 4, 4, (8,), (3,), padding=((2, 1),)))
    >>> p.input_size, p.padding
    ((9,), ((1, 1),))
    """
    lesser = tuple(min(pair) for pair in problem.padding)
    return replace(
        problem,
        input_size=tuple(
            size + sum(pair) - 2 * least
            for size, pair, least in zip(problem.input_size, problem.padding, lesser, strict=True)
        ),
        padding=tuple((least, least) for least in lesser),
    )


def padded(problem: Problem, build: Callable[[Problem], Executable]) -> Executable:
    """Build an executable for any padding; `build` only needs to handle equal padding."""
    like = symmetric(problem)
    return build(problem) if like == problem else _Padded(problem, build(like))


class ComputedExecutable(Executable):
    """Base of executables that compute a result in any strides and precision, and then place it.

    One pass over the result converts it while it is copied or added to its place.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._layout = memory_format(problem)

    @abstractmethod
    def compute(self, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the result, plus a bias if there is one, in at least the operands' precision."""

    def alone(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute the result of these operands into a new tensor in the problem's layout."""
        return self._placed(self.compute(a, b, bias), a.dtype)

    def write(self, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
        """Compute into a slice of an existing result (fprop, dgrad)."""
        out.copy_(self.compute(a, b, bias))

    def begin(self, a: Tensor, b: Tensor) -> Tensor:
        """Compute a new result, to which chunks are added; float32 for half precision (wgrad)."""
        return self._placed(self.compute(a, b, None), torch.promote_types(a.dtype, torch.float32))

    def add(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        """Add the result to an existing tensor, in the precision of that tensor (wgrad)."""
        out.add_(self.compute(a, b, None))

    def _placed(self, result: Tensor, dtype: torch.dtype) -> Tensor:
        # `to` takes a microsecond even if it converts nothing.
        if result.dtype != dtype:
            result = result.to(dtype)
        return result.contiguous(memory_format=self._layout)


class _Padded(ComputedExecutable):
    def __init__(self, problem: Problem, inner: Executable) -> None:
        super().__init__(problem)
        self._inner = inner
        excess = [
            (begin - min(begin, end), end - min(begin, end)) for begin, end in problem.padding
        ]
        # torch.nn.functional.pad takes its amounts from the last axis to the first.
        self._excess = [amount for pair in reversed(excess) for amount in pair]
        inside = (
            slice(begin, begin + size)
            for (begin, _), size in zip(excess, problem.input_size, strict=True)
        )
        self._inside = (slice(None), slice(None), *inside)

    def compute(self, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        # The inner executable computes the gradient of the padded input. The gradients of the zeros
        # that `pad` would add are cut off.
        if self.problem.op == "dgrad":
            return self._inner.alone(a, b, bias)[self._inside]
        # Only fprop and wgrad get here, and their first operand is x.
        return self._inner.alone(pad(a, self._excess), b, bias)
