"""One kernel's measurements as items for the solver, and the solver's table as a plan. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ucudnn.measurement import Measurement
from ucudnn.plan import DEFAULT_ALGORITHM, KernelPlan, Split, Step, Timing
from ucudnn.problem import Problem
from ucudnn.solvers import Item, ReuseTable, WalkEntry, reuse

KernelOf = Callable[[Problem, str], str | None]
# On the CPU the host cost is inside the measured time; it still is time that no kernel runs.
# A chunk should run ten times as long as its call takes on the host (about 20 us in PyTorch).
WORTHWHILE_NS = 10 * 20_000
# What a chunk may cost more on a busy machine, where threads wait for each other at its end: from
# nothing, as measured, to so much that only the number of chunks counts.
CHUNK_NS = (0, 2_000_000, 1_000_000_000)


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
        undivided = [
            item
            for item in self.items["alone"]
            if item.batch == batch and (self.limit is None or item.workspace_bytes <= self.limit)
        ]
        if undivided:
            splits.append(_alone(batch, min(undivided, key=_cost).algorithm))
        return list(dict.fromkeys(splits))

    def kernel_plan(
        self,
        layers: tuple[str, ...],
        winner: Split,
        timing: Timing,
        default: Timing | None,
        notes: tuple[str, ...] = (),
    ) -> KernelPlan:
        """The plan for every batch, with the winner of the finals at the largest.

        Where torch's default wins there it is the plan of the smaller batches too, whose splits
        were not timed as wholes; not where torch picks another kernel for them.
        """
        batch = self.problem.batch
        walk = next((walk for walk in self.walks if _walk(walk) == winner), self.walks[1])
        algorithms: dict[str, int] = {}
        alone, last = [], []
        for n, entry in enumerate(walk, start=1):
            lone = entry.alone.algorithm if entry.alone else None
            as_default = winner.is_default and n in self.like_default
            if as_default or (n == batch and len(winner.steps) == 1):
                lone = winner.steps[0].algorithm
            alone.append(-1 if lone is None else algorithms.setdefault(lone, len(algorithms)))
            if entry.last is None or as_default:
                last.append((0, -1))
            else:
                index = algorithms.setdefault(entry.last.algorithm, len(algorithms))
                last.append((entry.last.batch, index))
        return KernelPlan(
            problem=self.problem,
            layers=layers,
            algorithms=tuple(algorithms),
            alone=tuple(alone),
            last=tuple(last),
            predicted_time_ns=self._predicted_ns(winner) or timing.time_ns,
            timing=timing,
            default=default,
            notes=notes,
        )

    def _predicted_ns(self, split: Split) -> int | None:
        """Sum of what the steps cost in their roles; None where torch's default was not timed."""
        roles = ["first", *["later"] * (len(split.steps) - 1)]
        if len(split.steps) == 1:
            roles = ["alone"]
        total = 0
        for role, step in zip(roles, split.steps, strict=True):
            times = [
                item.time_ns
                for item in self.items[role]
                if (item.batch, item.algorithm) == (step.size, step.algorithm)
            ]
            if not times:
                return None
            total += min(times)
        return total


def solve(
    problem: Problem,
    measurements: Sequence[Measurement],
    kernel_of: KernelOf,
    limit: int | None,
) -> Solved:
    """Find the fastest split of every batch up to the problem's, of what was timed.

    Args:
        problem: the kernel at its largest batch.
        measurements: timed candidates within the workspace limit.
        kernel_of: which kernel an algorithm runs a problem by, None where it does not.
        limit: workspace in bytes that a split may use, None for any.
    """
    items = _items_by_role(problem, measurements, kernel_of)
    worthwhile = {
        role: [item for item in group if role == "alone" or item.time_ns >= WORTHWHILE_NS]
        for role, group in items.items()
    }
    if WalkEntry(None, None) in _walk_all(worthwhile, problem.batch, limit):
        worthwhile = items  # nothing else fits everywhere: then short chunks are allowed
    walks = tuple(_walk_all(worthwhile, problem.batch, limit, launch_ns) for launch_ns in CHUNK_NS)
    whole = kernel_of(problem, DEFAULT_ALGORITHM)
    like_default = frozenset(
        n
        for n in range(1, problem.batch + 1)
        if kernel_of(problem.with_batch(n), DEFAULT_ALGORITHM) == whole
    )
    tuples = {role: tuple(group) for role, group in items.items()}
    return Solved(problem, tuples, walks, limit, like_default)


