"""Measurements of one kernel's chunks, cached or new, and which of them a plan may use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ucudnn.benchmark.statistics import median_interval
from ucudnn.solvers.lazy import Interval
from ucudnn.tuning.workspace_model import WorkspaceModel

if TYPE_CHECKING:
    from ucudnn.benchmark.bench import Arm
    from ucudnn.measurement import Measurement, MeasurementKey
    from ucudnn.tuning.candidates import KernelCandidates
    from ucudnn.tuning.session import Session


class KernelRecords:
    """Known measurements of a kernel's candidates.

    Args:
        session: the device and the cache.
        listed: the candidates.
        limit: workspace in bytes, None for any.
        max_error: largest relative error (L2) of a candidate; None: any result that is not wrong.
        deterministic: no result may vary.
    """

    def __init__(
        self,
        session: Session,
        listed: KernelCandidates,
        limit: int | None,
        max_error: float | None,
        deterministic: bool = False,
    ) -> None:
        self._session = session
        self._listed = listed
        self._max_error = max_error
        self._deterministic = deterministic
        self.by_arm: dict[Arm, Measurement] = {}
        self.skipped: set[Arm] = set()  # for which there was no memory this time
        memory = session.backend.memory_bytes()
        self.workspaces = WorkspaceModel(listed, self.by_arm, limit, memory)

    def recall(self) -> None:
        """Read measurements from the cache, and those made for a kernel that shares them."""
        for arm in self._listed.by_arm:
            known = self._session.find(self.key(arm))
            if known is not None:
                self.by_arm[arm] = self._session.reuse(known)

    def keep(self, arm: Arm, measurement: Measurement) -> None:
        """Add a new measurement."""
        self.by_arm[arm] = self._session.keep(measurement)

    def key(self, arm: Arm) -> MeasurementKey:
        """The key of a candidate in the cache."""
        return self._session.key(self._listed.part(arm.size), arm.algorithm, arm.role)

    def by_size(self) -> Iterator[tuple[Arm, Measurement]]:
        """All known measurements, the smallest chunks first."""
        return ((arm, self.by_arm[arm]) for arm in self._listed.by_arm if arm in self.by_arm)

    @property
    def usable(self) -> list[Measurement]:
        """Complete measurements of candidates that fit and are exact enough."""
        return [entry for arm, entry in self.by_size() if self.is_usable(arm, entry)]

    def is_usable(self, arm: Arm, entry: Measurement) -> bool:
        """True for a complete measurement of a candidate that may be part of a plan."""
        return entry.status == "ok" and self.is_allowed(arm, entry)

    def is_allowed(self, arm: Arm, entry: Measurement) -> bool:
        """True for a candidate that fits the limit and is exact and deterministic enough."""
        if entry.workspace_bytes is None or not self.workspaces.fits(arm, entry.workspace_bytes):
            return False
        if self._deterministic and not entry.is_deterministic:
            return False
        return self._max_error is None or (entry.error or 0.0) <= self._max_error

    def fits(self, arm: Arm) -> bool:
        """True for a candidate whose workspace is known and within the limit."""
        workspace = self.workspaces.known(arm)
        return workspace is not None and self.workspaces.fits(arm, workspace)

    def is_open(self, arm: Arm) -> bool:
        """True for a candidate that was run once and can still win."""
        entry = self.by_arm.get(arm)
        if entry is None or entry.status != "screened" or self.has_lost(arm, entry):
            return False
        if arm in self.skipped:
            return False
        return self.is_allowed(arm, entry)

    def has_lost(self, arm: Arm, entry: Measurement) -> bool:
        """True if it lost its race against a candidate that is allowed under this limit, too."""
        if entry.status != "screened" or not entry.lost_to:
            return False
        rival = arm._replace(algorithm=entry.lost_to)
        winner = self.by_arm.get(rival)
        return winner is not None and self.is_usable(rival, winner)

    def fastest(self, arm: Arm) -> Arm:
        """The best known arm of the same size and role."""
        rivals = {
            other: entry
            for other, entry in self.by_arm.items()
            if other[::2] == arm[::2] and self.is_usable(other, entry)
        }
        return min(rivals, key=lambda other: rivals[other].time_ns or 0)

    def best_times(self) -> dict[tuple[int, str], tuple[int, int]]:
        """Time of the fastest allowed arm of each size and role, as (median, upper end) in ns."""
        usable = [entry for entry in self.by_arm.items() if self.is_usable(*entry)]
        return {
            (arm.size, arm.role): (interval.time_ns, interval.high_ns)
            for arm, entry in sorted(usable, key=_slowest_first)
            if (interval := interval_of(entry)) is not None
        }


def interval_of(entry: Measurement) -> Interval | None:
    """Confidence interval of a time; None if it was not timed."""
    if entry.time_ns is None:
        return None
    low, high = median_interval(entry.samples) if entry.samples else (entry.time_ns, entry.time_ns)
    return Interval(low, entry.time_ns, high)


def _slowest_first(item: tuple[Arm, Measurement]) -> int:
    return -(item[1].time_ns or 0)
