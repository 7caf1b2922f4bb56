"""Ways of calling a planned layer that once broke; each against torch's own."""

from __future__ import annotations

import copy
import threading
import warnings
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

import ucudnn
from ucudnn.backends import aten
from ucudnn.steps.tracing import trace_layers

SHAPES = {1: (5, 4, 17), 2: (5, 4, 9, 8), 3: (5, 4, 5, 6, 7)}
LAYERS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize(
    "algorithm", ["torch_default", "onednn_nhwc", "slow_conv2d", "im2col_gemm", "fft"]
)
def test_outputs_may_be_changed_in_place(plan_by_hand, rank, algorithm, batch):
    layer = LAYERS[rank](4, 6, 3, bias=False)
    x = torch.randn(SHAPES[rank])[:batch]
    planned = nn.Sequential(copy.deepcopy(layer), nn.ReLU(inplace=True))
    plan = plan_by_hand(layer, torch.empty(x.shape), chunk=batch, algorithm=algorithm)
    ucudnn.convert_(planned, plan)
    y = planned(x)
    y.sum().backward()
    torch.testing.assert_close(y, torch.relu(layer(x)), rtol=1e-4, atol=1e-4)


def test_backward_inside_autocast_stays_in_float32(plan_by_hand):
    layer = nn.Conv2d(4, 6, 3)
    x = torch.randn(5, 4, 9, 8)
    planned = copy.deepcopy(layer)
    ucudnn.convert_(planned, plan_by_hand(layer, x.clone().requires_grad_()))
    grads = []
    for module in (planned, layer):
        loss = module(x).square().sum()
        with torch.autocast("cpu", torch.bfloat16):
            loss.backward()
        grads.append(module.weight.grad)
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-4)


def test_another_number_of_threads_falls_back_to_torch(plan_by_hand):
    layer = nn.Conv2d(64, 64, 1)
    x = torch.randn(1, 64, 28, 28, requires_grad=True)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(max(2, threads))
        plan = plan_by_hand(layer, x, algorithm="onednn_nhwc")
        torch.set_num_threads(1)
        planned = copy.deepcopy(layer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ucudnn.convert_(planned, plan)
            planned(x).sum().backward()
        layer(x).sum().backward()
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(planned.weight.grad, layer.weight.grad, rtol=1e-4, atol=1e-3)


@pytest.mark.filterwarnings("ignore:.* has no plan")
def test_threads_that_meet_unplanned_shapes_together():
    layer = ucudnn.nn.Conv2d(3, 4, 3)
    results = {}

    def run(batch):
        results[batch] = layer(torch.ones(batch, 3, 9, 9)).shape

    threads = [threading.Thread(target=run, args=(batch,)) for batch in (2, 3, 4, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {batch: (batch, 4, 7, 7) for batch in (2, 3, 4, 5)}


def test_a_second_conversion_with_a_filter_leaves_the_first_alone(plan_by_hand):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 3))
    plan = plan_by_hand(model, torch.empty(4, 3, 9, 9))
    ucudnn.convert_(model, plan, lambda _, name: name == "0")
    ucudnn.convert_(model, plan, lambda _, name: name == "1")
    assert [type(layer) for layer in model] == [ucudnn.nn.Conv2d] * 2
    other = plan_by_hand(nn.Conv2d(7, 7, 1), torch.empty(2, 7, 9, 9))
    with pytest.raises(ucudnn.PlanError, match="covers none of this model's 2 torch.nn convol"):
        ucudnn.convert_(model, other)
    assert [type(layer) for layer in model] == [ucudnn.nn.Conv2d] * 2


def test_a_plan_for_which_there_was_no_time_changes_nothing():
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3)), torch.randn(2, 3, 9, 9)
    with pytest.warns(ucudnn.errors.UntunedWarning):
        plan = ucudnn.tune(model, x, ucudnn.Config(time_budget_s=1e-6, step_race=False))
    assert plan.left_out
    assert not plan.kernels
    ucudnn.convert_(model, plan)
    assert type(model[0]) is nn.Conv2d


@dataclass
class Output:
    """What a model of transformers returns, in spirit."""

    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...] = ()


@pytest.mark.parametrize(
    "wrap", [Output, lambda y: {"logits": y}, lambda y: (Output(y), None), lambda y: [{"a": (y,)}]]
)
def test_backward_is_traced_through_any_nest_of_outputs(wrap):
    class Wrapped(nn.Sequential):
        def forward(self, x):
            return wrap(super().forward(x))

    model = Wrapped(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1))
    ops = [problem.op for _, problem in trace_layers(model, {"x": torch.empty(2, 3, 9, 9)}).layers]
    assert ops == ["fprop", "fprop", "dgrad", "wgrad", "wgrad"]


def test_tracing_works_inside_inference_mode():
    model, x = nn.Conv2d(3, 4, 3), torch.empty(2, 3, 9, 9)
    with torch.inference_mode():
        assert len(ucudnn.trace(model, x)) == 2


@pytest.mark.parametrize("planned", [("dgrad",), ("wgrad",), ("dgrad", "wgrad")])
def test_torch_computes_no_gradient_that_is_planned(plan_by_hand, monkeypatch, planned):
    """oneDNN computes the weight gradient where only that of the bias is asked for."""
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(4, 4, 9, 9, requires_grad=True)
    expected = torch.autograd.grad(layer(x).square().sum(), (x, layer.weight, layer.bias))
    plan = plan_by_hand(layer, x)
    kernels = tuple(
        one if one.problem.op in planned else one.by_default(every_batch=True)
        for one in plan.kernels
    )
    masks, computed = [], aten.convolution_backward

    def spy(*arguments):
        masks.append(list(arguments[-1]))
        return computed(*arguments)

    with ucudnn.installed(replace(plan, kernels=kernels)):
        monkeypatch.setattr("ucudnn.execution.autograd.aten.convolution_backward", spy)
        found = torch.autograd.grad(layer(x).square().sum(), (x, layer.weight, layer.bias))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    is_dgrad_torchs, is_wgrad_torchs = "dgrad" not in planned, "wgrad" not in planned
    # the bias comes with the weight or from nobody but ourselves
    asked = [is_dgrad_torchs, is_wgrad_torchs, is_wgrad_torchs]
    assert masks == ([asked] if any(asked) else [])
