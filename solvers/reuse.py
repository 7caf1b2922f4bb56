"""Workspace reuse: the best split of every batch under every limit, if kernels share one workspace.

Kernels of one stream run one after the other, so their chunks use the same memory. Their times add
up, and the shared workspace is as large as the largest one needed. So every kernel can be solved by
itself. This is the WR method of mu-cuDNN (Oyama et al., CLUSTER 2018), for all limits and batches
at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ucudnn.errors import ConfigError
from ucudnn.measurement import Role
from ucudnn.solvers._base import Item, require_int, require_items
from ucudnn.solvers.reuse_table import ReuseTable
from ucudnn.solvers.sweep import ANY, FIRST, LATER, SINGLE, Arc, Rows, Sweep, order

# With one list of items, a chunk costs the same alone or among others. So the table of costs has
# one row (see sweep.py), and adding a chunk leads from this row to itself.
_ONE_LIST = Rows(count=1, start=(0,), gate={ANY: 0}, arcs={ANY: (Arc(0, 0),)}, final=0, chain=0)
# With three lists of items there are three rows. Row 0 is for sequences of later chunks only, row 1
# for those of one first chunk and any number of later ones. Row 2 is for splits. It differs from
# row 1, because a first chunk by itself is no split, but a chunk alone is one.
_THREE_LISTS = Rows(
    count=3,
    start=(0,),
    gate={SINGLE: 2, FIRST: 1, LATER: 0},
    arcs={
        # This arc leads only from batch 0, because a chunk that is alone has no chunks before it.
        SINGLE: (Arc(0, 2, stop=1),),
        # The sweep may add the first chunk after later ones, because the order of a sum does not
        # matter. A split with a first chunk has at least one later chunk, hence start=1.
        FIRST: (Arc(0, 1), Arc(0, 2, start=1)),
        LATER: (Arc(0, 0), Arc(1, 1), Arc(1, 2)),
    },
    final=2,
    chain=1,
)


def reuse(
    items: Iterable[Item],
    batch: int,
    *,
    first: Iterable[Item] | None = None,
    accumulate: Iterable[Item] | None = None,
    launch_ns: int = 0,
) -> ReuseTable:
    """Find the fastest split of every batch up to `batch`, for every workspace limit at once.

    >>> items = [Item(4, 0, 40, "slow"), Item(1, 8, 5, "fast"), Item(2, 16, 9, "fast")]
    >>> table = reuse(items, batch=4)
    >>> table.front(4)
    [(0, 40), (8, 20), (16, 18)]
    >>> table.split(3, limit=16)
    (Chunk(size=2, algorithm='fast'), Chunk(size=1, algorithm='fast'))

    With all three lists, an item of `items` computes a batch as its only chunk. A split of two or
    more chunks has one chunk of `first`, and all its other chunks are of `accumulate`. The lists
    differ because a chunk alone is neither copied into a larger result nor added to one, and a
    first chunk is not added.

    Among splits that take equally long, the one with fewer chunks wins, then the one with less
    workspace, then the one with the lower sum of ranks.

    Args:
        items: ways to compute a chunk; with `first` and `accumulate`, ways to compute a batch
            alone.
        batch: the largest batch N.
        first: ways to compute the first of several chunks; needs `accumulate`.
        accumulate: ways to compute a chunk that is added to those before it; needs `first`.
        launch_ns: fixed cost of each chunk, in addition to its time.

    Raises:
        ConfigError: there are no items, or an argument is out of range.

    Items are inserted into an unbounded knapsack (Gilmore and Gomory 1966), see docs/solvers.md.
    """
    require_int("batch", batch, 1)
    require_int("launch_ns", launch_ns, 0)
    lists = _by_role(items, first, accumulate)
    # With one list all chunks are alike. With three lists the row of a sequence says whether it has
    # its first chunk.
    rows = _ONE_LIST if ANY in lists else _THREE_LISTS
    costs = order(lists, batch, launch_ns)
    return ReuseTable(batch, rows, costs, Sweep(rows, costs, batch).run())


def reuse_by_position(
    items: Mapping[str, Sequence[Item]], batch: int, launch_ns: int = 0
) -> ReuseTable | None:
    """`reuse` of three lists, by the position of their chunks; None if they make no split.

    >>> reuse_by_position({"alone": [], "first": [Item(1, 0, 5, "fast")], "later": []}, 1) is None
    True
    """
    alone, first, later = items[Role.ALONE], items[Role.FIRST], items[Role.LATER]
    # Without later chunks a first chunk cannot be part of a split.
    if not later:
        first = ()
    # Later chunks need a first chunk. So without first chunks only a chunk alone can be a split,
    # and if there is no such chunk either, there is no split.
    if not alone and not first:
        return None
    return reuse(alone, batch, first=first, accumulate=later, launch_ns=launch_ns)


def _by_role(
    items: Iterable[Item], first: Iterable[Item] | None, accumulate: Iterable[Item] | None
) -> dict[int, tuple[Item, ...]]:
    """The lists as tuples, by the role of their chunks; a ConfigError if they are not valid."""
    # With only one of these two lists, no split of several chunks would be found, so it is an error
    # to leave the other one out.
    if (first is None) != (accumulate is None):
        missing = "first" if first is None else "accumulate"
        raise ConfigError(
            f"first and accumulate must be given together, got no {missing}; "
            f"pass {missing}=() for none"
        )
    # Here both are None or neither is. Both are tested only for the type checker.
    if first is None or accumulate is None:
        lists = {ANY: require_items("items", items)}
    else:
        lists = {
            SINGLE: require_items("items", items),
            FIRST: require_items("first", first),
            LATER: require_items("accumulate", accumulate),
        }
    if not any(lists.values()):
        raise ConfigError("items must not be empty; pass at least one measured chunk")
    return lists
