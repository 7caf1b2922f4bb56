"""Dynamo, where it leaves a frame to Python: it looks into torch's code then, and not into ours."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import ucudnn

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPE = (4, 3, 9, 8)
# compiled on purpose, as torch's convolution
FORWARDS = {"AbstractConvolution._conv_forward", "AbstractTransposed.forward"}


def small_model():
    return nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ConvTranspose2d(3, 3, 3))


def step(model, x):
    model.zero_grad()
    for layer in model:
        x = layer(x)
        if x.max() > 1e6:  # Dynamo compiles no loop that it may have to leave
            break
    x.square().sum().backward()
    return [x.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.fixture
def compiled(package):
    """Calls a function compiled; returns the result, all frames compiled, and ours by name."""

    def run(function, *arguments):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        result = torch.compile(function, backend="eager")(*arguments)
        codes = [reference() for reference in torch._dynamo.convert_frame.input_codes.seen]
        ours = {
            code.co_qualname
            for code in codes
            if code is not None and Path(code.co_filename).is_relative_to(package)
        }
        return result, torch._dynamo.utils.counters["frames"]["total"], ours

    yield run
    torch._dynamo.reset()


PASSES = ["dgrad", "fprop", "fprop", "wgrad", "wgrad"]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["im2col_gemm", "onednn_nhwc"])
def test_kernels_below_the_dispatcher(plan_by_hand, compiled, computed, algorithm):
    model, x = small_model(), torch.randn(SHAPE)
    plan = plan_by_hand(model, x, 1, algorithm)
    for batch in (4, 2):
        truth = step(model, x[:batch])
        _, frames, _ = compiled(step, model, x[:batch])
        assert not computed
        with ucudnn.installed(plan):
            result, found, ours = compiled(step, model, x[:batch])
        torch.testing.assert_close(result, truth)
        assert sorted(computed) == PASSES
        assert (found, ours) == (frames, set())
        computed.clear()


def test_layers_that_are_not_compiled(plan_by_hand, compiled, computed):
    """Dynamo runs the forward of such a layer in Python, and watches what that calls."""
    model, x = small_model(), torch.randn(SHAPE)
    truth = step(model, x)
    ucudnn.convert_(model, plan_by_hand(model, x))
    for layer in model:
        layer.forward = torch._dynamo.disable(layer.forward, recursive=False)
    result, _, ours = compiled(step, model, x)
    torch.testing.assert_close(result, truth)
    assert ours <= FORWARDS
    # the transposed layer's forward is its own, and was left to Python
    assert sorted(computed) == ["dgrad", "fprop", "wgrad"]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's own, of the loss
def test_a_backward_that_was_not_compiled(plan_by_hand, compiled, computed):
    model, x = small_model(), torch.randn(SHAPE)
    truth = step(model, x)[1:]
    ucudnn.convert_(model, plan_by_hand(model, x))
    loss = model(x).square().sum()
    model.zero_grad()

    def backward():
        torch._dynamo.graph_break()
        loss.backward(retain_graph=True)
        return [p.grad for p in model.parameters()]

    result, _, ours = compiled(backward)
    torch.testing.assert_close(result, truth)
    assert sorted(computed) == PASSES
    assert not ours


def test_a_plan_installed_inside_a_compiled_function(plan_by_hand, compiled, computed):
    model, x = small_model(), torch.randn(SHAPE)
    truth, plan = step(model, x), plan_by_hand(model, x)

    def function():
        with ucudnn.installed(plan):
            return step(model, x)

    result, _, ours = compiled(function)
    torch.testing.assert_close(result, truth)
    assert sorted(computed) == PASSES
    # none of which computes anything
    assert ours <= {"__getattr__"}
