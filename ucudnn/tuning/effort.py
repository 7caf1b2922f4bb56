"""Limits of tuning for each value of `Config.effort`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ucudnn.benchmark.protocol import FINALS, Protocol


@dataclass(frozen=True, slots=True)
class Effort:
    """The limits of one effort.

    Args:
        budget_steps: the default time budget, as a number of training steps; None: no budget.
        least_budget_s: seconds that the default budget is at least.
        most_budget_s: seconds that it is at most.
        ignored_share: a kernel that could gain less than this fraction of a step's time, or that
            uses less than ten times as much, is not measured beyond torch's own convolution.
        tolerated_share: a kernel is measured no further when a better split could gain no more
            than this fraction of a step's time.
        chunks: how chunks are timed.
        wholes: how whole calls are timed against each other.
    """

    budget_steps: int | None
    least_budget_s: float
    most_budget_s: float
    ignored_share: float
    tolerated_share: float
    chunks: Protocol
    wholes: Protocol

    def budget_s(self, step_ns: int, *, on_gpu: bool = False) -> float | None:
        """The default time budget in seconds, for everything that `tune` does.

        >>> [EFFORTS["normal"].budget_s(step_ns) for step_ns in (1_000, 400_000_000, 2 * 10**9)]
        [10.0, 40.0, 45.0]

        Args:
            step_ns: time of a step.
            on_gpu: whether it is one on a GPU, which says little about tuning: a step is short, and
                candidates cost milliseconds each on the host. There the budget is the longest.
        """
        if self.budget_steps is None:
            return None
        if on_gpu:
            return self.most_budget_s
        budget_s = max(self.least_budget_s, self.budget_steps * step_ns / 1e9)
        return min(budget_s, self.most_budget_s)


# Nine pairs forgive a perturbed one at either end of a 95 % interval. Of fewer the interval is all
# of them: one perturbed pair costs a kernel its gain, and with three pairs noise may pass for a
# gain, which the race of whole steps is there to notice.
EFFORTS = {
    "quick": Effort(
        budget_steps=25,
        least_budget_s=5.0,
        most_budget_s=30.0,
        ignored_share=0.005,
        tolerated_share=0.01,
        chunks=Protocol(least_rounds=2, most_rounds=3, target=0.1, enough_ns=200_000_000),
        wholes=replace(FINALS, least_rounds=3, most_rounds=5, warm_ups=2, stops_when_decided=True),
    ),
    "normal": Effort(
        budget_steps=100,
        least_budget_s=10.0,
        most_budget_s=45.0,
        ignored_share=0.001,
        tolerated_share=0.003,
        chunks=Protocol(least_rounds=2, most_rounds=4, enough_ns=200_000_000),
        wholes=replace(FINALS, least_rounds=3, most_rounds=7, warm_ups=2, stops_when_decided=True),
    ),
    # No gain is too small to look for, and no roofline rules anything out: the session needs one
    # only where `ignored_share` is above 0.
    "thorough": Effort(
        budget_steps=None,
        least_budget_s=0.0,
        most_budget_s=0.0,
        ignored_share=0.0,
        tolerated_share=0.0,
        chunks=Protocol(),
        wholes=FINALS,
    ),
}
