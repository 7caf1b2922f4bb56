"""Sources of the measurements of one kernel: a device, or a recording of a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from ucudnn.axis import AbstractAxis, BatchAxis, RowAxis
from ucudnn.backends.torch_cpu.processor import give_back_free_blocks
from ucudnn.cache.base import key_texts
from ucudnn.config import Config
from ucudnn.errors import PlanError
from ucudnn.kernels.confirmation import Finalist, race_calls, recall_race
from ucudnn.kernels.measurer import KernelMeasurer
from ucudnn.kernels.session import Session
from ucudnn.kernels.splits import AbstractSplitTable, BatchSplits, Front, Point, RowSplits, pareto
from ucudnn.measurement import Measurement
from ucudnn.problem import Problem
from ucudnn.split import Split
from ucudnn.system.processes import cached_property

# Fields of a key that differ among the entries of one kernel. If a recording lacks a kernel, the
# error says in which of the other fields the nearest entry differs.
_ANY = ("algorithm", "conditions.role", "protocol")


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel, with the name of the layer of each of its calls."""

    problem: Problem
    layers: tuple[str, ...]
    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class Cut:
    """One way to cut a kernel into chunks."""

    table: type[AbstractSplitTable]
    axis: AbstractAxis
    # Sizes of the chunks; empty if the kernel is not cut in this way.
    sizes: tuple[int, ...]
    # True: chunks are computed only by algorithms that also add a bias.
    adds_bias: bool = False


@dataclass(frozen=True, slots=True)
class Evidence:
    """Measurements of a kernel's chunks, for each cut of its source."""

    # Measurements of the chunks that a split may consist of.
    usable: tuple[tuple[Measurement, ...], ...]
    # The usable measurements, and also those of chunks that failed, were eliminated or do not fit.
    known: tuple[tuple[Measurement, ...], ...]
    notes: tuple[str, ...] = ()
    # Algorithms that were not measured further, each with a sentence that gives the reason.
    ruled_out: tuple[tuple[str, str], ...] = ()

    @property
    def everything(self) -> tuple[Measurement, ...]:
        """All known measurements, of all cuts."""
        return tuple(entry for entries in self.known for entry in entries)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of one kernel's plan: workspace in bytes that a call and a chunk may use."""

    limit: int | None
    chunk_limit: int | None
    # The possible gain, as a fraction of the kernel's time, at which measuring ends.
    tolerance: float = 0.0


@dataclass(eq=False)
class AbstractSource(ABC):
    """Where the measurements of one kernel come from; only chunks within its bounds count."""

    session: Session
    config: Config
    kernel: Kernel
    bounds: Bounds
    # Measurement of torch's own convolution of the whole batch; None if it was not measured.
    default: Measurement | None

    @cached_property
    def cuts(self) -> tuple[Cut, ...]:
        """The ways to cut the kernel; torch's own convolution is a chunk of the first cut."""
        samples, rows = BatchAxis(self.kernel.problem), RowAxis(self.kernel.problem)
        policy = self.config.policy
        sizes = samples.sizes(policy)
        return (
            Cut(BatchSplits, samples, sizes),
            # An algorithm that adds a bias can compute only layers that have one.
            Cut(BatchSplits, samples, sizes if self.kernel.has_bias else (), adds_bias=True),
            *((Cut(RowSplits, rows, rows.sizes(policy)),) if self._may_cut_rows else ()),
        )

    @property
    def _may_cut_rows(self) -> bool:
        """True unless torch's own convolution is known to fit the limit."""
        workspace, limit = self.default.workspace_bytes if self.default else None, self.bounds.limit
        # Neighbouring slabs read some input rows twice. So slabs are tried only if the limit
        # excludes torch's own convolution of the whole batch.
        return limit is not None and (workspace is None or workspace > limit)

    @abstractmethod
    def known_front(self) -> Front:
        """Front of the splits from the measurements known now; nothing is measured.

        Raises PlanError if a recording has no measurement of this kernel.
        """

    @abstractmethod
    def hoped_front(self) -> Front:
        """For each workspace a lower bound of the time of every split; nothing is measured."""

    def _front(self, measurements: Iterable[Sequence[Measurement]]) -> Front:
        # Splits along all axes compete for the same workspace, so they share one front.
        return pareto(point for table in self.tables(measurements) for point in table.front())

    def tables(
        self, measurements: Iterable[Sequence[Measurement]], is_limited: bool = True
    ) -> list[AbstractSplitTable]:
        """The split table of each cut, for splits within the bounds, or within any limit."""
        limit = self.bounds.chunk_limit if is_limited else None
        return [
            cut.table(cut.axis, cut.sizes, entries, self.session.implementation_of, limit)
            for cut, entries in zip(self.cuts, measurements, strict=True)
        ]

    def within(self, bounds: Bounds) -> AbstractSource:
        """The source of the same kernel within other bounds."""
        return source_of(self.session, self.config, self.kernel, bounds, self.default)

    @abstractmethod
    def look_at_default(self) -> Measurement | None:
        """Torch's own convolution of the whole batch, run at least once; None if it fails."""

    def look_at_chunks(self, most: int) -> None:  # noqa: B027 - a recording does nothing
        """Run torch's own convolution once for the largest chunks of at most `most` samples."""

    def step(self) -> bool:
        """Measure the micro-batches that the solver asks for next; False if it asks for none."""
        return False

    @abstractmethod
    def evidence(self) -> Evidence:
        """Measure everything that the plan still needs, or recall it from a recording.

        Raises PlanError if a recording has no measurement of this kernel.
        """

    @property
    def lacks_time(self) -> bool:
        """True if a measurement was left out because it would have ended after the time budget."""
        return False

    @property
    def lack_of_memory(self) -> str:
        """Why a chunk could not be run for lack of memory; "" if there was enough."""
        return ""

    @abstractmethod
    def race(self, splits: Sequence[Split]) -> list[Finalist] | None:
        """Race splits as whole calls, or recall their race; None if neither is possible."""

    def release(self) -> None:  # noqa: B027 - a recording has none
        """Free the operands, which no other kernel uses; they are allocated again if needed."""


