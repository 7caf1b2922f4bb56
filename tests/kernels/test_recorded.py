"""Planning from a recording: nothing is run, the plan is the device's own, predictions say so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ucudnn
from ucudnn import cache as caches
from ucudnn.backends.recorded import RecordedBackend
from ucudnn.config import Config
from ucudnn.errors import ConfigError, PlanError, UnsupportedError, UntunedWarning
from ucudnn.kernels.tune import tune_problems
from ucudnn.measurement import Conditions, Device, Measurement, MeasurementKey, Role, Software
from ucudnn.plan import Chunk, Split
from ucudnn.problem import Problem
from ucudnn.reports.cards import cards
from ucudnn.reports.text import plan_table

MIB = 1 << 20
GPU = Device("cuda", "NVIDIA H200", cores=132, compute_capability="9.0")
SOFTWARE = Software("2.13.0+cu130", cudnn="9.28.0")
LAYERS = """\
name,n,c,d,h,w,k,kd,kh,kw,pad_d,pad_h,pad_w,stride_d,stride_h,stride_w,dil_d,dil_h,dil_w,groups
conv,8,4,1,9,9,4,1,3,3,0,0,0,1,1,1,1,1,1,1
"""
FPROP = Problem("fprop", 8, 4, 4, (9, 9), (3, 3), math="tf32")


def entry(
    problem, algorithm, time_us, mib, status="ok", role=Role.ALONE, device=GPU, implementation=""
):
    key = MeasurementKey(problem, algorithm, device, SOFTWARE, Conditions(role), 1)
    timed = status in ("ok", "screened")
    return Measurement(
        key,
        status,
        time_us * 1000 if timed else None,
        workspace_bytes=int(mib * MIB) if timed else None,
        implementation=implementation,
    )


def alone(problem=FPROP):
    """A fast engine whose workspace grows with the batch, a slow one without, torch's default."""
    return [
        *(entry(problem.with_batch(n), "eng67_k2=20", 100 * n, 10 * n) for n in (1, 2, 4, 8)),
        *(entry(problem.with_batch(n), "eng0", 300 * n, 0) for n in (1, 2, 4, 8)),
        entry(problem, "torch_default", 2300, 0),
    ]


def record(tmp_path, measurements):
    folder = tmp_path / "recording"
    with caches.open(folder) as cache:
        cache.put(measurements)
    return folder


def replay(folder, problem=FPROP, **settings):
    config = Config(backend="recorded", cache=folder, **settings)
    return tune_problems([("layer", problem)], config)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 1))


@pytest.mark.parametrize("limit", [None, "1MiB"])
def test_sizes_that_do_not_add_up_are_refused_with_a_reason(limit, tmp_path):
    folder = record(tmp_path, [entry(FPROP.with_batch(3), "eng0", 300, 0, role="later")])
    with pytest.raises(PlanError, match="measured do not add up to all of it; measure more"):
        replay(folder, policy="all", workspace_limit=limit)


@pytest.mark.slow
def test_a_replay_makes_the_plan_that_the_device_made_and_runs_nothing(tmp_path, monkeypatch):
    folder, inputs = tmp_path / "cache", torch.empty(12, 3, 16, 16)
    config = Config(workspace_limit="200KiB", cache=folder, step_race=False)
    made = ucudnn.tune(model(), inputs, config)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    monkeypatch.setattr(
        "ucudnn.backends.torch_cpu.backend.TorchCpuBackend.executable",
        lambda *_: pytest.fail("a replay ran something"),
    )
    config = Config(workspace_limit="200KiB", cache=folder, backend="recorded")
    replayed = ucudnn.tune(model(), inputs, config)
    assert [kernel.timing for kernel in replayed.kernels] == [k.timing for k in made.kernels]
    for kernel in made.kernels:
        assert replayed.split(kernel.problem) == made.split(kernel.problem)
        smaller = [kernel.problem.with_batch(n) for n in range(1, 12)]
        assert all(replayed.covers(one) for one in smaller if made.covers(one))
    assert (replayed.device, replayed.software) == (made.device, made.software)
    assert (replayed.backend, replayed.config.backend) == ("torch_cpu", "torch_cpu")
    after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert after == before


def test_a_file_exported_from_a_cache_is_a_recording(tmp_path):
    folder = record(tmp_path, alone())
    caches.open(folder, "r").export(tmp_path / "timings.csv")
    assert replay(tmp_path / "timings.csv") == replay(folder)


