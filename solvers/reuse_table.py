"""The solved reuse problem of one kernel: answers for every batch and every workspace limit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from ucudnn.errors import ConfigError, PlanError
from ucudnn.solvers._base import Item, require_int, require_limit
from ucudnn.solvers.sweep import FIRST, Costs, History, Rows
from ucudnn.split import Chunk
from ucudnn.system.processes import cached_property
from ucudnn.units import format_bytes


@dataclass(frozen=True, slots=True)
class WalkEntry:
    """Entry of a plan for one batch: how to compute it alone, and the last chunk of its sequence.

    Args:
        alone: the item that computes the batch alone, if that is best; else None.
        last: the last chunk of the best sequence of one first chunk and 0 or more later chunks;
            None if there is no such sequence.
    """

    alone: Item | None
    last: Item | None


@dataclass(frozen=True, eq=False)
class ReuseTable:
    """Result of `reuse`: fronts and splits of every batch from 1 to N.

    >>> from ucudnn.solvers import Item, reuse
    >>> table = reuse([Item(1, 0, 10, "slow"), Item(2, 64, 11, "fast")], batch=5)
    >>> table.time_ns(5, limit=None), table.time_ns(5, limit=63)
    (32, 50)
    >>> [chunk.size for chunk in table.split(5, limit=64)]
    [2, 2, 1]

    Args:
        batch: the largest batch N.
        rows: the rows of the table of costs, see sweep.py.
        costs: the items in the order of the sweep, and their costs.
        history: every cost that each batch had in each row during the sweep.
    """

    batch: int
    rows: Rows
    costs: Costs
    history: History

    def front(self, n: int) -> list[tuple[int, int]]:
        """Pareto front of batch n: workspace in bytes ascending, time in ns strictly descending.

        Empty if no split of n exists.
        """
        self._require_batch(n)
        fastest: dict[int, int] = {}
        time_ns = None
        entries = self.history.entries(self.rows.final, n)
        keys, last = self.history.keys[entries].tolist(), self.history.last[entries].tolist()
        for key, item in zip(keys, last, strict=True):
            # Keys (costs as integers) fall from entry to entry. An entry that takes as long as the
            # one before it only has fewer chunks or lower ranks, and is no new point of the front.
            # If several entries have the same workspace, the last one is the fastest and replaces
            # those before it.
            if key // self.costs.unit_ns != time_ns:
                time_ns = key // self.costs.unit_ns
                fastest[int(self.costs.workspaces[item])] = time_ns
        return list(fastest.items())

    def time_ns(self, n: int, limit: int | None = None) -> int | None:
        """Time of the fastest split of batch n within a workspace limit; None if nothing fits.

        Args:
            n: the batch, from 1 to N.
            limit: workspace in bytes, None for any.
        """
        entry = self.history.latest(self.rows.final, self._require_batch(n), self._count(limit))
        return None if entry is None else int(self.history.keys[entry]) // self.costs.unit_ns

    def split(self, n: int, limit: int | None = None) -> tuple[Chunk, ...]:
        """The fastest split of batch n within a workspace limit.

        After the first chunk, no chunk is larger than the one before it.

        Args:
            n: the batch, from 1 to N.
            limit: workspace in bytes, None for any.

        Raises:
            PlanError: no split fits; the error carries the smallest workspace with which one would.
        """
        return tuple(Chunk(item.batch, item.algorithm) for item in self.items(n, limit))

    def items(self, n: int, limit: int | None = None) -> tuple[Item, ...]:
        """The items of `split(n, limit)`, with the time and workspace of each chunk.

        Raises:
            PlanError: no split fits; the error carries the smallest workspace with which one would.
        """
        count = self._settled(n, limit)
        if count is None:
            raise self._nothing_fits(n, limit)
        # The order of the chunks does not matter. They are sorted so that equal splits are equal
        # tuples.
        chunks = sorted(self._chunks(self.rows.final, n, count), key=_turn)
        return tuple(item for _, item in chunks)

    def smallest_bytes(self, n: int) -> int | None:
        """The smallest workspace in bytes of any split of batch n; None if there is no split."""
        entries = self.history.entries(self.rows.final, self._require_batch(n))
        # If there is no entry, no split of n exists. Otherwise the first entry is the one of least
        # workspace.
        if entries.start == entries.stop:
            return None
        return int(self.costs.workspaces[self.history.last[entries.start]])

    def walk(self, limit: int | None = None) -> tuple[WalkEntry, ...]:
        """The entries of a plan for n = 1..N, from which the split of any n can be read.

        If `alone` of n is None, the last chunk of n is its `last`, the chunk before it is the
        `last` of n - last.batch, and so on. The chunks found in this way take as long as those of
        `split`, with one exception: with three lists, a first chunk by itself may be found, which
        is no split. This happens only if it is faster than every split and every chunk alone.
        Measured times exclude this, because a call alone does no more work than a first chunk.

        Args:
            limit: workspace in bytes, None for any.
        """
        count = self._count(limit)
        return tuple(
            WalkEntry(self._alone(n, limit), self._last(n, count)) for n in range(1, self.batch + 1)
        )

    def _alone(self, n: int, limit: int | None) -> Item | None:
        count = self._settled(n, limit)
        if count is None:
            return None
        # `_chunks` yields the last chunk first. If it is as large as n, it is the only one.
        _, item = next(self._chunks(self.rows.final, n, count))
        return item if item.batch == n else None

    def _last(self, n: int, count: int) -> Item | None:
        """The last chunk of the best sequence: a later chunk, or the first if there is none."""
        first = None
        for role, item in self._chunks(self.rows.chain, n, count):
            if role != FIRST:
                return item
            first = item
        return first

    def _chunks(self, row: int, n: int, count: int) -> Iterator[tuple[int, Item]]:
        """Role and item of each chunk of the best split of n by the first `count` items only."""
        while n and (entry := self.history.latest(row, n, count)) is not None:
            # The table is exact for the first `count` items, so removing the last chunk leaves the
            # best split of the rest.
            last = int(self.history.last[entry])
            role, item = int(self.costs.roles[last]), self.costs.items[last]
            yield role, item
            row, n = self._sources[role, row], n - item.batch

    @cached_property
    def _sources(self) -> dict[tuple[int, int], int]:
        # For each role at most one arc leads to a row, so the role of a chunk and the row after it
        # determine the row before it.
        return {
            (role, arc.target): arc.source for role, arcs in self.rows.arcs.items() for arc in arcs
        }

    def _settled(self, n: int, limit: int | None) -> int | None:
        """Number of items that suffice for the best time within a limit, with the fewest chunks.

        Further items could only lower the sum of ranks, and a split with less workspace is
        preferred to that.
        """
        entry = self.history.latest(self.rows.final, self._require_batch(n), self._count(limit))
        if entry is None:
            return None
        keys, start = self.history.keys, self.history.entries(self.rows.final, n).start
        unit = self.costs.unit_chunk
        # Of the entries with this time and number of chunks, the first one needs the least
        # workspace. All items of that workspace are included, because they may lower the sum of
        # ranks.
        best = keys[entry] // unit
        while entry > start and keys[entry - 1] // unit == best:
            entry -= 1
        return self._count(int(self.costs.workspaces[self.history.last[entry]]))

    def _count(self, limit: int | None) -> int:
        """Number of items of the sweep whose workspace is within a limit."""
        require_limit("limit", limit)
        if limit is None:
            return len(self.costs.items)
        # Items are sorted by workspace, so those within a limit come first.
        return bisect_right(self.costs.workspaces, limit)

    def _require_batch(self, n: int) -> int:
        require_int("n", n, 1)
        if n > self.batch:
            raise ConfigError(
                f"n must be at most the batch that was solved for ({self.batch}), got {n}; "
                f"solve for a larger batch"
            )
        return n

    def _nothing_fits(self, n: int, limit: int | None) -> PlanError:
        smallest = self.smallest_bytes(n)
        if smallest is None:
            return PlanError(
                f"batch {n} must be a sum of micro-batch sizes that were measured, and of those in "
                f"the list is none; measure more sizes"
            )
        # There is a split without a limit, so a limit must have been given.
        assert limit is not None
        first = self.items(n, smallest)[0]
        return PlanError(
            f"no split of batch {n} fits a workspace limit of {format_bytes(limit)}; the smallest "
            f"needs {format_bytes(smallest)} (micro-batch {first.batch}, {first.algorithm}); "
            f"raise the limit",
            smallest,
        )


def _turn(chunk: tuple[int, Item]) -> tuple[bool, int, str, int]:
    """Sort key: the chunk of role FIRST comes first, then larger chunks before smaller ones."""
    role, item = chunk
    # Algorithm and workspace are part of the key only to make the order unique.
    return role != FIRST, -item.batch, item.algorithm, item.workspace_bytes
