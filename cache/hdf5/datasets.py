"""Read the datasets of an HDF5 file, and refuse those larger than the file can account for.

A few bytes of HDF5 can claim terabytes, name another file, or refer a thousand times to one text.
So the claim of a dataset is compared with the length of the file before memory is taken for it, and
features that a cache never uses - links, external storage, other filters - are refused.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import h5py

from ucudnn.cache.hdf5.envelope import DamagedError, NewerError
from ucudnn.cache.table.rows import Array

# Rows compress by factors of 5 to 30, because each has a checksum of 8 random bytes or belongs to a
# row that has one.
_MOST_INFLATED = 64
_DEFLATE, _SHUFFLE = h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_SHUFFLE
_TEXTS_AT_ONCE = 16
_PLAIN_KINDS = "iufbS"


def read_numbers(file: h5py.File, name: str, length: int) -> Array:
    """The rows of a dataset of plain numbers and texts of fixed width.

    Args:
        file: the open file.
        name: name of the dataset.
        length: size of the file in bytes.

    Raises:
        DamagedError: it is missing, is something else, or is larger than the file can hold.
        NewerError: it has a column of a kind that this version does not know.
    """
    dataset = _dataset(file, name, length)
    names = dataset.dtype.names
    columns = (
        {column: dataset.dtype[column] for column in names} if names else {name: dataset.dtype}
    )
    for column, kind in columns.items():
        if kind.base.kind not in _PLAIN_KINDS:
            raise NewerError(f"its column {column} is of an unknown kind")
    rows: Array = dataset[()]
    return rows


def read_texts(file: h5py.File, name: str, length: int) -> list[bytes]:
    """The texts of a dataset.

    Args:
        file: the open file.
        name: name of the dataset.
        length: size of the file in bytes.

    Raises:
        DamagedError: it is missing, is something else, or its texts are longer than the file.
    """
    dataset = _dataset(file, name, length)
    string = h5py.check_string_dtype(dataset.dtype)
    if string is None or string.length is not None:
        raise DamagedError(f"its table {name} holds no texts")
    texts: list[bytes] = []
    left = length
    # A cache stores each text once, but a file may refer to a long one from every row. A few at a
    # time, so that such a file is refused before they fill the memory.
    for start in range(0, len(dataset), _TEXTS_AT_ONCE):
        some = dataset[start : start + _TEXTS_AT_ONCE].tolist()
        left -= sum(map(len, some))
        if left < 0:
            raise DamagedError(f"its table {name} claims more than the file can hold")
        texts += some
    return texts


def _dataset(file: h5py.File, name: str, length: int) -> h5py.Dataset:
    # A soft or external link could lead into another file.
    if not isinstance(file.get(name, getlink=True), h5py.HardLink):
        raise DamagedError(f"it has no table {name}")
    dataset = file[name]
    if not isinstance(dataset, h5py.Dataset) or dataset.ndim != 1:
        raise DamagedError(f"its {name} is no table")
    if not _is_accounted_for(dataset, length):
        raise DamagedError(f"its table {name} claims more than the file can hold")
    return dataset


def _is_accounted_for(dataset: h5py.Dataset, length: int) -> bool:
    """True if the file stores every row, and inflates to a bounded multiple of its length."""
    properties = dataset.id.get_create_plist()
    layout = properties.get_layout()
    row_bytes = dataset.id.get_type().get_size()
    needed = len(dataset) * row_bytes
    if properties.get_external_count() or layout == h5py.h5d.VIRTUAL:
        return False
    if layout == h5py.h5d.CHUNKED:
        (rows,) = dataset.chunks
        chunks = -(-len(dataset) // rows)
        # HDF5 reads a chunk that is not stored as zeros, for which the file has no bytes.
        return (
            _are_ours(properties)
            and chunks == dataset.id.get_num_chunks()
            and chunks * rows * row_bytes <= _MOST_INFLATED * length
        )
    if layout == h5py.h5d.COMPACT:
        return bool(needed <= dataset.id.get_storage_size() <= length)
    offset = dataset.id.get_offset()
    return needed == 0 or (offset is not None and offset + needed <= length)


def _are_ours(properties: Any) -> bool:
    """True for the filters of a cache, each at most once."""
    # Compressing twice would multiply the factor by which a file may inflate.
    filters = [properties.get_filter(index)[0] for index in range(properties.get_nfilters())]
    return not Counter(filters) - Counter([_SHUFFLE, _DEFLATE])
