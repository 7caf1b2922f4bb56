"""Error of a candidate's result against float64, in outputs that are first filled with NaN.

Each candidate is checked once for each problem it is measured as, on the operands that it is timed
with: a crop of its result against float64 (`Reference`), and the whole result for elements that are
not finite, which memory full of NaN leaves where nothing was written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ucudnn.backends import Executable
from ucudnn.backends.tensors import torch_dtype
from ucudnn.benchmark.protocol import Ring, empty_total
from ucudnn.benchmark.reference import Reference
from ucudnn.execution.execute import empty_result, run_first
from ucudnn.measurement import Role
from ucudnn.problem import Problem

# The value that chunks of a weight gradient are added to: not 0, so that it shows if a chunk
# overwrites the sum or leaves it as it is.
_BASE = 1.0


class Accuracy(NamedTuple):
    """Error of a result against the float64 one.

    Args:
        error: relative, in the L2 norm; infinite where an element was not written or is not finite.
        ulp: the largest difference of an element, in units in the last place of the dtype. The unit
            is that of the element's magnitude, but at least that of the root mean square of all.
    """

    error: float
    ulp: float


class Check:
    """A run of one candidate in one role, whose result is judged afterwards.

    Args:
        ring: operands.
        executable: of the candidate.
        part: the problem of its chunk.
        role: in which it runs.
        is_torch: whether it is torch's own call. torch fills its memory with NaN only in its
            deterministic mode, in which it may choose another kernel on a GPU. So its own call runs
            without NaN.
    """

    def __init__(
        self, ring: Ring, executable: Executable, part: Problem, role: Role, is_torch: bool = False
    ) -> None:
        self._ring = ring
        self._executable = executable
        self._part = part
        self._role = role
        self._poison = _as_it_is if is_torch else _poisoned
        self._result = self._prepared()

    def _prepared(self) -> Tensor | None:
        """Tensor that the run writes into or adds to; it is not part of the workspace."""
        if self._role != Role.LATER:
            return None
        if self._part.op == "wgrad":
            return empty_total(self._part, self._ring.a).fill_(_BASE)
        return empty_result(self._part, self._ring.a).fill_(float("nan"))

    def run(self) -> Tensor | None:
        """Run once into poisoned memory; returns the result where it is a new tensor."""
        a, b, _ = self._ring.chunk(self._part, 0)
        executable = self._executable
        if self._role == Role.ALONE:
            self._result = self._poison(lambda: executable.alone(a, b))
            return self._result
        if self._role == Role.FIRST:
            self._result = self._poison(lambda: run_first(executable, a, b))
            return self._result
        result = self._total()
        write = executable.add if self._part.op == "wgrad" else executable.write
        self._poison(lambda: write(a, b, result))
        return None

    def _total(self) -> Tensor:
        assert self._result is not None
        return self._result

    def accuracy(self, reference: Reference) -> Accuracy:
        """Judge the result of `run`.

        Args:
            reference: of the part, for the operands of its first chunk.
        """
        found = self._total()
        adds = self._role == Role.LATER and self._part.op == "wgrad"
        # A sum to which nothing was added is finite. Where the crop is all zeros that may be right.
        untouched = adds and bool(reference.expected.any()) and _keeps_base(found)
        if untouched or not _is_finite(found):
            return Accuracy(float("inf"), float("inf"))
        picked = reference.crop.pick(found) - (_BASE if adds else 0.0)
        return compare(picked, reference.expected, self._ring.a.dtype)


def allowed_error(problem: Problem) -> float:
    """Largest relative error of a correct result: at least half of the digits are right.

    >>> allowed_error(Problem("fprop", 1, 1, 1, (9,), (3,)))
    0.000345...

    Rounding errors are far smaller: those of sums of random terms grow with the root of their
    number, and a TF32 or Winograd kernel loses a few digits.
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
    # All of the crop should be zero, and no relative error can say how far off it is.
    if scale == 0.0:
        return Accuracy(float("inf"), float("inf"))
    # An element near zero is a difference of large terms, and may be off by their rounding.
    typical = scale / expected.numel() ** 0.5
    sizes = expected.abs().clamp_min(typical)
    ulps = difference / (torch.finfo(dtype).eps * torch.exp2(torch.floor(torch.log2(sizes))))
    return Accuracy(float(difference.norm()) / scale, float(ulps.max()))


def _is_finite(result: Tensor) -> bool:
    """True if all elements are finite, by their sum, which needs no memory to compute."""
    # float32 at least: half-precision values that are finite could overflow in their sum.
    total = result.sum(dtype=torch.promote_types(result.dtype, torch.float32))
    return bool(total.isfinite())


def _keeps_base(total: Tensor) -> bool:
    """True if nothing was added to any element of some filter or channel of a gradient."""
    # Implementations leave out whole filters or channels. Single elements may be 0 by chance.
    kept = (total == _BASE).flatten(2).all(2)
    return bool((kept.all(0).any() | kept.all(1).any()).item())


def _as_it_is(run: Callable[[], Tensor | None]) -> Tensor | None:
    return run()


def _poisoned(run: Callable[[], Tensor | None]) -> Tensor | None:
    """Run while torch fills every new tensor with NaN, so that unwritten elements show."""
    settings: Any = torch.utils.deterministic  # which says of no attribute that it has it
    before = settings.fill_uninitialized_memory
    level = torch.get_deterministic_debug_mode()
    settings.fill_uninitialized_memory = True
    # torch fills new memory in its deterministic mode alone; with a warning only, because some
    # candidates have no deterministic implementation.
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    try:
        return run()
    finally:
        torch.set_deterministic_debug_mode(level)
        settings.fill_uninitialized_memory = before
