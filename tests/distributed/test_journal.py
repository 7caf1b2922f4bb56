"""Journals by themselves: on the disk at once, and in the cache once their owner has ended."""

from __future__ import annotations

import importlib.util
import signal
from pathlib import Path

import pytest

from ucudnn import cache as caches
from ucudnn.cache import CacheWarning
from ucudnn.cache.entries import Entry
from ucudnn.distributed.journal import Journal
from ucudnn.distributed.rendezvous import Rendezvous


@pytest.fixture
def measurements():
    """The function of ranks.py; ranks put disjoint ranges of them."""
    spec = importlib.util.spec_from_file_location("ranks", Path(__file__).with_name("ranks.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.measurements


@pytest.fixture
def place(tmp_path):
    """Folder of the cache."""
    return tmp_path / "the cache"


def stored(path):
    """What a cache has on the disk, for a process that opens it now."""
    with caches.open(path, "r") as cache:
        return {one.key: one for one in cache}


def by_key(listed):
    return {one.key: one for one in listed}


def begin(place):
    """A job of this process begins with its journal, and ends before it publishes anything."""
    with Rendezvous("test") as rendezvous, Journal(rendezvous, str(place)):
        pass


@pytest.mark.parametrize("count", [0, 1, 5])
def test_what_killed_ranks_have_put_is_in_the_cache_of_the_next_job(
    launch, place, measurements, count
):
    job = launch("keep_journal", 2, path=str(place), count=count)
    for rank in (0, 1):
        job.wait_for(f"kept-{rank}")
    assert not stored(place)
    for rank in (0, 1):
        job.kill(rank)
        job.processes[rank].join()
    begin(place)
    assert stored(place) == by_key(measurements(0, 2 * count))
    # of the journals only the one of this process is left
    assert len(list((place / "journals").iterdir())) == 1


@pytest.mark.parametrize("number", [None, signal.SIGSTOP], ids=["runs", "stopped"])
def test_the_journal_of_a_living_process_is_left_to_it(launch, place, measurements, number):
    job = launch("keep_journal", 1, path=str(place), count=3)
    job.wait_for("kept-0")
    if number is not None:
        job.kill(0, number)
    (living,) = (place / "journals").iterdir()
    begin(place)
    assert not stored(place)
    assert stored(living) == by_key(measurements(0, 3))
    job.kill(0)
    job.processes[0].join()
    begin(place)
    assert not living.exists()
    assert stored(place) == by_key(measurements(0, 3))


def test_a_rank_finds_its_own_measurements_and_those_of_the_cache(place, measurements):
    old, new = measurements(0, 2), measurements(2, 2)
    with caches.open(place) as cache:
        cache.put(old)
    with Rendezvous("test") as rendezvous, Journal(rendezvous, str(place)) as journal:
        journal.cache.put(new)
        for one in old + new:
            assert journal.cache.get(one.key) == one
        assert stored(place) == by_key(old)


def test_published_measurements_are_in_the_cache_once_and_the_journals_are_gone(
    in_threads, place, measurements
):
    everything = measurements(0, 9)
    with caches.open(place) as cache:
        cache.put(everything[:2])

    def keep(rank):
        with Rendezvous("test") as rendezvous, Journal(rendezvous, str(place)) as journal:
            journal.cache.put(everything[3 * rank : 3 * rank + 3])
            journal.publish((Entry(one) for one in everything), (0, 1, 2))
            return journal.peers

    assert in_threads(keep, range(3)) == dict.fromkeys(range(3), (0, 1, 2))
    assert stored(place) == by_key(everything)
    assert not (place / "journals").exists()
    with caches.open(place) as cache:
        assert cache.check().clean


def test_each_cache_is_written_by_one_of_the_ranks_that_see_it(in_threads, tmp_path, measurements):
    """Ranks 0 and 2 are on one host, 1 and 3 on another; 2 and 3 are a team of their own."""
    places = [tmp_path / "a", tmp_path / "b"]
    teams = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    known = {(0, 1): measurements(0, 2), (2, 3): measurements(2, 3)}

    def keep(rank):
        team, path = teams[rank], str(places[rank % 2])
        with Rendezvous("test") as rendezvous, Journal(rendezvous, path) as journal:
            journal.publish(map(Entry, known[team]), team)
            return journal.peers

    assert in_threads(keep, range(4)) == {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}
    for path in places:
        assert stored(path) == by_key(measurements(0, 5))


def test_without_a_folder_for_it_a_journal_is_kept_in_memory_and_published(place, measurements):
    place.mkdir()
    (place / "journals").write_text("a file where the folder should be")
    (one,) = measurements(0, 1)
    with Rendezvous("test") as rendezvous, Journal(rendezvous, str(place)) as journal:
        with pytest.warns(CacheWarning, match="kept in memory"):
            journal.cache.put([one])
        assert journal.cache.get(one.key) == one
        journal.publish([Entry(one)], (0,))
    assert stored(place) == by_key([one])
