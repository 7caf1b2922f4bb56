"""Exact division of a pool: Lagrangian bound, reduced-cost fixing, then a dynamic program.

First, choices are removed whose reduced cost exceeds the gap between the best division known and
the bound: they are in no better division. Then kernels that still have several choices are added
one by one to the relaxation's base. A partial division is kept if no other dominates it and if it
may lead to a better one, by the bound at several prices of memory. A partial division that fits
together with the base choices of the other kernels may become the best known, which narrows the gap
(Pisinger, "A minimal algorithm for the multiple-choice knapsack problem", 1995). Kernels whose
workspace changes in large steps come first: they cause the gap that the rest must then close. All
computations are in integers, so the proof of optimality has no rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ucudnn.solvers._base import AbstractDivider, Division, Integers, Pool
from ucudnn.solvers.relaxation import Relaxation, relax

# States that are kept once the state limit was exceeded.
_FOLLOWED = 1 << 12
# With no more states than this, testing the bound of each at every price is not worth the time.
_FEW = 1 << 7
# Prices at which a state's bound is taken, in 64ths of the price that is best for the whole pool:
# what is best for the kernels that are left lies around it.
_PRICES = (0, 16, 32, 48, 56, 60, 62, 63, 64, 65, 66, 68, 72, 80, 96, 128, 256)
_BEST_PRICE = _PRICES.index(64)


@dataclass(frozen=True, slots=True)
class Exact(AbstractDivider):
    """Divides a pool and proves that no division is faster.

    >>> Exact().divide(Pool((((0, 9), (8, 5)), ((0, 7), (8, 1))), total_bytes=8)).choice
    (0, 1)

    Args:
        state_limit: number of partial divisions that are kept at once. If there are more, only the
            most promising ones are followed, and the lower bound says how good the result is at
            least. This happens if times and workspaces are proportional; no known network reaches
            it.
    """

    state_limit: int = 1 << 18

    def divide(self, pool: Pool) -> Division:
        """Divide one pool among the kernels that overlap; optimal within the state limit."""
        relaxation = relax(pool)
        search = _Search(pool, relaxation)
        proven = search.run(self.state_limit)
        # A search that dropped states proves nothing; what remains is the relaxation's bound.
        return pool.divided(
            relaxation.choices.places[search.best].tolist(),
            search.best_ns if proven else min(search.best_ns, relaxation.bound_ns),
            "exact",
        )


@dataclass(frozen=True, eq=False)
class _States:
    """Partial divisions after one more kernel, as differences from the base.

    Args:
        extra: bytes, in ascending order.
        later: ns, in descending order.
        parents: position of the preceding state, among those before this kernel.
        options: the choice of this kernel.
    """

    extra: Integers
    later: Integers
    parents: Integers
    options: Integers

    def only(self, kept: Integers) -> _States:
        """Some of the states, by position or by mask."""
        return _States(self.extra[kept], self.later[kept], self.parents[kept], self.options[kept])


@dataclass(frozen=True, eq=False)
class _Rest:
    """Bounds of what the kernels that are not yet added can contribute, for each turn.

    Args:
        gap: cost beyond the bound that the choices of a better division may have.
        least: the smallest number of bytes that they can add; negative if they save bytes.
        cheapest: for each price, the least that they can add to a cost.
    """

    gap: int
    least: Integers
    cheapest: Integers


class _Search:
    """The dynamic program, with the best division found so far."""

    def __init__(self, pool: Pool, relaxation: Relaxation) -> None:
        choices, base = relaxation.choices, relaxation.base
        self.best = relaxation.greedy
        self.best_ns = self._sum(choices.times, self.best)
        self._relaxation = relaxation
        self._prices = np.array([relaxation.price * part // 64 for part in _PRICES])
        self._starts = choices.starts[:-1]
        self._base_ns = self._sum(choices.times, base)
        self._slack = pool.total_bytes - self._sum(choices.workspaces, base)
        sizes = np.diff(choices.starts)
        # Differences from the base, so that a kernel with no other choice left can be skipped.
        self._extra = choices.workspaces - np.repeat(choices.workspaces[base], sizes)
        self._later = choices.times - np.repeat(choices.times[base], sizes)

    @staticmethod
    def _sum(values: Integers, choice: Integers) -> int:
        # As Python ints, because a sum of int64 may overflow.
        return sum(values[choice].tolist())

    def run(self, state_limit: int) -> bool:
        """Add kernels until no better division is possible; False if states had to be dropped."""
        # A zero in the dtype of the pool's numbers, int64 or Python ints.
        none = self._extra[:1] * 0
        layers = [_States(none, none, np.zeros(1, np.int64), self._relaxation.base[:1])]
        proven = True
        kernels = self._kernels()
        rest = self._rest(kernels)
        for turn, kernel in enumerate(kernels):
            # A better division was found since, which leaves fewer choices and tighter bounds.
            if self._gap() < rest.gap:
                rest = self._rest(kernels)
            options = self._options(kernel, rest.gap)
            # No other choice of this kernel can be in a better division, so no state would change.
            if set(options.tolist()) <= {int(self._relaxation.base[kernel])}:
                continue
            states = self._promising(self._combined(layers[-1], options, rest, turn), rest, turn)
            if len(states.extra) > state_limit:
                states, proven = states.only(self._cheapest(states)), False
            layers.append(states)
            self._improve(layers)
        return proven

    def _gap(self) -> int:
        # Minus 1, because only a division that is at least 1 ns faster is better.
        return self._relaxation.scale * (self.best_ns - 1) - self._relaxation.bound

    def _options(self, kernel: int, gap: int) -> Integers:
        places = self._relaxation.choices.kernel(kernel)
        allowed = self._relaxation.reduced[places.start : places.stop] <= gap
        return np.flatnonzero(allowed) + places.start

    def _kernels(self) -> list[int]:
        """Kernels with a choice besides the base's, those with the largest steps first."""
        others = self._relaxation.reduced <= self._gap()
        others[self._relaxation.base] = False
        # More than any step, so that it marks kernels with only their base choice left.
        largest = abs(self._extra).max() + 1
        steps = np.minimum.reduceat(np.where(others, abs(self._extra), largest), self._starts)
        # Stable, so that equal inputs give equal divisions.
        order = np.argsort(-steps, kind="stable")
        return [kernel for kernel in order.tolist() if steps[kernel] < largest]

    def _rest(self, kernels: list[int]) -> _Rest:
        gap = self._gap()
        allowed = self._relaxation.reduced <= gap
        allowed[self._relaxation.base] = True  # so that every kernel has a choice
        places = allowed.nonzero()[0]
        starts = np.searchsorted(places, self._starts)
        extra, later = self._extra[places], self._later[places]
        costs = self._relaxation.scale * later + self._prices[:, None] * extra
        cheapest = np.minimum.reduceat(costs, starts, axis=1)[:, kernels]
        least = np.minimum.reduceat(extra, starts)[kernels]
        return _Rest(gap, _sums_after(least), _sums_after(cheapest))

    def _combined(self, states: _States, options: Integers, rest: _Rest, turn: int) -> _States:
        """All states with all choices of one more kernel, without dominated ones."""
        extra = (self._extra[options, None] + states.extra).reshape(-1)
        later = (self._later[options, None] + states.later).reshape(-1)
        # At one price before the sort; `_promising` tests the others on what dominance leaves.
        alive = self._may_improve(extra, later, rest, turn, _BEST_PRICE)
        alive = np.flatnonzero(alive & (extra + rest.least[turn] <= self._slack))
        # By bytes, then by time: a state stays if it is faster than all that need no more bytes.
        # The slice below drops the leading True where no state is alive.
        alive = alive[np.lexsort((later[alive], extra[alive]))]
        lowest = np.minimum.accumulate(later[alive])
        kept = alive[np.append(True, lowest[1:] < lowest[:-1])[: len(alive)]]
        # The flattened matrix has a line per option and a column per state.
        count = len(states.extra)
        return _States(extra[kept], later[kept], kept % count, options[kept // count])

    def _promising(self, states: _States, rest: _Rest, turn: int) -> _States:
        """The states that may still lead to a better division, at every price."""
        for price in range(len(_PRICES) if len(states.extra) > _FEW else 0):
            alive = self._may_improve(states.extra, states.later, rest, turn, price)
            states = states.only(alive)
        return states

    def _may_improve(
        self, extra: Integers, later: Integers, rest: _Rest, turn: int, price: int
    ) -> Integers:
        """True if the bound of a state is below the best time known: time plus price of memory."""
        room = self._relaxation.scale * (self.best_ns - 1 - self._base_ns)
        paid = self._relaxation.scale * later + self._prices[price] * (extra - self._slack)
        below: Integers = paid + rest.cheapest[price, turn] <= room
        return below

    def _cheapest(self, states: _States) -> Integers:
        """Indices of the most promising states: those that cost least beyond the bound."""
        cost = self._relaxation.scale * states.later + self._relaxation.price * states.extra
        return np.sort(np.argsort(cost, kind="stable")[:_FOLLOWED])

    def _improve(self, layers: list[_States]) -> None:
        """Complete the fastest state that fits with the base; it may be the best division."""
        states = layers[-1]
        # More bytes mean less time among the states, so the last one that fits is the fastest.
        place = int(np.searchsorted(states.extra, self._slack, "right")) - 1
        if place < 0 or self._base_ns + int(states.later[place]) >= self.best_ns:
            return
        self.best_ns = self._base_ns + int(states.later[place])
        self.best = self._relaxation.base.copy()
        for layer in reversed(layers[1:]):
            option = int(layer.options[place])
            # Skipped kernels have no layer, so the index of the choice tells the kernel.
            kernel = int(np.searchsorted(self._starts, option, "right")) - 1
            self.best[kernel] = option
            place = int(layer.parents[place])


def _sums_after(values: Integers) -> Integers:
    """For each place along the last axis, the sum of all values after it."""
    backwards = np.cumsum(values[..., ::-1], axis=-1)[..., ::-1]
    return backwards - values
