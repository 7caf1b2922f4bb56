"""Plan one kernel within one limit: measure or recall chunks, solve, race whole calls.

If no split fits the workspace limit, the error names the smallest limit that would suffice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING

from ucudnn.errors import PlanError
from ucudnn.kernels.confirmation import PLANNED_CALL_NS, Finalist, choose
from ucudnn.kernels.splits import AbstractSplitTable, known_chunks, plan_by
from ucudnn.plan import DEFAULT_ALGORITHM, KernelPlan, Split, Timing
from ucudnn.units import format_bytes, format_sizes

if TYPE_CHECKING:
    from ucudnn.config import Config
    from ucudnn.kernels.sources import AbstractSource, Evidence
    from ucudnn.measurement import Measurement
    from ucudnn.problem import Problem


class KernelPlanner:
    """Finds the plan of one kernel within a limit."""

    def __init__(self, source: AbstractSource) -> None:
        # If whole calls need more workspace than their chunks, `_tighten` replaces this source by
        # one with a lower limit for chunks.
        self._source = source
        self._session = source.session
        self._config = source.config
        # Measured workspace of a whole call minus that of its largest chunk.
        self._call_overhead_bytes = 0
        self._problem = source.kernel.problem
        self._limit = source.bounds.limit

    def decide(self) -> KernelPlan | None:
        """The plan of the best split; None if the time ran out before any split was found.

        The best split has won a race of whole calls or, if there was no time for a race, is the
        fastest by predicted times. Raises PlanError if no plan fits the limit.
        """
        try:
            # Each pass of this loop returns, raises an error, or lowers the limit for chunks.
            while True:
                evidence = self._source.evidence()
                tables = self._source.tables(evidence.usable)
                is_empty = all(table.is_empty for table in tables)
                finalists = [] if is_empty else self._finalists(tables, evidence)
                if not finalists:
                    self._refuse_unless_over(evidence)
                    return None
                winner = choose(
                    finalists,
                    self._limit,
                    PLANNED_CALL_NS if self._session.backend.blocks_host else 0,
                    bool(self._config.deterministic),
                )
                if winner is not None:
                    return self._plan(winner, finalists, evidence, tables)
                # If measuring was cut short and torch's own convolution is the only finalist, there
                # is no error, because splits that were not measured may fit.
                if self._is_cut_short and all(one.split.is_default for one in finalists):
                    return None
                if self._config.deterministic and not any(f.is_deterministic for f in finalists):
                    raise PlanError(
                        f"every deterministic split of {self._problem} failed as a whole call; "
                        f"allow others by deterministic=False"
                    )
                if not self._tighten(finalists, tables):
                    self._refuse_unless_over(evidence)
                    return None
        finally:
            self._source.release()

    def _plan(
        self,
        winner: Finalist,
        finalists: Sequence[Finalist],
        evidence: Evidence,
        tables: Sequence[AbstractSplitTable],
    ) -> KernelPlan:
        own = next((entry for entry in finalists if entry.split.is_default), None)
        default = None if own is None else own.timing
        layers = self._source.kernel.layers
        plan = plan_by(tables, self._problem, winner.split, layers, winner.timing, default)
        # Notes of the plan say why algorithms were ruled out. Algorithms that the plan uses get no
        # such note, nor does torch's own convolution if it was raced.
        raced = {*plan.algorithms, *([DEFAULT_ALGORITHM] if default else [])}
        ruled_out = [said for name, said in evidence.ruled_out if name not in raced]
        return replace(
            plan,
            notes=(*(self._default_notes() if default else ()), *evidence.notes, *ruled_out),
            is_perturbed=any(finalist.is_perturbed for finalist in finalists),
            default_is_deterministic=own is None or own.is_deterministic,
        )

    def _default_notes(self) -> list[str]:
        # The first candidate is torch's own convolution.
        candidate = self._session.backend.candidates(self._problem)[0]
        name = candidate.implementation
        notes = (f"kernel={name}", *candidate.notes) if name else candidate.notes
        return [f"default {note}" for note in notes]

    def require_split(self) -> None:
        """Raise PlanError if no split fits the limit, unless measuring was cut short."""
        evidence = self._source.evidence()
        if all(table.is_empty for table in self._source.tables(evidence.usable)):
            self._refuse_unless_over(evidence)

    def _refuse_unless_over(self, evidence: Evidence) -> None:
        # If measuring was cut short, a split that was not measured may fit.
        if not self._is_cut_short:
            error = self._nothing_fits(evidence)
            lacks_memory = bool(self._source.lack_of_memory)
            error.lacks_memory = error.smallest_bytes is None and lacks_memory
            raise error

    @property
    def _is_cut_short(self) -> bool:
        return self._session.is_over or self._source.lacks_time

    def _finalists(
        self, tables: Sequence[AbstractSplitTable], evidence: Evidence
    ) -> list[Finalist]:
        """Splits with times of whole calls: raced, from the cache, or predicted from chunks."""
        # A backend may lack torch's own convolution, such as a recording that does not contain it.
        applies = self._session.implementation_of(self._problem, DEFAULT_ALGORITHM) is not None
        default = Split.default(self._problem.batch)
        offered = [default] if applies else []
        offered += [split for table in tables for split in table.splits()]
        splits = list(dict.fromkeys(offered))
        own = self._timed_default(evidence)
        # If torch's own convolution is the only split, it has no rival to race. Its time as a chunk
        # is that of the whole call, unless the whole call adds a bias.
        if splits == [default] and own is not None and not self._source.kernel.has_bias:
            return predict(tables, splits, own)
        # `raced` is None if the time is over, if there is too little memory for whole calls, or if
        # a recording lacks this race.
        raced = self._source.race(splits)
        return predict(tables, splits, self._source.default) if raced is None else raced

    def _timed_default(self, evidence: Evidence) -> Measurement | None:
        """Torch's own convolution of the whole batch, if it was timed in full."""
        return next(
            (
                entry
                for entry in evidence.everything
                if entry.key.problem == self._problem
                and entry.key.is_default
                and entry.status == "ok"
            ),
            None,
        )

    def _tighten(self, finalists: Sequence[Finalist], tables: Sequence[AbstractSplitTable]) -> bool:
        """Lower the limit for chunks, because whole calls needed more than their chunks.

        Returns False if no limit is low enough.
        """
        limit, chunk_limit = self._limit, self._source.bounds.chunk_limit
        # Without a limit, `choose` would have found a winner.
        assert limit is not None
        assert chunk_limit is not None
        # torch's own convolution is a finalist even if its chunk exceeds the limit. Then it does
        # not show what whole calls need beyond their chunks, and is left out here.
        timed = ((one, known_chunks(tables, one.split)) for one in finalists)
        sizes = [
            (one.timing.workspace_bytes, max(item.workspace_bytes for item in items))
            for one, items in timed
            if items is not None
        ]
        needs = [(need, chunk) for need, chunk in sizes if chunk <= chunk_limit]
        if not needs:
            return False
        need, chunk = min(needs)
        self._call_overhead_bytes = need - chunk
        # The limit for chunks is lowered by all the bytes by which the whole call exceeds its
        # limit. Otherwise other algorithms that need almost as much workspace would be raced one
        # after the other. The new limit is also below `chunk`, so that the same split is not found
        # again.
        lower = min(chunk_limit - (need - limit), chunk - 1)
        # If `lower` is negative, even a split whose chunks need no workspace would exceed the limit
        # as a whole call.
        if lower < 0:
            return False
        # Free the operands before the next source allocates its own.
        self._source.release()
        self._source = self._source.within(replace(self._source.bounds, chunk_limit=lower))
        return True

    def _nothing_fits(self, evidence: Evidence) -> PlanError:
        source, problem, config = self._source, self._problem, self._config
        smallest, limit = _smallest(source, evidence), self._limit
        if smallest is None:
            return _nothing_allowed(problem, config, evidence, source.lack_of_memory)
        least, what = smallest
        # A limit that suffices must hold the whole call, not only its largest chunk.
        least += self._call_overhead_bytes
        if limit is None or least <= limit:
            if source.lack_of_memory:
                return PlanError(
                    f"there was too little memory to time the chunks of any plan for {problem} "
                    f"({source.lack_of_memory})"
                )
            return PlanError(
                f"no plan for {problem} can be made of what was measured: {what}, needs "
                f"{format_bytes(least)} and was not timed; tune on the device with these settings"
            )
        more = "" if config.policy == "all" else " or allow more sizes by policy"
        # If the user did not set this limit, it is what a memory budget leaves to the kernel. Then
        # `Limits.refusal`, which knows what else is allocated, adds by how much to raise the
        # budget.
        if config.memory_budget is not None and limit != config.limit_bytes:
            return PlanError(f"its smallest plan needs {format_bytes(least)} ({what})", least)
        total, calls = config.total_bytes, len(source.kernel.layers)
        if total is None or limit == config.limit_bytes:
            most, need = format_sizes(limit, least)
            return PlanError(
                f"no plan for {problem} fits workspace_limit={most}; the smallest needs {need} "
                f"({what}); raise the limit{more}",
                least,
            )
        pool, need, needs = format_sizes(total, least, calls * least)
        together = f", {needs} for its {calls} calls" if calls > 1 else ""
        return PlanError(
            f"no plan for {problem} fits its part of total_workspace={pool}; the smallest needs "
            f"{need} ({what}){together}; raise it{more}",
            calls * least,
        )


