"""What counts as faster: the thresholds of all verdicts on times, and the predicates that use them.

A verdict is on an interval of ratios, (median, low, high): in each round, the time of one way to
compute something is divided by the time of another one.
"""

from __future__ import annotations

Interval = tuple[float, float, float]

# Kernels. Thresholds are fractions of the time that a kernel takes by its rival.

# torch's own convolution is replaced only if this is saved. A smaller gain is not worth it, even if
# it is certain.
WORTHWHILE_GAIN = 0.02
# A split that is slower than the fastest one by at most this counts as equally fast, because a race
# could not show the difference.
EQUALLY_FAST = 0.02
# A pool of workspace is not divided anew if that would save no more than this.
POOL_GAIN = 0.005
# The check of a plan fails if the speedup of one of its kernels has fallen by more than this factor
# since it was tuned.
LOST_SPEEDUP = 1.5

# Whole steps. Thresholds are fractions of the time of a step.

# A loss by a plan, and a gain by another layout or another way to run steps, count only if they are
# more than this. A smaller difference is not worth a change.
TOLERATED = 0.01
# A race with fewer rounds does not show how noisy its times are.
LEAST_ROUNDS = 3
# So in fewer rounds, only a loss of more than this counts as one.
CLEAR_LOSS = 0.1
# The confidence of the intervals that decide whether steps are faster. With it, the interval of six
# or seven pairs leaves out the smallest and the largest ratio, so that one perturbed round cannot
# hide a difference. The interval of fewer pairs spans all ratios.
CONFIDENCE = 0.75
# If the settings keep the layout, channels_last is tried in few rounds, so that it is recommended
# only if it saves more than this.
HINTED_GAIN = 0.05
# A single step by one way counts as clearly faster than by another if it takes no more than this
# part of the time, on a CPU and on a GPU, whose times vary by 1 % (docs/gpu-status.md).
CLEARLY = {"cpu": 0.95, "cuda": 0.98}
# Advice does not recommend tuning for less than this.
ADVISED_GAIN = 0.05
# A step under autocast that takes at least this many times as long as one in float32 has kernels
# without instructions for half precision. Then no other way to run it is worth a trial.
EMULATED = 10
# If the interval of a way's ratio reaches below this, noise may hide a gain that matters.
HIDDEN = 0.9

# Several processes.

# More ranks need more memory, so they are chosen only if they gain more than this.
RANKS_GAIN = 0.03
# A way to exchange gradients is measured if its predicted gain is larger than this.
HOPED_GAIN = 0.01
# Its gain is told only above the first of these if steps were measured, because smaller gains are
# noise; and above the second if all steps are predicted, because smaller gains are too uncertain.
TOLD_GAIN, TOLD_PREDICTED_GAIN = 0.03, 0.1


def is_faster(ratios: Interval, least: float = 0.0, surely: float = 0.0) -> bool:
    """True if the times are shorter, beyond the noise.

    >>> is_faster((0.9, 0.8, 0.99)), is_faster((0.9, 0.8, 1.01))
    (True, False)

    Args:
        ratios: the median of the ratios, and the ends of its interval.
        least: the fraction that must be saved by the median.
        surely: the fraction that must be saved by the upper end of the interval.
    """
    ratio, _, high = ratios
    return ratio < 1 - least and high < 1 - surely


def is_loss(low: float, rounds: int) -> bool:
    """True if steps are slower, beyond the noise, by the lower end of their interval.

    >>> is_loss(1.02, 3), is_loss(1.02, 2), is_loss(1.2, 2)
    (True, False, True)
    """
    return rounds > 0 and low > 1 + (TOLERATED if rounds >= LEAST_ROUNDS else CLEAR_LOSS)


def is_clear(ratios: Interval) -> bool:
    """True if the interval clearly shows a gain, a loss or no difference.

    >>> is_clear((0.9, 0.8, 0.99)), is_clear((1.0, 0.995, 1.005)), is_clear((0.9, 0.8, 1.2))
    (True, True, False)
    """
    _, low, high = ratios
    return high < 1 or low > 1 + TOLERATED or (low > 1 - TOLERATED and high < 1 + TOLERATED)


def may_be_worthwhile(ratios: Interval) -> bool:
    """True if it is open whether a kernel's gain is worthwhile, so that more rounds may show it."""
    _, low, high = ratios
    return low < 1 - WORTHWHILE_GAIN and high > 1 - WORTHWHILE_GAIN / 2
