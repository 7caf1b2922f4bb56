"""Split tables and the plans made of them, against every split there is."""

from __future__ import annotations

import random
import sys
from functools import cache
from math import prod
from typing import NamedTuple

import pytest
from exhaustive import by_position

from ucudnn.axis import BatchAxis, RowAxis
from ucudnn.kernels.candidates import Kernel
from ucudnn.kernels.choose import predict
from ucudnn.kernels.splits import (
    CHUNK_NS,
    WORTHWHILE_NS,
    AbstractSplitTable,
    BatchSplits,
    RowSplits,
    known_chunks,
    plan_by,
)
from ucudnn.measurement import Conditions, Device, Measurement, MeasurementKey, Software
from ucudnn.plan import DEFAULT_ALGORITHM, Chunk, KernelPlan, Split, Timing
from ucudnn.problem import OPS, Problem
from ucudnn.slabs import slabs

SEEDS = range(5)
N = 5
ALGORITHMS = (DEFAULT_ALGORITHM, "gemm", "winograd")
TIMING = Timing(time_ns=7, spread_ns=0, workspace_bytes=0, samples=3)


class TimedChunk(NamedTuple):
    """A way to compute so much of the axis, which solvers call a batch of rows, too."""

    batch: int
    algorithm: str
    time_ns: int
    workspace_bytes: int


def kernel(op: str = "fprop", dtype: str = "float32") -> Problem:
    """9 rows of y and of dx, so that there are slabs of 1, 2, 4 and 8 rows."""
    return Problem(op, N, 2, 2, (9, 3), (3, 3), padding=((1, 1), (1, 1)), dtype=dtype)


def one_kernel(problem: Problem, algorithm: str) -> str:
    """An algorithm runs every batch by the same implementation."""
    del problem
    return algorithm


def measured(problem: Problem, role: str, chunk: TimedChunk) -> Measurement:
    key = MeasurementKey(
        problem, chunk.algorithm, Device("cpu", "none"), Software("0"), Conditions(role), 1
    )
    time_ns = chunk.time_ns
    return Measurement(key, "ok", time_ns, 0, (time_ns,), workspace_bytes=chunk.workspace_bytes)


class Known:
    """Random times of chunks, as measurements and as the positions in a split they allow.

    Which roles a chunk is timed in is told here once more: a chunk of fprop or dgrad costs the same
    at any position beside others; the first one of wgrad runs as a lone one does in full precision,
    and in half precision begins a sum in float32, which all chunks then hold.
    """

    def __init__(self, axis, sizes, seed, shortest_ns=WORTHWHILE_NS, density=1.0, names=ALGORITHMS):
        self.axis, self.sizes = axis, tuple(sizes)
        self.measurements: list[Measurement] = []
        self.alone: list[TimedChunk] = []
        self.first: list[TimedChunk] = []
        self.later: list[TimedChunk] = []
        chance, problem = random.Random(seed), axis.problem
        half = problem.op == "wgrad" and problem.dtype == "float16"
        sum_bytes = 4 * prod(problem.w_shape) if half else 0
        for size in self.sizes:
            for name in names:
                # A lone chunk does no more than a first one.
                least, more = chance.randint(1, 9), chance.randint(0, 3)
                workspace = chance.choice([0, 100, 300, 500]) * size
                time_ns = shortest_ns * least * (1 + size) + chance.randrange(1000)
                alone = TimedChunk(size, name, time_ns, workspace)
                later = alone._replace(time_ns=alone.time_ns + shortest_ns * more)
                if chance.random() > density:
                    continue
                self._add("later", later, sum_bytes, self.later)
                if problem.op != "wgrad":
                    self.first.append(later)
                    self._add("alone", alone, 0, self.alone)
                else:
                    self._add("alone", alone, 0, self.alone)
                    if half:
                        first = later._replace(time_ns=alone.time_ns + shortest_ns)
                        self._add("first", first, sum_bytes, self.first)
                    else:
                        self.first.append(alone)

    def _add(
        self, role: str, chunk: TimedChunk, more_bytes: int, position: list[TimedChunk]
    ) -> None:
        self.measurements.append(measured(self.axis.part(chunk.batch), role, chunk))
        position.append(chunk._replace(workspace_bytes=chunk.workspace_bytes + more_bytes))

    @cache  # noqa: B019 - each lives as long as its test
    def splits(self, extent: int) -> list[tuple[TimedChunk, ...]]:
        """Every split; later chunks in one order only, as they cost the same in any."""
        return list(by_position(self.alone, self.first, self.later, extent))

    def fitting(self, extent: int, limit: int | None) -> list[tuple[TimedChunk, ...]]:
        """Those within a limit; with chunks too short for their launch only where no others are."""
        within = [s for s in self.splits(extent) if limit is None or workspace_of(s) <= limit]
        return [s for s in within if len(s) == 1 or is_worthwhile(s)] or within


