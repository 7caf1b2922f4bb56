"""Run modules in micro-batches and slabs, by a forward that takes the place of a module's own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import combinations
from operator import is_
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch._C._dynamo import eval_frame
from torch.autograd.graph import saved_tensors_hooks
from torch.compiler import is_compiling, is_exporting
from torch.fx import _symbolic_trace
from torch.nn.modules import module as every_module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from ucudnn.errors import PlanError, warn
from ucudnn.execution.compiling import inlined, untraced, untraced_alone
from ucudnn.execution.nesting import Nest, lists_in, put_together, take_apart
from ucudnn.execution.remembering import Remembered
from ucudnn.execution.selective import Selective
from ucudnn.execution.slabs import (
    CONSTANTS,
    PartResults,
    SlabCutter,
    axes_by_stride,
    of_kind,
    reached,
    room,
    rows_of,
)
from ucudnn.execution.statistics import NormsByStatistics
from ucudnn.segment import Segment, Stretch, stretch_of

_Run = Callable[..., Any]
# Hooks that torch calls for every module.
_GLOBAL_HOOKS = (
    *(every_module._global_forward_hooks, every_module._global_forward_pre_hooks),
    *(every_module._global_backward_hooks, every_module._global_backward_pre_hooks),
)
# The module of MONAI with its class of tensors.
_MONAI = "monai.data.meta_tensor"
# The most operations of a result that are looked at for one that fills a tensor too late.
_MOST_NODES = 5000


class SegmentForward:
    """A forward that runs a module in micro-batches.

    As an attribute of the module, it hides the forward of the module's class. The class stays the
    same, and so do the module's name, hooks, parameters and `state_dict`.

    Stretches of a sequence are segments, too: its forward calls a sequence of their own instead of
    these children.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.segment: Segment | None = None
        # The stretches of its children that are segments, by the places at which they begin and
        # end. Shorter ones inside these belong to them.
        self.stretches: dict[tuple[int, int], nn.Sequential] = {}
        # Whether the module is called with tensors without MONAI's metadata.
        self.strips = False
        # True: compiled code around the module can have it as a part of its graph.
        self.joins_graphs = False
        # Another library may have given the module a forward of its own as an attribute.
        self.hidden = vars(module).get("forward")
        # For training and evaluation: True if forward ends in an operator that fills a tensor after
        # autograd has saved it. It is found out in the first call.
        self._fills: dict[bool, bool] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on all samples, divided as the segment says."""
        if self.joins_graphs and is_compiling() and not is_exporting():
            return self._in_graph(self._traced, args, kwargs)
        return self._called(args, kwargs)

    @inlined
    def _in_graph(self, run: _Run, args: Any, kwargs: Any) -> Any:
        """What the compiler recomputes if the segment says so, traced as a part of a graph.

        It does not recompute what changes buffers, and draws the same random numbers.
        """
        if not is_compiling():  # Dynamo could not trace it
            return self._called(args, kwargs)
        segment = self.segment
        if segment is not None and segment.recompute and torch.is_grad_enabled():
            return checkpoint(partial(run, **kwargs), *args, use_reentrant=False)
        return run(*args, **kwargs)

    def _traced(self, *args: Any, **kwargs: Any) -> Any:
        if self.stretches:
            return self._children_traced([*self.module._modules.values()], *args, **kwargs)
        return (self.hidden or type(self.module).forward.__get__(self.module))(*args, **kwargs)

    def _children_traced(self, children: Sequence[Any], input: Any) -> Any:
        place = 0
        for begin, end in sorted(self.stretches):
            input = _chained(children[place:begin], input)
            inner = _installed(self.stretches[begin, end])
            run = partial(inner._children_traced, children[begin:end])
            input = inner._in_graph(run, (input,), {})
            place = end
        return _chained(children[place:], input)

    @untraced_alone
    def _called(self, args: Any, kwargs: Any) -> Any:
        if self.strips and (with_metadata := _with_metadata(args, kwargs)):
            (args, kwargs), renewed = with_metadata
            return renewed(self._divided(args, kwargs))
        return self._divided(args, kwargs)

    @untraced_alone
    def _divided(self, args: Any, kwargs: Any) -> Any:
        segment, whole = self.segment, (args, kwargs)
        if segment is None or _is_rewritten() or not self._is_as_planned(segment):
            return self._forward(args, kwargs)
        leaves, _ = take_apart(whole)
        rows = [one for n, one in enumerate(leaves) if has_samples(one) and n not in segment.shared]
        count = len(rows[0]) if rows else 0
        sizes = segment.sizes(count)
        cut = self._lists(segment, whole, count) if len(sizes) > 1 else {}
        is_graph = torch.is_grad_enabled()
        slabs = _slabs_of(segment, leaves)
        if cut is not None and slabs > 1:
            return self._in_slabs(segment, whole, sizes, cut, slabs)
        if cut is None or len(sizes) == 1:
            size, is_cut = segment.micro_batch, segment.is_cut
            is_kept = segment.kept > 0 and is_cut and 0 < count <= (size or count)
            if not is_graph or is_kept or not segment.recompute:
                return self._once(segment, whole)
            name = _named(segment)
            before = Remembered(self.module, name, updates=True, arguments=leaves)
            result = self._once(segment, whole, before)
            before.seal()
            return result
        parts = cut_up(whole, sizes, cut, segment.shared)
        if not is_graph:
            runs = (self._part(segment, part) for part in parts)
            return _written(segment, runs, sizes, leaves)
        recomputed = len(sizes) - segment.kept if segment.recompute else 0
        remembered = Remembered(self.module, _named(segment), updates=False) if recomputed else None
        results = [
            self._part(segment, part, None, remembered if place < recomputed else None)
            for place, part in enumerate(parts)
        ]
        if remembered is not None:
            remembered.seal()
        return _joined(segment, results, sizes, leaves)

    @untraced_alone
    def _in_slabs(
        self, segment: Segment, whole: Any, sizes: Sequence[int], cut: Any, slabs: int
    ) -> Any:
        """Run the module on each slab of each micro-batch."""
        given, _ = take_apart(whole)
        count = len(sizes) * slabs
        recomputed = count - segment.kept if segment.recompute and torch.is_grad_enabled() else 0
        remembered = Remembered(self.module, _named(segment), updates=False) if recomputed else None
        results, start = PartResults(segment, sum(sizes)), 0
        parts = cut_up(whole, sizes, cut, segment.shared) if len(sizes) > 1 else [whole]
        for size, part in zip(sizes, parts, strict=True):
            cutter = SlabCutter(segment, part)
            known = cutter.statistics(partial(self._part, segment, remembered=remembered))
            for own, slab in cutter.slabs():
                before, recomputed = remembered if recomputed > 0 else None, recomputed - 1
                norms = NormsByStatistics(segment.axis, known) if known else None
                results.write(self._part(segment, own, norms, before), slab, start, size)
            start += size
        if remembered is not None:
            remembered.seal()
        return results.whole(given)

    # If the model is compiled with `fullgraph=True`, torch raises an error, to which it adds this
    # message.
    _called._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
        "micro-batches are graphs of their own; compile without fullgraph, or ucudnn.revert_ first"
    )

    def extra_repr(self) -> str:
        """The module's own `extra_repr`, followed by how the segment and its stretches run."""
        own = type(self.module).extra_repr(self.module)
        manner = self.segment.manner if self.segment else ""
        inner = [f"[{name.rpartition('[')[2]} {how}" for name, how in self._manners()]
        return ", ".join(filter(None, [own, manner, *inner]))

    def _manners(self) -> Iterator[tuple[str, str]]:
        for one in map(_installed, self.stretches.values()):
            assert one.segment is not None
            yield one.segment.module, one.segment.manner
            yield from one._manners()

    def has_only_graphs(self) -> bool:
        """True if neither the module nor a stretch of its children runs in parts."""
        own = self.segment
        is_whole = own is None or not (own.is_cut or own.offload)
        inner = map(_installed, self.stretches.values())
        return is_whole and not self.strips and all(one.has_only_graphs() for one in inner)

    def add(self, stretch: Stretch, segment: Segment) -> None:
        """Let neighbours among the children run as a segment, after those around them."""
        for (begin, end), within in self.stretches.items():
            if begin <= stretch.begin and stretch.end <= end:
                inner = stretch._replace(begin=stretch.begin - begin, end=stretch.end - begin)
                _installed(within).add(inner, segment)
                return
        own = self.stretches[stretch.begin, stretch.end] = nn.Sequential()
        _installed(own).segment = segment

    def remove(self) -> None:
        """Let the module run undivided again."""
        attributes = vars(self.module)
        del attributes["extra_repr"]
        self.segment, self.stretches, self.strips = None, {}, False
        self.joins_graphs = False
        # If another library has put its own forward in the place of this one since, that forward
        # stays.
        if attributes.get("forward") is self:
            del attributes["forward"]
            if self.hidden is not None:
                attributes["forward"] = self.hidden

    @untraced_alone
    def _forward(self, args: Any, kwargs: Any) -> Any:
        if self.stretches and not _is_rewritten():
            is_compiled = callable(eval_frame.get_eval_frame_callback())
            return _in_turn(self._parts(is_compiled), *args, **kwargs)
        forward = self.hidden or type(self.module).forward.__get__(self.module)
        return _applied(forward, args, kwargs)

    @untraced
    def _parts(self, is_compiled: bool) -> list[_Run]:
        """What runs one after the other: stretches, and the children between them."""
        children: list[tuple[str, Any]] = [*self.module._modules.items()]
        parts, place = list[_Run](), 0
        for begin, end in [*sorted(self.stretches), (len(children), 0)]:
            between = [one for _, one in children[place:begin]]
            # Children that are compiled belong to one graph. Others get no function of their own,
            # which would hold their first argument until the last of them is done.
            parts += [partial(_chained, between)] if is_compiled and between else between
            if end:
                parts.append(self._renewed(self.stretches[begin, end], children[begin:end]))
            place = end
        return parts

    def _renewed(self, stretch: nn.Sequential, children: list[tuple[str, Any]]) -> _Run:
        """A stretch, with the children that the sequence has now."""
        if [*stretch._modules.items()] != children:
            stretch._modules = dict(children)
        stretch.training = self.module.training
        # The model does not have this module: hooks of all modules see it only while it has a hook
        # of its own, by which it is measured.
        return stretch if stretch._forward_hooks else stretch.forward

    @untraced
    def _is_as_planned(self, segment: Segment) -> bool:
        """False, with a warning, if the segment would not compute here what torch computes."""
        if not (segment.recompute or segment.is_cut):
            return True  # it runs once, on all samples
        reason = reason_of_hooks(self.module) or _reason_of_modes(self.module, segment)
        if reason:
            warn(f"{_named(segment)} runs undivided, and is not computed again: {reason}")
        return not reason

    @untraced
    def _lists(self, segment: Segment, whole: Any, count: int) -> dict[int, Any] | None:
        """Lists with an entry for each sample, by id; None, with a warning, if none can be told."""
        known = None if segment.lists is None else dict(segment.lists)
        cut, inside = dict[int, Any](), "\n"
        for place, one in lists_in(whole, count):
            if place.startswith(inside):
                continue
            if known is not None and place not in known:
                warn(
                    f"{_named(segment)} runs undivided: its argument {place} is a list as long as "
                    f"the batch, which it was not when the plan was made, so it is not known "
                    f"whether its entries belong to samples; tune with such an argument"
                )
                return None
            if known is None or known[place]:
                cut[id(one)], inside = one, f"{place}."
        return cut

    @untraced_alone
    def _part(
        self,
        segment: Segment,
        part: Any,
        norms: NormsByStatistics | None = None,
        remembered: Remembered | None = None,
    ) -> Any:
        """Compute one micro-batch or slab, which gets containers of its own for its arguments."""
        given, _ = take_apart(part)
        result = self._once(segment, part, remembered, norms)
        left, _ = take_apart(part)
        if len(given) != len(left) or not all(map(is_, given, left)):
            raise PlanError(
                f"{_named(segment)} writes to a list or dict that it is called with, which cannot "
                f"be divided; leave it out of the plan's segments"
            )
        return result

    @untraced_alone
    def _once(
        self,
        segment: Segment,
        arguments: Any,
        remembered: Remembered | None = None,
        norms: NormsByStatistics | None = None,
    ) -> Any:
        """Compute one micro-batch; what backward needs is kept, offloaded or recomputed later."""
        run: _Run = self._run if norms is None else partial(_by_statistics, self._run, norms)
        if not torch.is_grad_enabled():
            return run(arguments)
        if segment.selective:
            run = partial(_selective, run)
        if remembered is not None:
            return self._recomputed(segment, run, arguments, remembered)
        if segment.offload:
            with _offloaded():
                return run(arguments)
        return run(arguments)

    @untraced_alone
    def _run(self, arguments: Any) -> Any:
        return self._forward(*arguments)

    @untraced_alone
    def _recomputed(
        self, segment: Segment, run: _Run, arguments: Any, remembered: Remembered
    ) -> Any:
        """Compute one micro-batch, which backward computes again."""
        leaves, nest = take_apart(arguments)
        # If several arguments are one tensor, they are one in backward, too, because attention
        # modules test whether their arguments are the same tensor.
        tensors = {id(one): one for one in leaves if isinstance(one, Tensor)}
        repeatable = _Repeatable(run, arguments, leaves, nest, [*tensors], _named(segment))
        is_training = self.module.training
        repeatable.fills = self._fills.get(is_training)
        # Without `_as_compiled`, torch would compile nothing of what a checkpoint calls.
        call = partial(_as_compiled, eval_frame.get_eval_frame_callback(), repeatable)
        versions = [*map(_version, tensors.values())]
        result = checkpoint(
            call, *tensors.values(), use_reentrant=False, context_fn=remembered.contexts
        )
        self._fills[is_training] = bool(repeatable.fills)
        if versions != [*map(_version, tensors.values())]:
            raise PlanError(
                f"{_named(segment)} writes to its arguments, so it cannot be computed again in "
                f"backward; leave it out of the plan's segments"
            )
        return result


