"""Schema of an entry: the name, the type and the text form of each field.

HDF5 tables, CSV columns, filters and explanations all use the names listed here
("problem.batch", "software.cudnn", "time_ns"). The names are derived from the dataclasses: a field
that is added to a dataclass appears everywhere.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any

from ucudnn.cache.entries import Entry
from ucudnn.errors import ConfigError
from ucudnn.measurement import Conditions, Device, Measurement, MeasurementKey, Software
from ucudnn.problem import Problem
from ucudnn.split import Chunk, Split
from ucudnn.system.files import parse_json


@dataclass(frozen=True, slots=True)
class Kind:
    """Conversion of values of one type to text and back."""

    name: str  # such as "int | None"
    dump: Callable[[Any], str]
    load: Callable[[str], Any]  # raises ValueError for a text that is no such value


def _load_bool(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(text)
    return text == "true"


def load_texts(text: str) -> tuple[str, ...]:
    """Read a JSON array of strings; an empty text is an empty array."""
    values = parse_json(text) if text else []
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(text)
    return tuple(values)


def _optional(kind: Kind) -> Kind:
    return Kind(
        f"{kind.name} | None",
        lambda value: "" if value is None else kind.dump(value),
        lambda text: kind.load(text) if text else None,
    )


_TEXT = Kind("str", str, str)
_INT = Kind("int", str, int)
# `repr` writes the shortest text from which the same float is read back.
_FLOAT = Kind("float", repr, float)
_INTS = Kind(
    "tuple[int, ...]",
    lambda value: "x".join(map(str, value)),
    lambda text: tuple(map(int, text.split("x"))) if text else (),
)
_PAIRS = Kind(
    "tuple[tuple[int, int], ...]",
    lambda value: "x".join(f"{begin}:{end}" for begin, end in value),
    lambda text: tuple(tuple(map(int, pair.split(":"))) for pair in text.split("x")),
)
_TEXTS = Kind(
    "tuple[str, ...]",
    lambda value: json.dumps(value, ensure_ascii=False) if value else "",
    load_texts,
)


def split_to_text(split: Split) -> str:
    """A split as JSON: its fields, with runs of equal chunks as (number, size, algorithm).

    >>> split_to_text(Split("batch", (Chunk(4, "gemm"), Chunk(4, "gemm"))))
    '{"axis": "batch", "steps": [[2, 4, "gemm"]]}'
    """
    # Files keep the name "steps", which chunks had in earlier versions of this package.
    runs = [[len(list(run)), chunk.size, chunk.algorithm] for chunk, run in groupby(split.chunks)]
    return json.dumps({"axis": split.axis, "steps": runs}, ensure_ascii=False)


def split_from_text(text: str) -> Split:
    """The split that `split_to_text` wrote; a ValueError for any other text."""
    try:
        values = dict(parse_json(text))
        runs = values.pop("steps")
        chunks = (Chunk(int(size), str(name)) for n, size, name in runs for _ in range(n))
        return Split(chunks=tuple(chunks), **values)
    except (KeyError, TypeError, ValueError):
        raise ValueError(text) from None


# The kind of each type, which is written as in the annotations of the dataclasses. An attribute of
# any other type, such as `problem`, is stored field by field.
_KINDS = {
    "str": _TEXT,
    "Role": _TEXT,
    "Subject": _TEXT,
    "Split | None": _optional(Kind("split", split_to_text, split_from_text)),
    "FailureKind | None": _optional(_TEXT),
    "float": _FLOAT,
    "int": _INT,
    "Count": _INT,
    "bool": Kind("bool", lambda value: str(value).lower(), _load_bool),
    "tuple[int, ...]": _INTS,
    "tuple[Count, ...]": _INTS,
    "tuple[tuple[int, int], ...]": _PAIRS,
    "Count | None": _optional(_INT),
    "float | None": _optional(_FLOAT),
    "tuple[str, ...]": _TEXTS,
}


@dataclass(frozen=True, slots=True)
class Field:
    """One named value of an entry."""

    name: str  # such as "problem.batch" or "time_ns"
    type: str  # its annotation, such as "Count | None"
    path: str  # attributes that lead to it from an entry, as "measurement.key.problem.batch"
    read: Callable[[Entry], Any]

    @property
    def kind(self) -> Kind:
        """Conversion of the field's values."""
        return _KINDS[self.type]

    @property
    def own_name(self) -> str:
        """Name in its dataclass: "batch" for "problem.batch"."""
        return self.name.rpartition(".")[2]

    def text(self, entry: Entry) -> str:
        """The value in an entry, as text."""
        return self.kind.dump(self.read(entry))


def _fields_of(part: str, cls: Any, path: str) -> list[Field]:
    return [
        _field(f"{part}.{field.name}" if part else field.name, field.type, f"{path}.{field.name}")
        for field in dataclasses.fields(cls)
        if field.type in _KINDS
    ]


def _field(name: str, annotation: str, path: str) -> Field:
    return Field(name, annotation, path, attrgetter(path))


_OWN_KEY_FIELDS = _fields_of("", MeasurementKey, "measurement.key")
PROBLEM_FIELDS = tuple(_fields_of("problem", Problem, "measurement.key.problem"))
# The fields of a key that describe neither the problem nor the work on it. A file has few
# combinations of their values, and stores each combination once.
CONTEXT_FIELDS = (
    *_fields_of("device", Device, "measurement.key.device"),
    *_fields_of("software", Software, "measurement.key.software"),
    *_fields_of("conditions", Conditions, "measurement.key.conditions"),
    *(field for field in _OWN_KEY_FIELDS if field.name == "protocol"),
)
# The fields that describe the work that was timed: a chunk by an algorithm, or another call.
_WORK_FIELDS = tuple(field for field in _OWN_KEY_FIELDS if field.name != "protocol")
KEY_FIELDS = (*PROBLEM_FIELDS, *_WORK_FIELDS, *CONTEXT_FIELDS)
# All fields, in the order of the columns of a CSV file.
FIELDS = (
    *KEY_FIELDS,
    *_fields_of("", Measurement, "measurement"),
    _field("stored_ns", "Count", "stored_ns"),
)
FIELD_BY_NAME = {field.name: field for field in FIELDS}


def parse_where(where: Mapping[str, object] | Iterable[str]) -> dict[str, str]:
    """Read a filter from a mapping or from "name=value" words; return the values as text by name.

    >>> parse_where(["problem.batch=32", "status=ok"])
    {'problem.batch': '32', 'status': 'ok'}
    >>> parse_where({"problem.kernel_size": (3, 3)})
    {'problem.kernel_size': '3x3'}
    """
    if not isinstance(where, Mapping):
        words = list(where)
        for word in words:
            if "=" not in word:
                raise ConfigError(f"a filter is written field=value, got {word!r}")
        where = dict(word.split("=", 1) for word in words)
    for name in where:
        if name not in FIELD_BY_NAME:
            raise ConfigError(f"there is no field {name!r}; fields are {', '.join(FIELD_BY_NAME)}")
    return {
        name: value if isinstance(value, str) else FIELD_BY_NAME[name].kind.dump(value)
        for name, value in where.items()
    }


def matches(entry: Entry, where: Mapping[str, str]) -> bool:
    """True if an entry has all values of a filter."""
    return all(FIELD_BY_NAME[name].text(entry) == text for name, text in where.items())
