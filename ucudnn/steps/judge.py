"""Judge plans by races of whole steps of their model, in its own layout or in two layouts."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import ceil
from time import monotonic
from typing import Any

from torch import nn

from ucudnn.backends import AbstractBackend, open_backend
from ucudnn.benchmark.statistics import median_ns
from ucudnn.config import Config
from ucudnn.errors import TuningInterruptedError, UnplannedWarning, first_line
from ucudnn.execution.compiling import is_compiled, replays_graphs
from ucudnn.execution.observers import KernelTimer, Watcher
from ucudnn.execution.override import Installation
from ucudnn.execution.runner import Runner
from ucudnn.kernels.budget import EFFORTS, LEAST_RACE_STEPS
from ucudnn.kernels.deadline import Deadline
from ucudnn.outcomes import Compilation, LayoutHint, LayoutRace, StepMemory, StepRace
from ucudnn.plan import Plan
from ucudnn.problem import Problem
from ucudnn.steps.layout import LayoutJudge, reason_against_layout
from ucudnn.steps.race import race, raced_of, tells
from ucudnn.steps.run import STEP_ERRORS, Steps, gradient_mode, reason_against_steps, undisturbed
from ucudnn.steps.step_judge import LEAST_STEPS, NO_ROOM, NOTHING, StepJudge, StepMeter
from ucudnn.units import format_bytes

# A race is given time for this many steps, even beyond a default budget: one step of each of the
# two contestants to warm up, and three rounds, which decide a clear race.
RACE_STEPS = 8
# A hint on channels_last is given time for this many steps: one to warm up, and a pair.
HINT_STEPS = 3
# A race of two layouts is given time for this many steps: four rounds of four contestants, and the
# steps before the first round.
LAYOUT_RACE_STEPS = 25
# The most rounds for a hint, each with a step by torch in channels_last and a step by the plan.
_HINT_ROUNDS = 2
# The least number of steps in a race of two layouts: one to see how long steps are, two to compare
# the results of the layouts, and for each of four contestants one for its peak and one for a round.
_LEAST_STEPS = 11
# The reason that a plan gives if there was no time for a hint.
_USED_UP = "the time budget was used up"


def judged(
    model: nn.Module,
    example_inputs: Any,
    plan: Plan,
    config: Config,
    deadline: Deadline | None = None,
) -> Plan:
    """The plan after a race of whole steps, or with the reason why no race was run.

    `deadline` is when the race must end; None: it follows from the settings, and counts from now.
    If the model is compiled, compiled steps are raced.
    """
    reason = reason_against_race(model, example_inputs, config, plan.device.type)
    changes = not all(kernel.is_default for kernel in plan.kernels)
    hints = config.layout == "keep" and _has_other_layout(plan)
    if reason or not (changes or hints):
        return replace(plan, step_race=StepRace(reason=reason or NOTHING))
    # A budget may be too short even for the convolutions of a race.
    least_ns = 1e9 * convolutions_s(plan)
    end = _deadline(deadline, config, 0)
    if changes and not end.has_time(LEAST_RACE_STEPS, least_ns):
        hint = LayoutHint(reason=_USED_UP) if hints else None
        return replace(plan, step_race=StepRace(reason=NO_ROOM), layout_hint=hint)
    backend = open_backend(plan.backend)
    try:
        with _undisturbed(model):
            step = Steps(model, example_inputs, _has_backward(plan), division=plan.division)
            compilation = compile_steps(model, step, plan.device.type)
            plan = with_relaid(replace(plan, compilation=compilation), step)
            # This step warms up, and the default budget is computed from its time.
            step_ns = backend.elapsed_ns(step)
            end = _deadline(deadline, config, step_ns)
            # The time of compiling counts towards no budget, so the race ends later by it.
            end = end.later(0 if compilation is None else compilation.seconds)
            meter = _meter(backend, [plan], end, step_ns)
            if not changes:
                plan = replace(plan, step_race=StepRace(reason=NOTHING))
            else:
                plan = StepJudge(step, meter).judge(plan)
            if not hints:
                return plan
            return replace(plan, layout_hint=_hint(model, example_inputs, plan, step, meter))
    # On Ctrl-C only the race is incomplete, so the error that is raised holds the whole plan.
    except KeyboardInterrupt:
        raise TuningInterruptedError(plan) from None
    # A model that was traced on fake tensors may still fail on real ones, for example for lack of
    # memory. Its plan is returned all the same.
    except STEP_ERRORS as error:
        reason = f"a step could not be computed ({first_line(error)})"
        return replace(plan, step_race=StepRace(reason=reason))


def judged_divided(
    model: nn.Module,
    example_inputs: Any,
    plan: Plan,
    config: Config,
    deadline: Deadline | None = None,
) -> Plan:
    """The plan after a race of divided steps by the plan against undivided steps by torch."""
    backend = open_backend(plan.backend)
    reason = reason_against_race(model, example_inputs, config, plan.device.type)
    reason = reason or reason_against_torchs(plan.memory, backend)
    kernels = plan.step_race or StepRace()
    if reason:
        return replace(plan, step_race=StepRace(reason=reason, dropped=kernels.dropped))
    is_training = config.ops != ("fprop",)
    try:
        with _undisturbed(model), gradient_mode(is_training):
            own = Steps(model, example_inputs, is_training)
            step_ns = backend.elapsed_ns(own)
            meter = _meter(backend, [plan], _deadline(deadline, config, step_ns), step_ns)
            if meter.is_over(LEAST_STEPS):
                return replace(plan, step_race=StepRace(reason=NO_ROOM, dropped=kernels.dropped))
            divided = Steps(model, example_inputs, is_training, plan.memory_format, plan.division)
            # With a memory budget the peaks are known from the steps that checked the budget.
            peaks = (0, 0)
            if plan.memory is None:
                peaks = (meter.peak_bytes(own, None), meter.peak_bytes(divided, plan))
            by_torch, by_plan = race(
                [partial(meter.elapsed_ns, own, None), partial(meter.elapsed_ns, divided, plan)],
                meter.is_over,
                lambda samples: tells(*samples),
            )
    except KeyboardInterrupt:
        raise TuningInterruptedError(plan) from None
    except STEP_ERRORS as error:
        reason = f"a step could not be computed ({first_line(error)})"
        return replace(plan, step_race=StepRace(reason=reason, dropped=kernels.dropped))
    raced = replace(
        raced_of(by_torch, by_plan).race,
        torch_peak_bytes=peaks[0],
        plan_peak_bytes=peaks[1],
        dropped=kernels.dropped,
    )
    return replace(plan, step_race=raced)


def reason_against_torchs(memory: StepMemory | None, backend: AbstractBackend) -> str:
    """Why an undivided step by torch must not be run; "" if it may."""
    if memory is None:
        return ""
    need = memory.torch_peak_bytes
    most = min(memory.budget_bytes, memory.held_bytes + backend.available_bytes())
    return f"torch's step needs {format_bytes(need)} and was not run" if need > most else ""


def convolutions_s(plan: Plan) -> float:
    """Seconds that the convolutions of a step take by torch; the whole step takes longer."""
    timed = [(one.default or one.timing, len(one.layers)) for one in plan.kernels]
    return sum(timing.time_ns * calls for timing, calls in timed) / 1e9


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    with undisturbed(model), warnings.catch_warnings():
        # Compiled code may compute convolutions in another layout than they were planned in. The
        # race shows what the plan gains all the same. Warnings that they are unplanned are off,
        # because the user did not run these steps.
        if is_compiled(model):
            warnings.simplefilter("ignore", UnplannedWarning)
        yield


def _has_other_layout(plan: Plan) -> bool:
    problems = (kernel.problem for kernel in plan.kernels)
    is_kept = plan.memory_format == "keep"
    return is_kept and any(one.rank > 1 and one.layout == "nchw" for one in problems)


def _hint(model: nn.Module, inputs: Any, plan: Plan, step: Steps, meter: StepMeter) -> LayoutHint:
    """Time a few steps in turn: by torch in channels_last, and by the plan, already warmed up."""
    if meter.is_over(HINT_STEPS):
        return LayoutHint(reason=_USED_UP)
    try:
        other = Steps(model, inputs, _has_backward(plan), "channels_last", plan.division)
        # If the steps of the plan are compiled, those in channels_last must be, too, to be
        # comparable.
        if plan.compilation is not None and plan.compilation.is_compiled:
            other.compile()
        other()
        taken = [(meter.elapsed_ns(other, None), meter.elapsed_ns(step, plan))]
        while len(taken) < _HINT_ROUNDS and not meter.is_over(2):
            taken.append((meter.elapsed_ns(other, None), meter.elapsed_ns(step, plan)))
    # The plan is for the model's own layout: it stays valid if the model fails in channels_last.
    except STEP_ERRORS as error:
        return LayoutHint(reason=f"a step could not be computed ({first_line(error)})")
    last, own = (median_ns(times) for times in zip(*taken, strict=True))
    return LayoutHint(last, own, len(taken))


def judged_in_layouts(
    model: nn.Module,
    example_inputs: Any,
    plans: Mapping[str, Plan],
    config: Config,
    deadline: Deadline | None = None,
) -> Plan:
    """The plan of the better layout, found in a race of steps by torch and by plan in each layout.

    `plans` are plans that were not judged yet; the plan for the model's own layout ("keep") comes
    first. The model keeps its layout if steps cannot be compared, or if its results differ in
    channels_last by more than rounding.
    """
    own = plans["keep"]
    # Steps of both layouts compute a backward pass if any of the plans has one: otherwise their
    # times could not be compared.
    backend, backward = open_backend(own.backend), any(map(_has_backward, plans.values()))
    compilation: Compilation | None = None
    steps: dict[str, Steps] = {}
    try:
        with _undisturbed(model):
            steps |= {
                which: Steps(model, example_inputs, backward, which, one.division)
                for which, one in plans.items()
            }
            step_ns = backend.elapsed_ns(steps["keep"])
            end = _deadline(deadline, config, step_ns)
            if not end.has_time(_LEAST_STEPS, step_ns):
                against = "the time budget has no room for steps in both layouts"
            else:
                against = reason_against_layout(steps["keep"], steps["channels_last"], own)
            if not against:
                compilation, against = _compiled(model, steps, own.device.type)
            if not against:
                # The time of compiling counts towards no budget, so the race ends later by it.
                end = end.later(0 if compilation is None else compilation.seconds)
                judge = LayoutJudge(steps, _meter(backend, plans.values(), end, step_ns))
                plan = replace(judge.judge(plans), compilation=compilation)
                return with_relaid(plan, steps[plan.memory_format])
    except KeyboardInterrupt:
        raise TuningInterruptedError(own) from None
    except STEP_ERRORS as error:
        against = f"a step could not be computed ({first_line(error)})"
    # The model must keep its layout; the plan for this layout is judged as if it were the only one.
    spent = 0 if compilation is None else compilation.seconds
    steps.clear()  # their copies of the model take memory
    later = None if deadline is None else deadline.later(spent)
    kept = judged(model, example_inputs, own, config, later)
    # A plan that changes nothing is not raced, so its own `compilation` may be None.
    compilation = kept.compilation or compilation
    return replace(kept, layout_race=LayoutRace(reason=against), compilation=compilation)


def _compiled(
    model: nn.Module, steps: Mapping[str, Steps], device_type: str
) -> tuple[Compilation | None, str]:
    """Compile the steps of both layouts, or of none; also the reason to keep the layout, or ""."""
    own = compile_steps(model, steps["keep"], device_type)
    if own is None or not own.is_compiled:
        return own, ""
    last = compile_steps(model, steps["channels_last"], device_type)
    assert last is not None
    # A user could not run a compiled model in a layout in which it does not compile.
    reason = "" if last.is_compiled else f"in channels_last {last.reason}"
    return Compilation(own.seconds + last.seconds), reason


def _has_backward(plan: Plan) -> bool:
    return any(kernel.problem.op != "fprop" for kernel in plan.kernels)


def _meter(
    backend: AbstractBackend, plans: Iterable[Plan], deadline: Deadline, step_ns: int
) -> StepMeter:
    # `parts` names the chunks of a call. It is empty for a step: only the allocator tells its peak.
    peak = partial(backend.workspace_bytes, parts=())
    install = _Installer(backend, plans)
    # On a GPU kernels are not timed inside a step: the host goes on while the GPU computes, and a
    # step would have to wait for each kernel that is timed.
    timed = install.timed if backend.device().type == "cpu" else None
    return StepMeter(install, backend.elapsed_ns, peak, deadline, step_ns, timed=timed)


class _Installer:
    """Installs one plan after the other, and keeps for each plan the calls that were looked up.

    Otherwise each step would look up all its calls again, and that would count as time of the step.
    """

    def __init__(self, backend: AbstractBackend, plans: Iterable[Plan]) -> None:
        self._backend = backend
        # Runners by the id of their plan. A runner holds its plan, so that no other plan can get
        # the same id.
        self._runners: dict[int, Runner] = {}
        kernels = (kernel for plan in plans for kernel in plan.kernels)
        self._changed = {one.problem.w_shape for one in kernels if not one.is_default}

    def __call__(self, plan: Plan) -> Installation:
        return Installation(plan.device.type, self._runner(plan))

    @contextmanager
    def timed(self, plan: Plan | None) -> Iterator[Mapping[Problem, int]]:
        """Follow a plan, or torch, and time the convolutions that any of the plans changes."""
        runner = None if plan is None else self._runner(plan)
        timer = KernelTimer(self._backend.elapsed_ns, runner, self._changed)
        with Installation(self._backend.device().type, timer):
            yield timer.times_ns

    def _runner(self, plan: Plan) -> Runner:
        if id(plan) not in self._runners:
            # A step of a race may have shapes that the plan does not cover: torch computes them,
            # whatever the user's setting `unplanned` is.
            config = replace(plan.config, unplanned="torch")
            self._runners[id(plan)] = Runner(plan, config)
        return self._runners[id(plan)]


def _deadline(given: Deadline | None, config: Config, step_ns: int) -> Deadline:
    """When a race must end: as it was given, or else by the settings, from now on."""
    if given is not None:
        return given
    seconds = config.time_budget_s or EFFORTS[config.effort].budget_s(step_ns)
    return Deadline.never() if seconds is None else Deadline.within(seconds)


def reason_against_race(model: nn.Module, inputs: Any, config: Config, device_type: str) -> str:
    """Why whole steps on a kind of device cannot be raced; "" if they can."""
    if not config.step_race:
        return "step_race is off"
    if config.is_replayed:
        return "the plan is made from a recording"
    return reason_against_steps(model, inputs, device_type)


def compile_steps(model: nn.Module, steps: Steps, device_type: str) -> Compilation | None:
    """Let the steps of a compiled model run compiled; None if the model is not compiled.

    The first compiled steps are run here. If they fail, the steps stay uncompiled, and the reason
    is returned.
    """
    if not is_compiled(model):
        return None
    # Compiled code that replays CUDA graphs is not raced: all contestants would replay the kernels
    # of the contestant that was captured first.
    if device_type == "cuda" and replays_graphs(model):
        reason = "its compiled code replays CUDA graphs, which keep the kernels that they captured"
        return Compilation(reason=reason)
    began, reason = monotonic(), ""
    try:
        steps.compile()
    # torch.compile raises RuntimeErrors of its own, whatever its backend raised.
    except STEP_ERRORS as error:
        reason = f"torch.compile failed ({_said(error)})"
    return Compilation(ceil(monotonic() - began), reason)


def with_relaid(plan: Plan, steps: Steps) -> Plan:
    """The plan, with a note of how many convolutions a compiled step has in another layout."""
    compilation = plan.compilation
    if compilation is None or not compilation.is_compiled:
        return plan
    watcher = Watcher(lambda: None)
    with Installation(plan.device.type, watcher):
        steps()
    relaid = sum(any(_is_relaid(one, plan) for one in call.copied) for call in watcher.calls)
    return replace(plan, compilation=replace(compilation, relaid=relaid))


def _is_relaid(problem: Problem, plan: Plan) -> bool:
    other = replace(problem, layout="nchw" if problem.layout == "nhwc" else "nhwc")
    return plan.covers(other) and not plan.covers(problem)


def _said(error: BaseException) -> str:
    """The first informative line of an error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # A first line such as "backend='inductor' raised:" says less than the second one.
    said = lines[1] if len(lines) > 1 and lines[0].endswith(":") else " ".join(lines[:1])
    return said or type(error).__name__
