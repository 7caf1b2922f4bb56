"""Fit a step into a memory budget: choose how to divide it, plan its kernels, check the plan."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import ceil, inf
from operator import itemgetter
from textwrap import shorten
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ucudnn.backends import AbstractBackend, open_backend
from ucudnn.benchmark.failures import free_after, is_out_of_memory
from ucudnn.config import Config
from ucudnn.errors import (
    ConfigError,
    PlanError,
    TuningInterruptedError,
    UnplannedWarning,
    first_line,
)
from ucudnn.execution.compiling import is_compiled, is_converted, replays_graphs, settings_of
from ucudnn.execution.micro_batching import modes_of
from ucudnn.execution.override import Installation
from ucudnn.execution.runner import Layer, Runner
from ucudnn.kernels.deadline import Deadline
from ucudnn.kernels.limits import Limits
from ucudnn.kernels.tune import plan_without_kernels
from ucudnn.outcomes import Compilation, StepMemory, Way
from ucudnn.plan import Plan
from ucudnn.problem import Problem
from ucudnn.segment import UNCOMPILED, WHOLE, Segment, StepDivision
from ucudnn.steps.compiled import CompiledWays, KnownCompiled, reason_against_compiling
from ucudnn.steps.foresee import Foreseer
from ucudnn.steps.independence import NO_TIME
from ucudnn.steps.profile import StepProfile
from ucudnn.steps.run import STEP_ERRORS, Steps, not_computed, reason_against_steps, undisturbed
from ucudnn.steps.search import SegmentSearch
from ucudnn.steps.tracing import Traced
from ucudnn.system.processes import cached_property
from ucudnn.units import format_bytes, format_sizes
from ucudnn.verdict import CLEARLY

# The largest number of passes. If kernels need more memory than a division leaves to them, the next
# pass leaves them more, or divides the step in another way.
_MOST_PASSES = 6
# A search may take these shares of the time that is left, first without segments inside
# micro-batches, and then with them.
_SHARES = {False: 0.35, True: 0.4}
# Real peaks are larger than foreseen ones by at most this factor, so a refusal names a budget that
# is so much larger. Its text rounds the budget up, by no more than the second factor.
_MARGIN, _ROUNDED = 1.001, 1.1
# Seconds of one search for modules that are recomputed in compiled code.
_RECOMPUTED_S = 30.0
# The most divisions for which plans are made, with those that compute something else than torch.
_MOST_DIVISIONS = 24
# The most ways that a refusal lists.
_LISTED = 6
# Only modules of exactly these classes are swapped by `convert_`.
_SWAPPABLE = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)


@dataclass
class DividedStep:
    """One division of a step, and what it leaves to each kernel.

    Args:
        foreseer: foresees steps of the model.
        division: the division.
        config: the settings, with a memory budget in bytes.
        memory: what is known of the memory of steps.
        copy: steps on the copy of the model on which all divisions run.
    """

    foreseer: Foreseer
    division: StepDivision
    config: Config
    memory: StepMemory
    copy: Callable[[], Steps]
    # By layout and kernel, bytes that calls exceeded the budget by in an earlier pass.
    excess: dict[tuple[str, Problem], int] = field(default_factory=dict)

    def steps(self, memory_format: str = "keep") -> Steps:
        """Real steps of this division, until the copy of the model is divided anew."""
        if memory_format != "keep":
            one = self.foreseer
            return Steps(one.model, one.inputs, one.is_training, memory_format, self.division)
        steps = self.copy()
        steps.divide(self.division)
        return steps

    def profile(self, memory_format: str) -> StepProfile:
        """What a step of this division takes with torch's convolutions."""
        return self.foreseer.step(self.division, memory_format)

    def _live(self, memory_format: str) -> dict[Problem, int]:
        live = self.profile(memory_format).live_bytes
        return {one: size + self.excess.get((memory_format, one), 0) for one, size in live.items()}

    def traced(self, memory_format: str) -> Traced:
        """The convolutions of a step, in the layouts that they have on real tensors."""
        return self.profile(memory_format).traced

    def limits(self, memory_format: str) -> Limits:
        """The workspace that each kernel may use in a layout.

        Raises:
            PlanError: a step in this layout needs more than the budget without workspace.
        """
        budget, live = self.memory.budget_bytes, self._live(memory_format)
        profile = self.profile(memory_format)
        if profile.own_peak_bytes > budget:
            raise PlanError(
                f"a step in {memory_format} needs {format_bytes(profile.own_peak_bytes)} without "
                f"workspace",
                profile.own_peak_bytes,
            )
        # Beside what is held, a training step allocates gradients as large as the parameters. In a
        # divided step, what is live beside a micro-batch may not shrink with the micro-batch.
        fixed = profile.held.total + profile.held.parameters
        if self.division != WHOLE:
            fixed = max(live.values(), default=0)
        peaks = profile.call_peaks if self.config.limit_bytes is None else {}
        fitting = frozenset(one for one, peak in peaks.items() if peak <= budget)
        return Limits(self.config.limit_bytes, budget, live, fixed, fitting)

    def noted(self, plan: Plan) -> Plan:
        """The plan with what is known of a step's memory and the bytes live at each kernel."""
        limits = Limits(None, self.memory.budget_bytes, self._live(plan.memory_format))
        kernels = tuple(replace(one, live_bytes=limits.live(one.problem)) for one in plan.kernels)
        return replace(plan, kernels=kernels, memory=self.memory)

    def foreseen(self, plan: Plan) -> StepProfile:
        """What a step by a plan takes, installed or converted, whichever takes more."""
        with _told_at_the_end():
            profiles = [
                self.foreseer.step(self.division, one.memory_format, one)
                for one in _followed(plan, self.foreseer)
            ]
        return max(profiles, key=lambda one: one.peak_bytes)

    def measured(self, plan: Plan) -> tuple[int, int]:
        """The peak and the time of real steps by a plan, the larger of installed and converted."""
        foreseer = self.foreseer
        backend, steps = foreseer.backend, self.steps(plan.memory_format)
        peaks, times = list[int](), list[int]()
        for one in _followed(plan, foreseer):
            runner = Runner(one, replace(one.config, unplanned="torch"))
            with Installation(plan.device.type, runner), _told_at_the_end():
                # The first step looks up each call in the plan and fills torch's caches.
                steps()
                gc.collect()  # what it left in cycles must not be freed in the next one
                span = backend.span(lambda: times.append(backend.elapsed_ns(steps)))
                peaks.append(span.peak_bytes)
        return foreseer.held.total + max(peaks), max(times)


