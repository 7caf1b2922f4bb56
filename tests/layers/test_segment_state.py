"""A repeated or divided forward sees what torch's one forward saw, or says that it cannot."""

from __future__ import annotations

import copy
import gc
import random
import signal
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from packaged import monai
from torch import nn
from torch.func import functional_call

from ucudnn.errors import PlanError, UcudnnWarning
from ucudnn.execution.micro_batching import segment_
from ucudnn.segment import Segment

WHOLE, PARTS = Segment("body", None), Segment("body", 2)
STYLE = torch.ones(())


@pytest.fixture(autouse=True)
def _settings(one_thread):
    torch.manual_seed(0)


class Net(nn.Module):
    """A body between two layers."""

    def __init__(self, body) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Linear(6, 6), body, nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.body(self.stem(x)))


class Body(nn.Module):
    """Two layers, and what a function makes of what is between them."""

    def __init__(self, function=None, **attributes) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(6, 6), nn.Linear(6, 6), function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x, *rest, **named):
        hidden = self.first(x).tanh()
        hidden = hidden if self.function is None else self.function(self, hidden, *rest, **named)
        return self.last(hidden.sin())


def samples(count=5):
    return torch.randn(count, 6, dtype=torch.float64)


def both(model, segment, step):
    """What a step computes by torch, and with a segment, from the same random states."""
    found = []
    for one, segments in ((copy.deepcopy(model), []), (copy.deepcopy(model), [segment])):
        segment_(one, segments)
        torch.manual_seed(3), random.seed(3), np.random.seed(3)
        outputs = step(one)
        states = torch.rand(2), random.random(), np.random.rand()
        gradients = [p.grad for p in one.parameters() if p.grad is not None]
        found.append([*outputs, *gradients, *map(torch.as_tensor, states)])
    return found


def assert_equal(pair):
    theirs, ours = pair
    assert len(theirs) == len(ours)
    for a, b in zip(theirs, ours, strict=True):
        assert (a.double() - b.double()).norm() <= 1e-12 * (1 + a.double().norm())


def backward(*results):
    sum((n + 1) * one.square().sum() for n, one in enumerate(results)).backward()
    return [one.detach() for one in results]


@pytest.mark.parametrize("segment", [WHOLE, PARTS, Segment("body", 2, kept=1, selective=True)])
def test_parameters_swapped_for_a_call(segment):
    model, x = Net(Body()).double(), samples()
    other = {name: 2 * one.detach() for name, one in model.named_parameters()}

    def step(one):
        own = dict(one.named_parameters())
        fast = {name: other[name] + value.square() for name, value in own.items()}
        return backward(functional_call(one, fast, x), one(x))

    assert_equal(both(model, segment, step))


def by_attribute(model, value):
    model.body.style = value


def by_dict(model, value):
    model.body.styles["one"] = value


def by_object(model, value):
    model.body.context.style = value


def by_global(model, value):
    del model
    globals()["STYLE"] = value


class Styled(Body):
    """Reads what somebody else has set."""

    def __init__(self, how) -> None:
        super().__init__(style=None, styles={}, context=SimpleNamespace(style=None))
        self.how = how

    def forward(self, x):
        styles = {
            by_attribute: lambda: self.style,
            by_dict: lambda: self.styles["one"],
            by_object: lambda: self.context.style,
            by_global: lambda: STYLE,
        }
        return self.last((self.first(x) * styles[self.how]()).sin())


@pytest.mark.parametrize("set_", [by_attribute, by_dict, by_object, by_global])
@pytest.mark.parametrize("segment", [WHOLE, PARTS])
def test_what_is_set_before_each_call(set_, segment):
    model, x = Net(Styled(set_)).double(), samples()

    def step(one):
        found = []
        for n in (1.0, 2.0, 3.0):
            set_(one, torch.full((6,), n, dtype=torch.float64))
            found.append(one(x * n))
        set_(one, torch.full((6,), 7.0, dtype=torch.float64))
        return backward(*found)

    assert_equal(both(model, segment, step))


GENERATORS = {
    "Python": lambda _, x: x if random.random() < 0.5 else x * random.random(),
    "NumPy": lambda _, x: x * float(np.random.rand()),
    "torch": lambda _, x: x * torch.rand(()) + nn.functional.dropout(x),
    "Python's own": lambda self, x: x * self.own[0].random(),
    "NumPy's own": lambda self, x: x * self.own[1].random(),
    "torch's own": lambda self, x: x * torch.rand((), generator=self.own[2]),
}


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("segment", [WHOLE, Segment("", None)])
def test_random_numbers_of_any_library(name, segment):
    own = [random.Random(1), np.random.default_rng(1), torch.Generator().manual_seed(1)]
    model, x = Net(Body(GENERATORS[name], own=own)).double(), samples()
    assert_equal(both(model, segment, lambda one: backward(one(x), one(2 * x))))


