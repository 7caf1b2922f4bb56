"""Workspace that each kernel may use: a limit for all, or what a memory budget leaves. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ucudnn.errors import PlanError
from ucudnn.problem import Problem
from ucudnn.units import format_bytes


@dataclass(frozen=True, slots=True)
class Limits:
    """The workspace limit of every kernel.

    >>> early, late = (Problem("fprop", n, 4, 4, (9,), (3,)) for n in (1, 2))
    >>> limits = Limits(common=64, budget_bytes=100, live_bytes={early: 10, late: 90})
    >>> limits.of(early), limits.of(late), limits.of(late, batch=1)
    (64, 10, 55)

    Args:
        common: bytes that any kernel may use, None for any.
        budget_bytes: that a whole step may have allocated; None: no budget.
        live_bytes: the most that the step has allocated beside the workspace of any call of a
            kernel.
        fixed_bytes: of these, bytes that do not depend on the batch; the rest is taken to grow in
            proportion to it.
    """

    common: int | None
    budget_bytes: int | None = None
    live_bytes: Mapping[Problem, int] = field(default_factory=lambda: MappingProxyType({}))
    fixed_bytes: int = 0

    def of(self, problem: Problem, batch: int | None = None) -> int | None:
        """Bytes that a call of a kernel may use, None for any.

        Args:
            problem: the kernel.
            batch: in a step of a smaller batch, of which less is live; None: of the kernel's.
        """
        if self.budget_bytes is None:
            return self.common
        live = self.live(problem)
        if batch is not None:
            fixed = min(live, self.fixed_bytes)
            live = fixed + -(-(live - fixed) * batch // problem.batch)
        left = max(0, self.budget_bytes - live)
        return left if self.common is None else min(left, self.common)

    def live(self, problem: Problem) -> int:
        """Bytes beside the workspace of a kernel; of one that was not seen, the most of any."""
        return self.live_bytes.get(problem, max(self.live_bytes.values(), default=0))

    def decides(self, problem: Problem) -> bool:
        """True where the budget, and not the common limit, is what a kernel must stay within."""
        return self.budget_bytes is not None and self.of(problem) != self.common

    def refusal(
        self, errors: Mapping[Problem, PlanError], layers: Mapping[Problem, tuple[str, ...]]
    ) -> PlanError:
        """The error of the kernel that lacks most, for kernels that have no plan in the budget.

        Args:
            errors: each with the workspace of the smallest plan, where that is known.
            layers: names of the layers that run each kernel.
        """
        assert self.budget_bytes is not None
        needs = {
            problem: self.live(problem) + error.smallest_bytes
            for problem, error in errors.items()
            if error.smallest_bytes is not None
        }
        # A kernel that no algorithm computes: no budget would help.
        if len(needs) < len(errors):
            return next(error for problem, error in errors.items() if problem not in needs)
        worst = max(needs, key=lambda problem: needs[problem])
        return PlanError(
            f"no plan fits memory_budget={format_bytes(self.budget_bytes)}: "
            f"{format_bytes(needs[worst] - self.budget_bytes)} are missing at {worst} "
            f"({', '.join(layers[worst])}), where {format_bytes(self.live(worst))} are allocated "
            f"beside its workspace and {errors[worst]}; raise the budget to "
            f"{format_bytes(needs[worst])}",
            needs[worst],
        )
