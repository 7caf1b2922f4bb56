"""What the GPU suite writes is what the tables and the cache read; its loops compute the layer.

Kernels of the CPU stand in for cuDNN's, and its clock for CUDA's events.
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from ucudnn.backends.cudnn.engine import Configuration
from ucudnn.backends.torch_cpu import TorchCpuBackend
from ucudnn.cache.probe import read_probe
from ucudnn.candidate import Candidate

LAYERS = """\
name,n,c,d,h,w,k,kd,kh,kw,pad_d,pad_h,pad_w,stride_d,stride_h,stride_w,dil_d,dil_h,dil_w,groups
conv,6,4,1,9,9,8,1,3,3,0,1,1,1,1,1,1,1,1,1
"""
PROFILE = {
    "deviceName": "NVIDIA H200",
    "deviceVer": 900,
    "multiProcessorCount": 132,
    "totalGlobalMem": 150754820096,
}
WORKSPACE_BY_NAME = {"im2col_gemm": 1 << 20, "slow_conv2d": 0}


class Backend:
    """Two algorithms of the CPU as if they were engines."""

    def __init__(self) -> None:
        self._cpu = TorchCpuBackend()
        cudnn = SimpleNamespace(version=92800)
        self.runtime = SimpleNamespace(configurations=self._configurations, cudnn=cudnn)

    def _configurations(self, _device, _problem):
        return [
            Configuration(name, workspace, "A", rank, ("TENSOR_CORE",))
            for rank, (name, workspace) in enumerate(WORKSPACE_BY_NAME.items())
        ]

    def candidates(self, problem):
        engines = (Candidate(problem, name, size) for name, size in WORKSPACE_BY_NAME.items())
        return Candidate(problem, "torch_default"), *engines

    def executable(self, problem, algorithm):
        return self._cpu.executable(strict(problem), algorithm)

    def operands(self, problem, samples):
        return self._cpu.operands(strict(problem), samples)

    def workspace_bytes(self, run, _parts):
        run()
        return 3 << 20

    def is_broken(self):
        return False


def strict(problem):
    return replace(problem, math="strict")


def elapsed_us(run, count):
    times = []
    for _ in range(count):
        began = time.perf_counter()
        run()
        times.append((time.perf_counter() - began) * 1e6)
    return times


@pytest.fixture
def suite_module(script: Callable[[str], ModuleType], monkeypatch) -> ModuleType:
    module = script("gpu_suite")
    monkeypatch.setattr(module, "elapsed_us", elapsed_us)
    monkeypatch.setattr(module, "captured_us", lambda *_: "")
    monkeypatch.setattr(module, "compare_lists", lambda *_: None)
    monkeypatch.setattr(module, "CudnnBackend", Backend)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    return module


@pytest.fixture
def results(suite_module, tmp_path) -> Path:
    layers = tmp_path / "net.csv"
    layers.write_text(LAYERS)
    options = argparse.Namespace(
        folder=str(tmp_path / "h200"),
        layers=[str(layers)],
        dtypes="fp32,bf16",
        layouts="nchw",
        ops="fprop,dgrad,wgrad",
        limits="0,64",
        min_batch=1,
        seconds=60.0,
        parts="timings",
    )
    for _ in range(2):  # the second time everything is there
        suite = suite_module.Suite(options)
        suite_module.time_layers(suite, None)
        suite.save_answers()
        assert not suite.skipped
    (suite.folder / "profile.json").write_text(json.dumps(PROFILE))
    return suite.folder


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_every_configuration_is_timed_once_at_every_size(results):
    timings = rows(results / "timings.csv")
    keys = [(row["op"], row["dtype"], row["batch"], row["algorithm"]) for row in timings]
    assert len(keys) == len(set(keys)) == 3 * 2 * 2 * 2
    assert {row["batch"] for row in timings} == {"6", "3"}


def test_errors_are_those_of_the_dtype(results):
    for row in rows(results / "timings.csv"):
        checked = row["batch"] == "3"
        assert bool(row["error"]) == checked
        assert bool(row["beta1_error"]) == (checked and row["op"] == "wgrad")
        most = 1e-6 if row["dtype"] == "fp32" else 1e-2
        assert all(float(row[name]) < most for name in ("error", "beta1_error") if row[name])


def test_splits_obey_the_limit(results):
    splits = rows(results / "splits.csv")
    assert len(splits) == 3 * 2 * 2
    for row in splits:
        assert float(row["workspace_mib"]) <= int(row["limit_mib"])
        assert float(row["eager_us"]) > 0
        assert row["torch_benchmark_extra_mib"] == "3.0"


def test_the_tables_and_the_cache_read_the_files(results, script):
    assert len(script("gpu_tables").read_loops(results)) == 12
    entries = read_probe(results / "timings.csv", [results.parent / "net.csv"])
    assert len(entries) == 24
    assert {one.measurement.key.problem.batch for one in entries} == {3, 6}


def test_a_faulty_configuration_is_left_out_at_the_next_start(
    suite_module, results, tmp_path, monkeypatch
):
    folder = tmp_path / "other"
    options = argparse.Namespace(
        folder=str(folder),
        layers=[str(results.parent / "net.csv")],
        dtypes="fp32",
        layouts="nchw",
        ops="fprop",
        limits="64",
        min_batch=1,
        seconds=60.0,
        parts="tests,timings",
    )
    started = []

    def execv(_program, arguments):
        started.append(arguments)
        raise SystemExit

    monkeypatch.setattr(suite_module.os, "execv", execv)
    suite = suite_module.Suite(options)
    monkeypatch.setattr(suite.backend, "is_broken", lambda: True)
    plain = suite.backend.executable

    def fault(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def faulty(problem, algorithm):
        if algorithm == "im2col_gemm" and problem.batch == 3:
            return SimpleNamespace(write=fault)
        return plain(problem, algorithm)

    monkeypatch.setattr(suite.backend, "executable", faulty)
    with pytest.raises(SystemExit):
        suite_module.time_layers(suite, None)
    assert started[0][-4:-2] == ["--parts", "timings"]
    again = suite_module.Suite(options)
    assert len(again.faults) == 1
    assert "im2col_gemm" in again.faults[0]
    suite_module.time_layers(again, None)
    assert len(rows(folder / "timings.csv")) == 3