def is_worthwhile(split: tuple[TimedChunk, ...]) -> bool:
    return all(chunk.time_ns >= WORTHWHILE_NS for chunk in split)


def time_of(split: tuple[TimedChunk, ...], launch_ns: int = 0) -> int:
    return sum(chunk.time_ns + launch_ns for chunk in split)


def workspace_of(split: tuple[TimedChunk, ...]) -> int:
    return max(chunk.workspace_bytes for chunk in split)


def batch_of(seed: int, op="fprop", dtype="float32", **settings) -> Known:
    return Known(BatchAxis(kernel(op, dtype)), range(1, N + 1), seed, **settings)


def rows_of(seed: int, op="fprop", dtype="float32", **settings) -> Known:
    return Known(RowAxis(kernel(op, dtype)), (2, 3, 4), seed, names=ALGORITHMS[1:], **settings)


def table_of(
    known: Known, limit: int | None = None, implementation_of=one_kernel, timed_only: bool = False
) -> AbstractSplitTable:
    """The table; `timed_only`: without sizes that are bounded by the time of larger ones."""
    if known.axis.name == "spatial":
        return RowSplits(known.axis, known.sizes, known.measurements, implementation_of, limit)
    sizes = () if timed_only else known.sizes
    return BatchSplits(known.axis, sizes, known.measurements, implementation_of, limit)


def plan_of(
    winner: Split, *tables: AbstractSplitTable, op: str = "fprop", dtype: str = "float32"
) -> KernelPlan:
    planned = Kernel(kernel(op, dtype), ("layer",))
    return plan_by(tables, planned, winner, TIMING, None, tables[-1].implementation_of)


def chunks_by_truth(known: Known, split: Split) -> tuple[TimedChunk, ...]:
    """The fastest way that is known of each chunk in its position."""
    found = []
    for number, chunk in enumerate(split.chunks):
        listed = known.later if number else known.first if len(split.chunks) > 1 else known.alone
        size = known.axis.size_of(chunk)
        ways = [one for one in listed if (one.batch, one.algorithm) == (size, chunk.algorithm)]
        found.append(min(ways, key=lambda one: one.time_ns))
    return tuple(found)


KINDS = [(op, "float32") for op in OPS] + [("wgrad", "float16")]
kinds = pytest.mark.parametrize(("op", "dtype"), KINDS)
of_any_axis = pytest.mark.parametrize("known_of", [batch_of, rows_of])


@kinds
@of_any_axis
@pytest.mark.parametrize("seed", SEEDS)
def test_the_first_split_is_the_fastest_and_all_are_whole_and_fit(known_of, op, dtype, seed):
    known = known_of(seed, op, dtype, density=0.7)
    for limit in (None, 1200, 600, 300, 0):
        table = table_of(known, limit, timed_only=True)
        expected = known.fitting(known.axis.extent, limit)
        splits = table.splits()
        assert bool(splits) == bool(expected)
        for split in splits:
            chunks = chunks_by_truth(known, split)
            assert sum(chunk.batch for chunk in chunks) == known.axis.extent
            assert limit is None or workspace_of(chunks) <= limit
        if splits:
            assert time_of(chunks_by_truth(known, splits[0])) == min(map(time_of, expected))


def timed(*chunks: TimedChunk, sizes=range(1, N + 1)) -> BatchSplits:
    """A table of chunks of fprop: of the whole alone, of others beside others."""
    entries = [
        measured(kernel().with_batch(one.batch), "alone" if one.batch == N else "later", one)
        for one in chunks
    ]
    return BatchSplits(BatchAxis(kernel()), sizes, entries, one_kernel, None)


