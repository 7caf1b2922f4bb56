"""Measure what one kernel's plan needs: the solver asks for chunks, the cache or a bench answers.

What to measure next follows from the measurements alone. So the same cache leads to the same
decisions, and a second tune measures nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ucudnn.axis import AbstractAxis
from ucudnn.benchmark.accuracy import allowed_error
from ucudnn.benchmark.bench import AbstractBench, Arm, Look
from ucudnn.benchmark.rounds import Result, failure_of
from ucudnn.benchmark.statistics import median_ns, spread_ns
from ucudnn.benchmark.worker import LostError
from ucudnn.errors import WrongResultWarning, warn
from ucudnn.measurement import Candidate, Measurement, MeasurementKey, is_perturbation
from ucudnn.plan import DEFAULT_ALGORITHM
from ucudnn.solvers.lazy import Outlook
from ucudnn.system.forking import cached_property
from ucudnn.tuning.candidates import KernelCandidates
from ucudnn.tuning.elimination import Elimination
from ucudnn.tuning.records import BEATEN, KernelRecords
from ucudnn.tuning.requests import TOLERANCE, Requests
from ucudnn.tuning.session import Session
from ucudnn.tuning.trials import Trials
from ucudnn.tuning.workspace_model import must_be_known


class KernelMeasurer:
    """Measures the candidates of one kernel that its best split may need.

    Args:
        session: the device and the cache.
        axis: of the kernel, along which it is split.
        limit: workspace in bytes, None for any.
        sizes: of the chunks that a split may have.
        max_error: relative error (L2) that a candidate may have, None: any that is not wrong.
        adds_bias: measure those candidates that add a bias, too, and no others.
        tolerance: the possible gain, as a fraction of the kernel's time, at which measuring ends.
    """

    def __init__(
        self,
        session: Session,
        axis: AbstractAxis,
        limit: int | None,
        sizes: Iterable[int] = (),
        max_error: float | None = None,
        adds_bias: bool = False,
        tolerance: float = TOLERANCE,
    ) -> None:
        self._session = session
        self._axis = axis
        self._limit = limit
        must_probe = must_be_known(axis.problem, limit, session.backend.memory_bytes())
        listed = KernelCandidates(session, axis, sizes, adds_bias, extrapolates=must_probe)
        records = KernelRecords(session, listed, limit, max_error)
        roofline = session.roofline(axis.problem.dtype)
        elimination = Elimination(
            listed, records.by_arm, records.workspaces, records.is_allowed, roofline
        )
        self._listed = listed
        self._records = records
        self._elimination = elimination
        self._trials = Trials(listed, records, elimination, must_probe)
        self._requests = Requests(session, listed, records, elimination, limit, tolerance)

    @cached_property
    def bench(self) -> AbstractBench:
        """Bench of the kernel, made when something must be run."""
        return self._session.bench(self._axis)

    def release(self) -> None:
        """Give the operands back; they are made anew where something is run again."""
        self.__dict__.pop("bench", None)

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to measure."""
        return not self._listed.by_arm

    @property
    def measurements(self) -> list[Measurement]:
        """Everything known of the candidates, by size."""
        return [entry for _, entry in self._records.by_size()]

    @property
    def usable(self) -> list[Measurement]:
        """Measurements in full that fit and are exact enough."""
        return self._records.usable

    def look_at_default(self) -> Measurement | None:
        """Torch's own convolution of the whole batch as it was first run; None where it fails.

        That first time is kept apart from later, better ones: what a second tune decides by it must
        be what the first one did.
        """
        arm = Arm(self._listed.problem.batch, DEFAULT_ALGORITHM, "alone")
        kept_as = self._session.key(
            self._listed.problem, f"plan[{arm.size} {arm.algorithm}] run first"
        )
        counts = self._session.effort.ignored_share > 0  # only then anything is decided by it
        first = self._session.find(kept_as) if counts else None
        if first is not None:
            return first
        known = self._session.find(self._session.key(self._listed.problem, arm.algorithm))
        if known is None and arm in self._listed.by_arm:
            self._look_at(arm, limit=None)
            known = self._records.by_arm.get(arm)
        if known is None or known.time_ns is None:
            return None
        if not counts:
            return known
        first = replace(known, key=kept_as)
        self._session.note(first)
        return first

    def step(self) -> bool:
        """Measure what is wanted next; False where nothing is, or there is no more time."""
        self._records.recall()
        if self._session.is_over:
            return False
        first_runs = self._trials.wanted()
        for arm in first_runs:
            if self._session.is_over:
                return False
            # the ones before it may have been that much faster
            if self._listed.curves[arm] not in self._elimination.reasons():
                self._look_at(arm, self._limit)
        wanted = [] if first_runs else self._requests.wanted()
        self._measure(wanted)
        if not first_runs and not wanted and self._elimination.is_active and not self.usable:
            self._elimination.is_active = False  # what is left may be slow, but nothing else fits
            return True
        return bool(first_runs or wanted)

    def outlook(self) -> Outlook:
        """Gap estimate of the best split of the timed chunks."""
        return self._requests.outlook()

    def certificate(self) -> tuple[str, ...]:
        """Counts of timed candidates and the gap that is left, for the notes of a plan."""
        # Those that only tell about others are no candidates, whether they were timed or not.
        options = [arm for arm in self._listed.by_arm if self._listed.lists(arm)]
        entries = [self._records.by_arm.get(arm) for arm in options]
        timed = sum(entry is not None and entry.time_ns is not None for entry in entries)
        gap = (
            f"no split along the {self._axis.name} axis is faster by more than "
            f"{self.outlook().gap:.1%} if the assumptions of lazy measuring hold"
        )
        ruled_out = self._elimination.reasons().values()
        return f"timed {timed} of {len(options)} candidates", *ruled_out, gap

    def _measure(self, arms: Sequence[Arm]) -> None:
        """Look at what was never run, then race what is not hopeless."""
        for arm in arms:
            entry = self._records.by_arm.get(arm)
            if entry is None or entry.status == "untimed":
                self._look_at(arm, self._limit)
        groups = {arm[::2] for arm in arms if self._records.is_open(arm)}
        racing = [
            arm for arm in self._records.by_arm if arm[::2] in groups and self._records.is_open(arm)
        ]
        if not racing:
            return
        results = self.bench.rounds(racing, self._records.best_times())
        for arm, result in zip(racing, results, strict=True):
            winner = result.beaten_by
            while winner is not None and winner >= 0 and results[winner].beaten_by is not None:
                winner = results[winner].beaten_by  # who was faster yet
            self._settle(arm, result, None if winner is None or winner < 0 else racing[winner])

    def _settle(self, arm: Arm, result: Result, winner: Arm | None) -> None:
        entry = self._records.by_arm[arm]
        if result.failure:
            self._records.keep(arm, Measurement(entry.key, "failed", reason=result.failure))
            return
        reason = ""
        if result.beaten_by is not None:
            reason = BEATEN + (winner or self._records.fastest(arm)).algorithm
        disturbed = f"{result.repeated} rounds repeated, {result.switches} switches in the others"
        timed = replace(
            entry,
            status="screened" if reason else "ok",
            reason=reason,
            time_ns=median_ns(result.samples),
            spread_ns=spread_ns(result.samples),
            samples=tuple(result.samples),
            notes=(
                *(note for note in entry.notes if not is_perturbation(note)),
                *((disturbed,) if result.repeated else ()),
                *result.state,
            ),
        )
        self._records.keep(arm, timed)

    def _look_at(self, arm: Arm, limit: int | None) -> None:
        key, candidate = self._records.key(arm), self._listed.by_arm[arm]
        try:
            look = self.bench.look(arm, limit)
        except RuntimeError as error:
            reason = failure_of(error)
            lost = isinstance(error, LostError)  # "an illegal memory access" is no lack of memory
            if "memory" in reason and not lost:  # which there may be at another time
                self._records.skipped.add(arm)
                return
            self._records.keep(
                arm, Measurement(key, "failed", reason=reason, notes=candidate.notes)
            )
            return
        seen = _looked_at(key, candidate, look)
        self._records.keep(arm, replace(seen, notes=seen.notes + self._session.state()))


def _looked_at(key: MeasurementKey, candidate: Candidate, look: Look) -> Measurement:
    error, allowed = look.accuracy.error, allowed_error(key.problem)
    notes = (*candidate.notes, f"max_ulp={look.accuracy.ulp:.3g}")
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
        workspace = look.workspace_bytes
        return Measurement(
            key, "failed", workspace_bytes=workspace, error=error, reason=reason, notes=notes
        )
    if look.time_ns is None:
        return Measurement(
            key, "untimed", workspace_bytes=look.workspace_bytes, error=error, notes=notes
        )
    return Measurement(
        key, "screened", look.time_ns, 0, (look.time_ns,), look.workspace_bytes, error, notes=notes
    )
