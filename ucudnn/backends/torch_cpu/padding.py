"""Paddings that differ at the two ends, for aten's operators, which pad both ends equally.

The excess padding of one end is written out as zeros, as torch does for `padding="same"`. The copy
that this takes is counted as workspace and timed with the algorithm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor
from torch.nn.functional import pad

from ucudnn.backends._base import Executable
from ucudnn.backends.tensors import memory_format
from ucudnn.problem import Problem


def symmetric(problem: Problem) -> Problem:
    """The problem on a larger input, with the smaller padding of each axis at both ends.

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
    """Build an executable from one that pads both ends equally."""
    like = symmetric(problem)
    return build(problem) if like == problem else _Padded(problem, build(like))


class _Padded(Executable):
    def __init__(self, problem: Problem, inner: Executable) -> None:
        self._problem = problem
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

    def alone(self, a: Tensor, b: Tensor) -> Tensor:
        """Compute the result of these operands into a new tensor."""
        return self._run(a, b).contiguous(memory_format=memory_format(self._problem))

    # The two below copy or add what dgrad cuts out of a larger dx in one pass.
    def write(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        out.copy_(self._run(a, b))

    def add(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        out.add_(self._run(a, b))

    def _run(self, a: Tensor, b: Tensor) -> Tensor:
        # The inner gradient is that of the padded input; gradients of the zeros are cut away.
        if self._problem.op == "dgrad":
            return self._inner.alone(a, b)[self._inside]
        # The first operand is x for fprop and wgrad, the only ones to get here.
        return self._inner.alone(pad(a, self._excess), b)
