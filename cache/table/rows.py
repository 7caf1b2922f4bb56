"""Problems and contexts as rows of numpy tables, and back.

A row is what HDF5 stores: plain numbers and fixed-length text, one field per dataclass field, so
any HDF5 tool shows it. Problems have one layout in every file, because rows of them are compared as
bytes: a query becomes a row and is found by bisection, without building a million objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ucudnn.cache.hdf5.envelope import DamagedError
from ucudnn.cache.table.schema import CONTEXT_FIELDS, PROBLEM_FIELDS
from ucudnn.errors import CacheError, UcudnnError
from ucudnn.measurement import Conditions, Device, MeasurementKey, Software
from ucudnn.problem import Problem

Array: TypeAlias = NDArray[Any]

_AXES = 3
_WORD_BYTES = 16  # of op, dtype, layout, math and status: the longest today has 8
_PROBLEM_TYPES: dict[str, tuple[Any, ...]] = {
    "str": (f"S{_WORD_BYTES}",),
    "int": ("<i8",),
    "tuple[int, ...]": ("<i8", (_AXES,)),
    "tuple[tuple[int, int], ...]": ("<i8", (_AXES, 2)),
}


PROBLEM_ROW = np.dtype([(field.own_name, *_PROBLEM_TYPES[field.type]) for field in PROBLEM_FIELDS])
NONE = -(2**63)
MEASUREMENT_ROW = np.dtype(
    [
        ("problem", "<u4"),
        ("algorithm", "<u4"),
        ("context", "<u4"),
        ("status", f"S{_WORD_BYTES}"),
        ("time_ns", "<i8"),
        ("spread_ns", "<i8"),
        ("workspace_bytes", "<i8"),
        ("error", "<f8"),
        ("has_error", "?"),
        ("reason", "<u4"),
        ("notes", "<u4"),
        ("device_uuid", "<u4"),
        ("samples", "<u4"),
        ("first_sample", "<i8"),
        ("stored_ns", "<i8"),
        ("checksum", "<u8"),
    ]
)
# Texts are as wide as the longest of them.
_CONTEXT_TYPES = {"str": "S1", "int": "<i8", "bool": "?"}
_CONTEXT_KINDS = {field.name: np.dtype(_CONTEXT_TYPES[field.type]) for field in CONTEXT_FIELDS}


@dataclass(frozen=True, slots=True)
class Context:
    """Fields of a key beside problem and algorithm; a cache has few different ones."""

    device: Device
    software: Software
    conditions: Conditions
    protocol: int

    @classmethod
    def of(cls, key: MeasurementKey) -> Context:
        """The context of a key."""
        return cls(key.device, key.software, key.conditions, key.protocol)


def to_bytes(text: str) -> bytes:
    r"""UTF-8 for HDF5, in which text ends at a zero byte: U+0000 becomes C0 80, as in Java.

    >>> from_bytes(to_bytes("a\0b")) == "a\0b"
    True
    """
    return text.encode("utf-8", "surrogatepass").replace(b"\0", b"\xc0\x80")


def from_bytes(data: bytes) -> str:
    """Text that `to_bytes` wrote."""
    return data.replace(b"\xc0\x80", b"\0").decode("utf-8", "surrogatepass")


def problem_row(problem: Problem) -> bytes:
    """One problem as the bytes of its row."""
    return problem_rows([problem]).tobytes()


def problem_rows(problems: Iterable[Problem]) -> Array:
    """Problems as a table; unused axes are 0.

    Raises:
        CacheError: a size needs more than 64 bits.
    """
    rows = [
        tuple(_cell(getattr(problem, name)) for name in PROBLEM_ROW.names or ())
        for problem in problems
    ]
    try:
        return np.array(rows, PROBLEM_ROW)
    except OverflowError:
        raise CacheError("sizes in a problem must be below 2^63 to be stored") from None


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
        ProblemError: it is none that this version knows.
    """
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
    return problems.view(f"S{PROBLEM_ROW.itemsize}")


def context_rows(contexts: Sequence[Context]) -> Array:
    """Contexts as a table; its text columns are as wide as the longest text.

    Raises:
        CacheError: a number needs more than 64 bits.
    """
    columns = []
    for field in CONTEXT_FIELDS:
        values = [attrgetter(field.name)(context) for context in contexts]
        if field.type == "str":
            encoded = [to_bytes(value) for value in values]
            width = max(map(len, encoded), default=0) or 1
            columns.append(np.array(encoded, f"S{width}"))
        else:
            try:
                columns.append(np.array(values, "?" if field.type == "bool" else "<i8"))
            except OverflowError:
                raise CacheError(f"{field.name} must be below 2^63 to be stored") from None
    names = [field.name for field in CONTEXT_FIELDS]
    table = np.empty(
        len(contexts), [(name, c.dtype) for name, c in zip(names, columns, strict=True)]
    )
    for name, column in zip(names, columns, strict=True):
        table[name] = column
    return table


def contexts_from_rows(table: Array) -> list[Context | None]:
    """The contexts in a table; None for one that this version does not know.

    Raises:
        DamagedError: a column is missing.
    """
    names = table.dtype.names or ()
    require_columns(table, _CONTEXT_KINDS)
    columns: dict[str, list[Any]] = {}
    for field in CONTEXT_FIELDS:
        if field.name in names:
            values = table[field.name].tolist()
            columns[field.name] = (
                [from_bytes(value) for value in values] if field.type == "str" else values
            )
        elif field.default is MISSING:
            raise DamagedError(f"it has no column {field.name}")
        else:
            columns[field.name] = [field.default] * len(table)
    foreign = foreign_rows(table, columns)
    return [
        None if foreign[row] else _context({name: columns[name][row] for name in columns})
        for row in range(len(table))
    ]


def require_columns(rows: Array, kinds: Mapping[str, np.dtype[Any]]) -> None:
    """Refuse a table whose columns have the right names and other kinds of values.

    Args:
        rows: a table.
        kinds: by column; one that the table lacks is passed over.

    Raises:
        DamagedError: a column holds something else, or numbers that need more bits.
    """
    for name in kinds.keys() & set(rows.dtype.names or ()):
        stored, kind = rows.dtype[name], kinds[name]
        alike = {stored.base.kind, kind.base.kind} <= {"i", "u"} or (
            stored.base.kind == kind.base.kind
        )
        if not alike or stored.shape != kind.shape:
            raise DamagedError(f"its column {name} holds something else")
        if kind.base.kind in "iu" and rows[name].size:
            limits = np.iinfo(kind.base)
            if not limits.min <= int(rows[name].min()) <= int(rows[name].max()) <= limits.max:
                raise DamagedError(f"numbers of its column {name} are too large")


def foreign_rows(table: Array, known: Iterable[str]) -> Array:
    """Rows that a column of a later version tells apart: it is not at its empty value."""
    foreign = np.zeros(len(table), bool)
    for name in set(table.dtype.names or ()) - set(known):
        is_set = table[name] != np.zeros((), table.dtype[name])
        foreign |= is_set.any(axis=tuple(range(1, is_set.ndim)))
    return foreign


def _context(values: dict[str, Any]) -> Context | None:
    parts: dict[str, dict[str, Any]] = {"device": {}, "software": {}, "conditions": {}}
    for name, value in values.items():
        part, _, own_name = name.rpartition(".")
        if part:
            parts[part][own_name] = value
    try:
        return Context(
            Device(**parts["device"]),
            Software(**parts["software"]),
            Conditions(**parts["conditions"]),
            values["protocol"],
        )
    except UcudnnError:
        return None
