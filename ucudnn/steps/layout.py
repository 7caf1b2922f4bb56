"""Decide the layout of a model by times of whole steps.

A model may be in channels_last only if its results are the same there, up to rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from ucudnn.benchmark.failures import is_out_of_memory
from ucudnn.benchmark.statistics import median_ns, ratio_interval
from ucudnn.errors import first_line
from ucudnn.outcomes import TOLERATED, Contestant, LayoutRace, StepRace
from ucudnn.plan import Plan
from ucudnn.steps.race import CONFIDENCE, race, raced_inside, raced_of, steps_ns, tells
from ucudnn.steps.run import STEP_ERRORS, StepResults, Steps
from ucudnn.steps.step_judge import NOTHING, Step, StepJudge, StepMeter, has_default, replaceable

Samples = Sequence[Sequence[int]]

# Relative rounding of a factor in TF32, a format for which torch has no dtype.
_EPS_OF_TF32 = 2.0**-10
# Results of two layouts differ by rounding, because sums have another order. Differences are
# tolerated up to this many times the difference that a change of all weights by one rounding makes.
# Observed differences were 1 to 3 times as large as that one.
_MOST_TIMES = 10.0
# Relative differences of outputs and of gradients up to these powers of the coarsest relative
# rounding (eps) need no further test. Gradients differ more, by 0.002 in a ResNet-18, because
# rounding may move a ReLU's input across zero or change the maximum of a pool.
_POWER_OF_OUTPUTS, _POWER_OF_GRADIENTS = 0.5, 0.25


class LayoutEntrant(NamedTuple):
    """One way to compute steps: by a plan, or by torch's own convolutions."""

    memory_format: str
    plan: Plan | None
    # False for torch's own convolutions if any of them may not replace the plan of its kernel, for
    # example because it exceeds the workspace limit. Then they are timed for comparison only.
    is_allowed: bool


def entrants(plans: Mapping[str, Plan]) -> list[LayoutEntrant]:
    """Entrants per layout, the model's own first: torch, then the plan if it changes anything."""
    found = []
    for memory_format, plan in plans.items():
        is_allowed = all(has_default(plan, kernel) for kernel in plan.kernels)
        found.append(LayoutEntrant(memory_format, None, is_allowed))
        if not all(kernel.is_default for kernel in plan.kernels):
            found.append(LayoutEntrant(memory_format, plan, True))
    return found


def _best(of: Sequence[LayoutEntrant], samples: Samples, memory_format: str) -> int:
    """Index of a layout's best entrant: its plan if that pays, or if torch's own may not win."""
    # `entrants` lists torch's own first in each layout, then the plan if there is one.
    torchs, *plans = (i for i, one in enumerate(of) if one.memory_format == memory_format)
    if not plans:
        return torchs
    pays = raced_of(samples[torchs], samples[plans[0]]).pays
    # A plan that does not pay gives its kernels back to torch, where the limit allows that.
    return plans[0] if pays or not of[torchs].is_allowed else torchs


def winner(of: Sequence[LayoutEntrant], samples: Samples) -> int:
    """Index of the winner: in the model's own layout, unless channels_last is clearly faster."""
    own, last = (_best(of, samples, which) for which in ("keep", "channels_last"))
    # Unless the gain is both large enough and beyond the noise, the model stays as it is.
    ratio, _, high = ratio_interval(samples[last], samples[own], CONFIDENCE)
    return last if ratio < 1 - TOLERATED and high < 1 else own


def is_decided(of: Sequence[LayoutEntrant], samples: Samples) -> bool:
    """True if the rounds show clearly whether each plan pays, and which layout is faster."""
    pairs = [(_best(of, samples, "channels_last"), _best(of, samples, "keep"))]
    # In the list of entrants, the one before a plan is torch's own in the same layout.
    pairs += [(i, i - 1) for i, one in enumerate(of) if one.plan is not None]
    return all(tells(samples[one], samples[other]) for one, other in pairs)


def outcome(of: Sequence[LayoutEntrant], samples: Samples, peaks: Sequence[int]) -> LayoutRace:
    """The race of the layouts, in the form that a plan keeps."""
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


