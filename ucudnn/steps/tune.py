"""From a model to a plan: trace it, tune its convolutions, and judge the plan by whole steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

from torch import nn

from ucudnn.config import Config, require_config
from ucudnn.errors import ConfigError, PlanError, TuningInterruptedError, first_line
from ucudnn.execution.channels_last import memory_format_of, why_not_channels_last
from ucudnn.execution.compiling import original_of
from ucudnn.kernels.deadline import Deadline
from ucudnn.kernels.results import Progress
from ucudnn.kernels.tuner import device_type, tune_problems
from ucudnn.outcomes import LayoutRace, Origin
from ucudnn.plan import Plan
from ucudnn.segment import WHOLE, Segment, StepDivision
from ucudnn.steps.comparing import PlanComparer
from ucudnn.steps.fit import MemoryBudget
from ucudnn.steps.judge import (
    LAYOUT_RACE_STEPS,
    convolutions_s,
    judged,
    judged_divided,
    judged_in_layouts,
    reason_against_race,
)
from ucudnn.steps.run import tensors_of
from ucudnn.steps.search import faster_division
from ucudnn.steps.tracing import Traced, trace_layers

# The largest number of passes of tuning with a memory budget. If kernels need more memory in a step
# than when they were measured alone, the next pass lowers their workspace limits by the difference.
_MOST_PASSES = 4
# Kernels get this part of the time that is left of a budget that the user set. The rest is for the
# race of whole steps, or for the next pass.
_KERNELS = 0.75

Report = Callable[[Progress], None]


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

    If the model is compiled (`torch.compile(model)`), the copy on which steps run is compiled anew,
    once for each layout. This takes time in addition to `time_budget_s`; what the model itself has
    compiled is not changed.

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
        ConfigError: the model does not accept the inputs or computes no convolution; or it is
            compiled and there is a memory budget.
        PlanError: a kernel has no plan within the workspace limit, or within what the memory
            budget leaves it.
    """
    config, began = require_config(config), monotonic()
    how = {"real": real, "device_type": device_type(config)}
    return _Tuning(model, example_inputs, config, on_progress, remeasure, began, how).run()


