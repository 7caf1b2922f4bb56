"""Plan one kernel under one workspace limit: measure or recall its chunks, solve, race wholes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ucudnn.axis import AbstractAxis, BatchAxis, RowAxis
from ucudnn.backends.recorded import RecordedBackend
from ucudnn.benchmark.finals import Finalist, choose, race
from ucudnn.benchmark.kernel import KernelMeasurer
from ucudnn.benchmark.session import Session
from ucudnn.candidate import ADDS_BIAS
from ucudnn.config import Config
from ucudnn.errors import PlanError
from ucudnn.measurement import Measurement
from ucudnn.plan import DEFAULT_ALGORITHM, KernelPlan, Split
from ucudnn.problem import Problem
from ucudnn.replay import miss, predict, recall, recall_race
from ucudnn.solve import Front, Solved, SolvedRows, pareto, smallest_workspace, solve
from ucudnn.units import format_bytes


@dataclass(frozen=True, slots=True)
class Kernel:
    """What a model asks for.

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
    """What is known of a kernel's chunks.

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
    """

    def __init__(
        self,
        session: Session,
        config: Config,
        kernel: Kernel,
        limit: int | None,
        default: Measurement | None,
        chunk_limit: int | None = None,
    ) -> None:
        self._session = session
        self._config = config
        self._kernel = kernel
        self._problem = kernel.problem
        self._limit = limit
        self._chunk_limit = limit if chunk_limit is None else chunk_limit
        self._is_recorded = isinstance(session.backend, RecordedBackend)
        self.default = self._recalled_default() if self._is_recorded else default

    def _recalled_default(self) -> Measurement | None:
        whole = recall(self._session, self._axis, [self._axis.extent])
        known = (entry for entry in whole if entry.key.algorithm == DEFAULT_ALGORITHM)
        return next(known, None)

    @cached_property
    def _axis(self) -> BatchAxis:
        return BatchAxis(self._problem)

    @cached_property
    def _rows_axis(self) -> RowAxis:
        return RowAxis(self._problem)

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        return self._axis.sizes(self._config.policy)

    @cached_property
    def _row_sizes(self) -> tuple[int, ...]:
        """Slabs to measure: none unless torch's own convolution exceeds the workspace limit."""
        workspace = self.default.workspace_bytes if self.default else None
        if self._limit is None or (workspace is not None and workspace <= self._limit):
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
        return KernelMeasurer(self._session, axis, limit, sizes, max_error, adds_bias)

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
            raise miss(self._session, self._problem)
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
        """Those with something to measure."""
        return [self._plain, *(one for one in (self._fused, self._slabs) if not one.is_empty)]

    def front(self) -> Front:
        """What splits take within how much workspace, by what there is to measure at this limit.

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
        evidence = self.evidence()
        if not self._has_split(evidence):
            return None
        solved, rows = self._solve(evidence), self._rows(evidence)
        splits = self._splits(solved, rows)
        finalists = self._finalists(splits, solved, rows)
        winner = choose(finalists, self._limit)
        if winner is None:
            return self._tighter(finalists, evidence).decide()
        default = next((entry.timing for entry in finalists if entry.split.is_default), None)
        notes = self._session.backend.candidates(self._problem)[0].notes if default else ()
        described = (*(f"default {note}" for note in notes), *evidence.notes)
        split, layers = winner.split, self._kernel.layers
        known = (one for one in solved if split in one.finalists(default_applies=True))
        of_winner = next(known, solved[0])
        return of_winner.kernel_plan(layers, split, winner.timing, default, described, rows)

    def require_split(self) -> None:
        """Refuse a limit that nothing fits.

        Raises:
            PlanError: nothing does, and there was time to find out.
        """
        self._has_split(self.evidence())

    def _has_split(self, evidence: Evidence) -> bool:
        """Whether something fits; False where the time ended before anything did."""
        if evidence.plain or evidence.fused or self._rows(evidence).splits(self._chunk_limit):
            return True
        if self._session.is_over:
            return False
        raise self._nothing_fits(evidence)

    def _solve(self, evidence: Evidence) -> tuple[Solved, Solved]:
        """What splits along the batch there are, by algorithms of one sort or the other."""
        kernel_of, limit, sizes = self._session.kernel_of, self._chunk_limit, self._sizes
        return (
            solve(self._problem, evidence.plain, kernel_of, limit, sizes),
            solve(self._problem, evidence.fused, kernel_of, limit, sizes),
        )

    def _rows(self, evidence: Evidence) -> SolvedRows:
        kernel_of = self._session.kernel_of
        return SolvedRows.of(self._rows_axis, self._row_sizes, evidence.slabs, kernel_of)

    def _splits(self, solved: tuple[Solved, Solved], rows: SolvedRows) -> list[Split]:
        """Splits worth timing as wholes, torch's default first, and those that add a bias last."""
        plain, fused = solved
        applies = self._session.kernel_of(self._problem, DEFAULT_ALGORITHM) is not None
        splits = plain.finalists(applies) + fused.finalists(default_applies=False)
        return splits + rows.splits(self._chunk_limit)

    def _finalists(
        self, splits: Sequence[Split], solved: Sequence[Solved], rows: SolvedRows
    ) -> list[Finalist]:
        """Splits as whole calls: raced, or as they were, else as their chunks predict."""
        session, has_bias = self._session, self._kernel.has_bias
        if not self._is_recorded:
            return race(session, self._working()[-1], self._problem, splits, has_bias)
        raced = recall_race(session, self._plain, self._problem, splits, has_bias)
        return predict(solved, rows, splits, self.default) if raced is None else raced

    def _tighter(self, finalists: Sequence[Finalist], evidence: Evidence) -> KernelPlanner:
        """Where every whole call needed more than its chunks were seen to: chunks of that less."""
        needs = [one.timing.workspace_bytes for one in finalists if not one.split.is_default]
        if not needs or self._limit is None or self._chunk_limit is None:
            raise self._nothing_fits(evidence)
        chunk_limit = self._chunk_limit - (min(needs) - self._limit)
        if chunk_limit < 0:
            raise self._nothing_fits(evidence)
        return KernelPlanner(
            self._session, self._config, self._kernel, self._limit, self.default, chunk_limit
        )

    def _nothing_fits(self, evidence: Evidence) -> PlanError:
        known = [
            entry
            for entry in evidence.everything
            if entry.workspace_bytes is not None and entry.status != "failed"
        ]
        kernel_of = self._session.kernel_of
        rows = SolvedRows.of(self._rows_axis, self._row_sizes, known, kernel_of)
        smallest = smallest_workspace(self._problem, known, kernel_of, rows)
        if smallest is None:
            reasons = (entry.reason for entry in evidence.everything if entry.status == "failed")
            return PlanError(f"no algorithm could be run on {self._problem}: {'; '.join(reasons)}")
        least, what = smallest
        limit = f"workspace_limit={format_bytes(self._limit or 0)}"
        if self._config.total_bytes is not None:
            limit = f"its part of total_workspace, {format_bytes(self._limit or 0)}"
        return PlanError(
            f"no plan for {self._problem} fits {limit}; the smallest needs {format_bytes(least)} "
            f"({what}); raise the limit"
            + ("" if self._config.policy == "all" else " or allow more sizes by policy"),
            least,
        )


def survey(planner_at: Callable[[int], KernelPlanner], most: int) -> Front:
    """What splits of a kernel take within how much workspace, from `most` downwards.

    Measured for limits of which each is at most half of the one before, and less than what the best
    split below that one needs. So there are few, and the best split for each is on the front; what
    is between them is made of the same measurements.

    Args:
        planner_at: makes the planner of the kernel for a limit in bytes.
        most: the largest limit.

    Returns:
        Empty where nothing could be measured in time.

    Raises:
        PlanError: nothing fits `most`.
    """
    points: Front = ()
    limit = most
    while limit >= 0:
        planner = planner_at(limit)
        while planner.step():
            pass
        found = planner.front()
        points = pareto((*points, *found))
        needs = max((size for size, _ in found if size <= limit), default=0)
        if not needs:
            break
        limit = min(needs - 1, limit // 2)
    within = tuple(point for point in points if point[0] <= most)
    if not within:
        planner_at(most).require_split()
    return within
