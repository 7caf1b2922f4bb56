"""Search for the segments of a step: divisions are foreseen, and the most promising ones run."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from time import perf_counter_ns
from typing import Literal

import torch
from torch import nn

from ucudnn.backends import AbstractBackend
from ucudnn.benchmark.failures import free_after, is_out_of_memory
from ucudnn.benchmark.statistics import median_ns
from ucudnn.errors import ConfigError, first_line
from ucudnn.kernels.deadline import Deadline
from ucudnn.outcomes import Way
from ucudnn.segment import WHOLE, Segment, StepDivision, is_inside, stretch_of
from ucudnn.solvers import Option, OuterOption
from ucudnn.steps.costs import SegmentCosts, axes_of, halved, segments_apart
from ucudnn.steps.foresee import Foreseer
from ucudnn.steps.independence import (
    NO_TIME,
    ONE_SAMPLE,
    UPDATES,
    Independence,
    Slabs,
    examined,
    unknown,
)
from ucudnn.steps.locality import NO_TIME as NO_TIME_FOR_SLABS
from ucudnn.steps.locality import Locality
from ucudnn.steps.profile import ModuleCall, ModuleWatcher, StepProfile
from ucudnn.steps.race import race, raced_of, tells
from ucudnn.steps.run import STEP_ERRORS, Steps, gradient_mode
from ucudnn.verdict import CLEARLY

# Least number of steps for the trial of a division and its race: two for the trial, then for each
# of the two contestants one to warm up and one in a round.
_LEAST_STEPS = 6
# Largest number of divisions into segments that are foreseen for one limit, and of ways, the first
# two with them, that are foreseen even if there is no time, as long as none fits.
_MOST_TRIALS, _LEAST_TRIALS = 16, 4
# The reason against micro-batches of one sample, as by InstanceNorm in channels_last (torch 2.13).
_OF_ONE = "a micro-batch of one sample has other gradients than in the batch"
# Of the steps that fit a limit, so many are timed again, in so many rounds.
_FASTEST, _ROUNDS = 3, 2
# Modules are examined on a part of the batch if the whole batch would need more memory than there
# is, as a multiple of the peak of a step; or more than this part of the time.
_OF_PEAK, _OF_STEP, _OF_TIME = 1.3, 8, 0.5
_LEAST_EXAMINED, _MOST_EXAMINED = 2, 8
# More bytes than any step has.
_ANY = 1 << 62


class SegmentSearch:
    """Searches for the best segments of one step.

    The solver chooses segments by their estimated costs; the step with them is foreseen, which
    replaces estimates, until the solver chooses what was foreseen already. Of the steps foreseen to
    fit, the fastest is run, until the fastest one has been run.

    Attributes:
        findings: what was found out about each module that was examined, by its name.
        deadline: the argument of this name.

    Args:
        foreseer: foresees steps of the model.
        deadline: after it, no more steps are run.
        copy: makes steps on a copy of the model, or gives those that were made before.
    """

    def __init__(
        self,
        foreseer: Foreseer,
        deadline: Deadline | None = None,
        copy: Callable[[], Steps] | None = None,
    ) -> None:
        self._foreseer = foreseer
        self._is_training, self._backend = foreseer.is_training, foreseer.backend
        self._clearly = CLEARLY[foreseer.backend.device().type]
        self._modules: Mapping[str, nn.Module] = foreseer.modules
        self.deadline = deadline or Deadline.never()
        self.findings: dict[str, Independence] = {}
        # Modules that must not be recomputed selectively, with the reason.
        self._unselective: dict[str, str] = {}
        self._failed: set[StepDivision] = set()
        # The ways to run a step that were foreseen; the first one is undivided.
        self._ways: dict[StepDivision, Way] = {}
        self._own = self._add(WHOLE, foreseer.step())
        selective = None
        if self._is_training:
            everywhere = StepDivision((Segment("", None, recompute=False, selective=True),))
            # A model that writes into the input of a normalisation cannot do without its result.
            with suppress(*STEP_ERRORS):
                # The arguments of a module whose calls are noted are views, by which selective
                # recomputation does not know the results that they are views of.
                profile = foreseer.step(everywhere, names=foreseer.holders)
                selective = self._add(everywhere, profile)
        known = self._may_be, self._excess_of
        self._costs = [SegmentCosts(foreseer, self._own, selective, *known)]
        split = None if selective is None else selective.split
        self._costs.append(SegmentCosts(foreseer, self._own.split, split, *known))
        # True: convolutions count with the workspace that they need if they are divided.
        self.is_split = False
        steps = partial(Steps, foreseer.model, foreseer.inputs, foreseer.is_training)
        self._copy = copy or cache(steps)
        # For each module that was examined, the samples of that step; and for each number of
        # samples, the calls of modules in a step of so many.
        self._examined_on: dict[str, int] = {}
        self._parts: dict[int, dict[tuple[str | None, int], ModuleCall]] = {}
        # True once modules were examined for slabs.
        self._has_rows = False
        # True: no step is run; what is foreseen decides.
        self.is_dry = False
        # True: modules are only recomputed, as a whole.
        self.is_uncut = False
        # The search by which modules are examined, if it is not this one.
        self._outer: SegmentSearch | None = None

    @property
    def batch(self) -> int:
        """Samples of the step."""
        return self._foreseer.batch

    @property
    def costs(self) -> SegmentCosts:
        """What segments cost, with the workspace that counts now."""
        return self._costs[self.is_split]

    def needs(self, way: Way) -> int:
        """The foreseen peak of a way, with the workspace that counts now."""
        return way.split_bytes if self.is_split else way.foreseen_bytes

    def fits(self, way: Way, limit: int) -> bool:
        """True if a way may be chosen and is foreseen to keep a limit in bytes."""
        return way.is_allowed and self.needs(way) <= limit

    @property
    def ways(self) -> list[Way]:
        """The ways to run a step that were foreseen; the first one is not divided."""
        return [*self._ways.values()]

    def _add(self, division: StepDivision, profile: StepProfile) -> StepProfile:
        """Add a way that was foreseen; return how."""
        self._ways[division] = _way(division, profile)
        return profile

    def note(self, way: Way, time_ns: int, peak_bytes: int = 0) -> Way:
        """Note what was measured of a way, which is returned with it."""
        known = self._ways[way.division]
        peak_bytes = peak_bytes or known.peak_bytes
        noted = self._ways[way.division] = replace(known, time_ns=time_ns, peak_bytes=peak_bytes)
        return noted

    def reasons(self) -> tuple[tuple[str, str], ...]:
        """Modules that cannot run in micro-batches or be recomputed, each with the reason."""
        found = []
        for name, one in self.findings.items():
            against = [each.locality.reason for each in one.slabs.values()]
            # A step of one sample is divided into slabs.
            if one.reason and not (self.batch == 1 and one.reason == ONE_SAMPLE):
                found.append((name, one.reason))
            found += [(name, against[0])] if against and all(against) else []
        found += [(name, _OF_ONE) for name, one in self.findings.items() if one.least > 1]
        return (*found, *self._unselective.items())

    def _exclude(self, one: Segment, reason: str) -> None:
        """Let no further division run a module as this segment does."""
        if one.selective and not one.recompute:
            self._unselective[one.module] = reason
            return
        found = self.findings.get(one.module, Independence(repeats=True))
        if one.rows is not None:
            slabs = {**found.slabs, one.axis: Slabs(Locality(reason))}
            self.findings[one.module] = replace(found, slabs=slabs)
            return
        repeats = found.repeats and one.micro_batch is not None
        self.findings[one.module] = replace(found, reason=found.reason or reason, repeats=repeats)

    def reject(self, causes: Mapping[Segment, str]) -> None:
        """Exclude segments for a reason, and forget the steps that were foreseen with any."""
        for one, reason in causes.items():
            self._exclude(one, reason)
        for division in [*self._ways]:
            if causes.keys() & {*division.segments}:
                del self._ways[division]

    def leave_out(self, division: StepDivision) -> None:
        """Take no step by this division."""
        if division in self._ways:
            self._ways[division] = replace(self._ways[division], is_allowed=False)

    def is_unaligned(self, division: StepDivision) -> bool:
        """True if random numbers of divided modules cannot be made the same for each sample."""
        names = {one.module for one in division.segments if one.micro_batch is not None}
        names |= {""} if division.micro_batch is not None else set()
        return any(self.findings[name].is_unaligned for name in names if name in self.findings)

    def _may_be(self, one: Segment) -> bool:
        if self.is_uncut and (one.is_cut or not one.recompute):
            return False
        if one.selective and one.module in self._unselective:
            return False
        is_cut = one.micro_batch is not None
        if is_cut and any(is_inside(name, one.module) for name in self._updating):
            return False
        if one.rows is not None and any(
            each.locality.reason for each in self._slabs_in(one).values()
        ):
            return False
        found = self.findings.get(one.module)
        return found is None or found.allows(one)

    def _slabs_in(self, one: Segment) -> dict[str, Slabs]:
        """What was found out of the rows of a module that runs in slabs, and of those inside.

        What holds for one innermost module is expected of those like it that were not examined.
        """
        shapes, axis = self.costs.shapes, one.axis
        dims = len(shapes.get(one.module, ()))
        alike = {name: self.findings.get(other) for name, other in self.costs.alike.items()}
        return {
            name: found.slabs[axis]
            for name, found in (alike | self.findings).items()
            if found is not None
            and axis in found.slabs
            and len(shapes.get(name, ())) == dims
            and (name == one.module or is_inside(name, one.module))
        }

    def _excess_of(self, one: Segment) -> tuple[int, int]:
        """Rows of the halo of a module and the number of its normalisations over rows.

        As far as it was not examined, those of modules inside are added up.
        """
        found = self.findings.get(one.module)
        if found is not None and one.axis in found.slabs:
            own = found.slabs[one.axis].locality
            return sum(own.halo), len(own.norms)
        shapes, innermost, rows, norms = self.costs.shapes, self.costs.innermost, 0.0, 0
        for name, slabs in self._slabs_in(one).items():
            if name in innermost:
                ratio = shapes[one.module][one.axis] / shapes[name][one.axis]
                rows += sum(slabs.locality.halo) * ratio
                norms += len(slabs.locality.norms)
        return round(rows), norms

    @property
    def _updating(self) -> list[str]:
        """Modules that update buffers, so that none around them can run in micro-batches."""
        return [name for name, one in self.findings.items() if one.reason == UPDATES]

    def is_over(self, steps: int) -> bool:
        """True if there is no time for `steps` more steps."""
        return not self.deadline.has_time(steps, max(one.step_ns for one in self.ways))

    def within(self, limit: int, *, inside: bool = False) -> Way:
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
                if not self.fits(self._best(limit), limit) and not self.reason_against_parts():
                    self._go_inside(limit, kept)
            if not self._has_run(self._best(limit), limit):
                break
        self._time_again(limit)
        return self._best(limit)

    def _has_run(self, best: Way, limit: int) -> bool:
        """Run the best step within a limit, if it was not; False if there is nothing to run."""
        if self.is_dry or best.time_ns or not self.fits(best, limit) or self.is_over(2):
            return False
        if self._foreseer.can_run(best.foreseen_bytes):
            self.run(best)
        elif self.is_split:
            return False  # with a plan there may be memory for it
        else:
            self.leave_out(best.division)
        return True

    def is_clearly_faster(self, one: Way, other: Way) -> bool:
        """True if one way takes clearly less time; both times are measured, or none."""
        both = (one, other)
        is_measured = all(way.time_ns for way in both)
        times = [way.time_ns if is_measured else way.foreseen_ns for way in both]
        return times[0] < self._clearly * times[1]

    def _solve(self, limit: int) -> None:
        """Foresee what the solver chooses, until it chooses what was foreseen already."""
        room = limit - self._own.held.total
        for trial in range(_MOST_TRIALS):
            least = _LEAST_TRIALS + self._has_rows
            if self.deadline.is_over and max(trial, len(self._ways)) >= least:
                break
            table = self.costs.table()
            least_ns = table.time_ns(max(room, table.smallest_bytes)) or 0
            found_ns = [one.foreseen_ns for one in self._segmented() if self.fits(one, limit)]
            # What fits already is as fast as the solver hopes, or there is no time to look further.
            if found_ns and (min(found_ns) * self._clearly <= least_ns or self.deadline.is_over):
                break
            options = table.choose(max(room, table.smallest_bytes))
            chosen = _one_for_each([option for option in options if option.choice is not None])
            if any(one.rows is not None for one in chosen) and not self._has_rows:
                # Halos and times of modules and stretches follow from those inside, of each kind.
                self._has_rows = True
                names = {*self.costs.alike.values()}
                self.examine(
                    dict.fromkeys(names, 1), {n: axes_of(self.costs.shapes[n]) for n in names}
                )
                few = [one for one in self.costs.in_few_slabs(names) if self._may_be(one)]
                self.foresee(StepDivision(tuple(map(self._described, few))))
                continue
            axes = {one.module: (one.axis,) for one in chosen if one.rows is not None}
            self.examine({one.module: one.micro_batch or 1 for one in chosen}, axes)
            refused = [one for one in chosen if not self._may_be(one)]
            if refused:
                # What holds for a module holds for all modules and stretches around it. Of slabs,
                # it is known by now.
                if any(one.rows is None for one in refused):
                    self.examine(dict.fromkeys(self.costs.innermost, 1))
                continue
            division = StepDivision(tuple(map(self._described, chosen)))
            is_new = division not in self._ways
            has_failed = division in self._failed
            found = self.foresee(division)
            if found is None or is_new:
                # Of a step for which there was no memory, its costs say nothing new.
                room -= room // 8 if has_failed else 0
                continue
            # Segments inside others, and modules that run several times, have no costs of their
            # own in a step with them. So the solver does not learn what they cost, and gets less
            # room instead.
            if self.fits(found, limit) or room <= table.smallest_bytes:
                break
            room -= self.needs(found) - limit

    def _segmented(self) -> list[Way]:
        """The steps that were foreseen, without loops over micro-batches."""
        return [one for one in self.ways if one.kind != "loop"]

    def _best(self, limit: int) -> Way:
        return min(self._segmented(), key=partial(self._cost, limit))

    def smallest(self, *, loop: bool) -> Way:
        """The step with the smallest peak, which is a loop only if loops are allowed."""
        return min(self.ways if loop else self._segmented(), key=partial(self._cost, 0))

    def _cost(self, limit: int, one: Way) -> tuple[bool, int, int]:
        """Sort key, less for the better way: bytes of the peak beyond a limit, then the time."""
        return not one.is_allowed, max(0, self.needs(one) - limit), one.step_ns

    def _time_again(self, limit: int) -> None:
        """Time the fastest steps within a limit again, as long as there is time.

        A single time is noisy, and of several times of a step the least is the best estimate.
        """
        fitting = [one for one in self._segmented() if one.time_ns and self.fits(one, limit)]
        fitting = sorted(fitting, key=lambda one: one.time_ns)[:_FASTEST]
        if len(fitting) < 2 or self.is_over(len(fitting)):
            return
        runs = [partial(self.elapsed_ns, one.division) for one in fitting]
        try:
            samples = race(runs, self.is_over, lambda _: False, is_warm=True, most_rounds=_ROUNDS)
        except STEP_ERRORS as error:
            if not is_out_of_memory(error):
                raise
            free_after(error)
            return
        for one, times in zip(fitting, samples, strict=True):
            self.note(one, min(one.time_ns, *times))

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
        while self._is_training and size < self.batch and not self.deadline.is_over:
            outer = self.foresee(division(size, ()))
            if outer is None:
                break
            inner = SegmentSearch(self._foreseer.of_batch(size), self.deadline)
            inner.share_with(self)
            room = limit - max(0, self.needs(outer) - inner.needs(inner.ways[0]))
            for is_first in (True, False, False):
                inner._solve(max(0, room))
                segments = inner._best(max(0, room)).division.segments
                last = self.foresee(division(size, segments))
                if last is None or self.needs(last) <= limit or room <= 0:
                    break
                if self.deadline.is_over:
                    return
                # Beside the current micro-batch, the step may hold more memory than estimated. So
                # the second attempt leaves more room for that. The third and last attempt takes the
                # segments with the smallest peak.
                room = room - 2 * (self.needs(last) - limit) if is_first else 0
            if last is None or self.needs(last) > limit:
                break
            size *= 2

    def share_with(self, other: SegmentSearch) -> None:
        """Use what another search finds out about modules, and count the same workspace."""
        self.findings, self._unselective, self._outer = other.findings, other._unselective, other
        self.is_split = other.is_split

    def in_parts(self, limit: int = _ANY, *, inside: bool = False) -> Way | None:
        """The fastest loop over micro-batches that fits, after steps of it were run, or None.

        Args:
            limit: largest peak, as for `within`.
            inside: as for `within`.

        Raises:
            ConfigError: the model cannot run on parts of a batch.
        """
        reason = self.reason_against_parts()
        if reason:
            raise ConfigError(f"loop runs a model on parts of the batch, and {reason}")

        def fitting() -> list[Way]:
            return [one for one in self.ways if one.kind == "loop" and self.fits(one, limit)]

        end = self.deadline.part(_OF_TIME)
        self.foresee_loops(lambda: end.is_over and bool(fitting()))
        if inside and not fitting():
            self._go_inside(limit, None)
        while fitting():
            if not self._has_run(min(fitting(), key=lambda one: one.step_ns), limit):
                return min(fitting(), key=lambda one: (not one.time_ns, one.step_ns))
        return None

    def foresee_loops(self, is_enough: Callable[[], bool] = lambda: False) -> None:
        """Foresee loops over micro-batches of falling sizes, if the model can run on parts."""
        if not self.reason_against_parts():
            for size in halved(self.batch)[1:]:
                if is_enough():
                    break
                self.foresee(StepDivision(micro_batch=size))

    def reason_against_parts(self) -> str:
        """Why the model cannot run on parts of a batch one by one; "" if it can."""
        if self.batch == 1:
            return f"of this model {ONE_SAMPLE}"
        self.examine({"": max(1, self.batch // 2)})
        found = self.findings[""]
        if found.reason:
            return f"of this model {found.reason}"
        # A copy of the model has no hooks of parameters.
        if any(one._backward_hooks for one in self._foreseer.model.parameters()):
            return "hooks of its parameters would see gradients of parts"
        if found.least > 1:
            return f"of this model {_OF_ONE}"
        is_first = found.samples == self._examined_on.get("")
        return "" if is_first else "its samples are not those of its first tensor"

    def faster(self, loop: bool = False) -> StepDivision:
        """The division that makes steps faster beyond the noise; `WHOLE` if there is none.

        Its peak is no larger than that of an undivided step.

        Args:
            loop: True: also try loops over micro-batches.
        """
        if self.reason_against_parts():
            return WHOLE
        own = self.run_if_fits(self._ways[WHOLE])
        self.try_sizes(loop)
        tried = [one for one in self.ways if one.time_ns]
        if own not in tried:
            return WHOLE
        fastest = min(tried, key=partial(self._cost, own.foreseen_bytes))
        if fastest.time_ns > own.time_ns * self._clearly:
            return WHOLE
        # Of the divisions that take about as long, the one with the smallest peak.
        most_ns = min(own.time_ns * self._clearly, fastest.time_ns / self._clearly)
        tried = [one for one in tried if one.time_ns <= most_ns]
        best = min(tried, key=lambda one: one.foreseen_bytes)
        samples = race(
            [partial(self.elapsed_ns, one) for one in (WHOLE, best.division)],
            self.is_over,
            lambda samples: tells(samples[1], samples[0]),
        )
        return best.division if raced_of(*samples).pays else WHOLE

    def faster_of(self, one: Way, other: Way) -> Way:
        """The faster of two steps, which take turns; the times of this race are noted."""
        both = (one, other)
        if one.division == other.division:
            return one
        if not all(self._foreseer.can_run(step.foreseen_bytes) for step in both):
            return min(both, key=lambda step: step.foreseen_ns)
        try:
            samples = race(
                [partial(self.elapsed_ns, step.division) for step in both],
                self.is_over,
                lambda samples: tells(*samples),
                is_warm=True,
            )
        except STEP_ERRORS as error:
            if not is_out_of_memory(error):
                raise
            free_after(error)
            # Steps that were run before have shown that there is memory for them.
            return min(both, key=lambda step: (not step.time_ns, step.step_ns))
        found = zip(both, map(median_ns, samples), strict=True)
        return min((self.note(step, ns) for step, ns in found), key=lambda way: way.time_ns)

    def steps(self, division: StepDivision = WHOLE) -> Steps:
        """Steps on the copy of the model, divided in this way until the next call."""
        steps = self._copy()
        steps.divide(division)
        return steps

    def elapsed_ns(self, division: StepDivision) -> int:
        """Time in ns of a step by a division."""
        return self._backend.elapsed_ns(self.steps(division))

    def examine(
        self, sizes: Mapping[str, int], axes: Mapping[str, Sequence[int]] | None = None
    ) -> None:
        """Find out which modules may run in micro-batches, of these sizes, and in slabs.

        Args:
            sizes: for each module, the size of a micro-batch.
            axes: for those that may run in slabs, too, the axes that may have the rows.
        """
        found = self.findings
        axes = {
            name: [one for one in each if name not in found or one not in found[name].slabs]
            for name, each in (axes or {}).items()
        }
        left = {name: size for name, size in sizes.items() if name not in found or axes.get(name)}
        if self._outer is not None:
            self._outer.examine(left, axes)
        elif left:
            samples, is_cropped = self._part_to_examine()
            while (new := self._examined(left, axes, samples, is_cropped=is_cropped)) is None:
                if samples <= _LEAST_EXAMINED and is_cropped:
                    break
                is_cropped = samples <= _LEAST_EXAMINED
                samples = samples if is_cropped else samples // 2
            # What could not be found out for lack of memory is not assumed.
            why = "there is no memory to find out whether it may run in parts"
            for name in left:
                one = (new or {}).get(name) or unknown(why, axes.get(name, ()))
                slabs = found[name].slabs if name in found else {}
                found[name] = replace(one, slabs={**slabs, **one.slabs})
            self._examined_on.update(dict.fromkeys(left, samples))

    def begin(self, deadline: Deadline) -> None:
        """Go on until another deadline: there may be time for what there was none for."""
        self.deadline = deadline
        for name, one in [*self.findings.items()]:
            reasons = {one.reason, *(each.locality.reason for each in one.slabs.values())}
            if reasons & {NO_TIME, NO_TIME_FOR_SLABS}:
                del self.findings[name]
                self._has_rows = False

    def _examined(
        self,
        sizes: Mapping[str, int],
        axes: Mapping[str, Sequence[int]],
        samples: int,
        *,
        is_cropped: bool,
    ) -> Mapping[str, Independence] | None:
        """What is found out in a step of so many samples; None if there is no memory for it."""
        steps = self.steps()
        forward = partial(steps.forward, samples, is_cropped=is_cropped)
        # A part of the axes takes little time, and without the whole model there is no loop.
        is_limited = not is_cropped and sizes.keys() != {""}
        deadline = self.deadline.part(_OF_TIME) if is_limited else Deadline.never()
        how = deadline, axes, self.deadline.part(_OF_TIME)
        try:
            with gradient_mode(self._is_training):
                found = examined(steps.model, forward, sizes, *how)
        except STEP_ERRORS as error:
            if is_out_of_memory(error):
                free_after(error)
                return None
            if not is_cropped:
                raise
            found = {}
        # A model for inputs of one size fails on others, or calls other modules.
        if is_cropped and found.keys() != sizes.keys():
            return self._examined(sizes, axes, samples, is_cropped=False)
        return found

    def _part_to_examine(self) -> tuple[int, bool]:
        """On how many samples modules are examined, and whether on a part of their spatial axes.

        As many samples as memory and time allow; if there is no time for two, on half of each axis.
        """
        samples, own = self.batch, self._own
        while samples > _MOST_EXAMINED:
            samples //= 2
        while True:
            part = samples / max(1, self.batch)
            fits = _OF_PEAK * part * own.own_bytes <= self._foreseer.free_bytes
            has_time = self.deadline.part(_OF_TIME).has_time(_OF_STEP * part, own.time_ns)
            if (fits and has_time) or samples < 2 * _LEAST_EXAMINED:
                return samples, not (fits and has_time)
            samples //= 2

    def _described(self, one: Segment) -> Segment:
        """The segment with the fields `shared` and `training` filled in for its module."""
        if self._outer is not None:
            return self._outer._described(one)
        described = self.findings[one.module].described(one)
        if one.micro_batch is None or self._examined_on.get(one.module, 0) >= self.batch:
            return described
        shared = {*described.shared, *self._as_long_by_chance(one.module)}
        return replace(described, shared=tuple(sorted(shared)))

    def _as_long_by_chance(self, name: str) -> Iterator[int]:
        """Places of arguments that are as long as the batch, and were not in the examined part."""
        stretch = None if name in self._modules else stretch_of(name)
        if stretch is not None:
            return  # each of its children has one argument
        samples = self._examined_on.get(name, 0)
        if not samples:
            return
        if samples not in self._parts:
            part = self._foreseer.of_batch(samples).step()
            self._parts[samples] = {call.key: call for call in part.root.walk()}
        for call in self._own.root.walk():
            other = self._parts[samples].get(call.key)
            if call.name != name or other is None or len(call.rows) != len(other.rows):
                continue
            for place, (rows, few) in enumerate(zip(call.rows, other.rows, strict=True)):
                if rows == call.samples and few != other.samples:
                    yield place

    def foresee(self, division: StepDivision) -> Way | None:
        """Foresee a step by a division, if it was not, and note what its segments cost.

        Returns None if the step fails: the segments that are the cause are excluded.
        """
        if division not in self._ways and division not in self._failed:
            try:
                profile = self._foreseer.step(division, names=segments_apart(division))
            except STEP_ERRORS as error:
                self._failed.add(division)
                self.exclude_the_cause(division, error)
            else:
                self._add(division, profile)
                for costs, one in zip(self._costs, (profile, profile.split), strict=True):
                    costs.foreseen(division, one)
        return self._ways.get(division)

    def run_if_fits(self, way: Way) -> Way | None:
        """Run steps by a way as `run` does, if there is memory for them; None if they fail."""
        if not self.is_dry and self._foreseer.can_run(way.foreseen_bytes):
            self.run(way)
        return self._ways.get(way.division)

    def run(self, way: Way) -> None:
        """Run two steps by a way: for its real peak, and for the time of each segment.

        A step that fails is left out, and the segments that are the cause are excluded.
        """
        try:
            steps = self.steps(way.division)
            gc.collect()  # what earlier steps left in cycles must not be freed in this one
            span = self._backend.span(steps)
            root, times = _timed(steps, segments_apart(way.division), self._backend)
        except STEP_ERRORS as error:
            self._failed.add(way.division)
            del self._ways[way.division]
            if is_out_of_memory(error):
                free_after(error)
            else:
                self.exclude_the_cause(way.division, error)
            return
        self.note(way, times[-1] - times[0], self._own.held.total + span.peak_bytes)
        for costs in self._costs:
            costs.measured(way.division, root, times)

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
            self._exclude(one, f"a step with it fails ({first_line(cause)})")

    def try_sizes(self, loop: bool = False) -> None:
        """Run steps of the whole model in micro-batches of each size, while there is time.

        Args:
            loop: True: also run loops over micro-batches.
        """
        for size in halved(self.batch)[1:]:
            one = self._described(Segment("", size, recompute=False))
            for division in (StepDivision((one,)), StepDivision(micro_batch=size))[: 1 + loop]:
                way = self.foresee(division)
                if way is not None and not self.is_over(_LEAST_STEPS):
                    self.run_if_fits(way)

    def in_blocks(self) -> Way | None:
        """A step in which each block is recomputed as a whole, as by torch.utils.checkpoint.

        A block is a module that keeps at most half of what the step keeps and is no nn.Sequential,
        or any module inside which nothing may be a segment. Returns None if there are no blocks.
        """
        root, names = self.costs.root, self.costs.samples.keys()
        most = self._own.cost(root).kept_bytes // 2

        def blocks(call: ModuleCall) -> Iterator[str]:
            kept = self._own.cost(call).kept_bytes
            is_sequence = call.name is None or isinstance(self._modules[call.name], nn.Sequential)
            inside = (one.name for child in call.children for one in child.walk())
            # Calls that matter for stretches alone are no segments.
            is_innermost = names.isdisjoint(inside)
            if call.name and (is_innermost or not (is_sequence or kept > most)):
                if call.name in names:
                    yield call.name
                return
            for child in call.children:
                yield from blocks(child)

        segments = [Segment(name, None) for name in dict.fromkeys(blocks(root))]
        self.examine({one.module: 1 for one in segments})
        segments = [self._described(one) for one in segments if self._may_be(one)]
        return self.foresee(StepDivision(tuple(segments))) if segments else None


def _way(division: StepDivision, profile: StepProfile) -> Way:
    """A way that was foreseen."""
    segments, size, _ = division
    kind: Literal["torch", "segments", "loop"] = "segments" if segments else "torch"
    name = f"{len(segments)} segments" if len(segments) > 1 else "".join(map(str, segments))
    if size is not None:
        kind, name = "loop", f"loop, micro-batches of {size}{', ' * bool(segments)}{name}"
    return Way(
        kind,
        name or "torch",
        profile.peak_bytes,
        profile.time_ns,
        own_bytes=profile.own_peak_bytes,
        split_bytes=profile.split.peak_bytes,
        division=division,
    )


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

    watcher = ModuleWatcher(names, clock)
    watcher.run(steps.model, steps)
    return watcher.root, times
