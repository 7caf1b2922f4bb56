"""`ucudnn check` and `ucudnn compare`: what they print, and their exit status."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from ucudnn.plan import Plan
from ucudnn.units import format_ns


@pytest.fixture
def tuned(ucudnn, model, output):
    """The path of a plan that was just measured."""
    flags = ("--input", "8x3x12x12", "--workspace-limit", "1MiB", "-o", output)
    done = ucudnn("tune", f"{model}:net", *flags)
    assert done.status == 0, done.err
    return output


@pytest.mark.nightly
def test_a_plan_that_was_just_tuned_is_true(ucudnn, tuned):
    done = ucudnn("check", tuned, "--canaries", "0")
    assert done.status == 0, done.out
    assert done.out.endswith("The plan is valid here.\n")
    assert ucudnn("compare", tuned, tuned).status == 0


def test_a_plan_that_was_just_made_is_true_but_for_what_is_timed(ucudnn, made):
    path = made("plan", workspace_limit="1MiB")
    done = ucudnn("check", path, "--canaries", "0")
    assert done.status == 0, done.out
    assert "ok  device: " in done.out
    assert "skipped  canary" in done.out
    assert done.out.endswith("The plan is valid here.\n")
    found = json.loads(ucudnn("check", path, "--canaries", "0", "--json").out)
    assert found["is_true"] is True
    abouts = [one["about"] for one in found["findings"]]
    assert abouts == ["device", "versions", "conditions", "build", "canary"]
    # One of another torch is not.
    plan = Plan.load(path)
    replace(plan, software=replace(plan.software, torch="1.0")).save(path)
    done = ucudnn("check", path, "--canaries", "0")
    assert done.status == 1
    assert "NO  versions: torch 1.0 there and " in done.out
    assert done.out.endswith("The plan is not valid here any more.\n")


@pytest.mark.slow
def test_canaries_are_timed(ucudnn, made, one_thread):
    del one_thread
    path = made("plan", workspace_limit="32KiB")
    assert sum(not kernel.is_default for kernel in Plan.load(path).kernels) > 2
    found = json.loads(ucudnn("check", path, "--canaries", "2", "--json").out)
    timed = [one for one in found["findings"] if one["about"].startswith("canary")]
    assert len(timed) == 2


def test_a_plan_is_the_same_as_itself_but_not_for_another_device(ucudnn, made, tmp_path):
    path = made("one")
    done = ucudnn("compare", path, path)
    assert done.status == 0
    assert "Both compute all 5 kernels alike." in done.out
    found = json.loads(ucudnn("compare", path, path, "--json").out)
    assert found == {"is_same": True, "differences": [], "changed": []}
    plan = Plan.load(path)
    elsewhere = tmp_path / "elsewhere.plan.json"
    replace(plan, device=replace(plan.device, name="abacus")).save(elsewhere)
    done = ucudnn("compare", path, elsewhere)
    assert done.status == 1
    assert f"device.name: {plan.device.name} | abacus" in done.out
    assert "alike, but were made for other devices or by other settings" in done.out


def test_in_what_two_plans_differ(ucudnn, made):
    paths = made("one"), made("other", 3, workspace_limit="32KiB", ops=("fprop",))
    one, other = map(Plan.load, paths)
    done = ucudnn("compare", *paths)
    assert done.status == 1
    assert "config.workspace_limit: none | 32768" in done.out
    assert "config.ops: ['fprop', 'dgrad', 'wgrad'] | ['fprop']" in done.out
    found = json.loads(ucudnn("compare", *paths, "--json").out)
    assert found["is_same"] is False
    assert {d["name"] for d in found["differences"]} == {"config.workspace_limit", "config.ops"}
    changed = {json.dumps(entry["problem"]): entry for entry in found["changed"]}
    for kernel in one.kernels:
        text = json.dumps(asdict(kernel.problem))
        counterpart = {k.problem: k for k in other.kernels}.get(kernel.problem)
        same = counterpart is not None and counterpart.decisions() == kernel.decisions()
        assert (text in changed) != same
        if same:
            continue
        entry = changed[text]
        assert entry["one"]["split"] == str(kernel.split(8))
        assert entry["one"]["plan_ns"] == kernel.timing.time_ns
        assert format_ns(kernel.timing.time_ns) in done.out
        assert (entry["other"] is None) == (counterpart is None)
