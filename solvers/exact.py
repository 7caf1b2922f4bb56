"""Exact division of a pool: Lagrangian bound, reduced-cost fixing, then a dynamic program.

What no choice can save is proven before anything is enumerated: a choice whose reduced cost exceeds
the gap between the best division known and the bound is in no better division. The few that are
left are combined kernel by kernel, keeping of all partial divisions those that no other dominates
and that the bound allows; whatever already fits becomes the best known and narrows the gap further
(the expanding core of Pisinger, "A minimal algorithm for the multiple-choice knapsack problem",
1995). All in integers, so optimal means optimal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ucudnn.solvers._base import AbstractDivider, Division, Pool
from ucudnn.solvers.relaxation import Relaxation, relax
from ucudnn.solvers.sweep import Integers


@dataclass(frozen=True, slots=True)
class Exact(AbstractDivider):
    """Divides a pool and proves that no division is faster.

    >>> Exact().divide(Pool((((0, 9), (8, 5)), ((0, 7), (8, 1))), total_bytes=8)).choice
    (0, 1)

    Args:
        state_limit: partial divisions kept for one kernel. Beyond it the best division known is
            returned, with its bound; no network has come near.
    """

    name: ClassVar[str] = "exact"
    state_limit: int = 1 << 21

    def divide(self, pool: Pool) -> Division:
        """Divide one pool among the kernels that overlap; optimal within the state limit."""
        search = _Search(pool, relax(pool), self.state_limit)
        finished = search.run()
        choice = search.choices.places[search.best].tolist()
        best_ns = search.best_ns
        return pool.divided(
            choice, best_ns if finished else min(best_ns, search.relaxation.bound_ns), self.name
        )


@dataclass(frozen=True, eq=False)
class _States:
    """Partial divisions after one more kernel, as differences from the base.

    Args:
        extra: bytes, rising.
        later: ns, falling.
        parents: each one's place among those before.
        options: the choice that it added.
    """

    extra: Integers
    later: Integers
    parents: Integers
    options: Integers

    def __len__(self) -> int:
        return len(self.extra)


class _Search:
    """Partial divisions as differences from the base, which is best at the relaxation's price."""

    def __init__(self, pool: Pool, relaxation: Relaxation, state_limit: int) -> None:
        self.relaxation = relaxation
        self.best = relaxation.greedy
        self.best_ns = self._time(self.best)
        self._state_limit = state_limit
        choices, base = relaxation.choices, relaxation.base
        self._base_ns = self._time(base)
        self._slack = pool.total_bytes - sum(choices.workspaces[base].tolist())
        sizes = np.diff(choices.starts)
        self._extra = choices.workspaces - np.repeat(choices.workspaces[base], sizes)
        self._later = choices.times - np.repeat(choices.times[base], sizes)

    def _time(self, choice: Integers) -> int:
        return sum(self.relaxation.choices.times[choice].tolist())

    @property
    def _gap(self) -> int:
        """What the choices of a better division may cost beyond the bound."""
        return self.relaxation.scale * (self.best_ns - 1) - self.relaxation.bound

    def run(self) -> bool:
        """Combine kernels until nothing better is left; False where there were too many states."""
        none = self._extra[:1] * 0
        states = _States(none, none, np.zeros(1, np.int64), np.zeros(1, np.int64))
        layers = [states]
        kernels = self._kernels()
        for turn, kernel in enumerate(kernels):
            options = self._options(kernel)
            if len(options) < 2:
                break
            states = self._combine(states, options, *self._reach(kernels[turn + 1 :]))
            layers.append(states)
            if len(states) > self._state_limit:
                return False
            self._improve(layers)
        return True
