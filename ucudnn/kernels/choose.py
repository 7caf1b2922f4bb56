"""Choose the plan of one kernel within one limit: race whole calls, or say why there is no plan.

Only a clear gain replaces torch's default. If no split fits the workspace limit, the error names
the smallest limit that would suffice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TYPE_CHECKING

from ucudnn.benchmark.statistics import median_ns, ratio_interval, spread_ns
from ucudnn.errors import PlanError, UnsupportedError
from ucudnn.kernels.splits import AbstractSplitTable, known_chunks, plan_by
from ucudnn.measurement import FailureKind, Measurement, MeasurementKey, Subject
from ucudnn.plan import DEFAULT_ALGORITHM, KernelPlan, Split, Timing
from ucudnn.units import format_bytes, format_sizes
from ucudnn.verdict import WORTHWHILE_GAIN, is_faster

if TYPE_CHECKING:
    from ucudnn.benchmark.rounds import Result
    from ucudnn.config import Config
    from ucudnn.kernels.candidates import Kernel
    from ucudnn.kernels.device import Session
    from ucudnn.kernels.measure import KernelTuning

# Time in ns that a call of a planned layer takes on the host in addition to its kernel, measured by
# benchmarks/overhead.py. In this time the call looks up its plan and makes an autograd node in
# Python.
PLANNED_CALL_NS = 30_000


@dataclass(frozen=True, slots=True)
class Finalist:
    """A split of the whole batch with the samples of one race."""

    split: Split
    timing: Timing
    # In ns, one per round; the n-th samples of all finalists are from the same round.
    samples: tuple[int, ...]
    is_deterministic: bool = True
    is_perturbed: bool = False


class KernelPlanner:
    """Finds the plan of one kernel within a limit.

    Args:
        tuning: measures the kernel.
        limit: bytes of workspace that a call may use; None: no limit.
        tolerance: as in `KernelTuning.measure`.
    """

    def __init__(self, tuning: KernelTuning, limit: int | None, tolerance: float = 0.0) -> None:
        self._tuning = tuning
        self._session = tuning.session
        self._config = tuning.config
        self._problem = tuning.problem
        self._limit = limit
        # Bytes of workspace that a chunk may use; `_tighten` lowers it if whole calls need more
        # workspace than their chunks.
        self._chunk_limit = limit
        self._tolerance = tolerance
        # Measured workspace of a whole call minus that of its largest chunk.
        self._call_overhead_bytes = 0

    def decide(self) -> KernelPlan | None:
        """The plan of the best split; None if the time ran out before any split was found.

        The best split has won a race of whole calls or, if there was no time for a race, is the
        fastest by predicted times. Raises PlanError if no plan fits the limit.
        """
        try:
            # Each pass of this loop returns, raises an error, or lowers the limit for chunks.
            while True:
                tables = self._measure()
                is_empty = all(table.is_empty for table in tables)
                finalists = [] if is_empty else self._finalists(tables)
                if not finalists:
                    self._refuse_unless_over()
                    return None
                winner = choose(
                    finalists,
                    self._limit,
                    PLANNED_CALL_NS if self._session.backend.blocks_host else 0,
                    bool(self._config.deterministic),
                )
                if winner is not None:
                    return self._plan(winner, finalists, tables)
                # If measuring was cut short and torch's own convolution is the only finalist, there
                # is no error, because splits that were not measured may fit.
                if self._tuning.is_cut_short and all(one.split.is_default for one in finalists):
                    return None
                if self._config.deterministic and not any(f.is_deterministic for f in finalists):
                    raise PlanError(
                        f"every deterministic split of {self._problem} failed as a whole call; "
                        f"allow others by deterministic=False"
                    )
                if not self._tighten(finalists, tables):
                    self._refuse_unless_over()
                    return None
        finally:
            self._tuning.release()

    def _plan(
        self, winner: Finalist, finalists: Sequence[Finalist], tables: Sequence[AbstractSplitTable]
    ) -> KernelPlan:
        own = next((entry for entry in finalists if entry.split.is_default), None)
        default = None if own is None else own.timing
        plan = plan_by(
            tables,
            self._tuning.kernel,
            winner.split,
            winner.timing,
            default,
            self._session.implementation_of,
        )
        # Notes of the plan say why algorithms were ruled out. Algorithms that the plan uses get no
        # such note, nor does torch's own convolution if it was raced.
        raced = {*plan.algorithms, *([DEFAULT_ALGORITHM] if default else [])}
        notes = self._tuning.notes(self._chunk_limit, self._tolerance, raced)
        return replace(
            plan,
            notes=(*(self._default_notes() if default else ()), *notes),
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
        if all(table.is_empty for table in self._measure()):
            self._refuse_unless_over()

    def _measure(self) -> tuple[AbstractSplitTable, ...]:
        tables = self._tuning.measure_within(self._chunk_limit, self._tolerance)
        if not self._session.can_measure and not any(self._tuning.measurements):
            raise self._session.missing(self._problem)
        return tables

    def _refuse_unless_over(self) -> None:
        # If measuring was cut short, a split that was not measured may fit.
        if not self._tuning.is_cut_short:
            error = self._nothing_fits()
            lacks_memory = bool(self._tuning.lack_of_memory)
            error.lacks_memory = error.smallest_bytes is None and lacks_memory
            raise error

    def _finalists(self, tables: Sequence[AbstractSplitTable]) -> list[Finalist]:
        """Splits with times of whole calls: raced, from the cache, or predicted from chunks."""
        # A backend may lack torch's own convolution, such as a recording that does not contain it.
        applies = self._session.implementation_of(self._problem, DEFAULT_ALGORITHM) is not None
        default = Split.default(self._problem.batch)
        offered = [default] if applies else []
        offered += [split for table in tables for split in table.splits()]
        splits = list(dict.fromkeys(offered))
        own = self._tuning.timed_default
        # If torch's own convolution is the only split, it has no rival to race. Its time as a chunk
        # is that of the whole call, unless the whole call adds a bias.
        if splits == [default] and own is not None and not self._tuning.kernel.has_bias:
            return predict(tables, splits, own)
        # `raced` is None if the time is over, if there is too little memory for whole calls, or if
        # a recording lacks this race.
        raced = race_calls(self._tuning, splits)
        return predict(tables, splits, self._tuning.default) if raced is None else raced

    def _tighten(self, finalists: Sequence[Finalist], tables: Sequence[AbstractSplitTable]) -> bool:
        """Lower the limit for chunks, because whole calls needed more than their chunks.

        Returns False if no limit is low enough.
        """
        limit, chunk_limit = self._limit, self._chunk_limit
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
        self._chunk_limit = lower
        return True

    def _nothing_fits(self) -> PlanError:
        tuning, problem, config = self._tuning, self._problem, self._config
        smallest, limit = _smallest(tuning), self._limit
        if smallest is None:
            return _nothing_allowed(tuning)
        least, what = smallest
        # A limit that suffices must hold the whole call, not only its largest chunk.
        least += self._call_overhead_bytes
        if limit is None or least <= limit:
            if tuning.lack_of_memory:
                return PlanError(
                    f"there was too little memory to time the chunks of any plan for {problem} "
                    f"({tuning.lack_of_memory})"
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
        total, calls = config.total_bytes, len(tuning.kernel.layers)
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


def _nothing_allowed(tuning: KernelTuning) -> PlanError:
    problem, config, lack = tuning.problem, tuning.config, tuning.lack_of_memory
    everything = [entry for entries in tuning.measurements for entry in entries]
    ran = list(filter(_ran, everything))
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
    # The roles of a candidate may have failed alike.
    failed = dict.fromkeys(one.reason for one in everything if one.status == "failed")
    # If every candidate ran out of memory, there are no entries, because such failures are not
    # kept.
    if failed or not everything:
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


def _smallest(tuning: KernelTuning) -> tuple[int, str] | None:
    """The least workspace in bytes of any split, and its description; None if no split is known."""
    config = tuning.config
    known = [
        [
            one
            for one in filter(_ran, entries)
            if _is_exact(one, config) and (one.is_deterministic or not config.deterministic)
        ]
        for entries in tuning.measurements
    ]
    # All tables are asked, because slabs may fit where no micro-batch does, for example at batch 1.
    found = filter(None, (table.smallest() for table in tuning.tables(known, None)))
    smallest = min(found, default=None, key=itemgetter(0))
    if smallest is None:
        return None
    least, split = smallest
    first = split.chunks[0]
    is_by_slabs = split.axis == "spatial"
    return least, str(split) if is_by_slabs else f"micro-batch {first.size}, {first.algorithm}"


def race_calls(tuning: KernelTuning, splits: Sequence[Split]) -> list[Finalist] | None:
    """Time whole calls in interleaved rounds, or take the race from the cache if it is complete.

    Every call adds a bias if the kernel has one. None if there is no time, or too little memory for
    any of them. Raises UnsupportedError if no split could be run for another reason.
    """
    session, kernel = tuning.session, tuning.kernel
    # Samples are compared in pairs of one round, so a race is recalled as a whole or run anew.
    recalled = _recall_race(session, kernel, splits)
    # A race takes at least three runs of each call: one for its workspace, one to warm up, and one
    # round.
    has_time = session.end.has_time(3 * len(splits), tuning.whole_ns)
    if recalled or not session.can_measure or session.race_until.is_over or not has_time:
        return recalled
    results = tuning.bench().whole(splits, kernel.has_bias)
    listed = session.backend.candidates(kernel.problem)
    varying = {one.algorithm for one in listed if not one.is_deterministic}
    found = [
        # One nondeterministic chunk makes the whole call nondeterministic.
        _timed(
            key,
            result,
            kernel.has_bias,
            varying.isdisjoint(chunk.algorithm for chunk in split.chunks),
        )
        for key, result, split in zip(_keys(session, kernel, splits), results, splits, strict=True)
    ]
    for entry in found:
        # A call that ran out of memory is not kept as failed, because there may be more memory at
        # another time.
        if entry.failure != FailureKind.OUT_OF_MEMORY:
            session.keep(entry)
    # The race is written to the cache now, so that it is kept if tuning is interrupted.
    session.flush()
    finalists = _raced(splits, found)
    if found and all(entry.failure == FailureKind.OUT_OF_MEMORY for entry in found):
        return None
    if splits and not finalists:
        raise UnsupportedError(f"a whole call could not be run to be timed: {found[0].reason}")
    return finalists


def _recall_race(
    session: Session, kernel: Kernel, splits: Sequence[Split]
) -> list[Finalist] | None:
    """The race of these splits from the cache; None if it is not there or no split could be run."""
    known = [session.find(key) for key in _keys(session, kernel, splits)]
    found = [session.reuse(entry) for entry in known if entry is not None]
    return None if len(found) < len(splits) else _raced(splits, found) or None


def _keys(session: Session, kernel: Kernel, splits: Sequence[Split]) -> list[MeasurementKey]:
    """One key per split, with an identity of the race: other races' samples are not comparable."""
    # The texts are sorted, so that the same splits in another order have the same identity.
    texts = sorted(map(str, splits))
    identity = hashlib.sha256(f"{' | '.join(texts)} | {kernel.has_bias}".encode()).hexdigest()[:16]
    return [
        session.key(kernel.problem, "", subject=Subject.CALL, split=split, race=identity)
        for split in splits
    ]


