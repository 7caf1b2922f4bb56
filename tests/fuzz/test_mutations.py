"""Mutated files: a sentence or a sound value, whatever stands in them, and little memory.

`pytest tests/fuzz --mutations 10000 --mutation-seed 7` goes on for longer, with others.
"""

from __future__ import annotations

import importlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import signed
from torch import nn

import ucudnn
from ucudnn.config import Config
from ucudnn.errors import PlanError, UcudnnError
from ucudnn.plan import Plan

HERE = Path(__file__).parent
MOST_BYTES = 300 << 20


@pytest.fixture
def mutations(request: pytest.FixtureRequest) -> int:
    """How many."""
    return int(request.config.getoption("--mutations"))


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Where chance begins."""
    return int(request.config.getoption("--mutation-seed"))


def test_a_mutated_plan_is_refused_or_sound(mutations, seed, python):
    report = json.loads(python(HERE / "harness.py", "plan_files", mutations, seed).stdout)
    assert not report["findings"], "\n".join(report["first"])
    assert report["outcomes"]["values loaded"]
    assert report["outcomes"]["values refused"]
    assert report["peak_bytes"] < MOST_BYTES
    assert not report["torch"]


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Everything that a step computes."""
    leaf = x.clone().requires_grad_()
    y = model(leaf)
    return [y, *torch.autograd.grad(y.square().sum(), [leaf, *model.parameters()])]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore::UserWarning")  # of what such a plan does not cover
def test_a_mutated_plan_that_loads_computes_the_same(
    mutations: int,
    seed: int,
    tmp_path: Path,
    random_plan: Callable[..., Plan],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    mutate = importlib.import_module("plan_files").mutated_document
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(4, 4, 3, groups=2)
    ).double()
    x = torch.randn(4, 3, 7, 6, dtype=torch.float64)
    truth = gradients(model, x)
    path = tmp_path / "a.plan.json"
    random_plan(model, x, random.Random(seed), Config(unplanned="torch")).save(path)
    document: dict[str, Any] = json.loads(path.read_text())
    computed = 0
    for index in range(mutations):
        signed(mutate(document, random.Random(f"{seed} {index}")), path)
        try:
            plan = Plan.load(path)
        except PlanError:
            continue
        try:
            with ucudnn.installed(plan):
                found = gradients(model, x)
            ucudnn.convert_(model, plan)
            again = gradients(model, x)
        except UcudnnError:  # as for another device
            continue
        finally:
            ucudnn.revert_(model)
        for one, other, true in zip(found, again, truth, strict=True):
            torch.testing.assert_close(one, true, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(other, true, rtol=1e-9, atol=1e-9)
        computed += 1
    assert computed
