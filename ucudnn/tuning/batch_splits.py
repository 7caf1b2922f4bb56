"""Splits of one kernel along the batch, for every batch up to the largest. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ucudnn.axis import AbstractAxis
from ucudnn.measurement import Measurement, Role
from ucudnn.solvers import Item, WalkEntry
from ucudnn.solvers.reuse import reuse_by_position
from ucudnn.split import DEFAULT_ALGORITHM, Split, Step
from ucudnn.system.forking import cached_property
from ucudnn.tuning.items import KernelOf, items_by_role, with_bounded
from ucudnn.tuning.plan_draft import PlanDraft, Walk, end_of
from ucudnn.tuning.split_table import CHUNK_NS, Items, MeasuredSplits, worthwhile


@dataclass(frozen=True, eq=False)
class BatchSplits(MeasuredSplits):
    """Splits of every batch from 1 to N into micro-batches.

    Args:
        axis: the samples of the kernel at the largest batch.
        items: as in `MeasuredSplits`.
        kernel_of: as in `MeasuredSplits`.
        limit: as in `MeasuredSplits`.
        sizes: chunks that a split may have, timed or not: a smaller batch may need them.
    """

    sizes: tuple[int, ...]

    @classmethod
    def of(
        cls,
        axis: AbstractAxis,
        sizes: Iterable[int],
        measurements: Sequence[Measurement],
        kernel_of: KernelOf,
        limit: int | None,
    ) -> BatchSplits:
        """Collect the measurements of micro-batches."""
        items = items_by_role(axis.problem, measurements, kernel_of)
        return cls(axis, items, kernel_of, limit, tuple(sizes))

    @property
    def is_empty(self) -> bool:
        """True where no micro-batch was timed."""
        return not any(self.items.values())

    def splits(self) -> list[Split]:
        """Splits of the largest batch worth timing as wholes, the fastest as measured first."""
        splits = [split for split in map(end_of, self._walks) if split is not None]
        batch, limit = self.axis.extent, self.limit
        # The solver favours chunks with lucky samples, so the best undivided call is raced, too.
        undivided = [
            item
            for item in self.items[Role.ALONE]
            if item.batch == batch and (limit is None or item.workspace_bytes <= limit)
        ]
        if undivided:
            splits.append(Split("batch", (Step(batch, min(undivided, key=_cost).algorithm),)))
        return list(dict.fromkeys(splits))

    def smallest(self) -> tuple[int, str] | None:
        """The least workspace in bytes of any split, and the chunk that begins it."""
        found = self.smallest_steps()
        if found is None:
            return None
        least, (first, *_) = found
        return least, f"micro-batch {first.size}, {first.algorithm}"

    def fill(self, draft: PlanDraft) -> None:
        """Add undivided calls like the winner's, and a walk for all other batches.

        Where torch's default wins it is the plan of smaller batches, too, whose splits were not
        timed as whole calls, unless another implementation would run for them.
        """
        winner = draft.winner
        if winner.axis == self.axis.name and len(winner.steps) == 1:
            alike = self._like_default() if winner.is_default else [self.axis.extent]
            draft.compute_as_winner(alike)
        draft.follow(self._walks)

    def uncovered(self) -> list[int]:
        """The batches that nothing timed computes within the limit, the smallest first."""
        walk = _walk_all(self._bounded, self.axis.extent, self.limit)
        return [n for n, entry in enumerate(walk, start=1) if entry == WalkEntry(None, None)]

    @cached_property
    def _bounded(self) -> Items:
        return with_bounded(self.axis.problem, self.items, self.kernel_of, self.sizes)

    @cached_property
    def _walks(self) -> tuple[Walk, ...]:
        """For each penalty of `CHUNK_NS` the fastest splits of all batches."""
        batch, limit = self.axis.extent, self.limit
        # Smaller batches may use sizes that were not timed, at the times of larger ones. The
        # largest batch is raced, and its prediction must rest on timed chunks alone.
        return tuple(
            _with_end_of(
                _walk_all(self._bounded, batch, limit, launch_ns),
                _walk_all(self.items, batch, limit, launch_ns),
            )
            for launch_ns in CHUNK_NS
        )

    def _like_default(self) -> list[int]:
        """The batches at which torch's default runs the kernel that it runs at the largest."""
        problem = self.axis.problem
        whole = self.kernel_of(problem, DEFAULT_ALGORITHM)
        # torch picks an implementation by batch: that its choice won at N says nothing about
        # others.
        return [
            n
            for n in range(1, problem.batch + 1)
            if self.kernel_of(problem.with_batch(n), DEFAULT_ALGORITHM) == whole
        ]


def _walk_all(
    items: Items, batch: int, limit: int | None, launch_ns: int = 0
) -> tuple[WalkEntry, ...]:
    """The fastest split of every batch; of short chunks only where nothing else fits."""
    tables = (reuse_by_position(choice, batch, launch_ns) for choice in (worthwhile(items), items))
    found = [table.walk(limit) for table in tables if table is not None]
    merged = []
    for entries in zip(*found, strict=True):
        chosen = next((entry for entry in entries if entry.alone or entry.last), entries[0])
        # A back-pointer leads from n to n - last.batch and goes on with the entry there: even where
        # n is best computed alone, larger batches may need its chain.
        last = next((entry.last for entry in entries if entry.last), None)
        merged.append(WalkEntry(chosen.alone, last))
    return tuple(merged) or (WalkEntry(None, None),) * batch


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


def _cost(item: Item) -> tuple[int, int, int]:
    return item.time_ns, item.workspace_bytes, item.rank
