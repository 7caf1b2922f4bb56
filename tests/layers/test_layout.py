"""Plans that lay a model out in channels_last, and back: nothing but strides changes."""

from __future__ import annotations

import copy
import pickle
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import ucudnn
from ucudnn.config import Config
from ucudnn.execution.channels_last import lay_out_, restore_layout_, why_not_channels_last

pytestmark = pytest.mark.slow
LAST, LAST_3D = torch.channels_last, torch.channels_last_3d
INPUT = (6, 3, 9, 9)


class Small(nn.Module):
    """Convolutions, one of 1x1, one by depth, batch norm, a buffer of four axes, a linear layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, groups=8)
        self.last = nn.Conv2d(8, 4, 1)
        self.linear = nn.Linear(4, 5)
        self.register_buffer("scale", torch.rand(1, 8, 9, 9))

    def forward(self, x):
        x = self.norm(self.first(x)).relu() * self.scale
        return self.linear(self.last(self.depthwise(x)).mean((2, 3)))


def torchs_own():
    """The same model in channels_last by torch itself."""
    return Small().to(memory_format=LAST)


@pytest.fixture
def plan_last(plan_by_hand):
    """Plan of a model for channels_last, traced on torch's own conversion of it."""

    def made(model, x, last=LAST, **settings):
        model = copy.deepcopy(ucudnn.revert_(copy.deepcopy(model))).to(memory_format=last)
        return replace(plan_by_hand(model, x, **settings), memory_format="channels_last")

    return made


def contents(model):
    """Every parameter and buffer with its identity, values and strides."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [(name, id(one), one.detach().clone(), one.stride()) for name, one in tensors]


def require_same(now, before, strides=True):
    for (name, identity, values, found), (_, as_before, truth, expected) in zip(
        now, before, strict=True
    ):
        assert identity == as_before, name
        assert torch.equal(values, truth), name
        assert not strides or found == expected, name


def step(model, x):
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach()


def test_converting_changes_strides_alone_and_reverting_gives_them_back(plan_last):
    model = Small()
    before, keys = contents(model), list(model.state_dict())
    ucudnn.convert_(model, plan_last(model, torch.empty(INPUT)))
    assert list(model.state_dict()) == keys
    require_same(contents(model), before, strides=False)
    for ours, torchs in zip(contents(model), contents(torchs_own()), strict=True):
        assert ours[3] == torchs[3], ours[0]
    assert ucudnn.revert_(model) is model
    require_same(contents(model), before)
    assert vars(model).keys() == vars(Small()).keys()
    assert not model._forward_pre_hooks
    assert not model._forward_pre_hooks_with_kwargs


def test_a_converted_model_trains_as_torchs_own_in_channels_last(plan_last, computed):
    model, theirs = Small(), torchs_own()
    conversion = ucudnn.convert_(model, plan_last(model, torch.empty(INPUT)))
    assert conversion.swapped == ("first", "depthwise", "last")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (model, theirs)]
    for seed in range(4):
        x = torch.randn(INPUT, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(
            step(model, x), step(theirs, x.to(memory_format=LAST)), rtol=1e-5, atol=1e-6
        )
        for optimizer in optimizers:
            optimizer.step()
    assert len(computed) == 4 * 8  # every pass of every layer, but the gradient of the images
    for ours, torchs in zip(contents(model), contents(theirs), strict=True):
        torch.testing.assert_close(ours[2], torchs[2], rtol=1e-4, atol=1e-5)
        assert ours[3] == torchs[3], ours[0]


def test_a_plan_of_torchs_defaults_gives_torchs_channels_last_to_the_bit(plan_last):
    model, theirs = Small(), torchs_own()
    plan = plan_last(model, torch.empty(INPUT), algorithm="torch_default")
    kernels = tuple(replace(one, alone=(0,) * one.problem.batch) for one in plan.kernels)
    conversion = ucudnn.convert_(model, replace(plan, kernels=kernels))
    assert conversion.swapped == ()
    x = torch.randn(INPUT)
    assert torch.equal(step(model, x), step(theirs, x.to(memory_format=LAST)))
    for ours, torchs in zip(model.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(ours.grad, torchs.grad)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_optimisers_made_earlier_go_on(kind, how):
    settings = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    weights = []
    for changes in ({}, {2: lay_out_, 4: restore_layout_}):
        torch.manual_seed(0)
        model, truth = nn.Conv2d(4, 6, 3), torch.randn(6, 4, 3, 3)
        optimizer = kind(model.parameters(), lr=0.1, **settings, **how)
        for number in range(6):
            changes.get(number, lambda _: None)(model)
            (model.weight * truth).sin().sum().backward()  # elementwise: no rounding by layout
            optimizer.step()  # gradients add up, in the strides that they had
        weights.append(model.weight.detach().clone())
    assert torch.equal(*weights)


def test_tied_weights_stay_tied_and_odd_strides_come_back(plan_last):
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1))
    model[0].weight.data = model[0].weight.data.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    model[1].weight = model[0].weight
    before = contents(model)
    ucudnn.convert_(model, plan_last(model, torch.empty(2, 4, 9, 9)))
    assert model[1].weight is model[0].weight
    assert model[0].weight.is_contiguous(memory_format=LAST)
    ucudnn.revert_(model)
    require_same(contents(model), before)


class Pair(nn.Module):
    """Two convolutions of the same shape, whose weights can be tied in many ways."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(4, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        return self.second(self.first(x - getattr(self, "mean", 0)).relu())


