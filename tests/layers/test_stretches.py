"""Stretches of a sequence as segments, and segments inside others: torch's numbers, fewer bytes."""

from __future__ import annotations

import copy
import pickle
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import ucudnn
from ucudnn.backends import open_backend
from ucudnn.cli import app
from ucudnn.errors import PlanError, UcudnnWarning
from ucudnn.execution.micro_batching import named_parts, segment_, unsegment_
from ucudnn.plan import Plan
from ucudnn.segment import Segment, Stretch, stretch_of
from ucudnn.steps.independence import examined
from ucudnn.steps.profile import ModuleWatcher


@pytest.fixture(autouse=True)
def _settings(one_thread: None) -> None:
    torch.manual_seed(0)


def recomputed(*names: str) -> list[Segment]:
    return [Segment(name, None) for name in names]


class Net(nn.Module):
    """A sequence between two layers; its modules go by names that are no numbers, too."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.layers = nn.Sequential(*layers[:2])
        for place, one in enumerate(layers[2:]):
            self.layers.add_module(f"layer_{place}", one)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.layers(self.stem(x)))


def net() -> Net:
    return Net(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Sigmoid(), nn.Linear(6, 6)).double()


def samples(count: int = 5) -> Tensor:
    return torch.randn(count, 6, dtype=torch.float64, requires_grad=True)


def left(model: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """Results, gradients and buffers after a step, and the random numbers that come next."""
    torch.manual_seed(1)
    found = []
    model.zero_grad()
    for x in inputs:
        x.grad = None
        found.append(model(x))
    sum(one.square().sum() for one in found).backward()
    found += [one.grad for one in (*inputs, *model.parameters())]
    return [*found, *(one.clone() for one in model.buffers()), torch.rand(2)]


def assert_as_torch(
    model: nn.Module, segments: list[Segment], *inputs: Tensor, bound: float = 1e-12
) -> nn.Module:
    """Two steps without segments and two with them leave the same."""
    ours, theirs = copy.deepcopy(model), copy.deepcopy(model)
    segment_(ours, segments)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UcudnnWarning)
        for _ in range(2):
            for a, b in zip(left(ours, *inputs), left(theirs, *inputs), strict=True):
                assert (a - b).double().norm() <= bound * b.double().norm()
    return ours


WAYS = {
    **{f"{n} recomputed": Segment("", n) for n in (1, 2, 3)},
    "last kept": Segment("", 2, kept=1),
    "kept": Segment("", 2, recompute=False),
    "whole": Segment("", None),
    "selective": Segment("", None, recompute=False, selective=True),
    "offloaded": Segment("", 2, recompute=False, offload=True),
}
EACH_WAY = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
STRETCHES = [
    ["layers[0:2]"],
    ["layers[1:4]"],
    ["layers[0:5]"],
    ["layers[0:2]", "layers[2:3]", "layers[3:5]"],
    ["layers[1:3]", "layers[0:4]", "layers[1:4]", "layers.layer_0"],
    ["layers", "layers[1:5]", "layers[2:4]", "layers[4:5]", ""],
]


@pytest.mark.slow
@EACH_WAY
@pytest.mark.parametrize("names", STRETCHES)
def test_results_and_gradients_are_torchs(way: Segment, names: list[str]) -> None:
    model, segments = net(), [replace(way, module=name) for name in names]
    for count in (7, 1, 0):
        ours = assert_as_torch(model, segments, samples(count))
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                torch.testing.assert_close(ours(samples(count)[:0]), model(samples(0)))


def test_of_the_model_itself() -> None:
    model = nn.Sequential(*net().layers)
    assert_as_torch(model, [Segment("[0:3]", 2), *recomputed("[1:3]", "3")], samples())


def layer(draw: random.Random) -> nn.Module:
    """A layer that random numbers, statistics or changes in place make hard to repeat."""
    width = nn.Linear(6, 6)
    kinds = [
        width,
        nn.Sequential(width, nn.ReLU(inplace=True)),
        nn.Sequential(nn.BatchNorm1d(6), nn.ReLU(inplace=True), width),
        nn.Sequential(width, nn.BatchNorm1d(6, momentum=None)),
        nn.Sequential(nn.Dropout(0.4), width, nn.Dropout(0.2, inplace=True)),
        nn.Tanh(),
        nn.Sequential(width, nn.RReLU()),
        nn.Sequential(width, nn.LayerNorm(6), nn.GELU()),
    ]
    return draw.choice(kinds)


def nested(draw: random.Random, name: str, begin: int, end: int) -> Iterator[Segment]:
    """Random segments among the children of a sequence, each inside the one before, or beside."""
    if end - begin < 1 or draw.random() < 0.2:
        return
    first = draw.randint(begin, end - 1)
    last = draw.randint(first + 1, end)
    if (last - first, draw.random() < 0.5) != (end - begin, True):
        kind = draw.choice([{}, {}, {"selective": True}, {"recompute": False, "selective": True}])
        yield Segment(str(Stretch(name, first, last)), None, **kind)
        if last - first > 1:
            cut = draw.randint(first, last)
            for part in ((first, cut), (cut, last)):
                if part != (first, last):
                    yield from nested(draw, name, *part)
    yield from nested(draw, name, last, end)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_recomputed_ones_inside_recomputed_ones_at_any_depth(seed: int) -> None:
    draw = random.Random(seed)
    layers = [layer(draw) for _ in range(8)]
    inner = nn.Sequential(*layers[4:])
    model = Net(*layers[:4], inner, nn.Linear(6, 6)).double()
    segments = [*nested(draw, "layers", 0, 6), *nested(draw, "layers.layer_2", 0, 4)]
    segments += recomputed("layers.layer_2", "layers", "")[: draw.randint(0, 3)]
    segments = [*{one.module: one for one in segments}.values()]
    draw.shuffle(segments)
    assert_as_torch(model, segments, samples())
    assert_as_torch(model.eval(), segments, samples())


def test_autocast() -> None:
    names = ("layers[0:3]", "layers[0:2]", "layers.0", "layers[3:5]")
    ours, model, x = net().float(), net().float(), samples().detach().float().requires_grad_()
    ours.load_state_dict(model.state_dict())
    segment_(ours, recomputed(*names))
    found = []
    for one in (ours, model):
        with torch.autocast("cpu", torch.bfloat16):
            found.append(left(one, x))
    assert all(map(torch.equal, *found))


@pytest.mark.slow
def test_memory_of_recomputed_ones_inside_a_recomputed_one() -> None:
    # In units of one result. Of k stretches of s tanhs each there are k results, and in backward
    # those of one stretch and two gradients. Inside a recomputed segment they are kept no longer.
    unit, count = 1 << 20, 24
    model = nn.Sequential(nn.Tanh(), nn.Sequential(*[nn.Tanh() for _ in range(count)]))
    x = torch.randn(8, unit // 32, requires_grad=True)

    def once() -> list[float]:
        backend, hidden, results = open_backend("torch_cpu"), model[0](x), list[Tensor]()
        within = backend.span(lambda: results.append(model[1](hidden)))
        after = backend.span(
            lambda: torch.autograd.backward(results, [torch.ones_like(results[0])])
        )
        sizes = within.end_bytes, within.peak_bytes, within.end_bytes + after.peak_bytes
        return [size / unit for size in sizes]

    def measured(*names: str) -> list[float]:
        segment_(model, recomputed(*names))
        once()  # looks up what is kept for later calls
        return once()

    def stretches(size: int) -> list[str]:
        return [f"1[{place}:{place + size}]" for place in range(0, count, size)]

    near = {"abs": 0.1}
    assert measured("1") == pytest.approx([1, 2, count + 3], **near)
    assert measured("1[0:24]") == pytest.approx([1, 2, count + 3], **near)
    for size in (12, 6, 4, 2):
        parts = count // size
        most = parts + size + 2
        assert measured(*stretches(size)) == pytest.approx([parts, parts + 1, most], **near)
        kept, forward, backward = measured("1", *stretches(size))
        assert (kept, forward) == pytest.approx((1, 3), **near)
        assert most - 1.1 < backward < most + 0.1
    # The third level keeps less than the second.
    assert measured("1", *stretches(12), *stretches(3))[2] < measured("1", *stretches(12))[2] - 4
    assert measured("1", *stretches(12), *stretches(3))[2] < 10


def test_hooks_see_what_they_see_without() -> None:
    model, x, seen = net(), samples(), list[tuple[str, int]]()
    segment_(model, [Segment("layers[1:3]", 2), Segment("layers[3:5]", 2)])
    for name in ("layers", "layers.0"):
        module = model.get_submodule(name)
        module.register_forward_hook(lambda *a, name=name: seen.append((name, len(a[2]))))
    left(model, x)
    assert seen == [("layers.0", 5), ("layers", 5)]
    seen.clear()
    inner = model.layers[1].register_forward_hook(lambda *a: seen.append(("1", len(a[2]))))
    with pytest.warns(UcudnnWarning, match=r"layers\[1:3\] runs undivided.*hook"):
        left(model, x)
    assert seen == [("layers.0", 5), ("1", 5), ("layers", 5)]
    inner.remove()
    # A hook of all modules sees only those that the model has.
    called = list[nn.Module]()
    every = nn.modules.module.register_module_forward_hook(lambda one, *_: called.append(one))
    with every, pytest.warns(UcudnnWarning, match="undivided"):
        model(x)
    assert called == [model.stem, *model.layers, model.layers, model.head, model]


def test_the_model_stays_what_it_is() -> None:
    model = net()
    names, before, kept = [*model.state_dict()], repr(model), dict(vars(model.layers))
    modules = [name for name, _ in model.named_modules()]
    segment_(model, [Segment("layers[0:3]", 2), *recomputed("layers[1:3]", "layers[3:5]")])
    assert [*model.state_dict()] == names
    assert [name for name, _ in model.named_modules()] == modules
    assert (
        "(layers): Sequential(\n    [0:3] in micro-batches of 2, recomputed, [1:3] whole, "
        "recomputed, [3:5] whole, recomputed\n    (0): Linear" in repr(model)
    )
    extra = {name: one for name, one in named_parts(model) if name not in modules}
    assert set(extra) == {"layers[0:3]", "layers[1:3]", "layers[3:5]"}
    segment_(model, [Segment("layers", 3), *recomputed("layers[1:3]")])
    assert "in micro-batches of 3, recomputed, [1:3] whole, recomputed\n" in repr(model)
    model.eval()
    left(model, samples())
    assert not any(one.training for _, one in named_parts(model))
    unsegment_(model.train())
    assert repr(model) == before
    assert vars(model.layers) == kept


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
@pytest.mark.parametrize("is_run", [False, True])
def test_copies_run_by_themselves(copied: Callable[[Any], Any], is_run: bool) -> None:
    model, x = net(), samples()
    segment_(model, [Segment("layers[0:3]", 2), *recomputed("layers[1:3]")])
    if is_run:
        left(model, x)
    twin = copied(model)
    assert repr(twin) == repr(model)
    before = model(x)
    with torch.no_grad():
        twin.layers[0].weight.zero_()
    assert torch.equal(model(x), before)
    assert not torch.equal(twin(x), before)
    unsegment_(model)
    assert_as_torch(model, [], x)
    assert "recomputed" in repr(twin)


def test_a_child_that_is_replaced_runs_at_once() -> None:
    model, x = net(), samples()
    segment_(model, recomputed("layers[0:5]", "layers[1:3]", "layers[1:2]"))
    left(model, x)
    result = model(x)
    model.layers[1] = nn.ReLU()
    model.layers.layer_0 = nn.Linear(8, 6).double()
    # A graph of before is computed from what ran then.
    found = torch.autograd.grad(result.square().sum(), x)
    theirs = copy.deepcopy(model)
    unsegment_(theirs)
    assert_as_torch(theirs, [], x)
    for a, b in zip(left(model, x), left(theirs, x), strict=True):
        torch.testing.assert_close(a, b)
    torch.manual_seed(0)
    again = net()
    assert torch.allclose(found[0], torch.autograd.grad(again(x).square().sum(), x)[0])


class Same(nn.Sequential):
    """Runs its children as nn.Sequential does."""

    def __init__(self, *layers: nn.Module, note: str) -> None:
        super().__init__(*layers)
        self.note = note


class Other(nn.Sequential):
    """Runs its children in another way."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self[1](self[0](x))


