"""Time the kernels of whole steps, by torch in several settings and by a plan, in turn."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any, NamedTuple

from torch import nn

from ucudnn.backends import AbstractBackend
from ucudnn.benchmark.failures import first_line
from ucudnn.benchmark.statistics import midmean_ns
from ucudnn.errors import UnplannedWarning
from ucudnn.execution.override import Installation
from ucudnn.execution.runner import Runner
from ucudnn.execution.stepping import STEP_ERRORS, Steps, gradient_mode, undisturbed
from ucudnn.execution.timing import KernelTimer
from ucudnn.plan import Plan
from ucudnn.races import StepTimes

# After this time no more rounds begin, once there are the least.
_MOST_S, _LEAST_ROUNDS, _MOST_ROUNDS = 90.0, 3, 15


class Setting(NamedTuple):
    """A way to compute a step.

    Args:
        memory_format: as for `Stepper`.
        plan: None: torch's own convolutions.
        keeps_blocks: glibc's malloc keeps large blocks of the process for reuse.
    """

    memory_format: str = "keep"
    plan: Plan | None = None
    keeps_blocks: bool = False


class TimedStep:
    """Computes steps of a model, which stays as it is, and times each kernel.

    Args:
        model: any module.
        inputs: example inputs, as for `Steps`.
        backend: of the device that it runs on.
        is_training: forward and backward; else forward without a graph, as for inference.
        setting: its layout and plan; malloc is that of this process.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        backend: AbstractBackend,
        is_training: bool,
        setting: Setting,
    ) -> None:
        self._model = model
        self._backend = backend
        self._is_training = is_training
        self._step = Steps(model, inputs, is_training, setting.memory_format)
        self._runner = None if setting.plan is None else Runner(setting.plan)

    def __call__(self) -> StepTimes:
        """Compute one step."""
        timer = KernelTimer(self._backend.elapsed_ns, self._runner)
        with (
            undisturbed(self._model),
            gradient_mode(self._is_training),
            warnings.catch_warnings(),
            Installation(self._backend.device().type, timer),
        ):
            # The plan has only what was scanned in time.
            warnings.simplefilter("ignore", UnplannedWarning)
            step_ns = self._backend.elapsed_ns(self._step)
        return StepTimes(step_ns, timer.times_ns)


def interleaved(
    steps: Mapping[str, Callable[[], StepTimes]],
    on_round: Callable[[int, int], None] = lambda *_: None,
) -> dict[str, StepTimes | str]:
    """Means of steps in several settings, one of each in every round, for some 90 s.

    Of the rounds the middle half counts: whether a kernel finds its blocks paged in varies from
    step to step. A setting in which a step fails has the reason instead, and if it is the first
    setting, no more steps are computed. There are three rounds at least, and one more before them,
    which finds kernels and fills caches.

    >>> def fails():
    ...     raise RuntimeError("no memory")
    >>> interleaved({"a": lambda: StepTimes(3, {}), "b": fails})
    {'a': StepTimes(step_ns=3, kernels_ns={}), 'b': 'no memory'}

    Args:
        steps: compute a step each; all others are compared with the first.
        on_round: called after every round, with how many are done and how many there may be.
    """
    first = next(iter(steps), "")
    samples = {name: list[StepTimes]() for name in steps}
    failures: dict[str, str] = {}
    until = monotonic() + _MOST_S
    for done in range(1 + _MOST_ROUNDS):
        if done > _LEAST_ROUNDS and monotonic() >= until:
            break
        # Each other round goes backwards, so that none always follows the same.
        for name in list(samples)[:: -1 if done % 2 else 1]:
            try:
                samples[name].append(steps[name]())
            except STEP_ERRORS as error:
                failures[name] = first_line(error)
                del samples[name]
        if first in failures:
            break
        on_round(done, _MOST_ROUNDS)
    means = {name: _means(taken[1:]) for name, taken in samples.items() if len(taken) > 1}
    return means | failures


def _means(taken: list[StepTimes]) -> StepTimes:
    kernels = {problem for one in taken for problem in one.kernels_ns}
    # A model may choose in each step what it computes: what is not there took no time.
    return StepTimes(
        midmean_ns([one.step_ns for one in taken]),
        {p: midmean_ns([one.kernels_ns.get(p, 0) for one in taken]) for p in kernels},
    )