class _Repeatable:
    """A call that gets the caller's own arguments at first, and in backward equal ones."""

    def __init__(
        self,
        run: _Run,
        arguments: Any,
        leaves: Sequence[Any],
        nest: Nest,
        ids: list[int],
        name: str,
    ) -> None:
        self._run, self._given, self._nest, self._name = run, arguments, nest, name
        self._others = [None if isinstance(one, Tensor) else one for one in leaves]
        self._places = [ids.index(id(one)) if isinstance(one, Tensor) else -1 for one in leaves]
        self._versions: list[int] = []
        self.fills: bool | None = None

    @untraced_alone
    def __call__(self, *tensors: Tensor) -> Any:
        versions = [*map(_version, tensors)]
        if self._given is not None:
            given, self._given, self._versions = self._given, None, versions
        else:
            # Tensors that are computed again may have earlier versions, but no later ones.
            if any(map(int.__gt__, versions, self._versions)):
                raise RuntimeError(
                    f"an argument of {self._name}, which is computed again in backward, has been "
                    f"modified by an inplace operation; leave it out of the plan's segments"
                )
            pairs = zip(self._places, self._others, strict=True)
            leaves = [other if place < 0 else tensors[place] for place, other in pairs]
            given = put_together(leaves, self._nest)
        result = self._run(given)
        if self.fills is None:
            self.fills = _fills(result)
        if self.fills:
            # The repetition ends as soon as it has saved as many tensors as the first forward.
            # With one more tensor, it does not end inside an operator that still fills another.
            torch.empty(0, requires_grad=True).square()
        return result


