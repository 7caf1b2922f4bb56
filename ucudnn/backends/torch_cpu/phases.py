"""Data gradients of strided convolutions, computed phase by phase.

A phase consists of the inputs whose positions have the same remainder modulo the stride. All inputs
of a phase are multiplied with the same filter positions, and neighbours in a phase belong to
neighbouring outputs. So the gradient of a phase is a convolution of dy at stride 1 with a part of
the filter, reversed. It needs no products with zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import gcd, prod
from typing import NamedTuple

from torch import Tensor

from ucudnn.backends._base import Cost, Executable, add_bias
from ucudnn.backends.tensors import Slices, memory_format
from ucudnn.backends.torch_cpu.algorithm import AbstractAlgorithm, empty
from ucudnn.backends.torch_cpu.gemm import Gemm, Im2colGemm
from ucudnn.backends.torch_cpu.operators import OneDnn, cramped_refusal
from ucudnn.problem import Problem

# Algorithms for a phase, in order of preference.
_INNER = (OneDnn(), Gemm(), Im2colGemm())
_ALL = slice(None)


class Phases(AbstractAlgorithm):
    """One convolution at stride 1 per phase, written into a strided view of dx."""

    name = "phases"

    def refusal(self, problem: Problem) -> str | None:
        # At stride 1 there is only one phase, which is the whole problem.
        if problem.op != "dgrad" or set(problem.stride) == {1}:
            return "it computes data gradients of strided convolutions only"
        for phase in _phases(problem):
            if _inner(phase.problem) is None:
                return f"no algorithm computes its phase {phase.problem}"
        return None

    def cost(self, problem: Problem) -> Cost:
        """Sum of the costs of the phases and of copying each into dx."""
        operations = traffic = workspace = 0
        element = problem.bytes_per_element
        covered = 0
        for phase, inner in _computed_phases(problem):
            cost = inner.cost(phase.problem)
            copied = element * problem.batch * problem.in_channels * phase.places
            covered += copied
            operations += cost.operations
            # Copying the result of a phase into dx reads and writes it once.
            traffic += cost.traffic_bytes + 2 * copied
            # Phases run one after another, so their temporary memory does not add up.
            workspace = max(workspace, phase.problem.result_bytes + cost.workspace_bytes)
        traffic += problem.result_bytes - covered  # zeros
        return Cost(operations, traffic, workspace)

    def executable(self, problem: Problem) -> Executable:
        return _PhasesExecutable(problem)

    def kernels(self, problem: Problem) -> Iterable[tuple[Problem, str]]:
        for phase, inner in _computed_phases(problem):
            yield phase.problem, inner.name


def _inner(problem: Problem) -> AbstractAlgorithm | None:
    # Phases are small, so a filter may be larger than its phase. oneDNN computes such problems
    # wrongly in half precision (see `cramped_refusal`). Then another algorithm is used.
    if cramped_refusal(problem) is None and _INNER[0].refusal(problem) is None:
        return _INNER[0]
    able = (algorithm for algorithm in _INNER[1:] if algorithm.refusal(problem) is None)
    return next(able, None)


def _computed_phases(problem: Problem) -> Iterator[tuple[_Phase, AbstractAlgorithm]]:
    """The phases of a problem that is not refused, each with the algorithm that computes it."""
    for phase in _phases(problem):
        inner = _inner(phase.problem)
        assert inner is not None
        yield phase, inner


class _AxisPhase(NamedTuple):
    """One phase along one axis; phases that no output reads are omitted."""

    taps: slice  # positions of the filter that read the phase
    taps_count: int
    inputs: slice  # positions of the phase in dx that some output reads
    places: int  # number of these positions
    outputs: slice  # positions in dy that read the phase
    outputs_count: int
    begin: int  # number of zeros to put before these positions of dy
    end: int  # number of zeros to put after these positions of dy
    dilation: int  # dilation of the filter that consists of `taps` only


def _axis_phases(problem: Problem, axis: int) -> Iterator[_AxisPhase]:
    """The phases along an axis.

    Let g be the greatest common divisor of stride s and dilation d. Then every (s/g)-th position of
    the filter falls on the same phase, and neighbours among these positions read outputs at a
    distance of d/g. Places in a phase are counted in strides from the beginning of the padding.
    """
    stride, dilation = problem.stride[axis], problem.dilation[axis]
    size, outputs = problem.input_size[axis], problem.output_size[axis]
    kernel, begin = problem.kernel_size[axis], problem.padding[axis][0]
    divisor = gcd(stride, dilation)
    step, distance = stride // divisor, dilation // divisor
    # Positions first, first + step, ... of the filter fall on the same phase.
    for first in range(min(step, kernel)):
        # Output o reads input p (counted from the beginning of the padding) at filter position k
        # if p = o * stride + k * dilation. The phase of the input is p modulo the stride.
        offset, remainder = divmod(first * dilation, stride)
        count = len(range(first, kernel, step))
        reach = (count - 1) * distance
        # low .. high - 1 are the places of the phase that lie in the input and that an output
        # reads. -(-a // b) divides and rounds up.
        low = max(-(-(begin - remainder) // stride), offset)
        high = min(-(-(begin + size - remainder) // stride), outputs + offset + reach)
        # No output reads a place of this phase: the gradient there is zero.
        if low >= high:
            continue
        start = low * stride + remainder - begin
        stop = (high - 1) * stride + remainder - begin + 1
        # Outputs left .. right - 1 read these places. Outputs beyond the ends of dy are zeros.
        left, right = low - offset - reach, high - offset
        yield _AxisPhase(
            slice(first, None, step),
            count,
            slice(start, stop, stride),
            high - low,
            slice(max(left, 0), min(right, outputs)),
            min(right, outputs) - max(left, 0),
            max(-left, 0),
            max(right - outputs, 0),
            distance,
        )


class _Phase(NamedTuple):
    """One phase along all axes."""

    problem: Problem  # fprop of dy with reversed filters; paddings are equal at both ends
    taps: Slices
    inputs: Slices
    outputs: Slices
    kept: Slices  # positions of the result that belong to dx; the others are due to excess padding
    places: int


@lru_cache(maxsize=4096)
def _phases(problem: Problem) -> tuple[_Phase, ...]:
    axes = [tuple(_axis_phases(problem, axis)) for axis in range(problem.rank)]
    return tuple(_phase(problem, parts) for parts in product(*axes))


def _phase(problem: Problem, parts: tuple[_AxisPhase, ...]) -> _Phase:
    # aten's operators pad both ends by the same number of zeros. So the larger margin is used for
    # both, and `kept` cuts off the surplus.
    margins = [max(part.begin, part.end) for part in parts]
    inner = replace(
        problem,
        # The gradient of a phase is itself a forward convolution, of dy with the reversed filter.
        op="fprop",
        in_channels=problem.out_channels,
        out_channels=problem.in_channels,
        input_size=tuple(part.outputs_count for part in parts),
        kernel_size=tuple(part.taps_count for part in parts),
        stride=(1,) * problem.rank,
        padding=tuple((margin, margin) for margin in margins),
        dilation=tuple(part.dilation for part in parts),
    )
    kept = tuple(
        slice(margin - part.begin, margin - part.begin + part.places)
        for margin, part in zip(margins, parts, strict=True)
    )
    return _Phase(
        inner,
        tuple(part.taps for part in parts),
        tuple(part.inputs for part in parts),
        tuple(part.outputs for part in parts),
        kept,
        prod(part.places for part in parts),
    )


class _PhasesExecutable(Executable):
    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._phases = [
            (phase, inner.executable(phase.problem)) for phase, inner in _computed_phases(problem)
        ]
        places = sum(phase.places for phase, _ in self._phases)
        self._is_all_covered = places == prod(problem.input_size)

    def alone(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        dx = empty(self._problem, (a.shape[0], *self._problem.x_shape[1:]))
        self.write(a, b, dx, bias)
        return dx

    def write(self, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
        form = memory_format(self._problem)
        # Places that no output reads belong to no phase; their gradient is zero.
        if not self._is_all_covered:
            out.zero_()
        for phase, inner in self._phases:
            dy = a[(_ALL, _ALL, *phase.outputs)].contiguous(memory_format=form)
            found = inner.alone(dy, self._filters(b[(_ALL, _ALL, *phase.taps)]))
            out[(_ALL, _ALL, *phase.inputs)] = found[(_ALL, _ALL, *phase.kept)]
        add_bias(out, bias)

    def _filters(self, w: Tensor) -> Tensor:
        """Reversed filters, with the input and output channels of each group exchanged."""
        groups = self._problem.groups
        # dgrad computes input channels from output channels, so these two axes of w are exchanged.
        exchanged = w.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
        reverse: Tensor = exchanged.flip(tuple(range(2, w.dim())))
        return reverse.contiguous(memory_format=memory_format(self._problem))
