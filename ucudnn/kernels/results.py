"""Progress and results of tuning: plans so far, and kernels without a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from ucudnn.errors import PlanError, UntunedWarning, warn
from ucudnn.kernels.choose import KernelPlanner
from ucudnn.kernels.splits import batches_like, plan_by
from ucudnn.split import KernelPlan, Split
from ucudnn.units import format_sizes

if TYPE_CHECKING:
    from ucudnn.config import Config
    from ucudnn.kernels.limits import Limits
    from ucudnn.kernels.measure import KernelTuning
    from ucudnn.kernels.pool import WorkspacePool
    from ucudnn.problem import Problem


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of tuning.

    Args:
        kernel: the kernel that is tuned now.
        done: kernels finished; if kernels divide a pool, those that have a part of it so far.
        total: all kernels.
        measured: candidates timed so far.
        reused: candidates found in the cache so far.
        seconds_left: estimated seconds until tuning ends; None: not known.
        budget_s: the time budget in seconds; None: there is none, or it is not known yet.
    """

    kernel: str
    done: int
    total: int
    measured: int
    reused: int
    seconds_left: float | None = None
    budget_s: float | None = None


Report = Callable[[Progress], None]


def warn_of_untuned(left_out: int, budget_s: float | None, is_recorded: bool = False) -> None:
    """Warn if kernels have no plan, or no plan for some batches."""
    if not left_out:
        return
    several = left_out > 1
    said = (
        f"{left_out} kernel{'s' * several} {'are' if several else 'is'} not in the plan, or not at "
        f"every batch: "
    )
    if is_recorded:
        warn(
            f"{said}nothing that was recorded of them fits, and torch's own convolution serves "
            f"them; raise the limit, or measure more on the device",
            UntunedWarning,
        )
        return
    budget = "" if budget_s is None else f" of {budget_s:g} s"
    warn(
        f"{said}the time budget{budget} was over before they had a plan, and torch's own "
        f"convolution, which serves the others, was not run yet or exceeds a workspace limit; give "
        f"a larger time_budget_s, or tune again, which goes on from what is in the cache",
        UntunedWarning,
    )


