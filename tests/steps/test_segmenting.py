"""Memory budgets that it takes segments to keep: kept by real steps, or refused with the reason."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import ClassVar
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

import ucudnn
from ucudnn import Config
from ucudnn.backends import open_backend
from ucudnn.errors import ConfigError, PlanError
from ucudnn.kernels.deadline import Deadline
from ucudnn.outcomes import Way
from ucudnn.segment import WHOLE, Segment, StepDivision
from ucudnn.steps.costs import SegmentCosts
from ucudnn.steps.fit import _chosen
from ucudnn.steps.foresee import Foreseer
from ucudnn.steps.run import Steps, tensors_of
from ucudnn.steps.search import SegmentSearch
from ucudnn.units import parse_bytes

# A busy machine may leave no time for kernels, which is not what these tests are about.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ucudnn.errors.UntunedWarning"),
    pytest.mark.filterwarnings("ignore::ucudnn.errors.UnplannedWarning"),
    pytest.mark.filterwarnings("ignore::ucudnn.errors.NoiseWarning"),
]
QUICK = {"effort": "quick", "policy": "undivided", "time_budget_s": 15.0, "step_race": False}


class Block(nn.Module):
    def __init__(self, width: int, norm: nn.Module) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.norm = norm
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.norm(self.first(x))))


def blocks(norm: Callable[[int], nn.Module], width: int = 8, depth: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        *(Block(width, norm(width)) for _ in range(depth)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 4),
    )


def groups(width: int) -> nn.Module:
    return nn.GroupNorm(2, width)


def none(width: int) -> nn.Module:
    """Without normalisation nothing can be recomputed selectively."""
    return nn.Identity(width)


IMAGES = (8, 3, 24, 24)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "groups": (lambda: blocks(groups), IMAGES),
    "batches": (lambda: blocks(nn.BatchNorm2d), IMAGES),
    "dropout": (lambda: blocks(lambda _: nn.Dropout(0.3), depth=3), IMAGES),
    "deep": (lambda: blocks(groups, 4, 12), (6, 3, 16, 16)),
    "wide": (lambda: blocks(groups, 32, 2), (4, 3, 16, 16)),
    "nested": (
        lambda: nn.Sequential(nn.Sequential(blocks(groups)[0:3]), blocks(groups)[3:]),
        IMAGES,
    ),
    "volumes": (
        lambda: nn.Sequential(
            nn.Conv3d(1, 8, 3, padding=1),
            nn.Sequential(nn.InstanceNorm3d(8), nn.ReLU(), nn.Conv3d(8, 8, 3, padding=1)),
            nn.Sequential(nn.InstanceNorm3d(8), nn.ReLU(), nn.Conv3d(8, 2, 3, padding=1)),
        ),
        (4, 1, 12, 12, 12),
    ),
    "sound": (
        lambda: nn.Sequential(
            nn.Conv1d(1, 16, 9, padding=4),
            *(nn.Sequential(nn.GELU(), nn.Conv1d(16, 16, 9, padding=4)) for _ in range(3)),
        ),
        (8, 1, 400),
    ),
}


def peak_of_steps(model: nn.Module, x: Tensor, plan: ucudnn.Plan | None) -> int:
    """The most that two training steps have, with an optimiser and all that is there before."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        for part in [(x,)] if plan is None else plan.micro_batches(x):
            outputs = tensors_of(model(part[0]))
            torch.autograd.backward([one.abs().sum() for one in outputs])
        optimizer.step()

    def steps() -> None:
        step()
        step()

    step()
    optimizer.zero_grad()
    states = [leaf for state in optimizer.state.values() for leaf in state.values()]
    held = [*model.parameters(), *model.buffers(), x, *filter(torch.is_tensor, states)]
    size = sum(one.numel() * one.element_size() for one in held)
    return size + open_backend("torch_cpu").workspace_bytes(steps, ())


def drawn(count: int) -> Iterator[tuple[str, int, bool]]:
    chance = random.Random(0)
    for name in NETWORKS:
        for _ in range(count):
            yield name, chance.randint(15, 99), chance.random() < 0.3


