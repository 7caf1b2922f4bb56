"""One kernel's measurements as items for the solver, and the solver's table as a plan. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from ucudnn.measurement import Measurement
from ucudnn.plan import DEFAULT_ALGORITHM, KernelPlan, Split, Step, Timing
from ucudnn.problem import Problem
from ucudnn.solvers import Item, ReuseTable, reuse

# A chunk should run ten times as long as its call takes on the host (about 20 us in PyTorch).
WORTHWHILE_NS = 10 * 20_000


@dataclass(frozen=True)
class Solved:
    """The solver's answer for one kernel: exact splits of every batch from its measurements.

    Args:
        problem: the kernel at the largest batch.
        single: items that compute a batch alone.
        table: what `reuse` made of them.
        limit: workspace in bytes that a split may use, None for any.
    """

    problem: Problem
    single: tuple[Item, ...]
    table: ReuseTable
    limit: int | None

    def finalists(self, default_applies: bool) -> list[Split]:
        """Splits of the largest batch worth timing as wholes, torch's default first."""
        batch = self.problem.batch
        splits = [_alone(batch, DEFAULT_ALGORITHM)] if default_applies else []
        if self.table.time_ns(batch, self.limit) is not None:
            splits.append(Split("batch", self.table.split(batch, self.limit)))
        undivided = [item for item in self.single if item.batch == batch and self._fits(item)]
        if undivided:
            splits.append(_alone(batch, min(undivided, key=_cost).algorithm))
        return list(dict.fromkeys(splits))

    def kernel_plan(
        self, layers: tuple[str, ...], winner: Split, timing: Timing, default: Timing | None
    ) -> KernelPlan:
        """The plan for every batch, with the winner of the finals at the largest.

        Where torch's default wins there it is the plan of the smaller batches too, whose splits
        were not timed as wholes.
        """
        batch = self.problem.batch
        walk = self.table.walk(self.limit)
        algorithms: dict[str, int] = {}
        alone, last = [], []
        for n, entry in enumerate(walk, start=1):
            lone = entry.alone.algorithm if entry.alone else None
            if winner.is_default:
                lone = DEFAULT_ALGORITHM
            elif n == batch:
                lone = winner.steps[0].algorithm if len(winner.steps) == 1 else None
            alone.append(-1 if lone is None else algorithms.setdefault(lone, len(algorithms)))
            if entry.last is None or winner.is_default:
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
        )

    def _fits(self, item: Item) -> bool:
        return self.limit is None or item.workspace_bytes <= self.limit

    def _predicted_ns(self, split: Split) -> int | None:
        if len(split.steps) > 1:
            return self.table.time_ns(split.size, self.limit)
        step = split.steps[0]
        times = [
            item.time_ns
            for item in self.single
            if item.batch == step.size and item.algorithm == step.algorithm
        ]
        return min(times, default=None)


def solve(
    problem: Problem,
    measurements: Sequence[Measurement],
    applies: Callable[[Problem, str], bool],
    limit: int | None,
) -> Solved:
    """Find the fastest split of every batch up to the problem's, of what was timed.

    Args:
        problem: the kernel at its largest batch.
        measurements: timed candidates within the workspace limit.
        applies: whether an algorithm computes the problem at some batch.
        limit: workspace in bytes that a split may use, None for any.
    """
    single = _single_items(problem, measurements, applies)
    later = _chunk_items(problem, measurements, "later")
    # In full precision the first chunk of wgrad runs exactly as a lone one does.
    first_role = "later" if problem.op != "wgrad" else "alone"
    if problem.op == "wgrad" and problem.bytes_per_element < 4:
        first_role = "first"
    first = [
        item
        for item in _chunk_items(problem, measurements, first_role)
        if item.batch < problem.batch
    ]
    # A chunk that is returned costs no more than one that begins a sum.
    single += [item for item in first if problem.op == "wgrad"]
    table = _table(single, _worthwhile(first), _worthwhile(later), problem.batch)
    if any(table.time_ns(n, limit) is None for n in range(1, problem.batch + 1)):
        table = _table(single, first, later, problem.batch)
    return Solved(problem, tuple(single), table, limit)


def _table(single: list[Item], first: list[Item], later: list[Item], batch: int) -> ReuseTable:
    if first and later:
        return reuse(single, batch, first=first, accumulate=later)
    return reuse(single, batch, first=(), accumulate=())


def _worthwhile(items: list[Item]) -> list[Item]:
    return [item for item in items if item.time_ns >= WORTHWHILE_NS]


def _single_items(
    problem: Problem,
    measurements: Sequence[Measurement],
    applies: Callable[[Problem, str], bool],
) -> list[Item]:
    """What each algorithm takes for each batch alone, or at most takes.

    A batch that was not timed costs at most what the next larger one does, and a chunk alone at
    most what it does when it is written into a larger result.
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
            if bound is not None and (n in by_batch or applies(problem.with_batch(n), algorithm)):
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
            assert entry.time_ns is not None
            assert entry.workspace_bytes is not None
            algorithm = entry.key.algorithm
            items.append(
                Item(
                    batch=entry.key.problem.batch,
                    workspace_bytes=entry.workspace_bytes + total,
                    time_ns=entry.time_ns,
                    algorithm=algorithm,
                    rank=int(algorithm != DEFAULT_ALGORITHM),
                )
            )
    return items


def _alone(batch: int, algorithm: str) -> Split:
    return Split("batch", (Step(batch, algorithm),))


def _cost(item: Item) -> tuple[int, int, int]:
    return item.time_ns, item.workspace_bytes, item.rank
