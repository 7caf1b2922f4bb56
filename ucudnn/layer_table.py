"""Tables of convolution layers as CSV files: read and written as problems."""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import NamedTuple

from ucudnn.errors import ConfigError, ProblemError, shortened
from ucudnn.problem import OPS, Problem

_AXES = ("d", "h", "w")
COLUMNS = (
    *("name", "n", "c", "d", "h", "w", "k", "kd", "kh", "kw", "pad_d", "pad_h", "pad_w"),
    *("stride_d", "stride_h", "stride_w", "dil_d", "dil_h", "dil_w", "groups"),
)
# Columns that a table may also have. A table that ucudnn writes has all of them.
OPTIONAL_COLUMNS = ("rank", "dtype", "layout", "math", "ops", "bias", "count")
# `as_calls` lists the problem of a row at most this often.
_MOST_CALLS = 1000


class Row(NamedTuple):
    """One convolution of a table.

    Attributes:
        name: name of the layer.
        problem: the convolution.
        calls: number of its calls in a step, or in a whole run with several steps. Only the ratio
            to the numbers of other rows counts.
        has_bias: whether a bias is added to its result.
    """

    name: str
    problem: Problem
    calls: int = 1
    has_bias: bool = False


def lock_of(path: str | os.PathLike[str]) -> Path:
    """The lock file by which processes take turns to write a table.

    >>> lock_of("/tmp/layers.csv")
    PosixPath('/tmp/.layers.csv.lock')
    """
    return Path(path).with_name(f".{Path(path).name}.lock")


def read_rows(
    path: str | os.PathLike[str],
    ops: Iterable[str] = OPS,
    dtype: str | None = None,
    layout: str | None = None,
    math: str | None = None,
    *,
    has_tf32: bool = False,
) -> list[Row]:
    """Read the convolutions of a table, each with the number of its calls.

    Without a column `rank` a layer is two-dimensional if its depth and its kernel depth are 1, and
    three-dimensional otherwise. The math of float32 problems ("strict", or "tf32" if factors may be
    rounded to TF32) is given by the argument `math` or by a column `math`. Without either it is
    "tf32" if `has_tf32` is true, else "strict".
    """
    lines = _lines(path)
    given = {"dtype": dtype, "layout": layout, "math": math}
    for name, value in given.items():
        if value is not None and name in lines[0][1]:
            raise ConfigError(
                f"{name} (={value!r}) is given, and {path} has a column {name}; leave one of them "
                f"out"
            )
    fallbacks = {"math": "tf32" if has_tf32 else "strict"}
    fallbacks |= {name: value for name, value in given.items() if value is not None}
    wanted = tuple(ops)
    return [
        found for line, row in lines for found in _rows(path, line, {**fallbacks, **row}, wanted)
    ]


