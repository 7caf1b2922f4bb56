"""Measurements by column: what a file holds, found by key without building the rest.

A million entries are arrays here. Objects are built for the few that are asked for: a problem is
found by bisection over the sorted rows, its entries are neighbours, and a small dictionary of them
is made when the problem is first looked up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from ucudnn.cache.entries import Entry
from ucudnn.cache.table.rows import (
    NONE,
    Array,
    Context,
    problem_from_row,
    problem_row,
    sort_keys,
)
from ucudnn.measurement import STATUSES, Measurement, MeasurementKey
from ucudnn.problem import Problem
from ucudnn.system.forking import cached_property

_STATUS_BY_BYTES = {status.encode(): status for status in STATUSES}
_MEMO_PROBLEMS = 10_000
_ROWS_AT_ONCE = 10_000
# A row as a tuple of MEASUREMENT_ROW's fields, by its algorithm and context.
_RowByKey: TypeAlias = dict[tuple[int, int], tuple[Any, ...]]


@dataclass(slots=True)
class _Last:
    """Parts of the last key, and the rows they led to."""

    parts: tuple[object, ...] = ()
    context_id: int = -1
    problem: Problem | None = None
    rows: _RowByKey = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Table:
    """Entries sorted by problem, algorithm and context, one per key; rows point into the lists.

    Args:
        problems: distinct, sorted as bytes.
        contexts: distinct.
        algorithms: distinct names.
        reasons: distinct.
        notes: distinct.
        device_uuids: distinct.
        rows: the entries.
        samples: of all rows, one after the other.
    """

    problems: Array
    contexts: list[Context]
    algorithms: list[str]
    reasons: list[str]
    notes: list[tuple[str, ...]]
    device_uuids: list[str]
    rows: Array
    samples: Array
    _rows_by_problem: dict[Problem, _RowByKey] = field(init=False, default_factory=dict)
    _last: _Last = field(init=False, default_factory=_Last)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def newest_ns(self) -> int:
        """When the last entry was stored, 0 where there is none."""
        return int(self.rows["stored_ns"].max(initial=0))

    @cached_property
    def _first_rows(self) -> Array:
        return np.searchsorted(self.rows["problem"], np.arange(len(self.problems) + 1))

    @cached_property
    def _context_ids(self) -> dict[Context, int]:
        return {context: index for index, context in enumerate(self.contexts)}

    @cached_property
    def _algorithm_ids(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.algorithms)}

    def find(self, key: MeasurementKey) -> tuple[Any, ...] | None:
        """The row of a key, for `measurement`; None where there is none."""
        last = self._last
        # Tuples compare by identity first: the next key mostly has the same objects.
        parts = (key.device, key.software, key.conditions, key.protocol)
        if parts != last.parts:
            last.parts, last.context_id = parts, self._context_ids.get(Context(*parts), -1)
        if key.problem is not last.problem:
            rows = self._rows_by_problem.get(key.problem)
            last.problem, last.rows = (
                key.problem,
                self._index(key.problem) if rows is None else rows,
            )
        return last.rows.get((self._algorithm_ids.get(key.algorithm, -1), last.context_id))

    def _index(self, problem: Problem) -> _RowByKey:
        keys, wanted = sort_keys(self.problems), problem_row(problem)
        index = int(np.searchsorted(keys, np.array(wanted, keys.dtype)))
        rows: _RowByKey = {}
        if index < len(keys) and self.problems[index : index + 1].tobytes() == wanted:
            start, stop = self._first_rows[index : index + 2].tolist()
            rows = {(row[1], row[2]): row for row in self.rows[start:stop].tolist()}
        if len(self._rows_by_problem) >= _MEMO_PROBLEMS:
            self._rows_by_problem.clear()
        self._rows_by_problem[problem] = rows
        return rows

    def measurement(self, row: tuple[Any, ...], key: MeasurementKey) -> Measurement:
        """The measurement in a row whose key is known."""
        _, _, _, status, time, spread, workspace, error, has_error, reason, notes, *_ = row
        count, first = row[12], row[13]
        return Measurement(
            key,
            _STATUS_BY_BYTES[status],
            None if time == NONE else time,
            None if spread == NONE else spread,
            tuple(self.samples[first : first + count].tolist()) if count else (),
            None if workspace == NONE else workspace,
            error if has_error else None,
            self.reasons[reason],
            self.notes[notes],
        )

    def entries(self) -> Iterator[Entry]:
        """The entries in order."""
        problem_id, problem = -1, None
        for row in self._row_tuples():
            if row[0] != problem_id or problem is None:
                problem_id, problem = row[0], problem_from_row(self.problems[row[0]])
            context = self.contexts[row[2]]
            key = MeasurementKey(
                problem,
                self.algorithms[row[1]],
                context.device,
                context.software,
                context.conditions,
                context.protocol,
            )
            yield Entry(self.measurement(row, key), stored_ns(row), self.device_uuids[row[11]])

    def _row_tuples(self) -> Iterator[tuple[Any, ...]]:
        for start in range(0, len(self), _ROWS_AT_ONCE):
            yield from self.rows[start : start + _ROWS_AT_ONCE].tolist()


def stored_ns(row: tuple[Any, ...]) -> int:
    """When the entry in a row was stored."""
    stored: int = row[14]
    return stored
