"""The scan names each cliff and what removes it, and that saves what it says."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from ucudnn.backends import DeviceState, open_backend
from ucudnn.cli import app
from ucudnn.cli.targets import Recipe
from ucudnn.cli.timed_steps import times_in_processes
from ucudnn.config import Config
from ucudnn.errors import ConfigError
from ucudnn.execution.execute import bind
from ucudnn.plan import Plan
from ucudnn.problem import Problem
from ucudnn.races import StepTimes
from ucudnn.split import Split, Step
from ucudnn.tracing import trace_layers
from ucudnn.tuning.cliffs import find_cliffs
from ucudnn.tuning.cliffs.step_times import Setting, TimedStep, interleaved
from ucudnn.tuning.tuner import layers_by_problem

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
    monkeypatch.setattr("ucudnn.tuning.cliffs.scan._MOST_ELEMENTS", 8 * 2 * 81 - 1)
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
    (said,) = (one for one in scan.sentences() if one.startswith("Apply GLIBC_TUNABLES="))
    assert said.endswith(" python SCRIPT: a step takes 16.0 ms less.")
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
    assert document["steps_ns"]["torch"] > 0
    assert document["failures"] == {}
    alone = CliRunner().invoke(app, ["doctor", "--output", str(output)])
    assert isinstance(alone.exception, ConfigError)
    assert "which is not given" in str(alone.exception)
    assert document["scanned"] == 2


class WrittenSteps:
    """Steps whose times in each setting are written by the test; in others the step fails."""

    def __init__(self, step_ms, **kernels_ms):
        self.step_ms, self.kernels_ms = step_ms, kernels_ms
        self.asked = {}

    def __call__(self, settings):
        self.asked = settings
        return {name: self.times(self.kernels_ms.get(name)) for name in settings}

    def times(self, kernels_ms):
        if kernels_ms is None:
            return "no memory"
        # in other layouts and by other kernels the step takes less
        step_ms = self.step_ms - (kernels_ms is not self.kernels_ms["torch"])
        return StepTimes(step_ms * MS, {p: ms * MS for p, ms in kernels_ms.items()})


def test_steps_decide(scripted):
    """Times of kernels alone are those of no step: what is promised is what a step saves."""
    backend = scripted(torch_default=cost(3), fast=cost(1))
    wide = replace(FPROP, out_channels=3)
    layers = {FPROP: ("a", "b"), wide: ("c",)}
    steps = WrittenSteps(1000, torch={FPROP: 100, wide: 20}, splits={FPROP: 40, wide: 19})
    scan = find_cliffs(layers, backend, time_steps=steps)
    (cliff,) = scan.found
    # of two calls together
    assert (cliff.time_ns, cliff.remedied_ns, cliff.saved_ns) == (50 * MS, 20 * MS, 60 * MS)
    assert scan.convolutions_ns == 120 * MS
    # what the step does not gain from is no cliff, and is left to torch
    assert scan.plan.split(wide).is_default
    assert not scan.plan.split(FPROP).is_default
    # both were proposed to the step
    assert not any(steps.asked["splits"].plan.split(problem).is_default for problem in layers)
    assert scan.sentences()[-1] == (
        "Times are of calls in whole steps, which take 1.00 s (torch), 999 ms (splits)."
    )
    assert scan.to_dict()["saved_ns"] == {"splits": 60 * MS}
    assert any(one.endswith(": their kernels take 60.0 ms less.") for one in scan.sentences())
    # a plan has times of kernels alone
    (kernel,) = (one for one in scan.plan.kernels if one.problem == FPROP)
    assert (kernel.timing.time_ns, kernel.default.time_ns) == (8 * MS, 24 * MS)


def test_what_saves_too_little_of_a_step_is_not_listed(scripted):
    backend = scripted(torch_default=cost(3), fast=cost(1))
    steps = WrittenSteps(2501, torch={FPROP: 8}, splits={FPROP: 3})
    scan = find_cliffs({FPROP: ("a",)}, backend, time_steps=steps)
    assert (scan.found, scan.unlisted) == ((), 1)
    assert scan.sentences()[-1] == "1 more cliff would save less than 0.2 % of a step each."
    steps = WrittenSteps(2500, torch={FPROP: 8}, splits={FPROP: 3})
    assert len(find_cliffs({FPROP: ("a",)}, backend, time_steps=steps).found) == 1


def test_steps_where_malloc_keeps_blocks(scripted, monkeypatch):
    backend = scripted(torch_default=cost(3))
    steps = WrittenSteps(1000, torch={LARGE: 90}, malloc={LARGE: 30})
    monkeypatch.setattr("ucudnn.tuning.cliffs.search.describe_allocator", lambda: "glibc")
    # a process of its own has the setting
    keep = pytest.fail
    (cliff,) = find_cliffs({LARGE: ("a",)}, backend, keep, time_steps=steps).found
    assert (cliff.kind, cliff.saved_ns) == ("allocator threshold", 60 * MS)
    assert steps.asked["malloc"].keeps_blocks
    # malloc changes more of a step than this kernel: the step says what that saves
    scan = find_cliffs({LARGE: ("a",)}, backend, time_steps=steps)
    assert scan.to_dict()["saved_ns"] == {"malloc": MS}
    monkeypatch.setattr("ucudnn.tuning.cliffs.search.describe_allocator", lambda: "other")
    assert find_cliffs({LARGE: ("a",)}, backend, time_steps=steps).found == ()
    assert "malloc" not in steps.asked


def test_steps_in_another_layout(scripted):
    backend = scripted(torch_default=cost(3))
    backend.charged = lambda name, part: (
        (MS, 0) if part.layout == "nhwc" else backend.costs[name](part.batch)
    )
    last = replace(FPROP, layout="nhwc")

    def found(channels_last, step_ms=1000):
        steps = WrittenSteps(step_ms, torch={FPROP: 90})
        steps.kernels_ms |= {} if channels_last is None else {"channels_last": channels_last}
        return find_cliffs({FPROP: ("a", "b")}, backend, time_steps=steps)

    (cliff,) = found({last: 30}).found
    assert (cliff.remedy, cliff.saved_ns) == ("channels_last", 60 * MS)
    # one of two calls stays in the layout that it had
    (cliff,) = found({last: 10, FPROP: 40}).found
    assert cliff.saved_ns == 40 * MS
    assert found({last: 15, FPROP: 50}).found == ()
    # it is another kernel there
    assert found({}).found == ()
    # the step fails in that layout
    scan = found(None)
    assert scan.found == ()
    assert scan.sentences()[-1] == "The step fails (channels_last): no memory."


def test_a_layout_in_which_the_step_is_slower_is_not_proposed(scripted):
    backend = scripted(torch_default=cost(3))
    backend.charged = lambda name, part: (
        (MS, 0) if part.layout == "nhwc" else backend.costs[name](part.batch)
    )
    last = replace(FPROP, layout="nhwc")
    for step_ms, is_proposed in ((1000, False), (999, True)):
        times = {
            "torch": StepTimes(1000 * MS, {FPROP: 90 * MS}),
            "channels_last": StepTimes(step_ms * MS, {last: 30 * MS}),
        }
        scan = find_cliffs({FPROP: ("a",)}, backend, time_steps=lambda _, times=times: times)
        assert bool(scan.found) == is_proposed


def test_where_the_step_fails_the_scan_stands(scripted):
    backend = scripted(torch_default=cost(3), fast=cost(1))
    scan = find_cliffs({FPROP: ("a",)}, backend, time_steps=lambda names: dict.fromkeys(names, "x"))
    assert scan.found[0].saved_ns == 16 * MS
    assert scan.sentences()[-3:] == [
        "No step was timed: a kernel may take another time there than alone.",
        "The step fails (torch): x.",
        "The step fails (splits): x.",
    ]


def test_a_step_is_timed_and_the_model_stays_as_it_was(stateful_model):
    x = torch.randn(4, 3, 8, 8)
    before = {name: value.clone() for name, value in stateful_model.state_dict().items()}
    random = torch.get_rng_state()
    layers = layers_by_problem(trace_layers(stateful_model, x).layers, Config())
    backend = open_backend("auto")
    settings = {"torch": Setting(), "last": Setting("channels_last")}
    times = interleaved(
        {name: TimedStep(stateful_model, x, backend, True, one) for name, one in settings.items()}
    )
    assert set(times["torch"].kernels_ns) == set(layers)
    assert 0 < sum(times["torch"].kernels_ns.values()) < times["torch"].step_ns
    assert all(problem.layout == "nhwc" for problem in times["last"].kernels_ns)
    for name, value in stateful_model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(parameter.grad is None for parameter in stateful_model.parameters())
    assert torch.equal(torch.get_rng_state(), random)


def test_a_setting_that_fails_later_is_left_out_then():
    rounds = iter([StepTimes(1, {FPROP: 5}), StepTimes(2, {FPROP: 7})])

    def step():
        found = next(rounds, None)
        if found is None:
            raise RuntimeError("out of memory\nat length")
        return found

    taken = iter(range(100, 200))
    times = interleaved({"a": lambda: StepTimes(next(taken), {}), "b": step})
    # the first step does not count
    assert times == {"a": StepTimes(108, {}), "b": "out of memory"}


MODELS = """
import os, sys
from torch import nn

