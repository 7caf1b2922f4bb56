"""torch's own convolution, also while `ucudnn.installed` stands in for the operator.

Whoever times or computes torch's own convolution calls it here, so that no plan comes between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

DISPATCH_KEYS = {"cpu": "CPU", "cuda": "CUDA"}
_aten = torch.ops.aten
_convolution: Callable[..., Any] = torch._convolution
_cudnn: Any = torch.backends.cudnn


class Kernels(NamedTuple):
    """The kernels of aten::convolution and aten::convolution_backward on one kind of device."""

    convolution: Callable[..., Any]
    convolution_backward: Callable[..., Any]


_kept: dict[str, Kernels] = {}


def convolution(x: Tensor, w: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
    """torch's own convolution.

    >>> convolution(torch.ones(1, 1, 3), torch.ones(1, 1, 3), None, [1], [0], [1], False, [0], 1)
    tensor([[[3.]]])

    Args:
        x: input.
        w: filter.
        bias: shape (K,) or None.
        geometry: stride, padding, dilation, transposed, output_padding, groups.
    """
    kernels = _kept.get(x.device.type)
    function = torch.convolution if kernels is None else kernels.convolution
    result: Tensor = function(x, w, bias, *geometry)
    return result


def convolution_backward(
    dy: Tensor, x: Tensor, w: Tensor, bias_sizes: list[int] | None, *geometry_and_mask: Any
) -> Any:
    """torch's own gradients of x, w and the bias; None for those that are not wanted.

    Args:
        dy: gradient of the output.
        x: input.
        w: filter.
        bias_sizes: [K], None without a bias.
        geometry_and_mask: as for `convolution`, then which gradients of x, w and bias are wanted.
    """
    kernels = _kept.get(dy.device.type)
    function = _aten.convolution_backward.default if kernels is None else kernels[1]
    return function(dy, x, w, bias_sizes, *geometry_and_mask)


def keep(device_type: str) -> Kernels:
    """Remember the kernels that others are about to stand in for."""
    _kept[device_type] = Kernels(
        _forward_kernel(device_type), _boxed("aten::convolution_backward", device_type)
    )
    return _kept[device_type]


def _forward_kernel(device_type: str) -> Callable[..., Any]:
    name, key = "aten::convolution", DISPATCH_KEYS[device_type]
    if torch._C._dispatch_has_kernel_for_dispatch_key(name, key):
        return _boxed(name, device_type)  # another library's
    # torch's kernel for every device only adds these four flags; calling what it calls takes half
    # as long as calling it boxed
    return _cuda_convolution if device_type == "cuda" else _cpu_convolution


def _cpu_convolution(*arguments: Any) -> Any:
    return _convolution(*arguments, False, False, True, True)


def _cuda_convolution(*arguments: Any) -> Any:
    c = torch._C
    deterministic = c._get_cudnn_deterministic() or c._get_deterministic_algorithms()
    flags = (c._get_cudnn_benchmark(), deterministic, c._get_cudnn_enabled(), tf32_allowed())
    return _convolution(*arguments, *flags)


def tf32_allowed() -> bool:
    """True if torch may round the operands of a float32 convolution on a GPU to TF32 now.

    `torch.backends.cudnn.allow_tf32` raises once the newer `fp32_precision` was used; this reads
    the newer one, which follows both.

    >>> torch.backends.cudnn.conv.fp32_precision == ("tf32" if tf32_allowed() else "ieee")
    True
    """
    return bool(_cudnn.conv.fp32_precision == "tf32")


def _boxed(name: str, device_type: str) -> Callable[..., Any]:
    key = DISPATCH_KEYS[device_type]
    kernel = torch.library.get_kernel(name, key)
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def call(*arguments: Any) -> Any:
        return kernel.call_boxed(keys, *arguments)

    return call
