"""Splits of one kernel along its batch or its rows, and the plan for every batch made of them.

They are computed from the times of single chunks: nothing is measured here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from ucudnn.axis import AbstractAxis, axis_of
from ucudnn.measurement import Measurement, Role, positions, role_of
from ucudnn.problem import Problem
from ucudnn.slabs import slabs
from ucudnn.solvers import Item, WalkEntry
from ucudnn.solvers._base import undominated
from ucudnn.solvers.reuse import reuse_by_position
from ucudnn.split import BY_BATCH, BY_SLABS, DEFAULT_ALGORITHM, Chunk, KernelPlan, Split, Timing
from ucudnn.system.processes import cached_property

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


class PlanDraft:
    """Splits of every batch of one kernel, which split tables fill in one after the other.

    The largest batch is computed by the split that has won a race of whole calls. Every other batch
    is computed by the first table that has a split for it, so the table in which the winner was
    found comes first.
    """

    def __init__(self, problem: Problem, winner: Split) -> None:
        self.problem = problem
        self.winner = winner
        # Batches that are computed in the same way as the largest one: those that are not divided,
        # and those that are cut into the same slabs as the winner.
        self._undivided: frozenset[int] = frozenset()
        self._by_slabs: frozenset[int] = frozenset()
        self._walk: Walk = (WalkEntry(None, None),) * problem.batch
        self._walk_number: int | None = None

    def compute_as_winner(self, batches: Iterable[int]) -> None:
        """Compute these batches in the winner's way: undivided, or cut into its slabs."""
        if self.winner.axis == "spatial":
            self._by_slabs |= frozenset(batches)
        else:
            self._undivided |= frozenset(batches)

    def follow(self, walks: Sequence[Walk]) -> None:
        """Split batches by one of these walks, if no earlier walk has a split for them.

        `walks` are those of one table: one for each penalty of `CHUNK_NS`.
        """
        if self._walk_number is None:
            # If no walk splits the largest batch as the winner does, smaller batches follow the
            # walk of the second penalty, whose chunks are fewer and larger than without a penalty.
            places = (place for place, walk in enumerate(walks) if end_of(walk) == self.winner)
            self._walk_number = next(places, 1)
        self._walk = [
            WalkEntry(mine.alone if mine.alone or mine.last else its.alone, mine.last or its.last)
            for mine, its in zip(self._walk, walks[self._walk_number], strict=True)
        ]

    def kernel_plan(
        self,
        layers: tuple[str, ...],
        predicted_time_ns: int,
        timing: Timing,
        default: Timing | None,
    ) -> KernelPlan:
        """The kernel's plan: a split for every batch from 1 to the planned one."""
        algorithms: dict[str, int] = {}

        def index(algorithm: str) -> int:
            return algorithms.setdefault(algorithm, len(algorithms))

        passed, alone, last = self._passed(), list[int](), list[tuple[int, int]]()
        for n in range(1, self.problem.batch + 1):
            undivided, chunk = self._algorithm(n), self._last(n, n in passed)
            if n in self._by_slabs:
                alone.append(BY_SLABS)
            else:
                alone.append(BY_BATCH if undivided is None else index(undivided))
            last.append((0, -1) if chunk is None else (chunk.batch, index(chunk.algorithm)))
        slabs = self.winner.chunks if self._by_slabs else ()
        # Index the slabs before the tuple of names is taken.
        indexed = tuple((chunk.size, index(chunk.algorithm)) for chunk in slabs)
        return KernelPlan(
            problem=self.problem,
            layers=layers,
            algorithms=tuple(algorithms),
            alone=tuple(alone),
            last=tuple(last),
            predicted_time_ns=predicted_time_ns,
            timing=timing,
            default=default,
            slabs=indexed,
        )

    def _algorithm(self, n: int) -> str | None:
        """The algorithm that computes a batch undivided; None if the batch is split."""
        if n in self._undivided:
            return self.winner.chunks[0].algorithm
        item = self._walk[n - 1].alone
        return None if item is None else item.algorithm

    def _last(self, n: int, is_passed: bool) -> Item | None:
        """Last chunk of a batch's best chain of chunks; None if the batch has or needs no chain."""
        # A batch that is left to torch's own convolution needs no chain, unless the chain of a
        # larger batch leads through it.
        is_ended = self.winner.is_default and n in self._undivided and not is_passed
        return None if is_ended else self._walk[n - 1].last

    def _passed(self) -> set[int]:
        """Batches that the chain of a larger batch leads through, chunk by chunk."""
        passed: set[int] = set()
        for n in range(self.problem.batch, 0, -1):
            last = self._last(n, n in passed)
            if last is not None:
                passed.add(n - last.batch)
        return passed


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

    @abstractmethod
    def smallest(self) -> tuple[int, str] | None:
        """The least workspace in bytes of any split, with a description; None without a split."""

    @abstractmethod
    def fill(self, draft: PlanDraft) -> None:
        """Add the splits of this table for each batch to a draft of the plan."""

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

    def smallest_chunks(self) -> tuple[int, tuple[Chunk, ...]] | None:
        """The least workspace in bytes of any split, with its chunks; None without a split."""
        extent = self.axis.extent
        table = reuse_by_position(self.items, extent)
        least = table.smallest_bytes(extent) if table else None
        return None if table is None or least is None else (least, table.split(extent, least))


