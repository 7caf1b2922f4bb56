"""Start of a rank: its process group from the variables of whatever launched it.

torchrun sets the variables that torch reads. MPI and Slurm set others, and leave it to the ranks
to find each other.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from ucudnn import config
from ucudnn.distributed.affinity import host_name
from ucudnn.distributed.launchers import (
    Launched,
    meeting_file,
    read_launcher,
    require_communicator,
    require_known_launcher,
    slurm_address,
)
from ucudnn.errors import RankError
from ucudnn.system.files import replacing

_POLL_S = 0.05


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

    Reads the variables of torchrun, Open MPI, MPICH or Slurm, chooses the rank's GPU, and calls
    `init_process_group`. Also sets RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE for other
    libraries. A process that was started by itself becomes a job of one rank, and sets none.

    >>> job = init()  # this process alone
    >>> job.rank, job.size, torch.distributed.get_world_size()
    (0, 1, 1)
    >>> torch.distributed.destroy_process_group()

    Args:
        backend: as in `init_process_group`; None: nccl for CUDA and gloo for CPU tensors, or gloo
            for both where ranks share a GPU, because NCCL refuses that.
        timeout_s: how long to wait for the other ranks.

    Raises:
        RankError: variables are missing or contradict each other, an MPI library sees another
            job, or a rank did not arrive in time.
    """
    if dist.is_initialized():
        raise RankError("there is a process group already; call init once, instead of torch's own")
    launched = read_launcher(os.environ)
    require_known_launcher(launched)
    _compare_with_mpi4py(launched)
    try:
        store = _open_store(launched, timeout_s)
        device = _choose_device(launched)
        sharing = _count_sharing(store, launched, device)
        chosen = backend or _backend(device, sharing)
        dist.init_process_group(
            chosen,
            store=store,
            rank=launched.rank,
            world_size=launched.size,
            timeout=timedelta(seconds=timeout_s),
        )
    except dist.DistError as error:
        raise RankError(
            f"rank {launched.rank} of {launched.size} ({launched.launcher}) did not reach the "
            f"others within {timeout_s:g} s ({str(error).splitlines()[0]}); see whether all were "
            f"started, and whether MASTER_ADDR and MASTER_PORT are the same for all",
            (launched.rank,),
        ) from error
    if launched.launcher != "none":
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        numbers = (launched.rank, launched.size, launched.local_rank, launched.local_size)
        os.environ.update(dict(zip(names, map(str, numbers), strict=True)))
    return Job(
        launched.rank,
        launched.size,
        launched.local_rank,
        launched.launcher,
        device,
        sharing,
        config.progress_folder() is not None,
    )


def _compare_with_mpi4py(launched: Launched) -> None:
    """Refuse a job that the MPI library of this process sees as another one."""
    loaded: Any = sys.modules.get("mpi4py.MPI")
    if loaded is not None and launched.launcher in ("Open MPI", "MPICH", "Slurm"):
        world = loaded.COMM_WORLD
        require_communicator(launched, world.rank, world.size)


def _open_store(launched: Launched, timeout_s: float) -> Store:
    """The key-value store of the job."""
    timeout = timedelta(seconds=timeout_s)
    address = _given_address()
    if launched.launcher == "torchrun" or address is not None:
        numbers = {"RANK": launched.rank, "WORLD_SIZE": launched.size}
        os.environ.update({name: str(number) for name, number in numbers.items()})
        if address is None:
            raise RankError(
                "RANK and WORLD_SIZE are set, but MASTER_ADDR and MASTER_PORT are not; set them to "
                "the host of rank 0 and a free port there"
            )
        store, _, _ = next(rendezvous("env://", timeout=timeout))
        return _of_this_attempt(store)
    if launched.size == 1:
        return HashStore()
    if launched.local_size == launched.size:
        return _meet_in_file(launched, timeout_s)
    fixed = slurm_address(os.environ) if launched.launcher == "Slurm" else None
    if fixed is not None:
        host, port = fixed
        return TCPStore(host, port, launched.size, launched.rank == 0, timeout)
    return _meet_by_mpi4py(launched, timeout)


def _given_address() -> tuple[str, str] | None:
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if (host is None) != (port is None):
        given, other = ("MASTER_ADDR", "MASTER_PORT")[:: 1 if host else -1]
        raise RankError(f"{given} is set and {other} is not; set both, or none of them")
    return None if host is None or port is None else (host, port)


