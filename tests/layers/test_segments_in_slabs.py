"""Modules in slabs of rows compute what they compute at once, forward and backward."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

import ucudnn
from ucudnn.backends import open_backend
from ucudnn.errors import PlanError, UcudnnWarning
from ucudnn.execution.micro_batching import segment_
from ucudnn.execution.nesting import take_apart
from ucudnn.segment import Segment
from ucudnn.steps.independence import examined
from ucudnn.steps.run import run_step

WAYS = {
    "recomputed": Segment("", rows=5),
    "one row": Segment("", rows=1),
    "last kept": Segment("", rows=5, kept=1),
    "two kept": Segment("", rows=3, kept=2),
    "kept": Segment("", rows=5, recompute=False),
    "selective": Segment("", rows=5, selective=True),
    "of one sample": Segment("", 1, rows=4),
    "of two samples": Segment("", 2, rows=7, kept=1),
}
EACH_WAY = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@pytest.fixture(autouse=True)
def _settings(one_thread):
    torch.manual_seed(0)


def numbers(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def gradients(model, *inputs):
    """Results, and gradients of inputs and parameters, of a loss that weighs each value."""
    given = [one.detach().clone().requires_grad_(one.requires_grad) for one in inputs]
    leaves = [one for one in take_apart(model(*given))[0] if torch.is_tensor(one)]
    loss = sum(
        (one * torch.linspace(0.1, 1, one.numel(), dtype=one.dtype).view(one.shape)).square().sum()
        for one in leaves
    )
    wanted = [one for one in (*given, *model.parameters()) if one.requires_grad]
    return [*leaves, *torch.autograd.grad(loss, wanted, allow_unused=True)]


def assert_equal(ours, theirs, bound=1e-12):
    assert len(ours) == len(theirs)
    # Of a bias before a normalisation, the gradient is zero but for rounding.
    most = max((one.double().norm() for one in theirs if one is not None), default=0)
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.shape == b.shape
            axes = [axis for axis, size in enumerate(a.shape) if size > 1]
            assert sorted(axes, key=a.stride) == sorted(axes, key=b.stride)
            assert (a - b).double().norm() <= bound * max(b.double().norm(), most)


def found(model, *inputs, axis=2, training=True):
    """What is found out of the rows of a module."""
    with torch.set_grad_enabled(training):
        one = examined(model, partial(model, *inputs), {"": 1}, axes={"": (axis,)})[""]
    return one.slabs[axis].locality


def in_slabs(model, way):
    twin = copy.deepcopy(model)
    segment_(twin, [way])
    return twin


class Shortcut(nn.Module):
    """Two ways from one tensor to another, which are added or joined."""

    def __init__(self, *ways, join=False):
        super().__init__()
        self.ways, self.join = nn.ModuleList(ways), join

    def forward(self, x):
        results = [way(x) for way in self.ways]
        rows = min(one.shape[2] for one in results)
        results = [one[:, :, :rows] for one in results]
        return torch.cat(results, 1) if self.join else sum(results)


class Merge(nn.Module):
    """A decoder's step: the coarse tensor is enlarged, and joined with one of a skip connection."""

    def __init__(self, dims=2):
        super().__init__()
        self.up = getattr(nn, f"ConvTranspose{dims}d")(4, 3, 2, 2)
        self.mix = getattr(nn, f"Conv{dims}d")(5, 4, 3, padding=1)

    def forward(self, x, skip, scale=None):
        mixed = self.mix(torch.cat([self.up(x), skip], 1))
        return mixed if scale is None else mixed * scale


