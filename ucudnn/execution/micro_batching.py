"""Modules in micro-batches: the forward that stands in the place of a module's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import starmap
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from ucudnn.errors import PlanError, warn
from ucudnn.execution.untraced import untraced_alone
from ucudnn.segment import Segment


class SegmentForward:
    """The forward of a module, in micro-batches; an attribute of the module hides its own.

    So the class of the module stays, with its name, hooks, parameters and `state_dict`.

    Args:
        module: the module.
        segment: how it runs.
    """

    def __init__(self, module: nn.Module, segment: Segment) -> None:
        self.module = module
        self.segment = segment
        # Another library may have put a forward of its own there.
        self.hidden = vars(module).get("forward")

    @untraced_alone
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute all samples."""
        leaves, spec = tree_flatten((args, kwargs))
        count = self._count(leaves)
        run = partial(self._run, spec)
        size = self.segment.micro_batch
        if size is None or count <= size or self._is_mixing():
            return self._once(run, leaves, is_whole=True)
        chunks = self._chunks(leaves, count, size)
        if torch.is_grad_enabled():
            return _joined(map(partial(self._once, run), chunks), size)
        return _written(starmap(run, chunks), size, count)

    def extra_repr(self) -> str:
        """The module's own, and how it runs."""
        own = type(self.module).extra_repr(self.module)
        return f"{own}, {self.segment.manner}" if own else self.segment.manner

    @untraced_alone
    def _run(self, spec: TreeSpec, *leaves: Any) -> Any:
        args, kwargs = tree_unflatten(leaves, spec)
        if self.hidden is not None:
            return self.hidden(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    @untraced_alone
    def _count(self, leaves: Sequence[Any]) -> int:
        """Samples of a call; 0 if no argument has any."""
        return next((len(leaf) for n, leaf in enumerate(leaves) if self._has_samples(n, leaf)), 0)

    def _has_samples(self, place: int, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.dim() > 0 and place not in self.segment.shared

    def _is_mixing(self) -> bool:
        """True if samples may depend on each other in the modes that the modules are in now."""
        most = self.segment.training
        # One of two modes is the rule, for which the module's own flag is enough.
        if most is None or not self.module.training:
            return False
        if sum(one.training for one in self.module.modules()) <= most:
            return False
        warn(
            f"{self.segment.module or 'the model'} was planned in evaluation mode, in which its "
            f"samples do not depend on each other; in training mode it runs undivided"
        )
        return True

    @untraced_alone
    def _chunks(self, leaves: Sequence[Any], count: int, size: int) -> Iterator[list[Any]]:
        """The arguments of each micro-batch."""
        # Views of one operator: its backward puts all gradients into one tensor.
        views = {
            n: leaf.split(size)
            for n, leaf in enumerate(leaves)
            if self._has_samples(n, leaf) and len(leaf) == count
        }
        for place in range(-(-count // size)):
            yield [views[n][place] if n in views else leaf for n, leaf in enumerate(leaves)]

    @untraced_alone
    def _once(
        self, run: Callable[..., Any], leaves: Sequence[Any], *, is_whole: bool = False
    ) -> Any:
        """Compute one micro-batch, and keep what the segment says."""
        if not torch.is_grad_enabled():
            return run(*leaves)
        if self.segment.recompute:
            contexts = partial(_contexts, self.module, is_whole)
            return checkpoint(run, *leaves, use_reentrant=False, context_fn=contexts)
        if self.segment.offload:
            is_pinned = any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in leaves)
            with save_on_cpu(pin_memory=is_pinned):
                return run(*leaves)
        return run(*leaves)


class _BuffersBefore:
    """Context of a repeated forward, which finds the buffers of a module as the first one did.

    The values that the first one left stay: running statistics are updated once.
    """

    def __init__(self, module: nn.Module) -> None:
        self._found = [
            (one._buffers, name, buffer.detach().clone())
            for one in module.modules()
            for name, buffer in one._buffers.items()
            if buffer is not None
        ]
        self._own: list[Tensor | None] = []

    def __enter__(self) -> None:
        self._own = [buffers[name] for buffers, name, _ in self._found]
        for buffers, name, value in self._found:
            # A copy each time: a graph that is kept may be computed from again.
            buffers[name] = value.clone()

    def __exit__(self, *error: object) -> None:
        del error
        for (buffers, name, _), before in zip(self._found, self._own, strict=True):
            buffers[name] = before


def _contexts(
    module: nn.Module, is_whole: bool
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of the forward of a micro-batch and of its repetition in backward."""
    # Only a module whose forward leaves its buffers alone runs in several micro-batches.
    changes_buffers = is_whole and any(one.training for one in module.modules())
    return nullcontext(), _BuffersBefore(module) if changes_buffers else nullcontext()


@untraced_alone
def _joined(parts: Iterable[Any], size: int) -> Any:
    """Results of micro-batches as those of the batch."""
    leaves, specs = zip(*map(tree_flatten, parts), strict=True)
    joined = map(partial(_joined_leaf, size), zip(*leaves, strict=True))
    return tree_unflatten(joined, specs[0])


def _joined_leaf(size: int, parts: tuple[Any, ...]) -> Any:
    # What is no part of a batch is the same for all.
    return torch.cat(parts) if _is_part(parts[0], size) else parts[0]


def _is_part(leaf: Any, size: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == size


@untraced_alone
def _written(parts: Iterable[Any], size: int, count: int) -> Any:
    """The same without a graph: each micro-batch is written into the result and let go."""
    results, spec, start = list[Any](), None, 0
    for part in parts:
        leaves, spec = tree_flatten(part)
        del part
        if not start:
            results = [*map(partial(_room, size, count), leaves)]
        for result, leaf in zip(results, leaves, strict=True):
            if result is not leaf and isinstance(leaf, Tensor):
                result[start : start + len(leaf)] = leaf
        start += size
    assert spec is not None  # there are two micro-batches at least
    return tree_unflatten(results, spec)


def _room(size: int, count: int, leaf: Any) -> Any:
    """Memory for the results of all samples, in the layout of those of some."""
    if not _is_part(leaf, size):
        return leaf
    rest = leaf.shape[1:]
    if leaf.numel() and leaf[0].numel() == leaf.stride(0):
        return leaf.new_empty_strided((count, *rest), leaf.stride())
    return leaf.new_empty((count, *rest))


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
        segments: none of which holds another.
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
        forward = vars(module).get("forward")
        if isinstance(forward, SegmentForward):
            del module.forward, module.extra_repr
            if forward.hidden is not None:
                vars(module)["forward"] = forward.hidden
