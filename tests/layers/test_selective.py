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
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import ucudnn
from ucudnn.backends import open_backend
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
    norm: Callable[[int], nn.Module], activation: nn.Module, is_training: bool
) -> None:
    model = block(norm, activation).train(is_training)
    assert_same(model, torch.randn(4, 3, 9, 9))


def test_tracked_statistics_of_instances_are_updated_once() -> None:
    model = block(lambda width: nn.InstanceNorm2d(width, track_running_stats=True), nn.ReLU())
    assert_same(model, torch.randn(4, 3, 9, 9))


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


def test_a_compiled_model_gives_the_same_gradients() -> None:
    model = block(group_norm, nn.SiLU())
    x = torch.randn(2, 3, 9, 9)
    exact = gradients(model, x)
    segment_(model, [WHOLE])
    model.compile(backend="aot_eager")
    for a, b in zip(exact, gradients(model, x), strict=True):
        torch.testing.assert_close(a, b)