@untraced
def _fills(result: Any) -> bool:
    """True if a result comes from RReLU, which draws random numbers into a tensor saved before."""
    level: set[Any] = {one.grad_fn for one in take_apart(result)[0] if isinstance(one, Tensor)}
    seen: set[Any] = {None}
    while (level := level - seen) and len(seen) < _MOST_NODES:
        if any("Rrelu" in one.name() for one in level):
            return True
        seen |= level
        level = {one for node in level for one, _ in node.next_functions}
    return False


@untraced
def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


@contextmanager
def _offloaded() -> Iterator[None]:
    """Context in which the tensors that backward needs are moved to the host until then."""

    def pack(tensor: Tensor) -> tuple[torch.device, Tensor]:
        # Without `detach`, on a CPU a result would keep the operation alive that keeps the result.
        host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        return tensor.device, host.copy_(tensor.detach(), non_blocking=tensor.is_cuda)

    def unpack(packed: tuple[torch.device, Tensor]) -> Tensor:
        device, host = packed
        return host.to(device, non_blocking=host.is_pinned())

    with saved_tensors_hooks(pack, unpack):
        yield


@untraced
def _named(segment: Segment) -> str:
    return segment.module or "the model"


@untraced
def reason_of_hooks(module: nn.Module) -> str:
    """Why a module's hooks forbid to run it in parts or again; "" if they do not.

    Hooks of the modules inside it would see parts of the batch, and see them again in backward.
    The module's own hooks run outside of its forward. Those of torch itself, such as weight norm,
    belong to what a module computes.
    """
    for name, one in module.named_modules():
        for called in hooks_of(one) if one is not module else ():
            return f"the hook {called} of {name!r} would see parts of the batch, or see them again"
    for hooks in _GLOBAL_HOOKS:
        for called in filter(None, map(_users, hooks.values())):
            return (
                f"the hook {called} of all modules would see parts of the batch, or see them again"
            )
    return ""


