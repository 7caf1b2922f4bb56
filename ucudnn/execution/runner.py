"""Looks up a plan's split for each operand shape once, and builds the executables of the split."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from ucudnn.backends import AbstractBackend, open_backend
from ucudnn.backends.tensors import memory_format, problem_of
from ucudnn.config import Config
from ucudnn.errors import MismatchWarning, PlanError, UnplannedWarning, UnsupportedError, warn
from ucudnn.execution.autograd import AbstractRunner, Bound, Geometry, Pass
from ucudnn.execution.execute import Call, as_kernel, build
from ucudnn.execution.override import Everything
from ucudnn.execution.validity import device_is_missing, findings_without_building, require_valid
from ucudnn.plan import Plan
from ucudnn.problem import OPS, Problem

# The most warnings that a runner gives for convolutions without a plan. A model with many unplanned
# layers would otherwise cause one warning for each of them.
_MOST_WARNINGS = 8
# For each `Finding.about`, the warning if that statement of the plan is not true here. Results are
# right in every version and with any threads, because all algorithms compute the same sums.
_WARNINGS = {
    "device": "torch's own convolutions run: {}",
    "versions": "the plan was made with other versions; its results are right, its times may not "
    "be: {}",
    "conditions": "the plan was made with other threads; its results are right, its times may not "
    "be: {}, or set torch.set_num_threads",
    "determinism": "the plan is deterministic, and {}",
}


class Layer(NamedTuple):
    """The fields that all problems of a layer share, for any pass, batch, input size and dtype."""

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

    Unless `is_checked` is true, the first look-up checks whether the plan is for this device. If
    not, torch computes all convolutions, or with unplanned='error' an error is raised.
    """

    def __init__(
        self, plan: Plan | None, config: Config | None = None, is_checked: bool = True
    ) -> None:
        super().__init__()
        self._is_checked = is_checked
        self.config = config or (plan.config if plan else Config())
        self._backend: AbstractBackend | None = None
        self._warned: set[Problem] = set()
        self._said_layout = False
        self._follow(plan)

    def _follow(self, plan: Plan | None) -> None:
        self.plan = plan
        kernels = plan.kernels if plan else ()
        # A shape that the plan lacks causes a warning only if its layer is in `_layers`. By
        # `filter_shapes`, `installed` recognises convolutions of other models without building a
        # Problem.
        self._layers = {Layer.of(kernel.problem) for kernel in kernels}
        shapes = {kernel.problem.w_shape for kernel in kernels}
        # With unplanned='error' every convolution must reach this runner, because a convolution
        # without a plan is refused here.
        self.filter_shapes: Container[tuple[int, ...]] = Everything() if self._refuses else shapes

    @property
    def _refuses(self) -> bool:
        return self.config.unplanned == "error"

    # Pickling leaves out the backend and the calls, which hold handles of this process. The
    # unpickled runner makes its own.
    def __reduce__(self) -> tuple[type[Runner], tuple[Plan | None, Config, bool]]:
        return type(self), (self.plan, self.config, self._is_checked)

    def __deepcopy__(self, memo: object) -> Runner:
        return self  # a plan never changes, so copies of a model can share its runner

    def problems(self, x: Tensor, w: Tensor, geometry: Geometry) -> dict[str, Problem]:
        """The problem of each pass that may be planned; none if the plan is for other devices."""
        here = x.device.type
        found = {which: problem_of(which, x, w, *geometry) for which in OPS}
        problems = {
            which: self._as_planned(problem, x, w)
            for which, problem in found.items()
            if problem is not None and which in self.config.ops
        }
        planned_for = self.plan.device.type if self.plan else here
        if problems and planned_for != here:
            self.decline(
                next(iter(problems.values())),
                f"the plan was made for {planned_for} and the tensors are on {here}: torch's own "
                f"convolution computes them; tune with the model there",
            )
            return {}
        return problems

    def _as_planned(self, problem: Problem, x: Tensor, w: Tensor) -> Problem:
        """The problem; in the other layout if the plan has only that, and the tensors fit it, too.

        torch derives the layout of a tensor from its strides, but the stride of an axis of one
        element says nothing: for example, images of one pixel are in both layouts. Between two
        layers, a batch of one sample may also lose the layout that larger batches keep; the planned
        call then converts the sample to the planned layout.
        """
        if self.plan is None or problem.rank == 1 or self.plan.covers(problem):
            return problem
        other = replace(problem, layout="nchw" if problem.layout == "nhwc" else "nhwc")
        # If the filter is in channels_last, it was converted on purpose, so the problem keeps that
        # layout.
        is_meant = other.layout == "nchw" and not w.is_contiguous()
        if is_meant or not self.plan.covers(other):
            return problem
        form = memory_format(other)
        # A sample can only have lost the plan's layout if the filter is in that layout. If the
        # filter is not, the model was not converted; the problem then stays unplanned, and a
        # warning says so.
        is_laid_out = self.plan.memory_format == "keep" or w.is_contiguous(memory_format=form)
        is_lost = problem.batch == 1 and is_laid_out
        return other if is_lost or x.is_contiguous(memory_format=form) else problem

    def bind(self, which: str, bound: Bound, has_bias: bool = False) -> Pass | None:
        """Look up a plan's call for a pass, kept in `bound`; None: torch computes the pass."""
        del has_bias  # a plan is the same with a bias and without
        # The look-up is done once for all threads, so that they share one call, and a warning is
        # given once.
        with self._lock:
            if not bound.knows(which):
                bound.follow(which, as_kernel(self._bind, bound.problems[which]))
        return bound.planned(which)

    def _bind(self, problem: Problem) -> Call | None:
        if not self._is_checked and self.plan is not None:
            if not is_followed(self.plan, self.config):
                # From now on this runner lists no filter shapes, so no convolution reaches it any
                # more.
                self._follow(None)
                return None
            self._is_checked = True
        if self.plan is None or not self.plan.covers(problem):
            self._unplanned(problem)
            return None
        split = self.plan.split(problem)
        # If the split is torch's own convolution, None lets torch's operator be called directly: it
        # also adds the bias, and computes both gradients at once.
        if split.is_default:
            return None
        if self._backend is None:
            self._backend = open_backend(self.plan.backend)
        try:
            return build(self._backend, problem, split)
        except UnsupportedError as error:  # threads, versions or settings differ from the plan's
            self.decline(problem, f"{error}: torch's own convolution computes it; tune again")
            return None

    def decline(self, problem: Problem, sentence: str) -> None:
        """Warn that torch computes a problem, once per shape, or with unplanned='error' refuse."""
        if self._refuses:
            raise PlanError(f"unplanned='error' refuses {problem} without its plan: {sentence}")
        self._warn(problem, sentence)

    def _warn(self, problem: Problem, sentence: str) -> None:
        """Warn once per shape, whatever its pass and batch, and at most `_MOST_WARNINGS` times."""
        same = replace(problem, op="fprop", batch=1)
        if same in self._warned or len(self._warned) >= _MOST_WARNINGS:
            return
        self._warned.add(same)
        last = len(self._warned) == _MOST_WARNINGS
        rest = " (there may be more of these, which are not reported)" if last else ""
        warn(sentence + rest, UnplannedWarning)

    def _unplanned(self, problem: Problem) -> None:
        other_layout = (
            self.plan is not None
            and self.plan.memory_format != "keep"
            and problem.rank > 1
            and problem.layout == "nchw"
            and self.plan.covers(replace(problem, layout="nhwc"))
        )
        if other_layout and not self._said_layout:
            self._said_layout = True
            warn(
                "the plan is for a model in channels_last, and this one is not: torch's own "
                "convolutions compute it; use ucudnn.convert_(model, plan), or "
                "model.to(memory_format=torch.channels_last) and its inputs likewise (in 3-D "
                "channels_last_3d)",
                MismatchWarning,
            )
        if self._refuses:
            raise PlanError(
                f"{problem} has no plan and unplanned='error'; tune with an example input of this "
                f"shape and at least this batch, or set unplanned='torch'"
            )
        why = "has no plan"
        others = [] if self.plan is None else other_dtypes(problem, self.plan)
        if self.plan is None:
            remedy = "tune the model, and convert it by that plan"
        elif others:
            why = f"has no plan in {problem.dtype}, only in {' and '.join(others)}"
            remedy = "tune under autocast, too (--autocast), or train without it"
        elif other_layout or Layer.of(problem) not in self._layers:
            return  # a warning was given already, or the plan was not made for this layer
        elif _is_left_out(problem, self.plan):
            why = (
                "was left out of the plan, because the time was over or nothing fits the workspace "
                "limit"
            )
            remedy = "tune again, which goes on from what is in the cache, or with a larger limit"
        else:
            remedy = "tune with an example input of this shape and at least this batch"
        self._warn(problem, f"{problem} {why}: torch's own convolution computes it; {remedy}")


