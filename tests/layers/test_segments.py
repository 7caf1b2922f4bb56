"""Modules in micro-batches compute what they compute at once, in everything torch does to them."""

from __future__ import annotations

import copy
import pickle
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import ucudnn
from ucudnn.backends import open_backend
from ucudnn.errors import ConfigError, PlanError, UcudnnWarning
from ucudnn.execution.micro_batching import modes_of, segment_, unsegment_
from ucudnn.execution.nesting import take_apart
from ucudnn.segment import Segment

WAYS = {
    **{f"{n} recomputed": Segment("body", n) for n in (1, 2, 3)},
    "last kept": Segment("body", 2, kept=1),
    "kept": Segment("body", 2, recompute=False),
    "whole": Segment("body", None),
    "offloaded": Segment("body", 2, recompute=False, offload=True),
}
EACH_WAY = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


class Body(nn.Module):
    """Mixes what it is given; nothing across samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x, other=None, *, scale=1.0, bias=None):
        hidden = torch.tanh(self.first(x)) * scale
        hidden = hidden if other is None else hidden + other.square()
        hidden = hidden if bias is None else hidden * bias
        return self.second(hidden)


class Net(nn.Module):
    """A body between two layers."""

    def __init__(self, body=None, width=4) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Linear(6, 6), body or Body(), nn.Linear(width, 3)

    def forward(self, x):
        return self.head(self.body(self.stem(x)))


class Watched(nn.Module):
    """A layer that notes with how many samples it is called."""

    def __init__(self, layer, seen) -> None:
        super().__init__()
        self.layer, self.seen = layer, [seen]

    def forward(self, x):
        self.seen[0].append(len(x))
        return self.layer(x)


@pytest.fixture(autouse=True)
def _settings(one_thread):
    torch.manual_seed(0)


def gradients(model, *inputs, call=None, **named):
    """Results, and gradients of inputs and parameters, of a loss that weighs each value."""
    given = [
        one.detach().clone().requires_grad_(one.requires_grad)
        if isinstance(one, torch.Tensor)
        else one
        for one in inputs
    ]
    result = (model if call is None else call)(*given, **named)
    leaves = [one for one in take_apart(result)[0] if torch.is_tensor(one)]
    loss = sum(
        (one * torch.linspace(0.1, 1, one.numel()).view(one.shape)).square().sum() for one in leaves
    )
    wanted = [
        one for one in (*given, *model.parameters()) if torch.is_tensor(one) and one.requires_grad
    ]
    return [*leaves, *torch.autograd.grad(loss, wanted, allow_unused=True)]


def assert_equal(ours, theirs, bound=1e-12):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.shape == b.shape
            assert a.stride() == b.stride()
            assert (a - b).double().norm() <= bound * b.double().norm()


def divided(model, *segments):
    twin = copy.deepcopy(model)
    segment_(twin, segments)
    return twin


def numbers(*shape, needs=True):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=needs)


@EACH_WAY
@pytest.mark.parametrize("batch", [7, 2, 1, 0])
@pytest.mark.parametrize("needs", [True, False])
def test_results_and_gradients_are_those_of_the_batch(way, batch, needs):
    model, x = Net().double(), numbers(batch, 6, needs=needs)
    ours = divided(model, way)
    assert_equal(gradients(ours, x), gradients(model, x))
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert_equal([ours(x)], [model(x)])


@EACH_WAY
def test_arguments_pass_as_they_are(way):
    body, shared = Body().double(), numbers(6)
    alone = divided(body, replace(way, module="", shared=(2, 3)))
    x, other, scale = numbers(5, 6), numbers(5, 6), torch.tensor(0.3, dtype=torch.float64)
    table = numbers(5, 5).sum(1, keepdim=True)[:1]
    for inputs, named in [
        ((x,), {}),
        ((x, other), {"scale": 2.0}),
        ((x, None), {"scale": scale}),
        ((x, shared), {"scale": scale, "bias": shared}),
        ((x, other), {"scale": table, "bias": None}),
    ]:
        assert_equal(gradients(alone, *inputs, **named), gradients(body, *inputs, **named))
    # A table as long as the batch, of which only its place tells that it is none of it.
    wide = numbers(6, 6)
    square = divided(Product().double(), replace(way, module="", shared=(1,)))
    assert_equal(gradients(square, wide, wide), gradients(Product(), wide, wide))


class Same(nn.Module):
    def forward(self, a, b):
        return a * b if a is b else a * 0


@EACH_WAY
def test_arguments_that_are_one_tensor_stay_one(way):
    x = numbers(5, 6)
    (found,) = torch.autograd.grad(divided(Same(), replace(way, module=""))(x, x).sum(), x)
    assert_equal([found], [2 * x])


def test_batches_without_a_first_axis_to_cut_run_undivided():
    model = divided(nn.Linear(3, 2), Segment("", 1))
    ragged = [torch.randn(n, 3) for n in (2, 4)]
    found = model(torch.nested.nested_tensor(ragged, layout=torch.jagged)).unbind()
    assert all(torch.allclose(a, model(b)) for a, b in zip(found, ragged, strict=True))
    assert model(torch.randn(0, 3)).shape == (0, 2)


class Product(nn.Module):
    def forward(self, x, table):
        return x @ table


@dataclass
class Holder:
    value: torch.Tensor


def nests():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    return {
        "tuple": lambda x: (x, (x * 2, None)),
        "dict": lambda x: {"a": x, "n": 3, "kind": "text", "b": [x.sum(1)]},
        "dataclass": Holder,
        "dataclass beside": lambda x: (x, {"held": Holder((x, None))}),
        "output": lambda x: outputs.BaseModelOutput(last_hidden_state=x, hidden_states=(x, x * 3)),
    }


class Nested(Body):
    def __init__(self, nest) -> None:
        super().__init__()
        self.nest = nest

    def forward(self, x):
        return self.nest(super().forward(x))


@EACH_WAY
@pytest.mark.parametrize("name", ["tuple", "dict", "dataclass", "dataclass beside", "output"])
def test_nested_results_keep_their_structure(way, name):
    body, x = Nested(nests()[name]).double(), numbers(5, 6)
    ours = divided(body, replace(way, module=""))
    assert_equal(gradients(ours, x), gradients(body, x))
    with torch.no_grad():
        for found in (ours(x), ours(x[:2])):
            assert take_apart(found)[1] == take_apart(body(x))[1]
            assert type(found) is type(body(x))


@pytest.mark.parametrize(
    "nest",
    [
        lambda x: (x, x.mean()),
        lambda x: (x, len(x)),
        lambda x: [*x],
        lambda x: x if len(x) == 2 else torch.cat([x, x]),
    ],
    ids=["scalar", "number of samples", "list of samples", "more rows at last"],
)
@pytest.mark.parametrize("context", [nullcontext, torch.no_grad])
def test_results_that_cannot_be_put_together_are_refused(nest, context):
    model = divided(Nested(nest).double(), Segment("", 2))
    with context(), pytest.raises(PlanError, match="one for each sample.*leave it out"):
        model(numbers(5, 6))


class Turned(nn.Module):
    """Results whose axes lie in memory in another order."""

    def __init__(self, axes) -> None:
        super().__init__()
        self.axes = axes

    def forward(self, x):
        return (
            x.permute(self.axes).contiguous().permute(sorted(range(x.dim()), key=self.axes.index))
        )


@EACH_WAY
@pytest.mark.parametrize("dims", [2, 3])
def test_channels_last_stays(way, dims):
    convolution = (nn.Conv2d, nn.Conv3d)[dims - 2](3, 4, 3, padding=1).double()
    layout = (torch.channels_last, torch.channels_last_3d)[dims - 2]
    model = nn.Sequential(convolution).to(memory_format=layout)
    x = numbers(5, 3, *[4] * dims).to(memory_format=layout)
    ours = divided(model, replace(way, module="0"))
    # torch's own three-dimensional convolution on a CPU has results in the default layout.
    assert ours(x).is_contiguous(memory_format=layout) == (dims == 2)
    assert_equal(gradients(ours, x.detach()), gradients(model, x.detach()))
    with torch.no_grad():
        assert_equal([ours(x)], [model(x)])


@pytest.mark.parametrize("axes", [(0, 2, 1), (1, 0, 2), (2, 1, 0)])
def test_any_layout_of_results_stays(axes):
    model, x = Turned(list(axes)), numbers(5, 3, 4)
    ours = divided(model, Segment("", 2))
    for context in (nullcontext(), torch.no_grad()):
        with context:
            assert ours(x).stride() == model(x).stride()
            assert torch.equal(ours(x), x)


@EACH_WAY
def test_parts_of_backward(way):
    model, x = Net().double(), numbers(5, 6)
    ours = divided(model, way)
    for one in (model, ours):
        one.body.first.weight.requires_grad_(False)
    assert_equal(gradients(ours, x), gradients(model, x))
    # Gradients of gradients, of some inputs, twice from one graph, and added up.
    found = []
    for one in (model, ours):
        loss = one(x).square().sum()
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        first.square().sum().backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        one(x[:3]).sum().backward()
        found.append([first, x.grad, *(p.grad for p in one.parameters() if p.requires_grad)])
        x.grad = None
    assert_equal(found[1], found[0])


@EACH_WAY
def test_autocast_with_a_scaler(way):
    model, x = Net(), torch.randn(6, 6)
    found = []
    for one in (divided(model, way), Loop(model, way.micro_batch)):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = torch.optim.SGD(one.parameters(), 0.1)
        with torch.autocast("cpu", torch.bfloat16):
            result = one(x)
            assert result.dtype is torch.bfloat16
        scaler.scale(result.float().square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append([result.float(), *one.parameters()])
    assert_equal(*found, bound=1e-2)
    assert not torch.equal(found[0][1], model.stem.weight)


class Loop(nn.Module):
    """The same micro-batches by a loop that keeps everything: the truth for random numbers."""

    def __init__(self, model, size) -> None:
        super().__init__()
        self.model, self.size = copy.deepcopy(model), size

    def forward(self, x):
        parts = self.model.stem(x).split(self.size or len(x))
        return self.model.head(torch.cat([self.model.body(part) for part in parts]))


@EACH_WAY
def test_dropout_drops_the_same_in_recomputation(way):
    model = Net(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.3)), 6)
    x, found = numbers(6, 6), []
    for one in (divided(model.double(), way), Loop(model.double(), way.micro_batch)):
        torch.manual_seed(1)
        found.append([*gradients(one, x), torch.rand(2)])
    assert_equal(*found)


@pytest.mark.parametrize("outer", [Segment("", 2), Segment("", 4, recompute=False)])
@pytest.mark.parametrize("inner", [Segment("body", None), Segment("body", 1)])
def test_one_inside_another(outer, inner):
    body = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Tanh(), nn.Linear(6, 6))
    model, x = Net(body, 6).double(), numbers(5, 6)
    for mode in (False, True):
        found = []
        # Micro-batches draw the numbers for dropout in turn, whatever is recomputed in them.
        whole = inner.micro_batch is None
        for ways in ([outer, inner], [outer] if whole else [Segment("body", 1)]):
            torch.manual_seed(1)
            found.append(gradients(divided(model.train(mode), *ways), x))
        assert_equal(*found)


def changing():
    return {
        "BatchNorm": nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()),
        "spectral norm": parametrizations.spectral_norm(nn.Linear(6, 6)),
        "spectral norm by a hook": nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 6))),
        "a buffer that is replaced": Average(),
    }


class Average(nn.Module):
    """Divides by a moving average of its inputs, in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(6))
        self.register_buffer("nothing", None)

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().square().mean(0)
        return x.tanh() / self.mean


