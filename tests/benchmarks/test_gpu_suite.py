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

from ucudnn.backends._base import DeviceState
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


class Backend:
    """Two algorithms of the CPU as if they were engines."""

    candidate_timeout_s = 60.0

    def __init__(self) -> None:
        self._cpu = TorchCpuBackend()
        cudnn = SimpleNamespace(version=92800)
        self.runtime = SimpleNamespace(configurations=self._configurations, cudnn=cudnn)

    def _configurations(self, _device, _problem):
        return [
            Configuration(name, workspace, "A", rank, ("TENSOR_CORE",))
            for rank, (name, workspace) in enumerate(WORKSPACE_BY_NAME.items())
        ]

    def refusal(self, problem, algorithm):
        return self._cpu.refusal(strict(problem), algorithm)

    def executable(self, problem, algorithm):
        return self._cpu.executable(strict(problem), algorithm)

    def operands(self, problem, samples):
        return self._cpu.operands(strict(problem), samples)

    def workspace_bytes(self, run, _parts):
        run()
        return 3 << 20

    def is_broken(self):
        return False

    def device(self):
        return self._cpu.device()

    def software(self):
        return self._cpu.software()

    def state(self):
        return DeviceState()


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


def test_a_loop_of_one_chunk_is_the_undivided_call(results):
    for row in rows(results / "splits.csv"):
        if row["chunks"] == "1":
            assert row["split_rounds_us"] == row["undivided_rounds_us"]


def test_the_tables_read_the_files(results, script):
    assert len(script("gpu_tables").read_loops(results)) == 12


@pytest.fixture
def started(suite_module, monkeypatch) -> list[list[str]]:
    """Command lines by which the script replaced its process."""
    found = []

    def execv(_program, arguments):
        found.append(arguments)
        raise SystemExit

    monkeypatch.setattr(suite_module.os, "execv", execv)
    return found


def fault(*_):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_faulty_configuration_is_left_out_at_the_next_start(
    suite_module, layers, tmp_path, monkeypatch, started
):
    options = options_of(tmp_path / "other", layers, ops="fprop", parts="tests,timings")
    suite = suite_module.Suite(options)
    monkeypatch.setattr(suite.backend, "is_broken", lambda: True)
    plain = suite.backend.executable

    def faulty(problem, algorithm):
        if algorithm == "im2col_gemm" and problem.batch == 3:
            return SimpleNamespace(write=fault)
        return plain(problem, algorithm)

    monkeypatch.setattr(suite.backend, "executable", faulty)
    with pytest.raises(SystemExit):
        suite_module.time_layers(suite)
    assert started[0][-4:-2] == ["--parts", "timings"]
    again = suite_module.Suite(options)
    assert len(again.faults) == 1
    assert "im2col_gemm" in again.faults[0]
    suite_module.time_layers(again)
    assert len(rows(again.folder / "timings.csv")) == 3
    assert any("illegal memory access" in reason for reason in again.skipped)


@pytest.mark.parametrize("faulty", WORKSPACE_BY_NAME)
def test_a_call_that_fails_costs_its_configuration_and_no_row(
    faulty, suite_module, layers, tmp_path, monkeypatch
):
    """Chunks write into a result that exists; the undivided call that decides makes its own."""
    suite = suite_module.Suite(options_of(tmp_path / "other", layers, ops="fprop"))
    plain = suite.backend.executable

    def executable(problem, algorithm):
        built = plain(problem, algorithm)
        return SimpleNamespace(write=built.write, alone=fault) if algorithm == faulty else built

    monkeypatch.setattr(suite.backend, "executable", executable)
    suite_module.time_layers(suite)
    assert len(rows(suite.folder / "timings.csv")) == 4
    (row,) = rows(suite.folder / "splits.csv")
    assert row["undivided_algorithm"] != faulty
    assert all("run a call" in reason for reason in suite.skipped)


@pytest.mark.parametrize(("name", "lacking"), [("reference", "error"), ("compare_calls", "calls")])
def test_a_fault_beside_the_configurations_costs_what_it_was_for(
    name, lacking, suite_module, layers, tmp_path, monkeypatch, started, script
):
    options = options_of(tmp_path / "other", layers, ops="fprop")
    suite = suite_module.Suite(options)
    with monkeypatch.context() as patch:
        patch.setattr(suite.backend, "is_broken", lambda: True)
        patch.setattr(script("gpu_kernels"), name, fault)
        with pytest.raises(SystemExit):
            suite_module.time_layers(suite)
    again = suite_module.Suite(options)
    suite_module.time_layers(again)
    timings, splits = (rows(again.folder / f"{name}.csv") for name in ("timings", "splits"))
    assert len(timings) == 4
    assert any(row["error"] for row in timings) == (lacking != "error")
    assert len(splits) == (lacking != "calls")
    # what cannot be had is not tried again
    suite_module.time_layers(suite_module.Suite(options))
    assert len(rows(again.folder / "timings.csv")) == 4


def test_what_time_did_not_allow_is_noted_until_it_is_there(suite_module, layers, tmp_path):
    for seconds, missing in ((0.0, {"net fp32": 3}), (60.0, {})):
        suite = suite_module.Suite(options_of(tmp_path / "other", layers, seconds=seconds))
        suite_module.time_layers(suite)
        suite.save_answers()
        answers = json.loads((suite.folder / "answers.json").read_text())
        assert answers["not_reached"] == missing


def test_runs_follow_each_other_in_provenance(suite_module, tmp_path, monkeypatch):
    monkeypatch.setenv("SOURCE_COMMIT", "c0ffee")
    suite = suite_module.Suite(options_of(tmp_path / "new", tmp_path))
    with suite_module.provenance(suite):
        # a process that is replaced leaves what it has noted
        assert "ended" not in suite.load("provenance.json", [])[0]
    with pytest.raises(KeyboardInterrupt), suite_module.provenance(suite):
        raise KeyboardInterrupt
    runs = suite.load("provenance.json", [])
    assert [run["commit"] for run in runs] == ["c0ffee"] * 2
    assert all("ended" in run for run in runs)


def test_tuning_shares_the_time_among_limits(suite_module, layers, tmp_path, monkeypatch):
    asked = []

    def tune_problems(layers, config):
        asked.append((config.workspace_limit >> 20, config.time_budget_s))
        raise suite_module.UcudnnError("not here")

    monkeypatch.setattr(suite_module, "tune_problems", tune_problems)
    options = options_of(tmp_path / "other", layers, limits="8,64,512")
    suite = suite_module.Suite(argparse.Namespace(**vars(options), benchmark=False))
    suite_module.tune_layers(suite)
    assert suite.skipped["tune at 512 MiB: not here"] == 1
    assert [limit for limit, _ in asked] == [64, 8, 512]
    assert [round(seconds) for _, seconds in asked] == [20, 30, 60]
