"""Progress of tuning, and the warning where it could not finish."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of tuning.

    Args:
        kernel: the kernel at work.
        done: kernels finished.
        total: kernels in all.
        measured: candidates timed so far.
        reused: candidates found in the cache so far.
        seconds_left: estimated; None before there is anything to go by.
        budget_s: the time budget in seconds; None: there is none, or it is not known yet.
    """

    kernel: str
    done: int
    total: int
    measured: int
    reused: int
    seconds_left: float | None = None
    budget_s: float | None = None


class UntunedWarning(UserWarning):
    """The time was over before some kernels were looked at, so the plan leaves them out."""
