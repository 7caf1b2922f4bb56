"""Tune many kernels: the costliest first, on several devices, in a time budget.

At any moment there is a plan: finished kernels have theirs, the others run torch's own convolution.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from queue import SimpleQueue
from threading import Lock
from time import monotonic

import torch

from ucudnn.axis import AbstractAxis, BatchAxis, RowAxis
from ucudnn.backends import AbstractBackend
from ucudnn.backends.recorded import RecordedBackend
from ucudnn.benchmark.finals import Finalist, choose, race
from ucudnn.benchmark.kernel import KernelMeasurer
from ucudnn.benchmark.session import Session
from ucudnn.cache import AbstractCache
from ucudnn.candidate import ADDS_BIAS
from ucudnn.config import Config
from ucudnn.errors import ConfigError, PlanError
from ucudnn.measurement import Measurement
from ucudnn.plan import DEFAULT_ALGORITHM, KernelPlan, Split, Step, Timing
from ucudnn.problem import Problem
from ucudnn.replay import miss, predict, recall, recall_race
from ucudnn.solve import Solved, SolvedRows, smallest_workspace, solve
from ucudnn.units import format_bytes

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
        ConfigError: the devices are of several kinds.
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
        self._config = config
        self._layers = layers_by_problem
        self._biased = frozenset(biased)
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
            PlanError: no plan of some kernel fits the workspace limit.
        """
        try:
            with torch.no_grad():
                if not isinstance(self._sessions[0].backend, RecordedBackend):
                    self._spread(map(self._look, self._layers))
                    for session in self._sessions:  # whichever tunes a kernel, it knows of the look
                        session.flush()
                self._tuning_began, self._total_ns = monotonic(), self._cost_ns(self._layers)
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
                    found = self._measurer(session, problem).look_at_default()
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
                plans: list[KernelPlan | None]
                if isinstance(session.backend, RecordedBackend):
                    plans = [self._from_recording(session, problem) for problem in problems]
                else:
                    measurers = [self._measurer(session, problem) for problem in problems]
                    while sum(measurer.step() for measurer in measurers):
                        pass
                    session.flush()
                    pairs = zip(problems, measurers, strict=True)
                    plans = [self._decide(session, *pair) for pair in pairs]
            self._plans |= {plan.problem: plan for plan in plans if plan is not None}
            self._done_ns = self._cost_ns(self._plans)

        return task

    def _measurer(self, session: Session, problem: Problem) -> KernelMeasurer:
        axis = BatchAxis(problem)
        return self._measurer_of(session, axis, axis.sizes(self._config.policy))

    def _measurer_of(
        self,
        session: Session,
        axis: AbstractAxis,
        sizes: Iterable[int],
        adds_bias: bool = False,
    ) -> KernelMeasurer:
        limit, max_error = self._config.limit_bytes, self._config.max_error
        return KernelMeasurer(session, axis, limit, sizes, max_error, adds_bias)

    def _row_sizes(self, axis: RowAxis) -> tuple[int, ...]:
        """Slabs to measure: none unless torch's own convolution exceeds the workspace limit."""
        limit, default = self._config.limit_bytes, self._default.get(axis.problem)
        workspace = default.workspace_bytes if default else None
        if limit is None or (workspace is not None and workspace <= limit):
            return ()
        return axis.sizes(self._config.policy)

    def _decide(
        self, session: Session, problem: Problem, measurer: KernelMeasurer
    ) -> KernelPlan | None:
        """The plan of a kernel by a race of whole calls; None where the time ended before any."""
        limit, axis, rows_axis = self._config.limit_bytes, BatchAxis(problem), RowAxis(problem)
        has_bias, row_sizes = problem in self._biased, self._row_sizes(rows_axis)
        sizes = axis.sizes(self._config.policy)
        fused = self._measurer_of(session, axis, sizes if has_bias else (), adds_bias=True)
        by_rows = self._measurer_of(session, rows_axis, row_sizes)
        measurers = [measurer, *(one for one in (fused, by_rows) if not one.is_empty)]
        for before, after in pairwise(measurers):
            before.release()  # all have the same operands
            while after.step():
                pass
            session.flush()
        rows = SolvedRows.of(rows_axis, row_sizes, by_rows.usable, session.kernel_of)
        row_splits = rows.splits(limit)
        known = [entry for one in measurers for entry in one.measurements]
        usable = [one.usable for one in (measurer, fused)]
        if not any(usable) and not row_splits:
            if session.is_over:
                return None
            raise self._nothing_fits(session, problem, known)
        solved = [solve(problem, entries, session.kernel_of, limit, sizes) for entries in usable]
        splits = self._finalists(session, problem, solved) + row_splits
        finalists = race(session, measurers[-1], problem, splits, has_bias)
        notes = tuple(note for one in measurers for note in one.certificate())
        return self._plan(session, solved, finalists, known, notes, rows)

    def _finalists(
        self, session: Session, problem: Problem, solved: Sequence[Solved]
    ) -> list[Split]:
        """Splits worth timing as wholes, torch's default first, and those that add a bias last."""
        plain, fused = solved
        default_applies = session.kernel_of(problem, DEFAULT_ALGORITHM) is not None
        return plain.finalists(default_applies) + fused.finalists(default_applies=False)

    def _from_recording(self, session: Session, problem: Problem) -> KernelPlan:
        """The plan of a kernel that cannot be run: by its recorded race, else by prediction."""
        axis, by_rows, limit = BatchAxis(problem), RowAxis(problem), self._config.limit_bytes
        known = recall(session, axis, axis.sizes(self._config.policy))
        for entry in known:
            if entry.key.problem == problem and entry.key.algorithm == DEFAULT_ALGORITHM:
                self._default[problem] = entry
        row_sizes = self._row_sizes(by_rows)
        known += recall(session, by_rows, row_sizes)
        if not known:
            raise miss(session, problem)
        timed = [entry for entry in known if entry.status == "ok"]
        rows = SolvedRows.of(by_rows, row_sizes, timed, session.kernel_of)
        parts = {axis.part(size) for size in axis.sizes(self._config.policy)}
        of_batch = [entry for entry in timed if entry.key.problem in parts]
        has_bias = problem in self._biased
        solved = [
            solve(problem, entries, session.kernel_of, limit, axis.sizes(self._config.policy))
            for entries in (
                [entry for entry in of_batch if ADDS_BIAS not in entry.notes],
                [entry for entry in of_batch if ADDS_BIAS in entry.notes and has_bias],
            )
        ]
        splits = self._finalists(session, problem, solved) + rows.splits(limit)
        measurer = KernelMeasurer(session, axis, limit)
        finalists = recall_race(session, measurer, problem, splits, has_bias)
        if finalists is None:
            default = self._default.get(problem)
            finalists = predict(solved, rows, splits, default)
        return self._plan(session, solved, finalists, known, (), rows)

    def _plan(
        self,
        session: Session,
        solved: Sequence[Solved],
        finalists: Sequence[Finalist],
        measurements: Sequence[Measurement],
        notes: tuple[str, ...],
        rows: SolvedRows | None = None,
    ) -> KernelPlan:
        problem = solved[0].problem
        winner = choose(finalists, self._config.limit_bytes)
        if winner is None:
            raise self._nothing_fits(session, problem, measurements)
        default = next((entry.timing for entry in finalists if entry.split.is_default), None)
        of_default = session.backend.candidates(problem)[0].notes if default else ()
        described = tuple(f"default {note}" for note in of_default)
        described += notes
        layers = self._layers[problem]
        split, timing = winner.split, winner.timing
        known = (one for one in solved if split in one.finalists(default_applies=True))
        of_winner = next(known, solved[0])
        return of_winner.kernel_plan(layers, split, timing, default, described, rows)

    def _untuned(self, problem: Problem) -> KernelPlan | None:
        """Torch's own convolution, where it is within the limit."""
        entry, limit = self._default.get(problem), self._config.limit_bytes
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

    def _nothing_fits(
        self, session: Session, problem: Problem, measurements: Sequence[Measurement]
    ) -> PlanError:
        reasons = [entry.reason for entry in measurements if entry.status == "failed"]
        known = [
            entry
            for entry in measurements
            if entry.workspace_bytes is not None and entry.status != "failed"
        ]
        config = self._config
        axis = RowAxis(problem)
        rows = SolvedRows.of(axis, self._row_sizes(axis), known, session.kernel_of)
        smallest = smallest_workspace(problem, known, session.kernel_of, rows)
        if smallest is None:
            return PlanError(f"no algorithm could be run on {problem}: {'; '.join(reasons)}")
        least, what = smallest
        return PlanError(
            f"no plan for {problem} fits workspace_limit={format_bytes(config.limit_bytes or 0)}; "
            f"the smallest needs {format_bytes(least)} ({what}); "
            f"raise the limit"
            + ("" if config.policy == "all" else " or allow more sizes by policy"),
            least,
        )

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