def sizes_of(split: Split) -> list[int]:
    return sorted(chunk.size for chunk in split.chunks)


def test_a_short_call_of_the_whole_is_no_chunk_that_is_too_short():
    short, chunk = WORTHWHILE_NS // 2, WORTHWHILE_NS
    table = timed(
        TimedChunk(5, "gemm", short, 0),
        TimedChunk(1, "gemm", chunk, 0),
        TimedChunk(4, "gemm", chunk, 0),
    )
    assert sizes_of(table.splits()[0]) == [5]
    assert table.front() == ((0, short),)


def test_the_undivided_call_is_offered_though_it_is_slower_under_every_penalty():
    second = CHUNK_NS[-1]
    slow = TimedChunk(5, "gemm", 9 * second, 0), TimedChunk(5, "winograd", 7 * second, 0)
    table = timed(*slow, TimedChunk(1, "gemm", second, 0), TimedChunk(4, "gemm", second, 0))
    found = [split.chunks for split in table.splits()]
    assert sizes_of(table.splits()[0]) == [1, 4]
    assert found[-1] == (Chunk(5, "winograd"),)


def test_the_largest_batch_is_split_into_sizes_that_were_timed():
    """Two samples take no more than three do, which would be the faster split if it were timed."""
    cheap, dear = WORTHWHILE_NS, 9 * WORTHWHILE_NS
    table = timed(TimedChunk(3, "gemm", cheap, 0), TimedChunk(1, "gemm", dear, 0))
    assert [sizes_of(split) for split in table.splits()] == [[1, 1, 3]]
    plan = plan_of(table.splits()[0], table)
    assert plan.predicted_time_ns == cheap + 2 * dear
    # The chain of 5 leads through 4, so its steps are those of 4, too.
    assert [sizes_of(plan.split(n)) for n in (1, 2, 3, 4)] == [[1], [2], [3], [1, 3]]


def test_where_nothing_timed_adds_up_smaller_chunks_of_the_same_kernel_are_raced():
    known = Known(BatchAxis(kernel()), (3,), 0, names=("gemm",))
    assert table_of(known, timed_only=True).splits() == []
    table = BatchSplits(known.axis, (1, 2, 3), known.measurements, one_kernel, None)
    (split,) = table.splits()
    assert sorted(chunk.size for chunk in split.chunks) == [2, 3]
    assert table.chunks(split) is None
    plan = plan_of(split, table)
    assert (plan.split(N), plan.predicted_time_ns) == (split, TIMING.time_ns)


@of_any_axis
@pytest.mark.parametrize("seed", SEEDS)
def test_a_split_is_offered_for_every_penalty_of_a_chunk(known_of, seed):
    known = known_of(seed)
    offered = [chunks_by_truth(known, split) for split in table_of(known).splits()]
    for launch_ns in CHUNK_NS:
        expected = min(time_of(split, launch_ns) for split in known.splits(known.axis.extent))
        assert min(time_of(split, launch_ns) for split in offered) == expected


