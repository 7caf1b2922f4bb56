"""What ranks run in tests of training: converted layers beside torch's, in the same processes."""

from __future__ import annotations

import copy
import runpy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from by_hand import in_chunks, where_it_can
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import ucudnn
from ucudnn import distributed
from ucudnn.backends import open_backend
from ucudnn.steps.run import reason_against_steps
from ucudnn.steps.tracing import trace_layers

BATCH, STEPS = 8, 20


def network(seed: int = 0, dtype: torch.dtype = torch.float32, norm: bool = True) -> nn.Module:
    """Convolutions with a stride, with groups, with and without a bias."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 3, padding=1, bias=False)]
    layers += [nn.BatchNorm2d(8)] if norm else []
    layers += [nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, groups=2), nn.ReLU()]
    layers += [nn.Conv2d(8, 4, 1), nn.Flatten(), nn.Linear(4 * 4 * 4, 5)]
    return nn.Sequential(*layers).to(dtype)


def planned(
    model: nn.Module, batch: int = BATCH, last: bool = False, parameters: bool = True
) -> nn.Module:
    """A copy that computes every batch in chunks of two samples, backward too.

    With `last` it is by a plan for channels_last, with `parameters` as such a plan has them.
    """
    dtype = next(model.parameters()).dtype
    traced = copy.deepcopy(model).to(memory_format=torch.channels_last) if last else model  # type: ignore[call-overload]
    layers = trace_layers(traced, torch.empty(batch, 3, 9, 9, dtype=dtype)).layers
    backend = open_backend("torch_cpu")
    plan = in_chunks(backend, layers, 2, where_it_can(backend, "im2col_gemm", 2))
    plan = replace(plan, memory_format="channels_last" if last else "keep")
    converted = copy.deepcopy(model)
    agreed = distributed.agree(plan, timeout_s=100)
    conversion = ucudnn.convert_(converted, agreed, parameters=parameters)
    assert len(conversion.swapped) == 3
    assert converted[0].weight.is_contiguous() != (last and parameters)
    return converted


def data(samples: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    images = torch.randn(samples, 3, 9, 9, generator=generator)
    return images.to(dtype), torch.randint(5, (samples,), generator=generator)


def difference(ours: nn.Module, theirs: nn.Module) -> float:
    """Largest difference of any parameter or buffer, relative to the largest of that tensor."""
    pairs = zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True)
    return max(
        float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-30))
        for a, b in pairs
    )


def is_replicated(model: nn.Module) -> bool:
    """Whether all ranks have the same parameters, bit by bit."""
    ok = True
    for parameter in model.parameters():
        first = parameter.detach().clone()
        dist.broadcast(first, 0)
        ok = ok and torch.equal(first, parameter.detach())
    return ok


def ddp(
    folder: Path,
    rank: int,
    last: bool = False,
    micro: int = 1,
    joined: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train both, the last batch of each epoch smaller and not the same on all.

    Of the `micro` micro-steps of an update only the last communicates. With `joined` each rank has
    another number of batches, under torch's `Join`.
    """
    ranks = dist.get_world_size()
    model = network()
    pair = planned(model, last=last), copy.deepcopy(model)
    both = [DistributedDataParallel(m, **options) for m in pair]
    counts = [count_buckets(m) for m in both]
    images, labels = data(ranks * BATCH * 4 + ranks * 3)
    losses: list[list[float]] = [[], []]
    for one, taken in zip(both, losses, strict=True):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.05, momentum=0.9)
        with Join([one]) if joined else nullcontext():
            for number in range((3 + 2 * rank if joined else STEPS) * micro):
                # five batches an epoch; in the fifth the ranks have 3, 4, 3, 4 samples
                start = number % 5 * BATCH * ranks + rank * BATCH
                size = BATCH if number % 5 < 4 else 3 + rank % 2
                start = min(start, len(images) - size)
                mine = slice(start, start + size)
                is_last = number % micro == micro - 1
                with nullcontext() if is_last else one.no_sync():
                    loss = cross_entropy(one(images[mine]), labels[mine]) / micro
                    loss.backward()
                if is_last:
                    optimizer.step()
                    optimizer.zero_grad()
                    taken.append(loss.item())
    return {
        "loss": max(abs(a - b) / b for a, b in zip(*losses, strict=True)),
        "learned": losses[0][-1] / losses[0][0],
        "weights": difference(*(m.module for m in both)),
        "replicated": is_replicated(both[0]),
        "buckets": [list(count) for count in counts],
    }


