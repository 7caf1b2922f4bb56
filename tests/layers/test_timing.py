"""Kernels of a step are timed one by one, and compute what they did."""

from __future__ import annotations

import pytest
import torch
from by_hand import in_chunks
from torch import nn

from ucudnn.backends import open_backend
from ucudnn.config import Config
from ucudnn.execution.execute import build
from ucudnn.execution.observers import KernelTimer
from ucudnn.execution.override import Installation
from ucudnn.execution.runner import Runner
from ucudnn.kernels.tune import layers_by_problem
from ucudnn.steps.tracing import trace_layers


class Model(nn.Module):
    """A layer that runs twice, a transposed one, a grouped one and one whose weight is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, stride=2)
        self.twice = nn.Conv2d(4, 4, 3, padding=1, groups=2)
        self.back = nn.ConvTranspose2d(4, 2, 2, bias=False)
        self.frozen = nn.Conv2d(2, 2, 1)
        self.frozen.weight.requires_grad_(False)

    def forward(self, x):
        return self.frozen(self.back(self.twice(self.twice(self.first(x)))))


def gradients(model, x):
    model.zero_grad()
    model(x).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("by_plan", [False, True])
def test_each_kernel_is_timed_and_computes_the_same(by_plan, monkeypatch):
    torch.manual_seed(0)
    model, x = Model(), torch.randn(2, 3, 12, 12)
    traced = trace_layers(model, x).layers
    layers, built = layers_by_problem(traced, Config()), set()
    # The two samples of each kernel are computed one by one.
    plan = in_chunks(open_backend("auto"), traced, 1) if by_plan else None

    def spy(backend, problem, split):
        built.add(problem)
        return build(backend, problem, split)

    monkeypatch.setattr("ucudnn.execution.runner.build", spy)
    runs = []

    def clock(run):
        run()
        runs.append(run)
        return 7

    timer = KernelTimer(clock, Runner(plan) if plan else None)
    expected = gradients(model, x)
    with Installation("cpu", timer):
        found = gradients(model, x)
    assert timer.times_ns == {problem: 7 * len(names) for problem, names in layers.items()}
    assert built == set(layers if by_plan else ())
    assert len(runs) == sum(map(len, layers.values()))
    assert len(found) == len(expected) == 6
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_what_no_plan_can_be_made_for_is_computed_and_not_timed():
    timer = KernelTimer(lambda run: pytest.fail(f"{run} was timed"))
    x, w = torch.randn(0, 3, 9, 9), torch.randn(4, 3, 3, 3)
    with Installation("cpu", timer):
        found = nn.functional.conv2d(x, w)
    torch.testing.assert_close(found, nn.functional.conv2d(x, w))
    assert timer.times_ns == {}
