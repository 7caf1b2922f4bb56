"""Files: self-describing HDF5 in an envelope, which no other version and no damage passes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from ucudnn import cache as caches
from ucudnn.cache import CacheWarning
from ucudnn.cache.schema import FIELD_BY_NAME, read_entries, write_entries
from ucudnn.cache.segments import ENVELOPE_BYTES, VERSION, DamagedError, verify, wrap
from ucudnn.errors import UcudnnError
from ucudnn.measurement import Conditions, Device, Measurement, MeasurementKey, Software, Subject
from ucudnn.problem import Problem
from ucudnn.split import Chunk, Split

GPU = Device("cuda", "NVIDIA H200", compute_capability="9.0", cores=132)
KEYS = [
    MeasurementKey(
        Problem("fprop", batch, 3, 8, (27, 28), (5, 3), padding=((2, 1), (0, 0)), math="tf32"),
        f"eng{engine}_k2=20",
        GPU,
        Software("2.13.0", cudnn="9.28.0"),
        Conditions(mps_percent=50),
        protocol=1,
    )
    for batch in (1, 2, 4)
    for engine in (0, 67)
]
MEASUREMENTS = [
    Measurement(one, "ok", 1000 + place, 7, (1000, 1001 + place), place << 20, 1e-6)
    for place, one in enumerate(KEYS)
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A segment with MEASUREMENTS."""
    with caches.open(tmp_path) as cache:
        cache.put(MEASUREMENTS)
    (path,) = tmp_path.rglob("*.h5")
    return path


def edit(path: Path, change: Callable[[h5py.File], None]) -> None:
    """Change the HDF5 part of a file and seal it again, as an attacker would."""
    image = path.with_suffix(".image")
    image.write_bytes(path.read_bytes()[ENVELOPE_BYTES:])
    with h5py.File(image, "r+") as file:
        change(file)
    path.write_bytes(wrap(image.read_bytes()))
    image.unlink()


def retype(column: str, kind: str | None) -> Callable[[h5py.File], None]:
    """Give a column another type, and zeros; None: leave the column out."""

    def change(file: h5py.File) -> None:
        old = file["measurements"][()]
        kinds = {name: old.dtype[name] for name in old.dtype.names}
        kinds |= {column: kind} if kind else {}
        new = np.zeros(len(old), [one for one in kinds.items() if kind or one[0] != column])
        for name in set(old.dtype.names) - {column}:
            new[name] = old[name]
        if new.dtype.hasobject:
            new[column] = "text"
        replaced(new)(file)

    return change


def replaced(table: Any) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        del file["measurements"]
        file["measurements"] = table

    return change


def set_cell(column: str, value: object) -> Callable[[h5py.File], None]:
    """Give the first row another value in one column."""

    def change(file: h5py.File) -> None:
        rows = file["measurements"][()]
        kinds = [(name, rows.dtype[name]) for name in rows.dtype.names]
        wide = [
            (name, "S90" if name == column and kind.kind == "S" else kind) for name, kind in kinds
        ]
        rows = rows.astype(wide)
        rows[column][0] = value
        replaced(rows)(file)

    return change


def refer_to(cell: bytes) -> Callable[[h5py.File], None]:
    """Let the first row refer to a long text, of which there are two."""

    def change(file: h5py.File) -> None:
        set_cell("reason", cell)(file)
        del file["texts"]
        file["texts"] = np.frombuffer(b"long\0longer", "u1")

    return change


