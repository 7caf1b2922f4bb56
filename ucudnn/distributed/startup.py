"""Start a rank: make its process group from the environment variables of its launcher.

torchrun sets the variables that torch reads. MPI and Slurm set other variables, which this module
translates, and leave it to the ranks to find each other.
"""

from __future__ import annotations

import os
import re
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

# Environment variables with a rank's number in the job, the number of ranks in the job, its number
# on its host, and the number of ranks on its host. The columns are for torchrun, Open MPI, MPICH
# and Slurm. The first column whose variable in the first row is set is used. Those of several
# launchers may be set: mpirun may start torchrun once per host, and passes on the variables of a
# Slurm batch job. If a string has several names, the first that is set is used. Slurm's names are
# in the column of MPICH, too, because srun may set PMI_RANK. SLURM_STEP_NUM_TASKS comes before
# SLURM_NTASKS, because srun may start only a part of the tasks of a batch job.
_VARIABLES = (
    ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"),
    ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS SLURM_NTASKS"),
    (
        "LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "MPI_LOCALRANKID PMI_LOCAL_RANK SLURM_LOCALID",
        "SLURM_LOCALID",
    ),
    (
        "LOCAL_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "MPI_LOCALNRANKS PMI_LOCAL_SIZE SLURM_STEP_TASKS_PER_NODE",
        "SLURM_STEP_TASKS_PER_NODE SLURM_TASKS_PER_NODE",
    ),
)


