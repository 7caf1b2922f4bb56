"""With unplanned="error" a plan runs as it was made or not at all."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn

import ucudnn
from ucudnn.check import check
from ucudnn.config import Config
from ucudnn.errors import (
    MismatchWarning,
    PlanError,
    RefusedError,
    UnplannedWarning,
    UnsupportedError,
)
from ucudnn.execution.execute import Call
from ucudnn.problem import OPS

pytestmark = pytest.mark.usefixtures("one_thread")


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, stride=2))


INPUT = (4, 3, 9, 9)


@pytest.fixture
def plan(plan_by_hand):
    return plan_by_hand(small_model(), torch.empty(INPUT), config=Config(unplanned="error"))


CHANGED = {
    "device": ("device", "name", "abacus", "device: the plan is for abacus"),
    "version": ("software", "torch", "1.0", "versions: torch 1.0 there and "),
    "threads": ("conditions", "threads", 64, "conditions: threads 64 there and 1 here"),
}


@pytest.mark.parametrize(("room", "field", "value", "sentence"), CHANGED.values(), ids=CHANGED)
@pytest.mark.filterwarnings("ignore:the plan was made")
def test_what_check_refuses_is_refused(plan, room, field, value, sentence):
    other = replace(plan, **{room: replace(getattr(plan, room), **{field: value})})
    assert any(finding.is_true is False for finding in check(other, canaries=0))
    model = small_model()
    for run in (lambda: ucudnn.convert_(model, other), lambda: ucudnn.installed(other)):
        with pytest.raises(PlanError, match=f"unplanned='error' refuses a plan.*{sentence}"):
            run()
    assert type(model[0]) is nn.Conv2d
    if room != "device":
        assert ucudnn.convert_(model, replace(other, config=Config())).swapped


def test_a_missing_algorithm_is_refused(plan):
    first = replace(plan.kernels[0], algorithms=("gone",))
    other = replace(plan, kernels=(first, *plan.kernels[1:]))
    (wrong,) = [finding for finding in check(other, canaries=0) if finding.is_true is False]
    assert wrong.about == "build"
    with pytest.raises(PlanError, match="build: .*gone does not compute.*there is none of that"):
        ucudnn.convert_(small_model(), other)


def test_a_device_that_is_not_here_is_refused(plan, monkeypatch):
    def refuse(_):
        raise UnsupportedError("there is no NVIDIA GPU here")

    monkeypatch.setattr("ucudnn.execution.validity.open_backend", refuse)
    with pytest.raises(PlanError, match="device: the plan is for .*no NVIDIA GPU here"):
        ucudnn.convert_(small_model(), plan)


@pytest.mark.parametrize("shape", [(5, 3, 9, 9), (4, 3, 9, 8)], ids=["batch", "size"])
def test_a_shape_without_a_plan_ends_the_step(plan, shape):
    model = small_model()
    ucudnn.convert_(model, plan)
    with pytest.raises(PlanError, match="has no plan and unplanned='error'"):
        model(torch.randn(shape))
    with (
        ucudnn.installed(plan),
        pytest.raises(PlanError, match="has no plan and unplanned='error'"),
    ):
        small_model()(torch.randn(shape))


def test_installed_refuses_convolutions_of_other_layers(plan):
    x = torch.randn(2, 7, 6, 6)
    w = torch.randn(2, 7, 1, 1)
    with ucudnn.installed(plan), pytest.raises(PlanError, match=r"conv2d\(7->2.* has no plan"):
        torch.nn.functional.conv2d(x, w)
    torch.nn.functional.conv2d(x, w)


def test_a_layer_that_stays_torchs_by_plan_refuses_other_shapes(plan_by_hand):
    model = small_model()
    plan = plan_by_hand(
        model,
        torch.empty(INPUT),
        chunk=4,
        algorithm="torch_default",
        config=Config(unplanned="error"),
    )
    default = [replace(kernel, alone=(0,) * kernel.problem.batch) for kernel in plan.kernels]
    ucudnn.convert_(model, replace(plan, kernels=tuple(default)))
    assert torch.equal(model(torch.ones(INPUT)), small_model()(torch.ones(INPUT)))
    with pytest.raises(PlanError, match="has no plan"):
        model(torch.ones(4, 3, 8, 9))


def test_a_convolution_that_the_plan_lacks_is_refused(plan):
    model = nn.Sequential(*small_model(), nn.Conv2d(4, 5, 1))
    with pytest.raises(PlanError, match="these convolutions are not: 3;"):
        ucudnn.convert_(model, plan)
    assert type(model[0]) is nn.Conv2d
    assert ucudnn.convert_(model, plan, lambda _, name: name != "3").swapped == ("0", "2")


def test_a_planned_module_that_cannot_be_swapped_is_refused(plan):
    class Mine(nn.Conv2d):
        pass

    model = small_model()
    model[2] = Mine(4, 4, 3, stride=2)
    with pytest.raises(PlanError, match=r"cannot be swapped: 2; use ucudnn.installed"):
        ucudnn.convert_(model, plan)


def test_a_step_that_cannot_be_built_is_refused(plan, monkeypatch):
    model = small_model()
    ucudnn.convert_(model, plan)

    def refuse(*_):
        raise UnsupportedError("im2col_gemm was removed")

    monkeypatch.setattr("ucudnn.execution.runner.build", refuse)
    with pytest.raises(PlanError, match="unplanned='error' refuses .*im2col_gemm was removed"):
        model(torch.ones(INPUT))


@pytest.fixture
def refusing(monkeypatch):
    """A function that lets the planned calls of an op refuse to run; it returns their number."""
    compute = Call.__call__

    def refuse(op):
        tried = []

        def called(call, *operands):
            if call.problem.op != op:
                return compute(call, *operands)
            tried.append(call)
            raise RefusedError("the engine refuses these strides")

        monkeypatch.setattr(Call, "__call__", called)
        return tried

    return refuse


def step(model, x):
    x = x.clone().requires_grad_()
    y = model(x)
    return (y, *torch.autograd.grad(y.square().sum(), (x, *model.parameters())))


@pytest.mark.parametrize("is_converted", [True, False], ids=["converted", "installed"])
@pytest.mark.parametrize("op", OPS)
def test_what_an_algorithm_refuses_at_its_first_run_is_torchs(
    plan_by_hand, refusing, op, is_converted
):
    """Of each layer one pass, of which torch also computes the bias or its gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GELU(), nn.ConvTranspose2d(4, 2, 2))
    x = torch.randn(INPUT)
    expected = step(copy.deepcopy(model).double(), x.double())
    plan = plan_by_hand(model, torch.empty(INPUT, requires_grad=True))
    assert {kernel.problem.op for kernel in plan.kernels} == set(OPS)
    if is_converted:
        ucudnn.convert_(model, plan)
    tried = refusing(op)
    with (
        nullcontext() if is_converted else ucudnn.installed(plan),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        for _ in range(3):
            for found, truth in zip(step(model, x), expected, strict=True):
                torch.testing.assert_close(found.double(), truth, rtol=1e-4, atol=1e-4)
    # once for each of the two layers, and never again
    assert len(tried) == 2
    said = "the engine refuses these strides: torch's own convolution computes it"
    assert [(one.category, said in str(one.message)) for one in caught] == [
        (UnplannedWarning, True)
    ] * 2


def test_what_an_algorithm_refuses_at_its_first_run_ends_a_step_that_must_follow_its_plan(
    plan, refusing
):
    model = small_model()
    ucudnn.convert_(model, plan)
    refusing("fprop")
    for _ in range(2):
        with pytest.raises(PlanError, match="unplanned='error' refuses .*refuses these strides"):
            model(torch.ones(INPUT))


def test_the_environment_goes_before_the_plan(plan, monkeypatch):
    other = replace(plan, software=replace(plan.software, torch="1.0"))
    monkeypatch.setenv("UCUDNN_UNPLANNED", "torch")
    with pytest.warns(MismatchWarning, match="torch 1.0 there and"):
        assert ucudnn.convert_(small_model(), other).swapped == ("0", "2")
    monkeypatch.setenv("UCUDNN_UNPLANNED", "error")
    with pytest.raises(PlanError, match="unplanned='error' refuses a plan"):
        ucudnn.installed(replace(other, config=Config(unplanned="torch")))
