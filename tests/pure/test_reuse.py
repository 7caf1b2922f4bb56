"""Reuse: fronts, splits and walks against exhaustive search, invariants and published data."""

from __future__ import annotations

import random
from typing import Any

import pytest
from exhaustive import cost, exhaustive
from hypothesis import given, settings
from hypothesis import strategies as st

from ucudnn.plan import Chunk
from ucudnn.solvers import Item, ReuseTable, reuse

LIMITS = (None, 0, 1, 2, 3, 4, 5)
N = 8


def items(least: int = 1, most: int = 9, largest: int = N) -> st.SearchStrategy[list[Item]]:
    """Few sizes, workspaces and times, so that ties are common."""
    item = st.builds(
        Item,
        batch=st.integers(1, largest),
        workspace_bytes=st.integers(0, 5),
        time_ns=st.integers(1, 12),
        algorithm=st.sampled_from(["direct", "gemm", "winograd"]),
        rank=st.integers(0, 1),
    )
    return st.lists(item, min_size=least, max_size=most)


LAUNCH_NS = st.sampled_from([0, 3])
THREE_LISTS = st.fixed_dictionaries({"first": items(0, 6), "accumulate": items(0, 6)})
# Of one list, which chunks of any role are of, or of three.
PROBLEMS = st.tuples(items(), st.just({})) | st.tuples(items(0), THREE_LISTS)


def best(table: ReuseTable, n: int, limit: int | None) -> tuple[Item, ...] | None:
    return None if table.time_ns(n, limit) is None else table.items(n, limit)


@pytest.mark.slow
@settings(max_examples=600)
@given(PROBLEMS, LAUNCH_NS)
def test_every_split_is_the_best_there_is(
    problem: tuple[list[Item], dict[str, Any]], launch_ns: int
) -> None:
    single, lists = problem
    if not single and not any(lists.values()):
        return
    table = reuse(single, N, **lists, launch_ns=launch_ns)
    for n in range(1, N + 1):
        for limit in LIMITS:
            expected = exhaustive(single, n, limit, **lists, launch_ns=launch_ns)
            found = best(table, n, limit)
            assert (found and cost(found, launch_ns)) == (expected and cost(expected, launch_ns))


@given(PROBLEMS, LAUNCH_NS)
def test_chunks_keep_their_roles_and_their_sizes_do_not_rise(
    problem: tuple[list[Item], dict[str, Any]], launch_ns: int
) -> None:
    single, lists = problem
    if not single and not any(lists.values()):
        return
    table = reuse(single, N, **lists, launch_ns=launch_ns)
    for n in range(1, N + 1):
        split = best(table, n, None) or ()
        assert not split or table.split(n) == tuple(Chunk(i.batch, i.algorithm) for i in split)
        # With three lists the first of several chunks may be smaller than the others.
        has_first = bool(lists) and len(split) > 1
        assert all(item in lists["first"] for item in split[: int(has_first)])
        later = split[int(has_first) :]
        assert all(item in (lists["accumulate"] if has_first else single) for item in later)
        sizes = [item.batch for item in later]
        assert sizes == sorted(sizes, reverse=True)


@given(items(), LAUNCH_NS)
def test_the_front_is_what_every_limit_gives(chunks: list[Item], launch_ns: int) -> None:
    table = reuse(chunks, N, launch_ns=launch_ns)
    for n in range(1, N + 1):
        fastest: dict[int, int] = {}
        for limit in LIMITS[1:]:
            time_ns = table.time_ns(n, limit)
            if time_ns is not None and time_ns < min(fastest.values(), default=time_ns + 1):
                fastest[limit or 0] = time_ns
        assert table.front(n) == list(fastest.items())
        for workspace_bytes, time_ns in table.front(n):
            split = table.items(n, workspace_bytes)
            assert sum(item.time_ns + launch_ns for item in split) == time_ns
            assert max(item.workspace_bytes for item in split) == workspace_bytes


def walked(table: ReuseTable, n: int, limit: int | None) -> list[Item] | None:
    entries = table.walk(limit)
    alone = entries[n - 1].alone
    if alone is not None:
        return [alone]
    steps = []
    while n:
        last = entries[n - 1].last
        if last is None:
            return None
        steps.append(last)
        n -= last.batch
    return steps[::-1]


