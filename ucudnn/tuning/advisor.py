"""`ucudnn.advise`: time a training step and its convolutions without a search."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from time import monotonic
from typing import Any

import torch
from torch import nn

from ucudnn.backends import AbstractBackend, Cost, open_backend
from ucudnn.benchmark.failures import first_line
from ucudnn.benchmark.statistics import median_ns, ratio_interval, spread_ns
from ucudnn.config import Config, require_config
from ucudnn.errors import ConfigError, UnsupportedError, warn
from ucudnn.execution.compiling import is_compiled
from ucudnn.execution.stepping import STEP_ERRORS, Steps, reason_against_steps, undisturbed
from ucudnn.plan import Timing
from ucudnn.problem import Problem
from ucudnn.split import DEFAULT_ALGORITHM
from ucudnn.tracing import Traced, trace_layers
from ucudnn.tuning.advice import Advice, KernelAdvice
from ucudnn.tuning.step_rounds import race, tells
from ucudnn.tuning.tuner import layers_by_problem
from ucudnn.tuning.worth import least_ns

# Seconds for all of it: advice is for those who do not want to wait for tuning.
_MOST_S = 60.0
# Steps may take this part of the time, kernels the rest.
_STEPS_PART = 0.4
# The least that comparing two layouts takes: warmed up, with their peaks, and one pair.
_LEAST_STEPS = 6
# A kernel is run until it has taken `_ENOUGH_NS` or so many times: long ones only once, because one
# slow layer must not use up the time of all others.
_LEAST_SAMPLES, _MOST_SAMPLES, _ENOUGH_NS = 1, 7, 150_000_000

OnKernel = Callable[[int, int], None]


def _silent(done: int, total: int) -> None:
    del done, total


def advise(
    model: nn.Module,
    example_inputs: Any,
    config: Config | None = None,
    *,
    real: bool = False,
    on_kernel: OnKernel = _silent,
) -> Advice:
    """Time a training step and its convolutions as torch runs them, and bound what can be gained.

    There is no search and nothing is cached; it takes a minute at most. Steps are run on two deep
    copies of the model, in its own layout and in channels_last. Model and random states do not
    change. Steps of a compiled model are run as if it were not compiled, with a warning.

    >>> import torch
    >>> advice = advise(torch.nn.Conv2d(3, 8, 3), torch.ones(2, 3, 9, 9))
    >>> [kernel.problem.op for kernel in advice.kernels], advice.verdict.endswith(".")
    (['fprop', 'wgrad'], True)

    Args:
        model: any module.
        example_inputs: a tensor, a tuple of positional inputs or a dict of keyword inputs; or a
            list of these for several input sizes.
        config: the settings; only `ops` and `backend` matter; default: `Config()`.
        real: compute one step to find the convolutions, for a model whose control flow depends on
            values.
        on_kernel: called after every kernel, with how many are done and how many there are.

    Raises:
        ConfigError: the model does not accept the inputs or computes no convolution, or the
            backend is a recording, which cannot run steps.
    """
    config = require_config(config)
    require_live(config)
    traced = trace_layers(model, example_inputs, config.ops, real=real)
    return advised(model, example_inputs, traced, config, on_kernel)


def advised(
    model: nn.Module,
    example_inputs: Any,
    traced: Traced,
    config: Config,
    on_kernel: OnKernel = _silent,
) -> Advice:
    """Like `advise`, for a model that was traced.

    Args:
        model: any module.
        example_inputs: that it was traced with.
        traced: its convolutions.
        config: the settings.
        on_kernel: called after every kernel.

    Raises:
        ConfigError: as for `advise`.
    """
    require_live(config)
    if is_compiled(model):
        warn(
            "advice is by steps that are not compiled, and another layout may be faster where "
            "torch.compile fuses what stands between convolutions; tune with layout='auto', which "
            "judges a compiled model by compiled steps"
        )
    names = layers_by_problem(traced.layers, config)
    began, backend = monotonic(), open_backend(config.backend)
    advice = Advice((), backend.device())
    advice = _with_steps(advice, model, example_inputs, backend, names, began)
    watch = _Watch(backend, began + _MOST_S)
    found: dict[Problem, KernelAdvice] = {}
    # Function modes of the caller, as `with torch.device(...)`, would change where the operands are
    # allocated.
    with torch.no_grad(), torch._C.DisableTorchFunction():
        # The kernels that probably take longest come first, because time may end before the others.
        for problem in sorted(names, key=lambda p: -p.flops * len(names[p])):
            found[problem] = watch.kernel(problem, names[problem])
            on_kernel(len(found), len(names))
    return replace(advice, kernels=tuple(found[problem] for problem in names))


def require_live(config: Config) -> None:
    """Refuse settings that name a recording.

    Raises:
        ConfigError: the settings name one.
    """
    if config.is_replayed:
        raise ConfigError(
            "advice is about this machine, and the settings name a recording; leave out "
            "backend='recorded' and device"
        )


def _with_steps(
    advice: Advice,
    model: nn.Module,
    inputs: Any,
    backend: AbstractBackend,
    problems: Collection[Problem],
    began: float,
) -> Advice:
    """Run steps in the model's own layout and in channels_last, in turn."""
    reason = reason_against_steps(model, inputs, backend.device().type)
    if reason:
        return replace(advice, reason=reason)
    backward = any(problem.op != "fprop" for problem in problems)
    # In 1-D torch has no channels-last layout, and "nhwc" is that layout already.
    has_other = any(problem.rank > 1 and problem.layout == "nchw" for problem in problems)
    try:
        with undisturbed(model):
            step = Steps(model, inputs, backward)
            advice = replace(advice, step_ns=backend.elapsed_ns(step))
            if _LEAST_STEPS * advice.step_ns > _STEPS_PART * _MOST_S * 1e9:
                return replace(advice, reason="a step takes too long for more than one in a minute")
            peak_bytes = backend.workspace_bytes(step, ())
            advice = replace(advice, step_peak_bytes=peak_bytes)
            # No layout to compare with: one more step, which is warm now, is enough.
            if not has_other:
                return replace(advice, step_ns=min(advice.step_ns, backend.elapsed_ns(step)))
            other = Steps(model, inputs, backward, "channels_last")
            # Taking the peak runs a step, which also warms up what channels_last needs.
            peak = backend.workspace_bytes(other, ())
            until, step_s = began + _STEPS_PART * _MOST_S, advice.step_ns / 1e9
            own, last = race(
                [partial(backend.elapsed_ns, one) for one in (step, other)],
                lambda steps: monotonic() + steps * step_s >= until,
                lambda times: tells(times[1], times[0]),
            )
    # A model that was traced on fake tensors may still fail on real ones. Its kernels can be timed
    # all the same.
    except STEP_ERRORS as error:
        return replace(advice, reason=f"one could not be computed ({first_line(error)})")
    return replace(
        advice,
        step_ns=median_ns(own),
        last_step_ns=median_ns(last),
        last_step_peak_bytes=peak,
        last_ratio=ratio_interval(last, own),
    )


