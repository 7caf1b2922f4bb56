"""Sources of the measurements of one kernel: a device, or a recording of one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ucudnn.axis import AbstractAxis, BatchAxis, RowAxis
from ucudnn.backends.recorded import RecordedBackend
from ucudnn.config import Config
from ucudnn.measurement import ADDS_BIAS, Measurement
from ucudnn.plan import DEFAULT_ALGORITHM, Split
from ucudnn.problem import Problem
from ucudnn.system.forking import cached_property
from ucudnn.tuning.confirmation import Finalist, race, recall_race
from ucudnn.tuning.measurer import KernelMeasurer
from ucudnn.tuning.replay import miss, recall
from ucudnn.tuning.session import Session


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel with the layers that run it.

    Args:
        problem: at the largest batch.
        layers: names of the layers that run it, one per call.
        has_bias: whether a layer adds a bias to the result.
    """

    problem: Problem
    layers: tuple[str, ...]
    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class Evidence:
    """Measurements of a kernel's chunks.

    Args:
        plain: chunks that a split along the batch may consist of.
        fused: the same, by algorithms that add a bias.
        slabs: slabs that a split along the rows may consist of.
        everything: these, and those that failed, were eliminated or do not fit.
        notes: notes for the plan, such as the remaining gap.
    """

    plain: tuple[Measurement, ...]
    fused: tuple[Measurement, ...]
    slabs: tuple[Measurement, ...]
    everything: tuple[Measurement, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of one kernel's plan.

    Args:
        limit: workspace in bytes that a call may use, None for any.
        chunk_limit: workspace in bytes that a chunk may use.
        tolerance: the possible gain, as a fraction of the kernel's time, at which measuring ends.
    """

    limit: int | None
    chunk_limit: int | None
    tolerance: float = 0.0


class AbstractSource(ABC):
    """Measurements of one kernel within its limits.

    Args:
        session: the device and the cache.
        config: the settings.
        kernel: the kernel that is measured.
        bounds: limits of its plan.
        default: torch's own convolution of the whole batch, as far as it was measured.
    """

    def __init__(
        self,
        session: Session,
        config: Config,
        kernel: Kernel,
        bounds: Bounds,
        default: Measurement | None,
    ) -> None:
        self.session = session
        self.config = config
        self.kernel = kernel
        self.bounds = bounds
        self.default = default
        self.axis = BatchAxis(kernel.problem)
        self.rows_axis = RowAxis(kernel.problem)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the chunks of samples that a split may have."""
        return self.axis.sizes(self.config.policy)

    @cached_property
    def row_sizes(self) -> tuple[int, ...]:
        """Sizes of slabs: none unless torch's own convolution exceeds the workspace limit."""
        workspace, limit = self.default.workspace_bytes if self.default else None, self.bounds.limit
        # Neighbouring slabs read some input rows twice, so they are tried only where the limit
        # excludes the whole.
        if limit is None or (workspace is not None and workspace <= limit):
            return ()
        return self.rows_axis.sizes(self.config.policy)

    @abstractmethod
    def look_at_default(self) -> Measurement | None:
        """Torch's own convolution of the whole batch, run at least once; None if it fails."""

    @abstractmethod
    def step(self) -> bool:
        """Measure the micro-batches that the solver asks for next; False if it asks for none."""

    @abstractmethod
    def evidence(self) -> Evidence:
        """Measure everything that is still wanted, or recall it from a recording.

        Raises:
            PlanError: a recording has nothing of this kernel.
        """

    @abstractmethod
    def race(self, splits: Sequence[Split]) -> list[Finalist] | None:
        """Time splits as whole calls, or recall the race; None if neither is possible."""

    @abstractmethod
    def release(self) -> None:
        """Free the operands, which no other kernel uses; they are allocated again if needed."""


class LiveSource(AbstractSource):
    """Source that measures on the session's device, unless the cache has the measurement."""

    @cached_property
    def _plain(self) -> KernelMeasurer:
        return self._measurer(self.axis, self.sizes)

    @cached_property
    def _fused(self) -> KernelMeasurer:
        # Without a bias to add, a kernel that adds one computes too much.
        sizes = self.sizes if self.kernel.has_bias else ()
        return self._measurer(self.axis, sizes, adds_bias=True)

    @cached_property
    def _slabs(self) -> KernelMeasurer:
        return self._measurer(self.rows_axis, self.row_sizes)

    def _measurer(
        self, axis: AbstractAxis, sizes: Iterable[int], adds_bias: bool = False
    ) -> KernelMeasurer:
        bounds = self.bounds
        more = (self.config.max_error, adds_bias, bounds.tolerance)
        return KernelMeasurer(self.session, axis, bounds.chunk_limit, sizes, *more)

    def _working(self) -> list[KernelMeasurer]:
        """Measurers that have something to measure."""
        # The plain one is always there: it knows torch's own convolution.
        return [self._plain, *(one for one in (self._fused, self._slabs) if not one.is_empty)]

    def look_at_default(self) -> Measurement | None:
        """Torch's own convolution of the whole batch, run at least once; None if it fails."""
        return self._plain.look_at_default()

    def step(self) -> bool:
        """Measure the micro-batches that the solver asks for next; False if it asks for none."""
        return self._plain.step()

    def evidence(self) -> Evidence:
        """Measure everything that is still wanted."""
        working = self._working()
        for place, measurer in enumerate(working):
            if place:
                # Each allocates operands of the same size; only one set is in memory at a time.
                working[place - 1].release()
            while measurer.step():
                pass
            self.session.flush()
        return Evidence(
            tuple(self._plain.usable),
            tuple(self._fused.usable),
            tuple(self._slabs.usable),
            tuple(entry for one in working for entry in one.measurements),
            tuple(note for one in working for note in one.certificate()),
        )

    def race(self, splits: Sequence[Split]) -> list[Finalist] | None:
        """Time splits as whole calls while there is time, else recall the race."""
        session, problem, has_bias = self.session, self.kernel.problem, self.kernel.has_bias
        # A race in the cache costs no time, and a plan by measured whole calls is the better one.
        if not session.may_race:
            return recall_race(session, problem, splits, has_bias)
        # The measurer that worked last still holds operands, the others gave theirs back.
        return race(session, self._working()[-1], problem, splits, has_bias)

    def release(self) -> None:
        """Free the operands, which no other kernel uses; they are allocated again if needed."""
        for name in ("_plain", "_fused", "_slabs"):
            # A cached property is found there once it was asked for; asking now would make a
            # measurer.
            if name in self.__dict__:
                self.__dict__[name].release()


class ReplayedSource(AbstractSource):
    """Source that recalls the measurements of a device, which need not be here."""

    def __init__(
        self, session: Session, config: Config, kernel: Kernel, bounds: Bounds, _: object = None
    ) -> None:
        # What a device here measured of torch's own convolution does not count: the recording has
        # it, or has none.
        super().__init__(session, config, kernel, bounds, None)
        self.default = self.look_at_default()

    def look_at_default(self) -> Measurement | None:
        """Torch's own convolution of the whole batch, as it was recorded."""
        whole = recall(self.session, self.axis, [self.axis.extent])
        known = (entry for entry in whole if entry.key.algorithm == DEFAULT_ALGORITHM)
        return next(known, None)

    def step(self) -> bool:
        """False: a recording measures nothing."""
        return False

    def evidence(self) -> Evidence:
        """Recall the measurements.

        Raises:
            PlanError: the recording has nothing of this kernel.
        """
        # Sizes of slabs depend on torch's own workspace, which `__init__` has looked up.
        of_batch = recall(self.session, self.axis, self.sizes)
        of_rows = recall(self.session, self.rows_axis, self.row_sizes)
        if not of_batch and not of_rows:
            # Nothing at all: the error names the nearest entry and in which fields of the key it
            # differs.
            raise miss(self.session, self.kernel.problem)
        usable = [entry for entry in of_batch if self._is_usable(entry)]
        return Evidence(
            tuple(entry for entry in usable if ADDS_BIAS not in entry.notes),
            # A recording may be of a layer with a bias and be replayed for one without.
            tuple(e for e in usable if ADDS_BIAS in e.notes and self.kernel.has_bias),
            tuple(entry for entry in of_rows if self._is_usable(entry)),
            (*of_batch, *of_rows),
        )

    def _is_usable(self, entry: Measurement) -> bool:
        most = self.config.max_error
        # Recordings made by other means may lack errors; one that is not known excludes nothing.
        return entry.status == "ok" and (most is None or (entry.error or 0.0) <= most)

    def race(self, splits: Sequence[Split]) -> list[Finalist] | None:
        """The race as it was recorded."""
        return recall_race(self.session, self.kernel.problem, splits, self.kernel.has_bias)

    def release(self) -> None:
        """Do nothing: there are no operands."""


def source_of(
    session: Session, config: Config, kernel: Kernel, bounds: Bounds, default: Measurement | None
) -> AbstractSource:
    """The source for a session: a recording replays, every other device measures."""
    is_recorded = isinstance(session.backend, RecordedBackend)
    kind = ReplayedSource if is_recorded else LiveSource
    return kind(session, config, kernel, bounds, default)
