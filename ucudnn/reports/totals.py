"""Totals of a plan in a few large numbers, for the top of a report."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import NamedTuple

from ucudnn.plan import Plan
from ucudnn.units import format_bytes, format_ns


class Total(NamedTuple):
    """One number of the whole plan.

    Args:
        name: what it is of.
        value: torch's and the plan's.
        note: what they mean.
    """

    name: str
    value: str
    note: str


def totals(plan: Plan) -> Iterator[Total]:
    """Times, workspaces and peaks by torch and by the plan, as far as they are known."""
    if not plan.kernels:
        return
    yield _step(plan)
    yield from _convolutions(plan)
    yield _workspace(plan)
    yield from _peak(plan)
    changed = sum(not kernel.is_default for kernel in plan.kernels)
    partial = f", {len(plan.left_out)} left out" if plan.left_out else ""
    yield Total(
        "Kernels", f"{changed} of {len(plan.kernels)}", f"leave torch's convolution{partial}"
    )


def _step(plan: Plan) -> Total:
    race = plan.step_race
    if race is None or not race.rounds:
        why = "" if race is None else f" ({race.reason})"
        return Total("Whole step", "not timed", f"the plan was not raced in whole steps{why}")
    times = f"{format_ns(race.torch_ns)} → {format_ns(race.plan_ns)}"
    return Total(
        "Whole step", times, f"{race.ratio:.2f} times as long ({race.low:.2f} to {race.high:.2f})"
    )


def _convolutions(plan: Plan) -> Iterator[Total]:
    """The sums of all kernels that torch computes, too."""
    known = [(one, one.default, len(one.layers)) for one in plan.kernels if one.default]
    if not known:
        return
    torchs = sum(default.time_ns * calls for _, default, calls in known)
    planned = sum(kernel.timing.time_ns * calls for kernel, _, calls in known)
    about = "~" if any(kernel.timing.is_predicted for kernel, _, _ in known) else ""
    said = f"{format_ns(torchs)} → {about}{format_ns(planned)}"
    yield Total("Convolutions", said, f"{planned / torchs:.2f} times as long, summed up")


def _workspace(plan: Plan) -> Total:
    sizes = [one.default.workspace_bytes for one in plan.kernels if one.default]
    most = f"{format_bytes(max(sizes))} → " if sizes else ""
    limit = plan.config.limit_bytes
    kept = "no limit" if limit is None else f"limit {format_bytes(limit)}"
    # With a pool it is the sum over all calls, which nothing of torch's compares with.
    if plan.config.total_bytes is not None:
        most, kept = "", f"pool of {format_bytes(plan.config.total_bytes)}"
    return Total("Workspace", f"{most}{format_bytes(plan.workspace_bytes)}", f"at most; {kept}")


def _peak(plan: Plan) -> Iterator[Total]:
    memory = plan.memory
    if memory is not None and memory.plan_peak_bytes:
        said = f"{format_bytes(memory.torch_peak_bytes)} → {format_bytes(memory.plan_peak_bytes)}"
        yield Total("Peak of a step", said, f"budget {format_bytes(memory.budget_bytes)}")


def cards(plan: Plan) -> str:
    """The totals as HTML; an arrow leads from torch's own to the plan's."""
    listed = "".join(
        f"<div>{escape(one.name)}<b>{escape(one.value)}</b><span>{escape(one.note)}</span></div>"
        for one in totals(plan)
    )
    key = '<p class="under">torch\'s own → this plan</p>' if listed else ""
    return f'{key}<div class="cards">{listed}</div>' if listed else ""
