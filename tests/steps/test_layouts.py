"""Real models tuned in two layouts: which may be laid out; test_untouched.py has what stays."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ucudnn
from ucudnn.backends.torch_cpu.backend import TorchCpuBackend
from ucudnn.config import Config
from ucudnn.errors import PlanError, TuningInterruptedError
from ucudnn.execution.channels_last import lay_out_
from ucudnn.reports.text import plan_verdict
from ucudnn.steps.comparing import coarsest_eps, reason_against_layout

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ucudnn.errors.UntunedWarning"),
    pytest.mark.filterwarnings("ignore::ucudnn.errors.NoiseWarning"),
]
AUTO = {"layout": "auto", "policy": "undivided", "effort": "quick"}
SHAPE = (4, 3, 12, 12)


class Views(nn.Conv2d):
    """Takes its result for contiguous."""

    def forward(self, x):
        return super().forward(x).view(x.shape[0], -1)


class Peeks(nn.Conv2d):
    """Reads its result in the order of memory."""

    def forward(self, x):
        y = super().forward(x)
        return y.as_strided((y.numel(),), (1,)).cumsum(0)


class Fragile(nn.Conv2d):
    """Fails in channels_last, on real tensors alone."""

    def forward(self, x):
        if type(x) is torch.Tensor and not x.is_contiguous():
            raise RuntimeError("I need contiguous images\nwhich this is not")
        return super().forward(x)


class Branches(nn.Module):
    """Copies what it gets, unless that is in channels_last; `contiguous` scales one branch."""

    def __init__(self, contiguous):
        super().__init__()
        self.contiguous = contiguous
        self.conv, self.norm = nn.Conv2d(16, 16, 3, padding=1), nn.LayerNorm(16)

    def forward(self, x):
        scale = self.contiguous if x.is_contiguous() else 1.0
        return self.conv(x), scale * self.norm(x.permute(0, 2, 3, 1).contiguous())


def tied_by_data():
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3))
    model[1].weight.data = model[0].weight.data
    return model


KEPT = {
    "shares memory": (tied_by_data(), SHAPE, "another tensor uses the memory of 0.weight"),
    "fails when traced": (Views(3, 4, 3), SHAPE, r"it fails in channels_last \(.*view"),
    "fails when run": (Fragile(3, 4, 3), SHAPE, r"channels_last \(I need contiguous images\)"),
    "computes something else": (
        Peeks(3, 4, 3),
        SHAPE,
        "in channels_last its outputs differ by .* of their norm, and by .* where weights change",
    ),
    "has one axis": (nn.Conv1d(3, 4, 3), (2, 3, 9), "channels_last changes none"),
    "is in channels_last": (
        nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
        SHAPE,
        "channels_last changes none of its convolutions",
    ),
}


@pytest.mark.parametrize("case", KEPT)
def test_a_model_that_cannot_be_laid_out_keeps_its_layout_and_the_plan_says_why(case, tmp_path):
    model, shape, reason = KEPT[case]
    torch.manual_seed(0)
    plan = ucudnn.tune(model, torch.randn(shape), Config(**AUTO))
    assert plan.memory_format == "keep"
    assert plan.kernels
    assert not plan.layout_race.ways
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(str(plan.layout_race))
    plan.save(tmp_path / "plan.json")
    assert ucudnn.Plan.load(tmp_path / "plan.json").layout_race == plan.layout_race


def against(model, x, dtype="float32"):
    """Reason against channels_last, by a plan whose problems have this dtype."""
    problems = [replace(problem, dtype=dtype) for problem in ucudnn.trace(model, x)]
    plan = SimpleNamespace(kernels=[SimpleNamespace(problem=problem) for problem in problems])
    eps = coarsest_eps(kernel.problem for kernel in plan.kernels)
    return reason_against_layout(model, x, eps, is_training=True)


class Noisy(nn.Module):
    """Draws random numbers in every way that depends on the layout of a tensor."""

    def __init__(self):
        super().__init__()
        self.net = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        x = nn.functional.dropout(self.net(x), 0.5)
        x = nn.functional.rrelu(x, training=True) + torch.rand_like(x) + x.clone().exponential_()
        return nn.functional.dropout2d(x * torch.empty_like(x).bernoulli_(0.5))


def test_random_numbers_are_no_difference():
    torch.manual_seed(0)
    x = torch.randn(SHAPE)
    assert against(Noisy(), x) == ""
    # which hangs on them: torch itself draws others for the same elements
    last = x.to(memory_format=torch.channels_last)
    found = [torch.manual_seed(0) and nn.functional.dropout(one) for one in (x, last)]
    assert not torch.equal(*found)


@pytest.mark.parametrize("seed", range(4))
def test_an_ordinary_network_computes_the_same(seed):
    torch.manual_seed(seed)
    layers = [nn.Conv2d(3, 16, 3, padding=1)]
    for _ in range(6):
        layers += [nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)]
    model = nn.Sequential(*layers, nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    assert against(model, torch.randn(4, 3, 24, 24)) == ""


def test_half_precision_is_held_to_its_own_rounding():
    torch.manual_seed(0)
    layers = [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    model = nn.Sequential(nn.Conv2d(3, 16, 3), *layers, *copy.deepcopy(layers)).bfloat16()
    assert against(model, torch.randn(SHAPE).bfloat16(), "bfloat16") == ""
    assert "differ by" in against(Peeks(3, 4, 3).bfloat16(), torch.randn(SHAPE).bfloat16())


class Hungry(nn.Conv2d):
    """Has too little memory for a real step, in one layout or in both."""

    only_last = False

    def forward(self, x):
        y = super().forward(x)
        if type(y) is torch.Tensor and not (self.only_last and y.is_contiguous()):
            raise MemoryError("no more")
        return y


@pytest.mark.parametrize("only_last", [False, True])
def test_without_memory_for_a_step_the_model_keeps_its_layout(only_last):
    model = Hungry(3, 4, 3)
    model.only_last = only_last
    plan = ucudnn.tune(model, torch.randn(SHAPE), Config(**AUTO))
    assert plan.layout_race.reason == "a step could not be computed (no more)"
    assert plan.memory_format == plan.layout_race.memory_format == "keep"
    # In the model's own layout a step may be possible.
    reason = "" if only_last else plan.layout_race.reason
    # If torch's own convolutions are the fastest here, there is no race.
    assert plan.step_race.reason in (reason, "it changes nothing")


@pytest.fixture
def tuned(monkeypatch):
    """The deadline and the layout of every list of problems that is tuned."""
    calls, original = [], ucudnn.steps.tune.tune_problems

    def spy(layers, config, *args, **kwargs):
        calls.append((kwargs["deadline"], layers[0][1].layout))
        return original(layers, config, *args, **kwargs)

    monkeypatch.setattr("ucudnn.steps.tune.tune_problems", spy)
    return calls


def test_both_tunings_and_the_race_share_the_time_budget(tuned, monkeypatch):
    now = [1000.0]
    for module in ("kernels.deadline", "steps.tune", "steps.compiled"):
        monkeypatch.setattr(f"ucudnn.{module}.monotonic", lambda: now[0])
    original = ucudnn.steps.tune.tune_problems

    def takes_25_s(*args, **kwargs):
        now[0] += 25
        return original(*args, **kwargs)

    monkeypatch.setattr("ucudnn.steps.tune.tune_problems", takes_25_s)
    config = Config(**AUTO, time_budget_s=60)
    model, x = nn.Conv2d(3, 4, 3), torch.randn(SHAPE)
    plan = ucudnn.tune(model, x, config)
    (first, own), (second, last) = tuned
    assert (own, last) == ("nchw", "nhwc")
    assert first.at_s == 1030
    assert 1042.5 <= second.at_s <= 1060
    assert plan.config == config
    assert plan.config.time_budget_s == 60
    assert plan.origin.budget == "60"
    assert plan.layout_race.rounds >= 3
    now[0] = 1000.0
    plan = ucudnn.tune(model, x, replace(config, time_budget_s=49))
    assert plan.layout_race.reason == "the time budget has no room for steps in both layouts"


def test_progress_is_that_of_one_tuning():
    events = []
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))
    ucudnn.tune(model, torch.randn(SHAPE), Config(**AUTO), events.append)
    assert {event.total for event in events} == {10}  # five kernels in each layout
    assert [event.done for event in events] == sorted(event.done for event in events)
    assert events[-1].done == 10
    assert [one.measured for one in events] == sorted(one.measured for one in events)


@pytest.mark.parametrize("error", [PlanError("no plan fits"), KeyboardInterrupt()], ids=str)
def test_what_ends_the_second_tuning_leaves_the_first_plan(error, tuned, monkeypatch):
    original = ucudnn.steps.tune.tune_problems

    def fails(layers, *args, **kwargs):
        if layers[0][1].layout == "nhwc":
            if isinstance(error, KeyboardInterrupt):
                raise TuningInterruptedError(None)
            raise error
        return original(layers, *args, **kwargs)

    monkeypatch.setattr("ucudnn.steps.tune.tune_problems", fails)
    model, x = nn.Conv2d(3, 4, 3), torch.randn(SHAPE)
    if isinstance(error, PlanError):
        plan = ucudnn.tune(model, x, Config(**AUTO))
        assert plan.layout_race.reason == "it has no plan in channels_last (no plan fits)"
    else:
        with pytest.raises(TuningInterruptedError) as caught:
            ucudnn.tune(model, x, Config(**AUTO))
        plan = caught.value.plan
    assert plan.memory_format == "keep"
    assert {one.problem.op for one in plan.kernels} == {"fprop", "wgrad"}


@pytest.mark.parametrize("rank", [2, 3])
def test_tuning_in_place_lays_the_model_out(rank, monkeypatch):
    original = ucudnn.steps.judge.judge_layouts

    def last(plans, *how):
        return replace(plans["channels_last"], layout_race=original(plans, *how).layout_race)

    monkeypatch.setattr("ucudnn.steps.judge.judge_layouts", last)
    kind, shape = {2: (nn.Conv2d, SHAPE), 3: (nn.Conv3d, (2, 3, 6, 6, 6))}[rank]
    last_format = {2: torch.channels_last, 3: torch.channels_last_3d}[rank]
    torch.manual_seed(0)
    model, x = kind(3, 4, 3), torch.randn(shape)
    truth = model(x)
    conversion = ucudnn.tune_(model, x, Config(**AUTO))
    assert conversion.plan.memory_format == "channels_last"
    assert {one.problem.layout for one in conversion.plan.kernels} == {"nhwc"}
    assert model.weight.is_contiguous(memory_format=last_format)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = model(x)
    assert found.is_contiguous(memory_format=last_format)
    torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ["keep", "auto"])
@pytest.mark.parametrize("parameters", [True, False])
def test_a_converted_model_is_tuned_again_in_the_layout_that_it_has(layout, parameters):
    model, x = nn.Conv2d(3, 4, 3), torch.randn(SHAPE)
    lay_out_(model, parameters)
    conversion = ucudnn.tune_(model, x, Config(**{**AUTO, "layout": layout}))
    assert conversion.plan.memory_format == "channels_last"
    assert {one.problem.layout for one in conversion.plan.kernels} == {"nhwc"}
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)


def hinted(model, x=None, **settings):
    x = torch.randn(SHAPE) if x is None else x
    return ucudnn.tune(model, x, Config(policy="undivided", effort="quick", **settings))


class Seen(nn.Conv2d):
    """Keeps the layout of the images of its last step."""

    is_last = False

    def forward(self, x):
        if type(x) is torch.Tensor:
            Seen.is_last = x.is_contiguous(memory_format=torch.channels_last)
        return super().forward(x)


@pytest.mark.parametrize(("last_ns", "keep_ns"), [(800, 1000), (990, 1000)])
def test_a_plan_that_keeps_the_layout_says_what_channels_last_promises(
    monkeypatch, tmp_path, last_ns, keep_ns
):
    """The clock of steps tells the time that the test gave to the layout which was just run."""

    def elapsed_ns(self, run):
        run()
        return last_ns if Seen.is_last else keep_ns

    monkeypatch.setattr(TorchCpuBackend, "elapsed_ns", elapsed_ns)
    plan = hinted(Seen(3, 8, 3))
    assert plan.memory_format == "keep"
    hint = plan.layout_race
    assert hint.is_fixed
    assert hint.memory_format == "keep"
    assert [(one.kind, one.time_ns) for one in hint.ways] == [("plan", keep_ns), ("torch", last_ns)]
    assert hint.rounds == 2
    # Of a gain of one in a hundred two rounds say nothing.
    assert ('layout="auto"' in str(hint)) == (last_ns == 800)
    # nor do they tell an interval
    assert f" takes {last_ns / keep_ns:.2f} times as long" in " ".join(plan_verdict(plan))
    plan.save(tmp_path / "plan.json")
    assert ucudnn.Plan.load(tmp_path / "plan.json").layout_race == hint
    # A plan's identity is what it decides.
    assert replace(plan, layout_race=None).hash == plan.hash


def test_there_is_no_hint_where_layout_is_decided_or_makes_no_difference():
    line = torch.randn(2, 3, 20)
    assert hinted(nn.Conv1d(3, 4, 3), line).layout_race is None
    assert not hinted(nn.Conv2d(3, 4, 3), layout="auto").layout_race.is_fixed
    assert hinted(nn.Conv2d(3, 4, 3), step_race=False).layout_race is None


@pytest.fixture
def copies(monkeypatch):
    """The models that are copied to run steps, once for each copy."""
    found, original = [], ucudnn.steps.run.copied

    def copied(*args):
        found.append(args[0])
        return original(*args)

    monkeypatch.setattr("ucudnn.steps.run.copied", copied)
    return found


@pytest.mark.parametrize(("layout", "most"), [("keep", 2), ("auto", 4)])
def test_a_tuning_makes_few_copies_of_the_model(copies, layout, most):
    """One copy for each layout, and two new ones whose results are compared."""
    plan = hinted(nn.Conv2d(3, 4, 3), layout=layout)
    assert plan.layout_race.rounds
    assert len(copies) == most


def test_a_tuning_within_a_memory_budget_makes_three_copies(copies):
    """One copy, divided in any way, and two new ones whose results are compared."""
    layers = (nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.SiLU()) for _ in range(4))
    model = nn.Sequential(nn.Conv2d(3, 8, 3), *layers)
    plan = hinted(model, torch.randn(8, 3, 24, 24), memory_budget="60%")
    assert plan.segments
    assert plan.layout_race is None
    assert len(copies) == 3


@pytest.mark.parametrize(("contiguous", "memory_format"), [(1.0, "channels_last"), (2.0, "keep")])
def test_an_undivided_step_that_keeps_a_budget_in_channels_last_alone(contiguous, memory_format):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), Branches(contiguous))
    x = torch.rand(2, 1, 64, 64)
    truth = copy.deepcopy(model)
    # Of 3.3 MB in channels_last, and 3.8 without any workspace in its own layout.
    config = Config(memory_budget=3_500_000, **AUTO)
    plan = ucudnn.tune(model, x, config)
    assert plan.memory_format == memory_format
    assert (plan.segments == ()) == (memory_format == "channels_last")
    assert plan.memory.plan_peak_bytes <= 3_500_000
    said = " ".join(plan_verdict(plan))
    assert ("The layout is channels_last." in said) == (memory_format == "channels_last")
    ucudnn.convert_(model, plan)
    for one in (model, truth):
        sum(y.square().sum() for y in one(x)).backward()
    for (name, one), other in zip(truth.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-3, atol=1e-3, msg=name)
