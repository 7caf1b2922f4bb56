"""The devices that measure together, and the tasks that are spread over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import torch

from ucudnn.backends import AbstractBackend
from ucudnn.backends.recorded import RecordedBackend
from ucudnn.cache import AbstractCache
from ucudnn.errors import ConfigError
from ucudnn.system.forking import ForkSafeLock
from ucudnn.tuning.effort import Effort
from ucudnn.tuning.session import Session

Task = Callable[[Session], None]


class Devices:
    """Sessions of one or several devices of one kind.

    Args:
        sessions: one per device.
        on_run: called whenever something was measured or found.
    """

    def __init__(self, sessions: Sequence[Session], on_run: Callable[[], None]) -> None:
        self._sessions = list(sessions)
        for session in self._sessions:
            session.on_run = on_run

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def first(self) -> Session:
        """The first session, for questions that all answer alike, such as the algorithms."""
        return self._sessions[0]

    @property
    def is_recorded(self) -> bool:
        """True if a recording is replayed instead of measuring."""
        return isinstance(self.first.backend, RecordedBackend)

    @property
    def is_busy(self) -> bool:
        """True if other processes used the processors when tuning began."""
        return any(session.is_busy for session in self._sessions)

    @property
    def measured(self) -> int:
        """Candidates measured so far."""
        return sum(session.measured for session in self._sessions)

    @property
    def reused(self) -> int:
        """Candidates found in the cache so far."""
        return sum(session.reused for session in self._sessions)

    def flush(self) -> None:
        """Write new measurements to the cache, where every session finds them."""
        for session in self._sessions:
            session.flush()

    def close(self) -> None:
        """Write the remaining measurements and end the workers."""
        for session in self._sessions:
            session.close()

    def stop_at(self, deadline: float) -> None:
        """Measure nothing after a `time.monotonic`."""
        for session in self._sessions:
            session.until = session.race_until = deadline

    def spread(self, tasks: Iterable[Task]) -> None:
        """Run tasks in their order, each on the next device that is free."""
        # In this thread, with its own grad mode and where Ctrl-C arrives.
        if len(self._sessions) == 1:
            for task in tasks:
                task(self.first)
            return
        # Tasks take very different times, so each goes to the device that is free first.
        free: SimpleQueue[Session] = SimpleQueue()
        for session in self._sessions:
            free.put(session)

        def run(task: Task) -> None:
            session = free.get()
            try:
                # Grad mode is a setting of each thread, and is on in a new one.
                with torch.no_grad():
                    task(session)
            finally:
                free.put(session)

        with ThreadPoolExecutor(len(self._sessions)) as pool:
            futures = [pool.submit(run, task) for task in tasks]
            try:
                # Raises what the task raised.
                for future in futures:
                    future.result()
            except BaseException:
                # The pool waits for its threads on the way out: those of the other devices end at
                # their next candidate, so that the error is seen soon.
                pool.shutdown(wait=False, cancel_futures=True)
                self.stop_at(0.0)
                raise


def open_devices(
    backends: Sequence[AbstractBackend],
    cache: AbstractCache,
    effort: Effort,
    deadline: float | None,
    remeasure: bool,
    on_run: Callable[[], None],
) -> Devices:
    """Open a session per device; if there are several, each measures in its own process.

    Args:
        backends: one per device.
        cache: where measurements are kept.
        effort: how precisely times are taken.
        deadline: `time.monotonic` after which nothing is measured, None for any.
        remeasure: measure everything anew, even if it is in the cache.
        on_run: called whenever something was measured or found.

    Raises:
        ConfigError: the devices are of several kinds.
    """
    _require_one_kind(backends)
    # Sessions of several devices use one cache, each from a thread of its own.
    lock = ForkSafeLock()
    sessions = [
        Session(
            backend,
            cache,
            until=deadline,
            race_until=deadline,
            # In one process threads would be timed with what they wait for each other, and torch
            # has one profiler of memory for all of them.
            isolated=backend.in_worker or len(backends) > 1,
            effort=effort,
            lock=lock,
            remeasure=remeasure,
        )
        for backend in backends
    ]
    return Devices(sessions, on_run)


def _require_one_kind(backends: Sequence[AbstractBackend]) -> None:
    """Refuse devices whose measurements cannot be mixed.

    Raises:
        ConfigError: they differ in hardware or versions.
    """
    # A plan states one device and one set of versions for all times that it rests on.
    first = backends[0]
    for other in backends[1:]:
        if (other.device(), other.software()) != (first.device(), first.software()):
            raise ConfigError(
                f"devices that measure together must be of one kind with one set of versions, got "
                f"{first.device()} and {other.device()}; leave one of them out"
            )
