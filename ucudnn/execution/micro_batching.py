"""Run modules in micro-batches, by a forward that takes the place of a module's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
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
from ucudnn.execution.selective import Selective
from ucudnn.segment import Segment

_Run = Callable[..., Any]
# A module that runs in micro-batches may return values of these types, if they are equal in all
# micro-batches.
_CONSTANTS = (int, float, complex, str, torch.Size, torch.dtype, torch.device)


class SegmentForward:
    """A forward that runs a module in micro-batches.

    As an attribute of the module, it hides the forward of the module's class. The class stays the
    same, and so do the module's name, hooks, parameters and `state_dict`.
    """

    def __init__(self, module: nn.Module, segment: Segment) -> None:
        self.module = module
        self.segment: Segment | None = segment
        # Another library may have given the module a forward of its own as an attribute.
        self.hidden = vars(module).get("forward")

    @untraced_alone
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on all samples, divided as the segment says."""
        segment = self.segment
        if segment is None or _is_rewritten():
            return self._forward(args, kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        run = partial(self._run, spec)
        if segment.selective and torch.is_grad_enabled():
            run = partial(_selective, run)
        split = {n: one for n, one in enumerate(leaves) if has_samples(one)}
        for place in segment.shared:
            split.pop(place, None)
        count = len(next(iter(split.values()), ()))
        size = segment.micro_batch
        if size is None or count <= size or self._is_mixing(segment):
            is_kept = segment.kept > 0 and size is not None and 0 < count <= size
            return run(*leaves) if is_kept else self._once(segment, run, leaves, is_whole=True)
        # The micro-batches of a tensor are views, all made by one call of `split`, so that backward
        # writes their gradients into one tensor. If two arguments are the same tensor, both get the
        # same views, because attention modules test whether their arguments are the same tensor.
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
            recomputed = -(-count // size) - segment.kept
            parts = [
                self._once(segment, run, chunk) if place < recomputed else run(*chunk)
                for place, chunk in enumerate(chunks)
            ]
            return _joined(segment, parts, size, count)
        return _written(segment, starmap(run, chunks), size, count)

    # If the model is compiled with `fullgraph=True`, torch raises an error, to which it adds this
    # message.
    __call__._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
        "micro-batches are graphs of their own; compile without fullgraph, or ucudnn.revert_ first"
    )

    def extra_repr(self) -> str:
        """The module's own `extra_repr`, followed by how the segment runs."""
        own = type(self.module).extra_repr(self.module)
        manner = self.segment.manner if self.segment else ""
        return ", ".join(filter(None, [own, manner]))

    def remove(self) -> None:
        """Let the module run undivided again."""
        attributes = vars(self.module)
        del attributes["extra_repr"]
        self.segment = None
        # If another library has put its own forward in the place of this one since, that forward
        # stays.
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
        """True, with a warning, if more modules are in training mode than the segment allows.

        The samples may then depend on each other, so that they must not be divided.
        """
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
        """Compute one micro-batch; what backward needs is kept, offloaded or recomputed later."""
        if not torch.is_grad_enabled():
            return run(*leaves)
        if segment.recompute:
            # Without `_as_compiled`, torch would compile nothing of what a checkpoint calls.
            run = partial(_as_compiled, eval_frame.get_eval_frame_callback(), run)
            # When backward repeats a forward that changed buffers, their earlier values must be
            # restored first. A forward that runs in several micro-batches changes no buffers, so
            # only a forward of the whole batch needs this.
            contexts = _BuffersBefore(self.module).contexts if is_whole else noop_context_fn
            return checkpoint(run, *leaves, use_reentrant=False, context_fn=contexts)
        if segment.offload:
            is_pinned = any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in leaves)
            with save_on_cpu(pin_memory=is_pinned):
                return run(*leaves)
        return run(*leaves)


@untraced
def _is_rewritten() -> bool:
    """True while torch exports, traces or transforms what the module computes."""
    return (
        torch.compiler.is_exporting()
        or torch._C._is_tracing()
        # Backward of a graph from outside a transform repeats what has not been transformed.
        or (torch._C._are_functorch_transforms_active() and torch._C._current_graph_task_id() == -1)
    )


# The call has a function of its own, because torch.compile can compile the frame of this function
# even if `forward` belongs to one of torch's own modules.
def _applied(forward: _Run, args: Any, kwargs: Any) -> Any:
    return forward(*args, **kwargs)


@untraced_alone
def _as_compiled(callback: Any, run: _Run, *leaves: Any) -> Any:
    """Call `run`, in backward too, with the Dynamo callback that was set in the first forward."""
    before = eval_frame.set_eval_frame(callback)
    try:
        return run(*leaves)
    finally:
        eval_frame.set_eval_frame(before)


@untraced_alone
def _selective(run: _Run, *leaves: Any) -> Any:
    """Call `run` with selective recomputation, which compiled code does by itself."""
    if callable(eval_frame.get_eval_frame_callback()):
        return run(*leaves)
    with Selective():
        return run(*leaves)


class _BuffersBefore:
    """Gives a repeated forward the buffer values with which the first forward began.

    After the repetition the buffers get back the values that they had just before it. So running
    statistics change only once.
    """

    @untraced
    def __init__(self, module: nn.Module) -> None:
        self._found = [
            (one._buffers, name, buffer.detach().clone())
            for one in module.modules()
            for name, buffer in one._buffers.items()
            if buffer is not None and not buffer.is_inference()
        ]

    @untraced
    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """The context for the first forward, and the context for each forward that repeats it."""
        return nullcontext(), self

    @untraced
    def __enter__(self) -> None:
        self._left = [buffers.get(name) for buffers, name, _ in self._found]
        for buffers, name, value in self._found:
            # The repeated forward gets a copy, because it may change the buffer, while the value is
            # needed again if the graph is retained and backward runs once more.
            buffers[name] = value.clone()

    @untraced
    def __exit__(self, *error: object) -> None:
        del error
        for (buffers, name, _), left in zip(self._found, self._left, strict=True):
            buffers[name] = left


