"""Plans of what tuning left out: kernels by torch's own convolution, and smaller batches."""

from __future__ import annotations

from collections.abc import Callable

from ucudnn.errors import PlanError
from ucudnn.measurement import Measurement
from ucudnn.problem import Problem
from ucudnn.split import BY_BATCH, DEFAULT_ALGORITHM, KernelPlan, Timing
from ucudnn.tuning.planner import KernelPlanner


def plan_by_torch(
    problem: Problem,
    layers: tuple[str, ...],
    entry: Measurement | None,
    limit: int | None,
    kernel_of: Callable[[Problem, str], str | None],
    note: str,
    deterministic: bool = False,
) -> KernelPlan | None:
    """The undivided plan; None if torch's own was not timed, exceeds the limit or may vary.

    Args:
        problem: the kernel at its largest batch.
        layers: names of the layers that run it.
        entry: measurement of torch's own convolution; None: it was not measured.
        limit: workspace in bytes, None for any.
        kernel_of: name of the implementation by which an algorithm runs a problem.
        note: the reason, for the notes of the plan.
        deterministic: its result must never vary.
    """
    if entry is None or entry.time_ns is None or entry.workspace_bytes is None:
        return None
    if deterministic and not entry.is_deterministic:
        return None
    if limit is not None and entry.workspace_bytes > limit:
        return None
    timing = Timing(entry.time_ns, entry.spread_ns or 0, entry.workspace_bytes, len(entry.samples))
    # Its one time also plans the smaller batches that torch computes by the same implementation,
    # where it is an upper bound.
    whole = kernel_of(problem, DEFAULT_ALGORITHM)
    batches = range(1, problem.batch + 1)
    alike = (kernel_of(problem.with_batch(n), DEFAULT_ALGORITHM) == whole for n in batches)
    return KernelPlan(
        problem=problem,
        layers=layers,
        algorithms=(DEFAULT_ALGORITHM,),
        alone=tuple(0 if is_alike else BY_BATCH for is_alike in alike),
        last=((0, -1),) * problem.batch,
        predicted_time_ns=timing.time_ns,
        timing=timing,
        default=timing,
        notes=(note,),
        is_perturbed=entry.is_perturbed,
        default_is_deterministic=entry.is_deterministic,
    )


def with_every_batch(
    plan: KernelPlan,
    limit_at: Callable[[int], int | None],
    kernel_of: Callable[[Problem, str], str | None],
    planner_at: Callable[[int], KernelPlanner],
    deterministic: bool = False,
) -> KernelPlan:
    """The plan with a split of every batch, as far as anything fits.

    Torch runs other implementations for some batches, of which the largest batch says nothing:
    its own convolution of such a batch is run once, and if that exceeds the limit, the batch is
    tuned as a kernel of its own.

    Args:
        plan: of a kernel.
        limit_at: workspace in bytes at each batch, None for any.
        kernel_of: name of the implementation by which an algorithm runs a problem.
        planner_at: makes the planner of the kernel at a smaller batch.
        deterministic: no result may vary.
    """
    problem, missing = plan.problem, plan.uncovered()
    if limit_at(problem.batch) is None and not deterministic:
        return plan.with_default(missing)
    while missing:
        largest = missing[-1]
        limit = limit_at(largest)
        planner = planner_at(largest)
        default = planner.look_at_default()
        planner.release()
        if default is not None and _is_allowed(default, limit, deterministic):
            kernels = {n: kernel_of(problem.with_batch(n), DEFAULT_ALGORITHM) for n in missing}
            plan = plan.with_default([n for n in missing if kernels[n] == kernels[largest]])
        else:
            plan = _tuned_at(plan, planner_at(largest))
        missing = [n for n in plan.uncovered() if n < largest]
    return plan


def _is_allowed(default: Measurement, limit: int | None, deterministic: bool) -> bool:
    if deterministic and not default.is_deterministic:
        return False
    # What it needs is not known where it failed.
    workspace = default.workspace_bytes
    return workspace is not None and (limit is None or workspace <= limit)


def _tuned_at(plan: KernelPlan, planner: KernelPlanner) -> KernelPlan:
    """The plan with the splits of a smaller batch that is tuned alone, if anything fits."""
    try:
        smaller = planner.decide()
    except PlanError:
        return plan
    return plan if smaller is None else plan.completed_by(smaller)
