"""Tune many kernels: the costliest first, on several devices, in a time budget.

At any moment there is a plan: finished kernels have theirs, the others run torch's own convolution.
Where kernels divide one pool of workspace, what each could do with how much is measured first.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch

from ucudnn.backends import AbstractBackend
from ucudnn.backends.recorded import RecordedBackend
from ucudnn.cache import AbstractCache
from ucudnn.config import Config
from ucudnn.errors import PlanError
from ucudnn.plan import DEFAULT_ALGORITHM, KernelPlan, Split, Step, Timing
from ucudnn.problem import Problem
from ucudnn.system.forking import ForkSafeLock
from ucudnn.tuning.budget import Budget
from ucudnn.tuning.devices import Devices, Task, require_one_kind
from ucudnn.tuning.division import require_solver
from ucudnn.tuning.effort import EFFORTS
from ucudnn.tuning.noise import PERTURBED
from ucudnn.tuning.planner import Kernel, KernelPlanner
from ucudnn.tuning.pool import Pool, measure
from ucudnn.tuning.progress import Progress, UntunedWarning
from ucudnn.tuning.session import Session
from ucudnn.tuning.solve import solve
from ucudnn.tuning.step_shares import StepShares


class TuningScheduler:
    """The tuning of the kernels of one model.

    Args:
        backends: one per device, all of one kind; several measure in processes of their own.
        cache: where measurements are kept.
        config: the settings.
        layers_by_problem: what to tune, and the names of the layers that run it.
        on_progress: called after every measurement.
        biased: of the problems those to whose result a layer adds a bias.
        is_whole_step: the problems are all convolutions of a step, so that each is worth measuring
            by its share of it.
        reserved_steps: time to leave of the budget, in steps.
        remeasure: take every time anew, whatever the cache has.

    Raises:
        ConfigError: the devices are of several kinds, or the solver is not installed.
    """

    def __init__(
        self,
        backends: Sequence[AbstractBackend],
        cache: AbstractCache,
        config: Config,
        layers_by_problem: Mapping[Problem, tuple[str, ...]],
        on_progress: Callable[[Progress], None] | None = None,
        biased: Collection[Problem] = (),
        is_whole_step: bool = True,
        reserved_steps: int = 0,
        remeasure: bool = False,
    ) -> None:
        require_one_kind(backends)
        if config.total_bytes is not None:
            require_solver(config.solver)
        self._config = config
        self._layers = layers_by_problem
        self._kernels = {
            problem: Kernel(problem, layers, problem in biased)
            for problem, layers in layers_by_problem.items()
        }
        self._on_progress = on_progress
        self._effort = EFFORTS[config.effort]
        self._reserved_steps = reserved_steps
        self._budget = Budget(config.time_budget_s)
        is_recorded = isinstance(backends[0], RecordedBackend)
        self._by_share = is_whole_step and config.total_bytes is None and not is_recorded
        self.devices = self._opened(backends, cache, remeasure)
        self._shares = StepShares(self.devices.first, layers_by_problem, config.limit_bytes)
        self._pool: Pool | None = None
        if config.total_bytes is not None:
            self._pool = Pool(
                config,
                layers_by_problem,
                self.devices,
                self._shares,
                self._planner,
                lambda: self._budget.is_over,
                self._begin,
            )
        self._plans: dict[Problem, KernelPlan] = {}
        self._at_work = ""
        self._total_ns = 0

    def _opened(
        self, backends: Sequence[AbstractBackend], cache: AbstractCache, remeasure: bool
    ) -> Devices:
        effort = self._effort if self._by_share else replace(self._effort, ignored_share=0)
        lock, deadline = ForkSafeLock(), self._budget.deadline
        sessions = [
            Session(
                backend,
                cache,
                until=deadline,
                race_until=deadline,
                isolated=backend.in_worker or len(backends) > 1,
                effort=effort,
                lock=lock,
                remeasure=remeasure,
            )
            for backend in backends
        ]
        return Devices(sessions, self._report)

    def run(self) -> None:
        """Tune everything, or until the time is over.

        Raises:
            PlanError: no plan of some kernel fits the workspace limit, or all plans the pool.
        """
        try:
            # function modes such as `with torch.device("meta")` act on what makes operands
            with torch.no_grad(), torch._C.DisableTorchFunction():
                if not self.devices.is_recorded:
                    self.devices.spread(map(self._look, self._shares.by_expected_cost()))
                    self.devices.flush()  # whichever tunes a kernel, it knows of the look
                self._begin_tuning()
                self._tune_all()
        except BaseException:
            self._budget.end()
            raise
        finally:
            self.devices.close()
        self._at_work = ""
        self._report()
        self._warn_of_untuned()

    @property
    def kernels(self) -> tuple[KernelPlan, ...]:
        """The best plan so far, of each kernel that has one within the limit."""
        plans = (self._plans.get(p) or self._untuned(p) for p in self._layers)
        return tuple(plan for plan in plans if plan is not None)

    def _begin_tuning(self) -> None:
        """Derive the time budget from the step, where none is set, and say so."""
        shares, seconds = self._shares, self._budget.seconds
        self._total_ns = shares.cost_ns(self._layers)
        if seconds is None and self._by_share:
            is_forced = any(stake.is_forced for stake in shares.stakes.values())
            seconds = self._effort.budget_s(self._total_ns, is_forced)
        self._budget.begin_tuning(seconds, self._reserved_steps * self._total_ns / 1e9)
        if self._budget.deadline is not None:
            self.devices.stop_at(self._budget.deadline)
        self._report()

    def _tune_all(self) -> None:
        pool = self._pool
        if pool is not None:
            pool.divide()
        self._keep_defaults()
        self.devices.spread(map(self._tune, self._by_worth()))
        while pool is not None and pool.learn():
            pool.divide()
            self.devices.spread(map(self._tune, self._shares.by_geometry()))

    def _warn_of_untuned(self) -> None:
        left_out = len(self._layers) - len(self.kernels)
        if left_out:
            budget_s = self._budget.seconds
            budget = "" if budget_s is None else f" of {budget_s:g} s"
            warnings.warn(
                f"{left_out} of {len(self._layers)} kernels are not in the plan: "
                f"the time budget{budget} was over before they were looked at, or torch's own "
                f"convolution exceeds the workspace limit; raise it by time_budget_s, "
                f"or tune again and go on from what is in the cache",
                UntunedWarning,
                stacklevel=4,
            )

    def _keep_defaults(self) -> None:
        """Decide the kernels that are not worth measuring anything of."""
        if not self._by_share:
            return
        for problem, stake in self._shares.stakes.items():
            if stake.is_ignored(self._total_ns, self._effort):
                share = min(stake.time_ns, stake.gain_ns) / self._total_ns
                note = (
                    f"looked at once: it could save {share:.2%} of the convolutions' time at most"
                )
                plan = self._untuned(problem, note)
                if plan is not None:
                    self._plans[problem] = plan

    def _by_worth(self) -> list[list[Problem]]:
        """Groups of kernels that share measurements, the largest possible gain first."""
        groups = [
            left
            for group in self._shares.by_geometry()
            if (left := [problem for problem in group if problem not in self._plans])
        ]
        return sorted(groups, key=self._shares.gain_ns, reverse=True) if self._by_share else groups

    def _allot(self, session: Session, problems: Sequence[Problem]) -> None:
        """Give a group its part of the time that is left, by what it could gain."""
        if self._by_share:
            waiting = self._shares.gain_ns(p for p in self._layers if p not in self._plans)
            part = self._shares.gain_ns(problems) / waiting if waiting else 1.0
            self._budget.allot(session, part * len(self.devices))

    def _look(self, problem: Problem) -> Task:
        """Run torch's own convolution once: a plan to fall back to, and what time it is worth."""

        def task(session: Session) -> None:
            if not session.is_over:
                planner = self._planner(session, problem)
                with torch.autocast("cpu", enabled=False):
                    found = planner.look_at_default()
                planner.release()
                if found is not None:
                    self._shares.defaults[problem] = found

        return task

    def _tune(self, problems: Sequence[Problem]) -> Task:
        """Measure and plan kernels of one geometry, until none of them wants to know more."""

        def task(session: Session) -> None:
            if self._budget.is_over:
                return
            self._begin(problems[0])
            self._allot(session, problems)
            parts = None if self._pool is None else self._pool.parts
            planners = [self._planner(session, p) for p in problems if parts is None or p in parts]
            with torch.autocast("cpu", enabled=False):
                measure(session, planners)
                plans = [self._decided(planner) for planner in planners]
            self._plans |= {plan.problem: plan for plan in plans if plan is not None}

        return task

    def _begin(self, problem: Problem) -> None:
        self._at_work = str(problem)
        self._report()

    def _decided(self, planner: KernelPlanner) -> KernelPlan | None:
        try:
            return planner.decide()
        except PlanError as error:
            if self._pool is None or planner.limit == self._config.limit_bytes:
                raise
            self._pool.refuse(planner.problem, error)
            return None

    def _planner(
        self, session: Session, problem: Problem, limit: int | None = None
    ) -> KernelPlanner:
        shares, config = self._shares, self._config
        if limit is None:
            parts = {} if self._pool is None else self._pool.parts
            limit = parts.get(problem, config.limit_bytes)
        kernel, default = self._kernels[problem], shares.defaults.get(problem)
        tolerance = 0.0
        if self._total_ns and default is not None and self._by_share:
            tolerance = shares.stakes[problem].tolerance(self._total_ns, self._effort)
        planner = KernelPlanner(session, config, kernel, limit, default, tolerance=tolerance)
        if planner.default is not None:  # of a recording, too
            shares.defaults[problem] = planner.default
        return planner

    def _untuned(
        self, problem: Problem, note: str = "not tuned: the time was over"
    ) -> KernelPlan | None:
        """Torch's own convolution, where it is within the limit."""
        entry, limit = self._shares.defaults.get(problem), self._config.limit_bytes
        if self._pool is not None:
            limit = self._pool.parts.get(problem, -1)
        if entry is None or entry.time_ns is None or entry.workspace_bytes is None:
            return None
        if limit is not None and entry.workspace_bytes > limit:
            return None
        spread_ns, samples = entry.spread_ns or 0, len(entry.samples)
        timing = Timing(entry.time_ns, spread_ns, entry.workspace_bytes, samples)
        kernel_of = self.devices.first.kernel_of
        solved = solve(problem, [replace(entry, status="ok")], kernel_of, limit)
        split = Split("batch", (Step(problem.batch, DEFAULT_ALGORITHM),))
        notes = (note, *((PERTURBED,) if entry.is_perturbed else ()))
        return solved.kernel_plan(self._layers[problem], split, timing, timing, notes)

    def _report(self) -> None:
        if self._on_progress is not None:
            done_ns = self._shares.cost_ns(self._plans)
            self._on_progress(
                Progress(
                    self._at_work,
                    len(self._plans),
                    len(self._layers),
                    self.devices.measured,
                    self.devices.reused,
                    self._budget.seconds_left(done_ns, self._total_ns),
                    self._budget.seconds,
                )
            )
