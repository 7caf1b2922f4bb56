"""What plans keep of how they were judged: what is printed, kept in a file, and refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ucudnn.config import Config
from ucudnn.errors import PlanError
from ucudnn.measurement import Conditions, Device, Software
from ucudnn.outcomes import TOLERATED, Compilation, Contestant, LayoutRace, StepMemory, StepRace
from ucudnn.plan import Plan

PLAN = Plan((), Device("cpu", "any"), Software("2.13"), Conditions(), Config())
RACE = StepRace(110_000, 100_000, 0.91, 0.9, 0.92, 5)


@pytest.mark.parametrize(
    ("low", "high", "is_loss"),
    [
        (0.90, 0.99, False),
        (0.90, 1.00, False),
        (1.0 + TOLERATED, 1.2, False),
        (1.001 + TOLERATED, 1.2, True),
    ],
)
def test_a_loss_is_beyond_the_noise(low: float, high: float, is_loss: bool) -> None:
    assert replace(RACE, low=low, high=high).is_loss == is_loss


def test_no_race_is_no_loss() -> None:
    for race in (StepRace(low=2.0, high=3.0), StepRace(low=0.1, high=0.2)):
        assert not race.is_loss


def test_what_a_race_prints() -> None:
    assert str(StepRace(reason="the model has no loss")) == (
        "the plan was not judged by whole steps: the model has no loss"
    )
    plain = (
        "a step takes 0.91 (0.90 to 0.92) times as long as by torch's own: 100 us against 110 us"
    )
    assert str(RACE) == plain
    whole = replace(RACE, torch_peak_bytes=3 << 20, plan_peak_bytes=2 << 20, dropped=("a", "b"))
    assert str(whole) == (
        f"{plain}, and its peak is 2 MiB above what was allocated before it, against 3 MiB; 2 "
        "kernels did not pay there and are torch's own"
    )
    assert str(replace(RACE, dropped=("a",))).endswith(
        "; 1 kernel did not pay there and is torch's own"
    )
    assert str(replace(RACE, inside=(0.631, 0.536, 0.764))) == (
        f"{plain}; inside steps the kernels that the plan changes take 0.63 (0.54 to 0.76) times "
        "as long"
    )


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("torch_ns", -1, "counts of a race of steps must be ints from 0"),
        ("plan_ns", 1.5, "counts of a race of steps must be ints from 0"),
        ("rounds", True, "counts of a race of steps must be ints from 0"),
        ("plan_peak_bytes", 1 << 63, "counts of a race of steps must be ints from 0"),
        ("ratio", 0.0, "ratios of a race of steps must be above 0"),
        ("low", math.nan, "ratios of a race of steps must be above 0"),
        ("high", math.inf, "ratios of a race of steps must be above 0"),
        ("high", 1, "ratios of a race of steps must be above 0"),
        ("inside", (1.0, 0.9, math.nan), "ratios of a race of steps must be above 0"),
        ("inside", (1.0, 0.9), "inside must be a ratio with its interval"),
        ("dropped", (3,), "names and reasons of a race of steps must be strings"),
        ("reason", None, "names and reasons of a race of steps must be strings"),
    ],
)
def test_a_race_that_cannot_be_is_refused(name: str, value: Any, sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        replace(RACE, **{name: value})


CONTESTANTS = (Contestant("keep", False, 100), Contestant("channels_last", True, 80, 0.8))


@pytest.mark.parametrize(
    "outcome",
    [
        {"step_race": replace(RACE, dropped=("fprop", "dgrad"), inside=(0.6, 0.5, 0.7))},
        {"layout_race": LayoutRace(CONTESTANTS, 1, 5)},
        {"compilation": Compilation(3, "why not", 2)},
    ],
    ids=lambda outcome: next(iter(outcome)),
)
def test_a_file_keeps_it_and_the_hash_does_not(outcome: dict[str, Any], tmp_path: Path) -> None:
    judged = replace(PLAN, **outcome)
    assert judged.hash == PLAN.hash
    judged.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    for name, value in outcome.items():
        assert getattr(loaded, name) == value
        assert name not in PLAN.to_dict()


def test_what_a_compilation_prints() -> None:
    assert str(Compilation(seconds=34)) == (
        "the steps that judged it were compiled by torch.compile, which took 34 s beside the time "
        "budget"
    )
    assert str(Compilation(2, relaid=5)).endswith(
        "; there 5 convolutions are in another layout than in the plan, which does not act on "
        "them: tune with layout='auto', or in the other layout"
    )
    assert str(Compilation(2, "torch.compile failed (no compiler)")) == (
        "the model is compiled, but the steps that judged its plan were not: torch.compile failed "
        "(no compiler)"
    )


@pytest.mark.parametrize(
    "values",
    [{"seconds": -1}, {"seconds": True}, {"seconds": 1.5}, {"relaid": -1}, {"reason": None}],
)
def test_a_compilation_that_cannot_be_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="(counts|reasons) of a compilation must be (ints|strings)"):
        Compilation(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"memory_format": "blocked"},
        {"time_ns": -1},
        {"ratio": 0.0},
        {"is_allowed": 1},
        {"peak_bytes": 1.5},
    ],
    ids=str,
)
def test_a_contestant_holds_what_it_may(values: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="contestant"):
        Contestant(**{"memory_format": "keep", "is_plan": True, "time_ns": 1, **values})


@pytest.mark.parametrize("values", [{"rounds": -1}, {"winner": 1}, {"reason": None}], ids=str)
def test_a_race_of_layouts_holds_what_it_may(values: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=r"of a race of layouts must be|winner must be"):
        LayoutRace(**values)


@pytest.mark.parametrize(
    "values",
    [{"budget_bytes": -1}, {"is_training": 1}, {"calls": ((0, -1),)}],
)
def test_the_memory_of_a_plan_file_is_checked(values: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="step's memory"):
        StepMemory(**{**dict.fromkeys(StepMemory.__slots__[:7], 1), **values})