@pytest.mark.parametrize(
    ("limit_mib", "chunks", "time_us"),
    [
        (None, [(8, "eng67_k2=20")], 800),
        (45, [(4, "eng67_k2=20")] * 2, 800),
        (25, [(2, "eng67_k2=20")] * 4, 800),
        (5, [(8, "torch_default")], 2300),
    ],
)
def test_what_was_not_raced_is_predicted_and_marked(tmp_path, limit_mib, chunks, time_us):
    limit = None if limit_mib is None else limit_mib * MIB
    plan = replay(record(tmp_path, alone()), workspace_limit=limit)
    (kernel,) = plan.kernels
    assert plan.split(FPROP) == Split("batch", tuple(Chunk(*chunk) for chunk in chunks))
    # torch's own was measured, as the one chunk that it is
    assert kernel.timing.is_predicted == kernel.is_derived(8) == (time_us == 800)
    assert kernel.timing.time_ns == kernel.predicted_time_ns == time_us * 1000
    assert kernel.default.time_ns == 2_300_000
    assert not kernel.default.is_predicted
    assert limit is None or kernel.timing.workspace_bytes <= limit
    assert plan.backend == "cudnn"
    if time_us == 800:
        cells = [cell for column in plan_table(plan).columns for cell in column.cells]
        assert "~800 us" in cells
        assert "~0.35" in cells
        assert any("predicted, not timed" in card.note for card in cards(plan))


def test_half_precision_gradients_count_the_chunk_and_the_sum_as_workspace(tmp_path):
    problem = Problem("wgrad", 8, 64, 64, (9, 9), (3, 3), dtype="float16")
    chunks = [entry(problem.with_batch(n), "eng0", 10 * n, 1) for n in (1, 2, 4)]
    (kernel,) = replay(record(tmp_path, chunks), problem).kernels
    assert [chunk.size for chunk in kernel.split(8).chunks] == [4, 4]
    weights = 64 * 64 * 9
    assert kernel.timing.workspace_bytes == MIB + 2 * weights + 4 * weights


def test_a_kernel_that_was_not_recorded_is_a_miss_that_names_the_nearest(tmp_path):
    folder = record(tmp_path, alone())
    with pytest.raises(PlanError) as caught:
        replay(folder, replace(FPROP, out_channels=8))
    assert "has no measurement of fprop conv2d(4->8" in str(caught.value)
    assert "differs in problem.out_channels (8 wanted, 4 there)" in str(caught.value)
    with pytest.raises(PlanError, match="problem.math"):
        replay(folder, replace(FPROP, math="strict"))


def test_the_device_is_named_where_there_are_several(tmp_path):
    other = replace(GPU, name="NVIDIA A100")
    folder = record(tmp_path, [*alone(), entry(FPROP, "eng1", 5, 0, device=other)])
    with pytest.raises(ConfigError, match="device must name one of .*H200.*A100|A100.*H200"):
        replay(folder)
    assert replay(folder, device="a100").device == other
    with pytest.raises(ConfigError, match="has none of a device called 'L40S'"):
        replay(folder, device="L40S")


def test_measurements_made_in_two_ways_are_no_recording(tmp_path):
    later = replace(entry(FPROP, "eng1", 5, 0).key, software=replace(SOFTWARE, cudnn="9.29.0"))
    measurements = [*alone(), Measurement(later, "ok", 5, workspace_bytes=0)]
    folder = record(tmp_path, measurements)
    with pytest.raises(ConfigError, match="one set of versions") as caught:
        replay(folder)
    assert "cudnn 9.28.0" in str(caught.value)
    assert "cudnn 9.29.0" in str(caught.value)
    chosen = tmp_path / "928.csv"
    caches.open(folder, "r").export(chosen, {"software.cudnn": "9.28.0"})
    assert replay(chosen).software == SOFTWARE


