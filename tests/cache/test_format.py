"""Files: self-describing HDF5 in an envelope, and what other versions of the format may hold."""

from __future__ import annotations

import hashlib
import json
import random
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from ucudnn import cache as caches
from ucudnn import testing
from ucudnn.cache import CacheWarning
from ucudnn.cache.hdf5 import envelope
from ucudnn.cache.hdf5.columns import cast_columns
from ucudnn.cache.hdf5.envelope import ENVELOPE_BYTES, verify, wrap
from ucudnn.cache.table import table as tables
from ucudnn.cache.table.rows import (
    MEASUREMENT_DTYPE,
    PROBLEM_DTYPE,
    MeasurementRow,
    problem_from_row,
    problem_row,
    problem_rows,
)
from ucudnn.cache.table.validity import possible_problems
from ucudnn.errors import CacheError, ProblemError
from ucudnn.measurement import Conditions, Device, Measurement, MeasurementKey, Software
from ucudnn.problem import Problem

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


def test_a_file_begins_with_its_version_length_and_digest(file: Path) -> None:
    data = file.read_bytes()
    lines = data[:ENVELOPE_BYTES].rstrip(b"\0").decode().splitlines()
    assert lines[0] == "ucudnn-cache 1"
    assert lines[1] == f"bytes {len(data) - ENVELOPE_BYTES}"
    digest = hashlib.sha256(b"ucudnn-cache 1\n" + data[ENVELOPE_BYTES:]).hexdigest()
    assert lines[2] == f"sha256 {digest}"


def test_any_hdf5_tool_reads_it(file: Path) -> None:
    with h5py.File(file) as opened:
        rows = opened["measurements"][()]
        problems, contexts = opened["problems"][()], opened["contexts"][()]
        names = opened["algorithms"].asstr()[()]
        samples = opened["samples"][()]
        assert "time_ns: ns" in opened["measurements"].attrs["units"]
        assert "bytes" in opened["measurements"].attrs["units"]
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
        assert context["device.name"] == b"NVIDIA H200"
        assert context["software.cudnn"] == b"9.28.0"
        assert context["conditions.mps_percent"] == 50


def test_the_files_of_a_device_carry_its_name(file: Path) -> None:
    assert file.name == "cuda-nvidia-h200-9.0.h5"


def test_a_newer_format_is_left_alone(file: Path) -> None:
    edit(file, lambda _: None, version=2)
    data = file.read_bytes()
    extra = Measurement(KEYS[0], "ok", 5)
    with caches.open(file.parent) as cache:
        with pytest.warns(CacheWarning, match="format version 2, this ucudnn reads up to 1"):
            assert cache.get(KEYS[0]) is None
        cache.put([extra])
        assert cache.get(KEYS[0]) == extra
        report = cache.check()
        assert report.clean
        assert any(file.name in note for note in report.notes)
    assert file.read_bytes() == data
    with pytest.warns(CacheWarning), caches.open(file.parent) as cache:
        assert cache.get(KEYS[0]) == extra


def test_an_unknown_column_of_numbers_is_kept(file: Path) -> None:
    edit(file, set_column("energy_uj", "measurements", 4.5))
    with caches.open(file.parent) as cache:
        assert [cache.get(key) for key in KEYS] == MEASUREMENTS
        cache.put([Measurement(KEYS[0], "ok", 5)])
        cache.merge(file.parent)
        assert cache.get(KEYS[0]).time_ns == 5
        assert any("later version" in note for note in cache.check().notes)
    with h5py.File(file) as opened:
        assert set(opened["measurements"]["energy_uj"]) == {4.5}


@pytest.mark.parametrize(
    ("table", "name"), [("contexts", "conditions.power_mode"), ("problems", "fused")]
)
def test_an_unknown_field_of_the_key_is_another_key(file: Path, table: str, name: str) -> None:
    edit(file, set_column(name, table, b"eco"))
    with caches.open(file.parent) as cache:
        assert not list(cache)
        cache.put(MEASUREMENTS[:1])
    with h5py.File(file) as opened:
        assert set(opened[table][name]) == {b"eco"}


@pytest.mark.parametrize("table", ["contexts", "problems"])
def test_an_unknown_field_of_the_key_that_is_empty_changes_nothing(file: Path, table: str) -> None:
    edit(file, set_column("conditions.power_mode", table, np.bytes_(b"\0\0")))
    with caches.open(file.parent) as cache:
        assert [cache.get(key) for key in KEYS] == MEASUREMENTS


