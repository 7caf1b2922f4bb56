"""Compile the steps that judge a plan, where the model of the user is compiled."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from time import monotonic

from torch import nn

from ucudnn.execution.compiling import is_compiled, replays_graphs
from ucudnn.execution.observers import Watcher
from ucudnn.execution.override import Installation
from ucudnn.execution.stepping import STEP_ERRORS, Steps
from ucudnn.outcomes import Compilation
from ucudnn.plan import Plan
from ucudnn.problem import Problem


def compile_steps(model: nn.Module, steps: Steps, device_type: str) -> Compilation | None:
    """Let the steps of a compiled model run compiled; None if the model is not compiled.

    The first compiled steps are run. If they fail, the steps stay as they were, and the reason is
    returned.

    Args:
        model: as torch.compile returned it.
        steps: of that model.
        device_type: "cpu" or "cuda".
    """
    if not is_compiled(model):
        return None
    # Two contestants would replay the kernels of the one that was captured.
    if device_type == "cuda" and replays_graphs(model):
        reason = "its compiled code replays CUDA graphs, which keep the kernels that they captured"
        return Compilation(reason=reason)
    began, reason = monotonic(), ""
    try:
        steps.compile()
    # torch.compile raises RuntimeErrors of its own, whatever its backend raised.
    except STEP_ERRORS as error:
        reason = f"torch.compile failed ({_said(error)})"
    return Compilation(ceil(monotonic() - began), reason)


def with_relaid(plan: Plan, steps: Steps) -> Plan:
    """The plan with the number of convolutions that its compiled steps compute in another layout.

    Args:
        plan: judged by the steps.
        steps: run once, by torch's own convolutions.
    """
    compilation = plan.compilation
    if compilation is None or not compilation.is_compiled:
        return plan
    watcher = Watcher(lambda: None)
    with Installation(plan.device.type, watcher):
        steps()
    relaid = sum(any(_is_relaid(one, plan) for one in call.copied) for call in watcher.calls)
    return replace(plan, compilation=replace(compilation, relaid=relaid))


def _is_relaid(problem: Problem, plan: Plan) -> bool:
    other = replace(problem, layout="nchw" if problem.layout == "nhwc" else "nhwc")
    return plan.covers(other) and not plan.covers(problem)


def _said(error: BaseException) -> str:
    """The first line of an error that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # "backend='inductor' raised:" says less than the line below it.
    said = lines[1] if len(lines) > 1 and lines[0].endswith(":") else " ".join(lines[:1])
    return said or type(error).__name__
