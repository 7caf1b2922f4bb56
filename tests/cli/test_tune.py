"""`ucudnn tune` and `ucudnn show`: what they write and print, and every wrong call."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ucudnn import cache as caches
from ucudnn.benchmark.protocol import PROTOCOL
from ucudnn.plan import Plan

SHAPE = "8x3x12x12"


@pytest.mark.slow
def test_a_model_is_tuned_shown_and_tuned_again_from_the_cache(ucudnn, model, output):
    arguments = ("tune", f"{model}:net", "--input", SHAPE, "--no-step-race")
    tuned = ucudnn(*arguments, "--all", "-o", output)
    assert tuned.status == 0, tuned.err
    assert "fprop conv2d(3->8, k3, 12x12)" in tuned.out
    assert f"plan written to {output}" in tuned.out
    assert "Measured nothing" not in tuned.out
    plan = Plan.load(output)
    # the first layer's input needs no gradient
    assert len(plan.kernels) == 5
    shown = ucudnn("show", output, "--all")
    assert shown.status == 0
    assert "wgrad conv2d(8->4, k1, 12x12)" in shown.out
    again = ucudnn(*arguments, "--json")
    counts = json.loads(again.out)
    assert counts["measured"] == 0
    assert counts["reused"] > 0
    assert counts["hash"] == plan.hash
    assert "Measured nothing: everything was in the cache" in ucudnn(*arguments).out


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_steps_are_noted(ucudnn, model, output, monkeypatch):
    # Code that does nothing but run the graph is as fast as torch.
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda graph, _: graph.forward)
    arguments = ("tune", f"{model}:net", "--input", SHAPE, "--policy", "undivided")
    done = ucudnn(*arguments, "--compile", "auto", "--layout", "auto", "-o", output)
    assert done.status == 0, done.err
    compilation = Plan.load(output).compilation
    assert "compiled" in [way.name for way in compilation.ways]
    for printed in (done.out, ucudnn("show", output).out):
        assert str(compilation).partition(",")[0].partition(":")[0].capitalize() in printed
    found = json.loads(ucudnn(*arguments, "--compile", "auto", "--json").out)
    assert len(found["compilation"]["ways"]) >= 2


@pytest.mark.slow
def test_a_pool_is_divided(ucudnn, model, output):
    flags = ("--input", SHAPE, "--ops", "fprop", "--total-workspace", "150KiB")
    tuned = ucudnn("tune", f"{model}:net", *flags, "--solver", "cbc", "-o", output)
    assert tuned.status == 0, tuned.err
    assert "pool of 150 KiB" in tuned.out
    assert "each call its own" in tuned.out
    plan = Plan.load(output)
    assert sum(k.timing.workspace_bytes for k in plan.kernels) == plan.workspace_bytes <= 150 << 10


@pytest.mark.slow
def test_a_memory_budget(ucudnn, model, output):
    flags = ("--input", SHAPE, "--memory-budget", "1GiB", "--infer", "-o", output)
    tuned = ucudnn("tune", f"{model}:net", *flags)
    assert tuned.status == 0, tuned.err
    assert "memory budget 1 GiB" in tuned.out
    memory = Plan.load(output).memory
    assert 0 < memory.own_peak_bytes <= memory.plan_peak_bytes <= memory.budget_bytes
    assert "The peak by torch is " in ucudnn("show", output).out
    assert "An inference by torch has at most" in ucudnn("show", output, "--segments").out
    assert "beside its workspace, which may take" in ucudnn("show", output, "--kernel", "0").out
    # less than the parameters alone
    refused = ucudnn("tune", f"{model}:net", "--input", SHAPE, "--memory-budget", "1KiB")
    assert refused.status != 0
    assert "memory_budget=1 KiB is too small for any step: parameters, " in refused.err


@pytest.mark.slow
def test_show_one_kernel_every_batch(ucudnn, table, output):
    ucudnn("tune", table(), "--ops", "fprop", "-o", output)
    by_number, by_name = (ucudnn("show", output, "--kernel", key) for key in ("0", "conv1"))
    assert by_number.out == by_name.out
    assert "timed" in by_number.out
    assert "layers: conv1" in by_number.out
    assert "measured, the parts add up to" in by_number.out
    wrong = ucudnn("show", output, "--kernel", "conv9")
    assert wrong.status == 2
    assert "--kernel must be a number from 0 to 0 or the name of a layer" in wrong.err


@pytest.mark.slow
def test_show_json_is_the_plan(ucudnn, table, output):
    ucudnn("tune", table(), "--policy", "undivided", "-o", output)
    shown, kept = json.loads(ucudnn("show", output, "--json").out), json.loads(output.read_text())
    summaries = [kernel.pop("summary") for kernel in shown["kernels"]]
    assert shown.pop("left_out") == []
    del kept["checksum"]
    assert shown == kept
    assert shown["origin"]["protocol"] == PROTOCOL
    assert shown["origin"]["made"].startswith("20")
    rows = list(csv.DictReader(ucudnn("show", output, "--csv").out.splitlines()))
    assert [list(row.values()) for row in rows] == [
        ["" if value is None else str(value) for value in one.values()] for one in summaries
    ]
    plan = Plan.load(output)
    for row, kernel in zip(rows, plan.kernels, strict=True):
        assert int(row["plan_ns"]) == kernel.timing.time_ns
        assert row["split"] == str(kernel.split(8))
        assert float(row["gain"]) == pytest.approx(
            1 if kernel.is_default else kernel.default.time_ns / kernel.timing.time_ns, rel=1e-3
        )
    assert ucudnn("show", output, "--json", "--csv").status == 2


def test_settings_from_a_file_and_from_flags(ucudnn, table, tmp_path, output):
    settings = tmp_path / "settings.json"
    settings.write_text('{"policy": "undivided", "ops": ["wgrad"], "workspace_limit": "9MiB"}')
    done = ucudnn("tune", table(), "--config", settings, "--ops", "fprop", "-o", output)
    assert done.status == 0, done.err
    config = Plan.load(output).config
    assert (config.policy, config.ops, config.limit_bytes) == ("undivided", ("fprop",), 9 << 20)


MODEL = ("{model}:net", "--input", SHAPE)
BAD_CALLS = [
    (("nowhere.models:net", "--input", SHAPE), "No module named 'nowhere'"),
    (("{model}:no_module", "--input", SHAPE), "it returned int"),
    (("{model}:needs_arguments", "--input", SHAPE), "called without arguments"),
    (("{model}:no_convolution", "--input", "2x3x3"), "no convolution to plan"),
    (("{model}:net",), "a model needs --input"),
    (("{model}:net", "--input", "2x4x9x9"), "shapes [(2, 4, 9, 9)]"),
    (("{model}:net", "--input", "64x"), "SHAPE[,SHAPE ...][:DTYPE]"),
    (("{model}:net", "--input", "2x3x9x9:float8"), "DTYPE one of float32"),
    (
        ("{model}:net", "--input", "2x3x9x9,1x3x9x9", "--input", "2,2,2"),
        "one shape or as many as the others, got 2 and 3",
    ),
    (
        (*MODEL, "--autocast-dtype", "float32"),
        "--autocast-dtype must be one of bfloat16, float16, got 'float32'",
    ),
    (("{model}:net", "--input", "y=2x3x9x9"), "y"),
    (("{model}:net", "--input", "999999x3x16000x16000"), "fit in memory"),
    ((*MODEL, "--inputs", "{model}:inputs"), "or else --inputs"),
    (("{model}:net", "--inputs", "{model}:no_module"), "it returned int"),
    ((*MODEL, "--args", "{{"), "--args must be JSON"),
    ((*MODEL, "--args", "3"), "a JSON object or list"),
    (("some_models", "--input", SHAPE), "must be module:callable"),
    ((*MODEL, "--dtype", "float64"), "--dtype is for a table of layers"),
    ((*MODEL, "--layout", "nhwc"), "--layout must be one of keep, auto, got 'nhwc'"),
    (("{table}", "--memory-format", "auto"), "--memory-format must be one of nchw, nhwc, got"),
    (("{table}", "--layout", "auto"), "a table has none; --memory-format, or a column"),
    (("{table}", "--input", SHAPE), "--input is for a model"),
    (("{table}", "--autocast-dtype", "float16"), "--autocast-dtype is for a model"),
    (("{table}", "--step-race"), "--step-race runs steps of a model"),
    (("{table}", "--compile", "auto"), "--compile is of a model, and a table has none"),
    (("{table}", "--memory-budget", "1GiB"), "there is no model to run here"),
    ((*MODEL, "--compile", "yes"), "--compile must be one of keep, auto, got 'yes'"),
    (("{table}", "--math", "tf32"), "--math is about GPUs"),
    ((*MODEL, "--infer", "--ops", "wgrad"), "leave one out"),
    (("{model}:net", "--input", "0x3x9x9"), "got '0x3x9x9'"),
    (("nowhere.csv",), "cannot read the table of layers nowhere.csv"),
    ((*MODEL, "--solver", "exact"), "--solver divides --total-workspace"),
    (("{table}", "--dtype", "float8"), "bfloat16"),
    (("{table}", "-o", "nowhere/plan.json"), "a folder that exists"),
    (("{table}", "--fast"), "No such option"),
    (("{table}", "--config", "nowhere.json"), "--config must be a JSON file"),
    (("nowhere.py:net", "--input", SHAPE), "a file that is there, and nowhere.py"),
    (("{model}:nets", "--input", SHAPE), "some_models has no 'nets'"),
    ((*MODEL, "--time-budget", "x"), "--time-budget must be a number above 0 or None, got 'x'"),
]


@pytest.mark.parametrize(("arguments", "said"), BAD_CALLS, ids=lambda one: str(one)[-40:])
def test_bad_calls_say_one_sentence(ucudnn, model, table, arguments, said):
    names = {"model": model, "table": table()}
    done = ucudnn("tune", *(argument.format(**names) for argument in arguments))
    assert done.status == 2
    assert said in done.err
    assert "Traceback" not in done.err


def test_an_output_that_cannot_be_written_is_found_before_tuning(ucudnn, table):
    done = ucudnn("tune", table(), "-o", "/proc/plan.json")
    assert done.status == 3
    assert "--output cannot be written to /proc/plan.json" in done.err
    assert "tuning for" not in done.err


def test_a_script_that_runs_when_it_is_imported_is_named(ucudnn, model):
    script = Path(model).with_name("runs.py")
    script.write_text(Path(model).read_text() + "\nfor _ in range(2):\n    print('trained')\n")
    done = ucudnn("trace", f"{script}:net", "--input", SHAPE)
    assert done.status == 0, done.err
    assert "importing runs.py, which runs it" in done.err
    assert "importing" not in ucudnn("trace", f"{model}:net", "--input", SHAPE).err


@pytest.mark.process
def test_ctrl_c_keeps_what_was_measured(model, tmp_path):
    """A real process, a real signal, and the cache that it leaves."""
    cache = tmp_path / "interrupted"
    # a background job of a shell hands down that it ignores the signal
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        # what was measured while others use the machine would be measured again
        "from ucudnn.backends.torch_cpu.processor import LoadMeter; "
        "LoadMeter.others = lambda _: 0.0; "
        "from ucudnn.cli import main; main()"
    )
    command = [sys.executable, "-c", program, "tune", f"{model}:net", "--input", "32x3x48x48"]
    environment = {**os.environ, "UCUDNN_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    output = tmp_path / "so_far.json"
    child = subprocess.Popen(
        [*command, "-o", str(output)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not list(cache.rglob("*.h5")) and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "interrupted; measurements taken so far are in the cache" in err
    assert "Traceback" not in err
    assert f"and the plan so far, of 5 kernels, is in {output}" in " ".join(err.split())
    assert len(Plan.load(output).kernels) == 5
    with caches.open(cache, "r") as kept:
        assert any(entry.time_ns for entry in kept)


@pytest.mark.slow
@pytest.mark.filterwarnings("always:other processes use this machine")
def test_noise_is_said(ucudnn, model, output, monkeypatch):
    from ucudnn.backends.torch_cpu.processor import LoadMeter

    monkeypatch.setattr(LoadMeter, "others", lambda _: 99.0)
    arguments = ("tune", f"{model}:net", "--input", SHAPE, "--no-step-race", "-o", output)
    done = ucudnn(*arguments)
    assert done.status == 0
    assert "other processes use this machine" in done.err
    assert "Noise: of 5 kernels 5 timed while others used the processors" in done.out
    assert len(Plan.load(output).kernels) == 5
    assert "5 timed while others used the processors" in ucudnn("show", output).out
    noise = json.loads(ucudnn(*arguments, "--json", "--remeasure").out)["noise"]
    assert noise["perturbed"] == 5
    assert noise["is_noisy"] is True


@pytest.mark.slow
def test_all_kernels_over_the_limit_are_named_with_the_one_that_fits(ucudnn, model, output):
    arguments = ("tune", f"{model}:net", "--input", SHAPE, "--policy", "undivided")
    done = ucudnn(*arguments, "--workspace-limit", "1", "--unplanned", "error")
    assert done.status == 1
    named = re.findall(r"([\d.]+) KiB for (\w+ conv2d\(.*?\) at batch 8)", done.err)
    assert len(named) > 1
    suffices = re.search(r"raise the limit to (\S+) (\w+), which fits all", done.err)
    assert float(suffices[1]) == max(float(need) for need, _ in named)
    enough = "".join(suffices.groups())
    fitting = ucudnn(*arguments, "--workspace-limit", enough, "-o", output)
    assert fitting.status == 0, fitting.err
    assert len(Plan.load(output).kernels) == 5


@pytest.mark.slow
@pytest.mark.filterwarnings("always:.*exceed the workspace limit")
def test_kernels_that_nothing_fits_are_left_out_or_refused(ucudnn, model, output):
    arguments = ("tune", f"{model}:net", "--input", SHAPE, "--policy", "undivided")
    done = ucudnn(*arguments, "--workspace-limit", "3KiB", "-o", output)
    assert done.status == 0, done.err
    plan = Plan.load(output)
    assert "kernels exceed the workspace limit and run torch's own convolution" in done.err
    assert plan.origin.over_limit == plan.left_out
    assert len(plan.kernels) + len(plan.left_out) == 5
    assert plan.left_out
    assert all(kernel.timing.workspace_bytes <= 3 << 10 for kernel in plan.kernels)
    assert "nothing fits the workspace limit for " in ucudnn("show", output).out
    partial = ucudnn(*arguments, "--workspace-limit", "3KiB", "--fail-if-partial")
    assert partial.status == 1
    assert "The plan is partial" in partial.err
    refused = ucudnn(*arguments, "--workspace-limit", "3KiB", "--unplanned", "error")
    assert refused.status == 1
    assert "to torch's own convolution by --unplanned torch" in refused.err