def test_an_unknown_word_hides_only_what_has_it(file: Path) -> None:
    def change(opened: h5py.File) -> None:
        problems = opened["problems"][()]
        problems["dtype"][problems["batch"] == 2] = b"float8_e4m3"
        opened["problems"][...] = problems
        set_column("status", "measurements", b"interpolated")(opened)
        rows = opened["measurements"][()]
        rows["status"][rows["time_ns"] != 1000] = b"ok"
        opened["measurements"][...] = rows

    edit(file, change)
    with caches.open(file.parent) as cache:
        wanted = [one for one in MEASUREMENTS[1:] if one.key.problem.batch != 2]
        assert sorted(map(repr, cache)) == sorted(map(repr, wanted))
        assert any("later version" in note for note in cache.check().notes)


def test_an_older_file_gets_the_default_of_a_field_it_lacks(file: Path) -> None:
    edit(file, set_column("conditions.mps_percent", "contexts", 100))
    edit(file, drop_column("conditions.mps_percent", "contexts"))
    with caches.open(file.parent) as cache:
        assert cache.get(KEYS[0]) is None
        found = [one.key.conditions for one in cache]
        assert found == [Conditions(mps_percent=100)] * len(KEYS)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (drop_column("batch", "problems"), "no column batch"),
        (drop_column("device.name", "contexts"), "no column device.name"),
        (drop_column("time_ns", "measurements"), "no column time_ns"),
        (lambda file: file.pop("samples"), "no table samples"),
        (set_column("problem", "measurements", 99), "do not fit together"),
        (set_column("reason", "measurements", 99), "do not fit together"),
        (set_column("samples", "measurements", 10**6), "do not fit together"),
        (set_column("first_sample", "measurements", -5), "do not fit together"),
    ],
)
def test_sound_bytes_with_senseless_tables_are_set_aside(
    file: Path, change: Callable[[h5py.File], None], reason: str
) -> None:
    edit(file, change)
    with caches.open(file.parent) as cache:
        with pytest.warns(CacheWarning, match=reason):
            assert cache.get(KEYS[0]) is None
        assert cache.check().clean
    assert len(list(file.parent.glob("*.damaged-*"))) == 1


def test_an_older_file_gets_the_default_of_a_size_it_lacks(file: Path) -> None:
    edit(file, drop_column("math", "problems"))
    with caches.open(file.parent) as cache:
        assert {one.key.problem.math for one in cache} == {"strict"}
        assert len(cache) == len(KEYS)


def test_an_unknown_word_of_the_conditions_hides_only_what_has_it(file: Path) -> None:
    def change(opened: h5py.File) -> None:
        contexts, rows = opened["contexts"][()], opened["measurements"][()]
        del opened["contexts"], opened["measurements"]
        later = contexts.astype(
            [
                (n, "S8" if n == "conditions.role" else contexts.dtype[n])
                for n in contexts.dtype.names
            ]
        )
        later["conditions.role"] = b"middle"
        opened["contexts"] = np.concatenate([contexts.astype(later.dtype), later])
        rows["context"][0] = 1
        opened["measurements"] = rows

    edit(file, change)
    with caches.open(file.parent) as cache:
        assert len(cache) == len(KEYS) - 1
        assert any("later version" in note for note in cache.check().notes)


def test_a_column_of_an_unknown_kind_leaves_the_file_alone(file: Path) -> None:
    edit(file, set_column("curve", "measurements", 1j))
    data = file.read_bytes()
    with caches.open(file.parent) as cache:
        with pytest.warns(CacheWarning, match="column curve is of an unknown kind; upgrade ucudnn"):
            assert not list(cache)
        assert cache.check().clean
    assert file.read_bytes() == data


def test_a_small_table_may_stand_in_the_header_of_its_dataset(file: Path) -> None:
    """HDF5 calls this layout compact; h5py writes it only when it is asked to."""

    def change(opened: h5py.File) -> None:
        samples = opened["samples"][()]
        del opened["samples"]
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_layout(h5py.h5d.COMPACT)
        kind, space = h5py.h5t.py_create(samples.dtype), h5py.h5s.create_simple(samples.shape)
        dataset = h5py.h5d.create(opened.id, b"samples", kind, space, properties)
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, samples)

    edit(file, change)
    with caches.open(file.parent) as cache:
        assert [cache.get(key) for key in KEYS] == MEASUREMENTS


def test_many_rows_are_compressed_and_come_back(tmp_path: Path) -> None:
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
        assert opened["contexts"].compression is None
    with caches.open(tmp_path) as cache:
        assert sorted(one.time_ns for one in cache) == list(range(1, 3001))
        assert cache.get(many[2345].key) == many[2345]


