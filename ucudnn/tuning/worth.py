"""Possible gain of each kernel in a training step, which decides how much it is measured.

It is known from the times of torch's own convolutions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ucudnn.backends import Cost, Roofline
from ucudnn.measurement import Measurement
from ucudnn.problem import Problem
from ucudnn.system.processes import cached_property
from ucudnn.tuning.effort import Effort
from ucudnn.tuning.memory_budget import Limits
from ucudnn.tuning.session import Session

# A kernel below this many times the ignored share of the step is not measured beyond its default:
# to save the ignored share it would have to become faster by more than a tenth of its time.
_LOOKED_AT_ONCE = 10
# However small a kernel's share is, a known gain of this fraction of its time is taken.
_MOST_TOLERANCE = 0.25


def least_ns(costs: Iterable[Cost | None], roofline: Roofline | None) -> int:
    """Lower bound of a kernel's time by any of its algorithms; 0 if nothing is known.

    >>> least_ns([Cost(2000, 0, 0), Cost(0, 400, 0)], Roofline(1e9, 1e9, 0))
    400

    Args:
        costs: of all its algorithms.
        roofline: of the machine.
    """
    known = list(costs)
    # An algorithm whose cost is not known may be faster than all the others.
    if roofline is None or not all(known):
        return 0
    return min((roofline.time_ns(cost) for cost in known if cost is not None), default=0)


@dataclass(frozen=True, slots=True)
class Stake:
    """The part of one kernel in a step.

    Args:
        time_ns: time of all its calls by torch's own convolution.
        least_ns: lower bound of the time of these calls by any algorithm.
        is_forced: torch's own exceeds the workspace limit, so another plan must be found.
    """

    time_ns: int
    least_ns: int
    is_forced: bool

    @property
    def gain_ns(self) -> int:
        """Upper bound of the time that a plan saves; all of the time if a plan must be found."""
        return self.time_ns if self.is_forced else max(0, self.time_ns - self.least_ns)

    def is_ignored(self, step_ns: int, effort: Effort) -> bool:
        """True if torch's own convolution is kept without measuring anything else.

        >>> from ucudnn.tuning.effort import EFFORTS
        >>> Stake(900, 100, False).is_ignored(100_000, EFFORTS["normal"])  # 0.9 % of the step
        True

        Args:
            step_ns: of all kernels together.
            effort: which gains are too small to look for.
        """
        ignored_ns = effort.ignored_share * step_ns
        is_small = self.time_ns < _LOOKED_AT_ONCE * ignored_ns or self.gain_ns < ignored_ns
        return is_small and not self.is_forced

    def tolerance(self, step_ns: int, effort: Effort) -> float:
        """Fraction of the kernel's time: smaller possible gains are ignored.

        >>> from ucudnn.tuning.effort import EFFORTS
        >>> Stake(50_000, 0, True).tolerance(1_000_000, EFFORTS["normal"])
        0.06

        Args:
            step_ns: of all kernels together.
            effort: which gains are too small to look for.
        """
        if self.time_ns == 0:
            return 0.0
        # A fraction of the step, as a fraction of what the kernel takes of it.
        return min(_MOST_TOLERANCE, effort.tolerated_share * step_ns / self.time_ns)


class StepShares:
    """Known times of torch's own convolutions in a step.

    Args:
        session: of a device, with the algorithms that it has and its roofline.
        layers_by_problem: the names of the layers that run each kernel.
        limits: workspace that each kernel may use.
    """

    def __init__(
        self,
        session: Session,
        layers_by_problem: Mapping[Problem, tuple[str, ...]],
        limits: Limits,
    ) -> None:
        self._session = session
        self._layers = layers_by_problem
        self._limits = limits
        self.defaults: dict[Problem, Measurement] = {}  # filled while kernels are looked at

    @cached_property
    def stakes(self) -> dict[Problem, Stake]:
        """The stake of each kernel in the step; computed once, after all kernels were run."""
        found = {}
        for problem, entry in self.defaults.items():
            calls = len(self._layers[problem])
            limit = self._limits.of(problem)
            is_forced = limit is not None and (entry.workspace_bytes or 0) > limit
            time_ns, bound_ns = entry.time_ns or 0, self._least_ns(problem)
            # A time below the bound disproves it: the machine was busy when its speed was taken.
            if bound_ns > time_ns:
                bound_ns = 0
            found[problem] = Stake(calls * time_ns, calls * bound_ns, is_forced)
        return found

    def _least_ns(self, problem: Problem) -> int:
        """A lower bound of a call's time by any algorithm; 0 if nothing is known."""
        session = self._session
        listed = session.backend.candidates(problem)
        costs = [session.cost(problem, candidate.algorithm) for candidate in listed]
        return least_ns(costs, session.roofline(problem.dtype))

    def cost_ns(self, problems: Iterable[Problem]) -> int:
        """Time of torch's own convolution for all calls of some kernels, as far as known."""
        known = ((self.defaults.get(p), len(self._layers[p])) for p in problems)
        return sum((entry.time_ns or 0) * calls for entry, calls in known if entry is not None)

    def gain_ns(self, problems: Iterable[Problem]) -> int:
        """Upper bound of the time that plans of some kernels could save in a step."""
        return sum(self.stakes[p].gain_ns for p in problems if p in self.stakes)

    def part(self, problems: Iterable[Problem], waiting: Iterable[Problem]) -> float:
        """Fraction of the time that is left for some kernels, by their possible gain.

        Args:
            problems: the kernels.
            waiting: all kernels that are not finished, these among them.
        """
        gain_ns = self.gain_ns(waiting)
        return self.gain_ns(problems) / gain_ns if gain_ns else 1.0

    def forced(self, problems: Iterable[Problem]) -> int:
        """The number of kernels that must not stay without a plan."""
        return sum(p in self.stakes and self.stakes[p].is_forced for p in problems)

    def ignored(self, total_ns: int, effort: Effort) -> Iterator[tuple[Problem, str]]:
        """Kernels that are not worth measuring, with the reason.

        Args:
            total_ns: of all kernels of the step.
            effort: which gains are too small to look for.
        """
        for problem, stake in self.stakes.items():
            if stake.is_ignored(total_ns, effort):
                # A plan can save neither more than the kernel's time nor more than its gain.
                share = min(stake.time_ns, stake.gain_ns) / total_ns
                yield (
                    problem,
                    f"looked at once: it could save {share:.2%} of the convolutions' time at most",
                )

    def by_expected_cost(self) -> list[Problem]:
        """Kernels in the order of their expected time, the longest first, before any was run."""
        # Floating-point operations are all that is known of a kernel that never ran.
        return sorted(self._layers, key=lambda p: -p.flops * len(self._layers[p]))

    def by_geometry(self) -> list[list[Problem]]:
        """Groups of kernels that differ only in their batch, the longest first."""
        return sorted(_grouped(self._layers), key=self.cost_ns, reverse=True)

    def by_gain(self, problems: Iterable[Problem]) -> list[list[Problem]]:
        """Some kernels in such groups, those with the largest possible gain first."""
        # Sorting keeps the order of equals: of groups with one gain the costlier comes first.
        groups = sorted(_grouped(problems), key=self.cost_ns, reverse=True)
        return sorted(groups, key=self.gain_ns, reverse=True)


def _grouped(problems: Iterable[Problem]) -> list[list[Problem]]:
    groups: dict[Problem, list[Problem]] = {}
    for problem in problems:
        groups.setdefault(problem.with_batch(1), []).append(problem)
    return list(groups.values())
