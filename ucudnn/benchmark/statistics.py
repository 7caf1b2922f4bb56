"""Order statistics of times: medians, spreads, and intervals of medians and of paired ratios."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from statistics import median


def median_ns(samples: Sequence[int]) -> int:
    """The median of times in ns, rounded to an integer of at least 1.

    >>> median_ns([4, 9, 5])
    5
    """
    # The result is at least 1, because a time of 0 would make ratios infinite and is refused by the
    # solver.
    return max(1, round(median(samples)))


def spread_ns(samples: Sequence[int]) -> int:
    """The interquartile range of times in ns.

    >>> spread_ns([1, 2, 3, 4, 100])
    2
    """
    ordered = sorted(samples)
    last = len(ordered) - 1
    # Both quartiles are samples, so that the result is an integer. The index of the upper quartile
    # is rounded to the nearest integer, that of the lower one is rounded down.
    return ordered[(3 * last + 2) // 4] - ordered[last // 4]


def median_interval(samples: Sequence[int]) -> tuple[int, int]:
    """A distribution-free 95 % confidence interval of the median: two of the samples.

    It reaches from the k-th smallest to the k-th largest sample. The number k follows from the
    binomial distribution (Conover, "Practical Nonparametric Statistics", section 3.2). With few
    samples the interval spans all of them.

    >>> median_interval([5, 1, 2, 3, 4]), median_interval(range(1, 10))
    ((1, 5), (2, 8))
    """
    ordered = sorted(samples)
    k = _outermost(len(ordered))
    return ordered[k - 1], ordered[-k]


def ratio_interval(
    numerators: Sequence[int], denominators: Sequence[int], confidence: float = 0.95
) -> tuple[float, float, float]:
    """The median of paired ratios, and the ends of its distribution-free confidence interval.

    The two times of a pair are from the same round, so that a perturbation affects both of them.

    >>> ratio_interval([90, 92, 91, 90, 93, 91], [100, 100, 100, 100, 100, 100])
    (0.91, 0.9, 0.93)
    """
    ratios = sorted(a / b for a, b in zip(numerators, denominators, strict=True))
    k = _outermost(len(ratios), confidence)
    return median(ratios), ratios[k - 1], ratios[-k]


def _outermost(count: int, confidence: float = 0.95) -> int:
    """The largest k for which the k-th smallest and k-th largest sample enclose the median."""
    outside = 1 - confidence
    k, tail = 0, 0.0
    # The true median is outside of the interval if it is below the k-th smallest or above the k-th
    # largest sample. Each is as probable as fewer than k heads in `count` tosses of a coin.
    while k < count // 2:
        tail += comb(count, k) / 2**count
        if 2 * tail > outside:
            break
        k += 1
    # With fewer than six samples, even the smallest and the largest do not enclose the median with
    # 95 % confidence.
    return max(k, 1)
