"""Columns in files: as narrow as their values allow, and perhaps of another version.

A version of ucudnn may add a column, a word or a field of the key. An older file lacks it and is
read with its default. A newer file is read as far as this version understands it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING
from operator import attrgetter
from typing import Any

import numpy as np

from ucudnn.cache.hdf5.envelope import DamagedError
from ucudnn.cache.table.rows import PROBLEM_DTYPE, Array, Context
from ucudnn.cache.table.schema import CONTEXT_FIELDS, PROBLEM_FIELDS
from ucudnn.errors import CacheError, UcudnnError
from ucudnn.measurement import Conditions, Device, Software
from ucudnn.problem import BYTES_BY_DTYPE, LAYOUTS, MATHS, OPS

_WORDS = {"op": OPS, "dtype": tuple(BYTES_BY_DTYPE), "layout": LAYOUTS, "math": MATHS}
# The width of a text column is that of its longest text, so 1 stands for any.
_CONTEXT_TYPES = {"int": "<i8", "bool": "?"}
_CONTEXT_KINDS = {
    field.name: np.dtype("S1" if field.is_text else _CONTEXT_TYPES[field.type])
    for field in CONTEXT_FIELDS
}


def to_bytes(text: str) -> bytes:
    r"""UTF-8 for HDF5, in which text ends at a zero byte: U+0000 becomes C0 80, as in Java.

    >>> from_bytes(to_bytes("a\0b")) == "a\0b"
    True
    """
    return text.encode("utf-8", "surrogatepass").replace(b"\0", b"\xc0\x80")


def from_bytes(data: bytes) -> str:
    """Text that `to_bytes` encoded."""
    return data.replace(b"\xc0\x80", b"\0").decode("utf-8", "surrogatepass")


def encoded_words(words: Sequence[str]) -> Array:
    """Words as a column of texts."""
    return np.array([word.encode() for word in words])


def narrow(column: Array) -> Array:
    """The same words or non-negative numbers, in the narrowest type that holds them all."""
    # Fewer bytes take less time to inflate when the file is read.
    if column.dtype.kind == "S":
        width = np.char.str_len(column).max(initial=1)
        return column.astype(f"S{width}")
    return column.astype(np.min_scalar_type(column.max(initial=0)))


def narrow_columns(rows: Array, names: Iterable[str]) -> Array:
    """The same rows with some columns made narrow."""
    chosen = set(names)
    return _joined(
        {
            name: narrow(rows[name]) if name in chosen else rows[name]
            for name in rows.dtype.names or ()
        }
    )


def _joined(columns: Mapping[str, Array]) -> Array:
    length = len(next(iter(columns.values())))
    rows = np.empty(length, [(name, column.dtype) for name, column in columns.items()])
    for name, column in columns.items():
        rows[name] = column
    return rows


def context_rows(contexts: Sequence[Context]) -> Array:
    """Contexts as a table; its text columns are as wide as their longest text.

    Raises:
        CacheError: a number needs more than 64 bits.
    """
    columns = {}
    for field in CONTEXT_FIELDS:
        values = [attrgetter(field.name)(context) for context in contexts]
        if field.is_text:
            encoded = [to_bytes(value) for value in values]
            # HDF5 has no texts of width 0.
            width = max(map(len, encoded), default=0) or 1
            columns[field.name] = np.array(encoded, f"S{width}")
        else:
            try:
                columns[field.name] = np.array(values, _CONTEXT_TYPES[field.type])
            except OverflowError:
                raise CacheError(f"{field.name} must be below 2^63 to be stored") from None
    return _joined(columns)


def contexts_from_rows(table: Array) -> list[Context | None]:
    """The contexts in a table; None for one with a value that this version does not know.

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
                [from_bytes(value) for value in values] if field.is_text else values
            )
        elif field.default is MISSING:
            raise DamagedError(f"it has no column {field.name}")
        else:
            columns[field.name] = [field.default] * len(table)
    unknown = unknown_rows(table, columns)
    return [
        None if unknown[row] else _context({name: columns[name][row] for name in columns})
        for row in range(len(table))
    ]


