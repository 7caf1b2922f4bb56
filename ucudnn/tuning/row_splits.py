"""Splits of one kernel along its rows, into slabs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ucudnn.axis import AbstractAxis
from ucudnn.measurement import Measurement, Role, role_of
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
            chunk_items(axis.problem, measurements, role_of(axis.problem, position), size_by_part)
            for position in (Role.FIRST, Role.LATER)
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
        if self.chunks(draft.winner) is not None:
            draft.compute_as_winner(self._batches_of(draft.winner))

    def _batches_of(self, split: Split) -> list[int]:
        """The batches at which every slab runs the kernel that it was measured with."""
        problem = self.axis.problem
        entries = slabs(problem, [step.size for step in split.steps])
        parts = {
            (entry.problem, step.algorithm)
            for entry, step in zip(entries, split.steps, strict=True)
            if entry.problem is not None
        }
        # Another batch may be computed by another implementation, whose workspace is not known.
        return [
            n
            for n in range(1, problem.batch + 1)
            if all(
                self.kernel_of(part.with_batch(n), algorithm) == self.kernel_of(part, algorithm)
                for part, algorithm in parts
            )
        ]
