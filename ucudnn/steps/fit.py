"""Keep steps of a model within a memory budget: divide them, limit workspace, check a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from textwrap import shorten
from time import monotonic
from typing import Any, TypeVar

from torch import nn

from ucudnn.backends import AbstractBackend, open_backend
from ucudnn.config import Config
from ucudnn.errors import ConfigError, PlanError, first_line
from ucudnn.execution.compiling import is_compiled, original_of
from ucudnn.execution.runner import Layer
from ucudnn.kernels.limits import Limits
from ucudnn.outcomes import Way
from ucudnn.plan import Plan
from ucudnn.problem import Problem
from ucudnn.segment import WHOLE, Segment, StepDivision
from ucudnn.steps.run import STEP_ERRORS, batch_of, parts_of, reason_against_steps, undisturbed
from ucudnn.steps.search import CLEARLY, Seen, SegmentSearch, half_of
from ucudnn.steps.step_profile import Held, StepProfile, StepProfiler
from ucudnn.steps.tracing import Traced
from ucudnn.units import format_bytes, format_sizes

# Only modules of exactly these classes are swapped by `convert_`.
_SWAPPABLE = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_NOTHING = Traced([])


@dataclass
class _Layout:
    """What is known of the memory of steps in one layout of the model."""

    profiler: StepProfiler
    held: Held
    live_bytes: dict[Problem, int]


class MemoryBudget:
    """The memory budget of the steps of one model.

    Attributes:
        config: the settings, with the budget in bytes.
        division: how steps are divided to stay within the budget.

    Args:
        model: any module.
        inputs: example inputs.
        config: settings with a memory budget.
        began: the `time.monotonic` from which the time budget counts; None: now.
        traced: the convolutions of the undivided step.

    Raises:
        ConfigError: no step can be run here, or the model is compiled.
        PlanError: a step cannot be computed, or exceeds the budget however it is divided.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        config: Config,
        began: float | None = None,
        traced: Traced = _NOTHING,
    ) -> None:
        if config.is_replayed:
            raise ConfigError(
                "memory_budget is of a step that is run here, and the settings name a recording; "
                "leave out backend='recorded' and device, or set workspace_limit instead"
            )
        if is_compiled(model):
            raise ConfigError(
                "memory_budget is of steps that are not compiled, and torch.compile changes what a "
                "step allocates; tune the model before it is compiled, or set workspace_limit "
                "instead"
            )
        self._model = model
        # A list with one element is one size of inputs; a longer list stays a list.
        self._inputs = inputs[0] if isinstance(inputs, list) and len(inputs) == 1 else inputs
        self._is_training = config.ops != ("fprop",)
        self._layouts: dict[str, _Layout] = {}
        self._backend: AbstractBackend = open_backend(config.backend)
        # Layers that a converted model leaves to torch's own convolution, and the modules that
        # compute them. Inside `installed` they follow the plan.
        self._torchs, self._unswappable = _unswappable(model, traced)
        reason = reason_against_steps(model, inputs, self._backend.device().type)
        if reason:
            raise ConfigError(f"memory_budget is of a step, and none can be run: {reason}")
        own = self._profiler("keep", WHOLE)
        profile = _computed(own.profile)
        self.config = config = config.with_budget_of(profile.peak_bytes)
        budget = config.budget_bytes
        assert budget is not None
        self._held = profile.held
        self._memory = profile.memory(budget, self._is_training)
        self.division = WHOLE
        self._search: SegmentSearch | None = None
        self._began = monotonic() if began is None else began
        # Steps without workspace by the divisions that were tried; each is tried only once, because
        # if kernels lack workspace in it, they do so again.
        self._least: dict[StepDivision, Way] = {}
        # Bytes of the budget to leave free, which kernels lacked for workspace in an earlier pass.
        self._spared = 0
        # The fastest step within the budget, workspace of torch's convolutions included; and the
        # step that is planned instead, if it takes less time and exceeds the budget by workspace.
        self._fitting: Seen | None = None
        self._faster: Seen | None = None
        # If a step by torch without its workspace is within the budget, limits for the workspace
        # may suffice, and no segments are needed.
        if budget >= profile.own_peak_bytes and not config.loop:
            return
        divided = _computed(partial(self._divided, budget))
        if divided is None:
            raise self._too_small()
        self.division = divided

    def divides_anew(self, error: PlanError) -> bool:
        """Divide the step anew, to leave more memory to kernels; False if no way is found.

        Args:
            error: the error of a kernel that has no plan within what the budget leaves it.
        """
        budget = self.config.budget_bytes
        assert budget is not None
        if self._faster is not None:
            self._return_to_fitting()
            return True
        if error.smallest_bytes is None or error.smallest_bytes <= budget:
            return False
        self._spared += error.smallest_bytes - budget
        divided = _computed(partial(self._divided, budget))
        if divided is None or divided == self.division:
            return False
        self.division = divided
        self._layouts.clear()
        return True

    def divides_without(self, causes: Mapping[Segment, str]) -> None:
        """Divide the step anew, without segments by which it is not torch's.

        Args:
            causes: these segments, each with the reason.

        Raises:
            PlanError: steps exceed the budget without them.
        """
        budget = self.config.budget_bytes
        assert budget is not None
        assert self._search is not None
        for one, reason in causes.items():
            self._search.exclude(one, reason)
        self._search.forget(causes)
        self._fitting = self._faster = None
        self._least.clear()
        self._layouts.clear()
        divided = _computed(partial(self._divided, budget))
        if divided is None:
            raise self._too_small()
        self.division = divided

    @property
    def reasons(self) -> tuple[tuple[str, str], ...]:
        """Modules that run as a whole, or are not recomputed, each with the reason."""
        return () if self._search is None else self._search.reasons()

    @property
    def is_unaligned(self) -> bool:
        """True if random numbers of divided modules cannot be made the same for each sample."""
        names = {one.module for one in self.division.segments if one.micro_batch is not None}
        names |= {""} if self.division.micro_batch is not None else set()
        findings = {} if self._search is None else self._search.findings
        return any(findings[name].is_unaligned for name in names if name in findings)

    def _return_to_fitting(self) -> None:
        """Plan the step that fits instead of the faster one."""
        assert self._fitting is not None
        self._faster, self.division = None, self._fitting.division
        self._layouts.clear()

    def _divided(self, budget: int) -> StepDivision | None:
        """A division by which a step stays within the budget; None if none is found."""
        if isinstance(self._inputs, list):
            return None
        limit = budget - self._held.total - self._spared
        with undisturbed(self._model):
            search = self._search = self._search or SegmentSearch(
                self._model,
                self._inputs,
                self._backend,
                self._is_training,
                until=half_of(self.config, self._began),
                effort=self.config.effort,
            )
        # Segments inside micro-batches are tried last, because small micro-batches that recompute
        # modules are slow.
        for inside in (False, True):
            with undisturbed(self._model):
                best = self._best(search, limit, inside=inside)
                fits = best.peak_bytes <= limit
                if fits and self._fitting is None:
                    self._fitting = best
                    self._faster = self._but_for_workspace(search, best, limit, inside)
                # The search runs selective recomputation everywhere without examining a module.
                chosen = (self._faster or best).division
                search.examine({one.module: one.micro_batch or 1 for one in chosen.segments})
            ways = search.ways(self._held.total)
            self._memory = replace(self._memory, ways=ways)
            if fits:
                return chosen
            # A loop is tried even if the user did not allow it, so that the error can recommend it.
            with undisturbed(self._model):
                if not (self.config.loop or search.reason_against_parts()):
                    search.try_(StepDivision(micro_batch=1))
            # A division whose steps exceed the budget only by their workspace is accepted, too:
            # limits for the workspace may suffice.
            for one in sorted(search.seen, key=lambda one: one.peak_bytes):
                if self._is_allowed(one) and one.division not in self._least:
                    try:
                        peak = self._own_peak_bytes(one)
                    # By other random numbers, a step that ran may fail.
                    except STEP_ERRORS:
                        continue
                    way = one.way(self._held.total)
                    name = f"{way.name}, without workspace"  # such a step is not run: no time
                    self._least[one.division] = replace(way, name=name, peak_bytes=peak, time_ns=0)
                    if peak <= budget - self._spared:
                        return one.division
        smallest = min(self._least.values(), key=lambda way: way.peak_bytes)
        self._memory = replace(self._memory, ways=(*self._memory.ways, smallest))
        return None

    def _but_for_workspace(
        self, search: SegmentSearch, fitting: Seen, limit: int, inside: bool
    ) -> Seen | None:
        """A step clearly faster than `fitting` that fits but for its workspace; None if none is."""
        budget = limit + self._held.total
        workspace = fitting.peak_bytes + self._held.total - self._own_peak_bytes(fitting)
        # Micro-batches twice as large may need twice the workspace.
        most = limit + 2 * max(0, workspace)
        self._best(search, most, inside=inside)
        for one in sorted(search.seen, key=lambda one: one.time_ns):
            if one.time_ns >= CLEARLY * fitting.time_ns:
                break
            is_near = one.peak_bytes <= most and self._is_allowed(one)
            if is_near and self._own_peak_bytes(one) <= budget:
                return one
        return None

    def _is_allowed(self, one: Seen) -> bool:
        return one.division.micro_batch is None or self.config.loop

    def _own_peak_bytes(self, one: Seen) -> int:
        """The peak of a step by a division, without the workspace of convolutions."""
        return self._profiler("keep", one.division).profile().own_peak_bytes

    def _best(self, search: SegmentSearch, limit: int, *, inside: bool = False) -> Seen:
        if not self.config.loop:
            return search.within(limit, inside=inside)
        # A loop with segments inside recomputes less than segments alone, so it is tried first.
        in_parts = search.in_parts(limit, inside=inside or not search.is_over(2))
        best = search.within(limit, inside=inside)
        if in_parts is None:
            return best
        return in_parts if best.peak_bytes > limit else search.faster_of(in_parts, best)

    def _profiler(self, memory_format: str, division: StepDivision) -> StepProfiler:
        return StepProfiler(
            self._model,
            self._inputs,
            self._backend,
            self._is_training,
            memory_format,
            division,
            self._torchs,
        )

    def has_seen(self, memory_format: str, traced: Traced) -> bool:
        """True if a real step computes just the convolutions that were traced on fake tensors.

        For a single sample, for example, some operators return another layout on fake tensors.

        Args:
            memory_format: layout of the model, as for `Steps`; the first call for it runs a step.
            traced: the convolutions of divided steps in this layout.

        Raises:
            PlanError: a step cannot be computed, needs more than the budget even without workspace,
                or the model was converted and follows another plan.
        """
        seen = self._layout(memory_format).live_bytes.keys()
        is_converted = any("_ucudnn_runner" in vars(one) for one in self._model.modules())
        for name, problem in traced.layers:
            if is_converted and problem not in seen:
                raise PlanError(
                    f"memory_budget needs all convolutions of a step to be torch's own, and "
                    f"{problem} ({name}) was not; call ucudnn.revert_(model) first"
                )
        return seen == {problem for _, problem in traced.layers}

    def limits(self, memory_format: str) -> Limits:
        """The workspace that each kernel may use; the first call for a layout runs a step.

        Args:
            memory_format: layout of the model, as for `Steps`.

        Raises:
            PlanError: a step cannot be computed, or needs more than the budget without workspace.
        """
        layout, config = self._layout(memory_format), self.config
        # Beside what is held, a training step allocates gradients as large as the parameters. In a
        # divided step, what is live beside a micro-batch may not shrink with the micro-batch at
        # all.
        fixed = layout.held.total + layout.held.parameters
        if self.division != WHOLE:
            fixed = max(layout.live_bytes.values(), default=0)
        return Limits(config.limit_bytes, config.budget_bytes, layout.live_bytes, fixed)

    def _layout(self, memory_format: str) -> _Layout:
        if memory_format not in self._layouts:
            profiler = self._profiler(memory_format, self.division)
            profile = _computed(profiler.profile)
            budget = self.config.budget_bytes
            assert budget is not None
            if budget < profile.own_peak_bytes:
                raise self._too_small()
            self._layouts[memory_format] = _Layout(profiler, profile.held, dict(profile.live_bytes))
        return self._layouts[memory_format]

    def noted(self, plan: Plan) -> Plan:
        """The plan with what is known of a step's memory and the bytes live at each kernel."""
        layout = self._layouts[plan.memory_format]
        limits = Limits(None, self.config.budget_bytes, layout.live_bytes)
        kernels = tuple(replace(one, live_bytes=limits.live(one.problem)) for one in plan.kernels)
        return replace(plan, kernels=kernels, memory=self._memory)

    def checked(self, plan: Plan) -> Plan | None:
        """The plan with the peak of a step that runs it; None if the peak exceeds the budget.

        If calls of a kernel exceed the budget, its workspace limit in the next pass is lower by the
        excess. None is also returned if limits of workspace make the kernels of a faster division
        so slow that the next pass plans the division that fits without them.

        Raises:
            PlanError: a kernel that has no plan exceeds the budget.
        """
        layout, memory = self._layouts[plan.memory_format], plan.memory
        budget = self.config.budget_bytes
        assert memory is not None
        assert budget is not None
        profile = layout.profiler.profile(plan)
        # The plan is also kept to the budget as a converted model follows it.
        swapped = [one for one in plan.kernels if Layer.of(one.problem) not in self._torchs]
        if len(swapped) < len(plan.kernels):
            converted = layout.profiler.profile(replace(plan, kernels=tuple(swapped)))
            profile = max(profile, converted, key=lambda one: one.peak_bytes)
        fits = profile.peak_bytes <= budget
        if self._faster is not None and self._fitting is not None:
            slowed_ns = self._faster.time_ns * (1 + _lost(plan))
            if not fits or slowed_ns >= CLEARLY * self._fitting.time_ns:
                self._return_to_fitting()
                return None
        if fits:
            memory = replace(
                memory, plan_peak_bytes=profile.peak_bytes, calls=_calls(plan, profile)
            )
            return replace(plan, memory=memory)
        planned = {kernel.problem: kernel for kernel in plan.kernels}
        for problem, peak in profile.call_peaks.items():
            excess = peak - budget
            if excess <= 0:
                continue
            if problem not in planned:
                raise PlanError(
                    f"{problem} has no plan and exceeds memory_budget={format_bytes(budget)} by "
                    f"{format_bytes(excess)}; raise the budget, or time_budget_s if the time was "
                    f"over"
                )
            layout.live_bytes[problem] = layout.live_bytes.get(problem, 0) + excess
        return None

    def refusal(self) -> PlanError:
        """The error to raise if steps exceed the budget by every plan that was tried."""
        assert self.config.budget_bytes is not None
        budget = format_bytes(self.config.budget_bytes)
        return PlanError(
            f"steps by every plan that was tried exceed memory_budget={budget}, by workspace that "
            f"kernels need in a step and not when they run alone; raise the budget"
        )

    def _too_small(self) -> PlanError:
        """The error for a budget that is too small; it lists the ways to run a step, with peaks."""
        memory, loop, budget = self._memory, self.config.loop, self._memory.budget_bytes
        fixed = memory.parameters_bytes + memory.gradients_bytes + memory.optimizer_bytes
        ways = memory.ways or (Way("torch", "torch, without workspace", memory.own_peak_bytes, 0),)
        ways = tuple(way for way in ways if not way.is_estimated)
        limit, held, *peaks = format_sizes(budget, fixed, *(way.peak_bytes for way in ways))
        least = min((w for w in ways if loop or w.kind != "loop"), key=lambda way: way.peak_bytes)
        more = "" if least.time_ns else " plus the workspace that kernels need"
        if any(way.kind == "loop" and way.peak_bytes <= budget for way in ways):
            remedy = ", or set loop=True, by which it is kept"
        elif fixed > budget:
            remedy = f" (parameters, gradients and the state of optimisers take {held})"
        elif isinstance(self._inputs, list):
            remedy = (
                ", or tune the largest input size alone: with several sizes no segments are looked "
                "for, and the segments of a plan run at every size"
            )
        elif self._may_fit_alone():
            remedy = ", or lower the batch"
        else:
            remedy = ", or use smaller inputs: a single sample exceeds it by every way tried"
        names = shorten(", ".join(self._unswappable), 80, placeholder=" ...")
        torchs = f" These count torch's workspace in {names}, which convert_ cannot swap."
        rows = "".join(f"\n  {way.name}: {peak}" for way, peak in zip(ways, peaks, strict=True))
        if self.reasons:
            rows += "\nModules that are not divided or not recomputed:"
            rows += "".join(f"\n  {name or 'the model'}: {why}" for name, why in self.reasons)
        return PlanError(
            f"memory_budget={limit} is too small: the smallest peak of a step that was found is "
            f"{peaks[ways.index(least)]}; raise the budget to it{more}{remedy}."
            f"{torchs if names else ''} Peaks:{rows}",
            least.peak_bytes,
        )

    def _may_fit_alone(self) -> bool:
        """True unless a step of a single sample exceeds the budget, divided or not."""
        if batch_of(self._inputs) <= 1:
            return False
        sample = next(parts_of(self._inputs, 1))
        smallest = min(self._least, key=lambda one: self._least[one].peak_bytes, default=WHOLE)
        budget = self._memory.budget_bytes
        try:
            return any(
                replace(self._profiler("keep", one), inputs=sample).profile().own_peak_bytes
                <= budget
                for one in (WHOLE, smallest)
            )
        except STEP_ERRORS:  # batch norm, for example, may need several samples
            return True


