"""Start of a rank: its process group from the variables of whatever launched it.

torchrun sets the variables that torch reads. MPI and Slurm set others, which are translated here,
and leave it to the ranks to find each other.
"""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from ucudnn import config
from ucudnn.errors import RankError

# Variables for rank and size, in the job and on the host; of several names the first that is set
# counts. The order matters: torchrun may be started by mpirun, once per host; srun may set
# PMI_RANK, too; and mpirun in a batch job of Slurm leaves the variables of that job as they are.
# SLURM_NTASKS is that of the batch job, of which an srun may start a part.
_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPICH": (
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID PMI_LOCAL_RANK SLURM_LOCALID",
        "MPI_LOCALNRANKS PMI_LOCAL_SIZE SLURM_NTASKS_PER_NODE",
    ),
    "Slurm": (
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS SLURM_NTASKS",
        "SLURM_LOCALID",
        "SLURM_NTASKS_PER_NODE",
    ),
}


@dataclass(frozen=True, slots=True)
class Job:
    """Place of this rank in its job.

    Args:
        rank: number of this process.
        size: number of processes.
        local_rank: number of this process on its host.
        launcher: "torchrun", "Open MPI", "MPICH", "Slurm" or "none".
        device: on which this rank computes.
        ranks_per_device: ranks that share it; more than 1 on a CPU only under `ucudnn launch`.
        is_trial: this run only measures speed for `ucudnn launch --ranks-per-gpu auto`, and should
            write no results.
    """

    rank: int
    size: int
    local_rank: int
    launcher: str
    device: torch.device
    ranks_per_device: int
    is_trial: bool = False


def init(backend: str | None = None, timeout_s: float = 600.0) -> Job:
    """Make the default process group of this rank, whichever launcher started it.

    Reads the variables of torchrun, Open MPI, MPICH or Slurm, sets those of torch, chooses the
    rank's GPU, and calls `init_process_group`. A process that was started by itself becomes a job
    of one rank.

    >>> job = init()  # this process alone
    >>> job.rank, job.size, torch.distributed.get_world_size()
    (0, 1, 1)
    >>> torch.distributed.destroy_process_group()

    Args:
        backend: as in `init_process_group`; None: nccl for CUDA and gloo for CPU tensors, or gloo
            for both where ranks share a GPU, because NCCL refuses that.
        timeout_s: seconds to wait for the other ranks.

    Raises:
        RankError: variables are missing, an MPI library sees another job, or a rank did not arrive
            in time.
    """
    if dist.is_initialized():
        raise RankError("there is a process group already; call init once, instead of torch's own")
    launcher, rank, size, local_rank, local_size = _read()
    timeout = timedelta(seconds=timeout_s)
    try:
        store: Store = HashStore()
        if launcher != "none":
            if launcher != "torchrun" and "MASTER_ADDR" not in os.environ:
                address = _address(launcher, rank, size, local_size)
                os.environ.update(zip(("MASTER_ADDR", "MASTER_PORT"), address, strict=True))
            numbers = map(str, (rank, size, local_rank, local_size))
            os.environ.update(zip(_LAUNCHERS["torchrun"], numbers, strict=True))
            store = _of_this_attempt(next(rendezvous("env://", timeout=timeout))[0])
        device = _choose_device(local_rank, local_size)
        sharing = _count_sharing(store, rank, size, device)
        if backend is None:
            has_nccl = device.type == "cuda" and sharing == 1
            backend = "cpu:gloo,cuda:nccl" if has_nccl else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    # A missing MASTER_PORT is a ValueError of torch.
    except (dist.DistError, ValueError) as error:
        raise RankError(
            f"rank {rank} of {size} ({launcher}) did not reach the others within {timeout_s:g} s "
            f"({str(error).splitlines()[0]}); see whether all were started, and give all of them "
            f"the host of rank 0 and a free port there in MASTER_ADDR and MASTER_PORT",
            (rank,),
        ) from error
    is_trial = config.progress_folder() is not None
    return Job(rank, size, local_rank, launcher, device, sharing, is_trial)


