"""What a profile says of the calls of modules, counted by hand or by autograd's own hooks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ucudnn.backends import open_backend
from ucudnn.steps.foresee import Foreseer
from ucudnn.steps.profile import ModuleCall, ModuleWatcher

# Marks, hooks and Python's own objects on the way: some KiB.
SLACK = 24 << 10
# Bytes of one tensor of a chain of layers.
UNIT = 1 << 20


@pytest.fixture(autouse=True)
def _settings(one_thread):
    torch.manual_seed(0)


def profile(model, x, backward=True):
    names = [name for name, _ in model.named_modules() if name]
    return Foreseer(model, x, open_backend("torch_cpu"), backward).step(names=names)


def calls(found):
    return {call.name: call for call in found.root.walk()}


def chain(*layers):
    return nn.Sequential(*layers)


def units(*values):
    return pytest.approx([one * UNIT for one in values], abs=SLACK)


def example(*, needs=True):
    return torch.randn(8, UNIT // 32, requires_grad=needs)


def test_bytes_and_order_of_a_chain():
    # A tanh keeps its result; sine, its argument, which the layer before has kept or not.
    model = chain(nn.Tanh(), chain(nn.Tanh(), nn.Tanh(), nn.Tanh()), nn.Tanh())
    found = profile(model, example())
    by_name = calls(found)
    assert [*by_name] == [None, "0", "1", "1.0", "1.1", "1.2", "2"]
    assert all(call.is_nested for call in by_name.values())
    assert by_name["1"].samples == 8
    assert by_name["1"].result_bytes == by_name["1"].argument_bytes == UNIT
    costs = {name: found.cost(call) for name, call in by_name.items() if name}
    for name, kept in [("0", 1), ("1", 3), ("1.0", 1), ("1.1", 1), ("2", 1)]:
        assert [costs[name].kept_bytes, costs[name].forward_bytes] == units(kept, kept)
    # When its backward begins there are the outputs of the step and the gradient of its result;
    # when the first of its tanhs is computed, the gradient of the argument of that too.
    assert [costs["1"].beside_bytes, costs["1"].backward_bytes] == units(2, 6)
    between = found.between(found.root)
    assert [one.kept_bytes for one in between[1:3]] == units(0, 0)
    assert len(between) == 4


def saved_bytes(module, x):
    """Bytes that autograd keeps for a module, beside parameters and its input."""
    storages = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    own = {one.untyped_storage().data_ptr() for one in (x, *module.parameters(), *module.buffers())}
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = module(x)
    storages[result.untyped_storage().data_ptr()] = result.untyped_storage().nbytes()
    return sum(size for place, size in storages.items() if place not in own)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = chain(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU())

    def forward(self, x):
        return x + self.inner(x)


class Normed(Residual):
    """On a CPU, what batch normalisation reserves for its backward is a tensor without bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner[1] = nn.BatchNorm2d(4)