def count_buckets(model: DistributedDataParallel) -> list[int]:
    """Sizes of the gradient buckets, in the order in which they become ready; DDP as always."""
    sizes: list[int] = []

    # DDP asks for this very name, and reads annotations that `annotations` turns into text
    def hook(state, bucket):  # type: ignore[no-untyped-def]
        sizes.append(bucket.buffer().numel())
        # waits itself: futures of gloo that outlive this frame can abort the exit
        dist.all_reduce(bucket.buffer())
        future = torch.futures.Future()
        future.set_result(bucket.buffer().div_(dist.get_world_size()))
        return future

    model.register_comm_hook(None, hook)
    return sizes


def fsdp(folder: Path, rank: int, last: bool = False) -> dict[str, Any]:
    """Parameters sharded over the ranks: `fully_shard` on every layer and on the whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = network(norm=False)
    # fully_shard takes contiguous parameters alone
    both = [planned(model, last=last, parameters=not last), copy.deepcopy(model)]
    for one in both:
        for layer in one:
            if list(layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(one, mesh=mesh)
    images, labels = data(dist.get_world_size() * BATCH)
    mine = slice(rank * BATCH, (rank + 1) * BATCH)
    calls = count_calls()
    losses: list[list[float]] = [[], []]
    for one, taken in zip(both, losses, strict=True):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.05)
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = cross_entropy(one(images[mine]), labels[mine])
            loss.backward()
            optimizer.step()
            taken.append(loss.item())
    pairs = zip(*(one.state_dict().values() for one in both), strict=True)
    apart = max(float((a.full_tensor() - b.full_tensor()).abs().max()) for a, b in pairs)
    return {
        "loss": max(abs(a - b) / b for a, b in zip(*losses, strict=True)),
        "weights": apart,
        "planned calls": calls[0],
    }


def count_calls() -> list[int]:
    """How often a planned convolution runs from now on."""
    from ucudnn.execution import execute

    calls = [0]
    original: Callable[..., Tensor] = execute.Call.__call__

    def counted(self: Any, *operands: Tensor | None) -> Tensor:
        calls[0] += 1
        return original(self, *operands)

    execute.Call.__call__ = counted  # type: ignore[method-assign]
    return calls


def uneven(folder: Path, rank: int, times: list[list[int | None]], batch: int) -> dict[str, Any]:
    """Train on uneven parts by the example, in float64, beside one process with the whole batch.

    Every fourth global batch is a smaller one, which some rank may have no sample of.
    """
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "uneven_batches.py"))
    dtype = torch.float64
    sizes = example["local_batches"](times[rank], batch)
    model = network(dtype=dtype, norm=False)
    whole = copy.deepcopy(model)
    one = DistributedDataParallel(planned(model, max(sizes)))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (one, whole)]
    images, labels = data(batch, dtype)
    worst, parts = 0.0, []
    for number in range(STEPS):
        total = 3 if number % 4 == 3 else batch
        for optimizer in optimizers:
            optimizer.zero_grad()
        mine = example["part"](sizes, rank, total)
        parts.append([mine.start, mine.stop])
        example["backward"](one, images[:total], labels[:total], mine)
        cross_entropy(whole(images[:total]), labels[:total]).backward()
        for a, b in zip(one.module.parameters(), whole.parameters(), strict=True):
            worst = max(worst, float((a.grad - b.grad).norm() / b.grad.norm()))
        for optimizer in optimizers:
            optimizer.step()
    return {
        "sizes": list(sizes),
        "parts": parts,
        "gradient": worst,
        "weights": difference(one.module, whole),
        "replicated": is_replicated(one),
    }


def synchronized_batch_norm(folder: Path, rank: int) -> dict[str, Any]:
    """What torch's conversion leaves of ours, and what it does without a GPU."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(planned(network()))
    sentence = ""
    try:
        DistributedDataParallel(model)
    except ValueError as error:
        sentence = str(error)
    kinds = [type(layer).__module__ for layer in model if isinstance(layer, nn.Conv2d)]
    reason = reason_against_steps(model, data(BATCH, torch.float32)[0], "cpu")
    return {"sentence": sentence, "kinds": kinds, "norm": type(model[1]).__name__, "steps": reason}


