"""Simulated ranks of benchmarks/communication_accuracy.py: ways that change nothing or little."""

from __future__ import annotations

import runpy

import pytest
import torch

from ucudnn.distributed import TopK


@pytest.fixture(scope="module")
def ways(repository):
    return runpy.run_path(str(repository / "benchmarks" / "communication_accuracy.py"))


def trained(job, steps=4):
    chance = torch.Generator().manual_seed(1)
    for _ in range(steps):
        images = torch.randn(8, 1, 8, 8, generator=chance)
        job.step(images, torch.randint(10, (8,), generator=chance))
    return torch.cat([one.detach().flatten() for one in job.trained().parameters()])


def made(make):
    torch.manual_seed(0)
    return make(4, 0.1)


@pytest.mark.parametrize(
    "make",
    [
        lambda ways: lambda ranks, rate: ways["Coded"](TopK(0.49), ranks, rate),
        lambda ways: lambda ranks, rate: ways["Apart"](1, None, ranks, rate),
    ],
    ids=["top-k", "average"],
)
def test_ways_that_change_nothing_or_little(ways, make):
    plain = trained(made(ways["Job"]))
    found = trained(made(make(ways)))
    # Of half the numbers the largest are sent, and the others a step later.
    most = 1e-6 if make(ways)(4, 0.1).__class__.__name__ == "Apart" else 0.05
    assert (plain - found).abs().max() < most


def test_the_first_delayed_gradients_are_zeros(ways):
    start = torch.cat([one.detach().flatten() for one in made(ways["Late"]).model.parameters()])
    assert torch.equal(trained(made(ways["Late"]), 1), start)
    assert not torch.equal(trained(made(ways["Late"]), 2), start)
