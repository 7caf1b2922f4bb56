"""Tuning real models on this machine's CPU: small, but every station is the real one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ucudnn
from ucudnn.backends import open_backend
from ucudnn.benchmark.protocol import Ring, WholeLoop
from ucudnn.config import Config
from ucudnn.errors import ConfigError, PlanError
from ucudnn.execution.execute import bind


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 1))


INPUT = (8, 3, 24, 24)


@pytest.mark.slow
def test_no_kernel_exceeds_the_limit_when_run():
    # Within the default budget a busy machine may not get to smaller batches.
    config = Config(workspace_limit="200KiB", time_budget_s=600)
    plan = ucudnn.tune(model(), torch.empty(INPUT), config)
    backend = open_backend("auto")
    limit = plan.config.limit_bytes
    for kernel in plan.kernels:
        for batch in (8, 7, 3, 1):
            problem = kernel.problem.with_batch(batch)
            split = plan.split(problem)
            call = bind(backend, problem, split)
            loop = WholeLoop(Ring.allocate(backend, problem), call)
            assert backend.workspace_bytes(loop.once, call.parts) <= limit, f"{problem}: {split}"


@pytest.mark.slow
def test_model_is_unchanged():
    net = model()
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    types = [type(module) for module in net.modules()]
    ucudnn.tune(net, torch.empty(INPUT), Config(policy="undivided"))
    assert [type(module) for module in net.modules()] == types
    assert all(torch.equal(net.state_dict()[name], tensor) for name, tensor in state.items())
    assert all(parameter.grad is None for parameter in net.parameters())


@pytest.mark.slow
def test_second_tune_measures_nothing():
    events = []
    config = Config(policy="undivided", step_race=False)
    first = ucudnn.tune(model(), torch.empty(INPUT), config)
    second = ucudnn.tune(model(), torch.empty(INPUT), config, events.append)
    assert events[-1].measured == 0
    assert events[-1].reused > 0
    assert second == first


@pytest.mark.slow
def test_tune_and_convert_in_one_line():
    net, reference = model(), model()
    conversion = ucudnn.tune_(net, torch.empty(INPUT), Config(workspace_limit="100KiB"))
    assert {*conversion.swapped, *conversion.left} == {"0", "2"}
    x = torch.randn(INPUT)
    torch.testing.assert_close(net(x), reference(x), rtol=1e-4, atol=1e-5)


def test_inference_plans_the_forward_pass_only():
    plan = ucudnn.tune(model(), torch.empty(INPUT), Config(ops=("fprop",), policy="undivided"))
    assert {kernel.problem.op for kernel in plan.kernels} == {"fprop"}


def test_a_model_without_convolutions():
    with pytest.raises(ConfigError, match="there is no convolution to plan"):
        ucudnn.tune(nn.Linear(3, 3), torch.empty(2, 3))


def test_input_of_the_wrong_shape():
    with pytest.raises(ConfigError, match=r"does not accept example inputs of shapes \[\(2, 4"):
        ucudnn.tune(model(), torch.empty(2, 4, 9, 9))


def test_a_limit_nothing_fits():
    with pytest.raises(PlanError, match="fits workspace_limit=0 B; the smallest needs") as caught:
        ucudnn.tune(model(), torch.empty(INPUT), Config(workspace_limit=0))
    assert caught.value.smallest_bytes > 0
