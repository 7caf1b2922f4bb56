"""A step by a plan is compared with torch's before the plan is returned."""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from by_hand import in_chunks, where_it_can
from torch import nn

import ucudnn
from ucudnn.backends import open_backend
from ucudnn.config import Config
from ucudnn.errors import PlanError
from ucudnn.execution.micro_batching import located, modes_of
from ucudnn.kernels.tune import tune_problems
from ucudnn.outcomes import Comparison
from ucudnn.segment import Segment
from ucudnn.steps.comparing import PlanComparer
from ucudnn.steps.independence import Independence, Slabs
from ucudnn.steps.locality import Locality
from ucudnn.steps.run import Steps
from ucudnn.steps.search import SegmentSearch
from ucudnn.steps.tracing import trace_layers

# On a busy machine, some kernels stay torch's own.
pytestmark = pytest.mark.filterwarnings("ignore::ucudnn.errors.UntunedWarning")
QUICK = {"policy": "undivided", "effort": "quick", "time_budget_s": 60.0, "step_race": False}


@pytest.fixture(autouse=True)
def _settings(one_thread):
    torch.manual_seed(0)


def network(*inside):
    layers = (nn.Conv2d(3, 8, 3, padding=1), nn.Sequential(*inside), nn.Conv2d(8, 4, 3))
    return nn.Sequential(*layers).double()


@pytest.fixture
def plan_by_hand():
    """A plan that computes convolutions in chunks of two samples."""
    backend = open_backend("torch_cpu")
    algorithm = where_it_can(backend, "im2col_gemm", 2)
    return lambda model, x: in_chunks(
        backend, trace_layers(model, x, real=True).layers, 2, algorithm, None
    )


def comparer(plan_by_hand, model, x, *segments, micro_batch=None, **how):
    plan = replace(plan_by_hand(model, x), segments=segments, micro_batch=micro_batch)
    return PlanComparer(model, x, plan, **{"is_training": True, **how})


def images(batch=6, size=9):
    return torch.randn(batch, 3, size, size, dtype=torch.float64)


def test_a_right_plan_is_near(plan_by_hand):
    model, x = network(nn.GroupNorm(2, 8), nn.Dropout(0.5), nn.ReLU()), images()
    own = [one.clone() for one in model.parameters()]
    for segment in (Segment("1", 4), Segment("1", None, recompute=False, selective=True)):
        found, reason = comparer(plan_by_hand, model, x, segment).compare()
        assert reason == ""
        assert found.deviation < 1e-12
        assert found.parameters == len(own)
        assert (found.samples, found.states) == (6, 2)
    found, reason = comparer(plan_by_hand, model, x, micro_batch=4).compare()
    assert (reason, found.deviation < 1e-12) == ("", True)
    assert all(map(torch.equal, own, model.parameters()))
    assert all(one.grad is None for one in model.parameters())


class Dropped(nn.Module):
    """Drops a block for some samples, each by one number (stochastic depth)."""

    def __init__(self, draw):
        super().__init__()
        self.draw, self.block = draw, nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        return x + self.block(x).tanh() * self.draw(x[:, :1, :1, :1])


@pytest.mark.parametrize(
    "draw",
    [
        lambda one: torch.rand(one.shape, dtype=one.dtype) < 0.5,
        lambda one: torch.empty_like(one).bernoulli_(0.5),
        lambda one: torch.bernoulli(torch.full_like(one, 0.5)),
    ],
)
def test_one_number_for_a_sample_is_the_same_in_any_part(plan_by_hand, draw):
    model, x = network(*(Dropped(draw) for _ in range(3))), images()
    ways = Segment("1", 1), Segment("1", 4), Segment("1", None, recompute=False, selective=True)
    for segment in ways:
        found, reason = comparer(plan_by_hand, model, x, segment).compare()
        assert (reason, found.states) == ("", 2)


class Normalised(nn.Module):
    """Normalises the gradient over the batch."""

    def forward(self, x):
        y = x * 1
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient / gradient.norm())
        return y


