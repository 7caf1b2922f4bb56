"""Problems and measurements as rows of numpy tables, and back.

A row is plain numbers and text of fixed length, one field per dataclass field, so any HDF5 tool
shows it. Problems have one layout in every table, because their rows are compared as bytes: a
lookup turns its problem into a row and bisects, without building the other problems.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ucudnn.cache.table.schema import PROBLEM_FIELDS, split_from_text, split_to_text
from ucudnn.measurement import Conditions, Device, MeasurementKey, Software, Subject
from ucudnn.problem import Problem

Array: TypeAlias = NDArray[Any]

_AXES = 3
# For op, dtype, layout, math and status; the longest word today has 8 bytes.
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


class Work(NamedTuple):
    """The work that a key names, beside its problem, as texts.

    >>> Work("gemm").texts
    {'algorithm': 'gemm'}

    Args:
        algorithm: as in `MeasurementKey`.
        subject: as in `MeasurementKey`.
        split: as JSON, "" without any.
        race: as in `MeasurementKey`.
    """

    algorithm: str
    subject: str = "chunk"
    split: str = ""
    race: str = ""

    @classmethod
    def of(cls, key: MeasurementKey) -> Work:
        """The work of a key."""
        if key.subject is Subject.CHUNK:
            return cls(key.algorithm)
        split = "" if key.split is None else split_to_text(key.split)
        return cls(key.algorithm, str(key.subject), split, key.race)

    @property
    def texts(self) -> dict[str, str]:
        """Texts by name of what differs from a chunk, which most rows are."""
        chunk = Work(self.algorithm)
        return {
            name: text
            for name, text in self._asdict().items()
            if name == "algorithm" or text != getattr(chunk, name)
        }

    def key(self, problem: Problem, context: Context) -> MeasurementKey:
        """The key of this work on a problem.

        Raises:
            UcudnnError: the texts are not those of a key.
        """
        return MeasurementKey(
            problem,
            self.algorithm,
            context.device,
            context.software,
            context.conditions,
            context.protocol,
            Subject(self.subject),
            split_from_text(self.split) if self.split else None,
            self.race,
        )


class MeasurementRow(NamedTuple):
    """One measurement of a table, as a tuple: a million of them are read at once.

    A column that a later version adds needs a default, with which older files are read.

    Args:
        problem: row of the problems.
        algorithm: row of the algorithms, which also say what else was timed.
        context: row of the contexts.
        status: as ASCII.
        time_ns: `NONE` where it was not timed.
        spread_ns: `NONE` where it is unknown.
        workspace_bytes: `NONE` where it is unknown.
        error: 0 if it was not measured.
        has_error: True if it was.
        reason: row of the reasons.
        notes: row of the notes.
        device_uuid: row of the UUIDs.
        samples: number of samples.
        first_sample: row of the first of them.
        stored_ns: time of storage, in ns since 1970.
        checksum: of the values, as `ucudnn.cache.table.checksum` computes it.
        facts: row of the facts.
    """

    problem: int
    algorithm: int
    context: int
    status: bytes
    time_ns: int
    spread_ns: int
    workspace_bytes: int
    error: float
    has_error: bool
    reason: int
    notes: int
    device_uuid: int
    samples: int
    first_sample: int
    stored_ns: int
    checksum: int
    facts: int = 0

    @property
    def sample_slice(self) -> slice:
        """Rows of the samples that belong to this measurement."""
        return slice(self.first_sample, self.first_sample + self.samples)


_NUMBER_TYPES = {
    **dict.fromkeys(("problem", "algorithm", "context", "reason", "notes"), "<u4"),
    **dict.fromkeys(("device_uuid", "samples", "facts"), "<u4"),
    "status": f"S{_WORD_BYTES}",
    "error": "<f8",
    "has_error": "?",
    "checksum": "<u8",
}
MEASUREMENT_DTYPE = np.dtype(
    [(name, _NUMBER_TYPES.get(name, "<i8")) for name in MeasurementRow._fields]
)


@dataclass(frozen=True, slots=True)
class Context:
    """Fields of a key beside problem and algorithm; a cache has few different combinations."""

    device: Device
    software: Software
    conditions: Conditions
    protocol: int

    @classmethod
    def of(cls, key: MeasurementKey) -> Context:
        """The context of a key."""
        return cls(key.device, key.software, key.conditions, key.protocol)


def problem_row(problem: Problem) -> bytes:
    """One problem as the bytes of its row."""
    return problem_rows([problem]).tobytes()


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
    """The problem in a row.

    Raises:
        ProblemError: this version knows no such problem.
    """
    # An input size is at least 1, so the zeros are the axes that are not used.
    rank = int(np.count_nonzero(row["input_size"]))
    values: dict[str, Any] = {}
    for field in PROBLEM_FIELDS:
        value = row[field.own_name].tolist()
        if isinstance(value, bytes):
            value = value.decode()
        elif isinstance(value, list):
            value = tuple(tuple(v) if isinstance(v, list) else v for v in value[:rank])
        values[field.own_name] = value
    return Problem(**values)


def sort_keys(problems: Array) -> Array:
    """The rows as byte strings, which numpy can sort and search."""
    return problems.view(f"S{PROBLEM_DTYPE.itemsize}")
