"""Compiled models: their plan is judged by compiled steps, and nothing of theirs changes."""

from __future__ import annotations

import copy
import random
import shutil
from dataclasses import replace

import pytest
import torch
from torch import nn

import ucudnn
from ucudnn.config import Config
from ucudnn.errors import ConfigError, UcudnnWarning
from ucudnn.execution import override
from ucudnn.reports.text import plan_verdict
from ucudnn.steps.compiled import compile_steps
from ucudnn.steps.judge import Judge
from ucudnn.steps.race import StepMeter
from ucudnn.steps.run import Steps

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ucudnn.errors.UntunedWarning"),
    pytest.mark.filterwarnings("ignore::ucudnn.errors.NoiseWarning"),
    # Dynamo looks at the gradients of what it is called with.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
# Inductor uses what torch itself calls deprecated.
inductor = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
SHAPE = (4, 3, 12, 12)
LAST = torch.channels_last
SETTINGS = {"policy": "undivided", "effort": "quick"}
# Calls of `Net.forward` that Dynamo did not compile.
uncompiled_calls: list[int] = []


class Net(nn.Module):
    """Two convolutions with batch norm and dropout between them.

    Args:
        breaks: the graph breaks in the middle.
    """

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)
        self.breaks = breaks

    def forward(self, x):
        if not torch.compiler.is_compiling():
            uncompiled_calls.append(1)
        x = nn.functional.dropout(self.norm(self.one(x)).relu(), 0.1, self.training)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.two(x)


class Counting:
    """A backend that runs graphs as they are; it counts those it was given, and their runs."""

    def __init__(self) -> None:
        self.compiled = 0
        # of each run: True if its filters are in channels_last
        self.runs: list[bool] = []

    def __call__(self, graph, inputs):
        del inputs
        self.compiled += 1

        def run(*tensors):
            self.runs.append(any(map(is_last, tensors)))
            return graph.forward(*tensors)

        return run


def is_last(tensor):
    # sizes that vary are inputs of a graph, too
    return isinstance(tensor, nn.Parameter) and not tensor.is_contiguous()


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    uncompiled_calls.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def wrapped(model, backend):
    return torch.compile(model, backend=backend)


def in_place(model, backend):
    model.compile(backend=backend)
    return model


def in_parts(model, backend):
    model.one, model.two = (torch.compile(m, backend=backend) for m in (model.one, model.two))
    return model


@pytest.fixture
def metered(monkeypatch):
    """Of every step that judges a plan: how many graphs were compiled, were run, and were not."""
    counts = []

    def watched(backend):
        for name in ("times", "peak_bytes"):
            original = getattr(StepMeter, name)

            def spy(self, step, plan, original=original):
                before = backend.compiled, len(backend.runs), len(uncompiled_calls)
                found = original(self, step, plan)
                after = backend.compiled, len(backend.runs), len(uncompiled_calls)
                counts.append(tuple(b - a for a, b in zip(before, after, strict=True)))
                return found

            monkeypatch.setattr(StepMeter, name, spy)
        return counts

    return watched


KINDS = {
    # graphs of a step; calls of `Net.forward` itself
    "wrapped": (wrapped, False, 1, 0),
    "wrapped, with a break": (wrapped, True, 2, 0),
    "in place": (in_place, False, 1, 0),
    "in parts": (in_parts, False, 2, 1),
}
# Models of these kinds are tuned on each push.
JUDGED = [
    pytest.param("wrapped", marks=pytest.mark.nightly),
    "wrapped, with a break",
    pytest.param("in place", marks=pytest.mark.nightly),
    "in parts",
]


@pytest.mark.parametrize("kind", JUDGED)
def test_every_step_that_judges_is_compiled_beforehand(kind, metered):
    made, breaks, graphs, calls = KINDS[kind]
    backend = Counting()
    counts = metered(backend)
    plan = ucudnn.tune(
        made(Net(breaks), backend), torch.randn(SHAPE), Config(layout="auto", **SETTINGS)
    )
    assert plan.compilation.is_compiled
    assert plan.layout_race.rounds >= 3, plan.layout_race
    # In channels_last a hook converts the inputs, which may be a graph of its own.
    assert {(0, graphs, calls)} <= set(counts) <= {(0, graphs, calls), (0, graphs + 1, calls)}
    assert set(backend.runs) == {False, True}
    assert "The steps that judged it were compiled by torch.compile" in plan_verdict(plan)[-2]