@dataclass
class _Tuning:
    """Tunes one model, in one layout or in two."""

    model: nn.Module
    inputs: Any
    config: Config
    on_progress: Report | None
    remeasure: bool
    # The `time.monotonic` from which the time budget counts.
    began: float
    # Arguments for `trace_layers`; another layout or division is traced anew.
    how: Mapping[str, Any]
    budget: MemoryBudget | None = None
    division: StepDivision = WHOLE
    # Modules by which divided steps were not torch's, each with the reason.
    reasons: tuple[tuple[str, str], ...] = ()

    def run(self) -> Plan:
        """Tune the model and judge the plan; repeat both while steps exceed the memory budget.

        A divided step is compared with torch's. If it computes something else, the step is divided
        anew without the segments that are the cause.
        """
        traced = self._traced()
        if self.config.memory_budget is None:
            self.division = faster_division(
                self.model, self.inputs, traced, self.config, self.began
            )
            plan = self._tuned_and_judged(self._divided(traced))
        else:
            self.budget = MemoryBudget(self.model, self.inputs, self.config, self.began, traced)
            self.config = self.budget.config
            plan = self._within_budget(self.budget, traced)
        while self.division != WHOLE:
            try:
                comparer = self._comparer(plan)
                comparison, reason = comparer.compare()
                causes = comparer.causes(reason) if reason else {}
            # Segments that were not compared are in no plan.
            except KeyboardInterrupt:
                undivided = replace(plan, segments=(), micro_batch=None)
                raise TuningInterruptedError(undivided) from None
            if not reason:
                plan = replace(plan, comparison=comparison)
                plan = judged_divided(self.model, self.inputs, plan, self.config, self.began)
                break
            plan = self._without(causes, reason, traced)
        reasons = self.reasons + (() if self.budget is None else self.budget.reasons)
        return self._described(replace(plan, reasons=tuple(dict(reasons).items())))

    def _comparer(self, plan: Plan) -> PlanComparer:
        (inputs,) = self.inputs if isinstance(self.inputs, list) else [self.inputs]
        return PlanComparer(
            self.model,
            inputs,
            plan,
            is_training=self.config.ops != ("fprop",),
            is_unaligned=self.budget is None or self.budget.is_unaligned,
        )

    def _without(self, causes: Mapping[Segment, str], reason: str, traced: Traced) -> Plan:
        """The plan of a step without segments by which it is not torch's."""
        if self.budget is None:
            self.division = WHOLE
            self.reasons = tuple((one.module, why) for one, why in causes.items())
            self.reasons = self.reasons or (("", reason),)
            return self._tuned_and_judged(traced)
        if self.division.micro_batch is not None:
            raise PlanError(
                f"a training loop over micro-batches computes something else: {reason}; leave out "
                f"loop=True"
            )
        self.budget.divides_without(causes)
        return self._within_budget(self.budget, traced)

    def _within_budget(self, budget: MemoryBudget, traced: Traced) -> Plan:
        errors: list[PlanError] = []
        for _ in range(_MOST_PASSES):
            self.division = budget.division
            try:
                plan = self._tuned_and_judged(self._divided(traced))
            except PlanError as error:
                if not budget.divides_anew(error):
                    raise
                errors.append(error)
                continue
            checked = budget.checked(plan)
            if checked is not None:
                return checked
        # Of the divisions in which kernels lacked workspace, the one that needs the least budget.
        raise min(errors, key=lambda one: one.smallest_bytes or 0, default=budget.refusal())

    def _divided(self, traced: Traced) -> Traced:
        return traced if self.division == WHOLE else self._traced()

    def _traced(self, memory_format: str = "keep") -> Traced:
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
                if _problems(last) == _problems(traced):
                    reason = "channels_last changes none of its convolutions"
        if reason:
            return replace(self._as_it_is(traced), layout_race=LayoutRace(reason=reason))
        return self._in_layouts({"keep": traced, "channels_last": last})

    def _as_it_is(self, traced: Traced) -> Plan:
        # A model that was converted by a plan for channels_last is in that layout already.
        layout = memory_format_of(self.model)
        plan = self._tuned(traced, self._part(_KERNELS), self.on_progress, layout)
        return self._judged(plan)

    @property
    def _end(self) -> Deadline | None:
        """The end of a time budget that the user set."""
        seconds = self.config.time_budget_s
        return None if seconds is None else Deadline(self.began + seconds)

    def _part(self, share: float) -> Deadline | None:
        return None if self._end is None else self._end.part(share)

    def _judged(self, plan: Plan) -> Plan:
        return judged(self.model, self.inputs, plan, self.config, self.began)

    def _in_layouts(self, traced: Mapping[str, Traced]) -> Plan:
        # The progress of both tunings is reported as that of one. While the first one runs, `more`
        # is the number of kernels of the second one.
        before = latest = Progress("", 0, 0, 0, 0)
        more = len(set(_problems(traced["channels_last"])))

        def report(event: Progress) -> None:
            nonlocal latest
            latest = replace(
                event,
                done=before.done + event.done,
                total=before.done + event.total + more,
                measured=before.measured + event.measured,
                reused=before.reused + event.reused,
            )
            if self.on_progress is not None:
                self.on_progress(latest)

        # A time budget that the user set is for both layouts together, a default one for each.
        own = self._tuned(traced["keep"], self._part(0.5), report, "keep")
        before, more = latest, 0
        deadline = self._deadline_of_the_second(own)
        try:
            last = self._tuned(traced["channels_last"], deadline, report, "channels_last")
        # The error carries the plan of the first layout, because only that plan is complete.
        except TuningInterruptedError:
            raise TuningInterruptedError(own) from None
        # If no plan fits the limit in channels_last, the model keeps its own layout.
        except PlanError as error:
            reason = f"it has no plan in channels_last ({error})"
            return replace(self._judged(own), layout_race=LayoutRace(reason=reason))
        plans = {"keep": own, "channels_last": last}
        return judged_in_layouts(self.model, self.inputs, plans, self.config, self.began)

    def _deadline_of_the_second(self, own: Plan) -> Deadline | None:
        """When tuning the second layout must end, to leave time for the race."""
        if self._end is None:
            return None
        left_s = self._end.left_s()
        # The time of a step is not known yet. It is taken to be twice as long as its convolutions.
        race_s = min(left_s / 2, max(left_s / 4, 2 * LAYOUT_RACE_STEPS * convolutions_s(own)))
        return self._end.at_most(left_s - race_s)

    def _tuned(
        self, traced: Traced, deadline: Deadline | None, report: Report | None, memory_format: str
    ) -> Plan:
        """A plan for one layout, before it is judged."""
        budget = self.budget
        if budget is not None and not budget.has_seen(memory_format, traced):
            self.how = {**self.how, "real": True}
            traced = self._traced(memory_format)
        plan = tune_problems(
            traced.layers,
            self.config,
            report,
            biased=traced.biased,
            remeasure=self.remeasure,
            limits=None if budget is None else budget.limits(memory_format),
            deadline=deadline,
            last=self._end,
        )
        segments, micro_batch = self.division
        plan = replace(
            plan, memory_format=memory_format, segments=segments, micro_batch=micro_batch
        )
        return plan if budget is None else budget.noted(plan)

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
        return replace(plan, origin=origin)


def _problems(traced: Traced) -> list[Any]:
    return [problem for _, problem in traced.layers]
