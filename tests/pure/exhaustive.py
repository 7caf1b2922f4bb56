"""Exhaustive search over all splits and all divisions, with which other solvers are compared.

For tests and tiny problems only. It shares neither code nor methods with what it checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any

from ucudnn.solvers._base import Division, Item, Pool


def exhaustive(
    items: Iterable[Item],
    n: int,
    limit: int | None = None,
    *,
    first: Iterable[Item] | None = None,
    accumulate: Iterable[Item] | None = None,
    launch_ns: int = 0,
) -> tuple[Item, ...] | None:
    """The best split of batch n, found by trying all; None if nothing fits.

    >>> items = [Item(4, 0, 40, "slow"), Item(1, 8, 5, "fast"), Item(2, 16, 9, "fast")]
    >>> [item.batch for item in exhaustive(items, 3)]
    [1, 2]

    Takes the arguments of `reuse`, and a workspace limit in bytes.
    """
    # As in `reuse`: one list for all positions, or three by position in the split.
    if first is None or accumulate is None:
        splits = _multisets(_fitting(items, limit), n)
    else:
        alone, begins, later = (_fitting(some, limit) for some in (items, first, accumulate))
        splits = by_position(alone, begins, later, n)
    return min(splits, default=None, key=lambda split: cost(split, launch_ns))


def by_position(
    alone: list[Any], first: list[Any], later: list[Any], n: int
) -> Iterator[tuple[Any, ...]]:
    """Every split into one chunk alone, or into a first one and later ones."""
    for item in alone:
        if item.batch == n:
            yield (item,)
    for item in first:
        if item.batch < n:
            for rest in _multisets(later, n - item.batch):
                yield (item, *rest)


def cost(split: Sequence[Item], launch_ns: int = 0) -> tuple[int, int, int, int]:
    """What `reuse` compares splits by: time, number of chunks, workspace, ranks."""
    return (
        sum(item.time_ns + launch_ns for item in split),
        len(split),
        max(item.workspace_bytes for item in split),
        sum(item.rank for item in split),
    )


def _fitting(items: Iterable[Item], limit: int | None) -> list[Item]:
    return [item for item in items if limit is None or item.workspace_bytes <= limit]


def _multisets(items: list[Any], n: int) -> Iterator[tuple[Any, ...]]:
    """Every multiset of items whose sizes sum up to n."""
    if n == 0:
        yield ()
    for place, item in enumerate(items):
        if item.batch <= n:
            # From `place` on, so that every multiset comes in one order only.
            for rest in _multisets(items[place:], n - item.batch):
                yield (item, *rest)


def divide_exhaustively(pool: Pool) -> Division:
    """Divide a pool by trying all divisions.

    >>> divide_exhaustively(Pool((((0, 9), (8, 5)), ((0, 7), (8, 1))), total_bytes=8)).choice
    (0, 1)
    """
    tried = product(*(range(len(front)) for front in pool.fronts))
    # A lower bound of 0 for now: the true one is known when all were compared.
    divisions = (pool.divided(choice, 0, "exhaustive") for choice in tried)
    best = min(
        (one for one in divisions if one.workspace_bytes <= pool.total_bytes),
        key=lambda one: one.time_ns,
    )
    return pool.divided(best.choice, best.time_ns, "exhaustive")