def test_any_hdf5_tool_reads_it(file):
    with h5py.File(file) as opened:
        rows = opened["measurements"][()]
        assert opened.attrs["version"] == VERSION
    assert rows.dtype.names == tuple(FIELD_BY_NAME)
    assert len(rows) == len(MEASUREMENTS)
    for row, true in zip(rows, MEASUREMENTS, strict=True):
        assert row["problem.batch"] == true.key.problem.batch
        assert row["algorithm"].decode() == true.key.algorithm
        assert row["time_ns"] == true.time_ns
        assert row["workspace_bytes"] == true.workspace_bytes
        assert row["samples"].decode() == "x".join(map(str, true.samples))
        assert row["problem.input_size"] == b"27x28"
        assert row["problem.padding"] == b"2:1x0:0"
        assert (row["problem.op"], row["problem.math"]) == (b"fprop", b"tf32")
        assert row["device.name"] == b"NVIDIA H200"
        assert row["software.cudnn"] == b"9.28.0"
        assert row["conditions.mps_percent"] == 50
        assert row["is_deterministic"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (retype("problem.batch", None), "columns of its table are not"),
        (retype("energy_uj", "f8"), "columns of its table are not"),
        (retype("time_ns", "f8"), "column time_ns holds something else"),
        (retype("time_ns", "i4"), "column time_ns holds something else"),
        (retype("reason", "i8"), "column reason holds something else"),
        (retype("reason", h5py.string_dtype()), "texts of variable length"),
        (set_cell("stored_ns", 2**62 + 1), "impossible time"),
        (refer_to(b"\x0012"), "list index out of range"),
        (refer_to(b"\0first"), "invalid literal"),
        (lambda file: file.pop("texts"), "texts is no table"),
        (lambda file: file.pop("measurements"), "measurements is no table"),
    ],
)
def test_sound_bytes_with_a_senseless_table_are_set_aside(file, change, reason):
    edit(file, change)
    with caches.open(file.parents[1]) as cache:
        with pytest.warns(CacheWarning, match=reason):
            assert cache.get(KEYS[0]) is None
        assert cache.check().clean
    assert len(list(file.parent.glob("*.damaged-*"))) == 1


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("status", b"guessed"),
        ("status", b"failed"),
        ("time_ns", -5),
        ("samples", b"1x?"),
        ("notes", b"[" * 80),
        ("notes", b"\xff\xfe"),
        ("failure", b"boredom"),
        ("problem.op", b"conv"),
        ("problem.stride", b"0x1"),
        ("device.cores", -1),
        ("conditions.role", b"middle"),
        ("split", b"{}"),
    ],
)
def test_a_senseless_row_is_named_once_and_costs_that_row_alone(file, column, value):
    edit(file, set_cell(column, value))
    cache = caches.open(file.parents[1])
    with pytest.warns(CacheWarning, match="a measurement that makes no sense"):
        assert list(cache) == MEASUREMENTS[1:]
    # No second warning, which would be an error here.
    assert [cache.get(key) for key in KEYS] == [None, *MEASUREMENTS[1:]]
    (said,) = cache.check().problems
    assert "makes no sense" in said
    cache.put(MEASUREMENTS[:1])
    assert [cache.get(key) for key in KEYS] == MEASUREMENTS


def test_many_rows_are_compressed_and_come_back(tmp_path):
    many = [
        Measurement(replace(KEYS[0], protocol=number), "ok", number + 1, samples=(number + 1,))
        for number in range(3000)
    ]
    with caches.open(tmp_path) as cache:
        cache.put(many)
    (path,) = tmp_path.rglob("*.h5")
    assert path.stat().st_size < 3000 * 40
    with caches.open(tmp_path) as cache:
        assert sorted(one.time_ns for one in cache) == list(range(1, 3001))
        assert cache.get(many[2345].key) == many[2345]


def test_rows_that_are_nearly_equal_come_back(tmp_path):
    """They would compress so well that their file would be taken for one that claims too much."""
    texts = {"status": "failed", "time_ns": None, "spread_ns": None, "reason": "x" * 250}
    one = replace(MEASUREMENTS[0], samples=(), notes=("y" * 240,), **texts)
    many = [replace(one, key=replace(KEYS[0], protocol=number)) for number in range(5000)]
    with caches.open(tmp_path) as cache:
        cache.put(many)
    with caches.open(tmp_path, "r") as cache:
        assert cache.get(many[-1].key) == many[-1]
        assert cache.check().records == len(many)


