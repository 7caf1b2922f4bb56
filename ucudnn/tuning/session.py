"""What stays the same while one device measures: backend, cache, worker, time left, and counts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from time import monotonic

from ucudnn.axis import AbstractAxis
from ucudnn.backends import AbstractBackend
from ucudnn.benchmark.bench import AbstractBench, LocalBench
from ucudnn.benchmark.protocol import PROTOCOL
from ucudnn.benchmark.worker import Worker, WorkerBench
from ucudnn.cache import AbstractCache
from ucudnn.measurement import Measurement, MeasurementKey
from ucudnn.problem import Problem


@dataclass
class Session:
    """What stays the same while one device measures: the backend, the cache, and the counts.

    Args:
        backend: where candidates come from.
        cache: where measurements are kept.
        on_run: called whenever something was measured or found, to show progress.
        until: when to stop, by `time.monotonic`; None: when everything is known.
        isolated: measure in a process of its own.
        lock: held while the cache is used, where several sessions share it.
    """

    backend: AbstractBackend
    cache: AbstractCache
    on_run: Callable[[], None] = lambda: None
    until: float | None = None
    isolated: bool = False
    lock: AbstractContextManager[object] = field(default_factory=nullcontext)
    measured: int = 0
    reused: int = 0
    _fresh: dict[MeasurementKey, Measurement] = field(default_factory=dict)
    _taken: set[MeasurementKey] = field(default_factory=set)
    _found: set[MeasurementKey] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._device, self._software = self.backend.device(), self.backend.software()
        self._conditions = self.backend.conditions()
        self._worker = Worker(self.backend) if self.isolated else None
        self._kernel = lru_cache(maxsize=None)(self._find_kernel)

    def key(self, problem: Problem, algorithm: str, role: str = "alone") -> MeasurementKey:
        """The key of a candidate that this session would measure."""
        conditions = replace(self._conditions, role=role)
        return MeasurementKey(
            problem, algorithm, self._device, self._software, conditions, PROTOCOL
        )

    def kernel_of(self, problem: Problem, algorithm: str) -> str | None:
        """Which kernel an algorithm runs a problem by, None where it does not."""
        return self._kernel(problem, algorithm)

    def _find_kernel(self, problem: Problem, algorithm: str) -> str | None:
        if self.backend.refusal(problem, algorithm) is not None:
            return None
        return self.backend.kernel(problem, algorithm)

    def bench(self, axis: AbstractAxis) -> AbstractBench:
        """Where candidates of a kernel run: in this process, or in the session's worker."""
        if self._worker is not None:
            return WorkerBench(self._worker, axis)
        return LocalBench(self.backend, axis)

    @property
    def is_over(self) -> bool:
        """Whether the time to measure in is over."""
        return self.until is not None and monotonic() >= self.until

    def find(self, key: MeasurementKey) -> Measurement | None:
        """What was measured, now or ever."""
        if key in self._fresh:
            return self._fresh[key]
        with self.lock:
            return self.cache.get(key)

    def reuse(self, measurement: Measurement) -> Measurement:
        """Count a measurement that was not taken again."""
        if measurement.key not in self._taken and measurement.key not in self._found:
            self._found.add(measurement.key)
            self.reused += 1
            self.on_run()
        return measurement

    def keep(self, measurement: Measurement) -> Measurement:
        """Count a new measurement; `flush` writes it to the cache."""
        self._fresh[measurement.key] = measurement
        self.measured += measurement.key not in self._taken
        self._taken.add(measurement.key)
        self.on_run()
        return measurement

    def flush(self) -> None:
        """Write new measurements to the cache, in one go."""
        if self._fresh:
            with self.lock:
                self.cache.put(self._fresh.values())
        self._fresh = {}

    def close(self) -> None:
        """Write what is left and end the worker."""
        try:
            self.flush()
        finally:
            if self._worker is not None:
                self._worker.close()