def _read() -> tuple[str, int, int, int, int]:
    """Launcher, rank, size, local rank and local size; a job of one where there is no launcher."""
    for launcher, names in _LAUNCHERS.items():
        if names[0] in os.environ:
            rank, size, local_rank, local_size = map(_number, names)
            if rank is None or size is None or local_rank is None or not 0 <= rank < size:
                got = ", ".join(f"{name.split()[0]}={_number(name)}" for name in names[:3])
                raise RankError(
                    f"{launcher} must tell a rank its number, the number of ranks, and its number "
                    f"on this host, got {got}; set them"
                )
            _compare_with_mpi4py(launcher, rank, size)
            # On one host, unless it says otherwise.
            return launcher, rank, size, local_rank, local_size or size
    return "none", 0, 1, 0, 1


def _number(names: str) -> int | None:
    text = next((os.environ[name] for name in names.split() if os.environ.get(name)), "")
    return int(text) if text.isdecimal() else None


def _compare_with_mpi4py(launcher: str, rank: int, size: int) -> None:
    """Refuse a job that the MPI library of this process sees as another one."""
    # The mpiexec of another MPI starts as many jobs of size 1 for the library that is loaded.
    loaded: Any = sys.modules.get("mpi4py.MPI")
    if launcher != "torchrun" and loaded is not None:
        world = loaded.COMM_WORLD
        if (world.rank, world.size) != (rank, size):
            raise RankError(
                f"{launcher} started rank {rank} of {size}, but mpi4py sees rank {world.rank} of "
                f"{world.size}: it has loaded the library of another MPI; start the job by the "
                f"mpiexec of that one, or choose the library by MPI4PY_MPIABI",
                (rank,),
            )


def _address(launcher: str, rank: int, size: int, local_size: int) -> tuple[str, str]:
    """Host of rank 0 and a port there, that every rank finds alike."""
    if local_size == size:
        # The same launcher, and no other one, is the parent of all ranks of a host.
        return "127.0.0.1", str(20000 + os.getppid() % 10000)
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise RankError(
            f"{launcher} started ranks on several hosts, which do not know where rank 0 is; set "
            f"MASTER_ADDR and MASTER_PORT for all of them, or install mpi4py"
        ) from error
    _compare_with_mpi4py(launcher, rank, size)
    with socket.socket() as free:
        free.bind(("", 0))
        address: tuple[str, str] = (socket.getfqdn(), str(free.getsockname()[1]))
    world: Any = MPI.COMM_WORLD
    host, port = world.bcast(address)
    return host, port


def _of_this_attempt(store: Store) -> Store:
    """The keys of this attempt: torchrun's store keeps those of ranks that died before a restart.

    With them gloo would connect to processes that no longer exist (pytorch#135712). Agents of
    several hosts may count restarts differently, so their jobs keep the plain store.
    """
    if os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        return store
    return PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _choose_device(local_rank: int, local_size: int) -> torch.device:
    """The GPU of this rank, made current; neighbours share one if there are fewer GPUs."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    # With a launcher that shows each rank its own GPU alone this is that one.
    shared = local_rank * count // max(local_size, local_rank + 1)
    device = torch.device("cuda", local_rank if local_size <= count else shared)
    torch.cuda.set_device(device)
    return device


def _count_sharing(store: Store, rank: int, size: int, device: torch.device) -> int:
    """The number of ranks on this one's device, which becomes part of every measurement's key."""
    if device.type == "cpu":
        # Only `ucudnn launch` knows; ranks that others start use each other's cores.
        return config.ranks_per_device()
    # By UUID, because a launcher may show each rank another GPU as number 0.
    own = f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"
    store.set(f"device/{rank}", own)
    sharing = [store.get(f"device/{other}") for other in range(size)].count(own.encode())
    config.share_device(sharing)
    return sharing
