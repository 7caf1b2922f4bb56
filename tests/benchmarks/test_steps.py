"""Timing training steps in processes of their own, and what the demonstrations conclude."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch


@pytest.fixture
def workers(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("step_workers")


@pytest.fixture
def make_run(workers: ModuleType) -> Callable[..., Any]:
    """A function that makes a run of some variant with given step times in ms."""

    def make(variant: str, *times_ms: float, gib: float = 1, batch: int = 2, **more: Any) -> Any:
        run = workers.Run(workers.Job("unet3d", variant, "tf32", batch, **more))
        run.samples_ns = [round(1e6 * time_ms) for time_ms in times_ms]
        run.memory = {"reserved": int(gib * 2**30)}
        return run

    return make


@pytest.mark.nightly
def test_processes_take_steps_in_turn(workers):
    """One fails at setting up, which the others do not notice; every answer is handed out."""
    names = {"unet3d": ("eager", "channels_last"), "nothing": ("eager",)}
    jobs = [
        workers.Job(network, variant, "tf32", 2, "cpu", small=True)
        for network, variants in names.items()
        for variant in variants
    ]
    seen = []
    runs = workers.measure(jobs, 2, time.monotonic() + 300, lambda found: seen.append(len(found)))
    assert [len(run.samples_ns) for run in runs] == [2, 2, 0]
    assert [run.failed for run in runs] == [None, None, "KeyError: 'nothing'"]
    # the same weights and inputs give the same loss, whatever the layout
    assert runs[0].setup["loss"] == pytest.approx(runs[1].setup["loss"], rel=1e-4)
    assert len(seen) == 3 + 2 * 2


@pytest.mark.parametrize(
    ("variant", "benchmark", "limit"),
    [("benchmark", True, 10), ("channels_last+benchmark@all", True, 0), ("eager", False, None)],
)
def test_a_rival_tries_ten_engines_or_all(script, workers, monkeypatch, variant, benchmark, limit):
    settings = torch.backends.cudnn
    monkeypatch.setattr(settings, "benchmark", False)
    monkeypatch.setattr(settings, "benchmark_limit", None)
    job = workers.Job("unet3d", variant, "tf32", 2, "cpu", small=True)
    script("step_runner").Runner(job)
    assert (settings.benchmark, settings.benchmark_limit) == (benchmark, limit)


def test_the_table_compares_rounds(workers, make_run):
    failed = make_run("compile")
    failed.failed = "out of memory"
    runs = [make_run("eager", 30, 30, 60), make_run("ucudnn@none", 20, 20, 20), failed]
    text = "\n".join(workers.report(runs))
    assert "### unet3d, tf32, N=2" in text
    assert "| ucudnn@none | 20.0 ms ± 0 ns | 1.50 (1.50 to 3.00) | 1.00 GiB |" in text
    assert "| compile | out of memory |" in text


def test_finished_cases_are_not_repeated_and_a_killed_run_is_kept(
    script, make_run, monkeypatch, tmp_path
):
    steps, workers = script("training_steps"), script("step_workers")
    asked: list[tuple[str, str, int]] = []

    def measure(jobs: list[Any], rounds: int, deadline: float, on_update: Any) -> list[Any]:
        asked.append(jobs[0].case)
        runs = [workers.Run(job, samples_ns=[1] * rounds) for job in jobs]
        if jobs[0].network == "alexnet" and len(asked) == 2:
            on_update(runs[:1])
            raise KeyboardInterrupt
        on_update(runs)
        return runs

    monkeypatch.setattr(steps, "measure", measure)
    command = ["--out", str(tmp_path), "--tiny", "--networks", "unet3d,alexnet", "--dtypes", "tf32"]
    with pytest.raises(KeyboardInterrupt):
        steps.main(command)
    kept = workers.load(tmp_path / "training_steps.json")
    assert {run.job.network for run in kept} == {"unet3d", "alexnet"}
    steps.main(command)
    assert [network for network, _, _ in asked] == ["unet3d", "alexnet", "alexnet"]
    assert len(workers.load(tmp_path / "training_steps.json")) == 2 * len(steps.VARIANTS)


@pytest.mark.parametrize(
    ("own_ms", "own_gib", "verdict"),
    [(10, 2, "HOLDS: ucudnn@none is 1.20 times"), (10, 2.5, "DOES NOT HOLD"), (11, 2, "DOES NOT")],
)
def test_demonstration_a(own_ms, own_gib, verdict, script, make_run):
    runs = [
        make_run("eager", 20, 20, 20, gib=2),
        make_run("compile", 12, 12, 12, gib=3),
        make_run("ucudnn@none", own_ms, own_ms, own_ms, gib=own_gib),
    ]
    judged = script("demo_unet").judge(runs)
    assert judged.startswith(verdict)
    assert "as compile" in judged
    assert script("demo_unet").judge(runs[:2]) == "not decided: ucudnn took no step"


def test_demonstration_b(script):
    demo = script("demo_memory")
    here, x = " in 24 GiB", "x the fastest without a limit"
    rows = {
        1: {f"eager{here}": 100, f"wscap@64{here}": 190, f"ucudnn@64MiB{here}": 100, "eager": 100},
        2: {
            f"eager{here}": demo.OUT_OF_MEMORY,
            f"wscap@64{here}": 400,
            f"ucudnn@64MiB{here}": 209,
            "eager": 210,
            "ucudnn@none": 200,
        },
        3: {f"ucudnn@64MiB{here}": demo.OUT_OF_MEMORY, "eager": 300},
    }
    assert demo.judge_memory(rows, 24).splitlines() == [
        f"N=1: does not hold: eager: 1.00{x}; capped workspace: 1.90{x}; ucudnn: 1.00{x}",
        f"N=2: HOLDS: eager: out of memory; capped workspace: 2.00{x}; ucudnn: 1.04{x}",
    ]
    rows[2][f"ucudnn@64MiB{here}"] = 211
    assert "N=2: does not hold" in demo.judge_memory(rows, 24)
    assert "| 3 |  |  | out of memory | 300 ns |  |" in demo.table(rows)


def test_demonstration_c(script, make_run):
    judge = script("demo_cold_start").judge
    one = {"sha256": "a", "measured": 0, "cache_files": 0}
    runs = [make_run("ucudnn@none", 51, 51), make_run("benchmark", 60, 60)]
    runs.append(make_run("benchmark", 50, 50))
    lines = judge([[one, one], [one, one]], runs)
    assert [line.partition(":")[0] for line in lines] == ["HOLDS"] * 3
    assert "1.020 times" in lines[2]
    lines = judge([[one], [{**one, "sha256": "b", "measured": 3}]], [*runs[:2]])
    assert [line.partition(":")[0] for line in lines] == ["DOES NOT HOLD"] * 2 + ["HOLDS"]
    failed = judge([[one], [{"failed": "no plan", "cache_files": 0}]], [])
    assert failed[0].startswith("DOES NOT HOLD")
    assert failed[2:] == ["failed: no plan", "not decided: a side took no step"]


def test_the_cache_hypothesis(script):
    l2 = script("l2_hypothesis")

    def trial(undivided: int, divided: int, chunks: int = 4) -> Any:
        samples = {"undivided": [undivided] * 3, "divided": [divided] * 3, "torch": [100] * 3}
        return l2.Trial(
            *("t:a", "a problem", "fprop", "tf32", samples),
            *({"divided": "batch: 4x2 e"}, {"undivided": 2**22, "divided": 2**20}, chunks),
        )

    failed = l2.Trial("t:b", "another", "fprop", "tf32", failed="another: no kernel")
    trials = [trial(200, 100), trial(100, 120), trial(100, 50, chunks=1), failed]
    lines = list(l2.report(trials))
    assert "| t:a | fprop | tf32 | 0.83 (0.83 to 0.83) |" in lines[0]
    # the root of 2 * 0.833
    assert lines[1] == (
        "tf32 fprop: HOLDS: geo-mean 1.29 of 2 problems (claimed 1.15), 1 gain and 1 lose more "
        "than 2%, best 2.00, worst 0.83"
    )
    assert lines[3] == "1 of 4 problems stay undivided even within the cache."
    assert lines[4] == "not timed: another: no kernel"
    assert "REFUTED" in l2.verdict("all", [trial(100, 100)])
