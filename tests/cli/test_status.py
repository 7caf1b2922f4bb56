"""Exit statuses: one test per cell of the table in docs/reference.md, which names them all."""

from __future__ import annotations

import os
import random
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import laws
import pytest

from ucudnn import cache as caches
from ucudnn.cli import models
from ucudnn.errors import TuningInterruptedError
from ucudnn.plan import Plan

SHAPE = ("--input", "8x3x12x12")
COLUMNS = ("tune", "show", "check", "compare", "cache")


class Setting(NamedTuple):
    """What the tests of all cells need.

    Args:
        status: runs a command and returns its exit status.
        net: a model on a command line, with its input.
        table: a table of a layer, with the flags of a short tuning.
        both: the same with a second layer, which needs no workspace.
        plan: file of a plan of this machine, by chance.
        damaged: a file that is no plan.
        folder: an empty one.
        patch: pytest's `monkeypatch`.
    """

    status: Callable[..., int]
    net: tuple[str, ...]
    table: tuple[Any, ...]
    both: tuple[Any, ...]
    plan: Path
    damaged: Path
    folder: Path
    patch: pytest.MonkeyPatch


@pytest.fixture
def setting(ucudnn, model, table, random_plan, tmp_path, monkeypatch) -> Setting:
    import torch

    made = random_plan(torch.nn.Conv2d(3, 4, 3), torch.empty(2, 3, 9, 9), random.Random(0))
    plan, damaged, folder = (tmp_path / name for name in ("plan.json", "damaged.json", "folder"))
    made.save(plan)
    damaged.write_text('{"format": "ucudnn-plan", "version": 1}')
    folder.mkdir()
    short = ("--ops", "fprop", "--policy", "undivided", "--effort", "quick")
    both = tmp_path / "both.csv"
    both.write_text(f"{table().read_text()}conv2,8,3,1,12,12,4,1,1,1,0,0,0,1,1,1,1,1,1,1\n")
    return Setting(
        lambda *words: ucudnn(*words).status,
        (f"{model}:net", *SHAPE),
        ("tune", table(), *short),
        ("tune", both, *short),
        plan,
        damaged,
        folder,
        monkeypatch,
    )


def done_tune(at: Setting) -> None:
    assert at.status("trace", *at.net) == 0
    assert at.status(*at.table) == 0
    # a partial plan, too
    assert at.status(*at.both, "--workspace-limit", "1", "-o", at.folder / "p") == 0
    assert Plan.load(at.folder / "p").left_out


def done_show(at: Setting) -> None:
    pytest.importorskip("plotly")
    assert at.status("show", at.plan) == 0
    assert at.status("report", at.plan, "-o", at.folder / "r.html") == 0


def done_check(at: Setting) -> None:
    assert at.status("check", at.plan, "--canaries", 0) == 0


def done_compare(at: Setting) -> None:
    assert at.status("compare", at.plan, at.plan) == 0


def done_cache(at: Setting) -> None:
    with caches.open(at.folder) as cache:
        cache.put(laws.sample_measurements(1))
        (batch,) = (one.key.problem.batch for one in cache)
    mine = ("--cache", at.folder)
    for words in ("check", "info", f"explain --where problem.batch={batch}"):
        assert at.status("cache", *words.split(), *mine) == 0, words


def no_from_tune(at: Setting) -> None:
    limit = ("--workspace-limit", "1")
    assert at.status(*at.table, *limit) == 1
    assert at.status(*at.both, *limit, "--fail-if-partial") == 1
    assert at.status(*at.both, *limit, "--unplanned", "error") == 1
    from ucudnn.backends.torch_cpu.machine import LoadMeter

    at.patch.setattr(LoadMeter, "others", lambda _: 99.0)
    assert at.status(*at.table, "--remeasure", "--fail-if-noisy") == 1


def no_from_check(at: Setting) -> None:
    plan, other = Plan.load(at.plan), at.folder / "other.json"
    replace(plan, device=replace(plan.device, name="another")).save(other)
    assert at.status("check", other) == 1


def no_from_compare(at: Setting) -> None:
    plan, other = Plan.load(at.plan), at.folder / "other.json"
    Plan((), plan.device, plan.software, plan.conditions, plan.config).save(other)
    assert at.status("compare", at.plan, other) == 1


def no_from_cache(at: Setting) -> None:
    with caches.open(at.folder) as cache:
        cache.put(laws.sample_measurements(20))
    mine = ("--cache", at.folder)
    assert at.status("cache", "explain", "--where", "software.torch=0.0", *mine) == 1
    for path in at.folder.rglob("*.h5"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:-100])
    assert at.status("cache", "check", *mine) == 1


def usage_of_tune(at: Setting) -> None:
    assert at.status("tune", at.folder / "none.csv") == 2
    assert at.status(*at.table, "--fast") == 2
    assert at.status(*at.table, "--policy", "some") == 2
    for command in ("tune", "advise", "trace"):
        assert at.status(command, "nowhere:net", *SHAPE) == 2, command
    (at.folder / "table.csv").write_text("nonsense")
    assert at.status("tune", at.folder / "table.csv") == 2
    assert at.status("enumerate", "none.csv", "--device-profile", "h200", "-o", "o") == 2
    assert at.status(*("enumerate", at.table[1]), "--device-profile", "none", "-o", "o") == 2


def usage_of_show(at: Setting) -> None:
    for wrong in (at.folder / "none.json", at.damaged):
        assert at.status("show", wrong) == 2
        assert at.status("report", wrong, "-o", at.folder / "r.html") == 2
    assert at.status("report", at.plan) == 2


