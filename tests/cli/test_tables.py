"""`ucudnn trace` and tables of layers: what a model computes, as a file that `tune` takes."""

from __future__ import annotations

import json

import pytest
import torch

import ucudnn as package
from ucudnn.layer_table import read_rows
from ucudnn.plan import Plan

CONDITIONAL = ("--input", "8x3x12x12", "--input", "t=8:int64")


def traced(ucudnn, tmp_path, *arguments):
    output = tmp_path / "traced.csv"
    done = ucudnn("trace", *arguments, "-o", output)
    assert done.status == 0, done.err
    return read_rows(output)


def test_the_table_of_a_model_is_its_trace(ucudnn, model, tmp_path):
    rows = traced(ucudnn, tmp_path, f"{model}:net", "--input", "8x3x12x12")
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 1)
    )
    expected = package.trace(net, torch.empty(8, 3, 12, 12))
    assert sorted(map(str, expected)) == sorted(str(row.problem) for row in rows)
    assert {row.name for row in rows} == {"0", "2"}
    assert [row.problem.op for row in rows if row.has_bias] == ["fprop", "fprop"]
    printed = ucudnn("trace", f"{model}:net", "--input", "8x3x12x12").out
    assert printed == (tmp_path / "traced.csv").read_text()


@pytest.mark.parametrize(
    "how", [CONDITIONAL, ("--input", "x=8x3x12x12", "--input", "t=8:int64"), None]
)
def test_inputs_by_keyword_of_any_dtype_or_from_a_function(ucudnn, model, tmp_path, how):
    if how is None:
        rows = traced(ucudnn, tmp_path, f"{model}:Conditional", "--inputs", f"{model}:inputs")
        assert {(row.problem.batch, row.problem.input_size) for row in rows} == {
            (2, (8, 8)),
            (4, (6, 6)),
        }
        return
    rows = traced(ucudnn, tmp_path, f"{model}:Conditional", *how)
    assert {(row.problem.batch, row.problem.out_channels) for row in rows} == {(8, 4)}


def test_arguments_of_the_callable_several_sizes_and_a_model_that_is_there(ucudnn, model, tmp_path):
    sizes = ("--input", "8x3x12x12,2x3x9x9", "--input", "8,2:int64")
    rows = traced(ucudnn, tmp_path, f"{model}:Conditional", *sizes, "--args", '{"width": 6}')
    assert {(row.problem.batch, row.problem.out_channels) for row in rows} == {(8, 6), (2, 6)}
    rows = traced(ucudnn, tmp_path, f"{model}:needs_arguments", "--args", "[5]", *sizes[:2])
    assert {row.problem.out_channels for row in rows} == {5}
    assert traced(ucudnn, tmp_path, f"{model}:made", "--input", "8x3x12x12")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ((), "float32"),
        (("--autocast",), "bfloat16"),
        (("--autocast-dtype", "float16"), "float16"),
        (("--autocast", "--autocast-dtype", "float16"), "float16"),
    ],
)
def test_a_model_under_autocast(ucudnn, model, tmp_path, flags, dtype):
    rows = traced(ucudnn, tmp_path, f"{model}:net", "--input", "8x3x12x12", *flags)
    assert {row.problem.dtype for row in rows} == {dtype}
    assert {row.problem.op for row in rows} == {"fprop", "dgrad", "wgrad"}


def test_volumes_in_channels_last(ucudnn, model, tmp_path):
    rows = traced(ucudnn, tmp_path, f"{model}:volumes", "--input", "2x4x6x6x6", "--channels-last")
    assert {row.problem.rank for row in rows} == {3}
    net = torch.nn.Sequential(
        torch.nn.Conv3d(4, 8, 3), torch.nn.ReLU(), torch.nn.Conv3d(8, 4, 1)
    ).to(memory_format=torch.channels_last_3d)
    x = torch.empty(2, 4, 6, 6, 6).to(memory_format=torch.channels_last_3d)
    assert sorted(str(row.problem) for row in rows) == sorted(map(str, package.trace(net, x)))
    assert "nhwc" in {row.problem.layout for row in rows}


def test_a_model_whose_course_depends_on_values(ucudnn, model, tmp_path):
    refused = ucudnn("trace", f"{model}:of_values", "--input", "2x3x9")
    assert refused.status == 2
    assert "use --real" in refused.err
    rows = traced(ucudnn, tmp_path, f"{model}:of_values", "--input", "2x3x9", "--real")
    assert {row.problem.rank for row in rows} == {1}


@pytest.mark.slow
def test_a_table_is_tuned_as_its_model_is(ucudnn, model, tmp_path, output):
    table = tmp_path / "layers.csv"
    ucudnn("trace", f"{model}:net", "--input", "4x3x9x9", "--autocast", "-o", table)
    done = ucudnn("tune", table, "--policy", "undivided", "-o", output)
    assert done.status == 0, done.err
    kernels = Plan.load(output).kernels
    assert {kernel.problem.dtype for kernel in kernels} == {"bfloat16"}
    assert sorted(kernel.layers for kernel in kernels) == [("0",)] * 2 + [("2",)] * 3
    refused = ucudnn("tune", table, "--dtype", "float32")
    assert refused.status == 2
    assert "has a column dtype" in refused.err