def test_a_plan_acts_in_compiled_steps(plan_by_hand, computed, metered):
    model, x, backend = Net(), torch.randn(SHAPE), Counting()
    counts = metered(backend)
    plan = plan_by_hand(model, x)
    found = Judge(torch.compile(model, backend=backend), x, Config(**SETTINGS)).judge(plan)
    assert found.compilation.is_compiled
    assert found.step_race.rounds
    assert set(counts) == {(0, 1, 0)}
    # two forward passes in each step, and torch computes those of the other steps
    assert computed.count("fprop") >= 2 * found.step_race.rounds
    # the hint on channels_last is compiled, too
    assert found.layout_race.rounds
    assert backend.compiled == 2
    assert not uncompiled_calls[1:], "traced once"


def test_several_sizes_are_compiled_before_the_race(metered, plan_by_hand):
    model, backend = Net(), Counting()
    counts = metered(backend)
    sizes = [torch.randn(4, 3, 12, 12), torch.randn(2, 3, 16, 16), torch.randn(3, 3, 9, 14)]
    plan = plan_by_hand(model, sizes)
    found = Judge(torch.compile(model, backend=backend), sizes, Config(**SETTINGS)).judge(plan)
    assert found.step_race.rounds
    assert set(counts) == {(0, 3, 0)}


