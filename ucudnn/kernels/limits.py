"""The workspace that each kernel may use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from textwrap import shorten
from types import MappingProxyType

from ucudnn.errors import PlanError
from ucudnn.problem import Problem
from ucudnn.units import format_sizes, tightest


@dataclass(frozen=True, slots=True)
class Limits:
    """The workspace limit of every kernel.

    >>> early, late = (Problem("fprop", n, 4, 4, (9,), (3,)) for n in (1, 2))
    >>> limits = Limits(common=64, budget_bytes=100, live_bytes={early: 10, late: 90})
    >>> limits.of(early), limits.of(late), limits.of(late, batch=1)
    (64, 10, 55)

    Args:
        common: bytes of workspace that every kernel may use; None: no limit.
        budget_bytes: bytes that a whole step may have allocated; None: no budget.
        live_bytes: for each kernel, the most bytes that the step has allocated beside the workspace
            of one of its calls.
        fixed_bytes: part of the live bytes that does not depend on the batch; the rest is assumed
            to grow in proportion to the batch.
        fitting: kernels that stay within the budget by torch's own convolution, as foreseen.
    """

    common: int | None
    budget_bytes: int | None = None
    live_bytes: Mapping[Problem, int] = field(default_factory=lambda: MappingProxyType({}))
    fixed_bytes: int = 0
    fitting: frozenset[Problem] = frozenset()

    def of(self, problem: Problem, batch: int | None = None) -> int | None:
        """Bytes of workspace that a call of a kernel may use; None: no limit.

        Args:
            problem: the kernel.
            batch: batch of the step; None: the batch of `problem`. In a smaller batch fewer bytes
                are live, which leaves more for workspace.
        """
        if self.budget_bytes is None:
            return self.common
        live = self.live(problem)
        if batch is not None:
            fixed = min(live, self.fixed_bytes)
            live = fixed + -(-(live - fixed) * batch // problem.batch)
        return tightest(self.common, max(0, self.budget_bytes - live))

    def live(self, problem: Problem) -> int:
        """Bytes live beside a kernel's workspace; if not known, the largest of all kernels."""
        return self.live_bytes.get(problem, max(self.live_bytes.values(), default=0))

    def decides(self, problem: Problem) -> bool:
        """True if the limit of a kernel follows from the budget and is not the common limit."""
        return self.budget_bytes is not None and self.of(problem) != self.common

    def refusal(
        self, errors: Mapping[Problem, PlanError], layers: Mapping[Problem, tuple[str, ...]]
    ) -> PlanError:
        """The error for kernels without a plan: it names the kernel that needs most memory."""
        assert self.budget_bytes is not None
        needs = {
            problem: self.live(problem) + error.smallest_bytes
            for problem, error in errors.items()
            if error.smallest_bytes is not None
        }
        # If an error names no smallest workspace, no budget would help its kernel.
        if len(needs) < len(errors):
            return next(error for problem, error in errors.items() if problem not in needs)
        worst = max(needs, key=lambda problem: needs[problem])
        names = shorten(", ".join(dict.fromkeys(layers[worst])), 80, placeholder=" ...")
        need, live, excess = needs[worst], self.live(worst), needs[worst] - self.budget_bytes
        budget, least, live_text, missing = format_sizes(self.budget_bytes, need, live, excess)
        return PlanError(
            f"no plan fits memory_budget={budget}: {missing} are missing at {worst} ({names}), "
            f"where {live_text} are allocated beside its workspace and {errors[worst]}; raise the "
            f"budget to {least}",
            need,
        )
