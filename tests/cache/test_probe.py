"""A probe's table becomes entries with the problems of its layers and the device of its profile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ucudnn import cache as caches
from ucudnn.cache import commands
from ucudnn.cache.exchange.probe import COLUMNS, read_probe
from ucudnn.errors import CacheError, ConfigError
from ucudnn.measurement import Conditions, Device, Software
from ucudnn.problem import Problem

LAYERS = """\
name,n,c,d,h,w,k,kd,kh,kw,pad_d,pad_h,pad_w,stride_d,stride_h,stride_w,dil_d,dil_h,dil_w,groups
conv1,256,3,1,227,227,96,1,11,11,0,0,0,1,4,4,1,1,1,1
down,2,32,128,128,64,64,3,3,3,1,1,1,2,2,2,1,1,1,1
"""
ROWS = (
    "net:conv1,fprop,fp32,nchw,64,eng67_k2=20,1048576,A,0,TENSOR_CORE,123.46,120.00,24,3.1e-4,",
    "net:conv1,wgrad,fp16,nhwc,256,eng0,0,FALLBACK,2,,900.00,900.00,1,,",
    "net:down,wgrad,fp32,nchw,2,eng1_k0=1,64,B,11,TENSOR_CORE+WINOGRAD,7.00,6.50,3,0.5,nan",
)
PROFILE = {
    "deviceName": "NVIDIA H200",
    "deviceVer": 900,
    "multiProcessorCount": 132,
    "totalGlobalMem": 150754820096,
    "driverVer": 13000,
}


@pytest.fixture
def probe(tmp_path: Path) -> Path:
    """The folder that a probe leaves, with its layer table beside it."""
    (tmp_path / "timings.csv").write_text("\n".join([",".join(COLUMNS), *ROWS]) + "\n")
    (tmp_path / "profile.json").write_text(json.dumps(PROFILE))
    (tmp_path / "answers.json").write_text(json.dumps({"cudnn": 92800, "torch": "2.13.0+cu130"}))
    (tmp_path / "net.csv").write_text(LAYERS)
    return tmp_path


def test_each_row_becomes_a_measurement(probe: Path) -> None:
    first, second, third = (
        one.measurement for one in read_probe(probe / "timings.csv", [probe / "net.csv"])
    )
    assert first.key.problem == Problem(
        "fprop", 64, 3, 96, (227, 227), (11, 11), (4, 4), math="tf32"
    )
    assert first.key.algorithm == "eng67_k2=20"
    assert first.key.device == Device(
        "cuda", "NVIDIA H200", "", 132, "9.0", memory_bytes=150754820096
    )
    assert first.key.software == Software("2.13.0+cu130", cudnn="9.28.0")
    assert first.key.conditions == Conditions()
    assert first.key.protocol == 0
    assert (first.status, first.time_ns, first.workspace_bytes) == ("ok", 123460, 1048576)
    assert first.error == 3.1e-4
    assert first.notes == ("TENSOR_CORE", "mode=A", "rank=0", "min_us=120.00", "samples=24")
    assert (second.status, second.time_ns, second.error) == ("screened", 900_000, None)
    assert second.key.problem == Problem(
        "wgrad", 256, 3, 96, (227, 227), (11, 11), (4, 4), dtype="float16", layout="nhwc"
    )
    assert third.key.problem.input_size == (128, 128, 64)
    assert third.key.problem.padding == ((1, 1),) * 3
    assert third.notes[:2] == ("TENSOR_CORE", "WINOGRAD")
    assert third.notes[-1] == "beta1_error=nan"


def test_the_command_fills_a_cache(probe: Path) -> None:
    folder = probe / "cache"
    for _ in range(2):
        assert commands.import_(probe / "timings.csv", folder, [probe / "net.csv"]) == 3
    with caches.open(folder, "r") as cache:
        assert sorted(one.time_ns or 0 for one in cache) == [7_000, 123_460, 900_000]
        assert cache.check().clean


def test_a_gpu_before_tf32_and_a_cudnn_before_nine(probe: Path) -> None:
    (probe / "profile.json").write_text(json.dumps({**PROFILE, "deviceVer": 750}))
    (probe / "answers.json").write_text(json.dumps({"cudnn": 8902, "torch": "2.2"}))
    key = read_probe(probe / "timings.csv", [probe / "net.csv"])[0].measurement.key
    assert (key.device.compute_capability, key.software.cudnn) == ("7.5", "8.9.2")
    assert key.problem.math == "strict"
    (probe / "answers.json").write_text("{}")
    key = read_probe(probe / "timings.csv", [probe / "net.csv"])[0].measurement.key
    assert key.software == Software("")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("timings.csv", "name,op\n", "line 1: a probe's table has the columns dtype"),
        ("timings.csv", "x" * 200_000, "line 1: field larger than"),
        ("timings.csv", None, "cannot read"),
        ("profile.json", "{}", "profile.json lacks 'deviceVer'"),
        ("profile.json", '{"deviceVer": true}', "deviceVer must be of type int, got True"),
        ("profile.json", "[", "not valid JSON"),
        ("profile.json", "[]", "must hold one JSON object"),
        ("answers.json", None, "cannot read"),
    ],
)
def test_a_file_that_is_wrong_is_named(
    name: str, content: str | None, reason: str, probe: Path
) -> None:
    (probe / name).unlink()
    if content is not None:
        (probe / name).write_text(content)
    with pytest.raises(CacheError) as error:
        read_probe(probe / "timings.csv", [probe / "net.csv"])
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("net:down", "net:up", "line 4: layer 'net:up' is in none of the layer tables"),
        ("7.00", "fast", "line 4: could not convert"),
        ("fp16", "fp8", "line 3: dtype must be one of"),
    ],
)
def test_a_line_that_is_wrong_is_named(old: str, new: str, reason: str, probe: Path) -> None:
    path = probe / "timings.csv"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(CacheError) as error:
        read_probe(path, [probe / "net.csv"])
    assert reason in str(error.value)


def test_a_layer_table_that_is_wrong_is_named(probe: Path) -> None:
    (probe / "net.csv").write_text("name,n\n")
    with pytest.raises(ConfigError, match=r"net\.csv"):
        read_probe(probe / "timings.csv", [probe / "net.csv"])
    (probe / "net.csv").write_text(LAYERS.replace("down", "conv1"))
    with pytest.raises(CacheError, match="two layers called conv1"):
        read_probe(probe / "timings.csv", [probe / "net.csv"])
