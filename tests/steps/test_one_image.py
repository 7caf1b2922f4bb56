"""A step of one image or volume fits a budget by slabs: chosen, kept, and the same gradients."""

from __future__ import annotations

import copy
import runpy
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import ucudnn
from ucudnn import Config
from ucudnn.backends import open_backend
from ucudnn.benchmark.operators import OperatorTable
from ucudnn.errors import PlanError
from ucudnn.segment import Segment, StepDivision
from ucudnn.steps.comparing import PlanComparer
from ucudnn.steps.foresee import Foreseer
from ucudnn.steps.search import SegmentSearch

HERE = Path(__file__).parent
QUICK = {"effort": "quick", "time_budget_s": 6, "policy": "undivided", "step_race": False}
MIB = 1 << 20
pytestmark = pytest.mark.filterwarnings("ignore::ucudnn.errors.UcudnnWarning")


def example(number):
    """A network of step_peaks.py, which runs in a process of its own, and its input."""
    return runpy.run_path(str(HERE / "step_peaks.py"))["of_one_image"](number)


def tuned(model, x, share, folder):
    """A plan within a share of the peak, or within what is found on a machine that is busy."""
    config = Config(memory_budget=share, cache=str(folder), **QUICK)
    with suppress(PlanError):  # there may be no time to find slabs
        return ucudnn.tune(model, x, config)
    config = replace(config, time_budget_s=60)
    try:
        return ucudnn.tune(model, x, config)
    except PlanError as error:
        return ucudnn.tune(model, x, replace(config, memory_budget=error.smallest_bytes))


def gradients(model, x):
    model.zero_grad()
    x = x.clone().requires_grad_()
    model(x).square().sum().backward()
    return [x.grad, *(one.grad for one in model.parameters())]


@pytest.mark.process
@pytest.mark.parametrize(
    "number", [0, *(pytest.param(n, marks=pytest.mark.nightly) for n in range(1, 10))]
)
def test_budgets_are_kept_by_mallocs_own_count(number, tmp_path, under_malloc):
    model, x = example(number)
    truth, plans = gradients(model, x), []
    model.zero_grad()
    for share in ("60%", "45%", "33%"):
        plan = tuned(model, x, share, tmp_path)
        plan.save(tmp_path / f"{len(plans)}.json")
        plans.append(plan)
        twin = copy.deepcopy(model)
        ucudnn.convert_(twin, ucudnn.Plan.load(tmp_path / f"{len(plans) - 1}.json"))
        most = max(one.norm() for one in truth)
        for ours, one in zip(gradients(twin, x), truth, strict=True):
            assert (ours - one).norm() <= 1e-3 * max(one.norm(), 1e-2 * most)
    # for larger budgets, less workspace or plain recomputation may do
    assert any(one.rows is not None for one in plans[-1].segments)
    paths = sorted(tmp_path.glob("?.json"))
    peaks = under_malloc(HERE / "step_peaks.py", f"one image {number}", *paths)
    # blocks below 4 KiB and what the allocator rounds up to; scratch of a matrix product
    slack = MIB // 4 + torch.get_num_threads() * MIB // 5
    for plan, peak in zip(plans, peaks, strict=True):
        assert plan.memory.plan_peak_bytes <= plan.memory.budget_bytes
        assert peak <= plan.memory.budget_bytes + slack


@pytest.mark.slow
def test_a_sentence_tells_of_slabs(tmp_path, capsys):
    model, x = example(0)
    plan = tuned(model, x, "40%", tmp_path)
    told = "\n".join(map(str, plan.segments))
    assert "in slabs of" in told
    assert "rows" in told
    others = [replace(one, rows=one.rows and 2 * one.rows) for one in plan.segments]
    assert replace(plan, segments=tuple(others)).hash != plan.hash
    assert "no such axis" not in str(plan.reasons)
    twin = copy.deepcopy(model)
    conversion = ucudnn.convert_(twin, plan)
    assert conversion.segments
    assert "in slabs of" in repr(twin)
    ucudnn.revert_(twin)
    assert repr(twin) == repr(model)


