"""Schema of an entry: the name of each field; its values as text, as cells of a table, and as CSV.

HDF5 tables, CSV columns, filters and explanations all use the names listed here
("problem.batch", "software.cudnn", "time_ns"). The names are derived from the dataclasses: a field
that is added to a dataclass appears everywhere.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, islice
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeAlias

from msgspec import ValidationError, convert

from ucudnn.cache.entries import Entry
from ucudnn.errors import CacheError, ConfigError, TableError, UcudnnError, shortened
from ucudnn.measurement import Conditions, Device, Measurement, MeasurementKey, Software
from ucudnn.problem import Problem
from ucudnn.split import Chunk, Split
from ucudnn.system.files import make_folder, parse_json, replacing

# Cells in the order of `FIELDS`: those of an entry, or those of its key, which come first.
Row: TypeAlias = tuple[Any, ...]
# Stands for None in a column of integers.
_NONE = -(2**63)
# More chunks than any batch or number of rows.
_MOST_CHUNKS = 1 << 20
# Most problems, and other parts of keys, that are kept in both forms.
_MEMO = 4096


@dataclass(frozen=True, slots=True)
class Kind:
    """Conversion of values of one type to text and back, and to cells of a table."""

    name: str  # such as "int | None"
    dump: Callable[[Any], str]
    load: Callable[[str], Any]  # raises ValueError for a text that is no such value
    column: str = "S"  # numpy's name for the type of a column; "S": text as bytes

    def to_cell(self, value: Any) -> Any:
        """The cell for a value."""
        if self.column == "S":
            return _to_bytes(self.dump(value))
        return _NONE if value is None else value

    def from_cell(self, cell: Any) -> Any:
        """The value of a cell."""
        if self.column == "S":
            return self.load(_from_bytes(cell))
        return None if cell == _NONE else cell


def _to_bytes(text: str) -> bytes:
    r"""Encode text as UTF-8, but U+0000 as C0 80 as Java does: a zero byte ends a text in HDF5.

    >>> _from_bytes(_to_bytes("a\0b")) == "a\0b"
    True
    """
    return text.encode("utf-8", "surrogatepass").replace(b"\0", b"\xc0\x80")


def _from_bytes(data: bytes) -> str:
    """Text that `_to_bytes` encoded."""
    return data.replace(b"\xc0\x80", b"\0").decode("utf-8", "surrogatepass")


def _load_int(text: str) -> int:
    number = int(text)
    if number == _NONE:
        raise ValueError(text)
    return number


def _load_bool(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(text)
    return text == "true"


def _load_texts(text: str) -> tuple[str, ...]:
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
        # A column of floats has no number that could stand for None: nan is a value, too.
        kind.column if kind.column == "<i8" else "S",
    )


_TEXT = Kind("str", str, str)
_INT = Kind("int", str, _load_int, "<i8")
# `repr` writes the shortest text from which the same float is read back.
_FLOAT = Kind("float", repr, float, "<f8")
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
    _load_texts,
)


def _split_to_text(split: Split) -> str:
    """A split as JSON: its fields, with runs of equal chunks as (number, size, algorithm).

    >>> _split_to_text(Split("batch", (Chunk(4, "gemm"), Chunk(4, "gemm"))))
    '{"axis": "batch", "steps": [[2, 4, "gemm"]]}'
    """
    # Recordings have the name "steps", which chunks had when they were made.
    runs = [[len(list(run)), chunk.size, chunk.algorithm] for chunk, run in groupby(split.chunks)]
    return json.dumps({"axis": split.axis, "steps": runs}, ensure_ascii=False)


def _split_from_text(text: str) -> Split:
    """The split that `_split_to_text` wrote; a ValueError for any other text."""
    with suppress(KeyError, TypeError, ValueError):
        values = dict(parse_json(text))
        runs = values.pop("steps")
        if sum(n for n, _, _ in runs) <= _MOST_CHUNKS:
            chunks = (Chunk(int(size), str(name)) for n, size, name in runs for _ in range(n))
            return Split(chunks=tuple(chunks), **values)
    raise ValueError(text)


# The kind of each type, which is written as in the annotations of the dataclasses. An attribute of
# any other type, such as `problem`, is stored field by field.
_KINDS = {
    "str": _TEXT,
    "Role": _TEXT,
    "Subject": _TEXT,
    "Split | None": _optional(Kind("split", _split_to_text, _split_from_text)),
    "FailureKind | None": _optional(_TEXT),
    "float": _FLOAT,
    "int": _INT,
    "Count": _INT,
    "bool": Kind("bool", lambda value: str(value).lower(), _load_bool, "?"),
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
    kind: Kind
    path: str  # attributes that lead to it from an entry, as "measurement.key.problem.batch"
    own_name: str  # in its dataclass: "batch" for "problem.batch"

    def text(self, entry: Entry) -> str:
        """The value in an entry, as text."""
        return self.kind.dump(attrgetter(self.path)(entry))


def _fields_of(part: str, cls: Any, path: str) -> tuple[Field, ...]:
    return tuple(
        Field(f"{part}{field.name}", _KINDS[field.type], f"{path}{field.name}", field.name)
        for field in dataclasses.fields(cls)
        if field.type in _KINDS
    )


# The parts of a key that many entries share.
_PART_FIELDS = {
    cls: _fields_of(f"{name}.", cls, f"measurement.key.{name}.")
    for name, cls in {
        "problem": Problem,
        "device": Device,
        "software": Software,
        "conditions": Conditions,
    }.items()
}
_ALGORITHM, _PROTOCOL, *_OTHERS = _fields_of("", MeasurementKey, "measurement.key.")
_WORK_FIELDS = (_ALGORITHM, *_OTHERS)
_OWN_FIELDS = _fields_of("", Measurement, "measurement.")
KEY_FIELDS = (
    *_PART_FIELDS[Problem],
    *_WORK_FIELDS,
    *_PART_FIELDS[Device],
    *_PART_FIELDS[Software],
    *_PART_FIELDS[Conditions],
    _PROTOCOL,
)
# All fields, in the order of the columns of a table; those of the key are the first.
FIELDS = (*KEY_FIELDS, *_OWN_FIELDS, Field("stored_ns", _INT, "stored_ns", "stored_ns"))
FIELD_BY_NAME = {field.name: field for field in FIELDS}


def row_of(entry: Entry) -> Row:
    """The cells of an entry."""
    measurement = entry.measurement
    return (*key_row(measurement.key), *_cells(_OWN_FIELDS, measurement), entry.stored_ns)


def key_row(key: MeasurementKey) -> Row:
    """The cells of a key, with which the row of its entry begins."""
    return (
        *_part_row(key.problem),
        *_cells(_WORK_FIELDS, key),
        *_part_row(key.device),
        *_part_row(key.software),
        *_part_row(key.conditions),
        key.protocol,
    )


@lru_cache(_MEMO)
def _part_row(part: Problem | Device | Software | Conditions) -> Row:
    return _cells(_PART_FIELDS[type(part)], part)


def _cells(fields: Iterable[Field], holder: Any) -> Row:
    return tuple([field.kind.to_cell(getattr(holder, field.own_name)) for field in fields])


# Errors that a row raises that is no entry. `convert` raises a ValueError if a field that allows
# only a few words, such as a role, has text that is not valid Unicode.
NONSENSE = (ValidationError, ValueError, UcudnnError)


def entry_of(row: Row) -> Entry:
    """The entry of a row; one of the errors `NONSENSE` if it is none."""
    cells = iter(row)

    def part(cls: Any) -> Any:
        return _part(cls, tuple(islice(cells, len(_PART_FIELDS[cls]))))

    # The cells are taken in the order of the columns.
    values = {
        "problem": part(Problem),
        **_values(_WORK_FIELDS, cells),
        "device": part(Device),
        "software": part(Software),
        "conditions": part(Conditions),
        "protocol": next(cells),
    }
    key = convert(values, MeasurementKey)
    return Entry(measurement_of(row, key), row[-1])


@lru_cache(_MEMO)
def _part(cls: type[Any], cells: Row) -> Any:
    return convert(_values(_PART_FIELDS[cls], cells), cls)


def measurement_of(row: Row, key: MeasurementKey) -> Measurement:
    """The measurement of a row whose key is known; an error as of `entry_of` if it is none."""
    return convert({"key": key, **_values(_OWN_FIELDS, row[len(KEY_FIELDS) : -1])}, Measurement)


def _values(fields: Iterable[Field], cells: Iterable[Any]) -> dict[str, Any]:
    # The fields come first, so that no cell is taken from an iterator beyond those of the fields.
    pairs = zip(fields, cells, strict=False)
    return {field.own_name: field.kind.from_cell(cell) for field, cell in pairs}


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


def write_entries(path: str | os.PathLike[str], entries: Iterable[Entry]) -> int:
    """Write entries to a .csv file, and count them; make its folder if it is missing."""
    target = _csv_path(path)
    # With newline="" the stream does not translate line ends, which the csv module writes itself.
    stream = io.StringIO(newline="")
    writer = csv.writer(stream)
    writer.writerow(FIELD_BY_NAME)
    count = 0
    for entry in entries:
        writer.writerow([field.text(entry) for field in FIELDS])
        count += 1
    try:
        make_folder(target.parent)
        with replacing(target) as file:
            file.write(stream.getvalue().encode("utf-8", "surrogatepass"))
    except OSError as error:
        raise CacheError(f"cannot write {target}: {error.strerror}; choose another path") from error
    return count


def read_entries(path: str | os.PathLike[str]) -> list[Entry]:
    """Read a .csv file of entries."""
    source = _csv_path(path)
    reader = csv.reader(io.StringIO(_read_text(source), newline=""))
    try:
        header = next(reader, [])
        if sorted(header) != sorted(FIELD_BY_NAME):
            raise TableError(
                f"{source} line 1: a table of measurements has the columns "
                f"{', '.join(FIELD_BY_NAME)}; export it with this ucudnn"
            )
        entries = []
        for row in reader:
            place = f"{source} line {reader.line_num}"
            if len(row) != len(header):
                raise TableError(f"{place}: {len(header)} values are needed, got {len(row)}")
            entries.append(_entry_of_texts(place, dict(zip(header, row, strict=True))))
    except csv.Error as error:
        raise TableError(f"{source} line {reader.line_num}: {error}") from error
    return entries


def _csv_path(path: str | os.PathLike[str]) -> Path:
    found = Path(path)
    if found.suffix.lower() != ".csv":
        raise TableError(f"measurements are exported and imported as .csv, got {found.name!r}")
    return found


def _read_text(path: Path) -> str:
    try:
        # "surrogatepass" is needed because `write_entries` writes a lone surrogate of a Python
        # string as it is.
        return path.read_bytes().decode("utf-8", "surrogatepass")
    except OSError as error:
        raise TableError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TableError(f"{path} is not a table of measurements: it is not text") from error


def _entry_of_texts(place: str, texts: Mapping[str, str]) -> Entry:
    """The entry whose fields have these texts by name; errors begin with the place of the row."""
    cells = []
    for name, field in FIELD_BY_NAME.items():
        try:
            cells.append(field.kind.to_cell(field.kind.load(texts[name])))
        except ValueError:
            raise TableError(
                f"{place}: {name} must be {field.kind.name}, got {shortened(texts[name])!r}"
            ) from None
    try:
        return entry_of(tuple(cells))
    except NONSENSE as error:
        raise TableError(f"{place}: {shortened(str(error))}") from error
