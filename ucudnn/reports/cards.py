"""What a plan changes, in a few totals, and what finding it cost; pages and terminals begin so."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import NamedTuple

from ucudnn.outcomes import StepRace
from ucudnn.plan import KernelPlan, Plan, Timing
from ucudnn.segment import WHOLE, compiled_as_told
from ucudnn.units import format_bytes, format_ns, format_ratio, format_sizes
from ucudnn.verdict import is_faster


class Card(NamedTuple):
    """A total: its name, torch's value with an arrow to the plan's, and a remark."""

    name: str
    value: str
    note: str


def cards(plan: Plan) -> list[Card]:
    """The totals of a plan: time and peak memory of a step, and what the plan changes.

    >>> from ucudnn import Config
    >>> from ucudnn.measurement import Conditions, Device, Software
    >>> empty = Plan((), Device("cpu", "any"), Software("2"), Conditions(), Config())
    >>> print(*cards(empty))
    Card(name='Step', value='not timed', note='the plan was not judged by whole steps')
    """
    found = [_step(plan), *_peak(plan)]
    if not plan.division.is_whole:
        loop = "" if plan.micro_batch is None else f"a loop over {plan.micro_batch} samples"
        modules = f"{len(plan.segments)} divided" if plan.segments else loop
        found.append(Card("Modules", modules, "in micro-batches or slabs, or recomputed"))
    if plan.kernels:
        found += [*_convolutions(plan), _workspace(plan), _kernels(plan)]
    return found


def raced(plan: Plan) -> StepRace | None:
    """The race of a step by torch, in the model's own layout, and by the plan; None if none was."""
    race, layouts = plan.step_race, plan.layout_race
    if layouts is not None and layouts.winner and layouts.rounds:
        # `plan.step_race` is about two steps in the layout of the plan.
        torchs, won = layouts.ways[0], layouts.ways[layouts.winner]
        peaks = torchs.peak_bytes, won.peak_bytes
        return StepRace(torchs.time_ns, won.time_ns, *won.ratios, won.rounds, *peaks)
    return race if race is not None and race.rounds else None


def _step(plan: Plan) -> Card:
    race, memory = raced(plan), plan.memory
    if race is not None:
        ratio = format_ratio(race.ratio, race.low, race.high, race.rounds)
        where = "" if plan.memory_format == "keep" else f" in {plan.memory_format}"
        where += "" if plan.compiled is None else f", {compiled_as_told(plan.compiled)}"
        times = f"{format_ns(race.torch_ns)} → {format_ns(race.plan_ns)}"
        return Card("Step", times, f"{ratio} times as long{where}")
    why = f": {plan.step_race.reason}" if plan.step_race is not None else ""
    if memory is not None and memory.plan_ns:
        times = f"~{format_ns(memory.torch_foreseen_ns)} → {format_ns(memory.plan_ns)}"
        return Card("Step", times, f"~: foreseen{why}")
    return Card("Step", "not timed", f"the plan was not judged by whole steps{why}")


def _peak(plan: Plan) -> Iterator[Card]:
    memory, race = plan.memory, raced(plan)
    torch_bytes = plan_bytes = 0
    note = ""
    if memory is not None:
        torch_bytes, plan_bytes = memory.torch_peak_bytes, memory.plan_peak_bytes
        note = f"budget {format_bytes(memory.budget_bytes)}"
    elif race is not None:
        torch_bytes, plan_bytes = race.torch_peak_bytes, race.plan_peak_bytes
    if torch_bytes and plan_bytes:
        share = f"{plan_bytes / torch_bytes:.0%} of torch's"
        before, after = format_sizes(torch_bytes, plan_bytes)
        yield Card("Peak memory", f"{before} → {after}", "; ".join(filter(None, [share, note])))


def _known(plan: Plan) -> list[tuple[KernelPlan, Timing]]:
    """The kernels whose time by torch's own convolution is known, each with this timing."""
    return [(kernel, kernel.default) for kernel in plan.kernels if kernel.default is not None]


def _convolutions(plan: Plan) -> Iterator[Card]:
    known = _known(plan)
    if not known:
        return
    before = sum(default.time_ns * len(kernel.layers) for kernel, default in known)
    after = sum(kernel.timing.time_ns * len(kernel.layers) for kernel, _ in known)
    is_predicted = any(kernel.timing.is_predicted for kernel, _ in known)
    note = f"{after / before:.2f} times as long, summed up"
    note += "; ~: some are predicted, not timed" if is_predicted else ""
    times = f"{format_ns(before)} → {'~' if is_predicted else ''}{format_ns(after)}"
    yield Card("Convolutions", times, note)


def _workspace(plan: Plan) -> Card:
    planned, limit = format_bytes(plan.workspace_bytes), plan.config.limit_bytes
    if plan.config.total_bytes is not None:
        # The workspace of the plan is a sum over all calls. torch's is that of one call after the
        # other, and cannot be compared with a sum.
        note = f"pool of {format_bytes(plan.config.total_bytes)}, each call its own part"
        # What is left out runs torch's own convolution, whose workspace is in no pool.
        note += f"; without the {len(plan.left_out)} left out" if plan.left_out else ""
        return Card("Workspace", planned, note)
    most = max((default.workspace_bytes for _, default in _known(plan)), default=None)
    value = planned if most is None else f"{format_bytes(most)} → {planned}"
    kept = "no limit" if limit is None else f"limit {format_bytes(limit)}"
    return Card("Workspace", value, f"at most; {kept}")


def _kernels(plan: Plan) -> Card:
    changed = sum(not kernel.is_default for kernel in plan.kernels)
    partial = f", {len(plan.left_out)} left out" if plan.left_out else ""
    value = f"{changed} of {len(plan.kernels)}"
    return Card("Kernels", value, f"leave torch's own convolution{partial}")


def steps_to_pay_back(plan: Plan, seconds: float) -> int | None:
    """Number of steps after which the plan has saved the time of tuning; None if it saves none."""
    race, saved_ns = raced(plan), sum(kernel.saved_ns for kernel in plan.kernels)
    if race is not None:
        is_gain = is_faster((race.ratio, race.low, race.high))
        saved_ns = race.torch_ns - race.plan_ns if is_gain else 0
    return None if saved_ns <= 0 else ceil(seconds * 1e9 / saved_ns)


def payback(plan: Plan, seconds: float) -> str:
    """Sentence on how long tuning took, and what that bought: memory, or time that pays it back."""
    cost, memory, race = f"Tuning cost {seconds:.1f} s", plan.memory, raced(plan)
    saved = 0
    if memory is not None and memory.plan_peak_bytes:
        saved = memory.torch_peak_bytes - memory.plan_peak_bytes
    if memory is not None and saved > 0:
        bought = f"{format_bytes(saved)} ({saved / memory.torch_peak_bytes:.0%} of the peak)"
        price = ""
        if race is not None:
            price = f" for {race.ratio:.2f} times the time of a step"
        elif memory.plan_ns and memory.torch_foreseen_ns:
            ratio = memory.plan_ns / memory.torch_foreseen_ns
            price = f" for about {ratio:.2f} times the time of a step"
        return f"{cost} and bought {bought}{price}."
    is_whole = plan.division == WHOLE and plan.memory_format == "keep"
    if is_whole and all(kernel.is_default for kernel in plan.kernels):
        return f"{cost}: nothing is gained, all stays torch's own convolution."
    steps = steps_to_pay_back(plan, seconds)
    if steps is None:
        return f"{cost}: the plan saves no time that would pay it back."
    condition = "" if race is not None else ", if a step gains what its convolutions do"
    return f"{cost}: paid back after {steps:,} steps{condition}."
