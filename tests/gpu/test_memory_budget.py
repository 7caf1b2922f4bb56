"""Steps on a GPU within a memory budget: peaks by torch's allocator, and torch's gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import ucudnn


@pytest.fixture
def model(backend):
    """Activations, not parameters, are most of its memory; the last layer uses cuBLAS."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 64, 3, padding=1)]
    for _ in range(5):
        block = [nn.GroupNorm(8, 64), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1)]
        layers.append(nn.Sequential(*block))
    head = [nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Linear(64 * 64, 100)]
    return nn.Sequential(*layers, *head).cuda()


def step(model, micro_batches):
    for (part,), weight in micro_batches:
        (weight * model(part).square().mean()).backward()


def errors(gradients, exact):
    """The relative error of each gradient."""
    pairs = zip(gradients, exact, strict=True)
    return [float((a.cpu().double() - b).norm() / b.norm()) for a, b in pairs]


@pytest.mark.hardware("memory statistics")
@pytest.mark.parametrize(("share", "loop"), [("70%", False), ("45%", False), ("30%", True)])
def test_a_step_stays_within_the_budget(backend, model, tmp_path, share, loop):
    x = torch.randn(16, 3, 128, 128, device="cuda")
    exact = copy.deepcopy(model).double()
    step(exact, [((x.double(),), 1.0)])
    expected = [parameter.grad.cpu() for parameter in exact.parameters()]
    step(model, [((x,), 1.0)])
    torchs = errors([parameter.grad for parameter in model.parameters()], expected)
    model.zero_grad()
    del exact
    config = ucudnn.Config(
        memory_budget=share, loop=loop, cache=str(tmp_path), effort="quick", time_budget_s=15
    )
    plan = ucudnn.tune(model, x, config)
    ucudnn.convert_(model, plan)
    micro_batches = [((part[0],), part.weight) for part in plan.micro_batches(x)]
    step(model, micro_batches)
    model.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    step(model, micro_batches)
    peak = torch.cuda.max_memory_allocated()
    assert peak <= plan.memory.budget_bytes < plan.memory.torch_peak_bytes
    found = errors([parameter.grad for parameter in model.parameters()], expected)
    assert all(a < 2 * b + 1e-6 for a, b in zip(found, torchs, strict=True)), (found, torchs)
