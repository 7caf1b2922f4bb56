"""Checksums of single measurements, by which sound rows of a damaged file are recognised."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING
from hashlib import blake2b
from operator import attrgetter
from typing import Any

import numpy as np

from ucudnn.cache.table.rows import MEASUREMENT_DTYPE, Array, MeasurementRow, problem_from_row
from ucudnn.cache.table.schema import CONTEXT_FIELDS, PROBLEM_FIELDS, Field
from ucudnn.cache.table.table import Table

# Part of the file format: a column that a later version adds must not be among these.
_COVERED = (
    *("status", "time_ns", "spread_ns", "workspace_bytes", "error", "has_error", "samples"),
    "stored_ns",
)


def checksums(table: Table) -> Array:
    """Checksum of each row: over its values, not over the numbers of the rows it points to.

    It is BLAKE2b with 8 bytes over the problem and the context as JSON, the texts as JSON, the
    facts that differ from their defaults as JSON, the row's own numbers and its samples.
    """
    problems: dict[int, bytes] = {}
    contexts = [
        _json({field: attrgetter(field.name)(context) for field in CONTEXT_FIELDS})
        for context in table.contexts
    ]
    numbers = np.empty(len(table), [(name, MEASUREMENT_DTYPE[name]) for name in _COVERED])
    for name in _COVERED:
        numbers[name] = table.rows[name]
    sums = np.empty(len(table), "<u8")
    for index, row in enumerate(map(MeasurementRow._make, table.rows.tolist())):
        if row.problem not in problems:
            problem = problem_from_row(table.problems[row.problem])
            values = {field: getattr(problem, field.own_name) for field in PROBLEM_FIELDS}
            problems[row.problem] = _json(values)
        texts = (
            table.algorithms[row.algorithm],
            table.reasons[row.reason],
            table.notes[row.notes],
            table.device_uuids[row.device_uuid],
        )
        digest = blake2b(problems[row.problem], digest_size=8)
        digest.update(contexts[row.context])
        digest.update(json.dumps(texts).encode())
        facts = table.facts[row.facts]
        if facts.unusual:
            digest.update(json.dumps(facts.unusual, sort_keys=True).encode())
        digest.update(numbers[index].tobytes())
        digest.update(table.samples[row.sample_slice].astype("<i8").tobytes())
        sums[index] = int.from_bytes(digest.digest(), "little")
    return sums


def _json(value_by_field: Mapping[Field, Any]) -> bytes:
    # Defaults are left out, so that a field of a later version does not change the sums of rows
    # which do not use it.
    kept = {
        field.name: value
        for field, value in value_by_field.items()
        if field.default is MISSING or value != field.default
    }
    return json.dumps(kept, sort_keys=True).encode()