class UNet(nn.Module):
    """Down twice and up twice."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 2, 3, padding=1)
        self.down = nn.Sequential(nn.Conv2d(2, 4, 3, 2, 1), nn.ReLU())
        self.deep = nn.Sequential(nn.MaxPool2d(3, 2, 1), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU())
        self.up, self.merge = nn.Upsample(scale_factor=2), Merge()

    def forward(self, x):
        stem = torch.relu(self.stem(x))
        down = self.down(stem)
        return self.merge(down + self.up(self.deep(down)), stem)


class PreActivated(nn.Module):
    """A residual block whose normalisations average over rows."""

    def __init__(self, norm):
        super().__init__()
        self.norms = nn.ModuleList([norm(), norm()])
        self.layers = nn.ModuleList([nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)])

    def forward(self, x):
        hidden = x
        for norm, layer in zip(self.norms, self.layers, strict=True):
            hidden = layer(functional.silu(norm(hidden)))
        return x + hidden


MODULES = {
    "two convolutions": (
        nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3)),
        3,
    ),
    "strides": (nn.Sequential(nn.Conv2d(3, 4, 5, 2, 2), nn.Tanh(), nn.Conv2d(4, 2, 3, 2, 1)), 3),
    "a stride of three": (nn.Conv2d(3, 4, 5, 3, 2), 3),
    "dilation and groups": (nn.Conv2d(4, 4, 3, padding=3, dilation=3, groups=2), 4),
    "transposed": (nn.ConvTranspose2d(3, 2, 4, 2, 1), 3),
    "transposed by three": (nn.ConvTranspose2d(3, 2, 5, 3, 1, output_padding=1), 3),
    "pools": (nn.Sequential(nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2, ceil_mode=True)), 3),
    "shuffled pixels": (nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.PixelShuffle(2)), 3),
    "upsampling": (
        nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(3, 2, 3)),
        3,
    ),
    "reflected": (nn.Conv2d(3, 2, 5, padding=2, padding_mode="reflect"), 3),
    "a frozen norm": (
        nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4).eval(), nn.ReLU()),
        3,
    ),
    "a U-Net": (UNet(), 3),
    "a norm": (nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.InstanceNorm2d(4, affine=True)), 3),
    "norms of strides": (
        nn.Sequential(
            *(nn.Conv2d(3, 4, 3, 2, 1), nn.InstanceNorm2d(4), nn.ReLU()),
            *(nn.Conv2d(4, 6, 3, 2, 1), nn.GroupNorm(3, 6), nn.SiLU()),
        ),
        3,
    ),
    "group norms": (PreActivated(partial(nn.GroupNorm, 2, 4)), 4),
    "instance norms": (PreActivated(partial(nn.InstanceNorm2d, 4, affine=True)), 4),
}


@EACH_WAY
@pytest.mark.parametrize("name", MODULES)
def test_slabs_compute_what_the_whole_does(way, name):
    module, channels = copy.deepcopy(MODULES[name][0]).double(), MODULES[name][1]
    x = numbers(3, channels, 32 if name == "a U-Net" else 33, 8)
    rows = found(module, x)
    assert rows.reason == ""
    ours = in_slabs(module, rows.described(replace(way, rows=rows.unit * way.rows)))
    assert_equal(gradients(ours, x), gradients(module, x))
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert_equal([ours(x)], [module(x)])


@EACH_WAY
def test_skip_connections_have_rows_of_their_own(way):
    merge = Merge().double()
    x, skip = numbers(3, 4, 16, 8), numbers(3, 2, 32, 16)
    for others in ([], [torch.tensor(0.5, dtype=torch.float64)], [numbers(3, 1, 1, 1)]):
        rows = found(merge, x, skip, *others)
        assert (rows.halo, rows.unit, rows.rates) == ((1, 1), 1, ((1, 2, *[0] * len(others)), (2,)))
        ours = in_slabs(merge, rows.described(way))
        assert_equal(gradients(ours, x, skip, *others), gradients(merge, x, skip, *others))


@EACH_WAY
@pytest.mark.parametrize("dims", [1, 3])
def test_sequences_and_volumes(way, dims):
    layer = getattr(nn, f"Conv{dims}d")
    body = nn.Sequential(layer(2, 4, 3, padding=1), nn.LeakyReLU(), layer(4, 3, 3, 2, 1)).double()
    x = numbers(2, 2, 33, *[5] * (dims - 1))
    rows = found(body, x)
    assert (rows.halo, rows.unit) == ((2, 2), 2)
    assert_equal(
        gradients(in_slabs(body, rows.described(replace(way, rows=6))), x), gradients(body, x)
    )


@EACH_WAY
def test_tokens_of_a_transformers_mlp(way):
    mlp = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 6)).double()
    x = numbers(3, 17, 6)
    rows = found(mlp, x, axis=1)
    assert (rows.reason, rows.halo, rows.unit) == ("", (0, 0), 1)
    ours = in_slabs(mlp, rows.described(replace(way, axis=1)))
    assert_equal(gradients(ours, x), gradients(mlp, x))


class Pooled(nn.Module):
    """Keeps its rows, but each of them knows all others."""

    def forward(self, x):
        return x + x.mean((2, 3), keepdim=True)


class Swallows(nn.Module):
    """All rows know the largest number, which NaN elsewhere does not change."""

    def forward(self, x):
        return x * x.nan_to_num(float("-inf")).amax((2, 3), keepdim=True)


class GradientOfAll(nn.Module):
    """Its results are by row, its gradients are not."""

    def forward(self, x):
        y = x * 1.0
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient - gradient.mean())
        return y


NOT_BY_ROWS = {
    "five norms": (nn.Sequential(*(nn.InstanceNorm2d(4) for _ in range(5))), "5 normalisations"),
    "a norm of rows and columns": (nn.LayerNorm((4, 32, 8)), "far away"),
    "batch norm in training": (nn.BatchNorm2d(4), "updates its buffers"),
    "a mean": (Pooled(), "far away"),
    "a maximum": (Swallows(), "slabs of its rows give other results"),
    "gradients": (GradientOfAll(), "slabs of its rows give other gradients"),
    "circular": (nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"), "far away"),
    "aligned corners": (
        nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
        "slabs of its rows give other results",
    ),
    "pooled to one": (nn.AdaptiveAvgPool2d(1), "far away"),
    "flat": (nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), "results have no such axis"),
    "dropout": (nn.Dropout(0.5), "random numbers"),
    "a wide kernel": (nn.Conv2d(4, 4, (63, 1), padding=(31, 0)), "far away"),
}


@pytest.mark.parametrize("name", NOT_BY_ROWS)
def test_what_is_not_by_rows_is_refused_with_the_reason(name):
    module, reason = NOT_BY_ROWS[name]
    module, x = copy.deepcopy(module).double(), numbers(2, 4, 32, 8)
    with torch.no_grad():
        x[:, :, 16, 4] = 9  # the largest number is in the middle
    assert reason in found(module, x).reason


def test_rows_in_evaluation_are_not_rows_in_training():
    body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)).double()
    x = numbers(2, 3, 16, 8)
    assert found(body, x).reason
    assert found(body.eval(), x, training=False).halo == (1, 1)


def convolution(pick, dims, channels, name="Conv", **fixed):
    """A convolution to four channels, whose settings are picked unless they are given."""
    stride = pick.choice([1, 1, 2, 3])
    dilation = pick.choice([1, 1, 2]) if name == "Conv" and stride == 1 else 1
    settings = {"kernel_size": pick.choice([1, 2, 3, 5]), "stride": stride, "dilation": dilation}
    settings |= fixed
    most = settings["dilation"] * (settings["kernel_size"] - 1)
    most = most // 2 if name == "ConvTranspose" else most
    settings.setdefault("padding", pick.randint(0, most))
    return getattr(nn, f"{name}{dims}d")(channels, 4, **settings)


def pool(pick, dims):
    """A pool of the largest number or of the mean."""
    size, ceil_mode = pick.choice([2, 3]), pick.random() < 0.5
    if pick.random() < 0.5:
        stride = pick.choice([1, 2])
        return getattr(nn, f"MaxPool{dims}d")(size, stride, size // 2, ceil_mode=ceil_mode)
    return getattr(nn, f"AvgPool{dims}d")(size, 2, pick.randint(0, size // 2), ceil_mode=ceil_mode)


def norm(pick, dims, width):
    """A norm with fixed statistics, or one over rows."""
    if pick.random() < 0.3:
        return pick.choice([nn.GroupNorm(1, width), getattr(nn, f"InstanceNorm{dims}d")(width)])
    fixed = getattr(nn, f"BatchNorm{dims}d")(width)
    nn.init.uniform_(fixed.running_mean), nn.init.uniform_(fixed.running_var, 0.5, 2)
    return fixed.eval()


def chain(seed):
    """A chain of layers, some with two branches, and the shape of its input."""
    pick = random.Random(seed)
    dims = pick.choice([1, 2, 2, 2, 3])
    upsampling = ["nearest", {1: "linear", 2: "bilinear", 3: "trilinear"}[dims]]
    layers, width, kinds = [], 3, ["conv", "conv", "pool", "up", "branch", "norm", "act"]
    for _ in range(pick.randint(1, 4)):
        kind = pick.choice(kinds)
        if kind == "conv":
            layers.append(convolution(pick, dims, width))
            width = 4
        elif kind == "up":
            kinds.remove("up")
            layers.append(nn.Upsample(scale_factor=2, mode=pick.choice(upsampling)))
            layers.append(convolution(pick, dims, width, "ConvTranspose"))
            width = 4
        elif kind == "branch":
            same = {"stride": pick.choice([1, 2]), "dilation": 1}
            wide = convolution(pick, dims, width, kernel_size=3, padding=1, **same)
            narrow = convolution(pick, dims, width, kernel_size=1, padding=0, **same)
            layers.append(Shortcut(wide, narrow, join=pick.random() < 0.5))
            width = 8 if layers[-1].join else 4
        else:
            others = {"pool": partial(pool, pick, dims), "norm": partial(norm, pick, dims, width)}
            layers.append(others[kind]() if kind in others else pick.choice([nn.ReLU(), nn.SiLU()]))
    shape = (pick.choice([1, 1, 2]), 3, pick.randint(40, 52), *[pick.randint(9, 12)] * (dims - 1))
    return nn.Sequential(*layers).double(), shape


class WrittenOut(nn.Module):
    """An instance norm by means, which torch sums in pairs; its own norm deviates up to 5e-10."""

    def forward(self, x):
        axes = [*range(2, x.dim())]
        x = x - x.mean(axes, keepdim=True)
        return x / (x.square().mean(axes, keepdim=True) + 1e-5).sqrt()


def every_size(seed):
    """A chain at every slab size against the whole; the reason if it is not by rows."""
    torch.manual_seed(seed)
    model, shape = chain(seed)
    x = numbers(*shape)
    try:
        undivided = gradients(model, x)
    except (RuntimeError, ValueError):
        return "torch refuses it"
    is_instance_norm = [type(one).__name__.startswith("InstanceNorm") for one in model]
    pairs = zip(is_instance_norm, model, strict=True)
    truth = gradients(nn.Sequential(*(WrittenOut() if is_one else one for is_one, one in pairs)), x)
    rows = found(model, x)
    if rows.reason:
        return rows.reason
    for size in range(1, shape[2] // rows.unit + 1):
        way = replace(Segment("", rows=size * rows.unit), kept=size % 3)
        ours = in_slabs(model, rows.described(way))
        is_whole = size * rows.unit == shape[2]
        assert_equal(gradients(ours, x), undivided if is_whole else truth, bound=1e-11)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "block", [0, *(pytest.param(n, marks=pytest.mark.nightly) for n in range(1, 25))]
)
def test_random_chains_at_every_slab_size(block):
    reasons = [every_size(seed) for seed in range(40 * block, 40 * block + 40)]
    assert sum(not one for one in reasons) >= 30


BAD = {
    "no rows": ({"rows": 0}, "rows of segment 'body' must be an int of at least 1.*got 0"),
    "no int": ({"rows": 2.0}, "or None for all rows at once, got 2.0"),
    "no halo": ({"rows": 2, "halo": 3}, "halo of .* must be a tuple of two ints.*got 3"),
    "below": ({"rows": 2, "halo": (0, -1)}, "of at least 0, the rows before and after a slab"),
    "samples": ({"rows": 2, "axis": 0}, "axis of .* must be an int of at least 1, got 0"),
    "keeps": ({"kept": 1}, "keeps 1 parts, and has none that are recomputed; leave out kept"),
}


@pytest.mark.parametrize(("fields", "sentence"), BAD.values(), ids=BAD)
def test_bad_values_are_refused(fields, sentence):
    with pytest.raises(PlanError, match=sentence):
        Segment("body", **fields)


def test_arguments_and_results_without_such_rows_are_refused():
    x = numbers(2, 3, 16, 8)
    pooled = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1)).double()
    other = ((1,), (1, 1))
    for model, way, sentence in [
        (pooled, Segment("", rows=4), "results of a segment in slabs must have rows.*leave it out"),
        (nn.Flatten(), Segment("", rows=4), "returns none with such rows"),
        (pooled, Segment("", rows=4, axis=5), "axis 5, and none of its arguments has it; tune"),
        (pooled, Segment("", rows=4, rates=((1, 1), (1,))), "others than they were when the plan"),
        (pooled, Segment("", rows=4, rates=other), "leave it out of the plan's segments"),
    ]:
        before = gradients(model, x)
        ours = in_slabs(model, way)
        with pytest.raises(PlanError, match=sentence):
            ours(x)
        assert_equal(gradients(model, x), before)
    layer = nn.Conv2d(3, 4, 3, padding=1).double()
    ours = in_slabs(layer, Segment("", rows=64, halo=(1, 1)))
    with pytest.warns(UcudnnWarning, match="16 along axis 2, fewer than rows=64 of its"):
        assert_equal(gradients(ours, x), gradients(layer, x))


def test_parameters_get_their_gradients_once():
    body = MODULES["two convolutions"][0]
    model = nn.Sequential(copy.deepcopy(body)).double()
    calls = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: calls.append(1))
    segment_(model, [Segment("0", rows=5, halo=(1, 3))])
    model(numbers(1, 3, 33, 8)).square().sum().backward()
    assert len(calls) == len([*model.parameters()])


def test_gradients_of_gradients_and_retained_graphs():
    body, x = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh()).double(), numbers(1, 3, 16, 6)
    ours = in_slabs(body, Segment("", rows=5, halo=(1, 1)))
    found = []
    for model in (body, ours):
        loss = model(x).square().sum()
        (first,) = torch.autograd.grad(loss, x, create_graph=True, retain_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x, retain_graph=True)
        (again,) = torch.autograd.grad(loss, x)
        found.append([first.detach(), second, again])
    assert_equal(found[1], found[0])


def test_channels_last_and_autocast():
    body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU())
    x = torch.randn(1, 3, 32, 16).contiguous(memory_format=torch.channels_last)
    body = body.to(memory_format=torch.channels_last)
    ours = in_slabs(body, Segment("", rows=8, halo=(1, 1), norms=(1,)))
    result = ours(x)
    assert result.is_contiguous(memory_format=torch.channels_last)
    assert_equal([result], [body(x)], bound=1e-5)
    layer = nn.Conv2d(3, 8, 3, padding=1)
    ours = in_slabs(layer, Segment("", rows=8, halo=(1, 1)))
    with torch.autocast("cpu", torch.bfloat16):
        both = ours(x), layer(x)
    assert both[0].dtype == both[1].dtype == torch.bfloat16
    assert_equal([both[0].float()], [both[1].float()], bound=1e-2)


def test_a_plan_computes_slabs_beside_a_normalisation(plan_by_hand, computed):
    norm, conv = nn.InstanceNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)
    model, x = nn.Sequential(norm, conv), torch.randn(1, 4, 20, 12, requires_grad=True)
    ours, slab = copy.deepcopy(model), torch.randn(1, 4, 11, 12, requires_grad=True)
    plan = plan_by_hand(nn.Sequential(conv), slab)
    plan = replace(plan, segments=(Segment("", rows=10, halo=(1, 1), norms=(1,)),))
    ucudnn.convert_(ours, plan)
    assert_equal(gradients(ours, x), gradients(model, x), bound=1e-5)
    assert [computed.count(op) for op in ("dgrad", "wgrad")] == [2, 2]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("norms", [(), (1,)])
def test_compiled_from_outside(norms):
    layers = [nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.InstanceNorm2d(4), nn.Tanh()]
    body = nn.Sequential(*layers[: 2 + len(norms)][:: 1 if norms else 2]).double()
    model, x = nn.Sequential(nn.Conv2d(3, 3, 1), body).double(), numbers(1, 3, 16, 6)
    ours = copy.deepcopy(model)
    segment_(ours, [Segment("1", rows=5, halo=(1, 1), norms=norms)])
    assert_equal(gradients(torch.compile(ours, backend="aot_eager"), x), gradients(model, x))


def test_memory_of_slabs_is_what_is_counted_by_hand():
    body = nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(4)))
    x = torch.randn(1, 8, 256, 64, requires_grad=True)
    whole, backend = x.numel() * 4, open_backend("torch_cpu")
    ours = in_slabs(body, Segment("", rows=16, halo=(4, 4)))
    run_step(ours, x)
    peak = backend.workspace_bytes(partial(run_step, ours, x), ())
    # The result, the loss's copy of it, its gradient and that of the argument; slabs of 24 rows.
    assert 3 * whole <= peak <= 4.2 * whole + 20 * whole * 24 / 256
    with torch.no_grad():
        peak = backend.workspace_bytes(partial(ours, x), ())
    assert whole <= peak <= whole + 8 * whole * 24 / 256
