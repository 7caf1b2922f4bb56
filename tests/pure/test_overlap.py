"""Buckets and collectives: equal to brute force, and to messages that are sent one by one."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from messages import LINK, RANKS, ring_by_messages

from ucudnn.errors import ConfigError
from ucudnn.solvers import Line, Link, bucket, collectives, finish, fit

numbers = st.integers(0, 1000)


def all_cuts(n: int) -> list[list[int]]:
    """The ends of the buckets, for every cut of n gradients."""
    choices = [[place + 1 for place in range(n - 1) if bits >> place & 1] for bits in range(1 << n)]
    return [[*inner, n] for inner in choices[: 1 << (n - 1)]]


def end_ns(ready: list[int], sizes: list[int], line: Line, ends: list[int]) -> int:
    parts = [slice(*pair) for pair in pairwise([0, *ends])]
    costs = [line.time_ns(sum(sizes[part])) for part in parts]
    return finish([max(ready[part]) for part in parts], costs)[-1]


@given(
    st.lists(st.tuples(numbers, numbers), min_size=1, max_size=9),
    st.integers(0, 300),
    st.integers(0, 16),
    st.integers(0, 500),
)
def test_bucket_equals_brute_force(gradients, fixed, eighths, slack):
    ready, sizes = (list(column) for column in zip(*gradients, strict=True))
    line = Line(fixed, eighths / 8)
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
    end = bucket(ready, sizes, Line(fixed, 0.5)).end_ns
    assert bucket(ready, sizes, Line(fixed + more, 0.5)).end_ns >= end
    assert bucket(ready, sizes, Line(fixed, 0.5 + more)).end_ns >= end
    # At best nothing waits for the link, and everything but the last bucket is hidden.
    assert end >= max(ready) + fixed


def test_bucket_joins_all_where_only_latency_counts_and_none_where_it_is_nothing():
    assert bucket([0, 0, 0], [5, 5, 5], Line(100, 0)).counts == (3,)
    assert bucket([0, 10, 20], [10, 10, 10], Line(0, 1)).counts == (1, 1, 1)
    assert bucket([0, 10, 20], [10, 10, 10], Line(0, 1), slack_ns=20).counts == (3,)
    assert bucket([0], [0], Line(0, 0)).counts == (1,)


@pytest.mark.parametrize(
    ("ready", "sizes", "line", "words"),
    [
        ([], [], Line(1, 1), "got 0 and 0"),
        ([1], [1, 2], Line(1, 1), "got 1 and 2"),
        ([1.5], [1], Line(1, 1), "ready_ns must be an int of at least 0, got 1.5"),
        ([1], [-1], Line(1, 1), "size in bytes must be an int of at least 0, got -1"),
        ([1], [True], Line(1, 1), "must be an int of at least 0, got True"),
        ([1], [1], Line(-1, 1), "no negative part"),
    ],
)
def test_bucket_refuses(ready, sizes, line, words):
    with pytest.raises(ConfigError, match=words):
        bucket(ready, sizes, line)


@given(st.integers(1, 10**6), st.integers(1, 100))
def test_fit_finds_the_line_that_samples_are_on(fixed, per_byte):
    samples = [(size, fixed + per_byte * size) for size in (0, 64, 4096, 1 << 20)]
    found = fit(samples)
    assert found.fixed_ns == pytest.approx(fixed, rel=1e-6)
    assert found.per_byte_ns == pytest.approx(per_byte, rel=1e-6)
    assert found.error(samples) < 1e-6


def test_fit_has_no_negative_part():
    assert fit([(1000, 1000), (2000, 2100)]).fixed_ns == 0
    assert fit([(1000, 2100), (2000, 2000)]).per_byte_ns == 0
    assert fit([(1000, 500)]).error([(1000, 500)]) < 1e-6
    with pytest.raises(ConfigError, match="samples must not be empty"):
        fit([])


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