def tied_by_data(model):
    model.second.weight.data = model.first.weight.data


def flat(model):
    weights = [model.first.weight, model.second.weight]
    model.flat = torch.cat([one.detach().flatten() for one in weights])
    for one, part in zip(weights, model.flat.split(weights[0].numel()), strict=True):
        one.data = part.view_as(one)


def part(model):
    model.second.weight.data = torch.randn(6, 4, 3, 3)[2:]


def in_shared_memory(model):
    model.share_memory()


def with_an_expanded_buffer(model):
    model.register_buffer("mean", torch.randn(1, 4, 1, 1).expand(1, 4, 9, 9))


def with_a_flat_gradient(model):
    sizes = [one.numel() for one in model.parameters()]
    model.gradients = torch.zeros(sum(sizes))
    for one, piece in zip(model.parameters(), model.gradients.split(sizes), strict=True):
        one.grad = piece.view_as(one)


SHARING = {
    tied_by_data: "another tensor uses the memory of first.weight",
    flat: "another tensor uses the memory of first.weight",
    part: "second.weight is expanded, or a part of something larger",
    in_shared_memory: "first.weight is in shared memory",
    with_an_expanded_buffer: "mean is expanded, or a part of something larger",
    with_a_flat_gradient: "another tensor uses the memory of the gradient of first.weight",
}


