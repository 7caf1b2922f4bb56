"""Planned layers against torch.nn: outputs and gradients, in all the ways a layer is called."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.utils.checkpoint
import torch.utils.flop_counter
from torch import nn

import ucudnn
from ucudnn.config import Config

LAYERS = {
    "1d": (nn.Conv1d(4, 6, 3, padding=1), (5, 4, 17)),
    "1d-same": (nn.Conv1d(4, 6, 4, padding="same"), (5, 4, 17)),
    "2d": (nn.Conv2d(4, 6, 3), (5, 4, 9, 8)),
    "2d-no-bias": (nn.Conv2d(4, 6, 3, bias=False), (5, 4, 9, 8)),
    "2d-strided-grouped": (nn.Conv2d(4, 6, (3, 2), (2, 1), (1, 0), groups=2), (5, 4, 9, 8)),
    "2d-dilated": (nn.Conv2d(4, 6, 3, padding=2, dilation=2), (5, 4, 9, 8)),
    "2d-same": (nn.Conv2d(4, 6, (3, 2), padding="same"), (5, 4, 9, 8)),
    "2d-valid": (nn.Conv2d(4, 6, 3, padding="valid"), (5, 4, 9, 8)),
    "2d-reflect": (nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), (5, 4, 9, 8)),
    "2d-circular": (nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), (5, 4, 9, 8)),
    "2d-replicate-no-padding": (nn.Conv2d(4, 6, 1, padding_mode="replicate"), (5, 4, 9, 8)),
    "3d": (nn.Conv3d(4, 6, 3, padding=1), (5, 4, 5, 6, 7)),
    "1d-transposed": (nn.ConvTranspose1d(4, 6, 4, 3, 1), (5, 4, 17)),
    "2d-transposed": (nn.ConvTranspose2d(4, 6, 3, 2, 1, output_padding=1), (5, 4, 9, 8)),
    "2d-transposed-grouped": (
        nn.ConvTranspose2d(4, 6, (3, 2), (2, 1), (1, 0), (1, 0), groups=2, bias=False),
        (5, 4, 9, 8),
    ),
    "2d-transposed-dilated": (nn.ConvTranspose2d(4, 6, 3, padding=2, dilation=2), (5, 4, 9, 8)),
    "3d-transposed": (nn.ConvTranspose3d(4, 6, 2, 2), (5, 4, 3, 4, 5)),
}
# torch warns of its own padded copy, for an even kernel
ignore_even_same = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


@pytest.fixture(params=LAYERS.values(), ids=LAYERS)
def pair(request, plan_by_hand):
    """A torch layer, the same layer following a plan of chunks of two, and an input."""
    layer, shape = request.param
    planned = copy.deepcopy(layer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = plan_by_hand(layer, torch.empty(shape, requires_grad=True))
    ucudnn.convert_(planned, plan)
    assert type(planned) is not type(layer)
    return layer, planned, torch.randn(shape)


def gradients(layer, x, dy=None):
    layer.zero_grad()
    x = x.detach().requires_grad_()
    y = layer(x)
    y.backward(torch.ones_like(y) if dy is None else dy)
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


def assert_close(ours, theirs):
    for mine, torchs in zip(ours, theirs, strict=True):
        assert mine.dtype == torchs.dtype
        assert mine.shape == torchs.shape
        torch.testing.assert_close(mine, torchs, rtol=1e-4, atol=1e-4)


@ignore_even_same
def test_outputs_and_gradients_of_every_batch_equal_torchs(pair):
    layer, planned, x = pair
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*has no plan")
        for batch in range(1, len(x) + 1):
            assert_close(gradients(planned, x[:batch]), gradients(layer, x[:batch]))


@ignore_even_same
@pytest.mark.parametrize("kind", ["expanded", "transposed", "sliced"])
def test_any_strides_of_input_and_gradient(pair, kind):
    layer, planned, x = pair
    y = layer(x)
    if kind == "expanded":
        x, dy = x[:1].expand_as(x), torch.ones(()).expand_as(y)
    elif kind == "transposed":
        x = x.transpose(-1, 1).contiguous().transpose(-1, 1)
        dy = torch.randn(y.transpose(-1, 1).shape).transpose(-1, 1)
    else:
        x = torch.stack([x, x], -1)[..., 0]
        dy = torch.randn(*y.shape, 2)[..., 1]
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".*has no plan"
        )  # channels-last is another problem
        assert_close(gradients(planned, x, dy), gradients(layer, x, dy))


def plain_pair(plan_by_hand, **settings):
    layer = nn.Conv2d(4, 6, 3)
    x = torch.randn(5, 4, 9, 8)
    planned = copy.deepcopy(layer)
    plan = plan_by_hand(layer, torch.empty(x.shape, requires_grad=True), config=Config(**settings))
    ucudnn.convert_(planned, plan)
    return layer, planned, x


def test_what_the_plan_does_not_compute_is_torchs(plan_by_hand):
    layer, planned, x = plain_pair(plan_by_hand)
    assert torch.equal(planned(x[:0]), layer(x[:0]))
    meta = planned.to("meta")(x.to("meta"))
    assert meta.device.type == "meta"


def test_an_input_without_a_batch_follows_the_plan_of_one_sample(plan_by_hand):
    layer, planned, x = plain_pair(plan_by_hand)
    assert_close(gradients(planned, x[0]), gradients(layer, x[0]))
    assert torch.equal(planned(x[0]), planned(x[:1])[0])


def test_double_backward_equals_torchs(plan_by_hand):
    results = []
    layer, planned, x = plain_pair(plan_by_hand)
    for module in (layer, planned):
        y = module(x).square().sum()
        (dw,) = torch.autograd.grad(y, module.weight, create_graph=True)
        results.append(torch.autograd.grad(dw.square().sum(), module.weight)[0])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-2)


def test_tracing_a_converted_model_finds_its_convolutions(plan_by_hand):
    layer, planned, x = plain_pair(plan_by_hand)
    assert ucudnn.trace(planned, x) == ucudnn.trace(layer, x)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_forward_mode_differentiation_runs_torchs_operator(plan_by_hand):
    results = []
    _, planned, x = plain_pair(plan_by_hand)
    for module in (ucudnn.revert_(copy.deepcopy(planned)), planned):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            results.append(torch.autograd.forward_ad.unpack_dual(module(dual)).tangent)
        results.append(torch.func.jvp(module, (x,), (torch.ones_like(x),))[1])
    assert all(torch.equal(results[0], result) for result in results[1:])


def test_transforms_and_batched_gradients_equal_torchs(plan_by_hand):
    _, planned, x = plain_pair(plan_by_hand)
    results = []
    for module in (ucudnn.revert_(copy.deepcopy(planned)), planned):
        parameters = dict(module.named_parameters())

        def loss(parameters, sample, module=module):
            return torch.func.functional_call(module, parameters, sample[None]).square().sum()

        per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
        y = module(x)
        many = torch.stack([torch.ones_like(y), torch.randn(y.shape, generator=seeded())])
        batched = torch.autograd.grad(y, module.weight, many, is_grads_batched=True)
        results.append([per_sample["weight"], *batched])
    assert_close(*results)


def seeded():
    return torch.Generator().manual_seed(0)


def test_who_looks_on_sees_torchs_operator(plan_by_hand):
    """A counter of operations counts a planned layer as torch's, and torch.jit.trace records it."""
    layer, planned, x = plain_pair(plan_by_hand)
    counts = []
    for module in (layer, planned):
        with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
            module(x).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = torch.jit.trace(planned, x)
    assert "aten::_convolution" in str(traced.graph)
    torch.testing.assert_close(traced(x), layer(x))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_recomputes_by_plan(plan_by_hand, reentrant):
    layer, planned, x = plain_pair(plan_by_hand)
    results = []
    for module in (layer, planned):

        def run(x, module=module):
            checkpoint = torch.utils.checkpoint.checkpoint
            return checkpoint(lambda x: module(x).relu(), x, use_reentrant=reentrant)

        run.zero_grad, run.parameters = module.zero_grad, module.parameters
        results.append(gradients(run, x))
    assert_close(*results)


