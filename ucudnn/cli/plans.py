"""`ucudnn show`, `report`, `check`, `compare`: print, draw, check and compare plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from ucudnn.cli.console import Answer, bar, out, print_json, print_lines, say
from ucudnn.cli.options import AllOption, CacheOption, JsonOption
from ucudnn.config import Config
from ucudnn.errors import CacheError, ConfigError, quoted
from ucudnn.plan import KernelPlan, Plan
from ucudnn.segment import compiled_as_told
from ucudnn.units import format_bytes, format_ns

if TYPE_CHECKING:
    from ucudnn.kernels.rationale import Rationale

# The word to print for each value of `Finding.is_true`; None means that nothing was checked.
_WORDS = {True: "ok", False: "NO", None: "skipped"}


def show(
    plan: Annotated[Path, typer.Argument(help="A plan file.", metavar="PLAN")],
    kernel: Annotated[
        str | None,
        typer.Option(
            help="Every batch of one kernel, and what was rejected: its number or layer.",
            metavar="KERNEL",
        ),
    ] = None,
    segments: Annotated[
        bool,
        typer.Option(
            "--segments",
            help="Modules that run in parts, those that cannot, and peaks of all ways.",
        ),
    ] = False,
    memory_snapshot: Annotated[
        Path | None,
        typer.Option(
            help="Write the memory of both steps for PyTorch's viewer, pytorch.org/memory_viz.",
            metavar="FILE",
        ),
    ] = None,
    cache: CacheOption = None,
    everything: AllOption = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV: one row per kernel.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print a plan: its totals, and for each kernel torch's default, split, times and workspaces.

    Example: ucudnn show resnet18.plan.json --kernel 3
    """
    asked = as_csv, as_json, segments, kernel is not None, memory_snapshot is not None
    if sum(asked) > 1:
        raise ConfigError(
            "--csv, --json, --segments, --kernel and --memory-snapshot exclude each other; leave "
            "one"
        )
    loaded = Plan.load(plan)
    if memory_snapshot is not None:
        if loaded.memory is None:
            raise ConfigError(
                f"--memory-snapshot needs a plan that was made with --memory-budget, and {plan} is "
                f"none"
            )
        loaded.memory.save(memory_snapshot)
        say(f"{memory_snapshot} is written; open it at https://pytorch.org/memory_viz")
        return
    if as_csv or as_json:
        from ucudnn.reports.text import plan_csv, plan_document

        if as_json:
            print_json(plan_document(loaded))
        else:
            print(plan_csv(loaded), end="")
        return
    if segments:
        _show_segments(loaded)
    elif kernel is None:
        print_lines(plan_lines(loaded, everything=everything))
        if loaded.origin is not None:
            out.print(str(loaded.origin))
    else:
        _show_kernels(loaded, kernel, cache)


def plan_lines(plan: Plan, *, everything: bool) -> Iterator[str | Table]:
    """A plan: its totals, sentences, and a row per kernel, or per kernel that is changed."""
    from ucudnn.reports.text import cards_table, counted, layout_table, plan_table, plan_verdict

    yield cards_table(plan)
    yield from plan_verdict(plan)
    layouts = plan.layout_race
    if layouts is not None and layouts.ways and not layouts.is_fixed:
        yield layout_table(layouts)
    kept = 0 if everything else sum(kernel.is_default for kernel in plan.kernels)
    if kept < len(plan.kernels):
        # The width decides which columns the table has.
        yield plan_table(plan, out.width, everything=everything)
    if kept:
        stay = (
            "stays torch's own; --all lists it"
            if kept == 1
            else "stay torch's own; --all lists them"
        )
        yield f"{counted(kept, 'kernel')} {stay}."


def _show_segments(plan: Plan) -> None:
    """Print which modules run in parts, which cannot, and the ways to run the step."""
    from ucudnn.reports.text import as_sentence, ways_of, ways_table

    for one in plan.segments:
        say(as_sentence(str(one)))
    if plan.micro_batch is not None:
        say(f"A training loop runs the model in micro-batches of {plan.micro_batch}.")
    if plan.compiled is not None:
        say(as_sentence(f"the model is {compiled_as_told(plan.compiled)}"))
    if not plan.segments and plan.micro_batch is None:
        say("No module runs in micro-batches or slabs.")
    if plan.comparison is not None:
        say(as_sentence(str(plan.comparison)))
    for name, reason in plan.reasons:
        say(f"{name or 'The model'} stays as it is: {reason}.")
    if plan.memory is not None:
        say(as_sentence(str(plan.memory)))
    if ways := ways_of(plan):
        out.print(ways_table(ways))


