"""The last chunk of a batch-invariant split, filled up with zeros to the size of the others."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from ucudnn.backends import Executable
from ucudnn.backends.tensors import memory_format
from ucudnn.problem import Problem


class Remainder(Executable):
    """Computes fewer samples by an executable in a chunk of fixed size.

    Zeros in the place of samples add nothing to a weight gradient, and what is computed of them is
    dropped otherwise.

    Args:
        inner: computes the chunk.
        problem: of the chunk, at its full size.
    """

    def __init__(self, inner: Executable, problem: Problem) -> None:
        self._inner = inner
        self._problem = problem

    # Results are written as those of full chunks are, for which an algorithm may have other code
    # than for a result of its own.
    def alone(self, a: Tensor, b: Tensor) -> Tensor:
        """Compute the result of these operands into a new tensor."""
        if self._problem.op == "wgrad":
            return self._inner.alone(self._filled(a), self._filled(b))
        whole = self._empty(a)
        self._inner.write(self._filled(a), b, whole)
        # A copy, because a view would keep the memory of the whole chunk.
        return whole[: a.shape[0]].clone()

    def alone_biased(self, a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
        """Compute the result plus a bias of one element per channel (fprop, dgrad)."""
        whole = self._empty(a)
        self._inner.write_biased(self._filled(a), b, whole, bias)
        return whole[: a.shape[0]].clone()

    def write(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        """Compute into a slice of an existing result (fprop, dgrad)."""
        whole = self._empty(a)
        self._inner.write(self._filled(a), b, whole)
        out.copy_(whole[: a.shape[0]])

    def write_biased(self, a: Tensor, b: Tensor, out: Tensor, bias: Tensor) -> None:
        """Compute the result plus a bias into a slice of an existing result (fprop, dgrad)."""
        whole = self._empty(a)
        self._inner.write_biased(self._filled(a), b, whole, bias)
        out.copy_(whole[: a.shape[0]])

    def begin(self, a: Tensor, b: Tensor) -> Tensor:
        """Compute a new result to which chunks are added (wgrad)."""
        return self._inner.begin(self._filled(a), self._filled(b))

    def add(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        """Add the result to an existing one (wgrad)."""
        self._inner.add(self._filled(a), self._filled(b), out)

    def _filled(self, tensor: Tensor) -> Tensor:
        samples = tensor.shape[0]
        filled = torch.empty(
            (self._problem.batch, *tensor.shape[1:]),
            dtype=tensor.dtype,
            device=tensor.device,
            memory_format=memory_format(self._problem),
        )
        filled[:samples] = tensor
        filled[samples:] = 0
        return filled

    def _empty(self, like: Tensor) -> Tensor:
        return torch.empty(
            self._problem.result_shape,
            dtype=like.dtype,
            device=like.device,
            memory_format=memory_format(self._problem),
        )


def padding_bytes(problem: Problem) -> int:
    """Memory that a `Remainder` needs beside the workspace of its chunk, in bytes.

    >>> padding_bytes(Problem("fprop", 2, 1, 1, (5,), (1,))), padding_bytes(
    ...     Problem("fprop", 1, 1, 1, (5,), (1,))
    ... )
    (80, 0)

    Args:
        problem: of the chunk, at its full size.
    """
    # A chunk of one sample is never filled up.
    if problem.batch == 1:
        return 0
    # Filled are x and dy, and the result of fprop and dgrad: always the two tensors of samples.
    return (prod(problem.x_shape) + prod(problem.y_shape)) * problem.bytes_per_element
