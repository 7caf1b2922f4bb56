"""Lagrangian relaxation of the division problem: a price per byte, a bound, and a good division.

With a price per byte, every kernel chooses for itself. The cost of these choices minus the price of
the pool is a lower bound, for any price. To find the best price, kernels start at their smallest
workspaces and move down their convex hulls, the steepest step first; the best price is the slope at
which the pool is exhausted. The division found on the way is at most one such step from the bound
(Sinha and Zoltners 1979; Pisinger 1995). A rounded price gives a valid bound, too, so everything is
computed in integers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import numpy as np

from ucudnn.solvers._base import SAFE, Integers, Pool, undominated

# Binary digits of the price where numbers outgrow 64 bits and are Python's.
_DIGITS = 40


@dataclass(frozen=True, eq=False)
class Choices:
    """The choices of all kernels that no other dominates, in flat arrays.

    Args:
        starts: index of each kernel's first choice, and at the end the number of all choices.
        places: index of each choice into its kernel's front.
        workspaces: in bytes, ascending within a kernel.
        times: in ns, descending within a kernel.
    """

    starts: Integers
    places: Integers
    workspaces: Integers
    times: Integers

    @classmethod
    def of(cls, pool: Pool) -> Choices:
        """The choices of a pool's kernels."""
        # Models repeat layers, so that many fronts are equal: each one is reduced once.
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

    def unlimited(self) -> Choices:
        """The same choices with Python's ints, which are unlimited."""
        return replace(
            self, workspaces=self.workspaces.astype(object), times=self.times.astype(object)
        )

    def kernel(self, number: int) -> range:
        """Indices of a kernel's choices."""
        return range(int(self.starts[number]), int(self.starts[number + 1]))


@dataclass(frozen=True, eq=False)
class Relaxation:
    """A price of memory, and the bound and choices that follow from it, in units of ns / scale.

    A division costs scale * time = bound + reduced costs of its choices + price * bytes left over.

    Args:
        choices: of all kernels.
        scale: number of units in one ns.
        price: of one byte.
        reduced: for each choice, its cost at that price minus that of its kernel's best choice.
        base: for each kernel, its best choice at that price, up to rounding; together they fit, and
            less than one step is left over.
        bound: lower bound of the cost of any division.
        greedy: for each kernel, its choice in a division that fits.
    """

    choices: Choices
    scale: int
    price: int
    reduced: Integers
    base: Integers
    bound: int
    greedy: Integers

    @property
    def bound_ns(self) -> int:
        """Lower bound of the time of any division."""
        # Rounded up: times are whole ns, so no division lies between two of them.
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
    # Costs exceed 64 bits even at a scale of 1.
    if scale is None:
        choices, scale = choices.unlimited(), 1 << _DIGITS
    # Rounding the price down keeps the bound valid, as every price gives one.
    price = saved * scale // extra
    paid = choices.times * scale + choices.workspaces * price
    lowest = np.minimum.reduceat(paid, choices.starts[:-1])
    reduced = paid - np.repeat(lowest, np.diff(choices.starts))
    bound = sum(lowest.tolist()) - price * pool.total_bytes
    return Relaxation(choices, scale, price, reduced, base, bound, greedy)


def _scale(choices: Choices, saved: int, extra: int) -> int | None:
    """The largest power of two that keeps sums of all costs in 64 bits; None if 1 is too large.

    A caller may multiply the price of the relaxation by 4.
    """
    count = len(choices.starts)
    time, workspace = (count * int(max(a)) for a in (choices.times, choices.workspaces))
    # From scale * time + 4 * price * workspace <= SAFE with price = scale * saved / extra, with
    # some room to spare; 4 is the largest factor in `exact._PRICES`.
    room = SAFE * extra // (time * extra + workspace * (4 * saved + extra))
    return 1 << (room.bit_length() - 1) if room and choices.times.dtype != object else None


def _climb(choices: Choices, total_bytes: int) -> tuple[Integers, Integers, tuple[int, int]]:
    """Take steps down the kernels' hulls, steepest first, while they fit.

    Returns the choices before the first step that did not fit, the choices after all later steps
    that fit, and the slope of that first step: the time that it saves and the bytes that it takes,
    or (0, 1) if all steps fit.
    """
    # Equal slopes keep their order, also with `reverse`: a kernel's steps stay in sequence.
    steps = sorted(_steps(choices), key=lambda step: step[0], reverse=True)
    reached = choices.starts[:-1].copy()
    left = total_bytes - sum(choices.workspaces[reached].tolist())
    base, slope = reached, (0, 1)
    for _, kernel, start, stop, saved, extra in steps:
        # The first step that does not fit sets the price; shorter ones may still fit after it.
        if extra > left and slope == (0, 1):
            base, slope = reached.copy(), (saved, extra)
        # A step starts where the step before it on the same hull ends, if that one was taken.
        if extra <= left and reached[kernel] == start:
            reached[kernel] = stop
            left -= extra
    return base, reached, slope


def _steps(choices: Choices) -> Iterator[tuple[float, int, int, int, int, int]]:
    """Slope, kernel, from, to, time saved and bytes taken of every step of every kernel's hull."""
    workspaces, times = choices.workspaces.tolist(), choices.times.tolist()
    for kernel in range(len(choices.starts) - 1):
        places = choices.kernel(kernel)
        points = list(
            zip(
                workspaces[places.start : places.stop],
                times[places.start : places.stop],
                strict=True,
            )
        )
        for a, b in pairwise(_hull(points)):
            saved, extra = points[a][1] - points[b][1], points[b][0] - points[a][0]
            # A float is enough: any order of nearly equal slopes gives a valid bound.
            yield saved / extra, kernel, places[a], places[b], saved, extra


def _hull(points: Sequence[tuple[int, int]]) -> list[int]:
    """Indices of the lower convex hull of points with ascending x and descending y."""
    hull: list[int] = []
    for index, (x, y) in enumerate(points):
        while len(hull) > 1:
            (x0, y0), (x1, y1) = points[hull[-2]], points[hull[-1]]
            # Slopes compared crosswise, in integers: is the last point below the new line?
            if (y1 - y0) * (x - x0) < (y - y0) * (x1 - x0):
                break
            hull.pop()
        hull.append(index)
    return hull


def _fill(choices: Choices, reached: Integers, total_bytes: int) -> None:
    """Use the memory that the steps left over, each time for the choice that saves most time."""
    sizes = np.diff(choices.starts)
    left = total_bytes - sum(choices.workspaces[reached].tolist())
    while True:
        # Over all choices, also those above the hull, which no step leads to.
        extra = choices.workspaces - np.repeat(choices.workspaces[reached], sizes)
        saved = np.repeat(choices.times[reached], sizes) - choices.times
        best = int(np.argmax(np.where(extra <= left, saved, 0)))
        if saved[best] <= 0 or extra[best] > left:
            return
        reached[np.searchsorted(choices.starts, best, "right") - 1] = best
        left -= int(extra[best])
