"""Measure what one kernel's plan needs: the solver asks for chunks, the cache or a bench answers.

What to measure next follows from the measurements alone. So the same cache leads to the same
decisions, and a second tune measures nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from ucudnn.axis import AbstractAxis
from ucudnn.benchmark.accuracy import allowed_error
from ucudnn.benchmark.bench import AbstractBench, Arm, Look
from ucudnn.benchmark.rounds import Result, failure_of
from ucudnn.benchmark.statistics import median_interval, median_ns, spread_ns
from ucudnn.benchmark.worker import LostError
from ucudnn.measurement import Candidate, Measurement, MeasurementKey, is_perturbation
from ucudnn.plan import DEFAULT_ALGORITHM
from ucudnn.solvers.lazy import Interval, Option, Outlook, outlook
from ucudnn.system.forking import cached_property
from ucudnn.tuning.candidates import KernelCandidates
from ucudnn.tuning.elimination import Elimination
from ucudnn.tuning.items import rank_of
from ucudnn.tuning.session import Session
from ucudnn.tuning.solve import CHUNK_NS, WORTHWHILE_NS, uncovered_batches
from ucudnn.tuning.workspace_model import WorkspaceModel, must_be_known

# A split that is this close to the fastest is close enough: finals could not tell them apart.
TOLERANCE = 0.02
# Why a candidate was not timed in full: the reason names the algorithm that it lost against.
_BEATEN = "beaten by "


class WrongResultWarning(UserWarning):
    """A candidate computed something else than the convolution, and is out."""


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
        self._problem = axis.problem
        self._limit = limit
        self._max_error = max_error
        self._tolerance = max(tolerance, TOLERANCE)
        self._records: dict[Arm, Measurement] = {}
        self._skipped: set[Arm] = set()
        memory = session.backend.memory_bytes()
        self._must_probe = must_be_known(axis.problem, limit, memory)
        listed = KernelCandidates(session, axis, sizes, adds_bias, extrapolates=self._must_probe)
        self._listed = listed
        self._workspaces = WorkspaceModel(listed, self._records, limit, memory)
        roofline = session.roofline(axis.problem.dtype)
        self._elimination = Elimination(
            listed, self._records, self._workspaces, self._fits_and_is_exact, roofline
        )

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
        return [entry for _, entry in self._by_size()]

    def _by_size(self) -> list[tuple[Arm, Measurement]]:
        return [(arm, self._records[arm]) for arm in self._listed.by_arm if arm in self._records]

    @property
    def usable(self) -> list[Measurement]:
        """Measurements in full that fit and are exact enough."""
        return [entry for arm, entry in self._by_size() if self._is_usable(arm, entry)]

    def look_at_default(self) -> Measurement | None:
        """Torch's own convolution of the whole batch as it was first run; None where it fails.

        That first time is kept apart from later, better ones: what a second tune decides by it must
        be what the first one did.
        """
        arm = Arm(self._problem.batch, DEFAULT_ALGORITHM, "alone")
        kept_as = self._session.key(self._problem, f"plan[{arm.size} {arm.algorithm}] run first")
        counts = self._session.effort.ignored_share > 0  # only then anything is decided by it
        first = self._session.find(kept_as) if counts else None
        if first is not None:
            return first
        known = self._session.find(self._session.key(self._problem, arm.algorithm))
        if known is None and arm in self._listed.by_arm:
            self._look_at(arm, limit=None)
            known = self._records.get(arm)
        if known is None or known.time_ns is None:
            return None
        if not counts:
            return known
        first = replace(known, key=kept_as)
        self._session.note(first)
        return first

    def step(self) -> bool:
        """Measure what is wanted next; False where nothing is, or there is no more time."""
        self._recall()
        if self._session.is_over:
            return False
        first_runs = self._first_runs()
        for arm in first_runs:
            if self._session.is_over:
                return False
            # the ones before it may have been that much faster
            if self._listed.curves[arm] not in self._elimination.reasons():
                self._look_at(arm, self._limit)
        wanted = [] if first_runs else self._wanted()
        self._measure(wanted)
        if not first_runs and not wanted and self._elimination.is_active and not self.usable:
            self._elimination.is_active = False  # what is left may be slow, but nothing else fits
            return True
        return bool(first_runs or wanted)

    def outlook(self, launch_ns: int = 0) -> Outlook:
        """Gap estimate of the best split of the timed chunks, and the chunks to time next."""
        options = list(self._options())
        worthwhile = [
            option
            for option in options
            if "alone" in option.lists or not option.is_timed or _time_ns(option) >= WORTHWHILE_NS
        ]
        extent = self._axis.extent
        ask = partial(outlook, batch=extent, launch_ns=launch_ns, tolerance=self._tolerance)
        found = ask(worthwhile, least_ns=WORTHWHILE_NS)
        if found.bound_ns is None:  # nothing else fits: then short chunks are allowed
            found = ask(options)
        return found

    def certificate(self) -> tuple[str, ...]:
        """Counts of timed candidates and the gap that is left, for the notes of a plan."""
        timed = sum(entry.time_ns is not None for entry in self.measurements)
        gap = (
            f"no split along the {self._axis.name} axis is faster by more than "
            f"{self.outlook().gap:.1%} if the assumptions of lazy measuring hold"
        )
        options = sum(bool(self._listed.lists(arm)) for arm in self._listed.by_arm)
        ruled_out = self._elimination.reasons().values()
        return f"timed {timed} of {options} candidates", *ruled_out, gap

    def _recall(self) -> None:
        """Take in what the cache has, and what was measured for a kernel that shares it."""
        for arm in self._listed.by_arm:
            known = self._session.find(self._key(arm))
            if known is not None:
                self._records[arm] = self._session.reuse(known)

    def _key(self, arm: Arm) -> MeasurementKey:
        return self._session.key(self._listed.part(arm.size), arm.algorithm, arm.role)

    def _is_usable(self, arm: Arm, entry: Measurement) -> bool:
        return entry.status == "ok" and self._fits_and_is_exact(arm, entry)

    def _fits_and_is_exact(self, arm: Arm, entry: Measurement) -> bool:
        if entry.workspace_bytes is None:
            return False
        if not self._workspaces.fits(arm, entry.workspace_bytes):
            return False
        return self._max_error is None or (entry.error or 0.0) <= self._max_error

    def _options(self) -> Iterator[Option]:
        """Chunks that the solver may choose among, and measured ones that tell about them."""
        ruled_out = self._elimination.reasons()
        for arm in self._listed.by_arm:
            entry = self._records.get(arm)
            is_out = arm in self._skipped or (entry is not None and entry.status == "failed")
            if self._listed.curves[arm] in ruled_out and entry is None:
                is_out = True
            if not is_out:
                option = self._option(arm, entry, self._listed.curves[arm] not in ruled_out)
                if option.lists or option.interval is not None:
                    yield option

    def _option(self, arm: Arm, entry: Measurement | None, may_matter: bool) -> Option:
        """An arm as the solver sees it; no part of any split where it may not be one."""
        workspace = self._workspaces.expected(arm)
        if entry is not None and entry.workspace_bytes is not None:
            is_allowed = self._fits_and_is_exact(arm, entry) and not self._has_lost(arm, entry)
        else:
            is_allowed = workspace is not None and self._workspaces.may_run(arm, workspace)
        return Option(
            arm.size,
            arm.algorithm,
            self._listed.curves[arm],
            self._listed.lists(arm) if is_allowed and may_matter else (),
            None if entry is None else _interval(entry),
            entry is not None and entry.status == "ok",
            workspace or 0,
            rank_of(arm.algorithm, self._listed.by_arm[arm].notes),
            arm.size in self._listed.even_sizes,
            arm.role,
            self._elimination.least_ns(arm) if entry is None else 0,
        )

    def _has_lost(self, arm: Arm, entry: Measurement) -> bool:
        """True if it lost its race against one that counts under this limit, too."""
        if entry.status != "screened" or not entry.reason.startswith(_BEATEN):
            return False
        rival = arm._replace(algorithm=entry.reason.removeprefix(_BEATEN))
        winner = self._records.get(rival)
        return winner is not None and self._is_usable(rival, winner)

    def _first_runs(self) -> list[Arm]:
        """Small chunks that must run before larger ones of their curves may."""
        ruled_out = self._elimination.reasons()
        probes = [arm for arm in self._probes() if self._listed.curves[arm] not in ruled_out]
        return probes or self._elimination.trials()

    def _probes(self) -> list[Arm]:
        """The smallest chunks of curves of which no workspace is known though it must be."""
        if not self._must_probe:
            return []
        groups: dict[tuple[str, str], list[Arm]] = {}
        for arm, curve in self._listed.curves.items():
            entry = self._records.get(arm)
            if arm not in self._skipped and (entry is None or entry.status != "failed"):
                groups.setdefault((curve, arm.role), []).append(arm)
        found = (self._probe(curve, arms) for (curve, _), arms in groups.items())
        return [arm for arm in found if arm is not None]

    def _probe(self, curve: str, arms: Sequence[Arm]) -> Arm | None:
        """The first to look at of a curve's arms of one role; a second if that helps the whole."""
        workspaces, curves, whole = self._workspaces, self._listed.curves, self._axis.extent
        known = [
            arm
            for arm in arms
            for workspace in [workspaces.known(arm)]
            if workspace is not None and workspaces.fits(arm, workspace)
        ]
        if not self._listed.lists(arms[0]) and not self._is_worth_telling(curve, arms[-1]):
            return None
        if not known:
            smaller = any(arm.size < whole for arm, name in curves.items() if name == curve)
            is_no_probe = arms[0] in self._records or (arms[0].size == whole and smaller)
            return None if is_no_probe else arms[0]
        last, second = arms[-1], arms[min(1, len(arms) - 1)]
        is_open = last.size == whole and last not in self._records
        is_open = is_open and not workspaces.can_be_run(last)
        tells_more = len(known) == 1 and not self._listed.lists(second)
        return second if is_open and tells_more and workspaces.can_be_run(second) else None

    def _is_worth_telling(self, curve: str, whole: Arm) -> bool:
        """True if small chunks alone could show that the undivided call fits, when no others do."""
        if not self._workspaces.may_fit(whole) or self._workspaces.can_be_run(whole):
            return False
        return any(
            name == curve and arm.role != whole.role and arm in self._records
            for arm, name in self._listed.curves.items()
        )

    def _wanted(self) -> list[Arm]:
        for launch_ns in CHUNK_NS:
            wanted = self.outlook(launch_ns).wanted
            if wanted:
                return _arms(wanted)
        return self._wanted_by_smaller_batches()

    def _wanted_by_smaller_batches(self) -> list[Arm]:
        """Chunks to time for the first batch that lacks a split and could have one."""
        if self._axis.name != "batch":
            return []
        problem, kernel_of = self._problem, self._session.kernel_of
        options = list(self._options())
        bounds = self._limit, self._listed.sizes
        for batch in uncovered_batches(problem, self.usable, kernel_of, *bounds):
            possible = (
                replace(option, lists=("alone", *option.lists))
                if option.batch == batch and "first" in option.lists
                else option
                for option in options
            )
            wanted = outlook(possible, batch, tolerance=1.0).wanted
            if wanted:
                return _arms(wanted)
        return []

    def _measure(self, arms: Sequence[Arm]) -> None:
        """Look at what was never run, then race what is not hopeless."""
        for arm in arms:
            entry = self._records.get(arm)
            if entry is None or entry.status == "untimed":
                self._look_at(arm, self._limit)
        groups = {arm[::2] for arm in arms if self._is_open(arm)}
        racing = [arm for arm in self._records if arm[::2] in groups and self._is_open(arm)]
        if not racing:
            return
        known = {
            (arm.size, arm.role): (interval.time_ns, interval.high_ns)
            for arm, entry in sorted(self._records.items(), key=_slowest_first)
            if self._is_usable(arm, entry) and (interval := _interval(entry)) is not None
        }
        results = self.bench.rounds(racing, known)
        for arm, result in zip(racing, results, strict=True):
            winner = result.beaten_by
            while winner is not None and winner >= 0 and results[winner].beaten_by is not None:
                winner = results[winner].beaten_by  # who was faster yet
            self._settle(arm, result, None if winner is None or winner < 0 else racing[winner])

    def _is_open(self, arm: Arm) -> bool:
        entry = self._records.get(arm)
        if entry is None or entry.status != "screened" or self._has_lost(arm, entry):
            return False
        return self._fits_and_is_exact(arm, entry)

    def _settle(self, arm: Arm, result: Result, winner: Arm | None) -> None:
        entry = self._records[arm]
        if result.failure:
            self._keep(arm, Measurement(entry.key, "failed", reason=result.failure))
            return
        reason = ""
        if result.beaten_by is not None:
            reason = _BEATEN + (winner or self._fastest(arm)).algorithm
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
        self._keep(arm, timed)

    def _fastest(self, arm: Arm) -> Arm:
        """The best known arm of the same size and role."""
        rivals = {
            other: entry
            for other, entry in self._records.items()
            if other[::2] == arm[::2] and self._is_usable(other, entry)
        }
        return min(rivals, key=lambda other: rivals[other].time_ns or 0)

    def _look_at(self, arm: Arm, limit: int | None) -> None:
        key, candidate = self._key(arm), self._listed.by_arm[arm]
        try:
            look = self.bench.look(arm, limit)
        except RuntimeError as error:
            reason = failure_of(error)
            lost = isinstance(error, LostError)  # "an illegal memory access" is no lack of memory
            if "memory" in reason and not lost:  # which there may be at another time
                self._skipped.add(arm)
                return
            self._keep(arm, Measurement(key, "failed", reason=reason, notes=candidate.notes))
            return
        seen = _looked_at(key, candidate, look)
        self._keep(arm, replace(seen, notes=seen.notes + self._session.state()))

    def _keep(self, arm: Arm, measurement: Measurement) -> None:
        self._records[arm] = self._session.keep(measurement)


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
        warnings.warn(
            f"{key.algorithm} is disqualified for {key.problem}, role {key.conditions.role}: "
            f"{reason}",
            WrongResultWarning,
            stacklevel=2,
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


def _arms(options: Iterable[Option]) -> list[Arm]:
    return [Arm(option.batch, option.algorithm, option.role) for option in options]


def _interval(entry: Measurement) -> Interval | None:
    if entry.time_ns is None:
        return None
    low, high = median_interval(entry.samples) if entry.samples else (entry.time_ns, entry.time_ns)
    return Interval(low, entry.time_ns, high)


def _slowest_first(item: tuple[Arm, Measurement]) -> int:
    return -(item[1].time_ns or 0)


def _time_ns(option: Option) -> int:
    return 0 if option.interval is None else option.interval.time_ns