def _lines(path: str | os.PathLike[str]) -> list[tuple[int, dict[str, str]]]:
    """The rows of a file with their line numbers."""
    try:
        # "utf-8-sig" drops the byte order mark that spreadsheets write, which would otherwise
        # become part of the first column's name. newline="" leaves line ends to the csv module,
        # because quoted fields may contain some.
        with Path(path).open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.DictReader(stream)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise ConfigError(
                    f"{path} line 1: a table of layers has the columns {','.join(COLUMNS)}; "
                    f"missing: {', '.join(missing)}"
                )
            # `line_num` counts the lines of the file and not the rows, because a quoted field may
            # span several lines.
            rows = [(reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"cannot read the table of layers {path}: {reason}") from error
    if not rows:
        raise ConfigError(f"{path} has no layers: only a header")
    return rows


def _rows(path: object, line: int, row: Mapping[str, str], ops: Collection[str]) -> list[Row]:
    # A row that is too short has None in the columns that are missing.
    listed = _split(row.get("ops")) or OPS
    biased = _split(row.get("bias"))
    for name, values in (("ops", listed), ("bias", biased)):
        if not set(values) <= set(OPS):
            raise ConfigError(
                f"{path} line {line}: {name} names some of {', '.join(OPS)}, joined by +, got "
                f"{shortened(repr(row[name]))}"
            )
    count = _int(row.get("count") or "1")
    if count is None or count < 1:
        raise ConfigError(
            f"{path} line {line}: count is an int of at least 1, got "
            f"{shortened(repr(row['count']))}"
        )
    return [
        Row(row["name"], _problem(path, line, row, op), count, op in biased)
        for op in ops
        if op in listed
    ]


def _split(text: str | None) -> tuple[str, ...]:
    return tuple(text.split("+")) if text else ()


def _problem(path: object, line: int, row: Mapping[str, str], op: str) -> Problem:
    value = _ints(path, line, row)
    rank = row.get("rank") or ("3" if value["d"] > 1 or value["kd"] > 1 else "2")
    if rank not in ("1", "2", "3"):
        raise ConfigError(f"{path} line {line}: rank is 1, 2 or 3, got {shortened(repr(rank))}")
    axes = _AXES[-int(rank) :]
    dtype = row.get("dtype") or "float32"
    # TF32 is a way to multiply float32, and no other dtype.
    math = (row.get("math") or "strict") if dtype == "float32" else "strict"
    try:
        return Problem(
            op=op,
            batch=value["n"],
            in_channels=value["c"],
            out_channels=value["k"],
            input_size=_along(axes, value, ""),
            kernel_size=_along(axes, value, "k"),
            stride=_along(axes, value, "stride_"),
            padding=tuple((ends, ends) for ends in _along(axes, value, "pad_")),
            dilation=_along(axes, value, "dil_"),
            groups=value["groups"],
            dtype=dtype,
            layout=row.get("layout") or "nchw",
            math=math,
        )
    except ProblemError as error:
        reason = shortened(f"{row['name']}: {error}")
        raise ConfigError(f"{path} line {line}, layer {reason}") from error


def _along(axes: Sequence[str], value: Mapping[str, int], prefix: str) -> tuple[int, ...]:
    return tuple(value[f"{prefix}{axis}"] for axis in axes)


def _ints(path: object, line: int, row: Mapping[str, str]) -> dict[str, int]:
    values = {}
    for column in COLUMNS[1:]:
        value = _int(row[column])
        if value is None:
            raise ConfigError(
                f"{path} line {line}: every column but name holds an int; "
                f"{shortened(f'{column} is {row[column]!r}')}"
            )
        values[column] = value
    return values


def _int(text: str | None) -> int | None:
    try:
        # The text is None if the row is too short.
        return int(text or "")
    except ValueError:
        return None


def as_calls(rows: Iterable[Row]) -> list[tuple[str, Problem]]:
    """List each problem as often as one step calls it, computed from the counts of a table.

    The counts of a recorded run are sums over all its steps. The most frequent count is assumed to
    mean one call per step. The other counts are divided by it and rounded, to at least one call.

    >>> one, two = Problem("fprop", 2, 3, 4, (9,), (3,)), Problem("fprop", 2, 4, 4, (9,), (3,))
    >>> rows = [Row("a", one, 500), Row("b", two, 1000), Row("c", one, 500), Row("last", two, 1)]
    >>> [name for name, _ in as_calls(rows)]
    ['a', 'b', 'b', 'c', 'last']
    """
    kept = list(rows)
    frequency = Counter(row.calls for row in kept)
    # `unit` is the count that means one call per step. If several counts are equally frequent, it
    # is the smallest of them, so that rounding loses least.
    unit = min(frequency, key=lambda count: (-frequency[count], count), default=1)
    return [
        (row.name, row.problem)
        for row in kept
        # The ratio is computed in integers, because counts may be larger than any float.
        for _ in range(min(max(1, (2 * row.calls + unit) // (2 * unit)), _MOST_CALLS))
    ]


def count_calls(
    layers: Iterable[tuple[str, Problem]], biased: Collection[Problem] = ()
) -> list[Row]:
    """Rows for calls (layer name, problem); equal calls become one row with their count.

    `biased` has the problems to whose result a layer adds a bias.
    """
    counts = Counter(layers)
    return [
        Row(name, problem, count, problem in biased) for (name, problem), count in counts.items()
    ]


def format_rows(rows: Iterable[Row]) -> str:
    """The rows as the text of a CSV table with all columns, which `read_rows` can read."""
    # The passes (ops) of one layer share a line if they are called equally often.
    lines: dict[tuple[str, Problem, int], list[Row]] = {}
    for row in rows:
        geometry = replace(row.problem, op="fprop")
        lines.setdefault((row.name, geometry, row.calls), []).append(row)
    text = StringIO()
    writer = csv.DictWriter(text, (*COLUMNS, *OPTIONAL_COLUMNS), lineterminator="\n")
    writer.writeheader()
    for (name, problem, count), passes in lines.items():
        ops = [op for op in OPS if any(row.problem.op == op for row in passes)]
        biased = [op for op in OPS if any(row.problem.op == op and row.has_bias for row in passes)]
        cells = {"ops": "+".join(ops), "bias": "+".join(biased), "count": count}
        writer.writerow({"name": name, **_cells(problem), **cells})
    return text.getvalue()


def _cells(problem: Problem) -> dict[str, object]:
    if any(begin != end for begin, end in problem.padding):
        raise ConfigError(
            f"a table of layers has one padding for both ends of an axis, and {problem} has "
            f"{problem.padding}"
        )
    cells: dict[str, object] = {
        "n": problem.batch,
        "c": problem.in_channels,
        "k": problem.out_channels,
        "groups": problem.groups,
        "rank": problem.rank,
        "dtype": problem.dtype,
        "layout": problem.layout,
        "math": problem.math,
    }
    # Axes that the problem does not have are written as axes of one element, without padding.
    absent = 3 - problem.rank
    columns = {
        "": ((1,) * absent, problem.input_size),
        "k": ((1,) * absent, problem.kernel_size),
        "pad_": ((0,) * absent, [begin for begin, _ in problem.padding]),
        "stride_": ((1,) * absent, problem.stride),
        "dil_": ((1,) * absent, problem.dilation),
    }
    for prefix, (ones, values) in columns.items():
        for axis, value in zip(_AXES, (*ones, *values), strict=True):
            cells[f"{prefix}{axis}"] = value
    return cells