def _raced(splits: Sequence[Split], found: Sequence[Measurement]) -> list[Finalist]:
    return [
        Finalist(split, entry.timing, entry.samples, entry.is_deterministic, entry.is_perturbed)
        for split, entry in zip(splits, found, strict=True)
        if entry.status == "ok" and entry.timing is not None
    ]


def _timed(
    key: MeasurementKey, result: Result, has_bias: bool, is_deterministic: bool
) -> Measurement:
    # A failure is cached like a time, so that a second tune takes the race from the cache instead
    # of running it.
    if result.failure:
        kind, reason = result.failure
        return Measurement(key, "failed", reason=reason, failure=kind, adds_bias=has_bias)
    return Measurement(
        key,
        "ok",
        median_ns(result.samples),
        spread_ns(result.samples),
        tuple(result.samples),
        result.workspace_bytes,
        notes=result.state.notes,
        is_deterministic=is_deterministic,
        adds_bias=has_bias,
        load=result.state.load,
    )


def choose(
    finalists: Sequence[Finalist],
    limit: int | None,
    overhead_ns: int = 0,
    deterministic: bool = False,
) -> Finalist | None:
    """The winner within the limit: torch's default, unless another split is clearly faster.

    Of finalists that tie with the fastest, the one with the least workspace wins; if several need
    as little, the one with the fewest chunks, and then a deterministic one. A finalist ties if the
    fastest is not clearly faster, and if the finalist takes at most 2 % longer by the median. With
    wide intervals, the first condition alone would let much slower calls tie. `overhead_ns` is
    added to all times that are compared with those of torch's default.

    >>> from ucudnn.plan import Chunk
    >>> def entry(name, *samples):
    ...     timing = Timing(median_ns(samples), 0, 0, len(samples))
    ...     return Finalist(Split("batch", (Chunk(8, name),)), timing, samples)
    >>> slow = entry("torch_default", *[100] * 9)
    >>> choose([slow, entry("gemm", *[90] * 9)], None).split.chunks[0].algorithm
    'gemm'
    >>> choose([slow, entry("gemm", *[80, 120] * 4, 90)], None).split.chunks[0].algorithm
    'torch_default'
    """
    fitting = [
        entry
        for entry in finalists
        if (limit is None or entry.timing.workspace_bytes <= limit)
        and (entry.is_deterministic or not deterministic)
    ]
    default = next((entry for entry in fitting if entry.split.is_default), None)
    # If no finalist is clearly faster than torch's own convolution, only torch's own is left.
    if default is not None:
        faster = [entry for entry in fitting if _is_faster(entry, default, overhead_ns)]
        fitting = faster or [default]
    if not fitting:
        return None
    fastest = min(fitting, key=lambda entry: entry.timing.time_ns)
    return min((entry for entry in fitting if _ties(entry, fastest)), key=_thrift)


def _thrift(entry: Finalist) -> tuple[int, int, bool, int]:
    timing = entry.timing
    # Time comes last, because the times of calls that tie differ only by noise.
    chunks = len(entry.split.chunks)
    return timing.workspace_bytes, chunks, not entry.is_deterministic, timing.time_ns


def _ties(entry: Finalist, fastest: Finalist) -> bool:
    # Both conditions are required: with wide intervals even a much slower call is not clearly
    # slower, and without the condition on the ratio it would tie.
    ratio, _, _ = ratio_interval(entry.samples, fastest.samples)
    return ratio <= 1 + WORTHWHILE_GAIN and not _is_faster(fastest, entry)


def _is_faster(entry: Finalist, other: Finalist, overhead_ns: int = 0) -> bool:
    """True if `entry` takes less time than `other`, beyond the noise and by enough to matter."""
    # Timed calls do not look up their plan, but calls in training do. torch's own convolution needs
    # no lookup, so the overhead is added to the times of `entry` only.
    samples = [time_ns + overhead_ns for time_ns in entry.samples]
    return is_faster(ratio_interval(samples, other.samples), WORTHWHILE_GAIN)
