"""Simulated ranks of benchmarks/communication_accuracy.py: ways that change nothing or little."""

from __future__ import annotations

import runpy
from functools import partial

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


def test_ways_that_change_nothing_or_little(ways):
    plain = trained(made(ways["Job"]))
    averaged = trained(made(partial(ways["Apart"], 1, None)))
    assert (plain - averaged).abs().max() < 1e-6
    # Of half the numbers the largest are sent, and the others a step later.
    coded = trained(made(partial(ways["Coded"], TopK(0.49))))
    assert (plain - coded).abs().max() < 0.05


def test_the_first_delayed_gradients_are_zeros(ways):
    start = torch.cat([one.detach().flatten() for one in made(ways["Late"]).model.parameters()])
    assert torch.equal(trained(made(ways["Late"]), 1), start)
    assert not torch.equal(trained(made(ways["Late"]), 2), start)