def predict(
    tables: Sequence[AbstractSplitTable], splits: Sequence[Split], default: Measurement | None
) -> list[Finalist]:
    """Finalists without a race: torch's own convolution as measured, others as sums of chunks.

    A split with a chunk that was not timed in its position is left out.
    """
    found = (_measured(split, default) or _summed(split, tables) for split in splits)
    return [finalist for finalist in found if finalist is not None]


def _measured(split: Split, default: Measurement | None) -> Finalist | None:
    """The finalist of torch's own convolution; None for other splits or if it was not timed."""
    if not split.is_default or default is None or default.timing is None:
        return None
    # The finalist gets one sample, like the other splits, whose times are sums of medians without a
    # known interval. `choose` takes the ratio of two single samples as it is.
    return Finalist(
        split,
        default.timing,
        (default.timing.time_ns,),
        is_deterministic=default.is_deterministic,
        is_perturbed=default.is_perturbed,
    )


def _summed(split: Split, tables: Sequence[AbstractSplitTable]) -> Finalist | None:
    """The finalist of a split by its chunks' fastest measurements; None if a chunk has none."""
    chunks = known_chunks(tables, split)
    if chunks is None:
        return None
    time_ns = sum(item.time_ns for item in chunks)
    workspace = max(item.workspace_bytes for item in chunks)
    # 0 samples mark a time as predicted.
    timing = Timing(time_ns, spread_ns=0, workspace_bytes=workspace, samples=0)
    return Finalist(split, timing, samples=(time_ns,))


