"""Plan one kernel under one workspace limit: measure or recall its chunks, solve, race wholes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ucudnn.axis import axis_of
from ucudnn.config import Config
from ucudnn.errors import PlanError
from ucudnn.measurement import Measurement
from ucudnn.plan import DEFAULT_ALGORITHM, KernelPlan, Split
from ucudnn.tuning.confirmation import Finalist, choose
from ucudnn.tuning.items import held_bytes
from ucudnn.tuning.noise import PERTURBED
from ucudnn.tuning.refusals import nothing_fits
from ucudnn.tuning.replay import predict
from ucudnn.tuning.session import Session
from ucudnn.tuning.solve import Front, Solved, SolvedRows, pareto, solve
from ucudnn.tuning.sources import Bounds, Evidence, Kernel, source_of


class KernelPlanner:
    """Finds the plan of one kernel within a limit.

    Args:
        session: the device and the cache.
        config: tuning settings; `bounds` overrides its workspace limit.
        kernel: what to plan.
        bounds: limits of its plan.
        default: torch's own convolution of the whole batch, as far as it was measured.
        call_overhead_bytes: measured workspace of a whole call minus that of its largest chunk.
    """

    def __init__(
        self,
        session: Session,
        config: Config,
        kernel: Kernel,
        bounds: Bounds,
        default: Measurement | None,
        call_overhead_bytes: int = 0,
    ) -> None:
        self._session = session
        self._config = config
        self._kernel = kernel
        self._bounds = bounds
        self._call_overhead_bytes = call_overhead_bytes
        self.problem = kernel.problem
        self.limit = bounds.limit
        self._source = source_of(session, config, kernel, bounds, default)

    @property
    def default(self) -> Measurement | None:
        """Torch's own convolution of the whole batch, as far as it was measured."""
        return self._source.default

    def look_at_default(self) -> Measurement | None:
        """Torch's own convolution of the whole batch, run at least once; None where it fails."""
        return self._source.look_at_default()

    def step(self) -> bool:
        """Measure the micro-batches that the solver asks for next; False if it asks for none."""
        return self._source.step()

    def evidence(self) -> Evidence:
        """Measure whatever is still wanted, or recall what was.

        Raises:
            PlanError: the recording has nothing of this kernel.
        """
        return self._source.evidence()

    def release(self) -> None:
        """Free the operands, which no other kernel uses; they are allocated again if needed."""
        self._source.release()

    def front(self) -> Front:
        """Front of time over workspace of the splits, by the measurements at this limit.

        Raises:
            PlanError: the recording has nothing of this kernel.
        """
        # Splits along both axes compete for the same workspace, so they share one front.
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
            # Each pass returns, or goes on with a limit that is lower than that of the one before.
            while True:
                evidence = planner.evidence()
                if not planner._has_split(evidence):
                    return None
                solved, rows = planner._solve(evidence), planner._rows(evidence)
                finalists = planner._finalists(planner._splits(solved, rows), solved, rows)
                winner = choose(finalists, self.limit, self._session.planned_call_ns())
                if winner is not None:
                    return planner._plan(winner, finalists, evidence, solved, rows)
                # Measuring was cut short before anything but torch's own convolution could be
                # raced, so it is not known that nothing fits.
                if self._session.is_over and all(one.split.is_default for one in finalists):
                    return None
                # Before the next planner allocates operands of its own.
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
        # The first candidate is torch's own convolution, whose notes say which kernel it runs.
        notes = self._session.backend.candidates(self.problem)[0].notes if default else ()
        described = [*(f"default {note}" for note in notes), *evidence.notes]
        if any(finalist.is_perturbed for finalist in finalists):
            described.append(PERTURBED)
        split, layers = winner.split, self._kernel.layers
        plain, fused = solved
        # Smaller batches follow the table in which the winner was found; the other one serves
        # batches that it has no split for.
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
        if (
            evidence.plain
            or evidence.fused
            or self._rows(evidence).splits(self._bounds.chunk_limit)
        ):
            return True
        # Measuring was cut short, so it is not known that nothing fits.
        if self._session.is_over:
            return False
        raise self._nothing_fits(evidence)

    def _solve(self, evidence: Evidence) -> tuple[Solved, Solved]:
        """Splits along the batch, by plain algorithms and by those that add a bias."""
        kernel_of, limit, sizes = (
            self._session.kernel_of,
            self._bounds.chunk_limit,
            self._source.sizes,
        )
        return (
            solve(self.problem, evidence.plain, kernel_of, limit, sizes),
            solve(self.problem, evidence.fused, kernel_of, limit, sizes),
        )

    def _rows(self, evidence: Evidence) -> SolvedRows:
        kernel_of = self._session.kernel_of
        return SolvedRows.of(
            self._source.rows_axis, self._source.row_sizes, evidence.slabs, kernel_of
        )

    def _splits(self, solved: tuple[Solved, Solved], rows: SolvedRows) -> list[Split]:
        """Splits worth timing as wholes, torch's default first, and those that add a bias last."""
        plain, fused = solved
        # A backend may have no default here, as a recording in which it is missing.
        applies = self._session.kernel_of(self.problem, DEFAULT_ALGORITHM) is not None
        splits = plain.finalists(applies) + fused.finalists(default_applies=False)
        return splits + rows.splits(self._bounds.chunk_limit)

    def _finalists(
        self, splits: Sequence[Split], solved: Sequence[Solved], rows: SolvedRows
    ) -> list[Finalist]:
        """Splits as whole calls: raced, or as they were, else as their chunks predict."""
        # Nothing can be raced when the time is over, or in a recording that lacks this race.
        raced = self._source.race(splits)
        return predict(solved, rows, splits, self.default) if raced is None else raced

    def _tighter(self, finalists: Sequence[Finalist], evidence: Evidence) -> KernelPlanner:
        """A planner with a lower limit, after every whole call needed more than its chunks did."""
        # Only a limit can have refused every finalist.
        assert self.limit is not None
        assert self._bounds.chunk_limit is not None
        # torch's own call takes part in any case. Where its chunk exceeds the limit already, it
        # says nothing about what calls need beyond their chunks.
        needs = [
            (one.timing.workspace_bytes, chunk)
            for one in finalists
            for chunk in [self._chunk_bytes(one.split, evidence)]
            if chunk is not None and chunk <= self._bounds.chunk_limit
        ]
        if not needs:
            raise self._nothing_fits(evidence)
        need, chunk = min(needs)
        # Lower by the whole excess: other algorithms may need almost as much as this one, and would
        # be raced one after the other. Below `chunk`, so that this split is not found again.
        chunk_limit = min(self._bounds.chunk_limit - (need - self.limit), chunk - 1)
        overhead = need - chunk
        # Even a split without any workspace would exceed the limit as a whole call.
        if chunk_limit < 0:
            raise self._nothing_fits(evidence, overhead)
        bounds = replace(self._bounds, chunk_limit=chunk_limit)
        return KernelPlanner(
            self._session, self._config, self._kernel, bounds, self.default, overhead
        )

    def _chunk_bytes(self, split: Split, evidence: Evidence) -> int | None:
        """The largest workspace of a split's chunks; None where it is not known of any."""
        axis = axis_of(self.problem, split)
        steps = {(axis.part(axis.size_of(step)), step.algorithm) for step in split.steps}
        # Only chunks that were timed in full can be in a finalist. One chunk may have run in
        # several roles, of which the one that needs most counts.
        sizes = [
            entry.workspace_bytes + held_bytes(self.problem, entry.key.conditions.role)
            for entry in evidence.everything
            if (entry.key.problem, entry.key.algorithm) in steps
            and entry.workspace_bytes is not None
            and entry.status == "ok"
        ]
        return max(sizes, default=None)

    def _nothing_fits(
        self, evidence: Evidence, call_overhead_bytes: int | None = None
    ) -> PlanError:
        """Error for a limit that nothing fits."""
        if call_overhead_bytes is None:
            call_overhead_bytes = self._call_overhead_bytes
        return nothing_fits(self._source, evidence, call_overhead_bytes)


def survey(planner_at: Callable[[int], KernelPlanner], most: int) -> Front:
    """Front of time over workspace of the splits of a kernel, from `most` downwards.

    Measures for ever smaller limits. Each is at least a twentieth below the one before, and below
    the workspace of the best split for that one. So each point is the best split for some limit.

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
        # A later, lower limit may have measured what is better under an earlier one, too.
        front = pareto((*front, *found))
        fitting = [point.workspace_bytes for point in found if point.workspace_bytes <= limit]
        if not fitting:
            # Then this was the highest limit that excludes the last split: nothing needs less.
            if limit == needs - 1:
                break
            # A split may need more than 19/20 of the last limit and yet less than the last split.
            limit = needs - 1
            continue
        needs = max(fitting)
        limit = min(needs - 1, limit * 19 // 20)
    within = tuple(point for point in front if point.workspace_bytes <= most)
    if not within:
        # Raises the error that names the smallest workspace, unless the time was over.
        planner_at(most).require_split()
    return within
