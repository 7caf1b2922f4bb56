"""`ucudnn bench`: ways, plans, JSON, and flags that contradict each other."""

from __future__ import annotations

import json

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ucudnn.errors.NoiseWarning"),
]
SHAPE = ("--input", "2x3x12x12")


def test_it_tunes_and_prints_every_way_that_was_asked_for(ucudnn, model, tmp_path):
    arguments = ("bench", f"{model}:net", *SHAPE, "--effort", "quick", "--cache", tmp_path)
    done = ucudnn(*arguments, "--ways", "eager,channels_last,plan")
    assert done.status == 0
    for text in ("training step", "eager", "channels_last", "plan", "Tuning took", "A step by "):
        assert text in done.out
    document = json.loads(ucudnn(*arguments, "--ways", "eager,plan", "--infer", "--json").out)
    assert document["is_training"] is False
    assert [one["way"] for one in document["ways"]] == ["eager", "plan"]
    assert all(len(one["samples_ns"]) >= 5 for one in document["ways"])
    assert document["plan"]["memory_format"] in ("keep", "channels_last")


def test_a_plan_file_is_followed_and_not_tuned_again(ucudnn, model, tmp_path):
    path = tmp_path / "net.plan.json"
    assert ucudnn("tune", f"{model}:net", *SHAPE, "--effort", "quick", "-o", path).status == 0
    done = ucudnn("bench", f"{model}:net", *SHAPE, "--plan", path, "--ways", "eager,plan")
    assert done.status == 0
    assert "Tuning took" not in done.out
    done = ucudnn("bench", f"{model}:net", *SHAPE, "--plan", path, "--layout", "auto")
    assert done.status == 2
    assert "--plan is tuned already" in done.err


def test_an_unknown_way_is_refused_before_anything_is_tuned(ucudnn, model):
    done = ucudnn("bench", f"{model}:net", *SHAPE, "--ways", "eager,fastest")
    assert done.status == 2
    assert "ways must be some of eager, channels_last, compile" in done.err
    assert "'eager,fastest'" in done.err


def test_flags_of_tuning_are_refused_where_nothing_is_tuned(ucudnn, model, tmp_path):
    words = ("bench", f"{model}:net", *SHAPE, "--ways", "eager")
    for flag in (("--time-budget", "3"), ("--cache", tmp_path), ("--plan", "net.plan.json")):
        done = ucudnn(*words, *flag)
        assert done.status == 2
        assert f"--ways has none that follows a plan; leave out {flag[0]}" in done.err


def test_several_sizes_of_inputs_are_refused(ucudnn, model):
    done = ucudnn("bench", f"{model}:net", "--input", "2x3x12x12,2x3x9x9")
    assert done.status == 2
    assert "one input size, got 2 sizes" in done.err
