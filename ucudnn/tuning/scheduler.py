"""Tune many kernels on one or several devices, by possible gain, within a time budget.

There is a plan at any moment: finished kernels have theirs, and the others run torch's own
convolution. If kernels divide one pool of workspace, the front of each kernel is measured first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from ucudnn.backends import AbstractBackend
from ucudnn.backends.recorded import RecordedBackend
from ucudnn.cache import AbstractCache
from ucudnn.config import Config
from ucudnn.errors import PlanError
from ucudnn.plan import KernelPlan
from ucudnn.problem import Problem
from ucudnn.tuning.budget import LEAST_RACE_STEPS, Budget
from ucudnn.tuning.devices import Task, open_devices
from ucudnn.tuning.division import require_solver
from ucudnn.tuning.effort import EFFORTS, Effort
from ucudnn.tuning.fallback import with_every_batch
from ucudnn.tuning.memory_budget import Limits
from ucudnn.tuning.planner import KernelPlanner
from ucudnn.tuning.pool import Pool, measure
from ucudnn.tuning.progress import Progress, warn_of_untuned
from ucudnn.tuning.results import Results
from ucudnn.tuning.session import Session
from ucudnn.tuning.sources import Bounds, Kernel, source_of
from ucudnn.tuning.step_shares import StepShares

# How many times as long as its convolutions a step is taken to be, before any was run.
_LONGER = 1.25


class _Planners:
    """Makes the planners of kernels.

    Args:
        config: the settings.
        layers_by_problem: the names of the layers that run each kernel.
        biased: of the problems those to whose result a layer adds a bias.
        limit_of: workspace that each kernel may use now.
        shares: times of torch's own convolutions, which planners of a recording add to.
        effort: which gains are too small to look for.
    """

    def __init__(
        self,
        config: Config,
        layers_by_problem: Mapping[Problem, tuple[str, ...]],
        biased: Collection[Problem],
        limit_of: Callable[[Problem], int | None],
        shares: StepShares,
        effort: Effort,
    ) -> None:
        self._config = config
        self._layers = layers_by_problem
        self._biased = frozenset(biased)
        self._limit_of = limit_of
        self._shares = shares
        self._effort = effort
        # Time of a step by torch's own convolutions, once it is known and where kernels are
        # measured by their share of it.
        self.step_ns = 0

    def __call__(
        self, session: Session, problem: Problem, limit: int | None = None
    ) -> KernelPlanner:
        """Within a limit of its own, or within that of now."""
        limit = self._limit_of(problem) if limit is None else limit
        shares = self._shares
        kernel = Kernel(problem, self._layers[problem], problem in self._biased)
        default = shares.defaults.get(problem)
        tolerance = 0.0
        if self.step_ns and default is not None:
            tolerance = shares.stakes[problem].tolerance(self.step_ns, self._effort)
        bounds = Bounds(limit, limit, tolerance)
        planner = KernelPlanner(source_of(session, self._config, kernel, bounds, default))
        # A recording says what torch's own convolution takes without a first run.
        if planner.default is not None:
            shares.defaults[problem] = planner.default
        return planner

    def at_batch(
        self, session: Session, problem: Problem, batch: int, limit: int | None
    ) -> KernelPlanner:
        """Of a kernel at a smaller batch, for any plan and not for the best one."""
        layers, biased = self._layers[problem], problem in self._biased
        kernel = Kernel(problem.with_batch(batch), layers, biased)
        bounds = Bounds(limit, limit, tolerance=1.0)
        return KernelPlanner(source_of(session, self._config, kernel, bounds, None))


class TuningScheduler:
    """Tunes the kernels of one model.

    Args:
        backends: one per device, all of one kind; several measure in processes of their own.
        cache: where measurements are kept.
        config: the settings.
        layers_by_problem: the problems to tune, with the names of the layers that run them.
        limits: workspace that each kernel may use.
        on_progress: called after every measurement.
        biased: problems to whose result a layer adds a bias.
        is_whole_step: the problems are all convolutions of a step, so that each is measured as
            carefully as its part of the step is worth.
        reserved_steps: time of the budget to leave unused, in steps.
        remeasure: measure everything anew, even if it is in the cache.

    Raises:
        ConfigError: the devices are of several kinds, or the solver is not installed.
    """

    def __init__(
        self,
        backends: Sequence[AbstractBackend],
        cache: AbstractCache,
        config: Config,
        layers_by_problem: Mapping[Problem, tuple[str, ...]],
        limits: Limits,
        on_progress: Callable[[Progress], None] | None = None,
        biased: Collection[Problem] = (),
        is_whole_step: bool = True,
        reserved_steps: int = 0,
        remeasure: bool = False,
    ) -> None:
        has_pool = config.total_bytes is not None
        if has_pool:
            # A missing package is reported now, not after minutes of measuring.
            require_solver(config.solver)
        self._config = config
        self._layers = layers_by_problem
        self._on_progress = on_progress
        self._effort = EFFORTS[config.effort]
        self._reserved_steps = reserved_steps
        self._budget = Budget(config.time_budget_s)
        # In a pool every kernel's front decides on the parts of all, and what is recorded costs no
        # time: neither is measured by the kernel's share of the step.
        is_recorded = isinstance(backends[0], RecordedBackend)
        self._by_share = is_whole_step and not has_pool and not is_recorded
        # Without shares no kernel is too small, and no roofline may rule anything out.
        effort = self._effort if self._by_share else replace(self._effort, ignored_share=0)
        self.devices = open_devices(
            backends, cache, effort, self._budget.deadline, remeasure, self._report
        )
        self._limits = limits
        self._shares = StepShares(self.devices.first, layers_by_problem, self._limits)
        self.results = Results(
            layers_by_problem, limits, self._shares.defaults, self.devices.first.kernel_of, config
        )
        self._planners = _Planners(
            config, layers_by_problem, biased, self.results.limit_of, self._shares, self._effort
        )
        if has_pool:
            parts = (self.devices, self._shares, self._planners, self._budget, self._report)
            self.results.pool = Pool(config, layers_by_problem, limits, *parts)
        self._at_work = ""
        self._total_ns, self._step_s = 0, 0.0
        # Kernels that nothing was begun of, among which the time that is left is divided.
        self._left: set[Problem] = set()

    def run(self) -> None:
        """Tune everything, or as much as the time allows.

        Raises:
            PlanError: no plan of some kernel fits the workspace limit, or of all the pool.
        """
        try:
            # Function modes of the caller, as `with torch.device("meta")`, would change where
            # operands are allocated.
            with torch.no_grad(), torch._C.DisableTorchFunction():
                if not self.devices.is_recorded:
                    self.devices.spread(map(self._look, self._shares.by_expected_cost()))
                    # Any device may tune a kernel next, and finds its first run in the cache.
                    self.devices.flush()
                self._begin_tuning()
                self._tune_all()
        except BaseException:
            # Whatever of this still runs for other devices begins nothing new.
            self._budget.end()
            raise
        finally:
            self.devices.close()
        self._report("")
        self.results.judge_over_limit()
        left_out, is_recorded = len(self.results.left_out), self.devices.is_recorded
        warn_of_untuned(left_out, len(self._layers), self._budget.seconds, is_recorded)

    @property
    def budget_s(self) -> float | None:
        """Seconds that tuning may take; None: without an end, or not known yet."""
        return self._budget.seconds

    @property
    def _default_budget_s(self) -> float | None:
        on_gpu = self.devices.first.backend.device().type == "cuda"
        return self._effort.budget_s(self._total_ns, on_gpu=on_gpu)

    def _begin_tuning(self) -> None:
        """Derive the time budget from the step if none is set, and report it."""
        seconds = self._budget.seconds
        self._total_ns = self._shares.cost_ns(self._layers)
        self._step_s = _LONGER * self._total_ns / 1e9
        self._planners.step_ns = self._total_ns if self._by_share else 0
        if seconds is None and self._by_share:
            seconds = self._default_budget_s
        reserved_s = self._reserved_steps * self._step_s
        self._budget.begin_tuning(seconds, reserved_s, self.devices.first.started_s)
        # Sessions were opened when the length of a step was not known.
        self.devices.stop_at(self._budget.deadline)
        self._report()

    def _tune_all(self) -> None:
        pool = self.results.pool
        if pool is not None:
            pool.divide()
        if self._by_share:
            self.results.leave_to_torch(self._shares.ignored(self._total_ns, self._effort))
            self._tune_by_gain([one for one in self._layers if one not in self.results.plans])
        else:
            self.devices.spread(map(self._tune, self._shares.by_geometry()))
        # Whole calls showed that they need more than their chunks.
        while pool is not None and pool.learn():
            pool.divide()
            self.devices.spread(map(self._tune, self._shares.by_geometry()))
        self._tune_missing()
        self.results.require_plans()
        # A default budget is not used up for small gains, and of two layouts the second needs some.
        race_s = LEAST_RACE_STEPS * self._step_s
        if self._by_share and self._config.layout == "keep" and self._budget.go_on(race_s):
            self._tune_by_gain(self.results.unraced)
        if not self.devices.is_recorded:
            self.devices.stop_at(self._budget.last_moment)
            self.devices.spread(map(self._complete, self.results.kernels))

    def _tune_missing(self) -> None:
        """Tune kernels that would exceed their limit without a plan."""
        for extend in self._budget.extensions(self._default_budget_s):
            if missing := self.results.missing:
                extend()
                self._tune_by_gain(missing)

    def _tune_by_gain(self, problems: Collection[Problem]) -> None:
        """Tune kernels among which the time is divided."""
        self._left = set(problems)
        self.devices.stop_at(self._budget.deadline)
        self._budget.keep_for(self._shares.forced(problems))
        self.devices.spread(map(self._tune, self._shares.by_gain(problems)))

    def _allot(self, session: Session, problems: Sequence[Problem]) -> None:
        """Give a group its part of the remaining time."""
        if self._by_share:
            # Another device may begin a group meanwhile.
            shares, waiting = self._shares, list(self._left)
            self._left.difference_update(problems)
            # Devices work at the same time: there is its part of the time on each of them.
            part = shares.part(problems, waiting) * len(self.devices)
            self._budget.allot(session, part, shares.forced(problems), shares.forced(waiting))

    def _look(self, problem: Problem) -> Task:
        """Run torch's own convolution once, for a plan to fall back to and for its time."""

        def task(session: Session) -> None:
            # Kernels that are left out here are named in a warning at the end.
            if not session.is_over:
                planner = self._planners(session, problem)
                with torch.autocast("cpu", enabled=False):
                    found = planner.look_at_default()
                planner.release()
                if found is not None:
                    self._shares.defaults[problem] = found

        return task

    def _tune(self, problems: Sequence[Problem]) -> Task:
        """Measure and plan kernels of one geometry."""

        def task(session: Session) -> None:
            if self._budget.is_over:
                return
            self._report(problems[0])
            self._allot(session, problems)
            parts = None if self.results.pool is None else self.results.pool.parts
            planners = [self._planners(session, p) for p in problems if parts is None or p in parts]
            with torch.autocast("cpu", enabled=False):
                measure(session, planners)
                # Races come last: kernels of one geometry may measure what another of them needs.
                plans = [self._decided(planner) for planner in planners]
                self.results.plans |= {plan.problem: plan for plan in plans if plan is not None}

        return task

    def _complete(self, plan: KernelPlan) -> Task:
        """Plan the smaller batches that the plan of a kernel leaves out."""

        def task(session: Session) -> None:
            if not plan.uncovered():
                return
            limit_at = partial(self.results.limit_at, plan.problem)

            def planner_at(batch: int) -> KernelPlanner:
                return self._planners.at_batch(session, plan.problem, batch, limit_at(batch))

            deterministic = bool(self._config.deterministic)
            with torch.autocast("cpu", enabled=False):
                self.results.plans[plan.problem] = with_every_batch(
                    plan, limit_at, session.kernel_of, planner_at, deterministic
                )

        return task

    def _decided(self, planner: KernelPlanner) -> KernelPlan | None:
        try:
            return planner.decide()
        except PlanError as error:
            if not self.results.refuse(planner.problem, error):
                raise
            return None

    def _report(self, at_work: Problem | str | None = None) -> None:
        if at_work is not None:
            self._at_work = str(at_work)
        if self._on_progress is not None:
            done_ns = self._shares.cost_ns(self.results.plans)
            self._on_progress(
                Progress(
                    self._at_work,
                    len(self.results.plans),
                    len(self._layers),
                    self.devices.measured,
                    self.devices.reused,
                    self._budget.seconds_left(done_ns, self._total_ns),
                    self._budget.seconds,
                )
            )
