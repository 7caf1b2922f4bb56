"""Steps of a real model by torch in four ways and by a plan, interleaved in one run."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ucudnn.backends import AbstractBackend, open_backend
from ucudnn.errors import ConfigError
from ucudnn.execution.compiling import compiler_of, original_of
from ucudnn.execution.layout import lay_out_
from ucudnn.execution.override import Installation
from ucudnn.execution.randomness import same_random_states
from ucudnn.execution.runner import Runner
from ucudnn.execution.stepping import STEP_ERRORS, tensors_of
from ucudnn.plan import Plan
from ucudnn.steps.result import WAYS, StepBench, TimedSteps, Way
from ucudnn.system.memory import high_water_bytes

# Before time may end the rounds: the 95 % interval of fewer pairs says next to nothing.
_LEAST_ROUNDS = 5


def bench_steps(
    model: nn.Module,
    example_inputs: Any,
    plan: Plan | None = None,
    *,
    compiled_plan: Plan | None = None,
    training: bool = True,
    ways: Sequence[Way] = tuple(WAYS.values()),
    rounds: int = 9,
    enough_s: float = 90,
    on_progress: Callable[[str], None] | None = None,
    on_round: Callable[[int], bool] | None = None,
) -> StepBench:
    """Time whole steps of copies of a model, one by every way in each round.

    A training step is forward, a loss (the sum of squares of all outputs) and backward; else it is
    forward without gradients. The model itself and random states stay as they were.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    >>> bench = bench_steps(model, torch.ones(2, 3, 9, 9), ways=[WAYS["eager"]], rounds=5)
    >>> len(bench.ways[0].samples_ns)
    5

    Args:
        model: any module; one copy is made per layout. If torch.compile made it, compiled ways
            compile by its settings, and the others run what it compiled.
        example_inputs: a tensor, a tuple of positional inputs or a dict of keyword inputs.
        plan: for the ways that follow one, which are left out without it.
        compiled_plan: for those of them that are compiled, as tuned for the compiled model;
            default: the same plan.
        training: time training steps.
        ways: to compare.
        rounds: the most; a first one that does not count comes before them.
        enough_s: no more rounds begin after so many seconds of rounds, once there are five.
        on_progress: called with the name of each way before its first step.
        on_round: called with the number of each round before its steps, 0 for the one that does not
            count; False ends the rounds. Another process can take its turn here.

    Raises:
        ConfigError: the model cannot be copied, or the inputs are a list of several examples.
    """
    if isinstance(example_inputs, list):
        raise ConfigError("steps are timed for one example of inputs, got a list of several")
    ways = [way for way in ways if plan is not None or not way.is_planned]
    with same_random_states(), torch.inference_mode(False):
        plans = (plan, plan if compiled_plan is None else compiled_plan)
        steps = _Copies(model, example_inputs, plans, training)
        backend = open_backend("auto" if plan is None else plan.backend)
        timed = []
        for way in ways:
            if on_progress is not None:
                on_progress(way.name)
            timed.append(_first(way, steps, backend))
        samples = _interleaved(timed, steps, backend, rounds, enough_s, on_round)
    found = tuple(replace(one, samples_ns=tuple(samples.get(one.way, ()))) for one in timed)
    return StepBench(found, training)


class _Copies:
    """Steps of a model by each way, on copies that are laid out and compiled once.

    Args:
        model: to copy.
        inputs: of a step.
        plans: that planned ways follow: those that are not compiled, and those that are.
        training: run backward, too.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        plans: tuple[Plan | None, Plan | None],
        training: bool,
    ) -> None:
        self._model = original_of(model)
        self._compile = compiler_of(model)
        is_named = isinstance(inputs, Mapping)
        self._args: tuple[Any, ...] = (
            () if is_named else inputs if isinstance(inputs, tuple) else (inputs,)
        )
        self._kwargs: dict[str, Any] = dict(inputs) if is_named else {}
        self._training = training
        self._plans = plans
        # Each call is looked up once, as in a run that installs a plan once.
        self._runners = [None if plan is None else Runner(plan) for plan in plans]
        self._laid_out: dict[str, nn.Module] = {}
        self._compiled: dict[str, Callable[..., Any]] = {}

    def run(self, way: Way) -> None:
        """Compute one step."""
        planned = self._plans[way.is_compiled] if way.is_planned else None
        runner = self._runners[way.is_compiled]
        memory_format = way.memory_format if planned is None else planned.memory_format
        forward = self._forward(memory_format, way.is_compiled)
        following = (
            nullcontext()
            if planned is None or runner is None
            else Installation(planned.device.type, runner)
        )
        with following, torch.set_grad_enabled(self._training):
            outputs = forward(*self._args, **self._kwargs)
            if not self._training:
                return
            # Complex outputs have real losses, too.
            losses = [one.abs().square().sum() for one in tensors_of(outputs) if one.requires_grad]
            if losses:
                torch.autograd.backward(losses)
        for parameter in self._laid_out[memory_format].parameters():
            parameter.grad = None

    def _forward(self, memory_format: str, is_compiled: bool) -> Callable[..., Any]:
        module = self._laid_out.get(memory_format)
        if module is None:
            module = self._laid_out[memory_format] = self._copy(memory_format)
        if not is_compiled:
            return module
        if memory_format not in self._compiled:
            self._compiled[memory_format] = self._compile(module)
        return self._compiled[memory_format]

    def _copy(self, memory_format: str) -> nn.Module:
        try:
            module = copy.deepcopy(self._model)
        except (TypeError, RuntimeError, NotImplementedError) as error:
            raise ConfigError(
                f"the model cannot be copied, which its steps need: {error}"
            ) from error
        if memory_format == "channels_last":
            lay_out_(module)
        return module


def _first(way: Way, steps: _Copies, backend: AbstractBackend) -> TimedSteps:
    """Take the first steps by a way, which compile, and its peaks."""

    def step() -> None:
        steps.run(way)

    began = time.monotonic()
    try:
        step()
        first_s = round(time.monotonic() - began, 3)
        return TimedSteps(
            way,
            first_s=first_s,
            peak_bytes=backend.workspace_bytes(step, ()),
            process_bytes=high_water_bytes(step) if backend.device().type == "cpu" else None,
        )
    # torch.compile raises its own errors, which are RuntimeErrors, and whatever the model does.
    except STEP_ERRORS as error:
        return TimedSteps(way, reason=f"{type(error).__name__}: {str(error).splitlines()[0]}")


def _interleaved(
    timed: Sequence[TimedSteps],
    steps: _Copies,
    backend: AbstractBackend,
    rounds: int,
    enough_s: float,
    on_round: Callable[[int], bool] | None,
) -> dict[Way, list[int]]:
    """Times in ns of one step by each way per round."""
    samples: dict[Way, list[int]] = {one.way: [] for one in timed if not one.reason}
    order = list(samples)
    # In random order no way always runs after the same other one, whose data is in the caches.
    chance = random.Random(0)  # noqa: S311 - an order, not a secret
    began = time.monotonic()
    for number in range(rounds + 1):
        if number > _LEAST_ROUNDS and time.monotonic() - began > enough_s:
            break
        if on_round is not None and not on_round(number):
            break
        chance.shuffle(order)
        for way in order:
            taken = backend.elapsed_ns(lambda way=way: steps.run(way))  # type: ignore[misc]
            # Round 0 warms up.
            if number:
                samples[way].append(taken)
    return samples
