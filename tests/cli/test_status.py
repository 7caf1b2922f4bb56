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
    """What the tests of all cells need."""

    status: Callable[..., int]  # runs a command
    net: tuple[str, ...]  # a model on a command line, with its input
    table: tuple[Any, ...]  # a table of a layer, with the flags of a short tuning
    both: tuple[Any, ...]  # the same with a second layer, which needs no workspace
    plan: Path  # of this machine, by chance
    damaged: Path  # no plan
    folder: Path  # an empty one
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


CELLS: dict[tuple[int, str], Callable[[Setting], None]] = {}


def cell(status: int, *commands: str) -> Callable[[Any], Any]:
    """A test of one or more cells of the table."""

    def add(test: Callable[[Setting], None]) -> Callable[[Setting], None]:
        CELLS.update({(status, command): test for command in commands})
        return test

    return add


@cell(0, "tune")
def done_tune(at: Setting) -> None:
    assert at.status("trace", *at.net) == 0
    assert at.status(*at.table) == 0
    # a partial plan, too
    assert at.status(*at.both, "--workspace-limit", "1", "-o", at.folder / "p") == 0
    assert Plan.load(at.folder / "p").left_out


@cell(0, "show")
def done_show(at: Setting) -> None:
    pytest.importorskip("plotly", reason="charts need plotly (the extra report)")
    assert at.status("show", at.plan) == 0
    assert at.status("report", at.plan, "-o", at.folder / "r.html") == 0


@cell(0, "check")
def done_check(at: Setting) -> None:
    assert at.status("check", at.plan, "--canaries", 0) == 0


@cell(0, "compare")
def done_compare(at: Setting) -> None:
    assert at.status("compare", at.plan, at.plan) == 0


@cell(0, "cache")
def done_cache(at: Setting) -> None:
    with caches.open(at.folder) as cache:
        cache.put(laws.sample_measurements(1))
    for word in ("check", "info"):
        assert at.status("cache", word, "--cache", at.folder) == 0, word


@cell(1, "tune")
def no_from_tune(at: Setting) -> None:
    limit = ("--workspace-limit", "1")
    assert at.status(*at.table, *limit) == 1
    assert at.status(*at.both, *limit, "--fail-if-partial") == 1
    assert at.status(*at.both, *limit, "--unplanned", "error") == 1


@cell(1, "check")
def no_from_check(at: Setting) -> None:
    plan, other = Plan.load(at.plan), at.folder / "other.json"
    replace(plan, device=replace(plan.device, name="another")).save(other)
    assert at.status("check", other) == 1


@cell(1, "compare")
def no_from_compare(at: Setting) -> None:
    plan, other = Plan.load(at.plan), at.folder / "other.json"
    Plan((), plan.device, plan.software, plan.conditions, plan.config).save(other)
    assert at.status("compare", at.plan, other) == 1


@cell(1, "cache")
def no_from_cache(at: Setting) -> None:
    with caches.open(at.folder) as cache:
        cache.put(laws.sample_measurements(20))
    for path in at.folder.rglob("*.h5"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:-100])
    assert at.status("cache", "check", "--cache", at.folder) == 1


@cell(2, "tune")
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
    of_h200 = ("--device-profile", "h200", "-o", "o")
    assert at.status("enumerate", *at.net, *of_h200, "--dtype", "float16") == 2


@cell(2, "show")
def usage_of_show(at: Setting) -> None:
    for wrong in (at.folder / "none.json", at.damaged):
        assert at.status("show", wrong) == 2
        assert at.status("report", wrong, "-o", at.folder / "r.html") == 2
    assert at.status("report", at.plan) == 2


@cell(2, "check")
def usage_of_check(at: Setting) -> None:
    for wrong in (at.folder / "none.json", at.damaged):
        assert at.status("check", wrong) == 2
        assert at.status("run", "--plan", wrong, "--", __file__) == 2


@cell(2, "compare")
def usage_of_compare(at: Setting) -> None:
    for wrong in (at.folder / "none.json", at.damaged):
        assert at.status("compare", at.plan, wrong) == 2
        assert at.status("compare", wrong, at.plan) == 2


@cell(2, "cache")
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


@cell(3, "tune")
def environment_of_tune(at: Setting) -> None:
    assert at.status(*at.table, "--backend", "cudnn") == 3
    full_disk(at)
    assert at.status("trace", *at.net, "-o", at.folder / "l.csv") == 3
    assert list(at.folder.iterdir()) == []


@cell(3, "show")
def environment_of_show(at: Setting) -> None:
    with at.patch.context() as patch:
        for loaded in [one for one in sys.modules if one.partition(".")[0] == "plotly"]:
            patch.delitem(sys.modules, loaded)
        patch.setitem(sys.modules, "plotly", None)
        assert at.status("report", at.plan, "-o", at.folder / "r.html") == 3
    pytest.importorskip("plotly", reason="charts need plotly (the extra report)")
    full_disk(at)
    assert at.status("report", at.plan, "-o", at.folder / "r.html") == 3
    assert list(at.folder.iterdir()) == []


@cell(3, "cache")
def environment_of_cache(at: Setting) -> None:
    with caches.open(at.folder / "sound") as cache:
        cache.put(laws.sample_measurements(1))
        cache.export(at.folder / "timings.csv")
    for words in (("import", at.folder / "timings.csv"), ("merge", at.folder / "sound")):
        assert at.status("cache", *words, "--cache", at.damaged / "cache") == 3
    full_disk(at)
    full = at.folder / "full.csv"
    assert at.status("cache", "export", full, "--cache", at.folder / "sound") == 3
    assert not full.exists()
    assert at.status("cache", "merge", at.folder / "sound", "--cache", at.folder / "full") == 3
    for file in (at.folder / "sound").rglob("*.h5"):
        os.truncate(file, 600)
    # There is nothing to write, so this is about the file that cannot be used.
    assert at.status("cache", "merge", at.folder / "sound", "--cache", at.folder / "full") == 3


@cell(4, "tune")
def bug_in_tune(at: Setting) -> None:
    at.patch.setattr(models, "load_model", lambda *_: 1 / 0)
    for command in ("tune", "trace", "advise"):
        assert at.status(command, *at.net) == 4, command


@cell(4, "show", "check", "compare")
def bug_in_reading_a_plan(at: Setting) -> None:
    at.patch.setattr(Plan, "load", lambda *_: 1 / 0)
    for words in (("show",), ("report", "-o", at.folder / "r.html"), ("check",)):
        assert at.status(*words, at.plan) == 4, words
    assert at.status("compare", at.plan, at.plan) == 4


@cell(4, "cache")
def bug_in_cache(at: Setting) -> None:
    at.patch.setattr("ucudnn.cache.open", lambda *_: 1 / 0)
    assert at.status("cache", "info") == 4


@cell(130, "tune")
def interrupted_tune(at: Setting) -> None:
    def interrupted(*_: object, **named: object) -> None:
        raise TuningInterruptedError(Plan.load(at.plan))

    at.patch.setattr("ucudnn.kernels.tune.tune_problems", interrupted)
    assert at.status(*at.table, "-o", at.folder / "p.json") == 130
    assert (at.folder / "p.json").exists()


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
