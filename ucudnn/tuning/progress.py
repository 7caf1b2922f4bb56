"""Progress of tuning, and the warning or the error where it could not finish."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ucudnn.plan import Plan


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of tuning.

    Args:
        kernel: the kernel that is tuned now.
        done: kernels finished.
        total: kernels in all.
        measured: candidates timed so far.
        reused: candidates found in the cache so far.
        seconds_left: estimated; None before the first kernel is finished.
        budget_s: the time budget in seconds; None: there is none, or it is not known yet.
    """

    kernel: str
    done: int
    total: int
    measured: int
    reused: int
    seconds_left: float | None = None
    budget_s: float | None = None


class TuningInterruptedError(KeyboardInterrupt):
    """Ctrl-C during tuning; the measurements so far are in the cache.

    Attributes:
        plan: the best plan so far. Kernels that were never run are not in it, and those that were
            not finished run torch's own convolution.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__("tuning was interrupted")
        self.plan = plan


class UntunedWarning(UserWarning):
    """The time ran out before some kernels were run once, so the plan leaves them out."""


def warn_of_untuned(left_out: int, total: int, budget_s: float | None) -> None:
    """Warn of kernels that are not in the plan.

    Args:
        left_out: number of these kernels.
        total: kernels in all.
        budget_s: the time budget in seconds, None without one.
    """
    budget = "" if budget_s is None else f" of {budget_s:g} s"
    # The warning shows the line that called `tune_problems`, from which `TuningScheduler.run` and
    # then this function are called.
    warnings.warn(
        f"{left_out} of {total} kernels are not in the plan: "
        f"the time budget{budget} was over before they were looked at, or torch's own "
        f"convolution exceeds the workspace limit; raise it by time_budget_s, "
        f"or tune again and go on from what is in the cache",
        UntunedWarning,
        stacklevel=4,
    )