def test_what_is_no_stretch_of_the_model_is_refused() -> None:
    layers = (nn.Linear(6, 6), nn.Tanh(), nn.Tanh())
    model = nn.Sequential(Same(*layers, note="it"), Other(*layers), nn.ModuleList(layers)).double()
    for name, sentence in [
        ("0[0:4]", r"the plan has '0\[0:4\]' as a segment, and 0 has 3 children; use the plan"),
        ("[2:4]", r"and the model has 3 children; use"),
        ("1[0:2]", "1 is no nn.Sequential that runs its children one after the other"),
        ("2[0:2]", "2 is no nn.Sequential that runs"),
        ("3[0:2]", "Sequential has no such module"),
        ("0[1:1]", "Sequential has no such module"),
        ("0[-2:1]", "Sequential has no such module"),
    ]:
        with pytest.raises(PlanError, match=sentence):
            segment_(model, recomputed(name))
        assert "recomputed" not in repr(model)
    for names in (["0[0:2]", "0[1:3]"], ["0[1:3]", "0", "0[0:2]"]):
        with pytest.raises(PlanError, match=r"share children, and neither is inside the other; le"):
            segment_(model, recomputed(*names))
    model[0].forward = lambda x: x
    with pytest.raises(PlanError, match="0 is no nn.Sequential"):
        segment_(model, recomputed("0[0:2]"))
    del model[0].forward
    assert_as_torch(model[:2], recomputed("0[0:2]", "[0:2]"), samples())
    # A module may have a name that looks like that of a stretch.
    odd = nn.Sequential()
    odd.add_module("a[0:1]", nn.Linear(6, 6))
    assert "whole, recomputed)" in repr(
        assert_as_torch(odd.double(), recomputed("a[0:1]"), samples())
    )


