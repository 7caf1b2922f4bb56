"""State of measuring on one device: backend, cache, worker, deadlines and counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from ucudnn.backends import AbstractBackend, Cost, DeviceState, Roofline
from ucudnn.backends.recorded import RecordedBackend
from ucudnn.benchmark.bench import AbstractBench, How, LocalBench
from ucudnn.benchmark.failures import CANDIDATE_ERRORS, is_out_of_memory
from ucudnn.benchmark.protocol import PROTOCOL
from ucudnn.benchmark.worker import Worker, WorkerBench
from ucudnn.cache import AbstractCache, MemoryCache
from ucudnn.cache.base import key_texts
from ucudnn.errors import PlanError
from ucudnn.kernels.deadline import EFFORTS, Deadline, EffortLimits
from ucudnn.kernels.splits import ImplementationOf
from ucudnn.measurement import Measurement, MeasurementKey, Role, Subject
from ucudnn.problem import Problem
from ucudnn.split import Split

if TYPE_CHECKING:
    from ucudnn.axis import AbstractAxis

# Fields of a key that differ among the entries of one kernel. If a recording lacks a kernel, the
# error says in which of the other fields the nearest entry differs.
_ANY = ("algorithm", "conditions.role", "protocol")
# A roofline is cached as the times of this many operations and of this many bytes, see `Subject`.
_UNIT = 10**12
# Length of a sample of chunks on a GPU: other processes on the host do not lengthen its kernels.
_GPU_SAMPLE_NS = 2_000_000


@dataclass
class Session:
    """State of measuring on one device: the backend, the cache, deadlines and counts."""

    backend: AbstractBackend
    cache: AbstractCache
    # The worker to measure in if the backend needs one, which goes on after the session. None: one
    # that ends with the session.
    worker: Worker | None = None
    # Called after each measurement, new or found in the cache, to show progress.
    on_run: Callable[[], None] = lambda: None
    # The kernel that is tuned now, for people; "": none.
    at_work: str = ""
    # When measuring chunks stops, and when timing whole calls stops.
    until: Deadline = field(default_factory=Deadline.never)
    race_until: Deadline = field(default_factory=Deadline.never)
    effort: EffortLimits = EFFORTS["thorough"]
    # True: measure everything anew, even if it is in the cache.
    remeasure: bool = False
    # Nothing begins that is expected to end after this moment.
    end: Deadline = field(default_factory=Deadline.never)
    measured: int = 0
    reused: int = 0
    _fresh: dict[MeasurementKey, Measurement] = field(default_factory=dict)
    _taken: set[MeasurementKey] = field(default_factory=set)
    _found: set[MeasurementKey] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._device, self._software = self.backend.device(), self.backend.software()
        self._conditions = self.backend.conditions()
        # True: what is not in the cache is measured. False: a recording takes the cache's place.
        self.can_measure, self._protocol = True, PROTOCOL
        if isinstance(self.backend, RecordedBackend):
            self.can_measure, self._protocol = False, self.backend.protocol
            self.cache = MemoryCache()
            self.cache.put(self.backend.measurements)
        self._worker = (self.worker or Worker()) if self.backend.in_worker else None
        self._started_before_s = 0.0 if self._worker is None else self._worker.started_s
        # The load is read once, so that a session uses either all or none of the measurements that
        # were taken on a busy machine.
        self.is_busy = self.backend.state().load > 0
        # Name of the implementation by which an algorithm computes a problem; None if it cannot.
        self.implementation_of: ImplementationOf = lru_cache(None)(self._implementation_of)
        self.cost: Callable[[Problem, str], Cost | None] = lru_cache(None)(self.backend.cost)

    def key(
        self,
        problem: Problem,
        algorithm: str,
        role: Role = Role.ALONE,
        subject: Subject = Subject.CHUNK,
        split: Split | None = None,
        race: str = "",
    ) -> MeasurementKey:
        """The key under which this session would keep a measurement."""
        conditions = replace(self._conditions, role=role)
        return MeasurementKey(
            problem,
            algorithm,
            self._device,
            self._software,
            conditions,
            self._protocol,
            subject,
            split,
            race,
        )

    def _machine_key(self, subject: Subject, dtype: str = "float32") -> MeasurementKey:
        """The key of a peak rate of the machine, which depends on a dtype and on no problem."""
        problem = Problem("fprop", 1, 1, 1, (1,), (1,), dtype=dtype)
        return self.key(problem, "", subject=subject)

    def _implementation_of(self, problem: Problem, algorithm: str) -> str | None:
        if self.backend.refusal(problem, algorithm) is not None:
            return None
        return self.backend.implementation_of(problem, algorithm)

    def roofline(self, dtype: str) -> Roofline | None:
        """Peak rates of the machine; None if they are not known or the effort does not use them.

        They are cached like measurements, so that a second tune decides as the first did.
        """
        # With the effort "thorough" no algorithm is ruled out by a bound.
        if not self.effort.ignored_share:
            return None
        keys = [self._machine_key(one, dtype) for one in (Subject.OPERATIONS, Subject.TRAFFIC)]
        if not all(map(self.find, keys)):
            found = None if self.is_over else self._measured_roofline(dtype)
            if found is None:
                return None
            for key, speed in zip(keys, found[:2], strict=True):
                time_ns = round(_UNIT * 1e9 / speed)
                self.note(Measurement(key, "ok", time_ns, 0, workspace_bytes=found.cached_bytes))
        # The numbers are taken from their measurements, so that this run computes with the same
        # rounded numbers as a run that finds them in the cache.
        operations, moved = filter(None, map(self.find, keys))
        per_s = [_UNIT * 1e9 / (entry.time_ns or 1) for entry in (operations, moved)]
        return Roofline(per_s[0], per_s[1], moved.workspace_bytes or 0)

    def _measured_roofline(self, dtype: str) -> Roofline | None:
        try:
            return self.backend.roofline(dtype)
        except CANDIDATE_ERRORS as error:
            # Too little memory for operands that exceed the caches is no reason not to tune.
            if not is_out_of_memory(error):
                raise
            return None

    @property
    def started_s(self) -> float:
        """Seconds that starting the worker's processes took in this session."""
        return 0.0 if self._worker is None else self._worker.started_s - self._started_before_s

    def bench(self, axis: AbstractAxis) -> AbstractBench:
        """Bench of a kernel's candidates, in this process or in the session's worker."""
        if self._worker is not None:
            return WorkerBench(self._worker, self.backend, axis, self.how)
        return LocalBench(self.backend, axis, how=self.how)

    @property
    def how(self) -> How:
        """How candidates are timed on this device now."""
        chunks = self.effort.chunks
        if self.is_on_gpu:
            chunks = replace(chunks, sample_ns=_GPU_SAMPLE_NS)
        return How(chunks, self.effort.wholes, self.until.at_s, self.race_until.at_s)

    @property
    def is_on_gpu(self) -> bool:
        """True if the device is a GPU, whose times vary little."""
        return self._device.type == "cuda"

    def stop_at(self, chunks: Deadline, races: Deadline | None = None) -> None:
        """Set when measuring chunks and timing whole calls stop; None: both at the same moment."""
        self.until, self.race_until = chunks, chunks if races is None else races

    @property
    def is_over(self) -> bool:
        """True if the time for measuring chunks is over."""
        return self.until.is_over

    def find(self, key: MeasurementKey) -> Measurement | None:
        """The known measurement of a key; None if there is none, or if it must be taken anew.

        With `remeasure`, measurements of other sessions are taken anew. Measurements that were
        taken while other processes used the machine are taken anew, unless the machine was busy
        when this session began.
        """
        # A measurement that was not written to the cache yet is newer than the one in the cache.
        if key in self._fresh:
            return self._fresh[key]
        known = self.cache.get(key)
        # A measurement that this session took itself is not taken again.
        if known is None or key in self._taken or not self.can_measure:
            return known
        is_stale = self.remeasure or (known.is_perturbed and not self.is_busy)
        return None if is_stale else known

    def begin(self, at_work: Problem | str) -> None:
        """Show that a kernel is tuned from now on; "": none."""
        self.at_work = str(at_work)
        self.on_run()

    def missing(self, problem: Problem) -> PlanError:
        """The error for a kernel without candidates: it says how the nearest entry differs."""
        texts = key_texts(self.key(problem, ""))
        wanted = {name: texts[name] for name in texts if name not in _ANY}
        return PlanError(
            f"the recording of {self._device} has no measurement of {problem} at any of the "
            f"micro-batches allowed; {self.cache.explain(wanted)}"
        )

    def reuse(self, measurement: Measurement) -> Measurement:
        """Count a known measurement that need not be taken again."""
        if measurement.key not in self._taken and measurement.key not in self._found:
            self._found.add(measurement.key)
            self.reused += 1
            self.on_run()
        return measurement

    def keep(self, measurement: Measurement) -> Measurement:
        """Count a new measurement; `flush` writes it to the cache."""
        self._fresh[measurement.key] = measurement
        # A candidate that was run once and later timed in full is counted only once.
        self.measured += measurement.key not in self._taken
        self._taken.add(measurement.key)
        self.on_run()
        return measurement

    def state(self) -> DeviceState:
        """What perturbs times now; empty with a worker, whose rounds note it themselves."""
        return self.backend.state() if self._worker is None else DeviceState()

    def note(self, measurement: Measurement) -> None:
        """Keep a measurement for the cache without counting it, because it is of no candidate."""
        self._fresh[measurement.key] = measurement

    def flush(self) -> None:
        """Write new measurements to the cache, in one step.

        Measurements from a busy machine never replace measurements from a quiet one.
        """
        if self._fresh:
            self.cache.put([entry for entry in self._fresh.values() if self._counts(entry)])
        self._fresh = {}

    def _counts(self, entry: Measurement) -> bool:
        known = self.cache.get(entry.key) if entry.is_perturbed else None
        return known is None or entry.may_replace(known)

    def close(self) -> None:
        """Write the remaining measurements, and end the worker or let it rest."""
        try:
            # If the cache cannot be written, as on a full disk, the worker must be ended all the
            # same.
            self.flush()
        finally:
            if self.worker is not None:
                self.worker.rest()
            elif self._worker is not None:
                self._worker.close()