@pytest.mark.parametrize(
    ("name", "share", "loop"),
    [
        *(pytest.param(*one, marks=pytest.mark.slow) for one in [*drawn(1)][::2]),
        *(pytest.param(*one, marks=pytest.mark.nightly) for one in [*drawn(1)][1::2]),
        *(pytest.param(*one, marks=pytest.mark.nightly) for one in [*drawn(5)][8:]),
    ],
)
def test_a_budget_is_kept_by_real_steps_or_refused(name, share, loop, tmp_path):
    make, shape = NETWORKS[name]
    model, x = make(), torch.randn(shape)
    torch.manual_seed(0)
    # The state of its optimiser counts.
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    tensors_of(model(x))[0].abs().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    config = Config(memory_budget=f"{share}%", loop=loop, cache=str(tmp_path), **QUICK)
    if loop and name == "batches":
        with pytest.raises(ConfigError, match="loop runs a model on parts of the batch"):
            ucudnn.tune(model, x, config)
        return
    least = 0
    try:
        plan = ucudnn.tune(model, x, config)
    except PlanError as error:
        least = error.smallest_bytes
    if least:
        # No way that was run has a peak within the budget.
        assert least > 0.9 * share / 100 * peak_of_steps(model, x, None)
        return
    budget = plan.memory.budget_bytes
    assert plan.memory.plan_peak_bytes <= budget
    twin = copy.deepcopy(model)
    ucudnn.convert_(twin, plan)
    # Blocks of the allocator, and results of the loss.
    assert peak_of_steps(twin, x, plan) <= budget + (64 << 10)


def searching(model: nn.Module, x: Tensor) -> SegmentSearch:
    return SegmentSearch(Foreseer(model, x, open_backend("torch_cpu")))


