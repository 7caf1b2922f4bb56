"""What each kernel takes of a training step, what it could gain, and its part of the time.

A kernel's part of the time follows from its possible gain in a training step. The times of torch's
own convolutions give an upper bound of this gain.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from ucudnn.backends import Cost, Roofline
from ucudnn.problem import Problem
from ucudnn.system.processes import cached_property

if TYPE_CHECKING:
    from ucudnn.kernels.deadline import Deadline, EffortLimits
    from ucudnn.kernels.device import Session
    from ucudnn.kernels.limits import Limits
    from ucudnn.kernels.measure import KernelTuning

# A group of kernels gets at least this fraction of the time that is not kept for any kernel (see
# `StepShares.in_turn`), however little it could gain.
_LEAST_PART = 0.05
# Only torch's own convolution is measured for a kernel whose time is less than this many times the
# ignored share of the step (`EffortLimits.ignored_share`). To save that share, a plan would have to
# save more than a tenth of the kernel's time.
_LOOKED_AT_ONCE = 10
# A kernel that is tuned is measured on while its possible gain is more than this fraction of its
# time, however small its share of the step is.
_MOST_TOLERANCE = 0.25


def least_ns(costs: Iterable[Cost | None], roofline: Roofline | None) -> int:
    """Lower bound of a kernel's time by any of its algorithms; 0 if nothing is known.

    >>> least_ns([Cost(2000, 0, 0), Cost(0, 400, 0)], Roofline(1e9, 1e9, 0))
    400
    """
    known = list(costs)
    # An algorithm whose cost is not known may be faster than all the others.
    if roofline is None or not all(known):
        return 0
    return min((roofline.time_ns(cost) for cost in known if cost is not None), default=0)


@dataclass(frozen=True, slots=True)
class Stake:
    """What one kernel takes of a step, and what a plan for it could save."""

    # Time of all calls of the kernel by torch's own convolution, and a lower bound of the time of
    # these calls by any algorithm.
    time_ns: int
    least_ns: int
    # True if torch's own convolution exceeds the workspace limit, so that a plan must be found.
    is_forced: bool

    @property
    def gain_ns(self) -> int:
        """Upper bound of the time that a plan saves; the kernel's whole time if it needs a plan."""
        return self.time_ns if self.is_forced else max(0, self.time_ns - self.least_ns)

    def is_ignored(self, step_ns: int, effort: EffortLimits) -> bool:
        """True if torch's own convolution is kept without measuring anything else.

        >>> from ucudnn.kernels.deadline import EFFORTS
        >>> Stake(900, 100, False).is_ignored(100_000, EFFORTS["normal"])  # 0.9 % of the step
        True
        """
        ignored_ns = effort.ignored_share * step_ns
        is_small = self.time_ns < _LOOKED_AT_ONCE * ignored_ns or self.gain_ns < ignored_ns
        return is_small and not self.is_forced

    def tolerance(self, step_ns: int, effort: EffortLimits) -> float:
        """The possible gain, as a fraction of the kernel's time, at which measuring it ends.

        >>> from ucudnn.kernels.deadline import EFFORTS
        >>> Stake(50_000, 0, True).tolerance(1_000_000, EFFORTS["normal"])
        0.06
        """
        if self.time_ns == 0:
            return 0.0
        # `tolerated_share` is a fraction of the step's time; the result is a fraction of the
        # kernel's time.
        return min(_MOST_TOLERANCE, effort.tolerated_share * step_ns / self.time_ns)


