"""Find out whether a module may run in micro-batches and in slabs, by runs on its real arguments.

Forward and backward of the module are run on the whole batch, on parts of it, and on a batch in
which all samples but one hold no numbers. No list of module types is consulted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ucudnn.backends.tensors import CHANNELS_LAST_BY_RANK
from ucudnn.benchmark.failures import is_out_of_memory
from ucudnn.errors import first_line
from ucudnn.execution.micro_batching import cut_up, has_samples, located, modes_of, reason_of_hooks
from ucudnn.execution.nesting import lists_in, put_together, take_apart
from ucudnn.execution.remembering import Remembered, values_in
from ucudnn.kernels.deadline import Deadline
from ucudnn.segment import Segment, Stretch
from ucudnn.steps.locality import NO_TIME as NO_TIME_FOR_SLABS
from ucudnn.steps.locality import Locality, crops, locality
from ucudnn.steps.run import STEP_ERRORS, cloned, same_random_states, tensors_of
from ucudnn.steps.same_numbers import SameForSamples
from ucudnn.steps.trial import (
    CONSTANTS,
    Run,
    Trial,
    are_other,
    are_other_gradients,
    at,
    differ,
    is_real,
    name_of_change,
    random_states,
    weights_of,
)

# If parts of one sample compute something else, parts of at least so many may not.
_LEAST = 2
# Reasons against micro-batches.
UPDATES = "it updates its buffers"
ONE_SAMPLE = "its arguments have one sample"
NO_TIME = "there was no time to find out whether it may run in parts"
_OTHER = "part of a batch gives other results"
# A trial takes about so many times as long as a forward.
_FORWARDS = 20
# If more lists than these are as long as the batch, all of them belong to samples, or none does.
_MOST_LISTS = 3


class Slabs(NamedTuple):
    """Whether a module may run in slabs of the rows of one axis.

    Attributes:
        locality: what was found out.
        training: modes in which it may, as `Segment.training`.
        inference: modes in which it may without gradients.
    """

    locality: Locality
    training: tuple[tuple[str, ...], ...] = ()
    inference: tuple[tuple[str, ...], ...] = ()

    def united(self, other: Slabs) -> Slabs:
        """What holds for two calls, or in several modes."""
        both = self.locality.united(other.locality)
        modes = zip(self[1:], other[1:], strict=True)
        return Slabs(both, *(() if both.reason else _united(*each) for each in modes))


@dataclass(frozen=True, slots=True)
class Independence:
    """Whether a module may run in micro-batches or slabs, and whether its forward may be repeated.

    Args:
        reason: why its samples must stay together; "" if it may run in micro-batches.
        repeats: True if its forward may be repeated in backward.
        samples: number of samples in its arguments; 0 if they have none.
        shared: indices, among the leaves of its arguments, of tensors that all samples share.
        lists: as in `Segment`.
        least: the smallest micro-batch by which gradients are those of the batch.
        is_unaligned: True if it draws random numbers that cannot be made the same for each sample,
            so that its parts were compared by their sizes only.
        divides_in: modes in which it may run in micro-batches, as `Segment.training`.
        repeats_in: modes in which its forward may be repeated.
        infers_in: modes in which it may run in micro-batches without gradients.
        slabs: for each axis that was examined, whether it may run in slabs of its rows.
    """

    reason: str = ""
    repeats: bool = False
    samples: int = 0
    shared: tuple[int, ...] = ()
    lists: tuple[tuple[str, bool], ...] = ()
    least: int = 1
    is_unaligned: bool = False
    divides_in: tuple[tuple[str, ...], ...] = ()
    repeats_in: tuple[tuple[str, ...], ...] = ()
    infers_in: tuple[tuple[str, ...], ...] = ()
    slabs: Mapping[int, Slabs] = field(default_factory=dict)

    def allows(self, segment: Segment) -> bool:
        """True if the module may run as a segment says, as far as it is known."""
        if segment.micro_batch is not None and (self.reason or segment.micro_batch < self.least):
            return False
        if segment.rows is not None and segment.axis in self.slabs:
            found = self.slabs[segment.axis].locality
            if found.reason or segment.rows < found.unit:
                return False
        return self.repeats or not segment.recompute

    def described(self, segment: Segment) -> Segment:
        """The segment with what was found out about its module filled in."""
        if not (segment.is_cut or segment.recompute):
            return segment
        training = self.repeats_in if segment.micro_batch is None else self.divides_in
        inference = self.infers_in
        if segment.rows is not None:
            slabs = self.slabs[segment.axis]
            segment = slabs.locality.described(segment)
            training, inference = slabs.training, slabs.inference
            if segment.micro_batch is not None:
                training = tuple(one for one in training if one in self.divides_in)
                inference = tuple(one for one in inference if one in self.infers_in)
        return replace(
            segment,
            shared=self.shared,
            lists=self.lists,
            least=self.least,
            training=training,
            inference=inference,
        )


def unknown(reason: str, axes: Sequence[int]) -> Independence:
    """What holds of a module that was not examined, for a reason."""
    return Independence(reason, slabs=dict.fromkeys(axes, Slabs(Locality(reason))))


def examined(
    model: nn.Module,
    step: Callable[[], object],
    sizes: Mapping[str, int],
    deadline: Deadline | None = None,
    axes: Mapping[str, Sequence[int]] | None = None,
    end_of_slabs: Deadline | None = None,
) -> dict[str, Independence]:
    """Run a step, and find out which modules may run in micro-batches or slabs.

    If gradients are enabled, the backward of each module is run, too. If the model is in training
    mode, forward is run in evaluation mode, too, because a trained model is evaluated in between.

    Args:
        model: the model of the step.
        step: a function that runs the step.
        sizes: for each module or stretch to try, by name, the size of the micro-batch.
        deadline: after it, no module is tried, and what was not tried does not run in parts.
        axes: for those that may run in slabs, too, the axes that may have the rows.
        end_of_slabs: after it, no module is tried in slabs, and what was not tried does not run so.

    Raises:
        PlanError: the model has no such module or stretch.
    """
    deadline = deadline or Deadline.never()
    how = deadline, axes or {}, end_of_slabs or deadline
    found = _examined(model, step, sizes, *how, with_backward=torch.is_grad_enabled())
    modules = [*model.modules()]
    again = {name: sizes[name] for name, one in found.items() if one.repeats}
    if again and any(one.training for one in modules):
        in_evaluation = dict[str, Independence]()
        try:
            with Remembered(model, "the model", updates=True), same_random_states():
                for one in modules:
                    one.training = False
                in_evaluation = _examined(model, step, again, *how, with_backward=False)
        except STEP_ERRORS:  # a model that cannot be evaluated on these inputs
            pass
        for name, other in in_evaluation.items():
            own = found[name]
            is_alike = (own.shared, own.lists) == (other.shared, other.lists)
            if is_alike:
                slabs = {
                    axis: one
                    if other.slabs[axis].locality.reason
                    else one.united(other.slabs[axis])
                    for axis, one in own.slabs.items()
                }
                infers_in = own.infers_in + other.infers_in
                found[name] = replace(own, infers_in=infers_in, slabs=slabs)
    return found


def _examined(
    model: nn.Module,
    step: Callable[[], object],
    sizes: Mapping[str, int],
    deadline: Deadline,
    axes: Mapping[str, Sequence[int]],
    end_of_slabs: Deadline,
    *,
    with_backward: bool,
) -> dict[str, Independence]:
    found: dict[str, Independence] = {}
    busy: list[_Probe] = []
    places = located(model, sizes)
    with ExitStack() as stack:
        sequences = {id(one): _Sequence(one, []) for one, stretch in places.values() if stretch}
        for one in sequences.values():
            _hide(one.module, one, stack)
        for name, (module, stretch) in places.items():
            own = nn.Sequential() if stretch else module
            ends = deadline, end_of_slabs
            how = sizes[name], axes.get(name, ()), *ends, with_backward, found, busy
            probe = _Probe(own, own.forward, name, *how)
            if stretch:
                sequences[id(module)].stretches.append((stretch, probe))
            else:
                _hide(module, probe, stack)
        step()
    return found


def _hide(module: nn.Module, forward: Callable[..., Any], stack: ExitStack) -> None:
    """Hide a module's forward, and an attribute that hides it already, until a stack is closed."""
    attributes = vars(module)
    if "forward" in attributes:
        stack.callback(attributes.update, forward=attributes["forward"])
    else:
        stack.callback(attributes.pop, "forward")
    attributes["forward"] = forward


