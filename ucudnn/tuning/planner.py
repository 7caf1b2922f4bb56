"""Plan one kernel under one workspace limit: measure or recall its chunks, solve, race wholes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ucudnn.axis import AbstractAxis, BatchAxis, RowAxis, axis_of
from ucudnn.backends.recorded import RecordedBackend
from ucudnn.config import Config
from ucudnn.errors import PlanError
from ucudnn.measurement import ADDS_BIAS, Measurement
from ucudnn.plan import DEFAULT_ALGORITHM, KernelPlan, Split
from ucudnn.problem import Problem
from ucudnn.system.forking import cached_property
from ucudnn.tuning.confirmation import Finalist, choose, race, recall_race
from ucudnn.tuning.items import held_bytes
from ucudnn.tuning.measurer import KernelMeasurer
from ucudnn.tuning.noise import PERTURBED
from ucudnn.tuning.replay import miss, predict, recall
from ucudnn.tuning.session import Session
from ucudnn.tuning.solve import Front, Solved, SolvedRows, pareto, smallest_workspace, solve
from ucudnn.units import format_bytes


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel with the layers that run it.

    Args:
        problem: at the largest batch.
        layers: names of the layers that run it, one per call.
        has_bias: whether a layer adds a bias to the result.
    """

    problem: Problem
    layers: tuple[str, ...]
    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class Evidence:
    """Measurements of a kernel's chunks.

    Args:
        plain: what a split along the batch may consist of.
        fused: the same of algorithms that add a bias.
        slabs: what a split along the rows may consist of.
        everything: these and what failed, was beaten or does not fit.
        notes: how good the best split of them is.
    """

    plain: tuple[Measurement, ...]
    fused: tuple[Measurement, ...]
    slabs: tuple[Measurement, ...]
    everything: tuple[Measurement, ...]
    notes: tuple[str, ...] = ()


