"""What is known of the chunks of one kernel, and which of them to run next.

Small chunks are run first, to extrapolate workspace or times from them. Then those chunks are timed
that could be part of the fastest split.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from ucudnn.benchmark.bench import Arm
from ucudnn.benchmark.statistics import median_interval
from ucudnn.kernels.bounds import Elimination, WorkspaceModel
from ucudnn.kernels.items import rank_of
from ucudnn.kernels.splits import CHUNK_NS, worthwhile_ns
from ucudnn.measurement import Measurement, MeasurementKey, Role
from ucudnn.solvers.lazy import ChunkOption, Interval, Outlook, bound_front, outlook
from ucudnn.system.processes import cached_property

if TYPE_CHECKING:
    from ucudnn.kernels.candidates import KernelCandidates
    from ucudnn.kernels.session import Session


@dataclass(eq=False)
class KernelRecords:
    """Known measurements of a kernel's candidates."""

    session: Session
    listed: KernelCandidates
    limit: int | None
    # Largest relative error (L2) that a candidate may have; None: any error that is explained by
    # rounding.
    max_error: float | None
    deterministic: bool = False
    by_arm: dict[Arm, Measurement] = field(default_factory=dict)
    # Candidates that could not be run this time, because there was too little memory, with the text
    # of that error.
    skipped: dict[Arm, str] = field(default_factory=dict)

    @cached_property
    def workspaces(self) -> WorkspaceModel:
        """Known and extrapolated workspace of the candidates."""
        memory = self.session.backend.memory_bytes()
        return WorkspaceModel(self.listed, self.by_arm, self.limit, memory, self.skipped)

    def recall(self) -> None:
        """Read known measurements: from the cache, and those of kernels with the same chunks."""
        for arm in self.listed.by_arm:
            known = self.session.find(self.key(arm))
            if known is not None:
                self.by_arm[arm] = self.session.reuse(known)

    def keep(self, arm: Arm, measurement: Measurement) -> None:
        """Add a new measurement."""
        self.by_arm[arm] = self.session.keep(measurement)

    def key(self, arm: Arm) -> MeasurementKey:
        """The key of a candidate in the cache."""
        return self.session.key(self.listed.part(arm.size), arm.algorithm, arm.role)

    def by_size(self) -> Iterator[tuple[Arm, Measurement]]:
        """All known measurements, the smallest chunks first."""
        return ((arm, self.by_arm[arm]) for arm in self.listed.by_arm if arm in self.by_arm)

    def is_usable(self, arm: Arm, entry: Measurement) -> bool:
        """True for a complete measurement of a candidate that may be part of a plan."""
        return entry.status == "ok" and self.is_allowed(arm, entry)

    def is_allowed(self, arm: Arm, entry: Measurement) -> bool:
        """True for a candidate that fits the limit and is exact and deterministic enough."""
        if entry.workspace_bytes is None or not self.workspaces.fits(arm, entry.workspace_bytes):
            return False
        if self.deterministic and not entry.is_deterministic:
            return False
        return self.max_error is None or (entry.error or 0.0) <= self.max_error

    def fits(self, arm: Arm) -> bool:
        """True for a candidate whose workspace is known and within the limit."""
        workspace = self.workspaces.known(arm)
        return workspace is not None and self.workspaces.fits(arm, workspace)

    def is_open(self, arm: Arm) -> bool:
        """True for a candidate that was timed, but not in full, and can still win."""
        entry = self.by_arm.get(arm)
        if entry is None or entry.status != "screened" or self.has_lost(arm, entry):
            return False
        if arm in self.skipped:
            return False
        return self.is_allowed(arm, entry)

    def has_lost(self, arm: Arm, entry: Measurement) -> bool:
        """True if a candidate lost its race against a candidate that is usable under this limit."""
        if entry.status != "screened" or not entry.lost_to:
            return False
        rival = arm._replace(algorithm=entry.lost_to)
        winner = self.by_arm.get(rival)
        return winner is not None and self.is_usable(rival, winner)

    def shortest_ns(self) -> dict[tuple[int, str], int]:
        """For each size and role the shortest time of an allowed arm, timed in full or not."""
        found: dict[tuple[int, str], int] = {}
        for arm, entry in self.by_arm.items():
            if entry.time_ns and self.is_allowed(arm, entry):
                group = arm.size, arm.role
                found[group] = min(entry.time_ns, found.get(group, entry.time_ns))
        return found

    def fastest(self, arm: Arm) -> Arm:
        """The fastest usable arm of the same size and role as the given one."""
        rivals = {
            other: entry
            for other, entry in self.by_arm.items()
            if other[::2] == arm[::2] and self.is_usable(other, entry)
        }
        return min(rivals, key=lambda other: rivals[other].time_ns or 0)

    def best_times(self) -> dict[tuple[int, str], tuple[int, int]]:
        """For each size and role the time of the fastest usable arm, in ns.

        The time is a pair: the median, and the upper end of its interval.
        """
        usable = [entry for entry in self.by_arm.items() if self.is_usable(*entry)]
        # Arms are sorted by falling time, so that in the dict the fastest arm replaces slower ones.
        return {
            (arm.size, arm.role): (interval.time_ns, interval.high_ns)
            for arm, entry in sorted(usable, key=lambda item: -(item[1].time_ns or 0))
            if (interval := interval_of(entry)) is not None
        }