@untraced
def hooks_of(module: nn.Module) -> Iterator[str]:
    """Names of the hooks of a module that are neither torch's nor ours."""
    for hooks in (
        *(module._forward_hooks, module._forward_pre_hooks),
        *(module._backward_hooks, module._backward_pre_hooks),
    ):
        yield from filter(None, map(_users, hooks.values()))


def _users(hook: Any) -> str:
    """The name of a hook, if it is neither torch's nor ours."""
    while isinstance(hook, partial):
        hook = hook.func
    kind = hook if hasattr(hook, "__qualname__") else type(hook)
    is_ours = str(kind.__module__).partition(".")[0] in ("torch", "ucudnn")
    return "" if is_ours else str(kind.__qualname__).rpartition(".")[2]


def _reason_of_modes(module: nn.Module, segment: Segment) -> str:
    """Why a segment does not hold in the present modes of its modules; "" if it does."""
    if segment.training is None:
        return ""
    modes = modes_of(module)
    planned = segment.training + (() if torch.is_grad_enabled() else segment.inference)
    if modes in planned:
        return ""
    if not planned:
        return "it was planned for inference, and gradients are enabled"
    changed = min((sorted(set(modes) ^ set(one)) for one in planned), key=len)
    name = changed[0]
    is_module = name in dict(module.named_modules())
    states = ("in training mode", "in evaluation mode") if is_module else ("True", "False")
    now, then = states if name in modes else states[::-1]
    return f"{name or 'it'!r} was {then} when the plan was made, and is {now} now"


