"""Exact division of a pool: Lagrangian bound, reduced-cost fixing, then a dynamic program.

A choice whose reduced cost exceeds the gap between the best division known and the bound is in no
better division, and is left out before anything is enumerated. The kernels that keep a second
choice are added one by one to the relaxation's base, the cheapest second choice first. Of the
partial divisions those stay that no other dominates and that the bound allows; whatever fits with
the base for the rest may become the best known, which narrows the gap (the expanding core of
Pisinger, "A minimal algorithm for the multiple-choice knapsack problem", 1995). All in integers,
so optimal means optimal.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ucudnn.solvers._base import AbstractDivider, Division, Integers, Pool
from ucudnn.solvers.relaxation import Relaxation, relax

# States that are followed after there were too many.
_FOLLOWED = 1 << 12


@dataclass(frozen=True, slots=True)
class Exact(AbstractDivider):
    """Divides a pool and proves that no division is faster.

    >>> Exact().divide(Pool((((0, 9), (8, 5)), ((0, 7), (8, 1))), total_bytes=8)).choice
    (0, 1)

    Args:
        state_limit: partial divisions that are kept at once. Where there are more, which takes
            times and workspaces that rise in proportion and no network that we know, the most
            promising are followed, and the lower bound tells how good the result is at least.
    """

    state_limit: int = 1 << 18

    def divide(self, pool: Pool) -> Division:
        """Divide one pool among the kernels that overlap; optimal within the state limit."""
        relaxation = relax(pool)
        search = _Search(pool, relaxation)
        proven = search.run(self.state_limit)
        return pool.divided(
            relaxation.choices.places[search.best].tolist(),
            search.best_ns if proven else min(search.best_ns, relaxation.bound_ns),
            "exact",
        )


@dataclass(frozen=True, eq=False)
class _States:
    """Partial divisions after one more kernel, as differences from the base.

    Args:
        extra: bytes, rising.
        later: ns, falling.
        parents: each one's place among the states before.
        options: the choice of this kernel.
    """

    extra: Integers
    later: Integers
    parents: Integers
    options: Integers


class _Search:
    """The dynamic program, with the best division known as it goes."""

    def __init__(self, pool: Pool, relaxation: Relaxation) -> None:
        choices, base = relaxation.choices, relaxation.base
        self.best = relaxation.greedy
        self.best_ns = self._sum(choices.times, self.best)
        self._relaxation = relaxation
        self._starts = choices.starts[:-1]
        self._base_ns = self._sum(choices.times, base)
        self._slack = pool.total_bytes - self._sum(choices.workspaces, base)
        sizes = np.diff(choices.starts)
        self._extra = choices.workspaces - np.repeat(choices.workspaces[base], sizes)
        self._later = choices.times - np.repeat(choices.times[base], sizes)

    @staticmethod
    def _sum(values: Integers, choice: Integers) -> int:
        return sum(values[choice].tolist())

    def run(self, state_limit: int) -> bool:
        """Add kernels until nothing better can be left; False where states had to be dropped."""
        proven = True
        none = self._extra[:1] * 0
        layers = [_States(none, none, np.zeros(1, np.int64), self._relaxation.base[:1])]
        gap = self._gap()
        least, most = self._reach(gap)
        kernels = self._kernels(gap)
        for turn, kernel in enumerate(kernels):
            if self._gap() < gap:
                gap = self._gap()
                least, most = self._reach(gap)
            options = self._options(kernel, gap)
            rest = kernels[turn + 1 :]
            if not set(options.tolist()) <= {int(self._relaxation.base[kernel])}:
                states = self._combine(
                    layers[-1], options, gap, int(least[rest].sum()), int(most[rest].sum())
                )
                if len(states.extra) > state_limit:
                    states, proven = self._thin(states), False
                layers.append(states)
                self._improve(layers)
        return proven

    def _gap(self) -> int:
        """What the choices of a better division may cost beyond the bound."""
        return self._relaxation.scale * (self.best_ns - 1) - self._relaxation.bound

    def _options(self, kernel: int, gap: int) -> Integers:
        places = self._relaxation.choices.kernel(kernel)
        allowed = self._relaxation.reduced[places.start : places.stop] <= gap
        return np.flatnonzero(allowed) + places.start

    def _kernels(self, gap: int) -> list[int]:
        """Kernels with more than one choice left, the cheapest second choice first."""
        second = self._relaxation.reduced.copy()
        second[self._relaxation.base] = gap + 1
        cheapest = np.minimum.reduceat(second, self._starts)
        order = np.argsort(cheapest, kind="stable")
        return order[: np.count_nonzero(cheapest <= gap)].tolist()  # type: ignore[no-any-return]

    def _reach(self, gap: int) -> tuple[Integers, Integers]:
        """Per kernel by how many bytes its remaining choices can differ from the base."""
        extra = np.where(self._relaxation.reduced <= gap, self._extra, 0)
        return np.minimum.reduceat(extra, self._starts), np.maximum.reduceat(extra, self._starts)

    def _combine(
        self, states: _States, options: Integers, gap: int, least: int, most: int
    ) -> _States:
        """All states with all choices of one more kernel, less those that lead to nothing better.

        Args:
            states: before.
            options: choices of the kernel.
            gap: what a better division may cost beyond the bound.
            least: bytes that the kernels after this one can add, negative where they save.
            most: the same, at most.
        """
        extra = (self._extra[options, None] + states.extra).reshape(-1)
        later = (self._later[options, None] + states.later).reshape(-1)
        # Bytes that no kernel after this one can use are paid for and left over.
        unused = np.maximum(self._slack - most - extra, 0)
        cost = self._relaxation.scale * later + self._relaxation.price * (extra + unused)
        alive = np.flatnonzero((cost <= gap) & (extra + least <= self._slack))
        alive = alive[np.lexsort((later[alive], extra[alive]))]
        lowest = np.minimum.accumulate(later[alive])
        kept = alive[np.append(True, lowest[1:] < lowest[:-1])[: len(alive)]]
        count = len(states.extra)
        return _States(extra[kept], later[kept], kept % count, options[kept // count])

    def _thin(self, states: _States) -> _States:
        """The states that cost least beyond the bound."""
        cost = self._relaxation.scale * states.later + self._relaxation.price * states.extra
        kept = np.sort(np.argsort(cost, kind="stable")[:_FOLLOWED])
        return _States(
            states.extra[kept], states.later[kept], states.parents[kept], states.options[kept]
        )

    def _improve(self, layers: list[_States]) -> None:
        """Complete the fastest state that fits with the base; it may be the best division."""
        states = layers[-1]
        place = int(np.searchsorted(states.extra, self._slack, "right")) - 1
        if place < 0 or self._base_ns + int(states.later[place]) >= self.best_ns:
            return
        self.best_ns = self._base_ns + int(states.later[place])
        self.best = self._relaxation.base.copy()
        for layer in reversed(layers[1:]):
            option = int(layer.options[place])
            kernel = int(np.searchsorted(self._starts, option, "right")) - 1
            self.best[kernel] = option
            place = int(layer.parents[place])