@dataclass
class _Probe:
    """Replaces a module's forward: it tests the module, and then calls the replaced forward."""

    module: nn.Module
    forward: Callable[..., Any]
    name: str
    size: int
    axes: Sequence[int]
    deadline: Deadline
    end_of_slabs: Deadline
    with_backward: bool
    found: dict[str, Independence]
    busy: list[_Probe]
    # Indices of tensors that have samples, among the leaves of the arguments of any call.
    rows: set[int] = field(default_factory=set)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.test((args, kwargs))
        return self.forward(*args, **kwargs)

    def test(self, arguments: Any) -> None:
        """Test the module with the arguments of a call."""
        # A module is not tried while a module around it is being tried. It is tried again in each
        # later call, until one shows a reason against micro-batches.
        before = self.found.get(self.name, Independence())
        is_whole = before.reason and all(one.locality.reason for one in before.slabs.values())
        if self.busy or is_whole:
            return
        if self.deadline.is_over:
            self.found[self.name] = unknown(NO_TIME, self.axes)
        else:
            self.busy.append(self)
            try:
                found = self._examined(arguments)
            finally:
                self.busy.clear()
            leaves, _ = take_apart(arguments)
            self.rows |= {n for n, one in enumerate(leaves) if _has_rows(one, found.samples)}
            self.found[self.name] = self._of_all_calls(before, found)

    def _examined(self, arguments: Any) -> Independence:
        """What is found out by a call; of one sample that may run in slabs, by a part of it."""
        samples = next((len(one) for one in take_apart(arguments)[0] if has_samples(one)), 0)
        is_cropped = samples == 1 and len(self.axes) > 0
        for part in crops(arguments, self.axes[0]) if is_cropped else [arguments]:
            found = self._finding(part)
            if all(one.locality.is_final for one in found.slabs.values()):
                break
        return found

    def _of_all_calls(self, before: Independence, found: Independence) -> Independence:
        """What holds for the earlier calls of the module and for one more."""
        shared = tuple(sorted({*before.shared, *found.shared}))
        lists = dict(before.lists) | dict(found.lists)
        is_alike = self.rows.isdisjoint(shared) and lists == dict(found.lists) | dict(before.lists)
        other = "" if is_alike else "its calls do not divide the same arguments"
        reason = before.reason or found.reason or other
        return replace(
            found,
            reason=reason,
            shared=shared,
            lists=tuple(lists.items()),
            least=max(found.least, before.least),
            is_unaligned=found.is_unaligned or before.is_unaligned,
            divides_in=() if reason else _united(before.divides_in, found.divides_in),
            repeats_in=_united(before.repeats_in, found.repeats_in) if found.repeats else (),
            infers_in=() if reason else _united(before.infers_in, found.infers_in),
            slabs={
                axis: before.slabs[axis].united(one) if axis in before.slabs else one
                for axis, one in found.slabs.items()
            },
        )

    def _finding(self, arguments: Any) -> Independence:
        is_training = self.with_backward and torch.is_grad_enabled()
        # Inside a checkpoint of the model's own, the trial must save nothing that this checkpoint
        # would count.
        is_inside = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        apart = saved_tensors_hooks(Tensor.detach, _same) if is_inside else nullcontext()
        with torch.set_grad_enabled(is_training), same_random_states(), apart:
            trial = _Samples(Trial(self.module, self.forward, arguments, is_training))
            slabs = dict[int, Locality]()
            try:
                found = trial.finding(self.size, self.deadline)
                slabs = {axis: trial.locality(axis, self.end_of_slabs) for axis in self.axes}
            except STEP_ERRORS as error:
                if is_out_of_memory(error):  # it says nothing of the module
                    raise
                reason = f"it fails where samples are changed or missing ({first_line(error)})"
                found = Independence(reason, trial.repeats)
                slabs = dict.fromkeys(self.axes, Locality(reason)) | slabs
            modes = (modes_of(self.module),)
            return replace(
                found,
                divides_in=modes if is_training and not found.reason else (),
                repeats_in=modes if is_training and found.repeats else (),
                infers_in=() if found.reason else modes,
                slabs={
                    axis: Slabs(
                        one,
                        modes if is_training and found.repeats and not one.reason else (),
                        () if one.reason else modes,
                    )
                    for axis, one in slabs.items()
                },
            )