def state_of(model):
    """Every tensor of a model with its gradient: identity, values and strides."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [
        (name, id(one), one.tolist(), one.stride(), id(one.grad), one.grad is not None)
        + (() if one.grad is None else (one.grad.tolist(), one.grad.stride()))
        for name, one in tensors
    ]


@pytest.mark.parametrize("kind", JUDGED[1:])
def test_nothing_of_the_users_is_disturbed(kind):
    made, breaks, _, _ = KINDS[kind]
    backend, model, x = Counting(), Net(breaks), torch.randn(SHAPE)
    compiled = made(model, backend)
    compiled(x).sum().backward()
    before, modules = state_of(model), [vars(module).keys() for module in model.modules()]
    states = torch.random.get_rng_state(), random.getstate()
    plan = ucudnn.tune(compiled, x, Config(layout="auto", **SETTINGS))
    assert plan.compilation.is_compiled
    assert state_of(model) == before
    assert [vars(module).keys() for module in model.modules()] == modules
    assert torch.equal(torch.random.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert override._overrides["cpu"]._runner is None
    # the code that was compiled for it is still there
    count, runs = backend.compiled, len(backend.runs)
    uncompiled_calls.clear()
    compiled(x).sum().backward()
    assert backend.compiled == count
    assert len(backend.runs) > runs
    assert len(uncompiled_calls) == (kind == "in parts")


def relaying(graph, inputs):
    """A backend that computes in channels_last, as Inductor does where it expects a gain."""
    del inputs

    def run(*tensors):
        return graph.forward(
            *(one.contiguous(memory_format=LAST) if is_image(one) else one for one in tensors)
        )

    return run


def is_image(tensor):
    return isinstance(tensor, torch.Tensor) and tensor.dim() == 4


def test_convolutions_that_are_compiled_in_another_layout_are_counted(plan_by_hand):
    model, x = Net(), torch.randn(SHAPE)
    plan = plan_by_hand(model, x)
    for backend, relaid in (("eager", 0), (relaying, 4)):
        found = Judge(torch.compile(model, backend=backend), x, Config(**SETTINGS)).judge(plan)
        # both convolutions, forward and backward
        assert found.compilation.relaid == relaid
    assert "4 convolutions are in another layout" in plan_verdict(found)[-2]


@pytest.mark.parametrize("breaks", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_judging_often_uses_up_no_recompilations_of_the_user(breaks, plan_by_hand):
    backend, model = Counting(), Net(breaks)
    compiled = torch.compile(model, backend=backend, dynamic=False)
    compiled(torch.randn(2, 3, 9, 9))
    for size in range(10, 14):
        x = torch.randn(2, 3, size, size)
        found = Judge(compiled, x, Config(**SETTINGS)).judge(plan_by_hand(model, x))
        # code for two layouts
        assert found.layout_race.rounds
    for size in range(20, 24):
        uncompiled_calls.clear()
        count = backend.compiled
        compiled(torch.randn(2, 3, size, size))
        assert backend.compiled == count + 1 + breaks
        assert not uncompiled_calls


def refuse(graph, inputs):
    raise ValueError("no compiler here\nat length")


def test_where_compiling_fails_steps_are_judged_uncompiled_and_the_plan_says_so(tmp_path):
    model = Net()
    plan = ucudnn.tune(
        torch.compile(model, backend=refuse), torch.randn(SHAPE), Config(layout="auto", **SETTINGS)
    )
    assert plan.layout_race.rounds >= 3
    said = plan_verdict(plan)[-2]
    assert said.startswith("The steps that judged it were not compiled")
    assert said.endswith(": torch.compile failed (ValueError: no compiler here).")
    plan.save(tmp_path / "plan.json")
    assert ucudnn.Plan.load(tmp_path / "plan.json").compilation == plan.compilation


def test_a_model_that_cannot_be_compiled_in_channels_last_keeps_its_layout():
    def refuse_last(graph, inputs):
        if any(is_last(one) for one in inputs):
            raise ValueError("no code for these strides")
        return graph.forward

    plan = ucudnn.tune(
        torch.compile(Net(), backend=refuse_last),
        torch.randn(SHAPE),
        Config(layout="auto", **SETTINGS),
    )
    assert plan.memory_format == "keep"
    assert plan.layout_race.reason == (
        "in channels_last torch.compile failed (ValueError: no code for these strides)"
    )
    assert plan.compilation.is_compiled


@inductor
def test_steps_that_replay_cuda_graphs_are_not_compiled():
    compiled = torch.compile(Net(), mode="reduce-overhead")
    steps = Steps(compiled, torch.randn(SHAPE))
    assert "CUDA graphs" in compile_steps(compiled, steps, "cuda").reason


def test_a_memory_budget_is_refused_beside_a_limit_of_workspace():
    compiled = torch.compile(Net(), backend="eager")
    config = Config(memory_budget="1GiB", workspace_limit="1MiB", **SETTINGS)
    with pytest.raises(ConfigError, match=r"compiled code has its own; set one of the two"):
        ucudnn.tune(compiled, torch.randn(SHAPE), config)


def test_a_plan_names_the_layers_and_the_class_below_the_wrapper():
    backend = Counting()
    compiled = torch.compile(Net(), backend=backend)
    plan = ucudnn.tune(compiled, torch.randn(SHAPE), Config(step_race=False, **SETTINGS))
    assert {name for kernel in plan.kernels for name in kernel.layers} == {"one", "two"}
    assert plan.origin.model == "Net"
    assert plan.compilation is None
    assert not backend.compiled


@pytest.mark.parametrize("kind", KINDS)
def test_a_trace_compiles_nothing(kind):
    made, breaks, _, _ = KINDS[kind]
    backend, model, x = Counting(), Net(breaks), torch.randn(SHAPE)
    expected = ucudnn.trace(model, x)
    assert ucudnn.trace(made(model, backend), x) == expected
    assert len(expected) == 5
    assert not backend.compiled


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_model_is_converted_and_reverted(kind, plan_by_hand, computed):
    made, breaks, _, _ = KINDS[kind]
    model, x = Net(breaks).eval(), torch.randn(SHAPE)
    truth, strides = model(x), [one.stride() for one in model.parameters()]
    plan = plan_by_hand(copy.deepcopy(model).to(memory_format=torch.channels_last), x)
    plan = replace(plan, memory_format="channels_last")
    compiled = made(model, Counting())
    torch.testing.assert_close(compiled(x), truth)
    conversion = ucudnn.convert_(compiled, plan)
    assert conversion.model is compiled
    assert len(conversion.swapped) == 2
    assert not conversion.not_swappable
    with ucudnn.installed(plan):
        found = compiled(x)
    assert computed == ["fprop", "fprop"]
    assert found.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-5)
    assert ucudnn.revert_(compiled) is compiled
    assert [one.stride() for one in model.parameters()] == strides
    torch.testing.assert_close(compiled(x), truth)


def test_advice_says_that_its_steps_are_not_compiled():
    backend = Counting()
    compiled = torch.compile(Net(), backend=backend)
    with pytest.warns(UcudnnWarning, match="advice is by steps that are not compiled"):
        advice = ucudnn.advise(compiled, torch.randn(SHAPE))
    assert advice.step_ns
    assert not backend.compiled


# In the model's own layout some of its convolutions are in channels_last all the same.
@pytest.mark.filterwarnings("ignore::ucudnn.errors.UnplannedWarning")
@inductor
@pytest.mark.nightly
@pytest.mark.skipif(not shutil.which("g++"), reason="Inductor needs a C++ compiler")
def test_by_inductor_a_compiled_model_that_follows_its_plan_computes_what_torch_does(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    # inference, which has one graph to compile
    model, x = Net().eval().requires_grad_(False), torch.randn(SHAPE)
    truth = model(x)
    compiled = torch.compile(model)
    plan = ucudnn.tune(compiled, x, Config(layout="auto", ops=("fprop",), **SETTINGS))
    assert plan.compilation.is_compiled, plan.compilation
    assert plan.layout_race.rounds >= 3, plan.layout_race
    ucudnn.convert_(compiled, plan)
    with ucudnn.installed(plan):
        torch.testing.assert_close(compiled(x), truth, rtol=1e-4, atol=1e-5)
