"""Lazy measuring against timing everything: never a worse split where the assumptions hold."""

from __future__ import annotations

from dataclasses import replace

from exhaustive import exhaustive
from hypothesis import given, settings
from hypothesis import strategies as st

from ucudnn.solvers import Item
from ucudnn.solvers.lazy import ChunkOption, Interval, Outlook, outlook

Table = dict[ChunkOption, int]


def doublings(small: int, large: int) -> int:
    count = 0
    while small < large:
        small, count = 2 * small, count + 1
    return count


def economical(times: list[int]) -> list[int]:
    """The least times of sizes 1.. at or above these that keep both assumptions."""
    times = list(times)
    sizes = range(1, len(times) + 1)
    while True:
        before = list(times)
        for b in sizes:
            promised = [times[a - 1] for a in sizes if a < b]
            for c in sizes:
                if c <= b:
                    continue
                steps = doublings(b, c)
                promised.append(b * times[c - 1] * 9**steps // (c * 10**steps))
                for a in range(1, b):
                    steps = max(0, doublings(a, c) - 1)
                    rates = [b * times[x - 1] * 9**steps // (x * 10**steps) for x in (a, c)]
                    promised.append(min(rates))
            times[b - 1] = max(times[b - 1], *promised, 1)
        if times == before:
            return times


@st.composite
def tables(draw, batch: int, honest: bool) -> Table:
    """True times of every chunk, of two algorithms, one of which may not do the smallest size."""
    table: Table = {}
    for name in ("a", "b"):
        raw = draw(st.lists(st.integers(1, 400), min_size=batch, max_size=batch))
        times = economical(raw) if honest else raw
        smallest = draw(st.integers(1, 2))
        for size in range(smallest, batch + 1):
            workspace = draw(st.integers(0, 3))
            lists = ("alone",) if size == batch else ("first", "later")
            table[ChunkOption(size, name, name, lists, workspace_bytes=workspace)] = times[size - 1]
    return table


def run(table: Table, batch: int, launch_ns: int, tolerance: float) -> tuple[Outlook, int]:
    """Time what is wanted until nothing is; the last outlook and how much was timed."""
    known = {option: option for option in table}
    for _ in range(len(table) + 1):
        found = outlook(known.values(), batch, launch_ns=launch_ns, tolerance=tolerance)
        if not found.wanted:
            return found, sum(option.is_timed for option in known.values())
        for option in found.wanted:
            assert not option.is_timed
            key = replace(option, interval=None)
            time_ns = table[key]
            interval = Interval(time_ns, time_ns, time_ns)
            known[key] = replace(key, interval=interval, is_timed=True)
    raise AssertionError("it goes on for ever")


def best(table: Table, batch: int, launch_ns: int) -> int | None:
    lists: dict[str, list[Item]] = {"alone": [], "first": [], "later": []}
    for option, time_ns in table.items():
        for name in option.lists:
            lists[name].append(Item(option.batch, 0, time_ns, option.algorithm))
    found = exhaustive(
        lists["alone"], batch, first=lists["first"], accumulate=lists["later"], launch_ns=launch_ns
    )
    return None if found is None else sum(item.time_ns + launch_ns for item in found)


BATCH = 7


@given(tables(BATCH, honest=True), st.sampled_from([0, 5, 1000]))
@settings(max_examples=150)
def test_the_split_is_as_fast_as_with_everything_timed(table, launch_ns):
    found, _ = run(table, BATCH, launch_ns, tolerance=0.0)
    assert found.time_ns == best(table, BATCH, launch_ns)
    assert found.bound_ns == found.time_ns
    assert found.gap == 0


@given(tables(BATCH, honest=True), st.sampled_from([0.02, 0.2]))
@settings(max_examples=150)
def test_the_certificate_is_true_when_a_gap_is_left(table, tolerance):
    found, _ = run(table, BATCH, 0, tolerance)
    optimum = best(table, BATCH, 0)
    # what lies within the tolerance of a promise passes for noise
    assert (1 - tolerance) * found.bound_ns <= optimum <= found.time_ns
    assert found.gap <= tolerance


@given(tables(BATCH, honest=False))
@settings(max_examples=150)
def test_it_ends_and_is_a_plan_whatever_the_times(table):
    found, count = run(table, BATCH, 0, tolerance=0.0)
    assert count <= len(table)
    optimum = best(table, BATCH, 0)
    assert (found.time_ns is None) == (optimum is None)
    assert optimum is None or found.time_ns >= optimum


def curve(times_by_size: dict[int, int], batch: int, timed: set[int]) -> list[ChunkOption]:
    return [
        ChunkOption(
            size,
            "a",
            "a",
            ("alone",) if size == batch else ("first", "later"),
            Interval(time_ns, time_ns, time_ns) if size in timed else None,
            size in timed,
        )
        for size, time_ns in times_by_size.items()
    ]


def test_times_that_fall_are_repaired():
    """Eight samples take less than four: what lies between is not bound by the four."""
    times = {2: 60, 4: 130, 6: 40, 8: 100, 12: 400}
    found = outlook(curve(times, 12, {2, 4, 8, 12}), 12)
    assert found.time_ns == 220  # eight and twice two
    assert [option.batch for option in found.wanted] == [6]


def test_a_broken_promise_lowers_every_bound_of_the_curve():
    """At 2 per sample on both sides, 4 samples in half of it show that the rest may be as fast."""
    flat = {size: 2 * size for size in range(1, 33)}
    timed = {1, 2, 4, 8, 16, 32}
    assert not outlook(curve(flat, 32, timed), 32).wanted
    surprise = flat | {4: 4}
    found = outlook(curve(surprise, 32, timed), 32)
    assert found.time_ns == 32  # eight times four, and something else may be as good
    assert found.wanted


def test_noise_within_the_interval_is_no_broken_promise():
    options = curve({1: 2, 2: 4, 4: 8, 8: 16}, 8, {1, 2, 4, 8})
    noisy = [
        replace(option, interval=Interval(6, 7, 8)) if option.batch == 4 else option
        for option in options
    ]
    between = ChunkOption(3, "a", "a", ("first", "later"))
    assert outlook([*noisy, between], 8).bound_ns == 14  # twice four; nothing is lowered


def test_every_algorithm_is_looked_at_where_it_tells_most():
    options = curve({1: 1, 2: 1, 4: 1}, 4, set())
    others = [replace(option, algorithm="b", curve="b") for option in options]
    wanted = outlook([*options, *others], 4).wanted
    assert [(option.algorithm, option.batch) for option in wanted] == [("a", 4), ("b", 4)]


def test_nothing_fits():
    assert outlook([], 4) == Outlook(None, None)
    assert outlook([ChunkOption(3, "a", "a", ("first", "later"))], 4).time_ns is None
    assert outlook([], 4).gap == 1.0
