"""From a model to a plan: trace it, tune its convolutions, and judge the plan by whole steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ucudnn.backends import open_backend
from ucudnn.config import Config
from ucudnn.dispatch import installed
from ucudnn.errors import UcudnnError
from ucudnn.plan import Plan
from ucudnn.snapshot import unchanged
from ucudnn.step_race import StepRace
from ucudnn.stepping import Stepper
from ucudnn.tracing import trace_layers
from ucudnn.tuning.effort import EFFORTS
from ucudnn.tuning.progress import Progress
from ucudnn.tuning.step_judge import StepJudge
from ucudnn.tuning.tuner import TuningInterruptedError, is_replayed, tune_problems

# Time to leave of the budget: both contestants in two rounds more than decide a clear race.
RESERVED_STEPS = 10
# What a step may raise where it was traced but cannot be computed here.
_STEP_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError),
    *(NotImplementedError, RuntimeError, TypeError, ValueError, UcudnnError),
)


def tune(
    model: nn.Module,
    example_inputs: Any,
    config: Config | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    *,
    real: bool = False,
) -> Plan:
    """Measure the convolutions of a model's training step and plan each; the model is unchanged.

    The plan is then judged by whole steps of the model on the example inputs, without touching its
    parameters, gradients, buffers or random state: see `Config.step_race`.

    >>> import tempfile
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

    Raises:
        ConfigError: the model does not accept the inputs or computes no convolution.
        PlanError: no plan of some kernel fits the workspace limit.
    """
    config, began = config or Config(), monotonic()
    traced = trace_layers(model, example_inputs, config.ops, real=real)
    reserved = RESERVED_STEPS if config.step_race else 0
    plan = tune_problems(
        traced.layers, config, on_progress, biased=traced.biased, reserved_steps=reserved
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
    several = example_inputs if isinstance(example_inputs, list) else [example_inputs]
    backward = any(kernel.problem.op != "fprop" for kernel in plan.kernels)
    backend = open_backend(plan.backend)
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.random.fork_rng(),
            unchanged(model, None),
        ):
            steppers = [Stepper(model, inputs, backward=backward) for inputs in several]
            step = _Steps(steppers)
            began = monotonic() if began is None else began
            until = _until(config, began, backend.elapsed_ns(step))
            judge = StepJudge(
                step,
                installed,
                backend.elapsed_ns,
                lambda run: backend.workspace_bytes(run, ()),
                until,
            )
            return judge.judge(plan)
    except KeyboardInterrupt:
        raise TuningInterruptedError(plan) from None
    except _STEP_ERRORS as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        reason = f"a step could not be computed ({first})"
        return replace(plan, step_race=StepRace(reason=reason))


class _Steps:
    """One step for each of the example inputs."""

    def __init__(self, steppers: list[Stepper]) -> None:
        self._steppers = steppers

    def __call__(self) -> None:
        for stepper in self._steppers:
            stepper.run()


def _until(config: Config, began: float, step_ns: int) -> float | None:
    """When the race must end: with the budget that was set, or after a part of the default one."""
    if config.time_budget_s is not None:
        return began + config.time_budget_s
    budget_s = EFFORTS[config.effort].budget_s(step_ns)
    return None if budget_s is None else monotonic() + budget_s / 2


def _reason_against(model: nn.Module, inputs: Any, plan: Plan, config: Config) -> str:
    """Why no step is run, "" where some can be."""
    if not config.step_race:
        return "step_race is off"
    if is_replayed(config):
        return "it was made from a recording"
    if all(kernel.is_default for kernel in plan.kernels):
        return "it changes nothing"
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    places = {tensor.device.type for tensor in tensors}
    if places != {plan.device.type}:
        return f"the plan is for {plan.device.type} and tensors are on {', '.join(sorted(places))}"
    if any(type(tensor) not in (Tensor, nn.Parameter) for tensor in tensors):
        return "parameters or inputs are no plain tensors"
    return ""