@dataclass(eq=False)
class LiveSource(AbstractSource):
    """Source that measures on the session's device, unless the cache has the measurement."""

    def __post_init__(self) -> None:
        self._measurer_by_cut: dict[Cut, KernelMeasurer] = {}

    def _measurer(self, cut: Cut) -> KernelMeasurer:
        if cut not in self._measurer_by_cut:
            config, bounds = self.config, self.bounds
            self._measurer_by_cut[cut] = KernelMeasurer(
                self.session,
                cut.axis,
                bounds.chunk_limit,
                cut.sizes,
                max_error=config.max_error,
                adds_bias=cut.adds_bias,
                tolerance=bounds.tolerance,
                deterministic=bool(config.deterministic),
                like=None if cut == self.cuts[0] else self._measurer(self.cuts[0]),
            )
        return self._measurer_by_cut[cut]

    def known_front(self) -> Front:
        """Front of the splits of all chunks that were timed, in full or once."""
        return self._front(self._measurer(cut).timed for cut in self.cuts)

    def hoped_front(self) -> Front:
        """For each workspace a lower bound of the time of every split."""
        return pareto(
            Point(workspace, time_ns)
            for cut in self.cuts
            for workspace, time_ns in self._measurer(cut).hoped_front()
        )

    def _working(self) -> list[KernelMeasurer]:
        """The first measurer, and the other measurers that have something to measure."""
        # The first measurer is always included, because it knows torch's own convolution.
        first, *others = map(self._measurer, self.cuts)
        return [first, *(one for one in others if not one.is_empty)]

    def look_at_default(self) -> Measurement | None:
        """Torch's own convolution of the whole batch, run at least once; None if it fails."""
        return self._measurer(self.cuts[0]).look_at_default()

    def look_at_chunks(self, most: int) -> None:
        """Run torch's own convolution once for the largest chunks of at most `most` samples."""
        self._measurer(self.cuts[0]).look_at_chunks(most)

    def step(self) -> bool:
        """Measure the micro-batches that the solver asks for next; False if it asks for none."""
        return self._measurer(self.cuts[0]).step()

    def evidence(self) -> Evidence:
        """Measure everything that the plan still needs."""
        working = self._working()
        for place, measurer in enumerate(working):
            if place:
                # Each measurer allocates operands of the same size; only one set of them is in
                # memory at a time.
                working[place - 1].release()
            while measurer.step():
                pass
            self.session.flush()
        measurers = [self._measurer(cut) for cut in self.cuts]
        # If the time is over, kernels of a pool also use chunks that were timed by a single run,
        # because the division of the pool rests on such times, too.
        is_rough = self.config.total_bytes is not None and (self.session.is_over or self.lacks_time)
        return Evidence(
            tuple(tuple(one.timed if is_rough else one.usable) for one in measurers),
            tuple(tuple(one.measurements) for one in measurers),
            tuple(chain.from_iterable(one.certificate() for one in working)),
            tuple(chain.from_iterable(one.ruled_out for one in working)),
        )

    @property
    def lacks_time(self) -> bool:
        """True if a measurement was left out because it would have ended after the time budget."""
        return any(measurer.lacks_time for measurer in self._measurer_by_cut.values())

    @property
    def lack_of_memory(self) -> str:
        """Why a chunk could not be run for lack of memory; "" if there was enough."""
        lacks = (measurer.lack_of_memory for measurer in self._measurer_by_cut.values())
        return next(filter(None, lacks), "")

    def race(self, splits: Sequence[Split]) -> list[Finalist] | None:
        """Race splits as whole calls if there is time for it, else recall their race."""
        session, problem, has_bias = self.session, self.kernel.problem, self.kernel.has_bias
        # A race takes at least three runs of each call: one for its workspace, one to warm up, and
        # one round. If there is no time for that, a race in the cache still makes a better plan
        # than predictions.
        runs, whole_ns = 3 * len(splits), self._measurer(self.cuts[0]).whole_ns
        if session.race_until.is_over or not session.end.has_time(runs, whole_ns):
            return recall_race(session, problem, splits, has_bias)
        # The measurer that was used last still holds its operands; the others have freed theirs.
        return race_calls(session, self._working()[-1], problem, splits, has_bias)

    def release(self) -> None:
        """Free the operands, which no other kernel uses; they are allocated again if needed."""
        for measurer in self._measurer_by_cut.values():
            measurer.release()
        # malloc keeps memory that chunks have freed. Without this call the memory of kernels of
        # other sizes would be added to it.
        give_back_free_blocks()


