"""Tune one kernel: while the solver asks for chunks, time those that are not in the cache.

What to measure next follows from the measurements alone. So the same cache leads to the same
decisions, and once tuning has ended by itself, a second tune measures nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from ucudnn.axis import AbstractAxis, RowAxis
from ucudnn.backends.torch_cpu.processor import give_back_free_blocks
from ucudnn.benchmark.accuracy import allowed_error
from ucudnn.benchmark.bench import AbstractBench, Arm, Look
from ucudnn.benchmark.failures import CANDIDATE_ERRORS, failure_of
from ucudnn.benchmark.rounds import Result
from ucudnn.benchmark.statistics import median_ns, spread_ns
from ucudnn.config import Config
from ucudnn.errors import WrongResultWarning, warn
from ucudnn.kernels.candidates import Kernel, KernelCandidates, cuts_of
from ucudnn.kernels.device import Session
from ucudnn.kernels.known import Elimination, KnownChunks, interval_of, must_be_known
from ucudnn.kernels.splits import (
    CHUNK_NS,
    AbstractSplitTable,
    BatchSplits,
    Front,
    RowSplits,
    pareto,
    rank_of,
    worthwhile_ns,
)
from ucudnn.measurement import Candidate, FailureKind, Measurement, MeasurementKey, Role, Subject
from ucudnn.problem import Problem
from ucudnn.solvers.lazy import ChunkOption, Outlook, outlook
from ucudnn.verdict import EQUALLY_FAST

# On a GPU, a candidate enters a race if its first time is at most this many times the best one. The
# first time is the shortest of three, from which medians on an H100 differ by 1 %.
_STILL_RACES = 1.25


class KernelTuning:
    """One kernel, from the first run of torch's own convolution to its plan for every batch.

    Each question names the workspace limit that it is asked for. If the session may not measure,
    what was recorded answers.
    """

    def __init__(self, session: Session, config: Config, kernel: Kernel, is_limited: bool) -> None:
        self.session, self.config, self.kernel = session, config, kernel
        self._is_limited = is_limited
        memory = session.backend.memory_bytes()
        # Within a limit, small chunks also run in the role of the whole call, see `Requests`.
        must_probe = must_be_known(kernel.problem, is_limited, memory)
        deterministic = bool(config.deterministic)
        self._cuts = tuple(
            KnownChunks(
                session, config, KernelCandidates(session, cut, must_probe, deterministic), memory
            )
            for cut in cuts_of(kernel, config.policy)
        )
        self._requests_within: dict[tuple[int | None, float, bool], list[Requests]] = {}
        # The bench of one axis at a time: its operands are as large as those of the whole call.
        self._bench: tuple[str, AbstractBench] | None = None
        # Torch's own convolution of the whole batch as it was looked at; None before, or if it
        # failed.
        self.default: Measurement | None = None
        # True if a chunk was not measured because it would have ended after the time budget.
        self.lacks_time = False

    @property
    def problem(self) -> Problem:
        """The kernel's problem, at its largest batch."""
        return self.kernel.problem

    def at(self, batch: int) -> KernelTuning:
        """The tuning of the same kernel at a smaller batch."""
        smaller = replace(self.kernel, problem=self.problem.with_batch(batch))
        return KernelTuning(self.session, self.config, smaller, self._is_limited)

    @property
    def step_ns(self) -> int:
        """Time in ns of all calls of a step by torch's own convolution; 0 if it is not known."""
        time_ns = None if self.default is None else self.default.time_ns
        return (time_ns or 0) * len(self.kernel.layers)

    @property
    def timed_default(self) -> Measurement | None:
        """Torch's own convolution of the whole batch, if it was timed in full."""
        whole = self._cuts[0]
        found = whole.by_arm.get(whole.listed.default)
        return found if found is not None and found.status == "ok" else None

    @property
    def lack_of_memory(self) -> str:
        """Why a chunk could not be run for lack of memory; "" if there was enough."""
        return next((lack for known in self._cuts for lack in known.skipped.values()), "")

    def look_at_default(self) -> None:
        """Find the first measurement of torch's own convolution of the whole batch (`default`).

        There is none if the convolution fails or there is no time for it. The time of the first run
        is cached apart from later, more precise times, so that a second tune decides by the same
        time as the first tune.
        """
        whole = self._cuts[0]
        arm, session = whole.listed.default, self.session
        own = session.key(self.problem, arm.algorithm)
        # The first run has its own key, so that a later, more precise time does not replace it.
        kept_as = replace(own, subject=Subject.FIRST_RUN)
        counts = session.effort.ignored_share > 0  # else nothing depends on this time
        first = session.find(kept_as) if counts else None
        known = first or session.find(own)
        if known is None and session.can_measure and arm in whole.listed.by_arm:
            # Read the times of chunks from the cache: they show whether the time budget suffices to
            # run the whole batch.
            whole.recall()
            if not session.is_over and self._in_time(whole, [arm]):
                self._look_at(whole, arm)
                known = whole.by_arm.get(arm)
                self.release()
        if known is None or known.time_ns is None:
            return
        if counts and first is None:
            known = replace(known, key=kept_as)
            session.note(known)
        self.default = known

    def look_at_chunks(self, most: int, limit: int | None) -> None:
        """Run torch's own convolution once for the largest chunks of at most `most` samples."""
        known = self._cuts[0].within(limit)
        known.recall()
        listed = known.listed
        size = max((size for size in listed.cut.sizes if size <= most), default=None)
        for arm in listed.by_arm:
            is_wanted = arm.size == size and arm.is_default and bool(listed.lists(arm))
            if is_wanted and arm not in known.by_arm and self._in_time(known, [arm]):
                self._look_at(known, arm)
        self.release()

    def measure(self, limit: int | None, tolerance: float = 0.0) -> Iterator[None]:
        """Time what the solver asks for to find the best split within a limit; yield in between.

        Args:
            limit: bytes of workspace that a chunk may use; None: no limit.
            tolerance: the possible gain, as a fraction of the kernel's time, at which measuring
                ends.
        """
        self.lacks_time = False
        for requests in self.requests(limit, tolerance):
            requests.known.recall()
            while self.session.can_measure and self._time_wanted(requests):
                yield
                # Kernels that differ only in their batch share chunks, and are measured in turn.
                requests.known.recall()
            self.session.flush()

    def measure_within(
        self, limit: int | None, tolerance: float = 0.0
    ) -> tuple[AbstractSplitTable, ...]:
        """Measure everything that a plan within a limit still needs; the tables that it is made of.

        For the arguments see `measure`.
        """
        for _ in self.measure(limit, tolerance):
            pass
        asked = self.requests(limit, tolerance)
        tables = self.tables([one.known.usable for one in asked], limit)
        if self._is_rough(tables, limit):
            tables = self.tables([one.known.timed for one in asked], limit)
        return tables

    @property
    def measurements(self) -> list[list[Measurement]]:
        """All measurements of each cut, also of chunks that failed, lost a race or do not fit."""
        return [known.measurements for known in self._cuts]

    def notes(self, limit: int | None, tolerance: float, raced: Collection[str]) -> list[str]:
        """Notes for a plan: what was timed, and why algorithms are ruled out that did not race."""
        # Of a recording nothing is noted, because it does not say what was not measured.
        if not self.session.can_measure:
            return []
        first, *others = self.requests(limit, tolerance)
        # The first is of interest even if it is empty: torch's own convolution is of that cut.
        working = [first, *(one for one in others if one.listed.by_arm)]
        timed = [note for one in working for note in one.certificate()]
        ruled_out = [said for one in working for name, said in one.ruled_out if name not in raced]
        return timed + ruled_out

    def _is_rough(self, tables: Iterable[AbstractSplitTable], limit: int | None) -> bool:
        """True if plans may also consist of chunks that were timed by a single run."""
        if self.session.can_measure:
            # The division of a pool rests on such times, too, if there was no time for better ones.
            return self.config.total_bytes is not None and self.is_cut_short
        found = filter(None, (table.smallest() for table in tables))
        return not any(limit is None or least <= limit for least, _ in found)

    @property
    def is_cut_short(self) -> bool:
        """True if the time was over before everything that matters was measured."""
        return self.session.can_measure and (self.session.is_over or self.lacks_time)

    def front(self, limit: int | None) -> Front:
        """Front of the splits of all chunks that were timed and fit a limit: measures nothing."""
        # Splits along all axes compete for the same workspace, so they share one front. Slabs are
        # tried only within limits that exclude torch's own convolution.
        whole = None if self.default is None else self.default.workspace_bytes
        most = limit if whole is None else min(whole - 1, whole - 1 if limit is None else limit)
        views = [known.within(most if _is_by_rows(known) else limit) for known in self._cuts]
        for known in views:
            known.recall()
        tables = self.tables([known.timed for known in views], None)
        return pareto(point for table in tables for point in table.front())

    def tables(
        self, measurements: Sequence[Sequence[Measurement]], limit: int | None
    ) -> tuple[AbstractSplitTable, ...]:
        """The split table of each cut by some measurements, for splits within a limit."""
        return tuple(
            (RowSplits if _is_by_rows(known) else BatchSplits)(
                known.listed.axis,
                known.listed.cut.sizes,
                entries,
                self.session.implementation_of,
                limit,
            )
            for known, entries in zip(self._cuts, measurements, strict=False)  # rows come last
        )

    def bench(self, axis: AbstractAxis | None = None) -> AbstractBench:
        """Bench of chunks along an axis; None: any, as for whole calls."""
        if self._bench is None or (axis is not None and axis.name != self._bench[0]):
            axis = axis or self._cuts[0].listed.axis
            # Each bench allocates operands of the same size; only one set of them is in memory.
            self._bench = None
            self._bench = axis.name, self.session.bench(axis)
        return self._bench[1]

    def release(self) -> None:
        """Free the operands, which no other kernel uses; the next run allocates them again."""
        self._bench = None
        for known in self._cuts:
            known.skipped.clear()  # next time there may be more memory
        # malloc keeps memory that chunks have freed. Without this call the memory of kernels of
        # other sizes would be added to it.
        give_back_free_blocks()

    @property
    def whole_ns(self) -> float:
        """Time in ns of the whole kernel at the rate of its fastest timed chunk; 0 if none is."""
        return self._rate_ns(self._cuts[0]) * self.problem.batch

    def _rate_ns(self, known: KnownChunks) -> float:
        """Time in ns per unit of a cut's axis; by chunks of the first cut until one was timed."""
        if known.rate_ns:
            return known.rate_ns
        return self._cuts[0].rate_ns * self.problem.batch / known.listed.axis.extent

    def requests(self, limit: int | None, tolerance: float = 0.0) -> list[Requests]:
        """What to ask of each cut within a limit."""
        whole = None if self.default is None else self.default.workspace_bytes
        # Neighbouring slabs read some input rows twice. So slabs are tried only if the limit
        # excludes torch's own convolution of the whole batch.
        by_rows = limit is not None and (whole is None or whole > limit)
        key = limit, tolerance, by_rows
        if key not in self._requests_within:
            self._requests_within[key] = [
                Requests(known.within(limit), max(tolerance, EQUALLY_FAST))
                for known in self._cuts
                if by_rows or not _is_by_rows(known)
            ]
        return self._requests_within[key]

    def _time_wanted(self, requests: Requests) -> bool:
        """Run the chunks that are wanted next; False if none is wanted or the time is over."""
        known = requests.known
        if self._is_over(requests):
            return False
        first_runs = self._in_time(known, requests.first_runs())
        for arm in first_runs:
            if self._is_over(requests):
                return False
            # An arm that ran just before may have been so fast that this one is ruled out.
            if requests.listed.curves[arm] in requests.elimination.reasons():
                continue
            if self._in_time(known, [arm]):
                self._look_at(known, arm)
        wanted = [] if first_runs else self._in_time(known, requests.wanted())
        wanted = wanted if self._measure(known, wanted) else []
        is_done = not first_runs and not wanted
        if (
            is_done
            and not self.lacks_time
            and requests.elimination.is_active
            and not requests.has_plan()
        ):
            # Now candidates that were ruled out as slow are measured, because the others make no
            # plan.
            requests.elimination.is_active = False
            return True
        return bool(first_runs or wanted)

    def _is_over(self, requests: Requests) -> bool:
        """True after the time for chunks; if a plan is still needed, after the time for races."""
        if not self.session.is_over:
            return False
        if self.session.race_until.is_over:
            return True
        # More time is given only if torch's own convolution does not fit, so that a plan is needed,
        # and only to the one cut that lists torch's own convolution.
        whole = requests.listed.default
        needs_plan = whole in requests.listed.by_arm and not requests.fits(whole)
        return not needs_plan or requests.has_plan()

    def _in_time(self, known: KnownChunks, arms: Iterable[Arm]) -> list[Arm]:
        """The arms whose next run is expected to end within the time budget."""
        listed, rate_ns = list(arms), self._rate_ns(known)
        found = [
            arm
            for arm in listed
            # A single run of torch's own convolution both checks and times it. Other candidates run
            # a second time to be timed.
            if self.session.end.has_time(1 if arm.is_default else 2, rate_ns * arm.size)
        ]
        self.lacks_time |= len(found) < len(listed)
        return found

    def _measure(self, known: KnownChunks, arms: Sequence[Arm]) -> bool:
        """Run each new candidate once, then race those that can still win; False if nothing ran."""
        looked = set[Arm]()
        for arm in arms:
            entry = known.by_arm.get(arm)
            if (entry is None or entry.status == "untimed") and self._in_time(known, [arm]):
                self._look_at(known, arm)
                looked.add(arm)
        # What is asked for again after its first run must be timed, however long that run was.
        racing = self._racing(known, arms, {arm for arm in arms if arm not in looked})
        if not racing:
            return bool(looked)
        # The factor of 2 below is there because each arm also runs before the first round.
        sizes = sum(arm.size for arm in racing)
        if not self.session.end.has_time(2, self._rate_ns(known) * sizes):
            self.lacks_time = True
            return bool(looked)
        results = self.bench(known.listed.axis).rounds(racing, known.best_times())
        # Beaten arms come last, because the fastest arm is kept with them.
        pairs = zip(racing, results, strict=True)
        for arm, result in sorted(pairs, key=lambda pair: pair[1].is_beaten):
            _settle(known, arm, result)
        return True

    def _racing(
        self, known: KnownChunks, arms: Sequence[Arm], needed: Collection[Arm]
    ) -> list[Arm]:
        """For each size and role of `arms`: all arms of that size and role that can still win.

        On a GPU, these are `needed` arms and those whose known time is near that of the best one.
        """
        shortest_ns = known.shortest_ns()

        def can_win(arm: Arm) -> bool:
            if not known.is_open(arm):
                return False
            if not self.session.is_on_gpu or arm in needed:
                return True
            time_ns = known.by_arm[arm].time_ns or 0
            return time_ns <= _STILL_RACES * shortest_ns[arm.size, arm.role]

        groups = {arm[::2] for arm in arms if can_win(arm)}
        return [arm for arm in known.by_arm if arm[::2] in groups and can_win(arm)]

    def _look_at(self, known: KnownChunks, arm: Arm) -> None:
        """Run a chunk for the first time; its time is not taken if it exceeds the limit."""
        key, candidate = known.key(arm), known.listed.by_arm[arm]
        rival_ns = known.shortest_ns().get((arm.size, arm.role), inf)
        try:
            look = self.bench(known.listed.axis).look(arm, known.limit, rival_ns)
        except CANDIDATE_ERRORS as error:
            kind, reason = failure_of(error)
            if kind == FailureKind.OUT_OF_MEMORY:
                known.skipped[arm] = reason
                return
            failed = replace(_not_run(key, candidate), status="failed", reason=reason, failure=kind)
            known.keep(arm, failed)
            return
        seen, state = _looked_at(_not_run(key, candidate), look), self.session.state()
        known.keep(arm, replace(seen, notes=seen.notes + state.notes, load=state.load))


