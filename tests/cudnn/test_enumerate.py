"""`ucudnn enumerate` by real cuDNN, and what bad input is told."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
H200 = ROOT / "benchmarks" / "devices" / "h200.json"
HEADER = (
    "name,n,c,d,h,w,k,kd,kh,kw,pad_d,pad_h,pad_w,stride_d,stride_h,stride_w,"
    "dil_d,dil_h,dil_w,groups"
)
CONV2 = "256,64,1,27,27,192,1,5,5,0,2,2,1,1,1,1,1,1,1"
COLUMNS = "name,op,dtype,layout,batch,algorithm,workspace_bytes,mode,rank,notes"
MIB = 1 << 20
Enumerate = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Two layers that are alike."""
    path = tmp_path / "layers.csv"
    path.write_text(f"{HEADER}\nconv2,{CONV2}\nconv2b,{CONV2}\n")
    return path


@pytest.fixture
def enumerate_(stub_cache: Path, table: Path, tmp_path: Path) -> Enumerate:
    """Run the command on two layers, with a cuDNN on the path or none."""

    def run(*options: object, library: Path | None = None, profile: Path = H200):
        command = [sys.executable, "-m", "ucudnn", "enumerate", table]
        return subprocess.run(
            [*map(str, (*command, "--device-profile", profile, *options))],
            capture_output=True,
            check=False,
            cwd=tmp_path,
            env=environment(stub_cache, library),
            text=True,
        )

    return run


def environment(cache: Path, library: Path | None) -> dict[str, str]:
    """Variables for a process with its own cache, in which a cuDNN is installed or none."""
    paths = [os.environ.get("PYTHONPATH", ""), str(library.parents[3]) if library else ""]
    return {
        **os.environ,
        "XDG_CACHE_HOME": str(cache),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_the_table_is_complete_and_alike_layers_have_rows_each(enumerate_, library, tmp_path):
    output = tmp_path / "candidates.csv"
    done = enumerate_("-o", output, "--json", library=library)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    listed = rows(output)
    assert output.read_text().splitlines()[0] == COLUMNS
    assert said["library"] == str(library)
    assert said["device"] == "NVIDIA H200"
    assert said["problems"] == 27
    assert said["rows"] == len(listed) == 2 * said["candidates"]
    names = {tuple(row[name] for name in COLUMNS.split(",")[:6]) for row in listed}
    assert len(names) == len(listed)
    assert {row["op"] for row in listed} == {"fprop", "dgrad", "wgrad"}
    assert {int(row["batch"]) for row in listed} == {1 << power for power in range(9)}
    assert {row["mode"] for row in listed} == {"A", "B", "FALLBACK"}
    assert {"", "TENSOR_CORE", "NONDETERMINISTIC"} <= {row["notes"] for row in listed}
    of_one = [row for row in listed if (row["name"], row["op"]) == ("conv2b", "dgrad")]
    ranks = [int(row["rank"]) for row in of_one if row["batch"] == "32"]
    assert ranks == list(range(len(ranks)))


def test_options_choose_ops_dtype_layout_and_math(enumerate_, library, tmp_path):
    output = tmp_path / "some.csv"
    options = "--ops dgrad --dtype float16 --memory-format nhwc"
    done = enumerate_("-o", output, *options.split(), library=library)
    assert done.returncode == 0, done.stderr
    assert "distinct candidates of 9 problems on NVIDIA H200, by cuDNN 9." in done.stdout
    keys = {(row["op"], row["dtype"], row["layout"], row["batch"]) for row in rows(output)}
    assert keys == {("dgrad", "float16", "nhwc", str(1 << power)) for power in range(9)}
    strict = ("--math", "strict", "--ops", "wgrad")
    assert enumerate_("-o", output, *strict, library=library).returncode == 0
    assert rows(output)
    assert not any("TENSOR_CORE" in row["notes"] for row in rows(output))


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--ops", "sideways", "ops must name some of fprop, dgrad, wgrad"),
        ("--dtype", "int8", "dtype must be one of"),
        ("--math", "fast", "math must be one of strict, tf32"),
        ("-o", "no/such/folder.csv", "a file in a folder that exists"),
    ],
)
def test_bad_input_is_a_sentence_and_leaves_no_file(enumerate_, tmp_path, option, value, said):
    before = set(tmp_path.iterdir())
    done = enumerate_("-o", "new.csv", option, value)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert set(tmp_path.iterdir()) == before


def test_the_example_in_the_document_runs(library, stub_cache):
    (code,) = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "docs/cudnn.md").read_text(), re.M | re.S
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        check=False,
        cwd=ROOT,
        env=environment(stub_cache, library),
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"(eng\d+\w*[=\w-]* \d+ \(.*\)\n){3}", done.stdout)


def test_doctor_names_cudnn_and_saves_no_profile_where_there_is_no_gpu(tmp_path):
    command = [sys.executable, "-m", "ucudnn", "doctor", "--save-device-profile", "gpu.json"]
    done = subprocess.run(command, capture_output=True, check=False, cwd=tmp_path, text=True)
    if done.returncode == 0:
        assert json.loads((tmp_path / "gpu.json").read_text())["deviceName"]
        return
    assert done.returncode == 3
    assert "device profile" in done.stderr
    assert not (tmp_path / "gpu.json").exists()
