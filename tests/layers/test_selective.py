"""Selective recomputation: torch's gradients bit for bit, with fewer bytes kept."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ucudnn
from ucudnn.backends import open_backend
from ucudnn.execution import selective
from ucudnn.execution.micro_batching import segment_, unsegment_
from ucudnn.execution.selective import Selective, _Saved
from ucudnn.segment import Segment

WHOLE = Segment("", None, recompute=False, selective=True)


def block(norm: Callable[[int], nn.Module], activation: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        norm(8),
        activation,
        nn.Conv2d(8, 8, 3, padding=1),
        norm(8),
        copy.deepcopy(activation),
        nn.Conv2d(8, 2, 1),
    )


def group_norm(width: int) -> nn.Module:
    return nn.GroupNorm(4, width)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(x).square().mean().backward()
    return [one.grad.clone() for one in model.parameters() if one.grad is not None]


def peak(model: nn.Module, x: Tensor) -> int:
    def step() -> None:
        gradients(model, x)

    gc.collect()  # what tests before have left must not be freed in the step
    return open_backend("torch_cpu").workspace_bytes(step, ())


def assert_same(model: nn.Module, x: Tensor, segment: Segment = WHOLE) -> nn.Module:
    """Run a step undivided and one with a segment, from the same random state."""
    twin = copy.deepcopy(model)
    segment_(twin, [segment])
    found = []
    for one in (model, twin):
        torch.manual_seed(3)
        found.append([*gradients(one, x), *one.buffers()])
    assert found[0]
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    return twin


@pytest.mark.parametrize("least", [0, selective._LEAST_ELEMENTS])
@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, group_norm, nn.InstanceNorm2d])
@pytest.mark.parametrize(
    "activation",
    [
        *(nn.ReLU(), nn.ReLU(inplace=True), nn.SiLU(), nn.SiLU(inplace=True), nn.GELU()),
        *(nn.LeakyReLU(0.1), nn.LeakyReLU(0.1, inplace=True), nn.ELU(), nn.Hardswish(), nn.Tanh()),
        *(nn.Sigmoid(), nn.PReLU(8), nn.Softplus(), nn.Hardtanh(inplace=True), nn.Mish()),
    ],
    ids=repr,
)
def test_gradients_and_statistics_are_torchs(
    norm: Callable[[int], nn.Module],
    activation: nn.Module,
    is_training: bool,
    least: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(selective, "_LEAST_ELEMENTS", least)
    model = block(norm, activation).train(is_training)
    assert_same(model, torch.randn(4, 3, 9, 9))


def test_tracked_statistics_of_instances_are_updated_once() -> None:
    model = block(lambda width: nn.InstanceNorm2d(width, track_running_stats=True), nn.ReLU())
    assert_same(model, torch.randn(4, 3, 9, 9))


NORMS: dict[str, Callable[[Tensor, Tensor | None, Tensor | None], Tensor]] = {
    "groups": lambda x, w, b: functional.group_norm(x, 4, w, b),
    "torch's groups": lambda x, w, b: torch.group_norm(x, 2, weight=w, bias=b),
    "channels": lambda x, w, b: functional.group_norm(x, 8, w, bias=b),
    "batch": lambda x, w, b: functional.batch_norm(x, None, None, w, b, True),
    "tracked": lambda x, w, b: functional.batch_norm(x, torch.zeros(8), torch.ones(8), w, b, True),
    "instances": lambda x, w, b: functional.instance_norm(x, None, None, w, b),
}


class Moments(TorchDispatchMode):
    """Counts the operators that compute means and deviations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_trained = func is torch.ops.aten.native_batch_norm.default and args[5]
        self.count += bool(is_trained or func is torch.ops.aten.native_group_norm.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("way", ["as on a CPU", "as on a GPU"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed"])
@pytest.mark.parametrize("given", ["", "weight", "bias", "weight and bias"])
@pytest.mark.parametrize("shape", [(3, 8, 5, 7), (3, 8, 4, 3, 5), (3, 8, 6), (1, 8, 4, 4)], ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_is_repeated_by_the_moments_that_it_has_kept(
    norm: str,
    shape: tuple[int, ...],
    given: str,
    layout: str,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(selective, "_LEAST_ELEMENTS", 0)
    if way == "as on a GPU":
        monkeypatch.setattr(selective, "_HOST", "none")
    x = 3 * torch.randn(shape) + 1
    if layout == "channels_last" and len(shape) > 3:
        form = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
        x = x.contiguous(memory_format=form)
    elif layout == "transposed":
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    x.requires_grad_()
    weight, bias = (torch.randn(8) if name in given else None for name in ("weight", "bias"))
    doubled = list[Tensor]()
    with Selective():
        y = NORMS[norm](x, weight, bias)
        y.register_hook(doubled.append)
        result = (y * y).sum()
    with Moments() as moments:
        result.backward()  # type: ignore[no-untyped-call]
    is_grouped = norm in ("groups", "torch's groups", "channels")
    is_one = len(x) == 1 or norm in ("batch", "tracked")
    is_flat = x.stride() == y.stride() and (is_one or x.is_contiguous())
    # On a CPU, a group norm of one plane after the other is as fast as it is; on a GPU, a batch or
    # instance norm of planes that do not follow one another is left as it is.
    is_kept = not (is_grouped and is_flat) if way == "as on a CPU" else is_grouped or is_flat
    assert moments.count == (not is_kept)
    # On the strides depends by which kernels torch computes what follows.
    assert doubled[0].stride() == y.stride()
    if layout != "transposed" and (given == "weight and bias" or not is_grouped):
        assert torch.equal(doubled[0], 2 * y)
    else:
        torch.testing.assert_close(doubled[0], 2 * y, rtol=1e-6, atol=1e-6)


def test_an_instance_norm_of_one_sample_keeps_its_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its result is contiguous whatever its input is, and so is the gradient of its result."""
    monkeypatch.setattr(selective, "_LEAST_ELEMENTS", 0)
    model = block(lambda width: nn.InstanceNorm2d(width, affine=True), nn.SiLU()).double()
    x = torch.randn(1, 3, 9, 9, dtype=torch.float64).to(memory_format=torch.channels_last)
    assert_same(model.to(memory_format=torch.channels_last), x)


def test_a_norm_of_half_precision_is_repeated_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only with moments of full precision they are used."""
    monkeypatch.setattr(selective, "_LEAST_ELEMENTS", 0)
    for weights in (torch.float32, torch.bfloat16):
        model = block(nn.BatchNorm2d, nn.SiLU()).bfloat16()
        for one in model.modules():
            if isinstance(one, nn.BatchNorm2d):
                one.to(weights)
        assert_same(model, torch.randn(4, 3, 9, 9).bfloat16())


@pytest.mark.parametrize("inplace", [False, True])
def test_of_a_convolution_a_norm_and_an_activation_one_result_is_kept(inplace: bool) -> None:
    x = torch.randn(4, 3, 64, 64)
    result = 4 * 8 * 64 * 64 * 4
    model = nn.Sequential(
        *(
            nn.Sequential(
                nn.Conv2d(8 if n else 3, 8, 3, padding=1), group_norm(8), nn.ReLU(inplace=inplace)
            )
            for n in range(8)
        )
    )
    twin = assert_same(model, x)
    # Torch keeps the results of the convolution and of the activation, for each of the 8 blocks.
    assert peak(model, x) - peak(twin, x) >= 6 * result


def test_a_result_that_only_an_activation_could_compute_is_kept() -> None:
    """After a convolution, ReLU keeps only its result: dropping it would save nothing."""
    model = nn.Sequential(*(nn.Sequential(nn.Conv2d(3, 3, 3), nn.ReLU()) for _ in range(4)))
    x = torch.randn(2, 3, 32, 32)
    assert peak(assert_same(model, x), x) <= peak(model, x) + 1024


@pytest.mark.parametrize(
    "segment",
    [
        Segment("", None, selective=True),
        Segment("", 2, selective=True),
        Segment("", 2, recompute=False, selective=True),
        Segment("", 1, kept=1, selective=True),
        Segment("", None, recompute=False, offload=True, selective=True),
    ],
    ids=str,
)
def test_it_goes_with_every_other_setting(segment: Segment) -> None:
    model = block(group_norm, nn.SiLU()).double()
    x = torch.randn(5, 3, 9, 9, dtype=torch.float64)
    twin = copy.deepcopy(model)
    segment_(twin, [segment])
    for a, b in zip(gradients(model, x), gradients(twin, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_segments_inside_a_recomputed_one() -> None:
    model = nn.Sequential(block(group_norm, nn.SiLU()), nn.Conv2d(2, 2, 1)).double()
    twin = copy.deepcopy(model)
    segment_(twin, [Segment("", 1), Segment("0", None, recompute=False, selective=True)])
    x = torch.randn(3, 3, 9, 9, dtype=torch.float64)
    for a, b in zip(gradients(model, x), gradients(twin, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "around",
    [save_on_cpu, lambda: saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t)],
    ids=["offload", "copies"],
)
def test_hooks_around_it_treat_what_is_kept(around: Any) -> None:
    model = block(nn.BatchNorm2d, nn.ReLU(inplace=True))
    x = torch.randn(4, 3, 9, 9)
    with around():
        assert_same(model, x)


def test_a_checkpoint_inside_it() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = block(group_norm, nn.SiLU()), nn.GroupNorm(2, 2)
            self.last = nn.Conv2d(2, 2, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint(self.first, x, use_reentrant=False)
            return self.last(functional.silu(self.norm(x)))

    assert_same(Outer(), torch.randn(2, 3, 9, 9))


def test_dropout_draws_the_same_mask() -> None:
    model = nn.Sequential(block(group_norm, nn.ReLU()), nn.Dropout(0.5), nn.Conv2d(2, 2, 1))
    assert_same(model, torch.randn(4, 3, 9, 9))


def test_views_of_a_dropped_result() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 12), nn.Linear(12, 6)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.down(functional.gelu(self.up(x))))
            return self.down(functional.gelu(self.up(y.transpose(1, 2).transpose(1, 2))))

    assert_same(Rows(), torch.randn(2, 5, 6))


def test_autocast_repeats_in_its_precision() -> None:
    model = block(group_norm, nn.SiLU())
    x = torch.randn(4, 3, 9, 9)
    twin = copy.deepcopy(model)
    segment_(twin, [WHOLE])
    found = []
    for one in (model, twin):
        one.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = one(x).square().mean()
        loss.backward()
        found.append([p.grad for p in one.parameters()])
    assert all(map(torch.equal, *found))


def test_a_graph_that_is_retained_and_gradients_of_gradients() -> None:
    model = block(group_norm, nn.SiLU()).double()
    twin = copy.deepcopy(model)
    segment_(twin, [WHOLE])
    found = []
    for one in (model, twin):
        x = torch.randn(2, 3, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        loss = one(x.requires_grad_()).square().mean()
        loss.backward(retain_graph=True)
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        first.square().sum().backward()
        found.append([p.grad for p in one.parameters()] + [x.grad])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


class Shared(nn.Module):
    """The result of an activation is needed by two layers, one of them multiplies it by itself."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.activation, self.last = activation, nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(self.norm(self.first(x)))
        return self.last(y) * y + y.square()


RECTIFIED = [nn.ReLU(), nn.ReLU(inplace=True), nn.LeakyReLU(0.1), nn.LeakyReLU(0.1, inplace=True)]


@pytest.mark.parametrize("activation", [*RECTIFIED, nn.LeakyReLU(-0.5)], ids=repr)
def test_a_result_that_several_operations_need_is_not_overwritten_too_early(
    activation: nn.Module,
) -> None:
    model, x = Shared(activation), torch.randn(5, 6)
    twin = assert_same(model, x)
    for some in (["last.weight"], ["first.weight"], ["norm.bias", "last.bias"]):
        found = []
        for one in (model, twin):
            result, parameters = one(x), dict(one.named_parameters())
            for _ in range(2):
                wanted = [parameters[name] for name in some]
                found.append(torch.autograd.grad(result.sum(), wanted, retain_graph=True))
        for other in found[1:]:
            assert all(map(torch.equal, found[0], other))


@pytest.mark.parametrize("activation", RECTIFIED, ids=repr)
def test_backward_of_a_rectifier_needs_no_tensor_beside_its_input_and_gradient(
    activation: nn.Module,
) -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.LayerNorm(64), activation, nn.Linear(64, 1))
    x, size = torch.randn(4096, 8), 4096 * 64 * 4
    # What normalisation keeps, the result of the activation, and its gradient. To compute the next
    # gradient, torch's own backward of the activation allocates a fourth tensor.
    assert peak(assert_same(model, x), x) < 3.5 * size


def test_gradients_of_several_losses_at_once() -> None:
    model, x = Shared(nn.ReLU()), torch.randn(2, 6, requires_grad=True)
    twin = copy.deepcopy(model)
    segment_(twin, [WHOLE])
    losses = torch.eye(12).view(12, 2, 6)
    found = [
        torch.autograd.grad(one(x), x, losses, is_grads_batched=True)[0] for one in (model, twin)
    ]
    torch.testing.assert_close(*found)


def test_an_input_that_is_overwritten_is_an_error_as_by_torch() -> None:
    class Overwriting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x)
            y = self.norm(x)
            x.add_(1)
            return y

    model = Overwriting()
    segment_(model, [WHOLE])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(model, torch.randn(2, 3, 5, 5))


def test_a_result_that_is_changed_later_is_not_mistaken_for_the_old_one() -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.conv = nn.GroupNorm(3, 3), nn.Conv2d(3, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(self.norm(x).mul_(2))

    assert_same(Changing(), torch.randn(2, 3, 5, 5))


@pytest.mark.slow
@pytest.mark.parametrize("segment", [WHOLE, Segment("", None, selective=True)], ids=str)
def test_nothing_stays_allocated_after_the_graph(segment: Segment) -> None:
    """No reference cycles: without the collector, all goes with the last name for the result."""

    def saved() -> list[Any]:
        return [one for one in gc.get_objects() if type(one) in (_Saved, Selective)]

    model = block(group_norm, nn.Sigmoid())
    segment_(model, [segment])
    gradients(model, torch.randn(2, 3, 9, 9))  # torch's checkpoint leaves cycles at its first use
    gc.collect()
    gc.disable()
    try:
        result = model(torch.randn(2, 3, 9, 9))
        assert saved()
        result.sum().backward()
        del result
        assert not saved()
    finally:
        gc.enable()


def test_planned_convolutions_stay_planned(plan_by_hand: Any, computed: list[str]) -> None:
    model = block(group_norm, nn.SiLU())
    # With chunks of one sample, workspace is little beside the activations of all samples.
    x = torch.randn(16, 3, 32, 32)
    plan = plan_by_hand(model, x, chunk=1)
    exact = gradients(copy.deepcopy(model).double(), x.double())
    twin = copy.deepcopy(model)
    ucudnn.convert_(twin, plan)
    before = peak(twin, x)
    computed.clear()
    ucudnn.convert_(twin, replace(plan, segments=(WHOLE,)))
    for a, b in zip(exact, gradients(twin, x), strict=True):
        torch.testing.assert_close(a, b.double(), rtol=1e-4, atol=1e-6)
    # The input of the first of the three convolutions has no gradient.
    assert sorted(computed) == ["dgrad"] * 2 + ["fprop"] * 3 + ["wgrad"] * 3
    assert peak(twin, x) < before


def test_inference_and_reverting_leave_no_trace() -> None:
    model = block(group_norm, nn.SiLU())
    x = torch.randn(2, 3, 9, 9)
    before = model(x)
    segment_(model, [WHOLE])
    assert "selectively recomputed" in repr(model)
    with torch.no_grad():
        assert torch.equal(model(x), before)
    unsegment_(model)
    assert "selectively" not in repr(model)


@pytest.mark.slow
def test_a_compiled_model_gives_the_same_gradients() -> None:
    model = block(group_norm, nn.SiLU())
    x = torch.randn(2, 3, 9, 9)
    exact = gradients(model, x)
    segment_(model, [WHOLE])
    model.compile(backend="aot_eager")
    for a, b in zip(exact, gradients(model, x), strict=True):
        torch.testing.assert_close(a, b)


def penalised(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Gradients of a loss that contains gradients, as those of WGAN-GP and R1 do."""
    x = x.clone().requires_grad_()
    y = model(x * 1)
    (slope,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
    (again,) = torch.autograd.grad(slope.square().sum(), x, create_graph=True)
    loss = y.mean() + slope.flatten(1).norm(dim=1).square().mean() + again.square().mean()
    return [*torch.autograd.grad(loss, [x, *model.parameters()], retain_graph=True), slope, again]


def hessian_products(model: nn.Module, x: Tensor) -> list[Tensor]:
    return [*torch.autograd.functional.hvp(lambda one: model(one * 1).sin().sum(), x, x.cos())]


def jacobian(model: nn.Module, x: Tensor) -> list[Tensor]:
    def sums(one: Tensor) -> Tensor:
        return model(one * 1).square().flatten(1).sum(1)

    return [torch.autograd.functional.jacobian(sums, x, vectorize=True)]


def several_at_once(model: nn.Module, x: Tensor) -> list[Tensor]:
    y = model(x.clone().requires_grad_() * 1)
    losses = torch.stack([y.detach().cos(), y.detach().sin()])
    return [*torch.autograd.grad(y, [*model.parameters()], losses, is_grads_batched=True)]


def twice(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    y = model(x.clone().requires_grad_() * 1)
    y.sum().backward(retain_graph=True)
    first = [one.grad.clone() for one in model.parameters() if one.grad is not None]
    y.square().sum().backward()
    return [*first, *(one.grad for one in model.parameters() if one.grad is not None)]


def tangents(model: nn.Module, x: Tensor) -> list[Tensor]:
    with forward_ad.dual_level():
        return [*forward_ad.unpack_dual(model(forward_ad.make_dual(x, x.cos()) * 1))]


def transforms(model: nn.Module, x: Tensor) -> list[Tensor]:
    def loss(one: Tensor) -> Tensor:
        return model(one * 1).sin().sum()

    return [*torch.func.jvp(loss, (x,), (x,)), torch.func.hessian(loss)(x[:1])]


def transforms_of_backward(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The graph is made before there are tangents and axes of `vmap`; gradients get them."""
    x = x.clone().requires_grad_()
    y = model(x * 1)

    def slope(way: Tensor) -> Tensor:
        return torch.autograd.grad(y, x, way, retain_graph=True)[0]

    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(slope(forward_ad.make_dual(y.detach(), y.detach().cos())))
    return [*dual, torch.func.vmap(slope)(torch.stack([y.detach(), y.detach().cos()]))]


@pytest.mark.parametrize(
    "segments",
    [
        [WHOLE],
        [Segment("", None, selective=True)],
        [Segment("", 2, selective=True)],
        [Segment("", None), replace(WHOLE, module="1")],
        [WHOLE, Segment("1", None, selective=True)],
    ],
    ids=lambda segments: ", ".join(map(repr, map(str, segments))),
)
@pytest.mark.parametrize(
    "derived",
    [*(penalised, hessian_products, jacobian, several_at_once, twice), *(tangents, transforms)],
)
@pytest.mark.parametrize(
    "norm", [group_norm, lambda width: nn.InstanceNorm2d(width, affine=True)], ids=["group", "view"]
)
@pytest.mark.parametrize("activation", [*RECTIFIED[1:], nn.ELU(inplace=True)], ids=repr)
# Torch's own, when it first needs a decomposition.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_higher_and_forward_derivatives_are_torchs(
    activation: nn.Module, norm: Any, derived: Any, segments: list[Segment]
) -> None:
    inner = nn.Sequential(norm(4), activation, nn.Conv2d(4, 4, 1))
    model = nn.Sequential(nn.Conv2d(3, 4, 3), inner, copy.deepcopy(activation), nn.Conv2d(4, 2, 1))
    x = torch.randn(3, 3, 5, 5, dtype=torch.float64)
    assert_close(model.double(), segments, x, derived)
    if norm is not group_norm:  # of which torch has no tangents in backward
        assert_close(model, segments, x, transforms_of_backward)


def assert_close(
    model: nn.Module, segments: list[Segment], x: Tensor, derived: Any = gradients
) -> None:
    twin = copy.deepcopy(model)
    segment_(twin, segments)
    for a, b in zip(derived(model, x), derived(twin, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


class Within(nn.Module):
    """Calls a module in a context of the model's own."""

    def __init__(self, inner: nn.Module, manner: str) -> None:
        super().__init__()
        self.inner, self.manner = inner, manner

    def forward(self, x: Tensor) -> Tensor:
        if self.manner.startswith("checkpoint"):
            return checkpoint(self.inner, x, use_reentrant=self.manner.endswith("reentrant"))
        if self.manner == "offload":
            with save_on_cpu():
                return self.inner(x)
        if self.manner == "hooks":
            with saved_tensors_hooks(lambda one: one.detach(), lambda one: one):
                return self.inner(x)
        return self.inner(x)


class Beside(nn.Module):
    """The result of a normalisation goes into a rectifier, and into a layer beside it."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.norm, self.activation = nn.GroupNorm(2, 4), activation
        self.first, self.last = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.first(y) + self.last(self.activation(y))


MANNERS = ["checkpoint", "checkpoint, reentrant", "offload", "hooks", "none"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "segments",
    [
        [WHOLE],
        [Segment("", None, selective=True)],
        [WHOLE, Segment("1.inner", None)],
        [WHOLE, Segment("1.inner", 2)],
        [WHOLE, Segment("1.inner.last", None), replace(WHOLE, module="1.inner")],
        [Segment("1.inner", None), replace(WHOLE, module="1")],
    ],
    ids=lambda segments: ", ".join(map(repr, map(str, segments))),
)
@pytest.mark.parametrize("derived", [gradients, twice])
@pytest.mark.parametrize("manner", MANNERS)
@pytest.mark.parametrize("activation", [nn.ReLU(), nn.LeakyReLU(0.1)], ids=repr)
def test_contexts_of_the_models_own_inside_it(
    activation: nn.Module, manner: str, derived: Any, segments: list[Segment]
) -> None:
    blocks = (Within(Beside(copy.deepcopy(activation)), manner) for _ in range(2))
    model = nn.Sequential(nn.Conv2d(3, 4, 3), *blocks, nn.GroupNorm(2, 4), activation).double()
    model.append(nn.Conv2d(4, 2, 1, dtype=torch.float64))
    assert_close(model, segments, torch.randn(3, 3, 7, 7, dtype=torch.float64), derived)


@pytest.mark.parametrize("manner", ["checkpoint", "offload", "hooks", "none"])
def test_a_function_that_changes_its_argument_in_such_a_context(manner: str) -> None:
    class Both(nn.Module):
        def __init__(self, manner: str) -> None:
            super().__init__()
            self.norm, self.conv = nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 1)
            inner = nn.Sequential(nn.LeakyReLU(0.1, inplace=True), nn.Conv2d(4, 4, 1))
            self.within, self.is_exact = Within(inner, manner), not manner

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            return self.conv(y) + self.within(y.clone() if self.is_exact else y)

    model = nn.Sequential(nn.Conv2d(3, 4, 3), Both(manner)).double()
    exact = nn.Sequential(nn.Conv2d(3, 4, 3), Both("")).double()
    exact.load_state_dict(model.state_dict())
    segment_(model, [WHOLE])
    x = torch.randn(3, 3, 7, 7, dtype=torch.float64)
    for a, b in zip(gradients(exact, x), gradients(model, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.LeakyReLU(0.1), nn.SiLU()], ids=repr)
def test_hooks_inside_it_get_what_torch_saves(activation: nn.Module) -> None:
    saved: list[Tensor] = []

    class Noting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.GroupNorm(2, 4), activation, nn.Conv2d(4, 4, 1))

        def forward(self, x: Tensor) -> Tensor:
            with saved_tensors_hooks(lambda one: saved.append(one) or one, lambda one: one):
                return self.inner(x)

    assert_same(nn.Sequential(nn.Conv2d(3, 4, 3), Noting()), torch.randn(2, 3, 5, 5))
    for a, b in zip(saved[: len(saved) // 2], saved[len(saved) // 2 :], strict=True):
        assert torch.equal(a, b)


def test_one_inside_another_keeps_no_more() -> None:
    model = nn.Sequential(*(block(group_norm, nn.ReLU()) for _ in range(2)))
    for one in model:
        one.append(nn.Conv2d(2, 3, 1))
        one.insert(0, nn.GroupNorm(3, 3))
    x = torch.randn(4, 3, 32, 32)
    whole, nested = copy.deepcopy(model), copy.deepcopy(model)
    segment_(whole, [WHOLE])
    segment_(nested, [WHOLE, *(replace(WHOLE, module=f"{n}.{m}") for n in "01" for m in "147")])
    assert peak(nested, x) <= peak(whole, x)


@pytest.mark.parametrize("activation", RECTIFIED, ids=repr)
def test_a_tensor_that_someone_got_in_backward_is_not_overwritten(activation: nn.Module) -> None:
    got: list[Tensor] = []

    class Keeping(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:
            ctx.save_for_backward(y)
            return y * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            got.extend(ctx.saved_tensors)
            return gradient * 2

    class Last(nn.Module):
        def forward(self, y: Tensor) -> Tensor:
            return Keeping.apply(y)

    x = torch.randn(5, 6)
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), activation, Last())
    assert_same(model, x)
    assert torch.equal(*got)


class Changing(nn.Module):
    """Changes in place what the backward of a normalisation needs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.conv(y) + x.mul_(2)


@pytest.mark.parametrize(
    "segments",
    [
        [replace(WHOLE, module="1")],
        [WHOLE],
        [Segment("", None), replace(WHOLE, module="1")],
        [Segment("", None, selective=True)],
    ],
    ids=lambda segments: ", ".join(map(repr, map(str, segments))),
)
@pytest.mark.parametrize("around", ["checkpoint", "checkpoint, reentrant", "offload", "none"])
def test_a_change_in_place_is_an_error_in_every_context(
    around: str, segments: list[Segment]
) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), Changing(), nn.Conv2d(4, 2, 1))
    segment_(model, segments)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(Within(model, around), torch.randn(2, 3, 5, 5, requires_grad=True))


def test_a_context_that_copies_may_be_followed_by_a_change() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), Changing(), nn.Conv2d(4, 2, 1)).double()
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64)

    def copied(one: Tensor) -> Tensor:
        return torch.empty(one.shape, dtype=one.dtype).copy_(one)

    with saved_tensors_hooks(copied, lambda one: one):
        assert_close(model, [WHOLE], x)


def test_a_change_before_the_result_is_saved() -> None:
    """Nothing has been saved of what is frozen, so torch allows to change its argument."""

    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.conv = nn.GroupNorm(1, 3), nn.Conv2d(3, 4, 1)
            self.norm.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            x = x * 1
            y = self.norm(x)
            x.mul_(-3)
            return self.conv(functional.relu(y))

    assert_same(Frozen(), torch.randn(2, 3, 5, 5))


def test_a_weight_that_is_changed_before_backward_is_an_error() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Conv2d(4, 2, 1))
    segment_(model, [WHOLE])
    loss = model(torch.randn(2, 3, 5, 5)).sum()
    with torch.no_grad():
        model[1].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, model[2].weight)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_statistics_that_are_updated_before_backward(norm: Any) -> None:
    """As by a loss that compares the results in evaluation and in training mode."""

    def both(model: nn.Module, x: Tensor) -> list[Tensor]:
        loss = model.eval()(x).square().mean() + model.train()(2 * x + 1).square().mean()
        return [*torch.autograd.grad(loss, model[2].weight)]

    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), norm(4, track_running_stats=True), nn.Conv2d(4, 2, 1)
    ).double()
    assert_close(model, [WHOLE], torch.randn(4, 3, 5, 5, dtype=torch.float64), both)


@pytest.mark.parametrize("activation", RECTIFIED, ids=repr)
@pytest.mark.parametrize(
    "segments",
    [
        [WHOLE],
        [replace(WHOLE, module="2")],
        [Segment("", None), replace(WHOLE, module="2")],
        [Segment("", 2), replace(WHOLE, module="2")],
        [Segment("", None, selective=True)],
    ],
    ids=lambda segments: ", ".join(map(repr, map(str, segments))),
)
def test_evaluation_mode_in_which_an_argument_is_changed(
    activation: nn.Module, segments: list[Segment]
) -> None:
    inner = nn.Sequential(nn.Dropout(), activation, nn.Conv2d(4, 4, 1))
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), inner, nn.GELU()).double()
    x = torch.randn(4, 3, 6, 6, dtype=torch.float64)
    for derived in (gradients, penalised):
        assert_close(model.eval(), segments, x, derived)


def test_an_argument_that_was_made_in_inference_mode() -> None:
    with torch.inference_mode():
        x = torch.randn(5, 6)
    assert_same(nn.Sequential(nn.GELU(), nn.Linear(6, 6)), x)


def test_views_of_another_type() -> None:
    """Rotary embeddings multiply a normalised query as complex numbers."""

    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(6, 6), nn.RMSNorm(6)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(self.first(x))
            y = torch.view_as_complex(x.view(*x.shape[:-1], 3, 2))
            z = functional.rms_norm(y, [3])
            return torch.view_as_real(y * z * z.conj())

    assert_same(Rotary(), torch.randn(4, 5, 6))


def test_hooks_that_give_back_another_layout() -> None:
    """As `save_on_cpu` with pinned memory does."""

    class Turned(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.transpose(2, 3)
            return y * y.sigmoid()

    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), Turned(), nn.Conv2d(4, 2, 1))
    model = model.double().to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64).to(memory_format=torch.channels_last)

    def packed(one: Tensor) -> Tensor:
        return torch.empty(one.shape, dtype=one.dtype).copy_(one)

    with saved_tensors_hooks(packed, lambda one: one):
        assert_close(model, [WHOLE], x)
