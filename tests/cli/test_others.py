"""`ucudnn doctor`, `ucudnn cache info`, and the command line as a whole."""

from __future__ import annotations

import json
import os
import pty
import random
import re
import subprocess
import sys
import termios
import threading
import time
import warnings
from dataclasses import replace

import laws
import pytest
import torch

from ucudnn import cache as caches
from ucudnn.backends.torch_cpu.backend import TorchCpuBackend


@pytest.mark.slow
def test_doctor_says_what_a_plan_depends_on(ucudnn, tmp_path):
    done = ucudnn("doctor", "--cache", tmp_path / "new")
    assert done.status == 0, done.err
    for said in (torch.__version__, "threads", "malloc", "filling 64 MiB", str(tmp_path / "new")):
        assert said in done.out
    assert not (tmp_path / "new").exists()


def test_doctor_json(ucudnn):
    found = json.loads(ucudnn("doctor", "--json").out)
    assert found["conditions"]["threads"] == torch.get_num_threads()
    assert found["fresh_ns"] > 0
    assert isinstance(found["advice"], list)


def test_advice_on_malloc_names_its_price(tmp_path):
    from ucudnn.doctor import diagnose

    found = diagnose(str(tmp_path / "cache"))
    glibc = replace(found.conditions, allocator="glibc")
    slow = replace(found, conditions=glibc, fresh_ns=9_000_000, reused_ns=3_000_000, load=0.0)
    (sentence,) = slow.advice
    assert "GLIBC_TUNABLES=" in sentence
    assert "The price is memory" in sentence
    assert replace(slow, fresh_ns=3_000_000).advice == ()


def test_doctor_advises_a_writable_cache(ucudnn, tmp_path):
    (tmp_path / "file").write_text("")
    done = ucudnn("doctor", "--cache", tmp_path / "file" / "cache")
    assert done.status == 0
    assert "cannot be written" in done.out


@pytest.mark.slow
def test_tuning_goes_on_where_the_cache_cannot_be_written(ucudnn, table, tmp_path):
    (tmp_path / "file").write_text("")
    cache = tmp_path / "file" / "cache"
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        done = ucudnn("tune", table(), "--policy", "undivided", "--cache", cache, "--json")
    assert "ucudnn: warning: " in done.err
    assert done.err.count("kept in memory") == 1
    assert done.status == 0
    assert json.loads(done.out)["measured"] > 0


@pytest.mark.slow
def test_cache_commands_over_the_life_of_a_cache(ucudnn, table, tmp_path):
    def cache(*arguments, at="mine"):
        return ucudnn("cache", *arguments, "--cache", tmp_path / at)

    tuned = ucudnn("tune", table(), "--ops", "fprop", "--cache", tmp_path / "mine", "--json")
    measured = json.loads(tuned.out)["measured"]
    found = json.loads(cache("info", "--json").out)
    # what was skipped as too slow is remembered too
    assert sum(device["records"] for device in found["devices"]) >= measured
    assert f"{torch.__version__}" in cache("info").out
    assert cache("check").status == 0

    assert "(read-only)" not in cache("info").out
    file = tmp_path / "timings.csv"
    exported = json.loads(cache("export", file, "--json").out)
    assert exported["measurements"] >= measured
    assert json.loads(cache("import", file, "--json", at="copy").out) == exported
    merged = json.loads(cache("merge", tmp_path / "copy", "--json").out)
    assert merged == {"read": exported["measurements"], "added": 0}
    assert cache("merge", tmp_path / "copy").out.endswith(", 0 of them new here\n")

    assert cache("prune").status == 2
    assert cache("prune", "--where", "nonsense=1").status == 2
    everything = ("prune", "--where", "problem.op=fprop")
    assert "would remove" in cache(*everything, "--dry-run").out
    assert cache(*everything).status == 0
    assert json.loads(cache("info", "--json").out)["devices"] == []


def test_a_name_that_no_terminal_can_show_is_printed_all_the_same(ucudnn, tmp_path):
    one = laws.sample_measurements(2)[1]
    odd = replace(
        one, key=replace(one.key, device=replace(one.key.device, name="half \ud800 of it"))
    )
    with caches.open(tmp_path) as cache:
        cache.put([odd])
    found = ucudnn("cache", "info", "--cache", tmp_path)
    assert found.status == 0, found.err
    assert "half \\ud800 of it" in found.out


@pytest.mark.nightly
def test_advice_on_a_model_within_a_budget(ucudnn, model):
    arguments = ("advise", f"{model}:net", "--input", "8x3x12x12")
    done = ucudnn(*arguments, "--memory-budget", "50%")
    assert done.status == 0, done.err
    assert done.out.startswith("Verdict: the largest batch within ")
    assert len(done.out.splitlines()) <= 26


@pytest.mark.slow
def test_advice_on_a_model(ucudnn, model, monkeypatch):
    # No way of running steps is tried.
    monkeypatch.setattr("ucudnn.steps.advise._MOST_S", 0.0)
    arguments = ("advise", f"{model}:net", "--input", "8x3x12x12")
    done = ucudnn(*arguments)
    assert done.status == 0, done.err
    assert done.out.startswith("Verdict: ")
    assert len(done.out.splitlines()) <= 26
    assert "fprop conv2d(3->8, k3, 12x12) N=8" not in done.out
    done = ucudnn(*arguments, "--infer", "--all")
    assert "fprop conv2d(3->8, k3, 12x12) N=8" in done.out
    found = json.loads(ucudnn(*arguments, "--ops", "fprop", "--json").out)
    assert [kernel["problem"]["op"] for kernel in found["kernels"]] == ["fprop", "fprop"]
    assert found["ways"][0]["name"] == "as it is"
    assert found["verdict"]


