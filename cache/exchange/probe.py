"""Read the timings of a probe, a program without ucudnn, as entries of a cache.

A probe times every engine configuration of a table of layers on one GPU and writes `timings.csv`,
`profile.json` (cuDNN's description of the device) and `answers.json` (versions). Its entries have
protocol 0, because its timing loop is not ucudnn's. Columns that ucudnn has no field for become
notes.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ucudnn.cache.entries import Entry
from ucudnn.cache.exchange.parsing import read_text
from ucudnn.errors import TableError, UcudnnError, shortened
from ucudnn.layer_table import read_layers
from ucudnn.measurement import Conditions, Device, Measurement, MeasurementKey, Software
from ucudnn.problem import Problem
from ucudnn.system.files import parse_json

PROTOCOL = 0
COLUMNS = (
    *("name", "op", "dtype", "layout", "batch", "algorithm", "workspace_bytes", "mode", "rank"),
    *("notes", "median_us", "min_us", "samples", "error", "beta1_error"),
)
# Fields of cuDNN's description of a device that are needed here.
_PROFILE = {"deviceVer": int, "deviceName": str, "multiProcessorCount": int, "totalGlobalMem": int}
_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}
# cuDNN's own word for it.
_NONDETERMINISTIC = "NONDETERMINISTIC"
_KEPT_AS_NOTES = ("mode", "rank", "min_us", "samples", "beta1_error")
# cuDNN's deviceVer is a hundred times the compute capability; Ampere (8.0) brought TF32.
_FIRST_WITH_TF32 = 800


def read_probe(
    timings: str | os.PathLike[str], layers: Iterable[str | os.PathLike[str]]
) -> list[Entry]:
    """Read a probe's timings.csv, with the profile.json and answers.json beside it.

    Args:
        timings: the table of times; median_us becomes time_ns, one sample "screened".
        layers: the layer tables that the probe was given; a row names a layer "table:layer".

    Raises:
        CacheError: a file cannot be read, a line is impossible or names no layer.
        ConfigError: a layer table cannot be read.
    """
    path = Path(timings)
    # Not arguments: a probe always leaves the three files in one folder.
    profile = _read_json(path.with_name("profile.json"))
    answers = _read_json(path.with_name("answers.json"))
    _require_profile(path.with_name("profile.json"), profile)
    device = _device(profile)
    software = Software(torch=str(answers.get("torch", "")), cudnn=_version(answers.get("cudnn")))
    has_tf32 = profile["deviceVer"] >= _FIRST_WITH_TF32
    problems = _layer_problems(layers)
    reader = csv.DictReader(io.StringIO(read_text(path), newline=""))
    try:
        columns = reader.fieldnames or ()
    except csv.Error as error:
        raise TableError(f"{path} line 1: {error}") from error
    missing = [name for name in COLUMNS if name not in columns]
    if missing:
        raise TableError(f"{path} line 1: a probe's table has the columns {', '.join(missing)} too")
    entries = []
    try:
        for row in reader:
            problem = _problem(row, problems, has_tf32)
            key = MeasurementKey(
                problem, row["algorithm"], device, software, Conditions(), PROTOCOL
            )
            entries.append(Entry(_measurement(key, row)))
    # DictReader gives None for a cell that a short line lacks, hence TypeError.
    except (ValueError, TypeError, KeyError, OverflowError, csv.Error, UcudnnError) as error:
        raise TableError(f"{path} line {reader.line_num}: {shortened(str(error))}") from error
    return entries


def _require_profile(path: Path, profile: Mapping[str, Any]) -> None:
    for name, kind in _PROFILE.items():
        if name not in profile:
            raise TableError(f"{path} lacks {name!r}")
        # A bool is an int for isinstance.
        if type(profile[name]) is not kind:
            given = shortened(repr(profile[name]))
            raise TableError(f"{path}: {name} must be of type {kind.__name__}, got {given}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = parse_json(read_text(path))
    except ValueError as error:
        raise TableError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise TableError(f"{path} must hold one JSON object")
    return values


def _device(profile: Mapping[str, Any]) -> Device:
    major, minor = divmod(profile["deviceVer"] // 10, 10)
    return Device(
        type="cuda",
        name=profile["deviceName"],
        cores=profile["multiProcessorCount"],
        compute_capability=f"{major}.{minor}",
        memory_bytes=profile["totalGlobalMem"],
    )


def _version(number: object) -> str:
    """cuDNN's version from its number: 92800 is 9.28.0, and 8902, before version 9, is 8.9.2."""
    if type(number) is not int:
        return ""
    major, rest = divmod(number, 10_000 if number >= 90_000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _layer_problems(paths: Iterable[str | os.PathLike[str]]) -> dict[str, Problem]:
    problems: dict[str, Problem] = {}
    for path in map(Path, paths):
        for name, problem in read_layers(path, ops=("fprop",)):
            # A repeated line is harmless, another layer of that name is not.
            if problems.setdefault(f"{path.stem}:{name}", problem) != problem:
                raise TableError(f"{path} has two layers called {name}; give them other names")
    return problems


def _problem(row: Mapping[str, str], problems: Mapping[str, Problem], has_tf32: bool) -> Problem:
    if row["name"] not in problems:
        raise TableError(
            f"layer {row['name']!r} is in none of the layer tables; name the table that the probe "
            f"was given"
        )
    dtype = _DTYPES.get(row["dtype"], row["dtype"])
    # A layer table has no columns for these; the probe names them in each row.
    return replace(
        problems[row["name"]],
        op=row["op"],
        batch=int(row["batch"]),
        dtype=dtype,
        layout=row["layout"],
        math="tf32" if has_tf32 and dtype == "float32" else "strict",
    )


def _measurement(key: MeasurementKey, row: Mapping[str, str]) -> Measurement:
    words = tuple(filter(None, row["notes"].split("+")))
    kept = [f"{name}={row[name]}" for name in _KEPT_AS_NOTES if row[name]]
    return Measurement(
        key,
        # One sample has no spread to judge it by.
        status="ok" if int(row["samples"]) > 1 else "screened",
        time_ns=round(float(row["median_us"]) * 1000),
        workspace_bytes=int(row["workspace_bytes"]),
        error=float(row["error"]) if row["error"] else None,
        notes=(*words, *kept),
        is_deterministic=_NONDETERMINISTIC not in words,
    )
