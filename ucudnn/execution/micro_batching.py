"""Modules in micro-batches: the forward that stands in the place of a module's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import starmap
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch._C._dynamo import eval_frame
from torch.autograd.graph import save_on_cpu
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint, noop_context_fn

from ucudnn.errors import PlanError, warn
from ucudnn.execution.compiling import untraced, untraced_alone
from ucudnn.segment import Segment

_Run = Callable[..., Any]
# Results that may be compared.
_CONSTANTS = (int, float, complex, str, torch.Size, torch.dtype, torch.device)


class SegmentForward:
    """The forward of a module, in micro-batches; an attribute of the module hides its own.

    So the class of the module stays, with its name, hooks, parameters and `state_dict`.

    Args:
        module: the module.
        segment: how it runs; None: as it is.
    """

    def __init__(self, module: nn.Module, segment: Segment) -> None:
        self.module = module
        self.segment: Segment | None = segment
        # Another library may have put a forward of its own there.
        self.hidden = vars(module).get("forward")

    @untraced_alone
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute all samples."""
        segment = self.segment
        if segment is None or _is_rewritten():
            return self._forward(args, kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        run = partial(self._run, spec)
        split = {n: one for n, one in enumerate(leaves) if has_samples(one)}
        for place in segment.shared:
            split.pop(place, None)
        count = len(next(iter(split.values()), ()))
        size = segment.micro_batch
        if size is None or count <= size or self._is_mixing(segment):
            return self._once(segment, run, leaves, is_whole=True)
        # Views of one operator: its backward puts all gradients into one tensor. And one for each
        # tensor: attention looks whether its arguments are the same.
        rows = {id(one): one for one in split.values() if len(one) == count}
        views = {key: one.split(size) for key, one in rows.items()}
        chunks = (
            [
                views[id(one)][place] if n in split and id(one) in views else one
                for n, one in enumerate(leaves)
            ]
            for place in range(-(-count // size))
        )
        if torch.is_grad_enabled():
            parts = [self._once(segment, run, chunk) for chunk in chunks]
            return _joined(segment, parts)
        return _written(segment, starmap(run, chunks), size, count)

    # What torch says where a model must be compiled as one graph.
    __call__._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
        "micro-batches are graphs of their own; compile without fullgraph, or ucudnn.revert_ first"
    )

    def extra_repr(self) -> str:
        """The module's own, and how it runs."""
        own = type(self.module).extra_repr(self.module)
        manner = self.segment.manner if self.segment else ""
        return ", ".join(filter(None, [own, manner]))

    def remove(self) -> None:
        """Let the module run as it is."""
        attributes = vars(self.module)
        del attributes["extra_repr"]
        self.segment = None
        # Otherwise another library has put a forward of its own before this one.
        if attributes.get("forward") is self:
            del attributes["forward"]
            if self.hidden is not None:
                attributes["forward"] = self.hidden

    @untraced_alone
    def _run(self, spec: TreeSpec, *leaves: Any) -> Any:
        return self._forward(*tree_unflatten(leaves, spec))

    @untraced_alone
    def _forward(self, args: Any, kwargs: Any) -> Any:
        forward = self.hidden or type(self.module).forward.__get__(self.module)
        return _applied(forward, args, kwargs)

    @untraced
    def _is_mixing(self, segment: Segment) -> bool:
        """True if samples may depend on each other in the modes that the modules are in now."""
        most = segment.training
        if most is None or sum(one.training for one in self.module.modules()) <= most:
            return False
        planned = f"with {most} of its modules in training mode" if most else "in evaluation mode"
        warn(
            f"{segment.module or 'the model'} was planned {planned}, where its samples do not "
            f"depend on each other; with more of them in training mode it runs undivided"
        )
        return True

    @untraced_alone
    def _once(
        self, segment: Segment, run: _Run, leaves: Sequence[Any], *, is_whole: bool = False
    ) -> Any:
        """Compute one micro-batch, and keep what the segment says."""
        if not torch.is_grad_enabled():
            return run(*leaves)
        if segment.recompute:
            # torch compiles nothing inside a checkpoint, unless it is told to go on.
            run = partial(_as_compiled, eval_frame.get_eval_frame_callback(), run)
            # Only a module whose forward leaves its buffers alone runs in several micro-batches.
            contexts = _BuffersBefore(self.module).contexts if is_whole else noop_context_fn
            return checkpoint(run, *leaves, use_reentrant=False, context_fn=contexts)
        if segment.offload:
            is_pinned = any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in leaves)
            with save_on_cpu(pin_memory=is_pinned):
                return run(*leaves)
        return run(*leaves)


@untraced
def _is_rewritten() -> bool:
    """True where torch makes another program of the module, or another function, than it is."""
    return (
        torch.compiler.is_exporting()
        or torch._C._is_tracing()
        or torch._C._are_functorch_transforms_active()
    )


# A frame that torch.compile may compile, also where the forward is one of torch's own modules.
def _applied(forward: _Run, args: Any, kwargs: Any) -> Any:
    return forward(*args, **kwargs)


@untraced_alone
def _as_compiled(callback: Any, run: _Run, *leaves: Any) -> Any:
    """Call a function with torch.compile at work as it was, in backward too."""
    before = eval_frame.set_eval_frame(callback)
    try:
        return run(*leaves)
    finally:
        eval_frame.set_eval_frame(before)


class _BuffersBefore:
    """Lets a repeated forward find the buffers of a module as the first one did.

    The values that the first one left stay: running statistics are updated once.
    """

    @untraced
    def __init__(self, module: nn.Module) -> None:
        self._found = [
            (one._buffers, name, buffer, buffer._version, buffer.detach().clone())
            for one in module.modules()
            for name, buffer in one._buffers.items()
            if buffer is not None and not buffer.is_inference()
        ]

    @untraced
    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Contexts of the first forward and of those that repeat it."""
        return self._first(), self

    @contextmanager
    @untraced_alone
    def _first(self) -> Iterator[None]:
        yield
        # Of buffers of integers, as masks and tables of indices, which may be large and are seldom
        # written to, only those that have changed are kept. All others are: torch does not count
        # every change, such as those of running statistics.
        self._found = [
            (buffers, name, own, version, value)
            for buffers, name, own, version, value in self._found
            if own.is_floating_point()
            or own.is_complex()
            or own._version != version
            or buffers.get(name) is not own
        ]

    @untraced
    def __enter__(self) -> None:
        self._left = [buffers.get(name) for buffers, name, *_ in self._found]
        for buffers, name, *_, value in self._found:
            # A copy each time: a graph that is kept may be computed from again.
            buffers[name] = value.clone()

    @untraced
    def __exit__(self, *error: object) -> None:
        del error
        for (buffers, name, *_), left in zip(self._found, self._left, strict=True):
            buffers[name] = left


@untraced
def has_samples(leaf: Any) -> TypeGuard[Tensor]:
    """True for a tensor with a first axis along which it can be divided."""
    is_plain = isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_nested
    return is_plain and leaf.dim() > 0


@untraced_alone
def _joined(segment: Segment, parts: Sequence[Any]) -> Any:
    """Results of micro-batches as those of the batch."""
    leaves, specs = zip(*map(tree_flatten, parts), strict=True)
    is_row = _rows(segment, leaves[0])
    for other, spec in zip(leaves, specs, strict=True):
        _require_alike(segment, is_row, (leaves[0], specs[0]), (other, spec))
    joined = [
        _cat(column) if row else column[0]
        for column, row in zip(zip(*leaves, strict=True), is_row, strict=True)
    ]
    return tree_unflatten(joined, specs[0])


@untraced_alone
def _cat(parts: Sequence[Tensor]) -> Tensor:
    order, back = _orders(parts[0])
    if order == sorted(order):  # in most cases the axes lie in memory as they are numbered
        return torch.cat([*parts])
    return torch.cat([one.permute(order) for one in parts], order.index(0)).permute(back)


@untraced_alone
def _written(segment: Segment, parts: Iterable[Any], size: int, count: int) -> Any:
    """The same without a graph: each micro-batch is written into the result and let go."""
    results, start = list[Any](), 0
    for part in parts:
        leaves, spec = tree_flatten(part)
        del part
        if not start:
            is_row = _rows(segment, leaves)
            results = [
                _room(one, count) if row else one for one, row in zip(leaves, is_row, strict=True)
            ]
            first = results, spec
        _require_alike(segment, is_row, first, (leaves, spec))
        for result, leaf, row in zip(results, leaves, is_row, strict=True):
            if row:
                result[start : start + len(leaf)] = leaf
        start += size
    return tree_unflatten(results, spec)


@untraced_alone
def _room(leaf: Tensor, count: int) -> Tensor:
    """Memory for the results of all samples, in the layout of those of some."""
    order, back = _orders(leaf)
    shape = (count, *leaf.shape[1:])
    return leaf.new_empty([shape[axis] for axis in order]).permute(back)


@untraced_alone
def _orders(leaf: Tensor) -> tuple[list[int], list[int]]:
    """Axes of a tensor by their strides, and where each of them is there."""
    order = sorted(range(leaf.dim()), key=leaf.stride, reverse=True)
    return order, sorted(range(leaf.dim()), key=order.__getitem__)


@untraced_alone
def _rows(segment: Segment, leaves: Sequence[Any]) -> list[bool]:
    """Which results of the first micro-batch are one for each sample."""
    return [has_samples(leaf) and len(leaf) == segment.micro_batch for leaf in leaves]


@untraced_alone
def _require_alike(
    segment: Segment,
    is_row: Sequence[bool],
    first: tuple[Any, TreeSpec],
    other: tuple[Any, TreeSpec],
) -> None:
    """Refuse results that are neither one for each sample nor the same in all micro-batches."""
    (leaves, spec), (found, own) = first, other
    odd = "other results for each micro-batch" if own != spec else ""
    for a, b, row in zip(leaves, found, is_row, strict=False):
        is_same = a is b or (isinstance(a, _CONSTANTS) and a == b)
        if not (is_same or (row and has_samples(b) and a.shape[1:] == b.shape[1:])):
            odd = f"a {type(a).__name__}"
    if odd:
        raise PlanError(
            f"results of a segment must be one for each sample, or the same for all, and "
            f"{segment.module or 'the model'!r} returns {odd}; leave it out of the plan's segments"
        )


def require_modules(model: nn.Module, segments: Sequence[Segment]) -> None:
    """Refuse segments of another model.

    Raises:
        PlanError: the model lacks a module.
    """
    names = {name for name, _ in model.named_modules()}
    for one in segments:
        if one.module not in names:
            raise PlanError(
                f"the plan has {one.module!r} as a segment, and {type(model).__name__} has no such "
                f"module; use the plan of this model"
            )


def segment_(model: nn.Module, segments: Sequence[Segment]) -> None:
    """Let modules of a model run as segments, in place; those of earlier segments no more.

    Args:
        model: which has these modules.
        segments: one inside another is recomputed in each micro-batch of that.
    """
    unsegment_(model)
    modules = dict(model.named_modules())
    for one in segments:
        forward = SegmentForward(modules[one.module], one)
        # Attributes hide methods of the class; `repr` shows the segment.
        vars(forward.module).update(forward=forward, extra_repr=forward.extra_repr)


def unsegment_(model: nn.Module) -> None:
    """Let all modules of a model run as they are, in place."""
    for module in model.modules():
        forward = getattr(vars(module).get("extra_repr"), "__self__", None)
        if isinstance(forward, SegmentForward):
            forward.remove()
