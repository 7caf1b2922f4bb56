"""Whole steps of a model by torch in four ways and by a plan, interleaved in one run."""

from __future__ import annotations

import copy
import gc
import random
import re
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from found_steps import StepBench, TimedSteps, Way
from torch import nn

from ucudnn.backends import AbstractBackend, open_backend
from ucudnn.backends.torch_cpu.processor import give_back_free_blocks
from ucudnn.execution.channels_last import lay_out_
from ucudnn.execution.override import Installation
from ucudnn.execution.runner import Runner
from ucudnn.plan import Plan
from ucudnn.steps.run import STEP_ERRORS, tensors_of

# Before time may end the rounds: the 95 % interval of fewer pairs says next to nothing.
LEAST_ROUNDS = 5
STATUS = Path("/proc/self/status")
MARKS = Path("/proc/self/clear_refs")


def bench_steps(
    model: nn.Module,
    x: torch.Tensor,
    plans: tuple[Plan, Plan],
    ways: Sequence[Way],
    *,
    training: bool = True,
    rounds: int = 9,
    enough_s: float = 90,
    on_round: Callable[[int], bool] | None = None,
) -> StepBench:
    """Time whole steps of copies of a model, one by every way in each round.

    A training step is forward, a loss (the sum of squares of all outputs) and backward; else it is
    forward without gradients. The model stays as it was: one copy is made per layout.

    Args:
        model: a network that is not compiled.
        x: its input.
        plans: those that planned ways follow, uncompiled and compiled.
        ways: the ways to compare.
        training: time training steps, else inference.
        rounds: the most rounds; one that does not count comes before them.
        enough_s: seconds of rounds after which none begins, once there are five.
        on_round: called with the number of each round before its steps, 0 for the one that does not
            count; False ends the rounds. Another process can take its turn here.
    """
    steps = _Copies(model, x, plans, training)
    backend = open_backend(plans[0].backend)
    timed = [_first(way, steps, backend) for way in ways]
    samples = _interleaved(timed, steps, backend, rounds, enough_s, on_round)
    found = tuple(replace(one, samples_ns=tuple(samples.get(one.way, ()))) for one in timed)
    return StepBench(found, training)


class _Copies:
    """Steps of a model by each way, on copies that are laid out and compiled once."""

    def __init__(
        self, model: nn.Module, x: torch.Tensor, plans: tuple[Plan, Plan], training: bool
    ) -> None:
        self._model = model
        self._x = x
        self._training = training
        self._plans = plans
        # Each call is looked up once, as in a run that installs a plan once.
        self._runners = [Runner(plan) for plan in plans]
        self._laid_out: dict[str, nn.Module] = {}
        self._compiled: dict[str, Callable[..., Any]] = {}

    def run(self, way: Way) -> None:
        """Compute one step."""
        plan = self._plans[way.is_compiled]
        memory_format = plan.memory_format if way.is_planned else way.memory_format
        forward = self._forward(memory_format, way.is_compiled)
        runner = self._runners[way.is_compiled]
        following = Installation(plan.device.type, runner) if way.is_planned else nullcontext()
        with following, torch.set_grad_enabled(self._training):
            outputs = forward(self._x)
            if not self._training:
                return
            losses = [one.square().sum() for one in tensors_of(outputs) if one.requires_grad]
            torch.autograd.backward(losses)
        for parameter in self._laid_out[memory_format].parameters():
            parameter.grad = None

    def _forward(self, memory_format: str, is_compiled: bool) -> Callable[..., Any]:
        module = self._laid_out.get(memory_format)
        if module is None:
            module = self._laid_out[memory_format] = copy.deepcopy(self._model)
            if memory_format == "channels_last":
                lay_out_(module)
        if not is_compiled:
            return module
        if memory_format not in self._compiled:
            self._compiled[memory_format] = torch.compile(module)
        return self._compiled[memory_format]


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
    chance = random.Random(0)
    began = time.monotonic()
    for number in range(rounds + 1):
        if number > LEAST_ROUNDS and time.monotonic() - began > enough_s:
            break
        if on_round is not None and not on_round(number):
            break
        chance.shuffle(order)
        for way in order:
            taken = backend.elapsed_ns(lambda way=way: steps.run(way))
            # Round 0 warms up.
            if number:
                samples[way].append(taken)
    return samples


def high_water_bytes(run: Callable[[], object]) -> int | None:
    """Run once and return the most memory that the process gained meanwhile; None if unknown.

    This is what a container's limit counts: it includes what the allocator holds back from the
    system and what libraries allocate by themselves. Linux alone tells it.
    """
    try:
        gc.collect()
        give_back_free_blocks()
        # Linux sets the high-water mark to what the process has now (proc(5), clear_refs).
        MARKS.write_text("5")
        before = _read("VmRSS")
        run()
        return max(0, _read("VmHWM") - before)
    except (OSError, ValueError):
        run()
        return None


def _read(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    if found is None:
        raise ValueError(f"{STATUS} has no {name}")
    return int(found[1]) << 10
