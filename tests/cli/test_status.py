"""Exit statuses: one test per cell of the table in docs/reference.md."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from ucudnn import cache as caches
from ucudnn import testing
from ucudnn.plan import Plan

SHAPE = ("--input", "8x3x12x12")


@pytest.fixture
def plan(random_plan, tmp_path) -> Path:
    """A plan of this machine, by chance."""
    import torch

    made = random_plan(torch.nn.Conv2d(3, 4, 3), torch.empty(2, 3, 9, 9), random.Random(0))
    path = tmp_path / "one.plan.json"
    made.save(path)
    return path


@pytest.fixture
def damaged(tmp_path) -> Path:
    path = tmp_path / "damaged.json"
    path.write_text('{"format": "ucudnn-plan", "version": 1}')
    return path


def test_done(ucudnn, model, plan, tmp_path):
    assert ucudnn("trace", f"{model}:net", *SHAPE).status == 0
    assert ucudnn("show", plan).status == 0
    assert ucudnn("compare", plan, plan).status == 0
    assert ucudnn("check", plan, "--canaries", 0).status == 0
    assert ucudnn("cache", "check").status == 0
    assert ucudnn("--version").status == 0


@pytest.mark.slow
def test_the_answer_is_no(ucudnn, model, plan, tmp_path):
    limit = ("--workspace-limit", "1")
    assert ucudnn("tune", f"{model}:net", *SHAPE, *limit).status == 1
    document = json.loads(plan.read_text())
    other = tmp_path / "other.plan.json"
    loaded = Plan.load(plan)
    Plan((), loaded.device, loaded.software, loaded.conditions, loaded.config).save(other)
    assert ucudnn("compare", plan, other).status == 1
    from ucudnn.system.documents import sha256_of

    document["device"]["name"] = "another"
    del document["checksum"]
    other.write_text(json.dumps({**document, "checksum": sha256_of(document)}))
    assert ucudnn("check", other).status == 1
    assert ucudnn("cache", "explain", "--where", "problem.batch=3").status == 1


def test_an_input_that_cannot_be_read_is_wrong_usage(ucudnn, plan, damaged, tmp_path):
    for wrong in (tmp_path / "none.json", damaged):
        for words in (
            ("show", wrong),
            ("report", wrong, "-o", tmp_path / "r.html"),
            ("check", wrong),
            ("compare", plan, wrong),
            ("run", "--plan", wrong, "--", __file__),
        ):
            assert ucudnn(*words).status == 2, words
    table = tmp_path / "table.csv"
    assert ucudnn("tune", table).status == 2
    assert ucudnn("cache", "import", table).status == 2
    table.write_text("nonsense")
    assert ucudnn("tune", table).status == 2
    assert ucudnn("cache", "import", table).status == 2
    assert ucudnn("cache", "export", tmp_path / "t.txt").status == 2
    assert ucudnn("cache", "merge", tmp_path / "nowhere").status == 2
    assert ucudnn("cache", "prune").status == 2
    assert ucudnn("advise", "nowhere:net", *SHAPE).status == 2
    assert ucudnn("enumerate", "none.csv", "--device-profile", "p", "-o", "o").status == 2


def test_the_environment_does_not_allow_it(ucudnn, model, table, plan, tmp_path, monkeypatch):
    full = tmp_path / "full"
    full.mkdir()

    def no_space(*arguments, **named):
        raise OSError(28, os.strerror(28))

    (tmp_path / "file").write_text("")
    inside = ("--cache", tmp_path / "file" / "cache")
    with caches.open(tmp_path / "sound") as cache:
        cache.put(testing.sample_measurements(1))
        cache.export(tmp_path / "timings.csv")
    assert ucudnn("cache", "import", tmp_path / "timings.csv", *inside).status == 3
    assert ucudnn("tune", table(), "--backend", "cudnn").status == 3
    monkeypatch.setattr(os, "fsync", no_space)
    assert ucudnn("trace", f"{model}:net", *SHAPE, "-o", full / "l.csv").status == 3
    assert ucudnn("cache", "export", full / "t.csv").status == 3
    pytest.importorskip("plotly")
    assert ucudnn("report", plan, "-o", full / "r.html").status == 3
    assert list(full.iterdir()) == []


def test_an_error_of_ours(ucudnn, plan, monkeypatch):
    monkeypatch.setattr(Plan, "load", lambda *_: 1 / 0)
    for words in (("show", plan), ("check", plan), ("compare", plan, plan)):
        done = ucudnn(*words)
        assert done.status == 4
        assert "ZeroDivisionError" in done.err
