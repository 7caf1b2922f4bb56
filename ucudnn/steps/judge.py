"""Judge plans by races of whole steps: which kernels stay, and which layout.

A plan whose kernels are all faster can still slow down a step: planned calls take longer to start,
and in a step the caches hold other data. If steps are not faster beyond the noise, the kernels that
make them faster are found by their times inside the steps, or by halving the set of kernels. All
other kernels are given back to torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar

from torch import nn

from ucudnn.backends import AbstractBackend, open_backend
from ucudnn.benchmark.statistics import ratio_interval
from ucudnn.config import Config
from ucudnn.errors import TuningInterruptedError, UnplannedWarning
from ucudnn.execution.compiling import is_compiled
from ucudnn.execution.observers import Recorder
from ucudnn.execution.override import Installation
from ucudnn.kernels.deadline import LEAST_RACE_STEPS, Deadline
from ucudnn.kernels.tune import device_type
from ucudnn.outcomes import LayoutRace, StepMemory, StepRace, Way
from ucudnn.plan import KernelPlan, Plan
from ucudnn.problem import Problem
from ucudnn.segment import WHOLE, StepDivision
from ucudnn.steps.comparing import coarsest_eps, reason_against_layout
from ucudnn.steps.compiled import compile_steps
from ucudnn.steps.profile import held_by
from ucudnn.steps.race import (
    Raced,
    Samples,
    Step,
    StepMeter,
    raced_inside,
    raced_of,
    steps_ns,
    tells,
    timed,
)
from ucudnn.steps.run import STEP_ERRORS, Steps, not_computed, reason_against_steps, undisturbed
from ucudnn.units import format_bytes
from ucudnn.verdict import CONFIDENCE, LEAST_ROUNDS, TOLERATED, is_faster

# A race is given time for this many steps, even beyond a default budget: one step of each of the
# two rivals to warm up, and three rounds, which decide a clear race.
RACE_STEPS = 8
# A race of two layouts is given time for this many steps: four rounds of four ways, and the steps
# before the first round.
LAYOUT_RACE_STEPS = 25
# Least number of steps in a race of two rivals: each runs one step to warm up, and one in a round.
# A step that is run to measure its peak warms up, too.
_LEAST_STEPS = 4
# The least number of steps in a race of two layouts: one to see how long steps are, two to compare
# the results of the layouts, and for each of four ways one for its peak and one for a round.
_LEAST_LAYOUT_STEPS = 11
# If the settings keep the layout, channels_last is tried in at most so many rounds, of a step by
# each of two rivals. There must be time for one step to warm up, and a round.
_HINT_ROUNDS, _LEAST_HINT_STEPS = 2, 3

# Reasons why steps were not raced.
_NO_ROOM = "the time budget has no room for them"
_NOTHING = "it changes nothing"
_USED_UP = "the time budget was used up"

# Copies of a model, by division and layout.
Copies = dict[tuple[StepDivision, str], Steps]

_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Judge:
    """Judges plans of one model by whole steps. These run on as few copies of it as possible.

    On Ctrl-C only a race is incomplete, so the error that is raised holds the whole plan.

    Args:
        model: any module; if it is compiled, compiled steps are raced.
        inputs: an example, or a list of several.
        config: the settings.
        deadline: when races must end.
        copies: the copies on which steps run.
    """

    model: nn.Module
    inputs: Any
    config: Config
    deadline: Deadline = field(default_factory=Deadline.never)
    copies: Copies = field(default_factory=dict)

    def step_ns(self) -> int:
        """Time of a step by torch, which is run; 0 if none can be run."""
        if self._reason(device_type(self.config)):
            return 0
        try:
            with _undisturbed(self.model):
                return open_backend(self.config.backend).elapsed_ns(self._steps())
        # A model that was traced on fake tensors may still fail on real ones: the race reports it.
        except STEP_ERRORS:
            self.copies.clear()
            return 0

    @property
    def is_training(self) -> bool:
        """True if a step is forward and backward."""
        return self.config.ops != ("fprop",)

    @property
    def _held_bytes(self) -> int:
        return held_by(self.model, self.inputs).total

    def judge(self, plan: Plan, layout: str = "keep") -> Plan:
        """The plan after a race of whole steps, or with the reason why no race was run.

        `layout` is that of the steps; a model may be in channels_last already.
        """
        reason, changes = self._reason(plan.device.type), not _is_torchs(plan)
        # Whether steps in channels_last stay within a memory budget is not known.
        may_hint = self.config.layout == "keep" and self.config.memory_budget is None
        hints = may_hint and _has_other_layout(plan)
        if reason or not (changes or hints):
            return replace(plan, step_race=StepRace(reason=reason or _NOTHING))
        # A budget may be too short even for the convolutions of a race.
        if changes and not self.deadline.has_time(LEAST_RACE_STEPS, 1e9 * _convolutions_s(plan)):
            hint = LayoutRace(reason=_USED_UP, is_fixed=True) if hints else plan.layout_race
            return replace(plan, step_race=StepRace(reason=_NO_ROOM), layout_race=hint)
        found = self._attempt(plan, partial(self._race, plan, changes, hints, layout))
        return found if isinstance(found, Plan) else replace(plan, step_race=StepRace(reason=found))

    def _race(self, plan: Plan, changes: bool, hints: bool, layout: str) -> Plan:
        backend, step = open_backend(plan.backend), self._steps(plan.division, layout)
        compilation = compile_steps(self.model, step, plan.device.type)
        plan = with_relaid(replace(plan, compilation=compilation), step)
        step_ns = backend.elapsed_ns(step)  # this step also warms up
        # The time of compiling counts towards no budget, so the race ends later by it.
        end = self.deadline.later(0 if compilation is None else compilation.seconds)
        meter = StepMeter(backend, [plan], end, step_ns, self._held_bytes)
        if changes:
            plan = StepJudge(step, meter).judge(plan)
        else:
            plan = replace(plan, step_race=StepRace(reason=_NOTHING))
        if not hints:
            return plan
        # The plan is for the model's own layout: it stays valid if the model fails in the other.
        found = self._attempt(plan, partial(self._hint, plan, step, meter))
        hint = LayoutRace(reason=found, is_fixed=True) if isinstance(found, str) else found
        return replace(plan, layout_race=hint)

    def _hint(self, plan: Plan, step: Steps, meter: StepMeter) -> LayoutRace | str:
        """Race the plan, already warmed up, against torch in channels_last, in a few rounds."""
        if meter.is_over(_LEAST_HINT_STEPS):
            return _USED_UP
        other = self._steps(plan.division, "channels_last")
        # If the steps of the plan are compiled, those in channels_last must be, too, to be
        # comparable.
        if plan.compilation is not None and plan.compilation.is_compiled:
            other.compile()
        other()
        runs = [(step, plan), (other, None)]
        samples = meter.race(runs, lambda _: False, is_warm=True, most_rounds=_HINT_ROUNDS)
        ways = _way("plan", "keep"), _way("torch", "channels_last")
        return LayoutRace(timed(ways, steps_ns(samples)), is_fixed=True)

    def judge_divided(self, plan: Plan) -> Plan:
        """The plan after a race of divided steps by the plan against undivided steps by torch."""
        backend, dropped = open_backend(plan.backend), (plan.step_race or StepRace()).dropped
        found: StepRace | str = self._reason(plan.device.type)
        found = found or _reason_against_torchs(plan.memory, backend)
        if not found:
            found = self._attempt(plan, partial(self._race_divided, plan, backend))
        raced = StepRace(reason=found) if isinstance(found, str) else found
        return replace(plan, step_race=replace(raced, dropped=dropped))

    def _race_divided(self, plan: Plan, backend: AbstractBackend) -> StepRace:
        own = self._steps()
        step_ns = backend.elapsed_ns(own)
        meter = StepMeter(backend, [plan], self.deadline, step_ns, self._held_bytes)
        if meter.is_over(_LEAST_STEPS):
            return StepRace(reason=_NO_ROOM)
        runs = [(own, None), (self._steps(plan.division, plan.memory_format), plan)]
        for steps, _ in runs:
            compilation = compile_steps(self.model, steps, plan.device.type)
            if compilation is not None and not compilation.is_compiled:
                return StepRace(reason=compilation.reason)
        # With a memory budget the peaks are known from the steps that checked the budget.
        peaks = [0, 0] if plan.memory else [meter.peak_bytes(*run) for run in runs]
        samples = steps_ns(meter.race(runs, lambda times: tells(*steps_ns(times))))
        return raced_of(*samples).with_peaks(*peaks).race

    def judge_in_layouts(self, plans: Mapping[str, Plan]) -> Plan:
        """The plan of the better layout, after a race of torch and plan in each layout.

        `plans` are plans that were not judged yet; the plan for the model's own layout ("keep")
        comes first. The model keeps its layout if steps cannot be compared, or if its results
        differ in channels_last by more than rounding.
        """
        own = plans["keep"]
        found = self._attempt(own, partial(self._race_layouts, plans))
        if isinstance(found, Plan):
            return found
        # The model must keep its layout; the plan for this layout is judged as if it were the only
        # one.
        self.copies.pop((plans["channels_last"].division, "channels_last"), None)
        steps = self.copies.get((own.division, "keep"))
        compilation = None if steps is None else steps.compilation
        kept = self.judge(replace(own, compilation=compilation))
        return replace(kept, layout_race=LayoutRace(reason=found))

    def _race_layouts(self, plans: Mapping[str, Plan]) -> Plan | str:
        """The plan of the better layout, or the reason why the model keeps its own."""
        own = plans["keep"]
        backend = open_backend(own.backend)
        steps = {which: self._steps(one.division, which) for which, one in plans.items()}
        step_ns = backend.elapsed_ns(steps["keep"])
        if not self.deadline.has_time(_LEAST_LAYOUT_STEPS, step_ns):
            return "the time budget has no room for steps in both layouts"
        eps = coarsest_eps(kernel.problem for kernel in own.kernels)
        reason = reason_against_layout(self.model, self.inputs, eps, self.is_training)
        if reason:
            return reason
        compilation = compile_steps(self.model, steps["keep"], own.device.type)
        if compilation is not None and compilation.is_compiled:
            last = compile_steps(self.model, steps["channels_last"], own.device.type)
            assert last is not None
            compilation = replace(compilation, seconds=compilation.seconds + last.seconds)
            steps["keep"].compilation = compilation
            # A user could not run a compiled model in a layout in which it does not compile.
            if not last.is_compiled:
                return f"in channels_last {last.reason}"
        # The time of compiling counts towards no budget, so the race ends later by it.
        end = self.deadline.later(0 if compilation is None else compilation.seconds)
        meter = StepMeter(backend, plans.values(), end, step_ns, self._held_bytes)
        plan = judge_layouts(plans, steps, meter)
        return with_relaid(replace(plan, compilation=compilation), steps[plan.memory_format])

    def _attempt(self, plan: Plan, run: Callable[[], _Found]) -> _Found | str:
        """What a function that runs steps returns; or why a step could not be computed."""
        try:
            with _undisturbed(self.model, plan.compiles):
                return run()
        except TuningInterruptedError:
            raise
        except KeyboardInterrupt:
            raise TuningInterruptedError(plan) from None
        # A model that was traced on fake tensors may still fail on real ones, for example for lack
        # of memory. Its plan is returned all the same.
        except STEP_ERRORS as error:
            self.copies.clear()
            return not_computed(error)
        finally:
            # Copies would count as memory of the steps that check a budget.
            if self.config.memory_budget is not None:
                self.copies.clear()

    def _steps(self, division: StepDivision = WHOLE, memory_format: str = "keep") -> Steps:
        """Steps on the copy of this division and layout."""
        key = division, memory_format
        if key not in self.copies:
            how = self.is_training, memory_format, division
            self.copies[key] = Steps(self.model, self.inputs, *how)
        return self.copies[key]

    def _reason(self, device: str) -> str:
        return reason_against_race(self.model, self.inputs, self.config, device)


@contextmanager
def _undisturbed(model: nn.Module, has_compiled: bool = False) -> Iterator[None]:
    with undisturbed(model), warnings.catch_warnings():
        # Compiled code may compute convolutions in another layout than they were planned in. The
        # race shows what the plan gains all the same. Warnings that they are unplanned are off,
        # because the user did not run these steps.
        if has_compiled or is_compiled(model):
            warnings.simplefilter("ignore", UnplannedWarning)
        yield


def _has_other_layout(plan: Plan) -> bool:
    problems = (kernel.problem for kernel in plan.kernels)
    is_kept = plan.memory_format == "keep"
    return is_kept and any(one.rank > 1 and one.layout == "nchw" for one in problems)


def _reason_against_torchs(memory: StepMemory | None, backend: AbstractBackend) -> str:
    """Why an undivided step by torch must not be run; "" if it may."""
    if memory is None:
        return ""
    need = memory.torch_peak_bytes
    most = min(memory.budget_bytes, memory.held_bytes + backend.available_bytes())
    return f"torch's step needs {format_bytes(need)} and was not run" if need > most else ""


def _convolutions_s(plan: Plan) -> float:
    """Seconds that the convolutions of a step take by torch; the whole step takes longer."""
    timed = [(one.default or one.timing, len(one.layers)) for one in plan.kernels]
    return sum(timing.time_ns * calls for timing, calls in timed) / 1e9


def reason_against_race(model: nn.Module, inputs: Any, config: Config, device_type: str) -> str:
    """Why whole steps on a kind of device cannot be raced; "" if they can."""
    if not config.step_race:
        return "step_race is off"
    if config.is_replayed:
        return "the plan is made from a recording"
    return reason_against_steps(model, inputs, device_type)


def with_relaid(plan: Plan, steps: Steps) -> Plan:
    """The plan, with a note of how many convolutions a compiled step has in another layout."""
    compilation = plan.compilation
    if compilation is None or not compilation.is_compiled:
        return plan
    recorder = Recorder()
    with Installation(plan.device.type, recorder):
        steps()
    calls: dict[tuple[str, bool, bool], int] = {}
    for row in recorder.rows():
        if _is_relaid(row.problem, plan):
            # One call computes both gradients of a convolution.
            call = row.name, row.has_bias, row.problem.op == "fprop"
            calls[call] = max(row.calls, calls.get(call, 0))
    return replace(plan, compilation=replace(compilation, relaid=sum(calls.values())))


def _is_relaid(problem: Problem, plan: Plan) -> bool:
    other = replace(problem, layout="nchw" if problem.layout == "nhwc" else "nhwc")
    return plan.covers(other) and not plan.covers(problem)


@dataclass(frozen=True, slots=True)
class StepJudge:
    """Races steps of one model."""

    step: Step
    meter: StepMeter

    def judge(self, plan: Plan, raced: Raced | None = None) -> Plan:
        """The plan with the outcome of its race, and without kernels that make steps no faster.

        At least one kernel of the plan must not be torch's own. A kernel that torch's own
        convolution may not replace keeps its plan, even if that slows steps down. `raced` is the
        plan's race against torch, with peaks, if that race was run already.
        """
        # All kernels but the free ones must stay planned: torch's own convolutions would exceed the
        # workspace limit, or would not be deterministic.
        free = replaceable(plan)
        rest = _without(plan, free)
        raced = raced or self._raced_with_peaks(plan)
        if raced is None:
            return replace(plan, step_race=StepRace(reason=_NO_ROOM))
        # Kernels that must stay planned stay even if they slow the step down. So the plan is
        # compared with steps in which only these kernels are planned.
        against_rest = raced
        if free and not _is_torchs(rest):
            if self.meter.is_over(_LEAST_STEPS):
                return replace(plan, step_race=raced.race)
            against_rest = self._race(plan, rest)
        if not free or against_rest.pays:
            return replace(plan, step_race=raced.race)
        if against_rest.faster is not None:
            kept = [one for one in free if one.problem in against_rest.faster]
        else:
            kept = self._kept(plan, free)
        dropped = [one for one in free if one not in kept]
        # If steps by the whole plan are slower although no kernel was found that slows them down,
        # all kernels are dropped.
        if _is_torchs(rest) and raced.race.is_loss:
            dropped = dropped or free
        return self._judged_without(dropped, plan, raced)

    def _raced_with_peaks(self, plan: Plan) -> Raced | None:
        """A race of the plan against torch, with the peaks of both; None if there is no time."""
        peaks = list[int]()
        # The steps that are run to measure the peaks also warm up. Their times say more about the
        # next steps than the time of the very first step, which may take a third longer.
        for one in (None, plan):
            if self.meter.is_over(3):
                return None
            peaks.append(self.meter.peak_bytes(self.step, one))
        if self.meter.is_over(2):
            return None
        return self._race(plan, is_warm=True).with_peaks(*peaks)

    def _judged_without(self, dropped: Sequence[KernelPlan], plan: Plan, raced: Raced) -> Plan:
        """The plan without the dropped kernels, with the race of what is left of it."""
        # Nothing is dropped if the kernels were faster in parts, although the whole plan was not.
        if not dropped:
            return replace(plan, step_race=raced.race)
        left, race = _without(plan, dropped), raced.race
        torch_peak, plan_peak = race.torch_peak_bytes, race.plan_peak_bytes
        if _is_torchs(left):
            # All kernels are torch's own now, so there is nothing to race.
            race, plan_peak = StepRace(race.torch_ns, race.torch_ns, rounds=race.rounds), torch_peak
        elif self.meter.is_over(_LEAST_STEPS):
            race = StepRace(reason="the time budget has no room for steps without what did not pay")
        else:
            # The first race was of the plan with the dropped kernels, so the rest is raced anew.
            again, others = self._race(left), _changed(left)
            race, is_loss = again.race, again.race.is_loss and not again.pays
            if is_loss and len(replaceable(left)) == len(others):
                return self._judged_without([*dropped, *others], plan, raced)
        names = tuple(str(kernel.problem) for kernel in dropped)
        race = replace(race, torch_peak_bytes=torch_peak, plan_peak_bytes=plan_peak, dropped=names)
        return replace(left, step_race=race)

    def _kept(self, plan: Plan, kernels: Sequence[KernelPlan]) -> list[KernelPlan]:
        """Find, by halving, the kernels with whose plans a step is faster than without."""
        if len(kernels) == 1:
            return []
        middle, kept = len(kernels) // 2, list[KernelPlan]()
        for half in (kernels[:middle], kernels[middle:]):
            # No time is left: kernels that were not shown to make steps faster are given back to
            # torch. Steps by the rest of the plan are raced at the end.
            if self.meter.is_over(2 * _LEAST_STEPS):
                break
            # All replaceable kernels outside this half run torch's own convolutions, so that only
            # this half is judged. The rival has only the kernels that must stay planned.
            others = [kernel for kernel in plan.kernels if kernel not in half]
            with_half = _without(plan, [one for one in others if has_default(plan, one)])
            alone = _without(with_half, half)
            raced = self._race(with_half, None if _is_torchs(alone) else alone)
            # In too few rounds, a half does not count as paying.
            is_proven = raced.pays and raced.race.rounds >= LEAST_ROUNDS
            kept += half if is_proven else self._kept(plan, half)
        return kept

    def _race(self, plan: Plan, other: Plan | None = None, is_warm: bool = False) -> Raced:
        """Run timed steps until it is clear whether a plan is faster than another one, or torch."""
        kernels = replaceable(plan)

        def is_decided(samples: Samples) -> bool:
            raced = raced_inside(samples[0], samples[1], plan, kernels)
            # If the kernels are faster but the steps seem slower, it is not clear yet.
            is_clear = raced.pays and raced.race.ratio <= 1
            by_other, by_plan = steps_ns(samples)
            return is_clear or tells(by_plan, by_other)

        runs = [(self.step, other), (self.step, plan)]
        by_other, by_plan = self.meter.race(runs, is_decided, is_warm)
        return raced_inside(by_other, by_plan, plan, kernels)


def has_default(plan: Plan, kernel: KernelPlan) -> bool:
    """True if torch's own convolution may replace a kernel's plan.

    It must be within the workspace limit, and deterministic if the plan must be. With a pool it
    must need no more workspace than the kernel's plan.
    """
    if plan.config.deterministic and not kernel.default_is_deterministic:
        return False
    limit = plan.limit_bytes(kernel)
    # With a pool, the other calls of the step own the rest of the workspace.
    if plan.config.total_bytes is not None:
        limit = kernel.timing.workspace_bytes
    return kernel.default is not None and (limit is None or kernel.default.workspace_bytes <= limit)


def replaceable(plan: Plan) -> list[KernelPlan]:
    """The kernels that do not run torch's own convolution, although they could."""
    return [kernel for kernel in _changed(plan) if has_default(plan, kernel)]


