"""Leases, turns and processors: the pieces of sharded tuning, each by itself."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from ucudnn.distributed.affinity import Lane, bound_to, cores, lane_of
from ucudnn.distributed.sharded import Patience
from ucudnn.distributed.work_queue import Board, Pulse, Turns
from ucudnn.errors import ConfigError

LEASE_S = 0.4


@pytest.fixture
def store() -> HashStore:
    return HashStore()


def board(store: HashStore, rank: int, items: int = 3) -> Board:
    """Of a rank whose pulse does not beat: the others may take it for lost."""
    return Board(store, rank, range(items), Pulse(store, rank, LEASE_S))


def test_each_item_is_claimed_once_in_the_order_that_a_rank_prefers(store):
    first = board(store, 0)
    second = Board(store, 1, [2, 1, 0], Pulse(store, 1, LEASE_S))
    assert [first.claim(), second.claim(), first.claim()] == [0, 2, 1]
    assert first.claim() is second.claim() is None


def test_an_item_is_adopted_when_its_owner_stands_still_and_not_before(store):
    owner, other = board(store, 0, 1), board(store, 1, 1)
    assert owner.claim() == 0
    with Pulse(store, 0, LEASE_S):
        end = time.monotonic() + 2 * LEASE_S
        while time.monotonic() < end:
            assert other.claim() is None
            time.sleep(0.02)
    end = time.monotonic() + 60
    while other.claim() is None:
        assert time.monotonic() < end
        time.sleep(0.02)
    assert board(store, 2, 1).claim() is None  # it is the adopter's now


def test_of_two_results_the_first_counts(store):
    slow, quick = board(store, 0), board(store, 1)
    assert quick.finish(0, b"quick")
    assert not slow.finish(0, b"slow\0")
    assert slow.result(0) == quick.result(0) == b"quick"
    assert quick.count_done(range(3)) == 1
    assert not quick.are_done(range(3))


def test_what_is_done_is_not_adopted(store):
    owner, other = board(store, 0, 1), board(store, 1, 1)
    owner.claim()
    owner.finish(0, b"")
    end = time.monotonic() + 3 * LEASE_S
    while time.monotonic() < end:
        assert other.claim() is None
        time.sleep(0.05)


def test_turns_go_round_and_skip_who_is_lost(store):
    ranks = [3, 5, 7]
    with Pulse(store, 3, LEASE_S) as a, Pulse(store, 7, LEASE_S) as c:
        turns = {
            3: Turns(store, "lane", ranks, 3, a),
            7: Turns(store, "lane", ranks, 7, c),
        }
        held = []
        end = time.monotonic() + 60
        while len(held) < 5:
            assert time.monotonic() < end
            for rank, one in turns.items():
                if one.is_mine():
                    held.append(rank)
                    one.pass_on()
            time.sleep(0.02)
        assert held == [3, 7, 3, 7, 3]


@pytest.mark.parametrize("field", ["timeout_s", "lease_s"])
def test_patience_is_above_nothing(field):
    with pytest.raises(ConfigError, match=f"{field} must be above 0, got 0"):
        Patience(**{field: 0})


FOUR = [[0, 4], [1, 5], [2, 6], [3, 7]]  # four cores of two processors


@pytest.mark.parametrize(
    ("ranks", "threads", "expected"),
    [
        (1, 1, [Lane((0, 1, 2, 3, 4, 5, 6, 7), (0,))]),
        (2, 2, [Lane((0, 1, 4, 5), (0,)), Lane((2, 3, 6, 7), (1,))]),
        (2, 3, [Lane((0, 1, 2, 3, 4, 5, 6, 7), (0, 1))] * 2),
        (3, 1, [Lane((0, 4), (0,)), Lane((1, 5), (1,)), Lane((2, 3, 6, 7), (2,))]),
        (3, 9, [Lane((0, 1, 2, 3, 4, 5, 6, 7), (0, 1, 2))] * 3),
    ],
)
def test_ranks_of_a_host_get_whole_cores_or_take_turns(ranks, threads, expected):
    there = dict.fromkeys(range(ranks), FOUR)
    assert [lane_of(rank, there, threads) for rank in range(ranks)] == expected


def test_lanes_are_disjoint_cover_all_cores_and_each_rank_has_one():
    for count in range(1, 9):
        for threads in range(1, 6):
            there = dict.fromkeys(range(count), FOUR)
            lanes = {lane_of(rank, there, threads) for rank in range(count)}
            processors = [one for lane in lanes for one in lane.processors]
            assert sorted(processors) == list(range(8))
            assert sorted(rank for lane in lanes for rank in lane.ranks) == list(range(count))


def test_ranks_that_a_launcher_bound_keep_their_processors():
    there = {0: FOUR[:2], 1: FOUR[2:]}
    assert lane_of(1, there, 2) == Lane((2, 3, 6, 7), (1,))


def test_every_thread_is_bound_and_freed_again():
    ended, tasks = threading.Event(), []

    def wait() -> None:
        tasks.append(threading.get_native_id())
        ended.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    torch.ones(1 << 16).sum()  # torch's own threads are there, too
    first = cores()[0][:1]
    before = {int(name): os.sched_getaffinity(int(name)) for name in os.listdir("/proc/self/task")}
    try:
        with bound_to(first):
            assert os.sched_getaffinity(0) == os.sched_getaffinity(tasks[0]) == set(first)
            for task in before:
                assert os.sched_getaffinity(task) == set(first)
        for task, processors in before.items():
            assert os.sched_getaffinity(task) == processors
    finally:
        ended.set()
        thread.join()
