"""Is a candidate right? Its error against float64, in poisoned outputs that none may leave.

Each candidate is checked once, at its own size, on the operands that it is timed with. In fprop and
dgrad samples do not depend on each other: the first and the last one of the chunk are compared, and
no element of any may stay poisoned. In wgrad all samples go into each element: two filters are
compared. So the float64 convolution, many times slower than what it judges, stays small.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ucudnn.backends import Executable, original
from ucudnn.backends.tensors import torch_dtype
from ucudnn.benchmark.protocol import Ring, empty_total
from ucudnn.execute import empty_result, run_first
from ucudnn.problem import Problem

_DOUBLE = torch.float64
# What `add` begins with: an element that is written instead of added to shows.
_BASE = 1.0


class Accuracy(NamedTuple):
    """How far a result is from the float64 one.

    Args:
        error: relative, in the L2 norm; infinite where an element was not written or is not finite.
        ulp: the largest difference of an element, in units in the last place of the dtype at the
            element's size or, for smaller ones, at the root mean square of all.
    """

    error: float
    ulp: float


class Check:
    """A run of one candidate in one role whose result can be judged afterwards.

    Args:
        ring: operands.
        executable: of the candidate.
        part: the problem of its chunk.
        role: in which it runs.
        is_torch: whether it is torch's own call. Memory that torch allocates is filled with NaN in
            its deterministic mode alone, in which torch may choose another kernel on a GPU: its own
            call is run as it is.
    """

    def __init__(
        self, ring: Ring, executable: Executable, part: Problem, role: str, is_torch: bool = False
    ) -> None:
        self._ring = ring
        self._executable = executable
        self._part = part
        self._role = role
        self._poison = _as_it_is if is_torch else _poisoned
        self._result = self._prepared()

    def _prepared(self) -> Tensor | None:
        """What the run writes into or adds to, which is no part of its workspace."""
        if self._role != "later":
            return None
        if self._part.op == "wgrad":
            return empty_total(self._part, self._ring.a).fill_(_BASE)
        return empty_result(self._part, self._ring.a).fill_(float("nan"))

    def run(self) -> Tensor | None:
        """Run once into poisoned memory; returns the result where it is a new tensor."""
        a, b, _ = self._ring.chunk(self._part, 0)
        executable = self._executable
        if self._role == "alone":
            self._result = self._poison(lambda: executable.alone(a, b))
            return self._result
        if self._role == "first":
            self._result = self._poison(lambda: run_first(executable, a, b))
            return self._result
        result = self._total()
        write = executable.add if self._part.op == "wgrad" else executable.write
        self._poison(lambda: write(a, b, result))
        return None

    def _total(self) -> Tensor:
        assert self._result is not None
        return self._result

    def accuracy(self) -> Accuracy:
        """Judge what `run` left."""
        found = self._total()
        problem = self._part
        a, b, _ = self._ring.chunk(problem, 0)
        if problem.op == "wgrad":
            base = _BASE if self._role == "later" else 0.0
            picked = found[_ends(problem.out_channels)].to(_DOUBLE).cpu() - base
            expected = _filters(problem, a, b)
        else:
            ends = _ends(problem.batch)
            picked = found[ends].to(_DOUBLE).cpu()
            expected = reference(problem.with_batch(len(ends)), a[ends], b)
        if not bool(torch.isfinite(found).all()):
            return Accuracy(float("inf"), float("inf"))
        return compare(picked, expected, a.dtype)


def allowed_error(problem: Problem) -> float:
    """The relative error beyond which a result is wrong: fewer than half of the digits are right.

    >>> allowed_error(Problem("fprop", 1, 1, 1, (9,), (3,)))
    0.000345...

    Rounding stays far below: errors of sums of random terms grow with the root of their number,
    and what a TF32 or Winograd kernel loses is a few digits.
    """
    eps = torch.finfo(torch_dtype(problem)).eps
    if problem.math == "tf32":  # ten bits of the operands are used
        eps = 2.0**-10
    return float(eps**0.5)


def compare(found: Tensor, expected: Tensor, dtype: torch.dtype) -> Accuracy:
    """The error of one float64 tensor against another.

    >>> compare(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]), torch.float32)
    Accuracy(error=0.0, ulp=0.0)
    """
    difference = (found - expected).abs()
    scale = float(expected.norm())
    largest = float(difference.max())
    if largest == 0.0:
        return Accuracy(0.0, 0.0)
    if scale == 0.0:
        return Accuracy(float("inf"), float("inf"))
    typical = scale / expected.numel() ** 0.5
    sizes = expected.abs().clamp_min(typical)
    ulps = difference / (torch.finfo(dtype).eps * torch.exp2(torch.floor(torch.log2(sizes))))
    return Accuracy(float(difference.norm()) / scale, float(ulps.max()))


def reference(problem: Problem, a: Tensor, b: Tensor) -> Tensor:
    """The result of a problem in float64 on the CPU, by torch, with explicit padding.

    Args:
        problem: with the operands' batch.
        a: x for fprop and wgrad, dy for dgrad.
        b: w for fprop and dgrad, dy for wgrad.
    """
    a, b = a.detach().to("cpu", _DOUBLE).contiguous(), b.detach().to("cpu", _DOUBLE).contiguous()
    pads = [extent for pair in reversed(problem.padding) for extent in pair]
    none = [0] * problem.rank
    geometry = (list(problem.stride), none, list(problem.dilation), False, none, problem.groups)
    if problem.op == "fprop":
        y: Tensor = original.convolution(pad(a, pads), b, None, *geometry)
        return y
    backward = original.convolution_backward
    if problem.op == "wgrad":
        w = torch.empty(problem.w_shape, dtype=_DOUBLE)
        dw: Tensor = backward(b, pad(a, pads), w, None, *geometry, [False, True, False])[1]
        return dw
    x = pad(torch.empty(problem.x_shape, dtype=_DOUBLE), pads)
    dx: Tensor = backward(a, x, b, None, *geometry, [True, False, False])[0]
    for axis, (begin, _) in enumerate(problem.padding):
        dx = dx.narrow(2 + axis, begin, problem.input_size[axis])
    return dx


def _ends(extent: int) -> list[int]:
    return [0, extent - 1] if extent > 1 else [0]


def _filters(problem: Problem, x: Tensor, dy: Tensor) -> Tensor:
    """The first and the last filter of dw, each from the channels of its own group."""
    inputs = problem.in_channels // problem.groups
    single = replace(problem, in_channels=inputs, out_channels=1, groups=1)
    parts = []
    for filter_ in _ends(problem.out_channels):
        start = filter_ // (problem.out_channels // problem.groups) * inputs
        part = reference(single, x[:, start : start + inputs], dy[:, filter_ : filter_ + 1])
        parts.append(part)
    return torch.cat(parts)


def _as_it_is(run: Callable[[], Tensor | None]) -> Tensor | None:
    return run()


def _poisoned(run: Callable[[], Tensor | None]) -> Tensor | None:
    """Run while torch fills every new tensor with NaN, so that what is not written shows."""
    settings: Any = torch.utils.deterministic  # which says of no attribute that it has it
    before = settings.fill_uninitialized_memory
    level = torch.get_deterministic_debug_mode()
    settings.fill_uninitialized_memory = True
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    try:
        return run()
    finally:
        torch.set_deterministic_debug_mode(level)
        settings.fill_uninitialized_memory = before
