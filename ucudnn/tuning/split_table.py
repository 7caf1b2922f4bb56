"""The interface of split tables, whatever their chunks are, and what they have in common. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from ucudnn.axis import AbstractAxis, axis_of
from ucudnn.measurement import Measurement, Role, positions
from ucudnn.plan import KernelPlan, Split, Step, Timing
from ucudnn.solvers import Item
from ucudnn.solvers.reuse import reuse_by_position
from ucudnn.tuning.fronts import Front, Point, pareto
from ucudnn.tuning.items import KernelOf
from ucudnn.tuning.plan_draft import PlanDraft

# On the CPU the host cost is inside the measured time; it still is time that no kernel runs.
# A chunk should run ten times as long as its call takes on the host (about 20 us in PyTorch).
WORTHWHILE_NS = 10 * 20_000
# Penalties per chunk in ns, each of which gives one candidate split: 0 for times as measured, 2 ms
# for a busy machine, on which threads wait for each other at the end of a chunk, and 1 s, so that
# only the number of chunks counts.
CHUNK_NS = (0, 2_000_000, 1_000_000_000)

# Items by the position of their chunk in a split.
Items = Mapping[str, Sequence[Item]]


class AbstractSplitTable(ABC):
    """Splits of one kernel into chunks of one kind, by the measurements of such chunks.

    Law: every split that it offers computes the whole, by chunks that fit the limit. The first one
    is the fastest of all whose chunks were timed and are worth their launch.
    """

    @classmethod
    @abstractmethod
    def of(
        cls,
        axis: AbstractAxis,
        sizes: Iterable[int],
        measurements: Sequence[Measurement],
        kernel_of: KernelOf,
        limit: int | None,
    ) -> Self:
        """Collect the measurements of one kind of chunks.

        Args:
            axis: of the kernel, along which it is split.
            sizes: of the chunks that a split may have, timed or not.
            measurements: of such chunks, and perhaps of others.
            kernel_of: which kernel an algorithm runs a problem by, None where it does not.
            limit: workspace in bytes that a split may use, None for any.
        """

    @property
    @abstractmethod
    def is_empty(self) -> bool:
        """True where there is nothing to plan with."""

    @abstractmethod
    def splits(self) -> list[Split]:
        """Splits of the largest batch worth timing as wholes, the fastest as measured first."""

    @abstractmethod
    def front(self) -> Front:
        """Front of time over workspace of the splits of the largest batch, whatever the limit."""

    @abstractmethod
    def chunks(self, split: Split) -> tuple[Item, ...] | None:
        """The fastest measurement of each step in its position.

        Args:
            split: of any table of the kernel.

        Returns:
            None where one has none.
        """

    @abstractmethod
    def smallest(self) -> tuple[int, str] | None:
        """The least workspace in bytes of any split, and its description; None without any."""

    @abstractmethod
    def fill(self, draft: PlanDraft) -> None:
        """Add what is known of each batch to a plan in the making."""


@dataclass(frozen=True, eq=False)
class MeasuredSplits(AbstractSplitTable):
    """A split table of the chunks that were timed along one axis.

    Args:
        axis: of the kernel, along which it is split.
        items: what was timed, by the position of the chunk in a split.
        kernel_of: which kernel an algorithm runs a problem by, None where it does not.
        limit: workspace in bytes that a split may use, None for any.
    """

    axis: AbstractAxis
    items: Items
    kernel_of: KernelOf
    limit: int | None

    def front(self) -> Front:
        """The front of what is worthwhile, and of anything where that does not fit."""
        points: list[Point] = []
        for choice in (worthwhile(self.items), self.items):
            # From there on a split of longer chunks exists, which is taken though it may be slower.
            below = points[0].workspace_bytes if points else None
            table = reuse_by_position(choice, self.axis.extent)
            points += [
                Point(workspace, time_ns, below)
                for workspace, time_ns in (table.front(self.axis.extent) if table else ())
                if below is None or workspace < below
            ]
        return pareto(points)

    def chunks(self, split: Split) -> tuple[Item, ...] | None:
        """The fastest measurement of each step."""
        if axis_of(self.axis.problem, split) != self.axis:
            return None
        found = []
        for position, step in zip(positions(len(split.steps)), split.steps, strict=True):
            # The last slab may have fewer rows than it was measured with; it counts as a full one.
            chunk = self.axis.size_of(step), step.algorithm
            items = self.items[position]
            fitting = [item for item in items if (item.batch, item.algorithm) == chunk]
            if not fitting:
                return None
            found.append(min(fitting, key=_time_ns))
        return tuple(found)

    def smallest_steps(self) -> tuple[int, tuple[Step, ...]] | None:
        """The least workspace in bytes of any split, and its steps; None without any split."""
        extent = self.axis.extent
        table = reuse_by_position(self.items, extent)
        least = table.smallest_bytes(extent) if table else None
        return None if table is None or least is None else (least, table.split(extent, least))


def plan_by(
    tables: Sequence[AbstractSplitTable],
    draft: PlanDraft,
    layers: tuple[str, ...],
    timing: Timing,
    default: Timing | None,
    notes: tuple[str, ...] = (),
) -> KernelPlan:
    """The plan for every batch, with the winner of the finals at the largest.

    Args:
        tables: all of the kernel.
        draft: with the winner, and nothing else yet.
        layers: names of the layers that run it.
        timing: of the winner.
        default: of torch's default.
        notes: what else is known.
    """
    # Smaller batches follow the table in which the winner was found; the others serve batches that
    # it has no split for.
    for table in sorted(tables, key=lambda table: draft.winner not in table.splits()):
        table.fill(draft)
    # Torch's default takes part in a race even if it was not timed as a chunk.
    chunks = known_chunks(tables, draft.winner)
    predicted = timing.time_ns if chunks is None else sum(item.time_ns for item in chunks)
    return draft.kernel_plan(layers, predicted, timing, default, notes)


def known_chunks(tables: Sequence[AbstractSplitTable], split: Split) -> tuple[Item, ...] | None:
    """The fastest measurement of each step of a split in the first table that has them all.

    Args:
        tables: all of the kernel.
        split: of the kernel.
    """
    found = (table.chunks(split) for table in tables)
    return next((chunks for chunks in found if chunks is not None), None)


def worthwhile(items: Items) -> Items:
    """Items without chunks that are too short for what their calls cost."""
    return {
        # What runs alone has no alternative with fewer calls.
        position: [
            item for item in group if position == Role.ALONE or item.time_ns >= WORTHWHILE_NS
        ]
        for position, group in items.items()
    }


def _time_ns(item: Item) -> int:
    return item.time_ns
