"""Tune the kernels of a model in the order of their possible gain, within a time budget.

There is a plan at any moment: finished kernels have a plan of their own, and the other kernels run
torch's own convolution. If kernels divide one pool of workspace, their fronts are measured and the
pool is divided before any kernel is planned.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import inf

import torch

from ucudnn.backends import AbstractBackend
from ucudnn.benchmark.worker import Worker
from ucudnn.cache import AbstractCache
from ucudnn.config import Config
from ucudnn.errors import PlanError
from ucudnn.kernels.candidates import Kernel
from ucudnn.kernels.choose import KernelPlanner
from ucudnn.kernels.deadline import EFFORTS, Deadline
from ucudnn.kernels.device import Session
from ucudnn.kernels.limits import Limits
from ucudnn.kernels.measure import KernelTuning
from ucudnn.kernels.pool import WorkspacePool
from ucudnn.kernels.results import Progress, Report, Results, warn_of_untuned
from ucudnn.kernels.shares import StepShares
from ucudnn.plan import KernelPlan
from ucudnn.problem import Problem
from ucudnn.solvers import divide

# A group of kernels keeps this fraction of its time for timing whole calls. Otherwise its plans
# would rest on predictions, the sums of the times of their chunks.
_RACING = 0.4


class TuningScheduler:
    """Tunes the kernels of one model; for its arguments see `tune_problems`."""

    def __init__(
        self,
        backend: AbstractBackend,
        cache: AbstractCache,
        config: Config,
        layers_by_problem: Mapping[Problem, tuple[str, ...]],
        limits: Limits,
        on_progress: Report | None = None,
        biased: Collection[Problem] = (),
        remeasure: bool = False,
        deadline: Deadline | None = None,
        last: Deadline | None = None,
        worker: Worker | None = None,
    ) -> None:
        has_pool = config.total_bytes is not None
        if has_pool:
            # A solver imports its package when it solves. It solves the smallest possible division
            # here, so that a missing package is reported now, not after minutes of measuring.
            divide([[(0, 1)]], 0, config.solver)
        self._config = config
        self._on_progress = on_progress
        self._effort = EFFORTS[config.effort]
        # A default budget counts from here; it is not known yet.
        self._began = Deadline.within(0.0)
        self._has_default = deadline is None
        self._deadline = Deadline.never() if deadline is None else deadline
        # Kernels that must have a plan and have none go on until the first of these moments, and
        # smaller batches until the second one. No step can be run by kernels over a memory budget.
        self._completing = Deadline.never() if last is None else last
        self._last = self._completing if limits.budget_bytes is None else Deadline.never()
        # The time budget in seconds; None: there is none, or it is not known.
        self.budget_s = config.time_budget_s
        self.session = Session(
            backend,
            cache,
            worker,
            self._report,
            until=self._deadline,
            race_until=self._deadline,
            end=self._last if has_pool else self._deadline,
            effort=self._effort,
            remeasure=remeasure,
        )
        # The tuning of each kernel, which goes on from the first look at it to its plan.
        self._tunings = {
            problem: KernelTuning(
                self.session,
                config,
                Kernel(problem, layers, problem in biased),
                # A pool limits every kernel, even before it is divided.
                is_limited=has_pool or limits.of(problem) is not None,
            )
            for problem, layers in layers_by_problem.items()
        }
        self._shares = StepShares(self.session, self._tunings, limits)
        pool = WorkspacePool(config, self._shares) if has_pool else None
        self.results = Results(self._tunings, limits, config, pool)
        # Time in ns of all convolutions of a step by torch; 0 until it is known.
        self._total_ns = 0
        self._counts_from_s = 0.0
        # Kernels that there was no time to run by torch's own convolution.
        self._unseen: set[Problem] = set()

    def run(self) -> None:
        """Tune all kernels, or as many as the time allows.

        Raises PlanError if a kernel must have a plan and none fits its limit, or if no plans of all
        kernels fit the pool together.
        """
        try:
            # Function modes of the caller, such as `with torch.device("meta")`, would change where
            # operands are allocated. Autocast would cast them to another dtype than the problem's.
            no_autocast = torch.autocast("cpu", enabled=False)
            with torch.no_grad(), torch._C.DisableTorchFunction(), no_autocast:
                if self.results.pool is not None and self.session.can_measure:
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
        self.session.begin("")
        self.results.judge_over_limit()
        self.results.judge_too_large()
        left_out, can_measure = len(self.results.left_out), self.session.can_measure
        warn_of_untuned(left_out, self.budget_s, is_recorded=not can_measure)

    def _begin_tuning(self) -> None:
        """Derive the time budget from the time of a step if there is no deadline, and report it."""
        self._total_ns = self._shares.cost_ns(self._tunings)
        session = self.session
        if self._has_default and session.can_measure:
            self.budget_s = self._effort.budget_s(self._total_ns, on_gpu=session.is_on_gpu)
            if self.budget_s is not None:
                # The start of a worker does not count towards a default budget: otherwise the
                # budget could be over on a GPU before anything was measured.
                self._deadline = self._began.later(self.budget_s + session.started_s)
        # Progress is counted from here on, because the first runs of torch's own convolutions do
        # not show how fast tuning proceeds.
        self._counts_from_s = self._deadline.clock()
        session.stop_at(self._deadline)
        self._end_at(self._deadline)
        self._report()

    def _tune_all(self) -> None:
        if self.results.pool is not None:
            self._tune_within(self.results.pool)
        else:
            if self.session.can_measure:
                self.results.leave_to_torch(self._shares.ignored(self._total_ns, self._effort))
            self._tune_by_gain([one for one in self._tunings if one not in self.results.plans])
        self._tune_missing()
        self.results.require_plans()
        if not self.session.can_measure:
            return
        # If the user set a time budget, what is left of it is used for kernels whose plan was not
        # raced. A default budget is not used up for small gains. With layout="auto" no budget is
        # used up, because the first layout must leave time for the second.
        if self._config.layout == "keep" and self._config.time_budget_s is not None:
            self._end_at(self._deadline)
            self._tune_by_gain(self.results.unraced)
        self._end_at(self._completing)
        self.session.stop_at(self._completing)
        for plan in self.results.kernels:
            self._complete(plan)

    def _tune_within(self, pool: WorkspacePool) -> None:
        """Divide a pool, and plan kernels within their parts of it."""
        while True:
            before = dict(pool.parts)
            pool.divide(self._deadline, self._last)
            # Plans that were made for larger parts would exceed the pool.
            self.results.plans = {
                problem: plan
                for problem, plan in self.results.plans.items()
                if before.get(problem, -1) <= pool.parts.get(problem, -1)
            }
            self._tune_by_gain(pool.parts)
            # Planning may show that whole calls need more workspace than their chunks, or that
            # other splits are faster. Then the pool is divided anew.
            if not pool.learn(self._deadline):
                return

    def _plan_by_known(self) -> None:
        """Plan the kernels that have a part of the pool by what is known; nothing is measured."""
        pool = self.results.pool
        if pool is None:
            return
        self._on_progress = None
        self.session.stop_at(Deadline.within(0.0))
        self.results.plans = {}
        pool.divide_by_known()
        for problem in pool.parts:
            plan = self._decided(problem)
            if plan is not None:
                self.results.plans[problem] = plan

    def _tune_missing(self) -> None:
        """Go on with kernels that must have a plan and have none, until each has its first one."""
        self._end_at(self._last)
        # When the time for chunks is over, micro-batches are measured until they make a plan. If
        # none is found, slabs may fit, so everything is measured, as long as there is time.
        for chunks in (self._deadline.part(1 - _RACING), self._last):
            missing = [one for one in self.results.missing if self._must_have_plan(one)]
            for problems in self._shares.by_gain(missing):
                if not self._last.is_over:
                    self.session.stop_at(chunks, self._last)
                    self._tune(problems)

    def _end_at(self, end: Deadline) -> None:
        # A pool keeps some time to plan the kernels, and may go on until `last` at any moment.
        if self.results.pool is None:
            self.session.end = end

    def _must_have_plan(self, problem: Problem) -> bool:
        """True unless torch's own convolution, which was not run yet, may serve a kernel."""
        is_limited = self.results.limit_of(problem) is not None
        is_limited &= problem not in self.results.limits.fitting
        return is_limited or self._config.deterministic or problem not in self._unseen

    def _tune_by_gain(self, problems: Collection[Problem]) -> None:
        """Tune kernels in the order of their possible gain, and divide the time among them."""
        for group, races in self._shares.in_turn(self._deadline, problems):
            # With a pool, kernels are planned even after the deadline, by what was measured before.
            if self._deadline.is_over and self.results.pool is None:
                return
            self.session.stop_at(races.part(1 - _RACING), races)
            self._tune(group)

    def _tune(self, problems: Sequence[Problem]) -> None:
        """Plan kernels of one geometry in the time that the session has for them."""
        self.session.begin(problems[0])
        measuring = [
            self._tunings[p].measure(self.results.limit_of(p), self._tolerance(p)) for p in problems
        ]
        # In turn, because kernels that differ only in their batch share their chunks.
        while measuring:
            measuring = [one for one in measuring if next(one, self) is None]
        # Races come last: kernels of one geometry may measure what another kernel of the group
        # needs.
        plans = [plan for plan in map(self._decided, problems) if plan is not None]
        self.session.stop_at(self._deadline)
        for plan in plans:
            self.results.plans[plan.problem] = self.results.with_every_batch(plan)

    def _look(self, problem: Problem) -> None:
        """Run torch's own convolution once, to know its time and to have a plan to fall back to."""
        # A warning at the end counts the kernels that are left out here and get no plan later.
        if self.session.is_over:
            self._unseen.add(problem)
            return
        self._tunings[problem].look_at_default()

    def _complete(self, plan: KernelPlan) -> None:
        """Plan the smaller batches that the plan of a kernel leaves out."""
        if not plan.uncovered():
            return
        completed = self.results.with_every_batch(plan)
        self.results.plans[plan.problem] = completed
        if self.session.is_over and completed.uncovered():
            self.results.unfinished.add(plan.problem)

    def _tolerance(self, problem: Problem) -> float:
        """The possible gain, as a fraction of a kernel's time, at which measuring it ends."""
        if not self._total_ns or self._tunings[problem].default is None:
            return 0.0
        return self._shares.stakes[problem].tolerance(self._total_ns, self._effort)

    def _decided(self, problem: Problem) -> KernelPlan | None:
        limit, tolerance = self.results.limit_of(problem), self._tolerance(problem)
        try:
            return KernelPlanner(self._tunings[problem], limit, tolerance).decide()
        except PlanError as error:
            if not self.results.refuse(problem, error):
                raise
            return None

    def _report(self) -> None:
        if self._on_progress is not None:
            plans, pool, left_s = self.results.plans, self.results.pool, self._deadline.left_s()
            # Tuning a kernel is assumed to last in proportion to the time of torch's own
            # convolution.
            if done_ns := self._shares.cost_ns(plans):
                spent_s = self._deadline.clock() - self._counts_from_s
                left_s = min(left_s, spent_s * (self._total_ns - done_ns) / done_ns)
            self._on_progress(
                Progress(
                    self.session.at_work,
                    len(plans if pool is None else pool.parts),
                    len(self._tunings),
                    self.session.measured,
                    self.session.reused,
                    None if left_s == inf else left_s,
                    self.budget_s,
                )
            )
