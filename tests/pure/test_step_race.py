"""Races of whole steps: who won, what is printed, what a file holds, what cannot be."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from ucudnn.errors import PlanError
from ucudnn.outcomes import TOLERATED, StepRace

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


def test_what_is_printed() -> None:
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


def test_json_gives_it_back() -> None:
    race = replace(RACE, dropped=("fprop", "dgrad"), inside=(0.6, 0.5, 0.7))
    values = json.loads(json.dumps(race.to_dict()))
    assert StepRace.from_dict(values) == race


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
def test_what_cannot_be_is_refused(name: str, value: Any, sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        replace(RACE, **{name: value})
