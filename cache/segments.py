"""Segments: the files of a cache, each with some measurements; the only module that uses h5py.

A segment is complete or absent, and it never changes: a writer publishes a new one under a unique
name, and a reader takes the union of all. So nothing is lost without locks, and the only feature
that the file system must have is an atomic rename.

A segment begins with an envelope of 512 bytes, an HDF5 user block, which HDF5 tools skip. The
sha256 in it covers the first line and everything after the block:

    ucudnn-cache 2
    bytes 24184
    sha256 6b1c...
    (zeros)

The HDF5 data behind it are a table `/measurements`, with a row per entry and a column per field of
`ucudnn.cache.schema`, and a dataset `/texts`, with texts that are too long for their columns.

This package reads and writes whole files itself, and libhdf5 works on memory only. So libhdf5 takes
no file locks (which network file systems may lack), reads only data that has passed its checksum,
and holds no file open across a fork.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import count
from pathlib import Path
from time import time_ns
from typing import Any, TypeAlias

import h5py
import numpy as np
from numpy.typing import NDArray

from ucudnn.cache.entries import LATEST_NS
from ucudnn.cache.schema import FIELDS, Row
from ucudnn.errors import CacheError
from ucudnn.system.files import make_folder, replacing

Array: TypeAlias = NDArray[Any]

VERSION = 2
ENVELOPE_BYTES = 512
SUFFIX = ".h5"
_FORMAT = "ucudnn-cache"
_FIRST_LINE = re.compile(rb"ucudnn-cache ([1-9]\d{0,8})\n")
_NAME = re.compile(r"\d{20}-\d+-[0-9a-f]{8}\.h5")
# Errors that an edited file may raise while its table is read.
_DAMAGES = (OSError, RuntimeError, LookupError, TypeError, ValueError)
_numbers = count()
# H5LT_FILE_IMAGE_DONT_COPY | H5LT_FILE_IMAGE_DONT_RELEASE, which h5py passes on without names.
_SHARED = 2 | 4
# Longer texts are in `/texts`, because a column is as wide in each row as its longest text. The
# cell of such a text is a zero byte, which no other text contains, and the number of the text.
_LONGEST = 255
_COMPRESSED_ROWS = 16
_CHUNK_ROWS = 1024
# Largest ratio of the bytes of a table to those of its file, because a damaged file may claim
# terabytes. Rows compress by a factor of about 5; if they compress too well, they are stored as
# they are.
_MOST_INFLATED = 64
_ABOUT = "Times of convolution algorithms, one per row."


class DamagedError(CacheError):
    """A file that was changed after it was written, or that no cache wrote."""


class OtherVersionError(CacheError):
    """A sound file that another version of this package wrote."""


def names_in(folder: Path) -> list[str]:
    """The names in a folder, sorted; none if there is no folder."""
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def segments_in(folder: Path) -> list[str]:
    """Names of the segments in a folder, oldest first."""
    return [name for name in names_in(folder) if name.endswith(SUFFIX)]


def publish(folder: Path, content: bytes) -> str:
    """Write a new segment, durably; return its name, which no other process gives."""
    name = f"{time_ns():020d}-{os.getpid()}-{os.urandom(4).hex()}{SUFFIX}"
    make_folder(folder)
    with replacing(folder / name) as stream:
        stream.write(content)
    return name


def read(path: Path) -> list[Row]:
    """The rows of a segment."""
    # A pipe would be waited for, if nobody writes to it.
    if not _is_file_or_gone(path):
        raise DamagedError("it is not a file")
    content = path.read_bytes()
    verify(content)
    return decode(content)


def is_ours(path: Path) -> bool:
    """True for a file with a name that only a cache gives, even if it was damaged since.

    Every other path may be one of the user's, who may name a folder of HDF5 files by mistake.
    """
    return bool(_NAME.fullmatch(path.name)) and _is_file_or_gone(path)


def _is_file_or_gone(path: Path) -> bool:
    # In this order, because another process may remove the file between the two calls.
    return path.is_file() or not os.path.lexists(path)


def set_aside(path: Path) -> Path:
    """Rename a damaged file, so that no reader looks at it again; return its new path."""
    target = path.with_name(f"{path.name}.damaged-{os.urandom(4).hex()}")
    os.rename(path, target)
    return target


def wrap(data: bytes, version: int = VERSION) -> bytes:
    """The contents of a file: HDF5 data behind its envelope."""
    return _envelope(data, version) + data


def _envelope(data: bytes | memoryview, version: int) -> bytes:
    first = f"{_FORMAT} {version}\n".encode()
    digest = sha256(first)
    digest.update(data)
    return (first + f"bytes {len(data)}\nsha256 {digest.hexdigest()}\n".encode()).ljust(
        ENVELOPE_BYTES, b"\0"
    )


def verify(content: bytes) -> None:
    """Compare a file with its envelope, before HDF5 reads it; an error if they differ.

    >>> verify(wrap(b"anything"))
    """
    first = _FIRST_LINE.match(content)
    if not first:
        raise DamagedError("it does not begin like a file of this cache")
    version, data = int(first[1]), memoryview(content)[ENVELOPE_BYTES:]
    if content[:ENVELOPE_BYTES] != _envelope(data, version):
        raise DamagedError("its checksum does not agree with its contents")
    if version != VERSION:
        raise OtherVersionError(f"it has format version {version}, this ucudnn reads {VERSION}")


def encode(rows: Sequence[Row]) -> bytes:
    """The contents of a segment with these rows, of which there is at least one."""
    long: dict[bytes, int] = {}
    columns = {}
    for field, cells in zip(FIELDS, zip(*rows, strict=True), strict=True):
        is_text = field.kind.column == "S"
        shown = [_short(cell, long) for cell in cells] if is_text else cells
        try:
            columns[field.name] = np.array(shown, field.kind.column)
        except OverflowError:
            raise CacheError("numbers of a measurement must be below 2^63 to be stored") from None
    table = np.empty(len(rows), [(name, column.dtype) for name, column in columns.items()])
    for name, column in columns.items():
        table[name] = column
    texts = np.frombuffer(b"\0".join(long), "u1")
    chunks = (min(len(rows), _CHUNK_ROWS),)
    compressed = {"chunks": chunks, "compression": "gzip", "compression_opts": 1, "shuffle": True}
    data = _image(table, texts, compressed if len(rows) >= _COMPRESSED_ROWS else {})
    if table.nbytes > _MOST_INFLATED * len(data):
        data = _image(table, texts, {})
    return wrap(data)


def _image(table: Array, texts: Array, storage: Mapping[str, Any]) -> bytes:
    # The name has a number, because HDF5 cannot open two files of one name at a time, not even in
    # memory.
    with h5py.File(f"image {next(_numbers)}", "w", driver="core", backing_store=False) as file:
        file.attrs.update({"format": _FORMAT, "version": VERSION, "about": _ABOUT})
        file.create_dataset("measurements", data=table, **storage)
        file["texts"] = texts
        file.flush()
        data: bytes = file.id.get_file_image()
    return data


def _short(cell: bytes, long: dict[bytes, int]) -> bytes:
    """The cell in its column; if it is too long for that, it is added to the long ones."""
    return cell if len(cell) <= _LONGEST else b"\0%d" % long.setdefault(cell, len(long))


def decode(content: bytes) -> list[Row]:
    """The rows of a segment's contents, which were verified."""
    try:
        # libhdf5 reads the bytes in place; to copy them would take as long as to decompress them.
        # Reading in place is safe, because `content` outlives the open file.
        with h5py.File(h5py.h5f.open_file_image(content, _SHARED), "r") as file:
            table = _dataset(file, "measurements", len(content))
            texts = _dataset(file, "texts", len(content))
        _require_columns(table)
        if texts.dtype != np.uint8:
            raise DamagedError("its texts are no bytes")
        long = texts.tobytes().split(b"\0")
        rows: list[Row] = table.tolist()
        if len(texts):
            rows = [tuple(_whole(cell, long) for cell in row) for row in rows]
    except _DAMAGES as error:
        raise DamagedError(f"it is no table of measurements: {error}") from error
    return rows


