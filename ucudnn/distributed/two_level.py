"""Gradients averaged in two levels: among the ranks of a device, then across devices.

NCCL before 2.30.3 refuses two ranks on one GPU. So one rank of each GPU, its leader, adds up the
gradients of the others through memory of the GPU that all of them see (CUDA IPC). Leaders alone
take part in NCCL's all-reduce.

Without `from __future__ import annotations`: DDP compares the annotations of a hook with classes.
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

# Gradients go through the shared memory in pieces of this size: it is allocated once.
_PIECE_BYTES = 32 << 20
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _TwoLevels:
    """State of the hook."""

    team: Sequence[int]  # the ranks of this device, the leader first
    group: ProcessGroup  # the same
    across: ProcessGroup  # the leaders of all devices; on other ranks no group
    mine: Tensor  # memory of the device that this rank writes
    peers: Sequence[Tensor]  # memory of the others; on all but the leader that of the leader alone


def reduce_by_device(replica: DistributedDataParallel) -> bool:
    """Average gradients among the ranks of each device first, then across devices.

    Call it on all ranks after `init`, before the first step. The sums are those of plain DDP in
    another order.

    >>> from torch.distributed import HashStore
    >>> dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    >>> reduce_by_device(DistributedDataParallel(torch.nn.Linear(2, 1)))  # nothing is shared here
    False
    >>> dist.destroy_process_group()

    Args:
        replica: the wrapped model, without another communication hook.

    Returns:
        False if DDP goes on by itself: no device is shared, or its memory cannot be, as on a
        processor, in some containers, or with `expandable_segments:True`.
    """
    devices = [""] * dist.get_world_size()
    dist.all_gather_object(devices, _device())
    # Ranks by device; the first of each is its leader.
    by_device = {one: [r for r, other in enumerate(devices) if other == one] for one in devices}
    teams = list(by_device.values())
    if len(teams) == len(devices):
        return False
    device = next(replica.parameters()).device
    # Every rank takes part in making every group, also of those that it is not in.
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
    # Ranks of one processor share it only if one launcher has put them there.
    own = "" if config.ranks_per_device() > 1 else f" rank {dist.get_rank()}"
    return f"{socket.gethostname()}{own}"


def _open_peers(mine: Tensor, team: Sequence[int]) -> list[Tensor] | None:
    """Memory of the other ranks of a device; None on all ranks of the job if some cannot share."""
    # One handle for each process that opens it: torch counts them.
    sent = _attempt(lambda: [bytes(ForkingPickler.dumps(mine)) for _ in team])
    handles: list[list[bytes] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(handles, sent)
    me = team.index(dist.get_rank())
    known = [handle[me] for rank in team if (handle := handles[rank]) and rank != team[me]]
    # The handles are of ranks of this job.
    opened = _attempt(lambda: [pickle.loads(one) for one in known[: None if me == 0 else 1]])  # noqa: S301
    succeeded = [False] * dist.get_world_size()
    dist.all_gather_object(succeeded, opened is not None and len(known) == len(team) - 1)
    return opened if all(succeeded) else None


def _attempt(share: Callable[[], _T]) -> _T | None:
    try:
        return share()
    except (RuntimeError, OSError, ProcessError):
        # As on a processor, in containers that forbid it, or with expandable segments
        # (pytorch#165685).
        return None


def _average(state: _TwoLevels, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average one bucket over all ranks; DDP asks for the argument's very name."""
    buffer = bucket.buffer()
    for piece in buffer.split(_PIECE_BYTES // buffer.dtype.itemsize):
        mine, *peers = (
            shared.view(buffer.dtype)[: piece.numel()] for shared in (state.mine, *state.peers)
        )
        mine.copy_(piece)
        _meet(state)  # all ranks have written theirs
        if dist.get_rank() == state.team[0]:
            for peer in peers:
                mine.add_(peer)
            dist.all_reduce(mine, group=state.across)
        _meet(state)  # the sum is there
        piece.copy_(mine if dist.get_rank() == state.team[0] else peers[0])
        # The leader writes into the sum next time; nobody must still be reading.
        _meet(state)
    # Finished already: a future of gloo that outlives this call can abort the exit of a process.
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(buffer.div_(dist.get_world_size()))
    return future


def _meet(state: _TwoLevels) -> None:
    """Wait until all ranks of the device have finished what they do on it."""
    if state.mine.is_cuda:
        torch.cuda.current_stream().synchronize()
    dist.barrier(group=state.group)
