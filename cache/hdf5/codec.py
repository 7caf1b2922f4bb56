"""Codec between tables and HDF5 data in memory; beside `datasets`, the only module that uses h5py.

Whole files are read and written by the operating system, and libhdf5 works on memory only. So
libhdf5 takes no file locks (which network file systems may lack), reads only data that has passed
its checksum, and holds no file open across a fork.

    /problems      one row per convolution          /algorithms    JSON objects, see `Work`
    /contexts      device, software, conditions     /reasons       why something failed
    /measurements  numbers of the rows above        /notes         JSON arrays of text
    /samples       times in ns, one row after another   /device_uuids
    /facts         JSON objects of facts that differ from their defaults
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, cast

import h5py
import numpy as np

from ucudnn.cache.hdf5.columns import (
    cast_columns,
    context_rows,
    contexts_from_rows,
    encoded_words,
    from_bytes,
    narrow,
    narrow_columns,
    problems_from_rows,
    to_bytes,
)
from ucudnn.cache.hdf5.datasets import read_numbers, read_texts
from ucudnn.cache.hdf5.envelope import FORMAT, VERSION, DamagedError
from ucudnn.cache.hdf5.facts import facts_from_texts, facts_to_text
from ucudnn.cache.table.builder import merge_tables
from ucudnn.cache.table.rows import (
    MEASUREMENT_DTYPE,
    NONE,
    PROBLEM_DTYPE,
    Array,
    Context,
    MeasurementRow,
    Work,
    sort_keys,
)
from ucudnn.cache.table.schema import CONTEXT_FIELDS, load_texts, split_from_text
from ucudnn.cache.table.table import Table
from ucudnn.cache.table.validity import possible_numbers, possible_problems
from ucudnn.measurement import STATUSES, Subject
from ucudnn.system.files import parse_json
from ucudnn.units import TOO_LARGE

_numbers = count()
_TEXTS = ("algorithms", "reasons", "notes", "device_uuids", "facts")
# Columns of /measurements that point to rows of other tables.
_POINTERS = ("problem", "context", "algorithm", "reason", "notes", "device_uuid", "facts")
# Every dataset of this version with its columns.
_KNOWN = {
    "problems": PROBLEM_DTYPE.names,
    "contexts": tuple(field.name for field in CONTEXT_FIELDS),
    "measurements": MEASUREMENT_DTYPE.names,
    "samples": None,
    **dict.fromkeys(_TEXTS),
}
_NARROWED = (*_POINTERS, "status", "samples", "first_sample")
# H5LT_FILE_IMAGE_DONT_COPY | H5LT_FILE_IMAGE_DONT_RELEASE, which h5py passes on without names.
_SHARED = 2 | 4
_COMPRESSED_ROWS = 1024
# So that a chunk and its compressed form fit into a processor's own cache.
_CHUNK_ROWS = 8192
_ABOUT = "Times of convolution algorithms. A key is a problem, an algorithm and a context."
_UNITS = {
    "measurements": {
        "problem": "row of /problems",
        "algorithm": "row of /algorithms",
        "context": "row of /contexts",
        "status": f"one of {', '.join(STATUSES)}",
        "time_ns": f"ns, median of the samples; {NONE}: not timed",
        "spread_ns": f"ns, interquartile range of the samples; {NONE}: unknown",
        "workspace_bytes": f"bytes; {NONE}: unknown",
        "error": "relative L2 error against float64, where has_error",
        "has_error": "whether the error was measured",
        "reason": "row of /reasons",
        "notes": "row of /notes",
        "device_uuid": "row of /device_uuids",
        "samples": "number of rows of /samples",
        "first_sample": "row of /samples",
        "stored_ns": "ns since 1970-01-01 UTC",
        "checksum": "BLAKE2b with 8 bytes, see docs/cache.md",
        "facts": "row of /facts",
    },
    "problems": {
        "batch": "samples",
        "input_size": "elements per spatial axis, outermost first; unused axes 0",
        "kernel_size": "elements per spatial axis",
        "stride": "elements per spatial axis",
        "padding": "elements (begin, end) per spatial axis",
        "dilation": "elements per spatial axis",
    },
    "contexts": {
        "device.cores": "processors",
        "device.memory_bytes": "bytes",
        "device.power_limit_w": "W",
        "conditions.mps_percent": "%",
    },
    "samples": {"samples": "ns"},
}


def encode(table: Table) -> bytes:
    """The HDF5 data of a table.

    Raises:
        CacheError: a number needs more than 64 bits.
    """
    texts: dict[str, Sequence[str]] = {
        "algorithms": [json.dumps(work.texts, ensure_ascii=False) for work in table.algorithms],
        "reasons": table.reasons,
        "notes": [json.dumps(notes, ensure_ascii=False) for notes in table.notes],
        "device_uuids": table.device_uuids,
        "facts": list(map(facts_to_text, table.facts)),
    }
    arrays = {
        "problems": table.problems,
        "contexts": context_rows(table.contexts),
        "measurements": narrow_columns(table.rows, _NARROWED),
        "samples": narrow(table.samples),
    }
    # HDF5 opens no two files of one name at a time in a process, not even in memory.
    with h5py.File(f"image {next(_numbers)}", "w", driver="core", backing_store=False) as file:
        file.attrs.update({"format": FORMAT, "version": VERSION, "about": _ABOUT})
        for name, array in arrays.items():
            dataset = file.create_dataset(name, data=array, **_storage(name, array))
            dataset.attrs["units"] = "\n".join(f"{k}: {v}" for k, v in _UNITS[name].items())
        for name, values in texts.items():
            encoded = [to_bytes(value) for value in values]
            file.create_dataset(name, (len(encoded),), h5py.string_dtype(), encoded)
        file.flush()
        data: bytes = file.id.get_file_image()
    return data


def _storage(name: str, array: Array) -> Mapping[str, Any]:
    # Times hardly compress. Contexts are few, and their texts may shrink by more than the factor
    # that `datasets` accepts.
    if len(array) < _COMPRESSED_ROWS or name not in ("problems", "measurements"):
        return {}
    chunks = (min(len(array), _CHUNK_ROWS),)
    return {"chunks": chunks, "compression": "gzip", "compression_opts": 1, "shuffle": True}


def decode(data: bytes, only_possible: bool = False) -> tuple[Table, bool]:
    """The table of an HDF5 file, with or without an envelope, and whether it is complete.

    It is incomplete if the file has columns or values of a later version. Such a file must not be
    replaced by the entries that were read.

    Args:
        data: the file.
        only_possible: leave out entries with impossible values, which damage can cause.

    Raises:
        DamagedError: it is not HDF5, lacks a table or a column, claims more than it can hold, its
            tables do not fit together, or it has an impossible entry.
        NewerError: a later version wrote something that cannot be passed over.
    """
    try:
        return _interpret(*_load(data), only_possible)
    except (OSError, RuntimeError, KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"it is no table of measurements: {error}") from error


def _load(data: bytes) -> tuple[dict[str, Array], dict[str, list[bytes]], bool]:
    """Tables of numbers, tables of texts, and whether the file holds nothing else."""
    # libhdf5 reads these very bytes, which outlive the file; a copy takes as long as inflating.
    with h5py.File(h5py.h5f.open_file_image(data, _SHARED), "r") as file:
        texts = {name: read_texts(file, name, len(data)) for name in _TEXTS}
        arrays = {
            name: read_numbers(file, name, len(data)) for name in _KNOWN if name not in _TEXTS
        }
        is_known = set(file) <= set(_KNOWN)
    return arrays, texts, is_known


def _work_from_text(text: str) -> Work:
    values = parse_json(text)
    work = Work(**values)
    # A key that cannot be is damage here, before anybody looks it up.
    if not all(isinstance(value, str) for value in work) or work.subject not in tuple(Subject):
        raise ValueError(f"{text} is no algorithm")
    if work.split:
        split_from_text(work.split)
    return work


def _are_none(values: Sequence[object]) -> Array:
    return np.array([value is None for value in values], bool)


def _interpret(
    arrays: dict[str, Array], encoded: dict[str, list[bytes]], is_known: bool, only_possible: bool
) -> tuple[Table, bool]:
    contexts = contexts_from_rows(arrays["contexts"])
    problems, unknown_problems = problems_from_rows(arrays["problems"])
    defaults = MeasurementRow._field_defaults
    rows = cast_columns(arrays["measurements"], MEASUREMENT_DTYPE, defaults)
    texts = {name: list(map(from_bytes, encoded[name])) for name in _TEXTS}
    _require_fit(rows, [problems, contexts, *texts.values()], arrays["samples"])
    unknown = unknown_problems[rows["problem"]] | ~np.isin(rows["status"], encoded_words(STATUSES))
    unknown |= _are_none(contexts)[rows["context"]]
    facts, unknown_facts = facts_from_texts(texts["facts"])
    unknown |= unknown_facts[rows["facts"]]
    possible = possible_numbers(rows) & possible_problems(problems)[rows["problem"]]
    # The rules for unknown values are unknown, too.
    if not only_possible and not (possible | unknown).all():
        raise DamagedError("it has an entry that cannot be")
    stays = possible & ~unknown
    table = Table(
        problems,
        cast(list[Context], contexts),  # no row that stays points to None
        list(map(_work_from_text, texts["algorithms"])),
        texts["reasons"],
        list(map(load_texts, texts["notes"])),
        facts,
        texts["device_uuids"],
        rows if stays.all() else rows[stays],
        # In a file they are as narrow as the largest. From 2^32 ns on that is uint64, which
        # numpy joins with int64 to floats.
        arrays["samples"].astype("<i8"),
    )
    columns = {name: arrays[name].dtype.names for name in arrays}
    is_known &= all(set(columns[name] or ()) <= set(_KNOWN[name] or ()) for name in arrays)
    complete = is_known and not unknown.any()
    # Merging sorts, which a file of this version does not need.
    return (table if complete and _is_sorted(table) else merge_tables([table])), complete


def _require_fit(rows: Array, tables: Sequence[Sequence[Any] | Array], samples: Array) -> None:
    first, count = rows["first_sample"].astype("<i8"), rows["samples"].astype("<i8")
    fits = samples.dtype.kind in "iu" and first.min(initial=0) >= 0
    fits &= (first <= len(samples) - count).all()
    # Rows that share samples would let a small file stand for any number of them.
    fits &= count.sum() <= len(samples)
    fits &= samples.min(initial=0) >= 0 and samples.max(initial=0) < TOO_LARGE
    for name, table in zip(_POINTERS, tables, strict=True):
        fits &= len(rows) == 0 or rows[name].max() < len(table)
    if not fits:
        raise DamagedError("its tables do not fit together")


def _is_sorted(table: Table) -> bool:
    keys, problem = sort_keys(table.problems), table.rows["problem"]
    return bool((keys[1:] > keys[:-1]).all() and (problem[1:] >= problem[:-1]).all())