@dataclass(eq=False)
class Results:
    """Plans so far of one model's kernels; kernels without a plan run torch's own convolution."""

    tunings: Mapping[Problem, KernelTuning]
    limits: Limits  # with a pool, each kernel's part of it counts instead
    config: Config
    pool: WorkspacePool | None
    plans: dict[Problem, KernelPlan] = field(default_factory=dict)
    # Kernels that have no plan within the memory budget. The error that is raised for them names
    # the kernel that needs most memory.
    refusals: dict[Problem, PlanError] = field(default_factory=dict)
    # Kernels that have no split within the user's limit. They are named together at the end, so
    # that the user can raise the limit once for all of them.
    over_limit: dict[Problem, PlanError] = field(default_factory=dict)
    # Kernels of which too little could be run for a plan, because there was too little memory.
    too_large: dict[Problem, PlanError] = field(default_factory=dict)
    # Kernels that have no plan for some smaller batches, because the time did not suffice.
    unfinished: set[Problem] = field(default_factory=set)

    def __post_init__(self) -> None:
        # Cached, because `kernels` and `missing` ask for the same plans by torch again and again.
        self._undivided = lru_cache(maxsize=None)(self._plan_undivided)

    @property
    def kernels(self) -> tuple[KernelPlan, ...]:
        """For each kernel that has a plan within its limit, the best plan so far."""
        plans = (self.plans.get(p) or self.by_torch(p) for p in self.tunings)
        # A plan by torch's own convolution that does not cover all batches is left out: calls
        # without a plan run torch's own convolution, too.
        return tuple(
            plan
            for plan in plans
            if plan and not (plan.is_default and plan.problem in self.unfinished)
        )

    @property
    def missing(self) -> list[Problem]:
        """Kernels that have no plan so far, but may still get one."""
        done = {kernel.problem for kernel in self.kernels}
        return [problem for problem in self._plannable if problem not in done]

    @property
    def unraced(self) -> list[Problem]:
        """Kernels that have no plan, or one that rests on a prediction or on a single run."""
        raced = {p for p, plan in self.plans.items() if plan.timing.samples > 1}
        return [problem for problem in self._plannable if problem not in raced]

    @property
    def _plannable(self) -> list[Problem]:
        # A kernel that has no part of the pool cannot be planned.
        allowed = self.tunings if self.pool is None else self.pool.parts
        refused = {*self.refusals, *self.over_limit, *self.too_large}
        return [
            problem for problem in self.tunings if problem in allowed and problem not in refused
        ]

    @property
    def left_out(self) -> tuple[str, ...]:
        """Kernels that have no plan, or none for a smaller batch, because the time was over."""
        plans = {kernel.problem: kernel for kernel in self.kernels}
        planned = plans.keys() | self.over_limit.keys() | self.too_large.keys()
        missing = [problem for problem in self.tunings if problem not in planned]
        # A kernel whose smaller batches are not all planned is named with the largest batch that
        # has no plan.
        cut = [p.with_batch(plans[p].uncovered()[-1]) for p in plans if p in self.unfinished]
        return tuple(map(str, missing + cut))

    def limit_of(self, problem: Problem, batch: int | None = None) -> int | None:
        """Bytes of workspace that a kernel's call may use: its part of the pool, or its limit.

        Args:
            problem: the kernel.
            batch: as in `Limits.of`.
        """
        parts = {} if self.pool is None else self.pool.parts
        return parts.get(problem, self.limits.of(problem, batch))

    def by_torch(
        self, problem: Problem, note: str = "not tuned: the time was over"
    ) -> KernelPlan | None:
        """The plan by torch's own convolution, if it is within the limit."""
        limit = self.limits.of(problem)
        if self.pool is not None:
            # A kernel without a part of the pool gets no plan, even if it needs no workspace.
            limit = self.pool.parts.get(problem, -1)
        tuning = self.tunings[problem]
        return self._undivided(tuning, note) if self._is_by_torch(tuning, limit) else None

    def _is_by_torch(self, tuning: KernelTuning, limit: int | None) -> bool:
        """True if torch's own convolution ran, fits, and is deterministic if it must be."""
        default = tuning.default
        # A run that failed has no timing.
        if default is None or default.timing is None:
            return False
        if self.config.deterministic and not default.is_deterministic:
            return False
        return limit is None or default.timing.workspace_bytes <= limit

    def _plan_undivided(self, tuning: KernelTuning, note: str) -> KernelPlan:
        default = tuning.default
        assert default is not None
        timing = default.timing
        assert timing is not None
        # Only the whole batch was timed. Smaller batches that torch computes by the same
        # implementation take no longer, so the plan covers them, too.
        split, implementation_of = (
            Split.default(tuning.problem.batch),
            tuning.session.implementation_of,
        )
        plan = plan_by((), tuning.kernel, split, timing, timing, implementation_of)
        return replace(
            plan,
            notes=(note,),
            is_perturbed=default.is_perturbed,
            default_is_deterministic=default.is_deterministic,
        )

    def with_every_batch(self, plan: KernelPlan) -> KernelPlan:
        """The plan with a split for every batch for which any split fits.

        For some batches torch runs another implementation than for the largest batch, and its
        workspace is not known. So torch's own convolution of such a batch is run once. If it may
        not be used, for example by the limit, the batch is tuned as a kernel of its own.
        """
        problem, missing = plan.problem, plan.uncovered()
        if self.limit_of(problem) is None and not self.config.deterministic:
            return plan.with_default(missing)
        while missing:
            largest = missing[-1]
            tuning, limit = self.tunings[problem].at(largest), self.limit_of(problem, largest)
            tuning.look_at_default()
            if self._is_by_torch(tuning, limit):
                split, implementation_of = Split.default(largest), tuning.session.implementation_of
                alike = batches_like(tuning.problem, split, implementation_of)
                plan = plan.with_default({*missing} & {*alike})
            else:
                plan = _tuned_at(plan, tuning, limit)
            missing = [n for n in plan.uncovered() if n < largest]
        return plan

    def leave_to_torch(self, ignored: Iterable[tuple[Problem, str]]) -> None:
        """Plan kernels by torch's own convolution if that is within the limit."""
        for problem, reason in ignored:
            plan = self.by_torch(problem, reason)
            if plan is not None:
                self.plans[problem] = plan

    def refuse(self, problem: Problem, error: PlanError) -> bool:
        """Record that a kernel has no plan within the budget, the limit, or its part of a pool.

        Returns False if the error must end the tuning.
        """
        if self.pool is not None:
            # The next division may give a kernel a larger part, but never more than the limit.
            if self.limit_of(problem) == self.limits.common:
                return False
            self.pool.refuse(problem, error)
        elif self.limits.decides(problem):
            self.refusals[problem] = error
        elif error.smallest_bytes is not None:
            self.over_limit[problem] = error
        elif error.lacks_memory:
            self.too_large[problem] = error
        else:
            return False
        return True

    def judge_over_limit(self) -> None:
        """Warn of all kernels that have no split within the limit.

        Raises PlanError instead if `unplanned` is "error" or no other kernel has a plan.
        """
        if not self.over_limit:
            return
        limit = self.config.limit_bytes or 0
        is_refused = self.config.unplanned == "error"
        error = _all_over_limit(self.over_limit, limit, len(self.left_out), is_refused)
        if is_refused or not self.kernels:
            raise error
        warn(
            f"{len(self.over_limit)} of {len(self.tunings)} kernels exceed the workspace limit and "
            f"run torch's own convolution: {error}",
            UntunedWarning,
        )

    def judge_too_large(self) -> None:
        """Warn of kernels of which too little could be run for a plan, for lack of memory.

        Raises PlanError instead if `unplanned` is "error" or no other kernel has a plan.
        """
        if not self.too_large:
            return
        error = next(iter(self.too_large.values()))
        if self.config.unplanned == "error" or not self.kernels:
            raise error
        warn(
            f"{len(self.too_large)} of {len(self.tunings)} kernels could not be measured and run "
            f"torch's own convolution: {error}",
            UntunedWarning,
        )

    def require_plans(self) -> None:
        """Raise PlanError if a kernel has no plan within the memory budget."""
        if self.refusals:
            layers = {problem: one.kernel.layers for problem, one in self.tunings.items()}
            raise self.limits.refusal(self.refusals, layers)