@of_any_axis
@pytest.mark.parametrize("seed", SEEDS)
def test_short_chunks_are_used_only_where_nothing_else_fits(known_of, seed):
    known = known_of(seed, shortest_ns=WORTHWHILE_NS // 12)
    for limit in (None, 600, 100, 0):
        expected = known.fitting(known.axis.extent, limit)
        splits = [chunks_by_truth(known, split) for split in table_of(known, limit).splits()]
        assert bool(splits) == bool(expected)
        if splits and (is_worthwhile(expected[0]) or len(expected[0]) == 1):
            assert time_of(splits[0]) == min(map(time_of, expected))
        # Of the batch only what is left after a short chunk need not be short.
        assert all(limit is None or workspace_of(split) <= limit for split in splits)


@kinds
@of_any_axis
@pytest.mark.parametrize("shortest_ns", [WORTHWHILE_NS, WORTHWHILE_NS // 12])
@pytest.mark.parametrize("seed", range(2))
def test_the_front_says_which_split_each_limit_would_give(known_of, op, dtype, shortest_ns, seed):
    known = known_of(seed, op, dtype, shortest_ns=shortest_ns)
    front, extent = table_of(known).front(), known.axis.extent
    limits = sorted({workspace_of(split) for split in known.splits(extent)})
    least_ns = sys.maxsize
    for limit in limits:
        # Short chunks, used where no long ones fit, may be faster than long ones in more workspace.
        least_ns = min(least_ns, *map(time_of, known.fitting(extent, limit)))
        found = [point.time_ns for point in front if point.workspace_bytes <= limit]
        assert found[-1] == least_ns
    assert front[0].workspace_bytes == limits[0]
    assert list(front) == sorted(front, key=lambda point: (point.workspace_bytes, -point.time_ns))


@of_any_axis
@pytest.mark.parametrize("seed", SEEDS)
def test_the_smallest_workspace_of_any_split_is_named(known_of, seed):
    known = known_of(seed, density=0.5)
    every = known.splits(known.axis.extent)
    smallest = table_of(known, 0).smallest()
    assert (smallest is None) == (not every)
    if smallest is not None:
        assert smallest[0] == min(map(workspace_of, every))
        assert workspace_of(chunks_by_truth(known, smallest[1])) == smallest[0]
        assert table_of(known, smallest[0]).splits()
        if smallest[0]:
            assert not table_of(known, smallest[0] - 1, timed_only=True).splits()


@kinds
@of_any_axis
def test_a_prediction_is_the_sum_of_the_chunks_in_their_positions(known_of, op, dtype):
    known = known_of(3, op, dtype)
    table = table_of(known)
    for split in table.splits():
        expected = chunks_by_truth(known, split)
        chunks = table.chunks(split)
        assert [(item.time_ns, item.workspace_bytes) for item in chunks] == [
            (chunk.time_ns, chunk.workspace_bytes) for chunk in expected
        ]
        (finalist,) = predict([table], [split], default=None)
        assert finalist.samples == (time_of(expected),)
        assert finalist.timing == Timing(time_of(expected), 0, workspace_of(expected), samples=0)


def test_what_was_not_timed_in_its_position_is_not_predicted():
    table = table_of(rows_of(0))
    unknown = [
        Split("spatial", (Chunk(4, "gemm"), Chunk(4, "gemm"), Chunk(1, "gemm"))),
        Split("spatial", (Chunk(9, "gemm"),)),
        Split("spatial", (Chunk(4, "gemm"), Chunk(5, "cufft"))),
        Split("batch", (Chunk(4, "gemm"), Chunk(1, "gemm"))),
    ]
    assert [table.chunks(split) for split in unknown] == [None] * 4
    assert predict([table], unknown, default=None) == []
    assert known_chunks([], unknown[0]) is None


def test_the_default_is_predicted_as_it_was_measured_or_else_by_its_chunks():
    known = batch_of(1)
    split = Split.default(N)
    chunk = TimedChunk(N, DEFAULT_ALGORITHM, 123, 45)
    default = measured(kernel(), "alone", chunk)
    (finalist,) = predict([table_of(known)], [split], default)
    assert (finalist.timing.time_ns, finalist.timing.workspace_bytes) == (123, 45)
    (finalist,) = predict([table_of(known)], [split], default=None)
    assert finalist.timing.time_ns == time_of(chunks_by_truth(known, split))


@kinds
@pytest.mark.parametrize("seed", SEEDS)
def test_every_smaller_batch_gets_its_fastest_split(op, dtype, seed):
    known = batch_of(seed, op, dtype, names=ALGORITHMS[1:])
    for limit in (None, 900):
        table = table_of(known, limit)
        winner = table.splits()[0]
        plan = plan_of(winner, table, op=op, dtype=dtype)
        assert plan.split(N) == winner
        assert plan.predicted_time_ns == time_of(chunks_by_truth(known, winner))
        for n in range(1, N):
            found = chunks_by_truth(known, plan.split(n))
            assert limit is None or workspace_of(found) <= limit
            assert time_of(found) == min(map(time_of, known.fitting(n, limit)))


def penalty_of(known: Known, winner: Split) -> int:
    """The first penalty per chunk under which a split is the fastest; of none the middle one."""
    for launch_ns in CHUNK_NS:
        least = min(time_of(split, launch_ns) for split in known.splits(N))
        if time_of(chunks_by_truth(known, winner), launch_ns) == least:
            return launch_ns
    return CHUNK_NS[1]


@pytest.mark.parametrize("seed", SEEDS)
def test_smaller_batches_follow_the_penalty_under_which_the_winner_was_found(seed):
    known = batch_of(seed, names=ALGORITHMS[1:])
    table = table_of(known)
    for winner in table.splits():
        launch_ns, plan = penalty_of(known, winner), plan_of(winner, table)
        for n in range(1, N):
            found = time_of(chunks_by_truth(known, plan.split(n)), launch_ns)
            assert found == min(time_of(split, launch_ns) for split in known.splits(n))


def by_batch(chance: random.Random):
    """Implementations that change with the batch, as torch's own do."""
    names = {(n, name): chance.choice("ab") for n in range(1, N + 1) for name in ALGORITHMS}
    return lambda problem, algorithm: names[problem.batch, algorithm]


def test_chains_lead_through_batches_that_the_default_computes():
    default = Split.default(N)

    def implementation_of(problem, algorithm):
        is_other = algorithm == DEFAULT_ALGORITHM and problem.batch not in (3, 5)
        return "small" if is_other else algorithm

    known = Known(BatchAxis(kernel()), (1,), 0, names=("gemm",))
    plan = plan_of(default, table_of(known, implementation_of=implementation_of))
    assert [plan.split(n).is_default for n in range(1, N + 1)] == [False, False, True, False, True]
    assert sizes_of(plan.split(4)) == [1, 1, 1, 1]
    # The chain of 4 needs the one of 3, and nothing needs one of 5.
    assert plan.last[2] == plan.last[3]
    assert plan.last[4] == (0, -1)


def test_the_winners_table_comes_first_and_the_others_fill_what_it_lacks():
    """The fused algorithms run another implementation below batch 3, which was never timed."""
    plain = batch_of(6, names=("gemm",))
    fused = Known(plain.axis, (3, 5), 7, names=("gemm+bias",))

    def implementation_of(problem, algorithm):
        return "small" if problem.batch < 3 else algorithm

    tables = [
        table_of(plain, implementation_of=implementation_of),
        table_of(fused, implementation_of=implementation_of),
    ]
    names = [
        [{chunk.algorithm for chunk in plan_of(table.splits()[0], *tables).split(n).chunks}]
        for table in tables
        for n in range(1, N + 1)
    ]
    assert names == [[{"gemm"}]] * N + [[{"gemm"}]] * 2 + [[{"gemm+bias"}]] * 3


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("seed", SEEDS)
def test_slabs_serve_the_batches_at_which_each_runs_as_it_was_timed(op, seed):
    known, implementation_of = rows_of(seed, op), by_batch(random.Random(seed))
    table, batch = (
        table_of(known, implementation_of=implementation_of),
        table_of(batch_of(seed, op)),
    )
    winner = table.splits()[-1]
    plan = plan_of(winner, batch, table, op=op)
    assert plan.split(N) == winner
    assert plan.predicted_time_ns == time_of(chunks_by_truth(known, winner))
    entries = slabs(kernel(op), [chunk.size for chunk in winner.chunks])
    parts = [
        (entry.problem, chunk.algorithm)
        for entry, chunk in zip(entries, winner.chunks, strict=True)
        if entry.problem is not None
    ]
    for n in range(1, N + 1):
        alike = all(
            implementation_of(p.with_batch(n), name) == implementation_of(p, name)
            for p, name in parts
        )
        assert (plan.split(n) == winner) == alike
        assert plan.split(n).axis == ("spatial" if alike else "batch")


def test_nothing_measured_is_nothing_to_plan_with():
    for known in (of(0, density=-1.0) for of in (batch_of, rows_of)):
        table = table_of(known)
        assert table.is_empty
        assert table.splits() == []
        assert table.front() == ()
        assert table.smallest() is None
    # Chunks that add up to nothing: torch's own whole call may yet be raced along the batch.
    lone = Known(BatchAxis(kernel()), (3,), 0)
    assert not table_of(lone).is_empty
    assert table_of(lone).splits() == []
    assert table_of(Known(RowAxis(kernel()), (4,), 0)).is_empty
