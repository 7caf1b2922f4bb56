"""What is known of one kernel's chunks: measurements, expected workspace, bounds of their times.

A time has two lower bounds. Both follow from the lower bounds of operations and traffic that an
algorithm states (`Cost`). One bound is the roofline of the machine. The other bound follows from a
smaller chunk that was timed: times grow at least by the smaller of two ratios, that of the
operations and that of the traffic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from operator import is_
from typing import TYPE_CHECKING

from ucudnn.backends import Cost, Roofline
from ucudnn.benchmark.bench import Arm
from ucudnn.benchmark.statistics import median_interval
from ucudnn.kernels.splits import held_bytes
from ucudnn.measurement import Measurement, MeasurementKey
from ucudnn.problem import Problem
from ucudnn.solvers.lazy import Interval
from ucudnn.system.processes import cached_property
from ucudnn.units import format_sizes

if TYPE_CHECKING:
    from ucudnn.config import Config
    from ucudnn.kernels.candidates import KernelCandidates
    from ucudnn.kernels.device import Session

# An algorithm is ruled out if its expected time per sample is more than this many times the
# shortest known time per sample. The factor allows for errors: the expected time may follow from
# the time of one small chunk.
HOPELESS = 1.5
# Time of a call on the host in ns, which does not grow with the size of the chunk.
_CALL_NS = 50_000
# Times shorter than this are not extrapolated to larger chunks, because they depend more on the
# call than on the algorithm.
_LEAST_TELLING_NS = 200_000
# A chunk that is run to extrapolate the times of larger chunks should be expected to take at least
# this long.
_TRIAL_NS = 1_000_000
# Upper bound of workspace as a multiple of operands and result; im2col with an 11x11 filter needs a
# factor of 121.
_MOST_COPIES = 128
# Without a workspace limit, a candidate may take this many times the operands and result of the
# kernel, and at least `_SMALL_BYTES`. Larger workspaces would raise the peak of a step, and of
# tuning, far above what the model needs.
_MOST_OPERANDS = 4
_SMALL_BYTES = 128 << 20


@dataclass(eq=False)
class KnownChunks:
    """Measurements of one kernel's chunks, cut in one way, as they count within a workspace limit.

    An arm is a size of chunk, an algorithm, and the role of the chunk in its split. The arms that
    run the same implementation form a curve. For each implementation, workspace is assumed to grow
    linearly with the chunk, so that it is extrapolated along the sizes of a curve.
    """

    session: Session
    config: Config
    listed: KernelCandidates
    # Memory in bytes that a benchmark may use on this machine.
    memory_bytes: int
    # Workspace in bytes that a chunk may use, None for any.
    limit: int | None = None
    by_arm: dict[Arm, Measurement] = field(default_factory=dict)
    # Candidates that could not be run this time, because there was too little memory, with the text
    # of that error.
    skipped: dict[Arm, str] = field(default_factory=dict)

    def within(self, limit: int | None) -> KnownChunks:
        """The same measurements within another limit; what is added to one is added to both."""
        return replace(self, limit=limit)

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

    @property
    def measurements(self) -> list[Measurement]:
        """All measurements, the smallest chunks first."""
        return [entry for _, entry in self._by_size()]

    @property
    def usable(self) -> list[Measurement]:
        """Complete measurements of candidates that fit and are exact enough."""
        return [entry for arm, entry in self._by_size() if self.is_usable(arm, entry)]

    @property
    def timed(self) -> list[Measurement]:
        """Measurements of candidates that fit and are exact enough, timed in full or once."""
        return [one for arm, one in self._by_size() if one.time_ns and self.is_allowed(arm, one)]

    def _by_size(self) -> Iterator[tuple[Arm, Measurement]]:
        return ((arm, self.by_arm[arm]) for arm in self.listed.by_arm if arm in self.by_arm)

    def is_usable(self, arm: Arm, entry: Measurement) -> bool:
        """True for a complete measurement of a candidate that may be part of a plan."""
        return entry.status == "ok" and self.is_allowed(arm, entry)

    def is_allowed(self, arm: Arm, entry: Measurement) -> bool:
        """True for a candidate that fits the limit and is exact and deterministic enough."""
        if entry.workspace_bytes is None or not self.fits(arm, entry.workspace_bytes):
            return False
        if self.config.deterministic and not entry.is_deterministic:
            return False
        # Recordings that were not made by ucudnn may lack the errors of results.
        most = self.config.max_error
        return most is None or (entry.error or 0.0) <= most

    def is_open(self, arm: Arm) -> bool:
        """True for a candidate that was timed, but not in full, and can still win."""
        entry = self.by_arm.get(arm)
        if entry is None or entry.status != "screened" or self.has_lost(arm, entry):
            return False
        return arm not in self.skipped and self.is_allowed(arm, entry)

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

    def fastest(self, arm: Arm) -> str:
        """The fastest usable algorithm of the same size and role as an arm; "" if there is none."""
        rivals = {
            other.algorithm: entry.time_ns or 0
            for other, entry in self.by_arm.items()
            if other[::2] == arm[::2] and self.is_usable(other, entry)
        }
        return min(rivals, key=rivals.__getitem__, default="")

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

    @property
    def rate_ns(self) -> float:
        """Time in ns per unit of the axis by the fastest timed chunk; 0 if none is timed."""
        rates = (entry.time_ns / arm.size for arm, entry in self.by_arm.items() if entry.time_ns)
        return min(rates, default=0.0)

    @cached_property
    def most_bytes(self) -> int:
        """The largest workspace to try on this machine; `fits` checks the workspace limit."""
        if self.limit is not None:
            return self.memory_bytes
        whole = _operand_bytes(self.listed.problem)
        return min(self.memory_bytes, max(_SMALL_BYTES, _MOST_OPERANDS * whole))

    @cached_property
    def must_probe(self) -> bool:
        """True if small chunks must run first, to extrapolate from them the workspace of others."""
        return must_be_known(self.listed.problem, self.limit is not None, self.memory_bytes)

    def fits(self, arm: Arm, workspace: int | None) -> bool:
        """True if a workspace, with the memory that the arm's role needs, is within the limit.

        False if the workspace is None, which means that it is not known.
        """
        if workspace is None or self.limit is None:
            return workspace is not None
        return workspace + held_bytes(self.listed.problem, arm.role) <= self.limit

    def may_fit(self, arm: Arm) -> bool:
        """False if the lower bound of workspace that the algorithm states is too large."""
        cost = self.listed.cost(arm.size, arm.algorithm)
        return cost is None or self.may_run(arm, cost.workspace_bytes)

    def may_run(self, arm: Arm, workspace: int) -> bool:
        """True if so many bytes of workspace fit both the limit and `most_bytes`."""
        return self.fits(arm, workspace) and workspace <= self.most_bytes

    def can_be_run(self, arm: Arm) -> bool:
        """True for an arm that never ran and is expected to fit."""
        workspace = self.expected_bytes(arm)
        is_new = arm not in self.by_arm and arm not in self.skipped
        return is_new and workspace is not None and self.may_run(arm, workspace)

    def known_bytes(self, arm: Arm) -> int | None:
        """Workspace of an arm in bytes, as measured or as stated by the backend."""
        entry = self.by_arm.get(arm)
        if entry is not None and entry.workspace_bytes is not None:
            return entry.workspace_bytes
        return self.listed.by_arm[arm].workspace_bytes

    def expected_bytes(self, arm: Arm) -> int | None:
        """Workspace of an arm in bytes, known or extrapolated; None if nothing is known."""
        known = self.known_bytes(arm)
        if known is not None:
            return known
        points = [  # a larger chunk that does not fit says nothing of a smaller one
            (size, workspace)
            for size, workspace in self._points(arm)
            if size <= arm.size or self.fits(arm, workspace)
        ]
        if not points:
            # If no limit is set and any workspace would fit the memory, a chunk may run before its
            # workspace is known.
            return None if self.must_probe else 0
        return _on_the_line(points, arm.size, self.listed.cut.sizes)

    def _points(self, arm: Arm) -> list[tuple[int, int]]:
        """Known points (size, workspace) of an arm's curve: in its own role, else in others."""
        curves = self.listed.curves
        known = [
            (other, entry.workspace_bytes)
            for other, entry in self.by_arm.items()
            if entry.workspace_bytes is not None and curves.get(other) == curves[arm]
        ]
        same = sorted((other.size, found) for other, found in known if other.role == arm.role)
        if same:
            return same
        # The workspace of a later chunk may include a temporary result, unlike that of a chunk
        # alone.
        others = sorted(
            (other.size, max(0, workspace - self._own_result(other.size)))
            for other, workspace in known
        )
        return list(dict(others).items())  # per size, the point of the role that needs more

    def _own_result(self, size: int) -> int:
        if self.listed.problem.op == "wgrad":
            return 0
        return self.listed.axis.part(size).result_bytes


