"""Measurements by column: the contents of a file, in which look-ups by key are fast.

Each measurement is a row of a structured array. A column holds the values of a field, or indices of
a list of values that many rows share, such as algorithms. Columns have plain numbers and text of
fixed length, so any HDF5 tool shows them. A `Measurement` is built only for a row that is looked up
or listed. A problem is found by bisection over the sorted problems, which are compared as bytes.
The rows of its measurements are neighbours; at the first look-up of the problem, a small dictionary
of them is built.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from ucudnn.cache.entries import Entry
from ucudnn.cache.schema import PROBLEM_FIELDS, split_to_text
from ucudnn.errors import CacheError
from ucudnn.measurement import (
    STATUSES,
    Conditions,
    Device,
    FailureKind,
    Measurement,
    MeasurementKey,
    Software,
    Subject,
)
from ucudnn.problem import Problem
from ucudnn.split import Split
from ucudnn.system.processes import cached_property

Array: TypeAlias = NDArray[Any]
T = TypeVar("T")

_AXES = 3
# Width of op, dtype, layout, math and status; the longest word today has 8 bytes.
_WORD_BYTES = 16
_PROBLEM_TYPES: dict[str, tuple[Any, ...]] = {
    "str": (f"S{_WORD_BYTES}",),
    "int": ("<i8",),
    "tuple[int, ...]": ("<i8", (_AXES,)),
    "tuple[tuple[int, int], ...]": ("<i8", (_AXES, 2)),
}
PROBLEM_DTYPE = np.dtype(
    [(field.own_name, *_PROBLEM_TYPES[field.type]) for field in PROBLEM_FIELDS]
)
# Stands for None in a column of numbers.
NONE = -(2**63)
_STATUS_BY_BYTES = {status.encode(): status for status in STATUSES}
_MEMO_PROBLEMS = 10_000
_ROWS_AT_ONCE = 10_000
_KEY_COLUMNS = ("problem", "algorithm", "context")
# For each list of a table, the column of the measurements whose numbers are indices of that list.
COLUMN_BY_LIST = {
    "contexts": "context",
    "algorithms": "algorithm",
    "reasons": "reason",
    "notes": "notes",
    "facts": "facts",
}


class Facts(NamedTuple):
    """Facts of a measurement: the last fields of `Measurement`, in the same order.

    >>> Facts(lost_to="onednn").lost_to
    'onednn'
    """

    failure: FailureKind | None = None
    lost_to: str = ""
    implementation: str = ""
    is_deterministic: bool = True
    adds_bias: bool = False
    load: float = 0.0

    @classmethod
    def of(cls, measurement: Measurement) -> Facts:
        """The facts of a measurement."""
        return cls(*(getattr(measurement, name) for name in cls._fields))

    @property
    def unusual(self) -> dict[str, object]:
        """The facts that differ from their defaults: values by name.

        >>> Facts(lost_to="onednn", load=1.5).unusual
        {'lost_to': 'onednn', 'load': 1.5}
        """
        defaults = self._field_defaults
        return {name: value for name, value in self._asdict().items() if value != defaults[name]}


class Work(NamedTuple):
    """What was timed for the problem of a key: a chunk by an algorithm, or another call.

    >>> Work("gemm").texts
    {'algorithm': 'gemm'}
    """

    algorithm: str
    subject: Subject = Subject.CHUNK
    split: Split | None = None
    race: str = ""

    @classmethod
    def of(cls, key: MeasurementKey) -> Work:
        """The work of a key."""
        return cls(key.algorithm, key.subject, key.split, key.race)

    @property
    def texts(self) -> dict[str, str]:
        """Texts by field name; a field with its default value, as most have, is left out."""
        texts = {"algorithm": self.algorithm}
        if self.subject is not Subject.CHUNK:
            texts["subject"] = self.subject
        if self.split is not None:
            texts["split"] = split_to_text(self.split)
        if self.race:
            texts["race"] = self.race
        return texts


class MeasurementRow(NamedTuple):
    """One measurement of a table, as a tuple, because a million of them may be read.

    Problem, algorithm, context, reason, notes and facts are indices of the table's lists.
    """

    problem: int
    algorithm: int
    context: int
    status: bytes
    time_ns: int  # `NONE` if it is unknown; the next two fields likewise
    spread_ns: int
    workspace_bytes: int
    error: float  # 0 if it was not measured
    has_error: bool
    reason: int
    notes: int
    samples: int  # number of timed samples
    first_sample: int  # place of the first one in the table's samples
    stored_ns: int  # since 1970
    facts: int


_NUMBER_TYPES = {
    **dict.fromkeys(("problem", "algorithm", "context", "reason", "notes"), "<u4"),
    **dict.fromkeys(("samples", "facts"), "<u4"),
    "status": f"S{_WORD_BYTES}",
    "error": "<f8",
    "has_error": "?",
}
MEASUREMENT_DTYPE = np.dtype(
    [(name, _NUMBER_TYPES.get(name, "<i8")) for name in MeasurementRow._fields]
)


@dataclass(frozen=True, slots=True)
class Context:
    """Fields of a key beside problem and work; a cache has few combinations of their values."""

    device: Device
    software: Software
    conditions: Conditions
    protocol: int


# Gets the fields of a `Context` from a context or a key, as a tuple, which is hashed faster.
_context_of = attrgetter("device", "software", "conditions", "protocol")


def problem_rows(problems: Iterable[Problem]) -> Array:
    """Problems as a table; unused axes are 0."""
    # `Problem` accepts no size that needs more than 64 bits.
    rows = [
        tuple(_cell(getattr(problem, name)) for name in PROBLEM_DTYPE.names or ())
        for problem in problems
    ]
    return np.array(rows, PROBLEM_DTYPE)


def _cell(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, tuple):
        filler = (0, 0) if isinstance(value[0], tuple) else 0
        return value + (filler,) * (_AXES - len(value))
    return value


def problem_from_row(row: Any) -> Problem:
    """The problem in a row."""
    # An input size is at least 1, so a zero marks an axis that is not used.
    rank = int(np.count_nonzero(row["input_size"]))
    values: dict[str, Any] = {}
    for name in PROBLEM_DTYPE.names or ():
        value = row[name].tolist()
        if isinstance(value, bytes):
            value = value.decode()
        elif isinstance(value, list):
            value = tuple(tuple(v) if isinstance(v, list) else v for v in value[:rank])
        values[name] = value
    return Problem(**values)


def sort_keys(problems: Array) -> Array:
    """The rows as byte strings, which numpy can sort and search."""
    return problems.view(f"S{PROBLEM_DTYPE.itemsize}")


# The rows of one problem, by the indices of their algorithm and their context.
_RowByKey: TypeAlias = dict[tuple[int, int], MeasurementRow]


@dataclass(frozen=True, eq=False)
class Table:
    """Measurements sorted by problem, algorithm and context, one per key."""

    problems: Array  # distinct, sorted as bytes
    contexts: list[Context]  # distinct, as the values in each of the lists below
    algorithms: list[Work]
    reasons: list[str]
    notes: list[tuple[str, ...]]
    facts: list[Facts]
    rows: Array  # with the columns of `MEASUREMENT_DTYPE`, some of them indices of the above
    samples: Array  # times in ns of all rows, one row after the other
    _rows_by_problem: dict[Problem, _RowByKey] = field(init=False, default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def newest_ns(self) -> int:
        """Time at which the last entry was stored; 0 in an empty table."""
        return int(self.rows["stored_ns"].max(initial=0))

    @cached_property
    def _first_rows(self) -> Array:
        """First row of each problem, and as the last element the number of all rows."""
        return np.searchsorted(self.rows["problem"], np.arange(len(self.problems) + 1))

    @cached_property
    def _context_ids(self) -> dict[tuple[Any, ...], int]:
        return {_context_of(context): index for index, context in enumerate(self.contexts)}

    @cached_property
    def _algorithm_ids(self) -> dict[Work, int]:
        return {name: index for index, name in enumerate(self.algorithms)}

    def find(self, key: MeasurementKey) -> MeasurementRow | None:
        """The row of a key, to be passed to `measurement`; None if the table lacks the key."""
        rows = self._rows_by_problem.get(key.problem)
        if rows is None:
            rows = self._rows_of(key.problem)
        algorithm = self._algorithm_ids.get(Work.of(key), -1)
        return rows.get((algorithm, self._context_ids.get(_context_of(key), -1)))

    def _rows_of(self, problem: Problem) -> _RowByKey:
        keys, wanted = sort_keys(self.problems), problem_rows([problem]).tobytes()
        index = int(np.searchsorted(keys, np.array(wanted, keys.dtype)))
        rows: _RowByKey = {}
        # The problems are compared as `bytes`, because numpy ignores zeros at the end of its byte
        # strings.
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
        first = row.first_sample
        return Measurement(
            key,
            _STATUS_BY_BYTES[row.status],
            None if row.time_ns == NONE else row.time_ns,
            None if row.spread_ns == NONE else row.spread_ns,
            tuple(self.samples[first : first + row.samples].tolist()) if row.samples else (),
            None if row.workspace_bytes == NONE else row.workspace_bytes,
            row.error if row.has_error else None,
            self.reasons[row.reason],
            self.notes[row.notes],
            *self.facts[row.facts],
        )

    def entries(self) -> Iterator[Entry]:
        """The entries, in the order of the rows."""
        problem_id, problem = -1, None
        for row in self._row_tuples():
            if row.problem != problem_id or problem is None:
                problem_id, problem = row.problem, problem_from_row(self.problems[row.problem])
            context = self.contexts[row.context]
            work = self.algorithms[row.algorithm]
            key = MeasurementKey(
                problem,
                work.algorithm,
                context.device,
                context.software,
                context.conditions,
                context.protocol,
                work.subject,
                work.split,
                work.race,
            )
            yield Entry(self.measurement(row, key), row.stored_ns)

    def _row_tuples(self) -> Iterator[MeasurementRow]:
        # The rows are converted in blocks, so that memory does not grow with the number of entries.
        for start in range(0, len(self), _ROWS_AT_ONCE):
            block = self.rows[start : start + _ROWS_AT_ONCE].tolist()
            yield from map(MeasurementRow._make, block)


class _Lists:
    """The lists of a new table: distinct values, numbered in the order in which they appear."""

    def __init__(self) -> None:
        self._numbers: dict[str, dict[Any, int]] = {name: {} for name in COLUMN_BY_LIST}

    def number(self, name: str, value: Any) -> int:
        """Number of a value in a list; the value is appended if the list lacks it."""
        return _number(self._numbers[name], value)

    def renumber(self, name: str, values: Sequence[Any], old: Array) -> Array:
        """Turn numbers of another table's list into numbers of this one; unused values stay out."""
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
    """Build the table of these entries; of two entries with one key the later stored one stays."""
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
    # `merge_tables` also sorts the rows.
    return merge_tables([table])


