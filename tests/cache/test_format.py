"""Files: self-describing HDF5 in an envelope, which no other version and no damage passes."""

from __future__ import annotations

import json
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
from ucudnn.cache.exchange import read_entries, write_entries
from ucudnn.cache.hdf5.codec import ENVELOPE_BYTES, DamagedError, verify, wrap
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
    """A compacted file with MEASUREMENTS."""
    with caches.open(tmp_path) as cache:
        cache.put(MEASUREMENTS)
    (path,) = tmp_path.rglob("*.h5")
    return path


def edit(path: Path, change: Callable[[h5py.File], None], version: int = 1) -> None:
    """Change the HDF5 part of a file and seal it again, as a writer of another version would."""
    image = path.with_suffix(".image")
    image.write_bytes(path.read_bytes()[ENVELOPE_BYTES:])
    with h5py.File(image, "r+") as file:
        change(file)
    path.write_bytes(wrap(image.read_bytes(), version))
    image.unlink()


def set_column(name: str, table: str, value: object) -> Callable[[h5py.File], None]:
    """Give every row of a column one value; a column that is not there is added."""

    def change(file: h5py.File) -> None:
        old = file[table][()]
        kinds = {column: old.dtype[column] for column in old.dtype.names}
        kinds[name] = np.asarray(value).dtype
        replace_table(file, table, old, kinds)
        rows = file[table][()]
        rows[name] = value
        file[table][...] = rows

    return change


def drop_column(name: str, table: str) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        old = file[table][()]
        kinds = {column: old.dtype[column] for column in old.dtype.names if column != name}
        replace_table(file, table, old, kinds)

    return change


def replace_table(file: h5py.File, table: str, old: Any, kinds: dict[str, Any]) -> None:
    new = np.zeros(len(old), list(kinds.items()))
    for column in kinds.keys() & set(old.dtype.names):
        if kinds[column] == old.dtype[column]:
            new[column] = old[column]
    del file[table]
    file[table] = new


def edit_context(old: str, new: str) -> Callable[[h5py.File], None]:
    """Replace a part of the first context's text."""

    def change(file: h5py.File) -> None:
        text = file["contexts"].asstr()[0]
        assert old in text
        file["contexts"][0] = text.replace(old, new)

    return change


def test_any_hdf5_tool_reads_it(file):
    with h5py.File(file) as opened:
        rows = opened["measurements"][()]
        problems = opened["problems"][()]
        contexts = [json.loads(text) for text in opened["contexts"].asstr()[()]]
        names = opened["algorithms"].asstr()[()]
        samples = opened["samples"][()]
        assert opened.attrs["version"] == 1
    assert len(rows) == len(MEASUREMENTS)
    for row in rows:
        problem, context = problems[row["problem"]], contexts[row["context"]]
        (true,) = [
            one
            for one in MEASUREMENTS
            if one.key.problem.batch == problem["batch"]
            and one.key.algorithm == json.loads(names[row["algorithm"]])["algorithm"]
        ]
        assert row["time_ns"] == true.time_ns
        assert row["workspace_bytes"] == true.workspace_bytes
        first = row["first_sample"]
        assert tuple(samples[first : first + row["samples"]]) == true.samples
        assert problem["input_size"].tolist() == [27, 28, 0]
        assert problem["padding"].tolist() == [[2, 1], [0, 0], [0, 0]]
        assert (problem["op"], problem["math"]) == (b"fprop", b"tf32")
        assert context["device"]["name"] == "NVIDIA H200"
        assert context["software"]["cudnn"] == "9.28.0"
        assert context["conditions"]["mps_percent"] == 50


