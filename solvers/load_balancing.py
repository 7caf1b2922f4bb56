"""Uneven data parallelism: shares of a global batch, so that the slowest device finishes first.

Every device has its own time for every number of samples, which need not rise with it: plans are
best at some sizes. The makespan is found by bisection over the times that occur; whether devices
can take the batch within a makespan is a question of sums, answered exactly with sets of bits. This
is for the heterogeneous cluster of the mu-cuDNN paper (Oyama et al., CLUSTER 2018).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ucudnn.errors import ConfigError, PlanError
from ucudnn.solvers._base import SAFE, Integers, require_int
from ucudnn.solvers.table import ReuseTable


@dataclass(frozen=True, slots=True)
class Balance:
    """Shares of a global batch.

    Args:
        sizes: samples of each device, 0 where it does better to wait.
        times_ns: what each device takes for its share.
    """

    sizes: tuple[int, ...]
    times_ns: tuple[int, ...]

    @property
    def time_ns(self) -> int:
        """Time of the slowest device."""
        return max(self.times_ns)


def device_times(tables: Iterable[ReuseTable], limit: int | None = None) -> list[int | None]:
    """Times of a device for n = 1..N samples: sums over its kernels, None where one cannot.

    >>> from ucudnn.solvers import Item, reuse
    >>> device_times([reuse([Item(2, 0, 7, "a")], 4), reuse([Item(1, 0, 1, "a")], 4)])
    [None, 9, None, 18]

    Args:
        tables: one per kernel of the model, the same one again for each repetition.
        limit: workspace of this device in bytes, None for any.

    Raises:
        ConfigError: no table, or a limit that is out of range.
    """
    solved = list(tables)
    if not solved:
        raise ConfigError("tables must not be empty; pass one table per kernel")
    times: list[int | None] = []
    for n in range(1, min(table.batch for table in solved) + 1):
        parts = [table.time_ns(n, limit) for table in solved]
        known = [part for part in parts if part is not None]
        times.append(sum(known) if len(known) == len(parts) else None)
    return times


def balance(times: Sequence[Sequence[int | None]], batch: int) -> Balance:
    """Share a global batch among devices so that the slowest of them finishes first.

    Of the shares with that makespan the one with the least time summed over the devices wins.

    >>> fast, slow = [10 * n for n in range(1, 9)], [30 * n for n in range(1, 9)]
    >>> shares = balance([fast, slow], batch=8)
    >>> shares.sizes, shares.time_ns
    ((6, 2), 60)

    Args:
        times: per device its time in ns for 1, 2, ... samples, None where it cannot compute so
            many; `device_times` gives them.
        batch: the global batch.

    Raises:
        PlanError: the devices together cannot compute the batch.
        ConfigError: no device, or a value that is no int in range.
    """
    require_int("batch", batch, 1)
    if not times:
        raise ConfigError("times must not be empty; pass one list per device")
    choices = [_choices(device, row, batch) for device, row in enumerate(times)]
    makespans = sorted({time_ns for sizes in choices for time_ns in sizes.values()})
    place = bisect_left(makespans, True, key=lambda most: _reaches(choices, batch, most))
    if place == len(makespans):
        raise PlanError(
            f"the shares of {len(times)} device(s) must sum up to the global batch {batch}, and no "
            f"sizes that they can compute do; measure more sizes, or add a device"
        )
    fitting = [
        {size: time_ns for size, time_ns in sizes.items() if time_ns <= makespans[place]}
        for sizes in choices
    ]
    sizes = _least_sum(fitting, batch)
    return Balance(sizes, tuple(row[size] for row, size in zip(fitting, sizes, strict=True)))


def _choices(device: int, row: Sequence[int | None], batch: int) -> dict[int, int]:
    """Time by size of what a device can do, nothing at all included."""
    choices = {0: 0}
    for size, time_ns in enumerate(row[:batch], start=1):
        if time_ns is not None:
            require_int(f"times of device {device}", time_ns, 1)
            choices[size] = time_ns
    return choices


def _reaches(choices: Sequence[dict[int, int]], batch: int, most_ns: int) -> bool:
    """True if sizes of at most some time sum up to the batch; bit n of `sums` stands for n."""
    sums, every = 1, (1 << (batch + 1)) - 1
    for sizes in choices:
        reached = 0
        for size, time_ns in sizes.items():
            if time_ns <= most_ns:
                reached |= sums << size
        sums = reached & every
    return bool(sums >> batch)


def _least_sum(choices: Sequence[dict[int, int]], batch: int) -> tuple[int, ...]:
    """Sizes that sum up to the batch with the least sum of times, device by device."""
    infinite = 1 + sum(max(sizes.values()) for sizes in choices)
    dtype = np.int64 if 2 * infinite < SAFE else object
    least = np.full(batch + 1, infinite, dtype)
    least[0] = 0
    taken: list[Integers] = []
    for sizes in choices:
        found, last = np.full(batch + 1, infinite, dtype), np.zeros(batch + 1, np.int64)
        for size, time_ns in sizes.items():
            sums = least[: batch + 1 - size] + time_ns
            better = np.flatnonzero(sums < found[size:])
            found[size + better], last[size + better] = sums[better], size
        least = found
        taken.append(last)
    sizes_reversed, left = [], batch
    for last in reversed(taken):
        sizes_reversed.append(int(last[left]))
        left -= sizes_reversed[-1]
    return tuple(reversed(sizes_reversed))