def test_one_long_text_costs_its_own_length(tmp_path):
    """A column is as wide in each row as its longest text."""
    long = "x" * 100_000
    many = [replace(MEASUREMENTS[0], key=replace(KEYS[0], protocol=n)) for n in range(500)]
    texts = [
        replace(one, status="failed", time_ns=None, spread_ns=None, reason=reason)
        for one, reason in zip(many, (long, long, "\0" + long, "µ" * 150, "\0"), strict=False)
    ]
    with caches.open(tmp_path) as cache:
        cache.put([*texts, *many[len(texts) :]])
    (path,) = tmp_path.rglob("*.h5")
    assert path.stat().st_size < 3 * len(long)
    tracemalloc.start()
    try:
        with caches.open(tmp_path, "r") as cache:
            assert [cache.get(one.key) for one in texts] == texts
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 60 * len(long)


def claims(name: str, **storage: Any) -> Callable[[h5py.File], None]:
    """A table in place of another one, of which nothing or little is in the file."""

    def change(file: h5py.File) -> None:
        kind = storage.pop("dtype", file[name].dtype)
        del file[name]
        file.create_dataset(name, dtype=kind, **storage)

    return change


def linked(link: Any) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        del file["measurements"]
        file["measurements"] = link

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (claims("texts", shape=(10**12,), chunks=(1 << 16,), compression="gzip"), "claims more"),
        (claims("measurements", shape=(10**12,)), "claims more"),
        (claims("measurements", shape=(10**9,), chunks=(1 << 10,)), "claims more"),
        (claims("texts", shape=(64,), external=[("/dev/zero", 0, 64)]), "claims more"),
        (linked(h5py.ExternalLink("/dev/null", "x")), "measurements is no table"),
        (linked(h5py.SoftLink("/measurements")), "measurements is no table"),
        (lambda file: [file.pop("texts"), file.create_group("texts")], "texts is no table"),
        (claims("texts", data=[b"[" * 900] * 9, dtype="S900"), "texts are no bytes"),
    ],
)
def test_no_table_is_elsewhere_or_larger_than_its_file(file, change, reason):
    edit(file, change)
    tracemalloc.start()
    try:
        with caches.open(file.parents[1], "r") as cache, pytest.warns(CacheWarning, match=reason):
            assert not list(cache)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100 * file.stat().st_size


def test_no_bit_flip_and_no_truncation_goes_unseen():
    data = wrap(b"an HDF5 image")
    whole = int.from_bytes(data)
    flipped = [(whole ^ 1 << place).to_bytes(len(data)) for place in range(8 * len(data))]
    for damaged in (*flipped, *(data[:length] for length in range(len(data)))):
        with pytest.raises(DamagedError):
            verify(damaged)


SPLIT = Split("batch", (Chunk(3, "gemm"), Chunk(1, "“gemm”")))
OTHER_SUBJECTS = [
    replace(KEYS[0], subject=Subject.FIRST_RUN),
    *(
        replace(KEYS[0], algorithm="", subject=Subject.CALL, split=split, race=race)
        for split in (SPLIT, replace(SPLIT, axis="spatial"))
        for race in ("one", "another")
    ),
    *(
        replace(KEYS[0], algorithm="", subject=subject)
        for subject in (Subject.OPERATIONS, Subject.TRAFFIC)
    ),
]


def test_subjects_are_keys_of_their_own(tmp_path):
    """Whatever was timed of one problem, each has its time, in a cache and in text."""
    timed = [
        Measurement(key, "ok", 5 + place) for place, key in enumerate([KEYS[0], *OTHER_SUBJECTS])
    ]
    with caches.open(tmp_path) as cache:
        cache.put(timed)
    with caches.open(tmp_path, "r") as cache:
        assert [cache.get(one.key) for one in timed] == timed
        assert sorted(map(repr, cache)) == sorted(map(repr, timed))
        found = cache.explain(replace(OTHER_SUBJECTS[1], race="a third"))
        assert [one.field for one in found.differences] == ["race"]
    write_entries(tmp_path / "all.csv", [caches.Entry(one, 1) for one in timed])
    assert [one.measurement for one in read_entries(tmp_path / "all.csv")] == timed


@pytest.mark.parametrize(
    "changes",
    [
        {"subject": Subject.CALL},
        {"subject": Subject.CALL, "algorithm": ""},
        {"split": SPLIT},
        {"subject": Subject.OPERATIONS},
    ],
)
def test_a_subject_needs_what_it_is_of(changes):
    with pytest.raises(UcudnnError, match="do not go with"):
        replace(KEYS[0], **changes)