def modes_of(module: nn.Module) -> tuple[str, ...]:
    """Names of those modules, a module and those inside it, that are in training mode.

    Batch norm without statistics always computes as in training. Names of attributes that are True
    follow, if the class of their module is neither torch's nor ours.
    """
    names = list[str]()
    for name, one in module.named_modules():
        is_without = isinstance(one, _BatchNorm) and one.running_mean is None
        if one.training or is_without:
            names.append(name)
        # `convert_` gives convolutions of torch our classes, which changes no mode.
        if type(one).__module__.partition(".")[0] not in ("torch", "ucudnn"):
            prefix = f"{name}." if name else ""
            names += [
                prefix + key
                for key, value in vars(one).items()
                if value is True and key != "training"
            ]
    return tuple(names)


@untraced
def _is_rewritten() -> bool:
    """True while torch exports, traces or transforms what the module computes."""
    return (
        torch.compiler.is_exporting()
        or torch._C._is_tracing()
        or _symbolic_trace._is_fx_tracing_flag
        # Backward of a graph from outside a transform repeats what has not been transformed.
        or (torch._C._are_functorch_transforms_active() and torch._C._current_graph_task_id() == -1)
    )


# The call has a function of its own, because torch.compile can compile the frame of this function
# even if `forward` belongs to one of torch's own modules.
def _applied(forward: _Run, args: Any, kwargs: Any) -> Any:
    return forward(*args, **kwargs)


@untraced_alone
def _in_turn(parts: Sequence[_Run], input: Any) -> Any:
    for one in parts:
        input = one(input)
    return input


# Dynamo compiles no loop whose body breaks the graph, as that of `_in_turn` does.
def _chained(parts: Sequence[_Run], input: Any) -> Any:
    for one in parts:
        input = one(input)
    return input