def _of_this_attempt(store: Store) -> Store:
    """The keys of this attempt: torchrun's store keeps those of ranks that died before a restart.

    With them gloo would connect to processes that no longer exist (pytorch#135712). Agents of
    several hosts may count restarts differently, so their jobs keep the plain store.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"attempt {attempt}", store) if _is_one_host() else store


def _is_one_host() -> bool:
    return os.environ.get("GROUP_WORLD_SIZE", "1") == "1"


def _meet_in_file(launched: Launched, timeout_s: float) -> Store:
    """Ranks of one host: rank 0 opens a store at a free port and writes the number into a file."""
    path, timeout = meeting_file(), timedelta(seconds=timeout_s)
    joined = [f"joined/{rank}" for rank in range(launched.size)]
    if launched.rank == 0:
        store = TCPStore("127.0.0.1", 0, launched.size, True, timeout, wait_for_workers=False)
        with replacing(path) as stream:
            stream.write(str(store.port).encode())
        try:
            store.wait(joined[1:], timeout)
        finally:
            path.unlink(missing_ok=True)
        return store
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with suppress(FileNotFoundError):
            # Anybody may write files there; a port of another user would be theirs to answer.
            if path.stat().st_uid == os.getuid():
                port = int(path.read_text(encoding="ascii"))
                store = TCPStore(
                    "127.0.0.1", port, launched.size, False, timeout, wait_for_workers=False
                )
                store.set(joined[launched.rank], "")
                return store
        time.sleep(_POLL_S)
    raise RankError(
        f"rank 0 did not start within {timeout_s:g} s, as seen from rank {launched.rank} of "
        f"{launched.size} ({launched.launcher}); look at its output",
        (0,),
    )


def _meet_by_mpi4py(launched: Launched, timeout: timedelta) -> Store:
    """Ranks of several hosts: rank 0 opens a store at a free port and broadcasts its address."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise RankError(
            f"{launched.launcher} started ranks on several hosts, which do not know where rank 0 "
            f"is; set MASTER_ADDR and MASTER_PORT for all of them, or install mpi4py"
        ) from error
    world: Any = MPI.COMM_WORLD
    require_communicator(launched, world.rank, world.size)
    store, address = None, None
    if launched.rank == 0:
        host = socket.getfqdn()
        store = TCPStore(host, 0, launched.size, True, timeout, wait_for_workers=False)
        address = (host, store.port)
    host, port = world.bcast(address)
    return store or TCPStore(host, port, launched.size, False, timeout, wait_for_workers=False)


def _choose_device(launched: Launched) -> torch.device:
    """The GPU of this rank, made current; several ranks share one if there are fewer GPUs."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    index = launched.local_rank
    if index >= count:
        # Neighbours share, so that ranks of one GPU are consecutive. With a launcher that shows
        # each rank its own GPU alone this is that one.
        index = launched.local_rank * count // max(launched.local_size, launched.local_rank + 1)
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def _backend(device: torch.device, sharing: int) -> str:
    if device.type == "cpu":
        return "gloo"
    return "cpu:gloo,cuda:nccl" if sharing == 1 else "gloo"


def _count_sharing(store: Store, launched: Launched, device: torch.device) -> int:
    """The number of ranks on this one's device, which becomes part of every measurement's key."""
    if device.type == "cpu":
        # Only the launcher knows; ranks that torchrun or MPI start use each other's cores.
        return config.ranks_per_device()
    # By UUID, because a launcher may show each rank another GPU as number 0.
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    own, keys = (host_name(), uuid), [f"device/{rank}" for rank in range(launched.size)]
    store.set(keys[launched.rank], json.dumps(own))
    sharing = count_equal([tuple(json.loads(store.get(key))) for key in keys], own)
    config.share_device(sharing)
    return sharing


def count_equal(devices: Sequence[tuple[str, ...]], own: tuple[str, ...]) -> int:
    """The number of ranks with the same device.

    >>> count_equal([("host", "GPU-1"), ("host", "GPU-1"), ("host", "GPU-2")], ("host", "GPU-1"))
    2

    Args:
        devices: host and device of every rank.
        own: those of one of them.
    """
    return Counter(devices)[own]
