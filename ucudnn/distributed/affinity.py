"""Processors for ranks that share a host: disjoint while they measure, or they time each other."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Lane:
    """Processors on which one rank measures at a time.

    Args:
        processors: their numbers, as the system counts them.
        ranks: who measures there, in turn where there are several.
    """

    processors: tuple[int, ...]
    ranks: tuple[int, ...]


def host_name() -> str:
    """Equal in all processes on one running kernel, in whatever containers they are."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


def cores() -> list[list[int]]:
    """The processors that this process may use, those of one core together."""
    together: dict[str, list[int]] = {}
    for processor in sorted(os.sched_getaffinity(0)):
        topology = Path(f"/sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list")
        core = topology.read_text().strip() if topology.exists() else str(processor)
        together.setdefault(core, []).append(processor)
    return list(together.values())


def lane_of(rank: int, cores_by_rank: Mapping[int, Sequence[Sequence[int]]], threads: int) -> Lane:
    """The processors for one of the ranks of a host: whole cores, a core for each of its threads.

    Ranks that a launcher has bound elsewhere keep their own. Where there are too few cores, ranks
    share a lane and take turns.

    >>> four = [[0], [1], [2], [3]]
    >>> lane_of(1, {0: four, 1: four}, threads=2)
    Lane(processors=(2, 3), ranks=(1,))
    >>> lane_of(3, {rank: four for rank in range(4)}, threads=2)
    Lane(processors=(2, 3), ranks=(1, 3))

    Args:
        rank: whose lane.
        cores_by_rank: for each rank of the host what `cores` said there.
        threads: that a rank measures with.
    """
    own = [list(core) for core in cores_by_rank[rank]]
    mates = [other for other in sorted(cores_by_rank) if list(cores_by_rank[other]) == own]
    count = max(1, min(len(mates), len(own) // max(1, threads)))
    index = mates.index(rank) % count
    share = own[index * len(own) // count : (index + 1) * len(own) // count]
    processors = tuple(sorted(processor for core in share for processor in core))
    return Lane(processors, tuple(mates[index::count]))


@contextmanager
def bound_to(processors: Sequence[int]) -> Iterator[None]:
    """Bind every thread of this process, and free them again at the end.

    Each by itself: those that torch has started already do not follow the main thread.
    """
    before = {thread: os.sched_getaffinity(thread) for thread in _threads()}
    whole = os.sched_getaffinity(0)
    try:
        for thread in before:
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setaffinity(thread, processors)
        yield
    finally:
        for thread in _threads():
            with suppress(ProcessLookupError):
                os.sched_setaffinity(thread, before.get(thread, whole))


def _threads() -> list[int]:
    return [int(path.name) for path in Path("/proc/self/task").iterdir()]
