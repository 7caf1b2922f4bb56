"""`ucudnn cache`: inspect and maintain the measurement cache."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ucudnn.cli.console import Answer
from ucudnn.cli.options import CacheOption, common
from ucudnn.errors import CacheError, CacheWarning, ConfigError
from ucudnn.units import format_bytes

if TYPE_CHECKING:
    from ucudnn.cache.store import HDF5Cache

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
def info(cache: CacheOption = None) -> Answer:
    """Print the contents of the cache: devices, measurements, versions.

    Example: ucudnn cache info --json
    """
    with _opened(cache, "r") as opened:
        found = opened.info()
    lines = [
        f"{found.location}{'' if found.writable else ' (read-only)'}",
        f"{found.records} measurements in {found.files} files, {format_bytes(found.file_bytes)}",
    ]
    for device in found.devices:
        states = ", ".join(f"{count} {status}" for status, count in device.records_by_status)
        lines.append(f"  {device.device}: {device.records} measurements ({states})")
        lines += (f"    {count} with {software}" for software, count in device.versions)
    return Answer(asdict(found), lines)


@app.command()
@common
def check(cache: CacheOption = None) -> Answer:
    """Read every file of the cache and report errors; exit status 1 if there are any.

    Example: ucudnn cache check
    """
    # The cache is opened for reading only, because a cache that is opened for writing sets damaged
    # files aside.
    with _opened(cache, "r") as opened:
        report = opened.check()
    lines = [f"{report.records} sound measurements in {report.files} files", *report.problems]
    # `clean` is a property, which `asdict` leaves out.
    document = {**asdict(report), "clean": report.clean}
    return Answer(document, lines, None if report.clean else "")


@app.command()
@common
def merge(
    others: Annotated[
        list[Path], typer.Argument(help="Folders of other caches, only read.", metavar="DIR")
    ],
    cache: CacheOption = None,
) -> Answer:
    """Add the entries of other caches.

    Example: ucudnn cache merge /mnt/fleet/ucudnn
    """
    with _kept(), _opened(cache) as opened:
        reports = [opened.merge(other) for other in others]
    read, added = sum(one.read for one in reports), sum(one.added for one in reports)
    sentence = f"read {read} measurements, {added} of them new here"
    return Answer({"read": read, "added": added}, [sentence])


@app.command()
@common
def export(
    file: Annotated[Path, typer.Argument(help="A .csv file to write.", metavar="FILE")],
    where: WhereOption = None,
    cache: CacheOption = None,
) -> Answer:
    """Write measurements to a CSV file, without loss.

    Example: ucudnn cache export timings.csv --where problem.op=fprop
    """
    filters = _parsed(where)
    with _opened(cache, "r") as opened:
        count = opened.export(file, filters)
    return Answer({"measurements": count}, [f"wrote {count} measurements to {file}"])


# The command's name is given here, because no Python function can be called `import`.
@app.command("import")
@common
def import_(
    file: Annotated[Path, typer.Argument(help="A .csv file that `export` wrote.", metavar="FILE")],
    cache: CacheOption = None,
) -> Answer:
    """Add the measurements of a file; all of them, or none.

    Example: ucudnn cache import timings.csv
    """
    with _kept(), _opened(cache) as opened:
        count = opened.import_(file)
    return Answer({"measurements": count}, [f"read {count} measurements from {file}"])


@app.command()
@common
def prune(
    where: WhereOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count.")] = False,
    cache: CacheOption = None,
) -> Answer:
    """Remove measurements that match a filter, such as those of old versions.

    Example: ucudnn cache prune --where software.torch=2.12.0
    """
    from ucudnn.cache.schema import matches

    filters = _parsed(where)
    # This is refused, because an empty filter matches every entry, and a slip must not empty a
    # cache.
    if not filters:
        raise ConfigError("prune removes what matches and was given no filter; name a field=value")
    with _opened(cache, "r" if dry_run else "a") as opened:
        if dry_run:
            count = sum(matches(entry, filters) for entry in opened.entries())
        else:
            count = opened.prune(filters)
    sentence = f"{'would remove' if dry_run else 'removed'} {count} measurements"
    return Answer({"measurements": count, "dry_run": dry_run}, [sentence])


@contextmanager
def _kept() -> Iterator[None]:
    """Context that turns a CacheWarning into an error.

    It is for commands whose purpose is to write to a cache: they must not report success if the
    cache has warned that something is wrong.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error", CacheWarning)
        try:
            yield
        except CacheWarning as warning:
            raise CacheError(str(warning)) from warning


def _opened(path: str | None, mode: str = "a") -> HDF5Cache:
    # Imported when a command runs, so that `ucudnn --help` stays quick.
    from ucudnn import cache as caches

    return caches.open(path, mode)


def _parsed(where: Iterable[str] | None) -> dict[str, str]:
    from ucudnn.cache.schema import parse_where

    return parse_where(where or ())
