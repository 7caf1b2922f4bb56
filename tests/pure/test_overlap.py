"""Buckets and collectives: equal to brute force, and to messages that are sent one by one."""

from __future__ import annotations

from dataclasses import astuple
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from messages import LINK, RANKS, ring_by_messages

from ucudnn.errors import ConfigError
from ucudnn.solvers import Contention, Curve, Link, bucket, collectives, overlap

numbers = st.integers(0, 1000)


def all_cuts(n: int) -> list[list[int]]:
    """The ends of the buckets, for every cut of n gradients."""
    choices = [[place + 1 for place in range(n - 1) if bits >> place & 1] for bits in range(1 << n)]
    return [[*inner, n] for inner in choices[: 1 << (n - 1)]]


def end_ns(ready: list[int], sizes: list[int], curve: Curve, ends: list[int]) -> int:
    """End of the last bucket, if buckets are sent one after the other."""
    free = 0
    for part in (slice(*pair) for pair in pairwise([0, *ends])):
        free = max(free, *ready[part]) + curve.time_ns(sum(sizes[part]))
    return free


@given(
    st.lists(st.tuples(numbers, numbers), min_size=1, max_size=9),
    st.lists(st.integers(0, 300), min_size=1, max_size=4),
    st.integers(0, 500),
)
def test_bucket_equals_brute_force(gradients, steps, slack):
    ready, sizes = (list(column) for column in zip(*gradients, strict=True))
    line = Curve((10, 200, 500, 2000)[: len(steps)], tuple(accumulate(steps)))
    found = bucket(ready, sizes, line)
    ends = {tuple(cut): end_ns(ready, sizes, line, cut) for cut in all_cuts(len(sizes))}
    assert found.end_ns == min(ends.values())
    fewest = min(len(cut) for cut, end in ends.items() if end == found.end_ns)
    assert len(found.counts) == fewest
    assert found.end_ns == end_ns(ready, sizes, line, list(np.cumsum(found.counts)))
    assert sum(found.counts) == len(sizes)
    assert sum(found.sizes) == sum(sizes)
    fewer = bucket(ready, sizes, line, slack)
    enough = [cut for cut, end in ends.items() if end <= min(ends.values()) + slack]
    assert len(fewer.counts) == min(map(len, enough))
    assert fewer.end_ns == min(ends[cut] for cut in enough if len(cut) == len(fewer.counts))


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=30), numbers, numbers)
def test_a_slower_link_never_ends_earlier(gradients, fixed, more):
    ready, sizes = (list(column) for column in zip(*gradients, strict=True))
    end = bucket(ready, sizes, Curve.line(fixed, 0.5)).end_ns
    assert bucket(ready, sizes, Curve.line(fixed + more, 0.5)).end_ns >= end
    assert bucket(ready, sizes, Curve.line(fixed, 0.5 + more)).end_ns >= end
    # At best nothing waits for the link, and everything but the last bucket is hidden.
    assert end >= max(ready) + fixed


def test_bucket_joins_all_where_only_latency_counts_and_none_where_it_is_nothing():
    assert bucket([0, 0, 0], [5, 5, 5], Curve.line(100, 0)).counts == (3,)
    assert bucket([0, 10, 20], [10, 10, 10], Curve.line(0, 1)).counts == (1, 1, 1)
    assert bucket([0, 10, 20], [10, 10, 10], Curve.line(0, 1), slack_ns=20).counts == (3,)
    assert bucket([0], [0], Curve.line(0, 0)).counts == (1,)


@pytest.mark.parametrize(
    ("ready", "sizes", "line", "words"),
    [
        ([], [], Curve.line(1, 1), "got 0 and 0"),
        ([1], [1, 2], Curve.line(1, 1), "got 1 and 2"),
        ([1.5], [1], Curve.line(1, 1), "ready_ns must be an int of at least 0, got 1.5"),
        ([1], [-1], Curve.line(1, 1), "size in bytes must be an int of at least 0, got -1"),
        ([1], [True], Curve.line(1, 1), "must be an int of at least 0, got True"),
    ],
)
def test_bucket_refuses(ready, sizes, line, words):
    with pytest.raises(ConfigError, match=words):
        bucket(ready, sizes, line)


