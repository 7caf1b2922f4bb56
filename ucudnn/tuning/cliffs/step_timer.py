"""Time the kernels of whole steps, by torch in several settings and by a plan, in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from time import monotonic
from typing import Any, NamedTuple

import torch
from torch import nn

from ucudnn.backends import AbstractBackend
from ucudnn.benchmark.statistics import median_ns
from ucudnn.execution.override import Installation
from ucudnn.execution.runner import Runner
from ucudnn.execution.stepping import STEP_ERRORS, Steps, reason_against_steps, undisturbed
from ucudnn.execution.timing import KernelTimer
from ucudnn.plan import Plan
from ucudnn.problem import Problem

# After this time no more rounds begin, once there are the least.
_MOST_S, _LEAST_ROUNDS, _MOST_ROUNDS = 60.0, 3, 9


class StepTimes(NamedTuple):
    """Medians of several steps.

    Args:
        step_ns: of a step.
        kernels_ns: of all calls of each kernel in a step.
    """

    step_ns: int
    kernels_ns: Mapping[Problem, int]


class Setting(NamedTuple):
    """A way to compute a step.

    Args:
        memory_format: as for `Stepper`.
        plan: None: torch's own convolutions.
    """

    memory_format: str = "keep"
    plan: Plan | None = None


class StepTimer:
    """Times each kernel in steps of a model, which stays as it is.

    Args:
        model: any module.
        inputs: example inputs, as for `Steps`.
        backend: of the device that it runs on.
        is_training: forward and backward; else forward without a graph, as for inference.
    """

    def __init__(
        self, model: nn.Module, inputs: Any, backend: AbstractBackend, is_training: bool
    ) -> None:
        self._model = model
        self._inputs = inputs
        self._backend = backend
        self._is_training = is_training

    def reason_against(self) -> str:
        """Reason why no step can be timed; "" if steps can be timed."""
        return reason_against_steps(self._model, self._inputs, self._backend.device().type)

    def times(self, settings: Mapping[str, Setting]) -> dict[str, StepTimes]:
        """Times of steps in each setting, one after the other in every round.

        A setting in which the step fails is left out.
        """
        with undisturbed(self._model), self._mode():
            runs = {name: self._prepared(setting) for name, setting in settings.items()}
            samples = {name: list[StepTimes]() for name, run in runs.items() if _works(run)}
            until = monotonic() + _MOST_S
            for done in range(_MOST_ROUNDS):
                if done >= _LEAST_ROUNDS and monotonic() >= until:
                    break
                # Each other round goes backwards, so that none always follows the same.
                for name in list(samples)[:: -1 if done % 2 else 1]:
                    samples[name].append(runs[name]())
        return {name: _medians(taken) for name, taken in samples.items()}

    def _prepared(self, setting: Setting) -> Callable[[], StepTimes]:
        step = Steps(self._model, self._inputs, self._is_training, setting.memory_format)
        runner = None if setting.plan is None else Runner(setting.plan)

        def run() -> StepTimes:
            timer = KernelTimer(self._backend.elapsed_ns, runner)
            with Installation(self._backend.device().type, timer):
                step_ns = self._backend.elapsed_ns(step)
            return StepTimes(step_ns, timer.times_ns)

        return run

    def _mode(self) -> AbstractContextManager[object]:
        # An inference keeps nothing for a backward pass.
        return nullcontext() if self._is_training else torch.no_grad()


def _works(run: Callable[[], object]) -> bool:
    """Run a first step, which finds kernels and fills caches; False if it fails."""
    try:
        run()
    except STEP_ERRORS:
        return False
    return True


def _medians(taken: list[StepTimes]) -> StepTimes:
    kernels = {problem for one in taken for problem in one.kernels_ns}
    # A model may choose in each step what it computes: what is not there took no time.
    return StepTimes(
        median_ns([one.step_ns for one in taken]),
        {p: median_ns([one.kernels_ns.get(p, 0) for one in taken]) for p in kernels},
    )