def memory(model):
    """Where each parameter, gradient and buffer lies, and whether other processes see it."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [one.grad for one in model.parameters() if one.grad is not None]
    return [(one.data_ptr(), one.stride(), one.is_shared()) for one in tensors]


@pytest.mark.parametrize("share", SHARING, ids=lambda share: share.__name__)
def test_tensors_that_share_memory_keep_it_and_the_plan_is_followed(share, plan_last, computed):
    x = torch.randn(4, 4, 9, 9)
    plan = plan_last(Pair(), x)
    model, theirs = Pair(), Pair()
    for one in (model, theirs):
        torch.manual_seed(1)
        share(one)
    before = memory(model)
    assert why_not_channels_last(model) == SHARING[share]
    for _ in range(2):
        with pytest.warns(UserWarning, match=f"keep their strides, because {SHARING[share]};"):
            assert ucudnn.convert_(model, plan).swapped == ("first", "second")
        assert memory(model) == before
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, theirs)]
    for _ in range(3):
        for one, optimizer in zip((model, theirs), optimizers, strict=True):
            optimizer.zero_grad(set_to_none=False)
            one(x).square().mean().backward()
            optimizer.step()
    assert len(computed) == 3 * 5  # every pass, but the gradient of the images
    for ours, torchs in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-5)
    ucudnn.revert_(model)
    assert memory(model)[: len(before)] == before[: len(memory(model))]
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_what_nobody_shares_is_laid_out():
    model = Pair()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 4, 9, 9)).sum().backward()
    optimizer.step()
    # A view of a tensor that nobody holds; and one that no layout moves in memory.
    model.register_buffer("mean", torch.randn(4, 9, 9)[None])
    model.shifts = torch.randn(4)
    model.register_buffer("shift", model.shifts.view(1, 4, 1, 1))
    assert why_not_channels_last(model) is None
    held = model.first.weight.detach()
    assert why_not_channels_last(model) == "another tensor uses the memory of first.weight"
    del held
    lay_out_(model)
    assert model.shift.data_ptr() == model.shifts.data_ptr()
    assert model.mean.is_contiguous(memory_format=LAST)


def test_memory_that_comes_into_use_after_converting_is_kept_by_reverting(plan_last):
    model, x = Pair(), torch.randn(4, 4, 9, 9)
    plan = plan_last(model, x)
    ucudnn.convert_(model, plan)
    model.share_memory()
    before, truth = memory(model), model(x)
    with pytest.warns(UserWarning, match="keep the strides of channels_last, because first.weight"):
        ucudnn.revert_(model)
    assert memory(model) == before
    assert type(model.first) is nn.Conv2d
    assert not model._forward_pre_hooks
    torch.testing.assert_close(model(x), truth)


def test_a_weight_of_another_shape_put_there_since_is_left_alone_by_reverting(plan_last):
    model = nn.Sequential(nn.Conv2d(4, 6, 3))
    ucudnn.convert_(model, plan_last(model, torch.empty(2, 4, 9, 9)))
    model[0].weight = nn.Parameter(torch.randn(6, 8, 3, 3))
    ucudnn.revert_(model)
    assert model[0].weight.is_contiguous()


def test_without_memory_for_another_layout_nothing_changes(monkeypatch):
    model, allocate = Small(), torch.empty_strided

    def require_unchanged_by(change):
        before, hooks, made = memory(model), len(model._forward_pre_hooks), []

        def full(*arguments, **settings):
            if made:
                raise RuntimeError("not enough memory")
            made.append(allocate(*arguments, **settings))
            return made[-1]

        with monkeypatch.context() as patched:
            patched.setattr(torch, "empty_strided", full)
            with pytest.raises(RuntimeError, match="not enough memory"):
                change(model)
        assert made
        assert (memory(model), len(model._forward_pre_hooks)) == (before, hooks)

    require_unchanged_by(lay_out_)
    lay_out_(model)
    require_unchanged_by(restore_layout_)


class Mixed(nn.Module):
    """A 3-D, a 2-D and a 1-D convolution behind each other."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.deep = nn.Conv3d(2, 4, 3, padding=1)
        self.flat = nn.Conv2d(4, 4, 3, padding=1)
        self.thin = nn.Conv1d(4, 3, 3)

    def forward(self, x):
        return self.thin(self.flat(self.deep(x).mean(2)).mean(2))


def test_each_rank_has_its_own_layout(plan_by_hand):
    model, x = Mixed(), torch.randn(2, 2, 5, 6, 7)
    truth = model(x)
    laid = Mixed()
    lay_out_(laid)
    plan = replace(plan_by_hand(laid, x), memory_format="channels_last")
    layouts = {one.problem.rank: one.problem.layout for one in plan.kernels}
    assert layouts == {1: "nchw", 2: "nhwc", 3: "nhwc"}
    ucudnn.convert_(model, plan)
    assert model.deep.weight.is_contiguous(memory_format=LAST_3D)
    assert model.flat.weight.is_contiguous(memory_format=LAST)
    assert model.thin.weight.is_contiguous()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # every convolution is planned
        torch.testing.assert_close(model(x), truth, rtol=1e-5, atol=1e-5)