def test_advice_under_autocast_compares_a_step_in_float32(ucudnn, model, monkeypatch):
    def elapsed_ns(_, run):
        run()
        return 136 * 10**9 if torch.is_autocast_enabled("cpu") else 10**9

    monkeypatch.setattr(TorchCpuBackend, "elapsed_ns", elapsed_ns)
    done = ucudnn("advise", f"{model}:net", "--input", "8x3x12x12", "--autocast")
    assert done.status == 0, done.err
    assert done.out.startswith(
        "Verdict: leave autocast out: a step in float32 takes 0.0074 times as long, 1.00 s instead "
        "of 136 s."
    )


def test_no_advice_on_a_recording(ucudnn, model):
    done = ucudnn("advise", f"{model}:net", "--input", "8x3x12x12", "--backend", "recorded")
    assert done.status == 2
    assert "advice is about this machine" in done.err


def test_pruning_can_be_tried(ucudnn, tmp_path):
    # The two have different statuses.
    stays, goes = laws.sample_measurements(2)
    with caches.open(tmp_path) as cache:
        cache.put([stays, goes])
    where = f"status={goes.status}"
    arguments = ("cache", "prune", "--where", where, "--cache", tmp_path, "--json")
    assert json.loads(ucudnn(*arguments, "--dry-run").out) == {"measurements": 1, "dry_run": True}
    assert json.loads(ucudnn(*arguments).out) == {"measurements": 1, "dry_run": False}
    with caches.open(tmp_path, "r") as cache:
        assert [repr(one) for one in cache] == [repr(stays)]


def test_names_of_the_user_are_printed_as_they_are(ucudnn, model, tmp_path):
    odd = tmp_path / "emoji.py"
    odd.write_text("def fire(): raise ValueError('bad :fire: [red]x[/red]')")
    done = ucudnn("trace", f"{odd}:fire", "--input", "2x3x9x9")
    assert done.status == 2
    assert "emoji.py:fire: ValueError: bad :fire: [red]x[/red]" in done.err
    missing = ucudnn("show", ":fire:/[b]x.json")
    assert "cannot read the plan :fire:/[b]x.json" in missing.err


@pytest.mark.parametrize("words", [("tune", "-h"), ("-h",), ("cache", "-h"), ("run", "-h")])
def test_short_help(ucudnn, words):
    done = ucudnn(*words)
    assert done.status == 0
    assert "Usage: " in done.out


@pytest.fixture
def kept(tmp_path, random_plan):
    path = tmp_path / "kept.plan.json"
    model = torch.nn.Conv2d(3, 8, 3)
    random_plan(model, torch.empty(4, 3, 12, 12), random.Random(1)).save(path)
    return path


@pytest.mark.process
def test_through_a_pipe_lines_are_as_wide_as_the_terminal(kept):
    terminal, end = pty.openpty()
    termios.tcsetwinsize(end, (50, 90))
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    command = [sys.executable, "-m", "ucudnn", "show", kept]
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "env": environment}
    shown = subprocess.run(command, stderr=end, check=True, text=True, **options).stdout
    os.close(end)
    os.close(terminal)
    table = [line for line in shown.splitlines() if "conv2d" in line]
    assert table
    assert max(map(len, table)) <= 90
    # In CI, where nothing is a terminal, a table has all its columns.
    bare = subprocess.run(command, stderr=subprocess.PIPE, check=True, text=True, **options).stdout
    assert max(map(len, bare.splitlines())) > 90


@pytest.mark.process
@pytest.mark.parametrize("words", [(), ("--json",), ("--csv",)])
def test_a_reader_that_goes_away_is_no_error(kept, words):
    reader, writer = os.pipe()
    # As after `ucudnn show ... | head -0`.
    os.close(reader)
    command = [sys.executable, "-m", "ucudnn", "show", kept, *words]
    done = subprocess.run(command, check=False, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.stderr == ""


def test_the_version(ucudnn):
    import ucudnn as package

    assert ucudnn("--version").out == f"ucudnn {package.__version__}\n"


@pytest.mark.slow
def test_progress_without_a_terminal_is_lines(ucudnn, model, monkeypatch):
    from ucudnn.system import lines

    monkeypatch.setattr(lines, "_LINE_S", 0.0)
    arguments = ("tune", f"{model}:net", "--input", "2x3x9x9", "--ops", "fprop")
    arguments += ("--no-step-race", "--policy", "undivided")
    loud = ucudnn(*arguments)
    assert "ucudnn: tuning, " in loud.err
    assert " measured, " in loud.err
    assert "\n\n" not in loud.err
    assert ucudnn(*arguments, "--remeasure", "-q").err == ""
    monkeypatch.undo()
    assert ucudnn(*arguments, "--json", "-q").err == ""


def test_lines_of_progress_come_while_nothing_is_reported(capsys, monkeypatch):
    from ucudnn.cli import console
    from ucudnn.system import lines

    monkeypatch.setattr(lines, "_LINE_S", 0.01)
    monkeypatch.setattr(console, "_is_quiet", False)
    said, threads = "", threading.active_count()

    def wait_for(pattern):
        nonlocal said
        deadline = time.monotonic() + 30
        while not re.search(pattern, said, re.M) and time.monotonic() < deadline:
            time.sleep(0.01)
            said += capsys.readouterr().err
        assert re.search(pattern, said, re.M)

    with console.bar("waiting") as update:
        wait_for(r"^ucudnn: waiting, \d+ s$")
        update(1, 3, "a part", "2 left")
        wait_for(r"^ucudnn: waiting, \d+ s, 1 of 3, a part, 2 left$")
    assert threading.active_count() == threads
