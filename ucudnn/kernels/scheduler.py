"""Tune the kernels of a model in the order of their possible gain, within a time budget.

There is a plan at any moment: finished kernels have a plan of their own, and the other kernels run
torch's own convolution. If kernels divide one pool of workspace, their fronts are measured and the
pool is divided before any kernel is planned.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from time import monotonic

import torch

from ucudnn.backends import AbstractBackend
from ucudnn.cache import AbstractCache
from ucudnn.config import Config
from ucudnn.errors import PlanError
from ucudnn.kernels.budget import EFFORTS, LEAST_RACE_STEPS, Budget, StepShares
from ucudnn.kernels.limits import Limits
from ucudnn.kernels.planner import KernelPlanner
from ucudnn.kernels.pool import WorkspacePool
from ucudnn.kernels.results import Progress, Results, warn_of_untuned
from ucudnn.kernels.session import Session
from ucudnn.kernels.sources import AbstractSource, Bounds, Kernel, source_of
from ucudnn.measurement import Measurement
from ucudnn.plan import KernelPlan
from ucudnn.problem import Problem
from ucudnn.solvers import divide

# Before any step was run, a step is assumed to take this many times as long as its convolutions.
_LONGER = 1.25


class TuningScheduler:
    """Tunes the kernels of one model; for its arguments see `tune_problems`."""

    def __init__(
        self,
        backend: AbstractBackend,
        cache: AbstractCache,
        config: Config,
        layers_by_problem: Mapping[Problem, tuple[str, ...]],
        limits: Limits,
        on_progress: Callable[[Progress], None] | None = None,
        biased: Collection[Problem] = (),
        reserved_steps: int = 0,
        remeasure: bool = False,
        budget_s: float | None = None,
    ) -> None:
        has_pool = config.total_bytes is not None
        if has_pool:
            # A solver imports its package when it solves. It solves the smallest possible division
            # here, so that a missing package is reported now, not after minutes of measuring.
            divide([[(0, 1)]], 0, config.solver)
        self._config = config
        self._layers = layers_by_problem
        self._biased = frozenset(biased)
        self._on_progress = on_progress
        self._effort = EFFORTS[config.effort]
        self._reserved_steps = reserved_steps
        self._budget = Budget(config.time_budget_s if budget_s is None else budget_s)
        deadline = self._budget.deadline
        self.session = Session(
            backend,
            cache,
            self._report,
            until=deadline,
            race_until=deadline,
            effort=self._effort,
            remeasure=remeasure,
            deadline=deadline,
        )
        self._shares = StepShares(self.session, layers_by_problem, limits)
        self.results = Results(
            layers_by_problem, limits, self._shares.defaults, self.session.kernel_of, config
        )
        if has_pool:
            self.results.pool = WorkspacePool(
                config,
                layers_by_problem,
                limits,
                self.session,
                self._shares,
                self._source,
                self._budget,
                self._report,
            )
        self._at_work = ""
        # Time in ns of all convolutions of a step by torch, and the estimated time in s of the
        # whole step; 0 until they are known.
        self._total_ns, self._step_s = 0, 0.0
        # Kernels whose tuning has not begun; the time that is left is divided among them.
        self._left: set[Problem] = set()

    def run(self) -> None:
        """Tune all kernels, or as many as the time allows.

        Raises PlanError if a kernel must have a plan and none fits its limit, or if no plans of all
        kernels fit the pool together.
        """
        try:
            # Function modes of the caller, such as `with torch.device("meta")`, would change where
            # operands are allocated.
            with torch.no_grad(), torch._C.DisableTorchFunction():
                if not self.session.is_recorded:
                    if self.results.pool is not None:
                        self.results.pool.look_first()
                    for problem in self._shares.by_expected_cost():
                        self._look(problem)
                    self.session.flush()
                self._begin_tuning()
                self._tune_all()
        except KeyboardInterrupt:
            self._plan_by_known()
            raise
        finally:
            self.session.close()
        self._report("")
        self.results.judge_over_limit()
        self.results.judge_too_large()
        left_out, is_recorded = len(self.results.left_out), self.session.is_recorded
        warn_of_untuned(left_out, self.budget_s, is_recorded)

    @property
    def budget_s(self) -> float | None:
        """The time budget in seconds; None: there is none, or the default one is not known yet."""
        # Messages name the time budget that the user set, even if these problems get only a part of
        # it.
        return self._config.time_budget_s or self._budget.seconds

    @property
    def _default_budget_s(self) -> float | None:
        on_gpu = self.session.backend.device().type == "cuda"
        return self._effort.budget_s(self._total_ns, on_gpu=on_gpu)

    def _begin_tuning(self) -> None:
        """Derive the time budget from the time of a step if no budget is set, and report it."""
        seconds = self._budget.seconds
        self._total_ns = self._shares.cost_ns(self._layers)
        self._step_s = _LONGER * self._total_ns / 1e9
        if seconds is None and not self.session.is_recorded:
            seconds = self._default_budget_s
        reserved_s = self._reserved_steps * self._step_s
        self._budget.begin_tuning(seconds, reserved_s, self.session.started_s)
        # The deadline depends on the time of a step, which was not known when the session was
        # opened.
        self.session.stop_at(self._budget.deadline)
        self._report()

    def _tune_all(self) -> None:
        if self.results.pool is not None:
            self._tune_within(self.results.pool)
        elif self.session.is_recorded:
            # Replaying costs no time, so kernels need not be ranked by their share of the step.
            self._tune_each(self._shares.by_geometry())
        else:
            self.results.leave_to_torch(self._shares.ignored(self._total_ns, self._effort))
            self._tune_by_gain([one for one in self._layers if one not in self.results.plans])
        self._tune_missing()
        self.results.require_plans()
        if self.session.is_recorded:
            return
        # If the user set a time budget, what is left of it is used for kernels whose plan was not
        # raced. A default budget is not used up for small gains. With layout="auto" no budget is
        # used up, because the first layout must leave time for the second.
        race_s = LEAST_RACE_STEPS * self._step_s
        if self._config.layout == "keep" and self._budget.go_on(race_s):
            self._tune_by_gain(self.results.unraced)
        self.session.stop_at(self._budget.last_moment)
        for plan in self.results.kernels:
            self._complete(plan)

    def _tune_within(self, pool: WorkspacePool) -> None:
        """Divide a pool, and plan kernels within their parts of it."""
        while True:
            before = dict(pool.parts)
            pool.divide()
            # Plans that were made for larger parts would exceed the pool.
            self.results.plans = {
                problem: plan
                for problem, plan in self.results.plans.items()
                if before.get(problem, -1) <= pool.parts.get(problem, -1)
            }
            self._tune_by_gain(pool.parts)
            # Planning may show that whole calls need more workspace than their chunks, or that
            # other splits are faster. Then the pool is divided anew.
            if not pool.learn():
                return

    def _plan_by_known(self) -> None:
        """Plan the kernels that have a part of the pool by what is known; nothing is measured."""
        pool = self.results.pool
        if pool is None:
            return
        self._on_progress = None
        self.session.stop_at(0.0)
        self.results.plans = {}
        pool.divide_by_known()
        for problem in pool.parts:
            plan = self._decided(self._source(problem))
            if plan is not None:
                self.results.plans[problem] = plan

    def _tune_missing(self) -> None:
        """Tune kernels that have no plan yet, not even one by torch's own convolution."""
        for extend in self._budget.extensions(self._default_budget_s):
            if missing := self.results.missing:
                extend()
                self._tune_by_gain(missing)

    def _tune_by_gain(self, problems: Collection[Problem]) -> None:
        """Tune kernels in the order of their possible gain, and divide the time among them."""
        self._left = set(problems)
        self.session.stop_at(self._budget.deadline)
        self._budget.keep_for(self._shares.forced(problems))
        self._tune_each(self._shares.by_gain(problems))

    def _tune_each(self, groups: Iterable[Sequence[Problem]]) -> None:
        for problems in groups:
            # With a pool, kernels are planned even after the deadline, by what was measured before.
            if self._budget.is_over and self.results.pool is None:
                return
            self._report(problems[0])
            self._allot(problems)
            began = monotonic()
            # A kernel that has no part of the pool cannot be planned.
            parts = None if self.results.pool is None else self.results.pool.parts
            sources = [self._source(p) for p in problems if parts is None or p in parts]
            with torch.autocast("cpu", enabled=False):
                # `sum`, because `any` would stop at the first source that has measured something,
                # and not call the others.
                while sum(source.step() for source in sources):
                    pass
                self.session.flush()
                # Races come last: kernels of one geometry may measure what another kernel of the
                # group needs.
                plans = [plan for plan in map(self._decided, sources) if plan is not None]
                if self._budget.deadline is not None:
                    # Planning the smaller batches may take as long as the largest batch has taken,
                    # even if the deadline is over then.
                    end = max(self._budget.deadline, 2 * monotonic() - began)
                    last = self._budget.last_moment
                    self.session.stop_at(end if last is None else min(end, last))
                for plan in plans:
                    self.results.plans[plan.problem] = self._completed(plan)

    def _allot(self, problems: Sequence[Problem]) -> None:
        if not self.session.is_recorded:
            shares, waiting = self._shares, list(self._left)
            self._left.difference_update(problems)
            part, forced = shares.part(problems, waiting), shares.forced(problems)
            self._budget.allot(self.session, part, forced, shares.forced(waiting))

    def _look(self, problem: Problem) -> None:
        """Run torch's own convolution once, to know its time and to have a plan to fall back to."""
        # A warning at the end counts the kernels that are left out here and get no plan later.
        if self.session.is_over:
            return
        source = self._source(problem)
        with torch.autocast("cpu", enabled=False):
            found = source.look_at_default()
        source.release()
        if found is not None:
            self._shares.defaults[problem] = found

    def _complete(self, plan: KernelPlan) -> None:
        """Plan the smaller batches that the plan of a kernel leaves out."""
        if not plan.uncovered():
            return
        with torch.autocast("cpu", enabled=False):
            completed = self._completed(plan)
        self.results.plans[plan.problem] = completed
        if self.session.is_over and completed.uncovered():
            self.results.unfinished.add(plan.problem)

    def _completed(self, plan: KernelPlan) -> KernelPlan:
        """The plan of a kernel, completed at its smaller batches as far as anything fits."""

        def source_at(batch: int) -> AbstractSource:
            limit = self.results.limit_at(plan.problem, batch)
            # Any plan that fits will do, so measuring ends at any possible gain.
            bounds = Bounds(limit, limit, tolerance=1.0)
            return self._source_within(plan.problem, bounds, batch=batch)

        return self.results.with_every_batch(plan, source_at)

    def _source(self, problem: Problem, limit: int | None = None) -> AbstractSource:
        """The source of a kernel within a limit; None: within the kernel's present limit."""
        limit = self.results.limit_of(problem) if limit is None else limit
        default, tolerance = self._shares.defaults.get(problem), 0.0
        if not self.session.is_recorded and self._total_ns and default is not None:
            tolerance = self._shares.stakes[problem].tolerance(self._total_ns, self._effort)
        source = self._source_within(problem, Bounds(limit, limit, tolerance), default)
        # A recording already has the time of torch's own convolution, without a first run.
        if source.default is not None:
            self._shares.defaults[problem] = source.default
        return source

    def _source_within(
        self,
        problem: Problem,
        bounds: Bounds,
        default: Measurement | None = None,
        batch: int | None = None,
    ) -> AbstractSource:
        smaller = problem.with_batch(batch or problem.batch)
        kernel = Kernel(smaller, self._layers[problem], problem in self._biased)
        return source_of(self.session, self._config, kernel, bounds, default)

    def _decided(self, source: AbstractSource) -> KernelPlan | None:
        try:
            return KernelPlanner(source).decide()
        except PlanError as error:
            if not self.results.refuse(source.kernel.problem, error):
                raise
            return None

    def _report(self, at_work: Problem | str | None = None) -> None:
        if at_work is not None:
            self._at_work = str(at_work)
        if self._on_progress is not None:
            plans, pool = self.results.plans, self.results.pool
            self._on_progress(
                Progress(
                    self._at_work,
                    len(plans if pool is None else pool.parts),
                    len(self._layers),
                    self.session.measured,
                    self.session.reused,
                    self._budget.seconds_left(self._shares.cost_ns(plans), self._total_ns),
                    self.budget_s,
                )
            )