def _row(entry: Entry, problem: int, lists: _Lists, first_sample: int) -> MeasurementRow:
    measurement = entry.measurement
    key = measurement.key
    return MeasurementRow(
        problem=problem,
        algorithm=lists.number("algorithms", Work.of(key)),
        context=lists.number("contexts", Context(*_context_of(key))),
        status=measurement.status.encode(),
        time_ns=_or_none(measurement.time_ns),
        spread_ns=_or_none(measurement.spread_ns),
        workspace_bytes=_or_none(measurement.workspace_bytes),
        error=0.0 if measurement.error is None else measurement.error,
        has_error=measurement.error is not None,
        reason=lists.number("reasons", measurement.reason),
        notes=lists.number("notes", measurement.notes),
        samples=len(measurement.samples),
        first_sample=first_sample,
        stored_ns=entry.stored_ns,
        facts=lists.number("facts", Facts.of(measurement)),
    )


def _or_none(value: int | None) -> int:
    return NONE if value is None else value


def merge_tables(tables: Sequence[Table]) -> Table:
    """Merge tables into a sorted one; of several rows with one key the latest stored one stays."""
    problems, problem_numbers = _unite_problems(tables)
    lists = _Lists()
    parts, offset = [np.empty(0, MEASUREMENT_DTYPE)], 0
    for table, numbers in zip(tables, problem_numbers, strict=True):
        # The rows are copied in full width, because the columns of a file are as narrow as its
        # numbers allow.
        rows = table.rows.astype(MEASUREMENT_DTYPE)
        rows["problem"] = numbers[rows["problem"]]
        for name, column in COLUMN_BY_LIST.items():
            rows[column] = lists.renumber(name, getattr(table, name), rows[column])
        rows["first_sample"] += offset
        offset += len(table.samples)
        parts.append(rows)
    rows = _latest(np.concatenate(parts))
    # The empty array gives the result its type if there are no tables.
    samples = np.concatenate([np.empty(0, "<i8"), *(table.samples for table in tables)])
    gathered = _gather_samples(rows, samples)
    return lists.table(problems, rows, gathered)


