"""`ucudnn foresee`, and `ucudnn advise --dry-run`: what is said of steps that nobody runs."""

from __future__ import annotations

import json
import re

import pytest

from ucudnn.steps.run import Steps

SHAPE = ("--input", "6x3x32x32")


@pytest.fixture
def foresee(ucudnn, model):
    """Foresee a step of the small network."""

    def run(*flags, shape=SHAPE):
        return ucudnn("foresee", f"{model}:net", *shape, *flags)

    return run


@pytest.fixture
def no_steps(monkeypatch):
    """Refuse every real step of a whole model."""

    def run(_):
        raise AssertionError("a step was run")

    monkeypatch.setattr(Steps, "__call__", run)


def numbers(foresee, *flags, shape=SHAPE):
    done = foresee(*flags, "--json", shape=shape)
    assert done.status == 0, done.err
    return json.loads(done.out)


@pytest.mark.usefixtures("no_steps")
def test_it_says_peak_time_and_what_fills_it(foresee):
    done = foresee()
    assert done.status == 0, done.err
    first, *rest = done.out.splitlines()
    assert re.fullmatch(
        r"A training step of 6 samples has at most [\d.]+ [KM]iB allocated and takes about "
        r"[\d.]+ [mu]s \(foreseen\)\.",
        first,
    )
    assert [line.split()[2] for line in rest[:2]] == ["parameters", "buffers,"]
    assert "backward" in done.out


def test_json_holds_the_same_numbers(foresee):
    found = numbers(foresee)
    assert found["batch"] == 6
    assert found["is_training"] is True
    assert found["time_ns"] > 0
    held, fills = dict(found["held"]), dict(found["fills"])
    assert held["parameters"] == 4 * (3 * 8 * 9 + 8 + 8 * 4 + 4)
    # What the network keeps for backward, beside its input: the results of its layers.
    results = 4 * 6 * 32 * 32 * (8 + 8)
    assert sum(held.values()) + results < found["peak_bytes"]
    assert found["peak_bytes"] == sum(held.values()) + sum(fills.values())
    assert "fits" not in found


def test_an_inference_keeps_no_activations(foresee):
    infers = numbers(foresee, "--eval")
    assert infers["is_training"] is False
    assert infers["peak_bytes"] < numbers(foresee)["peak_bytes"]
    assert infers["peak_bytes"] == numbers(foresee, "--infer")["peak_bytes"]


def test_the_state_of_an_optimizer_counts(foresee):
    plain, adam = numbers(foresee), numbers(foresee, "--optimizer", "adamw")
    state = 2 * dict(plain["held"])["parameters"]
    assert dict(adam["held"])["optimiser state"] == state
    assert adam["peak_bytes"] == plain["peak_bytes"] + state


@pytest.mark.slow
def test_the_largest_batch_that_fits(foresee):
    done = foresee("--fits", "1MiB")
    assert done.status == 0, done.err
    batch = int(re.search(r"Within 1MiB, (\d+) samples fit undivided\.", done.out)[1])
    fits = numbers(foresee, "--fits", "1MiB")["fits"]
    assert fits["undivided"] == batch
    assert fits["in segments"] > batch

    # The needs of operators are extrapolated to other batches, which is less exact.
    shapes = [("--input", f"{samples}x3x32x32") for samples in (batch - 1, batch + 2)]
    less, more = (numbers(foresee, shape=shape)["peak_bytes"] for shape in shapes)
    assert less <= 1 << 20 < more
    assert numbers(foresee, "--fits", "1KiB")["fits"] == {"undivided": 0, "in segments": 0}


@pytest.mark.slow
def test_a_step_by_a_plan(ucudnn, foresee, model, output):
    quick = ("--effort", "quick", "--policy", "undivided", "--no-step-race", "-o", output)
    tuned = ucudnn("tune", f"{model}:net", *SHAPE, "--memory-budget", "60%", *quick)
    assert tuned.status == 0, tuned.err
    memory = json.loads(output.read_text())["memory"]
    found = numbers(foresee, "--plan", output, "--fits", "1MiB")
    assert found["peak_bytes"] < numbers(foresee)["peak_bytes"]
    assert found["peak_bytes"] == memory["plan_foreseen_bytes"]
    # In a network as small as this one, the states of random generators matter.
    assert found["peak_bytes"] == pytest.approx(memory["plan_peak_bytes"], rel=0.1)
    assert found["fits"]["by the plan"] > found["fits"]["undivided"]


BAD_CALLS = [
    (("--fits", "8XiB"), "--fits must be"),
    (("--optimizer", "adamx"), "--optimizer must be one of sgd, momentum, "),
    (("--plan", "nowhere.json"), "cannot read the plan nowhere.json"),
    (("--eval", "--ops", "fprop"), "No such option"),
    (("--fits", "1MiB", "--input", "6x3x32x32,2x3x16x16"), "one size of inputs"),
    (("--backend", "recorded"), "recording"),
    (("--backend", "nothing"), "--backend must be one of"),
]


@pytest.mark.parametrize(("flags", "said"), BAD_CALLS, ids=lambda one: str(one)[:30])
def test_bad_calls_say_one_sentence(foresee, flags, said):
    done = foresee(*flags, shape=() if "--input" in flags else SHAPE)
    assert done.status == 2
    assert said in done.err
    assert "Traceback" not in done.err
    assert done.out == ""


@pytest.mark.slow
@pytest.mark.usefixtures("no_steps")
def test_advice_without_a_step(ucudnn, model):
    arguments = ("advise", f"{model}:net", *SHAPE, "--dry-run")
    done = ucudnn(*arguments)
    assert done.status == 0, done.err
    assert done.out.startswith("Verdict: ")
    assert "~: estimated, not run." in done.out
    found = json.loads(ucudnn(*arguments, "--memory-budget", "60%", "--json").out)
    assert found["ways"][0]["name"] == "as it is"
    assert all(way["is_estimated"] for way in found["ways"])
    assert all(way["largest"]["batch"] > 0 for way in found["ways"])
    assert found["kernels"] == []
