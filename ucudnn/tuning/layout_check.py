"""Check that a model computes in channels_last what it computes in its own layout."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from ucudnn.benchmark.failures import first_line, is_out_of_memory
from ucudnn.execution.stepping import STEP_ERRORS, Results, Steps
from ucudnn.plan import Plan

# The rounding of a factor of TF32, which has no dtype.
_EPS_OF_TF32 = 2.0**-10
# Rounding differs by layout as much as by any other order of sums: so many times what a change of
# the weights by one rounding does to the same results (1 to 3 times was seen).
_MOST_TIMES = 10.0
# Differences up to these powers of the coarsest rounding are usual. Where rounding moves a value
# over a ReLU's edge or changes the largest of a pool, gradients jump: by 0.002 in a ResNet-18.
_POWER_OF_OUTPUTS, _POWER_OF_GRADIENTS = 0.5, 0.25


def reason_against_layout(own: Steps, last: Steps, plan: Plan) -> str:
    """Reason why a model cannot be in channels_last, "" if it computes the same there.

    Outputs and gradients of a step in both layouts are compared. If they differ by more than is
    usual for rounding, a further step with weights changed by one rounding shows how much rounding
    changes the results of this model.

    Args:
        own: steps in the model's own layout.
        last: steps in channels_last.
        plan: for its dtypes.

    Raises:
        MemoryError: there is too little memory; torch raises a RuntimeError instead.
    """
    truth = own.results()
    try:
        found = last.results()
    except STEP_ERRORS as error:
        if is_out_of_memory(error):
            raise
        return f"it fails in channels_last ({first_line(error)})"
    eps = _coarsest_eps(plan)
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


def _coarsest_eps(plan: Plan) -> float:
    problems = [kernel.problem for kernel in plan.kernels]
    found = [torch.finfo(getattr(torch, problem.dtype)).eps for problem in problems]
    return max([*found, *(_EPS_OF_TF32 for problem in problems if problem.math == "tf32")])


def _differences(truth: Results, found: Results) -> tuple[float, float]:
    """Relative differences: the largest of an output, and that of all gradients together.

    All gradients are compared together, because a single one may consist of rounding only, such as
    that of a bias before batch norm.
    """
    pairs = zip(truth.outputs, found.outputs, strict=False)
    outputs = [_difference([one], [other]) for one, other in pairs]
    if len(truth.outputs) != len(found.outputs):
        return inf, inf
    return max(outputs, default=0.0), _difference(truth.gradients, found.gradients)


def _difference(ones: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Norm of the difference over the norm of the first; not finite values count as zero."""
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
