"""The one loop over the steps of a split; the benchmark times the same pieces that it calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ucudnn.backends import AbstractBackend, Executable
from ucudnn.plan import Split
from ucudnn.problem import Problem

_CHANNELS_LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


@dataclass(frozen=True, slots=True)
class Call:
    """A split bound to the executables that compute its steps.

    Args:
        problem: what to compute, with the batch that the split divides.
        split: steps along the batch.
        executable_by_algorithm: built for `problem`, one per algorithm of the split.
    """

    problem: Problem
    split: Split
    executable_by_algorithm: Mapping[str, Executable]

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """Compute the problem; every split of a batch gives the same sum.

        Args:
            a: x for fprop and wgrad, dy for dgrad; contiguous in the problem's layout.
            b: w for fprop and dgrad, dy for wgrad; likewise.
        """
        op, steps = self.problem.op, self.split.steps
        if len(steps) == 1:
            return _owned(self.executable_by_algorithm[steps[0].algorithm].alone(a, b))
        result, start = None if op == "wgrad" else empty_result(self.problem, a), 0
        for step in steps:
            executable, end = self.executable_by_algorithm[step.algorithm], start + step.size
            if result is None:
                result = run_first(executable, a[start:end], b[start:end])
            elif op == "wgrad":
                executable.add(a[start:end], b[start:end], result)
            else:
                executable.write(a[start:end], b, result[start:end])
            start = end
        assert result is not None
        return result.to(a.dtype)


def _owned(result: Tensor) -> Tensor:
    """The same memory as a tensor that is no view, which autograd lets a caller change in place."""
    if not result._is_view():
        return result
    owner = torch.empty(0, dtype=result.dtype, device=result.device)
    storage, offset = result.untyped_storage(), result.storage_offset()
    return owner.set_(storage, offset, result.size(), result.stride())


def bind(backend: AbstractBackend, problem: Problem, split: Split) -> Call:
    """Build the executables of a split.

    Raises:
        UnsupportedError: an algorithm of the split does not compute the problem on this backend.
    """
    names = {step.algorithm for step in split.steps}
    return Call(problem, split, {name: backend.executable(problem, name) for name in names})


def run_first(executable: Executable, x: Tensor, dy: Tensor) -> Tensor:
    """dw of the first chunk, in the precision that later chunks are added in.

    Half-precision sums grow in float32: rounding every partial sum would lose small gradients.
    """
    dw = executable.alone(x, dy)
    return dw.to(torch.promote_types(dw.dtype, torch.float32))


def empty_result(problem: Problem, like: Tensor) -> Tensor:
    """A new tensor for the result of a problem, on the device and in the dtype of an operand."""
    return torch.empty(
        problem.result_shape,
        dtype=like.dtype,
        device=like.device,
        memory_format=memory_format(problem),
    )


def memory_format(problem: Problem) -> torch.memory_format:
    """The memory format that torch uses for the problem's layout."""
    if problem.layout == "nhwc":
        return _CHANNELS_LAST[problem.rank]
    return torch.contiguous_format
