"""Make tables: from entries, from other tables, from some rows of one.

Every table comes from here sorted, with one row per key, so whoever reads one need not check.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, replace
from hashlib import blake2b
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np

from ucudnn.cache.entries import Entry
from ucudnn.cache.table.rows import (
    MEASUREMENT_ROW,
    NONE,
    PROBLEM_ROW,
    Array,
    Context,
    problem_from_row,
    problem_rows,
    sort_keys,
)
from ucudnn.cache.table.schema import CONTEXT_FIELDS, PROBLEM_FIELDS, Field
from ucudnn.cache.table.table import Table
from ucudnn.errors import CacheError
from ucudnn.measurement import Measurement
from ucudnn.problem import Problem

T = TypeVar("T")
_KEY = ("problem", "algorithm", "context")
# The numbers that a checksum covers, for ever: what a later version adds is not among them.
_SUMMED = (
    *("status", "time_ns", "spread_ns", "workspace_bytes", "error", "has_error", "samples"),
    "stored_ns",
)


def tabulate(entries: Iterable[Entry]) -> Table:
    """A table of these entries; of two with one key the later stored one stays.

    Raises:
        CacheError: a number needs more than 64 bits.
    """
    problems: dict[Problem, int] = {}
    contexts: dict[Context, int] = {}
    algorithms: dict[str, int] = {}
    reasons: dict[str, int] = {}
    notes: dict[tuple[str, ...], int] = {}
    device_uuids: dict[str, int] = {}
    rows: list[tuple[Any, ...]] = []
    samples: list[int] = []
    for entry in entries:
        measurement = entry.measurement
        key = measurement.key
        row = (
            _number(problems, key.problem),
            _number(algorithms, key.algorithm),
            _number(contexts, Context.of(key)),
            *_numbers(measurement),
            _number(reasons, measurement.reason),
            _number(notes, measurement.notes),
            _number(device_uuids, entry.device_uuid),
            len(measurement.samples),
            len(samples),
            entry.stored_ns,
            0,
        )
        rows.append(row)
        samples.extend(measurement.samples)
    try:
        table = Table(
            problem_rows(problems),
            list(contexts),
            list(algorithms),
            list(reasons),
            list(notes),
            list(device_uuids),
            np.array(rows, MEASUREMENT_ROW),
            np.array(samples, "<i8"),
        )
    except OverflowError:
        raise CacheError("numbers of a measurement must be below 2^63 to be stored") from None
    table.rows["checksum"] = checksums(table)
    return merged([table])


def _number(seen: dict[T, int], value: T) -> int:
    return seen.setdefault(value, len(seen))


def _numbers(measurement: Measurement) -> tuple[Any, ...]:
    known = (measurement.time_ns, measurement.spread_ns, measurement.workspace_bytes)
    return (
        measurement.status.encode(),
        *(NONE if value is None else value for value in known),
        0.0 if measurement.error is None else measurement.error,
        measurement.error is not None,
    )


def merged(tables: Sequence[Table]) -> Table:
    """All entries of these tables, sorted; of those with one key the latest stored stays.

    Where two were stored at the same time, the larger checksum decides: on every machine the same.
    """
    problems, problem_ids = _unite_problems(tables)
    contexts: dict[Context, int] = {}
    algorithms: dict[str, int] = {}
    reasons: dict[str, int] = {}
    notes: dict[tuple[str, ...], int] = {}
    device_uuids: dict[str, int] = {}
    parts, offset = [np.empty(0, MEASUREMENT_ROW)], 0
    for table, ids in zip(tables, problem_ids, strict=True):
        rows = table.rows.astype(MEASUREMENT_ROW)  # a file's columns are as narrow as can be
        rows["problem"] = ids[rows["problem"]]
        rows["context"] = _renumber(contexts, table.contexts, rows["context"])
        rows["algorithm"] = _renumber(algorithms, table.algorithms, rows["algorithm"])
        rows["reason"] = _renumber(reasons, table.reasons, rows["reason"])
        rows["notes"] = _renumber(notes, table.notes, rows["notes"])
        rows["device_uuid"] = _renumber(device_uuids, table.device_uuids, rows["device_uuid"])
        rows["first_sample"] += offset
        offset += len(table.samples)
        parts.append(rows)
    rows = _latest(np.concatenate(parts))
    samples = np.concatenate([np.empty(0, "<i8"), *(table.samples for table in tables)])
    return Table(
        problems,
        list(contexts),
        list(algorithms),
        list(reasons),
        list(notes),
        list(device_uuids),
        rows,
        _gather_samples(rows, samples),
    )


def _unite_problems(tables: Sequence[Table]) -> tuple[Array, list[Array]]:
    """The problems that rows use, sorted, and for each table the new number of each old one."""
    used = [np.unique(table.rows["problem"]) for table in tables]
    kept = [table.problems[ids] for table, ids in zip(tables, used, strict=True)]
    everything = np.concatenate([np.empty(0, PROBLEM_ROW), *kept])
    keys, numbers = np.unique(sort_keys(everything), return_inverse=True)
    new_ids, start = [], 0
    for table, ids in zip(tables, used, strict=True):
        new = np.zeros(len(table.problems), "<u4")
        new[ids] = numbers[start : start + len(ids)]
        start += len(ids)
        new_ids.append(new)
    return keys.view(PROBLEM_ROW), new_ids


def _renumber(seen: dict[T, int], values: Sequence[T], ids: Array) -> Array:
    """Numbers into `seen` for numbers into `values`; what no row uses is left out."""
    new = np.zeros(len(values), "<u4")
    for old in np.unique(ids).tolist():
        new[old] = _number(seen, values[old])
    renumbered: Array = new[ids]
    return renumbered


def _latest(rows: Array) -> Array:
    order = np.lexsort(
        [rows[name] for name in ("checksum", "stored_ns", "context", "algorithm", "problem")]
    )
    rows = rows[order]
    is_last = np.ones(len(rows), bool)
    is_last[:-1] = np.logical_or.reduce([rows[name][1:] != rows[name][:-1] for name in _KEY])
    return rows[is_last]


def _gather_samples(rows: Array, samples: Array) -> Array:
    """The samples of the rows, in their order; the rows then point into these."""
    counts = rows["samples"].astype("<i8")
    starts = np.cumsum(counts) - counts
    places = np.repeat(rows["first_sample"] - starts, counts) + np.arange(counts.sum())
    rows["first_sample"] = starts
    gathered: Array = samples[places]
    return gathered


def only(table: Table, mask: Array) -> Table:
    """The entries that a mask names, and of the lists what they use."""
    return merged([replace(table, rows=table.rows[mask])])


def checksums(table: Table) -> Array:
    """Checksum of each row, over its values and not over the numbers of the lists.

    A damaged file is read row by row by this. It is BLAKE2b with 8 bytes of: the problem and the
    context as JSON of what differs from the defaults (so a later field does not change it), the
    texts as JSON, the row's own numbers, its samples.
    """
    problems: dict[int, bytes] = {}
    contexts = [
        _json({f: attrgetter(f.name)(context) for f in CONTEXT_FIELDS})
        for context in table.contexts
    ]
    numbers = np.empty(len(table), [(name, MEASUREMENT_ROW[name]) for name in _SUMMED])
    for name in _SUMMED:
        numbers[name] = table.rows[name]
    sums = np.empty(len(table), "<u8")
    for index, values in enumerate(table.rows.tolist()):
        problem_id, algorithm, context, *_, reason, notes, uuid, count, first, _, _ = values
        if problem_id not in problems:
            problem = problem_from_row(table.problems[problem_id])
            values_by_field = {f: getattr(problem, f.own_name) for f in PROBLEM_FIELDS}
            problems[problem_id] = _json(values_by_field)
        texts = (
            table.algorithms[algorithm],
            table.reasons[reason],
            table.notes[notes],
            table.device_uuids[uuid],
        )
        digest = blake2b(problems[problem_id], digest_size=8)
        digest.update(contexts[context])
        digest.update(json.dumps(texts).encode())
        digest.update(numbers[index].tobytes())
        digest.update(table.samples[first : first + count].astype("<i8").tobytes())
        sums[index] = int.from_bytes(digest.digest(), "little")
    return sums


def _json(value_by_field: Mapping[Field, Any]) -> bytes:
    kept = {
        field.name: value
        for field, value in value_by_field.items()
        if field.default is MISSING or value != field.default
    }
    return json.dumps(kept, sort_keys=True).encode()


EMPTY = tabulate(())
