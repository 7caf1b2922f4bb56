"""Gradients averaged in two levels: among the ranks of a device, then across devices.

NCCL before 2.30.3 refuses two ranks on one GPU. So one rank of each GPU, its leader, adds up the
gradients of the others, through memory of the GPU that all of them see (CUDA IPC) or else by gloo;
leaders alone take part in NCCL's all-reduce.

Without `from __future__ import annotations`: DDP compares the annotations of a hook with classes.
"""

import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
from ucudnn.distributed.affinity import host_name
from ucudnn.errors import ConfigError

# Gradients go through the shared memory in pieces of this size: it is allocated once.
_PIECE_BYTES = 32 << 20
_WAYS = ("auto", "memory", "gloo")
_T = TypeVar("_T")


def reduce_by_device(replica: DistributedDataParallel, through: str = "auto") -> None:
    """Average gradients among the ranks of each device first, then across devices.

    Call it on all ranks after `init`, before the first step. Where no device is shared it changes
    nothing. The sums are those of plain DDP in another order.

    >>> import tempfile
    >>> from torch.distributed import HashStore
    >>> dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    >>> reduce_by_device(DistributedDataParallel(torch.nn.Linear(2, 1)))  # nothing is shared here
    >>> dist.destroy_process_group()

    Args:
        replica: the wrapped model, without another communication hook.
        through: "memory" that the ranks of a device share, "gloo", or "auto": memory of a GPU where
            it can be shared, else gloo.

    Raises:
        ConfigError: there is no such way.
    """
    if through not in _WAYS:
        raise ConfigError(f"through must be one of {', '.join(_WAYS)}, got {through!r}")
    devices: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(devices, _device())
    teams = _group_ranks(devices)
    if len(teams) == len(devices):
        return
    device = next(replica.parameters()).device
    across = dist.new_group(
        [team[0] for team in teams], backend="nccl" if device.type == "cuda" else "gloo"
    )
    # Every rank takes part in making every group, also of those that it is not in.
    groups = [dist.new_group(team, backend="gloo") for team in teams]
    number = next(index for index, team in enumerate(teams) if dist.get_rank() in team)
    team, group = teams[number], groups[number]
    memory = None
    if through == "memory" or (through == "auto" and device.type == "cuda"):
        memory = _share_memory(group, team, device)
    replica.register_comm_hook(_TwoLevels(team, group, across, len(teams), memory), _average)


def _device() -> str:
    """Identity of this rank's device, equal for ranks that share it."""
    if torch.cuda.is_available():
        return f"{host_name()} {torch.cuda.get_device_properties('cuda').uuid}"
    # Ranks of one processor share it only if one launcher has put them there.
    own = "" if config.ranks_per_device() > 1 else f" rank {dist.get_rank()}"
    return f"{host_name()} {os.getuid()}{own}"


def _group_ranks(devices: Sequence[str]) -> list[list[int]]:
    """Ranks by device; the first of each is its leader.

    >>> _group_ranks(["a", "a", "b", "b"])
    [[0, 1], [2, 3]]
    """
    teams: dict[str, list[int]] = {}
    for rank, device in enumerate(devices):
        teams.setdefault(device, []).append(rank)
    return list(teams.values())


@dataclass(frozen=True, slots=True)
class _Memory:
    """Memory of one device that all its ranks see.

    Args:
        mine: written by this rank; of the leader, the sum.
        peers: on the leader, the memory of the other ranks.
        total: on the others, the leader's.
    """

    mine: Tensor
    peers: tuple[Tensor, ...]
    total: Tensor


@dataclass(frozen=True, slots=True)
class _TwoLevels:
    """State of the hook.

    Args:
        team: the ranks of this device, the leader first.
        group: the same as a process group.
        across: the leaders of all devices; on other ranks no group.
        devices: their number.
        memory: that the team shares; None: gloo.
    """

    team: Sequence[int]
    group: ProcessGroup
    across: ProcessGroup
    devices: int
    memory: _Memory | None

    @property
    def is_leader(self) -> bool:
        """True on the rank that takes part in the second level."""
        return dist.get_rank() == self.team[0]


def _average(state: _TwoLevels, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average one bucket over all ranks; DDP asks for the argument's very name."""
    buffer = bucket.buffer()
    reduce = _reduce_by_gloo if state.memory is None else _reduce_in_memory
    reduce(state, buffer)
    # Finished already: a future of gloo that outlives this call can abort the exit of a process.
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(buffer.div_(dist.get_world_size()))
    return future


def _reduce_by_gloo(state: _TwoLevels, buffer: Tensor) -> None:
    # Not `reduce`, which gloo does not have for CUDA tensors.
    dist.all_reduce(buffer, group=state.group)
    if state.devices > 1:
        if state.is_leader:
            dist.all_reduce(buffer, group=state.across)
        dist.broadcast(buffer, state.team[0], group=state.group)


def _reduce_in_memory(state: _TwoLevels, buffer: Tensor) -> None:
    memory = state.memory
    assert memory is not None
    for piece in _pieces(buffer):
        mine, total, *peers = (
            shared.view(buffer.dtype)[: piece.numel()]
            for shared in (memory.mine, memory.total, *memory.peers)
        )
        mine.copy_(piece)
        _meet(state)  # all ranks have written theirs
        if state.is_leader:
            for peer in peers:
                mine.add_(peer)
            if state.devices > 1:
                dist.all_reduce(mine, group=state.across)
        _meet(state)  # the sum is there
        piece.copy_(total)
        # The leader writes into the sum next time; nobody must still be reading.
        _meet(state)


def _pieces(buffer: Tensor) -> Iterator[Tensor]:
    return iter(buffer.split(_PIECE_BYTES // buffer.dtype.itemsize))


def _meet(state: _TwoLevels) -> None:
    """Wait until all ranks of the device have finished what they do on it."""
    if state.memory is not None and state.memory.mine.is_cuda:
        torch.cuda.current_stream().synchronize()
    dist.barrier(group=state.group)


def _share_memory(group: ProcessGroup, team: Sequence[int], device: torch.device) -> _Memory | None:
    """Memory for each rank of a device, which the leader sees; None where it cannot be shared."""
    mine = torch.empty(_PIECE_BYTES, dtype=torch.uint8, device=device)
    is_leader = dist.get_rank() == team[0]
    # One handle for each process that opens it: torch counts them.
    sent = _attempt(lambda: [bytes(ForkingPickler.dumps(mine)) for _ in team])
    handles: list[list[bytes] | None] = [None] * len(team)
    dist.all_gather_object(handles, sent, group=group)
    opened = None
    known = [given for given in handles if given is not None]
    if len(known) == len(team):
        own = list(team).index(dist.get_rank())
        others = range(1, len(team)) if is_leader else range(1)
        # The handles are of ranks of this job.
        opened = _attempt(lambda: [pickle.loads(known[one][own]) for one in others])  # noqa: S301
    succeeded: list[bool] = [False] * len(team)
    dist.all_gather_object(succeeded, opened is not None, group=group)
    # All ranks of a device take the same way, or they would wait for each other.
    if opened is None or not all(succeeded):
        return None
    return _Memory(mine, tuple(opened), mine) if is_leader else _Memory(mine, (), opened[0])


def _attempt(share: Callable[[], _T]) -> _T | None:
    try:
        return share()
    except (RuntimeError, OSError):
        # As in containers that forbid it, or with expandable segments (pytorch#165685).
        return None
