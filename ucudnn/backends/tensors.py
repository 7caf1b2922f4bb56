"""dtype and layout of a problem's tensors in torch's words."""

from __future__ import annotations

import torch

from ucudnn.problem import Problem

CHANNELS_LAST_BY_RANK = {2: torch.channels_last, 3: torch.channels_last_3d}


def memory_format(problem: Problem) -> torch.memory_format:
    """The memory format that torch uses for the problem's layout.

    >>> memory_format(Problem("fprop", 1, 4, 4, (9, 9), (3, 3), layout="nhwc"))
    torch.channels_last
    """
    if problem.layout == "nhwc":
        return CHANNELS_LAST_BY_RANK[problem.rank]
    return torch.contiguous_format


def torch_dtype(problem: Problem) -> torch.dtype:
    """The problem's dtype as torch knows it.

    >>> torch_dtype(Problem("fprop", 1, 4, 4, (9, 9), (3, 3), dtype="float16"))
    torch.float16
    """
    dtype = getattr(torch, problem.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def strides_of(shape: tuple[int, ...], is_channels_last: bool) -> tuple[int, ...]:
    """Strides of a new tensor of shape (N, C, *spatial), also of one in 1-D.

    >>> strides_of((2, 3, 5), False), strides_of((2, 3, 5), True)
    ((15, 5, 1), (15, 1, 3))
    """
    axes = range(len(shape))
    outer_to_inner = (0, *axes[2:], 1) if is_channels_last else axes
    strides, step = [0] * len(shape), 1
    for axis in reversed(outer_to_inner):
        strides[axis] = step
        step *= shape[axis]
    return tuple(strides)