@pytest.mark.parametrize("last", [nn.RReLU(0.1, 0.9), nn.Sequential(nn.RReLU(), nn.Linear(6, 6))])
def test_rrelu(last):
    model, x = Net(nn.Sequential(nn.Linear(6, 6), last)).double(), samples()

    def step(one):
        hidden = one(x)
        # What is freed here may hold the numbers that RReLU drew; it holds others now.
        taken = [torch.full((5, 6), 7.0, dtype=torch.float64) for _ in range(20)]
        del taken
        return backward(hidden)

    assert_equal(both(model, WHOLE, step))


def test_many_paths_through_a_segment_take_no_time(request):
    class Twice(nn.Module):
        def forward(self, x):
            return (0.3 * x).sin() + (0.4 * x).cos()

    def late(*_):
        raise TimeoutError("a minute is over")

    model = Net(nn.Sequential(nn.Linear(6, 6), *(Twice() for _ in range(60)))).double()
    x = samples()
    before = signal.signal(signal.SIGALRM, late)
    request.addfinalizer(partial(signal.signal, signal.SIGALRM, before))
    request.addfinalizer(partial(signal.alarm, 0))
    signal.alarm(60)  # there are 2 ** 60 paths
    assert_equal(both(model, WHOLE, lambda one: backward(one(x))))


