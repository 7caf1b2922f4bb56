"""Lower bounds without a search, for the time of any split and of any division of a pool.

They take one pass over the items. Solvers that prove their answers do not need them, but tests
check the answers with them. For a plan that was found in another way, they bound what is left to
gain.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ucudnn.solvers._base import Item, Pool, require_int, require_items, require_limit
from ucudnn.solvers.relaxation import relax


def split_bound_ns(
    items: Iterable[Item],
    n: int,
    limit: int | None = None,
    *,
    first: Iterable[Item] | None = None,
    accumulate: Iterable[Item] | None = None,
    launch_ns: int = 0,
) -> int | None:
    """Lower bound of the time of any split of batch n within a limit; None if nothing fits.

    Every sample is charged the smallest time per sample of any chunk: the linear relaxation of the
    split. The bound is reached if the size of that chunk divides n.

    >>> items = [Item(4, 0, 40, "slow"), Item(3, 8, 14, "fast")]
    >>> split_bound_ns(items, 7), split_bound_ns(items, 6), split_bound_ns(items, 7, limit=4)
    (33, 28, 70)

    Args:
        items: ways to compute a chunk; with `first` and `accumulate`, ways to compute the batch
            alone.
        n: the batch.
        limit: workspace in bytes, None for any.
        first: ways to compute the first of several chunks.
        accumulate: ways to compute a later chunk.
        launch_ns: fixed cost of each chunk, in addition to its time.

    Raises:
        ConfigError: an argument is out of range.
    """
    require_int("n", n, 1)
    require_limit("limit", limit)
    require_int("launch_ns", launch_ns, 0)
    lone, starts, later = (
        [(item.batch, item.time_ns + launch_ns) for item in _usable(name, listed, n, limit)]
        for name, listed in (("items", items), ("first", first), ("accumulate", accumulate))
    )
    # In one list a chunk costs the same at any position, so one rate holds for all n samples.
    if first is None and accumulate is None:
        return _charged(n, lone)
    alone = [time_ns for size, time_ns in lone if size == n]
    # Several chunks have exactly one first chunk; the rate of later ones holds for the rest only.
    several = [
        time_ns + rest
        for size, time_ns in starts
        if size < n and (rest := _charged(n - size, later)) is not None
    ]
    return min([*alone, *several], default=None)


def _usable(name: str, listed: Iterable[Item] | None, n: int, limit: int | None) -> list[Item]:
    # A chunk that is larger than n or over the limit is in no split, so it must not set the rate.
    fitting = (item for item in require_items(name, listed or ()) if item.batch <= n)
    return [item for item in fitting if limit is None or item.workspace_bytes <= limit]


def _charged(samples: int, chunks: Sequence[tuple[int, int]]) -> int | None:
    """Smallest time of so many samples, at the best rate of any (size, time) with size <= n."""
    best: tuple[int, int] | None = None
    for size, time_ns in chunks:
        # Rates are compared crosswise, in integers, so that none is rounded.
        if size <= samples and (best is None or time_ns * best[0] < best[1] * size):
            best = size, time_ns
    # Rounded up: times are integers, so no split lies between two of them.
    return None if best is None else -(-samples * best[1] // best[0])


def network_bound_ns(fronts: Iterable[Sequence[tuple[int, int]]], total_bytes: int) -> int:
    """Lower bound of the time of any division of a pool among overlapping kernels.

    It is the linear relaxation of the division, in which a kernel may run at a mixture of points.

    >>> network_bound_ns([[(0, 9), (8, 5)], [(0, 7), (8, 1)]], total_bytes=8)
    10

    Args:
        fronts: per kernel its choices as (workspace in bytes, time in ns).
        total_bytes: the pool.

    Raises:
        PlanError: the pool is too small; the error carries the smallest sufficient one.
        ConfigError: an argument is out of range.
    """
    return relax(Pool(tuple(map(tuple, fronts)), total_bytes)).bound_ns