def test_a_profile_restricts_a_recording_to_what_cudnn_has(tmp_path, monkeypatch):
    """The fast engine was recorded with another cuDNN, and this one does not list it."""
    asked = []

    def listings(problems, profile):
        asked.extend(problems)
        for problem in problems:
            one = SimpleNamespace(identity="eng0")
            yield SimpleNamespace(problem=problem, configurations=(one,))

    monkeypatch.setattr("ucudnn.kernels.tune.list_configurations", listings)
    folder = record(tmp_path, [*alone(), entry(FPROP, "eng1", 5, 0, device=replace(GPU, name="X"))])
    profile = Path(__file__).parents[2] / "benchmarks" / "devices" / "h200.json"
    config = Config(backend="cudnn", device=profile, cache=folder, workspace_limit="90MiB")
    (kernel,) = tune_problems([("layer", FPROP)], config).kernels
    assert set(asked) == {FPROP.with_batch(n) for n in (1, 2, 4, 8)}
    assert kernel.is_default  # eng0 takes 2.4 ms
    assert set(kernel.algorithms) <= {"torch_default", "eng0"}
    with pytest.raises(ConfigError, match="set one of the two or leave device out"):
        tune_problems([("layer", FPROP)], replace(config, backend="auto"))


def test_the_command_plans_for_a_gpu_that_is_not_here(tmp_path, monkeypatch, capsys):
    from ucudnn import cli

    table = tmp_path / "net.csv"
    table.write_text(LAYERS)
    folder, output = record(tmp_path, alone()), tmp_path / "h200.plan.json"
    line = f"tune {table} --ops fprop --backend recorded --cache {folder} --device h200 -o {output}"
    monkeypatch.setattr("sys.argv", ["ucudnn", *line.split()])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert not stopped.value.code, capsys.readouterr().err
    assert "~800 us" in capsys.readouterr().out
    plan = ucudnn.Plan.load(output)
    assert (plan.backend, plan.device) == ("cudnn", GPU)
    assert plan.kernels[0].problem == FPROP  # float32 with TF32, as torch's on a GPU


def test_a_device_without_a_recording_is_refused():
    with pytest.raises(ConfigError, match="device .='H200'. is what backend='recorded' replays"):
        tune_problems([("layer", FPROP)], Config(device="H200"))


def test_a_recording_runs_nothing():
    backend = RecordedBackend(alone())
    for call in (
        lambda: backend.executable(FPROP, "eng0"),
        lambda: backend.operands(FPROP, 8),
        lambda: backend.elapsed_ns(lambda: None),
        lambda: backend.workspace_bytes(lambda: None, []),
    ):
        with pytest.raises(UnsupportedError, match="a recording of NVIDIA H200.* runs nothing"):
            call()
    assert backend.candidates(FPROP.with_batch(3)) == ()


def test_what_is_known_of_an_algorithm():
    small = entry(FPROP.with_batch(1), "torch_default", 1, 0, implementation="slow")
    large = entry(FPROP, "torch_default", 1, 0, implementation="fast")
    failed = entry(FPROP, "eng9", 0, 0, status="failed")
    backend = RecordedBackend([small, large, failed])
    assert [backend.implementation_of(FPROP.with_batch(n), "torch_default") for n in (1, 8)] == [
        "slow",
        "fast",
    ]
    # nobody knows at which batch torch changes its mind
    assert backend.implementation_of(FPROP.with_batch(4), "torch_default") not in ("slow", "fast")
    assert backend.refusal(FPROP.with_batch(4), "torch_default") is None
    assert backend.refusal(FPROP, "eng9") is not None
    assert backend.refusal(FPROP.with_batch(9), "torch_default") is not None


@pytest.mark.parametrize("default_us", [None, 500, 60_000])
def test_a_recording_with_gaps_is_planned_by_what_was_timed(tmp_path, default_us):
    """Lazy measuring leaves gaps: 6 = 1 + 4 + 1, though chunks of 2 would do."""
    problem = replace(FPROP, batch=6)
    entries = [
        entry(problem.with_batch(4), "eng1", 10_000, 0, role=Role.LATER),
        entry(problem.with_batch(1), "eng1", 6_000, 0, role=Role.LATER),
    ]
    if default_us is not None:
        over = default_us == 500
        entries.append(entry(problem, "torch_default", default_us, 99 if over else 0))
    folder = record(tmp_path, entries)
    (kernel,) = replay(folder, problem, workspace_limit="1MiB").kernels
    assert sorted(chunk.size for chunk in kernel.split(6).chunks) == [1, 1, 4]
    assert kernel.timing.time_ns == kernel.predicted_time_ns == 22_000_000
    assert all(kernel.split(n).size == n for n in range(1, 7))