def test_names_and_stretches() -> None:
    for one in (Stretch("a.b", 0, 1), Stretch("", 10, 12), Stretch("a[0:2].b", 1, 3)):
        assert stretch_of(str(one)) == one
    assert not any(map(stretch_of, ["", "a", "[1:1]", "a[2:1]", "a[01:2]", "a[0:2].b", "a[:2]"]))
    outer, inner, other = Stretch("a", 1, 4), Stretch("a", 2, 4), Stretch("a", 3, 5)
    assert [outer.holds(one) for one in (inner, outer, other)] == [True, True, False]
    assert not inner.holds(outer)
    apart = (Stretch("a", 4, 5), Stretch("b", 1, 4), Stretch("a", 0, 1))
    assert [outer.shares(one) for one in (inner, other, *apart)] == [True, True, *[False] * 3]


# torch reads `.grad` of what is no leaf, of any module behind a break of the graph.
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.slow
def test_compiled_and_exported() -> None:
    model, x = net().float(), samples().detach().float().requires_grad_()
    names = ("layers[0:2]", "layers[2:5]", "layers[3:5]")
    ours = assert_as_torch(model, recomputed(*names), x, bound=1e-5)
    compiled = list[str]()

    def backend(graph: Any, _: object) -> Any:
        parts = [one for one in graph.modules() if isinstance(one, torch.fx.GraphModule)]
        compiled.extend(one.code for one in parts)
        return graph

    for segments in (recomputed(*names), recomputed("layers[2:4]")):
        segment_(ours, segments)
        torch._dynamo.reset()
        compiled.clear()
        for a, b in zip(left(torch.compile(ours, backend=backend), x), left(model, x), strict=True):
            torch.testing.assert_close(a, b)
        # What is in stretches, and what is between them.
        assert all(one in "".join(compiled) for one in ("tanh", "sigmoid"))
    segment_(ours, [Segment("layers[0:3]", 2), Segment("layers[3:5]", 2, recompute=False)])
    traced = torch.fx.symbolic_trace(ours)
    exported = torch.export.export(ours, (x.detach(),)).module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.trace(ours, x)
    for one in (traced, exported, scripted):
        torch.testing.assert_close(one(x.detach()), model(x))
    assert "split" not in traced.code


