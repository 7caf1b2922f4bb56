"""How much temporary memory a call takes: what torch's allocator saw, beyond the result.

torch's profiler reports every allocation of torch's CPU allocator, oneDNN's scratch included, and
changes no state. It misses what a kernel takes from malloc itself: `unseen_bytes` is the formula.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from math import prod

# Kineto is read when the profiler is first loaded; it warns about GPUs that are not there.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
from torch import Tensor
from torch.autograd.profiler import profile

from ucudnn.errors import BusyError
from ucudnn.problem import Problem


def allocated_peak_bytes(run: Callable[[], Tensor | None]) -> int:
    """Run once and return the peak of allocated memory beyond the returned tensor.

    >>> import torch
    >>> allocated_peak_bytes(lambda: torch.ones(1 << 20).add(1).sum()) // (1 << 20)
    8

    Raises:
        BusyError: torch's profiler is in use.
    """
    if torch._C._autograd._profiler_enabled():  # there is one per process, and it is the user's
        raise BusyError(
            "workspace is measured with torch's profiler, which is in use; tune outside it"
        )
    with profile(use_kineto=True, profile_memory=True, use_cpu=True) as profiler:
        result = run()
    assert profiler.kineto_results is not None
    events = [
        (event.start_ns(), event.nbytes())
        for event in profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    allocated = peak = 0
    for _, change in sorted(events, key=lambda event: event[0]):
        allocated += change
        peak = max(peak, allocated)
    kept = 0 if result is None else result.untyped_storage().nbytes()
    return max(peak - kept, 0)


def unseen_bytes(problem: Problem, kernel: str, threads: int) -> int:
    """Bytes that a kernel takes from malloc itself, where the profiler does not see them.

    Two cases, both dgrad off oneDNN, held against a counting malloc by a test: slow_conv2d keeps
    the columns of one sample per thread, and float16 matrix products keep a float32 result.

    Args:
        problem: with the chunk as its batch.
        kernel: the kernel that runs, such as "slow_conv2d" or "im2col_gemm".
        threads: intra-operator threads.
    """
    if problem.op != "dgrad" or kernel.startswith("onednn"):
        return 0
    columns = problem.in_channels // problem.groups
    columns *= prod(problem.kernel_size) * prod(problem.output_size)
    product = 4 * columns if problem.dtype == "float16" else 0
    if kernel == "slow_conv2d":
        return min(threads, problem.batch) * (columns * problem.bytes_per_element + product)
    return product * (problem.batch if kernel == "im2col_gemm" else 1)