def other_dtypes(problem: Problem, plan: Plan) -> list[str]:
    """The other dtypes in which a plan covers a problem."""
    found = {
        one.problem.dtype
        for one in plan.kernels
        if one.covers(problem.batch)
        and replace(one.problem, dtype=problem.dtype, math=problem.math, batch=problem.batch)
        == problem
    }
    return sorted(found - {problem.dtype})


def _is_left_out(problem: Problem, plan: Plan) -> bool:
    """True if the kernel of a problem is among those that tuning left out, at whatever batch."""
    # Names in `plan.left_out` end with the largest batch of the kernel. The batch is not compared.
    kernel = str(problem).removesuffix(str(problem.batch))
    return any(name.startswith(kernel) for name in plan.left_out)


def is_followed(plan: Plan, config: Config) -> bool:
    """True if a plan can be followed here; False, with a warning, if it is for another device.

    Other statements of the plan that do not hold here cause warnings only. With unplanned='error',
    any statement that does not hold raises a PlanError.
    """
    if config.unplanned == "error":
        require_valid(plan)
        return True
    try:
        backend = open_backend(plan.backend)
        found = {one.about: one for one in findings_without_building(plan, backend)}
        # Conditions other than threads are left to `ucudnn check`.
        if backend.conditions().threads == plan.conditions.threads:
            found.pop("conditions", None)
    except UnsupportedError as error:
        found = {"device": device_is_missing(plan, error)}
    for about, finding in found.items():
        if not finding.is_true:
            warn(_WARNINGS[about].format(finding.said), MismatchWarning)
    return bool(found["device"].is_true)
