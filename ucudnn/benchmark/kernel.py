"""Measure every candidate of one kernel, through the cache: workspace first, then time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ucudnn.backends import AbstractBackend
from ucudnn.benchmark.protocol import PROTOCOL, ROUNDS, SCREEN_FACTOR, ChunkLoop, Ring
from ucudnn.benchmark.statistics import median_ns, spread_ns
from ucudnn.cache import AbstractCache
from ucudnn.measurement import Measurement, MeasurementKey
from ucudnn.plan import DEFAULT_ALGORITHM
from ucudnn.problem import Problem

# Why a candidate was not timed in full: the reason names the algorithm that it lost against.
_BEATEN = "beaten by "


@dataclass
class Session:
    """What stays the same while one process measures: the device, the cache, and the counts.

    Args:
        backend: where candidates come from.
        cache: where measurements are kept.
        on_run: called whenever something was measured or found, to show progress.
    """

    backend: AbstractBackend
    cache: AbstractCache
    on_run: Callable[[], None] = lambda: None
    measured: int = 0
    reused: int = 0
    _fresh: list[Measurement] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._device, self._software = self.backend.device(), self.backend.software()
        self._conditions = self.backend.conditions()

    def key(self, problem: Problem, algorithm: str, role: str = "alone") -> MeasurementKey:
        """The key of a candidate that this session would measure."""
        conditions = replace(self._conditions, role=role)
        return MeasurementKey(
            problem, algorithm, self._device, self._software, conditions, PROTOCOL
        )

    def reuse(self, measurement: Measurement) -> Measurement:
        """Count a measurement that was not taken again."""
        self.reused += 1
        self.on_run()
        return measurement

    def keep(self, measurement: Measurement) -> Measurement:
        """Count a new measurement; `flush` writes it to the cache."""
        self._fresh.append(measurement)
        self.measured += 1
        self.on_run()
        return measurement

    def flush(self) -> None:
        """Write new measurements to the cache, in one go."""
        if self._fresh:
            self.cache.put(self._fresh)
        self._fresh = []


class KernelMeasurer:
    """Measures the candidates of one kernel at every micro-batch size, smallest first.

    Two assumptions about chunks that one kernel computes save runs; where they fail, something is
    not measured, and no number is wrong. Workspace grows on a line with the chunk: a size that
    would exceed the limit, judged from the two smaller ones, is not run. Time does not fall as the
    chunk grows: an algorithm that took too long for a smaller chunk is not run for a larger one.
    """

    def __init__(self, session: Session, problem: Problem, limit: int | None) -> None:
        self._session = session
        self._problem = problem
        self._limit = limit
        self._ring: Ring | None = None
        self._smaller: dict[str, list[Measurement]] = {}

    @property
    def ring(self) -> Ring:
        """Operands, allocated when something must really be run."""
        if self._ring is None:
            self._ring = Ring.allocate(self._session.backend, self._problem)
        return self._ring

    def measure(self, sizes: Iterable[int]) -> list[Measurement]:
        """Measure all sizes; what was measured is kept even where this is interrupted."""
        found: list[Measurement] = []
        try:
            for size in sorted(sizes):
                entries = self._measure_size(size)
                for entry in entries:
                    self._smaller.setdefault(entry.key.algorithm, []).append(entry)
                found += entries
        finally:
            self._session.flush()
        return found

    def _measure_size(self, size: int) -> list[Measurement]:
        problem = self._problem.with_batch(size)
        best: dict[str, Measurement] = {}
        entered: list[_Entry] = []
        for candidate in self._session.backend.candidates(problem):
            for role in self._roles(size, candidate.algorithm):
                key = self._session.key(problem, candidate.algorithm, role)
                entry = self._enter(key, candidate.notes, best.get(role))
                if entry is None:
                    continue
                entered.append(entry)
                if self._counts(entry.measurement):
                    rivals = (entry.measurement, best.get(role, entry.measurement))
                    best[role] = min(rivals, key=_time_ns)
        return self._race(entered, best)

    def _roles(self, size: int, algorithm: str) -> tuple[str, ...]:
        if size == self._problem.batch:
            return ("alone",)
        if self._problem.op != "wgrad":
            return ("alone", "later") if algorithm == DEFAULT_ALGORITHM else ("later",)
        if self._problem.bytes_per_element < 4:
            return ("alone", "first", "later")
        return ("alone", "later")

    def _fits(self, workspace: int | None) -> bool:
        return workspace is not None and (self._limit is None or workspace <= self._limit)

    def _counts(self, measurement: Measurement) -> bool:
        """Whether a measurement is a time within the limit."""
        return measurement.time_ns is not None and self._fits(measurement.workspace_bytes)

    def _enter(
        self, key: MeasurementKey, notes: tuple[str, ...], best: Measurement | None
    ) -> _Entry | None:
        """What is known of a candidate, or a first run of it; None where it is not worth one."""
        known = self._session.cache.get(key)
        if known is not None and not self._deserves_another_try(known):
            return _Entry(known, known, None)
        smaller = self._smaller_of_the_kernel(key)
        expected = _expected_workspace(smaller, key)
        if expected > self._session.backend.memory_bytes() or not self._fits(expected):
            return None
        if best is not None and _is_hopeless(max(map(_time_ns, smaller), default=0), best):
            # no shorter than a smaller chunk was
            lost = Measurement(key, "untimed", reason=_BEATEN + best.key.algorithm, notes=notes)
            return _Entry(lost, known, None)
        return self._first_run(key, known, notes)

    def _smaller_of_the_kernel(self, key: MeasurementKey) -> list[Measurement]:
        """What the algorithm showed for smaller chunks, as far as the same kernel ran them."""
        kernel_of = self._session.backend.kernel
        kernel = kernel_of(key.problem, key.algorithm)
        return [
            entry
            for entry in self._smaller.get(key.algorithm, [])
            if kernel_of(entry.key.problem, key.algorithm) == kernel
        ]

    def _deserves_another_try(self, known: Measurement) -> bool:
        """Whether what was not timed, perhaps under another limit, may be worth it now.

        Asks what fits, never how long something took: the same cache leads to the same decisions.
        """
        if known.status != "untimed":
            return False
        if known.workspace_bytes is not None:
            return self._fits(known.workspace_bytes)
        return not self._is_still_beaten(known)

    def _is_still_beaten(self, loser: Measurement) -> bool:
        """Whether what a candidate lost against is within the limit now, too."""
        if not loser.reason.startswith(_BEATEN):
            return False
        key = replace(loser.key, algorithm=loser.reason.removeprefix(_BEATEN))
        winner = self._session.cache.get(key)
        return winner is not None and self._counts(winner)

    def _first_run(
        self, key: MeasurementKey, known: Measurement | None, notes: tuple[str, ...]
    ) -> _Entry | None:
        """Run once for the workspace and, within the limit, once for the time."""
        backend, problem = self._session.backend, key.problem
        try:
            loop = self._loop(key)
            workspace = backend.workspace_bytes(loop.run, [(problem, key.algorithm)])
            if not self._fits(workspace):
                over = Measurement(key, "untimed", workspace_bytes=workspace, notes=notes)
                return _Entry(over, known, None)
            time_ns = loop.screen_ns(backend)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
            if "memory" in reason:  # of this moment, not of the candidate: another time it may run
                return None
            return _Entry(Measurement(key, "failed", reason=reason, notes=notes), known, None)
        screened = Measurement(key, "screened", time_ns, 0, (time_ns,), workspace, notes=notes)
        return _Entry(screened, known, loop)

    def _loop(self, key: MeasurementKey) -> ChunkLoop:
        executable = self._session.backend.executable(key.problem, key.algorithm)
        return ChunkLoop(self.ring, executable, key.problem.batch, key.conditions.role)

    def _race(
        self, entered: Sequence[_Entry], best: Mapping[str, Measurement]
    ) -> list[Measurement]:
        """Time in interleaved rounds what is not hopeless next to the best of its role."""
        results, racing = [], []
        for entry in entered:
            measurement = entry.measurement
            rival = best.get(measurement.key.conditions.role)
            is_open = measurement.status == "screened" and self._counts(measurement)
            was_screened = entry.loop is None
            if not is_open or (was_screened and self._is_still_beaten(measurement)):
                results.append(self._settle(entry, measurement))
            elif rival is not None and _is_hopeless(_time_ns(measurement), rival):
                reason = _BEATEN + rival.key.algorithm
                results.append(self._settle(entry, replace(measurement, reason=reason)))
            else:
                racing.append(entry)
        return results + self._rounds(racing)

    def _settle(self, entry: _Entry, measurement: Measurement) -> Measurement:
        if measurement == entry.known:
            return self._session.reuse(measurement)
        return self._session.keep(measurement)

    def _rounds(self, racing: Sequence[_Entry]) -> list[Measurement]:
        backend = self._session.backend
        # what an earlier run with another limit had only screened has no loop yet
        loops = [entry.loop or self._loop(entry.measurement.key) for entry in racing]
        for entry, loop in zip(racing, loops, strict=True):
            if entry.loop is None:
                loop.screen_ns(backend)
        samples: list[list[int]] = [[] for _ in racing]
        for _ in range(ROUNDS):
            for taken, loop in zip(samples, loops, strict=True):
                taken.append(loop.sample_ns(backend))
        return [
            self._session.keep(
                replace(
                    entry.measurement,
                    status="ok",
                    reason="",
                    time_ns=median_ns(taken),
                    spread_ns=spread_ns(taken),
                    samples=tuple(taken),
                )
            )
            for taken, entry in zip(samples, racing, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A candidate at one size: what it showed, what the cache knew, how to run it."""

    measurement: Measurement
    known: Measurement | None
    loop: ChunkLoop | None


def _is_hopeless(time_ns: int, best: Measurement) -> bool:
    """Whether a time is too far from the best of its role to go on with."""
    return time_ns > SCREEN_FACTOR * _time_ns(best)


def _time_ns(measurement: Measurement) -> int:
    return measurement.time_ns or 0


def _expected_workspace(smaller: Sequence[Measurement], key: MeasurementKey) -> int:
    """Workspace on the line through the two largest sizes run so far; 0 where nothing was run.

    A chunk that was only run as a later one is expected to need less alone: not its own result.
    """
    same = [entry for entry in smaller if entry.key.conditions.role == key.conditions.role]
    points = []
    for entry in same or smaller:
        problem = entry.key.problem
        if entry.workspace_bytes is not None:
            own_result = 0 if same or problem.op == "wgrad" else problem.result_bytes
            points.append((problem.batch, max(0, entry.workspace_bytes - own_result)))
    if not points:
        return 0
    size, workspace = points[-1]
    if len(points) == 1:
        return workspace
    less_size, less = points[-2]
    return workspace + max(0, workspace - less) * (key.problem.batch - size) // (size - less_size)
