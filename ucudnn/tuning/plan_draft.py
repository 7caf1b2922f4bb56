"""The plan of one kernel in the making, which split tables fill in batch by batch. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ucudnn.problem import Problem
from ucudnn.solvers import Item, WalkEntry
from ucudnn.split import BY_BATCH, BY_SLABS, KernelPlan, Split, Step, Timing

# For n = 1..N how to compute n, as `ReuseTable.walk` returns it.
Walk = Sequence[WalkEntry]


class PlanDraft:
    """Splits of every batch of one kernel, which split tables fill in one after the other.

    For every batch the first entry counts, so the table in which the winner was found comes first.

    Args:
        problem: the kernel at the largest batch.
        winner: the split of the largest batch, chosen by a race of whole calls.
    """

    def __init__(self, problem: Problem, winner: Split) -> None:
        self.problem = problem
        self.winner = winner
        # Batches that are computed as the winner is: in one piece, or by its slabs.
        self._undivided: frozenset[int] = frozenset()
        self._by_slabs: frozenset[int] = frozenset()
        self._walk: Walk = (WalkEntry(None, None),) * problem.batch
        self._walk_number: int | None = None

    def compute_as_winner(self, batches: Iterable[int]) -> None:
        """Compute some batches as the winner computes the largest: undivided, or by its slabs."""
        if self.winner.axis == "spatial":
            self._by_slabs |= frozenset(batches)
        else:
            self._undivided |= frozenset(batches)

    def follow(self, walks: Sequence[Walk]) -> None:
        """Split batches as a walk does, where those that were followed before have no split.

        Args:
            walks: of one table, for the same penalties per chunk in the same order as every
                table's.
        """
        if self._walk_number is None:
            # For a winner that is in no walk, smaller batches follow splits of fewer, larger
            # chunks.
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
        notes: tuple[str, ...] = (),
    ) -> KernelPlan:
        """The plan, with an entry for each batch.

        Args:
            layers: names of the layers that run it.
            predicted_time_ns: sum of what the winner's steps take.
            timing: of the winner.
            default: of torch's default.
            notes: what else is known.
        """
        algorithms: dict[str, int] = {}

        def index(algorithm: str) -> int:
            return algorithms.setdefault(algorithm, len(algorithms))

        passed, alone, last = self._passed(), list[int](), list[tuple[int, int]]()
        for n in range(1, self.problem.batch + 1):
            undivided, step = self._algorithm(n), self._last(n, n in passed)
            if n in self._by_slabs:
                alone.append(BY_SLABS)
            else:
                alone.append(BY_BATCH if undivided is None else index(undivided))
            last.append((0, -1) if step is None else (step.batch, index(step.algorithm)))
        slabs = self.winner.steps if self._by_slabs else ()
        # Index the slabs before the tuple of names is taken.
        indexed = tuple((step.size, index(step.algorithm)) for step in slabs)
        return KernelPlan(
            problem=self.problem,
            layers=layers,
            algorithms=tuple(algorithms),
            alone=tuple(alone),
            last=tuple(last),
            predicted_time_ns=predicted_time_ns,
            timing=timing,
            default=default,
            notes=notes,
            slabs=indexed,
        )

    def _algorithm(self, n: int) -> str | None:
        """The algorithm that computes a batch undivided, None where it is split."""
        if n in self._undivided:
            return self.winner.steps[0].algorithm
        item = self._walk[n - 1].alone
        return None if item is None else item.algorithm

    def _last(self, n: int, is_passed: bool) -> Item | None:
        """Last step of the best chain of a batch; None without any, or where none is needed."""
        return None if n in self._ended and not is_passed else self._walk[n - 1].last

    @property
    def _ended(self) -> frozenset[int]:
        """Batches left to torch's own convolution, which are reached by chains of others only."""
        return self._undivided if self.winner.is_default else frozenset()

    def _passed(self) -> set[int]:
        """Batches that chains of larger ones lead through; no chain begins at one of `_ended`."""
        passed: set[int] = set()
        for n in range(self.problem.batch, 0, -1):
            last = self._last(n, n in passed)
            if last is not None:
                passed.add(n - last.batch)
        return passed


def end_of(walk: Walk) -> Split | None:
    """The split of the largest batch, step by step from its end; None where there is none.

    >>> end_of([WalkEntry(None, Item(1, 0, 5, "gemm"))] * 2).steps
    (Step(size=1, algorithm='gemm'), Step(size=1, algorithm='gemm'))
    """
    n, steps = len(walk), list[Step]()
    lone = walk[n - 1].alone
    if lone is not None:
        return Split("batch", (Step(n, lone.algorithm),))
    while n:
        last = walk[n - 1].last
        if last is None:
            return None
        steps.append(Step(last.batch, last.algorithm))
        n -= last.batch
    return Split("batch", tuple(reversed(steps)))
