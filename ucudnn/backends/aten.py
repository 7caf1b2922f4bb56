"""torch's own convolution, also while `ucudnn.installed` redirects the operator to a plan.

Code that times or runs torch's own convolution calls these functions, which never run a plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ucudnn.problem import Problem

_aten = torch.ops.aten
_convolution: Callable[..., Any] = torch._convolution


class Kernels(NamedTuple):
    """Kernels: the functions of torch's dispatcher for two operators, on one kind of device."""

    convolution: Callable[..., Any]
    convolution_backward: Callable[..., Any]


# The kernels that `keep_kernels` has kept, by kind of device. For any other kind of device,
# torch's operators are called directly.
_kept: dict[str, Kernels] = {}


def geometry_of(problem: Problem) -> tuple[Any, ...]:
    """The arguments of aten's convolutions that follow the bias, for equal padding at both ends.

    They are stride, padding, dilation, transposed, output_padding and groups.

    >>> from ucudnn.problem import Problem
    >>> geometry_of(Problem("fprop", 1, 4, 4, (9,), (3,), padding=((1, 1),)))
    ([1], [1], [1], False, [0], 1)
    """
    stride, dilation = list(problem.stride), list(problem.dilation)
    padding = [begin for begin, _ in problem.padding]
    return stride, padding, dilation, False, [0] * problem.rank, problem.groups


def convolution(x: Tensor, w: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
    """Compute a convolution as torch does; `geometry_of` explains the geometry.

    >>> convolution(torch.ones(1, 1, 3), torch.ones(1, 1, 3), None, [1], [0], [1], False, [0], 1)
    tensor([[[3.]]])
    """
    kernels = _kept.get(x.device.type)
    function = torch.convolution if kernels is None else kernels.convolution
    result: Tensor = function(x, w, bias, *geometry)
    return result


def convolution_backward(
    dy: Tensor, x: Tensor, w: Tensor, bias_sizes: list[int] | None, *geometry_and_mask: Any
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x, w and the bias as torch does; None for those not requested.

    The last argument is the mask of the requested gradients.
    """
    kernels = _kept.get(dy.device.type)
    function = _aten.convolution_backward.default if kernels is None else kernels[1]
    gradients: tuple[Tensor | None, ...] = function(dy, x, w, bias_sizes, *geometry_and_mask)
    return gradients


def keep_kernels(device_type: str, dispatch_key: str) -> Kernels:
    """Keep the dispatcher's present kernels for a kind of device, before others are registered.

    From then on, `convolution` and `convolution_backward` call the kept kernels.
    """
    _kept[device_type] = Kernels(
        _forward_kernel(device_type, dispatch_key),
        _boxed("aten::convolution_backward", dispatch_key),
    )
    return _kept[device_type]


def _forward_kernel(device_type: str, dispatch_key: str) -> Callable[..., Any]:
    name = "aten::convolution"
    # torch registers no kernel for this dispatch key itself. If there is one, it belongs to another
    # library, and is kept.
    if torch._C._dispatch_has_kernel_for_dispatch_key(name, dispatch_key):
        return _boxed(name, dispatch_key)
    # On every device `aten::convolution` only calls `aten::_convolution` with four more flags.
    # Calling `_convolution` directly takes half as long as calling a kernel by `call_boxed`.
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

    >>> torch.backends.cudnn.conv.fp32_precision == ("tf32" if tf32_allowed() else "ieee")
    True
    """
    # `torch.backends.cudnn.allow_tf32` raises an error once the newer setting `fp32_precision` was
    # used, whereas `fp32_precision` is right whichever of the two was set. It is read in C++,
    # because every read from Python takes 1 us.
    return bool(torch._C._get_fp32_precision_getter("cuda", "conv") == "tf32")


def setting_of(tensor: Tensor) -> tuple[bool, ...]:
    """The settings of torch that decide which convolutions of a tensor a plan may compute now.

    On a GPU they are whether TF32 is allowed and whether cuDNN is switched on, on a CPU whether
    oneDNN is switched on.
    """
    # All are read in C++, because this is read at every call of a planned convolution.
    if tensor.is_cuda:
        return tf32_allowed(), torch._C._get_cudnn_enabled()
    return (torch._C._get_mkldnn_enabled(),)


def _boxed(name: str, dispatch_key: str) -> Callable[..., Any]:
    kernel = torch.library.get_kernel(name, dispatch_key)
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, dispatch_key))

    def call(*arguments: Any) -> Any:
        return kernel.call_boxed(keys, *arguments)

    return call