def _unswappable(model: nn.Module, traced: Traced) -> tuple[frozenset[Layer], tuple[str, ...]]:
    """Layers that some modules compute which `convert_` cannot swap, and the names of these."""
    modules = dict(original_of(model).named_modules())
    found = [
        (name or "the model itself", Layer.of(problem))
        for name, problem in traced.layers
        if type(modules[name]) not in _SWAPPABLE
    ]
    return frozenset(layer for _, layer in found), tuple(dict.fromkeys(name for name, _ in found))


def _lost(plan: Plan) -> float:
    """Time that kernels lose by limits of workspace, as a fraction of that of torch's kernels."""
    lost = torchs = 0
    for kernel in plan.kernels:
        own = kernel.default or kernel.timing
        limit = plan.limit_bytes(kernel)
        torchs += own.time_ns * len(kernel.layers)
        if limit is not None and own.workspace_bytes > limit:
            lost += max(0, kernel.predicted_time_ns - own.time_ns) * len(kernel.layers)
    return lost / max(1, torchs)


def _calls(plan: Plan, profile: StepProfile) -> tuple[tuple[int, int], ...]:
    """(Index of the kernel in the plan, live bytes) of each call whose kernel is in the plan."""
    places = {kernel.problem: place for place, kernel in enumerate(plan.kernels)}
    return tuple((places[problem], live) for problem, live in profile.calls if problem in places)


Result = TypeVar("Result")


def _computed(run: Callable[[], Result]) -> Result:
    """The result of a function that runs steps of the model.

    Raises:
        PlanError: the steps cannot be computed.
    """
    try:
        return run()
    except (ConfigError, PlanError):
        raise
    # Tracing ran the model on fake tensors; on real tensors it may still fail.
    except STEP_ERRORS as error:
        raise PlanError(
            f"memory_budget is of a step, and none could be computed ({first_line(error)})"
        ) from error