@given(
    st.integers(0, 10**6),
    st.integers(0, 100),
    st.lists(st.integers(0, 10**6), min_size=2, max_size=6, unique=True),
    st.integers(0, 10**6),
)
def test_a_curve_is_the_line_that_its_points_are_on(fixed, per_byte, sizes, size):
    sizes = sorted(sizes)
    curve = Curve(tuple(sizes), tuple(fixed + per_byte * one for one in sizes))
    expected = fixed + per_byte * max(size, sizes[0])
    assert curve.time_ns(size) == pytest.approx(expected, rel=1e-9)
    assert Curve.line(fixed, per_byte).time_ns(size) == fixed + per_byte * size


@pytest.mark.parametrize(
    ("sizes", "times"),
    [((), ()), ((1,), (1, 2)), ((2, 1), (1, 2)), ((1, 2), (2, 1)), ((1,), (-1,))],
)
def test_what_is_no_curve_is_refused(sizes, times):
    with pytest.raises(ConfigError, match="a curve must have a time of at least 0 for each size"):
        Curve(sizes, times)


def in_small_steps(ready: list[int], costs: list[int], computing: int, given: Contention) -> float:
    """End of the last exchange or of computing, by advancing a clock in small steps."""
    dt, now, done, left = 0.25, 0.0, 0.0, [float(cost) for cost in costs]
    while done < computing or any(left):
        running = [n for n, rest in enumerate(left) if rest > 0 and ready[n] <= done]
        running = running[: 1 if given.pair == 2 else 2]
        shared = given.pair if len(running) == 2 else 1.0
        beside = given.exchanging if done < computing else 1.0
        if done < computing:
            done += dt / (given.computing if running else 1.0)
        for one in running:
            left[one] = max(0.0, left[one] - dt / shared / beside)
        now += dt
    return now


slower = st.sampled_from([1.0, 1.25, 1.5, 2.0])


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 60)), min_size=1, max_size=5),
    st.integers(0, 30),
    st.builds(Contention, slower, slower, slower),
)
def test_overlap_equals_a_clock_in_small_steps(exchanges, more, contention):
    ready, costs = sorted(one for one, _ in exchanges), [cost for _, cost in exchanges]
    computing = ready[-1] + more
    ends, computed = overlap(ready, costs, computing, contention)
    expected = in_small_steps(ready, costs, computing, contention)
    # The clock is late by up to a step for each event.
    assert max(*ends, computed) == pytest.approx(expected, abs=6)


@given(st.integers(50, 500), st.integers(50, 2000), st.builds(Contention, slower, slower, slower))
def test_contention_is_found_from_times_that_it_causes(cost, computing, contention):
    _, alone = overlap([0, 0], [0, 0], computing, Contention())
    pair, _ = overlap([0, 0], [1000 * cost] * 2, 0, contention)
    ends, computed = overlap([0], [1000 * cost], 1000 * computing, contention)
    ratio = max(pair) / (1000 * cost)
    found = Contention.measured(ratio, 1000 * alone, 1000 * cost, computed, *ends)
    assert astuple(found) == pytest.approx(astuple(contention), rel=1e-3)


@pytest.mark.parametrize("ranks", RANKS)
def test_ring_and_gather_equal_their_messages(ranks):
    size = 16.0 * 9 * 5 * 100
    by_messages = ring_by_messages(ranks, size / ranks, LINK, 2 * (ranks - 1))
    assert collectives.ring(ranks, size, LINK) == by_messages
    line = collectives.line(collectives.ring, ranks, LINK)
    assert line.time_ns(int(size)) == pytest.approx(by_messages, abs=1)
    by_messages = ring_by_messages(ranks, size, LINK, ranks - 1)
    assert collectives.gather(ranks, size, LINK) == by_messages
    assert collectives.line(collectives.gather, ranks, LINK).time_ns(int(size)) == round(
        by_messages
    )


def test_a_link_is_not_negative():
    with pytest.raises(ConfigError, match="no negative part, got Link"):
        Link(-1, 0.5)
    with pytest.raises(ConfigError, match="ranks must be an int of at least 1, got 0"):
        collectives.line(collectives.ring, 0, LINK)
