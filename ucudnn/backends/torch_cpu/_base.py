"""Base classes of the CPU backend's algorithms, and tensors in a problem's layout."""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor

from ucudnn.backends._base import Cost, Executable
from ucudnn.backends.tensors import memory_format, torch_dtype
from ucudnn.errors import UnsupportedError
from ucudnn.problem import Problem
from ucudnn.units import format_bytes

# Implementations that are oneDNN's, and those of aten that multiply matrices of columns (im2col).
ONEDNN_KERNELS = frozenset({"onednn", "onednn_nhwc"})
COLUMN_KERNELS = frozenset(
    {"slow_conv2d", "slow_conv3d", "slow_conv_dilated2d", "slow_conv_dilated3d"}
)


class AbstractAlgorithm(ABC):
    """A way to compute fprop, dgrad and wgrad; stateless, it builds executables."""

    name: str

    @abstractmethod
    def refusal(self, problem: Problem) -> str | None:
        """Reason why this algorithm does not apply, as a clause; None if it does."""

    @abstractmethod
    def cost(self, problem: Problem) -> Cost:
        """Lower bounds of operations, traffic and workspace, for a problem that is not refused."""

    @abstractmethod
    def executable(self, problem: Problem) -> Executable:
        """Build the executable for a problem that is not refused."""

    def kernels(self, problem: Problem) -> Iterable[tuple[Problem, str]]:
        """Pairs of a problem and the implementation that computes it, in the order of execution."""
        return ((problem, self.name),)


class OpsExecutable(Executable):
    """Base of executables with one method per op; `alone` calls the one of the problem's op."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._op = {"fprop": self.fprop, "dgrad": self.dgrad, "wgrad": self.wgrad}[problem.op]

    def alone(self, a: Tensor, b: Tensor) -> Tensor:
        """Compute the result of these operands into a new tensor."""
        return self._op(a, b)

    @abstractmethod
    def fprop(self, x: Tensor, w: Tensor) -> Tensor:
        """y from x and w."""

    @abstractmethod
    def dgrad(self, dy: Tensor, w: Tensor) -> Tensor:
        """dx from dy and w."""

    @abstractmethod
    def wgrad(self, x: Tensor, dy: Tensor) -> Tensor:
        """dw from x and dy."""


def empty(problem: Problem, shape: tuple[int, ...]) -> Tensor:
    """A new CPU tensor in the problem's dtype and layout."""
    # The device is given because `torch.set_default_device` may name another one.
    return torch.empty(
        shape, dtype=torch_dtype(problem), device="cpu", memory_format=memory_format(problem)
    )


def phantom(problem: Problem, shape: tuple[int, ...]) -> Tensor:
    """A shape-only tensor of zeros that takes no memory and must not be written.

    aten's backward operators need only the shape of x (dgrad) or w (wgrad), but take a tensor.
    """
    # mmap refuses a length of 0.
    size = max(prod(shape) * problem.bytes_per_element, 1)
    # The kernel backs an anonymous page with memory only when it is first written.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        pages = mmap.mmap(-1, size, flags=flags)
    except (OSError, OverflowError) as error:
        raise UnsupportedError(
            f"{problem} has tensors of {format_bytes(size)}, more than this machine can address; "
            f"use a smaller batch"
        ) from error
    # The tensor holds a reference to the mapping, which ends with it.
    flat = torch.frombuffer(pages, dtype=torch_dtype(problem), count=prod(shape))
    if problem.layout == "nchw":
        return flat.view(shape)
    batch, channels, *spatial = shape
    # Channels are innermost in memory and the second axis in the shape.
    order = (0, len(shape) - 1, *range(1, len(shape) - 1))
    return flat.view(batch, *spatial, channels).permute(order)
