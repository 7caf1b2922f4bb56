"""The solver's table of one kernel, by batch or by rows, as a plan. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ucudnn.axis import RowAxis
from ucudnn.measurement import Measurement, Role, positions, role_of
from ucudnn.plan import BY_BATCH, BY_SLABS, DEFAULT_ALGORITHM, KernelPlan, Split, Step, Timing
from ucudnn.problem import Problem
from ucudnn.slabs import slabs
from ucudnn.solvers import Item, ReuseTable, WalkEntry, reuse
from ucudnn.tuning.items import KernelOf, chunk_items, items_by_role, with_bounded

# On the CPU the host cost is inside the measured time; it still is time that no kernel runs.
# A chunk should run ten times as long as its call takes on the host (about 20 us in PyTorch).
WORTHWHILE_NS = 10 * 20_000
# Penalties per chunk in ns, each of which gives one candidate split: 0 for times as measured, 2 ms
# for a busy machine, on which threads wait for each other at the end of a chunk, and 1 s, so that
# only the number of chunks counts.
CHUNK_NS = (0, 2_000_000, 1_000_000_000)


class Point(NamedTuple):
    """The best split within some workspace.

    Args:
        workspace_bytes: that it needs.
        time_ns: that it takes.
        below: bytes from which on another split is taken, though a slower one: one of chunks that
            are worth their launch; None: never.
    """

    workspace_bytes: int
    time_ns: int
    below: int | None = None


# Workspace rising and time falling.
Front = tuple[Point, ...]


@dataclass(frozen=True)
class SolvedRows:
    """Measurements of a kernel's slabs, and the solver's table of them.

    Args:
        axis: the rows of the kernel.
        first: ways to compute the first slab.
        later: ways to compute any other.
        kernel_of: which kernel an algorithm runs a problem by, None where it does not.
    """

    axis: RowAxis
    first: tuple[Item, ...]
    later: tuple[Item, ...]
    kernel_of: KernelOf

    @classmethod
    def of(
        cls,
        axis: RowAxis,
        sizes: Iterable[int],
        measurements: Sequence[Measurement],
        kernel_of: KernelOf,
    ) -> SolvedRows:
        """Collect the measurements of slabs.

        Args:
            axis: the rows of the kernel.
            sizes: of the slabs, in units of the axis.
            measurements: of slabs, and perhaps of others, within the workspace limit.
            kernel_of: which kernel an algorithm runs a problem by, None where it does not.
        """
        size_by_part = {axis.part(size): size for size in sizes}
        first, later = (
            tuple(chunk_items(axis.problem, measurements, role, size_by_part))
            for role in (role_of(axis.problem, Role.FIRST), Role.LATER)
        )
        return cls(axis, first, later, kernel_of)

    def splits(self, limit: int | None) -> list[Split]:
        """Splits worth timing as wholes: the fastest as measured, and with fewer, larger slabs.

        Args:
            limit: workspace in bytes that a split may use, None for any.
        """
        # Slabs that are too short for what their calls cost only where no others fit.
        first, later = (
            [item for item in items if item.time_ns >= WORTHWHILE_NS]
            for items in (self.first, self.later)
        )
        return self._splits(first, later, limit) or self._splits(self.first, self.later, limit)

    def _splits(
        self, first: Sequence[Item], later: Sequence[Item], limit: int | None
    ) -> list[Split]:
        if not first or not later:
            return []
        found = []
        for launch_ns in CHUNK_NS:
            table = self._table(first, later, launch_ns)
            if table.time_ns(self.axis.extent, limit) is not None:
                found.append(self.axis.split(table.split(self.axis.extent, limit)))
        # Several penalties often lead to the same split.
        return list(dict.fromkeys(found))

    def _table(self, first: Sequence[Item], later: Sequence[Item], launch_ns: int) -> ReuseTable:
        # No slab runs alone: the undivided call is a split along the batch.
        return reuse((), self.axis.extent, first=first, accumulate=later, launch_ns=launch_ns)

    def front(self) -> Front:
        """Front of time over workspace of the splits."""
        return _front(
            {Role.ALONE: (), Role.FIRST: self.first, Role.LATER: self.later}, self.axis.extent
        )

    def smallest(self) -> tuple[int, Split] | None:
        """The least workspace in bytes of any split, and the split; None where there is none."""
        if not self.first or not self.later:
            return None
        table = self._table(self.first, self.later, 0)
        front = table.front(self.axis.extent)
        if not front:
            return None
        return front[0][0], self.axis.split(table.split(self.axis.extent, front[0][0]))

    def predicted_ns(self, split: Split) -> int:
        """Sum of what the steps take; the last one counts as if it had all its rows."""
        return sum(
            min(
                item.time_ns
                for item in (self.later if number else self.first)
                if (item.batch, item.algorithm) == (self.axis.size_of(step), step.algorithm)
            )
            for number, step in enumerate(split.steps)
        )

    def batches_of(self, split: Split) -> frozenset[int]:
        """The batches at which every slab runs the kernel that it was measured with."""
        problem = self.axis.problem
        entries = slabs(problem, [step.size for step in split.steps])
        parts = {
            (entry.problem, step.algorithm)
            for entry, step in zip(entries, split.steps, strict=True)
            if entry.problem is not None
        }
        # Another batch may be computed by another implementation, whose workspace is not known.
        return frozenset(
            n
            for n in range(1, problem.batch + 1)
            if all(
                self.kernel_of(part.with_batch(n), algorithm) == self.kernel_of(part, algorithm)
                for part, algorithm in parts
            )
        )


@dataclass(frozen=True)
class Solved:
    """The solver's answers for one kernel: splits of every batch from its measurements.

    Args:
        problem: the kernel at the largest batch.
        items: by role, what `reuse` was given.
        walks: for n = 1..N how to compute n; first the fastest way as measured, then the fastest
            where every chunk costs more by `CHUNK_NS`, which has fewer and larger chunks.
        limit: workspace in bytes that a split may use, None for any.
        like_default: the batches at which torch's default runs the kernel that it runs at N.
    """

    problem: Problem
    items: Mapping[str, tuple[Item, ...]]
    walks: tuple[tuple[WalkEntry, ...], ...]
    limit: int | None
    like_default: frozenset[int]

    def finalists(self, default_applies: bool) -> list[Split]:
        """Splits of the largest batch worth timing as wholes, torch's default first."""
        batch = self.problem.batch
        splits = [_alone(batch, DEFAULT_ALGORITHM)] if default_applies else []
        splits += [split for split in map(_walk, self.walks) if split is not None]
        # The solver favours chunks with lucky samples, so the best undivided call is raced, too.
        undivided = [
            item
            for item in self.items[Role.ALONE]
            if item.batch == batch and (self.limit is None or item.workspace_bytes <= self.limit)
        ]
        if undivided:
            splits.append(_alone(batch, min(undivided, key=_cost).algorithm))
        return list(dict.fromkeys(splits))

    def completed(self, other: Solved) -> Solved:
        """These splits, and the other's for each batch that has none here."""
        walks = (
            tuple(
                WalkEntry(
                    mine.alone if mine.alone or mine.last else its.alone, mine.last or its.last
                )
                for mine, its in zip(walk, others, strict=True)
            )
            for walk, others in zip(self.walks, other.walks, strict=True)
        )
        return replace(self, walks=tuple(walks))

    def front(self) -> Front:
        """Front of time over workspace of the splits of the largest batch, as timed."""
        return _front(self.items, self.problem.batch)

    def kernel_plan(
        self,
        layers: tuple[str, ...],
        winner: Split,
        timing: Timing,
        default: Timing | None,
        notes: tuple[str, ...] = (),
        rows: SolvedRows | None = None,
    ) -> KernelPlan:
        """The plan for every batch, with the winner of the finals at the largest.

        Where torch's default or slabs win there, they are the plan of smaller batches, too, whose
        splits were not timed as whole calls, unless another implementation would run for them.

        Args:
            layers: names of the layers that run it.
            winner: the split of the largest batch.
            timing: of the winner.
            default: of torch's default.
            notes: what else is known.
            rows: where a winner along the rows comes from.
        """
        batch = self.problem.batch
        by_slabs = rows.batches_of(winner) if rows and winner.axis == rows.axis.name else ()
        # For a winner that is in no table, smaller batches follow splits of fewer, larger chunks.
        walk = next((walk for walk in self.walks if _walk(walk) == winner), self.walks[1])
        algorithms: dict[str, int] = {}
        alone, last = [], []
        passed = _passed(walk, self.like_default if winner.is_default else frozenset())
        for n, entry in enumerate(walk, start=1):
            lone = entry.alone.algorithm if entry.alone else None
            as_default = winner.is_default and n in self.like_default
            if as_default or (n == batch and len(winner.steps) == 1):
                lone = winner.steps[0].algorithm
            if n in by_slabs or lone is None:
                alone.append(BY_SLABS if n in by_slabs else BY_BATCH)
            else:
                alone.append(algorithms.setdefault(lone, len(algorithms)))
            if entry.last is None or (as_default and n not in passed):
                last.append((0, -1))
            else:
                index = algorithms.setdefault(entry.last.algorithm, len(algorithms))
                last.append((entry.last.batch, index))
        slabs = [
            (step.size, algorithms.setdefault(step.algorithm, len(algorithms)))
            for step in (winner.steps if by_slabs else ())
        ]
        predicted_ns = rows.predicted_ns(winner) if rows and slabs else self._predicted_ns(winner)
        return KernelPlan(
            problem=self.problem,
            layers=layers,
            algorithms=tuple(algorithms),
            alone=tuple(alone),
            last=tuple(last),
            predicted_time_ns=predicted_ns or timing.time_ns,
            timing=timing,
            default=default,
            notes=notes,
            slabs=tuple(slabs),
        )

    def _predicted_ns(self, split: Split) -> int | None:
        """Sum of what the steps cost in their roles; None where torch's default was not timed."""
        total = 0
        for role, step in zip(positions(len(split.steps)), split.steps, strict=True):
            times = [
                item.time_ns
                for item in self.items[role]
                if (item.batch, item.algorithm) == (step.size, step.algorithm)
            ]
            # torch's default takes part in a race even if it was not timed as a chunk.
            if not times:
                return None
            total += min(times)
        return total


