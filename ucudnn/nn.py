"""Layers with the constructors of torch.nn whose convolutions follow a plan.

They are adapters without logic, with the same parameters and the same state_dict. A layer that was
made here, and not converted by a plan, follows `Config.unplanned`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ucudnn.config import Config
from ucudnn.errors import warn
from ucudnn.execution.autograd import Geometry, convolution
from ucudnn.execution.compiling import untraced
from ucudnn.execution.runner import Layer, Runner

if TYPE_CHECKING:  # the mixins stand before a torch.nn convolution, whose attributes they read

    class _Convolution(nn.modules.conv._ConvTransposeNd):
        def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...
        def extra_repr(self) -> str: ...

else:
    _Convolution = object


class AbstractPlanned(_Convolution):
    """The addition to torch's layers: the plan that they follow.

    Args:
        config: what to do with shapes that have no plan, keyword only; all other arguments are
            torch's.
    """

    _ucudnn_runner: Runner

    def __init__(
        self, *args: Any, device: Any = None, config: Config | None = None, **kwargs: Any
    ) -> None:
        if device is not None:  # a parameter because torch.nn.utils.skip_init looks for one
            kwargs["device"] = device
        super().__init__(*args, **kwargs)
        follow(self, Runner(None, config))

    def __setattr__(self, name: str, value: Any) -> None:
        # With this attribute torch's quantisation, eager and by FX, begins with each layer.
        if name == "qconfig" and value is not None:
            warn(
                "torch.ao.quantization looks layers up by their type and leaves those that follow "
                "a plan as they are; call ucudnn.revert_(model) before it"
            )
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        """torch's own, and what the layer follows."""
        plan = self._ucudnn_runner.plan
        said = "no plan" if plan is None else f"plan {plan.hash[:8]}"
        return f"{super().extra_repr()}, {said}"


class AbstractConvolution(AbstractPlanned):
    """Forward of a convolution by its plan; under torch.compile, torch's own convolution."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if torch.compiler.is_compiling():
            plain: Tensor = super()._conv_forward(input, weight, bias)
            return plain
        surplus, geometry = geometry_of(self)
        # aten's convolution pads with zeros, the same at both ends; the rest is added before it.
        if surplus is not None:
            mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
            input = functional.pad(input, surplus, mode=mode)
        return convolution(self._ucudnn_runner, input, weight, bias, geometry)


class AbstractTransposed(AbstractPlanned):
    """Forward of a transposed convolution by its plan; under torch.compile, torch's own."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Compute the output by the plan; arguments as in torch."""
        if torch.compiler.is_compiling():
            plain: Tensor = super().forward(input, output_size)
            return plain
        rank = len(self.kernel_size)
        arguments = (self.stride, self.padding, self.kernel_size, rank, self.dilation)
        # `output_size` of this call decides, and the module's own padding is only the default.
        output_padding = self._output_padding(input, output_size, *arguments)  # type: ignore[arg-type]
        _, geometry = geometry_of(self)
        geometry = geometry._replace(output_padding=tuple(output_padding))
        return convolution(self._ucudnn_runner, input, self.weight, self.bias, geometry)


class Conv1d(AbstractConvolution, nn.Conv1d):
    """torch.nn.Conv1d that follows a plan.

    >>> layer = Conv1d(4, 8, 3, config=Config(unplanned="error"))
    >>> layer.weight.shape
    torch.Size([8, 4, 3])
    """


class Conv2d(AbstractConvolution, nn.Conv2d):
    """torch.nn.Conv2d that follows a plan.

    >>> Conv2d(64, 192, 5, padding=2)
    Conv2d(64, 192, kernel_size=(5, 5), stride=(1, 1), padding=(2, 2), no plan)
    """


class Conv3d(AbstractConvolution, nn.Conv3d):
    """torch.nn.Conv3d that follows a plan.

    >>> Conv3d(1, 2, 3).weight.shape
    torch.Size([2, 1, 3, 3, 3])
    """


class ConvTranspose1d(AbstractTransposed, nn.ConvTranspose1d):
    """torch.nn.ConvTranspose1d that follows a plan.

    >>> ConvTranspose1d(4, 8, 3).weight.shape
    torch.Size([4, 8, 3])
    """


