"""Plans as text: tables for a terminal, CSV and JSON, and sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich import box
from rich.table import Table

from ucudnn.kernels.noise import noise_of
from ucudnn.outcomes import LayoutRace, StepRace, Way
from ucudnn.plan import Chunk, KernelPlan, Plan, Split, Timing
from ucudnn.problem import Problem
from ucudnn.reports.cards import cards, raced
from ucudnn.reports.comparison import PlanComparison
from ucudnn.segment import compiled_as_told
from ucudnn.system.markup import csv_table
from ucudnn.units import format_bytes, format_ns, format_ratio

# Columns of the CSV file, on which users rely: keep names and order, add new columns last.
_COLUMNS = (
    *("number", "kernel", "op", "batch", "calls", "layers", "split"),
    *("default_ns", "default_workspace_bytes", "plan_ns", "plan_spread_ns"),
    *("plan_workspace_bytes", "samples", "predicted_ns", "gain"),
)


def simple_table(title: str | None = None, caption: str | None = None) -> Table:
    """A table without rows, drawn with a single ruled line, below its headings."""
    return Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


def plan_title(plan: Plan) -> str:
    """What a plan is for: its limits, the device, threads and torch."""
    threads = counted(plan.conditions.threads, "thread")
    return f"{_limits(plan)}, {plan.device}, {threads}, torch {plan.software.torch}"


def cards_table(plan: Plan) -> Table:
    """Table of a plan's totals, under its title."""
    table = simple_table(plan_title(plan))
    table.title_justify = "left"
    table.add_column("", no_wrap=True)
    table.add_column("torch's own → this plan", no_wrap=True)
    table.add_column("")
    for card in cards(plan):
        table.add_row(*card)
    return table


def kernel_name(problem: Problem) -> str:
    """The name of a kernel in tables."""
    return str(problem).replace(" at batch ", " N=")