@untraced_alone
def _as_compiled(callback: Any, run: _Run, *leaves: Any) -> Any:
    """Call `run`, in backward too, with the Dynamo callback that was set in the first forward."""
    before = eval_frame.set_eval_frame(callback)
    try:
        return run(*leaves)
    finally:
        eval_frame.set_eval_frame(before)


@untraced_alone
def _selective(run: _Run, arguments: Any) -> Any:
    """Call `run` with selective recomputation, which compiled code does by itself."""
    if callable(eval_frame.get_eval_frame_callback()):
        return run(arguments)
    with Selective():
        return run(arguments)


@untraced
def _slabs_of(segment: Segment, leaves: Sequence[Any]) -> int:
    """How many slabs a segment has; 1, with a warning, if it has fewer rows than a slab."""
    if segment.rows is None:
        return 1
    count = rows_of(segment, leaves)
    if count < segment.rows:
        warn(
            f"{_named(segment)} runs with all rows at once: it has {count} along axis "
            f"{segment.axis}, fewer than rows={segment.rows} of its slabs; tune with such arguments"
        )
    return len(segment.slabs(count))


@untraced_alone
def _by_statistics(run: _Run, norms: NormsByStatistics, arguments: Any) -> Any:
    """Call `run` with statistics that are known, uncompiled: compiled code asks for none."""
    return _as_compiled(None, reached, run, arguments, norms.again())


@untraced
def has_samples(leaf: Any) -> TypeGuard[Tensor]:
    """True for a tensor that can be divided along its first axis."""
    is_plain = isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_nested
    return is_plain and leaf.dim() > 0


