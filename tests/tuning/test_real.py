"""Tuning real models on this machine's CPU: small, but every station is the real one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ucudnn
from ucudnn.backends import open_backend
from ucudnn.benchmark.protocol import Ring, WholeLoop
from ucudnn.config import Config
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
def test_tune_and_convert_in_one_line():
    net, reference = model(), model()
    conversion = ucudnn.tune_(net, torch.empty(INPUT), Config(workspace_limit="100KiB"))
    assert {*conversion.swapped, *conversion.left} == {"0", "2"}
    x = torch.randn(INPUT)
    torch.testing.assert_close(net(x), reference(x), rtol=1e-4, atol=1e-5)


def test_inference_plans_the_forward_pass_only():
    plan = ucudnn.tune(model(), torch.empty(INPUT), Config(ops=("fprop",), policy="undivided"))
    assert {kernel.problem.op for kernel in plan.kernels} == {"fprop"}
