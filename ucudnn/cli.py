"""The command line: a skin that parses, calls one public function and prints."""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ucudnn.config import Config
from ucudnn.errors import ConfigError, PlanError, ProblemError, UcudnnError
from ucudnn.load import read_config, trace_named
from ucudnn.plan import Plan
from ucudnn.units import format_bytes, format_ns

app = typer.Typer(
    name="ucudnn",
    help="Split the mini-batch of each convolution, so that fast algorithms fit.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
cache_app = typer.Typer(help="Look at and look after the measurement cache.", no_args_is_help=True)
app.add_typer(cache_app, name="cache")

_SAYS_NO, _USAGE, _ENVIRONMENT, _INTERRUPTED = 1, 2, 3, 130
# A pipe has no width of its own: one that holds a table.
_out = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160)
_err = Console(stderr=True)

CacheOption = Annotated[
    str | None, typer.Option("--cache", help="Folder of the measurement cache.", metavar="DIR")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


def main() -> None:
    """Run the command line; every error is one sentence and an exit status.

    Exit status: 0 done, 1 the answer is no, 2 wrong usage, 3 the environment does not allow it,
    130 interrupted.
    """
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            app()
    except _InterruptedError:
        _fail("interrupted; measurements taken so far are in the cache", _INTERRUPTED)
    except (ConfigError, ProblemError) as error:
        _fail(str(error), _USAGE)
    except PlanError as error:
        _fail(str(error), _SAYS_NO)
    except UcudnnError as error:
        _fail(str(error), _ENVIRONMENT)


class _InterruptedError(Exception):
    """Ctrl-C while measuring; typer would end silently on KeyboardInterrupt itself."""


def _fail(message: str, status: int) -> None:
    _err.print(f"ucudnn: {message}", style="red", highlight=False, markup=False, soft_wrap=True)
    sys.exit(status)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """What `warnings.showwarning` is called as; a user of the command wants the sentence alone."""
    del category, filename, lineno, file, line
    _err.print(f"ucudnn: warning: {message}", highlight=False, markup=False, soft_wrap=True)


@app.command()
def tune(
    model: Annotated[str, typer.Argument(help="module:callable that returns a model, or a CSV.")],
    input: Annotated[
        list[str] | None, typer.Option("--input", help="Input shape, such as 64x3x224x224.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the plan here.")
    ] = None,
    workspace_limit: Annotated[
        str | None, typer.Option(help="Workspace each kernel may use, such as 64MiB.")
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="Micro-batch sizes: undivided, powers-of-two or all.")
    ] = None,
    ops: Annotated[
        str | None, typer.Option(help="Some of fprop,dgrad,wgrad, separated by commas.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="For a CSV: dtype of its layers.")] = "float32",
    layout: Annotated[str, typer.Option(help="For a CSV: nchw or nhwc.")] = "nchw",
    channels_last: Annotated[
        bool, typer.Option(help="For a model: convert it and its inputs to channels-last.")
    ] = False,
    autocast: Annotated[
        bool, typer.Option(help="For a model: plan what bfloat16 autocast would run.")
    ] = False,
    infer: Annotated[bool, typer.Option(help="Plan the forward pass only.")] = False,
    config_file: Annotated[
        Path | None, typer.Option("--config", help="JSON file with settings.", metavar="FILE")
    ] = None,
    cache: CacheOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure convolutions on this machine and write a plan.

    Example: ucudnn tune examples/models.py:resnet18 --input 32x3x224x224 -o resnet18.plan.json
    """
    given = {"workspace_limit": workspace_limit, "policy": policy, "ops": ops, "cache": cache}
    config = _settings(config_file, {**given, **({"ops": "fprop"} if infer else {})})
    if output is not None and (output.is_dir() or not output.parent.is_dir()):
        raise ConfigError(f"--output must be a file in a folder that exists, got {output}")
    from ucudnn.tuner import tune_problems

    if model.endswith(".csv"):
        from ucudnn.layer_table import read_layers

        layers = read_layers(model, config.ops, dtype, layout)
    else:
        layers = trace_named(model, input or [], channels_last, autocast, infer)
    start = time.monotonic()
    try:
        with _progress() as (on_progress, counts):
            plan = tune_problems(layers, config, on_progress)
    except KeyboardInterrupt:
        raise _InterruptedError from None
    if output is not None:
        plan.save(output)
    seconds = time.monotonic() - start
    _print_tuned(plan, counts, seconds, output, as_json)


def _settings(file: Path | None, given: dict[str, Any]) -> Config:
    """Settings of a file, or the environment's, with flags over them."""
    flags = {name: value for name, value in given.items() if value is not None}
    return replace(read_config(file) if file else Config(), **flags)


def _print_tuned(
    plan: Plan, counts: dict[str, int], seconds: float, output: Path | None, as_json: bool
) -> None:
    if as_json:
        summary = {
            **counts,
            "seconds": round(seconds, 3),
            "kernels": len(plan.kernels),
            "hash": plan.hash,
            "workspace_bytes": plan.workspace_bytes,
            "predicted_time_ns": plan.predicted_time_ns,
            "output": None if output is None else str(output),
        }
        print(json.dumps(summary))
        return
    from ucudnn.tables import plan_summary, plan_table

    _out.print(plan_table(plan, _out.width))
    _out.print(plan_summary(plan), highlight=False)
    if counts["measured"]:
        said = f"Measured {counts['measured']} candidates in {seconds:.1f} s"
    else:
        said = f"Measured nothing: everything was in the cache ({seconds:.1f} s)"
    where = f"; plan written to {output}" if output else "; no -o FILE, so the plan was not kept"
    _say(f"{said}, reused {counts['reused']}{where}.")


@app.command()
def show(
    plan: Annotated[Path, typer.Argument(help="A plan file.")],
    kernel: Annotated[
        str | None, typer.Option(help="Every batch of one kernel: its number or layer name.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print a plan: per kernel torch's default, the split, times and workspaces.

    Example: ucudnn show resnet18.plan.json --kernel 3
    """
    loaded = Plan.load(plan)
    if as_json:
        print(json.dumps(loaded.to_dict()))
        return
    from ucudnn.tables import kernel_table, plan_summary, plan_table

    if kernel is None:
        _out.print(plan_table(loaded, _out.width))
        _out.print(plan_summary(loaded), highlight=False)
        return
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
        _out.print(kernel_table(entry))
        _say(f"layers: {', '.join(entry.layers)}")
        for note in entry.notes:
            _say(f"note: {note}")


@app.command()
def doctor(cache: CacheOption = None, as_json: JsonOption = False) -> None:
    """Say what tuning depends on here: device, versions, threads, malloc, cache.

    Example: ucudnn doctor --json
    """
    from ucudnn.doctor import diagnose

    found = diagnose(cache or Config().cache)
    if as_json:
        print(json.dumps({**asdict(found), "advice": found.advice}))
        return
    rows = {
        "device": str(found.device),
        "torch": found.software.torch,
        "oneDNN": found.software.onednn or "not in this torch",
        "threads": str(found.conditions.threads),
        "malloc": found.conditions.allocator,
        "filling 64 MiB": f"{format_ns(found.fresh_ns)} freshly allocated, "
        f"{format_ns(found.reused_ns)} in use",
        "load": f"{found.load:.1f}",
        "cache": found.cache_path + ("" if found.cache_writable else " (read-only)"),
    }
    for name, value in rows.items():
        _say(f"{name:>15}  {value}")
    for sentence in found.advice or ("Nothing to advise.",):
        _say(sentence)


WhereOption = Annotated[
    list[str] | None,
    typer.Option(help="Only entries with this value, such as problem.op=fprop or status=failed."),
]


@cache_app.command()
def info(cache: CacheOption = None, as_json: JsonOption = False) -> None:
    """Say what the cache holds: devices, measurements, versions.

    Example: ucudnn cache info --json
    """
    found = _cache_commands().info(cache)
    if as_json:
        print(json.dumps(asdict(found)))
        return
    _say(f"{found.location}{'' if found.writable else ' (read-only)'}")
    _say(f"{found.records} measurements in {found.files} files, {format_bytes(found.file_bytes)}")
    for device in found.devices:
        states = ", ".join(f"{count} {status}" for status, count in device.records_by_status)
        _say(f"  {device.device}: {device.records} measurements ({states})")
        for software, count in device.versions:
            _say(f"    {count} with {software}")


@cache_app.command()
def check(
    fix: Annotated[bool, typer.Option("--fix", help="Put right what can be.")] = False,
    cache: CacheOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read every file of the cache and say what is wrong; exit status 1 if something is.

    Example: ucudnn cache check --fix
    """
    report = _cache_commands().check(cache, fix)
    if as_json:
        print(json.dumps({**asdict(report), "clean": report.clean}))
    else:
        _say(f"{report.records} measurements in {report.files} sound files")
        for label in ("problems", "fixed", "notes"):
            for sentence in getattr(report, label):
                _say(f"{label}: {sentence}")
    if not report.clean:
        raise typer.Exit(_SAYS_NO)


@cache_app.command()
def merge(
    others: Annotated[list[Path], typer.Argument(help="Folders of other caches, only read.")],
    cache: CacheOption = None,
) -> None:
    """Add everything that other caches hold.

    Example: ucudnn cache merge /mnt/fleet/ucudnn
    """
    report = _cache_commands().merge(others, cache)
    _say(f"read {report.read} measurements, {report.added} of them new here")


@cache_app.command()
def export(
    file: Annotated[Path, typer.Argument(help="A .csv or .json file to write.")],
    where: WhereOption = None,
    cache: CacheOption = None,
) -> None:
    """Write measurements to a CSV or JSON file, without loss.

    Example: ucudnn cache export timings.csv --where problem.op=fprop
    """
    count = _cache_commands().export(file, cache, where or ())
    _say(f"wrote {count} measurements to {file}")


@cache_app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="What `export` wrote, or a probe's timings.csv.")],
    layers: Annotated[
        list[Path] | None, typer.Option(help="A layer table that the probe was given.")
    ] = None,
    cache: CacheOption = None,
) -> None:
    """Add the measurements of a file; all of them, or none.

    Example: ucudnn cache import timings.csv
    """
    count = _cache_commands().import_(file, cache, layers or ())
    _say(f"read {count} measurements from {file}")


@cache_app.command()
def prune(
    where: WhereOption = None,
    older_than_days: Annotated[float | None, typer.Option(help="Only what is older.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count.")] = False,
    cache: CacheOption = None,
) -> None:
    """Remove measurements that match, such as those of versions that are gone.

    Example: ucudnn cache prune --where software.torch=2.12.0
    """
    count = _cache_commands().prune(cache, where or (), older_than_days, dry_run)
    _say(f"{'would remove' if dry_run else 'removed'} {count} measurements")


@cache_app.command()
def explain(where: WhereOption = None, cache: CacheOption = None) -> None:
    """Say whether a measurement is there, and if not, in what the nearest one differs.

    Exit status 1 where there is none. Example: ucudnn cache explain --where problem.batch=32
    """
    found = _cache_commands().explain(where or (), cache)
    _say(str(found))
    if not found.found:
        raise typer.Exit(_SAYS_NO)


def _cache_commands() -> Any:
    from ucudnn.cache import commands

    return commands


def _say(line: str) -> None:
    _out.print(line, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def _progress() -> Iterator[tuple[Callable[[Any], None], dict[str, int]]]:
    """A progress bar on the terminal, and the counts of the last event."""
    counts = {"measured": 0, "reused": 0}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[counts]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=_err, transient=True) as bar:
        task = bar.add_task("", total=None, counts="")

        def on_progress(event: Any) -> None:
            counts.update(measured=event.measured, reused=event.reused)
            bar.update(
                task,
                description=event.kernel,
                completed=event.done,
                total=event.total,
                counts=f"{event.measured} measured, {event.reused} from cache",
            )

        yield on_progress, counts