def test_inputs_follow_and_only_those_of_the_models_own_rank():
    seen = []

    class Clip(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Conv2d(3, 4, 3)

        def forward(self, clip, *, image=None, mask=None, names=("a",)):
            seen.append((clip.stride(), image.stride(), mask.stride(), names))
            return self.net(clip.view(-1, *clip.shape[2:]) + image)

    model, clip = Clip(), torch.randn(2, 5, 3, 8, 8)
    image, mask = torch.randn(10, 3, 8, 8, requires_grad=True), torch.ones(3, 3)
    truth = model(clip, image=image, mask=mask)
    lay_out_(model)
    found = model(clip, image=image, mask=mask)
    torch.testing.assert_close(found, truth)
    found.sum().backward()
    assert image.grad.shape == image.shape
    last = image.to(memory_format=LAST).stride()
    assert seen[1] == (clip.stride(), last, mask.stride(), ("a",))


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "state"])
def test_copies_have_the_layout_and_can_be_reverted(way, plan_last, computed):
    model = Small()
    plan = plan_last(model, torch.empty(INPUT))
    before = contents(model)
    ucudnn.convert_(model, plan)
    if way == "state":
        other = Small()
        ucudnn.convert_(other, plan)
        other.load_state_dict(model.state_dict())
    else:
        other = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert [one[3] for one in contents(other)] == [one[3] for one in contents(model)]
    x = torch.randn(INPUT)
    assert torch.equal(other(x), model(x))
    assert len(computed) == 6
    ucudnn.revert_(other)
    assert [one[3] for one in contents(other)] == [one[3] for one in before]
    assert not other._forward_pre_hooks


def test_a_later_plan_for_the_models_own_layout_takes_it_back(plan_last, plan_by_hand):
    model = Small()
    before, x = contents(model), torch.empty(INPUT)
    last = plan_last(model, x)
    ucudnn.convert_(model, last)
    ucudnn.convert_(model, last)
    assert len(model._forward_pre_hooks) == 1
    ucudnn.convert_(model, plan_by_hand(Small(), x))
    require_same(contents(model), before)
    assert not model._forward_pre_hooks
    assert type(model.first) is ucudnn.nn.Conv2d


def test_a_parametrized_model_is_laid_out_and_back(plan_last):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), parametrizations.weight_norm(nn.Conv2d(4, 4, 3)))
    x, before = torch.randn(INPUT), contents(model)
    truth = model(x)
    with pytest.warns(UserWarning, match="could be swapped: 1;"):
        ucudnn.convert_(model, plan_last(model, x))
    direction = model[1].parametrizations.weight.original1
    assert direction.is_contiguous(memory_format=LAST)
    torch.testing.assert_close(model(x), truth)
    ucudnn.revert_(model)
    require_same(contents(model), before)


def test_parameters_may_stay_as_they_are(plan_last, computed):
    model, x = Small(), torch.randn(INPUT)
    before, truth = contents(model), step(Small(), x)
    ucudnn.convert_(model, plan_last(model, x), parameters=False)
    require_same(contents(model), before)
    torch.testing.assert_close(step(model, x), truth)
    assert len(computed) == 8
    ucudnn.revert_(model)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