@dataclass(eq=False)
class StepShares:
    """What each kernel takes of a step, by the known times of torch's own convolutions."""

    session: Session
    tunings: Mapping[Problem, KernelTuning]
    limits: Limits

    @cached_property
    def stakes(self) -> dict[Problem, Stake]:
        """The stake of each kernel in the step; computed once, after all kernels were run."""
        found = {}
        for problem, tuning in self.tunings.items():
            if tuning.default is None:
                continue
            limit, time_ns = self.limits.of(problem), tuning.step_ns
            is_forced = limit is not None and (tuning.default.workspace_bytes or 0) > limit
            bound_ns = len(tuning.kernel.layers) * self._least_ns(problem)
            # A measured time below the lower bound shows that the bound is wrong: the machine was
            # busy when its peak rates were measured.
            found[problem] = Stake(time_ns, bound_ns if bound_ns <= time_ns else 0, is_forced)
        return found

    def _least_ns(self, problem: Problem) -> int:
        session = self.session
        listed = session.backend.candidates(problem)
        costs = [session.cost(problem, candidate.algorithm) for candidate in listed]
        return least_ns(costs, session.roofline(problem.dtype))

    def cost_ns(self, problems: Iterable[Problem]) -> int:
        """Time of torch's own convolution for all calls of some kernels, as far as known."""
        return sum(self.tunings[problem].step_ns for problem in problems)

    def gain_ns(self, problems: Iterable[Problem]) -> int:
        """Upper bound of the time that plans of some kernels could save in a step."""
        return sum(self.stakes[p].gain_ns for p in problems if p in self.stakes)

    def in_turn(
        self, deadline: Deadline, problems: Collection[Problem]
    ) -> Iterator[tuple[list[Problem], Deadline]]:
        """Groups of kernels that differ only in their batch, the largest possible gain first.

        With each group comes the end of its part of the time that is left then. Half of the time is
        kept for the kernels that must get a plan, in equal parts. The rest is divided in proportion
        to the possible gains.
        """
        waiting = set(problems)
        # Finding any plan of a kernel takes some time, however little the kernel could gain.
        kept_s = deadline.left_s() / 2 / max(1, self._forced(problems))
        for group in self.by_gain(problems):
            left_s, gain_ns, own = deadline.left_s(), self.gain_ns(waiting), deadline
            if left_s < inf:
                part = self.gain_ns(group) / gain_ns if gain_ns else 1.0
                free_s = max(0.0, left_s - kept_s * self._forced(waiting))
                own_s = kept_s * self._forced(group) + max(part, _LEAST_PART) * free_s
                own = deadline.at_most(own_s)
            yield group, own
            waiting.difference_update(group)

    def _forced(self, problems: Iterable[Problem]) -> int:
        """The number of these kernels that must get a plan."""
        return sum(p in self.stakes and self.stakes[p].is_forced for p in problems)

    def ignored(self, total_ns: int, effort: EffortLimits) -> Iterator[tuple[Problem, str]]:
        """Kernels that are not worth measuring further, with the reason."""
        for problem, stake in self.stakes.items():
            if stake.is_ignored(total_ns, effort):
                share = stake.gain_ns / total_ns
                yield (
                    problem,
                    f"looked at once: it could save {share:.2%} of the convolutions' time at most",
                )

    def by_expected_cost(self) -> list[Problem]:
        """All kernels, those expected to take longest first; no kernel needs to have run."""
        # Floating-point operations are all that is known of a kernel that never ran.
        return sorted(self.tunings, key=lambda p: -p.flops * len(self.tunings[p].kernel.layers))

    def by_geometry(self) -> list[list[Problem]]:
        """Groups of kernels that differ only in their batch, the slowest group first."""
        return sorted(_grouped(self.tunings), key=self.cost_ns, reverse=True)

    def by_gain(self, problems: Iterable[Problem]) -> list[list[Problem]]:
        """Groups of kernels that differ only in their batch, the largest possible gain first."""
        # Sorting is stable: of groups with equal gains, the slower one comes first.
        groups = sorted(_grouped(problems), key=self.cost_ns, reverse=True)
        return sorted(groups, key=self.gain_ns, reverse=True)


def _grouped(problems: Iterable[Problem]) -> list[list[Problem]]:
    groups: dict[Problem, list[Problem]] = {}
    for problem in problems:
        groups.setdefault(problem.with_batch(1), []).append(problem)
    return list(groups.values())
