"""Larger local batches for faster ranks, with the gradient of the whole batch.

torchrun --standalone --nproc-per-node 2 examples/uneven_batches.py

DistributedDataParallel averages gradients over P ranks. If rank r has b_r of B samples and
multiplies its mean loss by b_r P / B, this average is exactly the gradient of the mean over all B.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter_ns

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from ucudnn.solvers import balance

BATCH = 32  # of all ranks together


def step_times(step: Callable[[int], object], sizes: Sequence[int]) -> list[int | None]:
    """Times in ns of this rank's step for 1, 2, ... samples; None for a size that is not timed."""
    times: list[int | None] = [None] * max(sizes)
    for size in sizes:
        step(size)  # the first one of a size allocates and initializes
        times[size - 1] = int(median(timed(step, size) for _ in range(5)))
    return times


def timed(step: Callable[[int], object], size: int) -> int:
    start = perf_counter_ns()
    step(size)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return perf_counter_ns() - start


def local_batches(times: list[int | None], batch: int) -> tuple[int, ...]:
    """Local batches of all ranks, of which the slowest rank's step is as short as possible."""
    gathered: list[list[int | None]] = [[]] * dist.get_world_size()
    dist.all_gather_object(gathered, times)
    return balance(gathered, batch).sizes


def part(sizes: Sequence[int], rank: int, total: int) -> slice:
    """A rank's samples of a batch of `total`; the last batch of an epoch may be smaller."""
    # The ends are scaled and rounded, not the sizes: every sample belongs to exactly one rank.
    first, last = (round(sum(sizes[:end]) * total / sum(sizes)) for end in (rank, rank + 1))
    return slice(first, last)


def backward(
    replica: nn.Module, images: torch.Tensor, labels: torch.Tensor, mine: slice
) -> torch.Tensor:
    """Backward of this rank's part, so that gradients are those of the whole batch."""
    size: int = mine.stop - mine.start
    # A rank without a sample takes part with one that counts nothing.
    some = mine if size else slice(1)
    weight = size * dist.get_world_size() / len(images)
    loss = weight * cross_entropy(replica(images[some]), labels[some])
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def main() -> None:
    """Time this rank, divide the batch, train."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same model and the same batches everywhere
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 900, 10))

    def step(size: int) -> None:
        cross_entropy(model(torch.randn(size, 3, 32, 32)), torch.randint(10, (size,))).backward()

    sizes = local_batches(step_times(step, range(4, BATCH + 1, 4)), BATCH)
    print(f"rank {dist.get_rank()} computes {sizes[dist.get_rank()]} of {BATCH} samples")
    torch.manual_seed(1)
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.01)
    for total in (BATCH, BATCH, BATCH // 2):
        images, labels = torch.randn(total, 3, 32, 32), torch.randint(10, (total,))
        optimizer.zero_grad()
        loss = backward(replica, images, labels, part(sizes, dist.get_rank(), total))
        optimizer.step()
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            print(f"loss {loss.item() / dist.get_world_size():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