def solve(
    problem: Problem,
    measurements: Sequence[Measurement],
    kernel_of: KernelOf,
    limit: int | None,
    sizes: Iterable[int] = (),
) -> Solved:
    """Find the fastest split of every batch up to the problem's, of what was timed.

    Args:
        problem: the kernel at its largest batch.
        measurements: timed candidates within the workspace limit.
        kernel_of: which kernel an algorithm runs a problem by, None where it does not.
        limit: workspace in bytes that a split may use, None for any.
        sizes: chunks that a split may have, timed or not: a smaller batch may need them.
    """
    items = items_by_role(problem, measurements, kernel_of)
    bounded = with_bounded(problem, items, kernel_of, sizes)
    # Smaller batches may use sizes that were not timed, at the times of larger ones. The largest
    # batch is raced, and its prediction must rest on timed chunks alone.
    walks = tuple(
        _with_end_of(
            _walk_all(bounded, problem.batch, limit, launch_ns),
            _walk_all(items, problem.batch, limit, launch_ns),
        )
        for launch_ns in CHUNK_NS
    )
    whole = kernel_of(problem, DEFAULT_ALGORITHM)
    # torch picks an implementation by batch: that its choice won at N says nothing about others.
    like_default = frozenset(
        n
        for n in range(1, problem.batch + 1)
        if kernel_of(problem.with_batch(n), DEFAULT_ALGORITHM) == whole
    )
    tuples = {role: tuple(group) for role, group in items.items()}
    return Solved(problem, tuples, walks, limit, like_default)


