"""Progress of tuning, and the warning where it could not finish."""

from __future__ import annotations

from dataclasses import dataclass

from ucudnn.errors import UntunedWarning, warn


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of tuning.

    Args:
        kernel: the kernel that is tuned now.
        done: kernels finished; if kernels divide a pool, those that have a part of it so far.
        measured: candidates timed so far.
        reused: candidates found in the cache so far.
        seconds_left: estimated; None before the first kernel is finished.
        budget_s: the time budget in seconds; None: there is none, or it is not known yet.
        division_ns: time of the convolutions of a step by the best division of a pool so far, as
            measured; None: there is none.
    """

    kernel: str
    done: int
    total: int
    measured: int
    reused: int
    seconds_left: float | None = None
    budget_s: float | None = None
    division_ns: int | None = None


def warn_of_untuned(left_out: int, budget_s: float | None, is_recorded: bool = False) -> None:
    """Warn of kernels that are not in the plan, or not at every batch, if there are any.

    Args:
        left_out: number of these kernels.
        budget_s: the time budget in seconds, None without one.
        is_recorded: a recording was replayed, which takes no time.
    """
    if not left_out:
        return
    several = left_out > 1
    said = (
        f"{left_out} kernel{'s' * several} {'are' if several else 'is'} not in the plan, or not at "
        f"every batch: "
    )
    if is_recorded:
        warn(
            f"{said}nothing that was recorded of them fits, and torch's own convolution serves "
            f"them; raise the limit, or measure more on the device",
            UntunedWarning,
        )
        return
    budget = "" if budget_s is None else f" of {budget_s:g} s"
    warn(
        f"{said}the time budget{budget} was over before they had a plan, and torch's own "
        f"convolution, which serves the others, was not run yet or exceeds a workspace limit; give "
        f"a larger time_budget_s, or tune again, which goes on from what is in the cache",
        UntunedWarning,
    )