@dataclass(frozen=True, slots=True)
class _Watch:
    """Times kernels until the time is over.

    Args:
        backend: of the device.
        until: the `time.monotonic` after which no kernel is begun.
    """

    backend: AbstractBackend
    until: float

    def kernel(self, problem: Problem, layers: tuple[str, ...]) -> KernelAdvice:
        """Time one kernel by torch's own convolution, in both layouts."""
        others = []
        if problem.rank > 1 and problem.layout == "nchw":
            others.append(replace(problem, layout="nhwc"))
        roofline = self.backend.roofline(problem.dtype)
        elements = sum(map(prod, (*problem.operand_shapes, problem.result_shape)))
        # A direct convolution reads both operands and writes the result once, without workspace.
        direct = Cost(problem.flops, elements * problem.bytes_per_element, 0)
        bounds = [
            least_ns(
                (self.backend.cost(one, c.algorithm) for c in self.backend.candidates(one)),
                roofline,
            )
            for one in (problem, *others)
        ]
        timing, *last = (self._timed(one) for one in (problem, *others))
        # A time below the bound disproves it: the machine was busy when its speed was taken.
        seen = min((each.time_ns for each in (timing, *last) if each), default=0)
        return KernelAdvice(
            problem,
            layers,
            timing,
            last[0] if last else None,
            0 if roofline is None else roofline.time_ns(direct),
            min(bounds) if min(bounds) <= seen else 0,
        )

    def _timed(self, problem: Problem) -> Timing | None:
        if monotonic() >= self.until:
            return None
        backend = self.backend
        try:
            run = backend.executable(problem, DEFAULT_ALGORITHM).alone
            operands = backend.operands(problem, problem.batch)
            call = partial(run, *operands)
            # This run warms the kernel up, too.
            workspace = backend.workspace_bytes(call, [(problem, DEFAULT_ALGORITHM)])
            samples: list[int] = []
            while len(samples) < _LEAST_SAMPLES or (
                len(samples) < _MOST_SAMPLES
                and sum(samples) < _ENOUGH_NS
                and monotonic() < self.until
            ):
                samples.append(backend.elapsed_ns(call))
        # A kernel that cannot run by itself, as for lack of memory, is shown as not timed.
        except (RuntimeError, MemoryError, UnsupportedError):
            return None
        return Timing(median_ns(samples), spread_ns(samples), workspace, len(samples))