class ConvTranspose2d(AbstractTransposed, nn.ConvTranspose2d):
    """torch.nn.ConvTranspose2d that follows a plan.

    >>> ConvTranspose2d(8, 4, 2, stride=2).weight.shape
    torch.Size([8, 4, 2, 2])
    """


class ConvTranspose3d(AbstractTransposed, nn.ConvTranspose3d):
    """torch.nn.ConvTranspose3d that follows a plan.

    >>> ConvTranspose3d(2, 1, 3).weight.shape
    torch.Size([2, 1, 3, 3, 3])
    """


def follow(module: nn.Module, runner: Runner) -> None:
    """Give a layer the attributes that planned classes need.

    One of them is `__module__`: tracers of torch.fx take modules from torch.nn for leaves, which
    they do not look into. On the class it would break pickling.
    """
    # In the instance: all layers share the class, and `unfollow` can remove it again here.
    vars(module).update(_ucudnn_runner=runner, __module__=nn.Conv2d.__module__)


def unfollow(module: nn.Module) -> None:
    """Remove the attributes that `follow` has set."""
    for name in ("_ucudnn_runner", "__module__"):
        vars(module).pop(name, None)


@untraced
def geometry_of(module: nn.modules.conv._ConvNd) -> tuple[list[int] | None, Geometry]:
    """Padding of the input before the convolution, as torch does it, and the geometry of the rest.

    The padding is for `torch.nn.functional.pad`: (begin, end) per axis, last axis first; None if
    torch does not pad.

    >>> geometry_of(nn.Conv2d(1, 1, (3, 2), padding="same"))[0]
    [0, 1, 0, 0]
    >>> geometry_of(nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular"))[1].padding
    (0, 0)
    """
    # Tuples, which can be hashed, whatever was assigned to the module's attributes.
    return _geometry(
        module.padding if isinstance(module.padding, str) else tuple(module.padding),
        module.padding_mode,
        tuple(module.kernel_size),
        tuple(module.stride),
        tuple(module.dilation),
        module.transposed,
        tuple(module.output_padding),
        module.groups,
    )


# Every forward of a layer asks for this, and models have few different geometries.
@lru_cache(maxsize=1024)
def _geometry(
    amounts: str | tuple[int, ...],
    mode: str,
    kernel_size: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    transposed: bool,
    output_padding: tuple[int, ...],
    groups: int,
) -> tuple[list[int] | None, Geometry]:
    if amounts == "same":
        spans = zip(dilation, kernel_size, strict=True)
        # As torch does it: of an odd total the larger half comes last.
        totals = [step * (kernel - 1) for step, kernel in spans]
        pairs = [(total // 2, total - total // 2) for total in totals]
    elif isinstance(amounts, str):
        # The only other text is "valid", which means none.
        pairs = [(0, 0)] * len(kernel_size)
    else:
        pairs = [(amount, amount) for amount in amounts]
    # Zeros that are equal at both ends are left to the convolution, which needs no padded copy.
    inner = tuple(0 if mode != "zeros" else min(pair) for pair in pairs)
    surplus = [
        amount - kept
        for pair, kept in zip(reversed(pairs), reversed(inner), strict=True)
        for amount in pair
    ]
    geometry = Geometry(stride, inner, dilation, transposed, output_padding, groups)
    # torch calls its pad for every other mode, which may change the layout even where it adds none
    return surplus if mode != "zeros" or any(surplus) else None, geometry


def layer_of(module: nn.modules.conv._ConvNd) -> Layer:
    """The `Layer` of the kernels of a module.

    >>> layer_of(nn.ConvTranspose1d(2, 5, 3)).in_channels
    5
    """
    _, geometry = geometry_of(module)
    channels = (module.in_channels, module.out_channels)
    # A transposed convolution is the gradient of the one that has its channels exchanged.
    in_channels, out_channels = reversed(channels) if module.transposed else channels
    return Layer(
        in_channels,
        out_channels,
        tuple(module.kernel_size),
        geometry.stride,
        tuple((amount, amount) for amount in geometry.padding),
        geometry.dilation,
        geometry.groups,
    )
