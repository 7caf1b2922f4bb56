"""Every command for a GPU runs to its end on one that is simulated, and survives failures of it."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

TUNING = ("--minutes", "4", "--config", '{"time_budget_s": 3}')


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def suite(layers: Path, out: Path, *more: str) -> tuple[object, ...]:
    return ("benchmarks/gpu_suite.py", out, layers / "alexnet_ucudnn_csv.csv", *more)


def test_nothing_is_written_into_the_results_of_gpus(simulated, repository):
    folder = repository / "benchmarks" / "results" / "simulated"
    done = simulated("-c", f"open({str(folder)!r}, 'w')", is_failing=True)
    assert "a simulated GPU has no results" in done.stderr
    simulated("benchmarks/gpu_run.py", "--minutes", "1", is_failing=True)
    assert not folder.exists()


def test_what_is_available_is_free_memory_within_the_fraction_of_the_process(simulated):
    program = (
        "import torch; from ucudnn.backends import open_backend; gpu = open_backend('cudnn');"
        "free, whole = torch.cuda.mem_get_info(); print(gpu.available_bytes() - free);"
        "torch.cuda.get_per_process_memory_fraction = lambda _: 0.25;"
        "torch.cuda.memory_allocated = lambda _: 7;"
        "torch.cuda.memory_reserved = lambda _: 9;"
        "print(gpu.available_bytes() == min(free + 2, whole // 4 - 7))"
    )
    assert simulated("-c", program).stdout == "0\nTrue\n"


@pytest.mark.parametrize(
    "chosen", ["not bfloat16 and not float16-nchw", pytest.param("", marks=pytest.mark.nightly)]
)
def test_the_tests_pass(simulated, chosen):
    """bfloat16 differs from float16 by a number alone; both layouts are tried in float32."""
    options = ("-q", "-p", "no:cacheprovider", "-n", "2", "-k", chosen)
    done = simulated("-m", "pytest", *options, "tests/gpu")
    assert " passed" in done.stdout.splitlines()[-1]


def test_failures_cost_one_candidate_each(simulated, layers, faults, tmp_path):
    out = tmp_path / "out"
    command = suite(layers, out, "--dtypes", "fp32", "--limits", "1,64", "--min-batch", "4")
    simulated(*command, "--parts", "timings")
    whole = rows(out / "timings.csv")
    names = [row["algorithm"] for row in whole if (row["op"], row["batch"]) == ("fprop", "8")]
    # begins of identities, of which each is met once; a plan that is not built fails alone
    failing = {"fault": names[3], "hang": names[5], "fail": names[7]}
    for kind, identity in failing.items():
        (faults / kind).write_text(identity)
    (tmp_path / "out").rename(tmp_path / "before")
    simulated(*command, "--parts", "timings", SIMULATED_GPU_PATIENCE="15")
    assert not list(faults.iterdir())
    lost = {(row["op"], row["batch"], row["algorithm"]) for row in whole}
    lost -= {(row["op"], row["batch"], row["algorithm"]) for row in rows(out / "timings.csv")}
    assert lost == {("fprop", "8", identity) for identity in failing.values()}
    assert len(rows(out / "splits.csv")) == 3 * 2
    faulted = json.loads((out / "faults.json").read_text())
    assert [text.rpartition(" ")[2] for text in faulted] == [failing["fault"], failing["hang"]]
    # each of the three processes has left its record
    assert len(json.loads((out / "provenance.json").read_text())) == 3


@pytest.mark.nightly
def test_tuning_survives_failures(simulated, layers, faults, tmp_path):
    out = tmp_path / "out"
    options = ("--dtypes", "fp32", "--limits", "64", "--seconds", "60", "--parts", "tune")
    for kind in ("fault", "hang", "fail"):
        (faults / kind).write_text("eng")
    simulated(*suite(layers, out, *options, "--ops", "fprop"), SIMULATED_GPU_PATIENCE="15")
    assert not list(faults.iterdir())
    answers = json.loads((out / "answers.json").read_text())
    assert answers["skipped"] == {}
    plan = json.loads((out / "plan_64mib.json").read_text())
    assert plan["device"]["name"] == "simulated"
    recorded = rows(out / "recorded.csv")
    reasons = [row["reason"] for row in recorded if row["status"] not in ("ok", "screened")]
    assert sum("illegal memory access" in reason for reason in reasons) == 1
    assert sum("did not end within" in reason for reason in reasons) == 1
    assert sum("EXECUTION_FAILED" in reason for reason in reasons) == 1
    assert sum(row["status"] == "ok" for row in recorded) > 3


@pytest.mark.nightly
def test_everything_at_once_and_again(simulated, layers, tmp_path):
    """The script of `make gpu`; the second time it goes on where it stopped."""
    command = ("benchmarks/gpu_run.py", "--out", tmp_path / "out", "--layers", layers, "--tiny")
    # the tests run by themselves above
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "tests.txt").write_text("170 passed\n")
    for minutes in ("0.2", "6"):
        simulated(*command, "--minutes", minutes)
    page = (tmp_path / "out" / "tables.md").read_text()
    _, _, end = page.partition("## Won, lost, not run on simulated\n")
    for said in ("- kernels, fp32, 64 MiB", "- steps of unet3d, tf32", "- steps of resnet50, tf32"):
        assert said in end
    assert "not run: demonstration A" in end
    assert "fp32, for want of time" not in end
    timings = rows(tmp_path / "out" / "timings.csv")
    keys = [(*list(row.values())[:6],) for row in timings]
    assert len(keys) == len(set(keys))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("network", "variants"),
    [
        ("alexnet", "eager,benchmark,benchmark@all,ucudnn@none,ucudnn@64MiB"),
        ("unet3d", "eager,channels_last,ucudnn@64MiB,ucudnn@none"),
    ],
)
def test_steps_are_timed_in_every_variant(simulated, tmp_path, network, variants):
    options = ("--networks", network, "--dtypes", "tf32", "--rounds", "3", "--variants", variants)
    simulated("benchmarks/training_steps.py", "--out", tmp_path, "--tiny", *options, *TUNING)
    runs = json.loads((tmp_path / "training_steps.json").read_text())["runs"]
    assert [run["job"]["variant"] for run in runs] == variants.split(",")
    assert [(run["failed"], len(run["samples_ns"])) for run in runs] == [(None, 3)] * len(runs)


@pytest.mark.nightly
def test_steps_in_less_memory_are_timed(simulated, tmp_path):
    """Peaks that are measured lack all but what is held: so a rival's is too small a budget."""
    pytest.importorskip("monai")
    shape = ("--device", "cuda", "--shape", "2,1,32,32,32", "--rounds", "3", "--no-compile")
    budgets = ("--budget-of", "checkpoint", "--shares", "90%,5%", "--time-budget-s", "15")
    out = tmp_path / "fit.json"
    done = simulated("benchmarks/fit_the_step.py", "segresnet", *shape, *budgets, "--out", out)
    assert "has no plan" not in done.stderr  # each call meets the kernel that was planned for it
    [found] = json.loads(out.read_text())
    within = "segments within 90%"
    assert [*found["ways"]] == ["torch", "torch.utils.checkpoint", within]
    assert [len(way["samples_ns"]) for way in found["ways"].values()] == [3] * 3
    assert found["ways"][within]["divided"]
    assert (tmp_path / found["ways"][within]["plan"]).exists()
    rivals = "segments at the peak of torch.utils.checkpoint"
    assert [*found["refused"]] == [rivals, "segments within 5%"]
    assert all("is too small" in reason for reason in found["refused"].values())


