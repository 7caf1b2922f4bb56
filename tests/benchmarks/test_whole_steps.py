"""Whole steps by every way, the malloc of another process, limits and policies; their tables."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from ucudnn.problem import Problem
from ucudnn.units import format_bytes

pytestmark = pytest.mark.filterwarnings("ignore::ucudnn.errors.UcudnnWarning")


def bench(**samples: tuple[int, ...]) -> dict[str, Any]:
    """JSON of steps by ways."""
    ways = [
        {"way": name, "samples_ns": list(taken), "peak_bytes": 512}
        for name, taken in samples.items()
    ]
    return {"ways": ways, "is_training": True}


@pytest.fixture
def entries() -> list[dict[str, Any]]:
    """Two networks: a plan that gains nothing, and one that gains, with its malloc."""
    made = {"command": "python x.py", "date": "2026-01-31T12:00:00Z", "device": "a CPU"}
    made |= {"threads": 2, "torch": "2.13", "load": 0.1}
    common = {"input": [8, 3, 4], "mode": "training", "made": made}
    common |= {"tuned_s": 3.2, "kernels": 9, "changed": 2, "wall_s": 90}
    lost = {"network": "resnet18", "bench": bench(eager=(10,) * 6, plan=(12,) * 6)}
    kept = bench(eager=(8,) * 5, plan=(5,) * 5)
    won = {"network": "conformer", "bench": bench(eager=(9,) * 6, plan=(7,) * 6)}
    return [{**common, **lost}, {**common, **won, "malloc": {"bench": kept}}]


@pytest.fixture
def tables(script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """docs/make_tables.py, whose files are in a folder of the test."""
    made = script("make_tables")
    (tmp_path / "intel-xeon").mkdir()
    monkeypatch.setattr(made, "RESULTS", tmp_path)
    return made


def test_the_fastest_way_may_be_in_either_process(script, entries):
    lost, won = map(script("found_steps").Found, entries)
    assert lost.ratio() == pytest.approx((12 / 10,) * 3)
    assert won.ratio() == (0.625, 0.625, 0.625)
    assert won.ratio(with_malloc=False) == pytest.approx((7 / 9,) * 3)
    assert won.fastest(is_planned=False).name == "eager+malloc"
    assert won.sentence().startswith("a step by plan+malloc takes 0.62 (0.62 to 0.62) times as")
    entries[0] |= {"plan_of_compiled": {"changed": 5}, "bench": bench(eager=(9,), plan=(9,))}
    assert script("found_steps").Found(entries[0]).followed["changed"] == 2
    entries[0]["bench"]["ways"].append({"way": "plan+compile", "samples_ns": [8]})
    assert script("found_steps").Found(entries[0]).followed["changed"] == 5
    # a process that ended early has fewer rounds
    entries[1]["malloc"]["bench"] = bench(eager=(8,) * 2)
    assert script("found_steps").Found(entries[1]).ratio() == pytest.approx((7 / 8,) * 3)


def test_the_table_begins_with_the_largest_gain_and_says_how_it_was_made(tables, entries, tmp_path):
    page = "a\n<!-- table make -->\n\nold\n\n<!-- end of table -->\nb\n"
    assert "\n\nNot measured yet.\n\n" in tables.rewritten(page)
    (tmp_path / "intel-xeon" / "bench.json").write_text(json.dumps(entries))
    lines = tables.rewritten(page).splitlines()
    assert (lines[0], lines[-1]) == ("a", "b")
    heading, first, second = (
        [cell.strip() for cell in lines[n].split("|")[1:-1]] for n in (3, 5, 6)
    )
    assert heading[5:9] == ["eager", "plan", "eager+malloc", "plan+malloc"]
    assert first[:3] == ["conformer blocks", "8x3x4", "training"]
    assert first[3:5] == ["0.78 (0.78 to 0.78)", "0.62 (0.62 to 0.62)"]
    assert first[8:] == ["5 ns ± 0 ns", "512 B, 512 B", "3 s", "2 of 9"]
    assert second[:4] == ["ResNet-18", "8x3x4", "training", "1.20 (1.20 to 1.20)"]
    assert second[7:9] == ["-", "-"]
    assert lines[8] == (
        "Measured on 2026-01-31 in 3 minutes by `python x.py`: a CPU, 2 threads, torch 2.13. "
        "Just before, other processes used up to 0.1 processors."
    )


def test_a_way_that_fails_is_named_and_the_others_are_timed(script, random_plan, monkeypatch):
    def refuse(module: nn.Module) -> None:
        raise RuntimeError("no compiler here")

    found_steps = script("found_steps")
    model, x = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 9, 9)
    plan = random_plan(model, x, random.Random(0))
    monkeypatch.setattr(torch, "compile", refuse)
    ways = [found_steps.WAYS["eager"], found_steps.WAYS["compile"]]
    bench = script("steps").bench_steps(model, x, (plan, plan), ways, rounds=5)
    eager, compiled = bench.ways
    assert len(eager.samples_ns) == 5
    assert not compiled.samples_ns
    assert "no compiler here" in compiled.reason
    assert found_steps.StepBench.from_dict(json.loads(json.dumps(bench.to_dict()))) == bench


@pytest.mark.nightly
def test_the_other_process_takes_a_round_when_it_is_told_to(script, random_plan, tmp_path):
    other, path, shape = script("malloc_steps"), tmp_path / "plan.json", (1, 512, 8)
    random_plan(
        *script("networks").example("conformer", shape, is_training=False), random.Random(0)
    ).save(path)
    steps = other.MallocSteps("conformer", shape, False, path, rounds=9)
    for number in range(4):
        assert steps.take_round(number)
    # the first one does not count, and this is not the turn of round 9
    steps.take_round(9)
    result = steps.result()
    assert result["malloc"] == "glibc,mmap_threshold=1073741824"
    assert {one["way"]: len(one["samples_ns"]) for one in result["bench"]["ways"]} == dict.fromkeys(
        ("eager", "channels_last", "plan"), 3
    )
    assert result["bench"]["is_training"] is False


@pytest.fixture
def tiny(script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a network of one convolution."""
    networks = script("networks")

    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())

    monkeypatch.setitem(networks.NETWORKS, "tiny", networks.Network(make, (8, 16, 12, 12)))
    return "tiny"