def batch_of(inputs: Any) -> int:
    """Samples of an input: the length of its first tensor that has axes; 0 if there is none.

    >>> batch_of((torch.ones(()), torch.ones(4, 3)))
    4
    """
    tensors = (leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
    return next((len(tensor) for tensor in tensors if tensor.dim()), 0)


@untraced
def cut_up(
    whole: Any, sizes: Sequence[int], cut: Mapping[int, Any], shared: Collection[int]
) -> Iterator[Any]:
    """The arguments of each micro-batch.

    Args:
        whole: the arguments of the batch, as (args, kwargs).
        sizes: samples of each micro-batch.
        cut: lists with an entry for each sample, by id.
        shared: as in `Segment`.
    """
    leaves, nest = take_apart(whole, lambda one: id(one) in cut)
    # The micro-batches of a tensor are views, all made by one call of `split`, so that backward
    # writes their gradients into one tensor. If two arguments are the same tensor, both get the
    # same views, because attention modules test whether their arguments are the same tensor.
    views, rows, place, count = dict[int, Any](), set[int](), 0, sum(sizes)
    for n, one in enumerate(leaves):
        if id(one) in cut:
            rows.add(n)
            place += len(take_apart(one)[0])
            continue
        if has_samples(one) and len(one) == count and place not in shared:
            rows.add(n)
            if id(one) not in views:
                views[id(one)] = one.split([*sizes])
        place += 1
    start = 0
    for number, size in enumerate(sizes):
        where = slice(start, start + size)
        yield put_together(
            [
                one if n not in rows else one[where] if id(one) in cut else views[id(one)][number]
                for n, one in enumerate(leaves)
            ],
            nest,
        )
        start += size


@untraced_alone
def _joined(segment: Segment, parts: Sequence[Any], sizes: Sequence[int], given: Any) -> Any:
    """Join the results of all micro-batches into the results of the whole batch."""
    leaves, nests = zip(*map(take_apart, parts), strict=True)
    is_row = _rows(sizes[0], leaves[0])
    for size, other, nest in zip(sizes, leaves, nests, strict=True):
        _require_alike(segment, is_row, (leaves[0], nests[0]), (other, nest), size)
    for size, row in zip(sizes, leaves, strict=True):
        for one in row if size == 1 else ():
            if isinstance(one, Tensor) and one.requires_grad and not one.is_leaf:
                one.register_hook(partial(laid_out_as, one.stride()))
    joined = [
        of_kind(_cat(column), column[0], given) if row else column[0]
        for column, row in zip(zip(*leaves, strict=True), is_row, strict=True)
    ]
    return put_together(joined, nests[0])


@untraced
def laid_out_as(strides: tuple[int, ...], gradient: Tensor) -> Tensor:
    """The gradient of one sample in the memory layout of the result that it belongs to.

    In other layouts, torch 2.13 computes wrong gradients of InstanceNorm and of grouped
    convolutions for one sample.
    """
    is_batched = torch._C._functorch.is_legacy_batchedtensor(gradient)
    if is_batched or torch._C._functorch.is_functorch_wrapped_tensor(gradient):
        return gradient  # whose strides cannot be asked for
    if gradient.stride() == strides or gradient.layout is not torch.strided:
        return gradient
    return gradient.new_empty_strided(gradient.shape, strides).copy_(gradient)


@untraced_alone
def _cat(parts: Sequence[Tensor]) -> Tensor:
    order = axes_by_stride(parts[0])
    if order == sorted(order):  # usually the axes lie in memory in the order of their numbers
        return torch.cat([*parts])
    joined = torch.cat([one.permute(order) for one in parts], order.index(0))
    return joined.permute(sorted(range(len(order)), key=order.__getitem__))


@untraced_alone
def _written(segment: Segment, parts: Iterable[Any], sizes: Sequence[int], given: Any) -> Any:
    """Join results that have no graph: each is copied into the whole result and then freed."""
    results, kinds, start = list[Any](), list[Any](), 0
    left = [*sizes]
    # `zip` would keep a part while the next one is computed.
    for part in parts:
        size = left.pop(0)
        leaves, nest = take_apart(part)
        if not start:
            is_row, count = _rows(size, leaves), sum(sizes)
            results = [
                room(one, (count, *one.shape[1:]), axes_by_stride(one)) if row else one
                for one, row in zip(leaves, is_row, strict=True)
            ]
            # A copy without rows stands for the kind of a result, because it takes no memory.
            kinds = [one[:0].clone() if r else one for one, r in zip(leaves, is_row, strict=True)]
            first = results, nest
        _require_alike(segment, is_row, first, (leaves, nest), size)
        for place, row in enumerate(is_row):
            if row:
                results[place][start : start + size] = leaves[place]
        start += size
        # The next result is computed before these names are bound anew.
        del part, leaves
    columns = zip(results, kinds, is_row, strict=True)
    return put_together([of_kind(a, b, given) if row else a for a, b, row in columns], first[1])


@untraced_alone
def _rows(size: int, leaves: Sequence[Any]) -> list[bool]:
    """For each result of the first micro-batch: True if it has one row for each sample."""
    return [has_samples(leaf) and len(leaf) == size for leaf in leaves]


@untraced_alone
def _require_alike(
    segment: Segment,
    is_row: Sequence[bool],
    first: tuple[Any, Nest],
    other: tuple[Any, Nest],
    samples: int,
) -> None:
    """Require that each result has a row for each of the samples, or is that of the first part."""
    (leaves, nest), (found, own) = first, other
    odd = "other results for each micro-batch" if own != nest else ""
    for a, b, row in zip(leaves, found, is_row, strict=False):
        is_same = a is b or (isinstance(a, CONSTANTS) and a == b)
        if not (is_same or (row and has_samples(b) and b.shape == (samples, *a.shape[1:]))):
            odd = f"a {type(a).__name__}"
    if odd:
        raise PlanError(
            f"results of a segment must be one for each sample, or the same for all, and "
            f"{segment.module or 'the model'!r} returns {odd}; leave it out of the plan's segments"
        )


def located(model: nn.Module, names: Iterable[str]) -> dict[str, tuple[nn.Module, Stretch | None]]:
    """For each name the module, or the sequence and the stretch of it.

    Raises:
        PlanError: the model has no such module or stretch.
    """
    modules = dict(model.named_modules())
    found = dict[str, tuple[nn.Module, Stretch | None]]()
    for name in names:
        stretch = None if name in modules else stretch_of(name)
        module = modules.get(name if stretch is None else stretch.module)
        reason = "" if stretch is None or module is None else _reason_against(stretch, module)
        if module is None or reason:
            raise PlanError(
                f"the plan has {name!r} as a segment, and "
                f"{reason or f'{type(model).__name__} has no such module'}; use the plan of this "
                f"model"
            )
        found[name] = module, stretch
    return found


def is_sequence(module: nn.Module) -> bool:
    """True if stretches of a module's children may be segments."""
    return not _reason_against(Stretch("", 0, 1), module)


def _reason_against(stretch: Stretch, module: nn.Module) -> str:
    """Why a module has no such stretch; "" if it has."""
    forward, kind = vars(module).get("forward"), type(module)
    while isinstance(forward, SegmentForward):
        forward = forward.hidden
    is_torchs = forward is None and isinstance(module, nn.Sequential)
    name, count = stretch.module or "the model", len(module._modules)
    if not is_torchs or any(
        getattr(kind, one) is not getattr(nn.Sequential, one) for one in ("forward", "__iter__")
    ):
        return f"{name} is no nn.Sequential that runs its children one after the other"
    return f"{name} has {count} children" if stretch.end > count else ""


def require_modules(model: nn.Module, segments: Sequence[Segment]) -> None:
    """Raise a PlanError if segments name what the model does not have, or stretches that cross."""
    found = located(model, (one.module for one in segments))
    stretches = [one for _, one in found.values() if one is not None]
    for one, other in combinations(stretches, 2):
        if one.shares(other) and not (one.holds(other) or other.holds(one)):
            raise PlanError(
                f"segments '{one}' and '{other}' share children, and neither is inside the other; "
                f"leave one out of the plan's segments"
            )


def segment_(model: nn.Module, segments: Sequence[Segment]) -> None:
    """Let modules of a model run as their segments say, in place; earlier segments are removed.

    A segment inside another segment runs in each micro-batch of the outer segment.

    Raises:
        PlanError: as of `require_modules`.
    """
    require_modules(model, segments)
    unsegment_(model)
    found = located(model, (one.module for one in segments))
    inner = list[tuple[Stretch, Segment]]()
    for one in segments:
        module, stretch = found[one.module]
        if stretch is None:
            _installed(module).segment = one
        else:
            inner.append((stretch, one))
    # Those inside others come after them.
    for stretch, one in sorted(inner, key=lambda pair: pair[0].begin - pair[0].end):
        _installed(found[one.module][0]).add(stretch, one)
    for forward in filter(None, map(_forward_of, model.modules())):
        forward.joins_graphs = forward.has_only_graphs()


def strip_(model: nn.Module) -> None:
    """Call a model with plain tensors, in place, where it is called with those of MONAI."""
    if _MONAI in sys.modules:
        forward = _installed(model)
        forward.strips, forward.joins_graphs = True, False


def _with_metadata(args: Any, kwargs: Any) -> tuple[Any, _Run] | None:
    """Arguments without MONAI's metadata, and what adds it to results; None if there is none.

    MONAI's tensors are plain ones with metadata, which each operator passes on. Those that
    operators in place leave are freed only by Python's garbage collector, later than plain ones.
    """
    kind: Any = sys.modules[_MONAI].MetaTensor
    given = tuple(one for one in tree_leaves((args, kwargs)) if type(one) is kind)
    if not given:
        return None

    def renewed(result: Any) -> Any:
        def one(tensor: Tensor) -> Any:
            # As if the module were a single function of torch.
            return kind.__torch_function__(lambda *_: tensor, (kind,), given)

        return tree_map_only(Tensor, one, result)

    return tree_map_only(kind, kind.as_tensor, (args, kwargs)), renewed


def _installed(module: nn.Module) -> SegmentForward:
    """The forward for segments that a module has, or gets now."""
    forward = _forward_of(module)
    if forward is None:
        forward = SegmentForward(module)
        # These attributes hide the methods of the module's class; `extra_repr` shows the segment in
        # `repr`.
        vars(module).update(forward=forward, extra_repr=forward.extra_repr)
    return forward


def _forward_of(module: nn.Module) -> SegmentForward | None:
    forward = getattr(vars(module).get("extra_repr"), "__self__", None)
    return forward if isinstance(forward, SegmentForward) else None


def named_parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a model and the stretches that are segments, by name."""
    stack = [*model.named_modules()][::-1]
    while stack:
        name, module = stack.pop()
        yield name, module
        if forward := _forward_of(module):
            for one in forward.stretches.values():
                segment = _installed(one).segment
                assert segment is not None
                stack.append((segment.module, one))


def unsegment_(model: nn.Module) -> None:
    """Remove all segments of a model, in place, so that its modules run undivided again."""
    for module in model.modules():
        if forward := _forward_of(module):
            forward.remove()