def test_more_problems_than_are_remembered_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "_MEMO_PROBLEMS", 2)
    with caches.open(tmp_path) as cache:
        cache.put(MEASUREMENTS)
        for _ in range(2):
            for one in MEASUREMENTS:
                assert cache.get(one.key) == one
                other = replace(one.key, problem=one.key.problem.with_batch(77))
                assert cache.get(other) is None


def test_a_protocol_that_no_file_can_hold_is_named_and_nothing_is_kept(tmp_path: Path) -> None:
    with caches.open(tmp_path) as cache:
        with pytest.raises(CacheError, match="protocol must be below 2\\^63 to be stored"):
            cache.put([*MEASUREMENTS, Measurement(replace(KEYS[0], protocol=2**63), "ok", 1)])
        assert len(cache) == 0
    assert not list(tmp_path.iterdir())


def test_columns_agree_with_the_names_of_a_row() -> None:
    assert MEASUREMENT_DTYPE.names == MeasurementRow._fields


def test_a_column_that_is_added_gets_its_default_where_a_file_lacks_it() -> None:
    stored = np.array([(5,), (7,)], [("time_ns", "<i8")])
    layout = np.dtype([("time_ns", "<i8"), ("energy_uj", "<i8")])
    rows = cast_columns(stored, layout, {"energy_uj": -1})
    assert rows.tolist() == [(5, -1), (7, -1)]
    with pytest.raises(CacheError, match="it has no column energy_uj"):
        cast_columns(stored, layout, {})


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


def repeated_text(file: h5py.File) -> None:
    """One long text, to which every row refers."""
    file["algorithms"][0] = "a" * 20_000
    reference = file["algorithms"].id.get_offset()
    path = Path(file.filename)
    file.flush()
    data = bytearray(path.read_bytes())
    data[reference + 16 : reference + 32] = data[reference : reference + 16]
    file.close()
    path.write_bytes(data)


def twice_compressed(file: h5py.File) -> None:
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_chunk((10**6,))
    for _ in range(2):
        properties.set_deflate(9)
    del file["samples"]
    kind, space = h5py.h5t.NATIVE_INT64, h5py.h5s.create_simple((10**6,))
    dataset = h5py.h5d.create(file.id, b"samples", kind, space, properties)
    dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, np.zeros(10**6, "i8"))


def shared_samples(file: h5py.File) -> None:
    for column, value in (("samples", len(file["samples"])), ("first_sample", 0)):
        set_column(column, "measurements", value)(file)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (claims("samples", shape=(10**12,), chunks=(1 << 16,), compression="gzip"), "claims more"),
        (claims("samples", shape=(10**12,)), "claims more"),
        (claims("problems", shape=(10**9,), chunks=(1 << 10,), shuffle=True), "claims more"),
        (claims("algorithms", shape=(10**9,), chunks=(1 << 10,)), "claims more"),
        (claims("samples", data=np.zeros(10**6, "i8"), compression="gzip"), "claims more"),
        (claims("samples", data=np.zeros(9, "i8"), chunks=(9,), fletcher32=True), "claims more"),
        (
            claims("samples", shape=(64,), dtype="i1", external=[("/dev/zero", 0, 64)]),
            "claims more",
        ),
        (twice_compressed, "claims more"),
        (repeated_text, "algorithms claims more"),
        (shared_samples, "do not fit together"),
        (linked(h5py.ExternalLink("/dev/null", "x")), "no table samples"),
        (linked(h5py.SoftLink("/samples")), "no table samples"),
        (lambda file: [file.pop("samples"), file.create_group("samples")], "samples is no table"),
        (claims("reasons", data=np.zeros(9, "i8"), dtype="i8"), "reasons holds no texts"),
        (claims("notes", data=[b"[" * 900] * 9), "nested deeper than 32 levels"),
        (claims("notes", data=[b"[[1]]"] * 9), "no table of measurements"),
        (set_column("time_ns", "measurements", -5), "an entry that cannot be"),
        (set_column("time_ns", "measurements", 1.5), "time_ns holds something else"),
        (set_column("workspace_bytes", "measurements", np.uint64(2**63)), "are too large"),
        (set_column("stored_ns", "measurements", 2**62 + 1), "an entry that cannot be"),
        (set_column("status", "measurements", b"failed"), "an entry that cannot be"),
        (set_column("groups", "problems", 2), "an entry that cannot be"),
        (set_column("batch", "problems", 0), "an entry that cannot be"),
        (set_column("out_channels", "problems", 2**62), None),
    ],
)
def test_no_table_is_larger_than_its_file_or_holds_what_cannot_be(
    file: Path, change: Callable[[h5py.File], None], reason: str | None
) -> None:
    edit(file, change)
    tracemalloc.start()
    try:
        with caches.open(file.parent, "r") as cache:
            if reason is None:  # an odd size that a convolution may have
                assert len(list(cache)) == len(KEYS)
                return
            with pytest.warns(CacheWarning, match=reason):
                assert not list(cache)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100 * file.stat().st_size


