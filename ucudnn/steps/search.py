"""Search for the segments of a step: their costs are estimated from a profile, then measured."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from statistics import median
from time import monotonic
from typing import Any, NamedTuple

import torch
from torch import nn

from ucudnn.backends import AbstractBackend, open_backend
from ucudnn.benchmark.statistics import median_ns
from ucudnn.config import Config
from ucudnn.errors import ConfigError, first_line
from ucudnn.execution.compiling import is_compiled
from ucudnn.kernels.budget import EFFORTS
from ucudnn.outcomes import Way
from ucudnn.segment import WHOLE, Segment, StepDivision
from ucudnn.solvers import Node, Option, SegmentTable, segment
from ucudnn.steps.independence import Independence, examined
from ucudnn.steps.module_profile import ModuleCall, ModuleCost, ModuleProfile, profiled
from ucudnn.steps.race import race, raced_of, tells
from ucudnn.steps.run import (
    STEP_ERRORS,
    Steps,
    gradient_mode,
    parts_of,
    reason_against_steps,
    undisturbed,
)
from ucudnn.steps.tracing import Traced

# A module that could save less than this fraction of the peak of a step is no segment by itself; it
# counts as a part of the module around it.
_LEAST_SHARE = 0.01
# Sizes of micro-batches are the batch halved n times, for n below this number.
_MOST_HALVINGS = 7
# Resolution of the solver, as a fraction of the peak of the step: smaller differences of peaks do
# not matter.
_RESOLUTION = 1 / 4096
# If micro-batches are half as large, the whole batch is assumed to take 2 ** _SLOWER times as long,
# until such micro-batches are timed.
_SLOWER = 0.05
# Assumed bandwidth between a GPU and its host, in bytes per ns.
_LINK = 20
# A single step by one way counts as clearly faster than by another if it takes no more than this
# fraction of the time.
CLEARLY = 0.95
# Least number of steps for the trial of a division and its race: two to profile it, then for each
# of the two contestants one to warm up and one in a round.
_LEAST_STEPS = 6
# Roughly the number of estimated ways (points of the front of a step) that are shown.
_SHOWN = 16
# Largest number of divisions into segments that are tried for one limit.
_MOST_TRIALS = 8
# The reason against micro-batches of one sample, as by InstanceNorm in channels_last (torch 2.13).
_OF_ONE = "a micro-batch of one sample has other gradients than in the batch"
# Of the steps that fit a limit, so many are timed again, in so many rounds.
_FASTEST, _ROUNDS = 3, 2


class Seen(NamedTuple):
    """A step that was run."""

    division: StepDivision
    peak_bytes: int  # the most that it allocated, above what was allocated before it
    time_ns: int

    def cost(self, limit: int) -> tuple[int, int]:
        """Sort key, less for the better step: bytes of the peak beyond a limit, then the time."""
        return max(0, self.peak_bytes - limit), self.time_ns

    def way(self, held_bytes: int) -> Way:
        """This step in the form that a plan keeps; `held_bytes` are allocated all through it."""
        segments, size = self.division
        peak = self.peak_bytes + held_bytes
        if size is not None:
            inner = f", {len(segments)} segments" if segments else ""
            return Way("loop", f"loop, micro-batches of {size}{inner}", peak, self.time_ns)
        if not segments:
            return Way("torch", "torch", peak, self.time_ns)
        name = str(segments[0]) if len(segments) == 1 else f"{len(segments)} segments"
        return Way("segments", name, peak, self.time_ns)


@dataclass
class _Known:
    """The estimated cost of a segment, and its measured cost once a step with it was run."""

    foreseen: Option
    measured: Option | None = None


class SegmentSearch:
    """Searches for the best segments of one step.

    Attributes:
        seen: the steps that were run; the first one is not divided.
        findings: what was found out about each module that was examined, by its name.
        until: the argument of this name; callers may set it anew.

    Args:
        model: any module.
        inputs: an example input.
        backend: backend of the model's device; it must be able to report allocated memory.
        is_training: True: a step is forward and backward; False: forward without a graph.
        until: the `time.monotonic` after which steps begin only while no step fits the limit;
            None: it follows from the default budget of the effort, which begins now.
        effort: as in `Config`.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        backend: AbstractBackend,
        is_training: bool,
        *,
        until: float | None = None,
        effort: str = "normal",
    ) -> None:
        self._model, self._inputs = model, inputs
        self._steps = steps = Steps(model, inputs, is_training)
        self._backend = backend
        self._is_training = is_training
        self._modules: Mapping[str, nn.Module] = dict(steps.model.named_modules())
        self.findings: dict[str, Independence] = {}
        # Modules that must not be recomputed selectively, with the reason.
        self._unselective: dict[str, str] = {}
        self._failed: set[StepDivision] = set()
        self._known: dict[Segment, _Known] = {}
        # Ratios of measured to estimated times, by the keys of `_alike`.
        self._ratios: dict[Any, list[float]] = {}
        # Modules without children are no candidates for segments, because they keep their result
        # and little else.
        names = [name for name, one in self._modules.items() if any(one.children())]
        with gradient_mode(is_training):
            steps()
            self._own = profiled(steps, names, backend)
        self.seen = [Seen(WHOLE, self._own.peak_bytes, self._own.time_ns)]
        # What each module costs with selective recomputation.
        self._selective: dict[str | None, ModuleCost] = {}
        if is_training:
            everywhere = StepDivision((Segment("", None, recompute=False, selective=True),))
            # A model that writes into the input of a normalisation cannot do without its result.
            with suppress(*STEP_ERRORS):
                profile = self._profiled(everywhere, names)
                self._selective = {one.name: profile.cost(one) for one in profile.root.walk()}
        budget_s = EFFORTS[effort].budget_s(self._own.time_ns)
        self.until = until
        if until is None and budget_s is not None:
            self.until = monotonic() + budget_s
        self._root = self._tree(self._own.root)
        self._samples = {call.name: call.samples for call in self._root.walk()}

    def ways(self, held_bytes: int) -> tuple[Way, ...]:
        """The ways to run a step: those that were run, and estimated ones from the front.

        Args:
            held_bytes: bytes that are allocated all through a step.
        """
        run = [one.way(held_bytes) for one in self.seen]
        front = self.table().front()
        front = front[:: max(1, len(front) // _SHOWN)]
        return (
            *run,
            *(Way("segments", "segments", peak + held_bytes, ns, True) for peak, ns in front),
        )

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
        """Leave out the steps that were run with any of these segments."""
        self.seen = [one for one in self.seen if not set(causes) & {*one.division.segments}]

    def _tree(self, root: ModuleCall) -> ModuleCall:
        """The tree of those calls only that may be segments; their estimated costs are noted."""
        counts: dict[str | None, int] = {}
        for call in root.walk():
            counts[call.name] = counts.get(call.name, 0) + 1
        least = _LEAST_SHARE * self._own.peak_bytes

        self._repeated = dict(_outermost(root, lambda call: counts[call.name] > 1))

        def matters(call: ModuleCall) -> bool:
            if counts[call.name] > 1 or not call.samples:
                return False
            cost = self._own.cost(call)
            if not self._is_training:
                return cost.forward_bytes - call.result_bytes >= least
            return len(call.backward) == 2 and cost.kept_bytes - call.result_bytes >= least

        def pruned(call: ModuleCall) -> Iterator[ModuleCall]:
            children = [one for child in call.children for one in pruned(child)]
            if not matters(call):
                yield from children
            else:
                yield replace(call, children=children)

        top = replace(root, children=[one for child in root.children for one in pruned(child)])
        for call in top.walk():
            if call.name is not None:
                self._foresee(call)
        return top

    def _foresee(self, call: ModuleCall) -> None:
        """Note each segment that this call could be run as, with its estimated cost."""
        assert call.name is not None
        cost, name = self._own.cost(call), call.name
        gradients = sum(
            one.numel() * one.element_size()
            for one in self._modules[name].parameters()
            if one.requires_grad
        )
        selective = self._selective.get(name, cost)
        # Modules without normalisations and activation functions gain nothing.
        gains = selective.kept_bytes < cost.kept_bytes
        options = []
        if gains:
            one = Segment(name, None, recompute=False, selective=True)
            options.append(selective.option(one))
        sizes = [call.samples >> n for n in range(_MOST_HALVINGS) if call.samples >> n]
        for size in sizes:
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
        self._known |= {option.choice: _Known(option) for option in options}

    def table(self) -> SegmentTable:
        """The divisions that no other beats in both peak and time, by the costs known so far."""
        resolution = max(1, round(self._own.peak_bytes * _RESOLUTION))
        return segment(self._node(self._root), resolution)

    def _node(self, call: ModuleCall) -> Node:
        options = [
            self._option(known)
            for one, known in self._known.items()
            if one.module == call.name and self._may_be(one)
        ]
        if not (call.children and call.is_nested):
            return Node((self._own.cost(call).option(None), *options))
        between = [Node((option,)) for option in self._own.between(call)]
        children = [between[0]]
        for child, after in zip(call.children, between[1:], strict=True):
            children += [self._node(child), after]
        return Node(tuple(options), tuple(children))

    def _may_be(self, one: Segment) -> bool:
        if one.selective and one.module in self._unselective:
            return False
        found = self.findings.get(one.module)
        return found is None or found.allows(one)

    def _option(self, known: _Known) -> Option:
        if known.measured is not None:
            return known.measured
        one = known.foreseen.choice
        ratios = next(filter(None, map(self._ratios.get, self._alike(one))), None)
        if not ratios:
            return known.foreseen
        return replace(known.foreseen, time_ns=round(known.foreseen.time_ns * median(ratios)))

    def _alike(self, one: Segment) -> tuple[Any, Any]:
        """Keys of segments that are as much faster or slower than estimated as this one."""
        size = one.micro_batch
        count = 1 if size is None else -(-self._samples[one.module] // size)
        return (one.module, size, one.selective), (count, one.recompute, one.selective)

    def is_over(self, steps: int) -> bool:
        """True if there is no time for `steps` more steps."""
        step_s = max(one.time_ns for one in self.seen) / 1e9
        return self.until is not None and monotonic() + steps * step_s >= self.until

    def within(self, limit: int, *, inside: bool = False) -> Seen:
        """Run steps with segments, and return the fastest one whose peak is within a limit.

        If no step fits, the one with the smallest peak is returned.

        Args:
            limit: largest peak, in bytes above what is allocated before the step.
            inside: True: if no step fits, also try segments inside micro-batches.
        """
        last = len(self.seen) + _MOST_TRIALS
        while len(self.seen) < last:
            table = self.table()
            options = table.choose(max(limit, table.smallest_bytes))
            chosen = [option.choice for option in options if option.choice is not None]
            self.examine({one.module: one.micro_batch or 1 for one in chosen})
            if not all(map(self._may_be, chosen)):
                continue
            division = StepDivision(tuple(map(self._described, chosen)))
            if any(one.division == division for one in self.seen):
                break
            # As long as no step fits the limit, the search goes on even if the time is over.
            if self.is_over(3) and self._best(limit).peak_bytes <= limit:
                break
            self.try_(division)
        if self._best(limit).peak_bytes > limit:
            self._try_repeated(limit)
        self._time_again(limit)
        # Backward begins with the last micro-batch, so keeping it needs no additional memory,
        # unless the results of the model are large.
        for kept in (1, 0) if inside else ():
            if self._best(limit).peak_bytes > limit and not self.reason_against_parts():
                self._go_inside(limit, kept)
        return self._best(limit)

    def _try_repeated(self, limit: int) -> None:
        """Run modules that a step calls several times in micro-batches, until a step fits.

        A call of such a module has no cost of its own, so the solver leaves these modules out.
        """
        for halvings in range(1, _MOST_HALVINGS):
            sizes = {name: count >> halvings for name, count in self._repeated.items()}
            sizes = {name: size for name, size in sizes.items() if size}
            self.examine(sizes)
            segments = [
                replace(one, recompute=self._is_training)
                for one in (Segment(name, size) for name, size in sizes.items())
                if self._may_be(one)
            ]
            if not segments or self._best(limit).peak_bytes <= limit:
                return
            self.try_(StepDivision(tuple(map(self._described, segments))))

    def _time_again(self, limit: int) -> None:
        """Time the fastest steps within a limit again, as long as there is time.

        A single time is noisy, and of several times of a step the least is the best estimate.
        """
        fitting = [
            place
            for place, one in enumerate(self.seen)
            if one.peak_bytes <= limit and one.division.micro_batch is None
        ]
        fitting.sort(key=lambda place: self.seen[place].time_ns)
        contestants = fitting[:_FASTEST] if len(fitting) > 1 else []
        for place in contestants * _ROUNDS:
            if self.is_over(1):
                break
            one = self.seen[place]
            time_ns = min(one.time_ns, self.elapsed_ns(one.division))
            self.seen[place] = one._replace(time_ns=time_ns)
        self._steps.divide(WHOLE)

    def _go_inside(self, limit: int, kept: int | None) -> None:
        """Run the model in micro-batches of one sample, of two, of four, with segments inside.

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
        while self._is_training and size < self._steps.batch:
            if (outer := self.try_(division(size, ()))) is None:
                break
            peak = outer.peak_bytes
            part = next(parts_of(self._inputs, size))
            inner = SegmentSearch(self._model, part, self._backend, True, until=self.until)
            room = limit - max(0, peak - inner.seen[0].peak_bytes)
            for is_first in (True, False, False):
                segments = inner.within(max(0, room)).division.segments
                last = self.try_(division(size, segments))
                if last is None or last.peak_bytes <= limit or room <= 0:
                    break
                # Beside the current micro-batch, the step may hold more memory than estimated. So
                # the second attempt leaves more room for that. The third and last attempt takes the
                # segments with the smallest peak.
                room = room - 2 * (last.peak_bytes - limit) if is_first else 0
            if last is None or last.peak_bytes > limit or self.is_over(2):
                break
            size *= 2

    def _best(self, limit: int) -> Seen:
        """The best of the steps that were run, without loops over micro-batches."""
        steps = (one for one in self.seen if one.division.micro_batch is None)
        return min(steps, key=lambda one: one.cost(limit))

    def in_parts(self, limit: int | None = None, *, inside: bool = False) -> Seen | None:
        """Run steps of loops over micro-batches; return the fastest that fits, or None.

        Args:
            limit: largest peak, as for `within`; None: no limit.
            inside: as for `within`.

        Raises:
            ConfigError: the model cannot run on parts of a batch.
        """
        batch = self._steps.batch
        sizes = [batch >> n for n in range(1, _MOST_HALVINGS) if batch >> n]
        reason = self.reason_against_parts()
        if reason:
            raise ConfigError(f"loop runs a model on parts of the batch, and {reason}")

        def fitting() -> list[Seen]:
            loops = (one for one in self.seen if one.division.micro_batch)
            return [one for one in loops if limit is None or one.peak_bytes <= limit]

        for size in sizes:
            # As long as no step fits the limit, the search goes on even if the time is over.
            if not (fitting() and self.is_over(2)):
                self.try_(StepDivision(micro_batch=size))
        if inside and limit is not None and not fitting():
            self._go_inside(limit, None)
        return min(fitting(), key=lambda one: one.time_ns, default=None)

    def reason_against_parts(self) -> str:
        """Why the model cannot run on parts of a batch one by one; "" if it can."""
        batch = self._steps.batch
        self.examine({"": max(1, batch // 2)})
        found = self.findings[""]
        if found.reason:
            return f"of this model {found.reason}"
        # A copy of the model has no hooks of parameters.
        if any(one._backward_hooks for one in self._model.parameters()):
            return "hooks of its parameters would see gradients of parts"
        if found.least > 1:
            return f"of this model {_OF_ONE}"
        return "" if found.samples == batch else "its samples are not those of its first tensor"

    def faster(self, loop: bool = False) -> StepDivision:
        """The division that makes steps faster beyond the noise; `WHOLE` if there is none.

        Its peak is no larger than that of an undivided step.

        Args:
            loop: True: also try loops over micro-batches.
        """
        own = self.seen[0]
        if self.reason_against_parts():
            return WHOLE
        self.try_sizes(loop)
        fastest = min(self.seen, key=lambda one: one.cost(own.peak_bytes))
        if fastest.time_ns > own.time_ns * CLEARLY:
            return WHOLE
        # Of the divisions that take about as long, the one with the smallest peak.
        most_ns = min(own.time_ns * CLEARLY, fastest.time_ns / CLEARLY)
        alike = (one for one in self.seen if one.time_ns <= most_ns)
        best = min(alike, key=lambda one: one.peak_bytes)
        samples = race(
            [partial(self.elapsed_ns, one) for one in (WHOLE, best.division)],
            self.is_over,
            lambda samples: tells(samples[1], samples[0]),
        )
        self._steps.divide(WHOLE)
        return best.division if raced_of(*samples).pays else WHOLE

    def faster_of(self, one: Seen, other: Seen) -> Seen:
        """The faster of two steps, which take turns; `seen` keeps the times of this race."""
        if one.division == other.division:
            return one
        samples = race(
            [partial(self.elapsed_ns, step.division) for step in (one, other)],
            self.is_over,
            lambda samples: tells(*samples),
            is_warm=True,
        )
        self._steps.divide(WHOLE)
        timed = [
            step._replace(time_ns=median_ns(times))
            for step, times in zip((one, other), samples, strict=True)
        ]
        by_division = {step.division: step for step in timed}
        self.seen = [by_division.get(step.division, step) for step in self.seen]
        return min(timed, key=lambda step: step.time_ns)

    def elapsed_ns(self, division: StepDivision) -> int:
        """Time in ns of a step by a division, which stays set for later calls of `self._steps`."""
        self._steps.divide(division)
        with gradient_mode(self._is_training):
            return self._backend.elapsed_ns(self._steps)

    def examine(self, sizes: Mapping[str, int]) -> None:
        """Find out which modules may run in micro-batches; `sizes` has a size for each module."""
        left = {name: size for name, size in sizes.items() if name not in self.findings}
        if left:
            with gradient_mode(self._is_training):
                self.findings.update(examined(self._steps.model, self._steps, left))

    def _described(self, one: Segment) -> Segment:
        """The segment with the fields `shared` and `training` filled in for its module."""
        return self.findings[one.module].described(one)

    def try_(self, division: StepDivision) -> Seen | None:
        """Run a step by a division, if none ran yet, and note what its segments cost.

        Returns None if the step fails: the segments that are the cause are excluded.
        """
        for seen in self.seen:
            if seen.division == division:
                return seen
        if division in self._failed:
            return None
        names = {one.module: one for one in division.segments}
        if division.micro_batch is not None or (len(names) > 1 and "" in names):
            names = {}  # a module that runs several times in a step has no single cost
        try:
            profile = self._profiled(division, names)
        except STEP_ERRORS as error:
            self._failed.add(division)
            self._exclude_the_cause(division, error)
            return None
        for call in profile.root.walk():
            if call.name is not None:
                one = names[call.name]
                plain = replace(one, shared=(), training=None, lists=None, inference=(), least=1)
                if known := self._known.get(plain):
                    known.measured = profile.cost(call).option(plain)
                    ratio = known.measured.time_ns / max(1, known.foreseen.time_ns)
                    for key in self._alike(plain):
                        self._ratios.setdefault(key, []).append(ratio)
        return self.seen[-1]

    def _exclude_the_cause(self, division: StepDivision, error: BaseException) -> None:
        """Exclude the segments by which, each alone, a step fails; or else the innermost one."""
        causes: dict[Segment, BaseException] = {}
        for one in division.segments if len(division.segments) > 1 else ():
            try:
                self._steps.divide(StepDivision((one,)))
                with gradient_mode(self._is_training):
                    self._steps()
            except STEP_ERRORS as alone:
                causes[one] = alone
            finally:
                self._steps.divide(WHOLE)
        if not causes and division.segments:
            causes = {max(division.segments, key=lambda one: one.module.count(".")): error}
        for one, cause in causes.items():
            self.exclude(one, f"a step with it fails ({first_line(cause)})")

    def _profiled(self, division: StepDivision, names: Collection[str]) -> ModuleProfile:
        """Run a step by a division, and note it as seen."""
        self._steps.divide(division)
        try:
            with gradient_mode(self._is_training):
                profile = profiled(self._steps, names, self._backend)
        finally:
            self._steps.divide(WHOLE)
        self.seen.append(Seen(division, profile.peak_bytes, profile.time_ns))
        return profile

    def try_sizes(self, loop: bool = False) -> None:
        """Run steps of the whole model in micro-batches of each size, while there is time.

        Args:
            loop: True: also run loops over micro-batches.
        """
        sizes = [self._steps.batch >> n for n in range(1, _MOST_HALVINGS)]
        for size in filter(None, sizes):
            one = self._described(Segment("", size, recompute=False))
            for division in (StepDivision((one,)), StepDivision(micro_batch=size))[: 1 + loop]:
                if not self.is_over(_LEAST_STEPS):
                    self.try_(division)

    def in_blocks(self) -> Seen | None:
        """Run a step in which each block is recomputed as a whole, as by torch.utils.checkpoint.

        A block is a module that keeps at most half of what the step keeps and is no nn.Sequential,
        or any module inside which nothing may be a segment. Returns None if there are no blocks.
        """
        most = self._own.cost(self._root).kept_bytes // 2

        def blocks(call: ModuleCall) -> Iterator[str]:
            kept = self._own.cost(call).kept_bytes
            is_sequence = call.name is None or isinstance(self._modules[call.name], nn.Sequential)
            if call.name and (not call.children or not (is_sequence or kept > most)):
                yield call.name
                return
            for child in call.children:
                yield from blocks(child)

        segments = [Segment(name, None) for name in blocks(self._root)]
        self.examine({one.module: 1 for one in segments})
        segments = [self._described(one) for one in segments if self._may_be(one)]
        return self.try_(StepDivision(tuple(segments))) if segments else None


def _outermost(
    call: ModuleCall, is_wanted: Callable[[ModuleCall], bool]
) -> Iterator[tuple[str, int]]:
    """Names and samples of the outermost wanted calls inside a call."""
    for child in call.children:
        if child.name and is_wanted(child):
            yield child.name, child.samples
        else:
            yield from _outermost(child, is_wanted)


def _kept_of(count: int) -> list[int]:
    """Out of `count` micro-batches, the numbers that segments may keep and not recompute."""
    return sorted({0, 1, count // 4, count // 2, 3 * count // 4}) if count > 1 else [0]


def faster_division(
    model: nn.Module, inputs: Any, traced: Traced, config: Config, began: float
) -> StepDivision:
    """The division that makes steps faster without a larger peak; `WHOLE` if there is none.

    Args:
        model: any module.
        inputs: the inputs that the model was traced with.
        traced: the convolutions of the model.
        config: the settings, without a memory budget.
        began: the `time.monotonic` from which the time budget counts.
    """
    several = inputs if isinstance(inputs, list) else [inputs]
    is_run = config.step_race and not config.is_replayed and not is_compiled(model)
    if not is_run or len(several) > 1:
        return WHOLE
    (inputs,), backend = several, open_backend(config.backend)
    # If all results of convolutions together fit the cache, micro-batches would not be faster.
    results = sum(
        prod(problem.result_shape) * problem.bytes_per_element
        for _, problem in traced.layers
        if problem.op == "fprop"
    )
    if results <= backend.cache_bytes() or reason_against_steps(
        model, inputs, backend.device().type
    ):
        return WHOLE
    try:
        with undisturbed(model):
            # The model is examined before it is profiled, because most networks cannot run in
            # micro-batches in training.
            steps = Steps(model, inputs, backward=False)
            with torch.no_grad():
                found = examined(steps.model, steps, {"": max(1, steps.batch // 2)})[""]
            if not found.reason and found.samples == steps.batch:
                del steps
                search = SegmentSearch(
                    model,
                    inputs,
                    backend,
                    is_training=config.ops != ("fprop",),
                    until=half_of(config, began),
                    effort=config.effort,
                )
                return search.faster(config.loop)
    # A model that was traced on fake tensors may still fail on real ones. It is no error here,
    # because the race of whole steps reports it.
    except STEP_ERRORS:
        pass
    return WHOLE


def half_of(config: Config, began: float) -> float | None:
    """The `time.monotonic` at which half of the time budget is over; None if no budget was set."""
    return None if config.time_budget_s is None else began + config.time_budget_s / 2


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
