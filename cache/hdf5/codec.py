"""Conversion between tables and the files of a cache; the only module that uses h5py.

This package reads and writes whole files itself, and libhdf5 works on memory only. So libhdf5 takes
no file locks (which network file systems may lack), reads only data that has passed its checksum,
and holds no file open across a fork.

A file begins with an envelope of 512 bytes, an HDF5 user block, which HDF5 tools skip. The sha256
in it covers the first line and everything after the block:

    ucudnn-cache 1
    bytes 24184
    sha256 6b1c...
    (zeros)

The HDF5 data behind it:

    /problems      one row per convolution          /contexts      JSON objects, see `Context`
    /measurements  one row per entry                /algorithms    JSON objects, see `Work`
    /samples       times in ns, one row after       /reasons       why something failed
                   another                          /notes         JSON arrays of text
                                                    /facts         JSON objects, see `Facts`
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import count
from typing import Any, get_type_hints

import h5py
import numpy as np
from msgspec import ValidationError, convert, to_builtins

from ucudnn.cache.schema import load_texts, split_from_text
from ucudnn.cache.table import (
    COLUMN_BY_LIST,
    MEASUREMENT_DTYPE,
    PROBLEM_DTYPE,
    Array,
    Context,
    Facts,
    Table,
    Work,
)
from ucudnn.errors import CacheError, UcudnnError
from ucudnn.measurement import Subject
from ucudnn.system.files import parse_json

VERSION = 1
ENVELOPE_BYTES = 512
FORMAT = "ucudnn-cache"
# So many bytes of a file are enough for `has_envelope`, because the attributes of the HDF5 root
# group are near the beginning.
HEAD_BYTES = 1 << 16
_MARK = FORMAT.encode()
_FIRST_LINE = re.compile(rb"ucudnn-cache ([1-9]\d{0,8})\n")
_HDF5 = b"\x89HDF\r\n\x1a\n"
# Errors that a truncated or edited file may raise while its tables are built.
_DAMAGES = (OSError, RuntimeError, KeyError, TypeError, ValueError, ValidationError, UcudnnError)
_numbers = count()
# Datasets that hold texts, in the order of the parameters of `Table`.
_TEXTS = ("contexts", "algorithms", "reasons", "notes", "facts")
_COLUMNS = {
    "problems": PROBLEM_DTYPE.names,
    "measurements": MEASUREMENT_DTYPE.names,
    "samples": None,
}
# H5LT_FILE_IMAGE_DONT_COPY | H5LT_FILE_IMAGE_DONT_RELEASE, which h5py passes on without names.
_SHARED = 2 | 4
_COMPRESSED_ROWS = 1024
# Number of rows of an HDF5 chunk. A chunk fits into the cache of a processor core together with its
# compressed form.
_CHUNK_ROWS = 8192
# Largest accepted ratio of the bytes of a table to those of its file, because a damaged file may
# claim terabytes. Rows compress by factors of 5 to 30.
_MOST_INFLATED = 64
_ABOUT = "Times of convolution algorithms. A key is a problem, an algorithm and a context."


class DamagedError(CacheError):
    """A file that was changed after it was written, or that no cache of this version wrote."""


def has_envelope(head: bytes) -> bool:
    """True if the first `HEAD_BYTES` of a file show that a cache wrote it, damaged or not.

    >>> has_envelope(wrap(b"anything")), has_envelope(bytes(600)), has_envelope(b"")
    (True, False, False)
    """
    # If the envelope was destroyed, the HDF5 data behind it may still show the origin: the root
    # group has an attribute "format" with the same text.
    is_hdf5 = head[ENVELOPE_BYTES : ENVELOPE_BYTES + len(_HDF5)] == _HDF5
    return head.startswith(_MARK) or (is_hdf5 and _MARK in head[ENVELOPE_BYTES:])


def wrap(data: bytes, version: int = VERSION) -> bytes:
    """The contents of a file: HDF5 data behind its envelope."""
    return _envelope(data, version) + data


def _envelope(data: bytes | memoryview, version: int) -> bytes:
    first = f"{FORMAT} {version}\n".encode()
    digest = sha256(first)
    digest.update(data)
    return (first + f"bytes {len(data)}\nsha256 {digest.hexdigest()}\n".encode()).ljust(
        ENVELOPE_BYTES, b"\0"
    )


def verify(content: bytes) -> None:
    """Compare a file with its envelope, before HDF5 reads it; a DamagedError if they differ.

    >>> verify(wrap(b"anything"))
    """
    first = _FIRST_LINE.match(content)
    if not first:
        raise DamagedError("it does not begin like a file of this cache")
    version, data = int(first[1]), memoryview(content)[ENVELOPE_BYTES:]
    if content[:ENVELOPE_BYTES] != _envelope(data, version):
        raise DamagedError("its checksum does not agree with its contents")
    if version != VERSION:
        raise DamagedError(f"it has format version {version}, this ucudnn reads {VERSION}")


def encode(table: Table) -> bytes:
    """The HDF5 data of a table."""
    texts: dict[str, Sequence[str]] = {
        "contexts": [json.dumps(to_builtins(one), ensure_ascii=False) for one in table.contexts],
        "algorithms": [json.dumps(work.texts, ensure_ascii=False) for work in table.algorithms],
        "reasons": table.reasons,
        "notes": [json.dumps(notes, ensure_ascii=False) for notes in table.notes],
        "facts": [json.dumps(facts.unusual, ensure_ascii=False) for facts in table.facts],
    }
    rows = table.rows
    types = {name: rows.dtype[name] for name in MEASUREMENT_DTYPE.names or ()}
    for name, kind in types.items():
        # Words, indices and counts, which are never negative, get the narrowest type.
        if kind.kind in "uS" or name == "first_sample":
            types[name] = _narrowest(rows[name])
    arrays = {
        "problems": table.problems,
        "measurements": rows.astype(list(types.items())),
        "samples": table.samples.astype(_narrowest(table.samples)),
    }
    # The name has a number, because HDF5 cannot open two files of one name at a time, not even in
    # memory.
    with h5py.File(f"image {next(_numbers)}", "w", driver="core", backing_store=False) as file:
        file.attrs.update({"format": FORMAT, "version": VERSION, "about": _ABOUT})
        for name, array in arrays.items():
            file.create_dataset(name, data=array, **_storage(name, array))
        for name, values in texts.items():
            encoded = [_to_bytes(value) for value in values]
            file.create_dataset(name, (len(encoded),), h5py.string_dtype(), encoded)
        file.flush()
        data: bytes = file.id.get_file_image()
    return data


def _storage(name: str, array: Array) -> Mapping[str, Any]:
    # Samples are stored as they are, because times hardly compress.
    if len(array) < _COMPRESSED_ROWS or name == "samples":
        return {}
    chunks = (min(len(array), _CHUNK_ROWS),)
    return {"chunks": chunks, "compression": "gzip", "compression_opts": 1, "shuffle": True}


def decode(data: bytes) -> Table:
    """The table in HDF5 data, with or without an envelope; a DamagedError if there is no table."""
    try:
        # libhdf5 reads the bytes in place; to copy them would take as long as to decompress them.
        # Reading in place is safe, because `data` outlives the open file.
        with h5py.File(h5py.h5f.open_file_image(data, _SHARED), "r") as file:
            arrays = {name: _read(file, name, len(data)) for name in _COLUMNS}
            texts = {name: list(_read(file, name, len(data))) for name in _TEXTS}
        return _table(arrays, {name: list(map(_from_bytes, texts[name])) for name in _TEXTS})
    except DamagedError:
        raise
    except _DAMAGES as error:
        raise DamagedError(f"it is no table of measurements: {error}") from error


def _read(file: h5py.File, name: str, length: int) -> Array:
    """The rows of a dataset."""
    # Only hard links are followed, because any other link could lead into another file.
    dataset = file[name] if isinstance(file.get(name, getlink=True), h5py.HardLink) else None
    if not isinstance(dataset, h5py.Dataset) or dataset.ndim != 1:
        raise DamagedError(f"its {name} is no table")
    properties = dataset.id.get_create_plist()
    is_elsewhere = properties.get_external_count() or properties.get_layout() == h5py.h5d.VIRTUAL
    if is_elsewhere or len(dataset) * dataset.dtype.itemsize > _MOST_INFLATED * length:
        raise DamagedError(f"its table {name} claims more than the file can hold")
    if name in _TEXTS:
        if h5py.check_string_dtype(dataset.dtype) is None:
            raise DamagedError(f"its table {name} holds no texts")
    elif dataset.dtype.names != _COLUMNS[name]:
        raise DamagedError(f"the columns of its table {name} are not those of this version")
    rows: Array = dataset[()]
    return rows


def _table(arrays: Mapping[str, Array], texts: Mapping[str, list[str]]) -> Table:
    rows, samples = arrays["measurements"], arrays["samples"]
    _require_kinds(rows, MEASUREMENT_DTYPE)
    _require_kinds(arrays["problems"], PROBLEM_DTYPE)
    table = Table(
        arrays["problems"].astype(PROBLEM_DTYPE, copy=False),
        list(map(_context, texts["contexts"])),
        list(map(_work, texts["algorithms"])),
        texts["reasons"],
        list(map(load_texts, texts["notes"])),
        list(map(_facts, texts["facts"])),
        rows,
        # A file has samples in the narrowest type that holds the largest of them. From 2^32 ns on
        # this is uint64, and numpy would turn a mixture of uint64 and int64 into floats.
        samples.astype("<i8"),
    )
    for name, column in {"problems": "problem", **COLUMN_BY_LIST}.items():
        if len(rows) and rows[column].max() >= len(getattr(table, name)):
            raise DamagedError("its tables do not fit together")
    ends = rows["first_sample"].astype("<i8") + rows["samples"]
    if ends.max(initial=0) > len(samples) or rows["first_sample"].min(initial=0) < 0:
        raise DamagedError("its tables do not fit together")
    return table


def _context(text: str) -> Context:
    values = parse_json(text)
    context = convert(values, Context)
    # `convert` ignores fields that it does not know, and gives missing ones their defaults.
    if to_builtins(context) != values:
        raise DamagedError("the fields of its contexts are not those of this version")
    return context


def _work(text: str) -> Work:
    values = parse_json(text)
    split = split_from_text(values["split"]) if "split" in values else None
    subject = Subject(values.get("subject", Subject.CHUNK))
    return Work(values["algorithm"], subject, split, values.get("race", ""))


_FACT_TYPES = get_type_hints(Facts)


def _facts(text: str) -> Facts:
    values = convert(parse_json(text), dict[str, Any])
    return Facts(**{name: convert(value, _FACT_TYPES[name]) for name, value in values.items()})


def _require_kinds(rows: Array, layout: np.dtype[Any]) -> None:
    """Refuse columns of other kinds than the layout's; signed and unsigned numbers are one kind."""
    for name in layout.names or ():
        stored, kind = rows.dtype[name], layout[name]
        is_number = {stored.base.kind, kind.base.kind} <= {"i", "u"}
        if stored.shape != kind.shape or not (is_number or stored.base.kind == kind.base.kind):
            raise DamagedError(f"its column {name} holds something else")


def _to_bytes(text: str) -> bytes:
    r"""Encode text as UTF-8, but U+0000 as C0 80 as Java does: a zero byte ends a text in HDF5.

    >>> _from_bytes(_to_bytes("a\0b")) == "a\0b"
    True
    """
    return text.encode("utf-8", "surrogatepass").replace(b"\0", b"\xc0\x80")


def _from_bytes(data: bytes) -> str:
    """Text that `_to_bytes` encoded."""
    return data.replace(b"\xc0\x80", b"\0").decode("utf-8", "surrogatepass")


def _narrowest(column: Array) -> np.dtype[Any]:
    """The narrowest type that holds all words, or all non-negative numbers, of a column."""
    # Fewer bytes take less time to decompress when the file is read.
    if column.dtype.kind == "S":
        return np.dtype(f"S{np.char.str_len(column).max(initial=1)}")
    return np.min_scalar_type(column.max(initial=0))
