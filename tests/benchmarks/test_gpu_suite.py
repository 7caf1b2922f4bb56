"""The tables and the cache read what the GPU suite writes; its loops compute the layer.

Kernels of the CPU stand in for cuDNN's, and its clock for CUDA's events.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from ucudnn.backends.cudnn.engine import Configuration
from ucudnn.backends.torch_cpu.backend import TorchCpuBackend

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


class Backend(TorchCpuBackend):
    """Two algorithms of the CPU as if they were engines."""

    def __init__(self) -> None:
        cudnn = SimpleNamespace(version=92800)
        self.runtime = SimpleNamespace(configurations=self._configurations, cudnn=cudnn)

    def _configurations(self, _device, _problem):
        return [
            Configuration(name, workspace, "A", rank, ("TENSOR_CORE",))
            for rank, (name, workspace) in enumerate(WORKSPACE_BY_NAME.items())
        ]

    def refusal(self, problem, algorithm):
        return super().refusal(strict(problem), algorithm)

    def executable(self, problem, algorithm):
        return super().executable(strict(problem), algorithm)

    def operands(self, problem, samples):
        return super().operands(strict(problem), samples)

    def workspace_bytes(self, run, _parts):
        run()
        return 3 << 20


def strict(problem):
    return replace(problem, math="strict")


def elapsed_us(run, count, ahead_us=0.0):
    del ahead_us
    times = []
    for _ in range(count):
        began = time.perf_counter()
        run()
        times.append((time.perf_counter() - began) * 1e6)
    return times


@pytest.fixture
def suite_module(script: Callable[[str], ModuleType], monkeypatch) -> ModuleType:
    module, kernels = script("gpu_suite"), script("gpu_kernels")
    monkeypatch.setattr(kernels, "elapsed_us", elapsed_us)
    monkeypatch.setattr(kernels, "captured_us", lambda *_: "")
    monkeypatch.setattr(module, "read_profile", lambda *_: None)
    monkeypatch.setattr(module, "compare_lists", lambda *_: None)
    monkeypatch.setattr(module, "CudnnBackend", Backend)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    return module


def options_of(folder: Path, layers: Path, **more: object) -> argparse.Namespace:
    fields = {"dtypes": "fp32", "layouts": "nchw", "ops": "fprop,dgrad,wgrad", "limits": "64"}
    fields |= {"min_batch": 1, "seconds": 60.0, "parts": "timings", **more}
    return argparse.Namespace(folder=str(folder), layers=[str(layers)], **fields)


@pytest.fixture
def layers(tmp_path) -> Path:
    path = tmp_path / "net.csv"
    path.write_text(LAYERS)
    return path


@pytest.fixture
def results(suite_module, layers, tmp_path) -> Path:
    options = options_of(tmp_path / "h200", layers, dtypes="fp32,bf16", limits="0,64")
    for _ in range(2):  # the second time everything is there
        suite = suite_module.Suite(options)
        suite_module.time_layers(suite)
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
        for name in ("split", "undivided", "default", "benchmark"):
            assert len(row[f"{name}_rounds_us"].split()) == 7
        assert row["default_extra_mib"] == row["benchmark_extra_mib"] == "3.0"
        # slabs are tried where 6 samples leave little to divide
        chunks = {"batch": 6, "spatial": 9}[row["axis"]] / int(row["chunk"])
        assert int(row["chunks"]) == math.ceil(chunks)


def test_the_tables_read_the_files(results, script):
    assert len(script("gpu_tables").read_loops(results)) == 12
