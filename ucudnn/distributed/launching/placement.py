"""GPU, cores, threads and workspace of each rank of a host."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ucudnn.config import rank_variables
from ucudnn.distributed.affinity import assign_cpus
from ucudnn.errors import UnsupportedError

_LIST_GPUS = (
    "import torch\n"
    "for i in range(torch.cuda.device_count()):\n"
    "    print('GPU-' + str(torch.cuda.get_device_properties(i).uuid))"
)


@dataclass(frozen=True, slots=True)
class Place:
    """Place of one rank.

    Args:
        cpus: logical CPUs to which it is bound; none: wherever the system schedules it.
        environment: variables that it gets.
    """

    cpus: tuple[int, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def place(
    ranks_per_device: int,
    gpus: Sequence[str],
    cores: Sequence[Sequence[int]],
    device_workspace: int | None = None,
    client: Mapping[str, str] | None = None,
    threads: str | None = None,
    progress: str | None = None,
) -> list[Place]:
    """Place the ranks of this host: neighbours share a GPU, or all share the processor.

    >>> [rank.cpus for rank in place(2, [], [[0], [1], [2], [3]])]
    [(0, 1), (2, 3)]
    >>> [rank.environment["CUDA_VISIBLE_DEVICES"] for rank in place(2, ["GPU-a", "GPU-b"], [[0]])]
    ['GPU-a', 'GPU-a', 'GPU-b', 'GPU-b']

    Args:
        ranks_per_device: number of ranks that share a GPU, or the processor.
        gpus: UUIDs of the GPUs; none: the ranks compute on the CPU.
        cores: logical CPUs of each core.
        device_workspace: bytes of workspace that the ranks of a device may use together.
        client: variables of the MPS daemon, if there is one.
        threads: OMP_NUM_THREADS, where it is given; None: as many as a rank has cores.
        progress: folder where ranks count their samples, in a trial.
    """
    ranks = ranks_per_device * max(1, len(gpus))
    # Equal parts: in every step all ranks wait for the slowest, and one plan serves all.
    limit = None if device_workspace is None else device_workspace // ranks_per_device
    shared = {
        **rank_variables(ranks_per_device, limit, progress),
        "OMP_NUM_THREADS": threads or str(max(1, len(cores) // ranks)),
        **(client or {}),
    }
    if not gpus:
        all_cores = dict.fromkeys(range(ranks), cores)
        sets = [assign_cpus(rank, all_cores, threads=1).cpus for rank in range(ranks)]
        return [Place(cpus, shared) for cpus in sets]
    # A rank sees its own GPU alone, as number 0, like torchrun's --virtual-local-rank. It is not
    # bound to cores: which of them are near its GPU the operating system knows better.
    return [
        Place((), {**shared, "CUDA_VISIBLE_DEVICES": gpu, "LOCAL_RANK": "0"})
        for gpu in gpus
        for _ in range(ranks_per_device)
    ]


def list_gpus() -> tuple[str, ...]:
    """UUIDs of the GPUs that torch sees, in its order.

    Raises:
        UnsupportedError: torch cannot tell.
    """
    if not torch.backends.cuda.is_built():
        return ()
    # In a process of its own: the launcher must not hold memory of a GPU for as long as it lives.
    listed = subprocess.run(  # noqa: S603 - our own interpreter
        [sys.executable, "-c", _LIST_GPUS],
        check=False,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
        text=True,
    )
    if listed.returncode != 0:
        lines = listed.stderr.strip().splitlines() or ["no message"]
        raise UnsupportedError(f"torch cannot list the GPUs of this machine: {lines[-1]}")
    return tuple(listed.stdout.split())
