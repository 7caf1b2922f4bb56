"""Layouts on the command line: the flag, and what every command says of a plan that has one."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from by_hand import kernel, plan_of

from ucudnn.outcomes import LayoutRace, Way
from ucudnn.plan import Plan
from ucudnn.reports.html import report

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::ucudnn.errors.NoiseWarning")]
TORCH = Way(
    *("torch", "torch"), peak_bytes=64 << 20, time_ns=100_000_000, rounds=5, is_allowed=False
)
WINNER = Way(
    *("plan", "plan in channels_last"),
    peak_bytes=48 << 20,
    time_ns=80_000_000,
    memory_format="channels_last",
    ratio=0.8,
    low=0.79,
    high=0.82,
    rounds=5,
)
SENTENCE = (
    "The layout is channels_last: a step by plan in channels_last takes 0.80 (0.79 to 0.82) times "
    "as long as by torch, 80.0 ms against 100 ms."
)


@pytest.fixture
def raced(tmp_path):
    """Files of a plan in the model's own layout, and of one for channels_last."""
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    plan = plan_of(kernel(9))
    plan.save(one)
    race = LayoutRace((TORCH, WINNER), 1)
    replace(plan, memory_format="channels_last", layout_race=race).save(other)
    return one, other


@pytest.mark.nightly
def test_tuning_for_the_better_layout_prints_the_race(ucudnn, model):
    arguments = ("tune", f"{model}:net", "--input", "2x3x12x12", "--policy", "undivided")
    done = ucudnn(*arguments, "--layout", "auto")
    assert done.status == 0
    assert "torch in channels_last" in done.out
    assert "The layout is " in " ".join(done.out.split())
    found = json.loads(ucudnn(*arguments, "--layout", "auto", "--json").out)
    assert found["memory_format"] in ("keep", "channels_last")
    ways = {(one["memory_format"], one["kind"]) for one in found["layout_race"]["ways"]}
    assert {("keep", "torch"), ("channels_last", "torch")} <= ways
    assert found["measured"] + found["reused"] > 0
    kept = json.loads(ucudnn(*arguments, "--layout", "keep", "--json").out)
    assert (kept["memory_format"], kept["layout_race"]["is_fixed"]) == ("keep", True)


def test_show_and_compare_print_the_race(ucudnn, raced):
    one, other = raced
    shown = ucudnn("show", other).out
    assert SENTENCE in " ".join(shown.split())
    for text in ("torch", "plan in channels_last", "over the limit", "48 MiB", "*"):
        assert text in shown
    assert "channels_last, workspace limit none" in shown
    done = ucudnn("compare", one, other)
    assert done.status == 1
    assert "memory_format: keep | channels_last" in done.out
    assert SENTENCE in " ".join(done.out.split())
    assert json.loads(ucudnn("show", other, "--json").out)["memory_format"] == "channels_last"


def test_report_prints_the_race(raced):
    pytest.importorskip("plotly", reason="charts need plotly (the extra report)")
    one, other = raced
    page = report(Plan.load(other))
    assert SENTENCE in page
    assert '<p class="under">channels_last, workspace limit none' in page
    assert "<td>plan in channels_last</td>" in page
    assert ">channels_last" not in report(Plan.load(one))
