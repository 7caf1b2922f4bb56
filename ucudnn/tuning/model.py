"""From a model to a plan: trace it, tune its convolutions, and judge the plan by whole steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import monotonic
from typing import Any

from torch import nn

from ucudnn.backends import open_backend
from ucudnn.benchmark.rounds import failure_of
from ucudnn.config import Config
from ucudnn.execution.override import Installation
from ucudnn.execution.runner import Runner
from ucudnn.execution.stepping import STEP_ERRORS, Steps, reason_against_steps, undisturbed
from ucudnn.plan import Plan
from ucudnn.step_race import StepRace
from ucudnn.tracing import trace_layers
from ucudnn.tuning.effort import EFFORTS
from ucudnn.tuning.progress import Progress
from ucudnn.tuning.step_judge import StepJudge, may_be_torchs
from ucudnn.tuning.tuner import TuningInterruptedError, is_replayed, tune_problems

# Time to leave of the budget: both contestants in two rounds more than decide a clear race.
RESERVED_STEPS = 10


def tune(
    model: nn.Module,
    example_inputs: Any,
    config: Config | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    *,
    real: bool = False,
    remeasure: bool = False,
) -> Plan:
    """Measure the convolutions of a model's training step and plan each; the model is unchanged.

    The plan is then judged by whole steps of the model on the example inputs, without touching its
    parameters, gradients, buffers or random state: see `Config.step_race`.

    >>> import tempfile, torch
    >>> model = torch.nn.Conv2d(3, 8, 3)
    >>> config = Config(workspace_limit="1MiB", policy="undivided", cache=tempfile.mkdtemp())
    >>> plan = tune(model, torch.ones(2, 3, 9, 9), config)
    >>> sorted(kernel.problem.op for kernel in plan.kernels)
    ['fprop', 'wgrad']

    Args:
        model: any module.
        example_inputs: a tensor, a tuple of positional inputs or a dict of keyword inputs; a list
            of such for several input sizes. Their batch is the largest planned, every smaller one
            is planned with it.
        config: the settings; default: `Config()`.
        on_progress: called after every measurement.
        real: compute one step to find the convolutions, for a model whose course depends on values.
        remeasure: take every time anew, whatever the cache has.

    Raises:
        ConfigError: the model does not accept the inputs or computes no convolution.
        PlanError: no plan of some kernel fits the workspace limit.
    """
    config, began = config or Config(), monotonic()
    traced = trace_layers(model, example_inputs, config.ops, real=real)
    reserved = RESERVED_STEPS if config.step_race else 0
    plan = tune_problems(
        traced.layers,
        config,
        on_progress,
        biased=traced.biased,
        reserved_steps=reserved,
        remeasure=remeasure,
    )
    return judged(model, example_inputs, plan, config, began)


def judged(
    model: nn.Module, example_inputs: Any, plan: Plan, config: Config, began: float | None = None
) -> Plan:
    """The plan after a race of whole steps, or with the reason why there was none.

    Args:
        model: that the plan was made for.
        example_inputs: that it was traced with.
        plan: not judged yet.
        config: with the time budget.
        began: the `time.monotonic` from which the budget counts; None: now.
    """
    reason = _reason_against(model, example_inputs, plan, config)
    if reason:
        return replace(plan, step_race=StepRace(reason=reason))
    backward = any(kernel.problem.op != "fprop" for kernel in plan.kernels)
    backend = open_backend(plan.backend)
    try:
        with undisturbed(model):
            step = Steps(model, example_inputs, backward)
            began = monotonic() if began is None else began
            until = _until(plan, config, began, backend.elapsed_ns(step))
            judge = StepJudge(
                step,
                _Installer(),
                backend.elapsed_ns,
                lambda run: backend.workspace_bytes(run, ()),
                until,
            )
            return judge.judge(plan)
    except KeyboardInterrupt:
        raise TuningInterruptedError(plan) from None
    except STEP_ERRORS as error:
        reason = f"a step could not be computed ({failure_of(error)})"
        return replace(plan, step_race=StepRace(reason=reason))


class _Installer:
    """Installs plans in turn; what was looked up for one stays, as in a run that installs it once.

    To look all calls of a step up takes as long as some of them.
    """

    def __init__(self) -> None:
        self._runners: dict[int, Runner] = {}  # each keeps its plan, so that no other has its id

    def __call__(self, plan: Plan) -> Installation:
        return Installation(plan.device.type, self._runners.setdefault(id(plan), Runner(plan)))


def _until(plan: Plan, config: Config, began: float, step_ns: int) -> float | None:
    """When the race must end: with the budget that was set, or with the default one."""
    budget_s = config.time_budget_s
    if budget_s is None:
        is_forced = any(not may_be_torchs(plan, kernel) for kernel in plan.kernels)
        budget_s = EFFORTS[config.effort].budget_s(step_ns, is_forced)
    return None if budget_s is None else began + budget_s


def _reason_against(model: nn.Module, inputs: Any, plan: Plan, config: Config) -> str:
    """Reason why no step is run, "" where some can be."""
    if not config.step_race:
        return "step_race is off"
    if is_replayed(config):
        return "it was made from a recording"
    if all(kernel.is_default for kernel in plan.kernels):
        return "it changes nothing"
    return reason_against_steps(model, inputs, plan.device.type)
