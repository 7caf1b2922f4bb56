"""Count the reasons not to trust a plan's times: load, varying times, wrong predictions."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ucudnn.plan import KernelPlan, Plan, Timing

# The times of a kernel vary too much if their interquartile range is above this fraction of the
# median.
_WIDE = 0.1
# A prediction is wrong if it differs from the measured time by more than this fraction.
_OFF = 0.25
# A plan is noisy if more than the first fraction of its kernels were timed on a busy machine, more
# than the second have times that vary too much, or more than the third were predicted wrongly.
_MOST_PERTURBED, _MOST_WIDE, _MOST_OFF = 0.1, 0.25, 0.25


@dataclass(frozen=True, slots=True)
class Noise:
    """Counts of kernels with unreliable times, among those that were measured.

    Args:
        kernels: number of measured kernels.
        perturbed: kernels timed while other processes used the processors.
        wide: kernels with times that vary by more than a tenth.
        mispredicted: kernels whose predicted time, the sum of their chunks, differs from the time
            of the whole call by more than a quarter.
        single: kernels that were run only once.
    """

    kernels: int = 0
    perturbed: int = 0
    wide: int = 0
    mispredicted: int = 0
    single: int = 0

    @property
    def is_noisy(self) -> bool:
        """True if the times are too unreliable to be trusted.

        >>> Noise(kernels=10, wide=2).is_noisy, Noise(kernels=10, wide=3).is_noisy
        (False, True)
        """
        return (
            self.perturbed > _MOST_PERTURBED * self.kernels
            or self.wide > _MOST_WIDE * self.kernels
            or self.mispredicted > _MOST_OFF * self.kernels
        )

    def __str__(self) -> str:
        counts = {
            "timed while others used the processors": self.perturbed,
            "with times that vary by more than a tenth": self.wide,
            "whose parts add up to something else by more than a quarter": self.mispredicted,
            "run only once": self.single,
        }
        said = [f"{count} {what}" for what, count in counts.items() if count]
        if not said:
            return f"no sign of noise in the times of {self.kernels} kernels"
        return f"of {self.kernels} kernels {', '.join(said)}"

    def to_dict(self) -> dict[str, Any]:
        """The counts as JSON values, and whether the plan is noisy."""
        return {**asdict(self), "is_noisy": self.is_noisy}


def noise_of(plan: Plan) -> Noise:
    """Count the kernels of a plan whose times are unreliable."""
    measured = [kernel for kernel in plan.kernels if not kernel.timing.is_predicted]
    return Noise(
        kernels=len(measured),
        perturbed=sum(kernel.is_perturbed for kernel in measured),
        wide=sum(
            any(_is_wide(one) for one in (kernel.timing, kernel.default) if one)
            for kernel in measured
        ),
        mispredicted=sum(_is_mispredicted(kernel) for kernel in measured),
        single=sum(kernel.timing.samples == 1 for kernel in measured),
    )


def _is_wide(timing: Timing) -> bool:
    # One sample has no spread; `Noise.single` counts the kernels that were run once.
    return timing.samples > 1 and timing.spread_ns > _WIDE * timing.time_ns


def _is_mispredicted(kernel: KernelPlan) -> bool:
    time_ns = kernel.timing.time_ns
    return kernel.timing.samples > 1 and abs(kernel.predicted_time_ns - time_ns) > _OFF * time_ns