def _tuned_at(plan: KernelPlan, tuning: KernelTuning, limit: int | None) -> KernelPlan:
    """The plan with the splits that are found by tuning a smaller batch by itself, if any fits."""
    try:
        # Any plan that fits will do, so measuring ends at any possible gain.
        smaller = KernelPlanner(tuning, limit, tolerance=1.0).decide()
    except PlanError:
        return plan
    return plan if smaller is None else plan.completed_by(smaller)


def _all_over_limit(
    refused: Mapping[Problem, PlanError], limit: int, unknown: int, is_refused: bool
) -> PlanError:
    """One error for all kernels that have no split within the workspace limit.

    `unknown` is the number of further kernels that were not examined, because the time was over.
    """
    remedy = (
        ", or leave what does not fit to torch's own convolution by unplanned='torch'"
        if is_refused
        else ""
    )
    if len(refused) == 1 and not unknown:
        (error,) = refused.values()
        return PlanError(f"{error}{remedy}", error.smallest_bytes)
    needs = [(error.smallest_bytes or 0, str(problem)) for problem, error in refused.items()]
    # The kernel that needs most comes first: a limit as large as its workspace fits all of them.
    needs.sort(reverse=True)
    most, *sizes = format_sizes(limit, *(need for need, _ in needs))
    listed = ", ".join(f"{size} for {name}" for size, (_, name) in zip(sizes, needs, strict=True))
    fits = f"fits all but {unknown} that there was no time for" if unknown else "fits all"
    return PlanError(
        f"no plan for {len(refused)} kernel{'s' * (len(refused) > 1)} fits "
        f"workspace_limit={most}; the "
        f"smallest needs {listed}; raise the limit to {sizes[0]}, which {fits}{remedy}",
        needs[0][0],
    )
