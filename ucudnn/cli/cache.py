"""`ucudnn cache`: inspect and maintain the measurement cache."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from ucudnn.cli.console import SAYS_NO, out, say
from ucudnn.cli.options import CacheOption, JsonOption, common
from ucudnn.errors import CacheError, CacheWarning, ConfigError
from ucudnn.units import format_bytes, format_ns

if TYPE_CHECKING:
    from ucudnn.cache.entries import Entry

app = typer.Typer(help="Inspect and maintain the measurement cache.", no_args_is_help=True)

WhereOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Only entries with this value, such as problem.op=fprop or status=failed.",
        metavar="FIELD=VALUE",
    ),
]


@app.command()
@common
def info(cache: CacheOption = None, as_json: JsonOption = False) -> None:
    """Print the contents of the cache: devices, measurements, versions.

    Example: ucudnn cache info --json
    """
    found = _cache_commands().info(cache)
    if as_json:
        print(json.dumps(asdict(found)))
        return
    say(f"{found.location}{'' if found.writable else ' (read-only)'}")
    say(f"{found.records} measurements in {found.files} files, {format_bytes(found.file_bytes)}")
    for device in found.devices:
        states = ", ".join(f"{count} {status}" for status, count in device.records_by_status)
        say(f"  {device.device}: {device.records} measurements ({states})")
        for software, count in device.versions:
            say(f"    {count} with {software}")


# The name is given, because a function `list` would hide the type in the annotations below.
@app.command("list")
@common
def list_(
    where: WhereOption = None,
    limit: Annotated[
        int, typer.Option(help="Rows to print; 0: all.", metavar="COUNT", min=0)
    ] = 100,
    cache: CacheOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print measurements as a table: of each kernel and role the fastest first.

    Example: ucudnn cache list --where problem.op=wgrad --where status=ok
    """
    found = _cache_commands().entries(cache, where or ())
    shown = found[: limit or None]
    if as_json:
        from ucudnn.cache.exchange.json import to_json

        # Not through rich, which breaks long lines.
        print(to_json(shown), end="")
        return
    if shown:
        out.print(_table(shown))
    left = "" if len(shown) == len(found) else f"; --limit {len(found)} prints all"
    say(f"{len(shown)} of {len(found)} measurements{left}")


def _table(entries: Sequence[Entry]) -> Table:
    devices = {entry.measurement.key.device for entry in entries}
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("device",) * (len(devices) > 1) + ("kernel", "role", "algorithm"):
        table.add_column(name, overflow="fold")
    for name in ("time", "workspace", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("status", overflow="fold")
    for measurement in (entry.measurement for entry in entries):
        key, time_ns, size = measurement.key, measurement.time_ns, measurement.workspace_bytes
        table.add_row(
            *[str(key.device)] * (len(devices) > 1),
            *(str(key.problem), str(key.conditions.role), key.algorithm),
            "-" if time_ns is None else format_ns(time_ns),
            "-" if size is None else format_bytes(size),
            "-" if measurement.error is None else f"{measurement.error:.1e}",
            ": ".join(filter(None, (measurement.status, measurement.reason))),
        )
    return table


@app.command()
@common
def check(
    fix: Annotated[bool, typer.Option("--fix", help="Put right what can be.")] = False,
    cache: CacheOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read every file of the cache and report errors; exit status 1 if there are any.

    Example: ucudnn cache check --fix
    """
    report = _cache_commands().check(cache, fix)
    if as_json:
        # A property, which `asdict` leaves out.
        print(json.dumps({**asdict(report), "clean": report.clean}))
    else:
        say(f"{report.records} measurements in {report.files} sound files")
        # The fields of the report that hold sentences; their names are the labels, too.
        for label in ("problems", "fixed", "notes"):
            for sentence in getattr(report, label):
                say(f"{label}: {sentence}")
    # With --json as well: scripts look at the status.
    if not report.clean:
        raise typer.Exit(SAYS_NO)


@app.command()
@common
def merge(
    others: Annotated[
        list[Path], typer.Argument(help="Folders of other caches, only read.", metavar="DIR")
    ],
    cache: CacheOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add the entries of other caches.

    Example: ucudnn cache merge /mnt/fleet/ucudnn
    """
    with _kept():
        report = _cache_commands().merge(others, cache)
    _tell(
        f"read {report.read} measurements, {report.added} of them new here", asdict(report), as_json
    )


@app.command()
@common
def export(
    file: Annotated[Path, typer.Argument(help="A .csv or .json file to write.", metavar="FILE")],
    where: WhereOption = None,
    cache: CacheOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write measurements to a CSV or JSON file, without loss.

    Example: ucudnn cache export timings.csv --where problem.op=fprop
    """
    count = _cache_commands().export(file, cache, where or ())
    _tell(f"wrote {count} measurements to {file}", {"measurements": count}, as_json)


# The name is given, because `import` itself cannot be the name of a function.
@app.command("import")
@common
def import_(
    file: Annotated[
        Path, typer.Argument(help="What `export` wrote, or a probe's timings.csv.", metavar="FILE")
    ],
    layers: Annotated[
        list[Path] | None,
        typer.Option(help="A layer table that the probe was given.", metavar="FILE"),
    ] = None,
    cache: CacheOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add the measurements of a file; all of them, or none.

    Example: ucudnn cache import timings.csv
    """
    with _kept():
        count = _cache_commands().import_(file, cache, layers or ())
    _tell(f"read {count} measurements from {file}", {"measurements": count}, as_json)


@app.command()
@common
def prune(
    where: WhereOption = None,
    older_than_days: Annotated[
        float | None, typer.Option(help="Only what is older.", metavar="DAYS")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count.")] = False,
    cache: CacheOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove measurements that match, such as those of old versions.

    Example: ucudnn cache prune --where software.torch=2.12.0
    """
    count = _cache_commands().prune(cache, where or (), older_than_days, dry_run)
    _tell(
        f"{'would remove' if dry_run else 'removed'} {count} measurements",
        {"measurements": count, "dry_run": dry_run},
        as_json,
    )


@app.command()
@common
def explain(
    where: WhereOption = None, cache: CacheOption = None, as_json: JsonOption = False
) -> None:
    """Say whether a measurement is in the cache, and if not, how the nearest one differs.

    Exit status 1 if there is none. Example: ucudnn cache explain --where problem.batch=32
    """
    if not where:
        raise ConfigError(
            "explain looks for a measurement and was given no field of it; name one or more, such "
            "as --where problem.batch=32"
        )
    found = _cache_commands().explain(where, cache)
    if as_json:
        print(json.dumps({"found": found.found, "entries": found.entries, "said": str(found)}))
    else:
        say(str(found))
    # The answer is no, which is the exit status that scripts test for.
    if not found.found:
        raise typer.Exit(SAYS_NO)


def _tell(sentence: str, document: dict[str, Any], as_json: bool) -> None:
    # Not through rich, which breaks long lines.
    print(json.dumps(document)) if as_json else say(sentence)


@contextmanager
def _kept() -> Iterator[None]:
    """Fail where the cache cannot be written, which tuning only warns of: this is all there is.

    Raises:
        CacheError: what was to be added is only in memory.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error", CacheWarning)
        try:
            yield
        except CacheWarning as warning:
            raise CacheError(str(warning)) from warning


def _cache_commands() -> Any:
    # Imported when a command runs, so that `ucudnn --help` stays quick.
    from ucudnn.cache import commands

    return commands
