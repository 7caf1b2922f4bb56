"""Divide one pool of workspace among the kernels of a model; more time gives a better division.

Each kernel owns a part of the pool, so the workspaces of all kernels add up, and kernels cannot be
planned one by one. Each kernel has a front: its best times for every amount of workspace, as far as
its chunks were timed. An integer program chooses one point of each front. This is the WD method of
mu-cuDNN (Oyama et al., CLUSTER 2018, section III), except that a front is not measured everywhere:
only within a few limits, and within the part that the kernel gets by what is known so far.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ucudnn.config import Config
from ucudnn.errors import PlanError
from ucudnn.kernels.choose import KernelPlanner
from ucudnn.kernels.deadline import Deadline
from ucudnn.kernels.shares import StepShares
from ucudnn.kernels.splits import Front
from ucudnn.problem import Problem
from ucudnn.solvers import divide
from ucudnn.units import format_sizes
from ucudnn.verdict import POOL_GAIN

# This fraction of the time budget is for dividing a pool; the rest is for races of whole calls.
_DIVIDING = 0.6
# Kernels are measured in turns, and the pool is divided anew after each turn. A turn lasts as long
# as this many calls by torch, and at least this many seconds. A larger time budget gives more
# turns, not longer ones.
_TURN_CALLS = 10
_TURN_S = 0.2
# At first only a chunk of this fraction of each batch is run, once, to have a division early.
_FIRST_PART = 1 / 8
# Each kernel is measured within the largest part that it may get, within this fraction of it, and
# so on down to its smallest split.
_NEXT_LIMIT = 1 / 2
# Planning the kernels is assumed to take at most this many times as long as dividing the pool.
_PLANNING = 4


@dataclass(eq=False)
class PooledKernel:
    """What is known of one kernel, among whose points a division of the pool chooses."""

    # Number of calls of the kernel in a step.
    calls: int
    # Largest part in bytes that one call may own.
    most: int
    # The front of one call: its points whose workspace plus the surplus is at most `most`.
    front: Front = ()
    # Bytes that a whole call needs beyond its chunks, and the error from which they are known.
    surplus: int = 0
    error: PlanError | None = None
    # Limits in bytes within which nothing is left to measure.
    settled: set[int] = field(default_factory=set)
    # Length of the next turn in seconds; 0: that of the first turn.
    turn_s: float = 0.0

    @property
    def points(self) -> list[tuple[int, int]]:
        """(Workspace in bytes, time in ns) of one call."""
        return [(point.workspace_bytes + self.surplus, point.time_ns) for point in self.front]

    def time_within(self, part: int) -> int | None:
        """Least time in ns of a call within `part` bytes; None if no point fits."""
        return min((time_ns for size, time_ns in self.points if size <= part), default=None)

    @property
    def least(self) -> int:
        """The least workspace in bytes that all calls need together."""
        return self.calls * self.points[0][0]

    @property
    def below(self) -> int:
        """The largest limit in bytes within which the kernel has no known split."""
        return self.points[0][0] - 1

    def is_settled(self, limit: int) -> bool:
        """True if nothing is left to measure within a limit."""
        for settled in self.settled:
            # The best split within a larger limit is also the best within what it needs.
            sizes = [point.workspace_bytes for point in self.front]
            needed = max((size for size in sizes if size <= settled), default=0)
            if needed <= limit <= settled:
                return True
        return False


def divided(
    choices: Mapping[Problem, PooledKernel], total_bytes: int, solver: str
) -> dict[Problem, int]:
    """The workspace in bytes that each call of a kernel gets, so that the total time is minimal.

    Raises PlanError if the pool is too small.

    >>> from ucudnn.kernels.splits import Point
    >>> slow, fast = (Problem("fprop", n, 4, 4, (9,), (3,)) for n in (1, 2))
    >>> fronts = (Point(0, 9), Point(4, 8)), (Point(0, 9), Point(6, 2))
    >>> choices = {slow: PooledKernel(2, 4, fronts[0]), fast: PooledKernel(1, 6, fronts[1])}
    >>> list(divided(choices, 8, "auto").values())  # 2 bytes are left over, for three calls
    [0, 6]
    """
    # A kernel with an empty front has no known split that fits, so it gets no part.
    named = {problem: one for problem, one in choices.items() if one.front}
    if not named:
        return {}
    fronts = [
        [(one.calls * size, one.calls * time_ns) for size, time_ns in one.points]
        for one in named.values()
    ]
    try:
        division = divide(fronts, total_bytes, solver)
    except PlanError as error:
        # Only the error for a pool that is too small is replaced; any other is raised as it is.
        if error.smallest_bytes is None:
            raise
        total, least = format_sizes(total_bytes, error.smallest_bytes)
        raise PlanError(
            f"no plans of these {len(named)} kernels fit total_workspace={total} together; the "
            f"smallest need {least}; raise it, or set workspace_limit instead if "
            f"the kernels run one after the other",
            error.smallest_bytes,
        ) from error
    # Every call gets an equal part of the bytes left over, because a whole call may need more than
    # the chunks from which the front was made.
    calls = sum(one.calls for one in named.values())
    left = (total_bytes - division.workspace_bytes) // calls
    return {
        problem: min(one.points[place][0] + left, one.most)
        for (problem, one), place in zip(named.items(), division.choice, strict=True)
    }


@dataclass(eq=False)
class WorkspacePool:
    """Divides one pool of workspace, and divides it anew after each turn of measurements."""

    config: Config
    shares: StepShares
    parts: dict[Problem, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.config.total_bytes is not None
        self._total_bytes = self.config.total_bytes
        self.session, self.tunings = self.shares.session, self.shares.tunings
        self._known: dict[Problem, PooledKernel] = {}
        for problem, tuning in self.tunings.items():
            calls, limit = len(tuning.kernel.layers), self.shares.limits.of(problem)
            # All calls of a kernel have the same plan, and so equal parts.
            part = self._total_bytes // calls
            self._known[problem] = PooledKernel(calls, part if limit is None else min(limit, part))

    def look_first(self) -> None:
        """Run small chunks of torch's own convolutions until splits into them fit the pool.

        These splits allow a first division of the pool, and their times show how long whole calls
        take. The cheapest kernels come first, because there may not be time for all of them.
        """
        part, end = _FIRST_PART, self.session.end
        most = max(problem.batch for problem in self.tunings)
        while len(self.parts) < len(self.tunings) and part * most >= 1:
            for problem in reversed(self.shares.by_expected_cost()):
                if self.session.is_over:
                    break
                size = max(1, int(part * problem.batch))
                self.session.begin(problem)
                self.tunings[problem].look_at_chunks(size, self._known[problem].most)
            began = end.clock()
            self.divide_by_known()
            # Keep enough time to plan the kernels by what was measured.
            kept_s = _PLANNING * (end.clock() - began)
            self.session.end = min(self.session.end, end.later(-kept_s))
            if self.session.is_over:
                break
            least = sum(one.least for one in self._fitting.values())
            part *= min(0.5, self._total_bytes / max(1, least))
        self.session.flush()

    def divide_by_known(self) -> None:
        """Divide the pool by what was timed so far; nothing is measured."""
        self._survey(self._problems)

    def divide(self, deadline: Deadline, last: Deadline) -> None:
        """Find each kernel's part of the pool, in bytes per call.

        There is a division as soon as each kernel has a split and these splits together fit the
        pool; finding one may go on until `last`. It is improved until no other division can be
        better, or the time is over. Raises PlanError if the pool is too small.
        """
        until = deadline.part(_DIVIDING)
        try:
            # A pass that measured nothing is the last one, because the next pass would find the
            # same. In a second tune, which finds all measurements in the cache, the first pass is
            # the last one.
            while True:
                before = self.session.measured
                for one in self._known.values():
                    one.settled.clear()
                self.divide_by_known()
                if not self._is_divided(last) or until.is_over:
                    return
                self._improve(until)
                if self.session.measured == before or until.is_over:
                    return
        finally:
            self.session.flush()
            self.session.stop_at(deadline)

    def refuse(self, problem: Problem, error: PlanError) -> None:
        """Learn from the error of a kernel without a plan in its part how much more calls need.

        Raises the error if it shows nothing new, because another division would fail like this one.
        """
        one = self._known[problem]
        # The first point of the front is the least workspace that the chunks of one call need. The
        # error names the least that all calls of the kernel need together.
        surplus = (error.smallest_bytes or 0) // one.calls - one.front[0].workspace_bytes
        if surplus <= one.surplus:
            raise error
        one.surplus, one.error = surplus, error

    def learn(self, deadline: Deadline) -> bool:
        """True if planning the kernels has shown that another division is needed or better.

        Planning shows how much workspace calls need beyond their chunks, and times more chunks.
        """
        if any(part <= self._known[problem].below for problem, part in self.parts.items()):
            return True
        if deadline.is_over:
            return False
        parts = self.parts
        self.divide_by_known()
        better_ns, now_ns = self._time_ns(self.parts), self._time_ns(parts)
        self.parts = parts
        return bool(better_ns and now_ns and better_ns < (1 - POOL_GAIN) * now_ns)

    @property
    def _problems(self) -> list[Problem]:
        """All kernels, those that take longest first."""
        return [problem for group in self.shares.by_geometry() for problem in group]

    @property
    def _fitting(self) -> dict[Problem, PooledKernel]:
        """The kernels that have a split within what they may own, those that take longest first."""
        return {p: self._known[p] for p in self._problems if self._known[p].front}

    def _time_ns(self, parts: Mapping[Problem, int]) -> int | None:
        """Sum of all calls' measured times by a division; None if a kernel has no part."""
        if len(parts) < len(self.tunings):
            return None
        known = ((self._known[problem], part) for problem, part in parts.items())
        return sum(one.calls * (one.time_within(part) or 0) for one, part in known)

    def _survey(self, problems: Iterable[Problem]) -> None:
        """Update what is known of these kernels, and divide the pool by what is known of all."""
        for problem in problems:
            one = self._known[problem]
            one.front = tuple(
                point
                for point in self.tunings[problem].front(one.most)
                if point.workspace_bytes + one.surplus <= one.most
            )
        known = self._fitting
        # If the kernels do not all fit the pool, those that need most get no part of it, so that
        # the others can have a plan.
        while sum(one.least for one in known.values()) > self._total_bytes:
            del known[max(known, key=lambda problem: known[problem].least)]
        self.parts = divided(known, self._total_bytes, self.config.solver)

    def _is_divided(self, last: Deadline) -> bool:
        """Measure until all kernels have splits that together fit the pool; False if time ran out.

        Raises PlanError if nothing more can be measured and the splits do not fit the pool.
        """
        for problem in self._problems:
            one = self._known[problem]
            if not one.front and not last.is_over:
                self._look_for(problem, one.most, last)
            if not one.front and not last.is_over:
                self._refuse(problem)
        known = self._fitting
        while len(self.parts) < len(known) and not last.is_over:
            needing = [problem for problem, one in known.items() if one.least]
            unseen = [one for one in needing if known[one].below not in known[one].settled]
            if not unseen:
                # If chunks were not run for lack of time, no error is raised, because they might
                # fit. Otherwise `divided` raises the error.
                if any(self.tunings[problem].lacks_time for problem in needing):
                    break
                divided(known, self._total_bytes, self.config.solver)
            problem = max(unseen, key=lambda problem: known[problem].least)
            self._look_for(problem, known[problem].below, last)
        return len(self.parts) == len(known)

    def _refuse(self, problem: Problem) -> None:
        """Raise the error of a kernel that has no split within the pool."""
        one, tuning = self._known[problem], self.tunings[problem]
        if one.error is not None:
            raise one.error
        self.session.stop_at(Deadline.never())
        try:
            KernelPlanner(tuning, one.most).require_split()
        except PlanError as error:
            # Of a recording the others are planned, with a warning that nothing of this one fits.
            if self.session.can_measure or error.smallest_bytes is None:
                raise
        finally:
            tuning.release()

    def _look_for(self, problem: Problem, limit: int, until: Deadline) -> None:
        """Measure a kernel until one of its splits fits a limit."""
        # Any split will do here. The time for chunks is set to be over, so that measuring ends as
        # soon as there is a plan.
        self.session.stop_at(until.at_most(0.0), until)
        one, tuning = self._known[problem], self.tunings[problem]
        self.session.begin(problem)
        for _ in tuning.measure(limit):
            self._survey(self._like(problem))
            if one.time_within(limit) is not None:
                break
        else:
            self._survey(self._like(problem))
        tuning.release()
        if one.time_within(limit) is None and not until.is_over:
            one.settled.add(limit)

    def _like(self, problem: Problem) -> Sequence[Problem]:
        groups = self.shares.by_geometry()
        return next(group for group in groups if problem in group)

    def _improve(self, until: Deadline) -> None:
        """Measure each kernel within a few limits, until another pass finds nothing to measure."""
        is_done = False
        while not is_done:
            is_done = True
            for problem, limit in self._unsettled():
                is_done = False
                self._measure(problem, limit, until)
                if until.is_over:
                    return

    def _unsettled(self) -> Iterator[tuple[Problem, int]]:
        """Kernels and limits within which something is left to measure."""
        limits = {problem: self._limits(problem) for problem in self.parts}
        for turn in range(max(map(len, limits.values()), default=0)):
            # If each kernel gets all that it can use, no other division is better.
            if turn and all(map(self._is_fastest, self.parts)):
                return
            for problem in self._problems:
                own = limits.get(problem, ())
                if turn < len(own) and not self._known[problem].is_settled(own[turn]):
                    yield problem, own[turn]

    def _is_fastest(self, problem: Problem) -> bool:
        one = self._known[problem]
        return one.time_within(self.parts[problem]) == one.front[-1].time_ns

    def _limits(self, problem: Problem) -> list[int]:
        """The limits to measure a kernel within: the largest, its part, and fixed smaller ones."""
        one, found = self._known[problem], list[int]()
        limit = one.most
        while limit and limit >= one.front[0].workspace_bytes:
            found.append(limit)
            limit = int(limit * _NEXT_LIMIT)
        return [*found[:1], self.parts[problem], *found[1:]]

    def _measure(self, problem: Problem, limit: int, until: Deadline) -> None:
        """Measure a kernel within a limit for one turn, and divide the pool anew."""
        one, tuning = self._known[problem], self.tunings[problem]
        turn_s = one.turn_s or max(_TURN_S, _TURN_CALLS * tuning.step_ns / one.calls / 1e9)
        end = until.at_most(turn_s)
        self.session.stop_at(end)
        self.session.begin(problem)
        for _ in tuning.measure(limit):
            pass
        tuning.release()
        if end.is_over:
            # The next turn of this kernel is twice as long. Otherwise a turn that is too short to
            # measure anything would be repeated again and again.
            one.turn_s = 2 * turn_s
        else:
            one.settled.add(limit)
        self._survey(self._like(problem))
