"""Fronts and rejected alternatives of all kernels, and the pictures that show them."""

from __future__ import annotations

import sys
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from ucudnn import cache as caches
from ucudnn.cli import app
from ucudnn.config import Config
from ucudnn.errors import ConfigError, OutputError
from ucudnn.measurement import Measurement
from ucudnn.problem import Problem
from ucudnn.reports.plot import plot_fronts
from ucudnn.tuning.rationale import rationales
from ucudnn.tuning.tuner import tune_problems

MS, MIB = 1_000_000, 1 << 20
PROBLEM = Problem("fprop", 8, 2, 2, (9, 9), (1, 1))
OTHER = replace(PROBLEM, out_channels=3)


def cost(ms_per_sample, mib_per_sample):
    return lambda size: (int(ms_per_sample * size * MS), int(mib_per_sample * size * MIB))


@pytest.fixture
def planned(scripted, tmp_path):
    """A plan of two kernels that are split because of the limit, and its settings."""
    scripted(torch_default=cost(3, 0.5), fast=cost(1, 2), near=cost(1.2, 0.25))
    config = Config(workspace_limit="4MiB", cache=str(tmp_path / "cache"), effort="thorough")
    return tune_problems([("a", PROBLEM), ("b", OTHER)], config), config


def known(plan, config):
    with caches.open(config.cache, "r") as cache:
        return rationales(plan, cache), list(cache)


def test_a_front_is_that_of_all_splits_of_what_was_timed(planned):
    plan, config = planned
    found, entries = known(plan, config)
    for kernel, one in zip(plan.kernels, found, strict=True):
        chunks = {
            (entry.key.problem.batch, entry.time_ns, entry.workspace_bytes)
            for entry in entries
            if entry.key.problem.with_batch(8) == kernel.problem
            and (entry.key.subject, entry.status) == ("chunk", "ok")
        }
        assert one.front == brute_force(8, chunks)
        assert one.alternatives[0].time_ns <= one.alternatives[1].time_ns


def brute_force(batch, chunks):
    """Least times of all splits of a batch by the workspace that they may use."""
    limits = sorted({workspace for _, _, workspace in chunks})
    front = []
    for limit in limits:
        best = [0] + [None] * batch
        for n in range(1, batch + 1):
            times = [
                best[n - size] + time_ns
                for size, time_ns, workspace in chunks
                if workspace <= limit and size <= n and best[n - size] is not None
            ]
            best[n] = min(times, default=None)
        if best[batch] is not None and (not front or best[batch] < front[-1][1]):
            front.append((limit, best[batch]))
    return tuple(front)


def test_without_measurements_there_is_what_the_plan_knows(planned):
    plan, _ = planned
    for one in rationales(plan, []):
        assert (one.front, one.channels_last) == ((), None)
        assert [str(other.split) for other in one.alternatives] == ["8 torch_default"]


def test_measurements_of_another_machine_are_no_part_of_it(planned):
    plan, config = planned
    elsewhere = replace(plan, software=replace(plan.software, torch="9"))
    assert all(not one.front for one in known(elsewhere, config)[0])


def test_torch_in_channels_last_is_found(planned):
    plan, config = planned
    entries = known(plan, config)[1]
    own = next(
        entry
        for entry in entries
        if (entry.key.problem, entry.key.algorithm) == (PROBLEM, "torch_default")
        and (entry.key.subject, str(entry.key.conditions.role)) == ("chunk", "alone")
    )
    there = replace(own.key, problem=replace(PROBLEM, layout="nhwc"))
    entry = Measurement(there, "ok", 7 * MS, 1 * MS, (7 * MS,) * 3, workspace_bytes=MIB)
    found = rationales(plan, [entry])[plan.kernels.index(plan.kernel(PROBLEM))].channels_last
    assert (found.time_ns, found.workspace_bytes, found.samples) == (7 * MS, MIB, 3)


@pytest.fixture
def matplotlib():
    return pytest.importorskip("matplotlib", reason="draws plots")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "begin"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")]
)
def test_a_plot_is_a_picture_and_the_same_each_time(matplotlib, planned, tmp_path, kind, begin):
    plan, config = planned
    found, _ = known(plan, config)
    files = [tmp_path / f"{number}.{kind}" for number in range(2)]
    assert [plot_fronts(plan, file, found) for file in files] == [2, 2]
    assert files[0].read_bytes().startswith(begin)
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.slow
def test_the_command_plots_the_kernels_that_are_named(matplotlib, planned, tmp_path):
    plan, config = planned
    plan.save(tmp_path / "plan.json")
    command = ["plot", str(tmp_path / "plan.json"), "-o", str(tmp_path / "a.svg")]
    drawn = CliRunner().invoke(app, [*command, "--kernel", "b", "--cache", config.cache])
    assert drawn.exit_code == 0, drawn.output
    assert "Drew 1 of 2 kernels" in drawn.output
    assert "no chunks" not in drawn.output
    # Text is drawn as paths, with the text itself as a comment.
    assert ElementTree.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")
    text = (tmp_path / "a.svg").read_text()
    assert "fprop 2-&gt;3 k1 9x9" in text or "fprop 2->3 k1 9x9" in text
    assert "2->2" not in text
    bare = CliRunner().invoke(app, [*command, "--cache", str(tmp_path / "none")])
    assert bare.exit_code == 0, bare.output
    assert "The cache has no chunks of this plan" in bare.output


@pytest.mark.slow
def test_the_report_as_a_picture_is_the_plot(matplotlib, planned, tmp_path):
    plan, config = planned
    plan.save(tmp_path / "plan.json")
    command = ["report", str(tmp_path / "plan.json"), "--cache", config.cache]
    drawn = CliRunner().invoke(app, [*command, "--png", str(tmp_path / "a.png")])
    assert drawn.exit_code == 0, drawn.output
    found, _ = known(plan, config)
    plot_fronts(plan, tmp_path / "b.png", found)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    # Without -o there is no page.
    assert sorted(path.name for path in tmp_path.glob("*.*")) == ["a.png", "b.png", "plan.json"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [((), "give -o FILE or --png FILE"), (("--png", "a.svg"), "`ucudnn plot` writes SVG and PDF")],
)
def test_a_report_needs_a_file_that_it_can_write(planned, tmp_path, flags, said):
    planned[0].save(tmp_path / "plan.json")
    done = CliRunner().invoke(app, ["report", str(tmp_path / "plan.json"), *flags])
    assert isinstance(done.exception, ConfigError)
    assert said in str(done.exception)


def test_what_cannot_be_plotted_is_one_sentence(planned, tmp_path):
    plan, _ = planned
    with pytest.raises(ConfigError, match=r"must end in \.png, \.svg or \.pdf, got a\.gif"):
        plot_fronts(plan, "a.gif", ())
    with pytest.raises(ConfigError, match="the plan has no kernels"):
        plot_fronts(replace(plan, kernels=()), "a.svg", ())


def test_a_plot_that_cannot_be_written(matplotlib, planned, tmp_path):
    plan, _ = planned
    with pytest.raises(OutputError, match="cannot write the plot"):
        plot_fronts(plan, tmp_path / "nowhere" / "a.svg", rationales(plan, []))


def test_without_matplotlib_one_sentence_says_what_to_install(planned, tmp_path, monkeypatch):
    plan, _ = planned
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    plan.save(tmp_path / "plan.json")
    done = CliRunner().invoke(
        app, ["plot", str(tmp_path / "plan.json"), "-o", str(tmp_path / "a.svg")]
    )
    assert "run: pip install matplotlib" in str(done.exception)
    assert [path.name for path in tmp_path.glob("a.*")] == []