def _show_kernels(plan: Plan, wanted: str, cache: str | None) -> None:
    from ucudnn.reports.text import kernel_table

    for kernel in (plan.kernels[index] for index in _chosen(plan, wanted)):
        out.print(kernel_table(kernel))
        say(f"layers: {', '.join(dict.fromkeys(kernel.layers))}")
        measured = "predicted" if kernel.timing.is_predicted else "measured"
        say(
            f"time: {format_ns(kernel.timing.time_ns)} {measured}, the parts add up to "
            f"{format_ns(kernel.predicted_time_ns)}"
        )
        if plan.memory is not None and kernel.live_bytes is not None:
            live, left = format_bytes(kernel.live_bytes), plan.limit_bytes(kernel) or 0
            say(f"memory: {live} beside its workspace, which may take {format_bytes(left)}")
        for note in kernel.remarks:
            say(f"note: {note}")
        _explain(plan, kernel, cache)


def _chosen(plan: Plan, wanted: str) -> list[int]:
    # A layer has several kernels, one per pass, so its name may choose more than one.
    found = [
        index
        for index, kernel in enumerate(plan.kernels)
        if wanted == str(index) or wanted in kernel.layers
    ]
    if not found:
        raise ConfigError(
            f"--kernel must be a number from 0 to {len(plan.kernels) - 1} or the name of a layer "
            f"of the plan, got {quoted(wanted)}"
        )
    return found


def _explain(plan: Plan, kernel: KernelPlan, cache: str | None) -> None:
    found = _rationales(replace(plan, kernels=(kernel,)), cache)[0].alternatives
    if not found:
        return
    table = Table(title="rejected alternatives", caption="~: sum of chunks, not timed as a call")
    for heading in ("split", "time", "workspace", "error", "why not"):
        table.add_column(heading, overflow="fold")
    for one in found:
        table.add_row(*one.cells)
    out.print(table)


def report(
    plan: Annotated[Path, typer.Argument(help="A plan file.", metavar="PLAN")],
    output: Annotated[
        Path,
        typer.Option("-o", "--output", help="HTML file to write; needs plotly.", metavar="FILE"),
    ],
    cache: CacheOption = None,
) -> None:
    """Draw a plan as one HTML file: totals, charts, what was rejected and why.

    Example: ucudnn report resnet18.plan.json -o report.html
    """
    from ucudnn.reports.html import write_report

    loaded = Plan.load(plan)
    write_report(loaded, output, _rationales(loaded, cache))
    say(f"Drew {len(loaded.kernels)} kernels; report written to {output}.")


def _rationales(plan: Plan, cache: str | None) -> tuple[Rationale, ...]:
    from ucudnn.kernels.rationale import rationales
    from ucudnn.kernels.tune import open_recording

    try:
        with open_recording(cache or Config().cache) as opened:
            return rationales(plan, opened)
    # A plan from another machine may come without the cache that belongs to it, which is no error.
    except CacheError:
        return rationales(plan, ())


def check(
    plan: Annotated[Path, typer.Argument(help="A plan file.", metavar="PLAN")],
    canaries: Annotated[
        int,
        typer.Option(
            help="So many kernels are timed again, those that save most.", metavar="COUNT"
        ),
    ] = 3,
) -> Answer:
    """Check whether a plan still holds on this machine; exit status 1 if not.

    Example: ucudnn check resnet18.plan.json
    """
    loaded = Plan.load(plan)
    # This imports torch, so it comes after the plan is loaded: the error for a wrong path need not
    # wait for torch.
    from ucudnn.check import check as check_plan

    findings = []
    with bar("checking") as update:
        for finding in check_plan(loaded, canaries):
            findings.append(finding)
            update(len(findings), None)
    is_true = all(finding.is_true is not False for finding in findings)
    lines = [f"{_WORDS[one.is_true]:>7}  {one.about}: {one.said}" for one in findings]
    lines.append("The plan is valid here." if is_true else "The plan is not valid here any more.")
    document = {"is_true": is_true, "findings": [asdict(one) for one in findings]}
    return Answer(document, lines, None if is_true else "")


def compare(
    one: Annotated[Path, typer.Argument(help="A plan file.", metavar="PLAN")],
    other: Annotated[Path, typer.Argument(help="Another one.", metavar="PLAN")],
) -> Answer:
    """Print the differences of two plans, kernel by kernel; exit status 1 if they differ.

    Example: ucudnn compare before.plan.json after.plan.json
    """
    from ucudnn.reports.comparison import compare as compare_plans
    from ucudnn.reports.text import comparison_document, comparison_summary, comparison_table

    found = compare_plans(Plan.load(one), Plan.load(other))
    names = (str(one), str(other))
    lines: list[str | Table] = [f"{it.name}: {it.one} | {it.other}" for it in found.differences]
    if found.changed:
        lines.append(comparison_table(found, names))
    lines += comparison_summary(found, names)
    return Answer(comparison_document(found), lines, None if found.is_same else "")