def _changed(plan: Plan) -> list[KernelPlan]:
    """The kernels that do not run torch's own convolution."""
    return [kernel for kernel in plan.kernels if not kernel.is_default]


def _is_torchs(plan: Plan) -> bool:
    return not _changed(plan)


def _without(plan: Plan, dropped: Sequence[KernelPlan]) -> Plan:
    """The plan with torch's own convolution for some kernels."""
    # If there is a limit, smaller batches keep their splits: it was not measured whether torch's
    # own convolutions of these batches fit.
    settings = plan.config
    limits = (settings.limit_bytes, settings.total_bytes, plan.memory)
    every_batch = all(limit is None for limit in limits)
    kernels = (
        kernel.by_default(every_batch) if kernel in dropped else kernel for kernel in plan.kernels
    )
    return replace(plan, kernels=tuple(kernels))


def judge_layouts(plans: Mapping[str, Plan], steps: Mapping[str, Step], meter: StepMeter) -> Plan:
    """The plan of the better layout, without kernels that do not pay, with both races.

    Args:
        plans: the plans by layout, the model's own first.
        steps: what computes a step, by layout.
        meter: measures the steps.
    """
    ways = layout_ways(plans)
    runs = [
        (steps[way.memory_format], plans[way.memory_format] if way.kind == "plan" else None)
        for way in ways
    ]
    # Taking the peaks runs every way once, so the race needs no round to warm up.
    peaks = [meter.peak_bytes(*run) for run in runs]
    samples = meter.race(runs, lambda times: _is_decided(ways, steps_ns(times)), is_warm=True)
    found = [
        replace(way, peak_bytes=peak)
        for way, peak in zip(timed(ways, steps_ns(samples)), peaks, strict=True)
    ]
    layouts = LayoutRace(tuple(found), winner(ways, steps_ns(samples)))
    chosen = plans[layouts.memory_format]
    torchs, *planned = _of_layout(ways, layouts.memory_format)
    if not planned:
        return replace(chosen, step_race=StepRace(reason=_NOTHING), layout_race=layouts)
    # This race has already timed the plan against torch's own convolutions in the same layout. More
    # steps are run only if the plan lost, to find the kernels that are responsible.
    raced = raced_inside(samples[torchs], samples[planned[0]], chosen, replaceable(chosen))
    raced = raced.with_peaks(peaks[torchs], peaks[planned[0]])
    judged = StepJudge(steps[layouts.memory_format], meter).judge(chosen, raced)
    return replace(judged, layout_race=layouts)


