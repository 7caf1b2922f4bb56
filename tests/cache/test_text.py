"""Exports: what the files look like, and what is said of those that cannot be read."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest

from ucudnn.cache import Entry, MemoryCache
from ucudnn.cache.schema import FIELD_BY_NAME
from ucudnn.errors import CacheError
from ucudnn.measurement import Conditions, Device, Measurement, MeasurementKey, Software
from ucudnn.problem import Problem

KEY = MeasurementKey(
    Problem("wgrad", 32, 64, 192, (27, 28), (5, 3), padding=((2, 1), (0, 0)), dtype="float16"),
    "eng67_k2=20",
    Device("cuda", "NVIDIA H200", compute_capability="9.0"),
    Software("2.13.0", cudnn="9.28.0"),
    Conditions("later", ranks_per_device=2),
    3,
)
ENTRY = Entry(
    Measurement(KEY, "ok", 1500, 20, (1490, 1500), 9 << 20, 1.5e-7, notes=("tensor core", "a,b")),
    stored_ns=1_700_000_000_000_000_001,
)


WIDTH = len(FIELD_BY_NAME)
HEADER = ",".join(FIELD_BY_NAME).encode() + b"\n"
COMMAS = b"," * (WIDTH - 2)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """An exported file with ENTRY."""
    path = tmp_path / "timings.csv"
    cache = MemoryCache()
    cache.put_entries([ENTRY])
    assert cache.export(path) == 1
    return path


def change(path: Path, edit: Callable[[dict[str, str]], object]) -> None:
    """Edit the only record of a file."""
    with path.open(newline="") as stream:
        (record,) = csv.DictReader(stream)
    edit(record)
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(record))
        writer.writeheader()
        writer.writerow(record)


def imported(path: Path) -> list[Entry]:
    with MemoryCache() as cache:
        cache.import_(path)
        return list(cache.entries())


def test_a_csv_has_a_column_per_field(file):
    with file.open(newline="") as stream:
        (record,) = csv.DictReader(stream)
    assert record["problem.input_size"] == "27x28"
    assert record["problem.padding"] == "2:1x0:0"
    assert record["software.cudnn"] == "9.28.0"
    assert record["is_deterministic"] == "true"
    assert record["time_ns"] == "1500"
    assert record["samples"] == "1490x1500"
    assert record["notes"] == '["tensor core", "a,b"]'
    assert record["stored_ns"] == "1700000000000000001"


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("problem.stride", "0x1", "stride must be an int of at least 1, got 0"),
        ("error", "small", "error must be float | None, got 'small'"),
        ("status", "guessed", "status must be one of ok, screened, untimed, failed, got 'guessed'"),
        ("problem.op", "conv", "op must be one of fprop, dgrad, wgrad, got 'conv'"),
        ("status", "failed", "time_ns=1500 does not go with status 'failed'"),
        ("time_ns", "soon", "time_ns must be int | None, got 'soon'"),
        ("time_ns", str(2**63), "Expected `int` <= 9223372036854775807"),
        ("samples", "1x?", "samples must be tuple[int, ...], got '1x?'"),
        ("notes", "[3]", "notes must be tuple[str, ...], got '[3]'"),
        ("adds_bias", "yes", "adds_bias must be bool, got 'yes'"),
        ("problem.padding", "1x:2", "problem.padding must be tuple[tuple[int, int], ...]"),
        ("problem.batch", str(2**63), "batch must be"),
        ("device.cores", "-1", "Expected `int` >= 0 - at `$.cores`"),
        ("conditions.role", "last", "Invalid enum value 'last'"),
        (
            "split",
            '{"axis": "batch", "steps": [[1000000000000, 1, "gemm"]]}',
            "split must be split",
        ),
        ("subject", "weather", "Invalid enum value 'weather'"),
        ("failure", "boredom", "Invalid enum value 'boredom'"),
        ("stored_ns", str(2**62 + 1), "stored_ns must be from 0 to 2^62"),
    ],
)
def test_a_bad_value_is_named_with_its_place_and_nothing_is_taken(name, value, reason, file):
    change(file, lambda record: record.update({name: value}))
    cache = MemoryCache()
    with pytest.raises(CacheError) as error:
        cache.import_(file)
    assert f"{file} line 2: " in str(error.value)
    assert reason in str(error.value)
    assert len(cache) == 0


@pytest.mark.parametrize(
    "edit", [lambda record: record.pop("notes"), lambda record: record.update(energy_uj="5")]
)
def test_a_file_without_a_field_or_with_an_unknown_one_is_refused(edit, file):
    change(file, edit)
    with pytest.raises(CacheError, match="has the columns"):
        imported(file)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("x.txt", b"", "exported and imported as .csv, got 'x.txt'"),
        ("x.csv", b"", "line 1: a table of measurements has the columns"),
        ("x.csv", b"name,op\nconv1,fprop\n", "; export it with this ucudnn"),
        ("x.csv", b"\xff\xfe\x00", "it is not text"),
        ("x.csv", HEADER + b"fprop\n", f"line 2: {WIDTH} values are needed, got 1"),
        ("x.csv", HEADER + b"fprop," + b"9" * 5000 + COMMAS, "line 2: problem.batch must be int"),
        ("x.csv", HEADER + b"x" * 200_000, "line 2: field larger than"),
    ],
)
def test_another_file_is_refused(name, content, reason, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CacheError) as error:
        imported(tmp_path / name)
    assert reason in str(error.value)
    assert len(str(error.value)) < 1000 + len(str(tmp_path))


def test_files_that_cannot_be_reached_are_named(tmp_path):
    with pytest.raises(CacheError, match="cannot read .*none.csv: No such file"):
        imported(tmp_path / "none.csv")
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="cannot write .*choose another path"):
        MemoryCache().export(tmp_path / "file" / "x.csv")
