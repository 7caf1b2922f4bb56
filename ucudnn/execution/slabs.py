"""Run a module on slabs of rows: cut its arguments, and write what the slabs give into one result.

A module is called on the rows of a slab and their halo, cut at the border of the whole. So what the
module adds at a border, such as padding, is added there and nowhere else, and what it adds at a
border between two slabs lies in the halo, of which nothing is kept. StreamingCNN (Pinckaers et al.,
arXiv 1911.04432) computes images in tiles by the same idea.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ucudnn.errors import PlanError
from ucudnn.execution.compiling import untraced, untraced_alone
from ucudnn.execution.nesting import Nest, put_together, take_apart
from ucudnn.execution.statistics import NormsByStatistics, Reached, Statistics, united
from ucudnn.segment import Segment, SlabRows

# A module that runs in parts may return values of these types, if they are equal in all parts.
CONSTANTS = (int, float, complex, str, torch.Size, torch.dtype, torch.device)


class _Slab(torch.autograd.Function):
    """A slab of a tensor, and the tensor for the slab that is cut next.

    Backward adds the gradient of the slab to that of the tensor, so that one gradient of the whole
    tensor is allocated, and none for each slab.
    """

    @staticmethod
    @untraced
    def forward(ctx: Any, tensor: Tensor, axis: int, low: int, length: int) -> Any:
        ctx.set_materialize_grads(False)
        ctx.where, ctx.form = (axis, low, length), (tensor.shape, axes_by_stride(tensor))
        return tensor.detach().narrow(*ctx.where), tensor.detach()

    @staticmethod
    @untraced
    def backward(ctx: Any, of_slab: Tensor | None, of_others: Tensor | None) -> Any:
        if of_slab is not None:
            if of_others is None:
                of_others = room(of_slab, *ctx.form).zero_()
            of_others.narrow(*ctx.where).add_(of_slab)
        return of_others, None, None, None


class _Written(torch.autograd.Function):
    """A result into which what a slab gives has been written.

    Slabs write to rows of their own, so the gradient of the result is that before the slab, too.
    """

    @staticmethod
    @untraced
    def forward(ctx: Any, whole: Tensor, part: Tensor, place: Any, kept: Any) -> Any:
        ctx.place, ctx.kept, ctx.form = place, kept, (part.shape, axes_by_stride(part))
        whole[place] = part[kept]
        ctx.mark_dirty(whole)
        return whole

    @staticmethod
    @untraced
    def backward(ctx: Any, gradient: Tensor) -> Any:
        # In the layout of what the slab gave: in others, torch 2.13 computes wrong gradients of
        # InstanceNorm and of grouped convolutions for one sample.
        of_part, kept = room(gradient, *ctx.form), gradient[ctx.place]
        if kept.shape != of_part.shape:
            of_part.zero_()
        of_part[ctx.kept] = kept
        return gradient if ctx.needs_input_grad[0] else None, of_part, None, None


@untraced
def axes_by_stride(tensor: Tensor) -> list[int]:
    """The axes of a tensor by falling strides."""
    return sorted(range(tensor.dim()), key=tensor.stride, reverse=True)


@untraced
def room(like: Tensor, shape: Sequence[int], order: Sequence[int]) -> Tensor:
    """An empty tensor of a shape, whose axes lie in memory in an order."""
    strides, step = [0] * len(order), 1
    for axis in reversed(order):
        strides[axis], step = step, step * max(1, shape[axis])
    # Not a view of a permuted tensor: autograd copies the gradient of a view that is written to.
    return like.as_subclass(Tensor).new_empty_strided([*shape], strides)


@untraced_alone
def of_kind(joined: Tensor, part: Tensor, given: Sequence[Any]) -> Tensor:
    """A joined result as the subclass of Tensor that its parts were, such as MONAI's MetaTensor.

    What the subclass knows of a batch is made as for any function of torch: it gets the arguments
    of the whole batch, and the result.
    """
    kind = type(part)
    override = kind.__torch_function__
    source = next((one for one in given if type(one) is kind), None)
    if kind is Tensor or override is torch._C._disabled_torch_function_impl or source is None:
        return joined
    plain = joined.as_subclass(Tensor)

    def segment(_: Tensor) -> Tensor:
        return plain

    found: Tensor = override(segment, (kind,), (source,), {})
    return found


@untraced
def rates_of(segment: Segment, leaves: Sequence[Any]) -> Sequence[int]:
    """For each argument, the rows that belong to a unit; 0 if it is not cut.

    Raises:
        PlanError: no argument can be cut, or they are others than those of the plan.
    """
    axis, unit = segment.axis, segment.unit
    counts = [one.shape[axis] if has_axis(one, axis) else 0 for one in leaves]
    first = next(filter(None, counts), 0)
    if segment.rates is None:
        rates = [0 if not one or one * unit % first else one * unit // first for one in counts]
    else:
        rates = [*segment.rates[0]]
    if len(rates) != len(counts) or any(map(int.__gt__, map(bool, rates), counts)):
        odd = "its arguments are others than they were when the plan was made"
    elif not any(rates):
        odd = "none of its arguments has it"
    else:
        return rates
    raise PlanError(
        f"{segment.module or 'the model'} runs in slabs of rows along axis {axis}, and {odd}; tune "
        f"with such arguments, or leave it out of the plan's segments"
    )


@untraced
def rows_of(segment: Segment, leaves: Sequence[Any]) -> int:
    """The rows of the first argument that is cut.

    Raises:
        PlanError: as of `rates_of`.
    """
    pairs = zip(leaves, rates_of(segment, leaves), strict=True)
    return next(int(one.shape[segment.axis]) for one, rate in pairs if rate)


@untraced
def has_axis(leaf: Any, axis: int) -> TypeGuard[Tensor]:
    """True for a tensor that can be cut along an axis."""
    is_plain = isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_nested
    return is_plain and leaf.dim() > axis


class SlabCutter:
    """Cuts the arguments of a module into slabs.

    The last slab comes first: so the length of a result is known from the beginning, because it
    ends where the last slab ends.
    """

    @untraced
    def __init__(self, segment: Segment, arguments: Any) -> None:
        self._segment = segment
        self._leaves, self._nest = take_apart(arguments)
        rates = rates_of(segment, self._leaves)
        self._count = rows_of(segment, self._leaves)
        # If two arguments are the same tensor, both get the same slab, because attention modules
        # test whether their arguments are the same tensor.
        pairs = zip(self._leaves, rates, strict=True)
        self._wholes = {id(one): (one, rate) for one, rate in pairs if rate}

    @untraced
    def slabs(self) -> Iterator[tuple[Any, SlabRows]]:
        """The arguments of each slab, with its rows.

        Gradients of the slabs of several calls are added to the same tensor.
        """
        axis, unit = self._segment.axis, self._segment.unit
        for slab in reversed(self._segment.slabs(self._count)):
            parts = dict[int, Tensor]()
            for key, (whole, rate) in self._wholes.items():
                low, high = slab.low * rate // unit, slab.high * rate // unit
                length = (whole.shape[axis] if slab.high == self._count else high) - low
                if torch.is_grad_enabled() and whole.requires_grad:
                    parts[key], rest = _Slab.apply(whole, axis, low, length)
                    self._wholes[key] = rest, rate
                else:
                    parts[key] = whole.narrow(axis, low, length)
            yield put_together([parts.get(id(one), one) for one in self._leaves], self._nest), slab

    @untraced_alone
    def statistics(self, run: Callable[[Any, NormsByStatistics], Any]) -> list[Statistics]:
        """The statistics of the module's normalisations over rows.

        Args:
            run: calls the module in a context; returns what the context has raised as `Reached`.
        """
        known = list[Statistics]()
        for rate in self._segment.norms:
            parts = list[Statistics]()
            for part, slab in self.slabs():
                first, last, low = (
                    row * rate // self._segment.unit for row in (slab.first, slab.last, slab.low)
                )
                rows = slice(first - low, None if slab.is_last else last - low)
                parts.append(run(part, NormsByStatistics(self._segment.axis, [*known], rows)))
            known.append(united(parts))
        return known


class PartResults:
    """The results of a module, into which those of its parts are written one after another.

    Args:
        segment: how the module runs.
        samples: of all micro-batches.
    """

    @untraced
    def __init__(self, segment: Segment, samples: int) -> None:
        self._segment, self._samples = segment, samples
        # Of all parts so far; and those of the first part, without samples.
        self._wholes, self._kinds = list[Any](), list[Any]()
        self._nest: Nest | None = None
        # For each result, its rows that belong to a unit; 0 if it has none.
        self._rates: Sequence[int] = ()

    @untraced
    def write(self, found: Any, slab: SlabRows, start: int, size: int) -> None:
        """Write the results of a slab of `size` samples, which begin with sample `start`."""
        leaves, nest = take_apart(found)
        if self._nest is None:
            self._begin(leaves, nest, slab, size)
        if nest != self._nest:
            raise self._error("other results for each slab")
        for n, (one, rate) in enumerate(zip(leaves, self._rates, strict=True)):
            if rate:
                self._write(n, one, slab, (start, size))
            elif not _are_one(one, self._wholes[n]):
                raise self._error(f"a {type(one).__name__} without these rows")

    @untraced
    def whole(self, given: Sequence[Any]) -> Any:
        """The results of the whole module, called with these leaves of arguments."""
        assert self._nest is not None
        pairs = zip(self._wholes, self._kinds, self._rates, strict=True)
        wholes = [of_kind(one, kind, given) if rate else one for one, kind, rate in pairs]
        return put_together(wholes, self._nest)

    def _begin(self, leaves: Sequence[Any], nest: Nest, slab: SlabRows, size: int) -> None:
        axis, unit = self._segment.axis, self._segment.unit
        counts = [one.shape[axis] if has_axis(one, axis) else 0 for one in leaves]
        if self._segment.rates is None:
            self._rates = [round(one * unit / (slab.high - slab.low)) for one in counts]
        else:
            self._rates = self._segment.rates[1]
        is_planned = len(self._rates) == len(counts) and any(self._rates)
        if not is_planned or any(map(int.__gt__, map(bool, self._rates), counts)):
            raise self._error("none with such rows")
        self._nest, self._wholes, self._kinds = nest, [*leaves], [*leaves]
        for n, (one, rate) in enumerate(zip(leaves, self._rates, strict=True)):
            if rate:
                shape = [*one.shape]
                shape[0] += self._samples - size
                shape[axis] += slab.low * rate // unit
                self._wholes[n] = room(one, shape, axes_by_stride(one))
                # A copy without samples stands for the kind of a result: it takes no memory.
                self._kinds[n] = one.detach()[:0].clone()

    def _write(self, n: int, part: Tensor, slab: SlabRows, samples: tuple[int, int]) -> None:
        whole, rate, axis, unit = (
            *(self._wholes[n], self._rates[n]),
            *(self._segment.axis, self._segment.unit),
        )
        most, offset = whole.shape[axis], slab.low * rate // unit
        # The last rows of arguments may have no results, as where a convolution pads nothing.
        begin = min(most, slab.first * rate // unit)
        end = most if slab.is_last else min(most, slab.last * rate // unit)
        shape = [*whole.shape]
        shape[0] += samples[1] - self._samples
        is_alike = has_axis(part, axis) and part.dim() == whole.dim()
        shape[axis] = part.shape[axis] if is_alike else 0
        if not is_alike or [*part.shape] != shape or end - offset > shape[axis]:
            raise self._error(f"others for rows {slab.first} to {slab.last}")
        others = [slice(None)] * (axis - 1)
        place = (slice(samples[0], samples[0] + shape[0]), *others, slice(begin, end))
        kept = (slice(None), *others, slice(begin - offset, end - offset))
        plain = part.as_subclass(Tensor)
        if part.requires_grad:
            self._wholes[n] = _Written.apply(whole, plain, place, kept)
        else:
            whole[place] = plain[kept]

    def _error(self, what: str) -> PlanError:
        return PlanError(
            f"results of a segment in slabs must have rows that follow those of its arguments, and "
            f"{self._segment.module or 'the model'!r} returns {what}; leave it out of the plan's "
            f"segments"
        )


@untraced
def _are_one(one: Any, other: Any) -> bool:
    """True if a result without rows is the same for two slabs."""
    return one is other or (
        isinstance(one, CONSTANTS) and type(one) is type(other) and one == other
    )


def in_slabs(segment: Segment, run: Callable[[Any], Any], arguments: Any) -> Any:
    """What a module computes in slabs.

    >>> layer, x = torch.nn.Conv2d(3, 2, 3, padding=1).double(), torch.randn(2, 3, 9, 9).double()
    >>> slabs = Segment("", rows=4, halo=(1, 1))
    >>> torch.allclose(in_slabs(slabs, lambda one: layer(*one[0]), ((x,), {})), layer(x))
    True

    Args:
        segment: how it runs, without micro-batches.
        run: calls it with arguments, given as (args, kwargs).
        arguments: those of the whole.

    Raises:
        PlanError: the arguments or the results have no such rows.
    """
    leaves, _ = take_apart(arguments)
    count = next(len(one) for one in leaves if has_axis(one, segment.axis))
    results, cutter = PartResults(segment, count), SlabCutter(segment, arguments)
    known = cutter.statistics(partial(reached, run))
    for part, slab in cutter.slabs():
        with NormsByStatistics(segment.axis, known):
            found = run(part)
        results.write(found, slab, 0, count)
    return results.whole(leaves)


@untraced_alone
def reached(run: Callable[[Any], Any], arguments: Any, context: NormsByStatistics) -> Any:
    """What a call in a context raises as `Reached`, or returns."""
    try:
        with context:
            return run(arguments)
    except Reached as end:
        return end.statistics
