"""Work queue, turns and CPU sets: the parts of sharded tuning, each by itself."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from ucudnn.distributed.affinity import CpuSet, assign_cpus, bound_to, cores
from ucudnn.distributed.sharded import Timeouts
from ucudnn.distributed.work_queue import Heartbeat, TurnLock, WorkQueue
from ucudnn.errors import ConfigError

LEASE_S = 0.4


@pytest.fixture
def store() -> HashStore:
    return HashStore()


def queue(store: HashStore, rank: int, items: int = 3) -> WorkQueue:
    """The queue of a rank without a heartbeat, which the others may take for lost."""
    return WorkQueue(store, rank, range(items), Heartbeat(store, rank, LEASE_S))


def test_each_item_is_claimed_once_in_the_order_that_a_rank_prefers(store):
    first = queue(store, 0)
    second = WorkQueue(store, 1, [2, 1, 0], Heartbeat(store, 1, LEASE_S))
    assert [first.claim(), second.claim(), first.claim()] == [0, 2, 1]
    assert first.claim() is second.claim() is None


def test_an_item_is_taken_over_when_its_owner_has_no_heartbeat_and_not_before(store):
    owner, other = queue(store, 0, 1), queue(store, 1, 1)
    assert owner.claim() == 0
    with Heartbeat(store, 0, LEASE_S):
        end = time.monotonic() + 2 * LEASE_S
        while time.monotonic() < end:
            assert other.claim() is None
            time.sleep(0.02)
    end = time.monotonic() + 60
    while other.claim() is None:
        assert time.monotonic() < end
        time.sleep(0.02)
    assert queue(store, 2, 1).claim() is None  # the new owner's heartbeat counts now


def test_of_two_results_the_first_counts(store):
    slow, quick = queue(store, 0), queue(store, 1)
    assert quick.finish(0, b"quick")
    assert not slow.finish(0, b"slow\0")
    assert slow.result(0) == quick.result(0) == b"quick"
    assert quick.count_done(range(3)) == 1
    assert not quick.are_done(range(3))


def test_what_is_done_is_not_taken_over(store):
    owner, other = queue(store, 0, 1), queue(store, 1, 1)
    owner.claim()
    owner.finish(0, b"")
    end = time.monotonic() + 3 * LEASE_S
    while time.monotonic() < end:
        assert other.claim() is None
        time.sleep(0.05)


def test_turns_go_round_and_skip_who_is_lost(store):
    ranks = [3, 5, 7]
    with Heartbeat(store, 3, LEASE_S) as a, Heartbeat(store, 7, LEASE_S) as c:
        turns = {
            3: TurnLock(store, "cpus", ranks, 3, a),
            7: TurnLock(store, "cpus", ranks, 7, c),
        }
        held = []
        end = time.monotonic() + 60
        while len(held) < 5:
            assert time.monotonic() < end
            for rank, one in turns.items():
                if one.is_held():
                    held.append(rank)
                    one.release()
            time.sleep(0.02)
        assert held == [3, 7, 3, 7, 3]


@pytest.mark.parametrize("field", ["timeout_s", "lease_s"])
def test_timeouts_are_above_nothing(field):
    with pytest.raises(ConfigError, match=f"{field} must be above 0, got 0"):
        Timeouts(**{field: 0})


FOUR = [[0, 4], [1, 5], [2, 6], [3, 7]]  # four cores of two processors


@pytest.mark.parametrize(
    ("ranks", "threads", "expected"),
    [
        (1, 1, [CpuSet((0, 1, 2, 3, 4, 5, 6, 7), (0,))]),
        (2, 2, [CpuSet((0, 1, 4, 5), (0,)), CpuSet((2, 3, 6, 7), (1,))]),
        (2, 3, [CpuSet((0, 1, 2, 3, 4, 5, 6, 7), (0, 1))] * 2),
        (3, 1, [CpuSet((0, 4), (0,)), CpuSet((1, 5), (1,)), CpuSet((2, 3, 6, 7), (2,))]),
        (3, 9, [CpuSet((0, 1, 2, 3, 4, 5, 6, 7), (0, 1, 2))] * 3),
    ],
)
def test_ranks_of_a_host_get_whole_cores_or_take_turns(ranks, threads, expected):
    there = dict.fromkeys(range(ranks), FOUR)
    assert [assign_cpus(rank, there, threads) for rank in range(ranks)] == expected


def test_cpu_sets_are_disjoint_cover_all_cores_and_each_rank_has_one():
    for count in range(1, 9):
        for threads in range(1, 6):
            there = dict.fromkeys(range(count), FOUR)
            cpu_sets = {assign_cpus(rank, there, threads) for rank in range(count)}
            processors = [cpu for one in cpu_sets for cpu in one.cpus]
            assert sorted(processors) == list(range(8))
            assert sorted(rank for one in cpu_sets for rank in one.ranks) == list(range(count))


def test_ranks_that_a_launcher_bound_keep_their_processors():
    there = {0: FOUR[:2], 1: FOUR[2:]}
    assert assign_cpus(1, there, 2) == CpuSet((2, 3, 6, 7), (1,))


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
