"""Bounds of the times of one kernel's chunks that never ran, and their expected workspace.

A time has two lower bounds. Both follow from the lower bounds of operations and traffic that an
algorithm states (`Cost`). One bound is the roofline of the machine. The other bound follows from a
smaller chunk that was timed: times grow at least by the smaller of two ratios, that of the
operations and that of the traffic.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import is_
from typing import TYPE_CHECKING

from ucudnn.backends import Cost, Roofline
from ucudnn.kernels.items import held_bytes
from ucudnn.problem import Problem
from ucudnn.system.processes import cached_property
from ucudnn.units import format_sizes

if TYPE_CHECKING:
    from ucudnn.benchmark.bench import Arm
    from ucudnn.kernels.candidates import KernelCandidates
    from ucudnn.measurement import Measurement

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
class WorkspaceModel:
    """Known and extrapolated workspace of a kernel's chunks, by arm.

    An arm is a size of chunk, an algorithm, and the role of the chunk in its split. The arms that
    run the same implementation form a curve, whose workspace is extrapolated along the sizes.

    For each implementation, workspace is assumed to grow linearly with the chunk.
    """

    candidates: KernelCandidates
    # Measurements so far; `KernelRecords` adds to them.
    records: Mapping[Arm, Measurement]
    # Workspace in bytes that a chunk may use, None for any.
    limit: int | None
    # Memory in bytes that a benchmark may use on this machine.
    available_bytes: int
    # Arms that ran out of memory.
    skipped: Collection[Arm] = ()

    @cached_property
    def most_bytes(self) -> int:
        """The largest workspace to try on this machine; `fits` checks the workspace limit."""
        if self.limit is not None:
            return self.available_bytes
        whole = _operand_bytes(self.candidates.problem)
        return min(self.available_bytes, max(_SMALL_BYTES, _MOST_OPERANDS * whole))

    @cached_property
    def _must_be_known(self) -> bool:
        return must_be_known(self.candidates.problem, self.limit, self.available_bytes)

    def fits(self, arm: Arm, workspace: int) -> bool:
        """True if a workspace, with the memory that the arm's role needs, is within the limit."""
        held = workspace + held_bytes(self.candidates.problem, arm.role)
        return self.limit is None or held <= self.limit

    def may_fit(self, arm: Arm) -> bool:
        """False if the lower bound of workspace that the algorithm states is too large."""
        cost = self.candidates.cost(arm.size, arm.algorithm)
        return cost is None or self.may_run(arm, cost.workspace_bytes)

    def may_run(self, arm: Arm, workspace: int) -> bool:
        """True if so many bytes of workspace fit both the limit and `most_bytes`."""
        return self.fits(arm, workspace) and workspace <= self.most_bytes

    def can_be_run(self, arm: Arm) -> bool:
        """True for an arm that never ran and is expected to fit."""
        workspace = self.expected(arm)
        is_new = arm not in self.records and arm not in self.skipped
        return is_new and workspace is not None and self.may_run(arm, workspace)

    def known(self, arm: Arm) -> int | None:
        """Workspace of an arm in bytes, as measured or as stated by the backend."""
        entry = self.records.get(arm)
        if entry is not None and entry.workspace_bytes is not None:
            return entry.workspace_bytes
        return self.candidates.by_arm[arm].workspace_bytes

    def expected(self, arm: Arm) -> int | None:
        """Workspace of an arm in bytes, known or extrapolated; None if nothing is known."""
        known = self.known(arm)
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
            return None if self._must_be_known else 0
        return _on_the_line(points, arm.size, self.candidates.sizes)

    def _points(self, arm: Arm) -> list[tuple[int, int]]:
        """Known points (size, workspace) of an arm's curve: in its own role, else in others."""
        curves = self.candidates.curves
        known = [
            (other, entry.workspace_bytes)
            for other, entry in self.records.items()
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
        candidates = self.candidates
        if candidates.problem.op == "wgrad":
            return 0
        return candidates.axis.part(size).result_bytes


def must_be_known(problem: Problem, limit: int | None, available_bytes: int) -> bool:
    """True if the workspace of a large chunk must be known before it may run.

    >>> must_be_known(Problem("fprop", 1, 1, 1, (9,), (3,)), None, 1 << 30)
    False
    """
    return limit is not None or _MOST_COPIES * _operand_bytes(problem) > available_bytes


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

    candidates: KernelCandidates
    # Measurements so far; `KernelRecords` adds to them.
    records: Mapping[Arm, Measurement]
    workspaces: WorkspaceModel
    # Returns True if a measured chunk may be part of a plan.
    is_allowed: Callable[[Arm, Measurement], bool]
    # Peak rates of the machine. None: lower bounds of times follow only from the times of smaller
    # chunks.
    roofline: Roofline | None = None
    # Set to False when no measured candidate fits. From then on slow candidates are measured, too,
    # and only candidates for which there is not enough memory are skipped.
    is_active: bool = True
    _known: _Conclusions | None = None

    def reasons(self) -> dict[str, str]:
        """The curves whose remaining chunks need not be measured, each with the reason."""
        known = self._so_far()
        if self.is_active not in known.reasons:
            best_ns, found = self._best_ns(), dict[str, str]()
            for curve, arms in self.candidates.arms_by_curve.items():
                reason = self._reason(arms, best_ns)
                if reason:
                    found[curve] = f"{arms[0].algorithm} is ruled out: {reason}"
            known.reasons[self.is_active] = found
        return known.reasons[self.is_active]

    def _so_far(self) -> _Conclusions:
        """Conclusions from the measurements so far; kept until one is added or replaced."""
        entries = list(self.records.values())
        known = self._known
        # Measurements are compared by identity: one may be replaced, but never changes.
        if (
            known is None
            or len(known.entries) != len(entries)
            or not all(map(is_, known.entries, entries))
        ):
            known = self._known = _Conclusions(entries, self._informative(), self._is_disproved())
        return known

    def _reason(self, arms: Sequence[Arm], best_ns: float | None) -> str:
        """Reason why no arm of a curve can be part of the best split; "" if one can."""
        # An algorithm that was timed is not ruled out: the solver judges it by its times.
        if any(self.records[arm].status == "ok" for arm in arms if arm in self.records):
            return ""
        reason = self._memory_reason(arms)
        if reason or not self.is_active or best_ns is None:
            return reason
        # The best rate of any size counts: a fixed cost, such as that of transforming a filter,
        # matters less in larger chunks, and must not by itself rule an algorithm out.
        rate = min(self._known_or_expected_ns(arm) / arm.size for arm in arms)
        times = rate * self.candidates.axis.extent / best_ns
        return "" if times <= HOPELESS else f"it is expected to take {times:.1f} times the best"

    def _memory_reason(self, arms: Sequence[Arm]) -> str:
        """Reason why there is not enough memory for any of a curve's arms; "" if there is."""
        costs = [self.candidates.cost(arm.size, arm.algorithm) for arm in arms]
        least = min((cost.workspace_bytes if cost else 0 for cost in costs), default=0)
        most = self.workspaces.most_bytes
        if least > most:
            need, room = format_sizes(least, most)
            return f"it needs {need} at least, more than the {room} that a candidate may take here"
        limit = self.workspaces.limit
        if self.is_active and limit is not None and least > limit:
            need, room = format_sizes(least, limit)
            return f"it needs {need} at least, and the workspace limit is {room}"
        return ""

    def _best_ns(self) -> float | None:
        """Time of the whole kernel at the rate of the fastest usable chunk; None without one."""
        rates = (
            entry.time_ns / arm.size
            for arm, entry in self.records.items()
            if entry.time_ns is not None and self.is_allowed(arm, entry)
        )
        fastest = min(rates, default=None)
        return None if fastest is None else fastest * self.candidates.axis.extent

    def _known_or_expected_ns(self, arm: Arm) -> int:
        entry = self.records.get(arm)
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
        cost = self.candidates.cost(arm.size, arm.algorithm)
        if cost is None:
            return 0
        extrapolated = [
            _CALL_NS + int((time_ns - _CALL_NS) * growth(smaller, cost))
            for size, time_ns in known.informative.get(self.candidates.curves[arm], ())
            if size <= arm.size and (smaller := self.candidates.cost(size, arm.algorithm))
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
            for arm, entry in self.records.items()
            if entry.time_ns and (cost := self.candidates.cost(arm.size, arm.algorithm))
        )

    def _informative(self) -> dict[str, list[tuple[int, int]]]:
        found: dict[str, list[tuple[int, int]]] = {}
        for arm, entry in self.records.items():
            curve = self.candidates.curves.get(arm)
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
            for curve, arms in self.candidates.arms_by_curve.items()
            if curve not in reasons
        )
        # A cheap trial may show that more expensive ones need not be run.
        return sorted((arm for arm in found if arm is not None), key=self.expected_ns)

    def _trial(self, arms: Sequence[Arm], best_ns: float | None) -> Arm | None:
        """The smallest of a curve's arms that is expected to run for `_TRIAL_NS`; or None."""
        first = arms[0]
        is_known = self.candidates.curves[first] in self._so_far().informative
        if is_known or self.candidates.cost(first.size, first.algorithm) is None:
            return None
        runnable = [arm for arm in arms if self.workspaces.can_be_run(arm)]
        # If no time of the kernel is known, the smallest chunk is tried, because it costs least.
        if not runnable or best_ns is None:
            return next(iter(runnable), None)
        least = _TRIAL_NS * self.candidates.axis.extent
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
