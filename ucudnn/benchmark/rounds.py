"""Interleaved rounds in random order, with elimination, repeated rounds and a time limit."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from time import monotonic, perf_counter_ns
from typing import TYPE_CHECKING

from ucudnn.backends import AbstractBackend, DeviceState
from ucudnn.benchmark.failures import CANDIDATE_ERRORS, Failure, failure_of
from ucudnn.benchmark.statistics import median_interval, median_ns, ratio_interval
from ucudnn.verdict import may_be_worthwhile

if TYPE_CHECKING:
    from ucudnn.benchmark.protocol import Protocol


@dataclass(frozen=True, slots=True)
class Entrant:
    """Something to time. Entrants of the same group (a size and a role) race each other."""

    sample_ns: Callable[[], int]
    group: tuple[int, str] | None = None


@dataclass
class Result:
    """Result of the rounds of one entrant."""

    # Times in ns. The n-th samples of all entrants are from the same round.
    samples: list[int] = field(default_factory=list)
    is_beaten: bool = False  # True if a rival eliminated it
    failure: Failure | None = None  # why it could not be run any more
    state: DeviceState = field(default_factory=DeviceState)  # after the rounds
    workspace_bytes: int = 0  # of a whole call; that of a chunk is known before its rounds

    @property
    def is_racing(self) -> bool:
        """True if the entrant was not eliminated and has not failed."""
        return not self.is_beaten and not self.failure


@dataclass(frozen=True, slots=True)
class _Reading:
    time_ns: int
    spent_ns: int  # time for which the entrant kept the device
    share: float | None  # processor time per elapsed time; None: it does not matter on this device
    switches: int


def run_rounds(
    backend: AbstractBackend,
    entrants: Sequence[Entrant],
    protocol: Protocol,
    known: Mapping[tuple[int, str], tuple[int, int]] | None = None,
    on_turn: Callable[[int], None] = lambda _: None,
    until: float = inf,
) -> list[Result]:
    """Time entrants in turn, in random order, until enough is known or a limit ends the rounds.

    `known` has, by group, the time of a rival that was timed before: its median, and the upper end
    of its interval. `on_turn` gets the number of an entrant before each of its samples. No round
    but the first begins after the `time.monotonic` of `until`.
    """
    results = [Result() for _ in entrants]
    # Even on an idle machine, a candidate's share of processor time depends on how many threads it
    # keeps busy. So each round of a candidate is compared with its own best round.
    most_share: list[float] = [0.0] * len(entrants)
    chance = random.Random(0)  # noqa: S311 - an order, not a secret
    repeated = spent = rounds = 0
    while not _is_over(results, protocol, rounds, spent, until):
        turns = [number for number, result in enumerate(results) if result.is_racing]
        chance.shuffle(turns)
        readings = _take_turns(backend, entrants, results, turns, on_turn)
        spent += sum(reading.spent_ns for reading in readings.values())
        disturbed = _is_disturbed(readings, most_share, protocol)
        # Samples of one round are compared as pairs, so the whole round is repeated. The number of
        # repeats is limited, because a machine may stay busy.
        if disturbed and repeated < protocol.repeats and monotonic() < until:
            repeated += 1
            continue
        rounds += 1
        for number, reading in readings.items():
            results[number].samples.append(reading.time_ns)
        _drop_beaten(entrants, results, protocol, rounds, known or {})
    state = backend.state()
    for result in results:
        result.state = state
    return results


def _read(backend: AbstractBackend, entrant: Entrant) -> _Reading:
    before, start_ns = backend.activity(), perf_counter_ns()
    time_ns = max(1, entrant.sample_ns())
    after, spent_ns = backend.activity(), max(time_ns, perf_counter_ns() - start_ns)
    # A GPU's backend reports no activity: other processes on the host do not lengthen a kernel.
    if before is None or after is None:
        return _Reading(time_ns, spent_ns, None, 0)
    elapsed_ns = max(1, after.clock_ns - before.clock_ns)
    share = (after.processor_ns - before.processor_ns) / elapsed_ns
    return _Reading(time_ns, spent_ns, share, after.switches - before.switches)


def _take_turns(
    backend: AbstractBackend,
    entrants: Sequence[Entrant],
    results: Sequence[Result],
    turns: Sequence[int],
    on_turn: Callable[[int], None],
) -> dict[int, _Reading]:
    """One sample of each entrant in turn; a failure is noted in the entrant's result."""
    readings = {}
    for number in turns:
        on_turn(number)
        try:
            readings[number] = _read(backend, entrants[number])
        except CANDIDATE_ERRORS as error:
            # After a fault on a GPU everything in this process fails. Then the error is raised, so
            # that the other entrants are not noted as failed.
            if backend.is_broken():
                raise
            results[number].failure = failure_of(error)
    return readings