def two_levels(folder: Path, rank: int, devices: int) -> dict[str, Any]:
    """Train with gradients averaged in two levels, and by DDP alone, in float64.

    Ranks share a device as if by `ucudnn launch`, with several devices on this host.
    """
    from ucudnn.distributed import two_level

    # A strategy by which processes that are not related can share, as they can on a GPU.
    torch.multiprocessing.set_sharing_strategy("file_system")
    two_level._PIECE_BYTES = 1 << 10  # so that a bucket needs several pieces
    ranks = dist.get_world_size()
    two_level._device = lambda: str(rank * devices // ranks)
    model = network(dtype=torch.float64, norm=False)
    both = [DistributedDataParallel(copy.deepcopy(model)) for _ in range(2)]
    is_reduced = distributed.reduce_by_device(both[0])
    images, labels = data(ranks * BATCH, torch.float64)
    mine = slice(rank * BATCH, (rank + 1) * BATCH)
    for one in both:
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for _ in range(STEPS):
            optimizer.zero_grad()
            cross_entropy(one(images[mine]), labels[mine]).backward()
            optimizer.step()
    return {
        "weights": difference(both[0].module, both[1].module),
        "replicated": is_replicated(both[0]),
        "reduced": is_reduced,
    }


def segments(folder: Path, rank: int, how: str) -> dict[str, Any]:
    """Train with segments in micro-batches beside torch's modules, in float64.

    With "fsdp first", parameters are sharded before segments are there.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from ucudnn.execution.micro_batching import segment_
    from ucudnn.segment import Segment

    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(3)]
    whole = nn.Sequential(*layers, nn.Linear(6, 5)).double()
    ours = copy.deepcopy(whole)
    chosen = [Segment("0", 2), Segment("1", None), Segment("2", 3, recompute=False)]
    if how != "fsdp first":
        segment_(ours, chosen)
    if how == "ddp":
        replica: nn.Module = DistributedDataParallel(ours)
        counts = count_buckets(replica)
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in [*ours, ours]:
            fully_shard(layer, mesh=mesh)
        replica, counts = ours, []
    if how == "fsdp first":
        segment_(ours, chosen)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (replica, whole)]
    ranks = dist.get_world_size()
    images = torch.randn(2, ranks * BATCH, 6, dtype=torch.float64)
    labels = torch.randint(5, (2, ranks * BATCH))
    mine = slice(rank * BATCH, (rank + 1) * BATCH)
    for _ in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        # Two batches for each update, of which the first may stay without communication.
        for part in range(2):
            with replica.no_sync() if how == "ddp" and not part else nullcontext():  # type: ignore[operator]
                cross_entropy(replica(images[part, mine]), labels[part, mine]).backward()
            cross_entropy(whole(images[part]), labels[part]).backward()
        for optimizer in optimizers:
            optimizer.step()
    pairs = zip(ours.state_dict().values(), whole.state_dict().values(), strict=True)
    full = [(getattr(a, "full_tensor", lambda a=a: a)(), b) for a, b in pairs]
    return {
        "weights": max(float((a - b).abs().max() / b.abs().max()) for a, b in full),
        "buckets": sum(counts),
        "values": sum(one.numel() for one in whole.parameters()),
    }