@pytest.mark.slow
def test_counts_are_calls_of_a_step(ucudnn, model, tmp_path, output):
    table = tmp_path / "layers.csv"
    header, first, second = ucudnn(
        "trace", f"{model}:net", "--input", "4x3x9x9", "--infer"
    ).out.splitlines()
    lines = [header, f"{first.rpartition(',')[0]},900", f"{second.rpartition(',')[0]},300"]
    table.write_text("\n".join([*lines, lines[2].replace("2,4,", "3,2,", 1)]) + "\n")
    done = ucudnn("tune", table, "--policy", "undivided", "-o", output)
    assert done.status == 0, done.err
    calls = {kernel.layers[0]: len(kernel.layers) for kernel in Plan.load(output).kernels}
    assert calls == {"0": 3, "2": 1, "3": 1}


def test_what_trace_refuses(ucudnn, model, table):
    for arguments, said in (
        ((f"{model}:no_convolution", "--input", "2x3"), "computes no convolution"),
        ((f"{model}:net", "--input", "8x3x12x12", "--device", "mps"), "must be cpu or cuda"),
        ((table(), "--input", "8x3x12x12"), "MODEL must be a model here"),
    ):
        done = ucudnn("trace", *arguments)
        assert (done.status, done.out) == (2, "")
        assert said in done.err


def test_the_origin_of_an_error_is_shown_where_that_is_wanted(ucudnn, model):
    arguments = ("trace", f"{model}:needs_arguments", "--input", "8x3x12x12")
    assert "Traceback" not in ucudnn(*arguments).err
    done = ucudnn(*arguments, "--traceback")
    assert done.status == 2
    assert "Traceback" in done.err
    assert "missing 1 required positional argument: 'width'" in done.err


WITHOUT_TORCH = """
import contextlib, io, json, sys

class NoTorch:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "torch":
            raise AssertionError("torch was imported")

sys.meta_path.insert(0, NoTorch())
from ucudnn import cli

found = []
for words in json.loads(sys.argv[1]):
    sys.argv = ["ucudnn", *words]
    with contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            cli.main()
            status = 0
        except SystemExit as stop:
            status = stop.code
    found.append((status, err.getvalue()))
print(json.dumps(found))
"""
ENUMERATE = ("--device-profile", "h200", "-o", "candidates.csv")


@pytest.mark.process
def test_what_is_wrong_by_itself_is_refused_without_torch(python, model, table, tmp_path):
    good, bad, other = table(), tmp_path / "bad.csv", tmp_path / "other.csv"
    bad.write_text("name,n,c,h,w,k,kh,kw\nfirst,8,3,32,32,16,3,3\nsecond,8,3,32,32,16,three,3\n")
    other.write_bytes(b"\x89PNG\r\n\x1a\n\x00")
    net, shape = f"{model}:net", ("--input", "8x3x12x12")
    said = {
        ("tune", "none.csv"): "cannot read the table of layers none.csv: No such file",
        ("tune", bad): f"{bad} line 3: kh must be an int, got 'three'",
        ("tune", other): f"cannot read the table of layers {other}",
        ("enumerate", "none.csv", *ENUMERATE): "cannot read the table of layers none.csv",
        ("enumerate", bad, *ENUMERATE): f"{bad} line 3: kh must be an int, got 'three'",
        ("tune", good, "--dtype", "float8"): "dtype must be one of",
        ("tune", good, "--policy", "some"): "--policy must be one of",
        ("advise", good): "MODEL must be a model here",
        ("foresee", good, *shape): "MODEL must be a model here",
        ("launch", "--ranks-per-gpu", "two", "train.py"): "--ranks-per-gpu must be a number",
    }
    for command in ("tune", "advise", "foresee", "trace"):
        said |= {
            (command, "train.py", *shape): "MODEL must be module:callable",
            (command, "train.py:net", *shape): "a file that is there, and train.py is not",
            (command, net): "a model needs --input",
            # Two mistakes are told together.
            (command, "train.py"): "got 'train.py'; and a model needs --input",
            (command, net, "--input", "8x"): "--input must be",
            (command, net, "--inputs", "inputs"): "--inputs must be module:callable",
            (command, net, *shape, "--args", "{"): "--args must be JSON",
            (command, net, *shape, "--fast"): "No such option",
        }
    words = [[str(word) for word in line] for line in said]
    found = json.loads(python("-c", WITHOUT_TORCH, json.dumps(words), cwd=tmp_path).stdout)
    for (status, err), line, sentence in zip(found, said, said.values(), strict=True):
        assert status == 2, (line, err)
        assert sentence in " ".join(err.split()), line