def _context(values: dict[str, Any]) -> Context | None:
    parts: dict[str, dict[str, Any]] = {"device": {}, "software": {}, "conditions": {}}
    for name, value in values.items():
        part, _, own_name = name.rpartition(".")
        if part:
            parts[part][own_name] = value
    try:
        # The constructors refuse words of a later version.
        return Context(
            Device(**parts["device"]),
            Software(**parts["software"]),
            Conditions(**parts["conditions"]),
            values["protocol"],
        )
    except UcudnnError:
        return None


def problems_from_rows(stored: Array) -> tuple[Array, Array]:
    """Problems in the layout of this version, and a mask of those that it does not know.

    Raises:
        DamagedError: a column is missing or holds something else.
    """
    defaults = {field.own_name: field.default for field in PROBLEM_FIELDS}
    problems = cast_columns(stored, PROBLEM_DTYPE, defaults).astype(PROBLEM_DTYPE, copy=False)
    unknown = unknown_rows(stored, PROBLEM_DTYPE.names or ())
    for name, words in _WORDS.items():
        unknown |= ~np.isin(problems[name], encoded_words(words))
    return problems, unknown


def cast_columns(stored: Array, layout: np.dtype[Any], defaults: Mapping[str, Any]) -> Array:
    """The columns that this version knows; one that is missing gets its default.

    Args:
        stored: rows of a file; they are returned as they are where their columns fit.
        layout: names and types of the columns.
        defaults: by column; a column without one must be there.

    Raises:
        DamagedError: a column is missing or holds something else.
    """
    require_columns(stored, {name: layout[name] for name in layout.names or ()})
    # Copying a million rows only to widen them would take longer than inflating them.
    if stored.dtype.names == layout.names and all(
        np.can_cast(stored.dtype[name], layout[name], "safe") for name in layout.names or ()
    ):
        return stored
    rows = np.zeros(len(stored), layout)
    for name in layout.names or ():
        if name in (stored.dtype.names or ()):
            rows[name] = stored[name]
        elif defaults.get(name, MISSING) is MISSING:
            raise DamagedError(f"it has no column {name}")
        else:
            rows[name] = defaults[name]
    return rows


def require_columns(rows: Array, kinds: Mapping[str, np.dtype[Any]]) -> None:
    """Refuse a table in which a column of a known name holds other kinds of values.

    Args:
        rows: a table.
        kinds: by column; one that the table lacks is passed over.

    Raises:
        DamagedError: a column holds something else, or numbers that need more bits.
    """
    for name in kinds.keys() & set(rows.dtype.names or ()):
        stored, kind = rows.dtype[name], kinds[name]
        # Narrow columns are unsigned, whatever they are in memory.
        alike = {stored.base.kind, kind.base.kind} <= {"i", "u"} or (
            stored.base.kind == kind.base.kind
        )
        if not alike or stored.shape != kind.shape:
            raise DamagedError(f"its column {name} holds something else")
        if kind.base.kind in "iu" and rows[name].size:
            limits = np.iinfo(kind.base)
            if not limits.min <= int(rows[name].min()) <= int(rows[name].max()) <= limits.max:
                raise DamagedError(f"numbers of its column {name} are too large")


def unknown_rows(table: Array, known: Iterable[str]) -> Array:
    """Mark rows that use a column of a later version: it has not its empty value there."""
    unknown = np.zeros(len(table), bool)
    for name in set(table.dtype.names or ()) - set(known):
        is_set = table[name] != np.zeros((), table.dtype[name])
        # A column of the later version may be an array in every row, as sizes are.
        unknown |= is_set.any(axis=tuple(range(1, is_set.ndim)))
    return unknown
