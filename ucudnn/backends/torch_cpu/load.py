"""Load of the machine by other processes, which perturbs times taken here."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

import torch

from ucudnn.system.forking import ForkSafeLock

# The kernel's counters advance in steps of 10 ms, too coarse for a shorter interval.
_LEAST_S = 0.2
# An average over more than this says nothing of the present; a short one is taken instead.
_MOST_S = 10.0
# Processors that others may use, beyond those that this process leaves idle, without a note.
_TOLERATED = 0.25


class _Reading(NamedTuple):
    clock_s: float
    machine_s: float  # processor time of everybody, and what a hypervisor gave to other machines
    own_s: float


class LoadMeter:
    """Measures how many processors other processes have used since the last call.

    >>> LoadMeter(Path("no/such/file")).load()
    0.0

    Args:
        path: file of the system's counters; if there is none, the load is reported as 0.
    """

    def __init__(self, path: Path = Path("/proc/stat")) -> None:
        self._path = path
        self._lock = ForkSafeLock()
        self._last = self._read()
        self._others = 0.0

    def others(self) -> float:
        """Average number of processors that other processes used recently."""
        with self._lock:
            now, last = self._read(), self._last
            if now is not None and last is not None and now.clock_s - last.clock_s > _MOST_S:
                time.sleep(_LEAST_S)
                now, last = self._read(), now
            if now is None or last is None or now.clock_s - last.clock_s < _LEAST_S:
                return self._others
            elapsed_s = now.clock_s - last.clock_s
            spent_s = (now.machine_s - last.machine_s) - (now.own_s - last.own_s)
            self._last, self._others = now, max(0.0, spent_s / elapsed_s)
            return self._others

    def load(self) -> float:
        """Processors that others use, if they take some that this process needs; else 0."""
        others = self.others()
        left = (os.cpu_count() or 1) - torch.get_num_threads()
        return round(others, 1) if others > max(0, left) + _TOLERATED else 0.0

    def _read(self) -> _Reading | None:
        try:
            line = self._path.read_text(encoding="ascii").partition("\n")[0]
            numbers = [int(text) for text in line.split()[1:9]]
            # The first line of /proc/stat sums up all processors, in clock ticks, see proc_stat(5).
            user, nice, system, _idle, _waiting, interrupts, soft, stolen = numbers
        except (OSError, ValueError):
            return None
        ticks = user + nice + system + interrupts + soft + stolen
        times = os.times()
        own_s = times.user + times.system + times.children_user + times.children_system
        return _Reading(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), own_s)
