"""Sharded tuning by real processes: who measures what, who dies, and that all end with one plan."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from ucudnn import cache as caches
from ucudnn.distributed.affinity import cores


def test_ranks_that_tune_alone_end_with_different_plans(launch):
    """Else the tests below would show nothing."""
    said = launch("tune_alone", 4).end()
    assert len({one["hash"] for one in said}) == 4


@pytest.mark.parametrize(("ranks", "share"), [(2, 0.6), (4, 0.3)])
def test_ranks_divide_the_work_and_end_with_one_plan(launch, ranks, share):
    alone = launch("tune_alone", 1).end()[0]["measured"]
    said = launch("tune", ranks).end()
    assert sum(one["measured"] for one in said) == alone
    assert max(one["measured"] for one in said) <= share * alone
    assert len({one["hash"] for one in said}) == 1
    # Each measured on processors of its own, as far as there are enough.
    cpu_sets = [tuple(cpus) for one in said for cpus in one["cpu_sets"]]
    assert len(cpu_sets) == ranks
    assert len(set(cpu_sets)) == min(ranks, len(cores()))
    assert sorted(one for cpus in set(cpu_sets) for one in cpus) == sorted(os.sched_getaffinity(0))


def test_ranks_of_which_one_measured_under_load_end_with_one_plan(launch):
    alone = launch("tune_alone", 1).end()[0]["measured"]
    said = launch("tune", 2, busy=[1]).end()
    assert len({one["hash"] for one in said}) == 1
    assert sum(one["measured"] for one in said) == alone


@pytest.mark.parametrize("sharing", [1, 2])
def test_ranks_of_one_device_keep_it_busy_while_one_of_them_measures(launch, sharing):
    """There is one kernel to measure; the other rank waits, or runs torch's own convolution."""
    if len(cores()) < 2:
        pytest.skip("one core, on which ranks take turns")
    said = launch("tune", 2, kernels=1, sharing=sharing).end()
    waiting = [one["ran"] for one in said if one["measured"] == 0]
    assert len(waiting) == 1
    assert bool(waiting[0]) == (sharing == 2)


def test_what_was_tuned_once_is_not_measured_again_by_any_number_of_ranks(launch):
    first = launch("tune", 2).end()
    for ranks in (4, 1):
        again = launch("tune", ranks).end()
        assert [one["ran"] for one in again] == [0] * ranks
        assert {one["hash"] for one in again} == {first[0]["hash"]}


def test_afterwards_one_cache_has_everything_and_no_journal_is_left(launch, tmp_path):
    said = launch("tune", 2).end()
    assert not (tmp_path / "cache" / "journals").exists()
    with caches.open(tmp_path / "cache", "r") as cache:
        assert len(cache) == sum(one["measured"] for one in said)
        assert cache.check().clean


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill -9", "SIGSTOP"])
def test_others_take_over_the_kernel_of_a_lost_rank_and_name_it_in_time(launch, number):
    job = launch("tune", 3, kernels=12, pause_s=0.006, lease_s=3, timeout_s=8, sign_after=60)
    job.wait_for("measuring-1")
    job.kill(1, number)
    said = job.end(0, 2)
    for one in said:
        assert one["error"] == "RankError"
        assert one["ranks"] == [1]
        assert "rank 1 did not reach the exchange of plan within 8 s" in one["sentence"]
    if number == signal.SIGKILL:
        # What the lost rank had finished is not measured again, nor is what the others did.
        again = launch("tune", 2, kernels=12).end()
        assert len({one["hash"] for one in again}) == 1
        assert [one["ran"] for one in again] == [0, 0]


def test_a_rank_that_was_stopped_for_a_while_comes_back(launch):
    job = launch("tune", 2, kernels=12, pause_s=0.006, lease_s=2, timeout_s=200, sign_after=60)
    job.wait_for("measuring-1")
    job.kill(1, signal.SIGSTOP)
    job.processes[0].join(4)
    job.kill(1, signal.SIGCONT)
    said = job.end()
    assert len({one["hash"] for one in said}) == 1


def test_killing_the_rank_that_led_the_rendezvous_stops_no_other(launch):
    job = launch("tune", 2, kernels=12, pause_s=0.006, lease_s=3, timeout_s=8, sign_after=60)
    job.wait_for("measuring-0")
    job.kill(0)
    (said,) = job.end(1)
    assert said["ranks"] == [0]


def test_torchrun_restarts_a_killed_rank_and_nothing_is_measured_twice(torchrun, launch, tmp_path):
    code, output, folder = torchrun("tune_and_die", 2, "--max-restarts=2")
    assert code == 0, output
    assert (folder / "died").exists()
    said = [_read(folder / f"{rank}.json") for rank in range(2)]
    assert len({one.get("hash", one.get("sentence")) for one in said}) == 1
    alone = launch("tune_alone", 1).end()[0]["measured"]
    before = sum(int(path.read_text()) for path in folder.glob("finished-*"))
    assert before > 0
    # Only the kernels that were under way when the job was ended.
    assert sum(one["measured"] for one in said) <= alone - before


def test_caches_that_are_not_shared_are_used_where_they_are(launch, tmp_path):
    places = [str(tmp_path / "a"), str(tmp_path / "b")]
    first = launch("tune", 2, caches=[places[0]] * 2).end()
    again = launch("tune", 2, caches=places).end()
    assert [one["ran"] for one in again] == [0, 0]
    assert {one["hash"] for one in again} == {first[0]["hash"]}
    with caches.open(places[0], "r") as one, caches.open(places[1], "r") as other:
        assert list(one) == list(other)


def test_one_plan_per_kind_of_device(launch):
    said = launch("tune_kinds", 4).end()
    assert [one["device"] for one in said] == ["kind 0", "kind 1"] * 2
    assert said[0]["hash"] == said[2]["hash"] != said[1]["hash"] == said[3]["hash"]
    assert all(one["measured"] for one in said)


def test_a_limit_that_nothing_fits_ends_all_ranks_with_the_same_sentence(launch):
    said = launch("tune", 2, limit=1000, kernels=2).end()
    assert {one["error"] for one in said} == {"PlanError"}
    assert len({one["sentence"] for one in said}) == 1
    assert "the smallest needs 1 MiB" in said[0]["sentence"]


def test_after_the_time_budget_no_kernel_is_begun(launch):
    said = launch("tune", 2, pause_s=0.02, budget_s=1).end()
    assert len({one["hash"] for one in said}) == 1
    assert 2 <= said[0]["kernels"] < 24


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


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())