def test_a_recomputation_ends_before_a_convolution_whose_result_nobody_needs(
    plan_by_hand, computed
):
    _, planned, x = plain_pair(plan_by_hand)
    for module, count in ((planned, 1), (nn.Sequential(planned, nn.ReLU()), 2)):
        checkpointed = torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)
        checkpointed.sum().backward()
        # the backward of ReLU reads the result of the convolution, so it is computed twice
        assert computed.count("fprop") == count
        computed.clear()


def test_a_convolution_computed_in_a_backward_can_be_differentiated_twice(plan_by_hand):
    class Reversed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, module):
            ctx.save_for_backward(x)
            ctx.module = module
            return module(x)

        @staticmethod
        def backward(ctx, dy):
            with torch.enable_grad():
                x = ctx.saved_tensors[0].detach().requires_grad_()
                y = ctx.module(x)
                (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
                found.append(torch.autograd.grad(dx.square().sum(), [*ctx.module.parameters()][:1]))
            return dx.detach(), None

    layer, planned, x = plain_pair(plan_by_hand)
    found = []
    for module in (layer, planned):
        Reversed.apply(x.clone().requires_grad_(), module).square().sum().backward()
    assert_close(*found)


def test_inference_mode_and_inference_tensors(plan_by_hand):
    layer, planned, x = plain_pair(plan_by_hand)
    with torch.inference_mode():
        y = planned(x * 1)
        assert y.is_inference()
        torch.testing.assert_close(y, layer(x), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(planned(y[:0, :4]), layer(y[:0, :4]))


@pytest.mark.parametrize("needed", [(0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 0, 1)])
def test_each_gradient_alone(plan_by_hand, needed):
    layer, planned, x = plain_pair(plan_by_hand)
    results = []
    for module in (layer, planned):
        mine = x.clone().requires_grad_(bool(needed[0]))
        module.weight.requires_grad_(bool(needed[1]))
        module.bias.requires_grad_(bool(needed[2]))
        module(mine).square().sum().backward()
        results.append([mine.grad, module.weight.grad, module.bias.grad])
    for ours, theirs in zip(*results, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)


def test_a_layer_without_initial_values():
    layer = nn.utils.skip_init(ucudnn.nn.Conv2d, 4, 6, 3, dtype=torch.float64)
    assert (layer.weight.shape, layer.weight.dtype) == ((6, 4, 3, 3), torch.float64)
    assert ucudnn.nn.Conv2d(4, 6, 3, device="meta").weight.is_meta


def test_export_shows_plain_operators(plan_by_hand):
    layer, planned, x = plain_pair(plan_by_hand)
    program = torch.export.export(planned, (x,))
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert targets == ["aten.conv2d.default"]
    assert torch.equal(program.module()(x), layer(x))


class TestUnplanned:
    """A shape that the plan does not cover does what `Config.unplanned` says."""

    def test_torch_computes_it_and_says_so_once(self, plan_by_hand):
        layer, planned, _ = plain_pair(plan_by_hand)
        larger = torch.randn(7, 4, 9, 8)
        with pytest.warns(UserWarning, match="at batch 7 has no plan") as caught:
            outputs = [planned(larger) for _ in range(3)]
        assert len(caught) == 1
        assert torch.equal(outputs[0], layer(larger))

    def test_another_dtype_alone_is_named(self, plan_by_hand):
        _, planned, x = plain_pair(plan_by_hand)
        with (
            torch.autocast("cpu", torch.bfloat16),
            pytest.warns(UserWarning, match=r"no plan in bfloat16, only in float32.*--autocast"),
        ):
            planned(x)

    def test_a_layer_made_without_a_plan(self):
        layer, reference = ucudnn.nn.Conv2d(4, 6, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)
        reference.load_state_dict(layer.state_dict())
        x = torch.randn(2, 4, 9, 8)
        with pytest.warns(UserWarning, match="has no plan: .* tune the model") as caught:
            ours = gradients(layer, x)
        assert len(caught) == 1
        assert all(map(torch.equal, ours, gradients(reference, x)))

    def test_an_op_that_was_not_asked_for_is_torchs_without_a_word(self, plan_by_hand):
        layer, planned, x = plain_pair(plan_by_hand, ops=("fprop",))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_close(gradients(planned, x), gradients(layer, x))
