"""Build tables: from entries, from other tables, from some rows of a table.

Every table is built here, sorted and with one row per key, so readers need not check.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from ucudnn.cache.entries import Entry
from ucudnn.cache.table.checksum import checksums
from ucudnn.cache.table.facts import Facts
from ucudnn.cache.table.rows import (
    MEASUREMENT_DTYPE,
    NONE,
    PROBLEM_DTYPE,
    Array,
    Context,
    MeasurementRow,
    Work,
    problem_rows,
    sort_keys,
)
from ucudnn.cache.table.table import Table
from ucudnn.errors import CacheError
from ucudnn.problem import Problem

T = TypeVar("T")
_KEY_COLUMNS = ("problem", "algorithm", "context")
# A list of a table, and the column with numbers of its rows.
_COLUMN_BY_LIST = {
    "contexts": "context",
    "algorithms": "algorithm",
    "reasons": "reason",
    "notes": "notes",
    "facts": "facts",
    "device_uuids": "device_uuid",
}


class _Lists:
    """Distinct values of the lists of a table, with their numbers in order of appearance."""

    def __init__(self) -> None:
        self._numbers: dict[str, dict[Any, int]] = {name: {} for name in _COLUMN_BY_LIST}

    def number(self, name: str, value: Any) -> int:
        """Number of a value in a list, which gets it if it is new there."""
        return _number(self._numbers[name], value)

    def renumber(self, name: str, values: Sequence[Any], old: Array) -> Array:
        """Numbers in this list for numbers of another table; values without a row are left out."""
        new = np.zeros(len(values), "<u4")
        for number in np.unique(old).tolist():
            new[number] = self.number(name, values[number])
        renumbered: Array = new[old]
        return renumbered

    def table(self, problems: Array, rows: Array, samples: Array) -> Table:
        """A table with these lists."""
        lists: dict[str, list[Any]] = {name: list(seen) for name, seen in self._numbers.items()}
        return Table(problems=problems, rows=rows, samples=samples, **lists)


def _number(seen: dict[T, int], value: T) -> int:
    return seen.setdefault(value, len(seen))


def build_table(entries: Iterable[Entry]) -> Table:
    """Build the table of these entries; of two with one key the later stored one stays.

    Raises:
        CacheError: a number needs more than 64 bits.
    """
    problems: dict[Problem, int] = {}
    lists = _Lists()
    rows: list[MeasurementRow] = []
    samples: list[int] = []
    for entry in entries:
        problem = _number(problems, entry.measurement.key.problem)
        rows.append(_row(entry, problem, lists, len(samples)))
        samples.extend(entry.measurement.samples)
    try:
        table = lists.table(
            problem_rows(problems), np.array(rows, MEASUREMENT_DTYPE), np.array(samples, "<i8")
        )
    except OverflowError:
        raise CacheError("numbers of a measurement must be below 2^63 to be stored") from None
    table.rows["checksum"] = checksums(table)
    # Merging a single table sorts it.
    return merge_tables([table])


def _row(entry: Entry, problem: int, lists: _Lists, first_sample: int) -> MeasurementRow:
    measurement = entry.measurement
    key = measurement.key
    return MeasurementRow(
        problem=problem,
        algorithm=lists.number("algorithms", Work.of(key)),
        context=lists.number("contexts", Context.of(key)),
        status=measurement.status.encode(),
        time_ns=_or_none(measurement.time_ns),
        spread_ns=_or_none(measurement.spread_ns),
        workspace_bytes=_or_none(measurement.workspace_bytes),
        error=0.0 if measurement.error is None else measurement.error,
        has_error=measurement.error is not None,
        reason=lists.number("reasons", measurement.reason),
        notes=lists.number("notes", measurement.notes),
        device_uuid=lists.number("device_uuids", entry.device_uuid),
        samples=len(measurement.samples),
        first_sample=first_sample,
        stored_ns=entry.stored_ns,
        checksum=0,  # computed from the finished table
        facts=lists.number("facts", Facts.of(measurement)),
    )


def _or_none(value: int | None) -> int:
    return NONE if value is None else value


def merge_tables(tables: Sequence[Table]) -> Table:
    """Merge tables, sorted; of several rows with one key the latest stored one stays."""
    problems, problem_numbers = _unite_problems(tables)
    lists = _Lists()
    parts, offset = [np.empty(0, MEASUREMENT_DTYPE)], 0
    for table, numbers in zip(tables, problem_numbers, strict=True):
        # A copy, in full width: the columns of a file are as narrow as its numbers allow.
        rows = table.rows.astype(MEASUREMENT_DTYPE)
        rows["problem"] = numbers[rows["problem"]]
        for name, column in _COLUMN_BY_LIST.items():
            rows[column] = lists.renumber(name, getattr(table, name), rows[column])
        rows["first_sample"] += offset
        offset += len(table.samples)
        parts.append(rows)
    rows = _latest(np.concatenate(parts))
    # The empty arrays give the result its type where there are no tables.
    samples = np.concatenate([np.empty(0, "<i8"), *(table.samples for table in tables)])
    gathered = _gather_samples(rows, samples)
    return lists.table(problems, rows, gathered)


def _unite_problems(tables: Sequence[Table]) -> tuple[Array, list[Array]]:
    """The problems that rows use, sorted, and for each table the new number of each old one."""
    # Problems that no row uses, such as those of pruned entries, are left out.
    used = [np.unique(table.rows["problem"]) for table in tables]
    kept = [table.problems[ids] for table, ids in zip(tables, used, strict=True)]
    everything = np.concatenate([np.empty(0, PROBLEM_DTYPE), *kept])
    keys, numbers = np.unique(sort_keys(everything), return_inverse=True)
    new_ids, start = [], 0
    for table, ids in zip(tables, used, strict=True):
        new = np.zeros(len(table.problems), "<u4")
        new[ids] = numbers[start : start + len(ids)]
        start += len(ids)
        new_ids.append(new)
    return keys.view(PROBLEM_DTYPE), new_ids


def _latest(rows: Array) -> Array:
    """The rows in order, without those that a later stored one with the same key replaces."""
    # Where two were stored at the same time, the larger checksum wins: on every machine the same.
    columns = ("checksum", "stored_ns", "context", "algorithm", "problem")
    rows = rows[np.lexsort([rows[name] for name in columns])]
    is_last = np.ones(len(rows), bool)
    is_last[:-1] = np.logical_or.reduce(
        [rows[name][1:] != rows[name][:-1] for name in _KEY_COLUMNS]
    )
    return rows[is_last]


def _gather_samples(rows: Array, samples: Array) -> Array:
    """The samples of the rows, in their order; the rows then point into the result."""
    # A place is the row's first sample plus the position among its samples; numpy repeats the
    # difference between old and new beginnings once per sample.
    counts = rows["samples"].astype("<i8")
    starts = np.cumsum(counts) - counts
    places = np.repeat(rows["first_sample"] - starts, counts) + np.arange(counts.sum())
    rows["first_sample"] = starts
    gathered: Array = samples[places]
    return gathered


def select_rows(table: Table, mask: Array) -> Table:
    """The table of the rows that a mask names; its lists hold only what they use."""
    return merge_tables([replace(table, rows=table.rows[mask])])


EMPTY = build_table(())
