"""Tables of layers: a line is the convolution that its columns say, or a sentence names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ucudnn.errors import ConfigError
from ucudnn.layer_table import COLUMNS, read_layers
from ucudnn.problem import OPS, Problem

FLAT = "flat,8,4,1,27,26,6,1,5,3,0,2,1,1,2,1,1,1,2,2"
DEEP = "deep,2,4,9,8,7,6,3,3,3,1,1,1,2,1,1,1,1,1,1"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "layers.csv"


def write(path: Path, *lines: str, header: str = ",".join(COLUMNS)) -> Path:
    path.write_text("\n".join([header, *lines]) + "\n")
    return path


def test_a_layer_is_a_problem_for_each_pass(path: Path) -> None:
    found = read_layers(write(path, FLAT, DEEP))
    assert [(name, problem.op) for name, problem in found] == [
        (name, op) for name in ("flat", "deep") for op in OPS
    ]


def test_depth_one_is_flat_and_any_other_is_deep(path: Path) -> None:
    flat, deep = (problem for _, problem in read_layers(write(path, FLAT, DEEP), ("dgrad",)))
    assert flat == Problem(
        *("dgrad", 8, 4, 6, (27, 26), (5, 3)),
        stride=(2, 1),
        padding=((2, 2), (1, 1)),
        dilation=(1, 2),
        groups=2,
    )
    assert deep == Problem(
        *("dgrad", 2, 4, 6, (9, 8, 7), (3, 3, 3)),
        stride=(2, 1, 1),
        padding=((1, 1),) * 3,
    )


def test_dtype_and_layout_are_those_of_all(path: Path) -> None:
    (_, problem), *_ = read_layers(write(path, FLAT), dtype="float16", layout="nhwc")
    assert (problem.dtype, problem.layout) == ("float16", "nhwc")


def test_a_byte_order_mark_and_columns_in_any_order_are_read(path: Path) -> None:
    columns = [*COLUMNS[1:], COLUMNS[0], "comment"]
    name, *values = FLAT.split(",")
    write(path, ",".join([*values, name, "mine"]), header="\ufeff" + ",".join(columns))
    assert read_layers(path, ("fprop",)) == read_layers(
        write(path.with_name("plain.csv"), FLAT), ("fprop",)
    )


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ((), "has no layers: only a header"),
        ((FLAT, FLAT.replace("27", "x")), "line 3: every column but name holds an int; h is 'x'"),
        ((FLAT[:-2],), "line 2: every column but name holds an int; groups is None"),
        ((FLAT.replace(",6,1,5", ",7,1,5"),), r"line 2, layer flat: .*groups"),
    ],
)
def test_a_table_that_cannot_be_is_refused_with_its_line(
    path: Path, lines: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read_layers(write(path, *lines))


def test_a_missing_column_is_named(path: Path) -> None:
    write(path, header=",".join(COLUMNS[:-1]))
    with pytest.raises(ConfigError, match=r"line 1: a table of layers has .* missing: groups$"):
        read_layers(path)


def test_what_is_no_text_and_what_is_not_there_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the table .*: No such file"):
        read_layers(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot read the table .*: 'utf-8'"):
        read_layers(path)