class UNet(nn.Module):
    """Skips from each level down to the one up."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep, self.up = Residual(), Residual(), Residual()
        self.join = nn.Conv2d(8, 4, 1)

    def forward(self, x):
        first = self.down(x)
        second = nn.functional.interpolate(
            self.deep(nn.functional.avg_pool2d(first, 2)), scale_factor=2
        )
        return self.up(self.join(torch.cat([first, second], 1)))


@pytest.mark.parametrize(
    "make", [Residual, Normed, UNet, lambda: chain(UNet(), nn.ReLU(), Normed())]
)
def test_kept_bytes_are_those_that_autograd_saves(make):
    model, x = make(), torch.randn(4, 4, 64, 64)
    expected = {}

    def note(module, args):
        expected[module] = args[0].detach().clone().requires_grad_()

    hooks = [module.register_forward_pre_hook(note) for module in model.modules()]
    model(x)
    for hook in hooks:
        hook.remove()
    found = profile(model, x)
    for call in found.root.walk():
        if call.name:
            module = model.get_submodule(call.name)
            kept = saved_bytes(module, expected[module])
            assert found.cost(call).kept_bytes == pytest.approx(kept, abs=SLACK), call.name


def test_backward_is_nested_where_it_runs_in_the_reverse_order():
    model, x = chain(UNet(), Residual()), torch.randn(2, 4, 16, 16)
    by_name = calls(profile(model, x))
    assert all(call.is_nested for call in by_name.values())
    down, deep, up = (by_name[f"0.{name}"].backward for name in ("down", "deep", "up"))
    assert up[1] <= deep[0] <= deep[1] <= down[0]
    assert by_name["0"].backward[0] <= up[0]
    assert by_name["1"].backward[1] <= by_name["0"].backward[0]


@pytest.mark.parametrize(
    ("first", "second", "is_nested"),
    [
        ([4, 5], [2, 3], True),
        ([3, 5], [2, 3], True),
        ([2, 3], [4, 5], False),
        ([3, 5], [2, 4], False),
        ([4, 7], [2, 3], False),
        ([], [2, 3], True),
    ],
)
def test_nesting_is_read_from_the_marks(first, second, is_nested):
    children = [ModuleCall("a", [0, 1], first), ModuleCall("b", [1, 2], second)]
    assert ModuleCall(None, [0, 2], [2, 6], children).is_nested == is_nested


def test_a_module_called_twice_has_two_calls():
    layer = nn.Tanh()
    found = profile(chain(layer, nn.Sigmoid(), layer), example())
    assert [call.name for call in found.root.children] == ["0", "1", "0"]
    assert found.root.is_nested


def test_in_place_modules_keep_nothing_more():
    layers = [nn.Tanh(), nn.Linear(UNIT // 32, 16), nn.ReLU(inplace=True), nn.Linear(16, 16)]
    found = profile(chain(*layers), example(needs=False))
    by_name = calls(found)
    assert found.cost(by_name["2"]).kept_bytes == pytest.approx(0, abs=SLACK)
    assert len(by_name["2"].backward) == 2
    # What has no gradients has no backward.
    assert by_name["0"].backward == []
    assert found.cost(by_name["0"]).backward_ns == 0
    # The linear layer after it needs its result all the same.
    assert found.cost(by_name["0"]).kept_bytes == pytest.approx(UNIT, abs=SLACK)


def test_without_a_graph_nothing_is_kept_but_the_result():
    found = profile(chain(chain(nn.Tanh(), nn.Tanh(), nn.Tanh()), nn.Tanh()), example(), False)
    cost = found.cost(calls(found)["0"])
    assert [cost.kept_bytes, cost.forward_bytes] == units(1, 2)
    assert (cost.backward_bytes, cost.backward_ns) == (0, 0)
    assert found.root.backward == []


class Several(nn.Module):
    """Several arguments and results, some without gradients, some unused."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(6, 6), nn.Dropout(0.5)

    def forward(self, x, *, scale, mask=None):
        hidden = self.drop(self.layer(x)) * scale
        return {"hidden": hidden, "extra": (hidden.detach(), x.sum(), mask)}


class Square(nn.Module):
    def forward(self, a, b):
        return a * b if a is b else a * 0


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Several(), Several()
        self.square, self.norm = Square(), nn.BatchNorm1d(6)

    def forward(self, x):
        first = self.one(x, scale=torch.tensor(2.0, requires_grad=True))["hidden"]
        # A module may look whether arguments are one tensor.
        first = self.square(first, first)
        second = self.two(self.norm(first), scale=2.0, mask=x > 0)
        return second["hidden"] + second["extra"][0] + first


def test_watching_changes_no_result():
    model, x = Outer(), torch.randn(5, 6, requires_grad=True)
    twin, found = copy.deepcopy(model), []
    for one, is_watched in ((model, True), (twin, False)):
        given = x.detach().clone().requires_grad_()
        torch.manual_seed(1)
        results = []

        def step(one=one, given=given, results=results):
            results.append(one(given))
            results[0].square().sum().backward()

        if is_watched:
            watcher = ModuleWatcher([name for name, _ in one.named_modules()], lambda: None)
            watcher.run(one, step)
        else:
            step()
        gradients = [parameter.grad for parameter in one.parameters()]
        found.append([*results, given.grad, *gradients, *one.buffers(), torch.rand(3)])
        assert not any(
            module._forward_hooks or module._forward_pre_hooks for module in one.modules()
        )
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