@contextmanager
def _told_at_the_end() -> Iterator[None]:
    """Context without warnings of kernels that were left out, of which tuning tells at its end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnplannedWarning)
        yield


def _followed(plan: Plan, foreseer: Foreseer) -> list[Plan]:
    """The plan as `installed` follows it, and as a converted model does, if that differs."""
    torchs = {layer for _, layer in foreseer.torchs()}
    swapped = tuple(one for one in plan.kernels if Layer.of(one.problem) not in torchs)
    if len(swapped) == len(plan.kernels):
        return [plan]
    return [plan, replace(plan, kernels=swapped)]


def fit(
    model: nn.Module,
    inputs: Any,
    config: Config,
    make_plan: Callable[[DividedStep], Plan],
    compare: Callable[[Plan, bool], tuple[Plan, Mapping[Segment, str]]],
    begin: Callable[[int], Deadline],
    ways_of: Callable[[StepProfile, Foreseer, KnownCompiled], CompiledWays] | None = None,
    *,
    remeasure: bool = False,
) -> Plan:
    """A plan by which a step stays within a memory budget.

    Args:
        model: any module.
        inputs: an example input, or a list of these for several input sizes.
        config: settings with a memory budget.
        make_plan: plans the kernels of a divided step within its limits.
        compare: compares a divided step by a plan with torch's; returns the plan, and the segments
            by which it differs, each with the reason. It is also told whether random numbers of
            divided modules cannot be made the same for each sample.
        begin: begins the time budget, given the time of a step in ns; returns when it ends.
        ways_of: makes the compiled ways, given torch's step and what is known of such ways; None:
            the step is not compiled.
        remeasure: return no plan that was made for a larger budget.

    Raises:
        ConfigError: no step can be run here, or the model does not accept the inputs.
        PlanError: a step cannot be computed, or exceeds the budget however it is divided.
    """
    if config.is_replayed:
        raise ConfigError(
            "memory_budget is of a step that is run here, and the settings name a recording; leave "
            "out backend='recorded' and device, or set workspace_limit instead"
        )
    backend = open_backend(config.backend)
    _require_steps(model, inputs, config, backend)
    inputs = inputs[0] if isinstance(inputs, list) and len(inputs) == 1 else inputs
    is_training = config.ops != ("fprop",)
    foreseer = Foreseer(model, inputs, backend, is_training, swappable=_SWAPPABLE)
    try:
        with undisturbed(model):
            own = foreseer.step()
            config = config.with_budget_of(own.peak_bytes, foreseer.free_bytes, own.held.total)
            assert config.budget_bytes is not None
            _require_room(foreseer, own, config.budget_bytes)
            fitting = _Fitting(
                *(foreseer, config, own.memory(config.budget_bytes, is_training)),
                *(make_plan, compare, begin(own.time_ns)),
            )
            if not remeasure and (known := fitting.known_plan()) is not None:
                return known
            if ways_of is None:
                return fitting.plan()
            if remeasure:
                fitting.compiled.clear()
            if reason := reason_against_compiling(config):
                return replace(fitting.plan(), compilation=Compilation(reason=reason))
            return fitting.compiled_plan(ways_of(own, foreseer, fitting.compiled))
    except (ConfigError, PlanError, TuningInterruptedError):
        raise
    except STEP_ERRORS as error:
        raise PlanError(
            f"memory_budget is of a step, and none could be computed ({first_line(error)})"
        ) from error


@dataclass
class _Fitting:
    """Makes plans for one division of a step after another, until one stays within the budget."""

    foreseer: Foreseer
    config: Config  # with the budget in bytes
    memory: StepMemory  # of torch's step
    make_plan: Callable[[DividedStep], Plan]
    compare: Callable[[Plan, bool], tuple[Plan, Mapping[Segment, str]]]
    end: Deadline

    def __post_init__(self) -> None:
        one = self.foreseer
        self._copy = cache(partial(Steps, one.model, one.inputs, one.is_training))
        self._known, self.compiled = _known_ways(one, self.config)

    @cached_property
    def _search(self) -> SegmentSearch:
        return SegmentSearch(self.foreseer, self.end, self._copy)

    def plan(self) -> Plan:
        """A plan within the budget, by a way that is known or that a search finds."""
        own, config, budget = self.foreseer.step(), self.config, self.memory.budget_bytes
        has_segments = not isinstance(self.foreseer.inputs, list)
        errors = list[tuple[PlanError, Way]]()
        # First come what was found for another budget, and the undivided step: without its
        # workspace it may be within the budget, and then limits for the workspace may suffice.
        choices = self._known_choices()
        torchs = Way("torch", "torch", own.peak_bytes, own.time_ns, own_bytes=own.own_peak_bytes)
        if torchs.own_bytes <= budget and not config.loop:
            choices.append(_Choice(torchs))
        elif has_segments:
            choices += map(_Choice, self._relaid())
        ways: list[Way] = []  # that a search has found
        spared = 0  # bytes that kernels needed beyond the budget in earlier passes
        for _ in range(_MOST_DIVISIONS):
            if not choices and has_segments:
                choices = _chosen(self._search, self.end, budget - spared, loop=config.loop)
                ways = self._search.ways
            if not choices or len(errors) == _MOST_PASSES:
                break
            choice = choices.pop(0)
            plan = self._planned(choice, ways)
            if isinstance(plan, Plan):
                return self._noted(plan, choice.way, ways)
            if plan is not None:
                errors.append((plan, choice.way))
                spared += max(0, (plan.smallest_bytes or 0) - budget)
            self._known.pop(choice.way.division, None)
            if has_segments:
                self._search.leave_out(choice.way.division)
        raise self._least(errors, ways)

    def _relaid(self) -> Iterator[Way]:
        """The undivided step in channels_last, if that is no slower, and keeps the budget."""
        if self.config.layout == "keep" or self.config.loop:
            return
        with suppress(ConfigError):  # it does not run in channels_last
            step = self.foreseer.step(WHOLE, "channels_last")
            is_slower = step.time_ns > self.foreseer.step().time_ns
            if step.own_peak_bytes <= self.memory.budget_bytes and not is_slower:
                yield Way(
                    *("torch", "torch in channels_last", step.peak_bytes, step.time_ns),
                    memory_format="channels_last",
                    own_bytes=step.own_peak_bytes,
                )

    def compiled_plan(self, ways: CompiledWays) -> Plan:
        """The fastest plan within the budget; of a compiled model a compiled one, if any is."""
        plan, error = None, None
        try:
            plan = None if is_compiled(self.foreseer.model) else self._candidate()
        except PlanError as refusal:
            error = refusal
        try:
            found = self._by_ways(ways, plan)
            compilation = ways.compilation(is_chosen=False)
        except KeyboardInterrupt:
            if plan is None and ways.has_fitting:
                plan = self._noted_compiled(ways)
            if plan is None:
                raise
            raise TuningInterruptedError(plan) from None
        except STEP_ERRORS as failure:
            if plan is None and error is None:
                raise
            found = None
            compilation = Compilation(reason=not_computed(failure))
        if found is not None:
            return found
        if error is not None:
            raise self._smaller(error, ways)
        assert plan is not None
        return self._final(replace(plan, compilation=compilation))

    def _by_ways(self, ways: CompiledWays, plan: Plan | None) -> Plan | None:
        """A plan by compiled ways, if one is faster within the budget than what is not compiled."""
        if plan is None:
            layout, divisions = "keep", [*self._loops()]
        else:
            layout, divisions = plan.memory_format, [plan.division] * (not plan.division.is_whole)
        limit, most = self.memory.budget_bytes, self.memory.torch_peak_bytes
        way = ways.within(limit, most, layout, self._recomputed, divisions)
        fits = way is not None and ways.fits(way)
        if fits and (plan is None or ways.is_faster(plan)):
            return self._noted_compiled(ways)
        return self._uncompiled(ways) if is_compiled(self.foreseer.model) else None

    def _uncompiled(self, ways: CompiledWays) -> Plan:
        """A plan for a compiled model, of which no compiled step keeps the budget as it is.

        The step is divided as one that is not compiled. Parts of it are compiled, if it then keeps
        the budget, too.
        """
        try:
            plan = self._candidate()
        except PlanError as error:
            raise self._smaller(error, ways) from None
        if not plan.division.is_whole:
            way = ways.attempt(plan.division._replace(compiled=1.0), plan.memory_format)
            if way is not None and ways.fits(way):
                return self._noted_compiled(ways)
        compilation = ways.compilation(is_chosen=False)
        return self._final(replace(plan, compiled=UNCOMPILED, compilation=compilation))

    def _smaller(self, error: PlanError, ways: CompiledWays) -> PlanError:
        """The error, which names the smallest peak of a compiled way if that is less."""
        other = error.smallest_bytes
        best = min(ways.ways, key=lambda one: one.peak_bytes, default=None)
        if best is None or other is None or _MARGIN * best.peak_bytes >= other:
            return error
        enough = ceil(_MARGIN * best.peak_bytes)
        limit, least, _ = format_sizes(self.memory.budget_bytes, enough, other)
        return PlanError(
            f"memory_budget={limit} is too small: the smallest peak of a step that was found is "
            f"{least} ({best.name}); raise the budget to it. For steps that are not compiled, "
            f"{error}",
            enough,
        )

    def _final(self, plan: Plan) -> Plan:
        """The plan, which is known for smaller budgets from now on."""
        division = plan.division._replace(compiled=None)
        self._known[division] = self._known[division]._replace(plan=plan)
        return plan

    def _loops(self) -> Iterator[StepDivision]:
        """The loop of the largest micro-batches that is foreseen to keep the budget uncompiled."""
        if self.config.loop and not isinstance(self.foreseer.inputs, list):
            budget = self.memory.budget_bytes
            self._search.foresee_loops()
            loops = [one for one in self._search.ways if one.kind == "loop"]
            fitting = [one.division for one in loops if one.foreseen_bytes <= budget]
            yield from sorted(fitting, key=lambda one: -(one.micro_batch or 0))[:1]

    def _candidate(self) -> Plan:
        """A plan that does not compile, which is not known: a compiled one may be better."""
        plan = self.plan()
        self._known[plan.division] = self._known[plan.division]._replace(plan=None)
        return plan

    def _recomputed(self, limit: int) -> StepDivision:
        """Modules that are recomputed as a whole, by which a step is foreseen to keep a limit."""
        if isinstance(self.foreseer.inputs, list) or not self.foreseer.is_training:
            return WHOLE
        # This is a part of compiling, which is beside the time budget.
        end = Deadline.within(_RECOMPUTED_S)
        self._search.begin(end)
        search = SegmentSearch(self.foreseer, end, self._copy)
        search.share_with(self._search)
        search.is_dry = search.is_uncut = True
        for way in search.ways[1:]:  # recomputed selectively, as the compiler does by itself
            search.leave_out(way.division)
        return search.within(limit).division

    def _noted_compiled(self, ways: CompiledWays) -> Plan:
        """A plan by the best compiled way, which is known from now on."""
        way = ways.best
        plan = ways.plan(plan_without_kernels(self.foreseer.backend, self.config))
        memory = replace(self.memory, plan_peak_bytes=way.peak_bytes, plan_ns=way.time_ns)
        plan = replace(plan, memory=memory)
        self._known[way.division] = _Known(way, memory.budget_bytes, plan)
        return plan

    def _least(self, errors: Sequence[tuple[PlanError, Way]], ways: Sequence[Way]) -> PlanError:
        """The error with the smallest budget that suffices, which is accepted from now on."""
        if errors:
            error, way = min(errors, key=lambda one: one[0].smallest_bytes or inf)
            if error.smallest_bytes is not None:
                self._accept(way, error.smallest_bytes)
            return error
        if ways:
            if not self.config.loop:
                self._search.foresee_loops()  # by which the budget may be kept
            smallest, ways = self._search.smallest(loop=self.config.loop), self._search.ways
            self._accept(smallest, smallest.foreseen_bytes)
        return self._refusal(ways)

    def _accept(self, way: Way, peak: int) -> None:
        """From now on, take this way for a budget as large as this peak, which a refusal names."""
        took = replace(way, peak_bytes=peak, time_ns=way.foreseen_ns)
        self._known[way.division] = _Known(took, round(_ROUNDED * peak))

    def _noted(self, plan: Plan, way: Way, ways: Sequence[Way]) -> Plan:
        """The plan with what is told of it; by which way it is, is known from now on."""
        assert plan.memory is not None
        budget = self.memory.budget_bytes
        reasons = tuple(dict(self._search.reasons()).items()) if ways else ()
        memory = replace(plan.memory, budget_bytes=budget)
        plan = replace(plan, memory=memory, reasons=reasons)
        peak = max(memory.plan_peak_bytes, memory.plan_foreseen_bytes)
        took = replace(way, peak_bytes=peak, time_ns=memory.plan_ns)
        self._known[way.division] = _Known(took, budget, plan)
        return plan

    def _planned(self, choice: _Choice, ways: Sequence[Way]) -> Plan | PlanError | None:
        """The plan of a divided step, measured, or the error; None: another division is better."""
        told = tuple(replace(one, division=WHOLE) for one in ways)
        limit = min(self.memory.budget_bytes, choice.most_bytes)
        memory = replace(self.memory, ways=told, budget_bytes=limit)
        step = DividedStep(self.foreseer, choice.way.division, self.config, memory, self._copy)
        try:
            plan = self._checked(step, choice)
        except PlanError as error:
            return error if choice.way.memory_format == "keep" else None
        # In channels_last alone, steps were not compared by a race of both layouts.
        if plan is not None and plan.memory_format != "keep" and plan.layout_race is None:
            plan, _ = self.compare(plan, False)
            if plan.comparison is None or not plan.comparison.is_same:
                return None
        elif plan is not None and step.division != WHOLE:
            plan, causes = self.compare(plan, self._search.is_unaligned(step.division))
            if causes:
                self._search.reject(causes)
                return None
        return None if plan is None else self._measured(step, plan)

    def _checked(self, step: DividedStep, choice: _Choice) -> Plan | None:
        """A plan whose step is foreseen to keep the budget; None if another division is better.

        Raises:
            PlanError: kernels lack workspace, or the step exceeds the budget with them.
        """
        budget = step.memory.budget_bytes
        for _ in range(2):
            plan = self.make_plan(step)
            if choice.fitting is not None:
                factor = CLEARLY[plan.device.type]
                slowed_ns = choice.way.step_ns * (1 + _lost(plan))
                if slowed_ns >= factor * choice.fitting.step_ns:
                    return None
            profile = step.foreseen(plan)
            if profile.peak_bytes <= budget:
                assert plan.memory is not None
                noted = replace(
                    plan.memory,
                    plan_foreseen_bytes=profile.peak_bytes,
                    plan_foreseen_ns=profile.time_ns,
                    plan_blocks=profile.blocks,
                    calls=_calls(plan, profile),
                )
                return replace(plan, memory=noted)
            planned = {kernel.problem for kernel in plan.kernels}
            for problem, peak in profile.call_peaks.items():
                if peak > budget and problem not in planned:
                    raise PlanError(
                        f"{problem} has no plan and exceeds memory_budget={format_bytes(budget)} "
                        f"by {format_bytes(peak - budget)}; raise the budget, or time_budget_s if "
                        f"the time was over"
                    )
                if peak > budget:
                    key = plan.memory_format, problem
                    step.excess[key] = step.excess.get(key, 0) + peak - budget
        raise _excess(profile.peak_bytes, budget)

    def _measured(self, step: DividedStep, plan: Plan) -> Plan | PlanError | None:
        """The plan with what real steps by it take, or the error if that is too much.

        None if a real step fails; then the segments that are the cause are excluded.
        """
        assert plan.memory is not None
        try:
            measured, time_ns = step.measured(plan)
        except STEP_ERRORS as error:
            if not is_out_of_memory(error):
                if step.division == WHOLE:
                    raise
                self._search.exclude_the_cause(step.division, error)
                return None
            free_after(error)
            needed = plan.memory.plan_foreseen_bytes
            return PlanError(
                f"there is no memory here for a step by the plan, which needs "
                f"{format_bytes(needed)}; lower the budget below it"
            )
        noted = replace(plan.memory, plan_peak_bytes=measured, plan_ns=time_ns)
        if measured > noted.budget_bytes:
            return _excess(measured, noted.budget_bytes)
        return replace(plan, memory=noted)

    def _refusal(self, ways: Sequence[Way]) -> PlanError:
        """The error for a budget that is too small; it lists the ways to run a step, with peaks."""
        memory, config, budget = self.memory, self.config, self.memory.budget_bytes
        reasons = self._search.reasons() if ways else ()
        ways = ways or [Way("torch", "torch", memory.torch_peak_bytes, memory.torch_foreseen_ns)]
        listed = {(one.name, one.most_bytes): one for one in ways}
        by_peak = sorted(listed.values(), key=lambda one: one.most_bytes)
        allowed = [one for one in by_peak if config.loop or one.kind != "loop"]
        smallest_way = allowed[0]
        ways = by_peak[:_LISTED]
        enough = ceil(_MARGIN * smallest_way.most_bytes)
        limit, smallest, *peaks = format_sizes(budget, enough, *(one.most_bytes for one in ways))
        loops = [one for one in by_peak if one.kind == "loop" and one.most_bytes <= budget]
        remedy = ", or lower the batch"
        if any(why == NO_TIME for _, why in reasons):
            remedy = ", or raise time_budget_s"
        if loops and not config.loop:
            remedy = ", or set loop=True, by which it is kept"
        elif isinstance(self.foreseer.inputs, list):
            remedy = (
                ", or tune the largest input size alone: with several sizes no segments are looked "
                "for, and the segments of a plan run at every size"
            )
        elif self.foreseer.batch <= 1:
            remedy = ", or use smaller inputs: a single sample exceeds it by every way tried"
        unswappable = dict.fromkeys(name for name, _ in self.foreseer.torchs())
        names = shorten(", ".join(unswappable), 80, placeholder=" ...")
        torchs = f" These count torch's workspace in {names}, which convert_ cannot swap."
        rows = "".join(f"\n  {way.name}: {peak}" for way, peak in zip(ways, peaks, strict=True))
        if reasons:
            told = [*dict(reasons).items()]
            rows += "\nModules that are not divided or not recomputed:"
            rows += "".join(f"\n  {name or 'the model'}: {why}" for name, why in told[:_LISTED])
            rows += f"\n  and {len(told) - _LISTED} others" * (len(told) > _LISTED)
        fills = shorten(", ".join(f"{what} {size}" for what, size in _named(memory)), 200)
        return PlanError(
            f"memory_budget={limit} is too small: the smallest peak of a step that was found is "
            f"{smallest}; raise the budget to it{remedy}. torch's step takes {fills}."
            f"{torchs if names else ''} Peaks:{rows}",
            enough,
        )

    def known_plan(self) -> Plan | None:
        """The fastest plan, by the same settings, for a larger budget that keeps this one, too."""
        budget, config, found = self.memory.budget_bytes, self.config, list[tuple[int, Plan]]()
        for way, most, plan in self._known.values():
            if plan is None or plan.memory is None or not way.peak_bytes <= budget < most:
                continue
            if config == replace(plan.config, memory_budget=budget):
                memory = replace(plan.memory, budget_bytes=budget)
                found.append((way.time_ns, replace(plan, config=config, memory=memory)))
        return min(found, key=itemgetter(0))[1] if found else None

    def _known_choices(self) -> list[_Choice]:
        """The fastest way within a budget, within the peak that it had, or else within the budget.

        Empty if none is known. For a larger budget than that of a way, a faster one may be found.
        """
        budget = self.memory.budget_bytes
        known = [one for one in self._known.values() if one.way.division.compiled is None]
        within = [way for way, most, _ in known if way.peak_bytes <= budget <= most]
        best = sorted(within, key=lambda one: one.time_ns)[:1]
        tight = [_Choice(one, most_bytes=one.peak_bytes) for one in best]
        return tight + [_Choice(one) for one in best]


class _Known(NamedTuple):
    """The fastest way by which a step was within a budget, and the plan if one was made."""

    way: Way
    budget_bytes: int
    plan: Plan | None = None


_KnownWays = dict[StepDivision, _Known]
# For each model, state and settings. So less memory never costs more: what was found for one budget
# is known for the next.
_KNOWN: WeakKeyDictionary[nn.Module, dict[Hashable, tuple[_KnownWays, KnownCompiled]]]
_KNOWN = WeakKeyDictionary()


def _known_ways(foreseer: Foreseer, config: Config) -> tuple[_KnownWays, KnownCompiled]:
    """The ways that are known of a model in its present state, for these inputs and settings."""
    model = foreseer.model
    tensors = [one for one in tree_leaves(foreseer.inputs) if isinstance(one, Tensor)]
    state: list[Hashable] = [(one.shape, one.stride(), one.dtype) for one in tensors]
    state += [(one.shape, one.requires_grad, one.grad is None) for one in model.parameters()]
    kind = foreseer.backend.device().type
    settings = (
        *(config.ops, config.loop, config.layout, config.workspace_limit, config.policy),
        *(config.compile, *settings_of(model)),
    )
    autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    key = settings, autocast, torch.get_num_threads(), modes_of(model), foreseer.held, *state
    return _KNOWN.setdefault(model, {}).setdefault(key, ({}, {}))


def _excess(peak: int, budget: int) -> PlanError:
    """The error for steps by a plan that exceed the budget."""
    found, limit = format_sizes(peak, budget)
    return PlanError(
        f"a step by the plan has a peak of {found}, which exceeds memory_budget={limit}; raise the "
        f"budget to it",
        peak,
    )


def _require_steps(model: nn.Module, inputs: Any, config: Config, backend: AbstractBackend) -> None:
    """Raise an error if no step can be run, or if a budget of steps makes no sense."""
    if backend.device().type == "cuda" and replays_graphs(model):
        raise ConfigError(
            "memory_budget is of a step that allocates its memory, and this model's compiled code "
            "replays CUDA graphs; compile without mode='reduce-overhead', or set workspace_limit "
            "instead"
        )
    if is_compiled(model) and (reason := reason_against_compiling(config)):
        raise ConfigError(f"memory_budget is of compiled steps, and {reason}; set one of the two")
    reason = reason_against_steps(model, inputs, backend.device().type)
    if reason:
        raise ConfigError(f"memory_budget is of a step, and none can be run: {reason}")
    if any("_ucudnn_runner" in vars(one) for one in model.modules()) or is_converted(model):
        raise PlanError(
            "memory_budget needs a step to be torch's own, and the model was converted; call "
            "ucudnn.revert_(model) first"
        )


def _require_room(foreseer: Foreseer, own: StepProfile, budget: int) -> None:
    """Raise an error if what is held and gradients, in a step however divided, exceed a budget."""
    trained = [one for one in foreseer.model.parameters() if one.requires_grad]
    new = sum(one.numel() * one.element_size() for one in trained if one.grad is None)
    needed = own.held.total + (new if foreseer.is_training else 0)
    if needed > budget:
        limit, least = format_sizes(budget, needed)
        raise PlanError(
            f"memory_budget={limit} is too small for any step: parameters, gradients, inputs and "
            f"the state of optimisers alone take {least}; raise the budget, or use a smaller model "
            f"or batch",
            needed,
        )


class _Choice(NamedTuple):
    """A way to run a step, to plan kernels for.

    Args:
        way: the way, with torch's workspace.
        fitting: the fastest way that fits with torch's workspace; None if there is none, or if it
            is the chosen one.
        most_bytes: the peak of this way when it was planned before.
    """

    way: Way
    fitting: Way | None = None
    most_bytes: int = 1 << 62


def _chosen(search: SegmentSearch, end: Deadline, limit: int, *, loop: bool) -> list[_Choice]:
    """The way to plan kernels for; empty if no step fits, even without workspace."""

    def best(*, inside: bool, is_split: bool) -> Way | None:
        search.is_split = is_split
        # A loop with segments inside recomputes less than segments alone, so it comes first.
        in_parts = search.in_parts(limit, inside=inside) if loop else None
        found = search.within(limit, inside=inside)
        if in_parts is None:
            return found if search.fits(found, limit) else None
        return search.faster_of(in_parts, found) if search.fits(found, limit) else in_parts

    # Segments inside micro-batches are tried last, because small micro-batches that recompute
    # modules are slow.
    for inside, share in _SHARES.items():
        search.begin(end.part(share))
        # Convolutions that are divided into chunks leave room for a faster way.
        split, fitting = (best(inside=inside, is_split=one) for one in (True, False))
        if split is not None:
            # It may have been timed once more, or have failed.
            same = (one for one in search.ways if one.division == split.division)
            split = next((one for one in same if one.is_allowed), None)
        if split is not None and fitting is not None:
            if search.is_clearly_faster(split, fitting):
                return [_Choice(split, fitting)]
            return [_Choice(fitting)]
        if split is not None or fitting is not None:
            return [_Choice(one) for one in (split, fitting) if one is not None]
    # A way whose steps exceed the budget only by their workspace is accepted, too: limits for the
    # workspace may suffice.
    ways = [one for one in search.ways if one.is_allowed and (loop or one.kind != "loop")]
    by_peak = sorted(ways, key=lambda one: one.foreseen_bytes)
    return [_Choice(one) for one in by_peak if one.own_bytes <= limit][:1]


def _named(memory: StepMemory) -> list[tuple[str, str]]:
    """What fills the peak of torch's step, with its size in words."""
    causes = [(what, size) for what, size in memory.causes if size]
    sizes = format_sizes(*(size for _, size in causes))
    return [(what, text) for (what, _), text in zip(causes, sizes, strict=True)]


def _lost(plan: Plan) -> float:
    """Time that kernels lose by limits of workspace, as a fraction of that of torch's kernels."""
    lost = torchs = 0
    for kernel in plan.kernels:
        own = kernel.default or kernel.timing
        limit = plan.limit_bytes(kernel)
        torchs += own.time_ns * len(kernel.layers)
        if limit is not None and own.workspace_bytes > limit:
            lost += max(0, kernel.predicted_time_ns - own.time_ns) * len(kernel.layers)
    return lost / max(1, torchs)


def _calls(plan: Plan, profile: StepProfile) -> tuple[tuple[int, int], ...]:
    """(Index of the kernel in the plan, live bytes) of each call whose kernel is in the plan."""
    places = {kernel.problem: place for place, kernel in enumerate(plan.kernels)}
    return tuple(
        (places[one.problem], one.live_bytes) for one in profile.calls if one.problem in places
    )
