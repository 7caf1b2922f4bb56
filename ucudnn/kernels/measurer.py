"""Measure those chunks of one kernel that the solver asks for and that are not in the cache.

What to measure next follows from the measurements alone. So the same cache leads to the same
decisions, and once tuning has ended by itself, a second tune measures nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from math import inf

from ucudnn.axis import AbstractAxis
from ucudnn.benchmark.accuracy import allowed_error
from ucudnn.benchmark.bench import AbstractBench, Arm, Look
from ucudnn.benchmark.failures import CANDIDATE_ERRORS, failure_of
from ucudnn.benchmark.rounds import Result
from ucudnn.benchmark.statistics import median_ns, spread_ns
from ucudnn.errors import WrongResultWarning, warn
from ucudnn.kernels.bounds import Elimination, must_be_known
from ucudnn.kernels.candidates import KernelCandidates
from ucudnn.kernels.requests import KernelRecords, Requests
from ucudnn.kernels.session import Session
from ucudnn.measurement import Candidate, FailureKind, Measurement, MeasurementKey, Subject
from ucudnn.solvers.lazy import Outlook
from ucudnn.system.processes import cached_property
from ucudnn.verdict import EQUALLY_FAST

# On a GPU, a candidate enters a race if its first time is at most this many times the best one. The
# first time is the shortest of three, from which medians on an H100 differ by 1 %.
_STILL_RACES = 1.25


class KernelMeasurer:
    """Measures the candidates of one kernel that its best split may need."""

    def __init__(
        self,
        session: Session,
        axis: AbstractAxis,
        limit: int | None,
        sizes: Iterable[int] = (),
        max_error: float | None = None,
        adds_bias: bool = False,
        tolerance: float = EQUALLY_FAST,
        deterministic: bool = False,
        like: KernelMeasurer | None = None,
    ) -> None:
        self._session = session
        self._axis = axis
        # The measurer of another cut of the same kernel. Until this measurer has timed a chunk, the
        # other one's time per sample is used for estimates.
        self._like = like
        self._limit = limit
        must_probe = must_be_known(axis.problem, limit, session.backend.memory_bytes())
        self._listed = KernelCandidates(session, axis, sizes, adds_bias, must_probe, deterministic)
        self._records = records = KernelRecords(
            session, self._listed, limit, max_error, deterministic
        )
        self._elimination = Elimination(
            self._listed,
            records.by_arm,
            records.workspaces,
            records.is_allowed,
            session.roofline(axis.problem.dtype),
        )
        self._requests = Requests(
            self._listed, records, self._elimination, max(tolerance, EQUALLY_FAST), must_probe
        )
        # True if a chunk was not measured because it would have ended after the time budget.
        self.lacks_time = False

    @cached_property
    def bench(self) -> AbstractBench:
        """Bench of the kernel, made when a chunk or a whole call must be run."""
        return self._session.bench(self._axis)

    def release(self) -> None:
        """Free the operands; the next run allocates them again."""
        self.__dict__.pop("bench", None)

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to measure."""
        return not self._listed.by_arm

    @property
    def measurements(self) -> list[Measurement]:
        """All measurements of the candidates, by size."""
        return [entry for _, entry in self._records.by_size()]

    @property
    def usable(self) -> list[Measurement]:
        """Complete measurements of candidates that fit and are exact enough."""
        return [one for arm, one in self._records.by_size() if self._records.is_usable(arm, one)]

    @property
    def timed(self) -> list[Measurement]:
        """Measurements of candidates that fit and are exact enough, timed in full or once."""
        self._records.recall()
        entries = self._records.by_size()
        return [one for arm, one in entries if one.time_ns and self._records.is_allowed(arm, one)]

    def hoped_front(self) -> list[tuple[int, int]]:
        """Points (workspace, lower bound of the time of every split within that workspace)."""
        self._records.recall()
        return self._requests.hoped_front()

    def look_at_default(self) -> Measurement | None:
        """First measurement of torch's own convolution of the whole batch.

        None if the convolution fails or there is no time for it. The time of the first run is
        cached apart from later, more precise times, so that a second tune decides by the same time
        as the first tune.
        """
        arm = self._listed.default
        own = self._session.key(self._listed.problem, arm.algorithm)
        # The first run has its own key, so that a later, more precise time does not replace it.
        kept_as = replace(own, subject=Subject.FIRST_RUN)
        counts = self._session.effort.ignored_share > 0  # else nothing depends on this time
        first = self._session.find(kept_as) if counts else None
        if first is not None:
            return first
        known = self._session.find(own)
        if known is None and arm in self._listed.by_arm:
            # Read the times of chunks from the cache: they show whether the time budget suffices to
            # run the whole batch.
            self._records.recall()
            if self._session.is_over or not self._in_time([arm]):
                return None
            self._look_at(arm, limit=None)
            known = self._records.by_arm.get(arm)
        if known is None or known.time_ns is None:
            return None
        if not counts:
            return known
        first = replace(known, key=kept_as)
        self._session.note(first)
        return first

    def look_at_chunks(self, most: int) -> None:
        """Run torch's own convolution once for the largest chunks of at most `most` samples."""
        self._records.recall()
        size = max((size for size in self._listed.sizes if size <= most), default=None)
        for arm in self._listed.by_arm:
            is_wanted = arm.is_default and bool(self._listed.lists(arm))
            is_new = arm not in self._records.by_arm
            if arm.size == size and is_wanted and is_new and self._in_time([arm]):
                self._look_at(arm, self._limit)

    def step(self) -> bool:
        """Measure the chunks wanted next; False if no chunk is wanted or the time is over."""
        self._records.recall()
        if self._is_over():
            return False
        first_runs = self._in_time(self._requests.first_runs())
        for arm in first_runs:
            if self._is_over():
                return False
            # An arm that ran just before may have been so fast that this one is ruled out.
            if self._listed.curves[arm] in self._elimination.reasons():
                continue
            if self._in_time([arm]):
                self._look_at(arm, self._limit)
        wanted = [] if first_runs else self._in_time(self._requests.wanted())
        wanted = wanted if self._measure(wanted) else []
        is_done = not first_runs and not wanted
        if is_done and self._elimination.is_active and not self._requests.has_plan():
            # Now candidates that were ruled out as slow are measured, because the others make no
            # plan.
            self._elimination.is_active = False
            return True
        return bool(first_runs or wanted)

    @property
    def lack_of_memory(self) -> str:
        """Why a chunk could not be run for lack of memory; "" if there was enough."""
        return next(iter(self._records.skipped.values()), "")

    def _is_over(self) -> bool:
        """True after the time for chunks; if a plan is still needed, after the time for races."""
        if not self._session.is_over:
            return False
        if self._session.race_until.is_over:
            return True
        # More time is given only if torch's own convolution does not fit, so that a plan is needed,
        # and only to the one cut that lists torch's own convolution.
        whole = self._listed.default
        needs_plan = whole in self._listed.by_arm and not self._records.fits(whole)
        return not needs_plan or self._requests.has_plan()

    def outlook(self) -> Outlook:
        """The best split of the timed chunks, with a bound of how much a better one could save."""
        return self._requests.outlook()

    def certificate(self) -> tuple[str, ...]:
        """Notes for the plan: the number of timed candidates, and what could still be gained."""
        # Chunks that no split may contain do not count as candidates, whether timed or not.
        options = [arm for arm in self._listed.by_arm if self._listed.lists(arm)]
        entries = [self._records.by_arm.get(arm) for arm in options]
        timed = sum(entry is not None and entry.time_ns is not None for entry in entries)
        gap = (
            f"no split along the {self._axis.name} axis is faster by more than "
            f"{self.outlook().gap:.1%} if the assumptions of lazy measuring hold"
        )
        return f"timed {timed} of {len(options)} candidates", gap

    @property
    def ruled_out(self) -> list[tuple[str, str]]:
        """Algorithms that need not be measured further, each with a sentence that says why."""
        arms_by_curve = self._listed.arms_by_curve
        return [
            (arms_by_curve[curve][0].algorithm, sentence)
            for curve, sentence in self._elimination.reasons().items()
        ]

    @property
    def whole_ns(self) -> float:
        """Time in ns of the whole kernel at the rate of its fastest timed chunk; 0 if none is."""
        known = self._records.by_arm.items()
        rates = [entry.time_ns / arm.size for arm, entry in known if entry.time_ns]
        if not rates and self._like is not None:
            return self._like.whole_ns
        return min(rates, default=0.0) * self._listed.axis.extent

    def _in_time(self, arms: Iterable[Arm]) -> list[Arm]:
        """The arms whose next run is expected to end within the time budget."""
        listed, per_size_ns = list(arms), self.whole_ns / self._listed.axis.extent
        found = [
            arm
            for arm in listed
            # A single run of torch's own convolution both checks and times it. Other candidates run
            # a second time to be timed.
            if self._session.end.has_time(1 if arm.is_default else 2, per_size_ns * arm.size)
        ]
        self.lacks_time |= len(found) < len(listed)
        return found

    def _measure(self, arms: Sequence[Arm]) -> bool:
        """Run each new candidate once, then race those that can still win; False if nothing ran."""
        looked = set[Arm]()
        for arm in arms:
            entry = self._records.by_arm.get(arm)
            if (entry is None or entry.status == "untimed") and self._in_time([arm]):
                self._look_at(arm, self._limit)
                looked.add(arm)
        # What is asked for again after its first run must be timed, however long that run was.
        racing = self._racing(arms, {arm for arm in arms if arm not in looked})
        if not racing:
            return bool(looked)
        # The factor of 2 below is there because each arm also runs before the first round.
        sizes = sum(arm.size for arm in racing)
        if not self._session.end.has_time(2, self.whole_ns * sizes / self._listed.axis.extent):
            self.lacks_time = True
            return bool(looked)
        results = self.bench.rounds(racing, self._records.best_times())
        for arm, result in zip(racing, results, strict=True):
            winner = _winner_over(result, results)
            self._settle(arm, result, None if winner is None else racing[winner])
        return True

    def _racing(self, arms: Sequence[Arm], needed: Collection[Arm]) -> list[Arm]:
        """For each size and role of `arms`: all arms of that size and role that can still win.

        On a GPU, these are `needed` arms and those whose known time is near that of the best one.
        """
        shortest_ns = self._records.shortest_ns()

        def can_win(arm: Arm) -> bool:
            if not self._records.is_open(arm):
                return False
            if not self._session.is_on_gpu or arm in needed:
                return True
            time_ns = self._records.by_arm[arm].time_ns or 0
            return time_ns <= _STILL_RACES * shortest_ns[arm.size, arm.role]

        groups = {arm[::2] for arm in arms if can_win(arm)}
        return [arm for arm in self._records.by_arm if arm[::2] in groups and can_win(arm)]

    def _settle(self, arm: Arm, result: Result, winner: Arm | None) -> None:
        entry = self._records.by_arm[arm]
        if result.failure:
            kind, reason = result.failure
            # A candidate that ran out of memory is not kept as failed, because there may be more
            # memory at another time.
            if kind == FailureKind.OUT_OF_MEMORY:
                self._records.skipped[arm] = reason
                return
            self._records.keep(arm, Measurement(entry.key, "failed", reason=reason, failure=kind))
            return
        lost_to = ""
        if result.beaten_by is not None:
            lost_to = (winner or self._records.fastest(arm)).algorithm
        timed = replace(
            entry,
            status="screened" if lost_to else "ok",
            lost_to=lost_to,
            time_ns=median_ns(result.samples),
            spread_ns=spread_ns(result.samples),
            samples=tuple(result.samples),
            notes=entry.notes + result.state.notes,
            load=result.state.load,
        )
        self._records.keep(arm, timed)

    def _look_at(self, arm: Arm, limit: int | None) -> None:
        key, candidate = self._records.key(arm), self._listed.by_arm[arm]
        rival_ns = self._records.shortest_ns().get((arm.size, arm.role), inf)
        try:
            look = self.bench.look(arm, limit, rival_ns)
        except CANDIDATE_ERRORS as error:
            kind, reason = failure_of(error)
            if kind == FailureKind.OUT_OF_MEMORY:
                self._records.skipped[arm] = reason
                return
            failed = replace(_not_run(key, candidate), status="failed", reason=reason, failure=kind)
            self._records.keep(arm, failed)
            return
        seen, state = _looked_at(_not_run(key, candidate), look), self._session.state()
        self._records.keep(arm, replace(seen, notes=seen.notes + state.notes, load=state.load))


def _winner_over(result: Result, results: Sequence[Result]) -> int | None:
    """Index of the unbeaten arm that beat a result's arm; None if no arm of the race did."""
    winner = result.beaten_by
    # The arm that won against this one may itself have been beaten by a faster arm.
    while winner is not None and winner >= 0 and results[winner].beaten_by is not None:
        winner = results[winner].beaten_by
    # A negative index stands for a rival that took part with a time from before this race.
    return None if winner is None or winner < 0 else winner


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
