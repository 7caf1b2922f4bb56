"""The rendezvous by itself: all-gathers, keys of dead ranks, and errors that name the missing."""

from __future__ import annotations

import subprocess
import sys
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from ucudnn.distributed import rendezvous
from ucudnn.distributed.rendezvous import Rendezvous
from ucudnn.errors import RankError

# Long enough for ranks that come on a busy machine, short where one never comes.
COMING_S, NEVER_S = 100, 0.3


def meet(rank, purpose="test", group=None, timeout_s=COMING_S):
    with Rendezvous(purpose, group, timeout_s) as there:
        return there.nonce


def test_this_process_alone_needs_no_group_and_no_store():
    with Rendezvous("test") as first, Rendezvous("test") as second:
        assert first.ranks == second.ranks == (0,)
        assert first.nonce != second.nonce
        assert first.exchange("values", [1, None]) == {0: [1, None]}


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_every_rank_gets_the_values_of_all_of_every_exchange(in_threads, ranks):
    def exchange(rank):
        with Rendezvous("test", None, COMING_S) as there:
            return [there.exchange(f"topic {number}", [rank, number]) for number in range(5)]

    expected = [{rank: [rank, number] for rank in range(ranks)} for number in range(5)]
    assert in_threads(exchange, range(ranks)) == dict.fromkeys(range(ranks), expected)


def test_ranks_with_another_purpose_or_in_another_group_do_not_meet(in_threads):
    groups = {0: (0, 2), 2: (0, 2), 1: (1, 3, 5), 3: (1, 3, 5), 5: (1, 3, 5), 4: (4,)}

    def exchange(rank):
        found = []
        for purpose in ("first", "second"):
            with Rendezvous(purpose, groups[rank], COMING_S) as there:
                found.append((there.nonce, there.exchange("values", purpose)))
        return found

    found = in_threads(exchange, range(6))
    for rank, group in groups.items():
        assert found[rank] == found[group[0]]
        values = [values for _, values in found[rank]]
        assert values == [dict.fromkeys(group, "first"), dict.fromkeys(group, "second")]
    assert len({nonce for one in found.values() for nonce, _ in one}) == 3 * 2


def test_a_rank_outside_the_group_is_refused(in_threads):
    found = in_threads(lambda rank: meet(rank, group=(0, 1)), range(3))
    assert found[0] == found[1]
    assert isinstance(found[2], RankError)
    assert found[2].ranks == (2,)


def test_keys_of_a_job_that_has_ended_let_no_rank_in(in_threads):
    """The store of a job that is started again has a nonce, answers and a confirmation."""
    before = in_threads(meet, range(3))
    assert len(set(before.values())) == 1

    def briefly(rank):
        return meet(rank, timeout_s=NEVER_S)

    # the first rank gives a new nonce, which the old answers do not repeat
    found = in_threads(briefly, range(3), absent=[1, 2])
    assert found[0].ranks == (1, 2)
    sentence = "ranks 1, 2 did not reach the rendezvous of all ranks within 0.3 s"
    assert sentence in str(found[0])
    # the others are let in by no confirmation of their predecessors' answers, old or new
    found = in_threads(briefly, range(3), absent=[0])
    assert [type(found[rank]) for rank in (1, 2)] == [RankError] * 2
    assert {rank for one in found.values() for rank in one.ranks} == {0}
    after = in_threads(meet, range(3))
    assert len(set(after.values())) == 1
    assert set(after.values()) != set(before.values())


def test_a_rank_that_comes_before_the_first_answers_the_new_nonce(in_threads):
    in_threads(meet, range(2))
    is_waiting = threading.Event()
    sleep = rendezvous.time.sleep

    def come(rank):
        if rank == 0:
            assert is_waiting.wait(COMING_S)
        return meet(rank)

    def waiting(seconds):
        is_waiting.set()
        sleep(seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous.time, "sleep", waiting)
        found = in_threads(come, range(2))
    assert found[0] == found[1]
    assert isinstance(found[0], str)


def test_the_message_names_all_ranks_that_have_sent_nothing_and_no_other(in_threads):
    has_sent = threading.Event()

    def exchange(rank):
        with Rendezvous("test", None, timeout_s=3) as there:
            if rank == 0:
                assert has_sent.wait(COMING_S)
            try:
                return there.exchange("values", rank) if rank in (0, 2) else None
            finally:
                if rank == 2:
                    has_sent.set()

    found = in_threads(exchange, range(4))
    assert found[0].ranks == (1, 3)
    assert "ranks 1, 3 did not reach the exchange of values within 3 s" in str(found[0])


def test_a_killed_rank_is_named_by_all_others(launch):
    job = launch("die_after_meeting", 4)
    for one in job.end(0, 2, 3):
        assert one["error"] == "RankError"
        assert one["ranks"] == [1]
        assert "rank 1 did not reach the exchange of values within 20 s" in one["sentence"]


def test_the_end_of_the_process_that_holds_the_store_is_said(in_threads, monkeypatch):
    program = (
        "import sys, torch.distributed as dist\n"
        "store = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n"
        "print(store.port, flush=True)\n"
        "sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe) as process:
        try:
            port, limit = int(process.stdout.readline()), timedelta(seconds=5)
            store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
            monkeypatch.setattr(rendezvous, "_get_default_store", lambda: store)

            def exchange(rank):
                with Rendezvous("test", None, COMING_S) as there:
                    process.kill()
                    process.wait()
                    return there.exchange("values", rank)

            error = in_threads(exchange, [0])[0]
        finally:
            process.kill()
    assert isinstance(error, RankError)
    assert "the job's store does not answer any more" in str(error)
