"""Whole steps by several ways: what each computes, what it leaves as it was, and who failed."""

from __future__ import annotations

import copy
import json
import mmap
from dataclasses import replace

import pytest
import torch
from torch import nn

from ucudnn import Config, tune
from ucudnn.errors import ConfigError
from ucudnn.steps.bench import bench_steps
from ucudnn.steps.result import WAYS, StepBench, TimedSteps, ways_of
from ucudnn.system.memory import high_water_bytes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ucudnn.errors.NoiseWarning"),
    pytest.mark.filterwarnings("ignore::ucudnn.errors.UnplannedWarning"),
]
EAGER, LAST, PLAN = WAYS["eager"], WAYS["channels_last"], WAYS["plan"]


class Seen(nn.Module):
    """Remembers, for all copies, in which layout and mode it was called."""

    calls: list[tuple[bool, bool]] = []  # noqa: RUF012 - shared on purpose

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x):
        y = self.norm(self.conv(x))
        is_last = y.is_contiguous(memory_format=torch.channels_last)
        Seen.calls.append((is_last, torch.is_grad_enabled()))
        return {"out": y, "count": 3}


@pytest.fixture
def x():
    return torch.randn(2, 3, 9, 9)


def test_every_way_runs_in_its_layout_and_nothing_of_the_model_changes(x):
    model = Seen()
    model.conv.weight.grad = torch.ones_like(model.conv.weight)
    before, state = copy.deepcopy(model), torch.get_rng_state()
    for way, is_last in ((EAGER, False), (LAST, True)):
        Seen.calls.clear()
        bench = bench_steps(model, x, ways=[way], rounds=5)
        assert set(Seen.calls) == {(is_last, True)}
        # the first step, one for each peak, a round that warms up, and five that count
        assert len(Seen.calls) == 1 + 2 + 1 + len(bench.ways[0].samples_ns)
    bench_steps(model, {"x": x}, ways=[EAGER], rounds=5, training=False)
    assert Seen.calls[-1] == (False, False)
    for name, value in before.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    assert torch.equal(model.conv.weight.grad, torch.ones_like(model.conv.weight))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("layout", ["keep", "channels_last"])
def test_a_planned_way_follows_the_plan_in_its_layout(x, tmp_path, layout):
    model = Seen()
    settings = Config(cache=str(tmp_path), effort="quick", step_race=False, unplanned="error")
    example = x
    if layout == "channels_last":
        model = model.to(memory_format=torch.channels_last)
        example = x.to(memory_format=torch.channels_last)
    plan = tune(model, example, settings)
    object.__setattr__(plan, "memory_format", layout)
    Seen.calls.clear()
    bench = bench_steps(model, x, plan, ways=[PLAN], rounds=5)
    assert bench.ways[0].samples_ns
    assert {is_last for is_last, _ in Seen.calls} == {layout == "channels_last"}
    # A filter of the plan in a shape that it does not hold: only who follows the plan is refused.
    bench = bench_steps(model, torch.randn(2, 3, 12, 12), plan, ways=[EAGER, PLAN], rounds=5)
    eager, planned = bench.ways
    assert eager.samples_ns
    assert not planned.samples_ns
    assert "no plan" in planned.reason


def test_a_way_that_fails_is_named_and_the_others_are_timed(x, monkeypatch):
    def refuse(module):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", refuse)
    bench = bench_steps(nn.Conv2d(3, 4, 3), x, ways=[EAGER, WAYS["compile"]], rounds=5)
    eager, compiled = bench.ways
    assert len(eager.samples_ns) == 5
    assert not compiled.samples_ns
    assert "no compiler here" in compiled.reason
    assert bench.ratio() is None
    assert "no compiler here" in bench.sentence()


def test_compiled_ways_follow_a_plan_of_their_own(x, plan_by_hand):
    layouts = []

    def backend(graph, inputs):
        filters = [one for one in inputs if isinstance(one, nn.Parameter) and one.dim() == 4]
        layouts.extend(one.is_contiguous() for one in filters)
        return graph.forward

    model = nn.Conv2d(3, 4, 3)
    plan = plan_by_hand(model, x)
    last = replace(plan, memory_format="channels_last")
    found = bench_steps(
        torch.compile(model, backend=backend),
        x,
        plan,
        compiled_plan=last,
        ways=[PLAN, WAYS["plan+compile"]],
        rounds=5,
    )
    assert [len(way.samples_ns) for way in found.ways] == [5, 5], found.sentence()
    # by the backend of the model
    assert layouts == [False]


def test_peaks_hold_at_least_what_a_step_keeps(x):
    model = nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(4)))
    big = torch.randn(4, 3, 256, 256)
    found = bench_steps(model, big, ways=[EAGER], rounds=5).ways[0]
    # the outputs of three layers are kept for backward while the fourth is computed
    assert found.peak_bytes >= 4 * big.nbytes
    assert found.process_bytes is None or found.process_bytes >= 4 * big.nbytes


def test_the_high_water_mark_counts_pages_that_are_gone_again():
    def use():
        with mmap.mmap(-1, 96 << 20) as pages:
            pages.write(b"x" * (96 << 20))

    grown = high_water_bytes(use)
    if grown is None:
        pytest.skip("this system does not tell the high-water mark")
    assert 96 << 20 <= grown < 400 << 20


def test_results_survive_json_and_wrong_names_are_refused():
    bench = StepBench((TimedSteps(EAGER, (4, 5, 6), 0.5, 3), TimedSteps(PLAN, reason="no")), True)
    assert StepBench.from_dict(json.loads(json.dumps(bench.to_dict()))) == bench
    assert [way.name for way in ways_of(",".join(WAYS))] == list(WAYS)
    for wrong in ("eager,eager", "fast", ""):
        with pytest.raises(ConfigError, match="ways must be some of eager, channels_last"):
            ways_of(wrong)


def test_a_list_of_examples_is_refused(x):
    with pytest.raises(ConfigError, match="one example"):
        bench_steps(nn.Conv2d(3, 4, 3), [x, x])


def test_another_process_has_its_turn_before_each_round(x):
    model, seen = nn.Conv2d(3, 8, 3), []
    bench = bench_steps(
        model, x, ways=[EAGER], rounds=9, on_round=lambda number: not seen.append(number)
    )
    assert seen == [0, *range(1, len(bench.ways[0].samples_ns) + 1)]
    bench = bench_steps(model, x, ways=[EAGER], rounds=9, on_round=lambda number: number < 3)
    assert len(bench.ways[0].samples_ns) == 2
