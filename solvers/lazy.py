"""Choose which chunks to time next, until no untimed chunk can be part of a faster split.

The solver takes the times of timed chunks, and lower bounds of the times of all others. If the
split that it finds contains only timed chunks, no split is faster, because every other split costs
at least its bound. Else the untimed chunks of the split, or chunks of sizes near theirs, are timed
next. A curve consists of the times of one implementation over the chunk size, in any role. The
bounds rest on two assumptions about curves:

* "grows": no chunk takes less time than a smaller one;
* "economy": per sample, a chunk may take less time than both neighbouring timed sizes, but not much
  less. Count the doublings that lead from the smaller to the larger of the two sizes. Each of them
  but the first allows a tenth less.

Measured times may contradict both assumptions. For "grows", a time that is longer than that of a
larger size is replaced by the shortest time of any larger size. Every timed size is compared with
the bound that the other times of its curve give for it. If a time is below its bound, all bounds of
the curve are multiplied by the ratio of the two; of several such ratios, by the smallest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from ucudnn.measurement import Role, positions
from ucudnn.solvers._base import Item
from ucudnn.solvers.reuse import reuse_by_position

# By "economy" (see above), one doubling between timed sizes lowers the time per sample at most by
# this factor. It is a fraction of two ints, because bounds are ints.
_KEPT, _OF = 9, 10


class Interval(NamedTuple):
    """A measured time with its confidence interval."""

    low_ns: int
    time_ns: int
    high_ns: int


@dataclass(frozen=True, slots=True)
class ChunkOption:
    """A chunk that fits the limit and that a split may contain, timed or not."""

    batch: int
    algorithm: str
    curve: str  # options of one curve run one implementation, so a time of one bounds the others
    lists: tuple[Role, ...]  # positions in a split that the chunk can fill
    interval: Interval | None = None  # None if the chunk never ran
    is_timed: bool = False  # True if the time is precise enough to plan with
    workspace_bytes: int = 0  # breaks ties
    rank: int = 0  # breaks ties between equal workspaces
    role: Role = Role.ALONE  # role in which the caller times the chunk
    least_ns: int = 0  # the caller's lower bound of the chunk's time, if the chunk never ran


@dataclass(frozen=True, slots=True)
class Outlook:
    """Time of the best known split, lower bound for all splits, and the chunks to time next."""

    time_ns: int | None  # of the best split of timed chunks, None if there is none
    bound_ns: int | None  # of any split, if the assumptions hold; None if no split exists
    wanted: tuple[ChunkOption, ...] = ()  # empty if time and bound are close enough

    @property
    def gap(self) -> float:
        """Upper bound of what a better split could save, as a fraction of the time.

        >>> Outlook(100, 75).gap
        0.25
        """
        if self.time_ns is None or self.bound_ns is None:
            return 1.0
        return max(0.0, 1 - self.bound_ns / self.time_ns)


def outlook(
    options: Iterable[ChunkOption],
    batch: int,
    *,
    launch_ns: int = 0,
    tolerance: float = 0.0,
    least_ns: int = 0,
) -> Outlook:
    """Choose what to time next to find the fastest split of a batch.

    >>> known = Interval(5, 5, 5)
    >>> small = ChunkOption(1, "gemm", "gemm", (Role.FIRST, Role.LATER), known, is_timed=True)
    >>> outlook([small, ChunkOption(4, "gemm", "gemm", (Role.ALONE,))], batch=4).wanted[0].batch
    4

    All options fit the limit. Once every curve has a time, no chunk is wanted if the gap is at most
    `tolerance`, a fraction of the time. A time that is below its bound by less than `tolerance` is
    taken for noise. In a split of several chunks the caller accepts only chunks of at least
    `least_ns`, so there the bound of an untimed chunk is at least `least_ns`.
    """
    everything = tuple(options)
    curves = _by_curve(everything)
    bound_by_option = _lower_bounds(curves.values(), tolerance, least_ns)
    known = {one: one.interval.time_ns for one in everything if one.is_timed and one.interval}
    # The best split is computed twice: from the timed chunks only, and from the lower bounds of all
    # chunks.
    best = _Solved(known, batch, launch_ns)
    optimistic = _Solved(bound_by_option, batch, launch_ns)
    time_ns, bound_ns = best.time_ns, optimistic.time_ns
    # If no chunks add up to the batch, timed or not, nothing is worth timing.
    if bound_ns is None:
        return Outlook(time_ns, bound_ns)
    # If no chunk of a curve ever ran, the two assumptions give no bounds for it, so one chunk of
    # each such curve is timed first.
    new = [one for one in curves.values() if not any(option.interval for option in one)]
    unknown = tuple(max(curve, key=_most_telling) for curve in new)
    if unknown:
        return Outlook(time_ns, bound_ns, unknown)
    if time_ns is not None and bound_ns >= (1 - tolerance) * time_ns:
        return Outlook(time_ns, bound_ns)
    # Of each curve and size only one role is asked for now; the next call may ask for other roles.
    found: dict[tuple[str, int], ChunkOption] = {}
    for option in optimistic.options():
        if not option.is_timed:
            # Instead of the option, a size in the middle between timed sizes may be asked for,
            # because it tightens the bounds of many sizes.
            chosen = _middle(option, curves[option.curve])
            found.setdefault((chosen.curve, chosen.batch), chosen)
    return Outlook(time_ns, bound_ns, tuple(found.values()))


def _lower_bounds(
    curves: Iterable[Sequence[ChunkOption]], tolerance: float, least_ns: int
) -> dict[ChunkOption, int]:
    """The time of each timed option, and a lower bound of the time of every other option."""
    found: dict[ChunkOption, int] = {}
    for curve in curves:
        found |= zip(curve, _bounds(curve, tolerance, least_ns), strict=True)
    return found


def _by_curve(options: Sequence[ChunkOption]) -> dict[str, list[ChunkOption]]:
    curves: dict[str, list[ChunkOption]] = {}
    for option in options:
        curves.setdefault(option.curve, []).append(option)
    return curves


def _most_telling(option: ChunkOption) -> tuple[int, bool]:
    """Key for `max`: the largest size, because its time bounds most sizes; then role ALONE."""
    return option.batch, Role.ALONE in option.lists


def _bounds(curve: Sequence[ChunkOption], tolerance: float, least_ns: int) -> list[int]:
    points = tuple(
        sorted((option.batch, option.interval) for option in curve if option.interval is not None)
    )
    sizes = tuple(option.batch for option in curve)
    bounds = _promises(sizes, points, tolerance)
    # The bound of a timed chunk is its time; if it ran too briefly, the lower end of its interval.
    # `least_ns` does not apply to the undivided batch, which may take less time.
    return [
        max(bound, option.least_ns, 0 if option.lists == (Role.ALONE,) else least_ns)
        if option.interval is None
        else option.interval.time_ns
        if option.is_timed
        else option.interval.low_ns
        for option, bound in zip(curve, bounds, strict=True)
    ]


# The bounds are cached, because a measurement changes only the curve that it belongs to.
@lru_cache(maxsize=4096)
def _promises(
    sizes: tuple[int, ...], points: tuple[tuple[int, Interval], ...], tolerance: float
) -> tuple[int, ...]:
    """Lower bounds for sizes, from a curve's timed sizes; lowered if a time is below its bound."""
    kept, of = 1, 1
    # Each time is compared with the bound that all other times give for its size.
    for place, (size, interval) in enumerate(points):
        others = _Curve(points[:place] + points[place + 1 :])
        promised = others.bound_ns(size)
        broken = interval.high_ns < (1 - tolerance) * promised
        # The smallest ratio is kept. Ratios are compared by cross-multiplication, in integers.
        if broken and interval.high_ns * of < kept * promised:
            kept, of = interval.high_ns, promised
    curve = _Curve(points)
    return tuple(max(1, curve.bound_ns(size) * kept // of) for size in sizes)


class _Curve:
    """Lower bounds of untimed sizes, which follow from the timed sizes by the two assumptions."""

    def __init__(self, points: Sequence[tuple[int, Interval]]) -> None:
        # Bounds must hold for a chunk in any role, so of each size the time of the fastest role is
        # used.
        least: dict[int, int] = {}
        for size, interval in points:
            least[size] = min(interval.time_ns, least.get(size, interval.time_ns))
        self._sizes = sorted(least)
        self._times = [least[size] for size in self._sizes]
        # For each size the shortest time of this size and of all larger sizes.
        self._growing = list(accumulate(reversed(self._times), min))[::-1]

    def bound_ns(self, size: int) -> int:
        at = bisect_left(self._sizes, size)
        above = at if at < len(self._sizes) else None
        exact = above is not None and self._sizes[above] == size
        below = above if exact else at - 1 if at else None
        grown = 1 if below is None else self._growing[below]
        # Without a larger timed size, "economy" gives no bound.
        if above is None:
            return grown
        return max(grown, self._economical(size, below, above))

    def _economical(self, size: int, below: int | None, above: int) -> int:
        neighbours = [above] if below is None else [below, above]
        least = self._sizes[neighbours[0]] if below is not None else size
        # Between two timed sizes the first doubling does not lower the bound. Below the smallest
        # timed size every doubling lowers it.
        doublings = _doublings(least, self._sizes[above]) - (below is not None)
        kept, of = _KEPT ** max(0, doublings), _OF ** max(0, doublings)
        # The result is rounded down, because it is a lower bound.
        promised: int = min(
            size * self._times[place] * kept // (self._sizes[place] * of) for place in neighbours
        )
        return promised


def _doublings(small: int, large: int) -> int:
    """Number of doublings from a small size to a large one, rounded up."""
    return (-(-large // small) - 1).bit_length()


def _middle(option: ChunkOption, curve: Sequence[ChunkOption]) -> ChunkOption:
    """The option nearest to the middle between the two timed sizes around a given option."""
    timed = sorted({other.batch for other in curve if other.interval is not None})
    place = bisect_left(timed, option.batch)
    # No other size is of use if the option itself ran too briefly before, if its size was timed in
    # another role, or if no smaller size was timed.
    if option.batch in timed or not place:
        return option
    # If no larger size was timed, the range ends at the option itself.
    below, top = timed[place - 1], (*timed, option.batch + 1)[place]
    between = [other for other in curve if below < other.batch < top]
    within = [other for other in between if other.lists == option.lists]
    # Powers of two are preferred: they often load all processors equally.
    powers = [other for other in within if other.batch.bit_count() == 1]
    return min(powers or within, key=lambda other: _imbalance(other.batch, below, top))


def _imbalance(size: int, below: int, above: int) -> float:
    # The result is 1 at the geometric mean of the two sizes, and greater on either side. Ratios of
    # sizes matter here, not differences, because "economy" is about doublings.
    return max(size * size / (below * above), below * above / (size * size))


class _Solved:
    """The fastest split of a batch, if every option takes its given time."""

    def __init__(
        self, time_by_option: Mapping[ChunkOption, int], batch: int, launch_ns: int
    ) -> None:
        self._batch = batch
        # All options fit the limit, so the best split contains only the fastest way to compute a
        # chunk of each size and position.
        self._best: dict[tuple[Role, int], ChunkOption] = {}
        for option, time_ns in time_by_option.items():
            for name in option.lists:
                place = (name, option.batch)
                rival = self._best.get(place)
                if rival is None or (time_ns, *_tie(option)) < (
                    time_by_option[rival],
                    *_tie(rival),
                ):
                    self._best[place] = option
        items: dict[str, list[Item]] = {name: [] for name in Role}
        for (name, size), option in self._best.items():
            # A chunk that is alone must be the whole batch.
            if size <= batch and not (name == Role.ALONE and size < batch):
                time_ns = time_by_option[option]
                items[name].append(
                    Item(size, option.workspace_bytes, time_ns, option.algorithm, option.rank)
                )
        self._table = reuse_by_position(items, batch, launch_ns)

    @property
    def time_ns(self) -> int | None:
        return None if self._table is None else self._table.time_ns(self._batch, None)

    def options(self) -> Iterator[ChunkOption]:
        """The chunks of the best split."""
        assert self._table is not None
        chunks = self._table.split(self._batch, None)
        for name, chunk in zip(positions(len(chunks)), chunks, strict=True):
            yield self._best[name, chunk.size]


def _tie(option: ChunkOption) -> tuple[int, int, str]:
    return option.workspace_bytes, option.rank, option.algorithm
