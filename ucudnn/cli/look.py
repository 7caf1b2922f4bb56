"""`ucudnn show`, `report`, `doctor`: plans, and facts of this machine."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from ucudnn.cli.console import out, say
from ucudnn.cli.options import (
    CacheOption,
    JsonOption,
)
from ucudnn.config import Config
from ucudnn.errors import CacheError, ConfigError, quoted
from ucudnn.plan import KernelPlan, Plan
from ucudnn.system.version import own_version
from ucudnn.units import format_bytes, format_ns

if TYPE_CHECKING:
    from ucudnn.doctor import Diagnosis
    from ucudnn.tuning.rationale import Rationale


def show(
    plan: Annotated[Path, typer.Argument(help="A plan file.", metavar="PLAN")],
    kernel: Annotated[
        str | None,
        typer.Option(
            help="Every batch of one kernel, and what was rejected: its number or layer.",
            metavar="KERNEL",
        ),
    ] = None,
    cache: CacheOption = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV: one row per kernel.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print a plan: for each kernel torch's default, the split, times and workspaces.

    Example: ucudnn show resnet18.plan.json --kernel 3
    """
    forms = [as_csv, as_markdown, as_json, kernel is not None]
    if sum(forms) > 1:
        raise ConfigError("--csv, --markdown, --json and --kernel exclude each other; leave one")
    loaded = Plan.load(plan)
    if any(forms[:3]):
        from ucudnn.reports.text import plan_csv, plan_document, plan_markdown

        # Not through rich, which breaks long lines.
        if as_json:
            print(json.dumps(plan_document(loaded)))
        else:
            print(plan_csv(loaded) if as_csv else plan_markdown(loaded), end="")
        return
    if kernel is None:
        _show_all(loaded)
    else:
        _show_kernels(loaded, kernel, cache)


def _show_all(plan: Plan) -> None:
    """Print one row per kernel, and what is known of the whole step."""
    from ucudnn.reports.text import as_sentence, layout_table, plan_summary, plan_table
    from ucudnn.tuning.noise import noise_of

    if plan.origin is not None:
        out.print(str(plan.origin))
    # The width decides which columns the table has.
    out.print(plan_table(plan, out.width))
    out.print(plan_summary(plan))
    if plan.layout_race is not None:
        if plan.layout_race.contestants:
            out.print(layout_table(plan.layout_race))
        say(as_sentence(str(plan.layout_race)))
    if plan.layout_hint is not None:
        say(as_sentence(str(plan.layout_hint)))
    if plan.compilation is not None:
        say(as_sentence(str(plan.compilation)))
    if plan.memory is not None:
        say(as_sentence(str(plan.memory)))
    out.print(f"Noise: {noise_of(plan)}.")


def _show_kernels(plan: Plan, wanted: str, cache: str | None) -> None:
    """Print every batch of the kernels of one number or layer.

    Raises:
        ConfigError: there is none.
    """
    from ucudnn.reports.text import kernel_table

    for kernel in (plan.kernels[index] for index in _chosen(plan, wanted)):
        out.print(kernel_table(kernel))
        say(f"layers: {', '.join(kernel.layers)}")
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
    """The kernels of one number or layer, by their numbers.

    Raises:
        ConfigError: there is none.
    """
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
    """Print the best alternatives that were rejected, by what the plan and the cache know."""
    found = _rationales(replace(plan, kernels=(kernel,)), cache)[0].alternatives
    if not found:
        return
    table = Table(title="rejected alternatives", caption="~: sum of chunks, not timed as a call")
    for heading in ("split", "time", "workspace", "error", "why not"):
        table.add_column(heading, overflow="fold")
    for one in found:
        time_ns = "-" if one.time_ns is None else format_ns(one.time_ns)
        table.add_row(
            str(one.split),
            time_ns if one.is_measured or one.time_ns is None else f"~{time_ns}",
            "-" if one.workspace_bytes is None else format_bytes(one.workspace_bytes),
            "-" if one.error is None else f"{one.error:.1e}",
            one.reason,
        )
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
    from ucudnn.tuning.noise import noise_of

    loaded = Plan.load(plan)
    known = _rationales(loaded, cache)
    write_report(loaded, output, known, [f"Noise: {noise_of(loaded)}."])
    say(f"Drew {len(loaded.kernels)} kernels; report written to {output}.")


def _rationales(plan: Plan, cache: str | None) -> tuple[Rationale, ...]:
    """Fronts and rejected alternatives, by what the plan and the cache know."""
    from ucudnn.tuning.rationale import rationales
    from ucudnn.tuning.replay import open_recording

    try:
        with open_recording(cache or Config().cache) as opened:
            return rationales(plan, opened)
    # Whoever looks at a plan from elsewhere has no cache of it.
    except CacheError:
        return rationales(plan, ())


def doctor(
    save_device_profile: Annotated[
        Path | None, typer.Option(help="Write the GPU's profile here and end.", metavar="FILE")
    ] = None,
    cache: CacheOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print what tuning depends on here: device, versions, threads, malloc, cache.

    Example: ucudnn doctor
    """
    # Under another name, because this function has the module's.
    from ucudnn import doctor as room

    if save_device_profile is not None:
        profile = room.save_device_profile(save_device_profile)
        say(f"wrote the profile of {profile.name} to {save_device_profile}")
        return
    # Without the flag `Config` asks the environment.
    found = room.diagnose(cache or Config().cache)
    if as_json:
        # A property, which `asdict` leaves out.
        print(json.dumps({**asdict(found), "advice": found.advice, "ucudnn": own_version()}))
        return
    _print_doctor(found)


def _print_doctor(found: Diagnosis) -> None:
    rows = {
        "ucudnn": own_version(),
        "device": str(found.device),
        "torch": found.software.torch,
        "oneDNN": found.software.onednn or "not in this torch",
        "cuDNN": found.cudnn,
        "threads": str(found.conditions.threads),
        "malloc": found.conditions.allocator,
        "filling 64 MiB": f"{format_ns(found.fresh_ns)} freshly allocated, "
        f"{format_ns(found.reused_ns)} in use",
        "load": f"{found.load:.1f}",
        "cache": found.cache_path + ("" if found.cache_writable else " (read-only)"),
    }
    for name, value in rows.items():
        say(f"{name:>15}  {value}")
    for sentence in found.advice or ("Nothing to advise.",):
        say(sentence)