def usage_of_check(at: Setting) -> None:
    for wrong in (at.folder / "none.json", at.damaged):
        assert at.status("check", wrong) == 2
        assert at.status("run", "--plan", wrong, "--", __file__) == 2


def usage_of_compare(at: Setting) -> None:
    for wrong in (at.folder / "none.json", at.damaged):
        assert at.status("compare", at.plan, wrong) == 2
        assert at.status("compare", wrong, at.plan) == 2


def usage_of_cache(at: Setting) -> None:
    table = at.folder / "table.csv"
    assert at.status("cache", "import", table) == 2
    table.write_text("nonsense")
    assert at.status("cache", "import", table) == 2
    assert at.status("cache", "export", at.folder / "t.txt") == 2
    assert at.status("cache", "merge", at.folder / "nowhere") == 2
    assert at.status("cache", "prune") == 2
    assert at.status("cache", "list", "--where", "nonsense=1") == 2


def full_disk(at: Setting) -> None:
    def no_space(*arguments: object, **named: object) -> None:
        raise OSError(28, os.strerror(28))

    at.patch.setattr(os, "fsync", no_space)


def environment_of_tune(at: Setting) -> None:
    assert at.status(*at.table, "--backend", "cudnn") == 3
    full_disk(at)
    assert at.status("trace", *at.net, "-o", at.folder / "l.csv") == 3
    assert list(at.folder.iterdir()) == []


def environment_of_show(at: Setting) -> None:
    with at.patch.context() as patch:
        for loaded in [one for one in sys.modules if one.partition(".")[0] == "plotly"]:
            patch.delitem(sys.modules, loaded)
        patch.setitem(sys.modules, "plotly", None)
        assert at.status("report", at.plan, "-o", at.folder / "r.html") == 3
    pytest.importorskip("plotly")
    full_disk(at)
    assert at.status("report", at.plan, "-o", at.folder / "r.html") == 3
    assert list(at.folder.iterdir()) == []


def environment_of_cache(at: Setting) -> None:
    with caches.open(at.folder / "sound") as cache:
        cache.put(laws.sample_measurements(1))
        cache.export(at.folder / "timings.csv")
    inside = ("--cache", at.damaged / "cache")
    assert at.status("cache", "import", at.folder / "timings.csv", *inside) == 3
    full_disk(at)
    full = at.folder / "full.csv"
    assert at.status("cache", "export", full, "--cache", at.folder / "sound") == 3
    assert not full.exists()


def bug_in_tune(at: Setting) -> None:
    at.patch.setattr(models, "load_model", lambda *_: 1 / 0)
    for command in ("tune", "trace", "advise"):
        assert at.status(command, *at.net) == 4, command


def bug_in_show(at: Setting) -> None:
    at.patch.setattr(Plan, "load", lambda *_: 1 / 0)
    assert at.status("show", at.plan) == 4
    assert at.status("report", at.plan, "-o", at.folder / "r.html") == 4


def bug_in_check(at: Setting) -> None:
    at.patch.setattr(Plan, "load", lambda *_: 1 / 0)
    assert at.status("check", at.plan) == 4


def bug_in_compare(at: Setting) -> None:
    at.patch.setattr(Plan, "load", lambda *_: 1 / 0)
    assert at.status("compare", at.plan, at.plan) == 4


def bug_in_cache(at: Setting) -> None:
    at.patch.setattr("ucudnn.cache.open", lambda *_: 1 / 0)
    assert at.status("cache", "info") == 4


def interrupted_tune(at: Setting) -> None:
    def interrupted(*_: object, **named: object) -> None:
        raise TuningInterruptedError(Plan.load(at.plan))

    at.patch.setattr("ucudnn.tuning.tuner.tune_problems", interrupted)
    assert at.status(*at.table, "-o", at.folder / "p.json") == 130
    assert (at.folder / "p.json").exists()


CELLS: dict[tuple[int, str], Callable[[Setting], None]] = {
    (0, "tune"): done_tune,
    (0, "show"): done_show,
    (0, "check"): done_check,
    (0, "compare"): done_compare,
    (0, "cache"): done_cache,
    (1, "tune"): no_from_tune,
    (1, "check"): no_from_check,
    (1, "compare"): no_from_compare,
    (1, "cache"): no_from_cache,
    (2, "tune"): usage_of_tune,
    (2, "show"): usage_of_show,
    (2, "check"): usage_of_check,
    (2, "compare"): usage_of_compare,
    (2, "cache"): usage_of_cache,
    (3, "tune"): environment_of_tune,
    (3, "show"): environment_of_show,
    (3, "cache"): environment_of_cache,
    (4, "tune"): bug_in_tune,
    (4, "show"): bug_in_show,
    (4, "check"): bug_in_check,
    (4, "compare"): bug_in_compare,
    (4, "cache"): bug_in_cache,
    (130, "tune"): interrupted_tune,
}


@pytest.mark.slow
@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell[0]}-{cell[1]}")
def test_a_cell(setting, cell):
    CELLS[cell](setting)


def test_the_table_has_these_cells(repository):
    text = (repository / "docs" / "reference.md").read_text()
    head, *rows = re.findall(r"^\| (?:status|\d+) \|.*$", text, re.M)
    columns = [re.findall(r"`(\w+)`", part) for part in head.split("|")[3:-1]]
    assert [names[0] for names in columns] == list(COLUMNS)
    written = {
        (int(row.split("|")[1]), name)
        for row in rows
        for name, said in zip(COLUMNS, row.split("|")[3:-1], strict=True)
        if said.strip() not in ("", "-")
    }
    assert written == set(CELLS)
