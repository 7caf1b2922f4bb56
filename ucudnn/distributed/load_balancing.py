"""Load balancing: larger local batches for faster ranks, with the gradient of the whole batch.

DistributedDataParallel and FSDP average gradients over P ranks: (1/P) sum of g_r, where g_r is the
gradient of rank r's mean loss over b_r samples. The mean over all B samples has the gradient
sum of (b_r/B) g_r. So a rank multiplies its loss by b_r P / B, and the average is exact. The local
batches are those of the heterogeneous cluster in the mu-cuDNN paper (Oyama et al., CLUSTER 2018).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter_ns

import torch

from ucudnn.distributed.agreement import raise_errors
from ucudnn.distributed.rendezvous import Group, Rendezvous, name_ranks
from ucudnn.errors import ConfigError, RankError
from ucudnn.solvers import balance

# Steps timed for each size: two disturbed ones of five do not move the median.
_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Shares:
    """Local batches of all ranks of a group, as seen from one of them.

    >>> shares = Shares(sizes=(6, 2), index=1, time_ns=0)
    >>> shares.part(8), shares.weight(8)
    (slice(6, 8, None), 0.5)
    >>> shares.part(3), shares.weight(3)  # the last batch of an epoch
    (slice(2, 3, None), 0.6666666666666666)

    Args:
        sizes: local batch of each rank, in the order of the group; their sum is the global batch.
        index: position of this rank in the group.
        time_ns: predicted time of a step: that of the slowest rank.
    """

    sizes: tuple[int, ...]
    index: int
    time_ns: int

    @property
    def batch(self) -> int:
        """Size of a full global batch."""
        return sum(self.sizes)

    def part(self, total: int | None = None) -> slice:
        """This rank's samples of a global batch; in a smaller one its proportion of them.

        Args:
            total: size of this global batch; None: a full one.

        Raises:
            ConfigError: the size is not from 1 to that of a full batch.
        """
        total = self._checked(total)
        ends = [0]
        for size in self.sizes:
            ends.append(ends[-1] + size)
        # The ends are scaled and rounded, not the sizes: each part begins where the one before it
        # ends, so every sample belongs to exactly one rank.
        first, last = (
            (2 * end * total + self.batch) // (2 * self.batch)
            for end in ends[self.index : self.index + 2]
        )
        return slice(first, last)

    def weight(self, total: int | None = None) -> float:
        """Factor to multiply this rank's mean loss by.

        Args:
            total: size of this global batch; None: a full one.

        Raises:
            ConfigError: the size is not from 1 to that of a full batch.
        """
        total = self._checked(total)
        part = self.part(total)
        local_batch: int = part.stop - part.start
        return local_batch * len(self.sizes) / total

    def _checked(self, total: int | None) -> int:
        total = self.batch if total is None else total
        if not 1 <= total <= self.batch:
            raise ConfigError(
                f"a global batch has 1 to {self.batch} samples as shared out, got {total}"
            )
        return total


def share(
    times_ns: Sequence[int | None], batch: int, group: Group = None, timeout_s: float = 300.0
) -> Shares:
    """Divide a global batch among the ranks so that the slowest finishes as early as possible.

    >>> share([100, 200, 300], batch=3).sizes  # without a process group: this process alone
    (3,)

    Args:
        times_ns: time of this rank's step on 1, 2, ... samples, None for a size that it cannot
            compute or that was not timed; `step_times` measures them.
        batch: the global batch, the same on all ranks.
        group: the ranks that take part; None: all.
        timeout_s: how long to wait for a rank that does not arrive.

    Raises:
        RankError: ranks pass different batches, or a rank would get no sample.
        PlanError: the ranks together cannot compute the batch; all raise it.
        ConfigError: a time or the batch is not an int in range.
    """
    with Rendezvous("share", group, timeout_s) as rendezvous:
        received = rendezvous.exchange("times", {"times": list(times_ns), "batch": batch})
        ranks = rendezvous.ranks
        expected = received[ranks[0]]["batch"]
        raise_errors(
            {
                rank: f"it shares a batch of {one['batch']}, where {name_ranks(ranks[:1])} shares "
                f"{expected}"
                for rank, one in received.items()
                if one["batch"] != expected
            }
        )
        balanced = balance([received[rank]["times"] for rank in ranks], batch)
    # A rank without a sample would still take part in every all-reduce, and gain nothing by it.
    idle = tuple(rank for rank, size in zip(ranks, balanced.sizes, strict=True) if not size)
    if idle:
        raise RankError(
            f"{name_ranks(idle)} would get no sample of a batch of {batch}: the others finish "
            f"earlier without it; leave it out of the job, or use a larger batch",
            idle,
        )
    return Shares(balanced.sizes, ranks.index(rendezvous.rank), balanced.time_ns)


def step_times(step: Callable[[int], object], sizes: Iterable[int]) -> list[int | None]:
    """Time a training step of this rank at some batch sizes, for `share`.

    >>> len(step_times(lambda batch: torch.ones(batch).sum(), [2, 4]))
    4

    Args:
        step: called with a batch size; runs forward, backward and update, without communication.
        sizes: the local batches that this rank may get.

    Returns:
        The median times in ns for 1, 2, ... samples, None for a size that was not requested.

    Raises:
        ConfigError: no size, or one below 1.
    """
    requested = sorted(set(sizes))
    if not requested or requested[0] < 1:
        raise ConfigError(f"sizes must name batch sizes from 1 on, got {requested}")
    times: list[int | None] = [None] * requested[-1]
    for size in requested:
        step(size)  # untimed: the first step of a size allocates and initializes
        # The solver accepts whole ns from 1 on.
        times[size - 1] = max(1, int(median(_timed(step, size) for _ in range(_ROUNDS))))
    return times


def _timed(step: Callable[[int], object], size: int) -> int:
    _synchronize()
    start = perf_counter_ns()
    step(size)
    _synchronize()
    return perf_counter_ns() - start


def _synchronize() -> None:
    # Launches on a GPU return before the work is done. A GPU that was never used has none under
    # way, and asking it would create a context on it.
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