def _is_by_rows(known: KnownChunks) -> bool:
    return known.listed.axis.name == RowAxis.name


def _settle(known: KnownChunks, arm: Arm, result: Result) -> None:
    """Keep the result of a race."""
    entry = known.by_arm[arm]
    if result.failure:
        kind, reason = result.failure
        # A candidate that ran out of memory is not kept as failed, because there may be more
        # memory at another time.
        if kind == FailureKind.OUT_OF_MEMORY:
            known.skipped[arm] = reason
            return
        known.keep(arm, Measurement(entry.key, "failed", reason=reason, failure=kind))
        return
    timed = replace(
        entry,
        status="screened" if result.is_beaten else "ok",
        lost_to=known.fastest(arm) if result.is_beaten else "",
        time_ns=median_ns(result.samples),
        spread_ns=spread_ns(result.samples),
        samples=tuple(result.samples),
        notes=entry.notes + result.state.notes,
        load=result.state.load,
    )
    known.keep(arm, timed)


@dataclass(eq=False)
class Requests:
    """Decides which small chunks must run first, and asks the solver what to time."""

    known: KnownChunks
    # The possible gain, as a fraction of the kernel's time, at which measuring ends.
    tolerance: float

    def __post_init__(self) -> None:
        known = self.known
        self.listed = known.listed
        roofline = known.session.roofline(known.listed.problem.dtype)
        self.elimination = Elimination(known, roofline)

    def wanted(self) -> list[Arm]:
        """Chunks to time next; empty if the best split is known precisely enough."""
        # Planning races the best split under each of these penalties, so each of these splits must
        # be known.
        for launch_ns in CHUNK_NS:
            missing = self.outlook(launch_ns).wanted
            if missing:
                return [Arm(one.batch, one.algorithm, one.role) for one in missing]
        return []

    def first_runs(self) -> list[Arm]:
        """Small chunks that must run before larger chunks of the same curve may run."""
        ruled_out = self.elimination.reasons()
        probes = [arm for arm in self._probes() if self.listed.curves[arm] not in ruled_out]
        # Runs for workspace come before runs for time, because chunks that exceed the limit need
        # not be timed.
        return probes or self.elimination.trials()

    def _probes(self) -> list[Arm]:
        """The smallest chunks of curves whose workspace must be known, but is not."""
        if not self.known.must_probe:
            return []
        # What a backend states need not be run, unless nothing is known to fit: then the runs show
        # the smallest limit that would suffice.
        must_run = not any(map(self.fits, self.listed.by_arm))
        # In another role an implementation may need another workspace, so one chunk of each role is
        # run.
        groups: dict[tuple[str, str], list[Arm]] = {}
        for arm, curve in self.listed.curves.items():
            entry = self.known.by_arm.get(arm)
            if arm not in self.known.skipped and (entry is None or entry.status != "failed"):
                groups.setdefault((curve, arm.role), []).append(arm)
        found = (self._probe(curve, arms, must_run) for (curve, _), arms in groups.items())
        return [arm for arm in found if arm is not None]

    def _probe(self, curve: str, arms: Sequence[Arm], must_run: bool) -> Arm | None:
        """The curve's smallest or second smallest arm, to run for its workspace; or None."""
        # Some chunks cannot be part of a split. They are run only if they may show that the whole
        # call fits.
        if not self.listed.lists(arms[0]) and not self._is_worth_telling(curve, arms[-1]):
            return None
        known = sum(map(self.fits, arms))
        if not known:
            is_stated = self.listed.by_arm[arms[0]].workspace_bytes is not None
            return None if is_stated and not must_run else self._first(curve, arms)
        # Workspace is extrapolated from one size in proportion, and from two sizes on a line.
        return self._second(arms) if known == 1 else None

    def _first(self, curve: str, arms: Sequence[Arm]) -> Arm | None:
        """The smallest arm; None if it ran, or if it is the whole call and smaller ones exist."""
        first, curves, whole = arms[0], self.listed.curves, self.listed.axis.extent
        if first in self.known.by_arm:
            return None
        # If an implementation has smaller chunks, the whole call is not the first to run, because
        # it may need more memory than there is.
        smaller = any(arm.size < whole for arm, name in curves.items() if name == curve)
        return None if first.size == whole and smaller else first

    def _second(self, arms: Sequence[Arm]) -> Arm | None:
        """The second smallest arm, if the smallest does not show that the whole call fits."""
        whole = arms[-1]
        if whole.size != self.listed.axis.extent or whole in self.known.by_arm:
            return None
        second = arms[min(1, len(arms) - 1)]
        # If a split may contain the second arm, it need not run here: the solver asks for it if
        # needed.
        if self.known.can_be_run(whole) or self.listed.lists(second):
            return None
        return second if self.known.can_be_run(second) else None

    def _is_worth_telling(self, curve: str, whole: Arm) -> bool:
        """True if small chunks in role ALONE are needed to show whether the undivided call fits."""
        if not self.known.may_fit(whole) or self.known.can_be_run(whole):
            return False
        return any(
            name == curve and arm.role != whole.role and arm in self.known.by_arm
            for arm, name in self.listed.curves.items()
        )

    def has_plan(self) -> bool:
        """True if the timed chunks suffice for a plan."""
        return self.outlook().time_ns is not None

    def outlook(self, launch_ns: int = 0) -> Outlook:
        """The best split of the timed chunks, a bound for better ones, and what to time next."""
        options = list(self._options())
        # No split may contain chunks that take too little time to be worth their calls; their times
        # bound those of other chunks. A chunk that is the whole call stays, because no split has
        # fewer calls. A chunk that was not timed stays, too, because it may take long enough.
        least_ns = worthwhile_ns(self.known.session.backend.device().type)
        worthwhile = [
            option
            if Role.ALONE in option.lists or not option.is_timed or _time_ns(option) >= least_ns
            else replace(option, lists=())
            for option in options
        ]
        extent = self.listed.axis.extent
        ask = partial(outlook, batch=extent, launch_ns=launch_ns, tolerance=self.tolerance)
        found = ask(worthwhile, least_ns=least_ns)
        # If no split without short chunks fits the limit, short chunks are allowed.
        if found.bound_ns is None:
            found = ask(options)
        return found

    def _options(self) -> Iterator[ChunkOption]:
        """Chunks that the solver may choose among, and measured ones that bound their times."""
        ruled_out = self.elimination.reasons()
        for arm in self.listed.by_arm:
            entry = self.known.by_arm.get(arm)
            is_out = arm in self.known.skipped or (entry is not None and entry.status == "failed")
            # A chunk that was measured before its curve was ruled out stays, because its time
            # bounds those of other sizes.
            if self.listed.curves[arm] in ruled_out and entry is None:
                is_out = True
            if not is_out:
                option = self._option(arm, entry, self.listed.curves[arm] not in ruled_out)
                if option.lists or option.interval is not None:
                    yield option

    def _option(self, arm: Arm, entry: Measurement | None, may_matter: bool) -> ChunkOption:
        """An arm as an option for the solver; it has no positions if no split may contain it."""
        has_lost = entry is not None and self.known.has_lost(arm, entry)
        may_matter = may_matter and not has_lost and self._is_allowed(arm, entry)
        return ChunkOption(
            arm.size,
            arm.algorithm,
            self.listed.curves[arm],
            self.listed.lists(arm) if may_matter else (),
            None if entry is None else interval_of(entry),
            entry is not None and entry.status == "ok",
            self.known.expected_bytes(arm) or 0,
            rank_of(arm.algorithm, self.listed.by_arm[arm].is_deterministic),
            arm.role,
            self.elimination.least_ns(arm) if entry is None else 0,
        )

    def _is_allowed(self, arm: Arm, entry: Measurement | None) -> bool:
        # A measured workspace only has to fit the limit. An expected workspace must also be small
        # enough to be tried on this machine.
        if entry is not None and entry.workspace_bytes is not None:
            return self.known.is_allowed(arm, entry)
        workspace = self.known.expected_bytes(arm)
        return workspace is not None and self.known.may_run(arm, workspace)

    def fits(self, arm: Arm) -> bool:
        """True for a candidate whose workspace is known and within the limit."""
        return self.known.fits(arm, self.known.known_bytes(arm))

    def certificate(self) -> tuple[str, ...]:
        """Notes for the plan: the number of timed candidates, and what could still be gained."""
        # Chunks that no split may contain do not count as candidates, whether timed or not.
        options = [arm for arm in self.listed.by_arm if self.listed.lists(arm)]
        entries = [self.known.by_arm.get(arm) for arm in options]
        timed = sum(entry is not None and entry.time_ns is not None for entry in entries)
        gap = (
            f"no split along the {self.listed.axis.name} axis is faster by more than "
            f"{self.outlook().gap:.1%} if the assumptions of lazy measuring hold"
        )
        return f"timed {timed} of {len(options)} candidates", gap

    @property
    def ruled_out(self) -> list[tuple[str, str]]:
        """Algorithms that need not be measured further, each with a sentence that says why."""
        arms_by_curve = self.listed.arms_by_curve
        return [
            (arms_by_curve[curve][0].algorithm, sentence)
            for curve, sentence in self.elimination.reasons().items()
        ]


