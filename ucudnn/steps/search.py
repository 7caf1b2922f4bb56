"""Search for the segments of a step: divisions are foreseen, and the most promising ones run."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from time import perf_counter_ns
from typing import Any

import torch
from torch import nn

from ucudnn.backends import AbstractBackend
from ucudnn.benchmark.failures import free_after, is_out_of_memory
from ucudnn.benchmark.statistics import median_ns
from ucudnn.errors import ConfigError, first_line
from ucudnn.execution.micro_batching import is_sequence
from ucudnn.kernels.deadline import Deadline
from ucudnn.outcomes import Way
from ucudnn.segment import WHOLE, Segment, StepDivision, Stretch, is_inside, stretch_of
from ucudnn.solvers import Node, Option, OuterOption, SegmentTable, segment
from ucudnn.steps.foresee import Foreseer
from ucudnn.steps.independence import NO_TIME, UPDATES, Independence, examined
from ucudnn.steps.profile import ModuleCall, ModuleCost, ModuleWatcher, StepProfile
from ucudnn.steps.race import race, raced_of, tells
from ucudnn.steps.run import STEP_ERRORS, Steps, gradient_mode
from ucudnn.verdict import CLEARLY

# A module that could save less than this fraction of the peak of a step is no segment by itself; it
# counts as a part of the module around it.
_LEAST_SHARE = 0.01
# Sizes of micro-batches are the batch halved n times, for n below this number.
_MOST_HALVINGS = 7
# Resolution of the solver, as a fraction of the peak of the step: smaller differences of peaks do
# not matter.
_RESOLUTION = 1 / 4096
# If micro-batches are half as large, the whole batch is assumed to take 2 ** _SLOWER times as long,
# until such micro-batches are foreseen.
_SLOWER = 0.05
# Assumed bandwidth between a GPU and its host, in bytes per ns.
_LINK = 20
# Least number of steps for the trial of a division and its race: two for the trial, then for each
# of the two contestants one to warm up and one in a round.
_LEAST_STEPS = 6
# Largest number of divisions into segments that are foreseen for one limit.
_MOST_TRIALS = 12
# Stretches of a sequence that are considered have so many children.
_STRETCHES = (2, 3, 4, 6, 8, 12, 16, 24)
# The reason against micro-batches of one sample, as by InstanceNorm in channels_last (torch 2.13).
_OF_ONE = "a micro-batch of one sample has other gradients than in the batch"
# Of the steps that fit a limit, so many are timed again, in so many rounds.
_FASTEST, _ROUNDS = 3, 2
# Modules are examined on a part of the batch if the whole batch would need more memory than there
# is, as a multiple of the peak of a step; or more than this part of the time.
_OF_PEAK, _OF_STEP, _OF_TIME = 1.3, 8, 0.5
_LEAST_EXAMINED, _MOST_EXAMINED = 2, 8


@dataclass(eq=False)
class Seen:
    """A division of a step: what it is foreseen to take, and the times of real steps."""

    division: StepDivision
    profile: StepProfile
    times_ns: list[int] = field(default_factory=list)
    # The measured peak; 0 if no step was run.
    real_bytes: int = 0
    # False if no plan can be made for it.
    is_allowed: bool = True

    @property
    def peak_bytes(self) -> int:
        """The foreseen peak, all that is held included."""
        return self.profile.peak_bytes

    @property
    def time_ns(self) -> int:
        """The least measured time, or else the time that is foreseen."""
        return min(self.times_ns, default=self.profile.time_ns)

    def fits(self, limit: int) -> bool:
        """True if it may be planned, and is foreseen to have a peak within a limit."""
        return self.is_allowed and self.peak_bytes <= limit

    def cost(self, limit: int) -> tuple[bool, int, int]:
        """Sort key, less for the better step: bytes of the peak beyond a limit, then the time."""
        return not self.is_allowed, max(0, self.peak_bytes - limit), self.time_ns

    @property
    def way(self) -> Way:
        """This step in the form that a plan keeps."""
        segments, size = self.division
        took = self.peak_bytes, self.profile.time_ns, self.real_bytes, min(self.times_ns, default=0)
        if size is not None:
            inner = f", {len(segments)} segments" if segments else ""
            return Way("loop", f"loop, micro-batches of {size}{inner}", *took)
        if not segments:
            return Way("torch", "torch", *took)
        name = str(segments[0]) if len(segments) == 1 else f"{len(segments)} segments"
        return Way("segments", name, *took)


@dataclass
class _Known:
    """The estimated cost of a segment, and its cost in a step that was foreseen with it."""

    estimated: Option
    foreseen: Option | None = None


class SegmentSearch:
    """Searches for the best segments of one step.

    The costs of each module in the undivided step, which is foreseen, give estimates of what it
    would cost as a segment. The solver chooses segments by these estimates; the step with them is
    foreseen, too, which replaces estimates, until the solver chooses what was foreseen already. Of
    the steps foreseen to fit, the fastest is run, until the fastest one has been run.

    Attributes:
        seen: the steps that were foreseen; the first one is not divided.
        findings: what was found out about each module that was examined, by its name.
        deadline: the argument of this name; callers may set it anew.

    Args:
        foreseer: foresees steps of the model.
        deadline: after it, no more steps are run.
    """

    def __init__(self, foreseer: Foreseer, deadline: Deadline | None = None) -> None:
        self._foreseer = foreseer
        self._is_training, self._backend = foreseer.is_training, foreseer.backend
        self._modules: Mapping[str, nn.Module] = foreseer.modules
        self.deadline = deadline or Deadline.never()
        self.findings: dict[str, Independence] = {}
        # Modules that must not be recomputed selectively, with the reason.
        self._unselective: dict[str, str] = {}
        self._failed: set[StepDivision] = set()
        # By segment and the number of the call of its module in the step.
        self._known: dict[tuple[Segment, int], _Known] = {}
        # Ratios of measured to foreseen times, by the keys of `_alike`.
        self._ratios: dict[Any, list[float]] = {}
        self._own = foreseer.step()
        self.seen = [Seen(WHOLE, self._own)]
        # What each call of a module costs with selective recomputation.
        self._selective: dict[tuple[str | None, int], ModuleCost] = {}
        if self._is_training:
            everywhere = StepDivision((Segment("", None, recompute=False, selective=True),))
            # A model that writes into the input of a normalisation cannot do without its result.
            try:
                # The arguments of a module whose calls are noted are views, by which selective
                # recomputation does not know the results that they are views of.
                profile = foreseer.step(everywhere, names=foreseer.holders)
            except STEP_ERRORS:
                pass
            else:
                self.seen.append(Seen(everywhere, profile))
                self._selective = {one.key: profile.cost(one) for one in profile.root.walk()}
        self._samples: dict[str, int] = {}
        self._root = self._tree(self._own.root)
        self._steps: Steps | None = None
        self._examined_batch = 0
        # Calls of modules in a step of the examined part; None: not looked at yet.
        self._part: dict[tuple[str | None, int], ModuleCall] | None = None
        # True: no step is run; what is foreseen decides.
        self.is_dry = False
        # The search by which modules are examined, if it is not this one.
        self._outer: SegmentSearch | None = None

    @property
    def batch(self) -> int:
        """Samples of the step."""
        return self._foreseer.batch

    def ways(self) -> tuple[Way, ...]:
        """The ways to run a step that were foreseen."""
        return tuple(one.way for one in self.seen)

    def reasons(self) -> tuple[tuple[str, str], ...]:
        """Modules that cannot run in micro-batches or be recomputed, each with the reason."""
        found = [(name, one.reason) for name, one in self.findings.items() if one.reason]
        found += [(name, _OF_ONE) for name, one in self.findings.items() if one.least > 1]
        return (*found, *self._unselective.items())

    def exclude(self, one: Segment, reason: str) -> None:
        """Let no further division run a module as this segment does."""
        if one.selective and not one.recompute:
            self._unselective[one.module] = reason
            return
        found = self.findings.get(one.module, Independence(repeats=True))
        repeats = found.repeats and one.micro_batch is not None
        self.findings[one.module] = replace(found, reason=found.reason or reason, repeats=repeats)

    def forget(self, causes: Collection[Segment]) -> None:
        """Leave out the steps that were foreseen with any of these segments."""
        self.seen = [one for one in self.seen if not set(causes) & {*one.division.segments}]

    def leave_out(self, division: StepDivision) -> None:
        """Take no step by this division."""
        for one in self.seen:
            one.is_allowed &= one.division != division

    def is_unaligned(self, division: StepDivision) -> bool:
        """True if random numbers of divided modules cannot be made the same for each sample."""
        names = {one.module for one in division.segments if one.micro_batch is not None}
        names |= {""} if division.micro_batch is not None else set()
        return any(self.findings[name].is_unaligned for name in names if name in self.findings)

    def _tree(self, root: ModuleCall) -> ModuleCall:
        """The tree of those calls only that may be segments; their estimated costs are noted."""
        least = _LEAST_SHARE * self._own.own_bytes

        def matters(call: ModuleCall) -> bool:
            if not call.samples:
                return False
            cost = self._own.cost(call)
            if not self._is_training:
                return cost.forward_bytes - call.result_bytes >= least
            return len(call.backward) == 2 and cost.kept_bytes - call.result_bytes >= least

        def pruned(call: ModuleCall, *, is_kept: bool) -> Iterator[ModuleCall]:
            # Stretches of a sequence are told by the places of all its children.
            keeps = self._is_sequence(call.name)
            children = [one for child in call.children for one in pruned(child, is_kept=keeps)]
            if is_kept or matters(call):
                yield replace(call, children=children)
            else:
                yield from children

        (top,) = pruned(root, is_kept=True)
        for call in top.walk():
            if call.name is not None and matters(call):
                self._estimate(call)
                for one in self._stretches_of(call):
                    if matters(one):
                        self._estimate(one)
        return top

    def _is_sequence(self, name: str | None) -> bool:
        return name is not None and is_sequence(self._modules[name])

    def _stretches_of(self, call: ModuleCall) -> list[ModuleCall]:
        """Stretches of a sequence, each as one call; none if it is no sequence."""
        children = call.children
        is_whole = self._is_sequence(call.name) and len(children) == len(
            self._modules[call.name or ""]._modules
        )
        if not is_whole or not call.is_nested:
            return []
        found = []
        for size in (one for one in _STRETCHES if one < len(children)):
            for begin in range(0, len(children) - 1, size):
                inner = children[begin : begin + size]
                first, last = inner[0], inner[-1]
                if len(inner) > 1 and all(len(one.backward) == 2 for one in inner):
                    name = str(Stretch(call.name or "", begin, begin + len(inner)))
                    found.append(
                        ModuleCall(
                            name,
                            [first.forward[0], last.forward[1]],
                            [last.backward[0], first.backward[1]],
                            inner,
                            first.samples,
                            last.result_bytes,
                            first.argument_bytes,
                            call.number,
                        )
                    )
        return found

    def _parameters_of(self, name: str) -> Iterator[nn.Parameter]:
        stretch = stretch_of(name) if name not in self._modules else None
        if stretch is None:
            yield from self._modules[name].parameters()
            return
        children = [*self._modules[stretch.module].children()]
        for child in children[stretch.begin : stretch.end]:
            yield from child.parameters()

    def _estimate(self, call: ModuleCall) -> None:
        """Note each segment that this call could be run as, with its estimated cost."""
        assert call.name is not None
        cost, name = self._own.cost(call), call.name
        self._samples[name] = call.samples
        gradients = sum(
            one.numel() * one.element_size()
            for one in self._parameters_of(name)
            if one.requires_grad
        )
        selective = self._selective.get(call.key, cost)
        # Modules without normalisations and activation functions gain nothing.
        gains = selective.kept_bytes < cost.kept_bytes
        options = []
        if gains:
            one = Segment(name, None, recompute=False, selective=True)
            options.append(selective.option(one))
        for size in _halved(call.samples):
            part = size / call.samples
            if self._is_training:
                count = -(-call.samples // size)
                for kept in _kept_of(count):
                    one = Segment(name, size if count > 1 else None, kept=kept)
                    options.append(_recomputed(call, cost, part, gradients, one))
                    if gains:
                        one = replace(one, selective=True)
                        options.append(_recomputed(call, selective, part, gradients, one))
            elif part < 1:
                one = Segment(name, size, recompute=False)
                peak = call.result_bytes + round(part * cost.forward_bytes)
                time_ns = round(cost.forward_ns * part**-_SLOWER)
                options.append(Option(cost.kept_bytes, peak, time_ns, one))
        if self._is_training and self._backend.device().type == "cuda":
            one = Segment(name, None, recompute=False, offload=True)
            moved = cost.kept_bytes - call.result_bytes
            time_ns = cost.forward_ns + cost.backward_ns + 2 * moved // _LINK
            peak = max(cost.forward_bytes, cost.backward_bytes - moved)
            options.append(Option(call.result_bytes, peak, time_ns, one))
        self._known |= {(option.choice, call.number): _Known(option) for option in options}

    def table(self) -> SegmentTable:
        """The divisions that no other beats in both peak and time, by the costs known so far."""
        resolution = max(1, round(self._own.own_bytes * _RESOLUTION))
        return segment(self._node(self._root), resolution)

    def _node(self, call: ModuleCall) -> Node:
        options = self._options(call)
        if not (call.children and call.is_nested):
            return Node((self._own.cost(call).option(None), *options))
        between = [Node((option,)) for option in self._own.between(call)]
        children = [between[0]]
        for child, after in zip(call.children, between[1:], strict=True):
            children += [self._node(child), after]
        stretches = []
        for one in self._stretches_of(call):
            found = self._options(one)
            stretch = stretch_of(one.name or "")
            assert stretch is not None
            # Between two children, and before the first one, there is a node of its own.
            begin, end = 2 * stretch.begin + 1, 2 * stretch.end
            inside = Node(children=tuple(children[begin:end]))
            outer = self._outer_options(one, inside)
            if found or outer:
                stretches.append((begin, end, Node(tuple(found), outer=outer)))
        inside = Node(children=tuple(children), stretches=tuple(stretches))
        outer = self._outer_options(call, inside)
        return Node(tuple(options), inside.children, outer, inside.stretches)

    def _options(self, call: ModuleCall) -> list[Option]:
        return [
            self._option(known)
            for (one, number), known in self._known.items()
            if one.module == call.name and number == call.number and self._may_be(one)
        ]

    def _outer_options(self, call: ModuleCall, inside: Node) -> tuple[OuterOption, ...]:
        """A call recomputed as a whole, around a division of its inside."""
        if not (call.name and call.children and self._is_training):
            return ()
        one = Segment(call.name, None)
        if (one, call.number) not in self._known or not self._may_be(one):
            return ()
        cost, result = self._own.cost(call), call.result_bytes
        # In the first forward, nothing is kept but the result of each child.
        peak = max(
            self._own.cost(child).forward_bytes + child.argument_bytes for child in call.children
        )
        return (OuterOption(result, result + peak, cost.forward_ns, one, inside, result),)

    def _may_be(self, one: Segment) -> bool:
        if one.selective and one.module in self._unselective:
            return False
        is_cut = one.micro_batch is not None
        if is_cut and any(is_inside(name, one.module) for name in self._updating):
            return False
        found = self.findings.get(one.module)
        return found is None or found.allows(one)

    @property
    def _updating(self) -> list[str]:
        """Modules that update buffers, so that none around them can run in micro-batches."""
        return [name for name, one in self.findings.items() if one.reason == UPDATES]

    def _innermost(self) -> dict[str, int]:
        """Modules that may be segments and have none inside, each with a size of micro-batches."""
        names = {one.module for one, _ in self._known}
        outer = [name for name in names if any(is_inside(other, name) for other in names)]
        return dict.fromkeys(names.difference(outer), 1)

    def _option(self, known: _Known) -> Option:
        found = known.foreseen or known.estimated
        ratios = next(filter(None, map(self._ratios.get, self._alike(found.choice))), None)
        return replace(found, time_ns=round(found.time_ns * median(ratios))) if ratios else found

    def _alike(self, one: Segment) -> tuple[Any, ...]:
        """Whose ratios to trust for a segment: those of the same module, then of the same kind."""
        size = one.micro_batch
        count = 1 if size is None else -(-self._samples[one.module] // size)
        return (one.module, size, one.selective), (count, one.recompute, one.selective)

    def is_over(self, steps: int) -> bool:
        """True if there is no time for `steps` more steps."""
        return not self.deadline.has_time(steps, max(one.time_ns for one in self.seen))

    def within(self, limit: int, *, inside: bool = False) -> Seen:
        """The fastest step with segments that is foreseen to fit a limit, after steps were run.

        If no step fits, the one with the smallest peak is returned, which was not run.

        Args:
            limit: largest peak in bytes, all that is held included.
            inside: True: if no step fits, also try segments inside micro-batches.
        """
        while True:
            self._solve(limit)
            for kept in (1, 0) if inside else ():
                # Backward begins with the last micro-batch, so keeping it needs no additional
                # memory, unless the results of the model are large.
                if not self._best(limit).fits(limit) and not self.reason_against_parts():
                    self._go_inside(limit, kept)
            best = self._best(limit)
            fitting = [one for one in self._candidates() if one.fits(limit)]
            if self.is_dry or not fitting or best.times_ns or self.is_over(2):
                break
            if self._foreseer.can_run(best.profile):
                self.run(best)
            else:
                best.is_allowed = False
        self._time_again(limit)
        return self._best(limit)

    def _solve(self, limit: int) -> None:
        """Foresee what the solver chooses, until it chooses what was foreseen already."""
        room = limit - self._own.held.total
        for _ in range(_MOST_TRIALS):
            table = self.table()
            least_ns = table.time_ns(max(room, table.smallest_bytes)) or 0
            found_ns = [one.profile.time_ns for one in self._candidates() if one.fits(limit)]
            # What fits already is as fast as the solver hopes, or there is no time to look further.
            if found_ns and (min(found_ns) * CLEARLY <= least_ns or self.deadline.is_over):
                break
            options = table.choose(max(room, table.smallest_bytes))
            chosen = _one_for_each([option for option in options if option.choice is not None])
            self.examine({one.module: one.micro_batch or 1 for one in chosen})
            if not all(map(self._may_be, chosen)):
                # What holds for a module holds for all modules and stretches around it.
                self.examine(self._innermost())
                continue
            division = StepDivision(tuple(map(self._described, chosen)))
            is_new = all(one.division != division for one in self.seen)
            has_failed = division in self._failed
            found = self.foresee(division)
            if found is None or is_new:
                # Of a step for which there was no memory, its costs say nothing new.
                room -= room // 8 if has_failed else 0
                continue
            # Segments inside others, and modules that run several times, have no costs of their
            # own in a step with them. So the solver does not learn what they cost, and gets less
            # room instead.
            if found.fits(limit) or room <= table.smallest_bytes:
                break
            room -= found.peak_bytes - limit

    def _candidates(self) -> list[Seen]:
        """The steps that were foreseen, without loops over micro-batches."""
        return [one for one in self.seen if one.division.micro_batch is None]

    def _best(self, limit: int) -> Seen:
        return min(self._candidates(), key=lambda one: one.cost(limit))

    def smallest(self, *, loop: bool) -> Seen:
        """The step with the smallest peak, which is a loop only if loops are allowed."""
        steps = [one for one in self.seen if loop or one.division.micro_batch is None]
        return min(steps, key=lambda one: (not one.is_allowed, one.peak_bytes))

    def _time_again(self, limit: int) -> None:
        """Time the fastest steps within a limit again, as long as there is time.

        A single time is noisy, and of several times of a step the least is the best estimate.
        """
        fitting = [one for one in self._candidates() if one.times_ns and one.fits(limit)]
        fitting.sort(key=lambda one: one.time_ns)
        for one in (fitting[:_FASTEST] if len(fitting) > 1 else []) * _ROUNDS:
            if self.is_over(1):
                break
            try:
                one.times_ns.append(self.elapsed_ns(one.division))
            except STEP_ERRORS as error:
                if not is_out_of_memory(error):
                    raise
                free_after(error)
                break

    def _go_inside(self, limit: int, kept: int | None) -> None:
        """Foresee micro-batches of one sample of the model, of two, of four, with segments inside.

        Larger micro-batches are faster, so the size grows until a step does not fit the limit.
        The last `kept` micro-batches are not recomputed; None: a loop, which recomputes none.
        """

        def division(size: int, inner: tuple[Segment, ...]) -> StepDivision:
            if kept is None:
                return StepDivision(inner, size)
            # The whole model in the inner step is a micro-batch of the outer one.
            is_selective = any(not one.module and one.selective for one in inner)
            outer = Segment("", size, kept=kept, selective=is_selective)
            within = (one for one in inner if one.module)
            return StepDivision((self._described(outer), *within))

        size = self.findings[""].least
        while self._is_training and size < self.batch:
            outer = self.foresee(division(size, ()))
            if outer is None:
                break
            inner = SegmentSearch(self._foreseer.of_batch(size), self.deadline)
            inner.share_with(self)
            room = limit - max(0, outer.peak_bytes - inner.seen[0].peak_bytes)
            for is_first in (True, False, False):
                inner._solve(max(0, room))
                segments = inner._best(max(0, room)).division.segments
                last = self.foresee(division(size, segments))
                if last is None or last.peak_bytes <= limit or room <= 0:
                    break
                # Beside the current micro-batch, the step may hold more memory than estimated. So
                # the second attempt leaves more room for that. The third and last attempt takes the
                # segments with the smallest peak.
                room = room - 2 * (last.peak_bytes - limit) if is_first else 0
            if last is None or last.peak_bytes > limit:
                break
            size *= 2

    def share_with(self, other: SegmentSearch) -> None:
        """Use what another search finds out about modules."""
        self.findings, self._unselective, self._outer = other.findings, other._unselective, other

    def in_parts(self, limit: int | None = None, *, inside: bool = False) -> Seen | None:
        """The fastest loop over micro-batches that fits, after steps of it were run, or None.

        Args:
            limit: largest peak, as for `within`; None: no limit.
            inside: as for `within`.

        Raises:
            ConfigError: the model cannot run on parts of a batch.
        """
        reason = self.reason_against_parts()
        if reason:
            raise ConfigError(f"loop runs a model on parts of the batch, and {reason}")

        def fitting() -> list[Seen]:
            loops = (one for one in self.seen if one.division.micro_batch)
            return [one for one in loops if one.is_allowed and (limit is None or one.fits(limit))]

        self.foresee_loops()
        if inside and limit is not None and not fitting():
            self._go_inside(limit, None)
        while fitting():
            best = min(fitting(), key=lambda one: one.time_ns)
            if self.is_dry or best.times_ns or self.is_over(2):
                return min(fitting(), key=lambda one: (not one.times_ns, one.time_ns))
            if self._foreseer.can_run(best.profile):
                self.run(best)
            else:
                best.is_allowed = False
        return None

    def foresee_loops(self) -> None:
        """Foresee loops over micro-batches of each size, if the model can run on parts."""
        if not self.reason_against_parts():
            for size in _halved(self.batch)[1:]:
                self.foresee(StepDivision(micro_batch=size))

    def reason_against_parts(self) -> str:
        """Why the model cannot run on parts of a batch one by one; "" if it can."""
        self.examine({"": max(1, self.batch // 2)})
        found = self.findings[""]
        if found.reason:
            return f"of this model {found.reason}"
        # A copy of the model has no hooks of parameters.
        if any(one._backward_hooks for one in self._foreseer.model.parameters()):
            return "hooks of its parameters would see gradients of parts"
        if found.least > 1:
            return f"of this model {_OF_ONE}"
        is_first = found.samples == self._examined_batch
        return "" if is_first else "its samples are not those of its first tensor"

    def faster(self, loop: bool = False) -> StepDivision:
        """The division that makes steps faster beyond the noise; `WHOLE` if there is none.

        Its peak is no larger than that of an undivided step.

        Args:
            loop: True: also try loops over micro-batches.
        """
        own = self.seen[0]
        if self.reason_against_parts():
            return WHOLE
        self.run(own)
        self.try_sizes(loop)
        tried = [one for one in self.seen if one.times_ns]
        fastest = min(tried, key=lambda one: one.cost(own.peak_bytes))
        if fastest.time_ns > own.time_ns * CLEARLY:
            return WHOLE
        # Of the divisions that take about as long, the one with the smallest peak.
        most_ns = min(own.time_ns * CLEARLY, fastest.time_ns / CLEARLY)
        best = min((one for one in tried if one.time_ns <= most_ns), key=lambda one: one.peak_bytes)
        samples = race(
            [partial(self.elapsed_ns, one) for one in (WHOLE, best.division)],
            self.is_over,
            lambda samples: tells(samples[1], samples[0]),
        )
        return best.division if raced_of(*samples).pays else WHOLE

    def faster_of(self, one: Seen, other: Seen) -> Seen:
        """The faster of two steps, which take turns; `seen` keeps the times of this race."""
        if one is other:
            return one
        try:
            samples = race(
                [partial(self.elapsed_ns, step.division) for step in (one, other)],
                self.is_over,
                lambda samples: tells(*samples),
                is_warm=True,
            )
        except STEP_ERRORS as error:
            if not is_out_of_memory(error):
                raise
            free_after(error)
            # Steps that were run before have shown that there is memory for them.
            return min((one, other), key=lambda step: (not step.times_ns, step.time_ns))
        for step, times in zip((one, other), samples, strict=True):
            step.times_ns = [median_ns(times)]
        return min((one, other), key=lambda step: step.time_ns)

    def steps(self, division: StepDivision = WHOLE) -> Steps:
        """Steps on the copy of the model, divided in this way until the next call."""
        if self._steps is None:
            one = self._foreseer
            self._steps = Steps(one.model, one.inputs, self._is_training)
        self._steps.divide(division)
        return self._steps

    def elapsed_ns(self, division: StepDivision) -> int:
        """Time in ns of a step by a division."""
        steps = self.steps(division)
        with gradient_mode(self._is_training):
            return self._backend.elapsed_ns(steps)

    def examine(self, sizes: Mapping[str, int]) -> None:
        """Find out which modules may run in micro-batches; `sizes` has a size for each module."""
        left = {name: size for name, size in sizes.items() if name not in self.findings}
        if self._outer is not None:
            self._outer.examine(left)
        elif left and self.deadline.is_over:
            self.findings.update(dict.fromkeys(left, Independence(NO_TIME)))
        elif left:
            samples = self._batch_to_examine()
            while (found := self._examined(left, samples)) is None and samples > _LEAST_EXAMINED:
                samples //= 2
            # What could not be found out for lack of memory is not assumed.
            unknown = Independence("there is no memory to find out whether it may run in parts")
            self.findings.update(found or dict.fromkeys(left, unknown))

    def _examined(
        self, sizes: Mapping[str, int], samples: int
    ) -> Mapping[str, Independence] | None:
        """What is found out in a step of so many samples; None if there is no memory for it."""
        self._examined_batch = samples
        steps = self.steps()
        try:
            with gradient_mode(self._is_training):
                deadline = self.deadline.part(_OF_TIME)
                return examined(steps.model, partial(steps.forward, samples), sizes, deadline)
        except STEP_ERRORS as error:
            if not is_out_of_memory(error):
                raise
            free_after(error)
            return None

    def _batch_to_examine(self) -> int:
        """Samples of the steps in which modules are examined: as many as memory and time allow."""
        samples, own = self.batch, self._own
        while samples > _MOST_EXAMINED:
            samples //= 2
        while samples >= 2 * _LEAST_EXAMINED:
            part = samples / max(1, self.batch)
            needs = _OF_PEAK * part * own.own_bytes
            has_time = self.deadline.part(_OF_TIME).has_time(_OF_STEP * part, own.time_ns)
            if needs <= self._foreseer.free_bytes and has_time:
                break
            samples //= 2
        return samples

    def _described(self, one: Segment) -> Segment:
        """The segment with the fields `shared` and `training` filled in for its module."""
        if self._outer is not None:
            return self._outer._described(one)
        described = self.findings[one.module].described(one)
        if one.micro_batch is None or self._examined_batch >= self.batch:
            return described
        shared = {*described.shared, *self._as_long_by_chance(one.module)}
        return replace(described, shared=tuple(sorted(shared)))

    def _as_long_by_chance(self, name: str) -> Iterator[int]:
        """Places of arguments that are as long as the batch, and were not in the examined part."""
        stretch = None if name in self._modules else stretch_of(name)
        if stretch is not None:
            return  # each of its children has one argument
        if self._part is None:
            part = self._foreseer.of_batch(self._examined_batch).step()
            self._part = {call.key: call for call in part.root.walk()}
        for call in self._own.root.walk():
            other = self._part.get(call.key)
            if call.name != name or other is None or len(call.rows) != len(other.rows):
                continue
            for place, (rows, few) in enumerate(zip(call.rows, other.rows, strict=True)):
                if rows == call.samples and few != other.samples:
                    yield place

    def foresee(self, division: StepDivision) -> Seen | None:
        """Foresee a step by a division, if it was not, and note what its segments cost.

        Returns None if the step fails: the segments that are the cause are excluded.
        """
        for seen in self.seen:
            if seen.division == division:
                return seen
        if division in self._failed:
            return None
        names = _by_module(division)
        try:
            profile = self._foreseer.step(division, names=names)
        except STEP_ERRORS as error:
            self._failed.add(division)
            self.exclude_the_cause(division, error)
            return None
        for call in profile.root.walk():
            if known := self._known_of(call, names):
                known.foreseen = profile.cost(call).option(known.estimated.choice)
        self.seen.append(Seen(division, profile))
        return self.seen[-1]

    def run_if_fits(self, seen: Seen) -> None:
        """Run two steps by a division as `run` does, if there is memory for them."""
        if not self.is_dry and self._foreseer.can_run(seen.profile):
            self.run(seen)

    def run(self, seen: Seen) -> None:
        """Run two steps by a division: for its real peak, and for the time of each segment.

        A step that fails is left out, and the segments that are the cause are excluded.
        """
        names = _by_module(seen.division)
        try:
            steps = self.steps(seen.division)
            gc.collect()  # what earlier steps left in cycles must not be freed in this one
            with gradient_mode(self._is_training):
                spans = self._backend.spans(lambda _: steps())
                assert spans is not None
                seen.real_bytes = seen.profile.held.total + max(one.peak_bytes for one in spans)
                root, times = _timed(steps, names, self._backend)
        except STEP_ERRORS as error:
            self._failed.add(seen.division)
            self.seen.remove(seen)
            if is_out_of_memory(error):
                free_after(error)
            else:
                self.exclude_the_cause(seen.division, error)
            return
        seen.times_ns.append(times[-1] - times[0])
        for call in root.walk():
            known = self._known_of(call, names)
            if known is not None and known.foreseen is not None:
                took = sum(times[b] - times[a] for a, b in (call.forward, call.backward or (0, 0)))
                ratio = took / max(1, known.foreseen.time_ns)
                for alike in self._alike(known.foreseen.choice):
                    self._ratios.setdefault(alike, []).append(ratio)

    def _known_of(self, call: ModuleCall, names: Mapping[str, Segment]) -> _Known | None:
        return (
            None if call.name is None else self._known.get((_plain(names[call.name]), call.number))
        )

    def exclude_the_cause(self, division: StepDivision, error: BaseException) -> None:
        """Exclude the segments by which, each alone, a step fails; or else the innermost one."""
        causes: dict[Segment, BaseException] = {}
        for one in division.segments if len(division.segments) > 1 else ():
            try:
                self._foreseer.step(StepDivision((one,)), names=())
            except STEP_ERRORS as alone:
                causes[one] = alone
        if not causes and division.segments:
            innermost = [
                one
                for one in division.segments
                if not any(is_inside(other.module, one.module) for other in division.segments)
            ]
            causes = {innermost[0]: error}
        for one, cause in causes.items():
            self.exclude(one, f"a step with it fails ({first_line(cause)})")

    def try_sizes(self, loop: bool = False) -> None:
        """Run steps of the whole model in micro-batches of each size, while there is time.

        Args:
            loop: True: also run loops over micro-batches.
        """
        for size in _halved(self.batch)[1:]:
            one = self._described(Segment("", size, recompute=False))
            for division in (StepDivision((one,)), StepDivision(micro_batch=size))[: 1 + loop]:
                seen = self.foresee(division)
                if seen is not None and not self.is_over(_LEAST_STEPS):
                    self.run_if_fits(seen)

    def in_blocks(self) -> Seen | None:
        """A step in which each block is recomputed as a whole, as by torch.utils.checkpoint.

        A block is a module that keeps at most half of what the step keeps and is no nn.Sequential,
        or any module inside which nothing may be a segment. Returns None if there are no blocks.
        """
        most = self._own.cost(self._root).kept_bytes // 2

        def blocks(call: ModuleCall) -> Iterator[str]:
            kept = self._own.cost(call).kept_bytes
            is_sequence = call.name is None or isinstance(self._modules[call.name], nn.Sequential)
            inside = (one.name for child in call.children for one in child.walk())
            # Calls that matter for stretches alone are no segments.
            is_innermost = self._samples.keys().isdisjoint(inside)
            if call.name and (is_innermost or not (is_sequence or kept > most)):
                if call.name in self._samples:
                    yield call.name
                return
            for child in call.children:
                yield from blocks(child)

        segments = [Segment(name, None) for name in dict.fromkeys(blocks(self._root))]
        self.examine({one.module: 1 for one in segments})
        segments = [self._described(one) for one in segments if self._may_be(one)]
        return self.foresee(StepDivision(tuple(segments))) if segments else None


def _one_for_each(options: Sequence[Option | OuterOption]) -> list[Segment]:
    """One segment for each module, of which several calls may have different ones.

    Of these, the one that keeps least is taken.
    """
    found: dict[str, Option | OuterOption] = {}
    for option in options:
        name = option.choice.module
        if name not in found or option.kept_bytes < found[name].kept_bytes:
            found[name] = option
    return [option.choice for option in found.values()]


def _by_module(division: StepDivision) -> dict[str, Segment]:
    """The segments that have costs of their own in a step: those around or inside no other one."""
    names = {one.module: one for one in division.segments}
    if division.micro_batch is not None:
        return {}
    return {
        name: one
        for name, one in names.items()
        if not any(is_inside(name, other) or is_inside(other, name) for other in names)
    }


def _plain(one: Segment) -> Segment:
    """A segment without what was found out about its module."""
    return replace(one, shared=(), training=None, lists=None, inference=(), least=1)


def _timed(
    steps: Steps, names: Collection[str], backend: AbstractBackend
) -> tuple[ModuleCall, list[int]]:
    """Run a step; return the calls of named modules, and the times of their marks in ns."""
    times: list[int] = []
    is_gpu = backend.device().type == "cuda"

    def clock() -> None:
        if is_gpu:
            torch.cuda.synchronize()
        times.append(perf_counter_ns())

    watcher = ModuleWatcher(steps.model, names, clock)
    watcher.run(steps)
    return watcher.root, times


def _halved(samples: int) -> list[int]:
    """Sizes of micro-batches: all samples, half of them, a quarter and so on."""
    return [samples >> n for n in range(_MOST_HALVINGS) if samples >> n]


def _kept_of(count: int) -> list[int]:
    """Out of `count` micro-batches, the numbers that segments may keep and not recompute."""
    return sorted({0, 1, count // 4, count // 2, 3 * count // 4}) if count > 1 else [0]


def _recomputed(
    call: ModuleCall, cost: ModuleCost, part: float, gradients: int, one: Segment
) -> Option:
    """The estimated cost of a call as a segment that recomputes the micro-batches it does not keep.

    `cost` is that of the call in the undivided step, `part` the fraction of the batch that a
    micro-batch has, and `gradients` the bytes of the gradients of the module's parameters.
    """
    result = call.result_bytes
    inside = round(part * (cost.kept_bytes - result))
    # The last micro-batch, which is kept first of all, may be smaller than the others.
    size = one.micro_batch or call.samples
    recomputed = (-(-call.samples // size) - one.kept) * size
    kept_part = (call.samples - recomputed) / call.samples if one.kept else 0
    kept = round(kept_part * (cost.kept_bytes - result))
    beside = min(cost.beside_bytes + gradients, cost.backward_bytes)
    transient = max(0, cost.backward_bytes - cost.kept_bytes - beside)
    # In forward, the results of all micro-batches and the whole result that they are copied into
    # are in memory at once.
    forward = (2 if part < 1 else 1) * result + round(part * cost.forward_bytes)
    forward += max(0, kept - inside)
    # In backward, the kept micro-batches come first; the others use the memory that these free. At
    # its end, the gradients of all micro-batches are copied into the gradient of the argument.
    backward = max(kept, inside) + round(part * transient + (1 - part) * call.argument_bytes)
    if part < 1:
        backward = max(backward, 2 * call.argument_bytes)
    backward += result + beside
    # Smaller micro-batches are assumed to be slower (`_SLOWER`). So of several sizes that fit, the
    # largest is tried first.
    forward_ns = (2 - kept_part) * cost.forward_ns
    time_ns = round((forward_ns + cost.backward_ns) * part**-_SLOWER)
    return Option(result + kept, max(forward, backward), time_ns, one)