class Collecting(nn.Module):
    """Gives its blocks a list and a dict, to which they add."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Body(self.collect)

    @staticmethod
    def collect(body, x, losses, *, table):
        del body
        losses.append(x.square().mean())
        table["largest"] = x.abs().amax()
        return x * table.pop("scale")

    def forward(self, x):
        losses, table = [], {"scale": 2.0}
        y = self.body(x, losses, table=table)
        return y, torch.stack(losses).sum(), table["largest"], torch.tensor(float(len(table)))


def test_containers_are_passed_on():
    model, x = Collecting().double(), samples()
    assert_equal(both(model, WHOLE, lambda one: backward(*one(x))))
    segment_(model, [PARTS])
    with pytest.raises(PlanError, match="body writes to a list or dict.*leave it out"):
        model(x)


@dataclass
class Batch:
    values: torch.Tensor
    lengths: list[int]


def shortened(_, x, lengths, more=None):
    lengths = lengths.lengths if isinstance(lengths, Batch) else lengths
    rows = [row * n for row, n in zip(x, lengths, strict=True)]
    return torch.stack(rows) * (1 if more is None else more["scale"][0])


class Lengths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Body(shortened)

    def forward(self, x, *rest, **named):
        return self.body(x, *rest, **named)


@pytest.mark.parametrize("lists", [None, (("1", True), ("1.lengths", True), ("more.scale", False))])
def test_lists_of_samples_are_divided(lists):
    model, x = Lengths().double(), samples()
    segment = Segment("body", 2, lists=lists)
    for given in ([5, 4, 3, 2, 1], (5, 4, 3, 2, 1), np.array([5, 4, 3, 2, 1])):
        assert_equal(both(model, segment, lambda one, given=given: backward(one(x, given))))
    batch = Batch(samples(), [5, 4, 3, 2, 1])
    assert_equal(both(model, segment, lambda one: backward(one(x, batch))))
    more = {"scale": [3.0] * 5}
    assert_equal(both(model, segment, lambda one: backward(one(x, [1] * 5, more=more))))


def test_a_list_that_may_be_of_samples_keeps_the_module_whole():
    model, x = Lengths().double(), samples()
    segment = Segment("body", 2, lists=())
    with pytest.warns(UcudnnWarning, match="body runs undivided: its argument 1 is a list as long"):
        assert_equal(both(model, segment, lambda one: backward(one(x, [5, 4, 3, 2, 1]))))


@pytest.mark.parametrize("place", ["forward", "before", "backward", "all modules"])
@pytest.mark.parametrize("segment", [WHOLE, PARTS])
def test_hooks_inside_see_the_batch_once(place, segment):
    model, x, seen = Net(nn.Sequential(Body())).double(), samples(), []

    def step(one):
        register = {
            "forward": one.body[0].first.register_forward_hook,
            "before": one.body[0].first.register_forward_pre_hook,
            "backward": one.body[0].first.register_full_backward_hook,
            "all modules": nn.modules.module.register_module_forward_hook,
        }[place]
        handle = register(lambda *a: seen.append(len(a[-1][0])))
        try:
            return backward(one(x))
        finally:
            handle.remove()

    with pytest.warns(UcudnnWarning, match="body runs undivided.*the hook <lambda> of"):
        assert_equal(both(model, segment, step))
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]


def test_one_tensor_as_three_arguments_stays_one():
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.MultiheadAttention(6, 2, batch_first=True)

        def forward(self, x):
            return self.body(x, x, x)[0]

    model, x = nn.Sequential(Attention(), Attention()).double(), torch.randn(4, 3, 6).double()
    twin = copy.deepcopy(model)
    segment_(twin, [Segment("", 2), Segment("0", None), Segment("0.body", None, selective=True)])
    for one in (model, twin):
        one(x).square().sum().backward()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, atol=1e-14)


IN_PLACE = {
    "argument": (nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6)), WHOLE),
    "argument, nested": (nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6)), Segment("", None)),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_module_that_writes_to_its_argument_is_refused(name):
    body, outer = IN_PLACE[name]
    model = Net(body).double()
    segment_(model, [outer, *([WHOLE] if outer is not WHOLE else [])])
    with pytest.raises(PlanError, match="body writes to its arguments.*leave it out"):
        model(samples()).sum().backward()


def changed_after(model, x):
    hidden = model.stem(x)
    y = model.body(hidden)
    hidden += y
    return model.head(hidden)


@pytest.mark.parametrize("segments", [[WHOLE], [Segment("", None), WHOLE]])
def test_an_argument_that_is_changed_afterwards_raises(segments):
    class Later(Net):
        def forward(self, x):
            return changed_after(self, x)

    model = Later(nn.Sequential(nn.Tanh(), nn.Sigmoid())).double()
    segment_(model, segments)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(samples()).square().sum().backward()


CHANGES = {
    "in place": lambda one: one.mul_(2),
    "through data": lambda one: one.data.mul_(2),
    "data exchanged": lambda one: setattr(one, "data", 2 * one.data),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("segment", [WHOLE, PARTS])
def test_a_parameter_that_is_changed_before_backward_raises(name, segment):
    model = Net(Body()).double()
    segment_(model, [segment])
    y = model(samples())
    with torch.no_grad():
        for one in model.body.parameters():
            CHANGES[name](one)
    with pytest.raises(RuntimeError, match="has been changed in place since its forward; run"):
        y.square().sum().backward()


def test_modes_switched_before_backward():
    body = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Tanh())
    model, x = Net(body).double(), samples()

    def step(one):
        y = one.train()(x)
        one.eval()
        return backward(y)

    for segment in (WHOLE, PARTS):
        theirs, ours = both(model, segment, step)
        if segment is WHOLE:
            assert_equal((theirs, ours))
        assert any(one.abs().sum() for one in ours)


@pytest.mark.slow
def test_a_discarded_forward_keeps_nothing_offloaded():
    model, x = Net(nn.Sequential(nn.Tanh(), nn.Sigmoid(), nn.Tanh())).double(), samples()
    segment_(model, [Segment("body", 2, recompute=False, offload=True)])
    gc.collect()
    gc.disable()
    try:
        before = sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())
        for _ in range(5):
            model(x)
        after = sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())
    finally:
        gc.enable()
    assert after <= before


class Marked(torch.Tensor):
    """A subclass that hands a mark on, as MONAI's MetaTensor does."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        marks = [one.mark for one in args if isinstance(one, Marked) and hasattr(one, "mark")]
        if isinstance(result, Marked) and marks and len(result) == len(args[0]):
            result.mark = marks[0]
        return result


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad])
def test_subclasses_of_tensors_come_back_as_of_the_whole_batch(context):
    body = nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double()
    x = samples().as_subclass(Marked)
    x.mark = "five samples"
    segment_(body, [Segment("", 2)])
    with context():
        found = body(x)
    assert type(found) is Marked
    assert found.mark == "five samples"
    segment_(body, [])
    assert torch.allclose(*(one.as_subclass(torch.Tensor) for one in (found, body(x))))


@pytest.mark.slow
def test_batches_of_monai_can_be_taken_apart():
    monai("SegResNet", init_filters=8)  # skips without MONAI
    from monai.data import MetaTensor, decollate_batch, list_data_collate

    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh())
    items = [
        {"image": MetaTensor(torch.randn(1, 6, 6), affine=torch.eye(4) * n, meta={"name": f"{n}"})}
        for n in range(5)
    ]
    batch = list_data_collate(items)["image"]
    segment_(model, [Segment("", 2)])
    with torch.no_grad():
        assert [one.meta["name"] for one in decollate_batch(model(batch))] == [*"01234"]