def layout_ways(plans: Mapping[str, Plan]) -> list[Way]:
    """Ways per layout, the model's own first: torch, then the plan if it changes anything."""
    found = []
    for memory_format, plan in plans.items():
        is_allowed = all(has_default(plan, kernel) for kernel in plan.kernels)
        found.append(_way("torch", memory_format, is_allowed))
        found += [] if _is_torchs(plan) else [_way("plan", memory_format)]
    return found


def _way(kind: Literal["torch", "plan"], memory_format: str, is_allowed: bool = True) -> Way:
    name = kind if memory_format == "keep" else f"{kind} in {memory_format}"
    return Way(kind, name, memory_format=memory_format, is_allowed=is_allowed)


def _of_layout(ways: Sequence[Way], memory_format: str) -> list[int]:
    """Indices of a layout's ways: torch, then the plan if there is one."""
    return [i for i, way in enumerate(ways) if way.memory_format == memory_format]


def _best(ways: Sequence[Way], samples: Sequence[Sequence[int]], memory_format: str) -> int:
    """Index of a layout's best way: its plan if that pays, or if torch's own may not win."""
    torchs, *plans = _of_layout(ways, memory_format)
    if not plans:
        return torchs
    pays = raced_of(samples[torchs], samples[plans[0]]).pays
    # A plan that does not pay gives its kernels back to torch, where the limit allows that.
    return plans[0] if pays or not ways[torchs].is_allowed else torchs


def winner(ways: Sequence[Way], samples: Sequence[Sequence[int]]) -> int:
    """Index of the winner: in the model's own layout, unless channels_last is clearly faster."""
    own, last = (_best(ways, samples, which) for which in ("keep", "channels_last"))
    ratios = ratio_interval(samples[last], samples[own], CONFIDENCE)
    return last if is_faster(ratios, TOLERATED) else own


def _is_decided(ways: Sequence[Way], samples: Sequence[Sequence[int]]) -> bool:
    """True if the rounds show clearly whether each plan pays, and which layout is faster."""
    pairs = [(_best(ways, samples, "channels_last"), _best(ways, samples, "keep"))]
    # The way before a plan is torch's own in the same layout.
    pairs += [(i, i - 1) for i, way in enumerate(ways) if way.kind == "plan"]
    return all(tells(samples[one], samples[other]) for one, other in pairs)
