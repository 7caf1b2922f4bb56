"""The scan names each cliff and what removes it, and that saves what it says."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from ucudnn.backends import DeviceState
from ucudnn.cli import app
from ucudnn.errors import ConfigError
from ucudnn.execution.execute import bind
from ucudnn.plan import Plan
from ucudnn.problem import Problem
from ucudnn.split import Split, Step
from ucudnn.tuning.cliffs import find_cliffs

MS, MIB = 1_000_000, 1 << 20
FPROP = Problem("fprop", 8, 2, 2, (9, 9), (1, 1))
DGRAD = replace(FPROP, op="dgrad", stride=(2, 2))
LARGE = Problem("fprop", 8, 16, 16, (256, 300), (1, 1))


def cost(ms_per_sample, mib_per_sample=0):
    return lambda size: (int(ms_per_sample * size * MS), int(mib_per_sample * size * MIB))


def only(backend, problem, layers=("a", "b"), **more):
    (found,) = find_cliffs({problem: layers}, backend, **more).found
    return found


def test_nothing_is_on_a_cliff(scripted):
    backend = scripted(torch_default=cost(3), fast=cost(2.5))
    scan = find_cliffs({FPROP: ("a",), DGRAD: ("b",)}, backend)
    assert scan.found == ()
    assert (scan.scanned, scan.total, scan.convolutions_ns) == (2, 2, 48 * MS)
    assert scan.sentences() == [
        "Scanned 2 of 2 convolutions, which take 48.0 ms of a step on scripted, 1 cores: no cliffs."
    ]


def test_load_is_said(scripted, monkeypatch):
    backend = scripted(torch_default=cost(3))
    monkeypatch.setattr(backend, "state", lambda: DeviceState(load=1.5))
    said = find_cliffs({FPROP: ("a",)}, backend).sentences()
    assert said[-1] == "Other processes used the machine: scan again when it is quiet."


def test_a_strided_data_gradient(scripted):
    backend = scripted(torch_default=cost(5, 1), phases=cost(1, 2), other=cost(2))
    found = only(backend, DGRAD)
    assert (found.kind, found.remedy) == ("strided data gradient", "the algorithm phases")
    assert (found.time_ns, found.remedied_ns, found.saved_ns) == (40 * MS, 8 * MS, 64 * MS)
    assert (found.workspace_bytes, found.remedied_bytes) == (8 * MIB, 16 * MIB)
    assert "5.0 times the 8.00 ms in 16 MiB with the algorithm phases" in str(found)
    assert only(backend, replace(DGRAD, stride=(1, 1))).kind == "slow kernel"


def test_a_switch_of_heuristics(scripted):
    backend = scripted(torch_default=lambda size: (size * MS * (4 if size > 4 else 1), 0))
    backend.kernels = {("torch_default", 8): "slow_kernel"}
    found = only(backend, FPROP)
    assert found.kind == "heuristics switch"
    assert found.remedy == "the split 2x4 torch_default"
    assert found.saved_ns == 2 * 24 * MS


def test_a_split_below_the_allocators_threshold(scripted):
    backend = scripted(torch_default=lambda size: (size * MS * (3 if size > 2 else 1), 0))
    found = only(backend, LARGE)
    assert found.kind == "allocator threshold"
    assert found.remedy == "the split 4x2 torch_default"


def test_a_malloc_that_keeps_blocks(scripted):
    backend = scripted(torch_default=cost(3))

    def keep():
        backend.costs["torch_default"] = cost(1)
        return True

    found = only(backend, LARGE, keep_blocks=keep)
    assert found.kind == "allocator threshold"
    assert found.remedy.startswith("GLIBC_TUNABLES=")
    assert found.saved_ns == 2 * 16 * MS
    backend.costs["torch_default"] = cost(3)
    # small blocks stay in any case, and some mallocs have no such setting
    assert find_cliffs({FPROP: ("a",)}, backend, keep).found == ()
    backend.costs["torch_default"] = cost(3)
    assert find_cliffs({LARGE: ("a",)}, backend, lambda: False).found == ()


@pytest.mark.parametrize(
    ("field", "value", "other", "kind", "remedy"),
    [
        ("layout", "nchw", "nhwc", "layout copy", "channels_last"),
        ("dtype", "bfloat16", "float32", "dtype", "float32"),
    ],
)
def test_layout_and_dtype(scripted, monkeypatch, field, value, other, kind, remedy):
    backend = scripted(torch_default=cost(3))
    build = backend.executable

    def executable(problem, algorithm):
        backend.costs["torch_default"] = cost(1 if getattr(problem, field) == other else 3)
        return build(problem, algorithm)

    def elapsed(run):
        backend.costs["torch_default"] = cost(1 if getattr(run.func.problem, field) == other else 3)
        before = backend.clock
        run()
        return backend.clock - before

    monkeypatch.setattr(backend, "executable", executable)
    monkeypatch.setattr(backend, "elapsed_ns", elapsed)
    found = only(backend, replace(FPROP, **{field: value}))
    assert (found.kind, found.remedy) == (kind, remedy)
    assert found.remedied_ns == 8 * MS


def test_more_elements_than_32_bits_count(scripted, monkeypatch):
    monkeypatch.setattr("ucudnn.tuning.cliffs._MOST_ELEMENTS", 8 * 2 * 81 - 1)
    backend = scripted(torch_default=cost(3), fast=cost(1))
    assert only(backend, FPROP).kind == "2^31 elements"


def test_what_is_proposed_saves_what_was_promised(scripted):
    """Running the remedy of each cliff takes the time that the scan says."""
    backend = scripted(
        torch_default=lambda size: (size * MS * (4 if size > 2 else 1), 0), fast=cost(1.5)
    )
    found = only(backend, FPROP)
    assert found.remedy == "the split 4x2 torch_default"
    split = Split("batch", (Step(2, "torch_default"),) * 4)
    call = bind(backend, FPROP, split)
    assert backend.elapsed_ns(lambda: call(*backend.operands(FPROP, 8))) == found.remedied_ns


def test_the_plan_of_a_scan_applies_what_it_proposes(scripted, tmp_path):
    backend = scripted(
        torch_default=lambda size: (size * MS * (4 if size > 2 else 1), size * MIB), phases=cost(6)
    )
    wide = replace(FPROP, out_channels=3)
    backend.charged = lambda name, part: (
        (8 * MS, 0) if part.out_channels == 3 else backend.costs[name](part.batch)
    )
    scan = find_cliffs({FPROP: ("a", "b"), wide: ("c",)}, backend)
    (cliff,) = scan.found
    assert cliff.split == Split("batch", (Step(2, "torch_default"),) * 4)
    scan.plan.save(tmp_path / "cliffs.plan.json")
    plan = Plan.load(tmp_path / "cliffs.plan.json")
    assert plan.split(FPROP) == cliff.split
    # what is on no cliff, and smaller batches, which were not timed
    for other in (wide, FPROP.with_batch(7), FPROP.with_batch(2)):
        assert plan.split(other).is_default
    (kernel,) = (one for one in plan.kernels if one.problem == FPROP)
    assert (kernel.timing.time_ns, kernel.default.time_ns) == (8 * MS, 32 * MS)
    assert any("ucudnn run --plan cliffs.plan.json -- SCRIPT" in one for one in scan.sentences())
    document = json.loads(json.dumps(scan.to_dict()))
    assert "plan" not in document
    assert document["found"][0]["split"]["steps"][0] == {"size": 2, "algorithm": "torch_default"}


def test_each_kind_of_remedy_says_how_it_is_applied(scripted):
    backend = scripted(torch_default=cost(3))

    def keep():
        backend.costs["torch_default"] = cost(1)
        return True

    scan = find_cliffs({LARGE: ("a",)}, backend, keep)
    assert any(one.startswith("Apply: GLIBC_TUNABLES=") for one in scan.sentences())
    assert scan.plan.split(LARGE).is_default


def test_what_fails_is_no_remedy(scripted):
    backend = scripted(torch_default=cost(3), broken=lambda _: (None, 0))
    assert find_cliffs({FPROP: ("a",)}, backend).found == ()
    backend.costs = {"torch_default": lambda _: (None, 0)}
    assert find_cliffs({FPROP: ("a",)}, backend).scanned == 0


@pytest.mark.slow
def test_the_command(tmp_path, monkeypatch):
    # it must not change the malloc of the tests
    monkeypatch.setattr("ucudnn.tuning.cliffs.large_blocks_stay", lambda: False)
    (tmp_path / "tiny.py").write_text("from torch import nn\ndef make(): return nn.Conv2d(3, 4, 3)")
    command = ["doctor", "--cliffs", f"{tmp_path}/tiny.py:make", "--input", "2x3x9x9"]
    said = CliRunner().invoke(app, command)
    assert said.exit_code == 0, said.output
    assert "Scanned 2 of 2 convolutions" in said.output
    output = tmp_path / "cliffs.plan.json"
    document = json.loads(
        CliRunner().invoke(app, [*command, "--json", "--output", str(output)]).stdout
    )
    assert len(Plan.load(output).kernels) == 2
    alone = CliRunner().invoke(app, ["doctor", "--output", str(output)])
    assert isinstance(alone.exception, ConfigError)
    assert "which is not given" in str(alone.exception)
    assert document["scanned"] == 2
