"""Load balancing: how many samples each of several unequal devices should compute.

The samples that one device computes are its local batch. Each device has its own time for each
local batch. The times need not increase with the local batch, because plans are better at some
sizes than at others. The makespan is the time of the slowest device. Dynamic programming over the
devices finds the smallest makespan, and then the smallest sum of times within that makespan. An
example of such devices is the heterogeneous cluster of the mu-cuDNN paper (Oyama et al., CLUSTER
2018).
"""

from __future__ import annotations

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
    # The first pass finds the smallest makespan. Among the divisions of that makespan, the second
    # pass finds one with the smallest sum of times.
    fastest = _best(choices, batch, np.maximum)
    if fastest is None:
        raise PlanError(
            f"the shares of {len(times)} device(s) must sum up to the global batch {batch}, and no "
            f"sizes that they can compute do; measure more sizes, or add a device"
        )
    makespan_ns = max(_times(choices, fastest))
    fitting = [
        {size: time_ns for size, time_ns in row.items() if time_ns <= makespan_ns}
        for row in choices
    ]
    sizes = _best(fitting, batch, np.add)
    assert sizes is not None  # the sizes of the first pass are among those that fit
    return Balance(sizes, _times(fitting, sizes))


def _times(choices: Sequence[dict[int, int]], sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The time of each device for its size."""
    return tuple(row[size] for row, size in zip(choices, sizes, strict=True))


def _choices(device: int, row: Sequence[int | None], batch: int) -> dict[int, int]:
    """Times by size for all sizes that a device can compute; 0 samples take no time."""
    choices = {0: 0}
    for size, time_ns in enumerate(row[:batch], start=1):
        if time_ns is not None:
            require_int(f"times of device {device}", time_ns, 1)
            choices[size] = time_ns
    return choices


def _best(
    choices: Sequence[dict[int, int]], batch: int, combine: np.ufunc
) -> tuple[int, ...] | None:
    """The sizes that sum up to the batch with the smallest combined time; None if no sizes do.

    Two times are combined by `np.maximum` or by `np.add`.
    """
    # Dynamic programming, device by device. `least` has the least time of n samples on the devices
    # so far, and `back` the size of the last of these devices in that division. The loop at the end
    # reads the sizes from `back`. Sums that might overflow 64 bits are computed with Python's ints.
    infinite = 1 + sum(max(sizes.values()) for sizes in choices)
    dtype = np.int64 if 2 * infinite < SAFE else object
    least = np.full(batch + 1, infinite, dtype)
    least[0] = 0
    back_pointers: list[Integers] = []
    for sizes in choices:
        found, back = np.full(batch + 1, infinite, dtype), np.zeros(batch + 1, np.int64)
        for size, time_ns in sizes.items():
            times = combine(least[: batch + 1 - size], time_ns)
            better = np.flatnonzero(times < found[size:])
            found[size + better], back[size + better] = times[better], size
        least = found
        back_pointers.append(back)
    if least[batch] == infinite:
        return None
    sizes_reversed, left = [], batch
    for back in reversed(back_pointers):
        sizes_reversed.append(int(back[left]))
        left -= sizes_reversed[-1]
    return tuple(reversed(sizes_reversed))