@settings(max_examples=600)
@given(items(), st.just({}) | THREE_LISTS, st.sampled_from(LIMITS))
def test_a_walk_is_an_optimal_split(
    single: list[Item], lists: dict[str, Any], limit: int | None
) -> None:
    # A lone call does no more than a first one.
    table = reuse([*single, *lists.get("first", ())], N, **lists)
    for n in range(1, N + 1):
        split, steps = best(table, n, limit), walked(table, n, limit)
        entry = table.walk(limit)[n - 1]
        if split is None:
            assert steps is None
            assert entry.alone is None
            continue
        assert steps is not None
        assert cost(steps)[:2] == cost(split)[:2]
        assert sum(item.batch for item in steps) == n
        assert limit is None or max(item.workspace_bytes for item in steps) <= limit
        assert (entry.alone is not None) == (len(split) == 1)
        if lists and entry.alone is None:
            assert steps[0] in lists["first"]
            assert all(item in lists["accumulate"] for item in steps[1:])


def test_a_chain_may_be_a_first_chunk_by_itself_a_split_is_not() -> None:
    table = reuse(
        [Item(2, 0, 100, "lone")],
        4,
        first=[Item(2, 0, 10, "first")],
        accumulate=[Item(2, 0, 1, "later")],
    )
    assert table.time_ns(2) == 100
    assert table.split(4) == (Chunk(2, "first"), Chunk(2, "later"))
    assert [entry.last and entry.last.algorithm for entry in table.walk()] == [
        None,
        "first",
        None,
        "later",
    ]


@given(items(2).flatmap(lambda chunks: st.tuples(st.just(chunks), st.permutations(chunks))))
def test_the_order_of_the_items_does_not_matter(both: tuple[list[Item], list[Item]]) -> None:
    one, other = (reuse(chunks, N) for chunks in both)
    for n in range(1, N + 1):
        assert one.front(n) == other.front(n)
        for limit in LIMITS:
            assert best(one, n, limit) == best(other, n, limit)


def test_golden_front_of_the_released_mu_cudnn() -> None:
    """The instance of its test/dp.cpp at b = 1, 2, 4 ... 256 (ms, bytes, chunks there)."""
    chunks = []
    for size in [2**power for power in range(9)]:
        if size << 20 < 64 << 20:
            chunks.append(Item(size, size << 20, size * 100_000 + 10_000, "fast"))
        chunks.append(Item(size, size, size * 10_000_000 + 100_000, "slow"))
    golden = [
        (1, 2_585_600_000, 256),
        (2, 2_572_800_000, 128),
        (4, 2_566_400_000, 64),
        (8, 2_563_200_000, 32),
        (16, 2_561_600_000, 16),
        (32, 2_560_800_000, 8),
        (64, 2_560_400_000, 4),
        (128, 2_560_200_000, 2),
        (256, 2_560_100_000, 1),
        (1 << 20, 28_160_000, 256),
        (2 << 20, 26_880_000, 128),
        (4 << 20, 26_240_000, 64),
        (8 << 20, 25_920_000, 32),
        (16 << 20, 25_760_000, 16),
        (32 << 20, 25_680_000, 8),
    ]
    table = reuse(chunks, 256)
    assert table.front(256) == [(workspace, time_ns) for workspace, time_ns, _ in golden]
    for workspace, _, count in golden:
        assert len(table.split(256, workspace)) == count


@pytest.mark.parametrize("scale", [10**6, 10**15, 10**18, 10**30])
def test_numbers_do_not_overflow(scale: int) -> None:
    draw = random.Random(9)
    drawn = [(draw.randint(1, 16), draw.randint(1, 999), draw.randint(1, 999)) for _ in range(50)]
    small = [Item(1, 0, 999, "lean"), *(Item(*one, "fast") for one in drawn)]
    large = [
        Item(i.batch, i.workspace_bytes * scale, i.time_ns * scale, i.algorithm) for i in small
    ]
    one, other = reuse(small, 16), reuse(large, 16)
    for n in range(1, 17):
        assert other.front(n) == [(w * scale, t * scale) for w, t in one.front(n)]
        assert other.split(n) == one.split(n)
    assert all(type(value) is int for point in other.front(16) for value in point)
