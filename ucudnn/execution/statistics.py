"""Normalisations that average over rows, in modules that run in slabs: their statistics come first.

The mean and the variance of a normalisation are computed slab by slab, before the module runs in
slabs: for each slab, the module runs up to this normalisation. All normalisations before it have
their statistics by then. The statistics of slabs are united as those of parts of a sample are
(Chan, Golub and LeVeque, 1979). All of it belongs to the graph of autograd, so backward needs no
formula of its own: gradients of statistics go back through the slabs that they are made from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ucudnn.execution.compiling import untraced

# Normalisations of each sample, each with the places of its weight, its bias and its eps.
_NORMS = {functional.instance_norm: (3, 4, 7), functional.group_norm: (2, 3, 4)}
_NAMES = ("weight", "bias", "eps")
# Statistics of narrower numbers are computed in float32.
_WIDE = (torch.float32, torch.float64)


class Statistics(NamedTuple):
    """Mean and variance of each group of channels of each sample, both of shape (samples, groups).

    Attributes:
        numbers: how many there are in a group.
        mean: their mean.
        squares: the sum of their squared differences from the mean.
    """

    numbers: int
    mean: Tensor
    squares: Tensor


class Reached(Exception):  # noqa: N818 - no error: it ends a forward whose rest is not needed
    """The normalisation whose statistics are asked for was called.

    Args:
        statistics: of its input.
    """

    def __init__(self, statistics: Statistics) -> None:
        super().__init__()
        self.statistics = statistics


class NormsByStatistics(TorchFunctionMode):
    """In this context, normalisations over rows use statistics that are known.

    Args:
        axis: the axis that has the rows.
        known: statistics of the first normalisations, in the order of their calls. Later ones
            compute their own.
        wanted: rows of the input of the next one, whose statistics are raised as `Reached`; None:
            those of none are.

    Attributes:
        own: the statistics of those that computed their own.
        rows: of the inputs of all that were called.
    """

    @untraced
    def __init__(
        self, axis: int, known: Sequence[Statistics] = (), wanted: slice | None = None
    ) -> None:
        super().__init__()
        self._axis, self._known, self._wanted = axis, known, wanted
        self.own, self.rows = list[Statistics](), list[int]()

    @untraced
    def again(self) -> NormsByStatistics:
        """The same context for one more forward."""
        return NormsByStatistics(self._axis, self._known, self._wanted)

    @untraced
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function, unless it is a normalisation whose statistics are known."""
        del types
        kwargs = kwargs or {}
        input_: Any = args[0] if args else kwargs.get("input")
        if func not in _NORMS or not self._is_over_rows(func, input_, args, kwargs):
            return func(*args, **kwargs)
        number = len(self.rows)
        self.rows.append(input_.shape[self._axis])
        groups = input_.shape[1]
        if func is functional.group_norm:
            groups = args[1] if len(args) > 1 else kwargs["num_groups"]
        if number < len(self._known):
            weight, bias, eps = (
                args[place] if len(args) > place else kwargs.get(name)
                for name, place in zip(_NAMES, _NORMS[func], strict=True)
            )
            return normalised(
                input_, self._known[number], weight, bias, 1e-5 if eps is None else eps
            )
        if self._wanted is not None:
            rows = [slice(None)] * self._axis + [self._wanted]
            raise Reached(statistics_of(input_[tuple(rows)], groups))
        self.own.append(statistics_of(input_.detach(), groups))
        return func(*args, **kwargs)

    def _is_over_rows(self, func: Any, input_: Tensor, args: Any, kwargs: dict[str, Any]) -> bool:
        is_own = args[5] if len(args) > 5 else kwargs.get("use_input_stats", True)
        is_by_input = func is functional.group_norm or is_own
        return bool(is_by_input) and self._axis >= 2 and input_.dim() > self._axis


@untraced
def statistics_of(input_: Tensor, groups: int) -> Statistics:
    """The statistics of a tensor of shape (samples, channels, ...)."""
    flat = input_.reshape(len(input_), groups, -1)
    flat = flat if flat.dtype in _WIDE else flat.float()
    mean = flat.mean(2)
    return Statistics(flat.shape[2], mean, (flat - mean[..., None]).square().sum(2))


@untraced
def united(parts: Sequence[Statistics]) -> Statistics:
    """The statistics of all parts together.

    >>> x = torch.arange(12.0).view(1, 1, 12)
    >>> both = united([statistics_of(x[..., :5], 1), statistics_of(x[..., 5:], 1)])
    >>> both.mean.item(), torch.isclose(both.squares / both.numbers, x.var(correction=0)).item()
    (5.5, True)
    """
    parts = [one for one in parts if one.numbers]
    count = sum(one.numbers for one in parts)
    counts = torch.tensor([one.numbers for one in parts], dtype=parts[0].mean.dtype)
    weights = counts.to(parts[0].mean.device)[:, None, None]
    means = torch.stack([one.mean for one in parts])
    mean = (means * (weights / count)).sum(0)
    squares = torch.stack([one.squares for one in parts]) + weights * (means - mean).square()
    return Statistics(count, mean, squares.sum(0))


@untraced
def normalised(
    input_: Tensor, known: Statistics, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """A tensor normalised by these statistics, times weights and with a bias of each channel."""
    samples, channels = input_.shape[:2]
    each = channels // known.mean.shape[1]
    deviation = torch.rsqrt(known.squares / known.numbers + eps)
    mean, scale = (one.repeat_interleave(each, 1) for one in (known.mean, deviation))
    if weight is not None:
        scale = scale * weight
    shift = -mean * scale if bias is None else torch.addcmul(bias, mean, scale, value=-1)
    form = (samples, channels, *[1] * (input_.dim() - 2))
    wide = input_ if input_.dtype in _WIDE else input_.float()
    return torch.addcmul(shift.view(form), wide, scale.view(form)).to(input_.dtype)
