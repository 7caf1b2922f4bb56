"""Uneven data parallelism: more samples for faster ranks, the gradient of the whole batch.

DistributedDataParallel and FSDP average gradients over P ranks: (1/P) sum of g_r, where g_r is the
gradient of rank r's mean loss over b_r samples. The mean over all B samples has the gradient
sum of (b_r/B) g_r. So a rank multiplies its loss by b_r P / B, and the average is exact. Where the
shares come from: the mu-cuDNN paper's heterogeneous cluster (Oyama et al., CLUSTER 2018).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter_ns

import torch

from ucudnn.distributed.agreement import refuse
from ucudnn.distributed.rendezvous import Group, Meeting, name_ranks
from ucudnn.errors import ConfigError, RankError
from ucudnn.solvers import balance

_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Shares:
    """Division of a global batch among the ranks of a group, seen from one of them.

    >>> shares = Shares(sizes=(6, 2), index=1, time_ns=0)
    >>> shares.part(8), shares.weight(8)
    (slice(6, 8, None), 0.5)
    >>> shares.part(3), shares.weight(3)  # the last batch of an epoch
    (slice(2, 3, None), 0.6666666666666666)

    Args:
        sizes: samples of each rank in a full batch, in the order of the group.
        index: of this rank in the group.
        time_ns: predicted time of a step: that of the slowest rank.
    """

    sizes: tuple[int, ...]
    index: int
    time_ns: int

    @property
    def batch(self) -> int:
        """The global batch."""
        return sum(self.sizes)

    def part(self, total: int | None = None) -> slice:
        """This rank's samples of a global batch, in proportion where there are fewer.

        Args:
            total: samples of this global batch; None: a full one.
        """
        total = self._checked(total)
        ends = [0]
        for size in self.sizes:
            ends.append(ends[-1] + size)
        # whole samples, and every one belongs to one rank
        first, last = (
            (2 * end * total + self.batch) // (2 * self.batch)
            for end in ends[self.index : self.index + 2]
        )
        return slice(first, last)

    def weight(self, total: int | None = None) -> float:
        """Factor of the mean loss of this rank.

        Args:
            total: samples of this global batch; None: a full one.
        """
        total = self._checked(total)
        part = self.part(total)
        mine: int = part.stop - part.start
        return mine * len(self.sizes) / total

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
    """Share a global batch among the ranks so that the slowest finishes first.

    >>> share([100, 200, 300], batch=3).sizes  # this process alone
    (3,)

    Args:
        times_ns: what this rank takes for a step on 1, 2, ... samples, None where it cannot or was
            not timed; `step_times` measures them.
        batch: the global batch, the same on all ranks.
        group: the ranks that take part; None: all.
        timeout_s: how long to wait for a rank that does not come.

    Raises:
        RankError: ranks name different batches, or a rank would get no sample.
        PlanError: the ranks together cannot compute the batch; all raise it.
        ConfigError: a time or the batch is no int in range.
    """
    with Meeting("share", group, timeout_s) as meeting:
        said = meeting.exchange("times", {"times": list(times_ns), "batch": batch})
        batches = {rank: one["batch"] for rank, one in said.items()}
        refuse(
            {
                rank: f"it shares a batch of {other}, where {name_ranks([meeting.ranks[0]])} "
                f"shares {batches[meeting.ranks[0]]}"
                for rank, other in batches.items()
                if other != batches[meeting.ranks[0]]
            }
        )
        balanced = balance([said[rank]["times"] for rank in meeting.ranks], batch)
    idle = tuple(rank for rank, size in zip(meeting.ranks, balanced.sizes, strict=True) if not size)
    if idle:
        raise RankError(
            f"{name_ranks(idle)} would get no sample of a batch of {batch}: the others are done "
            f"sooner alone; leave it out of the job, or use a larger batch",
            idle,
        )
    return Shares(balanced.sizes, meeting.ranks.index(meeting.rank), balanced.time_ns)


def step_times(step: Callable[[int], object], sizes: Iterable[int]) -> list[int | None]:
    """Time a training step of this rank alone, at some batch sizes, for `share`.

    >>> len(step_times(lambda batch: torch.ones(batch).sum(), [2, 4]))
    4

    Args:
        step: called with a batch size, does forward, backward and update, and no communication.
        sizes: the batch sizes that this rank may get.

    Returns:
        The median times in ns by batch size from 1 on, None for a size that was not asked for.

    Raises:
        ConfigError: no size, or one below 1.
    """
    wanted = sorted(set(sizes))
    if not wanted or wanted[0] < 1:
        raise ConfigError(f"sizes must name batch sizes from 1 on, got {wanted}")
    times: list[int | None] = [None] * wanted[-1]
    for size in wanted:
        step(size)
        times[size - 1] = max(1, int(median(_timed(step, size) for _ in range(_ROUNDS))))
    return times


def _timed(step: Callable[[int], object], size: int) -> int:
    _synchronize()
    start = perf_counter_ns()
    step(size)
    _synchronize()
    return perf_counter_ns() - start


def _synchronize() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