@dataclass(frozen=True, slots=True)
class Job:
    """Place of this rank in its job.

    Args:
        rank: number of this process.
        size: number of processes.
        local_rank: number of this process on its host.
        device: the device on which this rank computes.
        is_trial: True if this run only measures speed for `ucudnn launch --ranks-per-gpu auto`, and
            should write no results.
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    is_trial: bool = False


def init(backend: str | None = None, timeout_s: float = 600.0) -> Job:
    """Make the default process group of this rank, whichever launcher started it.

    Reads the variables of torchrun, Open MPI, MPICH or Slurm, sets those that torch reads, chooses
    the rank's GPU, and calls `init_process_group`. A process that no launcher started becomes a job
    of one rank.

    >>> job = init()  # this process alone
    >>> job.rank, job.size, torch.distributed.get_world_size()
    (0, 1, 1)
    >>> torch.distributed.destroy_process_group()

    Args:
        backend: as in `init_process_group`; None: nccl for tensors on GPUs and gloo for tensors on
            CPUs. If ranks share a GPU, which NCCL refuses, or there is no GPU: gloo for all.
        timeout_s: seconds to wait for the other ranks.

    Raises:
        RankError: there is a process group already, variables are missing, an MPI library sees
            another job, or a rank did not arrive in time.
    """
    if dist.is_initialized():
        raise RankError("there is a process group already; call init once, instead of torch's own")
    place = _read()
    rank, size, local_rank, local_size = place or (0, 1, 0, 1)
    timeout = timedelta(seconds=timeout_s)
    try:
        store = _open_store(place, timeout) if place else HashStore()
        device = _choose_device(local_rank, local_size)
        sharing = _count_sharing(store, rank, size, device)
        if backend is None:
            has_nccl = device.type == "cuda" and sharing == 1
            backend = "cpu:gloo,cuda:nccl" if has_nccl else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    # If MASTER_PORT is missing, torch raises a ValueError.
    except (dist.DistError, ValueError) as error:
        raise RankError(
            f"rank {rank} of {size} did not reach the others within {timeout_s:g} s "
            f"({str(error).splitlines()[0]}); see whether all were started, and give all of them "
            f"the host of rank 0 and a free port there in MASTER_ADDR and MASTER_PORT",
            (rank,),
        ) from error
    return Job(rank, size, local_rank, device, config.progress_folder() is not None)


def is_in_job() -> bool:
    """True if a launcher started this process as one of several ranks."""
    place = _read()
    return place is not None and place[1] > 1


def _read() -> tuple[int, int, int, int] | None:
    """Rank, size, local rank and local size; None without a launcher."""
    for names in zip(*_VARIABLES, strict=True):
        if names[0] in os.environ:
            rank, size, local_rank, local_size = map(_number, names)
            if not 0 <= rank < size or local_rank < 0 or local_size < 1:
                every = " ".join(names).split()
                got = ", ".join(f"{name}={os.environ.get(name)}" for name in every)
                raise RankError(
                    f"a rank must know its number and the number of ranks, in the job and on its "
                    f"host, got {got}; set what is missing"
                )
            return rank, size, local_rank, local_size
    return None


def _number(names: str) -> int:
    text = next((os.environ[name] for name in names.split() if os.environ.get(name)), "")
    # SLURM_STEP_TASKS_PER_NODE looks like 4(x2),3: 4 tasks on each of two hosts, 3 on a third.
    first = re.split("[(,]", text)[0]
    return int(first) if first.isdecimal() else -1


def _open_store(place: tuple[int, int, int, int], timeout: timedelta) -> Store:
    """Open the job's store by the variables that torch reads; set those that are not set yet."""
    rank, size, _, local_size = place
    if "RANK" not in os.environ:
        if "MASTER_ADDR" not in os.environ:
            address = _address(local_size == size)
            os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address
        # If mpi4py has loaded another MPI library than that of mpiexec, it sees each rank as a job
        # of its own.
        loaded: Any = sys.modules.get("mpi4py.MPI")
        if loaded and (world := loaded.COMM_WORLD) and (world.rank, world.size) != (rank, size):
            raise RankError(
                f"this is rank {rank} of {size} for its launcher, but rank {world.rank} of "
                f"{world.size} for mpi4py, which has loaded the library of another MPI; start the "
                f"job by the mpiexec of that one, or choose the library by MPI4PY_MPIABI",
                (rank,),
            )
        os.environ.update({names[0]: str(x) for names, x in zip(_VARIABLES, place, strict=True)})
    store: Store = next(rendezvous("env://", timeout=timeout))[0]
    # torchrun's store keeps the keys of ranks that died before a restart, so gloo would connect to
    # dead processes (pytorch#135712). A prefix for each attempt hides these keys. Agents of several
    # hosts may count restarts differently, so jobs on several hosts use the store without a prefix.
    if os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        return store
    return PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _address(is_one_host: bool) -> tuple[str, str]:
    """Host of rank 0 and a port of this host; all ranks return the same two."""
    if is_one_host:
        # The launcher is the parent of all ranks, so all get the same port from its process id.
        return "127.0.0.1", str(20000 + os.getppid() % 10000)
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise RankError(
            "ranks on several hosts do not know where rank 0 is; set MASTER_ADDR and MASTER_PORT "
            "for all of them, or install mpi4py"
        ) from error
    with socket.socket() as free:
        free.bind(("", 0))
        own = socket.getfqdn(), str(free.getsockname()[1])
    address: tuple[str, str] = MPI.COMM_WORLD.bcast(own)
    return address


def _choose_device(local_rank: int, local_size: int) -> torch.device:
    """Choose this rank's GPU and make it current; if GPUs are fewer than ranks, neighbours share.

    Without a GPU, return the CPU.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    # `local_size` may be too small: by Slurm it is the number of ranks on the first host, and there
    # may be more ranks on this one. If a launcher shows each rank only its own GPU, the index below
    # is 0.
    local_size = max(local_size, local_rank + 1, count)
    device = torch.device("cuda", local_rank * count // local_size)
    torch.cuda.set_device(device)
    return device


def _count_sharing(store: Store, rank: int, size: int, device: torch.device) -> int:
    """Count the ranks on this rank's device; the number becomes part of each measurement's key."""
    if device.type == "cpu":
        # Only `ucudnn launch`, which divides the cores among ranks, sets this number. By other
        # launchers, ranks may use each other's cores, and the number is 1.
        return config.ranks_per_device()
    # GPUs are compared by UUID, because a launcher may show each rank another GPU as number 0.
    own = f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"
    store.set(f"device/{rank}", own)
    sharing = [store.get(f"device/{other}") for other in range(size)].count(own.encode())
    os.environ.update(config.rank_variables(sharing))
    return sharing
