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
# The columns that every table has, and all columns of a layer's geometry.
REQUIRED_COLUMNS = ("name", "n", "c", "h", "w", "k", "kh", "kw")
COLUMNS = (
    *("name", "n", "c", "d", "h", "w", "k", "kd", "kh", "kw", "pad_d", "pad_h", "pad_w"),
    *("stride_d", "stride_h", "stride_w", "dil_d", "dil_h", "dil_w", "groups"),
)
# Columns beside the geometry. A table that ucudnn writes has all of them and all of the above.
_OTHER_COLUMNS = ("rank", "dtype", "layout", "math", "ops", "bias", "count")
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

    Only `REQUIRED_COLUMNS` must be there. Strides, dilations and groups are 1 without a column,
    and paddings 0. Without a column `rank` a layer is two-dimensional if its depth and its kernel
    depth are 1, and three-dimensional otherwise. The math of float32 problems ("strict", or "tf32"
    if factors may be rounded to TF32) is given by the argument `math` or by a column `math`.
    Without either it is "tf32" if `has_tf32` is true, else "strict".
    """
    lines = _lines(path)
    given = {"dtype": dtype, "layout": layout, "math": math}
    for name, value in given.items():
        if value is not None and name in lines[0].cells:
            raise ConfigError(
                f"{name} (={value!r}) is given, and {path} has a column {name}; leave one of them "
                f"out"
            )
    fallbacks = {"math": "tf32" if has_tf32 else "strict"}
    fallbacks |= {name: value for name, value in given.items() if value is not None}
    wanted = tuple(ops)
    return [
        found
        for line in lines
        for found in _rows(line._replace(cells={**fallbacks, **line.cells}), wanted)
    ]


class _Line(NamedTuple):
    """A line of a table: its place, as messages name it, and its cells by their columns."""

    place: str
    cells: Mapping[str, str]

    def number(self, column: str, default: int | None = None) -> int:
        """The number in a column; the default if there is no such column, or the cell is empty."""
        text = self.cells.get(column, "")
        if not text and default is not None:
            return default
        try:
            return int(text)
        except ValueError:
            raise ConfigError(
                f"{self.place}: {column} must be an int, got {shortened(repr(text))}"
            ) from None

    def passes(self, column: str) -> tuple[str, ...]:
        """The passes that a column names, joined by `+`; empty if it names none."""
        text = self.cells.get(column, "")
        names = tuple(text.split("+")) if text else ()
        if not set(names) <= set(OPS):
            raise ConfigError(
                f"{self.place}: {column} names some of {', '.join(OPS)}, joined by +, got "
                f"{shortened(repr(text))}"
            )
        return names

    def along(self, axes: Sequence[str], prefix: str, default: int, shared: str) -> tuple[int, ...]:
        """A number for each axis: from the axis' own column, or from one for all axes."""
        common = self.number(shared, default)
        values = tuple(self.number(f"{prefix}{axis}", common) for axis in axes)
        for axis, value in zip(axes, values, strict=True):
            if self.cells.get(shared) and value != common:
                raise ConfigError(
                    f"{self.place}: {shared} is {common} for all axes, and {prefix}{axis} is "
                    f"{value}; leave one of them out"
                )
        return values


def _lines(path: str | os.PathLike[str]) -> list[_Line]:
    """The lines of a file, without its header."""
    try:
        # "utf-8-sig" drops the byte order mark that spreadsheets write, which would otherwise
        # become part of the first column's name. newline="" leaves line ends to the csv module,
        # because quoted fields may contain some.
        with Path(path).open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.DictReader(stream)
            missing = [name for name in REQUIRED_COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise ConfigError(
                    f"{path} line 1: a table of layers has at least the columns "
                    f"{','.join(REQUIRED_COLUMNS)}; missing: {', '.join(missing)}"
                )
            # `line_num` counts the lines of the file and not the rows, because a quoted field may
            # span several lines.
            lines = [_Line(f"{path} line {reader.line_num}", row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"cannot read the table of layers {path}: {reason}") from error
    if not lines:
        raise ConfigError(f"{path} has no layers: only a header")
    for line in lines:
        # The csv module puts cells without a column under None, and None into columns without a
        # cell.
        if None in line.cells or None in line.cells.values():
            raise ConfigError(f"{line.place} does not have as many cells as the header has columns")
    return lines


def _rows(line: _Line, ops: Collection[str]) -> list[Row]:
    listed, biased = line.passes("ops") or OPS, line.passes("bias")
    count = line.number("count", 1)
    if count < 1:
        raise ConfigError(f"{line.place}: count must be at least 1, got {count}")
    name = line.cells["name"]
    return [Row(name, _problem(line, op), count, op in biased) for op in ops if op in listed]


def _problem(line: _Line, op: str) -> Problem:
    sizes = {column: line.number(column) for column in ("h", "w", "kh", "kw")}
    sizes |= {column: line.number(column, 1) for column in ("d", "kd")}
    rank = line.number("rank", 3 if sizes["d"] > 1 or sizes["kd"] > 1 else 2)
    if rank not in (1, 2, 3):
        raise ConfigError(f"{line.place}: rank must be 1, 2 or 3, got {rank}")
    axes = _AXES[-rank:]
    dtype = line.cells.get("dtype") or "float32"
    # TF32 is a way to multiply float32, and no other dtype.
    math = (line.cells.get("math") or "strict") if dtype == "float32" else "strict"
    try:
        return Problem(
            op=op,
            batch=line.number("n"),
            in_channels=line.number("c"),
            out_channels=line.number("k"),
            input_size=tuple(sizes[axis] for axis in axes),
            kernel_size=tuple(sizes[f"k{axis}"] for axis in axes),
            stride=line.along(axes, "stride_", 1, "stride"),
            padding=tuple((ends, ends) for ends in line.along(axes, "pad_", 0, "pad")),
            dilation=line.along(axes, "dil_", 1, "dilation"),
            groups=line.number("groups", 1),
            dtype=dtype,
            layout=line.cells.get("layout") or "nchw",
            math=math,
        )
    except ProblemError as error:
        reason = shortened(f"{line.cells['name']}: {error}")
        raise ConfigError(f"{line.place}, layer {reason}") from error


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
    writer = csv.DictWriter(text, (*COLUMNS, *_OTHER_COLUMNS), lineterminator="\n")
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