@pytest.mark.slow
def test_micro_batches_and_slabs_are_chosen_together(tmp_path):
    torch.manual_seed(0)
    model, _ = example(0)
    x = torch.randn(2, 3, 128, 96)
    settings = {**QUICK, "time_budget_s": 40}
    plan = ucudnn.tune(model, x, Config(memory_budget="22%", cache=str(tmp_path), **settings))
    assert any(one.rows is not None and one.micro_batch == 1 for one in plan.segments)
    assert plan.memory.plan_peak_bytes <= plan.memory.budget_bytes


@pytest.mark.parametrize("share", [1.0, 0.3, 0.05])
def test_a_single_sample_is_compared_on_a_part_of_its_axes(share, tmp_path, monkeypatch):
    body = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Tanh())
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), body), torch.randn(1, 3, 64, 64)
    plan = ucudnn.tune(model, x, Config(workspace_limit="1GiB", cache=str(tmp_path), **QUICK))
    good, bad = (Segment("1", rows=16, halo=(rows, rows)) for rows in (1, 0))
    sizes = []
    monkeypatch.setattr(nn.Tanh, "forward", lambda _, y: sizes.append(y.shape[2]) or y.tanh())
    for segment, is_right in ((good, True), (bad, False)):
        planned = replace(plan, segments=(segment,))
        found, reason = PlanComparer(model, x, planned, is_training=True, share=share).compare()
        assert (reason == "", found.samples) == (is_right, 1)
    whole = max(sizes)
    assert whole == {1.0: 64, 0.3: 32, 0.05: 8}[share]
    assert min(sizes) < whole  # slabs


@pytest.mark.slow
def test_advice_names_slabs():
    model, x = example(4)
    found = ucudnn.advise(model, x, Config(time_budget_s=20, effort="quick"))
    assert any(one.name.startswith("slabs of") for one in found.ways)


class Block(nn.Module):
    """What it computes inside is larger than its result, and is softmax along an axis."""

    def __init__(self, axis):
        super().__init__()
        self.first, self.last = nn.Conv2d(8, 64, 3, padding=1), nn.Conv2d(64, 8, 3, padding=1)
        self.axis = axis

    def forward(self, x):
        return x + self.last(self.first(x).softmax(self.axis))


@pytest.mark.parametrize("axis", [2, 3])
def test_what_one_block_shows_is_expected_of_those_like_it(axis):
    model = nn.Sequential(*(Block(axis) for _ in range(3)))
    foreseer = Foreseer(model, torch.randn(1, 8, 64, 64), open_backend("torch_cpu"), False)
    search = SegmentSearch(foreseer)
    search.is_dry = True
    best = search.within(0)
    mixes_rows = axis == 2  # slabs have rows along this axis
    assert bool(best.division.segments) is not mixes_rows
    far = "its results depend on rows that are far away"
    assert search.reasons() == (("0", far),) * mixes_rows


def test_slabs_of_a_size_that_was_slow_are_not_hoped_for_elsewhere(monkeypatch):
    timed, slow = OperatorTable._timed, range(29, 64)

    def by_rows(table, operator, arguments, is_kept):
        leaves = torch.utils._pytree.tree_leaves(arguments)
        maps = [one for one in leaves if isinstance(one, torch.Tensor) and one.dim() == 4]
        work = sum(one.numel() * (10 if one.shape[2] in slow else 1) for one in maps)
        return timed(table, operator, arguments, is_kept)._replace(time_ns=100 * (1 + work))

    monkeypatch.setattr("ucudnn.benchmark.operators._known", {})
    monkeypatch.setattr(OperatorTable, "_timed", by_rows)
    model = nn.Sequential(*(Block(3) for _ in range(6)))
    search = SegmentSearch(
        Foreseer(model, torch.randn(1, 8, 64, 64), open_backend("torch_cpu"), True)
    )
    for rows in (8, 16, 32):
        search.foresee(StepDivision((Segment("[0:2]", rows=rows, axis=2, halo=(4, 4)),)))
    table, own = search.costs.table(), search.ways[0].foreseen_bytes
    for room in (0.4 * own, 0.3 * own):
        chosen = [one.choice for one in table.choose(round(room)) if one.choice is not None]
        rows = {one.rows for one in chosen if one.rows is not None}
        assert rows
        assert rows.isdisjoint(slow)
