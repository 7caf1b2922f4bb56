"""Rounds on a clock written by the test: order, racing, stopping, and what a disturbance does."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from ucudnn.backends import Activity
from ucudnn.benchmark.failures import Failure
from ucudnn.benchmark.protocol import FINALS, Protocol
from ucudnn.benchmark.rounds import Entrant, Result, run_rounds
from ucudnn.benchmark.statistics import median_interval, median_ns
from ucudnn.measurement import FailureKind


class Machine:
    """A clock, and how much of the processor the process gets at the moment."""

    def __init__(self) -> None:
        self.clock = self.processor = self.switches = 0
        self.share = 2.0
        self.turns: list[str] = []
        self.on_sample: Callable[[], None] = lambda: None

    def activity(self) -> Activity:
        return Activity(self.clock, self.processor, self.switches)

    def is_broken(self) -> bool:
        return False

    def state(self) -> tuple[str, ...]:
        return ()

    def entrant(self, name: str, time_of: Callable[[], float], group: object = None) -> Entrant:
        def sample() -> int:
            self.turns.append(name)
            self.on_sample()
            work = time_of()
            elapsed = int(work * 2.0 / self.share)  # it waits for the processor
            self.clock += elapsed
            self.processor += int(elapsed * self.share)
            self.switches += int(self.share < 2.0)
            return elapsed

        return Entrant(sample, group)


@pytest.fixture
def machine() -> Machine:
    return Machine()


def run(machine: Machine, entrants, protocol: Protocol = FINALS, **more) -> list[Result]:
    return run_rounds(machine, entrants, protocol, **more)


def test_everybody_is_in_every_round_and_the_order_changes(machine):
    names = ["a", "b", "c", "d"]
    results = run(machine, [machine.entrant(name, lambda: 1000) for name in names])
    rounds = [machine.turns[i : i + 4] for i in range(0, len(machine.turns), 4)]
    assert all(sorted(turns) == names for turns in rounds)
    assert len({tuple(turns) for turns in rounds}) > 3
    assert all(len(result.samples) == len(rounds) for result in results)


def test_it_stops_when_intervals_are_narrow(machine):
    chance = random.Random(0)
    noisy = Protocol(most_rounds=30, target=0.05, lapped=())
    calm = run(machine, [machine.entrant("a", lambda: 1000)], noisy)
    assert len(calm[0].samples) == noisy.least_rounds
    shaky = run(machine, [machine.entrant("a", lambda: chance.gauss(1000, 60))], noisy)
    assert noisy.least_rounds < len(shaky[0].samples) <= 30
    low, high = median_interval(shaky[0].samples)
    assert high - low <= 0.05 * median_ns(shaky[0].samples) or len(shaky[0].samples) == 30


def test_it_stops_when_the_time_is_spent(machine, monkeypatch):
    monkeypatch.setattr("ucudnn.benchmark.rounds.perf_counter_ns", lambda: machine.clock)
    chance = random.Random(0)
    short = Protocol(most_rounds=30, target=0.0, enough_ns=7_500)
    results = run(machine, [machine.entrant("a", lambda: chance.randint(900, 1100))], short)
    assert len(results[0].samples) in (7, 8, 9)


def test_who_is_lapped_leaves_and_is_not_timed_again(machine):
    times = {"best": 1000, "close": 1010, "behind": 1300, "far": 1700, "lapped": 3500}
    chance = random.Random(0)
    entrants = [
        machine.entrant(name, lambda t=t: chance.gauss(t, 5), group="g")
        for name, t in times.items()
    ]
    results = dict(zip(times, run(machine, entrants, Protocol(target=0.0)), strict=True))
    taken = {name: len(result.samples) for name, result in results.items()}
    assert taken["lapped"] == 1
    assert taken["far"] == 2
    assert taken["behind"] == 3
    assert taken["best"] == 9
    assert not results["best"].is_beaten
    assert all(results[name].is_beaten for name in ("behind", "far", "lapped"))


def test_other_groups_are_no_rivals(machine):
    entrants = [
        machine.entrant("a", lambda: 10, group=1),
        machine.entrant("b", lambda: 99, group=2),
    ]
    assert all(result.is_racing for result in run(machine, entrants, Protocol()))


def test_who_was_timed_before_races_too(machine):
    entrants = [machine.entrant("a", lambda: 2000, group="g")]
    (result,) = run(machine, entrants, Protocol(), known={"g": (1000, 1020)})
    assert result.is_beaten
    assert len(result.samples) == 2


def test_a_failure_in_a_later_round_is_told_of_the_one_that_failed(machine):
    count = itertools.count()

    def breaks() -> float:
        if next(count) == 2:
            raise RuntimeError("no more\nof this")
        return 1000

    good, bad = run(machine, [machine.entrant("a", lambda: 1000), machine.entrant("b", breaks)])
    assert bad.failure == Failure(FailureKind.ERROR, "no more")
    assert len(good.samples) == FINALS.least_rounds
    assert good.is_racing
    assert not bad.is_racing


def test_disturbed_rounds_are_repeated(machine):
    """In two rounds another process takes half of the processor; no sample of them counts."""
    count = itertools.count()

    def hog() -> None:
        machine.share = 1.0 if next(count) in (4, 5, 8) else 2.0

    machine.on_sample = hog
    entrants = [machine.entrant(name, lambda: 1000) for name in "ab"]
    results = run(machine, entrants)
    assert all(result.samples == [1000] * FINALS.least_rounds for result in results)
    assert len(machine.turns) == 2 * (FINALS.least_rounds + 2)


def test_a_machine_that_stays_busy_does_not_keep_it_for_ever(machine):
    count = itertools.count()

    def hog() -> None:
        machine.share = 2.0 if next(count) == 0 else 1.0

    machine.on_sample = hog
    (result,) = run(machine, [machine.entrant("a", lambda: 1000)])
    assert len(result.samples) == FINALS.most_rounds
    assert len(machine.turns) == FINALS.most_rounds + FINALS.repeats


def test_a_process_without_processor_time_is_never_disturbed(machine):
    machine.activity = lambda: None
    machine.on_sample = lambda: setattr(
        machine, "share", random.Random(len(machine.turns)).choice([1.0, 2.0])
    )
    (result,) = run(machine, [machine.entrant("a", lambda: 1000)])
    assert len(machine.turns) == len(result.samples)