def _unite_problems(tables: Sequence[Table]) -> tuple[Array, list[Array]]:
    """The problems in use, sorted, and for each table the new numbers of its problems."""
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
    """The rows, sorted by key; of several rows with one key only the latest stored one stays."""
    # If two rows were stored at the same time, the one with the longer measured time is kept, so
    # that all machines keep the same one.
    columns = ("time_ns", "stored_ns", "context", "algorithm", "problem")
    rows = rows[np.lexsort([rows[name] for name in columns])]
    is_last = np.ones(len(rows), bool)
    is_last[:-1] = np.logical_or.reduce(
        [rows[name][1:] != rows[name][:-1] for name in _KEY_COLUMNS]
    )
    return rows[is_last]


def _gather_samples(rows: Array, samples: Array) -> Array:
    """The samples of the rows, in the order of the rows; the rows then point into the result."""
    # The old index of a sample is its new index plus the difference between the old and the new
    # first index of its row. numpy repeats this difference once per sample of the row.
    counts = rows["samples"].astype("<i8")
    starts = np.cumsum(counts) - counts
    places = np.repeat(rows["first_sample"] - starts, counts) + np.arange(counts.sum())
    rows["first_sample"] = starts
    gathered: Array = samples[places]
    return gathered


def select_rows(table: Table, mask: Array) -> Table:
    """The table of the rows that a mask selects; its lists hold only values that these rows use."""
    return merge_tables([replace(table, rows=table.rows[mask])])


EMPTY = build_table(())