@pytest.mark.parametrize("name", changing())
@pytest.mark.parametrize("mode", [True, False])
def test_buffers_are_updated_once(name, mode):
    model, x = Net(changing()[name], 6).double().train(mode), numbers(6, 6)
    ours = divided(model, Segment("body", None))
    for _ in range(2):
        assert_equal(gradients(ours, x), gradients(model, x))
        assert_equal([*ours.buffers()], [*model.buffers()])
    # The graph of an earlier step is computed from after a later one, and twice.
    found = []
    for one in (ours, model):
        losses = [one(x * n).square().sum() for n in (1, 2)]
        for loss in (*losses, losses[0]):
            loss.backward(retain_graph=True)
        found.append([x.grad, *(p.grad for p in one.parameters()), *one.buffers()])
        x.grad = None
    assert_equal(*found)


def test_hooks_run_once_for_the_batch():
    model, x, seen = divided(Net().double(), Segment("body", 2)), numbers(5, 6), []
    body = model.body
    body.register_forward_pre_hook(lambda _, args: seen.append(("pre", len(args[0]))))
    body.register_forward_hook(lambda *a: seen.append(("after", len(a[2]))) or a[2] * 2)
    body.register_full_backward_hook(lambda *a: seen.append(("backward", len(a[2][0]))))
    found = gradients(model, x)
    assert seen == [("pre", 5), ("after", 5), ("backward", 5)]
    unsegment_(model)
    assert_equal(found, gradients(model, x))