class Left(nn.Module):
    """Leaves a loss for whoever wants it."""

    def forward(self, x):
        self.loss = x.square().mean()
        return x * 2


class Mixed(nn.Module):
    """Mixes samples in some steps."""

    def forward(self, x):
        return 0.7 * x + 0.3 * x[torch.randperm(len(x))] if torch.rand(()) < 0.5 else x


WRONG = {
    "results": (nn.BatchNorm2d(8, track_running_stats=False), "result|gradient"),
    "gradients": (Normalised(), "gradient of"),
    "what is left": (Left(), "attribute '1.1.loss'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_plan_names_its_segment(plan_by_hand, name):
    module, where = WRONG[name]
    model, x = network(nn.Tanh(), module, nn.Sequential(nn.Tanh())), images()
    segments = (Segment("1", 4), Segment("1.2", None))
    found = comparer(plan_by_hand, model, x, *segments)
    _, reason = found.compare()
    assert "differs from torch's by" in reason
    causes = found.causes(reason)
    assert [*causes] == [segments[0]]
    assert any(one in causes[segments[0]] for one in where.split("|"))


def test_mixing_in_some_steps_shows_in_one_of_several_states(plan_by_hand):
    model, x = network(nn.Tanh(), Mixed()), images()
    assert comparer(plan_by_hand, model, x, Segment("1", 3)).compare()[1]


class Sequence(nn.Module):
    """Dropout on sequences whose second axis is that of the samples."""

    def forward(self, x):
        return nn.functional.dropout(x.flatten(1).T, 0.5).T.reshape(x.shape)


def test_random_numbers_that_cannot_be_the_same_for_each_sample(plan_by_hand):
    model, x = network(nn.Tanh(), Sequence()), images(32)
    for is_unaligned in (True, False):
        one = comparer(plan_by_hand, model, x, Segment("1", 16), is_unaligned=is_unaligned)
        assert bool(one.compare()[1]) != is_unaligned


def test_rounding_is_no_difference(plan_by_hand):
    model, x = network(nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(3, 1, 1)).float(), images()
    found, reason = comparer(plan_by_hand, model, x.float(), Segment("", 2)).compare()
    assert reason == ""
    assert found.deviation <= found.tolerance < 0.3


def test_a_mean_of_centred_results_is_nothing_but_rounding(plan_by_hand):
    # The second running mean is that of products with centred values: its digits are chance.
    layers = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8)
    model, x = network(*layers), images()
    segment = Segment("1", None, recompute=False, selective=True)
    assert comparer(plan_by_hand, model, x, segment).compare()[1] == ""


class Large(nn.Module):
    """Needs more memory for many samples than there is."""

    def forward(self, x):
        if len(x) > 3:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return x.tanh()


def test_the_largest_part_for_which_memory_suffices(plan_by_hand):
    model = network(nn.Tanh())
    x, plan = images(8), replace(plan_by_hand(model, images(8)), segments=(Segment("1", 4),))
    model[1][0] = Large()
    found, reason = PlanComparer(model, x, plan, is_training=True).compare()
    assert (reason, found.samples) == ("", 3)


def test_inference_is_compared_by_results(plan_by_hand):
    model, x = network(nn.Tanh()), images()
    found, reason = comparer(
        plan_by_hand, model, x, Segment("1", 4, recompute=False), is_training=False
    ).compare()
    assert (reason, found.parameters) == ("", 0)
    assert "results equal torch's to" in str(found)


def blocks(count):
    def block():
        return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU())

    return nn.Sequential(nn.Conv2d(3, 8, 3), *(block() for _ in range(count)))


def gradients(model, x):
    model.zero_grad()
    model(x).square().mean().backward()
    return torch.cat([one.grad.flatten() for one in model.parameters()])


