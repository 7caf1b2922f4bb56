"""`ucudnn show`, `report`, `doctor`: plans, and facts of this machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ucudnn import __version__
from ucudnn.cli.console import out, say
from ucudnn.cli.options import CacheOption, JsonOption
from ucudnn.config import Config
from ucudnn.errors import ConfigError
from ucudnn.plan import Plan
from ucudnn.units import format_ns


def show(
    plan: Annotated[Path, typer.Argument(help="A plan file.")],
    kernel: Annotated[
        str | None, typer.Option(help="Every batch of one kernel: its number or layer name.")
    ] = None,
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
        from ucudnn.reports.rows import plan_csv, plan_document, plan_markdown

        # Not through rich, which breaks long lines.
        if as_json:
            print(json.dumps(plan_document(loaded)))
        else:
            print(plan_csv(loaded) if as_csv else plan_markdown(loaded), end="")
        return
    if kernel is None:
        _print_plan(loaded)
    else:
        _print_kernels(loaded, kernel)


def _print_plan(loaded: Plan) -> None:
    from ucudnn.reports.text import as_sentence, layout_table, plan_summary, plan_table
    from ucudnn.tuning.noise import noise_of

    if loaded.origin is not None:
        out.print(str(loaded.origin))
    # The width decides which columns the table has.
    out.print(plan_table(loaded, out.width))
    out.print(plan_summary(loaded))
    if loaded.layout_race is not None:
        if loaded.layout_race.contestants:
            out.print(layout_table(loaded.layout_race))
        say(as_sentence(str(loaded.layout_race)))
    out.print(f"Noise: {noise_of(loaded)}.")


def _print_kernels(loaded: Plan, kernel: str) -> None:
    from ucudnn.reports.text import kernel_table

    # A layer has several kernels, one per pass, so its name may choose more than one.
    chosen = [
        entry
        for index, entry in enumerate(loaded.kernels)
        if kernel == str(index) or kernel in entry.layers
    ]
    if not chosen:
        raise ConfigError(
            f"--kernel must be a number from 0 to {len(loaded.kernels) - 1} or the name of a layer "
            f"of the plan, got {kernel!r}"
        )
    for entry in chosen:
        out.print(kernel_table(entry))
        say(f"layers: {', '.join(entry.layers)}")
        measured = "predicted" if entry.timing.is_predicted else "measured"
        say(
            f"time: {format_ns(entry.timing.time_ns)} {measured}, the parts add up to "
            f"{format_ns(entry.predicted_time_ns)}"
        )
        for note in entry.remarks:
            say(f"note: {note}")


def report(
    plan: Annotated[Path, typer.Argument(help="A plan file.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="HTML file to write.")],
) -> None:
    """Draw a plan as one HTML file: times, workspaces and splits; needs plotly.

    Example: ucudnn report resnet18.plan.json -o report.html
    """
    from ucudnn.reports.html import write_report

    loaded = Plan.load(plan)
    write_report(loaded, output)
    say(f"Drew {len(loaded.kernels)} kernels; report written to {output}.")


def doctor(
    save_device_profile: Annotated[
        Path | None, typer.Option(help="Write the GPU's profile here and end.", metavar="FILE")
    ] = None,
    cache: CacheOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print what tuning depends on here: device, versions, threads, malloc, cache.

    Example: ucudnn doctor --json
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
        print(json.dumps({**asdict(found), "advice": found.advice, "ucudnn": __version__}))
        return
    rows = {
        "ucudnn": __version__,
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
