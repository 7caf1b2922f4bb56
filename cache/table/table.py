"""Measurements by column: the contents of a file, found by key without building the others.

Measurements are rows of arrays, and an object is built only for a measurement that is looked up. A
problem is found by bisection over the sorted rows. Its measurements are neighbours, and a small
dictionary of them is built when the problem is first looked up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from ucudnn.cache.entries import Entry
from ucudnn.cache.table.facts import Facts
from ucudnn.cache.table.rows import (
    NONE,
    Array,
    Context,
    MeasurementRow,
    Work,
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
# By algorithm and context.
_RowByKey: TypeAlias = dict[tuple[int, int], MeasurementRow]


@dataclass(slots=True)
class _LastLookup:
    """Parts of the last key that was looked up, and the rows found for them."""

    context: tuple[object, ...] = ()
    context_id: int = -1
    problem: Problem | None = None
    rows: _RowByKey = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Table:
    """Measurements sorted by problem, algorithm and context, one per key.

    Args:
        problems: distinct, sorted as bytes.
        contexts: distinct.
        algorithms: distinct, with what else was timed.
        reasons: distinct.
        notes: distinct.
        facts: distinct.
        device_uuids: distinct.
        rows: columns of `MEASUREMENT_DTYPE`, which point into the lists and the samples.
        samples: of all rows, one after the other.
    """

    problems: Array
    contexts: list[Context]
    algorithms: list[Work]
    reasons: list[str]
    notes: list[tuple[str, ...]]
    facts: list[Facts]
    device_uuids: list[str]
    rows: Array
    samples: Array
    _rows_by_problem: dict[Problem, _RowByKey] = field(init=False, default_factory=dict)
    _last: _LastLookup = field(init=False, default_factory=_LastLookup)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def newest_ns(self) -> int:
        """Time at which the last entry was stored; 0 in an empty table."""
        return int(self.rows["stored_ns"].max(initial=0))

    @cached_property
    def _first_rows(self) -> Array:
        """First row of each problem, and the number of rows."""
        return np.searchsorted(self.rows["problem"], np.arange(len(self.problems) + 1))

    @cached_property
    def _context_ids(self) -> dict[Context, int]:
        return {context: index for index, context in enumerate(self.contexts)}

    @cached_property
    def _algorithm_ids(self) -> dict[Work, int]:
        return {name: index for index, name in enumerate(self.algorithms)}

    def find(self, key: MeasurementKey) -> MeasurementRow | None:
        """The row of a key, for `measurement`; None if there is none."""
        last = self._last
        # A tuner asks for many keys with the same objects in them, and tuples compare by identity
        # before they compare by value, so a repeated context or problem costs no hashing.
        context = (key.device, key.software, key.conditions, key.protocol)
        if context != last.context:
            last.context_id = self._context_ids.get(Context(*context), -1)
            last.context = context
        if key.problem is not last.problem:
            rows = self._rows_by_problem.get(key.problem)
            last.rows = self._rows_of(key.problem) if rows is None else rows
            last.problem = key.problem
        return last.rows.get((self._algorithm_ids.get(Work.of(key), -1), last.context_id))

    def _rows_of(self, problem: Problem) -> _RowByKey:
        keys, wanted = sort_keys(self.problems), problem_row(problem)
        index = int(np.searchsorted(keys, np.array(wanted, keys.dtype)))
        rows: _RowByKey = {}
        # Bytes, because numpy ignores zeros at the end of its byte strings.
        if index < len(keys) and self.problems[index : index + 1].tobytes() == wanted:
            start, stop = self._first_rows[index : index + 2].tolist()
            found = map(MeasurementRow._make, self.rows[start:stop].tolist())
            rows = {(row.algorithm, row.context): row for row in found}
        if len(self._rows_by_problem) >= _MEMO_PROBLEMS:
            self._rows_by_problem.clear()
        self._rows_by_problem[problem] = rows
        return rows

    def measurement(self, row: MeasurementRow, key: MeasurementKey) -> Measurement:
        """The measurement in a row whose key is known."""
        return Measurement(
            key,
            _STATUS_BY_BYTES[row.status],
            None if row.time_ns == NONE else row.time_ns,
            None if row.spread_ns == NONE else row.spread_ns,
            tuple(self.samples[row.sample_slice].tolist()) if row.samples else (),
            None if row.workspace_bytes == NONE else row.workspace_bytes,
            row.error if row.has_error else None,
            self.reasons[row.reason],
            self.notes[row.notes],
            *self.facts[row.facts],
        )

    def entries(self) -> Iterator[Entry]:
        """The entries in order."""
        problem_id, problem = -1, None
        for row in self._row_tuples():
            if row.problem != problem_id or problem is None:
                problem_id, problem = row.problem, problem_from_row(self.problems[row.problem])
            context = self.contexts[row.context]
            key = self.algorithms[row.algorithm].key(problem, context)
            uuid = self.device_uuids[row.device_uuid]
            yield Entry(self.measurement(row, key), row.stored_ns, uuid)

    def _row_tuples(self) -> Iterator[MeasurementRow]:
        # In blocks, so that memory does not grow with the number of entries.
        for start in range(0, len(self), _ROWS_AT_ONCE):
            block = self.rows[start : start + _ROWS_AT_ONCE].tolist()
            yield from map(MeasurementRow._make, block)
