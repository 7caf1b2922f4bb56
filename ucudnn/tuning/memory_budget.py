"""Keep the whole step of a model within a memory budget: what each kernel may use, and a check."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ucudnn.backends import AbstractBackend, open_backend
from ucudnn.benchmark.failures import first_line
from ucudnn.config import Config
from ucudnn.errors import ConfigError, PlanError
from ucudnn.execution.compiling import is_compiled
from ucudnn.execution.stepping import STEP_ERRORS, reason_against_steps
from ucudnn.plan import KernelPlan, Plan
from ucudnn.problem import Problem
from ucudnn.races import StepMemory
from ucudnn.tracing import Traced
from ucudnn.tuning.division import Overlap
from ucudnn.tuning.limits import Limits
from ucudnn.tuning.step_profile import StepProfile, StepProfiler
from ucudnn.units import format_bytes


@dataclass
class _Layout:
    """State of the budget in one layout of the model."""

    profiler: StepProfiler
    # Of a step by torch's own convolutions.
    profile: StepProfile
    memory: StepMemory
    live_bytes: dict[Problem, int]
    overlap: Overlap | None = None


class MemoryBudget:
    """The memory budget of the steps of one model.

    Args:
        model: any module.
        inputs: example inputs.
        config: settings with a memory budget.

    Raises:
        ConfigError: no step can be run here, or the model is compiled.
    """

    def __init__(self, model: nn.Module, inputs: Any, config: Config) -> None:
        if config.is_replayed:
            raise ConfigError(
                "memory_budget is of a step that is run here, and the settings name a recording; "
                "leave out backend='recorded' and device_profile, or set workspace_limit instead"
            )
        if is_compiled(model):
            raise ConfigError(
                "memory_budget is of steps that are not compiled, and torch.compile changes what a "
                "step allocates; tune the model before it is compiled, or set workspace_limit "
                "instead"
            )
        self._model = model
        self._inputs = inputs
        self._config = config
        self._is_training = config.ops != ("fprop",)
        self._layouts: dict[str, _Layout] = {}
        self._backend: AbstractBackend = open_backend(config.backend)
        reason = reason_against_steps(model, inputs, self._backend.device().type)
        if reason:
            raise ConfigError(f"memory_budget is of a step, and none can be run: {reason}")

    def limits(self, memory_format: str, traced: Traced) -> Limits:
        """Workspace that each kernel may use; a step is run at the first call for a layout.

        Args:
            memory_format: layout of the model, as for `Stepper`.
            traced: the convolutions of the model in it.

        Raises:
            PlanError: a step cannot be computed, follows another plan, or needs more than the
                budget without any workspace.
        """
        if memory_format not in self._layouts:
            self._layouts[memory_format] = self._profiled(memory_format, traced)
        layout = self._layouts[memory_format]
        layout.overlap = self._overlap(layout, Counter(problem for _, problem in traced.layers))
        budget = layout.memory.budget_bytes
        return Limits(self._config.limit_bytes, budget, layout.live_bytes, layout.overlap)

    def _overlap(self, layout: _Layout, calls: Mapping[Problem, int]) -> Overlap | None:
        """The kernels that may run at the same time; None where all follow one another."""
        budget, pool = layout.memory.budget_bytes, self._config.total_bytes
        # Workspace that is kept, or is in use on another stream, may be there at any moment of the
        # step, the fullest one too.
        left = max(0, budget - layout.memory.own_peak_bytes)
        if pool is None:
            found = layout.profile
            seen = zip((problem for problem, _ in found.calls), found.streams, strict=True)
            return Overlap.of_streams(seen, left, budget)
        if pool <= left:
            return Overlap.of_calls(calls, pool)
        return Overlap.of_calls(calls, left, budget)

    def _profiled(self, memory_format: str, traced: Traced) -> _Layout:
        profiler = StepProfiler(
            self._model, self._inputs, self._backend, self._is_training, memory_format
        )
        # Function modes of the caller, as `with torch.device("meta")`, would change where tensors
        # are allocated.
        try:
            with torch._C.DisableTorchFunction():
                profile = profiler.profile()
        # A model that was traced on fake tensors may still fail on real ones.
        except STEP_ERRORS as error:
            raise PlanError(
                f"memory_budget is of a step, and none could be computed ({first_line(error)})"
            ) from error
        for name, problem in traced.layers:
            if problem not in profile.live_bytes:
                raise PlanError(
                    f"memory_budget needs all convolutions of a step to be torch's own, and "
                    f"{problem} ({name}) was not; call ucudnn.revert_(model) first"
                )
        budget = self._config.budget_bytes(profile.own_peak_bytes)
        assert budget is not None
        if budget < profile.own_peak_bytes:
            raise _too_small(budget, profile)
        memory = profile.memory(budget, self._is_training)
        return _Layout(profiler, profile, memory, dict(profile.live_bytes))

    def grows(self, memory_format: str, error: PlanError) -> bool:
        """Raise a budget that is relative to what is possible, where nothing fits it.

        Args:
            memory_format: of the layout in which nothing does.
            error: with the smallest budget that something fits.

        Returns:
            False for a budget that is not relative, and where no budget would help.
        """
        layout, least = self._layouts[memory_format], error.smallest_bytes
        is_relative = isinstance(self._config.memory_budget, str)
        if not is_relative or least is None or least <= layout.memory.budget_bytes:
            return False
        layout.memory = replace(layout.memory, budget_bytes=least)
        return True

    def noted(self, plan: Plan) -> Plan:
        """The plan with the memory of a step, and what is live at each kernel."""
        layout = self._layouts[plan.memory_format]
        memory, overlap = layout.memory, layout.overlap
        limits = Limits(None, memory.budget_bytes, layout.live_bytes)
        sizes = {kernel.problem: kernel.timing.workspace_bytes for kernel in plan.kernels}

        def live(problem: Problem) -> int:
            if overlap is None:
                return limits.live(problem)
            beside = memory.own_peak_bytes + overlap.beside_bytes(problem, sizes)
            return max(limits.live(problem), beside)

        kernels = tuple(replace(one, live_bytes=live(one.problem)) for one in plan.kernels)
        if overlap is not None:
            memory = _with_calls(memory, plan, layout.profile)
        return replace(plan, kernels=kernels, memory=memory)

    def checked(self, plan: Plan) -> Plan | None:
        """The plan with the peak of a step by it; None where that exceeds the budget.

        What exceeds it is noted: the kernels get less the next time.

        Raises:
            PlanError: a kernel that has no plan exceeds it.
        """
        layout, memory = self._layouts[plan.memory_format], plan.memory
        assert memory is not None
        profile = layout.profiler.profile(plan)
        if profile.peak_bytes <= memory.budget_bytes:
            forced_by = self._forced_by(plan, memory, profile)
            peak = profile.peak_bytes
            memory = replace(memory, plan_peak_bytes=peak, forced_by=forced_by)
            return replace(plan, memory=_with_calls(memory, plan, profile))
        planned = {kernel.problem: kernel for kernel in plan.kernels}
        for problem, peak in profile.call_peaks.items():
            excess = peak - memory.budget_bytes
            if excess <= 0:
                continue
            if problem not in planned:
                raise PlanError(
                    f"{problem} has no plan and exceeds memory_budget="
                    f"{format_bytes(memory.budget_bytes)} by {format_bytes(excess)}; raise the "
                    f"budget, or time_budget_s if the time was over"
                )
            layout.live_bytes[problem] = layout.live_bytes.get(problem, 0) + excess
        return None

    def _forced_by(self, plan: Plan, memory: StepMemory, profile: StepProfile) -> str:
        """The kernel whose smallest plan decided a relative budget, "" where the user did."""
        asked = self._config.budget_bytes(memory.own_peak_bytes)
        if asked == memory.budget_bytes:
            return ""
        if self._layouts[plan.memory_format].overlap is not None:
            return "all kernels together, which may overlap,"
        peaks = profile.call_peaks

        def need(kernel: KernelPlan) -> int:
            return peaks.get(kernel.problem, 0)

        return str(max(plan.kernels, key=need).problem)

    def refusal(self, plan: Plan) -> PlanError:
        """The error for a plan whose steps exceed the budget again and again."""
        assert plan.memory is not None
        budget = format_bytes(plan.memory.budget_bytes)
        return PlanError(
            f"steps by every plan that was tried exceed memory_budget={budget}, by workspace that "
            f"kernels need in a step and not when they run alone; raise the budget"
        )


def _with_calls(memory: StepMemory, plan: Plan, profile: StepProfile) -> StepMemory:
    """The memory with the calls of a step of which the plan has the kernels."""
    places = {kernel.problem: place for place, kernel in enumerate(plan.kernels)}
    known = [
        (places[problem], live, stream)
        for (problem, live), stream in zip(profile.calls, profile.streams, strict=True)
        if problem in places
    ]
    streams = tuple(stream for *_, stream in known)
    return replace(
        memory,
        calls=tuple((place, live) for place, live, _ in known),
        streams=streams if len(set(streams)) > 1 else (),
    )


def _too_small(budget: int, profile: StepProfile) -> PlanError:
    held = profile.held
    missing = format_bytes(profile.own_peak_bytes - budget)
    return PlanError(
        f"memory_budget={format_bytes(budget)} is too small by {missing}: without any workspace a "
        f"step has {format_bytes(profile.own_peak_bytes)} allocated at its peak, of which "
        f"{format_bytes(held.total)} all along; raise the budget, or lower the batch",
        profile.own_peak_bytes,
    )
