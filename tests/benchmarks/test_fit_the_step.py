"""Steps in less memory: plans at the peaks of torch's own ways, and what a cut off run keeps."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn

import ucudnn
from ucudnn.errors import PlanError

pytestmark = pytest.mark.filterwarnings("ignore::ucudnn.errors.UcudnnWarning")
CHECKPOINT = "torch.utils.checkpoint"


def network() -> nn.Module:
    """Blocks whose activations are most of the peak, and a small result: its loss takes little."""
    smooth = nn.Sigmoid(), nn.Tanh(), nn.Sigmoid(), nn.Tanh()
    blocks = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), *smooth) for _ in range(6)]
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), *blocks, nn.Conv2d(4, 1, 4, stride=4))


@pytest.fixture
def fit(script) -> ModuleType:
    return script("fit_the_step")


@pytest.fixture
def race(fit, tmp_path) -> Callable[..., Any]:
    """A function that makes a race of the ways of a small network."""

    def make(*shares: str, rivals: tuple[str, ...] = ("checkpoint",), rounds: int = 2) -> Any:
        # Other processes cannot import this test, but a network is made of torch's modules.
        case = fit.Case(partial(deepcopy, network()), (8, 1, 48, 48), shares)
        config = ucudnn.Config(effort="quick", time_budget_s=5)
        asked = fit.Asked("cpu", rounds, False, rivals, config)
        return fit.Race("small", case, asked, tmp_path / "fit.json", [{"network": "before"}])

    return make


def ways(path: Path) -> dict[str, Any]:
    before, found = json.loads((path / "fit.json").read_text())
    assert before == {"network": "before"}
    return found["ways"]


@pytest.mark.nightly
def test_a_plan_takes_what_the_checkpoints_take(race, tmp_path):
    found = race().run()
    title = f"segments at the peak of {CHECKPOINT}"
    assert [*found["ways"]] == ["torch", CHECKPOINT, title]
    row, rival = found["ways"][title], found["ways"][CHECKPOINT]
    assert row["peak_bytes"] <= rival["peak_bytes"] < found["ways"]["torch"]["peak_bytes"]
    assert row["budget_bytes"] == rival["peak_bytes"]
    plan = ucudnn.Plan.load(tmp_path / row["plan"])
    assert row["divided"] == [str(one) for one in plan.segments]
    assert len(row["divided"]) == row["segments"] > 0
    assert row["deviation"] < 1e-5
    assert [len(one["samples_ns"]) for one in found["ways"].values()] == [2, 2, 2]
    # what was returned is what was written
    assert ways(tmp_path) == found["ways"]


def test_a_run_that_is_cut_off_keeps_what_it_has(fit, race, monkeypatch, tmp_path):
    written = []

    def planned(_model: nn.Module, _x: torch.Tensor, config: ucudnn.Config) -> Any:
        written.append([*ways(tmp_path)])
        if config.memory_budget == "50%":
            raise KeyboardInterrupt
        raise PlanError("too little memory\nin two lines")

    monkeypatch.setattr(fit, "planned", planned)
    with pytest.raises(KeyboardInterrupt):
        race("70%", "50%", "30%", rivals=()).run()
    assert written == [["torch", CHECKPOINT]] * 2
    kept = json.loads((tmp_path / "fit.json").read_text())[-1]
    assert kept["refused"] == {"segments within 70%": "too little memory"}
    for row in kept["ways"].values():
        assert len(row["beside_torch_ns"]) == 2
        assert row["samples_ns"] == []


def test_no_result_is_held_during_backward(fit):
    """Results count in the peak of no way while the first module has its gradients computed."""
    model, alive = network(), []
    results: list[ref[torch.Tensor]] = []
    model.register_forward_hook(lambda *call: results.append(ref(call[-1])))
    model[0].weight.register_hook(lambda _: alive.append(results[0]() is not None))
    fit.Contestant(model).step(torch.randn(2, 1, 8, 8))
    assert alive == [False]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--budget-of", "checkpoint,nothing"), "checkpoint, compile, got nothing"),
        (("--budget-of", "compile", "--no-compile"), "of checkpoint, got compile"),
    ],
)
def test_the_rivals_are_those_that_run(fit, monkeypatch, capsys, options, said):
    monkeypatch.setattr("sys.argv", ["fit_the_step.py", "segresnet", *options])
    with pytest.raises(SystemExit):
        fit.main()
    assert said in capsys.readouterr().err