def test_the_module_stays_what_it_is():
    model = Net()
    names, before, kind = [*model.state_dict()], repr(model), type(model.body)
    segment_(model, [Segment("body", 2)])
    assert [*model.state_dict()] == names
    assert type(model.body) is kind
    assert "body): Body(\n    in micro-batches of 2, recomputed\n" in repr(model)
    segment_(model, [Segment("body.first", 3, recompute=False)])
    assert (
        "first): Linear(in_features=6, out_features=6, bias=True, in micro-batches of 3)"
        in repr(model)
    )
    assert "of 2" not in repr(model)
    assert not model.eval().body.training
    unsegment_(model.train())
    assert repr(model) == before
    assert vars(model.body).keys() == vars(Body()).keys()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_run_by_themselves(copied):
    model, x = divided(Net().double(), Segment("body", 2)), numbers(5, 6)
    twin = copied(model)
    assert_equal(gradients(twin, x), gradients(model, x))
    with torch.no_grad():
        before = model(x)
        twin.body.first.weight.zero_()
        assert torch.equal(model(x), before)
        assert not torch.equal(twin(x), before)
    assert repr(twin) == repr(model)


def test_parameters_may_be_shared_between_segments():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()
    model[2].weight = model[0].weight
    x = numbers(5, 6)
    ours = divided(model, Segment("0", 2), Segment("2", 3))
    assert ours[0].weight is ours[2].weight
    assert_equal(gradients(ours, x), gradients(model, x))


