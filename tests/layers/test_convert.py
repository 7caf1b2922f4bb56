"""Swapping layers in an existing model and back, and that nothing else changes."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import ucudnn
from ucudnn.errors import MismatchWarning, PlanError
from ucudnn.measurement import Device


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, groups=2),
        nn.Flatten(),
        nn.Linear(8 * 4 * 4, 5),
    )


def step(model, x):
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach()


INPUT = (6, 3, 9, 9)


def test_objects_names_and_modes_stay_and_revert_gives_back_torchs_layers(plan_by_hand):
    model, original, calls = small_model().eval(), small_model().eval(), []
    model[0].register_forward_hook(lambda module, *_: calls.append(module))
    parameters = {name: id(p) for name, p in model.named_parameters()}
    ucudnn.convert_(model, plan_by_hand(original, torch.empty(INPUT)))
    assert {name: id(p) for name, p in model.named_parameters()} == parameters
    assert list(model.state_dict()) == list(original.state_dict())
    assert not model[0].training
    model(torch.randn(INPUT))
    assert calls == [model[0]]
    assert ucudnn.revert_(model) is model
    assert [type(m) for m in model.modules()] == [type(m) for m in original.modules()]
    assert vars(model[0]).keys() == vars(original[0]).keys()
    x = torch.randn(INPUT)
    assert torch.equal(step(model, x), step(original, x))
    for ours, theirs in zip(model.parameters(), original.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_a_layer_whose_plan_is_the_default_is_left_alone(plan_by_hand):
    model = small_model()
    plan = plan_by_hand(model, torch.empty(INPUT), chunk=6, algorithm="torch_default")
    default = tuple(replace(kernel, alone=(0,) * kernel.problem.batch) for kernel in plan.kernels)
    conversion = ucudnn.convert_(model, replace(plan, kernels=default))
    assert conversion.swapped == ()
    assert conversion.left == ("0", "3")
    assert type(model[0]) is nn.Conv2d


def test_every_kind_of_module_is_reported(plan_by_hand):
    class Mine(nn.Conv2d):
        pass

    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        Mine(4, 4, 3),
        parametrizations.weight_norm(nn.Conv2d(4, 4, 1)),
        nn.Conv2d(4, 6, 1),
    )
    plan = plan_by_hand(model, torch.empty(4, 3, 9, 9))
    other = nn.Sequential(*model, nn.Conv2d(6, 5, 1))
    with pytest.warns(UserWarning, match="planned, but no torch.nn convolution .*: 1, 2;"):
        conversion = ucudnn.convert_(other, plan)
    assert conversion.swapped == ("0", "3")
    assert conversion.unplanned == ("4",)
    assert conversion.not_swappable == ("1", "2")
    assert "2 are planned but not swappable" in str(conversion)


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4, 1, 1))

    def forward(self, x):
        return nn.functional.conv2d(x, self.weight)


def test_functional_calls_are_said_to_be_out_of_reach(plan_by_hand):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), Functional())
    plan = plan_by_hand(model, torch.empty(INPUT))
    with pytest.warns(UserWarning, match=r"could be swapped: 1; .* use ucudnn.installed\(plan\)"):
        assert ucudnn.convert_(model, plan).not_swappable == ("1",)
    ucudnn.revert_(model)
    conversion = ucudnn.convert_(model, plan, lambda _, name: name == "0")
    assert (conversion.swapped, conversion.not_swappable) == (("0",), ())
    with pytest.raises(PlanError, match=r"or ucudnn.installed\(plan\) for the model itself"):
        ucudnn.convert_(model[1], plan_by_hand(model[1], torch.empty(4, 4, 5, 5)))


def test_a_transposed_layer_takes_the_size_of_its_output(plan_by_hand):
    size = (10, 10)
    up = nn.ConvTranspose2d(3, 2, 3, stride=2, padding=1)
    small = torch.randn(2, 3, 5, 5)
    truth = up(small, output_size=size)
    sizes = nn.Sequential(up)
    sizes.forward = lambda x: up(x, output_size=size)
    ucudnn.convert_(up, plan_by_hand(sizes, small))
    assert type(up) is ucudnn.nn.ConvTranspose2d
    torch.testing.assert_close(up(small, output_size=size), truth)


def test_a_layer_parametrized_later_is_reverted_too(plan_by_hand):
    model = nn.Conv2d(3, 4, 3)
    ucudnn.convert_(model, plan_by_hand(model, torch.empty(INPUT)))
    parametrizations.weight_norm(model)
    twin, x = copy.deepcopy(model), torch.randn(INPUT)
    planned = model(x)
    ucudnn.revert_(model)
    assert not isinstance(model, ucudnn.nn.Conv2d)
    assert isinstance(twin, ucudnn.nn.Conv2d)
    torch.testing.assert_close(model(x), planned)
    nn.utils.parametrize.remove_parametrizations(model, "weight")
    assert type(model) is nn.Conv2d
    torch.testing.assert_close(model(x), planned)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_weight_norm_by_hooks_and_shared_layers(plan_by_hand):
    layers = []
    for _ in range(2):
        torch.manual_seed(0)
        layers.append(nn.utils.weight_norm(nn.Conv2d(4, 4, 3, padding=1)))
    model, original = (nn.Sequential(layer, layer) for layer in layers)
    x = torch.randn(6, 4, 9, 9)
    conversion = ucudnn.convert_(model, plan_by_hand(model, x))
    assert conversion.swapped == ("0",)
    assert model[0] is model[1]
    torch.testing.assert_close(step(model, x), step(original, x))
    for ours, theirs in zip(model.parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)


def test_converting_twice_takes_the_second_plan(plan_by_hand):
    model = small_model()
    ucudnn.convert_(model, plan_by_hand(model, torch.empty(INPUT)))
    second = plan_by_hand(small_model(), torch.empty(INPUT), chunk=3)
    ucudnn.convert_(model, second)
    assert model[0]._ucudnn_runner.plan is second


@pytest.mark.parametrize("by_environment", [False, True])
def test_a_plan_for_other_hardware_is_left_to_torch(plan_by_hand, monkeypatch, by_environment):
    model, config = small_model(), ucudnn.Config()
    if by_environment:
        monkeypatch.setenv("UCUDNN_UNPLANNED", "torch")
        config = ucudnn.Config(unplanned="error")
    plan = plan_by_hand(model, torch.empty(INPUT), config=config)
    elsewhere = replace(plan, device=Device("cpu", "another processor", cores=64))
    said = "torch's own convolutions run: the plan is for another processor"
    with pytest.warns(MismatchWarning, match=said):
        conversion = ucudnn.convert_(model, elsewhere)
    assert (conversion.swapped, conversion.unplanned) == ((), ("0", "3"))
    assert {type(module) for module in (model[0], model[3])} == {nn.Conv2d}
    x = torch.rand(INPUT)
    expected = model(x)
    with pytest.warns(MismatchWarning, match=said), ucudnn.installed(elsewhere):
        assert torch.equal(model(x), expected)
    # Here it is followed.
    assert ucudnn.convert_(model, plan).swapped == ("0", "3")


def test_other_versions_and_threads_are_said_once(plan_by_hand):
    model = small_model()
    plan = plan_by_hand(model, torch.empty(INPUT))
    other = replace(
        plan,
        software=replace(plan.software, torch="1.0"),
        conditions=replace(plan.conditions, threads=99),
    )
    with pytest.warns(UserWarning, match="its times may not be") as caught:
        ucudnn.convert_(model, other)
    assert len(caught) == 2
    assert "torch 1.0 there" in str(caught[0].message)
    assert "threads 99 there" in str(caught[1].message)


def test_a_plan_by_the_path_of_its_file_and_what_can_be_seen_of_it(plan_by_hand, tmp_path):
    model = small_model()
    plan = plan_by_hand(model, torch.empty(INPUT))
    before = repr(model)
    plan.save(tmp_path / "plan.json")
    conversion = ucudnn.convert_(model, tmp_path / "plan.json")
    assert conversion.swapped == ("0", "3")
    assert repr(model).count(f"plan {plan.hash[:8]}") == 2
    assert "BatchNorm2d" not in repr(conversion)
    assert repr(conversion).startswith("<Conversion of Sequential: 2 layers follow the plan")
    assert repr(ucudnn.revert_(model)) == before
    with ucudnn.installed(str(tmp_path / "plan.json")):
        pass
    with pytest.raises(PlanError, match="No such file"):
        ucudnn.convert_(model, "none.json")
