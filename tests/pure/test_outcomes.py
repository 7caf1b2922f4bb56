"""What plans keep of how they were judged: what is printed, kept in a file, and refused."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from by_hand import signed

from ucudnn.config import Config
from ucudnn.errors import PlanError, PlanFileError
from ucudnn.measurement import Conditions, Device, Software
from ucudnn.outcomes import Compilation, LayoutRace, Origin, StepMemory, StepRace, Way
from ucudnn.plan import Plan
from ucudnn.verdict import TOLERATED

PLAN = Plan((), Device("cpu", "any"), Software("2.13"), Conditions(), Config())
RACE = StepRace(110_000, 100_000, 0.91, 0.9, 0.92, 5)
LAST = {"memory_format": "channels_last", "ratio": 0.8, "low": 0.79, "high": 0.81, "rounds": 5}
WAYS = (
    Way("torch", "torch", time_ns=100, rounds=5),
    Way("plan", "plan in channels_last", time_ns=80, **LAST),
)
MEMORY = StepMemory(*[1] * 7)
KINDS = {
    "step_race": StepRace,
    "layout_race": LayoutRace,
    "compilation": Compilation,
    "memory": StepMemory,
    "origin": Origin,
}


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
        f"{plain}, and its peak is 2 MiB against 3 MiB; 2 "
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
    "outcome",
    [
        {"step_race": replace(RACE, dropped=("fprop", "dgrad"), inside=(0.6, 0.5, 0.7))},
        {"layout_race": LayoutRace(WAYS, 1)},
        {"layout_race": LayoutRace(WAYS, is_fixed=True)},
        {"compilation": Compilation(3, "why not", 2)},
        {"memory": MEMORY},
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


def test_what_a_race_of_layouts_prints() -> None:
    against = "takes 0.80 (0.79 to 0.81) times as long as by torch, 80 ns against 100 ns"
    assert str(LayoutRace(WAYS, 1)) == (
        f"the layout is channels_last: a step by plan in channels_last {against}"
    )
    assert str(LayoutRace(WAYS)) == (
        "the layout is the model's own: torch's own steps are the fastest, 100 ns"
    )
    assert str(LayoutRace(reason="why not")) == "the model keeps its layout: why not"
    # The settings keep the layout: the race is of the plan and of torch in the other layout.
    plan, last = Way("plan", "plan", time_ns=100, rounds=2), replace(WAYS[1], kind="torch")
    kept = LayoutRace((plan, replace(last, name="torch in channels_last")), is_fixed=True)
    said = "the layout is the model's own: a step by torch in channels_last"
    against = against.replace("by torch", "by plan")
    assert str(kept) == f'{said} {against}; layout="auto" would make a plan for channels_last, too'
    assert kept.memory_format == "keep"
    little = replace(kept, ways=(plan, replace(kept.ways[1], ratio=0.96)))
    assert "auto" not in str(little)
    assert str(LayoutRace(reason="why not", is_fixed=True)) == (
        "channels_last was not tried: why not"
    )


def test_what_a_compilation_prints() -> None:
    assert str(Compilation(seconds=34, graphs=2, nodes=90, uncompiled=3)) == (
        "the steps that judged it were compiled by torch.compile, which took 34 s beside the time "
        "budget: 2 graphs of 90 operators, 3 operators beside them"
    )
    assert str(Compilation(2, relaid=5)).endswith(
        "; there 5 convolutions are in another layout than in the plan, which does not act on "
        "them: tune with layout='auto', or in the other layout"
    )
    none = Compilation(2, "torch.compile failed (no compiler)", not_tried=("compiled, 3 segments",))
    assert str(none) == (
        "the steps that judged it were not compiled, which took 2 s beside the time budget: "
        "torch.compile failed (no compiler); not tried for lack of time: compiled, 3 segments"
    )
    left = Compilation(reason="why not", left_out=(("compiled", "its result differs"),))
    assert str(left) == (
        "the steps that judged it were not compiled: why not; compiled: its result differs"
    )


@pytest.mark.parametrize(
    ("outcome", "name", "value", "sentence"),
    [
        (RACE, "torch_ns", -1, "Expected `int` >= 0"),
        (RACE, "plan_ns", 1.5, "Expected `int`, got `float`"),
        (RACE, "rounds", True, "Expected `int`, got `bool`"),
        (RACE, "plan_peak_bytes", 1 << 63, "Expected `int` <= 9223372036854775807"),
        (RACE, "ratio", 0.0, "Expected `float` > 0.0"),
        (RACE, "low", math.nan, "Expected `float` > 0.0"),
        (RACE, "high", math.inf, "Expected `float` <= 1.79"),
        (RACE, "inside", [1.0, 0.9], "Expected `array` of length 3, got 2"),
        (RACE, "dropped", "ab", "Expected `array`, got `str`"),
        (RACE, "reason", None, "Expected `str`, got `null`"),
        (Compilation(3), "relaid", -1, "Expected `int` >= 0"),
        (LayoutRace(WAYS, 1), "winner", "5", "Expected `int`, got `str`"),
        (MEMORY, "is_training", 1, "Expected `bool`, got `int`"),
        (MEMORY, "calls", [[0, -1]], "Expected `int` >= 0"),
        (Origin("net"), "left_out", "abc", "Expected `array`, got `str`"),
    ],
)
def test_a_file_with_what_cannot_be_is_refused_and_the_place_is_named(
    outcome: Any, name: str, value: Any, sentence: str, tmp_path: Path
) -> None:
    (field,) = (one for one, kind in KINDS.items() if isinstance(outcome, kind))
    document = replace(PLAN, **{field: outcome}).to_dict()
    document[field][name] = value
    place = f".*at `\\$.{field}.{name}"
    with pytest.raises(PlanFileError, match=re.escape(sentence) + place):
        Plan.load(signed(document, tmp_path / "plan.json"))


def test_layouts_of_a_file_are_known_and_one_way_won(tmp_path: Path) -> None:
    document = replace(PLAN, layout_race=LayoutRace(WAYS, 1)).to_dict()
    document["layout_race"]["winner"] = 2
    with pytest.raises(PlanError, match="winner must be the index of a way, got 2"):
        Plan.load(signed(document, tmp_path / "plan.json"))
    document["layout_race"]["ways"][1]["memory_format"] = "blocked"
    with pytest.raises(PlanError, match=r"layout_race.ways\[1\].memory_format"):
        Plan.load(signed(document, tmp_path / "plan.json"))
    document = {**PLAN.to_dict(), "memory_format": "keep\n"}
    with pytest.raises(PlanError, match=r"matching regex .*at `\$.memory_format"):
        Plan.load(signed(document, tmp_path / "plan.json"))


def test_a_share_of_activations_is_one(tmp_path: Path) -> None:
    for share in (1.5, "yes"):
        document = {**PLAN.to_dict(), "compiled": share}
        with pytest.raises(PlanError, match=r"at `\$.compiled`"):
            Plan.load(signed(document, tmp_path / "plan.json"))
    with pytest.raises(PlanError, match="compiled must be a share of the activations from 0.0 to"):
        replace(PLAN, compiled=1.5)
    for share in (0.0, 0.5, 1.0, "no"):
        replace(PLAN, compiled=share).save(tmp_path / "plan.json")
        loaded = Plan.load(tmp_path / "plan.json")
        assert (loaded.compiled, loaded.hash) != (PLAN.compiled, PLAN.hash)
        assert loaded.compiled == share


@pytest.mark.parametrize("change", [{"more": 1}, {"rounds": None}])
def test_a_signed_file_has_the_fields_of_a_plan_and_no_others(
    change: dict[str, Any], tmp_path: Path
) -> None:
    document = replace(PLAN, step_race=RACE).to_dict()
    kept = {name: value for name, value in document["step_race"].items() if name not in change}
    document["step_race"] = kept | {name: one for name, one in change.items() if one}
    with pytest.raises(PlanError, match="its checksum does not agree with its contents"):
        Plan.load(signed(document, tmp_path / "plan.json"))