@dataclass
class _Sequence:
    """Replaces a sequence's forward: it tests stretches, each where its first child begins."""

    module: nn.Module
    stretches: list[tuple[Stretch, _Probe]]

    def __call__(self, input: Any) -> Any:
        children = [*self.module._modules.items()]
        for place, (_, child) in enumerate(children):
            for stretch, probe in self.stretches:
                if stretch.begin == place:
                    probe.module._modules = dict(children[place : stretch.end])
                    probe.module.training = self.module.training
                    probe.test(((input,), {}))
            assert child is not None
            input = child(input)
        return input


def _united(
    modes: tuple[tuple[str, ...], ...], others: tuple[tuple[str, ...], ...]
) -> tuple[tuple[str, ...], ...]:
    return tuple(dict.fromkeys(modes + others))


class _Samples:
    """Finds out whether samples of a module depend on each other, by trials of one call."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._count = next((len(leaf) for leaf in trial.leaves if has_samples(leaf)), 0)
        shared = [
            n for n, one in enumerate(trial.leaves) if has_samples(one) and len(one) != self._count
        ]
        self._shared = tuple(shared)
        # Lists that are cut with the samples, by id.
        self._cut: dict[int, Any] = {}
        self._is_unaligned = False
        # True once it is known that a repeated call gives the same results.
        self.repeats = False
        self._is_alone = False  # True once it is known that samples do not depend on each other
        # Why it cannot run in parts, whatever they are.
        self._reason = "it could not be found out"

    def finding(self, size: int, deadline: Deadline) -> Independence:
        """Find out whether the module may run in micro-batches of this size."""
        reason = self._reason = reason_of_hooks(self._trial.module)
        if reason:
            return Independence(reason)
        self._reason = "it cannot be computed again"
        began = deadline.clock()
        with torch.no_grad():
            once = self._trial.run(self._trial.arguments)
        if not deadline.has_time(_FORWARDS, (deadline.clock() - began) * 1e9):
            return Independence(NO_TIME)
        is_random = any(map(differ, self._trial.random, random_states()))
        if any(map(_is_written, self._trial.leaves, once.given)):
            return Independence("it writes to its arguments")
        if not tensors_of(once.results):
            return Independence("its results are no tensors")
        try:
            whole = self._trial.run(self._trial.arguments)
        # Some models set `requires_grad` of what they compute from arguments without gradients.
        except STEP_ERRORS:
            self._trial.forces = False
            whole = self._trial.run(self._trial.arguments)
        if are_other(once.results, whole.results):
            return Independence("it computes something else again")
        del once
        self.repeats = True
        least, lists = 1, dict[str, bool]()
        reason = self._reason_of_state(whole) or self._reason_of_containers(whole)
        self._reason = reason or "it draws random numbers" * is_random
        reason = reason or self._reason_of_counts(whole)
        if not reason:
            self._trial.weights = [weights_of(one) for one in whole.results]
            whole, gradients = self._trial.with_gradients(whole)
            reason = self._reason_of_samples(whole, gradients)
        if not reason:
            lists = self._lists(size, whole, is_random)
            reason, least = self._reason_of_parts(size, whole, gradients, is_random)
        if not reason and (is_random or self._trial.draws_outside):
            reason = self._reason_of_numbers()
        self._is_alone = not reason
        return Independence(
            reason, True, self._count, self._shared, tuple(lists.items()), least, self._is_unaligned
        )

    def locality(self, axis: int, deadline: Deadline) -> Locality:
        """Find out whether the module may run in slabs, once `finding` has run."""
        if self._reason or deadline.is_over:
            return Locality(self._reason or NO_TIME_FOR_SLABS)
        arguments = self._trial.arguments
        if self._is_alone and self._count > 1:
            arguments = next(cut_up(arguments, [1, self._count - 1], self._cut, self._shared))
        return locality(self._trial, arguments, axis, deadline)

    def _reason_of_state(self, whole: Run) -> str:
        """Why what a call reads and leaves forbids micro-batches."""
        if self._trial.is_updating:
            return UPDATES
        if self._trial.draws_of_its_own:
            return "it draws from a generator of its own"
        with torch.no_grad():
            after = self._trial.run(self._trial.arguments, is_second=True)
        if changed := name_of_change(whole.left, after.left):
            return f"it changes {changed} each time"
        return "it depends on earlier calls" if are_other(whole.results, after.results) else ""

    def _reason_of_containers(self, whole: Run) -> str:
        """Why arguments or results forbid micro-batches."""
        is_same = len(whole.given) == len(whole.after) and all(
            a is b for a, b in zip(whole.given, whole.after, strict=True)
        )
        if not is_same:
            return "it writes to a list or dict that it is called with"
        for one in self._trial.leaves:
            if not isinstance(one, (Tensor, *CONSTANTS)) and values_in(one):
                return f"it is called with a {type(one).__name__}, which cannot be divided"
        held = {_memory(one) for one in self._trial.leaves if isinstance(one, Tensor)}
        held |= {_memory(one) for one in whole.given if isinstance(one, Tensor)}
        if any(_memory(one) in held for one in whole.results if isinstance(one, Tensor)):
            return "its results are views of its arguments"
        return ""

    def _reason_of_counts(self, whole: Run) -> str:
        """Why arguments or results have no samples to divide."""
        if self._count < 2:
            return ONE_SAMPLE if self._count else "it has no samples"
        if not all(map(self._is_divisible, whole.results)):
            return "its results are not one for each sample"
        return ""

    def _reason_of_samples(self, whole: Run, gradients: list[Any]) -> str:
        """Why samples depend on each other, in forward or in backward."""
        # All samples but one are replaced by NaN, or negated: the result of the unchanged sample
        # must stay the same, and so must its gradient if those of the others are NaN.
        kept = self._count // 2
        alone = self._trial.run(self._changed(kept, _no_numbers))
        if reason := self._reason_of_one(slice(kept, kept + 1), whole, gradients, alone):
            return reason
        with torch.no_grad():
            negated = self._trial.run(self._changed(0, torch.neg))
        if are_other(at(slice(1), whole.results), at(slice(1), negated.results)):
            return "its samples depend on each other"
        return ""

    def _lists(self, size: int, whole: Run, is_random: bool) -> dict[str, bool]:
        """The lists as long as the batch, and whether they are cut with the samples."""
        found = [*lists_in(self._trial.arguments, self._count)]
        if not found:
            return {}
        if is_random:
            with SameForSamples(), torch.no_grad():
                whole = self._trial.run(self._trial.arguments)
        ways = [(True,) * len(found), (False,) * len(found)]
        if len(found) <= _MOST_LISTS:
            ways = [*product((True, False), repeat=len(found))]
        size = min(size, self._count - 1)
        for way in ways:
            self._cut = {
                id(one): one for (_, one), is_cut in zip(found, way, strict=True) if is_cut
            }
            try:
                with SameForSamples() if is_random else nullcontext(), torch.no_grad():
                    part = next(self._runs([size, self._count - size]))
            except STEP_ERRORS:
                continue
            if not are_other(at(slice(0, size), whole.results), part.results):
                return dict(zip((place for place, _ in found), way, strict=True))
        self._cut = {}
        return dict.fromkeys((place for place, _ in found), False)

    def _reason_of_parts(
        self, size: int, whole: Run, gradients: list[Any], is_random: bool
    ) -> tuple[str, int]:
        """Why parts compute something else, and the least samples of a part."""
        # The first part is a single sample, as the last one of a batch may be.
        sizes, same, truth = [1, *_sizes(size, self._count - 1)], is_random, (whole, gradients)
        if same:
            with SameForSamples():
                truth = self._trial.with_gradients(self._trial.run(self._trial.arguments))
        reason = self._other_in_parts(sizes, *truth, same)
        if reason == _OTHER and same:
            # Numbers that are drawn with the samples elsewhere than in the first axis differ. Then
            # only sizes can be compared, and what a call leaves cannot be compared at all.
            self._is_unaligned, same, truth = True, False, (whole, gradients)
            if changed := name_of_change(self._trial.initial, whole.left):
                return f"{changed} is that of the batch", 1
            reason = self._other_in_parts(sizes, *truth, same)
        if not reason or self._count < 2 * _LEAST:
            return reason, 1
        size = max(_LEAST, min(size, self._count - _LEAST))
        again = Segment("", size, least=_LEAST).sizes(self._count)
        return self._other_in_parts(again, *truth, same), _LEAST

    def _other_in_parts(
        self, sizes: Sequence[int], whole: Run, gradients: list[Any], same_numbers: bool
    ) -> str:
        """Why parts of these sizes are not as the whole; "" if they are."""
        only_sizes = self._is_unaligned
        found: list[list[Any]] = []
        start = 0
        with SameForSamples() if same_numbers else nullcontext():
            for size, part in zip(sizes, self._runs(sizes), strict=True):
                where = slice(start, start + size)
                start += size
                if part.nest != whole.nest or are_other(
                    at(where, whole.results), part.results, only_sizes=only_sizes
                ):
                    return _OTHER
                if not only_sizes and (changed := name_of_change(whole.left, part.left)):
                    return f"{changed} is that of the batch"
                if only_sizes or not self._trial.is_training:
                    continue
                weights = [one if one is None else one[where] for one in self._trial.weights]
                found.append(self._trial.gradients(part, weights))
                # In a loop, the gradient of a result may have any layout.
                turned = (
                    self._trial.gradients(part, [*map(_turned, weights)])
                    if size == 1
                    else found[-1]
                )
                if are_other_gradients(found[-1], turned, self._trial.eps(whole)):
                    return "part of a batch gives other gradients"
        total = self._added(found, whole) if found else gradients
        is_other = are_other_gradients(gradients, total, self._trial.eps(whole))
        return "part of a batch gives other gradients" if is_other else ""

    def _added(self, parts: Sequence[Sequence[Any]], whole: Run) -> list[Any]:
        """Gradients of the batch from those of its parts."""
        total = []
        for n, column in enumerate(zip(*parts, strict=True)):
            given = [one for one in column if one is not None]
            if n < len(whole.leaves) and _has_rows(whole.leaves[n], self._count):
                total.append(torch.cat(given) if len(given) == len(parts) else None)
            else:
                total.append(sum(given[1:], given[0]) if given else None)
        return total

    def _reason_of_numbers(self) -> str:
        """Why random numbers forbid micro-batches: samples share them, or mix by chance."""
        with SameForSamples() as of_whole, torch.no_grad():
            whole = self._trial.run(self._trial.arguments)
        with SameForSamples() as of_part, torch.no_grad():
            next(self._runs([1, self._count - 1]))
        # What is drawn in the same shape for a part belongs to the batch, not to samples.
        common = {
            place for place, shapes in of_whole.drawn.items() if shapes == of_part.drawn.get(place)
        }
        for state in (1, 2):
            with SameForSamples(state, common), torch.no_grad():
                other = self._trial.run(
                    self._trial.arguments, state if self._trial.draws_outside else None
                )
            if are_other(whole.results, other.results):
                return "its samples share random numbers"
        # Mixing in some steps only: other random numbers than those of this step.
        kept = self._count // 2
        where = slice(kept, kept + 1)
        ends = []
        others: list[dict[str, Any]] = [{"seed": 1}, {"seed": 2}, {"seed": 3}]
        others += [{"outside": 1}, {"outside": 2}] if self._trial.draws_outside else []
        for how in others:
            found, gradients = self._trial.with_gradients(
                self._trial.run(self._trial.arguments, **how)
            )
            ends += [torch.get_rng_state()] if "seed" in how else []
            # No name keeps the graph of this run while the next one is computed.
            changed = self._changed(kept, _no_numbers)
            if reason := self._reason_of_one(
                where, found, gradients, self._trial.run(changed, **how)
            ):
                return f"{reason} in some steps"
        if any(map(torch.equal, ends[1:], ends)):
            return "it seeds the random numbers"
        return ""

    def _reason_of_one(self, where: slice, whole: Run, gradients: list[Any], alone: Run) -> str:
        """Why a sample depends on others, given a run in which the others hold no numbers."""
        if are_other(at(where, whole.results), at(where, alone.results)):
            return "its samples depend on each other"
        kept = partial(_all_but, where.start, _no_numbers)
        weights = [one if one is None else kept(one) for one in self._trial.weights]
        count = len(whole.leaves)
        mine = [_row_of(where, self._count, one) for one in gradients[:count]]
        others = self._trial.gradients(alone, weights)[:count]
        others = [_row_of(where, self._count, one) for one in others]
        if are_other_gradients(mine, others, self._trial.eps(whole)):
            return "its samples depend on each other in backward"
        return ""

    def _is_divisible(self, result: Any) -> bool:
        return isinstance(result, CONSTANTS) or _has_rows(result, self._count)

    def _changed(self, kept: int, change: Callable[[Tensor], Tensor]) -> Any:
        """The arguments with all samples but one changed."""
        leaves, nest = take_apart(self._trial.arguments)
        return put_together(
            [_all_but(kept, change, one) if _has_rows(one, self._count) else one for one in leaves],
            nest,
        )

    def _runs(self, sizes: Sequence[int]) -> Iterator[Run]:
        # As in a segment, parts are views of the batch, whose strides a copy may not have.
        leaves, nest = take_apart(self._trial.arguments, lambda one: id(one) in self._cut)
        whole = put_together([*map(cloned, leaves)], nest)
        for part in cut_up(whole, sizes, self._cut, self._shared):
            yield self._trial.run(part, is_copy=True)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _sizes(size: int, count: int) -> list[int]:
    return Segment("", size).sizes(count)


def _has_rows(leaf: Any, count: int) -> bool:
    return has_samples(leaf) and len(leaf) == count


def _turned(weights: Tensor | None) -> Tensor | None:
    """The same numbers in the other of torch's two layouts."""
    layout = None if weights is None else CHANNELS_LAST_BY_RANK.get(weights.dim() - 2)
    if weights is None or layout is None:
        return weights
    if weights.is_contiguous(memory_format=layout):
        layout = torch.contiguous_format
    shape = weights.shape
    # A single sample may be in both layouts at once, by strides that tell them apart.
    return torch.cat([weights, weights]).contiguous(memory_format=layout)[: shape[0]]


def _memory(tensor: Tensor) -> int:
    is_plain = tensor.layout is torch.strided and not tensor.is_nested
    return tensor.untyped_storage().data_ptr() if is_plain and tensor.numel() else id(tensor)


def _row_of(where: slice, count: int, gradient: Any) -> Any:
    return gradient[where] if _has_rows(gradient, count) else None


def _no_numbers(leaf: Tensor) -> Tensor:
    return torch.full_like(leaf, float("nan"))


def _all_but(kept: int, change: Callable[[Tensor], Tensor], leaf: Tensor) -> Tensor:
    """A batch in which all samples but `kept` are changed: integers to copies of that sample."""
    if is_real(leaf):
        others = change(leaf.detach())
        others[kept] = leaf.detach()[kept]
        return others.requires_grad_(leaf.requires_grad)
    return leaf[kept].expand_as(leaf).clone()


def _is_written(before: Any, after: Any) -> bool:
    """True if a copy of an argument was written to, even if its values stayed the same."""
    if not isinstance(after, Tensor):
        return False
    return bool(not after.is_inference() and after._version) or differ(before, after)
