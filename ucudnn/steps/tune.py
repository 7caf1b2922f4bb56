"""From a model to a plan: trace it, tune its convolutions, and judge the plan by whole steps."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, prod
from textwrap import shorten
from time import monotonic
from typing import Any

import torch
from torch import nn

from ucudnn.backends import open_backend
from ucudnn.benchmark.worker import Worker
from ucudnn.config import Config, require_config
from ucudnn.errors import (
    ConfigError,
    PlanError,
    TuningInterruptedError,
    UnplannedWarning,
    first_line,
)
from ucudnn.execution.channels_last import memory_format_of, why_not_channels_last
from ucudnn.execution.compiling import is_compiled, original_of
from ucudnn.kernels.deadline import EFFORTS, Deadline
from ucudnn.kernels.results import Progress, Report
from ucudnn.kernels.tune import device_type, tune_problems
from ucudnn.outcomes import Compilation, LayoutRace, Origin
from ucudnn.plan import KernelPlan, Plan
from ucudnn.problem import Problem
from ucudnn.segment import WHOLE, Segment, StepDivision
from ucudnn.steps.comparing import PlanComparer
from ucudnn.steps.compiled import CompiledWays, KnownCompiled, reason_against_compiling
from ucudnn.steps.fit import DividedStep, fit
from ucudnn.steps.foresee import Foreseer
from ucudnn.steps.independence import examined
from ucudnn.steps.judge import (
    LAYOUT_RACE_STEPS,
    RACE_STEPS,
    Copies,
    Judge,
    StepJudge,
    reason_against_race,
)
from ucudnn.steps.profile import StepProfile, held_by
from ucudnn.steps.race import StepMeter
from ucudnn.steps.run import (
    STEP_ERRORS,
    Steps,
    not_computed,
    reason_against_steps,
    tensors_of,
    undisturbed,
)
from ucudnn.steps.search import SegmentSearch
from ucudnn.steps.tracing import Traced, trace_layers

# A default time budget is no less than so many steps: plans are measured and compared by steps.
_LEAST_STEPS = 12
# A search for segments that make steps faster may take this part of the time.
_SEARCH = 0.5
# With a memory budget, a step by the plan is foreseen, measured, and compared with torch's, which
# takes at most so many times as long as to foresee one (measured: 3.3 to 6), or if its operators
# are known already, as long as so many of its steps beside the comparison.
_AS_FORESEEN, _AS_STEPS = 7, 3


_NOTHING = Progress("", 0, 0, 0, 0)
# Steps are compared on a part of the batch, if this many times the peak of torch's step exceed the
# memory that is free, or if two steps take more than this part of the time budget.
_OF_PEAK, _OF_TIME = 1.5, 0.15


def tune(
    model: nn.Module,
    example_inputs: Any,
    config: Config | None = None,
    on_progress: Report | None = None,
    *,
    real: bool = False,
    remeasure: bool = False,
) -> Plan:
    """Measure and plan each convolution of a model's training step; the model is unchanged.

    The plan is then judged by whole steps on the example inputs (see `Config.step_race`). The steps
    run on a deep copy of the model, which takes the memory of its weights once more. No step is run
    for a model that cannot be copied. `Config.layout` can ask for the better of two layouts.

    If the model is compiled (`torch.compile(model)`), or may be (`Config.compile`), copies on which
    steps run are compiled, for each layout and each way that is tried. This takes time in addition
    to `time_budget_s` (see `Config.compile_budget_s`); what the model itself has compiled is not
    changed. Compiled steps are compared with the model's own.

    >>> import tempfile, torch
    >>> model = torch.nn.Conv2d(3, 8, 3)
    >>> config = Config(workspace_limit="1MiB", policy="undivided", cache=tempfile.mkdtemp())
    >>> plan = tune(model, torch.ones(2, 3, 9, 9), config)
    >>> sorted(kernel.problem.op for kernel in plan.kernels)
    ['fprop', 'wgrad']

    Args:
        model: any module, compiled or not.
        example_inputs: a tensor, a tuple of positional inputs or a dict of keyword inputs; or a
            list of these for several input sizes. Their batch is the largest that is planned; all
            smaller batches are planned, too.
        config: the settings; default: `Config()`.
        on_progress: called after every measurement.
        real: find the convolutions by computing a step on real tensors, for a model whose control
            flow or hooks need values.
        remeasure: measure everything anew, even if it is in the cache.

    Raises:
        ConfigError: the model does not accept the inputs or computes no convolution; or there is a
            memory budget, and its compiled code replays CUDA graphs.
        PlanError: a kernel has no plan within the workspace limit, or within what the memory
            budget leaves it.
    """
    config, began = require_config(config), monotonic()
    how = {"real": real, "device_type": device_type(config)}
    # A worker starts slowly on a GPU, so all passes and both layouts are measured in one.
    with Worker() as worker:
        return _Tuning(
            model, example_inputs, config, on_progress, remeasure, began, how, worker
        ).run()


@dataclass
class _Tuning:
    """Tunes one model, in one layout or in two."""

    model: nn.Module
    inputs: Any
    config: Config
    on_progress: Report | None
    remeasure: bool
    began: float  # the `time.monotonic` at which tuning began
    # Arguments for `trace_layers`; another layout or division is traced anew.
    how: Mapping[str, Any]
    worker: Worker
    # How the step is divided, and what that leaves to kernels if there is a memory budget.
    division: StepDivision = WHOLE
    step: DividedStep | None = None
    # When tuning must end; None: as long as the time of a step is not known, or cannot be.
    end: Deadline | None = None
    step_ns: int = 0
    # Copies of the model on which the judge runs steps.
    copies: Copies = field(default_factory=dict)
    compiled: CompiledWays | None = None
    # Progress before the layout that is tuned, and now.
    before: Progress = _NOTHING
    latest: Progress = _NOTHING

    def run(self) -> Plan:
        """Tune the model, judge the plan, and compare divided steps with torch's."""
        self._say("a step is foreseen")
        if self.config.memory_budget is not None:
            plan = fit(
                *(self.model, self.inputs, self.config),
                *(self._within, self._compared, self._begin),
                self._ways_of if is_compiled(self.model) or self._may_compile else None,
                remeasure=self.remeasure,
            )
        else:
            traced = self._traced()
            self._begin(0 if self.config.time_budget_s is not None else self._judge.step_ns())
            self.division = faster_division(
                self.model, self.inputs, traced, self.config, self._part(_SEARCH)
            )
            if self.division == WHOLE:
                plan = self._tuned_and_judged(traced)
            else:
                plan = self._tuned_and_judged(self._traced())
                plan, causes = self._compared(plan, is_unaligned=True)
                if causes:
                    self.division = WHOLE
                    named = tuple((one.module, why) for one, why in causes.items())
                    plan = replace(self._tuned_and_judged(traced), reasons=named)
            if self._may_compile:
                plan = self._compiled_if_faster(plan, traced)
        is_relaid = plan.memory_format != "keep" and plan.comparison is not None
        if plan.division != WHOLE or is_relaid:
            if self.step is not None:
                self.copies.clear()  # rivals need copies of their own
            end = self.end or Deadline.never()
            if self.compiled is not None and plan.compiles:
                self.copies[plan.division, plan.memory_format] = self.compiled.steps
                end = self._end_of_compiled(self.compiled)
            plan = replace(self._judge, deadline=end).judge_divided(plan)
        return self._described(plan)

    @property
    def _may_compile(self) -> bool:
        return self.config.compile == "auto" and not is_compiled(self.model)

    def _compiled_if_faster(self, plan: Plan, traced: Traced) -> Plan:
        """A plan by which the model is compiled, if steps are then faster; else the same plan."""
        reason = reason_against_race(self.model, self.inputs, self.config, plan.device.type)
        reason = reason or reason_against_compiling(self.config)
        if reason:
            return replace(plan, compilation=Compilation(reason=reason))
        held, kernels = held_by(self.model, self.inputs).total, plan.kernels
        try:
            with undisturbed(self.model):
                ways = self._ways(held, traced.problems)
                divided = [] if plan.division == WHOLE else [plan.division]
                way = ways.within(inf, 0, plan.memory_format, divisions=divided)
                if way is None or not ways.is_faster(plan):
                    return replace(plan, compilation=ways.compilation(is_chosen=False))
                self.compiled, layout = ways, plan.memory_format
                plan = replace(ways.plan(plan), layout_race=None)
                same = layout == way.memory_format
                return self._with_kernels(plan, kernels, ways, held) if same else plan
        except KeyboardInterrupt:
            raise TuningInterruptedError(plan) from None
        except STEP_ERRORS as error:
            if plan.compiles:  # the kernels failed
                return plan
            return replace(plan, compilation=Compilation(reason=not_computed(error)))

    def _end_of_compiled(self, ways: CompiledWays) -> Deadline:
        """When a race of compiled steps must end: beside the time budget, as compiling is."""
        end = self.end or Deadline.never()
        return max(end, Deadline.within(RACE_STEPS * ways.step_s))

    def _with_kernels(
        self, plan: Plan, kernels: tuple[KernelPlan, ...], ways: CompiledWays, held_bytes: int
    ) -> Plan:
        """The plan with those kernels that make compiled steps faster than the compiler's own."""
        if all(kernel.is_default for kernel in kernels):
            return plan
        planned = replace(plan, kernels=kernels)
        end, step_ns = self._end_of_compiled(ways), ways.best.time_ns
        meter = StepMeter(open_backend(plan.backend), [planned], end, step_ns, held_bytes)
        with warnings.catch_warnings():
            # The compiler may compute convolutions in a layout for which there is no plan.
            warnings.simplefilter("ignore", UnplannedWarning)
            judged = StepJudge(ways.steps, meter).judge(planned)
        race = judged.step_race
        return judged if race is not None and race.rounds else plan

    def _ways_of(self, own: StepProfile, foreseer: Foreseer, known: KnownCompiled) -> CompiledWays:
        """Compiled ways of a step within a memory budget, given torch's step."""
        need = _OF_PEAK * max(1, own.peak_bytes - own.held.total)
        share = foreseer.free_bytes / need
        self.compiled = self._ways(own.held.total, own.traced.problems, known, share)
        return self.compiled

    def _ways(
        self,
        held_bytes: int,
        problems: Iterable[Problem],
        known: KnownCompiled | None = None,
        share: float = 1.0,
    ) -> CompiledWays:
        how = self.model, self.inputs, self.config, open_backend(self.config.backend)
        return CompiledWays(*how, held_bytes, problems, known, share, self._say)

    def _within(self, step: DividedStep) -> Plan:
        """The plan of a divided step, whose kernels stay within its limits."""
        division = ", ".join(map(str, step.division.segments)) or "the undivided step"
        self._say(f"kernels of {shorten(division, 60)}")
        self.step, self.division, self.config = step, step.division, step.config
        # A judge of its own would copy the model again. The copy is divided anew for each division.
        self.copies.clear()
        self.copies[step.division, "keep"] = step.steps()
        return self._tuned_and_judged(self._traced())

    def _compared(self, plan: Plan, is_unaligned: bool) -> tuple[Plan, Mapping[Segment, str]]:
        """The plan after a comparison with torch, and the segments by which they differ."""
        self._say("a step by the plan is compared with torch's")
        (inputs,) = self.inputs if isinstance(self.inputs, list) else [self.inputs]
        comparer = PlanComparer(
            self.model,
            inputs,
            plan,
            is_training=self.config.ops != ("fprop",),
            is_unaligned=is_unaligned,
            share=self._share_to_compare(plan),
        )
        try:
            comparison, reason = comparer.compare()
            causes = comparer.causes(reason) if reason else {}
        # Segments that were not compared are in no plan.
        except KeyboardInterrupt:
            undivided = replace(plan, segments=(), micro_batch=None)
            if plan.layout_race is None:  # nor were steps in channels_last
                undivided = replace(undivided, memory_format="keep")
            raise TuningInterruptedError(undivided) from None
        if reason and plan.micro_batch is not None:
            raise PlanError(
                f"a training loop over micro-batches computes something else: {reason}; leave out "
                f"loop=True"
            )
        return replace(plan, comparison=comparison), causes

    def _share_to_compare(self, plan: Plan) -> float:
        """The share of a step by torch for which there are memory and time."""
        if plan.memory is None:
            return 1.0
        free = open_backend(plan.backend).available_bytes()
        need = max(1, plan.memory.torch_peak_bytes - plan.memory.held_bytes)
        return min(free / (_OF_PEAK * need), self._time_to_compare_s / max(1e-9, 2 * self._step_s))

    @property
    def _step_s(self) -> float:
        """Foreseen seconds of a divided step."""
        return 0.0 if self.step is None else self.step.profile("keep").time_ns / 1e9

    @property
    def _time_to_compare_s(self) -> float:
        return inf if self.end is None else _OF_TIME * (self.end.at_s - self.began)

    def _traced(self, memory_format: str = "keep") -> Traced:
        if self.step is not None:
            return self.step.traced(memory_format)
        return trace_layers(
            self.model,
            self.inputs,
            self.config.ops,
            **self.how,
            memory_format=memory_format,
            division=self.division,
        )

    def _tuned_and_judged(self, traced: Traced) -> Plan:
        if self.config.layout == "keep":
            return self._as_it_is(traced)
        device = self.how["device_type"]
        reason = reason_against_race(self.model, self.inputs, self.config, device)
        # The original model is examined, not the copy on which steps run, because the copy shares
        # memory with no other tensor.
        reason = reason or why_not_channels_last(original_of(self.model)) or ""
        if not reason:
            try:
                last = self._traced("channels_last")
            # A model that cannot be computed in channels_last keeps its layout. The reason that is
            # given is the cause of this error: the error that the model's own code raised.
            except ConfigError as error:
                reason = f"it fails in channels_last ({first_line(error.__cause__ or error)})"
            else:
                # For 1-D convolutions, or a model in channels_last already, the two layouts have
                # the same problems, so there is nothing to compare.
                if last.problems == traced.problems:
                    reason = "channels_last changes none of its convolutions"
        if reason:
            return replace(self._as_it_is(traced), layout_race=LayoutRace(reason=reason))
        return self._in_layouts({"keep": traced, "channels_last": last})

    def _as_it_is(self, traced: Traced) -> Plan:
        # A model that was converted by a plan for channels_last is in that layout already.
        layout = memory_format_of(self.model)
        return self._judge.judge(self._tuned(traced, self._end_of_kernels(), layout))

    def _begin(self, step_ns: int) -> Deadline:
        """Begin the time budget of steps of this time; return when it ends."""
        self.step_ns = step_ns
        seconds = self.config.time_budget_s
        if seconds is None and step_ns:
            on_gpu = self.how["device_type"] == "cuda"
            seconds = EFFORTS[self.config.effort].budget_s(step_ns, on_gpu=on_gpu)
            seconds = seconds and max(seconds, _LEAST_STEPS * step_ns / 1e9)
        self.end = None if seconds is None else Deadline(self.began + seconds)
        self._say("ways to divide the step are foreseen")
        return self.end or Deadline.never()

    def _part(self, share: float) -> Deadline | None:
        return None if self.end is None else self.end.part(share)

    @property
    def _judge(self) -> Judge:
        end = self._end_of_races or Deadline.never()
        return Judge(self.model, self.inputs, self.config, end, self.copies)

    @property
    def _end_of_races(self) -> Deadline | None:
        """When a race of steps must end, to leave time for what a memory budget asks for."""
        if self.end is None or self.step is None:
            return self.end
        steps_s = _AS_STEPS * self._step_s + min(2 * self._step_s, self._time_to_compare_s)
        return self.end.later(-max(_AS_FORESEEN * self.step.foreseer.took_s, steps_s))

    def _in_layouts(self, traced: Mapping[str, Traced]) -> Plan:
        # The progress of both tunings is reported as that of one.
        self.before = self.latest = _NOTHING
        more = len({*traced["channels_last"].problems})
        # A time budget that the user set is for both layouts together, a default one for each.
        try:
            own = self._tuned(traced["keep"], self._part(0.5), "keep", more)
        except PlanError as error:
            if self.step is None or self.division != WHOLE:
                raise
            return self._relaid(traced["channels_last"], error)
        self.before = self.latest
        deadline = self._end_of_kernels(LAYOUT_RACE_STEPS)
        try:
            last = self._tuned(traced["channels_last"], deadline, "channels_last")
        # The error carries the plan of the first layout, because only that plan is complete.
        except TuningInterruptedError:
            raise TuningInterruptedError(own) from None
        # If no plan fits the limit in channels_last, the model keeps its own layout.
        except PlanError as error:
            reason = f"it has no plan in channels_last ({error})"
            return replace(self._judge.judge(own), layout_race=LayoutRace(reason=reason))
        return self._judge.judge_in_layouts({"keep": own, "channels_last": last})

    def _relaid(self, traced: Traced, error: PlanError) -> Plan:
        """The plan of an undivided step that keeps a memory budget in channels_last, if any does.

        It is not compared with torch's step yet. If there is none, the error for the model's own
        layout is raised.
        """
        try:
            plan = self._tuned(traced, self._end_of_kernels(), "channels_last")
        except PlanError:
            raise error from None
        try:
            return self._judge.judge(plan, "channels_last")
        except TuningInterruptedError:
            raise TuningInterruptedError(replace(plan, memory_format="keep")) from None

    def _end_of_kernels(self, race_steps: int = RACE_STEPS) -> Deadline | None:
        """When kernels must be tuned, to leave time for a race of whole steps."""
        end = self._end_of_races
        if end is None or not self.config.step_race:
            return end
        left_s = end.left_s()
        race_s = min(left_s / 2, max(left_s / 4, race_steps * self.step_ns / 1e9))
        return end.at_most(left_s - race_s)

    def _say(self, what: str) -> None:
        """Report what is done now, beside kernels: it may take long."""
        takes_long = self.config.memory_budget is not None or self._may_compile
        if self.on_progress is not None and takes_long:
            self.on_progress(replace(self.latest, kernel=what))

    def _report(self, more: int, event: Progress) -> None:
        """Report with what was done before, and with the budget of all of tuning."""
        before = self.before
        self.latest = replace(
            event,
            done=before.done + event.done,
            total=before.done + event.total + more,
            measured=before.measured + event.measured,
            reused=before.reused + event.reused,
        )
        if self.end is not None:
            times = round(self.end.at_s - self.began, 1), self.end.left_s()
            self.latest = replace(self.latest, budget_s=times[0], seconds_left=times[1])
        if self.on_progress is not None:
            self.on_progress(self.latest)

    def _tuned(
        self, traced: Traced, deadline: Deadline | None, memory_format: str, more: int = 0
    ) -> Plan:
        """A plan for one layout, before it is judged; `more` kernels of the other one follow."""
        try:
            plan = tune_problems(
                traced.layers,
                self.config,
                partial(self._report, more) if self.on_progress is not None else None,
                biased=traced.biased,
                remeasure=self.remeasure,
                limits=None if self.step is None else self.step.limits(memory_format),
                deadline=deadline,
                last=self._end_of_races,
                worker=self.worker,
            )
        except PlanError:
            more = 0  # the other layout is not tuned
            raise
        finally:
            # The other layout is tuned before any step is run.
            if not (more or self._keeps_worker()):
                self.worker.close()
        plan = replace(plan, memory_format=memory_format, **self.division._asdict())
        return plan if self.step is None else self.step.noted(plan)

    def _keeps_worker(self) -> bool:
        """True if another pass may follow, and steps have enough memory beside the worker.

        On a GPU, the context of a process takes memory even if the process has no operands.
        """
        if self.step is None:
            return False
        memory = self.step.memory
        need = memory.budget_bytes - memory.held_bytes
        return need <= open_backend(self.config.backend).available_bytes()

    def _described(self, plan: Plan) -> Plan:
        """The plan with its model's name, its inputs, and the time that all of tuning took."""
        inputs = tuple(self.inputs) if isinstance(self.inputs, list) else self.inputs
        origin = replace(
            plan.origin or Origin(),
            model=type(original_of(self.model)).__name__,
            inputs=tuple(
                f"{'x'.join(map(str, tensor.shape))} {str(tensor.dtype).removeprefix('torch.')}"
                for tensor in tensors_of(inputs)
            ),
            seconds=round(monotonic() - self.began),
        )
        if self.end is not None:
            origin = replace(origin, budget=f"{self.end.at_s - self.began:.0f}")
        return replace(plan, origin=origin)


def faster_division(
    model: nn.Module, inputs: Any, traced: Traced, config: Config, deadline: Deadline | None
) -> StepDivision:
    """The division that makes steps faster without a larger peak; `WHOLE` if there is none.

    Args:
        model: any module.
        inputs: the inputs that the model was traced with.
        traced: the convolutions of the model.
        config: the settings, without a memory budget.
        deadline: when the search must end; None: never.
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
                foreseer = Foreseer(model, inputs, backend, config.ops != ("fprop",))
                search = SegmentSearch(foreseer, deadline)
                return search.faster(config.loop)
    # A model that was traced on fake tensors may still fail on real ones. It is no error here,
    # because the race of whole steps reports it.
    except STEP_ERRORS:
        pass
    return WHOLE