class KernelPlanner:
    """Finds the plan of one kernel within a limit.

    Args:
        session: the device and the cache.
        config: the settings; the workspace limit is the next but one.
        kernel: what to plan.
        limit: workspace in bytes that a call may use, None for any.
        default: torch's own convolution of the whole batch, as far as it was measured.
        chunk_limit: workspace in bytes that a chunk may use; None: as a call.
        surplus: bytes that a call was seen to need more than its chunks do.
        tolerance: the possible gain, as a fraction of the kernel's time, at which measuring ends.
    """

    def __init__(
        self,
        session: Session,
        config: Config,
        kernel: Kernel,
        limit: int | None,
        default: Measurement | None,
        chunk_limit: int | None = None,
        surplus: int = 0,
        tolerance: float = 0.0,
    ) -> None:
        self._session = session
        self._config = config
        self._kernel = kernel
        self.problem = kernel.problem
        self.limit = limit
        self._chunk_limit = limit if chunk_limit is None else chunk_limit
        self._surplus = surplus
        self._tolerance = tolerance
        self._is_recorded = isinstance(session.backend, RecordedBackend)
        self.default = self._recalled_default() if self._is_recorded else default

    def _recalled_default(self) -> Measurement | None:
        whole = recall(self._session, self._axis, [self._axis.extent])
        known = (entry for entry in whole if entry.key.algorithm == DEFAULT_ALGORITHM)
        return next(known, None)

    @cached_property
    def _axis(self) -> BatchAxis:
        return BatchAxis(self.problem)

    @cached_property
    def _rows_axis(self) -> RowAxis:
        return RowAxis(self.problem)

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        return self._axis.sizes(self._config.policy)

    @cached_property
    def _row_sizes(self) -> tuple[int, ...]:
        """Slabs to measure: none unless torch's own convolution exceeds the workspace limit."""
        workspace = self.default.workspace_bytes if self.default else None
        if self.limit is None or (workspace is not None and workspace <= self.limit):
            return ()
        return self._rows_axis.sizes(self._config.policy)

    @cached_property
    def _plain(self) -> KernelMeasurer:
        return self._measurer(self._axis, self._sizes)

    @cached_property
    def _fused(self) -> KernelMeasurer:
        sizes = self._sizes if self._kernel.has_bias else ()
        return self._measurer(self._axis, sizes, adds_bias=True)

    @cached_property
    def _slabs(self) -> KernelMeasurer:
        return self._measurer(self._rows_axis, self._row_sizes)

    def _measurer(
        self, axis: AbstractAxis, sizes: Iterable[int], adds_bias: bool = False
    ) -> KernelMeasurer:
        limit, max_error = self._chunk_limit, self._config.max_error
        more = (max_error, adds_bias, self._tolerance)
        return KernelMeasurer(self._session, axis, limit, sizes, *more)

    def look_at_default(self) -> Measurement | None:
        """Torch's own convolution of the whole batch, run at least once; None where it fails."""
        return self._plain.look_at_default()

    def step(self) -> bool:
        """Measure what is wanted next of chunks of samples; False where nothing is."""
        return not self._is_recorded and self._plain.step()

    def evidence(self) -> Evidence:
        """Measure whatever is still wanted, or recall what was.

        Raises:
            PlanError: the recording has nothing of this kernel.
        """
        return self._recalled() if self._is_recorded else self._measured()

    def _recalled(self) -> Evidence:
        of_batch = recall(self._session, self._axis, self._sizes)
        of_rows = recall(self._session, self._rows_axis, self._row_sizes)
        if not of_batch and not of_rows:
            raise miss(self._session, self.problem)
        usable = [entry for entry in of_batch if self._is_usable(entry)]
        return Evidence(
            tuple(entry for entry in usable if ADDS_BIAS not in entry.notes),
            tuple(e for e in usable if ADDS_BIAS in e.notes and self._kernel.has_bias),
            tuple(entry for entry in of_rows if self._is_usable(entry)),
            (*of_batch, *of_rows),
        )

    def _is_usable(self, entry: Measurement) -> bool:
        most = self._config.max_error
        return entry.status == "ok" and (most is None or (entry.error or 0.0) <= most)

    def _measured(self) -> Evidence:
        working = self._working()
        for place, measurer in enumerate(working):
            if place:
                working[place - 1].release()  # all have the same operands
            while measurer.step():
                pass
            self._session.flush()
        return Evidence(
            tuple(self._plain.usable),
            tuple(self._fused.usable),
            tuple(self._slabs.usable),
            tuple(entry for one in working for entry in one.measurements),
            tuple(note for one in working for note in one.certificate()),
        )

    def _working(self) -> list[KernelMeasurer]:
        """Measurers that have something to measure."""
        return [self._plain, *(one for one in (self._fused, self._slabs) if not one.is_empty)]

    def release(self) -> None:
        """Give operands back, which no later kernel uses; they are made anew where it must be."""
        for name in ("_plain", "_fused", "_slabs"):
            if name in self.__dict__:
                self.__dict__[name].release()

    def front(self) -> Front:
        """Front of time over workspace of the splits, by the measurements at this limit.

        Raises:
            PlanError: the recording has nothing of this kernel.
        """
        evidence = self.evidence()
        parts = (*self._solve(evidence), self._rows(evidence))
        return pareto(point for part in parts for point in part.front())

    def decide(self) -> KernelPlan | None:
        """The plan by a race of whole calls; None where the time ended before there was any.

        Raises:
            PlanError: none fits the limit.
        """
        planner = self
        try:
            while True:
                evidence = planner.evidence()
                if not planner._has_split(evidence):
                    return None
                solved, rows = planner._solve(evidence), planner._rows(evidence)
                finalists = planner._finalists(planner._splits(solved, rows), solved, rows)
                winner = choose(finalists, self.limit, self._session.planned_call_ns())
                if winner is not None:
                    return planner._plan(winner, finalists, evidence, solved, rows)
                planner.release()
                planner = planner._tighter(finalists, evidence)
        finally:
            planner.release()

    def _plan(
        self,
        winner: Finalist,
        finalists: Sequence[Finalist],
        evidence: Evidence,
        solved: tuple[Solved, Solved],
        rows: SolvedRows,
    ) -> KernelPlan:
        default = next((entry.timing for entry in finalists if entry.split.is_default), None)
        notes = self._session.backend.candidates(self.problem)[0].notes if default else ()
        described = [*(f"default {note}" for note in notes), *evidence.notes]
        if any(finalist.is_perturbed for finalist in finalists):
            described.append(PERTURBED)
        split, layers = winner.split, self._kernel.layers
        plain, fused = solved
        if split not in plain.finalists(True) and split in fused.finalists(False):
            plain, fused = fused, plain
        of_winner = plain.completed(fused)
        return of_winner.kernel_plan(layers, split, winner.timing, default, tuple(described), rows)

    def require_split(self) -> None:
        """Refuse a limit that nothing fits.

        Raises:
            PlanError: nothing does, and there was time to find out.
        """
        self._has_split(self.evidence())

    def _has_split(self, evidence: Evidence) -> bool:
        """True if something fits; False where the time ended before anything did."""
        if evidence.plain or evidence.fused or self._rows(evidence).splits(self._chunk_limit):
            return True
        if self._session.is_over:
            return False
        raise self._nothing_fits(evidence)

    def _solve(self, evidence: Evidence) -> tuple[Solved, Solved]:
        """Splits along the batch, by plain algorithms and by those that add a bias."""
        kernel_of, limit, sizes = self._session.kernel_of, self._chunk_limit, self._sizes
        return (
            solve(self.problem, evidence.plain, kernel_of, limit, sizes),
            solve(self.problem, evidence.fused, kernel_of, limit, sizes),
        )

    def _rows(self, evidence: Evidence) -> SolvedRows:
        kernel_of = self._session.kernel_of
        return SolvedRows.of(self._rows_axis, self._row_sizes, evidence.slabs, kernel_of)

    def _splits(self, solved: tuple[Solved, Solved], rows: SolvedRows) -> list[Split]:
        """Splits worth timing as wholes, torch's default first, and those that add a bias last."""
        plain, fused = solved
        applies = self._session.kernel_of(self.problem, DEFAULT_ALGORITHM) is not None
        splits = plain.finalists(applies) + fused.finalists(default_applies=False)
        return splits + rows.splits(self._chunk_limit)

    def _finalists(
        self, splits: Sequence[Split], solved: Sequence[Solved], rows: SolvedRows
    ) -> list[Finalist]:
        """Splits as whole calls: raced, or as they were, else as their chunks predict."""
        session, has_bias = self._session, self._kernel.has_bias
        if not self._is_recorded and session.may_race:
            return race(session, self._working()[-1], self.problem, splits, has_bias)
        raced = recall_race(session, self.problem, splits, has_bias)
        return predict(solved, rows, splits, self.default) if raced is None else raced

    def _tighter(self, finalists: Sequence[Finalist], evidence: Evidence) -> KernelPlanner:
        """A planner with a lower limit, after every whole call needed more than its chunks did."""
        assert self.limit is not None
        assert self._chunk_limit is not None
        needs = [
            (one.timing.workspace_bytes, chunk)
            for one in finalists
            for chunk in [self._chunk_bytes(one.split, evidence)]
            if chunk is not None and chunk <= self._chunk_limit
        ]
        if not needs:
            raise self._nothing_fits(evidence)
        need, chunk = min(needs)
        # chunks that differ in their algorithm alone may each be just below the limit
        chunk_limit = min(self._chunk_limit - (need - self.limit), chunk - 1)
        surplus = need - chunk
        if chunk_limit < 0:
            raise self._nothing_fits(evidence, surplus)
        kernel, limits = self._kernel, (self.limit, self.default, chunk_limit)
        more = (surplus, self._tolerance)
        return KernelPlanner(self._session, self._config, kernel, *limits, *more)

    def _chunk_bytes(self, split: Split, evidence: Evidence) -> int | None:
        """The largest workspace of a split's chunks; None where it is not known of any."""
        axis = axis_of(self.problem, split)
        steps = {(axis.part(axis.size_of(step)), step.algorithm) for step in split.steps}
        sizes = [
            entry.workspace_bytes + held_bytes(self.problem, entry.key.conditions.role)
            for entry in evidence.everything
            if (entry.key.problem, entry.key.algorithm) in steps
            and entry.workspace_bytes is not None
            and entry.status == "ok"
        ]
        return max(sizes, default=None)

    def _nothing_fits(self, evidence: Evidence, surplus: int | None = None) -> PlanError:
        """Error for a limit that nothing fits.

        Args:
            evidence: what was tried.
            surplus: bytes that a call was seen to need more than its chunks do.
        """
        known = [
            entry
            for entry in evidence.everything
            if entry.workspace_bytes is not None and entry.status != "failed"
        ]
        kernel_of = self._session.kernel_of
        rows = SolvedRows.of(self._rows_axis, self._row_sizes, known, kernel_of)
        smallest = smallest_workspace(self.problem, known, kernel_of, rows)
        if smallest is None:
            reasons = (entry.reason for entry in evidence.everything if entry.status == "failed")
            return PlanError(f"no algorithm could be run on {self.problem}: {'; '.join(reasons)}")
        least, what = smallest
        least += self._surplus if surplus is None else surplus
        more = "" if self._config.policy == "all" else " or allow more sizes by policy"
        total, calls = self._config.total_bytes, len(self._kernel.layers)
        if total is None or self.limit == self._config.limit_bytes:
            return PlanError(
                f"no plan for {self.problem} fits workspace_limit="
                f"{format_bytes(self.limit or 0)}; the smallest needs {format_bytes(least)} "
                f"({what}); raise the limit{more}",
                least,
            )
        together = f", {format_bytes(calls * least)} for its {calls} calls" if calls > 1 else ""
        return PlanError(
            f"no plan for {self.problem} fits its part of total_workspace={format_bytes(total)}; "
            f"the smallest needs {format_bytes(least)} ({what}){together}; raise it{more}",
            calls * least,
        )


def survey(planner_at: Callable[[int], KernelPlanner], most: int) -> Front:
    """Front of time over workspace of the splits of a kernel, from `most` downwards.

    Measured for ever smaller limits, each a twentieth below the one before or more: just below
    what the best split for that one needs. So each point is the best split for a limit.

    Args:
        planner_at: makes the planner of the kernel for a limit in bytes.
        most: the largest limit.

    Returns:
        Empty where nothing could be measured in time.

    Raises:
        PlanError: nothing fits `most`.
    """
    front: Front = ()
    limit, needs = most, most + 1
    while limit >= 0:
        planner = planner_at(limit)
        found = planner.front()
        planner.release()
        front = pareto((*front, *found))
        fitting = [point.workspace_bytes for point in found if point.workspace_bytes <= limit]
        if not fitting:
            if limit == needs - 1:
                break
            limit = needs - 1  # what was skipped is all that is left
            continue
        needs = max(fitting)
        limit = min(needs - 1, limit * 19 // 20)
    within = tuple(point for point in front if point.workspace_bytes <= most)
    if not within:
        planner_at(most).require_split()
    return within
