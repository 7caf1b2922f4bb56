"""Sweep over workspace limits: the lowest cost of every batch under each limit.

Under one limit the problem is an unbounded knapsack of the items that fit. Adding one item to a
solved knapsack takes one pass over the table of costs. So items are added in the order of their
workspace: once all items of at most w bytes are added, the table is exact for the limit w. Every
cost that was lowered may be a point of the front of its batch, and is logged.

A row of the table has the costs of all batches for one kind of sequence, such as "only later
chunks" or "one first chunk and any number of later ones". An arc says that adding a chunk of some
role leads from one row to another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ucudnn.solvers._base import SAFE, Integers, Item

# Number of items per block. numpy compares a block of items with the table at once, and rejects the
# items whose cost is no lower than the one that the table has for their batch. The items that
# remain are compared again one by one, because costs in the table fall while they are added.
_BLOCK = 512
# Roles of a chunk: SINGLE if it is alone, FIRST of several, or LATER; ANY if the role does not
# matter.
SINGLE, FIRST, LATER, ANY = range(4)


@dataclass(frozen=True, slots=True)
class Arc:
    """A transition between rows by adding a chunk to a batch n, where `start` <= n < `stop`."""

    source: int
    target: int
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of the table for one list of items or for three, and the arcs between them."""

    count: int
    start: Sequence[int]  # rows in which batch 0 costs nothing
    gate: Mapping[int, int]  # by role, the row in which an item must lower a cost to be inserted
    arcs: Mapping[int, Sequence[Arc]]  # by role, in the order in which a pass follows them
    final: int  # the row that holds the answer
    chain: int  # the row of one first chunk and any number of later ones


@dataclass(frozen=True)
class Costs:
    """Items in the order of the sweep; costs are compared by time, then chunks, then rank."""

    items: tuple[Item, ...]  # sorted by workspace, as are all arrays here
    roles: Integers
    batches: Integers
    workspaces: Integers
    keys: Integers  # cost of each item as one integer; the cost of a split is their sum
    infinite: int  # more than any cost
    unit_ns: int  # value of one nanosecond in a key
    unit_chunk: int  # value of one chunk in a key


def order(lists: Mapping[int, Sequence[Item]], batch: int, launch_ns: int) -> Costs:
    """Sort items for the sweep, and make one integer of each item's time, chunk count and rank.

    Items are sorted by workspace. Of the items of one workspace, those with the least time per
    sample come first. Any other order of these would give the same costs, but need more passes. The
    order does not depend on that of the lists, so that the same items always give the same splits.
    Items larger than the batch are left out.
    """
    items, roles = _joined(lists, batch)
    batches = np.array([item.batch for item in items], np.int64)
    times = integers([item.time_ns + launch_ns for item in items])
    workspaces = integers([item.workspace_bytes for item in items])
    ranks = integers([item.rank for item in items])
    # A split has at most `batch` chunks. So one chunk weighs more than all ranks together, and one
    # ns more than all chunks and ranks: comparing keys compares time, then chunks, then ranks.
    unit_chunk = batch * int(ranks.max(initial=0)) + 1
    unit_ns = (batch + 1) * unit_chunk
    rates = times.astype(float) / batches
    # An upper bound of the cost of any split: every sample takes the longest time per sample, with
    # a margin for rounding.
    most = int(rates.max(initial=0) * 1.001 + 1) * batch * unit_ns
    # If that exceeds 64 bits, Python's ints are used, and the bound is computed without floats: as
    # `batch` chunks of the longest time.
    if most > SAFE:
        times, most = times.astype(object), batch * (int(times.max()) + 1) * unit_ns
    keys = times * unit_ns + unit_chunk + ranks
    places = _ranked([item.algorithm for item in items])
    # `lexsort` sorts by its last key first, here the workspace.
    sweep = np.lexsort((places, roles, keys, batches, rates, workspaces))
    return Costs(
        items=tuple(items[i] for i in sweep.tolist()),
        roles=roles[sweep],
        batches=batches[sweep],
        workspaces=workspaces[sweep],
        keys=keys[sweep],
        # This is more than every cost. In 64 bits the cost of an item can still be added to it.
        infinite=max(most, SAFE) if keys.dtype == object else 2 * SAFE,
        unit_ns=unit_ns,
        unit_chunk=unit_chunk,
    )


def _joined(lists: Mapping[int, Sequence[Item]], batch: int) -> tuple[list[Item], Integers]:
    """The items of all lists in one list, without those larger than the batch, and their roles."""
    fitting = {role: [i for i in ones if i.batch <= batch] for role, ones in lists.items()}
    roles = np.repeat(list(fitting), [len(ones) for ones in fitting.values()])
    return [item for ones in fitting.values() for item in ones], roles


def _ranked(names: Sequence[str]) -> Integers:
    """Names as numbers in alphabetical order, because `lexsort` compares arrays of numbers."""
    places = {name: place for place, name in enumerate(sorted(set(names)))}
    return np.array([places[name] for name in names], np.int64)


