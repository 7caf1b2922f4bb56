"""Overlap of backward and gradient exchange: the best buckets, and when the exchange ends.

Backward computes gradients one after the other. A bucket can be sent as soon as its last gradient
is ready, while backward goes on. If there are few large buckets, each waits long for its last
gradient. If there are many small ones, the fixed cost of an exchange is paid often. `bucket` finds
the best cut into buckets that are sent one after the other, by a dynamic program. Of all cuts of
the first n gradients, only the one whose exchanges end first matters, because it leaves the link to
the other gradients earliest (MG-WFBP: Shi, Chu, Li, INFOCOM 2019). `overlap` simulates exchanges
that slow computing down, and each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ucudnn.errors import ConfigError, quoted
from ucudnn.solvers._base import require_int


@dataclass(frozen=True, slots=True)
class Curve:
    """Time of an exchange as a function of its bytes: straight lines between the known sizes.

    Beyond the largest size the line from the smallest to the largest goes on; below the smallest
    the time stays the same.

    >>> Curve((1000, 3000), (500, 1500)).time_ns(4000)
    2000

    Args:
        sizes: bytes, rising.
        times_ns: time in ns for each size, not falling.

    Raises:
        ConfigError: there is no size, sizes do not rise, or times fall or are negative.
    """

    sizes: tuple[int, ...]
    times_ns: tuple[float, ...]

    def __post_init__(self) -> None:
        is_rising = all(a < b for a, b in pairwise(self.sizes))
        if not (
            len(self.sizes) == len(self.times_ns) > 0
            and is_rising
            and list(self.times_ns) == sorted(self.times_ns)
            and min(self.times_ns) >= 0
        ):
            raise ConfigError(
                "a curve must have a time of at least 0 for each size, with rising sizes and no "
                f"falling times, got {quoted(self)}"
            )

    @classmethod
    def line(cls, fixed_ns: float, per_byte_ns: float) -> Curve:
        """The curve of a fixed time and an additional time for each byte.

        >>> Curve.line(1000, 0.5).time_ns(4096)
        3048
        """
        return cls((0, 1 << 30), (fixed_ns, fixed_ns + (1 << 30) * per_byte_ns))

    def times(self, sizes: NDArray[np.int64]) -> NDArray[np.float64]:
        """Times in ns of exchanges of these sizes in bytes, of any shape."""
        found = np.interp(sizes, self.sizes, self.times_ns)
        if len(self.sizes) > 1:
            slope = (self.times_ns[-1] - self.times_ns[0]) / (self.sizes[-1] - self.sizes[0])
            found = found + slope * np.maximum(sizes - self.sizes[-1], 0)
        return found

    def time_ns(self, size_bytes: int) -> int:
        """Time of one exchange, to the nearest ns."""
        return round(float(self.times(np.asarray(size_bytes))))


@dataclass(frozen=True, slots=True)
class Contention:
    """How much longer exchanges and computing take if they run at once.

    Args:
        pair: time of two exchanges at once over the time of one: from 1 to 2; with 2, exchanges
            run one after the other.
        computing: time of computing during exchanges over its time without them.
        exchanging: time of an exchange during computing over its time without it.
    """

    pair: float = 2.0
    computing: float = 1.0
    exchanging: float = 1.0

    @classmethod
    def measured(
        cls, pair: float, computing_ns: int, exchanging_ns: int, computed_ns: int, exchanged_ns: int
    ) -> Contention:
        """From times of computing and of exchanges, each by itself, and both at once.

        >>> Contention.measured(1.5, 120, 150, computed_ns=150, exchanged_ns=180)
        Contention(pair=1.5, computing=1.25, exchanging=1.25)

        Args:
            pair: time of two exchanges at once over the time of one.
            computing_ns: time of computing by itself.
            exchanging_ns: time of one or more exchanges in turn by themselves.
            computed_ns: if computing and exchanging begin at once: time until computing ends.
            exchanged_ns: in the same run: time until the last exchange ends.
        """
        # Computing and exchanges run at once for `both_ns`. What is then left of the longer of the
        # two takes as long as it would by itself. Without that, each has the time that the part
        # done during `both_ns` would take by itself. Because of noise this time may be 0 or
        # negative, so at least a tenth of `both_ns` is used.
        both_ns = min(computed_ns, exchanged_ns)
        computing_ns -= computed_ns - both_ns
        exchanging_ns -= exchanged_ns - both_ns
        return cls(
            pair=min(2.0, max(1.0, pair)),
            computing=max(1.0, both_ns / max(computing_ns, both_ns / 10)),
            exchanging=max(1.0, both_ns / max(exchanging_ns, both_ns / 10)),
        )


def overlap(
    ready_ns: Sequence[int], costs_ns: Sequence[int], computing_ns: int, contention: Contention
) -> tuple[list[int], int]:
    """End of each exchange and of computing in ns, if exchanges begin while computing goes on.

    Exchanges begin in the order of `ready_ns`. At most two are under way at once; only one, if two
    at once take as long as one after the other.

    >>> overlap([10, 20, 60], [30, 5, 5], 60, Contention())
    ([40, 45, 65], 60)
    >>> overlap([10, 20, 60], [30, 5, 5], 60, Contention(pair=1))
    ([40, 25, 65], 60)
    >>> overlap([10, 20, 60], [30, 5, 5], 60, Contention(computing=2, exchanging=1.5))
    ([55, 62, 91], 86)

    Args:
        ready_ns: time of computing after which each exchange may begin, not falling.
        costs_ns: duration in ns of each exchange by itself.
        computing_ns: duration of computing by itself, at least the last of `ready_ns`.
        contention: how much exchanges and computing slow each other down.
    """
    now = done = 0.0
    computing_ns = max([computing_ns, *ready_ns])
    left = [float(cost) for cost in costs_ns]
    ends = [0] * len(left)
    begun, computed_ns = 0, 0
    pending: list[int] = []
    while pending or done < computing_ns or begun < len(left):
        while begun < len(left) and ready_ns[begun] <= done:
            pending.append(begun)
            begun += 1
        running = pending[: 1 if contention.pair >= 2 else 2]
        is_computing = done < computing_ns
        slower = contention.computing if running else 1.0
        slowest = contention.exchanging if is_computing else 1.0
        slowest *= contention.pair if len(running) == 2 else 1.0
        # The next event: an exchange ends, a gradient is ready, or computing ends.
        event = ready_ns[begun] if begun < len(left) else computing_ns
        spans = [left[one] * slowest for one in running]
        if is_computing:
            spans.append((event - done) * slower)
        span = min(spans)
        now += span
        if is_computing:
            done = event if spans[-1] == span else done + span / slower
            computed_ns = round(now)
        for one, whole in zip(running, spans, strict=False):
            left[one] -= span / slowest
            if whole == span:
                ends[one] = round(now)
                pending.remove(one)
    return ends, computed_ns


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


def bucket(
    ready_ns: Sequence[int], sizes: Sequence[int], curve: Curve, slack_ns: int = 0
) -> Buckets:
    """Cut gradients into contiguous buckets so that the last exchange ends as early as possible.

    Of all cuts whose last exchange ends at most `slack_ns` later than that, the result has the
    fewest buckets. The search is exact. For n gradients it takes O(n^2) operations per bucket.

    >>> bucket([10, 20, 500], [1000, 1000, 10], Curve.line(100, 0.1))
    Buckets(counts=(2, 1), sizes=(2000, 10), end_ns=601)

    Args:
        ready_ns: time in ns at which each gradient is ready, in the order of sending.
        sizes: bytes of each gradient.
        curve: time of an exchange over its bytes.
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
    ready = np.maximum.accumulate(np.asarray([0, *ready_ns], np.int64))
    until = np.cumsum(np.asarray([0, *sizes], np.int64))
    # The entry in row n and column i is the time of exchanging the gradients i to n - 1 as one
    # bucket; entries with i >= n are not used.
    costs = np.rint(curve.times(until[:, None] - until)).astype(np.int64)
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