@pytest.mark.parametrize("limit", [None, "8MiB"])
def test_a_kernel_that_was_looked_at_once_is_replayed_by_that_look(tmp_path, limit):
    """Tuning looks at torch's own convolution of every kernel, and leaves small ones at that."""
    folder = record(tmp_path, [entry(FPROP, "torch_default", 2300, 1.5, "screened")])
    (kernel,) = replay(folder, workspace_limit=limit).kernels
    assert kernel.is_default
    assert kernel.timing.time_ns == 2_300_000
    assert all(kernel.covers(batch) for batch in range(1, 9))


def test_a_kernel_that_no_part_of_a_pool_fits_is_not_left_out_for_time(tmp_path):
    folder = record(tmp_path, [entry(FPROP, "torch_default", 2300, 9)])
    with pytest.warns(UntunedWarning, match="nothing that was recorded of them fits") as said:
        replay(folder, total_workspace="8MiB", policy="undivided")
    assert "time" not in str(said[0].message)


def test_what_lost_its_race_is_replayed_where_the_winner_does_not_fit(tmp_path):
    lost = replace(entry(FPROP, "eng0", 900, 1.5, "screened"), lost_to="eng67_k2=20")
    folder = record(tmp_path, [entry(FPROP, "eng67_k2=20", 800, 10), lost])
    assert str(replay(folder, workspace_limit="8MiB").split(FPROP)) == "8 eng0"


def test_a_pool_uses_what_lost_its_race_where_the_winners_do_not_fit_together(tmp_path):
    """What won needs 10 MiB of each kernel, what lost needs nothing, and the pool has 12 MiB."""
    other = replace(FPROP, in_channels=8)
    entries = [
        replace(one, status="screened", lost_to="eng67_k2=20")
        if "eng0" in one.key.algorithm
        else one
        for problem in (FPROP, other)
        for one in alone(problem)
        if not one.key.is_default
    ]
    layers = [("a", FPROP), ("b", other)]
    folder = record(tmp_path, entries)
    plan = tune_problems(
        layers, Config(backend="recorded", cache=str(folder), total_workspace="12MiB")
    )
    assert sorted(str(plan.split(problem)) for _, problem in layers) == [
        "8 eng0",
        "8x1 eng67_k2=20",
    ]


@pytest.mark.parametrize("settings", [{}, {"total_workspace": "8MiB"}], ids=["alone", "pool"])
def test_a_replay_says_why_nothing_that_was_recorded_may_be_used(tmp_path, settings):
    failed = replace(entry(FPROP, "eng0", 0, 0, "failed"), reason="it crashed")
    with pytest.raises(PlanError, match="no algorithm could be run on .*: it crashed"):
        replay(record(tmp_path / "failed", [failed]), **settings)
    varying = replace(entry(FPROP, "eng0", 900, 0), is_deterministic=False)
    with pytest.raises(PlanError, match="no deterministic algorithm computes"):
        replay(record(tmp_path / "varying", [varying]), deterministic=True, **settings)
    other = entry(replace(FPROP, in_channels=8), "eng0", 900, 0)
    with pytest.raises(PlanError, match="has no measurement of"):
        replay(record(tmp_path / "other", [other]), **settings)


def test_what_was_run_for_its_workspace_alone_is_said_not_to_be_timed(tmp_path):
    untimed = replace(entry(FPROP, "eng0", 0, 0, "untimed"), workspace_bytes=3 * MIB // 2)
    folder = record(tmp_path, [entry(FPROP, "eng67_k2=20", 800, 10), untimed])
    with pytest.raises(PlanError, match=r"eng0, needs 1.5 MiB and was not timed"):
        replay(folder, workspace_limit="8MiB")
    with pytest.raises(PlanError, match=r"fits workspace_limit=1 MiB; the smallest needs 1.5 MiB"):
        replay(folder, workspace_limit="1MiB")


@pytest.mark.parametrize(("device", "algorithm"), [("cpu", "torch_default"), ("cuda", "fast")])
def test_a_recorded_gain_must_exceed_the_cost_of_a_planned_call_on_a_cpu(
    device, algorithm, tmp_path
):
    there = Device(device, "any")
    times_us = {"torch_default": 1000, "fast": 975}
    entries = [entry(FPROP, name, time_us, 0, device=there) for name, time_us in times_us.items()]
    plan = replay(record(tmp_path, entries))
    assert plan.split(FPROP).chunks == (Chunk(8, algorithm),)