def uncovered_batches(
    problem: Problem,
    measurements: Sequence[Measurement],
    kernel_of: KernelOf,
    limit: int | None,
    sizes: Iterable[int],
) -> list[int]:
    """The batches that nothing timed computes within the limit, the smallest first.

    Args:
        problem: the kernel at its largest batch.
        measurements: as for `solve`, as are all others.
        kernel_of: which kernel an algorithm runs a problem by, None where it does not.
        limit: workspace in bytes that a split may use, None for any.
        sizes: chunks that a split may have.
    """
    items = items_by_role(problem, measurements, kernel_of)
    walk = _walk_all(with_bounded(problem, items, kernel_of, sizes), problem.batch, limit)
    return [n for n, entry in enumerate(walk, start=1) if entry == WalkEntry(None, None)]


def smallest_workspace(
    problem: Problem,
    measurements: Sequence[Measurement],
    kernel_of: KernelOf,
    rows: SolvedRows,
) -> tuple[int, str] | None:
    """The least workspace in bytes of any split of the largest batch, and what begins it.

    Args:
        problem: the kernel at its largest batch.
        measurements: all whose workspace is known, timed or not.
        kernel_of: as for `solve`.
        rows: what is known of its slabs.
    """
    found = []
    items = items_by_role(problem, measurements, kernel_of)
    if any(items.values()):
        table = _table(items, problem.batch, 0)
        for least, _ in table.front(problem.batch)[:1]:
            step = table.split(problem.batch, least)[0]
            found.append((least, f"micro-batch {step.size}, {step.algorithm}"))
    # Slabs may fit where no micro-batch does, as at batch 1.
    by_rows = rows.smallest()
    if by_rows is not None:
        found.append((by_rows[0], str(by_rows[1])))
    return min(found, default=None, key=lambda entry: entry[0])


