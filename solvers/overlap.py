"""Overlap of backward and gradient exchange: the best buckets, and when the exchange ends.

Backward computes gradients one after the other. A bucket can be sent as soon as its last gradient
is ready, while backward goes on; buckets are sent one after the other. If there are few large
buckets, each waits long for its last gradient. If there are many small ones, the fixed cost of an
exchange is paid often. A dynamic program finds the best cut into buckets. Of all cuts of the first
n gradients, only the one whose exchanges end first matters, because the link is free for the rest
earlier (MG-WFBP: Shi, Chu, Li, INFOCOM 2019).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ucudnn.errors import ConfigError, quoted
from ucudnn.solvers._base import require_int


@dataclass(frozen=True, slots=True)
class Line:
    """Time of an exchange as a straight line over its bytes.

    >>> Line(fixed_ns=1000, per_byte_ns=0.5).time_ns(4096)
    3048

    Args:
        fixed_ns: time in ns of an exchange of no bytes.
        per_byte_ns: additional time in ns for each byte.
    """

    fixed_ns: float
    per_byte_ns: float

    def time_ns(self, size_bytes: int) -> int:
        """Time of one exchange, to the nearest ns."""
        return round(self.fixed_ns + self.per_byte_ns * size_bytes)

    def error(self, samples: Sequence[tuple[int, int]]) -> float:
        """The largest relative difference between samples (bytes, ns) and the line."""
        return max(abs(self.time_ns(size) - time_ns) / time_ns for size, time_ns in samples)


def fit(samples: Sequence[tuple[int, int]]) -> Line:
    """Fit a line to measured exchanges by least squares of the relative errors.

    Neither part of the line is negative.

    >>> fit([(1000, 1500), (2000, 2000), (4000, 3000)])
    Line(fixed_ns=1000.0, per_byte_ns=0.5)

    Args:
        samples: size in bytes and time in ns, at least 1, of each exchange.

    Raises:
        ConfigError: there is no sample.
    """
    if not samples:
        raise ConfigError("samples must not be empty; pass (bytes, ns) of at least one exchange")
    sizes, times = np.asarray(samples, float).T
    # This solves (a + b * size) / time = 1 for all samples, by least squares. If a or b were
    # negative, it is set to 0.
    columns = np.stack([1 / times, sizes / times], axis=1)
    found = np.linalg.lstsq(columns, np.ones(len(times)))[0]
    for kept in (0, 1):
        if found[1 - kept] < 0:
            column = columns[:, kept]
            found = np.zeros(2)
            found[kept] = column.sum() / (column @ column)
    fixed, per_byte = (round(float(value), 9) for value in found)
    return Line(fixed, per_byte)


def finish(ready_ns: Sequence[int], costs_ns: Sequence[int]) -> list[int]:
    """End of each exchange in ns, if exchanges use one link one after the other, in this order.

    >>> finish([10, 20, 60], [30, 5, 5])
    [40, 45, 65]

    Args:
        ready_ns: earliest start of each exchange in ns.
        costs_ns: duration of each exchange in ns.
    """
    ends, free = [], 0
    for ready, cost in zip(ready_ns, costs_ns, strict=True):
        free = max(ready, free) + cost
        ends.append(free)
    return ends


@dataclass(frozen=True, slots=True)
class Buckets:
    """A cut of gradients into buckets, in the order in which they are ready.

    >>> Buckets(counts=(2, 1), sizes=(4096, 256), end_ns=900).counts
    (2, 1)

    Args:
        counts: gradients in each bucket.
        sizes: bytes of each bucket.
        end_ns: time at which the exchange of the last bucket ends.
    """

    counts: tuple[int, ...]
    sizes: tuple[int, ...]
    end_ns: int


def bucket(ready_ns: Sequence[int], sizes: Sequence[int], line: Line, slack_ns: int = 0) -> Buckets:
    """Cut gradients into contiguous buckets so that the last exchange ends as early as possible.

    Of all such cuts, the result has the fewest buckets. It is exact, and found in O(n^2) operations
    for n gradients and each bucket.

    >>> bucket([10, 20, 500], [1000, 1000, 10], Line(fixed_ns=100, per_byte_ns=0.1))
    Buckets(counts=(2, 1), sizes=(2000, 10), end_ns=601)

    Args:
        ready_ns: time in ns at which each gradient is ready, in the order in which they are sent.
        sizes: bytes of each gradient.
        line: time of an exchange over its bytes.
        slack_ns: time in ns by which the last exchange may end later if that saves buckets.

    Raises:
        ConfigError: there is no gradient, the lists differ in length, or a number is not an int of
            at least 0.
    """
    if not ready_ns or len(ready_ns) != len(sizes):
        raise ConfigError(
            f"ready_ns and sizes must have one number for each gradient, got "
            f"{len(ready_ns)} and {len(sizes)}"
        )
    for time_ns, size in zip(ready_ns, sizes, strict=True):
        require_int("ready_ns", time_ns, 0)
        require_int("a size in bytes", size, 0)
    require_int("slack_ns", slack_ns, 0)
    if line.fixed_ns < 0 or line.per_byte_ns < 0:
        raise ConfigError(f"a line must have no negative part, got {quoted(line)}")
    ready = np.maximum.accumulate(np.asarray([0, *ready_ns], np.int64))
    until = np.cumsum(np.asarray([0, *sizes], np.int64))
    # The entry in row n and column i is the time of exchanging the gradients i to n - 1 as one
    # bucket; entries with i >= n are not used.
    costs = np.rint(line.fixed_ns + line.per_byte_ns * (until[:, None] - until)).astype(np.int64)
    places = np.arange(len(until))
    is_bucket = places[:, None] > places
    ends = np.zeros(len(until), np.int64)
    for n in places[1:]:
        ends[n] = (np.maximum(ready[n], ends[:n]) + costs[n, :n]).min()
    wanted = ends[-1] + slack_ns
    # To use few buckets, search again with one bucket, then with two, and so on, until the end is
    # early enough.
    never = np.iinfo(np.int64).max // 2
    ends = np.where(places == 0, 0, never)
    before = []
    while ends[-1] > wanted:
        found = np.where(is_bucket, np.maximum(ready[:, None], ends) + costs, never)
        before.append(found.argmin(axis=1))
        ends = found.min(axis=1)
    cuts = [len(sizes)]
    for back in reversed(before):
        cuts.append(int(back[cuts[-1]]))
    pairs = list(zip(cuts[:0:-1], cuts[-2::-1], strict=True))
    return Buckets(
        tuple(last - first for first, last in pairs),
        tuple(int(until[last] - until[first]) for first, last in pairs),
        int(ends[-1]),
    )