@dataclass(eq=False)
class ReplayedSource(AbstractSource):
    """Source that recalls the measurements of a device that need not be in this machine."""

    def __post_init__(self) -> None:
        # The measurement of torch's own convolution is taken from the recording, not from the
        # argument `default`.
        self.default = self.look_at_default()

    def look_at_default(self) -> Measurement | None:
        """Torch's own convolution of the whole batch, as it was recorded."""
        samples = BatchAxis(self.kernel.problem)
        whole = self._recall(samples, [samples.extent])
        known = (entry for entry in whole if entry.key.is_default)
        return next(known, None)

    def evidence(self) -> Evidence:
        """Recall the measurements."""
        known = tuple(map(self._recalled, self.cuts))
        if not any(known):
            raise self._miss()
        usable = tuple(tuple(filter(self._is_usable, entries)) for entries in known)
        if not self._has_split(usable):
            # If the chunks that were timed in full make no split, chunks that were run once are
            # used, too.
            usable = tuple(tuple(filter(self._is_timed, entries)) for entries in known)
        return Evidence(usable, known)

    def _has_split(self, measurements: Iterable[Sequence[Measurement]]) -> bool:
        """True if chunks of some cut add up to a split within the limit."""
        limit = self.bounds.chunk_limit
        found = filter(None, (table.smallest() for table in self.tables(measurements)))
        return any(limit is None or least <= limit for least, _ in found)

    def known_front(self) -> Front:
        """Front of the splits that were recorded."""
        return self._front(self.evidence().usable)

    def hoped_front(self) -> Front:
        """The known front, because nothing more can be measured."""
        return self.known_front()

    def _recalled(self, cut: Cut) -> tuple[Measurement, ...]:
        found = self._recall(cut.axis, cut.sizes)
        # The recorded layer may have had a bias, and the layer that is tuned now none.
        return tuple(entry for entry in found if entry.adds_bias == cut.adds_bias)

    def _recall(self, axis: AbstractAxis, sizes: Iterable[int]) -> list[Measurement]:
        parts = [axis.part(size) for size in sizes]
        recording = self.session.recording
        assert recording is not None
        found = recording.measurements(axis.problem, parts)
        return [self.session.reuse(entry) for entry in found]

    def _miss(self) -> PlanError:
        """The error for a kernel without measurements; it says how the nearest entry differs."""
        texts = key_texts(self.session.key(self.kernel.problem, ""))
        wanted = {name: texts[name] for name in texts if name not in _ANY}
        nearest = self.session.cache.explain(wanted)
        return PlanError(
            f"the recording of {self.session.backend.device()} has no measurement of "
            f"{self.kernel.problem} at any of the micro-batches allowed; {nearest}"
        )

    def _is_usable(self, entry: Measurement) -> bool:
        return entry.status == "ok" and self._is_timed(entry)

    def _is_timed(self, entry: Measurement) -> bool:
        if entry.time_ns is None or (self.config.deterministic and not entry.is_deterministic):
            return False
        most = self.config.max_error
        # Recordings that were not made by ucudnn may lack the errors of results; a candidate of
        # unknown error is not excluded.
        return most is None or (entry.error or 0.0) <= most

    def race(self, splits: Sequence[Split]) -> list[Finalist] | None:
        """The race as it was recorded; None if it was not recorded."""
        return recall_race(self.session, self.kernel.problem, splits, self.kernel.has_bias)


def source_of(
    session: Session, config: Config, kernel: Kernel, bounds: Bounds, default: Measurement | None
) -> AbstractSource:
    """The source of a kernel: a recording if the session replays one, else its device."""
    kind = ReplayedSource if session.is_recorded else LiveSource
    return kind(session, config, kernel, bounds, default)
