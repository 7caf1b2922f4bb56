"""Tuning by real processes: each measures a part, one decides, and all end with its plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ucudnn import cache as caches
from ucudnn.measurement import Subject


def count(place: Path | str) -> int:
    """Measurements of chunks and calls in a cache, without those of the machine itself."""
    with caches.open(place, "r") as cache:
        return sum(one.key.subject in (Subject.CHUNK, Subject.CALL) for one in cache)


def test_ranks_that_tune_alone_end_with_different_plans(launch):
    """Else the tests below would show nothing."""
    said = launch("tune_alone", 4).end()
    assert len({one["hash"] for one in said}) == 4


@pytest.mark.parametrize(("ranks", "share"), [(2, 0.6), (4, 0.35)])
def test_each_rank_measures_a_part_and_all_have_the_plan_of_one_process(
    launch, tmp_path, ranks, share
):
    said = launch("tune", ranks).end()
    measured = [one["measured"] for one in said]
    # Nothing twice: what was measured is in the cache once.
    assert sum(measured) == count(tmp_path / "cache")
    assert max(measured) <= share * sum(measured)
    assert all(one["document"] == said[0]["document"] for one in said)
    # `ucudnn.tune` finds all of it in the cache, and decides alike.
    assert said[0]["of one process"] == [said[0]["hash"], 0]


def test_what_was_tuned_once_is_not_measured_again_by_any_number_of_ranks(launch):
    first = launch("tune", 2).end()
    for ranks in (4, 1):
        again = launch("tune", ranks).end()
        assert [one["ran"] for one in again] == [0] * ranks
        assert {one["hash"] for one in again} == {first[0]["hash"]}


def test_of_several_caches_that_of_the_first_rank_gets_everything(launch, tmp_path):
    places = [str(tmp_path / name) for name in ("a", "b", "c")]
    first = launch("tune", 3, places=places).end()
    assert count(places[0]) == sum(one["measured"] for one in first)
    assert 0 < count(places[1]) < count(places[0])
    # Also what ranks had measured in earlier jobs.
    again = launch("tune", 3, places=[str(tmp_path / "d"), *places[1:]]).end()
    assert [one["ran"] for one in again[1:]] == [0, 0]
    assert count(tmp_path / "d") == count(places[0])


def test_tuning_judges_steps_and_layouts_within_a_budget_as_in_one_process(launch):
    said = launch("tune_whole", 2, layout="auto", policy="undivided").end()
    for one in said:
        assert one["document"] == said[0]["document"]
        # The default budget, by the time of a step.
        assert float(one["budget"]) >= 10
        assert one["set"] is None
        assert one["left out"] == 0
        # Steps by torch in both layouts, at least.
        assert len(one["ways"]) >= 2
        assert one["rounds"] > 0


def test_tuning_keeps_a_memory_budget_as_in_one_process(launch):
    for one in launch("tune_whole", 2, memory_budget="1GiB", policy="undivided").end():
        assert one["left out"] == 0
        assert 0 < one["peak"] <= 1 << 30


def test_a_budget_that_ends_before_the_first_kernel_warns_on_all_ranks(launch):
    for one in launch("tune_whole", 2, time_budget_s=1e-3).end():
        assert (one["kernels"], one["left out"], one["set"]) == (0, 5, 1e-3)
        (sentence,) = one["warned"]
        assert "5 kernels are not in the plan" in sentence


def test_one_plan_per_kind_of_device(launch):
    said = launch("tune_kinds", 4).end()
    assert [one["device"] for one in said] == ["kind 0", "kind 1"] * 2
    assert said[0]["hash"] == said[2]["hash"] != said[1]["hash"] == said[3]["hash"]
    assert all(one["measured"] for one in said)


def test_a_limit_that_nothing_fits_ends_all_ranks_with_the_same_sentence(launch):
    said = launch("tune", 2, workspace_limit=1000).end()
    assert {one["error"] for one in said} == {"PlanError"}
    assert len({one["sentence"] for one in said}) == 1
    assert "the smallest needs 1 MiB" in said[0]["sentence"]


def test_a_rank_that_cannot_measure_ends_all_ranks(launch):
    for one in launch("tune_busy", 2).end():
        assert one["error"] == "RankError"
        assert one["ranks"] == [1]
        assert "no rank starts, because of rank 1: the profiler is in use" in one["sentence"]


def test_torchrun_restarts_a_killed_rank_and_nothing_is_measured_twice(torchrun, tmp_path):
    code, output = torchrun(
        "ranks.py",
        2,
        *("tune_and_die", tmp_path, "{}"),
        options=["--max-restarts=2"],
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
    )
    assert code == 0, output
    kept = int((tmp_path / "kept").read_text())
    assert kept > 0
    said = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert said[0]["hash"] == said[1]["hash"]
    assert sum(one["measured"] for one in said) <= count(tmp_path / "cache") - kept


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("version", "torch is 1.0 on rank 2, but 0 on ranks 0, 1"),
        ("ucudnn", "ucudnn is 7.0 on rank 2"),
        ("limit", "workspace_limit is 9437185 on rank 2, but 9437184 on ranks 0, 1"),
        ("problem", "problem 2 is op=fprop, batch=8"),
    ],
)
def test_ranks_about_to_do_different_things_are_told_before_they_measure(launch, what, text):
    said = launch("tune_differently", 3, what=what).end()
    for one in said:
        assert one["error"] == "RankError"
        assert text in one["sentence"]
        assert one["ranks"] == [2]
