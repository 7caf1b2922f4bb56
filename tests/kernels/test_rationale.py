"""Fronts and rejected alternatives with what each would cost, of what was measured here."""

from __future__ import annotations

from dataclasses import replace

import pytest
from by_hand import front, linear

from ucudnn import cache as caches
from ucudnn.config import Config
from ucudnn.kernels.rationale import rationales
from ucudnn.kernels.tune import tune_problems
from ucudnn.outcomes import StepRace
from ucudnn.problem import Problem

MS, MIB = 1_000_000, 1 << 20
PROBLEM = Problem("fprop", 8, 2, 2, (9, 9), (1, 1))
OTHER = replace(PROBLEM, out_channels=3)


@pytest.fixture
def planned(scripted, tmp_path):
    """A plan of two kernels in which `fast` is split because of the limit, and its settings."""
    scripted(
        torch_default=linear(3, 0.5),
        fast=linear(1, 2),
        near=linear(1.2, 0.25),
        broken=lambda _: (None, 0),
    )
    config = Config(workspace_limit="4MiB", cache=str(tmp_path / "cache"), effort="thorough")
    return tune_problems([("a", PROBLEM), ("b", OTHER)], config), config


def found(plan, config):
    with caches.open(config.cache, "r") as cache:
        return {str(one.split): one for one in rationales(plan, cache)[0].alternatives}


def test_alternatives_have_what_they_cost(planned):
    plan, config = planned
    assert str(plan.kernels[0].split(8)) == "4x2 fast"
    by_split = found(plan, config)
    assert "4x2 fast" not in by_split
    default = by_split["8 torch_default"]
    assert (default.time_ns, default.workspace_bytes) == (24 * MS, 4 * MIB)
    assert default.is_measured
    assert default.reason == "takes 3.00 times as long"
    near = by_split["8 near"]
    assert near.workspace_bytes == 2 * MIB
    assert near.reason == "takes 1.20 times as long"
    # what only a higher limit allows
    assert any("fast" in split and "over" not in split for split in by_split)
    broken = next(one for split, one in by_split.items() if "broken" in split)
    assert broken.time_ns is None
    assert "broken does not work" in broken.reason
    times = [one.time_ns for one in by_split.values() if one.time_ns is not None]
    assert times == sorted(times)


def test_the_settings_say_why_not(planned):
    plan, config = planned
    by_split = found(replace(plan, config=replace(config, workspace_limit="1MiB")), config)
    assert by_split["8 torch_default"].reason == "needs more than the limit of 1 MiB"
    exact = replace(plan, config=replace(config, max_error=1e-30))
    assert found(exact, config)["8 torch_default"].error is not None


def test_what_seems_faster_has_its_reason(planned):
    plan, config = planned
    kernel = plan.kernels[0]
    slow = replace(kernel, timing=replace(kernel.timing, time_ns=90 * MS))
    slower = replace(plan, kernels=(slow,))
    by_split = found(slower, config)
    reasons = {
        one.reason for one in by_split.values() if one.time_ns and one.workspace_bytes <= 4 * MIB
    }
    assert reasons == {
        "is not faster beyond the noise",
        "its parts add up to less, but it was not raced as a whole call",
    }
    assert by_split["8 torch_default"].reason == "is not faster beyond the noise"
    race = StepRace(9, 9, 1.0, 1.0, 1.0, 3, dropped=(str(PROBLEM),))
    assert found(replace(slower, step_race=race), config)["8 near"].reason == (
        "steps were not faster with the plan of this kernel"
    )


def test_measurements_of_other_machines_say_nothing(planned):
    plan, config = planned
    other = replace(plan, software=replace(plan.software, torch="9"))
    assert list(found(other, config)) == ["8 torch_default"]  # which the plan itself knows
    assert not known(other, config)[0][0].front


def known(plan, config):
    with caches.open(config.cache, "r") as cache:
        return rationales(plan, cache), list(cache)


def test_a_front_is_that_of_all_splits_of_what_was_timed(planned):
    plan, config = planned
    found, entries = known(plan, config)
    for kernel, one in zip(plan.kernels, found, strict=True):
        chunks = {
            (entry.key.problem.batch, entry.time_ns, entry.workspace_bytes)
            for entry in entries
            if entry.key.problem.with_batch(8) == kernel.problem
            and (entry.key.subject, entry.status) == ("chunk", "ok")
        }
        assert one.front == front(chunks, 8)
        assert one.alternatives[0].time_ns <= one.alternatives[1].time_ns


def test_without_measurements_there_is_what_the_plan_knows(planned):
    plan, _ = planned
    for one in rationales(plan, []):
        assert one.front == ()
        assert [str(other.split) for other in one.alternatives] == ["8 torch_default"]