print("a model may print")

class Viewed(nn.Conv2d):
    def forward(self, x):
        print("as often as it likes")
        tunables = "glibc.malloc.mmap_threshold" in os.environ.get("GLIBC_TUNABLES", "")
        if tunables:
            x = nn.functional.pad(x, (1, 1))
        y = super().forward(x)
        return y.view(-1) if y.is_contiguous() else sys.exit("ended")

def viewed():
    return Viewed(3, 4, 3)
"""


@pytest.mark.process
def test_steps_in_processes(tmp_path):
    """Each setting is that of a process; one whose step fails, or that ends, is left out."""
    (tmp_path / "viewed.py").write_text(MODELS)
    recipe = Recipe(f"{tmp_path}/viewed.py:viewed", ("2x3x9x9",))
    problem = Problem("fprop", 2, 3, 4, (9, 9), (3, 3))
    settings = {
        "torch": Setting(),
        "malloc": Setting(keeps_blocks=True),
        "last": Setting("channels_last"),
    }
    times = times_in_processes(recipe, "auto", settings)
    assert times["last"] == "the process has ended"
    # the gradient of an input is asked of no first layer
    assert set(times["torch"].kernels_ns) == {problem, replace(problem, op="wgrad")}
    wide = replace(problem, input_size=(9, 11))
    assert set(times["malloc"].kernels_ns) == {wide, replace(wide, op="wgrad")}
    inference = times_in_processes(recipe._replace(infer=True), "auto", {"torch": Setting()})
    assert set(inference["torch"].kernels_ns) == {problem}
