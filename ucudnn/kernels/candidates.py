"""Chunks of one kernel that may be measured: the ways to cut it, sizes, algorithms and roles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from ucudnn.axis import AbstractAxis, BatchAxis, RowAxis
from ucudnn.benchmark.bench import Arm
from ucudnn.measurement import Candidate, Role, role_of
from ucudnn.problem import Problem
from ucudnn.split import DEFAULT_ALGORITHM
from ucudnn.system.processes import cached_property

if TYPE_CHECKING:
    from ucudnn.backends import Cost
    from ucudnn.kernels.device import Session


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel, with the name of the layer of each of its calls."""

    problem: Problem
    layers: tuple[str, ...] = ()
    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class Cut:
    """One way to cut a kernel into chunks."""

    axis: AbstractAxis
    # Sizes of the chunks; empty if the kernel is not cut in this way.
    sizes: tuple[int, ...]
    # True: chunks are computed only by algorithms that also add a bias.
    adds_bias: bool = False


def cuts_of(kernel: Kernel, policy: str) -> tuple[Cut, Cut, Cut]:
    """The ways to cut a kernel: along the batch, the same with a bias added, and along the rows.

    Torch's own convolution is a chunk of the first cut.
    """
    samples, rows = BatchAxis(kernel.problem), RowAxis(kernel.problem)
    sizes = samples.sizes(policy)
    return (
        Cut(samples, sizes),
        # An algorithm that adds a bias can compute only layers that have one.
        Cut(samples, sizes if kernel.has_bias else (), adds_bias=True),
        Cut(rows, rows.sizes(policy)),
    )


class KernelCandidates:
    """Candidates of one kernel, cut in one way.

    If candidates must be deterministic, torch's own convolution is listed even if it is not
    deterministic, because all candidates are compared with it.
    """

    def __init__(self, session: Session, cut: Cut, extrapolates: bool, deterministic: bool) -> None:
        self._session = session
        self.cut = cut
        self.axis = axis = cut.axis
        self.problem = axis.problem
        self._extrapolates = extrapolates
        self._deterministic = deterministic
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
        for size in self.cut.sizes:
            part, ends = self.part(size), self.axis.ends(size)
            for candidate in backend.candidates(part, self.cut.adds_bias):
                # Unlike inner slabs, the first and the last slab have padding, which an algorithm
                # may not support. What was recorded is listed, also if it failed.
                is_refused = any(refusal(one, candidate.algorithm) for one in (part, *ends))
                if is_refused and self._session.can_measure:
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
        tells = (
            self._extrapolates and size in self.cut.sizes[:2] and self.axis.extent in self.cut.sizes
        )
        if tells and self.problem.op != "wgrad":
            roles[Role.ALONE] = None
        return tuple(roles)

    def lists(self, arm: Arm) -> tuple[Role, ...]:
        """The positions that an arm can have in a split; empty if no plan may contain the arm."""
        if self._deterministic and not self.by_arm[arm].is_deterministic:
            return ()
        if arm.size == self.axis.extent:
            return (Role.ALONE,)
        # A chunk of fprop or dgrad that was run in the role ALONE and is not the whole batch has no
        # position in a split: it ran only to extrapolate the workspace of the whole call.
        places = (Role.FIRST, Role.LATER)
        return tuple(place for place in places if role_of(self.problem, place) == arm.role)

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