@pytest.mark.slow
def test_micro_batches_are_kept_where_there_is_memory():
    search = searching(blocks(groups, depth=4), torch.randn(IMAGES))
    found = search.within(search.ways[0].foreseen_bytes // 2)
    assert found.foreseen_bytes <= search.ways[0].foreseen_bytes // 2
    # For this limit slabs may be as fast, for some limit they are not.
    table = search.costs.table()
    chosen = [one.choice for peak, _ in table.front() for one in table.choose(peak)]
    assert any(one is not None and one.kept and one.rows is None for one in chosen)
    # The fewer micro-batches keep their activations, the smaller is the estimate of the peak.
    assert any(peak < found.foreseen_bytes for peak, _ in table.front())


@pytest.mark.slow
def test_segments_keep_half_of_the_peak_and_the_gradients(tmp_path):
    model, x = blocks(groups), torch.randn(IMAGES)
    config = Config(memory_budget="50%", cache=str(tmp_path), **QUICK)
    plan = ucudnn.tune(model, x, config)
    assert plan.segments
    assert plan.memory.plan_peak_bytes <= plan.memory.budget_bytes < plan.memory.torch_peak_bytes
    assert plan.memory.ways[0].kind == "torch"
    assert plan.memory.plan_foreseen_bytes == pytest.approx(plan.memory.plan_peak_bytes, rel=1e-3)
    assert "was not run" in plan.step_race.reason or plan.step_race.reason == "step_race is off"
    exact, twin = copy.deepcopy(model).double(), copy.deepcopy(model)
    assert {*ucudnn.convert_(twin, plan).segments} == {one.module for one in plan.segments}
    for network in (exact, twin):
        network(x.to(network[0].weight.dtype)).square().sum().backward()
    for found, wanted in zip(twin.parameters(), exact.parameters(), strict=True):
        assert torch.allclose(found.grad.double(), wanted.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_samples_that_depend_on_each_other_are_recomputed_together(tmp_path):
    model, x = blocks(nn.BatchNorm2d, depth=4), torch.randn(IMAGES)
    plan = ucudnn.tune(model, x, Config(memory_budget="60%", cache=str(tmp_path), **QUICK))
    recomputed = [one for one in plan.segments if one.recompute]
    assert recomputed
    assert {one.micro_batch for one in plan.segments} == {None}
    assert "buffers" in dict(plan.reasons)[recomputed[0].module]
    with pytest.raises(ConfigError, match="loop runs a model on parts of the batch, and of this"):
        ucudnn.tune(model, x, Config(memory_budget="80%", loop=True, cache=str(tmp_path), **QUICK))


@pytest.mark.slow
def test_a_budget_that_no_way_keeps_names_the_ways():
    model, x = blocks(groups), torch.randn(IMAGES)
    with pytest.raises(PlanError, match="smallest peak of a step that was found is") as info:
        ucudnn.tune(model, x, Config(memory_budget="100KiB", **QUICK))
    lines = str(info.value).splitlines()
    peaks = [line.rpartition(": ")[2] for line in lines[1:7]]
    sizes = [parse_bytes(peak, "peak") for peak in peaks if "iB" in peak]
    assert sizes == sorted(sizes)
    assert len(sizes) == len(set(lines[1 : len(sizes) + 1])) <= 6
    # What a refusal names is accepted when it is asked for.
    plan = ucudnn.tune(model, x, Config(memory_budget=info.value.smallest_bytes, **QUICK))
    assert plan.memory.plan_peak_bytes <= plan.memory.budget_bytes == info.value.smallest_bytes


def test_a_budget_that_nothing_could_keep_is_refused_at_once():
    model, x = blocks(groups), torch.randn(IMAGES)
    with pytest.raises(PlanError, match="too small for any step: parameters, gradients") as info:
        ucudnn.tune(model, x, Config(memory_budget="9KiB", **QUICK))
    held = sum(one.nbytes for one in (x, *model.parameters(), *model.parameters()))
    assert info.value.smallest_bytes == held


@pytest.mark.slow
def test_what_is_foreseen_is_what_steps_measure():
    search = searching(blocks(none), torch.randn(IMAGES))
    whole = search.ways[0]
    held = search.costs._own.held.total
    assert max(dict(search.costs.table().front())) == whole.foreseen_bytes - held
    for size in (4, 2, 1):
        seen = search.foresee(StepDivision((Segment("", size),)))
        assert seen.foreseen_bytes - held < (whole.foreseen_bytes - held) * (size / 8 + 0.2)
        ran = search.run_if_fits(seen)
        assert ran.peak_bytes == pytest.approx(seen.foreseen_bytes, rel=1e-3)
    assert search.foresee(WHOLE) is whole
    best = search.within(whole.foreseen_bytes // 3)
    assert best.foreseen_bytes <= whole.foreseen_bytes // 3


@pytest.mark.slow
@pytest.mark.parametrize("loop", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_where_micro_batches_do_not_suffice_there_are_segments_inside(loop, monkeypatch):
    model, x = blocks(none, 8, 12), torch.randn(8, 3, 64, 64)
    search = searching(model, x)
    one = search.foresee(StepDivision(micro_batch=1) if loop else StepDivision((Segment("", 1),)))
    held = search.costs._own.held.total
    limit = held + (one.foreseen_bytes - held) * 9 // 10
    # Without stretches, which may need no micro-batches.
    monkeypatch.setattr(SegmentCosts, "_stretches_of", lambda *_: [])
    seen = search.in_parts(limit, inside=True) if loop else search.within(limit, inside=True)
    assert seen is not None
    assert seen.foreseen_bytes <= limit
    segments, size, _ = seen.division
    assert (size is not None) == loop
    assert len(segments) > 1 - loop


def test_of_two_steps_the_times_taken_in_turn_decide(monkeypatch):
    search = searching(blocks(none, 8, 2), torch.randn(4, 3, 16, 16))
    loop, segment = (
        search.foresee(one)
        for one in (StepDivision(micro_batch=1), StepDivision((Segment("", 1),)))
    )
    turns = {loop.division: itertools.cycle((5, 9, 9)), segment.division: itertools.repeat(8)}
    monkeypatch.setattr(search, "elapsed_ns", lambda one: next(turns[one]))
    search.note(loop, 1)
    faster = search.faster_of(loop, segment)
    assert (faster.division, faster.time_ns) == (segment.division, 8)
    assert search.foresee(loop.division).time_ns == 9
    assert search.faster_of(segment, segment) is segment
    # Where memory suffices for one of them only, as by a plan, none is run.
    smaller, larger = sorted((loop, segment), key=lambda way: way.foreseen_bytes)
    monkeypatch.setattr(search._foreseer, "can_run", lambda peak: peak < larger.foreseen_bytes)
    monkeypatch.setattr(search, "elapsed_ns", Mock(side_effect=AssertionError("it was run")))
    fastest = min((smaller, larger), key=lambda way: way.foreseen_ns)
    assert search.faster_of(smaller, larger) is fastest


@pytest.mark.nightly
def test_where_results_are_large_the_smallest_step_keeps_no_micro_batch():
    model = nn.Sequential(*blocks(groups, 8, 12)[:13], nn.Conv2d(8, 8, 1))
    search = searching(model, torch.randn(8, 3, 72, 72))
    inside = (Segment(str(number), None) for number in range(1, 13))
    wanted = search.foresee(StepDivision((Segment("", 1), *inside))).foreseen_bytes
    held = search.costs._own.held.total
    assert search.within(held + 1, inside=True).foreseen_bytes <= wanted


class Overwriting(nn.Module):
    """Overwrites the input of a norm, of which torch keeps a copy, because it is no plain one."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Sequential(nn.Conv2d(3, 8, 3)), nn.Conv2d(8, 8, 3)

    def forward(self, x):
        x = self.first(x).transpose(2, 3)
        y = nn.functional.instance_norm(x)
        return self.last(y) + x.mul_(2).mean()


def test_a_model_that_cannot_be_recomputed_selectively_is_searched_all_the_same():
    model, x = Overwriting(), torch.randn(4, 3, 16, 16)
    model(x).sum().backward()
    assert [one.division for one in searching(model, x).ways] == [WHOLE]


@pytest.mark.slow
def test_tuning_runs_a_step_that_is_recomputed_selectively(tmp_path):
    """Under a function mode of the caller, too."""
    model, x = blocks(groups), torch.randn(IMAGES)
    with torch.device("meta"):
        plan = ucudnn.tune(model, x, Config(memory_budget="66%", cache=str(tmp_path), **QUICK))
    by_torch, selective, *_ = plan.memory.ways
    assert "selectively" in selective.name
    assert selective.foreseen_bytes < by_torch.foreseen_bytes


class Perceptron(Block):
    """Without convolutions, whose workspace need not shrink with the batch."""

    def __init__(self, width: int) -> None:
        super().__init__(width, nn.LayerNorm(width))
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)


@pytest.mark.parametrize("size", [None, 4])
@pytest.mark.parametrize("selective", [False, True])
def test_the_peak_of_a_recomputed_block_is_foreseen_exactly(size, selective):
    model = nn.Sequential(nn.Linear(3, 8), *(Perceptron(8) for _ in range(4)))
    x = torch.randn(8, 64, 64, 3)
    one = Segment("2", size, selective=selective)
    search = searching(model, x)
    search.foresee(StepDivision((one,)))
    costs = search.costs
    # torch.utils.checkpoint keeps the state of a random number generator for each micro-batch.
    states = len(x) // (size or len(x)) * torch.get_rng_state().numel() * 5 // 4
    for name in ("kept_bytes", "peak_bytes"):
        wanted = getattr(costs._estimated[one, 0], name)
        assert getattr(costs._foreseen[one, 0], name) == pytest.approx(wanted, abs=states)


@pytest.mark.slow
def test_steps_that_fit_are_timed_again_because_one_of_them_was_slow_by_chance(monkeypatch):
    search = searching(blocks(groups), torch.randn(IMAGES))
    slower, faster = (search.foresee(StepDivision((Segment("", size),))) for size in (4, 2))
    limit = max(slower.foreseen_bytes, faster.foreseen_bytes)
    for one in search.ways:
        search.note(one, {slower.division: 900, faster.division: 1000}.get(one.division, 2000))
    times = {slower.division: 800, faster.division: 700}
    monkeypatch.setattr(search, "elapsed_ns", lambda division: times.get(division, 2000))
    monkeypatch.setattr(search, "run", lambda way: search.note(way, 2000))
    assert search.within(limit).division == faster.division


class Noting(nn.Module):
    """Notes the shapes that it is called with."""

    shapes: ClassVar[list[tuple[int, ...]]] = []

    def forward(self, x):
        self.shapes.append(tuple(x.shape))
        return x


@pytest.mark.parametrize(
    ("shape", "cropped"),
    [((8, 3, 32, 48), (2, 3, 16, 24)), ((8, 3, 33), (2, 3, 33)), ((8, 4), (2, 4))],
)
def test_if_time_is_short_half_of_each_spatial_axis_is_looked_at(shape, cropped):
    Noting.shapes.clear()
    Steps(Noting(), torch.randn(shape)).forward(2, is_cropped=True)
    assert Noting.shapes == [cropped]


def test_a_model_for_inputs_of_one_size_is_examined_on_whole_ones(monkeypatch):
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), nn.Flatten(), nn.Linear(400, 2)
    )
    search = searching(model, torch.randn(4, 3, 12, 12))
    monkeypatch.setattr(search, "_part_to_examine", lambda: (2, True))
    search.examine({"0": 1, "": 1})
    assert {name: one.reason for name, one in search.findings.items()} == {"0": "", "": ""}


class Pyramid(nn.Module):
    """Calls a module only for large inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = none_block(), none_block()

    def forward(self, x):
        while x.shape[-1] > 16:
            x = nn.functional.max_pool2d(self.large(x), 2)
        return self.small(x)


def none_block() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 3, 3, padding=1))


def test_what_is_not_called_on_half_of_the_axes_is_examined_on_all(monkeypatch):
    search = searching(Pyramid(), torch.randn(4, 3, 32, 32))
    monkeypatch.setattr(search, "_part_to_examine", lambda: (2, True))
    search.examine({"large": 1, "small": 1})
    assert not any(one.reason for one in search.findings.values())


def test_modules_may_be_examined_on_different_numbers_of_samples(monkeypatch):
    search = searching(Pyramid(), torch.randn(8, 3, 32, 32))
    parts = iter([(8, False), (4, False)])
    monkeypatch.setattr(search, "_part_to_examine", lambda: next(parts))
    assert not search.reason_against_parts()
    search.examine({"small": 1})
    assert not search.reason_against_parts()


class ScriptedSearch:
    """A search that finds a way for each workspace that it counts, and then has these ways."""

    is_clearly_faster = SegmentSearch.is_clearly_faster
    _clearly = 0.95

    def __init__(self, split, fitting, left):
        self.is_split = False
        self.ways = left
        self._found = {True: split, False: fitting}

    def begin(self, deadline):
        pass

    def fits(self, way, limit):
        return (way.split_bytes if self.is_split else way.foreseen_bytes) <= limit

    def within(self, *_, **__):
        return self._found[self.is_split]


@pytest.fixture
def ways():
    """A way that fits 60 bytes as it is, and a faster one that fits by convolutions in chunks."""
    slow, fast = (StepDivision((Segment(name, 2),)) for name in ("slow", "fast"))
    return (
        Way("segments", "slow", 50, 100, time_ns=100, split_bytes=40, division=slow),
        Way("segments", "fast", 70, 80, time_ns=80, split_bytes=60, division=fast),
    )


def chosen(*found):
    """The division of the way that is planned first, and of the one that fits beside it."""
    (choice,) = _chosen(ScriptedSearch(*found), Deadline.never(), 60, loop=False)
    return choice.way.name, choice.fitting and choice.fitting.name


def test_convolutions_in_chunks_are_planned_where_they_make_steps_clearly_faster(ways):
    slow, fast = ways
    assert chosen(fast, slow, ways) == ("fast", "slow")
    assert chosen(replace(fast, time_ns=96), slow, (slow, replace(fast, time_ns=96))) == (
        "slow",
        None,
    )


def test_a_way_that_fits_as_it_is_needs_no_other_one(ways):
    """Neither if none was found with chunks, nor if steps of that one have failed."""
    slow, fast = ways
    large = replace(fast, split_bytes=61)
    assert chosen(large, slow, ways) == ("slow", None)
    assert chosen(fast, slow, (slow,)) == ("slow", None)
    assert chosen(fast, slow, (slow, replace(fast, is_allowed=False))) == ("slow", None)
    assert chosen(fast, large, ways) == ("fast", None)


def test_a_way_that_was_timed_again_is_not_faster_than_itself(ways):
    slow, _ = ways
    again = replace(slow, time_ns=90)
    assert chosen(slow, again, (again,)) == ("slow", None)
