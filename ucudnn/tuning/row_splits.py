"""Splits of one kernel along its rows, into slabs of all samples or of micro-batches. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ucudnn.axis import AbstractAxis
from ucudnn.measurement import Measurement, Role
from ucudnn.slabs import slabs
from ucudnn.solvers.reuse import reuse_by_position
from ucudnn.split import Split
from ucudnn.tuning.items import KernelOf, chunk_items
from ucudnn.tuning.plan_draft import PlanDraft
from ucudnn.tuning.split_table import CHUNK_NS, Items, MeasuredSplits, worthwhile


@dataclass(frozen=True, eq=False)
class RowSplits(MeasuredSplits):
    """Splits of the largest batch into slabs, which may serve smaller batches, too.

    Args:
        axis: the rows of the kernel.
        items: as in `MeasuredSplits`.
        kernel_of: as in `MeasuredSplits`.
        limit: as in `MeasuredSplits`.
    """

    @classmethod
    def of(
        cls,
        axis: AbstractAxis,
        sizes: Iterable[int],
        measurements: Sequence[Measurement],
        kernel_of: KernelOf,
        limit: int | None,
    ) -> RowSplits:
        """Collect the measurements of slabs."""
        size_by_part = {axis.part(size): size for size in sizes}
        first, later = (
            chunk_items(axis.problem, measurements, role, size_by_part)
            for role in map(axis.role_at, (Role.FIRST, Role.LATER))
        )
        # No slab runs alone: the undivided call is a split along the batch.
        return cls(axis, {Role.ALONE: (), Role.FIRST: first, Role.LATER: later}, kernel_of, limit)

    @property
    def is_empty(self) -> bool:
        """True where no slabs within the limit add up to all rows."""
        return not self.splits()

    def splits(self) -> list[Split]:
        """Splits worth timing as wholes: the fastest as measured, and with fewer, larger slabs."""
        # Slabs that are too short for what their calls cost only where no others fit.
        return self._splits(worthwhile(self.items)) or self._splits(self.items)

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
        found = self.smallest_steps()
        return None if found is None else (found[0], str(self.axis.split(found[1])))

    def fill(self, draft: PlanDraft) -> None:
        """Add the batches that the winner's slabs compute, where slabs have won."""
        winner, samples = draft.winner, self.axis.problem.batch // self.axis.repetitions
        if self.chunks(winner) is not None:
            draft.compute_as_winner(self._batches_of(winner))
        # What full micro-batches of the winner leave is so many samples, and another implementation
        # may compute these: they were measured here.
        elif samples < winner.samples and self._fits(replace(winner, samples=samples)):
            batches = range(1, self.axis.problem.batch + 1)
            draft.compute_as_winner(n for n in batches if n % winner.samples == samples)

    def _fits(self, split: Split) -> bool:
        """True if all chunks of a split of this axis were timed, within the limit."""
        chunks = self.chunks(split)
        return chunks is not None and all(
            self.limit is None or item.workspace_bytes <= self.limit for item in chunks
        )

    def _batches_of(self, split: Split) -> list[int]:
        """The batches at which every slab runs the kernel that it was measured with."""
        problem, most = self.axis.problem, split.samples or self.axis.problem.batch
        entries = slabs(problem.with_batch(most), [step.size for step in split.steps])
        parts = {
            (entry.problem, step.algorithm)
            for entry, step in zip(entries, split.steps, strict=True)
            if entry.problem is not None
        }
        # Another batch may be computed by another implementation, whose workspace is not known.
        alike = {
            n
            for n in range(1, most + 1)
            if all(
                self.kernel_of(part.with_batch(n), algorithm) == self.kernel_of(part, algorithm)
                for part, algorithm in parts
            )
        }
        # Full micro-batches run as they were measured; the samples that they leave may not.
        return [n for n in range(1, problem.batch + 1) if n % most in alike | {0}]