def test_in_another_mode_than_planned_it_runs_undivided():
    seen = []
    body = nn.Sequential(Watched(nn.BatchNorm1d(6), seen), nn.Dropout(0.0))
    model = Net(body, 6).double().eval()
    x, ours = numbers(6, 6), divided(model, Segment("body", 2, training=((), ("1",))))
    seen = ours.body[0].seen[0]
    with torch.no_grad():
        assert_equal([ours(x)], [model(x)])
    assert seen == [2, 2, 2]
    # As a whole, or the one module that matters, without its parent.
    for modes in (lambda one: one.train(), lambda one: one.eval().body[0].layer.train()):
        modes(ours), modes(model)
        seen.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for _ in range(2):
                assert_equal(gradients(ours, x), gradients(model, x))
        assert seen == [6, 6]
        assert [one.category for one in caught] == [UcudnnWarning]
        assert "was in evaluation mode when the plan was made" in str(caught[0].message)
        assert_equal([*ours.buffers()][:2], [*model.buffers()][:2])
    # As many modules train as in a planned mode, but others.
    for one in (ours, model):
        one.eval().body[0].train()
    with pytest.warns(UcudnnWarning, match="'0.* was in evaluation mode"):
        assert_equal(gradients(ours, x), gradients(model, x))
    for one in (ours, model):
        one.eval().body[1].train()
    seen.clear()
    with torch.no_grad():
        assert_equal([ours(x)], [model(x)])
    assert seen == [2, 2, 2]