def test_a_plan_keeps_them(plan_by_hand: Any, tmp_path: Any) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 3), nn.Tanh())
    x = torch.randn(4, 3, 7, 7, requires_grad=True)
    segments = (Segment("[0:3]", 2), *recomputed("[1:3]"))
    plan: Plan = replace(plan_by_hand(model, x), segments=segments)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    shown = CliRunner().invoke(app, ["show", str(tmp_path / "plan.json"), "--segments"]).output
    assert "[0:3] in micro-batches of 2, recomputed." in shown
    assert "[1:3] whole, recomputed." in shown
    before, twin = repr(model), copy.deepcopy(model)
    conversion = ucudnn.convert_(twin, tmp_path / "plan.json")
    assert conversion.segments == ("[0:3]", "[1:3]")
    for a, b in zip(left(twin, x), left(model, x), strict=True):
        torch.testing.assert_close(a, b)
    assert repr(ucudnn.revert_(twin)) == before
    with pytest.raises(PlanError, match=r"has '\[0:3\]' as a segment, and the model has 2 child"):
        ucudnn.convert_(model[:2], plan)


def test_whether_a_stretch_may_run_in_micro_batches() -> None:
    layers = [nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Flatten(), nn.ReLU(inplace=True), nn.Tanh()]
    model, x = Net(*layers).double(), samples(6)
    names = ["layers[0:2]", "layers[2:5]", "layers[1:4]", "layers[2:3]", "layers[0:5]", "layers.0"]
    seen = list[int]()

    def step() -> None:
        model(x).square().sum().backward()
        seen.append(1)

    for mode in (True, False):
        before = vars(model.layers).keys()
        found = examined(model.train(mode), step, dict.fromkeys([*names, "layers"], 2))
        assert vars(model.layers).keys() == before
        reasons = {name: one.reason for name, one in found.items()}
        updates = "it updates its buffers" if mode else ""
        assert reasons == {
            "layers[0:2]": updates,
            "layers[0:5]": updates,
            "layers": updates,
            "layers[2:5]": "it writes to its arguments",
            "layers[1:4]": updates,
            "layers[2:3]": "its results are views of its arguments",
            "layers.0": "",
        }
        assert found["layers[0:5]"].repeats
        for name in ("layers[0:2]", "layers[0:5]"):
            segment = found[name].described(Segment(name, None if mode else 2))
            assert_as_torch(model, [segment], x)
    with pytest.raises(PlanError, match="layers has 5 children"):
        examined(model, step, {"layers[0:6]": 2})


def test_what_they_cost_can_be_watched() -> None:
    model, x = net(), samples()
    segment_(model, recomputed("layers[0:4]", "layers[1:3]"))
    marks = list[int]()
    watcher = ModuleWatcher(["layers[0:4]", "layers.layer_2"], lambda: marks.append(1))
    watcher.run(model, lambda: model(x).square().sum().backward())
    calls = watcher.root.children
    assert [one.name for one in calls] == ["layers[0:4]", "layers.layer_2"]
    assert all(len(one.backward) == 2 for one in calls)
    times = [time for one in calls for time in one.forward]
    assert all(a < b for a, b in pairwise(times))
    assert_as_torch(model, [], x)
