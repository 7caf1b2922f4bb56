"""Tune many kernels: the costliest first, on several devices, in a time budget.

At any moment there is a plan: finished kernels have theirs, the others run torch's own convolution.
Where kernels divide one pool of workspace, what each could do with how much is measured first.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from threading import Lock
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
from ucudnn.tuning.division import Choices, divided, require_solver
from ucudnn.tuning.planner import Kernel, KernelPlanner, survey
from ucudnn.tuning.session import Session
from ucudnn.tuning.solve import solve

Task = Callable[[Session], None]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far tuning is.

    Args:
        kernel: the kernel at work.
        done: kernels finished.
        total: kernels in all.
        measured: candidates timed so far.
        reused: candidates found in the cache so far.
        seconds_left: estimated; None before there is anything to go by.
    """

    kernel: str
    done: int
    total: int
    measured: int
    reused: int
    seconds_left: float | None = None


class UntunedWarning(UserWarning):
    """The time was over before some kernels were looked at, so the plan leaves them out."""


class Campaign:
    """The tuning of the kernels of one model.

    Args:
        backends: one per device, all of one kind; several measure in processes of their own.
        cache: where measurements are kept.
        config: the settings.
        layers_by_problem: what to tune, and the names of the layers that run it.
        on_progress: called after every measurement.
        biased: of the problems those to whose result a layer adds a bias.

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
        budget = config.time_budget_s
        lock = Lock()
        self._sessions = [
            Session(
                backend,
                cache,
                until=None if budget is None else self._began + budget,
                isolated=backend.in_worker or len(backends) > 1,
                lock=lock,
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
                    self._spread(map(self._look, self._layers))
                    for session in self._sessions:  # whichever tunes a kernel, it knows of the look
                        session.flush()
                self._tuning_began, self._total_ns = monotonic(), self._cost_ns(self._layers)
                total = self._config.total_bytes
                if total is not None:
                    self._divide(total)
                self._spread(map(self._tune, self._by_geometry()))
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
            warnings.warn(
                f"{left_out} of {len(self._layers)} kernels are not in the plan: "
                f"time_budget_s={self._config.time_budget_s} was over before they were looked at, "
                f"or torch's own convolution exceeds the workspace limit; raise it, or tune again "
                f"and go on from what is in the cache",
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

    def _cost_ns(self, problems: Iterable[Problem]) -> int:
        """What torch takes for all calls of some kernels, as far as it is known."""
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
                for session in self._sessions:
                    session.until = 0.0
                raise

    def _look(self, problem: Problem) -> Task:
        """Run torch's own convolution once: a plan to fall back to, and what time it is worth."""

        def task(session: Session) -> None:
            if not session.is_over:
                with torch.autocast("cpu", enabled=False):
                    found = self._planner(session, problem).look_at_default()
                if found is not None:
                    self._default[problem] = found

        return task

    def _tune(self, problems: Sequence[Problem]) -> Task:
        """Measure and plan kernels of one geometry, until none of them wants to know more."""

        def task(session: Session) -> None:
            if session.is_over:
                return
            self._at_work = str(problems[0])
            self._report()
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
        planner = KernelPlanner(session, self._config, kernel, limit, default)
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
        """What torch's own convolutions need, where the pool holds all of them; else nothing."""
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
        return any(session.is_over for session in self._sessions)

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

        return task

    def _untuned(self, problem: Problem) -> KernelPlan | None:
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
        notes = ("not tuned: the time was over",)
        return solved.kernel_plan(self._layers[problem], split, timing, timing, notes)

    def _report(self) -> None:
        if self._on_progress is not None:
            done, total = len(self._plans), len(self._layers)
            left = self._seconds_left()
            self._on_progress(
                Progress(self._at_work, done, total, self.measured, self.reused, left)
            )

    def _seconds_left(self) -> float | None:
        """What is left at the rate so far, weighed by what torch takes for each kernel."""
        if not self._done_ns:
            return None
        still_ns = self._total_ns - self._done_ns
        left = (monotonic() - self._tuning_began) * still_ns / self._done_ns
        until = self._sessions[0].until
        return left if until is None else min(left, max(0.0, until - monotonic()))


def _require_one_kind(backends: Sequence[AbstractBackend]) -> None:
    first = backends[0]
    for other in backends[1:]:
        if (other.device(), other.software()) != (first.device(), first.software()):
            raise ConfigError(
                f"devices that measure together must be of one kind with one set of versions, got "
                f"{first.device()} and {other.device()}; leave one of them out"
            )
