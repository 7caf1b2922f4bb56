"""Tables of layers: a line is the convolution that its columns say, or a sentence names it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ucudnn.errors import ConfigError
from ucudnn.layer_table import COLUMNS, Row, count_calls, format_rows, read_rows
from ucudnn.problem import OPS, Problem

FLAT = "flat,8,4,1,27,26,6,1,5,3,0,2,1,1,2,1,1,1,2,2"
SHORT_HEADER, SHORT = "name,n,c,h,w,k,kh,kw", "short,8,3,32,30,16,3,5"
DEEP = "deep,2,4,9,8,7,6,3,3,3,1,1,1,2,1,1,1,1,1,1"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "layers.csv"


def write(path: Path, *lines: str, header: str = ",".join(COLUMNS)) -> Path:
    path.write_text("\n".join([header, *lines]) + "\n")
    return path


def test_a_layer_is_a_problem_for_each_pass(path: Path) -> None:
    found = read_rows(write(path, FLAT, DEEP))
    assert [(row.name, row.problem.op) for row in found] == [
        (name, op) for name in ("flat", "deep") for op in OPS
    ]


def test_depth_one_is_flat_and_any_other_is_deep(path: Path) -> None:
    flat, deep = (row.problem for row in read_rows(write(path, FLAT, DEEP), ("dgrad",)))
    assert flat == Problem(
        *("dgrad", 8, 4, 6, (27, 26), (5, 3)),
        stride=(2, 1),
        padding=((2, 2), (1, 1)),
        dilation=(1, 2),
        groups=2,
    )
    assert deep == Problem(
        *("dgrad", 2, 4, 6, (9, 8, 7), (3, 3, 3)), stride=(2, 1, 1), padding=((1, 1),) * 3
    )


def test_dtype_and_layout_are_those_of_all(path: Path) -> None:
    first, *_ = read_rows(write(path, FLAT), dtype="float16", layout="nhwc")
    assert (first.problem.dtype, first.problem.layout) == ("float16", "nhwc")


def test_a_byte_order_mark_and_columns_in_any_order_are_read(path: Path) -> None:
    columns = [*COLUMNS[1:], COLUMNS[0], "comment"]
    name, *values = FLAT.split(",")
    write(path, ",".join([*values, name, "mine"]), header="\ufeff" + ",".join(columns))
    assert read_rows(path, ("fprop",)) == read_rows(
        write(path.with_name("plain.csv"), FLAT), ("fprop",)
    )


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ((), "has no layers: only a header"),
        ((FLAT, FLAT.replace("27", "x")), "line 3: h must be an int, got 'x'"),
        ((FLAT.replace("27", ""),), "line 2: h must be an int, got ''"),
        ((FLAT.replace(",0,2,1,", ",0,two,1,"),), "line 2: pad_h must be an int, got 'two'"),
        ((FLAT[:-2],), "line 2 does not have as many cells as the header has columns"),
        ((f"{FLAT},1",), "line 2 does not have as many cells as the header has columns"),
        ((FLAT.replace(",6,1,5", ",7,1,5"),), r"line 2, layer flat: .*groups"),
    ],
)
def test_a_table_that_cannot_be_is_refused_with_its_line(
    path: Path, lines: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read_rows(write(path, *lines))


def test_a_missing_column_is_named(path: Path) -> None:
    write(path, header=",".join(COLUMNS[:-1]).replace(",kh", ""))
    with pytest.raises(ConfigError, match=r"line 1: a table of layers has .* missing: kh$"):
        read_rows(path)


def test_eight_columns_suffice(path: Path) -> None:
    write(path, SHORT, header=SHORT_HEADER)
    assert [row.problem for row in read_rows(path)] == [
        Problem(op, 8, 3, 16, (32, 30), (3, 5)) for op in OPS
    ]


def test_the_table_in_the_documents_is_read(path: Path, repository: Path) -> None:
    page = (repository / "docs/formats.md").read_text()
    path.write_text(page.partition("A table of two layers")[2].split("```")[1].lstrip())
    assert [row.problem for row in read_rows(path, ("fprop",))] == [
        Problem("fprop", 64, 3, 16, (32, 32), (3, 3), padding=((1, 1), (1, 1))),
        Problem("fprop", 64, 16, 32, (32, 32), (5, 5), padding=((2, 2), (2, 2))),
    ]


@pytest.mark.parametrize(
    ("columns", "cells", "fields"),
    [
        ("stride,pad", "2,1", {"stride": (2, 2), "padding": ((1, 1), (1, 1))}),
        ("dilation,groups", "2,1", {"dilation": (2, 2)}),
        # the same for all axes and for one; and an empty cell is as no cell
        ("stride,stride_h,pad,pad_w", "2,2,,1", {"stride": (2, 2), "padding": ((0, 0), (1, 1))}),
        # the depth of a layer that has none is not asked for
        ("pad,pad_d,pad_h,pad_w", "1,0,1,1", {"padding": ((1, 1), (1, 1))}),
        ("rank,pad", "2,1", {"padding": ((1, 1), (1, 1))}),
    ],
)
def test_a_column_may_stand_for_all_axes(
    path: Path, columns: str, cells: str, fields: dict[str, tuple[object, ...]]
) -> None:
    write(path, f"{SHORT},{cells}", header=f"{SHORT_HEADER},{columns}")
    (row,) = read_rows(path, ("fprop",))
    assert row.problem == Problem("fprop", 8, 3, 16, (32, 30), (3, 5), **fields)


def test_a_column_for_all_axes_is_also_for_the_depth(path: Path) -> None:
    write(path, f"{SHORT},9,3,1", header=f"{SHORT_HEADER},d,kd,pad")
    (row,) = read_rows(path, ("fprop",))
    assert row.problem == Problem("fprop", 8, 3, 16, (9, 32, 30), (3, 3, 5), padding=((1, 1),) * 3)


def test_an_axis_that_contradicts_all_axes_is_refused(path: Path) -> None:
    write(path, f"{SHORT},2,1", header=f"{SHORT_HEADER},stride,stride_w")
    sentence = r"line 2: stride is 2 for all axes, and stride_w is 1; leave one of them out$"
    with pytest.raises(ConfigError, match=sentence):
        read_rows(path)


def test_what_is_no_text_and_what_is_not_there_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the table .*: No such file"):
        read_rows(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot read the table .*: 'utf-8'"):
        read_rows(path)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_what_was_written_is_read(path: Path, rank: int) -> None:
    some = Problem("fprop", 4, 6, 8, (9, 8, 7)[:rank], (3, 1, 2)[:rank], dtype="bfloat16")
    last = Problem("fprop", 4, 6, 8, (9, 8), (3, 3), layout="nhwc", math="tf32", groups=2)
    rows = [
        Row("a", some, 3, has_bias=True),
        *(Row("a", replace(some, op=op), 3) for op in ("dgrad", "wgrad")),
        Row("b,c", replace(last, op="wgrad"), 7),
        # the passes of one layer, not equally often
        Row("d", last, 9),
        Row("d", replace(last, op="wgrad"), 5),
    ]
    path.write_text(format_rows(rows))
    assert read_rows(path) == rows
    assert len(path.read_text().splitlines()) == 5
    only = [row for row in rows if row.problem.op == "wgrad"]
    assert read_rows(path, ("wgrad",)) == only


def test_calls_that_are_equal_are_counted() -> None:
    one, two = (Problem("fprop", 2, 3, k, (9,), (3,)) for k in (4, 5))
    rows = count_calls([("a", one), ("b", two), ("a", one), ("a", two)], {two})
    assert rows == [Row("a", one, 2), Row("b", two, 1, True), Row("a", two, 1, True)]


def test_what_the_table_says_is_not_said_twice(path: Path) -> None:
    path.write_text(format_rows([Row("a", Problem("fprop", 2, 3, 4, (9,), (3,)))]))
    for name in ("dtype", "layout", "math"):
        with pytest.raises(ConfigError, match=f"{name} .* has a column {name}; leave one"):
            read_rows(path, **{name: "strict"})


@pytest.mark.parametrize(
    ("column", "value", "sentence"),
    [
        ("rank", "4", "line 2: rank must be 1, 2 or 3, got 4"),
        ("ops", "fprop+bprop", r"line 2: ops names some of .* joined by \+, got 'fprop\+bprop'"),
        ("bias", "yes", "line 2: bias names some of"),
        ("count", "0", "line 2: count must be at least 1, got 0"),
        ("count", "1.5", "line 2: count must be an int, got '1.5'"),
        ("dtype", "float8", "line 2, layer flat: dtype must be one of"),
        ("layout", "chwn", "line 2, layer flat: layout must be one of"),
        ("math", "fast", "line 2, layer flat: math must be one of"),
    ],
)
def test_a_bad_value_of_an_optional_column_is_named(
    path: Path, column: str, value: str, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read_rows(write(path, f"{FLAT},{value}", header=",".join((*COLUMNS, column))))


def test_a_padding_without_a_column_is_refused() -> None:
    uneven = Problem("fprop", 2, 3, 4, (9,), (3,), padding=((1, 0),))
    with pytest.raises(ConfigError, match="one padding for both ends"):
        format_rows([Row("a", uneven)])
