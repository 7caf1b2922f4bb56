"""Small chunks of one kernel that are run before larger ones, for their workspace or their time."""

from __future__ import annotations

from collections.abc import Sequence

from ucudnn.benchmark.bench import Arm
from ucudnn.tuning.candidates import KernelCandidates
from ucudnn.tuning.elimination import Elimination
from ucudnn.tuning.records import KernelRecords


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
        workspaces, curves, whole = (
            self._records.workspaces,
            self._listed.curves,
            self._listed.axis.extent,
        )
        known = [
            arm
            for arm in arms
            for workspace in [workspaces.known(arm)]
            if workspace is not None and workspaces.fits(arm, workspace)
        ]
        # No split holds such chunks. They are run only where that may show that the whole fits.
        if not self._listed.lists(arms[0]) and not self._is_worth_telling(curve, arms[-1]):
            return None
        if not known:
            smaller = any(arm.size < whole for arm, name in curves.items() if name == curve)
            # The whole is never the first chunk of an implementation to run where smaller ones
            # exist: it may need more memory than there is.
            is_no_probe = arms[0] in self._records.by_arm or (arms[0].size == whole and smaller)
            return None if is_no_probe else arms[0]
        # One point gives workspace in proportion to the size, two give a line. The second is run
        # only where the first leaves open whether the whole fits.
        last, second = arms[-1], arms[min(1, len(arms) - 1)]
        is_open = last.size == whole and last not in self._records.by_arm
        is_open = is_open and not workspaces.can_be_run(last)
        tells_more = len(known) == 1 and not self._listed.lists(second)
        return second if is_open and tells_more and workspaces.can_be_run(second) else None

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
