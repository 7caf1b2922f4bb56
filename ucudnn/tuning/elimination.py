"""Rule out algorithms of one kernel before their large chunks are run, and give the reason.

There are two bounds, both from the lower bounds of operations and traffic that an algorithm states
(`Cost`). The roofline of the machine bounds the time of a chunk that never ran. A small chunk that
was timed bounds larger ones: the time grows at least as much as the slower growing of operations
and traffic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import is_
from typing import TYPE_CHECKING

from ucudnn.backends import Cost, Roofline
from ucudnn.units import format_bytes

if TYPE_CHECKING:
    from ucudnn.benchmark.bench import Arm
    from ucudnn.measurement import Measurement
    from ucudnn.tuning.candidates import KernelCandidates
    from ucudnn.tuning.workspace_model import WorkspaceModel

# An algorithm is ruled out where it is expected to take this many times the best known, per sample.
# That leaves room for the error of an expectation that rests on one small chunk.
HOPELESS = 1.5
# A call takes this long on the host whatever its size, which does not grow with the chunk.
_CALL_NS = 50_000
# Shorter times say more about the call than about the algorithm.
_LEAST_TELLING_NS = 200_000
# A chunk that is expected to take so long tells about larger ones.
_TRIAL_NS = 1_000_000


class _Known:
    """Conclusions from some measurements, drawn as they are asked for.

    Args:
        entries: the measurements.
        informative: for each curve the sizes and times that are long enough to extrapolate from.
        is_disproved: some measurement beat the bound of the roofline.
    """

    def __init__(
        self,
        entries: Sequence[Measurement],
        informative: Mapping[str, list[tuple[int, int]]],
        is_disproved: bool,
    ) -> None:
        self.entries = entries
        self.informative = informative
        self.is_disproved = is_disproved
        self.expected_ns: dict[Arm, int] = {}
        # By whether times rule out, too.
        self.reasons: dict[bool, dict[str, str]] = {}


class Elimination:
    """Decides which algorithms can still be part of the best split, by the measurements so far.

    Args:
        candidates: of the kernel.
        records: measurements so far, by arm; their owner adds to them.
        workspaces: known and extrapolated workspace of the chunks.
        is_allowed: whether a measured chunk may be part of a plan.
        roofline: of the machine; None: only smaller chunks bound times.
    """

    def __init__(
        self,
        candidates: KernelCandidates,
        records: Mapping[Arm, Measurement],
        workspaces: WorkspaceModel,
        is_allowed: Callable[[Arm, Measurement], bool],
        roofline: Roofline | None = None,
    ) -> None:
        self._candidates = candidates
        self._records = records
        self._workspaces = workspaces
        self._is_allowed = is_allowed
        self._roofline = roofline
        self._known: _Known | None = None
        # Cleared where nothing that was measured fits: then only a lack of memory rules out.
        self.is_active = True

    def reasons(self) -> dict[str, str]:
        """Curves that need not be measured further, with the reason."""
        known = self._so_far()
        if self.is_active not in known.reasons:
            best_ns, found = self._best_ns(), dict[str, str]()
            for curve, arms in self._candidates.arms_by_curve.items():
                reason = self._reason(arms, best_ns)
                if reason:
                    found[curve] = f"{arms[0].algorithm} is ruled out: {reason}"
            known.reasons[self.is_active] = found
        return known.reasons[self.is_active]

    def _so_far(self) -> _Known:
        """Conclusions from the measurements so far; kept until there is another one."""
        entries = list(self._records.values())
        known = self._known
        # Measurements are replaced and never changed.
        if (
            known is None
            or len(known.entries) != len(entries)
            or not all(map(is_, known.entries, entries))
        ):
            known = self._known = _Known(entries, self._informative(), self._is_disproved())
        return known

    def _reason(self, arms: Sequence[Arm], best_ns: float | None) -> str:
        """Reason why no arm of a curve can be part of the best split; "" if one can."""
        # It was timed in full, so that the solver judges it by its times.
        if any(self._records[arm].status == "ok" for arm in arms if arm in self._records):
            return ""
        reason = self._memory_reason(arms)
        if reason or not self.is_active or best_ns is None:
            return reason
        # The best rate of any size: a fixed cost, as the transform of a filter, weighs less in
        # larger chunks and alone must not rule an algorithm out.
        rate = min(self._known_or_expected_ns(arm) / arm.size for arm in arms)
        times = rate * self._candidates.axis.extent / best_ns
        return "" if times <= HOPELESS else f"it takes at least {times:.1f} times the best"

    def _memory_reason(self, arms: Sequence[Arm]) -> str:
        """Reason why there is not enough memory for any of a curve's arms, "" where there is."""
        costs = [self._candidates.cost(arm.size, arm.algorithm) for arm in arms]
        least = min((cost.workspace_bytes if cost else 0 for cost in costs), default=0)
        most = self._workspaces.most_bytes
        if least > most:
            return (
                f"it needs {format_bytes(least)} at least, more than the {format_bytes(most)} that "
                f"a candidate may take here"
            )
        limit = self._workspaces.limit
        if self.is_active and limit is not None and least > limit:
            return (
                f"it needs {format_bytes(least)} at least, and the workspace limit is "
                f"{format_bytes(limit)}"
            )
        return ""

    def _best_ns(self) -> float | None:
        """Time of the whole batch at the rate of the fastest usable chunk; None without one."""
        rates = (
            entry.time_ns / arm.size
            for arm, entry in self._records.items()
            if entry.time_ns is not None and self._is_allowed(arm, entry)
        )
        fastest = min(rates, default=None)
        return None if fastest is None else fastest * self._candidates.axis.extent

    def _known_or_expected_ns(self, arm: Arm) -> int:
        entry = self._records.get(arm)
        known = None if entry is None else entry.time_ns
        return self.expected_ns(arm) if known is None else known

    def least_ns(self, arm: Arm) -> int:
        """Lower bound of the time of an arm: the expected time with a margin for its error."""
        return int(self.expected_ns(arm) / HOPELESS)

    def expected_ns(self, arm: Arm) -> int:
        """Shortest time that an arm is expected to take; 0 if nothing is known."""
        known = self._so_far()
        if arm not in known.expected_ns:
            known.expected_ns[arm] = self._expected_ns(arm, known)
        return known.expected_ns[arm]

    def _expected_ns(self, arm: Arm, known: _Known) -> int:
        cost = self._candidates.cost(arm.size, arm.algorithm)
        if cost is None:
            return 0
        extrapolated = [
            _CALL_NS + int((time_ns - _CALL_NS) * growth(smaller, cost))
            for size, time_ns in known.informative.get(self._candidates.curves[arm], ())
            if size <= arm.size and (smaller := self._candidates.cost(size, arm.algorithm))
        ]
        roofline = None if known.is_disproved else self._roofline
        roofline_ns = 0 if roofline is None else roofline.time_ns(cost)
        # Noise makes times longer, which lifts the bounds that follow from them: trust the lowest.
        return max(roofline_ns, min(extrapolated, default=0))

    def _is_disproved(self) -> bool:
        """True if some measurement beat the bound of the roofline.

        The roofline is too low if it was measured while other processes used the machine.
        """
        roofline = self._roofline
        return roofline is not None and any(
            entry.time_ns < roofline.time_ns(cost)
            for arm, entry in self._records.items()
            if entry.time_ns and (cost := self._candidates.cost(arm.size, arm.algorithm))
        )

    def _informative(self) -> dict[str, list[tuple[int, int]]]:
        """For each curve the sizes and times that are long enough to extrapolate from."""
        found: dict[str, list[tuple[int, int]]] = {}
        for arm, entry in self._records.items():
            curve = self._candidates.curves.get(arm)
            if entry.time_ns is not None and curve is not None:
                fastest = min(entry.samples, default=entry.time_ns)
                if fastest >= _LEAST_TELLING_NS:
                    found.setdefault(curve, []).append((arm.size, fastest))
        return found

    def trials(self) -> list[Arm]:
        """A small chunk of each curve that has no time to extrapolate from, the cheapest first."""
        reasons, best_ns = self.reasons(), self._best_ns()
        found = (
            self._trial(arms, best_ns)
            for curve, arms in self._candidates.arms_by_curve.items()
            if curve not in reasons
        )
        # A cheap trial may show that dearer ones need not be run.
        return sorted((arm for arm in found if arm is not None), key=self.expected_ns)

    def _trial(self, arms: Sequence[Arm], best_ns: float | None) -> Arm | None:
        """The smallest arm of a curve that is long enough to extrapolate from, if it never ran."""
        first = arms[0]
        is_known = self._candidates.curves[first] in self._so_far().informative
        if is_known or self._candidates.cost(first.size, first.algorithm) is None:
            return None
        runnable = [arm for arm in arms if self._workspaces.can_be_run(arm)]
        # With no time to compare with, the smallest chunk costs least.
        if not runnable or best_ns is None:
            return next(iter(runnable), None)
        least = _TRIAL_NS * self._candidates.axis.extent
        return next((arm for arm in runnable if best_ns * arm.size >= least), runnable[-1])


def growth(small: Cost, large: Cost) -> float:
    """Lower bound of the ratio of two times, from a cost to a larger one.

    >>> growth(Cost(100, 50, 0), Cost(400, 100, 0))
    2.0
    """
    # The longer of computing and moving data bounds the time from below. It grows at least as much
    # as the slower growing of the two, whichever of them is the longer one.
    terms = ((large.operations, small.operations), (large.traffic_bytes, small.traffic_bytes))
    return min(_ratios(terms), default=1.0)


def _ratios(terms: Iterable[tuple[int, int]]) -> Iterator[float]:
    return (more / less for more, less in terms if less)
