"""Small chunks of one kernel that are run before larger ones, for their workspace or their time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ucudnn.benchmark.bench import Arm
    from ucudnn.tuning.candidates import KernelCandidates
    from ucudnn.tuning.elimination import Elimination
    from ucudnn.tuning.measurer import KernelRecords


class Trials:
    """Decides which small chunks must run first.

    Args:
        listed: the candidates.
        records: the measurements so far.
        elimination: tells which implementations cannot be part of the best split.
        must_probe: True if a chunk may run only when its workspace is known or extrapolated.
    """

    def __init__(
        self,
        listed: KernelCandidates,
        records: KernelRecords,
        elimination: Elimination,
        must_probe: bool,
    ) -> None:
        self._listed = listed
        self._records = records
        self._elimination = elimination
        self._must_probe = must_probe

    def wanted(self) -> list[Arm]:
        """Small chunks that must run before larger ones of their curves may."""
        ruled_out = self._elimination.reasons()
        probes = [arm for arm in self._probes() if self._listed.curves[arm] not in ruled_out]
        # Workspace first: what does not fit the limit need not be timed.
        return probes or self._elimination.trials()

    def _probes(self) -> list[Arm]:
        """The smallest chunks of curves whose workspace must be known, but is not."""
        if not self._must_probe:
            return []
        # An implementation may need other workspace in another role, so each role is probed.
        groups: dict[tuple[str, str], list[Arm]] = {}
        for arm, curve in self._listed.curves.items():
            entry = self._records.by_arm.get(arm)
            if arm not in self._records.skipped and (entry is None or entry.status != "failed"):
                groups.setdefault((curve, arm.role), []).append(arm)
        found = (self._probe(curve, arms) for (curve, _), arms in groups.items())
        return [arm for arm in found if arm is not None]

    def _probe(self, curve: str, arms: Sequence[Arm]) -> Arm | None:
        """The smallest arm of a curve, or a second one to extrapolate from, or None."""
        # No split holds such chunks. They are run only where that may show that the whole fits.
        if not self._listed.lists(arms[0]) and not self._is_worth_telling(curve, arms[-1]):
            return None
        known = sum(map(self._records.fits, arms))
        if not known:
            return self._first(curve, arms)
        # One point gives workspace in proportion to the size, two give a line.
        return self._second(arms) if known == 1 else None

    def _first(self, curve: str, arms: Sequence[Arm]) -> Arm | None:
        """The smallest arm; None if it ran, or if it is the whole and other roles have smaller."""
        first, curves, whole = arms[0], self._listed.curves, self._listed.axis.extent
        if first in self._records.by_arm:
            return None
        # The whole is never the first chunk of an implementation to run where smaller ones exist:
        # it may need more memory than there is.
        smaller = any(arm.size < whole for arm, name in curves.items() if name == curve)
        return None if first.size == whole and smaller else first

    def _second(self, arms: Sequence[Arm]) -> Arm | None:
        """The second smallest arm, where the first leaves open whether the whole fits."""
        workspaces, whole = self._records.workspaces, arms[-1]
        if whole.size != self._listed.axis.extent or whole in self._records.by_arm:
            return None
        second = arms[min(1, len(arms) - 1)]
        # One that a split may hold is run when the solver asks for it.
        if workspaces.can_be_run(whole) or self._listed.lists(second):
            return None
        return second if workspaces.can_be_run(second) else None

    def _is_worth_telling(self, curve: str, whole: Arm) -> bool:
        """True if the undivided call may fit, and only small chunks in role alone can show it."""
        if not self._records.workspaces.may_fit(whole) or self._records.workspaces.can_be_run(
            whole
        ):
            return False
        return any(
            name == curve and arm.role != whole.role and arm in self._records.by_arm
            for arm, name in self._listed.curves.items()
        )
