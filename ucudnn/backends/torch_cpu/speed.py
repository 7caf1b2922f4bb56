"""Peak rates of arithmetic and memory in this process, measured once: the machine's roofline."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache, partial

import torch

from ucudnn.backends._base import Roofline
from ucudnn.backends.torch_cpu.identity import usable_cache_bytes
from ucudnn.system.forking import ForkSafeLock

# By how much a convolution may come closer to the peak than the product and the copy below do.
MARGIN = 1.25
# Columns, and rows per thread, of a product. Among many short runs some are not interrupted; in a
# long one less of this thread's time goes into waiting for others that are.
_PRODUCTS = ((512, 256), (1024, 1024))
_MOST_ROWS = 1 << 14
# A cache saves at most its size in each pass, and no algorithm makes more passes over its operands
# and temporaries than these.
_PASSES = 16
_BUDGET_NS = 40_000_000
_measuring = ForkSafeLock()


def roofline(dtype: str) -> Roofline:
    """Peak rates of this process with its present threads, `MARGIN` times the best measured.

    Args:
        dtype: of a problem. Half precision is at least as fast as float32, which it may be
            computed in.
    """
    threads = torch.get_num_threads()
    with _measuring:
        operations = _operations_per_s(dtype, threads)
        if dtype in ("float16", "bfloat16"):
            operations = max(operations, _operations_per_s("float32", threads))
        cached = _PASSES * usable_cache_bytes()
        return Roofline(MARGIN * operations, MARGIN * _bytes_per_s(threads), cached)


@lru_cache
def _operations_per_s(dtype: str, threads: int) -> float:
    """Operations per second of the faster of two matrix products."""
    best = 0.0
    for side, rows_per_thread in _PRODUCTS:
        rows = min(rows_per_thread * threads, _MOST_ROWS)
        square = torch.ones(side, side, dtype=getattr(torch, dtype), device="cpu")
        left, product = square.new_ones(rows, side), square.new_empty(rows, side)
        best_ns = _shortest_ns(partial(torch.mm, left, square, out=product))
        best = max(best, 2e9 * rows * side**2 / best_ns)
        if best_ns > _BUDGET_NS:  # a dtype that the processor has no instructions for
            break
    return best


@lru_cache
def _bytes_per_s(threads: int) -> float:
    """Bytes read and written by a copy between tensors that exceed the caches together."""
    del threads  # part of the key
    size = usable_cache_bytes()
    source, target = (torch.ones(size, dtype=torch.uint8, device="cpu") for _ in range(2))
    return 2e9 * size / _shortest_ns(partial(target.copy_, source))


def _shortest_ns(run: Callable[[], object]) -> int:
    """The shortest processor time of this thread, which does an equal part of the work.

    Other processes on the machine affect it much less than elapsed time.
    """
    times: list[int] = []
    while sum(times) < _BUDGET_NS:
        before_ns = time.thread_time_ns()
        run()
        times.append(max(1, time.thread_time_ns() - before_ns))
    return min(times)
