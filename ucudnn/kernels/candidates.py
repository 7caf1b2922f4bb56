"""Chunks of one kernel that may be measured: their sizes, algorithms and roles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from ucudnn.axis import AbstractAxis, RowAxis
from ucudnn.benchmark.bench import Arm
from ucudnn.kernels.items import lists_of
from ucudnn.measurement import Candidate, Role, role_of
from ucudnn.split import DEFAULT_ALGORITHM
from ucudnn.system.processes import cached_property

if TYPE_CHECKING:
    from ucudnn.backends import Cost
    from ucudnn.kernels.session import Session


class KernelCandidates:
    """Candidates of one kernel along one axis.

    If candidates must be deterministic, torch's own convolution is listed even if it is not
    deterministic, because all candidates are compared with it.
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
        # The problems of chunks are cached: making a `Problem` checks its fields, and the same few
        # sizes are asked for often.
        self.part = lru_cache(maxsize=None)(axis.part)
        # Costs are cached by size and algorithm, because the session's own look-up by problem takes
        # longer.
        self.cost = lru_cache(maxsize=None)(self._cost)
        # torch's own convolution of the whole batch.
        self.default = Arm(axis.problem.batch, DEFAULT_ALGORITHM, Role.ALONE)

    @cached_property
    def by_arm(self) -> Mapping[Arm, Candidate]:
        """All candidates by arm, the smallest sizes first."""
        backend = self._session.backend
        # A slab of torch's own convolution may be refused, because only a plan computes slabs.
        refusal = backend.slab_refusal if self.axis.name == RowAxis.name else backend.refusal
        found: dict[Arm, Candidate] = {}
        for size in self.sizes:
            part, ends = self.part(size), self.axis.ends(size)
            for candidate in self._listed(part):
                if self._varies(candidate) and candidate.algorithm != DEFAULT_ALGORITHM:
                    continue
                # Unlike inner slabs, the first and the last slab have padding, which an algorithm
                # may not support.
                if any(refusal(problem, candidate.algorithm) for problem in (part, *ends)):
                    continue
                for role in self._roles(size):
                    found[Arm(size, candidate.algorithm, role)] = candidate
        return found

    def _roles(self, size: int) -> tuple[Role, ...]:
        # A chunk of the full size is the only one of its call, which returns a new result.
        if size == self.axis.extent:
            return (Role.ALONE,)
        roles = dict.fromkeys(role_of(self.problem, one) for one in (Role.FIRST, Role.LATER))
        # Chunks of fprop and dgrad are written into a larger result. Chunks of the two smallest
        # sizes are also run in the role ALONE, because the workspace of the undivided call is
        # extrapolated from these runs.
        tells = self._extrapolates and size in self.sizes[:2] and self.axis.extent in self.sizes
        if tells and self.problem.op != "wgrad":
            roles[Role.ALONE] = None
        return tuple(roles)

    def lists(self, arm: Arm) -> tuple[Role, ...]:
        """The positions that an arm can have in a split; empty if no plan may contain the arm."""
        if self._varies(self.by_arm[arm]):
            return ()
        return lists_of(self.problem, arm.size == self.axis.extent, arm.role)

    def _varies(self, candidate: Candidate) -> bool:
        """True if plans must be deterministic and the candidate is not."""
        return self._deterministic and not candidate.is_deterministic

    @cached_property
    def curves(self) -> Mapping[Arm, str]:
        """The name of each arm's curve: the arms of one algorithm and one implementation."""
        implementation_of = self._session.implementation_of
        # An algorithm may run different implementations at different batches, as torch's own
        # convolution does. Times of one implementation say nothing about another one.
        return {
            arm: f"{arm.algorithm} by {implementation_of(candidate.problem, arm.algorithm)}"
            for arm, candidate in self.by_arm.items()
        }

    @cached_property
    def arms_by_curve(self) -> Mapping[str, list[Arm]]:
        """For each curve the arms that can be part of a split, the smallest chunks first."""
        found: dict[str, list[Arm]] = {}
        for arm, curve in self.curves.items():
            if self.lists(arm):
                found.setdefault(curve, []).append(arm)
        return found

    def _cost(self, size: int, algorithm: str) -> Cost | None:
        return self._session.cost(self.part(size), algorithm)
