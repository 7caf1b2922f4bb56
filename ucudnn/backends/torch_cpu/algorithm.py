"""Shared code of the CPU backend's algorithms: base classes, tensors, filter positions, costs."""

from __future__ import annotations

import ctypes
import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ucudnn.backends._base import Cost, Executable, add_bias
from ucudnn.backends.tensors import ComputedExecutable, Slices, memory_format, torch_dtype
from ucudnn.errors import UnsupportedError
from ucudnn.problem import Problem, strides_of
from ucudnn.units import format_bytes

# Names of implementations: those by oneDNN, and those in which aten multiplies im2col columns.
ONEDNN_KERNELS = frozenset({"onednn", "onednn_nhwc"})
COLUMN_KERNELS = frozenset(
    {"slow_conv2d", "slow_conv3d", "slow_conv_dilated2d", "slow_conv_dilated3d"}
)

_BYTE = ctypes.c_char()


class AbstractAlgorithm(ABC):
    """A way to compute convolutions: it has no state and builds executables."""

    name: str

    @abstractmethod
    def refusal(self, problem: Problem) -> str | None:
        """Reason why this algorithm does not compute a problem, as a clause; None if it does."""

    @abstractmethod
    def cost(self, problem: Problem) -> Cost:
        """Lower bounds of operations, traffic and workspace, for a problem that is not refused."""

    @abstractmethod
    def executable(self, problem: Problem) -> Executable:
        """Build the executable for a problem that is not refused."""

    def is_deterministic(self, problem: Problem) -> bool:
        """True if the same operands and threads always give the same bits."""
        del problem
        return True

    def kernels(self, problem: Problem) -> Iterable[tuple[Problem, str]]:
        """Pairs of a problem and the implementation that computes it, in the order of execution."""
        return ((problem, self.name),)


class OpsExecutable(ComputedExecutable):
    """Base of executables with one method per op, which computes the result without a bias."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._op = {"fprop": self.fprop, "dgrad": self.dgrad, "wgrad": self.wgrad}[problem.op]

    def compute(self, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the result by the method of the problem's op."""
        return add_bias(self._op(a, b), bias)

    @abstractmethod
    def fprop(self, x: Tensor, w: Tensor) -> Tensor:
        """Compute y from x and w."""

    @abstractmethod
    def dgrad(self, dy: Tensor, w: Tensor) -> Tensor:
        """Compute dx from dy and w."""

    @abstractmethod
    def wgrad(self, x: Tensor, dy: Tensor) -> Tensor:
        """Compute dw from x and dy."""


def empty(problem: Problem, shape: tuple[int, ...]) -> Tensor:
    """A new CPU tensor in the problem's dtype and layout."""
    # The device is given explicitly, because `torch.set_default_device` may have set another one.
    return torch.empty(
        shape, dtype=torch_dtype(problem), device="cpu", memory_format=memory_format(problem)
    )


def phantom(problem: Problem, shape: tuple[int, ...]) -> Tensor:
    """A tensor of zeros that only stands for a shape: it takes no memory and must not be written.

    aten's backward operators read only the shape of x (dgrad) or w (wgrad), but expect a tensor.
    """
    # mmap refuses a length of 0.
    size = max(prod(shape) * problem.bytes_per_element, 1)
    # The operating system backs an anonymous page with memory only when it is first written. But a
    # process may have a limit of addresses, too.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        pages = mmap.mmap(-1, size, flags=flags)
    except (OSError, OverflowError) as error:
        raise MemoryError(
            f"{problem} has tensors of {format_bytes(size)}, more than this process can address; "
            f"use a smaller batch"
        ) from error
    # The tensor holds a reference to the mapping, so that the mapping lives as long as the tensor.
    return _laid_out(problem, shape, pages)


def outline(problem: Problem, shape: tuple[int, ...]) -> Tensor:
    """A tensor that only stands for a shape and takes no addresses: its values must not be read."""
    size = prod(shape) * problem.bytes_per_element
    try:
        # ctypes believes that there are so many bytes.
        claimed = (ctypes.c_char * size).from_address(ctypes.addressof(_BYTE))
    except (ValueError, OverflowError) as error:
        raise UnsupportedError(
            f"{problem} has tensors of {format_bytes(size)}, more than any machine can address; "
            f"use a smaller batch"
        ) from error
    return _laid_out(problem, shape, claimed)


def _laid_out(problem: Problem, shape: tuple[int, ...], memory: Any) -> Tensor:
    flat = torch.frombuffer(memory, dtype=torch_dtype(problem), count=prod(shape))
    return flat.as_strided(shape, strides_of(shape, problem.layout == "nhwc"))