def plan_table(plan: Plan, width: int = 120, *, everything: bool = True) -> Table:
    """Table with a row per kernel, which shows torch's default beside the plan.

    Both were timed in turn, in the same rounds. A time that was not measured, as in a plan made
    from a recording, is predicted and marked with "~". Without `everything`, kernels that stay
    torch's own convolution have no row.
    """
    table = simple_table(caption=_caption(plan))
    # In lines of fewer than 110 characters, columns for workspaces would leave no room for the
    # kernel and its split.
    wide = width >= 110
    table.add_column("#", justify="right")
    table.add_column("kernel", overflow="fold", min_width=16)
    for heading in ("calls", "default", "plan", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
        if wide and heading in ("default", "plan"):
            table.add_column("workspace", justify="right", no_wrap=True)
    table.add_column("split", overflow="fold", min_width=14)
    for index, kernel in enumerate(plan.kernels):
        if kernel.is_default and not everything:
            continue
        split = kernel.split(kernel.problem.batch)
        default = _cells(kernel.default, None, wide)
        # If the plan keeps the default, both times are of the same convolution, and differ only by
        # noise. So "= default" is printed instead of the second time.
        planned = _cells(kernel.timing, "= default" if split.is_default else None, wide)
        calls = str(len(kernel.layers))
        name = kernel_name(kernel.problem)
        table.add_row(str(index), name, calls, *default, *planned, _ratio(kernel), str(split))
    return table


def counted(count: int, what: str) -> str:
    """A count with its noun, in the plural if the count is not 1.

    >>> counted(1, "thread"), counted(2, "thread")
    ('1 thread', '2 threads')
    """
    return f"{count} {what}{'' if count == 1 else 's'}"


def _caption(plan: Plan) -> str:
    caption = "time (median ± interquartile range of the whole call) and workspace, measured; "
    if any(kernel.timing.is_predicted for kernel in plan.kernels):
        caption += "~: predicted from parts that were measured elsewhere; "
    return caption + "ratio: plan over default"


def _limits(plan: Plan) -> str:
    limit, total = plan.config.limit_bytes, plan.config.total_bytes
    layout = "" if plan.memory_format == "keep" else f"{plan.memory_format}, "
    layout += "" if plan.compiled is None else f"{compiled_as_told(plan.compiled)}, "
    said = f"{layout}workspace limit {'none' if limit is None else format_bytes(limit)}"
    if plan.memory is not None:
        said += f", memory budget {format_bytes(plan.memory.budget_bytes)}"
    pool = [] if total is None else [f"pool of {format_bytes(total)}"]
    return ", ".join([said, *pool, *(["deterministic"] if plan.config.deterministic else [])])


def _cells(timing: Timing | None, instead: str | None, wide: bool) -> tuple[str, ...]:
    if timing is None:
        return ("-", "-") if wide else ("-",)
    cells = (instead or _time(timing), format_bytes(timing.workspace_bytes))
    return cells if wide else ("\n".join(cells),)


def _ratio(kernel: KernelPlan) -> str:
    # A kernel that stays torch's own convolution has none, because the ratio of its two times is
    # only noise.
    if kernel.is_default or kernel.default is None:
        return ""
    predicted = "~" if kernel.timing.is_predicted else ""
    return f"{predicted}{kernel.timing.time_ns / kernel.default.time_ns:.2f}"


def _time(timing: Timing) -> str:
    if timing.is_predicted:
        return f"~{format_ns(timing.time_ns)}"
    # A single run has no spread, so "±0%" would be misleading.
    if timing.samples == 1:
        return f"{format_ns(timing.time_ns)} 1 run"
    return f"{format_ns(timing.time_ns)} ±{100 * timing.spread_ns / timing.time_ns:.0f}%"


def left_out_sentence(plan: Plan) -> str:
    """Sentence on how many kernels a partial plan lacks, wholly or at some batches, and why."""
    count = len(plan.left_out)
    assert plan.origin is not None
    reasons = []
    if plan.origin.left_out:
        reasons.append("the time or the memory was too little; tune again to go on")
    if plan.origin.over_limit:
        over = ", ".join(plan.origin.over_limit)
        reasons.append(f"nothing fits the workspace limit for {over}")
    return (
        f"The plan is partial: it lacks {count} kernel{'s' * (count > 1)}, or some batches of "
        f"{'them' if count > 1 else 'it'}, because {'; and '.join(reasons)}."
    )


def plan_verdict(plan: Plan) -> list[str]:
    """What the cards do not say of a plan, in sentences, from what it lacks to its noise."""
    sentences = [left_out_sentence(plan)] if plan.left_out else []
    sentences += _kernel_verdict(plan)
    if plan.compiles and any(not one.is_default for one in plan.kernels):
        sentences.append("In compiled code, its kernels act inside `ucudnn.installed(plan)`.")
    if plan.compiles:
        sentences.append(
            "The model is compiled where a script calls `ucudnn.convert_(model, plan)`, or by "
            "`ucudnn run --plan FILE -- train.py`."
        )
    elif plan.segments:
        sentences.append(
            "Modules are divided where a script calls `ucudnn.convert_(model, plan)`, or by "
            "`ucudnn run --plan FILE -- train.py`; `ucudnn show --segments` lists them."
        )
    if plan.micro_batch is not None:
        sentences.append(
            f"The training loop runs the model in micro-batches of {plan.micro_batch}: see "
            f"plan.micro_batches."
        )
    if plan.comparison is not None:
        sentences.append(as_sentence(str(plan.comparison)))
    if plan.memory is not None:
        causes = [f"{format_bytes(size)} of {what}" for what, size in plan.memory.causes if size]
        sentences.append(f"The peak by torch is {', '.join(causes)}.")
    sentences += _layout_verdict(plan)
    sentences += _race_verdict(plan.step_race or StepRace())
    if plan.compilation is not None:
        sentences.append(as_sentence(str(plan.compilation)))
    if plan.kernels:
        noise = noise_of(plan)
        said = str(noise) if noise.kernels else "not judged, because all times are predicted"
        sentences.append(f"Noise: {said}.")
    return sentences


def _layout_verdict(plan: Plan) -> list[str]:
    if plan.layout_race is not None:
        return [as_sentence(str(plan.layout_race))]
    return [f"The layout is {plan.memory_format}."] if plan.memory_format != "keep" else []


def _race_verdict(race: StepRace) -> list[str]:
    """Sentences on kernels in a race of whole steps."""
    sentences = []
    if race.inside is not None:
        ratio = format_ratio(*race.inside, race.rounds)
        sentences.append(
            f"Inside steps, the kernels that the plan changes take {ratio} times as long."
        )
    if race.dropped:
        count = counted(len(race.dropped), "kernel")
        sentences.append(f"{count} did not pay in whole steps, so torch's own convolution is kept.")
    return sentences


def _kernel_verdict(plan: Plan) -> list[str]:
    """Sentences on the time that faster kernels save, and on the time that slower kernels lose."""
    saved = [kernel.saved_ns for kernel in plan.kernels]
    faster, slower = [one for one in saved if one > 0], [one for one in saved if one < 0]
    sentences = []
    if faster:
        sentences.append(f"Faster kernels: {len(faster)}, by {format_ns(sum(faster))} in all.")
    if slower:
        limit = "the workspace limit" if plan.memory is None else "what the memory budget leaves it"
        if plan.config.total_bytes is not None:
            limit = "its part of the pool"
        sentences.append(
            f"Slower kernels: {len(slower)}, by {format_ns(-sum(slower))} in all, where torch's "
            f"own convolution exceeds {limit}."
        )
    return sentences


def as_sentence(said: str) -> str:
    """Turn a clause into a sentence, with a capital letter and a period.

    >>> as_sentence("the layout is the model's own")
    "The layout is the model's own."
    """
    return f"{said[0].upper()}{said[1:]}."


def ways_of(plan: Plan) -> list[Way]:
    """The ways to run a step that tuning made known, and with a budget the step by the plan."""
    memory, race = plan.memory, raced(plan)
    compiled = () if plan.compilation is None else plan.compilation.ways
    if memory is None or not (memory.ways or compiled):
        return [*compiled]
    # There is no race if torch's step does not fit; then the time is that of the last check.
    plan_ns = memory.plan_ns if race is None else race.plan_ns
    foreseen = memory.plan_foreseen_bytes, memory.plan_foreseen_ns
    this = Way("plan", "this plan", *foreseen, memory.plan_peak_bytes, plan_ns)
    ways = [*memory.ways, *compiled, *([this] if memory.plan_peak_bytes else [])]
    return sorted(ways, key=lambda way: -way.most_bytes)


def ways_table(ways: Sequence[Way]) -> Table:
    """Table with a row per way to run a step."""
    table = simple_table("Ways to run a step", "-: not foreseen, or no such step was run")
    for heading in ("way", "foreseen peak", "foreseen step", "peak", "step"):
        table.add_column(heading, justify="left" if heading == "way" else "right")
    for way in ways:
        found = (way.foreseen_bytes, way.foreseen_ns), (way.peak_bytes, way.time_ns)
        cells = [(format_bytes(size), format_ns(ns)) if ns else ("-", "-") for size, ns in found]
        table.add_row(way.name, *cells[0], *cells[1])
    return table


def layout_table(layouts: LayoutRace) -> Table:
    """One row per way of a race of layouts; the winner is marked."""
    caption = f"median of {layouts.rounds} interleaved rounds"
    if not all(one.is_allowed for one in layouts.ways):
        caption += "; over the limit: torch's own, of more workspace than allowed, never chosen"
    table = simple_table("Layout of the model", f"{caption}; *: what the plan is for")
    for heading in ("", "by", "step", "ratio to torch", "peak", ""):
        table.add_column(heading, justify="right" if heading in ("step", "peak") else "left")
    for index, one in enumerate(layouts.ways):
        ratio = format_ratio(*one.ratios, one.rounds)
        mark = "*" if index == layouts.winner else ""
        over = "" if one.is_allowed else "over the limit"
        peak = format_bytes(one.peak_bytes)
        table.add_row(mark, one.name, format_ns(one.time_ns), ratio, peak, over)
    return table


def kernel_table(kernel: KernelPlan) -> Table:
    """Table of a kernel's split at each batch; neighbouring batches with like splits share rows."""
    table = Table(title=str(kernel.problem), caption="timed: the whole split was; else derived")
    table.add_column("batch", justify="right")
    table.add_column("split")
    table.add_column("")
    every = range(1, kernel.problem.batch + 1)
    rows = [(n, kernel.split(n)) for n in every if kernel.covers(n)]
    for repeated, group in groupby(rows, lambda row: _repeated(kernel, *row)):
        entries = list(group)
        if repeated is not None and len(entries) > 1:
            splits = [split for _, split in entries]
            batches = f"{entries[0][0]}-{entries[-1][0]}"
            table.add_row(batches, _in_words(repeated, splits), "derived")
            continue
        for n, split in entries:
            table.add_row(str(n), str(split), "derived" if kernel.is_derived(n) else "timed")
    return table


def _repeated(kernel: KernelPlan, batch: int, split: Split) -> Chunk | str | None:
    """What the split of a batch repeats: a chunk, or the algorithm of an undivided batch.

    The result is None if the split repeats nothing. A split that repeats a chunk may have one other
    chunk, for the remaining samples. Neighbouring batches with the same result share a row of the
    table; a batch with the result None has a row of its own.
    """
    # A batch has a row of its own if its split was timed as a whole, or consists of slabs.
    if split.axis != "batch" or not kernel.is_derived(batch):
        return None
    if len(split.chunks) == 1:
        return split.chunks[0].algorithm
    largest = max(split.chunks, key=lambda chunk: chunk.size)
    rest = [chunk for chunk in split.chunks if chunk != largest]
    return largest if len(rest) <= 1 else None


def _in_words(repeated: Chunk | str, splits: list[Split]) -> str:
    """Words for what the splits of neighbouring batches have in common."""
    if isinstance(repeated, str):
        return f"undivided {repeated}"
    others = {chunk.algorithm for split in splits for chunk in split.chunks if chunk != repeated}
    rest = f", the rest by {' or '.join(sorted(others))}" if others else ""
    return f"chunks of {repeated.size} {repeated.algorithm}{rest}"


def comparison_table(found: PlanComparison, names: tuple[str, str]) -> Table:
    """Table with a row per kernel that two plans compute differently, by each plan's own times."""
    table = simple_table(
        caption="time and workspace of the whole call in each plan's own run, which may have been "
        "a faster or slower day; ratio: over torch's default in the same run; -: not planned"
    )
    table.add_column("kernel", overflow="fold", min_width=16)
    for heading in ("time", "workspace", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name in names:
        table.add_column(f"split of {name}", overflow="fold", min_width=14)
    for pair in found.changed:
        kernels = (pair.one, pair.other)
        cells = zip(*(_compared(kernel) for kernel in kernels), strict=True)
        splits = (str(kernel.split(kernel.problem.batch)) if kernel else "-" for kernel in kernels)
        table.add_row(kernel_name(pair.problem), *("\n".join(both) for both in cells), *splits)
    return table


def _compared(kernel: KernelPlan | None) -> tuple[str, str, str]:
    if kernel is None:
        return "-", "-", "-"
    workspace = format_bytes(kernel.timing.workspace_bytes)
    return _time(kernel.timing), workspace, _ratio(kernel) or "-"


def comparison_summary(found: PlanComparison, names: tuple[str, str]) -> list[str]:
    """Sentences on how many kernels two plans compute alike, and on the totals of each plan."""
    same = len(found.pairs) - len(found.changed)
    if not found.changed:
        verdict = f"Both compute all {same} kernels alike"
        verdict += (
            "." if found.is_same else ", but were made for other devices or by other settings."
        )
    else:
        verdict = f"{len(found.changed)} of {len(found.pairs)} kernels differ."
    totals = []
    for name, plan in zip(names, (found.one, found.other), strict=True):
        said = "; ".join(f"{card.name.lower()} {card.value} ({card.note})" for card in cards(plan))
        layout = f" {as_sentence(str(plan.layout_race))}" if plan.layout_race else ""
        totals.append(f"{name}: {said}.{layout}")
    return [verdict, *totals]


def _kernel_row(number: int, kernel: KernelPlan) -> dict[str, Any]:
    """The CSV row of a kernel, by the names in `_COLUMNS`; None for a value that is not known."""
    split, default, timing = kernel.split(kernel.problem.batch), kernel.default, kernel.timing
    gain = None if default is None else round(default.time_ns / timing.time_ns, 4)
    return {
        "number": number,
        "kernel": str(kernel.problem),
        "op": kernel.problem.op,
        "batch": kernel.problem.batch,
        "calls": len(kernel.layers),
        "layers": " ".join(dict.fromkeys(kernel.layers)),
        "split": str(split),
        "default_ns": None if default is None else default.time_ns,
        "default_workspace_bytes": None if default is None else default.workspace_bytes,
        "plan_ns": timing.time_ns,
        "plan_spread_ns": timing.spread_ns,
        "plan_workspace_bytes": timing.workspace_bytes,
        "samples": timing.samples,
        "predicted_ns": kernel.predicted_time_ns,
        "gain": 1.0 if split.is_default else gain,
    }


def comparison_document(found: PlanComparison) -> dict[str, Any]:
    """A comparison of two plans as JSON values; the values of a kernel are those of its CSV row."""

    def row(plan: Plan, kernel: KernelPlan | None) -> dict[str, Any] | None:
        return None if kernel is None else _kernel_row(plan.kernels.index(kernel), kernel)

    changed = [
        {
            "problem": asdict(pair.problem),
            "one": row(found.one, pair.one),
            "other": row(found.other, pair.other),
        }
        for pair in found.changed
    ]
    differences = [asdict(difference) for difference in found.differences]
    return {"is_same": found.is_same, "differences": differences, "changed": changed}


def plan_csv(plan: Plan) -> str:
    """The kernels of a plan as CSV; a value that is not known is empty."""
    rows = [_kernel_row(number, kernel) for number, kernel in enumerate(plan.kernels)]
    cells = [["" if row[name] is None else row[name] for name in _COLUMNS] for row in rows]
    return csv_table(_COLUMNS, cells)


def plan_document(plan: Plan) -> dict[str, Any]:
    """A plan's file as JSON values, in which each kernel also has its CSV row as `summary`."""
    document = plan.to_dict()
    # The checksum is left out, because it would be wrong for a document with these added rows.
    del document["checksum"]
    for number, (kernel, fields) in enumerate(zip(plan.kernels, document["kernels"], strict=True)):
        fields["summary"] = _kernel_row(number, kernel)
    return {**document, "left_out": list(plan.left_out)}