def _time_ns(option: ChunkOption) -> int:
    return 0 if option.interval is None else option.interval.time_ns


def _not_run(key: MeasurementKey, candidate: Candidate) -> Measurement:
    return Measurement(
        key,
        "untimed",
        notes=candidate.notes,
        implementation=candidate.implementation,
        is_deterministic=candidate.is_deterministic,
        adds_bias=candidate.adds_bias,
    )


def _looked_at(before: Measurement, look: Look) -> Measurement:
    key, error, allowed = before.key, look.error, allowed_error(before.key.problem)
    seen = replace(before, workspace_bytes=look.workspace_bytes, error=error)
    if not error <= allowed:
        what = (
            "left elements unwritten, or computed some that are not finite"
            if error == float("inf")
            else f"is wrong by {error:.2g} relative to float64, at most {allowed:.2g} is rounding"
        )
        reason = f"its result {what}"
        warn(
            f"{key.algorithm} is disqualified for {key.problem}, role {key.conditions.role}: "
            f"{reason}",
            WrongResultWarning,
        )
        return replace(seen, status="failed", reason=reason, failure=FailureKind.WRONG)
    if look.time_ns is None:
        return seen
    return replace(
        seen, status="screened", time_ns=look.time_ns, spread_ns=0, samples=(look.time_ns,)
    )