class BatchSplits(AbstractSplitTable):
    """Splits of every batch from 1 to N into micro-batches."""

    @cached_property
    def items(self) -> Items:
        """Micro-batches by role; a batch alone that was not timed may have an upper bound."""
        return items_by_role(self.axis.problem, self.measurements, self.implementation_of)

    @property
    def is_empty(self) -> bool:
        """True where no micro-batch was timed."""
        return not any(self.items.values())

    def splits(self) -> list[Split]:
        """Splits of the largest batch to race as whole calls, the fastest by its chunks first."""
        splits = [split for split in map(end_of, self._walks) if split is not None]
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

    def smallest(self) -> tuple[int, str] | None:
        """The least workspace in bytes of any split, and the chunk that begins it."""
        found = self.smallest_chunks()
        if found is None:
            return None
        least, (first, *_) = found
        return least, f"micro-batch {first.size}, {first.algorithm}"

    def fill(self, draft: PlanDraft) -> None:
        """Add the batches that stay undivided like the largest one, and a walk for the others.

        If torch's default has won, it also computes smaller batches, because their splits were not
        timed as whole calls. Batches for which torch runs another implementation follow the walk.
        """
        winner = draft.winner
        if winner.axis == self.axis.name and len(winner.chunks) == 1:
            alike = [self.axis.extent]
            if winner.is_default:
                alike = batches_like_whole(self.axis.problem, self.implementation_of)
            draft.compute_as_winner(alike)
        draft.follow(self._walks)

    @cached_property
    def _walks(self) -> tuple[Walk, ...]:
        """For each penalty of `CHUNK_NS` the fastest splits of all batches."""
        batch, limit = self.axis.extent, self.limit
        # Smaller batches may use chunks that were not timed, with the times of larger chunks. The
        # largest batch is raced, and its prediction must rest on timed chunks only.
        bounded = with_bounded(self.axis.problem, self.items, self.implementation_of, self.sizes)
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

    def smallest(self) -> tuple[int, str] | None:
        """The least workspace in bytes of any split, and the split."""
        found = self.smallest_chunks()
        return None if found is None else (found[0], str(self.axis.split(found[1])))

    def fill(self, draft: PlanDraft) -> None:
        """If slabs have won, add the batches that can be cut into the winner's slabs."""
        if self.chunks(draft.winner) is not None:
            draft.compute_as_winner(self._batches_of(draft.winner))

    def _batches_of(self, split: Split) -> list[int]:
        """The batches for which every slab runs the implementation that it was measured with."""
        problem = self.axis.problem
        entries = slabs(problem, [chunk.size for chunk in split.chunks])
        parts = {
            (entry.problem, chunk.algorithm)
            for entry, chunk in zip(entries, split.chunks, strict=True)
            if entry.problem is not None
        }
        # At another batch an algorithm may run another implementation, whose workspace is not
        # known.
        found = self.implementation_of
        return [
            n
            for n in range(1, problem.batch + 1)
            if all(found(part.with_batch(n), name) == found(part, name) for part, name in parts)
        ]


def plan_by(
    tables: Sequence[AbstractSplitTable],
    problem: Problem,
    winner: Split,
    layers: tuple[str, ...],
    timing: Timing,
    default: Timing | None,
) -> KernelPlan:
    """The plan for every batch, with the winner of the race at the largest batch."""
    draft = PlanDraft(problem, winner)
    # Smaller batches follow the table in which the winner was found. The other tables serve batches
    # for which that table has no split.
    for table in sorted(tables, key=lambda table: winner not in table.splits()):
        table.fill(draft)
    # If torch's default was raced but not timed as a chunk, the time of its race is the prediction.
    chunks = known_chunks(tables, winner)
    predicted = timing.time_ns if chunks is None else sum(item.time_ns for item in chunks)
    return draft.kernel_plan(layers, predicted, timing, default)