def _nothing_allowed(problem: Problem, config: Config, evidence: Evidence, lack: str) -> PlanError:
    ran = list(filter(_ran, evidence.everything))
    if config.deterministic and ran and not any(one.is_deterministic for one in ran):
        return PlanError(
            f"no deterministic algorithm computes {problem}; on a GPU "
            f"torch.use_deterministic_algorithms(True) makes torch's own convolution one"
        )
    if ran and not any(_is_exact(one, config) for one in ran):
        return PlanError(
            f"no algorithm computes {problem} within max_error={config.max_error}; the most exact "
            f"one has {min(one.error or 0.0 for one in ran):.2g}"
        )
    failed = [entry.reason for entry in evidence.everything if entry.status == "failed"]
    # If every candidate ran out of memory, there are no entries, because such failures are not
    # kept.
    if failed or not evidence.everything:
        reasons = "; ".join(failed) or f"there was too little memory{lack and f' ({lack})'}"
        return PlanError(f"no algorithm could be run on {problem}: {reasons}")
    return PlanError(
        f"{problem} has no split, because the chunks that were measured do not add up to all of "
        f"it; measure more sizes"
    )


def _ran(entry: Measurement) -> bool:
    # A candidate that exceeds the limit is run once for its workspace, and not timed. It counts as
    # run, because a higher limit may allow it.
    return entry.workspace_bytes is not None and entry.status != "failed"


def _is_exact(entry: Measurement, config: Config) -> bool:
    return config.max_error is None or (entry.error or 0.0) <= config.max_error


def _smallest(source: AbstractSource, evidence: Evidence) -> tuple[int, str] | None:
    """The least workspace in bytes of any split, and its description; None if no split is known."""
    config = source.config
    known = (
        [
            one
            for one in filter(_ran, entries)
            if _is_exact(one, config) and (one.is_deterministic or not config.deterministic)
        ]
        for entries in evidence.known
    )
    # All tables are asked, because slabs may fit where no micro-batch does, for example at batch 1.
    found = (table.smallest() for table in source.tables(known, is_limited=False))
    return min(filter(None, found), default=None, key=itemgetter(0))