def _dataset(file: h5py.File, name: str, length: int) -> Array:
    # Only hard links are followed, because any other link could lead into another file.
    dataset = file[name] if isinstance(file.get(name, getlink=True), h5py.HardLink) else None
    if not isinstance(dataset, h5py.Dataset) or dataset.ndim != 1:
        raise DamagedError(f"its {name} is no table")
    properties = dataset.id.get_create_plist()
    is_elsewhere = properties.get_external_count() or properties.get_layout() == h5py.h5d.VIRTUAL
    # Each call of `dtype` translates all columns.
    dtype = dataset.dtype
    if is_elsewhere or len(dataset) * dtype.itemsize > _MOST_INFLATED * length:
        raise DamagedError(f"its table {name} claims more than the file can hold")
    if dtype.hasobject:
        raise DamagedError(f"its table {name} has texts of variable length")
    rows: Array = dataset[()]
    return rows


def _require_columns(table: Array) -> None:
    if table.dtype.names != tuple(field.name for field in FIELDS):
        raise DamagedError("the columns of its table are not those of this version")
    for field in FIELDS:
        stored, column = table.dtype[field.name], field.kind.column
        if not (stored.kind == "S" if column == "S" else stored == np.dtype(column)):
            raise DamagedError(f"its column {field.name} holds something else")
    # A later time would hide every entry that is stored after it.
    if len(table) and not 0 <= table["stored_ns"].min() <= table["stored_ns"].max() <= LATEST_NS:
        raise DamagedError("its entries were stored in an impossible time")


def _whole(cell: Any, long: Sequence[bytes]) -> Any:
    return long[int(cell[1:])] if isinstance(cell, bytes) and cell[:1] == b"\0" else cell
