"""Read a table of convolution layers from a CSV file, as problems."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from ucudnn.errors import ConfigError, ProblemError, shortened
from ucudnn.problem import OPS, Problem

_AXES = ("d", "h", "w")
COLUMNS = (
    *("name", "n", "c", "d", "h", "w", "k", "kd", "kh", "kw", "pad_d", "pad_h", "pad_w"),
    *("stride_d", "stride_h", "stride_w", "dil_d", "dil_h", "dil_w", "groups"),
)


def read_layers(
    path: str | os.PathLike[str],
    ops: Iterable[str] = OPS,
    dtype: str = "float32",
    layout: str = "nchw",
) -> list[tuple[str, Problem]]:
    """Read layers from a CSV file, one problem per layer and op.

    A layer whose depth and kernel depth are 1 is two-dimensional, any other three-dimensional.

    Args:
        path: a file with the columns name, n, c, d, h, w, k, kd, kh, kw, pad_*, stride_*, dil_*
            and groups.
        ops: which of "fprop", "dgrad", "wgrad".
        dtype: of all problems.
        layout: of all problems.

    Raises:
        ConfigError: the file cannot be read, lacks a column, or has an impossible line, which the
            message names.
    """
    try:
        # Spreadsheets begin UTF-8 files with a byte order mark, which would be part of the first
        # name; newline="" leaves line ends to the csv module, which knows quoted ones.
        with Path(path).open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.DictReader(stream)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise ConfigError(
                    f"{path} line 1: a table of layers has the columns {','.join(COLUMNS)}; "
                    f"missing: {', '.join(missing)}"
                )
            # The line in the file, not the number of the row: a quoted field may span lines.
            rows = [(reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"cannot read the table of layers {path}: {reason}") from error
    if not rows:
        raise ConfigError(f"{path} has no layers: only a header")
    return [
        (row["name"], _problem(path, line, row, op, dtype, layout))
        for line, row in rows
        for op in ops
    ]


def _problem(
    path: object, line: int, row: Mapping[str, str], op: str, dtype: str, layout: str
) -> Problem:
    value = _ints(path, line, row)
    axes = _AXES if value["d"] > 1 or value["kd"] > 1 else _AXES[1:]
    try:
        return Problem(
            op=op,
            batch=value["n"],
            in_channels=value["c"],
            out_channels=value["k"],
            input_size=tuple(value[axis] for axis in axes),
            kernel_size=tuple(value[f"k{axis}"] for axis in axes),
            stride=tuple(value[f"stride_{axis}"] for axis in axes),
            padding=tuple((value[f"pad_{axis}"],) * 2 for axis in axes),
            dilation=tuple(value[f"dil_{axis}"] for axis in axes),
            groups=value["groups"],
            dtype=dtype,
            layout=layout,
        )
    except ProblemError as error:
        reason = shortened(f"{row['name']}: {error}")
        raise ConfigError(f"{path} line {line}, layer {reason}") from error


def _ints(path: object, line: int, row: Mapping[str, str]) -> dict[str, int]:
    """The columns of a row but its name, which are ints."""
    value = {}
    for column in COLUMNS[1:]:
        try:
            value[column] = int(row[column])
        # A row with too few fields has None for the others, hence TypeError.
        except (TypeError, ValueError):
            raise ConfigError(
                f"{path} line {line}: every column but name holds an int; "
                f"{shortened(f'{column} is {row[column]!r}')}"
            ) from None
    return value
