"""Measurements by column: what one file holds, found by key without building the rest.

A million entries are arrays here. Objects are built for the few that are asked for: a problem is
found by bisection over the sorted rows, its entries are neighbours, and a small dictionary of them
is made when the problem is first looked up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ucudnn.cache._base import Entry
from ucudnn.cache.records import (
    NONE,
    Array,
    Context,
    problem_from_row,
    problem_row,
    sort_keys,
)
from ucudnn.measurement import Measurement, MeasurementKey
from ucudnn.problem import Problem

_MEMO_PROBLEMS = 100_000


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
    _problem_ids: dict[Problem, int] = field(init=False, default_factory=dict)
    _row_by_key_by_problem: dict[int, dict[tuple[int, int], int]] = field(
        init=False, default_factory=dict
    )

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

    def find(self, key: MeasurementKey, context: Context) -> int | None:
        """The row of a key, None where there is none; `context` is the key's."""
        context_id = self._context_ids.get(context)
        algorithm_id = self._algorithm_ids.get(key.algorithm)
        if context_id is None or algorithm_id is None:
            return None
        problem_id = self._problem_ids.get(key.problem)
        if problem_id is None:
            problem_id = self._search(key.problem)
        if problem_id < 0:
            return None
        rows = self._row_by_key_by_problem.get(problem_id)
        if rows is None:
            rows = self._row_by_key_by_problem[problem_id] = self._index(problem_id)
        return rows.get((algorithm_id, context_id))

    def _search(self, problem: Problem) -> int:
        keys, wanted = sort_keys(self.problems), problem_row(problem)
        index = int(np.searchsorted(keys, np.array(wanted, keys.dtype)))
        found = index < len(keys) and self.problems[index : index + 1].tobytes() == wanted
        if len(self._problem_ids) >= _MEMO_PROBLEMS:
            self._problem_ids.clear()
        self._problem_ids[problem] = index if found else -1
        return self._problem_ids[problem]

    def _index(self, problem_id: int) -> dict[tuple[int, int], int]:
        start, stop = self._first_rows[problem_id : problem_id + 2].tolist()
        rows = self.rows[start:stop]
        keys = zip(rows["algorithm"].tolist(), rows["context"].tolist(), strict=True)
        return dict(zip(keys, range(start, stop), strict=True))

    def stored_ns(self, row: int) -> int:
        """When an entry was stored."""
        return int(self.rows["stored_ns"][row])

    def measurement(self, row: int, key: MeasurementKey) -> Measurement:
        """The measurement in a row whose key is known."""
        return self._measurement(self.rows[row].item(), key)

    def _measurement(self, values: tuple[Any, ...], key: MeasurementKey) -> Measurement:
        (_, _, _, status, time, spread, workspace, error, has_error, reason, notes, _) = values[:12]
        count, first = values[12], values[13]
        return Measurement(
            key,
            status.decode(),
            None if time == NONE else time,
            None if spread == NONE else spread,
            tuple(self.samples[first : first + count].tolist()),
            None if workspace == NONE else workspace,
            error if has_error else None,
            self.reasons[reason],
            self.notes[notes],
        )

    def entries(self, rows: Array | None = None) -> Iterator[Entry]:
        """The entries in order; `rows` (a mask): some of them."""
        problem_id, problem = -1, None
        for values in (self.rows if rows is None else self.rows[rows]).tolist():
            if values[0] != problem_id or problem is None:
                problem_id = values[0]
                problem = problem_from_row(self.problems[problem_id])
            context = self.contexts[values[2]]
            key = MeasurementKey(
                problem,
                self.algorithms[values[1]],
                context.device,
                context.software,
                context.conditions,
                context.protocol,
            )
            measurement = self._measurement(values, key)
            yield Entry(measurement, values[14], self.device_uuids[values[11]])