@pytest.mark.nightly
def test_steps_under_limits(script, tiny, monkeypatch, tmp_path):
    limits, path = script("limits"), tmp_path / "limits.json"
    command = ["limits.py", tiny, "--limits", "64KiB,64MiB", "--policies", "undivided,all"]
    command += ["--effort", "quick", "--rounds", "2", "--out", str(path)]
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", command)
        limits.main()
        command[3] = "1B"
    first, second = json.loads(path.read_text())
    own, *rows = first["rows"]
    assert (own["limit"], own["tuned_s"]) == ("", 0)
    assert [(row["limit"], row["policy"]) for row in rows] == [
        (limit, policy) for limit in ("64KiB", "64MiB") for policy in ("undivided", "all")
    ]
    for row, limit in zip(rows, (1 << 16, 1 << 16, 1 << 26, 1 << 26), strict=True):
        assert row["workspace_bytes"] <= limit
        assert row["kernels"] + row["over_limit"] == 2
        assert len(row["samples_ns"]) == 2
    assert [row["divided"] for row in rows if row["policy"] == "undivided"] == [0, 0]
    # path and all: a machine's folders are not for others
    assert first["made"]["command"].endswith("--rounds 2 --out limits.json")
    assert first["wall_s"] > 0
    table = script("found_limits").steps_table([first], {tiny: "Tiny"})
    assert table[1][:3] == ["Tiny, 8x16x12x12", "none", "torch's own"]
    assert table[2][4] == table[4][4] == "1"
    # nothing undivided fits 64 KiB, so that the ratio is to steps over the limit
    assert rows[0]["over_limit"] == 2
    assert (table[3][4][-1], table[5][4][-1]) == ("*", ")")
    assert table[5][7] == format_bytes(rows[3]["workspace_bytes"])
    assert all(len(row) == len(table[0]) for row in table)
    assert all(row["kernels"] + row["over_limit"] == 2 for row in second["rows"][1:])


def test_layers_of_the_figure(script, monkeypatch, tmp_path):
    layers, path = script("limits_layers"), tmp_path / "layers.json"
    found = layers.layers()
    assert len({problem for _, problem, _ in found}) == len(found) == 16
    assert (
        "Vision",
        Problem("fprop", 256, 192, 32, (28, 28), (5, 5), (1, 1), ((2, 2), (2, 2))),
        {"128MiB": 3.28, "256MiB": 3.84, "512MiB": 1.0},
    ) in found
    command = ["limits_layers.py", "--batch", "2", "--first", "1", "--out", str(path)]
    monkeypatch.setattr(sys, "argv", command)
    layers.main()
    document = json.loads(path.read_text())
    (layer,) = document["layers"]
    assert document["wall_s"] > 0
    assert layer["splits"][0]["split"] == "2 torch_default"
    for by_policy in layer["chosen"].values():
        assert all(0 <= place < len(layer["splits"]) for place in by_policy.values())
    heading, row = script("found_limits").layers_table({"layers": [layer]})
    assert len(heading) == len(row) == 9
    assert row[4] == "1.00"
