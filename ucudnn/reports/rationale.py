"""Reasons for the plan of a kernel, as reports show them: what else was measured of it."""

from __future__ import annotations

from dataclasses import dataclass

from ucudnn.split import Split, Timing


@dataclass(frozen=True, slots=True)
class Alternative:
    """A way to compute a kernel that its plan does not take.

    Args:
        split: the steps of a call.
        time_ns: of the whole call; None where it was not timed.
        workspace_bytes: of the whole call, or of its largest chunk; None where it is not known.
        error: the largest relative error (L2) of its chunks against float64; None: not known.
        is_measured: whether the whole call was timed; else its time is the sum of its chunks'.
        reason: why it is not the plan.
    """

    split: Split
    time_ns: int | None
    workspace_bytes: int | None
    error: float | None
    is_measured: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Rationale:
    """Everything that is known of a kernel beside its plan.

    Args:
        front: (workspace in bytes, time in ns) of the splits that no other one beats in both, by
            the sums of their chunks; workspace rises. Empty where no chunks are known.
        alternatives: the best rejected alternatives, fastest first.
        channels_last: torch's own convolution of the same sizes in channels_last.
    """

    front: tuple[tuple[int, int], ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    channels_last: Timing | None = None
