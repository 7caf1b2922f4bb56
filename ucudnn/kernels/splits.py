"""Splits of one kernel along its batch or its rows, and the plan for every batch made of them.

They are computed from the times of single chunks: nothing is measured here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from ucudnn.axis import AbstractAxis, axis_of
from ucudnn.measurement import Measurement, Role, positions, role_of
from ucudnn.problem import Problem
from ucudnn.slabs import slabs
from ucudnn.solvers import Item, WalkEntry
from ucudnn.solvers._base import undominated
from ucudnn.solvers.reuse import reuse_by_position
from ucudnn.split import BY_BATCH, BY_SLABS, DEFAULT_ALGORITHM, Chunk, KernelPlan, Split, Timing
from ucudnn.system.processes import cached_property

if TYPE_CHECKING:
    from ucudnn.kernels.candidates import Kernel

# A chunk should take ten times as long as its call takes on the host (about 20 us in PyTorch). On
# the CPU the time of a chunk includes that of the call.
WORTHWHILE_NS = 10 * 20_000
# A GPU computes a chunk while the host launches the next one, which took 55 to 103 us for cuDNN's
# engines (docs/gpu-status.md).
WORTHWHILE_ON_GPU_NS = 100_000
# The solver adds a penalty in ns to the time of each chunk. Each of these penalties gives one split
# to race. With 0, times count as measured.
# 2 ms are for a busy machine, on which threads wait for each other at the end of a chunk. With 1 s,
# only the number of chunks counts.
CHUNK_NS = (0, 2_000_000, 1_000_000_000)

# Name of the implementation by which an algorithm runs a problem; None if it does not run it.
ImplementationOf = Callable[[Problem, str], str | None]
# Items by the position of their chunk in a split.
Items = Mapping[str, Sequence[Item]]
# How to compute each batch n = 1..N, as `ReuseTable.walk` returns it: undivided, or by a last chunk
# of some size after the best chunks of the remaining samples.
Walk = Sequence[WalkEntry]


def end_of(walk: Walk) -> Split | None:
    """The split of the largest batch, found chunk by chunk from its end; None if there is none.

    >>> end_of([WalkEntry(None, Item(1, 0, 5, "gemm"))] * 2).chunks
    (Chunk(size=1, algorithm='gemm'), Chunk(size=1, algorithm='gemm'))
    """
    n, chunks = len(walk), list[Chunk]()
    lone = walk[n - 1].alone
    if lone is not None:
        return Split.undivided(n, lone.algorithm)
    while n:
        last = walk[n - 1].last
        if last is None:
            return None
        chunks.append(Chunk(last.batch, last.algorithm))
        n -= last.batch
    return Split("batch", tuple(reversed(chunks)))


class Point(NamedTuple):
    """Time of the best split within some workspace."""

    workspace_bytes: int
    time_ns: int


# Points in the order of rising workspace and falling time.
Front = tuple[Point, ...]


def pareto(points: Iterable[Point]) -> Front:
    """The points that no other point beats in both workspace and time, workspace rising.

    >>> [tuple(point) for point in pareto([Point(4, 9), Point(0, 20), Point(8, 9), Point(2, 20)])]
    [(0, 20), (4, 9)]
    """
    listed = tuple(points)
    return tuple(listed[place] for place in undominated(listed))


@dataclass(frozen=True, eq=False)
class AbstractSplitTable(ABC):
    """Splits of one kernel along one axis, found from the measurements of its chunks.

    Law: every split of `splits` computes the whole problem by chunks that fit the limit. The first
    split is the fastest of all whose chunks were timed and take long enough to be worth a call; if
    there is none, shorter chunks are allowed.
    """

    axis: AbstractAxis
    # Sizes of the chunks that a split may have, whether they were timed or not.
    sizes: Sequence[int]
    measurements: Sequence[Measurement]
    implementation_of: ImplementationOf
    limit: int | None

    @property
    @abstractmethod
    def items(self) -> Items:
        """Chunks with a time, by the position that they may have in a split."""

    def choices(self, items: Items) -> tuple[Items, Items]:
        """The items that take long enough to be worth their calls, and all items."""
        least_ns = max((worthwhile_ns(one.key.device.type) for one in self.measurements), default=0)
        return _worthwhile(items, least_ns), items

    @property
    @abstractmethod
    def is_empty(self) -> bool:
        """True if there are no chunks, or no split, to plan with."""

    @abstractmethod
    def splits(self) -> list[Split]:
        """Splits of the largest batch to race as whole calls, the fastest by its chunks first."""

    def front(self) -> Front:
        """Front of time over workspace of the splits of the largest batch, without a limit.

        Its points are splits into chunks that take long enough to be worth their calls. Splits into
        shorter chunks are included only if they need less workspace than any of these.
        """
        points: list[Point] = []
        for choice in self.choices(self.items):
            least = points[0].workspace_bytes if points else None
            table = reuse_by_position(choice, self.axis.extent)
            points += [
                Point(workspace, time_ns)
                for workspace, time_ns in (table.front(self.axis.extent) if table else ())
                if least is None or workspace < least
            ]
        return pareto(points)

    def chunks(self, split: Split) -> tuple[Item, ...] | None:
        """The fastest measurement of each chunk of a split.

        None if a chunk has no time, or if the split is along another axis.
        """
        if axis_of(self.axis.problem, split) != self.axis:
            return None
        found = []
        for position, chunk in zip(positions(len(split.chunks)), split.chunks, strict=True):
            # The last slab of a split may have fewer rows than the slab that was measured. Then the
            # time of the measured one is used.
            wanted = self.axis.size_of(chunk), chunk.algorithm
            items = self.items[position]
            fitting = [item for item in items if (item.batch, item.algorithm) == wanted]
            if not fitting:
                return None
            found.append(min(fitting, key=lambda item: item.time_ns))
        return tuple(found)

    def smallest(self) -> tuple[int, Split] | None:
        """The least workspace in bytes of any split, with such a split; None without a split."""
        extent = self.axis.extent
        table = reuse_by_position(self.items, extent)
        least = table.smallest_bytes(extent) if table else None
        if table is None or least is None:
            return None
        return least, self.axis.split(table.split(extent, least))


class BatchSplits(AbstractSplitTable):
    """Splits of every batch from 1 to N into micro-batches."""

    @cached_property
    def items(self) -> Items:
        """Micro-batches by position; a batch alone that was not timed may have an upper bound.

        A batch that was not timed is assumed to cost at most as much as the next larger one, if
        both run the same implementation. A chunk alone costs at most as much as a chunk that is
        written into a larger result.
        """
        problem, entries = self.axis.problem, self.measurements
        first = chunk_items(problem, entries, role_of(problem, Role.FIRST))
        later = chunk_items(problem, entries, Role.LATER)
        # A later chunk of wgrad is added to a sum, so its time bounds no chunk alone.
        bounds = [] if problem.op == "wgrad" else later
        # The items of `ALONE` come second, so that they replace those of the role `LATER`, which
        # are only upper bounds.
        known = [*bounds, *chunk_items(problem, entries, Role.ALONE)]
        alone = self._bounded(known, range(1, problem.batch + 1))
        if problem.op == "wgrad":
            # What was timed for a first chunk of wgrad is also an upper bound for a chunk alone:
            # returning a gradient costs no more than beginning a sum with it.
            alone += first
        return {Role.ALONE: alone, Role.FIRST: first, Role.LATER: later}

    def _bounded(self, items: Iterable[Item], sizes: Iterable[int]) -> list[Item]:
        """Items of each algorithm at these sizes; an untimed size gets the next larger one's time.

        A larger size is used only if it runs the same implementation. If there are two items of one
        size, the last one is used.
        """
        costs: dict[str, dict[int, Item]] = {}
        for item in items:
            costs.setdefault(item.algorithm, {})[item.batch] = item
        sizes, found = set(sizes), []
        for algorithm, by_batch in costs.items():
            # From the largest size down: with the same implementation, a chunk is assumed to need
            # no more time or workspace than the next larger one that was timed.
            bound = None
            for n in sorted(sizes | by_batch.keys(), reverse=True):
                bound = by_batch.get(n, bound)
                if bound is None:
                    continue
                two = (self.axis.part(size) for size in (n, bound.batch))
                if len({self.implementation_of(one, algorithm) for one in two}) == 1:
                    found.append(replace(bound, batch=n))
        return found

    @property
    def is_empty(self) -> bool:
        """True where no micro-batch was timed."""
        return not any(self.items.values())

    def splits(self) -> list[Split]:
        """Splits of the largest batch to race as whole calls, the fastest by its chunks first."""
        splits = [split for split in map(end_of, self.walks) if split is not None]
        batch, limit = self.axis.extent, self.limit
        # The solver prefers chunks whose times were short by chance. So the best undivided call is
        # always raced, too.
        undivided = [
            item
            for item in self.items[Role.ALONE]
            if item.batch == batch and (limit is None or item.workspace_bytes <= limit)
        ]
        if undivided:
            splits.append(Split.undivided(batch, min(undivided, key=_cost).algorithm))
        return list(dict.fromkeys(splits))

    @cached_property
    def walks(self) -> tuple[Walk, ...]:
        """For each penalty of `CHUNK_NS` the fastest splits of all batches."""
        batch, limit = self.axis.extent, self.limit
        # Smaller batches may use chunks that were not timed, with the times of larger chunks. The
        # largest batch is raced, and its prediction must rest on timed chunks only. The items of a
        # batch alone have such bounds already.
        first, later = (
            self._bounded(self.items[position], self.sizes) for position in (Role.FIRST, Role.LATER)
        )
        bounded: Items = {Role.ALONE: self.items[Role.ALONE], Role.FIRST: first, Role.LATER: later}
        all_choices, timed_choices = self.choices(bounded), self.choices(self.items)
        return tuple(
            _with_end_of(
                _walk_all(all_choices, batch, limit, launch_ns),
                _walk_all(timed_choices, batch, limit, launch_ns),
            )
            for launch_ns in CHUNK_NS
        )


class RowSplits(AbstractSplitTable):
    """Splits of the largest batch into slabs; smaller batches may be cut into the same slabs."""

    @cached_property
    def items(self) -> Items:
        """Measurements of slabs."""
        problem, size_by_part = self.axis.problem, {self.axis.part(one): one for one in self.sizes}
        first, later = (
            chunk_items(problem, self.measurements, role_of(problem, position), size_by_part)
            for position in (Role.FIRST, Role.LATER)
        )
        # No slab runs alone: the undivided call is a split along the batch.
        return {Role.ALONE: (), Role.FIRST: first, Role.LATER: later}

    @property
    def is_empty(self) -> bool:
        """True where no slabs within the limit add up to all rows."""
        return not self.splits()

    def splits(self) -> list[Split]:
        """Splits to race as whole calls: the fastest by its slabs, and those with fewer slabs."""
        # Slabs that take too little time to be worth their calls are used only if no others fit.
        worthwhile, everything = self.choices(self.items)
        return self._splits(worthwhile) or self._splits(everything)

    def _splits(self, items: Items) -> list[Split]:
        extent, found = self.axis.extent, []
        for launch_ns in CHUNK_NS:
            table = reuse_by_position(items, extent, launch_ns)
            if table is not None and table.time_ns(extent, self.limit) is not None:
                found.append(self.axis.split(table.split(extent, self.limit)))
        # Several penalties often lead to the same split.
        return list(dict.fromkeys(found))


def plan_by(
    tables: Sequence[AbstractSplitTable],
    kernel: Kernel,
    winner: Split,
    timing: Timing,
    default: Timing | None,
    implementation_of: ImplementationOf,
) -> KernelPlan:
    """The plan for every batch, with the winner of the race at the largest batch."""
    walk = _walk_of(tables, winner, kernel.problem.batch)
    alike = batches_like(kernel.problem, winner, implementation_of)
    last_by_batch = _chains(walk, alike if winner.is_default else ())
    algorithms: dict[str, int] = {}

    def index(algorithm: str) -> int:
        return algorithms.setdefault(algorithm, len(algorithms))

    alone, last = list[int](), list[tuple[int, int]]()
    is_by_slabs = winner.axis == "spatial"
    for n, entry in enumerate(walk, start=1):
        if n in alike:
            alone.append(BY_SLABS if is_by_slabs else index(winner.chunks[0].algorithm))
        else:
            alone.append(BY_BATCH if entry.alone is None else index(entry.alone.algorithm))
        chunk = last_by_batch.get(n)
        last.append((0, -1) if chunk is None else (chunk.batch, index(chunk.algorithm)))
    # Index the slabs before the tuple of names is taken.
    rows = tuple((one.size, index(one.algorithm)) for one in winner.chunks) if is_by_slabs else ()
    # If torch's default was raced but not timed as a chunk, the time of its race is the prediction.
    chunks = known_chunks(tables, winner)
    return KernelPlan(
        problem=kernel.problem,
        layers=kernel.layers,
        algorithms=tuple(algorithms),
        alone=tuple(alone),
        last=tuple(last),
        predicted_time_ns=timing.time_ns if chunks is None else sum(one.time_ns for one in chunks),
        timing=timing,
        default=default,
        slabs=rows,
    )


def batches_like(
    problem: Problem, winner: Split, implementation_of: ImplementationOf
) -> Collection[int]:
    """The batches that are computed in the winner's way: undivided, or cut into its slabs.

    If torch's default has won, it also computes smaller batches, because their splits were not
    timed as whole calls. The same holds for slabs.
    """
    if winner.axis == "spatial":
        entries = slabs(problem, [chunk.size for chunk in winner.chunks])
        parts = {
            (entry.problem, chunk.algorithm)
            for entry, chunk in zip(entries, winner.chunks, strict=True)
            if entry.problem is not None
        }
    elif winner.is_default:
        parts = {(problem, DEFAULT_ALGORITHM)}
    else:
        return (problem.batch,) if len(winner.chunks) == 1 else ()
    # At another batch an algorithm may run another implementation, whose time and workspace are not
    # known.
    found = implementation_of
    return [
        n
        for n in range(1, problem.batch + 1)
        if all(found(part.with_batch(n), name) == found(part, name) for part, name in parts)
    ]


def _walk_of(tables: Sequence[AbstractSplitTable], winner: Split, batch: int) -> Walk:
    """How to split each batch, by the same penalty of `CHUNK_NS` as the winner if there is one."""
    # Smaller batches follow the table in which the winner was found. The other tables serve batches
    # for which that table has no split.
    ordered = sorted(tables, key=lambda table: winner not in table.splits())
    found = [table.walks for table in ordered if isinstance(table, BatchSplits)]
    # If no walk splits the largest batch as the winner does, smaller batches follow the walk of the
    # second penalty, whose chunks are fewer and larger than without a penalty.
    first = found[0] if found else ()
    number = next((place for place, walk in enumerate(first) if end_of(walk) == winner), 1)
    return _first_of([walks[number] for walks in found], batch)


def _chains(walk: Walk, ended: Collection[int]) -> dict[int, Item]:
    """The last chunk of each batch's best chain of chunks.

    Batches of `ended` need no chain, unless the chain of a larger batch leads through them.
    """
    found, passed = dict[int, Item](), set[int]()
    for n in range(len(walk), 0, -1):
        last = walk[n - 1].last
        if last is not None and (n in passed or n not in ended):
            found[n] = last
            passed.add(n - last.batch)
    return found


def known_chunks(tables: Sequence[AbstractSplitTable], split: Split) -> tuple[Item, ...] | None:
    """The fastest measurement of each chunk of a split in the first table that has them all."""
    found = (table.chunks(split) for table in tables)
    return next((chunks for chunks in found if chunks is not None), None)


def worthwhile_ns(device_type: str) -> int:
    """The time in ns that a chunk must take on a kind of device to be worth its call.

    >>> worthwhile_ns("cpu"), worthwhile_ns("cuda")
    (200000, 100000)
    """
    return WORTHWHILE_NS if device_type == "cpu" else WORTHWHILE_ON_GPU_NS


def _worthwhile(items: Items, least_ns: int) -> Items:
    """The items, without those that take less time than `least_ns`."""
    return {
        # A chunk that runs alone stays, because no split has fewer calls.
        position: [item for item in group if position == Role.ALONE or item.time_ns >= least_ns]
        for position, group in items.items()
    }


def _walk_all(choices: Sequence[Items], batch: int, limit: int | None, launch_ns: int) -> Walk:
    """The fastest split of every batch by the first of some choices of items that has one."""
    tables = (reuse_by_position(choice, batch, launch_ns) for choice in choices)
    return _first_of([table.walk(limit) for table in tables if table is not None], batch)


def _first_of(walks: Sequence[Walk], batch: int) -> Walk:
    """The splits of every batch by the first of some walks that has one."""
    merged = []
    for entries in zip(*walks, strict=True):
        chosen = next((entry for entry in entries if entry.alone or entry.last), entries[0])
        # `last` of n is a back-pointer: the chain goes on at n - last.batch. It is kept even if n
        # itself is best computed alone, because chains of larger batches may lead through n.
        last = next((entry.last for entry in entries if entry.last), None)
        merged.append(WalkEntry(chosen.alone, last))
    return tuple(merged) or (WalkEntry(None, None),) * batch


def _with_end_of(walk: Walk, timed: Walk) -> Walk:
    """The entries of `walk`, with the largest batch split as in `timed`, by timed chunks only."""
    merged, n = list(walk), len(walk)
    if timed[n - 1].alone:
        # No chain leads through the largest batch, so its unused back-pointer may stay.
        merged[n - 1] = WalkEntry(timed[n - 1].alone, walk[n - 1].last)
        return tuple(merged)
    # Replace every back-pointer on the way down from the largest batch, so that its chain has only
    # timed chunks.
    while n and (last := timed[n - 1].last) is not None:
        merged[n - 1] = WalkEntry(None if n == len(walk) else walk[n - 1].alone, last)
        n -= last.batch
    return tuple(merged)


def _cost(item: Item) -> tuple[int, int, int]:
    return item.time_ns, item.workspace_bytes, item.rank


def chunk_items(
    problem: Problem,
    measurements: Sequence[Measurement],
    role: Role,
    size_by_part: Mapping[Problem, int] | None = None,
) -> list[Item]:
    """Items of the chunks measured in one role; their workspace includes `held_bytes`.

    With `size_by_part` only chunks of these problems are included, else only micro-batches.
    """
    total = held_bytes(problem, role)
    items = []
    for entry in measurements:
        part = entry.key.problem
        if size_by_part is None:
            # Measurements may be of slabs, too, whose spatial sizes differ from those of the
            # problem.
            size = part.batch if part.with_batch(problem.batch) == problem else None
        else:
            size = size_by_part.get(part)
        if size is not None and entry.key.conditions.role == role:
            assert entry.workspace_bytes is not None
            algorithm = entry.key.algorithm
            items.append(
                Item(
                    batch=size,
                    workspace_bytes=entry.workspace_bytes + total,
                    # An item must have a time. A chunk that was run only for its workspace was not
                    # timed; its item serves only to find the smallest workspace, so any time will
                    # do.
                    time_ns=entry.time_ns or 1,
                    algorithm=algorithm,
                    rank=rank_of(algorithm, entry.is_deterministic),
                )
            )
    return items


def rank_of(algorithm: str, is_deterministic: bool) -> int:
    """Rank of an item, the lower is preferred: deterministic algorithms, then torch's default."""
    return 2 * (not is_deterministic) + (algorithm != DEFAULT_ALGORITHM)


def held_bytes(problem: Problem, role: Role) -> int:
    """Bytes that a chunk needs beside its workspace: half-precision wgrad adds up in float32."""
    # Chunks of half-precision wgrad are added up in a float32 tensor, which the call holds until
    # its end. The measured workspace of a chunk does not include it.
    if problem.op == "wgrad" and problem.bytes_per_element < 4 and role != Role.ALONE:
        return 4 * prod(problem.w_shape)
    return 0
