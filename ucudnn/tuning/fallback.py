"""The plan of a kernel that is left to torch's own convolution. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ucudnn.axis import BatchAxis
from ucudnn.measurement import Measurement
from ucudnn.plan import DEFAULT_ALGORITHM, KernelPlan, Split, Step, Timing
from ucudnn.problem import Problem
from ucudnn.tuning.batch_splits import BatchSplits
from ucudnn.tuning.plan_draft import PlanDraft
from ucudnn.tuning.split_table import plan_by


def plan_by_torch(
    problem: Problem,
    layers: tuple[str, ...],
    entry: Measurement | None,
    limit: int | None,
    kernel_of: Callable[[Problem, str], str | None],
    note: str,
) -> KernelPlan | None:
    """The undivided plan; None if torch's own was not timed or exceeds the limit.

    Args:
        problem: the kernel at its largest batch.
        layers: names of the layers that run it.
        entry: measurement of torch's own convolution; None: it was not measured.
        limit: workspace in bytes, None for any.
        kernel_of: name of the implementation by which an algorithm runs a problem.
        note: the reason, for the notes of the plan.
    """
    if entry is None or entry.time_ns is None or entry.workspace_bytes is None:
        return None
    if limit is not None and entry.workspace_bytes > limit:
        return None
    spread_ns, samples = entry.spread_ns or 0, len(entry.samples)
    timing = Timing(entry.time_ns, spread_ns, entry.workspace_bytes, samples)
    # Its one time also plans the smaller batches that torch computes by the same implementation,
    # where it is an upper bound.
    table = BatchSplits.of(BatchAxis(problem), (), [entry], kernel_of, limit)
    # Undivided, by torch's own convolution: what runs without any plan.
    split = Split("batch", (Step(problem.batch, DEFAULT_ALGORITHM),))
    plan = plan_by([table], PlanDraft(problem, split), layers, timing, timing, (note,))
    return replace(plan, is_perturbed=entry.is_perturbed)
