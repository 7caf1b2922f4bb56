"""The tables say what was computed by hand from three small layers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

SPLITS = """\
name,op,dtype,layout,batch,limit_mib,axis,chunk,chunks,workspace_mib,predicted_us,captured_us,\
host_us_per_chunk,split_rounds_us,undivided_rounds_us,default_rounds_us,benchmark_rounds_us,\
default_extra_mib,benchmark_extra_mib
t:a,fprop,fp32,nchw,8,64,batch,2,4,49.0,160,160,4,200 200 200,800 800 800,400 400 9,100 100 100,\
10.0,196.0
t:b,fprop,fp32,nchw,8,64,batch,8,1,20.0,100,100,9,100 90 110,100 90 110,100 100 100,100 90 110,\
10.0,20.0
t:c,fprop,fp32,nchw,8,64,spatial,4,2,40.0,,,8,100 100 100,50 50 50,100 100 100,100 99 101,10.0,40.0
t:d,fprop,fp32,nchw,8,64,batch,1,8,60.0,80,50,5,100 100 100,,300 300 300,100 100 100,10.0,90.0
t:a,fprop,fp32,nchw,8,8,batch,1,8,6.0,320,320,6,400 400 400,800 800 800,400 400 400,100 100 100,\
10.0,196.0
"""
TIMINGS = """\
name,op,dtype,layout,batch,algorithm,workspace_bytes,mode,rank,notes,median_us,min_us,samples,\
error,beta1_error,host_us
t:a,fprop,fp32,nchw,8,eng67,205520896,A,0,TENSOR_CORE,250,249,9,,,40
t:a,fprop,fp32,nchw,8,eng0,0,B,1,,8,7,9,,,20
t:a,fprop,fp32,nchw,8,eng0,0,B,1,,800,790,9,,,30
t:a,fprop,fp32,nchw,2,eng67,51380224,A,0,TENSOR_CORE,40,39,9,3e-4,,50
t:c,fprop,fp32,nchw,8,eng67,41943040,A,0,TENSOR_CORE,50,50,9,,,
t:a,wgrad,fp32,nchw,4,eng1,0,A,0,,10,10,9,1e-6,2e-6,
t:a,wgrad,fp32,nchw,4,eng2,0,A,0,,10,10,9,3e-6,CUDNN_STATUS_NOT_SUPPORTED,
"""
ANSWERS = {
    "cudnn": 92800,
    "gpu": "NVIDIA H200",
    "not_reached": {"t fp32": 3},
    "lists_by_handle_equal_by_profile": [14, 15],
    "skipped": {"plan NOT_SUPPORTED": 7},
}


@pytest.fixture
def tables(
    script: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., dict[str, list[list[str]]]]:
    """A function that runs the script and returns the cells of each table by its title."""
    (tmp_path / "splits.csv").write_text(SPLITS)
    (tmp_path / "timings.csv").write_text(TIMINGS)
    (tmp_path / "answers.json").write_text(json.dumps(ANSWERS))

    def run(*arguments: str) -> dict[str, list[list[str]]]:
        script("gpu_tables").main([str(tmp_path), *arguments])
        parts = re.split(r"^### ", capsys.readouterr().out, flags=re.M)[1:]
        return {
            part.partition("\n")[0]: [
                [cell.strip() for cell in line.strip("|").split("|")]
                for line in part.splitlines()
                if line.startswith("|") and not line.startswith("|---")
            ][1:]
            for part in parts
        }

    return run


def test_gains_over_each_baseline(tables):
    found = tables()
    over_a = found["Gain over (a) best undivided configuration within the same limit"]
    # limit 8: one layer, 800/400; limit 64: 4, 1 and 0.5, and one with nothing undivided
    assert over_a[0][3:] == ["8", "1", "1", "2.00x", "2.00x t:a", "2.00x t:a", "100 %", "0 %", ""]
    assert over_a[1][3:6] == ["64", "4", "3"]
    assert over_a[1][6:] == ["1.26x", "4.00x t:a", "0.50x t:c", "33 %", "33 %", "1"]
    over_b = found["Gain over (b) torch's default, whatever workspace it takes"]
    # 2, 1, 1 and 3: the fourth root of 6; one round of a's says otherwise, which decides nothing
    assert over_b[1][6:] == ["1.57x", "3.00x t:d", "1.00x t:b", "25 %", "0 %", "10", "44"]
    over_c = found["Gain over (c) cudnn.benchmark, whatever workspace it takes"]
    # 0.5, 1, 1 and 1; memory: medians of 196, 20, 40, 90 and of 49, 20, 40, 60
    assert over_c[1][6:] == ["0.84x", "1.00x t:b", "0.50x t:a", "0 %", "25 %", "65", "44"]


def test_divided_against_any_workspace(tables):
    found = tables()["Divided loops over the fastest undivided kernel of any workspace"]
    # a: 250 over its faster limit's 200; c: 50 over 100; geo-mean: root of 1.25 * 0.5
    assert found == [
        [
            "fp32",
            "nchw",
            "fprop",
            "2",
            "0.79x",
            "1.25x t:a",
            "0.50x t:c",
            *["50 %"] * 2,
            "118",
            "44",
        ]
    ]


def test_loops_against_predictions_capture_and_host(tables):
    found = tables()
    # chunks: a 4 and 8, b 1, c 2, d 8
    assert found["Measured over predicted time of a loop"] == [
        ["1", "1", "1.00", "1.00", "1.00"],
        ["2 to 4", "1", "1.25", "1.25", "1.25"],
        ["5 to 16", "2", "1.25", "1.25", "1.25"],
    ]
    assert found["Eager over captured time of a loop"] == [
        ["1", "1", "1.00", "1.00", "1.00", "0"],
        ["2 to 4", "2", "1.25", "1.25", "1.25", "1"],
        ["5 to 16", "2", "1.25", "1.25", "2.00", "0"],
    ]
    # divided: host 4, 8, 5, 6; time per chunk 50, 50, 12.5, 50: the first alone is 10x
    assert found["Host time per chunk"] == [["fp32 nchw", "4", "4.0", "5.0", "8.0", "25 %"]]
    # of each engine the last row: 40, 30, 50 of the host beside 250, 800, 40 of the device
    assert found["Host time to launch one engine"] == [
        ["fp32", "nchw", "3", "30.0", "40.0", "50.0", "33 %"]
    ]
