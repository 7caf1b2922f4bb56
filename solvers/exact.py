"""Exact division of a pool: Lagrangian bound, reduced-cost fixing, then a dynamic program.

The relaxation: a byte of memory gets a price. The cost of a choice is its time plus the price of
its workspace, and every kernel takes its choice of least cost. For any price, also a rounded one,
the sum of these costs minus the price of the whole pool is a lower bound of the time. To find the
best price, kernels start at their smallest workspaces and move down their convex hulls of time over
workspace, the steepest step first. The best price is the slope of the first step that no longer
fits the pool. The time of the division found in this way exceeds the bound by at most the time that
this step would save (Sinha and Zoltners 1979; Pisinger 1995).

The search: the reduced cost of a choice is its cost minus that of its kernel's best choice. A
division costs at least the bound plus the reduced cost of any one of its choices. So a choice is
removed if its reduced cost exceeds the gap, which is the best time known minus the bound. Then the
search begins with the relaxation's best choices (the base), and lets the kernels that still have
several choices vary, one after the other. A partial division is kept if no other dominates it, and
if by the bound at each of several prices it may still lead to a better division. If it fits
together with the base choices of the other kernels, it may become the best division known, which
narrows the gap (Pisinger, "A minimal algorithm for the multiple-choice knapsack problem", 1995).
Kernels whose workspace changes in large steps come first: their steps cause the gap, and the other
kernels must close it.

All computations are in integers, so the proof of optimality has no rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import numpy as np

from ucudnn.solvers._base import SAFE, Division, Integers, Pool, undominated

# Number of binary digits after the point of a price, if numbers exceed 64 bits and are therefore
# Python's ints.
_DIGITS = 40
# Number of states (partial divisions) that are kept when the state limit is exceeded.
_FOLLOWED = 1 << 12
# With this many states or fewer, it is not worth the time to test their bounds at every price.
_FEW = 1 << 7
# Prices at which a state's bound is computed, in 64ths of the price that is best for the whole
# pool. The price that is best for the remaining kernels is near it.
_PRICES = (0, 16, 32, 48, 56, 60, 62, 63, 64, 65, 66, 68, 72, 80, 96, 128, 256)
_BEST_PRICE = _PRICES.index(64)


def divide_exactly(pool: Pool, state_limit: int = 1 << 18) -> Division:
    """Divide a pool and prove that no division is faster.

    >>> divide_exactly(Pool((((0, 9), (8, 5)), ((0, 7), (8, 1))), total_bytes=8)).choice
    (0, 1)

    If there are more partial divisions than `state_limit`, only the most promising ones are
    followed. The lower bound then limits how far the result is from the optimum. This can happen if
    times and workspaces are proportional; no known network reaches `state_limit`.
    """
    relaxation = relax(pool)
    search = _Search(pool, relaxation)
    proven = search.run(state_limit)
    # A search that dropped states proves nothing, so the lower bound is that of the relaxation.
    return pool.divided(
        relaxation.choices.places[search.best].tolist(),
        search.best_ns if proven else min(search.best_ns, relaxation.bound_ns),
        "exact",
    )


@dataclass(frozen=True, eq=False)
class Choices:
    """The undominated choices of all kernels, one kernel after the other in flat arrays."""

    starts: Integers  # index of each kernel's first choice; at the end the number of all choices
    places: Integers  # index of each choice in its kernel's front
    workspaces: Integers  # in bytes, ascending within a kernel
    times: Integers  # in ns, descending within a kernel

    @classmethod
    def of(cls, pool: Pool) -> Choices:
        """The choices of a pool's kernels."""
        # Models repeat layers, so many fronts are equal. Each different front is reduced once.
        kept_by_front = {front: undominated(front) for front in set(pool.fronts)}
        kept = [kept_by_front[front] for front in pool.fronts]
        points = [front[i] for front, places in zip(pool.fronts, kept, strict=True) for i in places]
        # No sum of times or workspaces in a division is larger than this.
        largest = sum(max(map(max, front)) for front in pool.fronts) + pool.total_bytes
        dtype = np.int64 if largest < SAFE else object
        return cls(
            starts=np.cumsum([0, *map(len, kept)]),
            places=np.fromiter(chain.from_iterable(kept), np.int64),
            workspaces=np.array([workspace for workspace, _ in points], dtype),
            times=np.array([time for _, time in points], dtype),
        )

    def kernel(self, number: int) -> range:
        """Indices of a kernel's choices."""
        return range(int(self.starts[number]), int(self.starts[number + 1]))