def _is_disturbed(
    readings: Mapping[int, _Reading], most_share: list[float], protocol: Protocol
) -> bool:
    """True if an entrant had too little processor time in this round; updates `most_share`."""
    disturbed = False
    for number, reading in readings.items():
        if reading.share is not None:
            most_share[number] = max(most_share[number], reading.share)
            # A small share alone may mean that the candidate's threads wait. Only an involuntary
            # context switch shows that another process took a processor.
            lost = reading.share < protocol.lost_share * most_share[number]
            disturbed |= lost and reading.switches > 0
    return disturbed


def _is_over(
    results: Sequence[Result], protocol: Protocol, rounds: int, spent_ns: int, until: float
) -> bool:
    """True if no further round begins: no entrant is left, enough is known, or time is over."""
    if rounds >= protocol.most_rounds or not any(result.is_racing for result in results):
        return True
    if rounds >= protocol.least_rounds and _is_enough(results, protocol, spent_ns):
        return True
    return rounds > 0 and monotonic() >= until


def _is_enough(results: Sequence[Result], protocol: Protocol, spent_ns: int) -> bool:
    """True if more rounds would not change the outcome, or would take too long."""
    if spent_ns >= protocol.enough_ns:
        return True
    if protocol.stops_when_decided and _is_decided(results):
        return True
    return all(
        high - low <= protocol.target * median_ns(result.samples)
        for result in results
        if result.is_racing
        for low, high in [median_interval(result.samples)]
    )


def _drop_beaten(
    entrants: Sequence[Entrant],
    results: Sequence[Result],
    protocol: Protocol,
    rounds: int,
    known: Mapping[tuple[int, str], tuple[int, int]],
) -> None:
    """Drop rivals after a round.

    In the first rounds, these are rivals that take more than `protocol.lapped` times as long as the
    best one. Later, they are rivals whose interval lies above the interval of the best one.
    """
    if not protocol.lapped:
        return
    for group, rivals in _rivals_by_group(entrants, results).items():
        medians = {number: median_ns(results[number].samples) for number in rivals}
        best = min(medians, key=medians.__getitem__)
        best_ns, high_ns = medians[best], median_interval(results[best].samples)[1]
        # A rival that was timed earlier takes part with its old time, and is not run again.
        if group in known and known[group][0] <= best_ns:
            best_ns, high_ns = known[group]
        for number, time_ns in medians.items():
            if rounds <= len(protocol.lapped):
                is_beaten = time_ns > protocol.lapped[rounds - 1] * best_ns
            else:
                is_beaten = median_interval(results[number].samples)[0] > high_ns
            results[number].is_beaten = is_beaten


def _rivals_by_group(
    entrants: Sequence[Entrant], results: Sequence[Result]
) -> dict[tuple[int, str], list[int]]:
    """The entrants of each group that are still in the race."""
    rivals: dict[tuple[int, str], list[int]] = {}
    for number, (entrant, result) in enumerate(zip(entrants, results, strict=True)):
        if result.is_racing and entrant.group is not None:
            rivals.setdefault(entrant.group, []).append(number)
    return rivals


def _is_decided(results: Sequence[Result]) -> bool:
    """True if every entrant is clearly faster or clearly no faster than the first one."""
    first, *others = (result.samples for result in results if result.is_racing)
    return not any(may_be_worthwhile(ratio_interval(samples, first)) for samples in others)
