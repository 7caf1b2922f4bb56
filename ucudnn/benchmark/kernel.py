"""Measure every candidate of one kernel, through the cache: workspace first, then time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from ucudnn.backends import AbstractBackend
from ucudnn.benchmark.protocol import PROTOCOL, ROUNDS, SCREEN_FACTOR, ChunkLoop, Ring
from ucudnn.benchmark.statistics import median_ns, spread_ns
from ucudnn.cache import AbstractCache
from ucudnn.measurement import Measurement, MeasurementKey
from ucudnn.plan import DEFAULT_ALGORITHM
from ucudnn.problem import Problem


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

    def find(self, key: MeasurementKey) -> Measurement | None:
        """What the cache knows of a candidate."""
        return self.cache.get(key)

    def count_reused(self) -> None:
        """Count a measurement that was not taken again."""
        self.reused += 1
        self.on_run()

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

    A size whose workspace would exceed the limit, judged from the two smaller sizes, is never run:
    workspace grows with the chunk. What one run shows to be over the limit is not timed.
    """

    def __init__(self, session: Session, problem: Problem, limit: int | None) -> None:
        self._session = session
        self._problem = problem
        self._limit = limit
        self._ring: Ring | None = None
        self._workspaces: dict[tuple[str, str], list[tuple[int, int]]] = {}

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
                found += self._measure_size(size)
        finally:
            self._session.flush()
        return found

    def _measure_size(self, size: int) -> list[Measurement]:
        problem = self._problem.with_batch(size)
        done: list[Measurement] = []
        screened: list[tuple[Measurement, ChunkLoop | None]] = []
        for candidate in self._session.backend.candidates(problem):
            for role in self._roles(size, candidate.algorithm):
                key = self._session.key(problem, candidate.algorithm, role)
                known = self._session.find(key)
                if known is None:
                    first, loop = self._first_run(key, candidate.notes)
                elif known.status == "untimed" and self._fits(known.workspace_bytes):
                    first, loop = self._first_run(key, candidate.notes)
                else:
                    first, loop = known, None
                if first is None:
                    continue
                self._note_workspace(first)
                if first.status == "screened":
                    screened.append((first, loop))
                else:
                    done.append(first)
                    self._count(first, known)
        return done + self._race(screened, done)

    def _count(self, measurement: Measurement, known: Measurement | None) -> None:
        if measurement is known:
            self._session.count_reused()
        else:
            self._session.keep(measurement)

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

    def _note_workspace(self, measurement: Measurement) -> None:
        if measurement.workspace_bytes is not None:
            key = (measurement.key.algorithm, measurement.key.conditions.role)
            point = (measurement.key.problem.batch, measurement.workspace_bytes)
            self._workspaces.setdefault(key, []).append(point)

    def _expected_workspace(self, key: MeasurementKey) -> int:
        """Workspace on the line through the two largest sizes run so far, 0 where unknown."""
        points = self._workspaces.get((key.algorithm, key.conditions.role), [])
        if not points:
            return 0
        size, workspace = points[-1]
        if len(points) == 1:
            return workspace
        smaller, less = points[-2]
        slope = max(0, workspace - less) / (size - smaller)
        return workspace + int(slope * (key.problem.batch - size))

    def _first_run(
        self, key: MeasurementKey, notes: tuple[str, ...]
    ) -> tuple[Measurement | None, ChunkLoop | None]:
        """Run once for the workspace and once for the time, as far as the limit allows."""
        session, problem = self._session, key.problem
        expected = self._expected_workspace(key)
        if not self._fits(expected) or expected > session.backend.memory_bytes():
            return None, None
        try:
            executable = session.backend.executable(problem, key.algorithm)
            loop = ChunkLoop(self.ring, executable, problem.batch, key.conditions.role)
            part = (problem, key.algorithm)
            workspace = session.backend.workspace_bytes(loop.run, [part])
            if not self._fits(workspace):
                return Measurement(key, "untimed", workspace_bytes=workspace, notes=notes), None
            time_ns = loop.screen_ns(session.backend)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
            return Measurement(key, "failed", reason=reason, notes=notes), None
        screened = Measurement(key, "screened", time_ns, 0, (time_ns,), workspace, notes=notes)
        return screened, loop

    def _race(
        self,
        screened: Sequence[tuple[Measurement, ChunkLoop | None]],
        done: Sequence[Measurement],
    ) -> list[Measurement]:
        """Time in interleaved rounds what is not hopeless next to the best of its role."""
        best: dict[str, int] = {}
        for measurement in [*done, *(entry for entry, _ in screened)]:
            if measurement.time_ns is not None and self._fits(measurement.workspace_bytes):
                role = measurement.key.conditions.role
                best[role] = min(best.get(role, measurement.time_ns), measurement.time_ns)
        results, racing = [], []
        for measurement, loop in screened:
            assert measurement.time_ns is not None
            slowest = SCREEN_FACTOR * best.get(measurement.key.conditions.role, 0)
            if measurement.time_ns <= slowest and self._fits(measurement.workspace_bytes):
                racing.append((measurement, loop or self._loop(measurement)))
            else:
                results.append(measurement)
                self._count(measurement, None if loop else measurement)
        return results + self._rounds(racing)

    def _loop(self, measurement: Measurement) -> ChunkLoop:
        """Build a candidate again that an earlier run with another limit had only screened."""
        key = measurement.key
        executable = self._session.backend.executable(key.problem, key.algorithm)
        loop = ChunkLoop(self.ring, executable, key.problem.batch, key.conditions.role)
        loop.screen_ns(self._session.backend)
        return loop

    def _rounds(self, racing: Sequence[tuple[Measurement, ChunkLoop]]) -> list[Measurement]:
        samples: list[list[int]] = [[] for _ in racing]
        for _ in range(ROUNDS):
            for taken, (_, loop) in zip(samples, racing, strict=True):
                taken.append(loop.sample_ns(self._session.backend))
        return [
            self._session.keep(
                replace(
                    measurement,
                    status="ok",
                    time_ns=median_ns(taken),
                    spread_ns=spread_ns(taken),
                    samples=tuple(taken),
                )
            )
            for taken, (measurement, _) in zip(samples, racing, strict=True)
        ]


