"""From a plan to calls: the split of a shape is looked up once, and its executables are built."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ucudnn.backends import AbstractBackend, open_backend
from ucudnn.backends.tensors import memory_format, problem_of
from ucudnn.config import Config
from ucudnn.errors import (
    BusyError,
    MismatchWarning,
    PlanError,
    UcudnnError,
    UnplannedWarning,
    UnsupportedError,
    warn,
)
from ucudnn.execution.autograd import AbstractRunner, Bound, Geometry, Pass
from ucudnn.execution.execute import Call, as_kernel, build
from ucudnn.execution.override import Everything
from ucudnn.execution.validity import nondeterminism, require_valid
from ucudnn.plan import Plan
from ucudnn.problem import OPS, Problem

# A model with many unplanned layers would otherwise print one warning for each of them.
_MOST_WARNINGS = 8
# Plans one problem, with its bias or without one.
Tuner = Callable[[Problem, Config, bool], Plan]


class Layer(NamedTuple):
    """Common fields of the kernels of one layer, for any input size and dtype."""

    in_channels: int
    out_channels: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int

    @classmethod
    def of(cls, problem: Problem) -> Layer:
        """The `Layer` of a problem.

        >>> Layer.of(Problem("wgrad", 2, 3, 8, (9, 9), (3, 3))).kernel_size
        (3, 3)
        """
        return cls(*(getattr(problem, name) for name in cls._fields))


class Runner(AbstractRunner):
    """Runs convolutions by a plan: looks a split up once per shape, then reuses it.

    Args:
        plan: None: every shape is unplanned.
        config: what to do with unplanned shapes, and how to tune them; default: the plan's
            settings.
        tuner: plans a shape that has no plan, if the settings ask for that; None: torch computes
            such shapes.
        is_checked: the plan is known to be for this device; False: look when the first planned
            shape comes.
    """

    def __init__(
        self,
        plan: Plan | None,
        config: Config | None = None,
        tuner: Tuner | None = None,
        is_checked: bool = True,
    ) -> None:
        super().__init__()
        self._is_checked = is_checked
        self.config = config or (plan.config if plan else Config())
        self._tuner = tuner
        self._backend: AbstractBackend | None = None
        self._tuning = False
        self._warned: set[Problem] = set()
        self._said_layout = False
        self._follow(plan)

    def _follow(self, plan: Plan | None) -> None:
        self.plan = plan
        kernels = plan.kernels if plan else ()
        # Layers decide whether an unplanned shape is worth a warning; filter shapes let `installed`
        # skip other models' convolutions without building a Problem.
        self._layers = {Layer.of(kernel.problem) for kernel in kernels}
        shapes = {kernel.problem.w_shape for kernel in kernels}
        # A frozen run refuses what the plan does not cover, so that it must see every convolution.
        self.filter_shapes: Container[tuple[int, ...]] = (
            Everything() if self.config.frozen else shapes
        )

    # The backend and the bound calls hold handles of this process; a copy makes its own.
    def __reduce__(self) -> tuple[type[Runner], tuple[Plan | None, Config, Tuner | None, bool]]:
        return type(self), (self.plan, self.config, self._tuner, self._is_checked)

    def __deepcopy__(self, memo: object) -> Runner:
        return self  # plans are values: copies of a model may share one

    def problems(self, x: Tensor, w: Tensor, geometry: Geometry) -> dict[str, Problem]:
        """The passes that may be planned; none if the plan is for another kind of device."""
        here = x.device.type
        found = {which: problem_of(which, x, w, *geometry) for which in OPS}
        problems = {
            which: self._as_planned(problem, x)
            for which, problem in found.items()
            if problem is not None and which in self.config.ops
        }
        planned_for = self.plan.device.type if self.plan else here
        if problems and planned_for != here:
            self._decline(
                next(iter(problems.values())),
                f"the plan was made for {planned_for} and the tensors are on {here}: torch's own "
                f"convolution computes them; tune with the model there",
            )
            return {}
        return problems

    def _as_planned(self, problem: Problem, x: Tensor) -> Problem:
        """The channels-last problem if the plan has it and the input fits that layout, too.

        The strides of a single sample are ambiguous: torch may treat it as channels first, although
        it treats larger batches of the same layer as channels-last.
        """
        last = replace(problem, layout="nhwc") if problem.rank > 1 else problem
        if self.plan is None or self.plan.covers(problem) or not self.plan.covers(last):
            return problem
        return last if x.is_contiguous(memory_format=memory_format(last)) else problem

    def bind(self, which: str, bound: Bound, has_bias: bool = False) -> Pass | None:
        """Look up the call that computes a pass, and keep it for later calls."""
        problem = bound.problems[which]
        # One lookup at a time: a second thread that meets the same unplanned shape waits for the
        # tuning of the first, instead of tuning it again and disturbing its timings.
        with self._lock:
            if self._tuning:  # what tuning itself computes is torch's own
                return None
            if not bound.knows(which):
                try:
                    bound.follow(which, as_kernel(self._bind, problem, has_bias))
                except BusyError as error:  # the next call tries again
                    self._warn(problem, f"{error}: torch's own convolution computes it until then")
                    return None
        return bound.planned(which)

    def _bind(self, problem: Problem, has_bias: bool) -> Call | None:
        if not self._is_checked and self.plan is not None:
            if not is_followed(self.plan, self.config):
                # From here on no filter is one of a plan, and nothing arrives here.
                self._follow(None)
                return None
            self._is_checked = True
        if self.plan is None or not self.plan.covers(problem):
            # May tune and extend the plan, so what the plan covers is asked a second time below.
            self._unplanned(problem, has_bias)
        if self.plan is None or not self.plan.covers(problem):
            return None
        split = self.plan.split(problem)
        # torch's own call fuses the bias and computes both gradients at once
        if split.is_default:
            return None
        if self._backend is None:
            self._backend = open_backend(self.plan.backend)
        try:
            return build(self._backend, problem, split)
        except UnsupportedError as error:  # other threads or versions than it was planned for
            self._decline(problem, f"{error}: torch's own convolution computes it; tune again")
            return None

    def _decline(self, problem: Problem, sentence: str) -> None:
        """Leave a shape to torch with a warning; in a frozen run raise an error.

        Raises:
            PlanError: nothing may be left to torch.
        """
        if self.config.frozen:
            raise PlanError(f"frozen=True refuses to run {problem} without its plan: {sentence}")
        self._warn(problem, sentence)

    def _warn(self, problem: Problem, sentence: str) -> None:
        """Warn once for each shape, for all its passes and batches, up to a number of warnings."""
        same = replace(problem, op="fprop", batch=1)
        if same in self._warned or len(self._warned) >= _MOST_WARNINGS:
            return
        self._warned.add(same)
        last = len(self._warned) == _MOST_WARNINGS
        rest = " (there may be more of these, which are not reported)" if last else ""
        warn(sentence + rest, UnplannedWarning)

    def _unplanned(self, problem: Problem, has_bias: bool) -> None:
        if self.config.frozen:
            raise PlanError(
                f"{problem} has no plan, and frozen=True runs only what is planned; tune with an "
                f"example input of this shape and at least this batch, or leave frozen out"
            )
        if self.plan is not None and Layer.of(problem) not in self._layers:
            return  # of a layer that the plan was not made for
        if self.plan is not None and self._is_in_the_other_layout(self.plan, problem):
            self._say_layout()
            if self.config.unplanned == "torch":
                return
        if self.config.unplanned == "error":
            raise PlanError(
                f"{problem} has no plan and unplanned='error'; tune with an example input of this "
                f"shape and at least this batch, or set unplanned='torch'"
            )
        if self.plan is not None and str(problem) in self.plan.left_out:
            self._warn(
                problem,
                f"{problem} was left out of the plan, because the time was over or nothing fits "
                f"the workspace limit: torch's own convolution computes it; tune again, which goes "
                f"on from what is in the cache, or with a larger limit",
            )
            return
        if self.config.unplanned == "torch" or self._tuner is None:
            self._warn(
                problem,
                f"{problem} has no plan: torch's own convolution computes it; tune with an example "
                f"input of this shape and at least this batch, or set unplanned='tune'",
            )
            return
        self._tune(self._tuner, problem, has_bias)

    def _is_in_the_other_layout(self, plan: Plan, problem: Problem) -> bool:
        if plan.memory_format == "keep" or problem.rank == 1 or problem.layout == "nhwc":
            return False
        return plan.covers(replace(problem, layout="nhwc"))

    def _say_layout(self) -> None:
        if not self._said_layout:
            self._said_layout = True
            warn(
                "the plan is for a model in channels_last, and this one is not: torch's own "
                "convolutions compute it; use ucudnn.convert_(model, plan), or "
                "model.to(memory_format=torch.channels_last) and its inputs likewise (in 3-D "
                "channels_last_3d)",
                MismatchWarning,
            )

    def _tune(self, tuner: Tuner, problem: Problem, has_bias: bool) -> None:
        _require_idle(problem)
        # a child forked from now on, where nobody tunes, keeps this and torch's own convolution
        self._tuning = True
        try:
            tuned = tuner(problem, self.config, has_bias)
        # Not a failure of tuning: `bind` warns and tries again at the next call.
        except BusyError:
            raise
        except (UcudnnError, OSError, RuntimeError) as error:  # which must not end a training step
            self._warn(
                problem,
                f"torch's own convolution computes {problem}, because tuning failed: {error}",
            )
            return
        finally:
            self._tuning = False
        kernels = (*self.plan.kernels, *tuned.kernels) if self.plan else tuned.kernels
        self._follow(replace(self.plan or tuned, kernels=kernels))


def _require_idle(problem: Problem) -> None:
    """Refuse to tune while operators are being recorded.

    Raises:
        BusyError: a CUDA graph is captured or torch's profiler runs.
    """
    # Tuning synchronizes the device, which invalidates a capture.
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        what = "a CUDA graph is captured"
    # torch has one profiler per process, and the CPU backend measures workspace with it.
    elif torch._C._autograd._profiler_enabled():
        what = "torch's profiler runs"
    else:
        return
    raise BusyError(f"{problem} has no plan and cannot be tuned while {what}")


def is_followed(plan: Plan, config: Config) -> bool:
    """Decide whether a plan is followed here; False, with a warning, if it is for another device.

    Args:
        plan: to run.
        config: settings to run it by.

    Raises:
        PlanError: the plan was made for another device, or must hold and does not.
        UnsupportedError: its backend cannot be opened here.
    """
    try:
        require_same_device(plan, config.frozen)
    except (PlanError, UnsupportedError) as error:
        if config.on_mismatch == "error":
            raise
        warn(f"torch's own convolutions run, because on_mismatch='torch': {error}", MismatchWarning)
        return False
    return True


def require_same_device(plan: Plan, frozen: bool = False) -> None:
    """Refuse a plan for other hardware; warn of one for other versions or threads.

    Args:
        plan: to run.
        frozen: refuse it for whatever does not hold here.

    Raises:
        PlanError: the plan was made for another device, or must hold and does not.
    """
    if frozen:
        require_valid(plan)
        return
    backend = open_backend(plan.backend)
    device, software = backend.device(), backend.software()
    threads = backend.conditions().threads
    if plan.device != device:
        raise PlanError(
            f"the plan was made for {plan.device}, this process runs on {device}; tune here, "
            f"or load a plan made for this device"
        )
    # Algorithms compute the same sums in every version, so this is a warning and not an error.
    if plan.software != software:
        warn(
            f"the plan was made with {plan.software}, this process runs {software}: its results "
            f"are right, its times may not be; tune again to renew it",
            MismatchWarning,
        )
    said = nondeterminism(plan, backend) if plan.config.deterministic else ""
    if said:
        warn(f"the plan is deterministic, and {said}", MismatchWarning)
    if plan.conditions.threads != threads:
        warn(
            f"the plan was made for {plan.conditions.threads} threads, this process has {threads}: "
            f"its results are right, its times may not be; set torch.set_num_threads or tune again",
            MismatchWarning,
        )
