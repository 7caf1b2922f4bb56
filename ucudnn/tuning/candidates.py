"""Chunks of one kernel that may be measured: their sizes, algorithms and roles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from ucudnn.axis import AbstractAxis, RowAxis
from ucudnn.benchmark.bench import Arm
from ucudnn.measurement import Candidate, Role, role_of
from ucudnn.split import DEFAULT_ALGORITHM
from ucudnn.system.processes import cached_property
from ucudnn.tuning.items import lists_of

if TYPE_CHECKING:
    from ucudnn.backends import Cost
    from ucudnn.tuning.session import Session


class KernelCandidates:
    """Candidates of one kernel along one axis.

    If deterministic ones are asked for, torch's own convolution is listed all the same, as a
    baseline.
    """

    def __init__(
        self,
        session: Session,
        axis: AbstractAxis,
        sizes: Iterable[int],
        adds_bias: bool = False,
        extrapolates: bool = False,
        deterministic: bool = False,
    ) -> None:
        self._session = session
        self.axis = axis
        self.problem = axis.problem
        self.sizes = tuple(sorted(sizes))
        self._extrapolates = extrapolates
        self._deterministic = deterministic
        backend = session.backend
        self._listed = backend.bias_candidates if adds_bias else backend.candidates
        # A `Problem` checks its fields whenever one is made, and the same few are asked for often.
        self.part = lru_cache(maxsize=None)(axis.part)
        # By size and algorithm, at less than it takes to find the problem among those of a session.
        self.cost = lru_cache(maxsize=None)(self._cost)

    @cached_property
    def by_arm(self) -> Mapping[Arm, Candidate]:
        """All candidates by arm, the smallest sizes first."""
        backend = self._session.backend
        # torch's own convolution of a whole problem is never refused, that of a slab may be.
        refusal = backend.slab_refusal if self.axis.name == RowAxis.name else backend.refusal
        found: dict[Arm, Candidate] = {}
        for size in self.sizes:
            part, ends = self.part(size), self.axis.ends(size)
            for candidate in self._listed(part):
                if self._varies(candidate) and candidate.algorithm != DEFAULT_ALGORITHM:
                    continue
                # The first and the last slab have padding, which an algorithm may not compute.
                if any(refusal(problem, candidate.algorithm) for problem in (part, *ends)):
                    continue
                for role in self._roles(size):
                    found[Arm(size, candidate.algorithm, role)] = candidate
        return found

    def _roles(self, size: int) -> tuple[Role, ...]:
        # The whole is the only chunk of its call, which allocates and returns the result.
        if size == self.axis.extent:
            return (Role.ALONE,)
        roles = dict.fromkeys(role_of(self.problem, one) for one in (Role.FIRST, Role.LATER))
        # Chunks of fprop and dgrad are written into a result. Two that return one extrapolate what
        # workspace the undivided call needs.
        tells = self._extrapolates and size in self.sizes[:2] and self.axis.extent in self.sizes
        if tells and self.problem.op != "wgrad":
            roles[Role.ALONE] = None
        return tuple(roles)

    def lists(self, arm: Arm) -> tuple[Role, ...]:
        """Positions that an arm can fill; none if it only serves to extrapolate workspace."""
        if self._varies(self.by_arm[arm]):
            return ()
        return lists_of(self.problem, arm.size == self.axis.extent, arm.role)

    def _varies(self, candidate: Candidate) -> bool:
        """True for a candidate that is too nondeterministic to be in a plan."""
        return self._deterministic and not candidate.is_deterministic

    @cached_property
    def curves(self) -> Mapping[Arm, str]:
        """The curve of each arm, by name; arms of one curve run the same implementation."""
        kernel_of = self._session.kernel_of
        # One name may stand for different implementations at different batches, as for torch's own
        # convolution; times of one of them say nothing about another.
        return {
            arm: f"{arm.algorithm} by {kernel_of(candidate.problem, arm.algorithm)}"
            for arm, candidate in self.by_arm.items()
        }

    @cached_property
    def arms_by_curve(self) -> Mapping[str, list[Arm]]:
        """The arms of each curve that can be part of a split, the smallest first."""
        found: dict[str, list[Arm]] = {}
        for arm, curve in self.curves.items():
            if self.lists(arm):
                found.setdefault(curve, []).append(arm)
        return found

    @cached_property
    def even_sizes(self) -> frozenset[int]:
        """Sizes that keep all processors equally busy; powers of two if these are not known."""
        # Waves are counted in samples, and so say nothing about the rows of a slab.
        powers = (1 << k for k in range(self.axis.extent.bit_length()))
        waves = self.axis.name == "batch" and self._session.backend.wave_sizes(self.problem)
        return frozenset(waves or powers)

    def _cost(self, size: int, algorithm: str) -> Cost | None:
        return self._session.cost(self.part(size), algorithm)