def test_transforms_and_exports_of_a_converted_model_compute_what_it_computed(plan_last):
    model, x = Small().eval(), torch.randn(INPUT)
    truth = copy.deepcopy(model).double()(x.double())
    before = torch.export.export(model, (x,))
    ucudnn.convert_(model, plan_last(model, x))
    weights = dict(model.named_parameters())

    def single(image):
        return torch.func.functional_call(model, weights, (image[None],))[0]

    batch = {0: torch.export.Dim("batch", min=1, max=64)}
    programs = [
        torch.export.export(model, (x,), dynamic_shapes=(batch,)).module(),
        torch.export.export(model, (x,), strict=True).module(),
        torch.jit.trace(model, (x,)),
        torch.fx.symbolic_trace(model),
        before.module(),
        torch.vmap(single),
    ]
    for _ in range(2):
        for program in programs:
            torch.testing.assert_close(program(x).double(), truth, rtol=1e-4, atol=1e-5)
        ucudnn.revert_(model)  # none of them depends on the model's strides


def test_an_installed_plan_changes_no_model_and_says_once_what_it_should_be(plan_last, computed):
    model, x = Small(), torch.randn(INPUT)
    before, plan = contents(model), plan_last(model, x)
    own = copy.deepcopy(model)(x)
    with ucudnn.installed(plan):
        with pytest.warns(UserWarning, match="plan is for a model in channels_last"):
            assert torch.equal(copy.deepcopy(model)(x), own)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(model, x)
        assert not computed
    require_same(contents(model)[:8], before[:8])  # not the counters of batch norm
    with warnings.catch_warnings(), ucudnn.installed(plan):
        warnings.simplefilter("error")
        step(torchs_own(), x)
    assert len(computed) == 8


class Attention(nn.Module):
    """Attention over pixels with a residual, as in the UNets of diffusion models."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.mix = nn.Linear(8, 8)
        self.norm = nn.GroupNorm(2, 8)
        self.last = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x):
        x = self.first(x)
        pixels = x.flatten(2).transpose(1, 2)
        mixed = self.mix(pixels).softmax(1).transpose(-1, -2).reshape(x.shape)
        x = self.last(nn.functional.silu(self.norm((mixed + x) / 1.5)))
        x = nn.functional.silu((x + mixed) / 1.5)
        return self.up(nn.functional.interpolate(x, scale_factor=2.0))


@pytest.mark.parametrize("size", [8, 4, 2])
@pytest.mark.parametrize(("planned_for", "batch"), [(1, 1), (3, 3), (3, 2), (3, 1)])
def test_an_axis_of_one_element_is_no_other_layout(planned_for, batch, size, plan_by_hand):
    model = Attention()
    truth = copy.deepcopy(model).double()
    example = torch.empty(planned_for, 3, size, size)
    ucudnn.convert_(model, plan_by_hand(model, example, config=Config(unplanned="error")))
    x = torch.randn(batch, 3, size, size)
    model(x).square().sum().backward()
    truth(x.double()).square().sum().backward()
    for ours, other in zip(model.parameters(), truth.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.double(), other.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("batch", [3, 1])
@pytest.mark.usefixtures("one_thread")
def test_a_single_sample_that_loses_channels_last_on_the_way_follows_the_plan(
    batch, plan_last, computed
):
    model = nn.Sequential(nn.Conv3d(3, 4, 3, padding=1), nn.ConvTranspose3d(4, 2, 2, 2))
    x = torch.randn(3, 3, 5, 5, 5)
    plan = plan_last(model, x, LAST_3D, config=Config(unplanned="error"))
    truth = copy.deepcopy(model).double()
    # On one thread torch computes one volume by a kernel whose result is channels first.
    between = copy.deepcopy(model[0]).to(memory_format=LAST_3D)(x[:1].to(memory_format=LAST_3D))
    assert between.is_contiguous()
    ucudnn.convert_(model, plan)
    model(x[:batch]).square().sum().backward()
    assert len(computed) == 5
    truth(x[:batch].double()).square().sum().backward()
    for ours, other in zip(model.parameters(), truth.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.double(), other.grad, rtol=1e-3, atol=1e-4)