@dataclass(frozen=True, eq=False)
class Relaxation:
    """A price of memory, and the bound and choices that follow from it; 1 ns costs `scale`.

    For every division of the pool, scale * time = bound + the sum of the reduced costs of its
    choices + price * unused bytes.
    """

    choices: Choices
    scale: int  # units of cost in one ns
    price: int  # cost of one byte
    reduced: Integers  # cost of each choice at that price, minus the cost of its kernel's best one
    # The best choice of each kernel at that price, up to rounding. Together these choices fit the
    # pool. The next step down a hull, if there is one, would no longer fit.
    base: Integers
    bound: int  # lower bound of the cost of any division
    greedy: Integers  # choice of each kernel in a division that fits

    @property
    def bound_ns(self) -> int:
        """Lower bound of the time of any division."""
        # The bound may be rounded up, because the time of a division is a whole number of ns.
        return -(-self.bound // self.scale)


def relax(pool: Pool) -> Relaxation:
    """Price the memory of a pool so that the lower bound is as high as it can be.

    >>> relaxation = relax(Pool((((0, 9), (8, 5)), ((0, 7), (8, 1))), total_bytes=8))
    >>> relaxation.bound_ns, relaxation.greedy.tolist()
    (10, [0, 3])
    """
    choices = Choices.of(pool)
    base, greedy, (saved, extra) = _climb(choices, pool.total_bytes)
    _fill(choices, greedy, pool.total_bytes)
    scale = _scale(choices, saved, extra)
    # Without a scale, costs exceed 64 bits, so Python's ints are used.
    if scale is None:
        workspaces, times = choices.workspaces.astype(object), choices.times.astype(object)
        choices, scale = replace(choices, workspaces=workspaces, times=times), 1 << _DIGITS
    # The price may be rounded down, because every price gives a valid bound.
    price = saved * scale // extra
    paid = choices.times * scale + choices.workspaces * price
    lowest = np.minimum.reduceat(paid, choices.starts[:-1])
    reduced = paid - np.repeat(lowest, np.diff(choices.starts))
    bound = sum(lowest.tolist()) - price * pool.total_bytes
    return Relaxation(choices, scale, price, reduced, base, bound, greedy)


def _scale(choices: Choices, saved: int, extra: int) -> int | None:
    """The largest power of two that keeps sums of all costs in 64 bits; None if 1 is too large.

    At this scale sums fit in 64 bits even if a caller multiplies the price of the relaxation by 4.
    """
    count = len(choices.starts)
    time, workspace = (count * int(max(a)) for a in (choices.times, choices.workspaces))
    # `room` is the largest scale for which scale * time + 4 * price * workspace <= SAFE with some
    # margin, where price = scale * saved / extra. 4 is the largest factor in `_PRICES`: 256 / 64.
    room = SAFE * extra // (time * extra + workspace * (4 * saved + extra))
    return 1 << (room.bit_length() - 1) if room and choices.times.dtype != object else None


def _climb(choices: Choices, total_bytes: int) -> tuple[Integers, Integers, tuple[int, int]]:
    """Take steps down the kernels' hulls, steepest first, while they fit.

    Returns the choices before the first step that did not fit, the choices after all later steps
    that fit, and the slope of that first step: the time that it saves and the bytes that it takes,
    or (0, 1) if all steps fit.
    """
    # Sorting keeps the order of steps of equal slope, also with `reverse`, so the steps of a kernel
    # stay in their order.
    steps = sorted(_steps(choices), key=lambda step: step[0], reverse=True)
    reached = choices.starts[:-1].copy()
    left = total_bytes - sum(choices.workspaces[reached].tolist())
    base, slope = reached, (0, 1)
    for _, kernel, start, stop, saved, extra in steps:
        # The first step that does not fit sets the price. Later steps may be smaller and still fit.
        if extra > left and slope == (0, 1):
            base, slope = reached.copy(), (saved, extra)
        # A step can be taken only if the step before it on the same hull was taken.
        if extra <= left and reached[kernel] == start:
            reached[kernel] = stop
            left -= extra
    return base, reached, slope


def _steps(choices: Choices) -> Iterator[tuple[float, int, int, int, int, int]]:
    """The steps of all hulls: slope, kernel, old choice, new choice, ns saved and bytes taken."""
    workspaces, times = choices.workspaces.tolist(), choices.times.tolist()
    for kernel in range(len(choices.starts) - 1):
        places = choices.kernel(kernel)
        points = [(workspaces[place], times[place]) for place in places]
        for a, b in pairwise(_hull(points)):
            saved, extra = points[a][1] - points[b][1], points[b][0] - points[a][0]
            # The slope may be a float: the bound is valid in whatever order nearly equal slopes
            # come.
            yield saved / extra, kernel, places[a], places[b], saved, extra


def _hull(points: Sequence[tuple[int, int]]) -> list[int]:
    """Indices of the lower convex hull of points with ascending x and descending y."""
    hull: list[int] = []
    for index, (x, y) in enumerate(points):
        while len(hull) > 1:
            (x0, y0), (x1, y1) = points[hull[-2]], points[hull[-1]]
            # Keep the last point only if it lies below the line from the point before it to the new
            # one. The slopes are compared by cross-multiplication, in integers.
            if (y1 - y0) * (x - x0) < (y - y0) * (x1 - x0):
                break
            hull.pop()
        hull.append(index)
    return hull


def _fill(choices: Choices, reached: Integers, total_bytes: int) -> None:
    """Use memory left over by the steps: change one choice at a time, the one that saves most."""
    sizes = np.diff(choices.starts)
    left = total_bytes - sum(choices.workspaces[reached].tolist())
    while True:
        # All choices are tried, also those above the hull, to which no step leads.
        extra = choices.workspaces - np.repeat(choices.workspaces[reached], sizes)
        saved = np.repeat(choices.times[reached], sizes) - choices.times
        best = int(np.argmax(np.where(extra <= left, saved, 0)))
        if saved[best] <= 0 or extra[best] > left:
            return
        reached[np.searchsorted(choices.starts, best, "right") - 1] = best
        left -= int(extra[best])


@dataclass(frozen=True, eq=False)
class _States:
    """Partial divisions after a kernel was added, as differences from the base."""

    extra: Integers  # bytes more than in the base, ascending
    later: Integers  # ns more than in the base, descending
    parents: Integers  # for each state, the position of the state to which the kernel was added
    options: Integers  # for each state, the choice of the kernel

    def only(self, kept: Integers) -> _States:
        """The states that are given by position or by mask."""
        return _States(self.extra[kept], self.later[kept], self.parents[kept], self.options[kept])


@dataclass(frozen=True, eq=False)
class _Rest:
    """For each kernel in turn, bounds of what the kernels after it can add to a division."""

    gap: int  # largest reduced cost that a choice in a better division may have
    least: Integers  # the fewest bytes that these kernels can add; negative if they save bytes
    cheapest: Integers  # for each price, the least cost that these kernels can add


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
        # All numbers are differences from the base, so that a kernel of which only the base choice
        # is left can be skipped.
        self._extra = choices.workspaces - np.repeat(choices.workspaces[base], sizes)
        self._later = choices.times - np.repeat(choices.times[base], sizes)

    @staticmethod
    def _sum(values: Integers, choice: Integers) -> int:
        # The sum is computed in Python's ints, because int64 might overflow.
        return sum(values[choice].tolist())

    def run(self, state_limit: int) -> bool:
        """Add one kernel after the other; False if `state_limit` made it drop states."""
        # `none` is a zero in the dtype of the pool's numbers, which is int64 or object.
        none = self._extra[:1] * 0
        layers = [_States(none, none, np.zeros(1, np.int64), self._relaxation.base[:1])]
        proven = True
        kernels = self._kernels()
        rest = self._rest(kernels)
        for turn, kernel in enumerate(kernels):
            # If a better division was found since `rest` was made, the gap is smaller: fewer
            # choices are left, and bounds are tighter.
            if self._gap() < rest.gap:
                rest = self._rest(kernels)
            options = self._options(kernel, rest.gap)
            # Skip the kernel if a better division can only have its base choice, because no state
            # would change.
            if set(options.tolist()) <= {int(self._relaxation.base[kernel])}:
                continue
            states = self._promising(self._combined(layers[-1], options, rest, turn), rest, turn)
            if len(states.extra) > state_limit:
                states, proven = states.only(self._cheapest(states)), False
            layers.append(states)
            self._improve(layers)
        return proven

    def _gap(self) -> int:
        # The 1 is subtracted, because only a division that is at least 1 ns faster is better.
        return self._relaxation.scale * (self.best_ns - 1) - self._relaxation.bound

    def _options(self, kernel: int, gap: int) -> Integers:
        places = self._relaxation.choices.kernel(kernel)
        allowed = self._relaxation.reduced[places.start : places.stop] <= gap
        return np.flatnonzero(allowed) + places.start

    def _kernels(self) -> list[int]:
        """Kernels with a choice besides that of the base, in the order in which they are added.

        Kernels of which even the smallest change of workspace is large come first.
        """
        others = self._relaxation.reduced <= self._gap()
        others[self._relaxation.base] = False
        # `largest` is greater than every step. It marks kernels of which only the base choice is
        # left.
        largest = abs(self._extra).max() + 1
        steps = np.minimum.reduceat(np.where(others, abs(self._extra), largest), self._starts)
        # The sort is stable, so that equal inputs give equal divisions.
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
        """Each state with each choice of one more kernel, if it may lead to a better division."""
        extra = (self._extra[options, None] + states.extra).reshape(-1)
        later = (self._later[options, None] + states.later).reshape(-1)
        # Before the sort, bounds are tested at one price only. Later `_promising` tests them at the
        # other prices, for the states that are not dominated.
        alive = self._may_improve(extra, later, rest, turn, _BEST_PRICE)
        alive = np.flatnonzero(alive & (extra + rest.least[turn] <= self._slack))
        # The states are sorted by bytes, then by time: a state stays if it is faster than all
        # states before it. If no state is alive, the slice below also drops the leading True.
        alive = alive[np.lexsort((later[alive], extra[alive]))]
        lowest = np.minimum.accumulate(later[alive])
        kept = alive[np.append(True, lowest[1:] < lowest[:-1])[: len(alive)]]
        # The flattened matrix has a line per option and a column per state.
        count = len(states.extra)
        return _States(extra[kept], later[kept], kept % count, options[kept // count])

    def _promising(self, states: _States, rest: _Rest, turn: int) -> _States:
        """The states whose bounds at all prices allow a better division; few states all stay."""
        for price in range(len(_PRICES) if len(states.extra) > _FEW else 0):
            alive = self._may_improve(states.extra, states.later, rest, turn, price)
            states = states.only(alive)
        return states

    def _may_improve(
        self, extra: Integers, later: Integers, rest: _Rest, turn: int, price: int
    ) -> Integers:
        """True for each state whose bound, at one price of memory, is below the best time known."""
        room = self._relaxation.scale * (self.best_ns - 1 - self._base_ns)
        paid = self._relaxation.scale * later + self._prices[price] * (extra - self._slack)
        below: Integers = paid + rest.cheapest[price, turn] <= room
        return below

    def _cheapest(self, states: _States) -> Integers:
        """Indices of the most promising states: those of least time plus price of memory."""
        cost = self._relaxation.scale * states.later + self._relaxation.price * states.extra
        return np.sort(np.argsort(cost, kind="stable")[:_FOLLOWED])

    def _improve(self, layers: list[_States]) -> None:
        """Complete the fastest state that fits; keep this division if it is the best so far."""
        states = layers[-1]
        # States are sorted by rising bytes and falling time, so the last one that fits is the
        # fastest.
        place = int(np.searchsorted(states.extra, self._slack, "right")) - 1
        if place < 0 or self._base_ns + int(states.later[place]) >= self.best_ns:
            return
        self.best_ns = self._base_ns + int(states.later[place])
        self.best = self._relaxation.base.copy()
        for layer in reversed(layers[1:]):
            option = int(layer.options[place])
            # Kernels that were skipped have no layer, so a layer's kernel is found from the index
            # of its choice.
            kernel = int(np.searchsorted(self._starts, option, "right")) - 1
            self.best[kernel] = option
            place = int(layer.parents[place])


def _sums_after(values: Integers) -> Integers:
    """For each place along the last axis, the sum of all values after it."""
    backwards = np.cumsum(values[..., ::-1], axis=-1)[..., ::-1]
    return backwards - values
