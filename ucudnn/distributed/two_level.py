"""Gradients averaged in two levels: among the ranks of a device, then across devices.

NCCL before 2.30.3 refuses two ranks on one GPU. So all ranks of a GPU write their gradients to
shared memory of the GPU (CUDA IPC), and one of these ranks, the leader, adds them up. Only leaders
take part in NCCL's all-reduce.

`from __future__ import annotations` is left out: DDP compares a hook's annotations with classes.
"""

import pickle
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import ProcessError
from multiprocessing.reduction import ForkingPickler
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing  # registers how a tensor is shared between processes
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.distributed_c10d import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from ucudnn import config

# Size of a rank's shared memory, allocated once; larger gradients go through it in pieces.
_PIECE_BYTES = 32 << 20
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _TwoLevels:
    """State of the hook."""

    team: Sequence[int]  # the ranks of this device, the leader first
    group: ProcessGroup  # the process group of these ranks
    across: ProcessGroup  # the group of all leaders; other ranks are not in it
    mine: Tensor  # shared memory on the device, which this rank writes
    peers: Sequence[Tensor]  # on the leader: the memory of all others; else the leader's alone


def reduce_by_device(replica: DistributedDataParallel) -> bool:
    """Average gradients among the ranks of each device first, then across devices.

    Call it on all ranks after `init`, before the first step. Plain DDP computes the same
    sums in another order.

    >>> from torch.distributed import HashStore
    >>> dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    >>> reduce_by_device(DistributedDataParallel(torch.nn.Linear(2, 1)))  # nothing is shared here
    False
    >>> dist.destroy_process_group()

    Args:
        replica: the wrapped model, without another communication hook.

    Returns:
        False if plain DDP goes on, because no ranks share a device, or because a device's memory
        cannot be shared: on a processor, in some containers, or with `expandable_segments:True`.
    """
    devices = [""] * dist.get_world_size()
    dist.all_gather_object(devices, _device())
    # The first rank of each device is its leader.
    by_device = {one: [r for r, other in enumerate(devices) if other == one] for one in devices}
    teams = list(by_device.values())
    if len(teams) == len(devices):
        return False
    device = next(replica.parameters()).device
    # torch requires that every rank makes every group, even groups that the rank is not in.
    leaders = [team[0] for team in teams]
    across = dist.new_group(leaders, backend="nccl" if device.type == "cuda" else "gloo")
    groups = {device: dist.new_group(team, backend="gloo") for device, team in by_device.items()}
    own = devices[dist.get_rank()]
    team, group = by_device[own], groups[own]
    mine = torch.empty(_PIECE_BYTES, dtype=torch.uint8, device=device)
    peers = _open_peers(mine, team)
    if peers is None:
        return False
    replica.register_comm_hook(_TwoLevels(team, group, across, mine, peers), _average)
    return True


def _device() -> str:
    """Identity of this rank's device, equal for ranks that share it."""
    if torch.cuda.is_available():
        return f"{socket.gethostname()} {torch.cuda.get_device_properties('cuda').uuid}"
    # Ranks of one host share its processor only if `ucudnn launch` says so.
    own = "" if config.ranks_per_device() > 1 else f" rank {dist.get_rank()}"
    return f"{socket.gethostname()}{own}"


def _open_peers(mine: Tensor, team: Sequence[int]) -> list[Tensor] | None:
    """Open the leader's memory, or on the leader that of all others; None on all if one fails."""
    # Each process that opens the memory needs its own handle, because torch counts handles.
    sent = _attempt(lambda: [bytes(ForkingPickler.dumps(mine)) for _ in team])
    handles: list[list[bytes] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(handles, sent)
    me = team.index(dist.get_rank())
    known = [handle[me] for rank in team if (handle := handles[rank]) and rank != team[me]]
    # Pickle is safe here: the handles come from ranks of this job.
    opened = _attempt(lambda: [pickle.loads(one) for one in known[: None if me == 0 else 1]])  # noqa: S301
    succeeded = [False] * dist.get_world_size()
    dist.all_gather_object(succeeded, opened is not None and len(known) == len(team) - 1)
    return opened if all(succeeded) else None


def _attempt(share: Callable[[], _T]) -> _T | None:
    try:
        return share()
    except (RuntimeError, OSError, ProcessError):
        # Sharing fails on a processor, in containers that forbid it, and with expandable
        # segments (pytorch#165685).
        return None


def _average(state: _TwoLevels, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average one bucket over all ranks; DDP requires a parameter with the name `bucket`."""
    buffer = bucket.buffer()
    for piece in buffer.split(_PIECE_BYTES // buffer.dtype.itemsize):
        mine, *peers = (
            shared.view(buffer.dtype)[: piece.numel()] for shared in (state.mine, *state.peers)
        )
        mine.copy_(piece)
        _meet(state)  # all ranks of the device have written
        if dist.get_rank() == state.team[0]:
            for peer in peers:
                mine.add_(peer)
            dist.all_reduce(mine, group=state.across)
        _meet(state)  # the leader has written the sum
        piece.copy_(mine if dist.get_rank() == state.team[0] else peers[0])
        # All ranks must have read the sum before the leader overwrites it with its next piece.
        _meet(state)
    # The future is finished already, because a future of gloo that outlives this call can abort a
    # process at its exit.
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(buffer.div_(dist.get_world_size()))
    return future


def _meet(state: _TwoLevels) -> None:
    """Wait until all ranks of this device have finished what they do on the device."""
    if state.mine.is_cuda:
        torch.cuda.current_stream().synchronize()
    dist.barrier(group=state.group)
