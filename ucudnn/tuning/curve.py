"""The curve of a network: measure every kernel for every workspace limit, and put them together."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ucudnn.problem import Problem
from ucudnn.races import Curve
from ucudnn.solvers import CurveKernel, network_curve
from ucudnn.tuning.fronts import Front
from ucudnn.tuning.memory_budget import Limits
from ucudnn.tuning.planner import KernelPlanner, survey


def kernel_front(planner_within: Callable[[int | None], KernelPlanner]) -> Front:
    """Front of time over workspace of the splits of a kernel, from no limit at all downwards.

    Args:
        planner_within: makes the planner of the kernel for a limit in bytes, None for none.

    Returns:
        Empty where nothing could be measured in time.
    """
    planner = planner_within(None)
    found = planner.front()
    planner.release()
    if not found:
        return ()
    return survey(planner_within, found[-1].workspace_bytes)


def plan_curve(
    fronts: Mapping[Problem, Front], layers: Mapping[Problem, tuple[str, ...]], limits: Limits
) -> Curve | None:
    """The curve of a network, None where a kernel was not measured in time.

    >>> from ucudnn.tuning.fronts import Point
    >>> problem = Problem("fprop", 4, 4, 4, (9,), (3,))
    >>> fronts = {problem: (Point(0, 9), Point(8, 5))}
    >>> plan_curve(fronts, {problem: ("first", "second")}, Limits(None)).by_workspace
    ((0, 18), (8, 10))

    Args:
        fronts: of time over workspace, of each kernel.
        layers: names of the layers that run each kernel.
        limits: with what is live at each kernel, where there is a memory budget.
    """
    if not all(fronts.get(problem) for problem in layers):
        return None
    by_workspace = [
        CurveKernel([point[:2] for point in fronts[problem]], len(names))
        for problem, names in layers.items()
    ]
    if limits.budget_bytes is None:
        return Curve(network_curve(by_workspace))
    by_peak = [
        kernel._replace(live_bytes=limits.live(problem))
        for problem, kernel in zip(layers, by_workspace, strict=True)
    ]
    return Curve(network_curve(by_workspace), network_curve(by_peak))