@untraced
def has_samples(leaf: Any) -> TypeGuard[Tensor]:
    """True for a tensor that can be divided along its first axis."""
    is_plain = isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_nested
    return is_plain and leaf.dim() > 0


@untraced_alone
def _joined(segment: Segment, parts: Sequence[Any], size: int, count: int) -> Any:
    """Join the results of all micro-batches into the results of the whole batch."""
    leaves, specs = zip(*map(tree_flatten, parts), strict=True)
    is_row = _rows(segment, leaves[0])
    for place, (other, spec) in enumerate(zip(leaves, specs, strict=True)):
        samples = min(size, count - place * size)
        _require_alike(segment, is_row, (leaves[0], specs[0]), (other, spec), samples)
    joined = [
        _cat(column) if row else column[0]
        for column, row in zip(zip(*leaves, strict=True), is_row, strict=True)
    ]
    return tree_unflatten(joined, specs[0])


@untraced_alone
def _cat(parts: Sequence[Tensor]) -> Tensor:
    order, back = _orders(parts[0])
    if order == sorted(order):  # usually the axes lie in memory in the order of their numbers
        return torch.cat([*parts])
    return torch.cat([one.permute(order) for one in parts], order.index(0)).permute(back)


@untraced_alone
def _written(segment: Segment, parts: Iterable[Any], size: int, count: int) -> Any:
    """Join results that have no graph: each is copied into the whole result and then freed."""
    results, start = list[Any](), 0
    for part in parts:
        leaves, spec = tree_flatten(part)
        if not start:
            is_row = _rows(segment, leaves)
            results = [
                _room(one, count) if row else one for one, row in zip(leaves, is_row, strict=True)
            ]
            first = results, spec
        _require_alike(segment, is_row, first, (leaves, spec), min(size, count - start))
        for place, row in enumerate(is_row):
            if row:
                results[place][start : start + size] = leaves[place]
        start += size
        # The next result is computed before these names are bound anew.
        del part, leaves
    return tree_unflatten(results, spec)


@untraced_alone
def _room(leaf: Tensor, count: int) -> Tensor:
    """Allocate a result for all samples, in the memory layout of a micro-batch's result."""
    order, back = _orders(leaf)
    shape = (count, *leaf.shape[1:])
    return leaf.new_empty([shape[axis] for axis in order]).permute(back)


@untraced_alone
def _orders(leaf: Tensor) -> tuple[list[int], list[int]]:
    """The axes of a tensor by falling strides, and each axis's place in this order."""
    order = sorted(range(leaf.dim()), key=leaf.stride, reverse=True)
    return order, sorted(range(leaf.dim()), key=order.__getitem__)


@untraced_alone
def _rows(segment: Segment, leaves: Sequence[Any]) -> list[bool]:
    """For each result of the first micro-batch: True if it has one row for each sample."""
    return [has_samples(leaf) and len(leaf) == segment.micro_batch for leaf in leaves]


@untraced_alone
def _require_alike(
    segment: Segment,
    is_row: Sequence[bool],
    first: tuple[Any, TreeSpec],
    other: tuple[Any, TreeSpec],
    samples: int,
) -> None:
    """Require that each result has a row for each of the samples, or is that of the first part."""
    (leaves, spec), (found, own) = first, other
    odd = "other results for each micro-batch" if own != spec else ""
    for a, b, row in zip(leaves, found, is_row, strict=False):
        is_same = a is b or (isinstance(a, _CONSTANTS) and a == b)
        if not (is_same or (row and has_samples(b) and b.shape == (samples, *a.shape[1:]))):
            odd = f"a {type(a).__name__}"
    if odd:
        raise PlanError(
            f"results of a segment must be one for each sample, or the same for all, and "
            f"{segment.module or 'the model'!r} returns {odd}; leave it out of the plan's segments"
        )


def require_modules(model: nn.Module, segments: Sequence[Segment]) -> None:
    """Raise a PlanError if a segment names a module that the model does not have."""
    names = {name for name, _ in model.named_modules()}
    for one in segments:
        if one.module not in names:
            raise PlanError(
                f"the plan has {one.module!r} as a segment, and {type(model).__name__} has no such "
                f"module; use the plan of this model"
            )


def segment_(model: nn.Module, segments: Sequence[Segment]) -> None:
    """Let modules of a model run as their segments say, in place; earlier segments are removed.

    A segment inside another segment runs in each micro-batch of the outer segment.
    """
    unsegment_(model)
    modules = dict(model.named_modules())
    for one in segments:
        forward = SegmentForward(modules[one.module], one)
        # These attributes hide the methods of the module's class; `extra_repr` shows the segment in
        # `repr`.
        vars(forward.module).update(forward=forward, extra_repr=forward.extra_repr)


def unsegment_(model: nn.Module) -> None:
    """Remove all segments of a model, in place, so that its modules run undivided again."""
    for module in model.modules():
        forward = getattr(vars(module).get("extra_repr"), "__self__", None)
        if isinstance(forward, SegmentForward):
            forward.remove()
