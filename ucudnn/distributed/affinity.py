"""CPU affinity of ranks that share a host: disjoint cores, so that times are not perturbed."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class CpuSet:
    """Logical CPUs on which one rank at a time measures.

    Args:
        cpus: their numbers, as the operating system counts them.
        ranks: the ranks that measure there, in turn if there are several.
    """

    cpus: tuple[int, ...]
    ranks: tuple[int, ...]


def host_name() -> str:
    """Identifier of the running kernel, equal in all containers of one host."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


def cores() -> list[list[int]]:
    """Logical CPUs that this process may use, grouped by physical core."""
    by_core: dict[str, list[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        # Logical CPUs of one core share its units, so a core must not be given to two ranks.
        core = siblings.read_text().strip() if siblings.exists() else str(cpu)
        by_core.setdefault(core, []).append(cpu)
    return list(by_core.values())


def assign_cpus(
    rank: int, cores_by_rank: Mapping[int, Sequence[Sequence[int]]], threads: int
) -> CpuSet:
    """Assign CPUs to one of the ranks of a host: whole cores, at least one for each thread.

    Ranks with the same cores divide them. A rank that its launcher has bound to other cores keeps
    those. If there are too few cores, several ranks get the same set and take turns.

    >>> four = [[0], [1], [2], [3]]
    >>> assign_cpus(1, {0: four, 1: four}, threads=2)
    CpuSet(cpus=(2, 3), ranks=(1,))
    >>> assign_cpus(3, {rank: four for rank in range(4)}, threads=2)
    CpuSet(cpus=(2, 3), ranks=(1, 3))

    Args:
        rank: the rank to assign CPUs to.
        cores_by_rank: for each rank of the host, the result of `cores` there.
        threads: number of threads that a rank measures with.
    """
    own = [list(core) for core in cores_by_rank[rank]]
    peers = [other for other in sorted(cores_by_rank) if list(cores_by_rank[other]) == own]
    # As many sets as there are ranks, or as have a core for every thread, but at least one.
    count = max(1, min(len(peers), len(own) // max(1, threads)))
    index = peers.index(rank) % count
    part = own[index * len(own) // count : (index + 1) * len(own) // count]
    return CpuSet(tuple(sorted(cpu for core in part for cpu in core)), tuple(peers[index::count]))


@contextmanager
def bound_to(cpus: Sequence[int]) -> Iterator[None]:
    """Bind every thread of this process to some CPUs, and restore their affinity at the end.

    >>> first = cores()[0]
    >>> with bound_to(first):
    ...     cores() == [first]
    True

    Args:
        cpus: their numbers, as the operating system counts them.
    """
    before = {thread: os.sched_getaffinity(thread) for thread in _threads()}
    whole = os.sched_getaffinity(0)
    try:
        # Affinity is a property of a thread: the threads that torch has already started do not
        # follow the main thread.
        for thread in before:
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setaffinity(thread, cpus)
        yield
    finally:
        for thread in _threads():
            with suppress(ProcessLookupError):
                os.sched_setaffinity(thread, before.get(thread, whole))


def _threads() -> list[int]:
    return [int(path.name) for path in Path("/proc/self/task").iterdir()]