@pytest.mark.nightly
@pytest.mark.parametrize(
    "command",
    [
        ("demo_unet.py", "--dtypes", "tf32", "--variants", "eager,ucudnn@none"),
        ("demo_memory.py", "--batches", "1,2"),
        ("demo_cold_start.py", "--ranks", "2", "--batch", "2", "--network", "unet3d"),
    ],
    ids=lambda command: command[0],
)
def test_a_demonstration_concludes(simulated, tmp_path, command):
    name, *options = command
    simulated(f"benchmarks/{name}", "--out", tmp_path, "--tiny", *options, *TUNING)
    found = json.loads((tmp_path / name.replace(".py", ".json")).read_text())
    assert any(run["samples_ns"] for run in found["runs"]) or found.get("rows")
    assert found["says"]
    page = simulated("benchmarks/gpu_tables.py", tmp_path).stdout
    assert found["says"][-1].strip() in page


@pytest.mark.nightly
def test_the_cache_hypothesis_concludes(simulated, layers, tmp_path):
    command = ("benchmarks/l2_hypothesis.py", "--out", tmp_path, "--l2-mib", "0.001")
    tables = ("--tables", *layers.glob("*.csv"), "--dtypes", "tf32", "--ops", "fprop")
    simulated(*command, *tables, "--minutes", "1")
    found = json.loads((tmp_path / "l2_hypothesis.json").read_text())
    assert found["device"] == "simulated"
    assert found["trials"]
    assert not [trial["failed"] for trial in found["trials"] if trial["failed"]]


@pytest.mark.nightly
def test_overhead_and_additivity_are_measured(simulated, layers, tmp_path):
    small = ("--batch", "2", "--image", "32", "--rounds", "2", "--steps", "1")
    done = simulated("benchmarks/overhead.py", "--device", "cuda", *small)
    assert "simulated" in done.stdout
    assert done.stdout.count("a workspace per") == 4
    plan = tmp_path / "some.plan.json"
    table = layers / "alexnet_ucudnn_csv.csv"
    simulated("-m", "ucudnn", "tune", table, "--backend", "cudnn", "--time-budget", "5", "-o", plan)
    done = simulated("benchmarks/additivity.py", plan, "--rounds", "3")
    assert "predicted over measured: median" in done.stdout