def must_be_known(problem: Problem, is_limited: bool, memory_bytes: int) -> bool:
    """True if the workspace of a large chunk must be known before it may run.

    >>> must_be_known(Problem("fprop", 1, 1, 1, (9,), (3,)), False, 1 << 30)
    False
    """
    return is_limited or _MOST_COPIES * _operand_bytes(problem) > memory_bytes


def _operand_bytes(problem: Problem) -> int:
    elements = sum(map(prod, (*problem.operand_shapes, problem.result_shape)))
    return elements * problem.bytes_per_element


def _on_the_line(points: Sequence[tuple[int, int]], size: int, sizes: Sequence[int]) -> int:
    """Workspace at a size: that of the next larger known size, else extrapolated on a line."""
    for known, workspace in points:
        if known >= size:
            return workspace
    known, workspace = points[-1]
    if len(points) > 1:
        less_size, less = points[-2]
        return workspace + max(0, workspace - less) * (size - known) // (known - less_size)
    # The next size is assumed to need no more, so that it can be run and gives a second point.
    if size == sizes[sizes.index(known) + 1]:
        return workspace
    return workspace * size // known


@dataclass(eq=False)
class _Conclusions:
    """Conclusions from a state of the measurements; times and reasons are added on demand."""

    entries: Sequence[Measurement]
    # For each curve the chunks that take long enough to extrapolate from, as (size, time in ns).
    informative: Mapping[str, list[tuple[int, int]]]
    # True if a measured time was below the bound of the roofline.
    is_disproved: bool
    expected_ns: dict[Arm, int] = field(default_factory=dict)
    # For each value of `Elimination.is_active`: the curves that are ruled out, with the reason.
    reasons: dict[bool, dict[str, str]] = field(default_factory=dict)