# torch reads `.grad` of what is no leaf, of any module behind a break of the graph.
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.slow
@EACH_WAY
def test_compiled_from_outside(way):
    compiled, ran = [], []

    def backend(graph, _):
        compiled.append(graph)
        graphs = [one.graph for one in graph.modules() if isinstance(one, torch.fx.GraphModule)]
        if not any(node.target is torch.tanh for each in graphs for node in each.nodes):
            return graph
        return lambda *inputs: ran.append(len(compiled)) or graph(*inputs)

    torch._dynamo.reset()
    model, x = Net().double(), numbers(5, 6)
    ours, size = divided(model, way), way.micro_batch or 5
    code = torch.compile(ours, backend=backend)
    for _ in range(2):
        ran.clear()
        assert_equal(gradients(ours, x, call=code), gradients(model, x))
        # Each micro-batch runs by compiled code, in recomputation too. Of a module that is
        # recomputed as a whole, the compiler does that.
        runs = 1 if not way.is_cut else -(-5 // size) * (1 + way.recompute) - way.kept
        assert len(ran) == runs
    ran.clear()
    with torch.no_grad():
        assert_equal([code(x)], [model(x)])
    assert len(ran) == -(-5 // size)
    # What is before and after the segment, and inside it for the micro-batch and for the rest.
    assert len(compiled) <= 2 * (2 + 1 + (5 % size > 0))
    if not way.is_cut:
        assert len(compiled) == 2
        torch.compile(ours, backend="eager", fullgraph=True)(x)
        return
    with pytest.raises(RuntimeError, match="compile without fullgraph, or ucudnn.revert_"):
        torch.compile(ours, backend="eager", fullgraph=True)(x)


@pytest.mark.slow
def test_programs_made_of_the_model_are_those_of_the_modules():
    model, x = Net(), torch.randn(4, 6)
    ours = divided(model, Segment("body", 2))
    batch = torch.export.Dim("batch", min=1, max=64)
    for one in (ours, model):
        exported = torch.export.export(one, (x,), dynamic_shapes=({0: batch},))
        assert "split" not in str(exported.graph)
        assert torch.allclose(exported.module()(x[:3]), model(x[:3]))
        traced = torch.fx.symbolic_trace(one)
        assert "checkpoint" not in traced.code
        assert torch.allclose(traced(x[:3]), model(x[:3]))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            assert torch.allclose(torch.jit.trace(one, x)(x[:3]), model(x[:3]))


def test_functions_of_parameters():
    model, x = Net().double(), numbers(5, 6, needs=False)
    ours = divided(model, Segment("body", 2))
    other = {name: one.detach() * 2 for name, one in model.named_parameters()}
    assert torch.allclose(functional_call(ours, other, x), functional_call(model, other, x))

    def loss(of, values, sample):
        return functional_call(of, values, sample[None]).square().sum()

    found, expected = (
        vmap(grad(partial(loss, one)), (None, 0))(other, x).values() for one in (ours, model)
    )
    assert_equal([*found], [*expected])


@pytest.mark.parametrize("is_first", [True, False])
def test_forward_of_another_library(is_first):
    hooks = pytest.importorskip("accelerate.hooks")

    class Doubled(hooks.ModelHook):
        def post_forward(self, module, output):  # noqa: ARG002 - Accelerate's names
            return output * 2

    model, x = Net().double(), numbers(5, 6)
    expected, sizes = model(x), []
    model.body.first = Watched(model.body.first, sizes)
    for step in (is_first, not is_first):
        hooks.add_hook_to_module(model.body, Doubled()) if step else segment_(
            model, [Segment("body", 2)]
        )
    doubled = model.head(2 * Body.forward(model.body, model.stem(x)))
    sizes.clear()
    assert_equal([model(x)], [doubled])
    assert sizes == [2, 2, 1]
    unsegment_(model)
    sizes.clear()
    assert_equal([model(x)], [doubled])
    assert sizes == [5]
    assert "micro-batches" not in repr(model)
    segment_(model, [Segment("body", 3)])
    sizes.clear()
    assert_equal([model(x)], [doubled])
    assert sizes == [3, 2]
    unsegment_(model)
    hooks.remove_hook_from_module(model.body)
    assert_equal([model(x)], [expected])


def test_a_hook_that_goes_away_takes_no_segment_with_it_unsaid():
    hooks = pytest.importorskip("accelerate.hooks")

    model, x, sizes = Net().double(), numbers(5, 6), []
    model.body.first = Watched(model.body.first, sizes)
    segment_(model, [Segment("body", 2)])
    hooks.add_hook_to_module(model.body, hooks.ModelHook())
    hooks.remove_hook_from_module(model.body)
    model(x)
    assert sizes == [2, 2, 1]
    assert "micro-batches of 2" in repr(model)


def test_checkpoints_of_the_user_hold_segments():
    model, x = Net().double(), numbers(5, 6)
    ours = divided(model, Segment("body", 2))
    found = gradients(ours, x, call=lambda given: checkpoint(ours, given, use_reentrant=False))
    assert_equal(found, gradients(model, x))


def memory_of_the_second(model, x):
    """Bytes that the second module keeps, and its peaks in forward and in backward."""
    backend, hidden, results = open_backend("torch_cpu"), model[0](x), []
    within = backend.span(lambda: results.append(model[1](hidden)))
    after = backend.span(lambda: torch.autograd.backward(results, [torch.ones_like(results[0])]))
    return within.end_bytes, within.peak_bytes, within.end_bytes + after.peak_bytes


def test_memory_of_a_segment_is_what_is_counted_by_hand():
    # A chain of tanh, each of which keeps its result, the last that of the chain; its input is the
    # result of another before it. In units of one result of a batch of 8.
    unit, chain = 1 << 20, nn.Sequential(*[nn.Tanh() for _ in range(4)])
    model = nn.Sequential(nn.Tanh(), chain)
    x = torch.randn(8, unit // 32, requires_grad=True)
    for way, kept, forward, backward in [
        # Backward has all that is kept, and three gradients: of the result, and of the result and
        # the argument of the tanh before.
        (None, 4, 4, 7),
        # The result, all of them again, and two gradients, or one result less and three.
        (Segment("1", None), 1, 2, 7),
        # Forward has all results twice when they are joined; backward the result, its gradient,
        # and the gradients of the argument, as parts and joined.
        (Segment("1", 1), 1, 2, 4),
        # The last micro-batch keeps all, and is gone when backward needs most.
        (Segment("1", 1, kept=1), 1.5, 2.375, 4),
        (Segment("1", 1, kept=8), 5, 5, 6.125),
        # The results of micro-batches stay beside the one; of a micro-batch there is a gradient.
        (Segment("1", 2, recompute=False), 5, 5, 6.25),
    ]:
        segment_(model, [way] if way else [])
        memory_of_the_second(model, x)  # looks up what is kept for later calls
        found = [size / unit for size in memory_of_the_second(model, x)]
        # Of each micro-batch the state of the random numbers is kept, 5 KiB.
        assert found == pytest.approx([kept, forward, backward], abs=0.05), way


def test_memory_of_an_inference_is_what_is_counted_by_hand():
    # Units and chain as above. A tanh has its argument and its result, and the whole result, into
    # which micro-batches are copied, is there from the first one on.
    unit, chain = 1 << 20, nn.Sequential(*[nn.Tanh() for _ in range(4)])
    x = torch.randn(8, unit // 32)
    for size, peak in [(8, 2), (4, 2), (2, 1.5), (1, 1.25)]:
        segment_(chain, [Segment("", size, recompute=False)])
        with torch.no_grad():
            span = open_backend("torch_cpu").span(lambda: chain(x))
        assert span.peak_bytes / unit == pytest.approx(peak, abs=0.01)


def network():
    """A network of convolutions with two parts that may be segments."""
    block = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 3, 3))
    return nn.Sequential(block, nn.Sequential(nn.Conv2d(3, 2, 1), nn.Flatten())).double()


@pytest.fixture
def plan(plan_by_hand):
    """Of `network`, with both parts as segments."""
    made = plan_by_hand(network(), numbers(4, 3, 7, 7))
    return replace(made, segments=(Segment("0", 2), Segment("1", None)), micro_batch=3)


def test_convert_and_revert(plan):
    model, x = network(), numbers(4, 3, 7, 7)
    twin, before = copy.deepcopy(model), repr(model)
    conversion = ucudnn.convert_(twin, plan)
    assert conversion.segments == ("0", "1")
    assert "2 modules run in micro-batches" in str(conversion)
    for inputs in (x, x[:3], x[:1]):
        assert_equal(gradients(twin, inputs.detach()), gradients(model, inputs.detach()))
    # Another plan takes the place of this one; a plan without segments ends them.
    ucudnn.convert_(twin, replace(plan, segments=(Segment("", 1),)))
    assert repr(twin).count("micro-batches") == 1
    assert_equal(gradients(twin, x), gradients(model, x))
    ucudnn.convert_(twin, replace(plan, segments=()))
    assert "micro-batches" not in repr(twin)
    ucudnn.convert_(twin, plan)
    assert repr(ucudnn.revert_(twin)) == before
    assert_equal(gradients(twin, x), gradients(model, x), bound=0)


def test_converting_changes_no_mode(plan):
    class Flagged(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(*network())
            self.is_on = True

    model, x = Flagged().double(), numbers(4, 3, 7, 7)
    segments = tuple(
        Segment(name, 2, training=(modes_of(model.get_submodule(name)),)) for name in ("0", "")
    )
    assert "is_on" in segments[1].training[0]
    conversion = ucudnn.convert_(copy.deepcopy(model), replace(plan, segments=segments))
    assert conversion.swapped
    # No warning, which would be an error here, says that a segment runs undivided.
    assert_equal(gradients(conversion.model, x), gradients(model, x))
    conversion.model.is_on = False
    with pytest.warns(UcudnnWarning, match="'is_on' was True when the plan was made, and is False"):
        conversion.model(x)


def test_segments_of_a_model_without_planned_convolutions(plan):
    model, x = Net().double(), numbers(5, 6)
    twin = copy.deepcopy(model)
    ucudnn.convert_(twin, replace(plan, kernels=(), segments=(Segment("body", 2),)))
    assert "in micro-batches of 2" in repr(twin)
    assert_equal(gradients(twin, x), gradients(model, x))


def test_a_plan_of_another_model_changes_nothing(plan):
    model = network()
    ucudnn.convert_(model, plan)
    before = repr(model)
    lacking = replace(plan, segments=(Segment("0", 1), Segment("decoder.3", 1)))
    with pytest.raises(PlanError, match="'decoder.3'.*no such module; use the plan of this model"):
        ucudnn.convert_(model, lacking)
    assert repr(model) == before


def test_a_file_keeps_segments(plan, tmp_path):
    described = Segment(
        "1", 1, recompute=False, offload=True, shared=(1, 4), training=(("", "0"), ())
    )
    plan = replace(plan, segments=(Segment("0", 2, kept=1), described))
    plan.save(tmp_path / "plan.json")
    again = ucudnn.Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert again.hash == plan.hash
    others = [
        replace(plan, segments=()),
        replace(plan, segments=(Segment("0", 2), described)),
        replace(plan, segments=(Segment("0", 2, kept=1), replace(described, shared=(1,)))),
        replace(plan, micro_batch=2),
        replace(plan, micro_batch=None),
    ]
    assert len({one.hash for one in (plan, *others)}) == 6


BAD = {
    "no samples": (lambda _: Segment("0", 0), "segment '0' must be an int of at least 1.*got 0"),
    "no int": (lambda _: Segment("0", True), "or None for all samples, got True"),
    "negative": (lambda _: Segment("0", 2, kept=-1), "'0' must be an int of at least 0, got -1"),
    "nothing to keep": (lambda _: Segment("0", None, kept=2), "'0' keeps 2 .*leave out kept"),
    "keeps less": (lambda _: Segment("0", 2, False, kept=1), "'0' keeps 1 .*leave out kept"),
    "both": (lambda _: Segment("0", 2, offload=True), "'0' recomputes.*choose one"),
    "empty loop": (lambda p: replace(p, micro_batch=0), "micro_batch must be an int.*got 0"),
    "loop of text": (lambda p: replace(p, micro_batch="2"), "micro_batch must be an int.*got '2'"),
    "twice": (
        lambda p: replace(p, segments=(Segment("0", 1),) * 2),
        "got \\['0'\\] more.*leave one",
    ),
}


@pytest.mark.parametrize(("change", "sentence"), BAD.values(), ids=BAD)
def test_bad_values_are_refused(plan, change, sentence):
    with pytest.raises(PlanError, match=sentence):
        change(plan)


class Named(NamedTuple):
    numbers: torch.Tensor
    names: list[str]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, None])
def test_a_loop_over_parts_adds_up_to_the_gradients_of_the_batch(plan, size):
    model, images = Net().double(), numbers(7, 6, needs=False)
    batch = {"images": images, "more": Named(torch.arange(7), [*"abcdefg"])}
    labels = torch.randint(3, (7,))
    plan = replace(plan, kernels=(), micro_batch=size)
    loss = nn.functional.cross_entropy
    loss(model(images), labels).backward()
    expected = [one.grad for one in model.parameters()]
    model.zero_grad()
    seen, weights = [], []
    for part in plan.micro_batches(batch, labels):
        assert [*part[0]] == ["images", "more"]
        assert len(part[0]["images"]) == len(part[1]) == len(part[0]["more"][0])
        (loss(model(part[0]["images"]), part[1]) * part.weight).backward()
        seen += part[0]["more"].names
        weights.append(part.weight)
    assert_equal([one.grad for one in model.parameters()], expected)
    assert seen == [*"abcdefg"]
    assert len(weights) == (1 if size is None else -(-7 // size))
    assert sum(weights) == pytest.approx(1, abs=1e-15)


@pytest.mark.parametrize(
    "batch",
    [(), (torch.ones(0, 3),), (torch.ones(3), torch.ones(4)), ({"a": torch.ones(2), "b": (1, 2)},)],
    ids=["nothing", "empty", "uneven", "no samples"],
)
def test_what_is_no_batch_is_refused(plan, batch):
    with pytest.raises(ConfigError, match="the same number of samples, at least 1"):
        next(plan.micro_batches(*batch))
