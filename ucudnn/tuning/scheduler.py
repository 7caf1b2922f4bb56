"""Tune many kernels: the costliest first, on several devices, in a time budget.

At any moment there is a plan: finished kernels have theirs, the others run torch's own convolution.
Where kernels divide one pool of workspace, what each could do with how much is measured first.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from time import monotonic

import torch

from ucudnn.backends import AbstractBackend
from ucudnn.backends.recorded import RecordedBackend
from ucudnn.cache import AbstractCache
from ucudnn.config import Config
from ucudnn.errors import ConfigError, PlanError
from ucudnn.measurement import Measurement
from ucudnn.plan import DEFAULT_ALGORITHM, KernelPlan, Split, Step, Timing
from ucudnn.problem import Problem
from ucudnn.system.forking import ForkSafeLock, cached_property
from ucudnn.tuning.division import Choices, divided, require_solver
from ucudnn.tuning.effort import EFFORTS
from ucudnn.tuning.noise import PERTURBED
from ucudnn.tuning.planner import Kernel, KernelPlanner, survey
from ucudnn.tuning.progress import Progress, UntunedWarning
from ucudnn.tuning.session import Session
from ucudnn.tuning.solve import solve
from ucudnn.tuning.worth import Stake, least_ns

Task = Callable[[Session], None]
# Of the time that a group gets, this part is kept for timing whole calls.
_RACING = 0.4
# However little it could gain, a group gets this part of the time that is left.
_LEAST_PART = 0.05


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
        _require_one_kind(backends)
        if config.total_bytes is not None:
            require_solver(config.solver)
        self._config = config
        self._layers = layers_by_problem
        self._kernels = {
            problem: Kernel(problem, layers, problem in biased)
            for problem, layers in layers_by_problem.items()
        }
        self._on_progress = on_progress
        self._began = monotonic()
        self._effort = EFFORTS[config.effort]
        is_recorded = isinstance(backends[0], RecordedBackend)
        self._by_share = is_whole_step and config.total_bytes is None and not is_recorded
        self._reserved_steps = reserved_steps
        self._budget_s = config.time_budget_s
        self._deadline = None if self._budget_s is None else self._began + self._budget_s
        lock = ForkSafeLock()
        self._sessions = [
            Session(
                backend,
                cache,
                until=self._deadline,
                race_until=self._deadline,
                isolated=backend.in_worker or len(backends) > 1,
                effort=self._effort if self._by_share else replace(self._effort, ignored_share=0),
                lock=lock,
                remeasure=remeasure,
            )
            for backend in backends
        ]
        for session in self._sessions:
            session.on_run = self._report
        self._default: dict[Problem, Measurement] = {}
        self._choices: dict[Problem, Choices] = {}
        self._shares: dict[Problem, int] = {}
        self._surplus: dict[Problem, int] = {}
        self._refusals: dict[Problem, PlanError] = {}
        self._learned: dict[Problem, PlanError] = {}
        self._plans: dict[Problem, KernelPlan] = {}
        self._at_work = ""
        self._done_ns = self._total_ns = 0
        self._tuning_began = self._began

    @property
    def is_busy(self) -> bool:
        """True where others used the processors when tuning began."""
        return any(session.is_busy for session in self._sessions)

    @property
    def measured(self) -> int:
        """Candidates measured so far."""
        return sum(session.measured for session in self._sessions)

    @property
    def reused(self) -> int:
        """Candidates found in the cache so far."""
        return sum(session.reused for session in self._sessions)

    def run(self) -> None:
        """Tune everything, or until the time is over.

        Raises:
            PlanError: no plan of some kernel fits the workspace limit, or all plans the pool.
        """
        try:
            # function modes such as `with torch.device("meta")` act on what makes operands
            with torch.no_grad(), torch._C.DisableTorchFunction():
                if not isinstance(self._sessions[0].backend, RecordedBackend):
                    self._spread(map(self._look, sorted(self._layers, key=self._flops)))
                    for session in self._sessions:  # whichever tunes a kernel, it knows of the look
                        session.flush()
                self._tuning_began, self._total_ns = monotonic(), self._cost_ns(self._layers)
                self._set_budget()
                total = self._config.total_bytes
                if total is not None:
                    self._divide(total)
                self._keep_defaults()
                self._spread(map(self._tune, self._by_worth()))
                while total is not None and self._learn():
                    self._divide(total)
                    self._spread(map(self._tune, self._by_geometry()))
        finally:
            for session in self._sessions:
                session.close()
        self._at_work = ""
        self._report()
        left_out = len(self._layers) - len(self.kernels)
        if left_out:
            budget = "" if self._budget_s is None else f" of {self._budget_s:g} s"
            warnings.warn(
                f"{left_out} of {len(self._layers)} kernels are not in the plan: "
                f"the time budget{budget} was over before they were looked at, or torch's own "
                f"convolution exceeds the workspace limit; raise it by time_budget_s, "
                f"or tune again and go on from what is in the cache",
                UntunedWarning,
                stacklevel=3,
            )

    @property
    def kernels(self) -> tuple[KernelPlan, ...]:
        """The best plan so far, of each kernel that has one within the limit."""
        plans = (self._plans.get(p) or self._untuned(p) for p in self._layers)
        return tuple(plan for plan in plans if plan is not None)

    def _by_geometry(self) -> list[list[Problem]]:
        """Kernels that differ in their batch alone share measurements; the costliest come first."""
        groups: dict[Problem, list[Problem]] = {}
        for problem in self._layers:
            groups.setdefault(problem.with_batch(1), []).append(problem)
        return sorted(groups.values(), key=self._cost_ns, reverse=True)

    def _flops(self, problem: Problem) -> int:
        """Sorts the kernels that are likely to take longest first."""
        return -problem.flops * len(self._layers[problem])

    def _set_budget(self) -> None:
        """Derive the time budget from the step, where none is set, and say so."""
        if self._budget_s is None and self._by_share:
            is_forced = any(stake.is_forced for stake in self._stakes.values())
            self._budget_s = self._effort.budget_s(self._total_ns, is_forced)
        if self._budget_s is not None:
            reserved_s = min(self._budget_s / 3, self._reserved_steps * self._total_ns / 1e9)
            self._deadline = self._began + self._budget_s - reserved_s
            for session in self._sessions:
                session.until = session.race_until = self._deadline
        self._report()

    @cached_property
    def _stakes(self) -> dict[Problem, Stake]:
        """The parts of the kernels in the step, of those that were looked at."""
        limit, found = self._config.limit_bytes, {}
        for problem, entry in self._default.items():
            calls = len(self._layers[problem])
            is_forced = limit is not None and (entry.workspace_bytes or 0) > limit
            time_ns, least_ns = entry.time_ns or 0, self._least_ns(problem)
            if least_ns > time_ns:  # the machine was busy when its speed was taken
                least_ns = 0
            found[problem] = Stake(calls * time_ns, calls * least_ns, is_forced)
        return found

    def _least_ns(self, problem: Problem) -> int:
        """A lower bound of a call's time by any algorithm; 0 where nothing is known."""
        session = self._sessions[0]
        roofline = session.roofline(problem.dtype)
        listed = session.backend.candidates(problem)
        costs = [session.cost(problem, candidate.algorithm) for candidate in listed]
        return least_ns(costs, roofline)

    def _keep_defaults(self) -> None:
        """Decide the kernels that are not worth measuring anything of."""
        if not self._by_share:
            return
        for problem, stake in self._stakes.items():
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
            for group in self._by_geometry()
            if (left := [problem for problem in group if problem not in self._plans])
        ]
        return sorted(groups, key=self._gain_ns, reverse=True) if self._by_share else groups

    def _gain_ns(self, problems: Iterable[Problem]) -> int:
        return sum(self._stakes[p].gain_ns for p in problems if p in self._stakes)

    def _allot(self, session: Session, problems: Sequence[Problem]) -> None:
        """Give a group its part of the time that is left, by what it could gain."""
        if not self._by_share or self._deadline is None:
            return
        waiting = self._gain_ns(p for p in self._layers if p not in self._plans)
        part = max(self._gain_ns(problems) / waiting, _LEAST_PART) if waiting else 1.0
        left_s = max(0.0, self._deadline - monotonic()) * min(1.0, part * len(self._sessions))
        session.race_until = monotonic() + left_s
        session.until = session.race_until - _RACING * left_s

    def _cost_ns(self, problems: Iterable[Problem]) -> int:
        """Time of torch's own convolution for all calls of some kernels, as far as known."""
        known = ((self._default.get(p), len(self._layers[p])) for p in problems)
        return sum((entry.time_ns or 0) * calls for entry, calls in known if entry is not None)

    def _spread(self, tasks: Iterable[Task]) -> None:
        """Run tasks in their order, each on the next device that is free."""
        if len(self._sessions) == 1:
            for task in tasks:
                task(self._sessions[0])
            return
        free: SimpleQueue[Session] = SimpleQueue()
        for session in self._sessions:
            free.put(session)

        def run(task: Task) -> None:
            session = free.get()
            try:
                with torch.no_grad():  # which is a setting of each thread
                    task(session)
            finally:
                free.put(session)

        with ThreadPoolExecutor(len(self._sessions)) as pool:
            futures = [pool.submit(run, task) for task in tasks]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self._deadline = 0.0
                for session in self._sessions:
                    session.until = session.race_until = 0.0
                raise

    def _look(self, problem: Problem) -> Task:
        """Run torch's own convolution once: a plan to fall back to, and what time it is worth."""

        def task(session: Session) -> None:
            if not session.is_over:
                with torch.autocast("cpu", enabled=False):
                    planner = self._planner(session, problem)
                    found = planner.look_at_default()
                    planner.release()
                if found is not None:
                    self._default[problem] = found

        return task

    def _tune(self, problems: Sequence[Problem]) -> Task:
        """Measure and plan kernels of one geometry, until none of them wants to know more."""

        def task(session: Session) -> None:
            if self._is_over:
                return
            self._at_work = str(problems[0])
            self._report()
            self._allot(session, problems)
            with torch.autocast("cpu", enabled=False):
                plans = [self._decided(one) for one in self._measured(session, problems)]
            self._plans |= {plan.problem: plan for plan in plans if plan is not None}
            self._done_ns = self._cost_ns(self._plans)

        return task

    def _decided(self, planner: KernelPlanner) -> KernelPlan | None:
        try:
            return planner.decide()
        except PlanError as error:
            if self._config.total_bytes is None or planner.limit == self._config.limit_bytes:
                raise
            self._refusals[planner.problem] = error
            return None

    def _learn(self) -> bool:
        """Note what calls need beyond what their chunks do, where that was more than their part.

        Raises:
            PlanError: a kernel has no plan within its part for another reason.
        """
        for problem, error in self._refusals.items():
            one = self._choices[problem]
            surplus = (error.smallest_bytes or 0) // one.calls - one.front[0].workspace_bytes
            if surplus <= self._surplus.get(problem, 0):
                raise error
            self._surplus[problem], self._learned[problem] = surplus, error
        is_news = bool(self._refusals)
        self._refusals.clear()
        return is_news

    def _measured(self, session: Session, problems: Iterable[Problem]) -> list[KernelPlanner]:
        """Planners of kernels that share measurements, when none of them wants to know more."""
        planners = [
            self._planner(session, problem)
            for problem in problems
            if self._config.total_bytes is None or problem in self._shares
        ]
        while sum(planner.step() for planner in planners):
            pass
        session.flush()
        return planners

    def _planner(
        self, session: Session, problem: Problem, limit: int | None = None
    ) -> KernelPlanner:
        if limit is None:
            limit = self._shares.get(problem, self._config.limit_bytes)
        kernel, default = self._kernels[problem], self._default.get(problem)
        tolerance = 0.0
        if self._total_ns and problem in self._default and self._by_share:
            tolerance = self._stakes[problem].tolerance(self._total_ns, self._effort)
        planner = KernelPlanner(session, self._config, kernel, limit, default, tolerance=tolerance)
        if planner.default is not None:  # of a recording, too
            self._default[problem] = planner.default
        return planner

    def _divide(self, total: int) -> None:
        """Find each kernel's part of the pool, by measurements that no longer grow.

        A kernel that gets its part may want to know more, and what it finds may make another
        division better; with the same cache a second run begins where this one ends.
        """
        self._shares = self._shares or self._shares_of_defaults(total)
        while True:
            before = self.measured
            self._spread(map(self._survey, self._by_geometry()))
            try:
                self._shares = divided(self._choices, total, self._config.solver)
            except PlanError:
                if self._is_over:  # kernels that were not looked at have but torch's own
                    return
                if self.measured == before:
                    raise
                continue
            self._spread(map(self._measure, self._by_geometry()))
            if self.measured == before or self._is_over:
                return

    def _shares_of_defaults(self, total: int) -> dict[Problem, int]:
        """Workspace of torch's own convolutions, where the pool holds all of them."""
        most = total if self._config.limit_bytes is None else self._config.limit_bytes
        needs = {
            problem: entry.workspace_bytes
            for problem, entry in self._default.items()
            if entry.workspace_bytes is not None and entry.workspace_bytes <= most
        }
        together = sum(size * len(self._layers[problem]) for problem, size in needs.items())
        return needs if together <= total else {}

    @property
    def _is_over(self) -> bool:
        return self._deadline is not None and monotonic() >= self._deadline

    def _survey(self, problems: Sequence[Problem]) -> Task:
        """Find out what each kernel could do with how much workspace."""

        def task(session: Session) -> None:
            for problem in problems:
                self._at_work = str(problem)
                self._report()
                with torch.autocast("cpu", enabled=False):
                    self._choices[problem] = self._choices_of(session, problem)

        return task

    def _choices_of(self, session: Session, problem: Problem) -> Choices:
        calls = len(self._layers[problem])
        total, limit = self._config.total_bytes or 0, self._config.limit_bytes
        most = total // calls if limit is None else min(limit, total // calls)
        front = survey(partial(self._planner, session, problem), most)
        surplus = self._surplus.get(problem, 0)
        fitting = tuple(point for point in front if point.workspace_bytes + surplus <= most)
        if front and not fitting:
            raise self._learned[problem]
        return Choices(calls, most, fitting, surplus)

    def _measure(self, problems: Sequence[Problem]) -> Task:
        def task(session: Session) -> None:
            with torch.autocast("cpu", enabled=False):
                for planner in self._measured(session, problems):
                    planner.evidence()
                    planner.release()

        return task

    def _untuned(
        self, problem: Problem, note: str = "not tuned: the time was over"
    ) -> KernelPlan | None:
        """Torch's own convolution, where it is within the limit."""
        entry, limit = self._default.get(problem), self._config.limit_bytes
        if self._config.total_bytes is not None:
            limit = self._shares.get(problem, -1)
        if entry is None or entry.time_ns is None or entry.workspace_bytes is None:
            return None
        if limit is not None and entry.workspace_bytes > limit:
            return None
        spread_ns, samples = entry.spread_ns or 0, len(entry.samples)
        timing = Timing(entry.time_ns, spread_ns, entry.workspace_bytes, samples)
        solved = solve(problem, [replace(entry, status="ok")], self._sessions[0].kernel_of, limit)
        split = Split("batch", (Step(problem.batch, DEFAULT_ALGORITHM),))
        notes = (note, *((PERTURBED,) if entry.is_perturbed else ()))
        return solved.kernel_plan(self._layers[problem], split, timing, timing, notes)

    def _report(self) -> None:
        if self._on_progress is not None:
            done, total = len(self._plans), len(self._layers)
            left = self._seconds_left()
            self._on_progress(
                Progress(
                    self._at_work, done, total, self.measured, self.reused, left, self._budget_s
                )
            )

    def _seconds_left(self) -> float | None:
        """Seconds left at the rate so far, weighed by torch's time of each kernel."""
        if not self._done_ns:
            return None
        still_ns = self._total_ns - self._done_ns
        left = (monotonic() - self._tuning_began) * still_ns / self._done_ns
        until = self._deadline
        return left if until is None else min(left, max(0.0, until - monotonic()))


def _require_one_kind(backends: Sequence[AbstractBackend]) -> None:
    first = backends[0]
    for other in backends[1:]:
        if (other.device(), other.software()) != (first.device(), first.software()):
            raise ConfigError(
                f"devices that measure together must be of one kind with one set of versions, got "
                f"{first.device()} and {other.device()}; leave one of them out"
            )