@pytest.mark.slow
def test_a_module_by_which_the_step_is_wrong_leaves_the_plan(monkeypatch, tmp_path):
    # The proof finds nothing, so that only the comparison is left.
    def trusting(model, step, sizes, deadline, axes, end_of_slabs):
        step()
        modes = {}
        for name, (module, stretch) in located(model, sizes).items():
            children = [*module._modules.items()]
            if stretch is not None:
                children = children[stretch.begin : stretch.end]
            part = module if stretch is None else nn.Sequential(OrderedDict(children))
            modes[name] = (modes_of(part),)
        none = Slabs(Locality("no rows"))
        return {
            name: Independence(
                repeats=True,
                samples=6,
                divides_in=one,
                repeats_in=one,
                slabs=dict.fromkeys((axes or {}).get(name, ()), none),
            )
            for name, one in modes.items()
        }

    monkeypatch.setattr("ucudnn.steps.search.examined", trusting)
    model, x = blocks(4), torch.randn(6, 3, 16, 16)
    model[2].append(Normalised())
    truth = gradients(copy.deepcopy(model), x)
    plan = ucudnn.tune(model, x, Config(memory_budget="60%", cache=str(tmp_path), **QUICK))
    assert plan.segments
    assert plan.comparison.deviation <= plan.comparison.tolerance
    ucudnn.convert_(model, plan)
    assert (gradients(model, x) - truth).norm() < 1e-3 * truth.norm()
    again = ucudnn.Plan.load(_saved(plan, tmp_path))
    assert (again.comparison, again.reasons) == (plan.comparison, plan.reasons)
    # Within so little memory, blocks must be recomputed.
    for block in model[2:]:
        block.append(Repeated())
    ucudnn.revert_(model)
    # What is left needs more, or leaves too little to its kernels.
    with pytest.raises(PlanError, match="(?s)too small.*differs from torch's|no plan fits"):
        ucudnn.tune(model, x, Config(memory_budget="30%", cache=str(tmp_path), **QUICK))


class Repeated(nn.Module):
    """Computes something else in backward."""

    def forward(self, x):
        return x.sin() if torch._C._current_graph_task_id() == -1 else x.cos()


def _saved(plan, folder):
    plan.save(folder / "plan.json")
    return folder / "plan.json"


@pytest.mark.slow
def test_an_error_in_a_trial_excludes_its_module(monkeypatch, tmp_path):
    model, x = blocks(4), torch.randn(6, 3, 16, 16)

    def step(steps):
        if any(one.module == "2" for one in steps.division.segments):
            raise RuntimeError("no such thing")
        call(steps)

    call = Steps.__call__
    monkeypatch.setattr(Steps, "__call__", step)
    plan = ucudnn.tune(model, x, Config(memory_budget="60%", cache=str(tmp_path), **QUICK))
    assert plan.segments
    assert "2" not in {one.module for one in plan.segments}
    assert "no such thing" in dict(plan.reasons).get("2", "no such thing")


@pytest.mark.slow
def test_a_loop_that_computes_something_else_is_refused(monkeypatch, tmp_path):
    model, x = blocks(2), torch.randn(4, 3, 12, 12)

    def wrong(_):
        return Comparison(1.0, 0.1), "the gradient differs"

    monkeypatch.setattr(PlanComparer, "compare", wrong)
    # The loop is the faster one.
    monkeypatch.setattr(SegmentSearch, "faster_of", lambda _, loop, __: loop)
    config = Config(memory_budget="70%", loop=True, cache=str(tmp_path), **QUICK)
    with pytest.raises(PlanError, match="loop .*the gradient differs; leave out loop=True"):
        ucudnn.tune(model, x, config)


def test_steps_are_measured_without_a_warning_of_kernels_that_were_left_out(monkeypatch, tmp_path):
    def without_the_last(*args, **how):
        plan = tune_problems(*args, **how)
        *kernels, last = plan.kernels
        origin = replace(plan.origin, left_out=(str(last.problem),))
        return replace(plan, kernels=tuple(kernels), origin=origin)

    monkeypatch.setattr("ucudnn.steps.tune.tune_problems", without_the_last)
    model, config = blocks(2), Config(memory_budget="100%", cache=str(tmp_path), **QUICK)
    plan = ucudnn.tune(model, torch.randn(6, 3, 16, 16), config)
    assert plan.left_out
    assert plan.memory.plan_ns
