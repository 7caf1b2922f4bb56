"""Convolution by Fourier transforms, which suits large filters and takes much workspace."""

from __future__ import annotations

from itertools import count
from math import log2, prod

import torch
from torch import Tensor

from ucudnn.backends._base import Cost, Executable
from ucudnn.backends.torch_cpu.algorithm import AbstractAlgorithm, OpsExecutable, direct_cost
from ucudnn.problem import Problem


class Fft(AbstractAlgorithm):
    """Convolution by products of spectra, correct for any stride, dilation and padding.

    Source: Mathieu, Henaff, LeCun, "Fast Training of Convolutional Networks through FFTs"
    (ICLR 2014), section 2.
    """

    name = "fft"

    def refusal(self, problem: Problem) -> str | None:
        if problem.bytes_per_element < 4:
            return f"torch has no Fourier transform in {problem.dtype} on a CPU"
        if set(problem.kernel_size) == {1}:
            return "a filter of size 1 has a flat spectrum; gemm computes it"
        return None

    def cost(self, problem: Problem) -> Cost:
        """Cost of the transforms and of the products of spectra, with their passes over memory."""
        sizes = transform_sizes(problem)
        # The spectrum of real numbers is symmetric, so rfftn stores half of the last axis.
        frequencies = prod(sizes[:-1]) * (sizes[-1] // 2 + 1)
        planes = [prod(shape[:2]) for shape in (*problem.operand_shapes, problem.result_shape)]
        element = problem.bytes_per_element
        padded = [count * prod(sizes) * element for count in planes]
        spectra = [count * frequencies * 2 * element for count in planes]
        transforms = sum(planes) * _transform_operations(sizes)
        # a product of complex numbers takes six operations, an addition two
        products = planes[2] * frequencies * (8 * _summands(problem) - 2)
        traffic = direct_cost(problem).traffic_bytes + 2 * sum(padded) + 2 * sum(spectra)
        # All spectra are in memory at the same time. Later the inverse transform holds the result's
        # spectrum, a copy of it if there are several axes, and what it returns.
        inverse = spectra[2] * min(problem.rank, 2) + padded[2]
        # The result is no workspace. If it has a single plane, it may be a view of what the inverse
        # transform returned, with padding, which then stays in memory as a whole.
        result = max(problem.result_bytes, padded[2] // planes[2])
        return Cost(transforms + products, traffic, max(sum(spectra), inverse) - result)

    def executable(self, problem: Problem) -> Executable:
        return _Fft(problem)


def transform_sizes(problem: Problem) -> list[int]:
    """Sizes of the transforms along each axis.

    The size of the padded input suffices, because only outputs that are cut off wrap around.
    """
    return [
        smooth_size(size + sum(padding))
        for size, padding in zip(problem.input_size, problem.padding, strict=True)
    ]


def _transform_operations(sizes: list[int]) -> int:
    """Operations of a real transform by the split-radix algorithm: 2 n log2 n - 4 n per axis."""
    return int(2 * prod(sizes) * sum(max(0.0, log2(size) - 2) for size in sizes))


def _summands(problem: Problem) -> int:
    """Number of products of spectra that are summed in each spectrum of the result."""
    return {
        "fprop": problem.in_channels // problem.groups,
        "dgrad": problem.out_channels // problem.groups,
        "wgrad": problem.batch,
    }[problem.op]


class _Fft(OpsExecutable):
    """Sums of products of spectra; fprop and wgrad conjugate one factor, as correlations do."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._sizes = transform_sizes(problem)
        self._axes = tuple(range(-problem.rank, 0))
        self._every_stride = self._grid(problem.output_size, problem.stride)
        # A dilated filter is written with zeros between its elements, and so is dy of a strided
        # convolution.
        self._every_dilation = self._grid(problem.kernel_size, problem.dilation)
        self._input = tuple(
            slice(begin, begin + size)
            for size, (begin, _) in zip(problem.input_size, problem.padding, strict=True)
        )

    @staticmethod
    def _grid(sizes: tuple[int, ...], steps: tuple[int, ...]) -> tuple[slice, ...]:
        return tuple(
            slice(0, (size - 1) * step + 1, step) for size, step in zip(sizes, steps, strict=True)
        )

    def fprop(self, x: Tensor, w: Tensor) -> Tensor:
        # The spectrum is conjugated in place, because under a TorchDispatchMode torch would not
        # resolve a lazily conjugated view.
        filters = self._filters(w).conj_physical_()
        spectrum = torch.einsum("ngc...,gkc...->ngk...", self._samples(x, self._input), filters)
        return self._inverse(spectrum, self._every_stride)

    def dgrad(self, dy: Tensor, w: Tensor) -> Tensor:
        spectrum = torch.einsum(
            "ngk...,gkc...->ngc...", self._samples(dy, self._every_stride), self._filters(w)
        )
        return self._inverse(spectrum, self._input)

    def wgrad(self, x: Tensor, dy: Tensor) -> Tensor:
        gradients = self._samples(dy, self._every_stride).conj_physical_()
        spectrum = torch.einsum("ngc...,ngk...->gkc...", self._samples(x, self._input), gradients)
        return self._inverse(spectrum, self._every_dilation)

    def _samples(self, tensor: Tensor, where: tuple[slice, ...]) -> Tensor:
        return self._grouped(self._spectrum(tensor, where), 1)

    def _filters(self, w: Tensor) -> Tensor:
        return self._grouped(self._spectrum(w, self._every_dilation), 0)

    def _grouped(self, spectrum: Tensor, axis: int) -> Tensor:
        shape = list(spectrum.shape)
        shape[axis : axis + 1] = [self.problem.groups, shape[axis] // self.problem.groups]
        return spectrum.view(shape)

    def _spectrum(self, tensor: Tensor, where: tuple[slice, ...]) -> Tensor:
        # These zeros are the padding of the convolution. They are also the reason why values that
        # wrap around in the cyclic convolution do not reach the outputs that are kept.
        canvas = tensor.new_zeros((*tensor.shape[:2], *self._sizes))
        canvas[(slice(None), slice(None), *where)] = tensor
        spectrum: Tensor = torch.fft.rfftn(canvas, dim=self._axes)
        return spectrum

    def _inverse(self, spectrum: Tensor, where: tuple[slice, ...]) -> Tensor:
        # The axes of groups and of the channels in a group become one axis of channels again.
        flattened = spectrum.flatten(*((1, 2) if self.problem.op != "wgrad" else (0, 1)))
        values: Tensor = torch.fft.irfftn(flattened, s=self._sizes, dim=self._axes)
        return values[(slice(None), slice(None), *where)]


def smooth_size(size: int) -> int:
    """The smallest number of at least `size` with no prime factor above 5.

    >>> [smooth_size(n) for n in (1, 7, 31, 58)]
    [1, 8, 32, 60]
    """
    for candidate in count(size):
        rest = candidate
        for factor in (2, 3, 5):
            while rest % factor == 0:
                rest //= factor
        if rest == 1:
            return candidate
    raise AssertionError("unreachable: there is always a larger power of two")
