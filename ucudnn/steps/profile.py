"""Profile of a step: memory and time of its modules, and memory at its convolutions."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from ucudnn.backends import Span
from ucudnn.execution.channels_last import optimizer_states, optimizers
from ucudnn.execution.micro_batching import batch_of, has_samples, named_parts
from ucudnn.execution.nesting import take_apart
from ucudnn.outcomes import Foresight, StepMemory
from ucudnn.problem import Problem
from ucudnn.solvers import Option
from ucudnn.steps.run import STEP_ERRORS, tensors_of
from ucudnn.steps.tracing import Traced
from ucudnn.timeline import Block

# Functions that an optimiser calls before and after each of its steps.
_OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_OF_OPTIMIZERS = {"state", "param_groups", "step", *_OPTIMIZER_HOOKS}


@dataclass(eq=False)
class ModuleCall:
    """One call of a module in a step.

    A mark is a numbered moment of the step at which memory or time is read.

    Args:
        name: name of the module; None: the call is the whole step.
        forward: numbers of the marks before and after its forward.
        backward: numbers of the marks before and after its backward; empty: it has no backward.
        children: calls of modules inside this call, in order.
        samples: number of samples in its arguments.
        result_bytes: bytes of the tensors that it returns.
        argument_bytes: bytes of its arguments that have gradients.
        number: number of this call among those of its module.
        rows: length of each of its arguments, taken apart; -1 for what has no samples.
        shape: of the first of its arguments that has axes.
    """

    name: str | None
    forward: list[int]
    backward: list[int] = field(default_factory=list)
    children: list[ModuleCall] = field(default_factory=list)
    samples: int = 0
    result_bytes: int = 0
    argument_bytes: int = 0
    number: int = 0
    rows: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[str | None, int]:
        """What tells this call from all others: its module, and its number."""
        return self.name, self.number

    def walk(self) -> Iterator[ModuleCall]:
        """This call and all calls inside it, in the order of their forwards."""
        yield self
        for child in self.children:
            yield from child.walk()

    @property
    def is_nested(self) -> bool:
        """True if the backwards of its children run in reverse order inside that of this call."""
        if not self.backward:
            return not any(child.backward for child in self.children)
        times = [self.backward[0]]
        for child in reversed(self.children):
            times += child.backward
        return times == sorted(times) and times[-1] <= self.backward[1]


class ModuleWatcher:
    """Makes a mark when the forward or the backward of a module begins or ends.

    Args:
        names: names of the modules, and of stretches that are segments, whose calls are noted.
        mark: function that makes a mark, such as one that notes the time.
        writers: names of modules that write to their arguments; those that a run finds are added.
            Watching such a module costs memory and time of its own, unless it is known before.
    """

    def __init__(
        self, names: Collection[str], mark: Callable[[], None], writers: set[str] | None = None
    ) -> None:
        self.root = ModuleCall(None, [])
        self._mark = mark
        self._marks = 0
        self._stack = [self.root]
        # Calls whose backward has begun and not ended. If the arguments of a call have no gradients
        # or are written to, nothing shows the end of its backward. Then its backward counts as
        # ended when the backward of a call that is not inside it begins or ends.
        self._open: list[ModuleCall] = []
        self._names = names
        self._writers = set[str]() if writers is None else writers
        # For the calls in `_stack`: what they got for their arguments, these, and their versions.
        self._given = list[list[tuple[Tensor, Tensor, int]]]()

    def mark(self) -> int:
        """Make a mark and return its number."""
        self._mark()
        self._marks += 1
        return self._marks - 1

    def run(self, model: nn.Module, step: Callable[[], object]) -> None:
        """Run a step of a model, and note the calls of modules in it."""
        # No attribute refers to the model. What it keeps of this step may refer to the graph of the
        # step, and so to this watcher: it would never be freed.
        with ExitStack() as stack:
            for name, module in named_parts(model):
                if name in self._names:
                    # Both hooks, the one before forward and the one after it, run after the hooks
                    # that the module has already.
                    begin = module.register_forward_pre_hook(
                        self._beginner(name), prepend=False, with_kwargs=True
                    )
                    end = module.register_forward_hook(self._end, always_call=True)
                    stack.callback(begin.remove)
                    stack.callback(end.remove)
            self.root.forward = [self.mark()]
            step()
            end_mark = self.mark()
        self._close(end_mark, [])
        counts: dict[str | None, int] = {}
        for call in self.root.walk():
            call.number = counts.get(call.name, 0)
            counts[call.name] = call.number + 1
        begins = [call.backward[0] for call in self.root.walk() if call.backward]
        # The backward of the step begins when the first backward of any call begins.
        self.root.forward.append(min(begins, default=end_mark))
        self.root.backward = [min(begins), end_mark] if begins else []

    def _beginner(self, name: str) -> Callable[[nn.Module, Any, Any], Any]:
        def begin(module: nn.Module, args: Any, kwargs: Any) -> Any:
            del module
            leaves, _ = take_apart((args, kwargs))
            rows = [len(leaf) if has_samples(leaf) else -1 for leaf in leaves]
            shape = next((tuple(leaf.shape) for leaf in leaves if has_samples(leaf)), ())
            call = ModuleCall(
                name, [], samples=batch_of((args, kwargs)), rows=(*rows,), shape=shape
            )
            self._stack[-1].children.append(call)
            self._stack.append(call)
            path = self._stack[1:]
            given = dict[int, tuple[Tensor, Tensor, int]]()

            def apart(tensor: Tensor) -> Tensor:
                # Each call gets views of its arguments: when the gradients of these views are
                # there, the backward of the call is over. If two arguments are the same tensor,
                # they get the same view, because attention checks whether they are the same. To
                # write to a view would be another operation than to write to the argument.
                if not (tensor.requires_grad and torch.is_grad_enabled()):
                    return tensor
                if id(tensor) not in given:
                    # `view_as` could change strides of axes of one element.
                    view = tensor if name in self._writers else torch.ops.aten.alias(tensor)
                    given[id(tensor)] = view, tensor, tensor._version
                return given[id(tensor)][0]

            arguments = (
                _mapped(apart, args),
                {key: _mapped(apart, one) for key, one in kwargs.items()},
            )
            self._given.append([*given.values()])
            call.argument_bytes = sum(_bytes(tensor) for _, tensor, _ in given.values())
            ends = [view for view, tensor, _ in given.values() if view is not tensor]
            left = [len(ends)]

            def ended(_: object) -> None:
                left[0] -= 1
                if not left[0] and call in self._open:
                    number = self.mark()
                    self._open.remove(call)
                    call.backward.append(number)
                    self._close(number, path)

            for tensor in ends:
                assert tensor.grad_fn is not None
                tensor.grad_fn.register_prehook(ended)
            call.forward.append(self.mark())
            return arguments

        return begin

    def _end(self, module: nn.Module, args: Any, result: Any) -> Any:
        del module, args
        path = self._stack[1:]
        call = self._stack.pop()
        call.forward.append(self.mark())
        given = self._given.pop()
        if any(tensor._version != version for _, tensor, version in given):
            assert call.name is not None
            self._writers.add(call.name)
        # An argument that is returned as it is is itself again: the next module may write to it.
        arguments = {id(view): tensor for view, tensor, _ in given}
        result = _mapped(lambda one: arguments.get(id(one), one), result)
        tensors = tensors_of(result)
        call.result_bytes = sum(map(_bytes, tensors))

        def began(_: object) -> None:
            # When the backward of a call begins, that of each call around it has begun, too.
            for depth, one in enumerate(path, 1):
                if not one.backward:
                    number = self.mark()
                    self._close(number, path[:depth])
                    one.backward.append(number)
                    self._open.append(one)

        for tensor in tensors:
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(began)
        return result

    def _close(self, number: int, path: Sequence[ModuleCall]) -> None:
        """End the backward of each open call, but for those on the path to a call."""
        held = [one for one in self._open if one in path]
        for one in self._open:
            if one not in held:
                one.backward.append(number)
        self._open = held


class ModuleCost(NamedTuple):
    """Memory and time that a call of a module costs.

    Args:
        kept_bytes: bytes allocated after its forward, above what there was before its forward.
        forward_bytes: the most bytes in its forward, above what there was before its forward.
        backward_bytes: the most bytes in its backward, above what there was before its forward.
        beside_bytes: bytes allocated beside `kept_bytes` when its backward begins: gradients of its
            result, and gradients of the parameters of later modules.
        forward_ns: time of its forward.
        backward_ns: time of its backward; 0 if it has none.
    """

    kept_bytes: int
    forward_bytes: int
    backward_bytes: int
    beside_bytes: int
    forward_ns: int
    backward_ns: int

    def option(self, choice: Any) -> Option:
        """The cost as an option for the solver."""
        peak, time_ns = max(self[1:3]), self.forward_ns + self.backward_ns
        return Option(self.kept_bytes, max(0, peak), time_ns, choice)


@dataclass(frozen=True, slots=True)
class Held:
    """Memory in bytes that is allocated all through a step."""

    parameters: int
    # Gradients that the parameters have before the step.
    gradients: int
    # State of the optimisers of the model's parameters.
    optimizers: int
    # Buffers and inputs, and everything else that was allocated before the step.
    others: int

    @property
    def total(self) -> int:
        """The sum of all these parts."""
        return self.parameters + self.gradients + self.optimizers + self.others


def held_by(model: nn.Module, inputs: Any, allocated: int = 0) -> Held:
    """The memory held before a step; `allocated` is what the allocator has counted by then.

    Optimisers that have run no step yet count with the state that their first step will make, and
    a DistributedDataParallel with its buckets.
    """
    parameters = list(model.parameters())
    gradients = [one.grad for one in parameters if one.grad is not None]
    # Optimisers have the part on this rank of a parameter that is gathered to plan it.
    optimized = [getattr(one, "sharded", one) for one in parameters]
    states = [state for _, state in optimizer_states(set(map(id, optimized)))]
    to_come = _state_to_come({id(one) for one in optimized if one.requires_grad})
    wrapped = [one for one in model.modules() if isinstance(one, DistributedDataParallel)]
    buckets = sum(bytes_of([p for p in one.parameters() if p.requires_grad]) for one in wrapped)
    named = Held(
        bytes_of(parameters),
        bytes_of(gradients),
        bytes_of(states),
        bytes_of([*model.buffers(), inputs]),
    )
    more = max(buckets, allocated - named.total)
    return replace(named, optimizers=named.optimizers + to_come, others=named.others + more)


def _state_to_come(parameters: Container[int]) -> int:
    """Bytes of state that optimisers will make for parameters with these ids."""
    found = 0
    for one in optimizers():
        attributes = dict(vars(one))
        # A wrapper around another optimiser has none of these, or would run that one.
        is_wrapper = any(isinstance(value, torch.optim.Optimizer) for value in attributes.values())
        if is_wrapper or not {"state", "param_groups"} <= attributes.keys():
            continue
        groups = [
            (group, [p for p in group["params"] if id(p) in parameters and p not in one.state])
            for group in one.param_groups
        ]
        if not any(new for _, new in groups):
            continue
        # Optimisers that need values, or a closure, refuse to run on tensors without memory. Their
        # state is not known.
        with suppress(*STEP_ERRORS), FakeTensorMode(allow_non_fake_inputs=True):
            twin = object.__new__(type(one))
            others = {name: attributes[name] for name in attributes.keys() - _OF_OPTIMIZERS}
            vars(twin).update(copy.deepcopy(others))
            vars(twin).update({name: {} for name in _OPTIMIZER_HOOKS}, state=defaultdict(dict))
            twin.param_groups = [{**group, "params": [*map(_fake, new)]} for group, new in groups]
            type(one).step(twin)
            found += bytes_of(list(twin.state.values()))
    return found


def _fake(parameter: Any) -> Tensor:
    parameter = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    fake = torch.empty_like(parameter).requires_grad_()
    fake.grad = torch.empty_like(fake)
    return fake


def bytes_of(tree: Any) -> int:
    """Bytes of the memory that tensors lie in; memory that tensors share is counted once."""
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    parts = [part for leaf in leaves for part in _strided(leaf)]
    storages = [one.untyped_storage() for one in parts]
    return sum({one._cdata: one.nbytes() for one in storages}.values())


def _strided(tensor: Any) -> tuple[Tensor, ...]:
    """The tensors with memory that a tensor consists of."""
    if hasattr(tensor, "to_local"):  # sharded: its part on this rank
        return (tensor.to_local(),)
    if tensor.layout is torch.sparse_coo:
        return tensor._values(), tensor._indices()
    return (tensor,)


class ConvolutionCall(NamedTuple):
    """One kernel of a convolution that a step calls.

    Args:
        problem: the kernel.
        live_bytes: bytes allocated beside its workspace, all that is held included.
        peak_bytes: bytes allocated with its workspace.
    """

    problem: Problem
    live_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class StepProfile:
    """Memory and times of a step, at the calls of modules and of convolutions in it.

    Args:
        held: memory that is allocated all through the step.
        root: the whole step as a call, which contains all other calls.
        spans: memory between marks, above what is held; the span with a mark's number ends at this
            mark.
        split_spans: the same as `spans` if each convolution that a plan can limit is divided into
            chunks, which need less workspace.
        times_ns: time in ns at each mark.
        own_peak_bytes: peak without the workspace of these convolutions.
        calls: the kernels of convolutions, in the order of the step.
        alive: what is allocated at the peak: for each module that runs in forward, the bytes that
            it allocated; those of backward; and what an operator needs inside.
        blocks: the largest blocks that it allocates.
        notes: what was not foreseen exactly, and why.
        traced: the convolutions.
    """

    held: Held
    root: ModuleCall
    spans: Sequence[Span]
    split_spans: Sequence[Span]
    times_ns: Sequence[int]
    own_peak_bytes: int
    calls: tuple[ConvolutionCall, ...] = ()
    alive: Mapping[str, int] = field(default_factory=dict)
    blocks: tuple[Block, ...] = ()
    notes: tuple[str, ...] = ()
    traced: Traced = field(default_factory=partial(Traced, []))

    @property
    def split(self) -> StepProfile:
        """The step with convolutions that are divided into chunks."""
        return replace(self, spans=self.split_spans)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that are allocated in the step, all that is held included."""
        return self.held.total + self.own_bytes

    def memory(self, budget_bytes: int, is_training: bool) -> StepMemory:
        """This memory in the form that a plan keeps; the step is torch's, undivided."""
        return StepMemory(
            budget_bytes=budget_bytes,
            parameters_bytes=self.held.parameters,
            gradients_bytes=self.held.gradients,
            optimizer_bytes=self.held.optimizers,
            other_bytes=self.held.others,
            own_peak_bytes=self.own_peak_bytes,
            torch_peak_bytes=self.peak_bytes,
            torch_foreseen_ns=self.time_ns,
            torch_blocks=self.blocks,
            is_training=is_training,
        )

    def foresight(self, batch: int, is_training: bool) -> Foresight:
        """What is told of this step, if it was foreseen."""
        held = self.held
        named = (
            ("parameters", held.parameters),
            ("gradients", held.gradients),
            ("optimiser state", held.optimizers),
            ("buffers, inputs and others", held.others),
        )
        fills = sorted(self.alive.items(), key=lambda one: -one[1])
        return Foresight(
            self.peak_bytes,
            self.time_ns,
            batch,
            is_training,
            tuple((what, size) for what, size in named if size),
            tuple(fills),
            self.notes,
        )

    @property
    def own_bytes(self) -> int:
        """The most bytes that the step allocates, above what is held."""
        return max(span.peak_bytes for span in self.spans)

    @property
    def time_ns(self) -> int:
        """Time of the step."""
        return self.times_ns[-1] - self.times_ns[0]

    @property
    def live_bytes(self) -> dict[Problem, int]:
        """For each kernel, the most bytes allocated beside the workspace in any of its calls."""
        return _most((one.problem, one.live_bytes) for one in self.calls)

    @property
    def call_peaks(self) -> dict[Problem, int]:
        """For each kernel, the most bytes allocated in any of its calls, with workspace."""
        return _most((one.problem, one.peak_bytes) for one in self.calls)

    def cost(self, call: ModuleCall) -> ModuleCost:
        """What a call cost in the step that was run."""
        (begin, end), before = call.forward, self._level(call.forward[0])
        kept, forward_ns = self._level(end) - before, self._ns(begin, end)
        forward_bytes = self._peak(begin, end) - before
        if not call.backward:
            return ModuleCost(kept, forward_bytes, 0, 0, forward_ns, 0)
        back, over = call.backward
        beside = max(0, self._level(back) - before - kept)
        backward_bytes = self._peak(back, over) - before
        return ModuleCost(
            kept, forward_bytes, backward_bytes, beside, forward_ns, self._ns(back, over)
        )

    def between(self, call: ModuleCall) -> list[Option]:
        """Costs, as options, of what a call computes before, between and after its children."""
        forward, backward = [call.forward[0]], call.backward[-1:]
        for child in call.children:
            forward += child.forward
            backward += child.backward[::-1]
        forward.append(call.forward[-1])
        backward += call.backward[:1]
        return [
            self._option([forward[n : n + 2], backward[n : n + 2][::-1]])
            for n in range(0, len(forward), 2)
        ]

    def _option(self, intervals: Sequence[Sequence[int]]) -> Option:
        end, before = intervals[0][1], self._level(intervals[0][0])
        found = [interval for interval in intervals if len(interval) == 2]
        return Option(
            kept_bytes=self._level(end) - before,
            peak_bytes=max(0, *(self._peak(*interval) - before for interval in found)),
            time_ns=sum(self._ns(*interval) for interval in found),
            choice=None,
        )

    def _ns(self, begin: int, end: int) -> int:
        return self.times_ns[end] - self.times_ns[begin]

    def _level(self, mark: int) -> int:
        return self.spans[mark].end_bytes

    def _peak(self, begin: int, end: int) -> int:
        inside = [span.peak_bytes for span in self.spans[begin + 1 : end + 1]]
        return max(inside, default=self._level(begin))


def _most(pairs: Iterable[tuple[Problem, int]]) -> dict[Problem, int]:
    found: dict[Problem, int] = {}
    for problem, size in pairs:
        found[problem] = max(found.get(problem, 0), size)
    return found


def _mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Change a tensor, or those of a tuple. A list or a dict stays: a module may write to it."""
    if isinstance(value, Tensor):
        return change(value)
    return tuple(_mapped(change, one) for one in value) if type(value) is tuple else value


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
