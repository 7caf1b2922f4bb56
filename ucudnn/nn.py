"""Layers with the constructors of torch.nn whose convolutions follow a plan.

They are adapters without logic: same parameters, same state_dict, same answers. A layer that was
made here and not converted has no plan yet; what it does then is `Config.unplanned`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ucudnn.config import Config
from ucudnn.ops import Geometry, Runner, convolution

if TYPE_CHECKING:  # the mixin stands before a torch.nn convolution, whose attributes it reads

    class _Convolution(nn.modules.conv._ConvNd):
        def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...

else:
    _Convolution = object


class AbstractPlanned(_Convolution):
    """What the layers below add to torch's: a runner, and a forward that asks it.

    Args:
        config: what to do with shapes that have no plan, keyword only; the others are torch's.
    """

    _ucudnn_runner: Runner

    def __init__(self, *args: Any, config: Config | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ucudnn_runner = Runner(None, config)

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if torch.compiler.is_compiling():
            # Inductor keeps its layout and fusion passes only on a plain aten convolution
            return super()._conv_forward(input, weight, bias)
        surplus, padding = split_padding(self)
        if any(surplus):
            mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
            input = functional.pad(input, surplus, mode=mode)
        geometry = Geometry(self.stride, padding, self.dilation, self.groups)
        return convolution(self._ucudnn_runner, input, weight, bias, geometry)


class Conv1d(AbstractPlanned, nn.Conv1d):
    """torch.nn.Conv1d that follows a plan.

    >>> layer = Conv1d(4, 8, 3, config=Config(unplanned="tune", policy="undivided"))
    >>> layer.weight.shape
    torch.Size([8, 4, 3])
    """


class Conv2d(AbstractPlanned, nn.Conv2d):
    """torch.nn.Conv2d that follows a plan.

    >>> Conv2d(64, 192, 5, padding=2).extra_repr()
    '64, 192, kernel_size=(5, 5), stride=(1, 1), padding=(2, 2)'
    """


class Conv3d(AbstractPlanned, nn.Conv3d):
    """torch.nn.Conv3d that follows a plan.

    >>> Conv3d(1, 2, 3).weight.shape
    torch.Size([2, 1, 3, 3, 3])
    """


def split_padding(layer: nn.modules.conv._ConvNd) -> tuple[list[int], tuple[int, ...]]:
    """What torch pads a layer's input by beforehand, and what it leaves to the convolution.

    >>> split_padding(nn.Conv2d(1, 1, (3, 2), padding="same"))
    ([0, 1, 0, 0], (1, 0))
    >>> split_padding(nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular"))
    ([1, 1, 1, 1], (0, 0))

    Returns:
        Amounts as `torch.nn.functional.pad` takes them, (begin, end) per axis, last axis first; and
        the padding at both ends of each axis, first axis first.
    """
    if layer.padding == "same":
        spans = zip(layer.dilation, layer.kernel_size, strict=True)
        totals = [dilation * (kernel - 1) for dilation, kernel in spans]
        pairs = [(total // 2, total - total // 2) for total in totals]
    elif layer.padding == "valid":
        pairs = [(0, 0)] * len(layer.kernel_size)
    else:
        pairs = [(int(amount), int(amount)) for amount in layer.padding]
    inner = [0 if layer.padding_mode != "zeros" else min(pair) for pair in pairs]
    surplus = [
        amount - kept
        for pair, kept in zip(reversed(pairs), reversed(inner), strict=True)
        for amount in pair
    ]
    return surplus, tuple(inner)
