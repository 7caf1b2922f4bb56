"""Decide the layout of a model: by times of whole steps, or by sums of kernels. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ucudnn.benchmark.statistics import median_ns, ratio_interval
from ucudnn.outcomes import TOLERATED, Contestant, LayoutRace
from ucudnn.plan import Plan
from ucudnn.tuning.step_judge import has_default
from ucudnn.tuning.step_rounds import CONFIDENCE, raced_of, tells

Samples = Sequence[Sequence[int]]


class Entrant(NamedTuple):
    """One way to compute steps.

    Args:
        memory_format: of the model, "keep" or "channels_last".
        plan: None for torch's own convolutions.
        is_allowed: False if it exceeds the workspace limit, so that it is only timed.
    """

    memory_format: str
    plan: Plan | None
    is_allowed: bool


def entrants(plans: Mapping[str, Plan]) -> list[Entrant]:
    """The contestants of a race: in each layout, torch's own, and the plan if it changes anything.

    Args:
        plans: by memory format, the model's own first.
    """
    found = []
    for memory_format, plan in plans.items():
        is_allowed = all(has_default(plan, kernel) for kernel in plan.kernels)
        found.append(Entrant(memory_format, None, is_allowed))
        if not all(kernel.is_default for kernel in plan.kernels):
            found.append(Entrant(memory_format, plan, True))
    return found


def _best(of: Sequence[Entrant], samples: Samples, memory_format: str) -> int:
    """The contestant that represents a layout: the plan if it pays or torch's is not allowed."""
    # `entrants` lists torch's own first in each layout, then the plan if there is one.
    torchs, *plans = (i for i, one in enumerate(of) if one.memory_format == memory_format)
    if not plans:
        return torchs
    pays = raced_of(samples[torchs], samples[plans[0]]).pays
    # A plan that does not pay gives its kernels back to torch, where the limit allows that.
    return plans[0] if pays or not of[torchs].is_allowed else torchs


def winner(of: Sequence[Entrant], samples: Samples) -> int:
    """Index of the winner; a contestant of the model's own layout unless the gain is clear.

    Args:
        of: the contestants.
        samples: times of their steps in ns, one of each per round.
    """
    own, last = (_best(of, samples, which) for which in ("keep", "channels_last"))
    # Unless the gain is both large enough and beyond the noise, the model stays as it is.
    ratio, _, high = ratio_interval(samples[last], samples[own], CONFIDENCE)
    return last if ratio < 1 - TOLERATED and high < 1 else own


def is_decided(of: Sequence[Entrant], samples: Samples) -> bool:
    """True if more rounds would change neither the verdict on a plan nor the layout.

    Args:
        of: the contestants.
        samples: times of their steps in ns, one of each per round.
    """
    pairs = [(_best(of, samples, "channels_last"), _best(of, samples, "keep"))]
    # The contestant before a plan is torch's own in the same layout.
    pairs += [(i, i - 1) for i, one in enumerate(of) if one.plan is not None]
    return all(tells(samples[one], samples[other]) for one, other in pairs)


def outcome(of: Sequence[Entrant], samples: Samples, peaks: Sequence[int]) -> LayoutRace:
    """The race as the plan keeps it.

    Args:
        of: the contestants, torch in the model's own layout first.
        samples: times of their steps in ns, one of each per round.
        peaks: of allocated memory in bytes.
    """
    contestants = []
    for one, times, peak in zip(of, samples, peaks, strict=True):
        ratio, low, high = ratio_interval(times, samples[0])
        contestants.append(
            Contestant(
                one.memory_format,
                one.plan is not None,
                median_ns(times),
                ratio,
                low,
                high,
                peak,
                one.is_allowed,
            )
        )
    return LayoutRace(tuple(contestants), winner(of, samples), len(samples[0]))


def by_sums(plans: Mapping[str, Plan], calls: Mapping[str, int], reason: str) -> LayoutRace:
    """Compare the sums of the kernels' times, because no steps can be run.

    Args:
        plans: by memory format, the model's own first.
        calls: how many convolutions a step has in that layout.
        reason: why no steps were run.
    """
    # Sums over different sets of kernels cannot be compared.
    if any(sum(len(k.layers) for k in plans[one].kernels) < calls[one] for one in plans):
        return LayoutRace(reason=f"not all kernels have a plan in both layouts, and {reason}")
    contestants: list[Contestant] = []
    for one in entrants(plans):
        time_ns = _sum_ns(one, plans[one.memory_format])
        # A recording may lack torch's own convolution of some kernel.
        if time_ns is not None:
            contestants.append(_summed(one, time_ns, contestants))
    # Of each layout the plan comes last; it holds torch's own where that is faster.
    own, last = ({one.memory_format: i for i, one in enumerate(contestants)}[f] for f in plans)
    is_faster = contestants[last].time_ns < (1 - TOLERATED) * contestants[own].time_ns
    return LayoutRace(tuple(contestants), last if is_faster else own, reason=reason)


def _sum_ns(one: Entrant, plan: Plan) -> int | None:
    """Sum over the calls of all kernels, by a plan or by torch; None where a time is not known."""
    total = 0
    for kernel in plan.kernels:
        timing = kernel.timing if one.plan else kernel.default
        if timing is None:
            return None
        total += timing.time_ns * len(kernel.layers)
    return total


def _summed(one: Entrant, time_ns: int, others: Sequence[Contestant]) -> Contestant:
    ratio = time_ns / others[0].time_ns if others else 1.0
    is_plan, allowed = one.plan is not None, one.is_allowed
    return Contestant(one.memory_format, is_plan, time_ns, ratio, ratio, ratio, is_allowed=allowed)