def taps(problem: Problem) -> Iterator[tuple[tuple[int, ...], Slices, Slices]]:
    """Taps: filter positions, each with the outputs that use it and the inputs that these read.

    A filter position that meets only padding is no tap.

    >>> p = Problem("fprop", 1, 1, 1, (3,), (2,), padding=((1, 0),))
    >>> for index, outputs, inputs in taps(p): print(index, outputs, inputs)
    (0,) (slice(1, 3, None),) (slice(0, 2, 1),)
    (1,) (slice(0, 3, None),) (slice(0, 3, 1),)
    """
    axes = [FilterAxis.of(problem, axis) for axis in range(problem.rank)]
    for index in product(*map(range, problem.kernel_size)):
        found = [axis.tap(position) for axis, position in zip(axes, index, strict=True)]
        met = [pair for pair in found if pair is not None]
        if len(met) == len(found):
            yield index, tuple(pair[0] for pair in met), tuple(pair[1] for pair in met)


def direct_cost(problem: Problem) -> Cost:
    """Cost of multiplying each input by each tap that reads it, without temporaries.

    Products with padding are not counted. Elements of operands that are multiplied only with
    padding, or not at all, are not counted either.

    >>> direct_cost(Problem("fprop", 1, 1, 1, (3,), (2,), padding=((1, 0),)))
    Cost(operations=10, traffic_bytes=32, workspace_bytes=0)
    """
    # Which inputs and taps meet is independent for each axis, so every count is a product over
    # axes.
    met = [counts_of(FilterAxis.of(problem, axis)) for axis in range(problem.rank)]
    pairs, inputs, outputs, positions = (prod(counts) for counts in zip(*met, strict=True))
    channels = problem.in_channels // problem.groups
    # For each tensor the number of elements that take part in a product; the others need not be
    # read.
    read = {
        "x": problem.batch * problem.in_channels * inputs,
        "w": problem.out_channels * channels * positions,
        "dy": problem.batch * problem.out_channels * outputs,
    }
    first, second = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("x", "dy")}[problem.op]
    operands = (read[first] + read[second]) * problem.bytes_per_element
    products = problem.batch * problem.out_channels * channels * pairs
    # The whole result is written, including its zeros.
    return Cost(2 * products, operands + problem.result_bytes, 0)


def columns_bytes(problem: Problem) -> int:
    """Bytes of the im2col columns of a whole batch: for each output, the inputs that it reads.

    >>> columns_bytes(Problem("fprop", 1, 1, 1, (3,), (2,), padding=((1, 0),)))
    24
    """
    covered = problem.in_channels * prod(problem.kernel_size) * prod(problem.output_size)
    return problem.batch * covered * problem.bytes_per_element


class FilterAxis(NamedTuple):
    """The sizes of a convolution along one of its axes."""

    size: int  # inputs, without padding
    places: int  # outputs
    kernel: int  # filter positions
    stride: int
    dilation: int
    begin: int  # padding before the first input

    @classmethod
    def of(cls, problem: Problem, axis: int) -> FilterAxis:
        """The sizes of a problem along an axis."""
        return cls(
            problem.input_size[axis],
            problem.output_size[axis],
            problem.kernel_size[axis],
            problem.stride[axis],
            problem.dilation[axis],
            problem.padding[axis][0],
        )

    def tap(self, position: int) -> tuple[slice, slice] | None:
        """Outputs that use a filter position and inputs that these read; None if there are none."""
        # At this position, output i reads input i * stride + offset. The tap has those outputs
        # whose input is in 0 .. size - 1. -(offset // stride) is -offset / stride, rounded up.
        offset = position * self.dilation - self.begin
        first = max(0, -(offset // self.stride))
        last = min(self.places - 1, (self.size - 1 - offset) // self.stride)
        if first > last:
            return None
        start, stop = (place * self.stride + offset for place in (first, last))
        return slice(first, last + 1), slice(start, stop + 1, self.stride)


class Met(NamedTuple):
    """Counts along an axis: pairs (output, tap) that read an input; their inputs, outputs, taps."""

    pairs: int
    inputs: int
    outputs: int
    positions: int


# The counts are cached, because a model has few distinct axes, and each is asked for again at every
# batch size.
@lru_cache(maxsize=4096)
def counts_of(axis: FilterAxis) -> Met:
    """Count the outputs, taps and inputs that meet along an axis; padding is no input."""
    pairs = positions = 0
    # One byte per input and output marks those that a tap connects. Bytes are used because Python
    # sets strided slices of bytes fast, in C code.
    inputs, outputs = bytearray(axis.size), bytearray(axis.places)
    for position in range(axis.kernel):
        met = axis.tap(position)
        if met is not None:
            count = met[0].stop - met[0].start
            outputs[met[0]] = inputs[met[1]] = b"\1" * count
            pairs += count
            positions += 1
    return Met(pairs, sum(inputs), sum(outputs), positions)