@dataclass(frozen=True, slots=True)
class LayoutJudge:
    """Races steps of one model in its own layout and in channels_last."""

    # By memory format, the object that computes a step.
    steps: Mapping[str, Step]
    meter: StepMeter

    def judge(self, plans: Mapping[str, Plan]) -> Plan:
        """The plan of the better layout, judged by `StepJudge`, with the race of the layouts."""
        all_of_them = entrants(plans)
        # Taking the peaks runs every contestant once, so the race needs no round to warm up.
        ways = [(self.steps[one.memory_format], one.plan) for one in all_of_them]
        peaks = [self.meter.peak_bytes(*way) for way in ways]
        samples = race(
            [partial(self.meter.times, *way) for way in ways],
            self.meter.is_over,
            lambda times: is_decided(all_of_them, steps_ns(times)),
            is_warm=True,
        )
        layouts = outcome(all_of_them, steps_ns(samples), peaks)
        chosen = plans[layouts.memory_format]
        # The contestants of the chosen layout: torch's own, and the plan if it changes any kernel.
        run = [i for i, one in enumerate(all_of_them) if one.memory_format == layouts.memory_format]
        judge = StepJudge(self.steps[layouts.memory_format], self.meter)
        # If the plan changes nothing, there is no race of its steps.
        if len(run) == 1:
            judged = replace(chosen, step_race=StepRace(reason=NOTHING))
        else:
            # This race has already timed the plan against torch's own convolutions in the same
            # layout. More steps are run only if the plan lost, to find the kernels that are
            # responsible.
            torchs, planned = run
            raced = raced_inside(samples[torchs], samples[planned], chosen, replaceable(chosen))
            peaked = replace(
                raced.race, torch_peak_bytes=peaks[torchs], plan_peak_bytes=peaks[planned]
            )
            judged = judge.judge(chosen, raced._replace(race=peaked))
        return replace(judged, layout_race=layouts)


def reason_against_layout(own: Steps, last: Steps, plan: Plan) -> str:
    """Reason why a model cannot be in channels_last; "" if its results are the same there.

    Outputs and gradients of a step in both layouts are compared. If they differ by more than
    rounding usually causes, one more step is run with all weights changed by one rounding. It shows
    how strongly rounding changes the results of this model. An error for lack of memory is raised
    again.
    """
    truth = own.results()
    try:
        found = last.results()
    except STEP_ERRORS as error:
        if is_out_of_memory(error):
            raise
        return f"it fails in channels_last ({first_line(error)})"
    eps = coarsest_eps(plan)
    usual = {"outputs": eps**_POWER_OF_OUTPUTS, "gradients": eps**_POWER_OF_GRADIENTS}
    differences = _differences(truth, found)
    del found  # before another step needs memory
    if all(one <= most for one, most in zip(differences, usual.values(), strict=True)):
        return ""
    nudged = _differences(truth, own.results(nudge=eps))
    for name, difference, rounding in zip(usual, differences, nudged, strict=True):
        if difference > max(usual[name], _MOST_TIMES * rounding):
            return (
                f"in channels_last its {name} differ by {difference:.2g} of their norm, and by "
                f"{rounding:.2g} where weights change by one rounding"
            )
    return ""


def coarsest_eps(plan: Plan) -> float:
    """The coarsest relative rounding of the convolutions of a plan."""
    problems = [kernel.problem for kernel in plan.kernels]
    found = [torch.finfo(getattr(torch, problem.dtype)).eps for problem in problems]
    # A plan may have no kernel, if there was no time for any.
    return max([0.0, *found, *(_EPS_OF_TF32 for problem in problems if problem.math == "tf32")])


def _differences(truth: StepResults, found: StepResults) -> tuple[float, float]:
    """The largest relative difference of any output, and the one of all gradients together.

    All gradients are compared together, because a single gradient may be nothing but rounding,
    such as the gradient of a bias before batch norm.
    """
    pairs = zip(truth.outputs, found.outputs, strict=False)
    outputs = [_difference([one], [other]) for one, other in pairs]
    if len(truth.outputs) != len(found.outputs):
        return inf, inf
    return max(outputs, default=0.0), _difference(truth.gradients, found.gradients)


def _difference(ones: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Norm of the difference over the norm of `ones`; values that are not finite count as 0."""
    if [one.shape for one in ones] != [other.shape for other in others]:
        return inf
    squares = [0.0, 0.0]
    for one, other in zip(ones, others, strict=True):
        if not one.is_floating_point():
            continue
        a, b = (tensor.double().nan_to_num(0, 0, 0) for tensor in (one, other))
        squares[0] += float((a - b).square().sum())
        squares[1] += float(a.square().sum())
    if squares[1] == 0:
        return 0.0 if squares[0] == 0 else inf
    return float((squares[0] / squares[1]) ** 0.5)
