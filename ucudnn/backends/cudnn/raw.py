"""Memory for measuring from CuPy, which torch's caching allocator neither holds nor counts.

Operands of a benchmark are larger than the GPU's cache. From torch's allocator, they would change
how its blocks are split, and would count as workspace if they are allocated during a run. Without
CuPy (the extras cuda12 and cuda13) they come from torch.
"""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any

import torch
import torch.utils.dlpack
from torch import Tensor


@cache
def _cupy() -> Any:
    """CuPy, None if it is not installed."""
    try:
        import cupy
    except ImportError:
        return None
    return cupy


def empty_raw(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A new contiguous tensor in separate memory, which is freed with the tensor.

    Args:
        shape: its sizes, all above 0.
        dtype: any of torch's.
        device: a GPU.
    """
    cupy = _cupy()
    if cupy is None:
        return torch.empty(shape, dtype=dtype, device=device)
    # Without CuPy's pool: memory that a pool keeps could not be allocated by torch.
    with cupy.cuda.Device(device.index), cupy.cuda.using_allocator(None):
        size = prod(shape) * dtype.itemsize  # bytes, because CuPy has no bfloat16
        try:
            owner = cupy.empty(size, dtype=cupy.uint8)
        except (RuntimeError, MemoryError):
            # Blocks that torch's allocator keeps and nothing uses are given back to torch alone.
            torch.cuda.empty_cache()
            owner = cupy.empty(size, dtype=cupy.uint8)
    return torch.utils.dlpack.from_dlpack(owner).view(dtype).view(shape)
