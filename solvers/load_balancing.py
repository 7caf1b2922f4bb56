"""Load balancing: how many samples each of several unequal devices should compute.

Each device has its own time for each local batch. These times need not increase with the batch,
because plans are better at some sizes than at others. The makespan is the time of the slowest
device. The smallest makespan is found by bisection over the times that occur. Whether the devices
can compute the whole batch within a makespan is a subset-sum problem, which bit sets solve exactly.
The heterogeneous cluster of the mu-cuDNN paper (Oyama et al., CLUSTER 2018) is an example.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ucudnn.errors import ConfigError, PlanError
from ucudnn.solvers._base import SAFE, Integers, require_int


@dataclass(frozen=True, slots=True)
class Balance:
    """Division of a global batch into local batches.

    Args:
        sizes: local batch of each device, 0 for a device that would only delay the other ones.
        times_ns: time in ns of each device for its local batch.
    """

    sizes: tuple[int, ...]
    times_ns: tuple[int, ...]

    @property
    def time_ns(self) -> int:
        """Time of the slowest device."""
        return max(self.times_ns)


def balance(times: Sequence[Sequence[int | None]], batch: int) -> Balance:
    """Divide a global batch among devices so that the slowest finishes as early as possible.

    If several divisions take equally long, the one with the smallest sum of times is returned.

    >>> fast, slow = [10 * n for n in range(1, 9)], [30 * n for n in range(1, 9)]
    >>> shares = balance([fast, slow], batch=8)
    >>> shares.sizes, shares.time_ns
    ((6, 2), 60)

    Args:
        times: for each device its times in ns for 1, 2, ... samples, None for a number of samples
            that it cannot compute.
        batch: the global batch.

    Raises:
        PlanError: the devices together cannot compute the batch.
        ConfigError: there is no device, or a value is not an int in range.
    """
    require_int("batch", batch, 1)
    if not times:
        raise ConfigError("times must not be empty; pass one list per device")
    choices = [_choices(device, row, batch) for device, row in enumerate(times)]
    # The makespan is the time of some device for some size. A batch that is possible within one
    # time is possible within any longer time, so bisection finds the smallest makespan.
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
    """Times by size for all sizes that a device can compute; 0 samples take no time."""
    choices = {0: 0}
    for size, time_ns in enumerate(row[:batch], start=1):
        if time_ns is not None:
            require_int(f"times of device {device}", time_ns, 1)
            choices[size] = time_ns
    return choices


def _reaches(choices: Sequence[dict[int, int]], batch: int, most_ns: int) -> bool:
    """True if the devices can compute the batch with no time above `most_ns`."""
    # Bit n is set if the devices considered so far can compute n samples together. A shift adds one
    # size to all these sums at once, which is faster than a table of sums.
    sums, every = 1, (1 << (batch + 1)) - 1
    for sizes in choices:
        reached = 0
        for size, time_ns in sizes.items():
            if time_ns <= most_ns:
                reached |= sums << size
        sums = reached & every
    return bool(sums >> batch)


def _least_sum(choices: Sequence[dict[int, int]], batch: int) -> tuple[int, ...]:
    """The sizes that sum up to the batch and whose times have the smallest sum."""
    # Dynamic programming, device by device. `least` has for each n the least sum of times in which
    # the devices so far compute n samples, and `back` the last device's size in it. The sizes are
    # read from `back` at the end. Sums that might overflow 64 bits are computed with Python's ints.
    infinite = 1 + sum(max(sizes.values()) for sizes in choices)
    dtype = np.int64 if 2 * infinite < SAFE else object
    least = np.full(batch + 1, infinite, dtype)
    least[0] = 0
    back_pointers: list[Integers] = []
    for sizes in choices:
        found, back = np.full(batch + 1, infinite, dtype), np.zeros(batch + 1, np.int64)
        for size, time_ns in sizes.items():
            sums = least[: batch + 1 - size] + time_ns
            better = np.flatnonzero(sums < found[size:])
            found[size + better], back[size + better] = sums[better], size
        least = found
        back_pointers.append(back)
    sizes_reversed, left = [], batch
    for back in reversed(back_pointers):
        sizes_reversed.append(int(back[left]))
        left -= sizes_reversed[-1]
    return tuple(reversed(sizes_reversed))