def test_rows_are_possible_where_problems_are() -> None:
    """The rule for a million rows against the constructor, for sizes around every limit."""
    chance = random.Random(0)
    problems = [one.key.problem for one in testing.sample_measurements(50)]
    rows = np.repeat(problem_rows(problems), 40)
    sizes = (*range(-1, 8), 2**31 - 1, 2**31, 2**32 + 1, 2**62, 2**63 - 1)
    numbers = [name for name in PROBLEM_DTYPE.names or () if PROBLEM_DTYPE[name].base.kind == "i"]
    for index in range(len(rows)):
        for _ in range(chance.choice((1, 1, 2, 3))):
            cells = rows[chance.choice(numbers)][index : index + 1].reshape(-1)
            cells[chance.randrange(len(cells))] = chance.choice(sizes)
    wanted = []
    for row in rows:
        try:
            wanted.append(problem_row(problem_from_row(row)) == row.tobytes())
        except ProblemError:
            wanted.append(False)
    assert possible_problems(rows).tolist() == wanted
    assert 100 < sum(wanted) < len(wanted) - 100


def test_the_checksum_is_the_documented_one(file: Path) -> None:
    true = MEASUREMENTS[3]
    with h5py.File(file) as opened:
        (row,) = [row for row in opened["measurements"][()] if row["time_ns"] == true.time_ns]
    problem = {
        "problem.op": "fprop",
        "problem.batch": 2,
        "problem.in_channels": 3,
        "problem.out_channels": 8,
        "problem.input_size": [27, 28],
        "problem.kernel_size": [5, 3],
        "problem.stride": [1, 1],
        "problem.padding": [[2, 1], [0, 0]],
        "problem.dilation": [1, 1],
        "problem.math": "tf32",
    }
    context = {
        "device.type": "cuda",
        "device.name": "NVIDIA H200",
        "device.cores": 132,
        "device.compute_capability": "9.0",
        "software.torch": "2.13.0",
        "software.cudnn": "9.28.0",
        "conditions.mps_percent": 50,
        "protocol": 1,
    }
    content = b"".join(
        [
            json.dumps(problem, sort_keys=True).encode(),
            json.dumps(context, sort_keys=True).encode(),
            json.dumps([[true.key.algorithm, "chunk", "", ""], "", [], ""]).encode(),
            struct.pack("<16sqqqd?Iq", b"ok", 1003, 7, 3 << 20, 1e-6, True, 2, row["stored_ns"]),
            struct.pack("<2q", *true.samples),
        ]
    )
    digest = hashlib.blake2b(content, digest_size=8).digest()
    assert row["checksum"] == int.from_bytes(digest, "little")


def test_entries_that_contradict_their_checksum_are_reported(file: Path) -> None:
    edit(file, set_column("time_ns", "measurements", 1))
    with caches.open(file.parent) as cache:
        report = cache.check()
    assert not report.clean
    assert "6 entries do not agree with their checksums" in report.problems[0]


def test_no_single_bit_flip_goes_unseen() -> None:
    data = wrap(b"an HDF5 image")
    for place in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[place // 8] ^= 1 << place % 8
        with pytest.raises(envelope.DamagedError):
            verify(bytes(flipped))


def test_no_truncation_goes_unseen() -> None:
    data = wrap(b"an HDF5 image")
    for length in range(len(data)):
        with pytest.raises(envelope.DamagedError):
            verify(data[:length])


def test_samples_of_many_seconds_stay_whole_in_a_file_that_grows(tmp_path: Path) -> None:
    # As narrow as they can be, these take 64 bits without a sign.
    samples = (5_000_000_001, 6_000_000_007)
    long = replace(MEASUREMENTS[0], time_ns=samples[0], samples=samples)
    for measurement in (long, *MEASUREMENTS[1:3]):
        with caches.open(tmp_path) as cache:
            cache.put([measurement])
    with caches.open(tmp_path, "r") as cache:
        assert cache.check().clean
        assert [cache.get(key) for key in KEYS[:3]] == [long, *MEASUREMENTS[1:3]]
