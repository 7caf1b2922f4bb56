"""Temporary memory of a call: the peak in torch's allocator, beyond the result.

torch's profiler reports every allocation of torch's CPU allocator, oneDNN's scratch included, and
changes no state. It misses memory that a kernel takes from malloc directly or in other threads.
`unseen_bytes` is an upper bound of such memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import accumulate
from math import prod
from typing import TypeVar

# Kineto reads this variable when the profiler is first loaded. Without it, Kineto warns about
# missing GPUs.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
from torch import Tensor
from torch.autograd.profiler import profile

from ucudnn.backends._base import Span
from ucudnn.backends.torch_cpu.algorithm import COLUMN_KERNELS, ONEDNN_KERNELS
from ucudnn.backends.torch_cpu.processor import has_instructions
from ucudnn.errors import BusyError
from ucudnn.problem import OPS, Problem

R = TypeVar("R")
_PADDING = 64  # rows and columns that packing may add to a matrix


def allocated_peak_bytes(run: Callable[[], Tensor | None]) -> int:
    """Run once and return the peak of allocated memory beyond the returned tensor.

    >>> import torch
    >>> allocated_peak_bytes(lambda: torch.ones(1 << 20).add(1).sum()) // (1 << 20)
    8
    """
    result, span = allocated(run)
    kept = 0 if result is None else result.untyped_storage().nbytes()
    # The difference is negative if the returned tensor existed before the call.
    return max(span.peak_bytes - kept, 0)


def allocated(run: Callable[[], R]) -> tuple[R, Span]:
    """Run once; return the result, and the memory that was allocated.

    >>> import torch
    >>> result, span = allocated(lambda: torch.ones(1 << 20).add(1))
    >>> [size >> 20 for size in span]
    [8, 4]
    """
    if torch._C._autograd._profiler_enabled():  # a process has one profiler, and the user runs it
        raise BusyError(
            "workspace is measured with torch's profiler, which is in use; tune outside it"
        )
    with profile(use_kineto=True, profile_memory=True, use_cpu=True) as profiler:
        result = run()
    assert profiler.kineto_results is not None
    events = [one for one in profiler.kineto_results.events() if one.name() == "[memory]"]
    # They are not listed in the order of time.
    changes = [one.nbytes() for one in sorted(events, key=lambda one: one.start_ns())]
    levels = [*accumulate(changes, initial=0)]
    return result, Span(max(levels), levels[-1])


def unseen_bytes(problem: Problem, kernel: str, threads: int) -> int:
    """Upper bound of the bytes that an implementation takes without the profiler seeing them.

    These bytes come from malloc directly, or from threads other than the caller's. aten's
    convolutions use them for the columns of one sample per thread (dgrad) and for the scratch of
    half-precision products. oneDNN uses them for scratch if the processor lacks instructions for
    the dtype. A test compares the bound with a counting malloc, also for older processors, which
    are imitated.
    """
    native = has_instructions(problem.dtype)
    if kernel in ONEDNN_KERNELS:
        return 0 if native else threads * _fallback_scratch_bytes(problem)
    if kernel not in COLUMN_KERNELS:
        return 0
    unseen = 0
    # The samples of a weight gradient are added up one after another, by a single thread.
    workers = 1 if problem.op == "wgrad" else min(threads, problem.batch)
    if kernel == "slow_conv2d" and problem.op == "dgrad":
        taps, _, places = _matrix_sizes(problem)
        unseen = workers * taps * places * problem.bytes_per_element
    if problem.bytes_per_element > 2:
        return unseen
    if native:  # the profiler sees what the caller's own thread takes
        return unseen + (workers - 1) * _packed_elements(problem, 32) * 2
    return unseen + threads * _fallback_scratch_bytes(problem)


def _fallback_scratch_bytes(problem: Problem) -> int:
    """Scratch of one thread for a sample's matrix product, in a dtype without instructions.

    The operands are packed, and half precision is computed in float32.
    """
    elements = _packed_elements(problem, 128)
    if problem.bytes_per_element == 2:
        sizes = _matrix_sizes(problem)
        elements += prod(sizes) // sizes[OPS.index(problem.op)]
    return 4 * elements


def _packed_elements(problem: Problem, least: int) -> int:
    """Elements of both packed operands of a sample's product, for sums of `least` terms or more."""
    sizes = _matrix_sizes(problem)
    summed = sizes[OPS.index(problem.op)]
    return (sum(sizes) - summed + _PADDING) * max(summed, least)


def _matrix_sizes(problem: Problem) -> tuple[int, int, int]:
    """The three sizes of a group's matrix product; each op sums over one of them.

    They are the inputs that an output reads (channels * filter positions), the output channels, and
    the output positions of a sample.
    """
    channels = problem.in_channels // problem.groups
    return (
        channels * prod(problem.kernel_size),
        problem.out_channels // problem.groups,
        prod(problem.output_size),
    )