def _walk_all(
    items: Mapping[str, Sequence[Item]], batch: int, limit: int | None, launch_ns: int = 0
) -> tuple[WalkEntry, ...]:
    """The fastest split of every batch; of short chunks only where nothing else fits."""
    found = []
    for choice in (_worthwhile(items), items):
        if any(choice.values()):
            found.append(_table(choice, batch, launch_ns).walk(limit))
    merged = []
    for entries in zip(*found, strict=True):
        chosen = next((entry for entry in entries if entry.alone or entry.last), entries[0])
        # A back-pointer leads from n to n - last.batch and goes on with the entry there: even where
        # n is best computed alone, larger batches may need its chain.
        last = next((entry.last for entry in entries if entry.last), None)
        merged.append(WalkEntry(chosen.alone, last))
    return tuple(merged) or (WalkEntry(None, None),) * batch


def _worthwhile(items: Mapping[str, Sequence[Item]]) -> Mapping[str, Sequence[Item]]:
    """Without chunks that are too short for what their calls cost."""
    return {
        # What runs alone has no alternative with fewer calls.
        role: [item for item in group if role == Role.ALONE or item.time_ns >= WORTHWHILE_NS]
        for role, group in items.items()
    }


def _front(items: Mapping[str, Sequence[Item]], extent: int) -> Front:
    """The front of what is worthwhile, and of anything where that does not fit."""
    points: list[Point] = []
    for choice in (_worthwhile(items), items):
        if choice[Role.ALONE] or (choice[Role.FIRST] and choice[Role.LATER]):
            # From there on a split of longer chunks exists, which is taken though it may be slower.
            below = points[0].workspace_bytes if points else None
            points += [
                Point(workspace, time_ns, below)
                for workspace, time_ns in _table(choice, extent, 0).front(extent)
                if below is None or workspace < below
            ]
    return pareto(points)


def pareto(points: Iterable[Point]) -> Front:
    """The points that no other one beats in both, workspace rising and time falling.

    >>> front = pareto([Point(4, 9), Point(0, 20), Point(8, 9), Point(2, 20)])
    >>> [point[:2] for point in front]
    [(0, 20), (4, 9)]

    Args:
        points: of any splits.
    """
    front: list[Point] = []
    for point in sorted(points, key=lambda point: point[:2]):
        if not front or point.time_ns < front[-1].time_ns:
            front.append(point)
    return tuple(front)


def _with_end_of(
    walk: tuple[WalkEntry, ...], timed: tuple[WalkEntry, ...]
) -> tuple[WalkEntry, ...]:
    """The entries of `walk`, with the largest batch split as in `timed`, by timed chunks alone."""
    merged, n = list(walk), len(walk)
    if timed[n - 1].alone:
        # Nothing leads through the largest batch, so a back-pointer that is not followed may stay.
        merged[n - 1] = WalkEntry(timed[n - 1].alone, walk[n - 1].last)
        return tuple(merged)
    # Replace every back-pointer on the way down, so that the chain from N holds timed chunks alone.
    while n and (last := timed[n - 1].last) is not None:
        merged[n - 1] = WalkEntry(None if n == len(walk) else walk[n - 1].alone, last)
        n -= last.batch
    return tuple(merged)


def _table(items: Mapping[str, Sequence[Item]], batch: int, launch_ns: int) -> ReuseTable:
    first, later = items[Role.FIRST], items[Role.LATER]
    # A first chunk that no other one can follow is no split.
    if not later:
        first = ()
    return reuse(items[Role.ALONE], batch, first=first, accumulate=later, launch_ns=launch_ns)


def _passed(walk: Sequence[WalkEntry], ended: Collection[int]) -> set[int]:
    """Batches that chains of larger ones lead through; no chain begins at one of `ended`."""
    passed: set[int] = set()
    for n in range(len(walk), 0, -1):
        last = walk[n - 1].last
        if last is not None and (n in passed or n not in ended):
            passed.add(n - last.batch)
    return passed


def _walk(walk: Sequence[WalkEntry]) -> Split | None:
    """The split of the largest batch, step by step from its end, as a plan walks it."""
    n, steps = len(walk), list[Step]()
    lone = walk[n - 1].alone
    if lone is not None:
        return _alone(n, lone.algorithm)
    while n:
        last = walk[n - 1].last
        if last is None:
            return None
        steps.append(Step(last.batch, last.algorithm))
        n -= last.batch
    return Split("batch", tuple(reversed(steps)))


def _alone(batch: int, algorithm: str) -> Split:
    return Split("batch", (Step(batch, algorithm),))


def _cost(item: Item) -> tuple[int, int, int]:
    return item.time_ns, item.workspace_bytes, item.rank