@dataclass(eq=False)
class Elimination:
    """Decides which algorithms can still be part of the best split, by the measurements so far."""

    known: KnownChunks
    # Peak rates of the machine. None: lower bounds of times follow only from the times of smaller
    # chunks.
    roofline: Roofline | None = None
    # Set to False when no measured candidate fits. From then on slow candidates are measured, too,
    # and only candidates for which there is not enough memory are skipped.
    is_active: bool = True
    _concluded: _Conclusions | None = None

    def reasons(self) -> dict[str, str]:
        """The curves whose remaining chunks need not be measured, each with the reason."""
        known = self._so_far()
        if self.is_active not in known.reasons:
            best_ns, found = self._best_ns(), dict[str, str]()
            for curve, arms in self.known.listed.arms_by_curve.items():
                reason = self._reason(arms, best_ns)
                if reason:
                    found[curve] = f"{arms[0].algorithm} is ruled out: {reason}"
            known.reasons[self.is_active] = found
        return known.reasons[self.is_active]

    def _so_far(self) -> _Conclusions:
        """Conclusions from the measurements so far; kept until one is added or replaced."""
        entries = list(self.known.by_arm.values())
        known = self._concluded
        # Measurements are compared by identity: one may be replaced, but never changes.
        if (
            known is None
            or len(known.entries) != len(entries)
            or not all(map(is_, known.entries, entries))
        ):
            known = self._concluded = _Conclusions(
                entries, self._informative(), self._is_disproved()
            )
        return known

    def _reason(self, arms: Sequence[Arm], best_ns: float | None) -> str:
        """Reason why no arm of a curve can be part of the best split; "" if one can."""
        # An algorithm that was timed is not ruled out: the solver judges it by its times.
        if any(self.known.by_arm[arm].status == "ok" for arm in arms if arm in self.known.by_arm):
            return ""
        reason = self._memory_reason(arms)
        if reason or not self.is_active or best_ns is None:
            return reason
        # The best rate of any size counts: a fixed cost, such as that of transforming a filter,
        # matters less in larger chunks, and must not by itself rule an algorithm out.
        rate = min(self._known_or_expected_ns(arm) / arm.size for arm in arms)
        times = rate * self.known.listed.axis.extent / best_ns
        return "" if times <= HOPELESS else f"it is expected to take {times:.1f} times the best"

    def _memory_reason(self, arms: Sequence[Arm]) -> str:
        """Reason why there is not enough memory for any of a curve's arms; "" if there is."""
        costs = [self.known.listed.cost(arm.size, arm.algorithm) for arm in arms]
        least = min((cost.workspace_bytes if cost else 0 for cost in costs), default=0)
        most = self.known.most_bytes
        if least > most:
            need, room = format_sizes(least, most)
            return f"it needs {need} at least, more than the {room} that a candidate may take here"
        limit = self.known.limit
        if self.is_active and limit is not None and least > limit:
            need, room = format_sizes(least, limit)
            return f"it needs {need} at least, and the workspace limit is {room}"
        return ""

    def _best_ns(self) -> float | None:
        """Time of the whole kernel at the rate of the fastest usable chunk; None without one."""
        rates = (
            entry.time_ns / arm.size
            for arm, entry in self.known.by_arm.items()
            if entry.time_ns is not None and self.known.is_allowed(arm, entry)
        )
        fastest = min(rates, default=None)
        return None if fastest is None else fastest * self.known.listed.axis.extent

    def _known_or_expected_ns(self, arm: Arm) -> int:
        entry = self.known.by_arm.get(arm)
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

    def _expected_ns(self, arm: Arm, known: _Conclusions) -> int:
        cost = self.known.listed.cost(arm.size, arm.algorithm)
        if cost is None:
            return 0
        extrapolated = [
            _CALL_NS + int((time_ns - _CALL_NS) * growth(smaller, cost))
            for size, time_ns in known.informative.get(self.known.listed.curves[arm], ())
            if size <= arm.size and (smaller := self.known.listed.cost(size, arm.algorithm))
        ]
        roofline = None if known.is_disproved else self.roofline
        roofline_ns = 0 if roofline is None else roofline.time_ns(cost)
        # Noise makes measured times longer, and so also the bounds that are extrapolated from them.
        # The lowest of these is used.
        return max(roofline_ns, min(extrapolated, default=0))

    def _is_disproved(self) -> bool:
        """True if a measured time was below the bound of the roofline.

        The roofline's rates are too low if other processes used the machine while these rates were
        measured.
        """
        roofline = self.roofline
        return roofline is not None and any(
            entry.time_ns < roofline.time_ns(cost)
            for arm, entry in self.known.by_arm.items()
            if entry.time_ns and (cost := self.known.listed.cost(arm.size, arm.algorithm))
        )

    def _informative(self) -> dict[str, list[tuple[int, int]]]:
        found: dict[str, list[tuple[int, int]]] = {}
        for arm, entry in self.known.by_arm.items():
            curve = self.known.listed.curves.get(arm)
            if entry.time_ns is not None and curve is not None:
                fastest = min(entry.samples, default=entry.time_ns)
                if fastest >= _LEAST_TELLING_NS:
                    found.setdefault(curve, []).append((arm.size, fastest))
        return found

    def trials(self) -> list[Arm]:
        """A small chunk of each curve that has no time to extrapolate from; the cheapest first."""
        reasons, best_ns = self.reasons(), self._best_ns()
        found = (
            self._trial(arms, best_ns)
            for curve, arms in self.known.listed.arms_by_curve.items()
            if curve not in reasons
        )
        # A cheap trial may show that more expensive ones need not be run.
        return sorted((arm for arm in found if arm is not None), key=self.expected_ns)

    def _trial(self, arms: Sequence[Arm], best_ns: float | None) -> Arm | None:
        """The smallest of a curve's arms that is expected to run for `_TRIAL_NS`; or None."""
        first = arms[0]
        is_known = self.known.listed.curves[first] in self._so_far().informative
        if is_known or self.known.listed.cost(first.size, first.algorithm) is None:
            return None
        runnable = [arm for arm in arms if self.known.can_be_run(arm)]
        # If no time of the kernel is known, the smallest chunk is tried, because it costs least.
        if not runnable or best_ns is None:
            return next(iter(runnable), None)
        least = _TRIAL_NS * self.known.listed.axis.extent
        return next((arm for arm in runnable if best_ns * arm.size >= least), runnable[-1])


def growth(small: Cost, large: Cost) -> float:
    """Lower bound of a ratio: the time of a chunk of cost `large` over that of one of cost `small`.

    >>> growth(Cost(100, 50, 0), Cost(400, 100, 0))
    2.0
    """
    # A chunk takes at least as long as the longer of two times: that of its operations and that of
    # moving its data. Whichever of the two is longer, it grows by at least the smaller of the two
    # ratios.
    terms = ((large.operations, small.operations), (large.traffic_bytes, small.traffic_bytes))
    return min((more / less for more, less in terms if less), default=1.0)


def interval_of(entry: Measurement) -> Interval | None:
    """Confidence interval of a measurement's time; None if the measurement has no time."""
    if entry.time_ns is None:
        return None
    low, high = median_interval(entry.samples) if entry.samples else (entry.time_ns, entry.time_ns)
    return Interval(low, entry.time_ns, high)