def batches_like_whole(problem: Problem, implementation_of: ImplementationOf) -> list[int]:
    """The batches for which torch's default runs the implementation of the largest batch."""
    # torch chooses an implementation by batch. If the one for the largest batch has won, this does
    # not show that the one for another batch is fast.
    batches = (problem.with_batch(n) for n in range(1, problem.batch + 1))
    found = [implementation_of(one, DEFAULT_ALGORITHM) for one in batches]
    return [n for n, name in enumerate(found, start=1) if name == found[-1]]


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


def _walk_all(
    choices: Sequence[Items], batch: int, limit: int | None, launch_ns: int
) -> tuple[WalkEntry, ...]:
    """The fastest split of every batch by the first of some choices of items that has one."""
    tables = (reuse_by_position(choice, batch, launch_ns) for choice in choices)
    found = [table.walk(limit) for table in tables if table is not None]
    merged = []
    for entries in zip(*found, strict=True):
        chosen = next((entry for entry in entries if entry.alone or entry.last), entries[0])
        # `last` of n is a back-pointer: the chain goes on at n - last.batch. It is kept even if n
        # itself is best computed alone, because chains of larger batches may lead through n.
        last = next((entry.last for entry in entries if entry.last), None)
        merged.append(WalkEntry(chosen.alone, last))
    return tuple(merged) or (WalkEntry(None, None),) * batch


def _with_end_of(
    walk: tuple[WalkEntry, ...], timed: tuple[WalkEntry, ...]
) -> tuple[WalkEntry, ...]:
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


def items_by_role(
    problem: Problem, measurements: Sequence[Measurement], implementation_of: ImplementationOf
) -> dict[str, list[Item]]:
    """The input of the solver of splits: items by the position that their chunk may have."""
    alone = _single_items(problem, measurements, implementation_of)
    later = chunk_items(problem, measurements, Role.LATER)
    first = chunk_items(problem, measurements, role_of(problem, Role.FIRST))
    if problem.op == "wgrad":
        # What was timed for a first chunk of wgrad is also an upper bound for a chunk alone:
        # returning a gradient costs no more than beginning a sum with it.
        alone += first
    return {Role.ALONE: alone, Role.FIRST: first, Role.LATER: later}


def _single_items(
    problem: Problem, measurements: Sequence[Measurement], implementation_of: ImplementationOf
) -> list[Item]:
    """For each algorithm and batch the item of an undivided call: measured, or an upper bound.

    A batch that was not timed is assumed to cost at most as much as the next larger one, if both
    run the same implementation. A chunk alone costs at most as much as a chunk that is written into
    a larger result.
    """
    # A later chunk of wgrad is added to a sum, so its time does not bound that of a chunk alone.
    later = [] if problem.op == "wgrad" else chunk_items(problem, measurements, Role.LATER)
    # The items of `ALONE` come second, so that they replace those of the role `LATER`, which are
    # only upper bounds.
    items = [*later, *chunk_items(problem, measurements, Role.ALONE)]
    return list(_bounded(problem, items, range(1, problem.batch + 1), implementation_of))


def with_bounded(
    problem: Problem,
    items: Mapping[str, Sequence[Item]],
    implementation_of: ImplementationOf,
    sizes: Iterable[int],
) -> dict[str, list[Item]]:
    """The items, with upper bounds added for chunks of sizes that were not timed."""
    sizes = tuple(sizes)
    # Items in role `ALONE` cover all batches already, see `_single_items`.
    found: dict[str, list[Item]] = {Role.ALONE: list(items[Role.ALONE])}
    for role in (Role.FIRST, Role.LATER):
        timed = {(item.algorithm, item.batch) for item in items[role]}
        more = (
            item
            for item in _bounded(problem, items[role], sizes, implementation_of)
            if (item.algorithm, item.batch) not in timed
        )
        found[role] = [*items[role], *more]
    return found


def _bounded(
    problem: Problem,
    items: Iterable[Item],
    sizes: Iterable[int],
    implementation_of: ImplementationOf,
) -> Iterator[Item]:
    """Items of each algorithm at these sizes; an untimed size gets the next larger one's time.

    A larger size is used only if it runs the same implementation. If there are two items of one
    size, the last one is used.
    """
    costs: dict[str, dict[int, Item]] = {}
    for item in items:
        costs.setdefault(item.algorithm, {})[item.batch] = item
    sizes = set(sizes)
    for algorithm, by_batch in costs.items():
        # From the largest size down: with the same implementation, a chunk is assumed to need no
        # more time or workspace than the next larger one that was timed.
        bound = None
        for n in sorted(sizes | by_batch.keys(), reverse=True):
            bound = by_batch.get(n, bound)
            if bound is None:
                continue
            two = (problem.with_batch(size) for size in (n, bound.batch))
            if len({implementation_of(one, algorithm) for one in two}) == 1:
                yield Item(n, bound.workspace_bytes, bound.time_ns, algorithm, bound.rank)


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