def smallest_workspace(
    problem: Problem, measurements: Sequence[Measurement], kernel_of: KernelOf
) -> tuple[int, Step] | None:
    """The least workspace in bytes of any split of the largest batch, and its first step.

    Args:
        problem: the kernel at its largest batch.
        measurements: all whose workspace is known, timed or not.
        kernel_of: as for `solve`.
    """
    items = _items_by_role(problem, measurements, kernel_of)
    table = _table(items, problem.batch, 0)
    front = table.front(problem.batch)
    if not front:
        return None
    least = front[0][0]
    return least, table.split(problem.batch, least)[0]


def _walk_all(
    items: Mapping[str, Sequence[Item]], batch: int, limit: int | None, launch_ns: int = 0
) -> tuple[WalkEntry, ...]:
    return _table(items, batch, launch_ns).walk(limit)


def _table(items: Mapping[str, Sequence[Item]], batch: int, launch_ns: int) -> ReuseTable:
    first, later = items["first"], items["later"]
    if not later:  # a first chunk alone is no split
        first = ()
    return reuse(items["alone"], batch, first=first, accumulate=later, launch_ns=launch_ns)


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


def _items_by_role(
    problem: Problem,
    measurements: Sequence[Measurement],
    kernel_of: KernelOf,
) -> dict[str, list[Item]]:
    alone = _single_items(problem, measurements, kernel_of)
    later = _chunk_items(problem, measurements, "later")
    if problem.op != "wgrad":
        first = later
    else:
        # In full precision the first chunk runs exactly as a lone one does.
        full = problem.bytes_per_element >= 4
        first = _chunk_items(problem, measurements, "alone" if full else "first")
        alone += first  # a chunk that is returned costs no more than one that begins a sum
    return {"alone": alone, "first": first, "later": later}


def _single_items(
    problem: Problem,
    measurements: Sequence[Measurement],
    kernel_of: KernelOf,
) -> list[Item]:
    """What each algorithm takes for each batch alone, or at most takes.

    A batch that was not timed costs at most what the next larger one does by the same kernel, and a
    chunk alone at most what it does when it is written into a larger result.
    """
    costs: dict[str, dict[int, Item]] = {}
    for role in ("later", "alone"):  # what was timed alone replaces the bound
        for item in _chunk_items(problem, measurements, role):
            if role == "alone" or problem.op != "wgrad":
                costs.setdefault(item.algorithm, {})[item.batch] = item
    items = []
    for algorithm, by_batch in costs.items():
        bound = None
        for n in range(problem.batch, 0, -1):
            bound = by_batch.get(n, bound)
            if bound is None:
                continue
            kernels = (kernel_of(problem.with_batch(size), algorithm) for size in {n, bound.batch})
            if len(set(kernels)) == 1:
                items.append(Item(n, bound.workspace_bytes, bound.time_ns, algorithm, bound.rank))
    return items


def _chunk_items(problem: Problem, measurements: Sequence[Measurement], role: str) -> list[Item]:
    """Items of one role; half-precision wgrad holds its sum in float32 beside the chunk's."""
    total = 0
    if problem.op == "wgrad" and problem.bytes_per_element < 4 and role != "alone":
        total = 4 * prod(problem.w_shape)
    items = []
    for entry in measurements:
        if entry.key.conditions.role == role:
            assert entry.workspace_bytes is not None
            algorithm = entry.key.algorithm
            items.append(
                Item(
                    batch=entry.key.problem.batch,
                    workspace_bytes=entry.workspace_bytes + total,
                    time_ns=entry.time_ns or 1,
                    algorithm=algorithm,
                    rank=int(algorithm != DEFAULT_ALGORITHM),
                )
            )
    return items


def _alone(batch: int, algorithm: str) -> Split:
    return Split("batch", (Step(batch, algorithm),))


def _cost(item: Item) -> tuple[int, int, int]:
    return item.time_ns, item.workspace_bytes, item.rank
