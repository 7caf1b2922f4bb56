"""Layers that follow a plan, with the names and constructors of torch.nn's convolutions.

They have the same parameters and the same state_dict as torch.nn's. A layer that is constructed
from one of these classes has no plan at first; `ucudnn.convert_` gives it one. Until then it
computes torch's own convolution or raises an error, as `Config.unplanned` says.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ucudnn.config import Config
from ucudnn.execution.autograd import Geometry, planned_convolution
from ucudnn.execution.compiling import untraced
from ucudnn.execution.runner import Layer, Runner

if TYPE_CHECKING:  # the mixins below read attributes of the torch.nn class with which they combine

    class _Convolution(nn.modules.conv._ConvTransposeNd):
        def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...
        def extra_repr(self) -> str: ...

else:
    _Convolution = object


class AbstractPlanned(_Convolution):
    """Mixin that lets a layer of torch follow a plan.

    Args:
        config: settings, whose `unplanned` says what to do with shapes that have no plan. It can
            only be given by keyword. All other arguments are those of the class in torch.nn.
    """

    _ucudnn_runner: Runner

    def __init__(
        self, *args: Any, device: Any = None, config: Config | None = None, **kwargs: Any
    ) -> None:
        # `device` is a parameter of its own, because torch.nn.utils.skip_init looks for one.
        if device is not None:
            kwargs["device"] = device
        super().__init__(*args, **kwargs)
        follow(self, Runner(None, config))

    def extra_repr(self) -> str:
        """torch's own `extra_repr`, and the plan that the layer follows."""
        plan = self._ucudnn_runner.plan
        said = "no plan" if plan is None else f"plan {plan.hash[:8]}"
        return f"{super().extra_repr()}, {said}"


class AbstractConvolution(AbstractPlanned):
    """Mixin whose forward follows the plan, except under torch.compile: there it is torch's own."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if torch.compiler.is_compiling():
            plain: Tensor = super()._conv_forward(input, weight, bias)
            return plain
        surplus, geometry = geometry_of(self)
        # aten's convolution pads with zeros only, and with equally many at both ends of an axis.
        # Any other padding (`surplus`) is added to the input here.
        if surplus is not None:
            mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
            input = functional.pad(input, surplus, mode=mode)
        return planned_convolution(self._ucudnn_runner, input, weight, bias, geometry)


class AbstractTransposed(AbstractPlanned):
    """Like `AbstractConvolution`, for transposed convolutions."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Compute the output by the plan; arguments as in torch."""
        if torch.compiler.is_compiling():
            plain: Tensor = super().forward(input, output_size)
            return plain
        rank = len(self.kernel_size)
        arguments = (self.stride, self.padding, self.kernel_size, rank, self.dilation)
        # If `output_size` is given, the output padding follows from it. Otherwise it is the
        # module's own `output_padding`.
        output_padding = self._output_padding(input, output_size, *arguments)  # type: ignore[arg-type]
        _, geometry = geometry_of(self)
        geometry = geometry._replace(output_padding=tuple(output_padding))
        return planned_convolution(self._ucudnn_runner, input, self.weight, self.bias, geometry)


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

    One of them is `__module__`. It says that the layer is from torch.nn, because tracers of
    torch.fx do not trace into such modules. If the class had this `__module__`, pickle would look
    for the class in torch.nn and not find it.
    """
    # The attributes are set on the instance, because all layers share the class, and `unfollow`
    # must be able to remove them from one layer.
    vars(module).update(_ucudnn_runner=runner, __module__=nn.Conv2d.__module__)


def unfollow(module: nn.Module) -> None:
    """Remove the attributes that `follow` has set."""
    for name in ("_ucudnn_runner", "__module__"):
        vars(module).pop(name, None)


@untraced
def geometry_of(module: nn.modules.conv._ConvNd) -> tuple[list[int] | None, Geometry]:
    """The padding to add to the input before a convolution, and the geometry of the convolution.

    The padding is for `torch.nn.functional.pad`: (begin, end) per axis, last axis first; None if
    torch would not call `pad` for this module either.

    >>> geometry_of(nn.Conv2d(1, 1, (3, 2), padding="same"))[0]
    [0, 1, 0, 0]
    >>> geometry_of(nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular"))[1].padding
    (0, 0)
    """
    # The cached function needs hashable arguments, and the module's attributes may be lists.
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


# The result is cached, because every forward of a layer calls this function, and models have few
# different geometries.
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
        # As in torch, the larger half of an odd total is added at the end.
        totals = [step * (kernel - 1) for step, kernel in spans]
        pairs = [(total // 2, total - total // 2) for total in totals]
    elif isinstance(amounts, str):
        # The only other text is "valid", which means no padding.
        pairs = [(0, 0)] * len(kernel_size)
    else:
        pairs = [(amount, amount) for amount in amounts]
    # The convolution itself can pad both ends with the same number of zeros, without a padded copy
    # of the input. Only the surplus of one end needs a copy.
    inner = tuple(0 if mode != "zeros" else min(pair) for pair in pairs)
    surplus = [
        amount - kept
        for pair, kept in zip(reversed(pairs), reversed(inner), strict=True)
        for amount in pair
    ]
    geometry = Geometry(stride, inner, dilation, transposed, output_padding, groups)
    # For modes other than "zeros" torch always calls `pad`, which may change the layout even if it
    # adds nothing. So `pad` is called here, too.
    return surplus if mode != "zeros" or any(surplus) else None, geometry


def layer_of(module: nn.modules.conv._ConvNd) -> Layer:
    """The `Layer` of a module: what all its kernels (passes and input sizes) have in common.

    >>> layer_of(nn.ConvTranspose1d(2, 5, 3)).in_channels
    5
    """
    _, geometry = geometry_of(module)
    channels = (module.in_channels, module.out_channels)
    # A transposed convolution is the dgrad of a convolution with the channel counts exchanged.
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