def integers(values: Sequence[int]) -> Integers:
    """An array of int64, or of Python ints if a value is too large."""
    return np.array(values, np.int64 if max(values, default=0) < SAFE else object)


class Sweep:
    """The table of costs while items are added, with a log of every cost that was lowered."""

    def __init__(self, rows: Rows, costs: Costs, batch: int) -> None:
        self._rows = rows
        self._costs = costs
        self._end = batch + 1
        # A row is about twice as long as the batch, because a pass reshapes it into a grid whose
        # last line may reach beyond the batch.
        self._cost = np.full((rows.count, 2 * batch + 1), costs.infinite, costs.keys.dtype)
        self._cost[list(rows.start), 0] = 0
        self._counts = np.arange(batch + 1, dtype=costs.keys.dtype)[:, None]
        self._log: list[tuple[Integers, Integers, int]] = []

    def run(self) -> History:
        """Insert every item that lowers a cost, and sort the log by row and batch."""
        costs = self._costs
        # A role without a gate has no items. Its place in the array needs some value, here 0.
        gates = np.array([self._rows.gate.get(role, 0) for role in range(max(self._rows.gate) + 1)])
        rows = gates[costs.roles]
        for start in range(0, len(costs.keys), _BLOCK):
            block = slice(start, start + _BLOCK)
            known = self._cost[rows[block], costs.batches[block]]
            for place in np.flatnonzero(costs.keys[block] < known).tolist():
                index = start + place
                if costs.keys[index] < self._cost[rows[index], costs.batches[index]]:
                    self._insert(index)
        return self._history()

    def _insert(self, index: int) -> None:
        key, size = self._costs.keys[index], int(self._costs.batches[index])
        for arc in self._rows.arcs[int(self._costs.roles[index])]:
            # If the arc leads from a row to itself, the chunk may be repeated. If at least two such
            # chunks fit the batch, one pass adds any number of them.
            if arc.source == arc.target and 2 * size < self._end:
                self._lower(arc.target, size, self._repeated(arc.source, size, key), index)
                continue
            stop = self._end - size if arc.stop is None else min(arc.stop, self._end - size)
            sources = self._cost[arc.source, arc.start : stop]
            self._lower(arc.target, arc.start + size, sources + key, index)

    def _repeated(self, row: int, size: int, key: int) -> Integers:
        """Costs of batches from `size` on after any number of copies of one chunk were added.

        Batches n with the same remainder modulo the size are computed together: for them, the
        lowest cost of n minus the cost of n // size copies is a running minimum over n.
        """
        # The grid has a line for each number of copies and a column for each remainder.
        lines = -(-self._end // size)
        grid = self._cost[row, : lines * size].reshape(lines, size)
        paid = self._counts[:lines] * key
        lowest = np.minimum.accumulate(grid - paid, axis=0) + paid
        found: Integers = lowest.reshape(-1)[size : self._end]
        return found

    def _lower(self, row: int, first: int, found: Integers, index: int) -> None:
        # `current` is a view, so writing to it below changes the table.
        current = self._cost[row, first : first + len(found)]
        better = (found < current).nonzero()[0]
        if len(better):
            lowered = found[better]
            current[better] = lowered
            self._log.append((better + (row * self._end + first), lowered, index))

    def _history(self) -> History:
        # The empty arrays set the dtype, and let `concatenate` accept an empty log.
        cells = np.concatenate([np.empty(0, np.int64), *(log[0] for log in self._log)])
        keys = np.concatenate([self._costs.keys[:0], *(log[1] for log in self._log)])
        last = np.repeat(
            np.array([log[2] for log in self._log], np.int32), [len(log[0]) for log in self._log]
        )
        # The sort is stable, so the entries of one cell stay in the order of the sweep, which is by
        # workspace.
        by_cell = np.argsort(cells, kind="stable")
        starts = np.searchsorted(cells[by_cell], np.arange(self._rows.count * self._end + 1))
        return History(self._end, starts, keys[by_cell], last[by_cell])


@dataclass(frozen=True)
class History:
    """Every cost that each cell (row, batch) has had, with the item of the last chunk."""

    end: int  # upper bound of the batches, exclusive
    starts: Integers  # index of the first entry of each cell
    keys: Integers  # costs, descending within a cell
    last: Integers  # positions of items in the order of the sweep, ascending within a cell

    def entries(self, row: int, n: int) -> slice:
        """Range of the entries of a cell."""
        cell = row * self.end + n
        return slice(int(self.starts[cell]), int(self.starts[cell + 1]))

    def latest(self, row: int, n: int, count: int) -> int | None:
        """The last entry that the first `count` items made in a cell; None if they made none."""
        cell = self.entries(row, n)
        place = int(np.searchsorted(self.last[cell], count))
        return cell.start + place - 1 if place else None