def test_a_file_of_another_version_is_set_aside_and_a_fresh_one_made(file):
    edit(file, lambda _: None, version=2)
    data = file.read_bytes()
    with caches.open(file.parent) as cache:
        with pytest.warns(CacheWarning, match="format version 2, this ucudnn reads 1"):
            assert cache.get(KEYS[0]) is None
        cache.put(MEASUREMENTS[:1])
    (aside,) = file.parent.glob("*.damaged-*")
    assert aside.read_bytes() == data
    with caches.open(file.parent) as cache:
        assert list(cache) == MEASUREMENTS[:1]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (drop_column("batch", "problems"), "columns of its table problems are not"),
        (edit_context('"name": "NVIDIA H200", ', ""), "missing required field `name`"),
        (edit_context('"isa": "", ', ""), "fields of its contexts are not"),
        (edit_context('"cores"', '"eyes": 2, "cores"'), "fields of its contexts are not"),
        (edit_context('"protocol": 1', '"protocol": "1"'), "Expected `int`, got `str`"),
        (set_column("energy_uj", "measurements", 4.5), "columns of its table measurements are not"),
        (lambda file: file.pop("samples"), "its samples is no table"),
        (edit_context('"alone"', '"middle"'), "Invalid enum value .*role`"),
        (set_column("problem", "measurements", 99), "do not fit together"),
        (set_column("reason", "measurements", 99), "do not fit together"),
        (set_column("samples", "measurements", 10**6), "do not fit together"),
        (set_column("first_sample", "measurements", -5), "do not fit together"),
    ],
)
def test_sound_bytes_with_senseless_tables_are_set_aside(file, change, reason):
    edit(file, change)
    with caches.open(file.parent) as cache:
        with pytest.warns(CacheWarning, match=reason):
            assert cache.get(KEYS[0]) is None
        assert cache.check().clean
    assert len(list(file.parent.glob("*.damaged-*"))) == 1


def test_many_rows_are_compressed_and_come_back(tmp_path):
    many = [
        Measurement(replace(KEYS[0], protocol=number), "ok", number + 1, samples=(number + 1,))
        for number in range(3000)
    ]
    with caches.open(tmp_path) as cache:
        cache.put(many)
    (path,) = tmp_path.glob("*.h5")
    with h5py.File(path) as opened:
        assert opened["measurements"].compression == "gzip"
        assert opened["measurements"].id.get_storage_size() < 3000 * 40
    with caches.open(tmp_path) as cache:
        assert sorted(one.time_ns for one in cache) == list(range(1, 3001))
        assert cache.get(many[2345].key) == many[2345]


def claims(name: str, **storage: Any) -> Callable[[h5py.File], None]:
    """A table in place of another one, of which nothing or little is in the file."""

    def change(file: h5py.File) -> None:
        kind = storage.pop("dtype", file[name].dtype)
        del file[name]
        file.create_dataset(name, dtype=kind, **storage)

    return change


def linked(link: Any) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        del file["samples"]
        file["samples"] = link

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (claims("samples", shape=(10**12,), chunks=(1 << 16,), compression="gzip"), "claims more"),
        (claims("samples", shape=(10**12,)), "claims more"),
        (claims("algorithms", shape=(10**9,), chunks=(1 << 10,)), "claims more"),
        (
            claims("samples", shape=(64,), dtype="i1", external=[("/dev/zero", 0, 64)]),
            "claims more",
        ),
        (linked(h5py.ExternalLink("/dev/null", "x")), "samples is no table"),
        (linked(h5py.SoftLink("/samples")), "samples is no table"),
        (lambda file: [file.pop("samples"), file.create_group("samples")], "samples is no table"),
        (claims("reasons", data=np.zeros(9, "i8"), dtype="i8"), "reasons holds no texts"),
        (claims("notes", data=[b"[" * 900] * 9), "nested deeper than 32 levels"),
        (claims("notes", data=[b"[[1]]"] * 9), "no table of measurements"),
        (set_column("time_ns", "measurements", 1.5), "time_ns holds something else"),
    ],
)
def test_no_table_is_elsewhere_or_larger_than_its_file(file, change, reason):
    edit(file, change)
    tracemalloc.start()
    try:
        with caches.open(file.parent, "r") as cache, pytest.warns(CacheWarning, match=reason):
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


# Facts beside the numbers; laws.py has that they come back

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


@pytest.mark.parametrize(
    "text", ['{"energy_uj": 4}', '{"failure": "boredom"}', '{"load": "high"}', "[]", "{", "lost_to"]
)
def test_facts_that_are_none_are_damage(file, text):
    edit(file, lambda opened: opened["facts"].__setitem__(0, text))
    with caches.open(file.parent) as cache, pytest.warns(caches.CacheWarning):
        assert not list(cache)
