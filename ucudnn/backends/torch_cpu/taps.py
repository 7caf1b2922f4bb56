"""Filter positions (taps): the outputs and inputs of each, and costs from these."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

from ucudnn.backends._base import Cost
from ucudnn.problem import Problem

Slices = tuple[slice, ...]


def taps(problem: Problem) -> Iterator[tuple[tuple[int, ...], Slices, Slices]]:
    """For each filter position: its index, the outputs it reaches and the inputs they read.

    >>> p = Problem("fprop", 1, 1, 1, (3,), (2,), padding=((1, 0),))
    >>> for index, outputs, inputs in taps(p): print(index, outputs, inputs)
    (0,) (slice(1, 3, None),) (slice(0, 2, 1),)
    (1,) (slice(0, 3, None),) (slice(0, 3, 1),)
    """
    axes = [_Axis.of(problem, axis) for axis in range(problem.rank)]
    for index in product(*map(range, problem.kernel_size)):
        found = [axis.tap(position) for axis, position in zip(axes, index, strict=True)]
        met = [pair for pair in found if pair is not None]
        if len(met) == len(found):
            yield index, tuple(pair[0] for pair in met), tuple(pair[1] for pair in met)


def direct_cost(problem: Problem) -> Cost:
    """Cost of multiplying each input by each tap that reads it, without temporaries.

    Products with padding are left out, and so are operands that are multiplied only with padding or
    not at all.

    >>> direct_cost(Problem("fprop", 1, 1, 1, (3,), (2,), padding=((1, 0),)))
    Cost(operations=10, traffic_bytes=32, workspace_bytes=0)
    """
    # Each axis alone decides what is met, so all counts are products over the axes.
    met = [_met(_Axis.of(problem, axis)) for axis in range(problem.rank)]
    pairs, inputs, outputs, positions = (prod(counts) for counts in zip(*met, strict=True))
    channels = problem.in_channels // problem.groups
    # Elements of each tensor that take part in any product; only these must be read.
    read = {
        "x": problem.batch * problem.in_channels * inputs,
        "w": problem.out_channels * channels * positions,
        "dy": problem.batch * problem.out_channels * outputs,
    }
    first, second = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("x", "dy")}[problem.op]
    operands = (read[first] + read[second]) * problem.bytes_per_element
    products = problem.batch * problem.out_channels * channels * pairs
    # The result is written whole, zeros included.
    return Cost(2 * products, operands + problem.result_bytes, 0)


def columns_bytes(problem: Problem) -> int:
    """Bytes of the columns of a whole batch: for each output the inputs that its filter covers.

    >>> columns_bytes(Problem("fprop", 1, 1, 1, (3,), (2,), padding=((1, 0),)))
    24
    """
    covered = problem.in_channels * prod(problem.kernel_size) * prod(problem.output_size)
    return problem.batch * covered * problem.bytes_per_element


class _Axis(NamedTuple):
    size: int
    places: int
    kernel: int
    stride: int
    dilation: int
    begin: int

    @classmethod
    def of(cls, problem: Problem, axis: int) -> _Axis:
        return cls(
            problem.input_size[axis],
            problem.output_size[axis],
            problem.kernel_size[axis],
            problem.stride[axis],
            problem.dilation[axis],
            problem.padding[axis][0],
        )

    def tap(self, position: int) -> tuple[slice, slice] | None:
        """The outputs that a filter position reaches and the inputs they read, if there are any."""
        # Output i reads input i * stride + offset at this position. Outputs are kept whose input
        # lies in 0 .. size - 1; -(offset // stride) is -offset / stride, rounded up.
        offset = position * self.dilation - self.begin
        first = max(0, -(offset // self.stride))
        last = min(self.places - 1, (self.size - 1 - offset) // self.stride)
        if first > last:
            return None
        start, stop = (place * self.stride + offset for place in (first, last))
        return slice(first, last + 1), slice(start, stop + 1, self.stride)


class _Met(NamedTuple):
    """Counts along one axis: pairs of an output and a tap that read an input, and each alone."""

    pairs: int
    inputs: int
    outputs: int
    positions: int


# Cached, because a model has few distinct axes and each is asked for at every batch size.
@lru_cache(maxsize=4096)
def _met(axis: _Axis) -> _Met:
    pairs = positions = 0
    # One byte per place marks what some position meets: strided slices of bytes are set by C code.
    inputs, outputs = bytearray(axis.size), bytearray(axis.places)
    for position in range(axis.kernel):
        met = axis.tap(position)
        if met is not None:
            count = met[0].stop - met[0].start
            outputs[met[0]] = inputs[met[1]] = b"\1" * count
            pairs += count
            positions += 1
    return _Met(pairs, sum(inputs), sum(outputs), positions)