@dataclass(eq=False)
class Requests:
    """Decides which small chunks must run first, and asks the solver what to time."""

    listed: KernelCandidates
    records: KernelRecords
    elimination: Elimination
    # The possible gain, as a fraction of the kernel's time, at which measuring ends; at least
    # `EQUALLY_FAST`.
    tolerance: float
    # True if small chunks must run first, to extrapolate from them the workspace of larger ones.
    must_probe: bool

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
        if not self.must_probe:
            return []
        # What a backend states need not be run, unless nothing is known to fit: then the runs show
        # the smallest limit that would suffice.
        must_run = not any(map(self.records.fits, self.listed.by_arm))
        # In another role an implementation may need another workspace, so one chunk of each role is
        # run.
        groups: dict[tuple[str, str], list[Arm]] = {}
        for arm, curve in self.listed.curves.items():
            entry = self.records.by_arm.get(arm)
            if arm not in self.records.skipped and (entry is None or entry.status != "failed"):
                groups.setdefault((curve, arm.role), []).append(arm)
        found = (self._probe(curve, arms, must_run) for (curve, _), arms in groups.items())
        return [arm for arm in found if arm is not None]

    def _probe(self, curve: str, arms: Sequence[Arm], must_run: bool) -> Arm | None:
        """The curve's smallest or second smallest arm, to run for its workspace; or None."""
        # Some chunks cannot be part of a split. They are run only if they may show that the whole
        # call fits.
        if not self.listed.lists(arms[0]) and not self._is_worth_telling(curve, arms[-1]):
            return None
        known = sum(map(self.records.fits, arms))
        if not known:
            is_stated = self.listed.by_arm[arms[0]].workspace_bytes is not None
            return None if is_stated and not must_run else self._first(curve, arms)
        # Workspace is extrapolated from one size in proportion, and from two sizes on a line.
        return self._second(arms) if known == 1 else None

    def _first(self, curve: str, arms: Sequence[Arm]) -> Arm | None:
        """The smallest arm; None if it ran, or if it is the whole call and smaller ones exist."""
        first, curves, whole = arms[0], self.listed.curves, self.listed.axis.extent
        if first in self.records.by_arm:
            return None
        # If an implementation has smaller chunks, the whole call is not the first to run, because
        # it may need more memory than there is.
        smaller = any(arm.size < whole for arm, name in curves.items() if name == curve)
        return None if first.size == whole and smaller else first

    def _second(self, arms: Sequence[Arm]) -> Arm | None:
        """The second smallest arm, if the smallest does not show that the whole call fits."""
        workspaces, whole = self.records.workspaces, arms[-1]
        if whole.size != self.listed.axis.extent or whole in self.records.by_arm:
            return None
        second = arms[min(1, len(arms) - 1)]
        # If a split may contain the second arm, it need not run here: the solver asks for it if
        # needed.
        if workspaces.can_be_run(whole) or self.listed.lists(second):
            return None
        return second if workspaces.can_be_run(second) else None

    def _is_worth_telling(self, curve: str, whole: Arm) -> bool:
        """True if small chunks in role ALONE are needed to show whether the undivided call fits."""
        if not self.records.workspaces.may_fit(whole) or self.records.workspaces.can_be_run(whole):
            return False
        return any(
            name == curve and arm.role != whole.role and arm in self.records.by_arm
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
        least_ns = worthwhile_ns(self.records.session.backend.device().type)
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

    def hoped_front(self) -> list[tuple[int, int]]:
        """For each workspace a lower bound of the time of every split within it."""
        # Nothing is eliminated here: a chunk that is too slow within the largest limit may be the
        # best one within a smaller limit.
        self.elimination.is_active = False
        options = self._options(at_any_limit=True)
        return bound_front(options, self.listed.axis.extent, tolerance=self.tolerance)

    def _options(self, at_any_limit: bool = False) -> Iterator[ChunkOption]:
        """Chunks that the solver may choose among, and measured ones that bound their times.

        With `at_any_limit`, chunks that may matter only at a smaller limit are included.
        """
        ruled_out = self.elimination.reasons()
        for arm in self.listed.by_arm:
            entry = self.records.by_arm.get(arm)
            is_out = arm in self.records.skipped or (entry is not None and entry.status == "failed")
            # A chunk that was measured before its curve was ruled out stays, because its time
            # bounds those of other sizes.
            if self.listed.curves[arm] in ruled_out and entry is None:
                is_out = True
            if not is_out:
                option = self._option(arm, entry, self.listed.curves[arm] not in ruled_out)
                if at_any_limit:
                    option = self._at_any_limit(arm, entry, option)
                if option.lists or option.interval is not None:
                    yield option

    def _at_any_limit(
        self, arm: Arm, entry: Measurement | None, option: ChunkOption
    ) -> ChunkOption:
        """The option, allowed even if a rival or unknown workspace rules it out at this limit."""
        if entry is not None and self.records.has_lost(arm, entry):
            return replace(option, lists=self.listed.lists(arm), is_timed=True)
        workspaces = self.records.workspaces
        if entry is not None or workspaces.expected(arm) is not None or not workspaces.may_fit(arm):
            return option
        cost = self.listed.cost(arm.size, arm.algorithm)
        least = 0 if cost is None else cost.workspace_bytes
        return replace(option, lists=self.listed.lists(arm), workspace_bytes=least)

    def _option(self, arm: Arm, entry: Measurement | None, may_matter: bool) -> ChunkOption:
        """An arm as an option for the solver; it has no positions if no split may contain it."""
        has_lost = entry is not None and self.records.has_lost(arm, entry)
        may_matter = may_matter and not has_lost and self._is_allowed(arm, entry)
        return ChunkOption(
            arm.size,
            arm.algorithm,
            self.listed.curves[arm],
            self.listed.lists(arm) if may_matter else (),
            None if entry is None else interval_of(entry),
            entry is not None and entry.status == "ok",
            self.records.workspaces.expected(arm) or 0,
            rank_of(arm.algorithm, self.listed.by_arm[arm].is_deterministic),
            arm.role,
            self.elimination.least_ns(arm) if entry is None else 0,
        )

    def _is_allowed(self, arm: Arm, entry: Measurement | None) -> bool:
        # A measured workspace only has to fit the limit. An expected workspace must also be small
        # enough to be tried on this machine.
        if entry is not None and entry.workspace_bytes is not None:
            return self.records.is_allowed(arm, entry)
        workspace = self.records.workspaces.expected(arm)
        return workspace is not None and self.records.workspaces.may_run(arm, workspace)


def interval_of(entry: Measurement) -> Interval | None:
    """Confidence interval of a measurement's time; None if the measurement has no time."""
    if entry.time_ns is None:
        return None
    low, high = median_interval(entry.samples) if entry.samples else (entry.time_ns, entry.time_ns)
    return Interval(low, entry.time_ns, high)


def _time_ns(option: ChunkOption) -> int:
    return 0 if option.interval is None else option.interval.time_ns
