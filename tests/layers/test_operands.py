"""Operands of every kind: what torch refuses is refused by torch, and strides are torch's."""

from __future__ import annotations

import copy
import warnings
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import ucudnn
from ucudnn.backends.torch_cpu.operators import chosen_kernel
from ucudnn.problem import Problem

ALGORITHMS = ("torch_default", "onednn", "onednn_nhwc", "slow_conv2d", "im2col_gemm", "fft")
X, W = torch.randn(5, 4, 9, 8), torch.randn(6, 4, 3, 3)
BIASES = {
    "one element": torch.ones(1),
    "a column": torch.ones(6, 1),
    "a scalar": torch.tensor(1.0),
    "one too many": torch.ones(7),
    "none": torch.ones(0),
    "float64": torch.ones(6).double(),
    "float16": torch.ones(6).half(),
    "int64": torch.ones(6).long(),
    "complex": torch.ones(6, dtype=torch.complex64),
}
OTHERS = {
    "fewer channels": (X[:, :3], W),
    "no channels": (X[:, :0], W),
    "too few axes": (X[0, 0], W),
    "too many axes": (X[None], W),
    "smaller than the filter": (X[..., :2], W),
    "unbatched, fewer channels": (X[0, :3], W),
    "float64 input": (X.double(), W),
    "float64 filter": (X, W.double()),
    "bfloat16 input": (X.bfloat16(), W),
    "integers": (X.long(), W),
    "complex": (X.cfloat(), W),
    "a filter of another rank": (X, W[0]),
    "a filter of a higher rank": (X, W[None]),
    "a filter elsewhere": (X, W.to("meta")),
    "sparse": (X.to_sparse(), W),
}


def message(run):
    """What a call says when it refuses, or else what it returns."""
    try:
        result = run()
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        return type(error), str(error)
    return result.shape, result.dtype, result.device


def calls(plan, x, w, bias):
    """The same convolution by torch, by a planned layer, and by torch while a plan is installed."""

    def of(layer):
        layer.weight, layer.bias = (
            None if operand is None else nn.Parameter(operand, requires_grad=False)
            for operand in (w, bias)
        )
        return message(lambda: layer(x))

    planned = nn.Conv2d(4, 6, 3)
    ucudnn.convert_(planned, plan)
    torchs = of(nn.Conv2d(4, 6, 3))
    with ucudnn.installed(plan):
        return torchs, of(planned), of(nn.Conv2d(4, 6, 3))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES)
def test_a_bias_that_torch_refuses(plan_by_hand, algorithm, bias):
    plan = plan_by_hand(nn.Conv2d(4, 6, 3), X, 2, algorithm)
    torchs, *ours = calls(plan, X, W, bias)
    assert torchs[0] is RuntimeError
    assert ours == [torchs, torchs]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("operands", OTHERS.values(), ids=OTHERS)
def test_other_operands_are_torchs_to_judge(plan_by_hand, operands, algorithm):
    plan = plan_by_hand(nn.Conv2d(4, 6, 3), X, 2, algorithm)
    for bias in (None, torch.ones(6)):
        torchs, *ours = calls(plan, *operands, bias)
        assert ours == [torchs, torchs]


@pytest.mark.parametrize("make", [nn.Conv2d, nn.ConvTranspose2d])
@pytest.mark.parametrize("x", [None, 1, "x", [1], X.numpy(), (X,), X.tolist()], ids=type)
def test_inputs_that_are_no_tensors(plan_by_hand, make, x):
    torchs = make(4, 6, 3)
    planned = copy.deepcopy(torchs)
    ucudnn.convert_(planned, plan_by_hand(torchs, X))
    assert message(lambda: planned(x)) == message(lambda: torchs(x))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_nested_tensors_are_torchs_to_judge(plan_by_hand):
    plan = plan_by_hand(nn.Conv2d(4, 6, 3), X)
    torchs, *ours = calls(plan, torch.nested.nested_tensor([X[0], X[1]]), W, None)
    assert torchs[0] is NotImplementedError
    assert ours == [torchs, torchs]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_float32_bias_of_a_float64_layer(plan_by_hand, algorithm):
    """aten's operator below `conv2d` takes it, and gives its gradient another dtype."""
    plan = plan_by_hand(nn.Conv2d(4, 6, 3).double(), X.double(), 2, algorithm)
    torchs, *ours = calls(plan, X.double(), W.double(), torch.ones(6))
    assert "should be the same" in torchs[1]
    assert ours == [torchs, torchs]


def test_a_gradient_of_another_shape_is_torchs_to_judge(plan_by_hand):
    layer = nn.Conv2d(4, 6, 3)
    x = X.clone().requires_grad_()
    arguments = ([6], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True])
    backward = torch.ops.aten.convolution_backward
    for dy in (torch.ones(5, 6, 7, 5), torch.ones(4, 6, 7, 6), torch.ones(5, 6, 7, 6).double()):
        torchs = message(lambda dy=dy: backward(dy, X, W, *arguments)[1])
        with ucudnn.installed(plan_by_hand(layer, x)):
            assert message(lambda dy=dy: backward(dy, X, W, *arguments)[1]) == torchs


def gradients(layer, x, dy):
    x = x.detach().requires_grad_()
    y = layer(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], dy.to(y.dtype))]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("is_filter_last", [False, True])
@pytest.mark.parametrize("batch", [1, 4])
def test_strides_in_1d(plan_by_hand, algorithm, dtype, is_filter_last, batch):
    """Channels innermost, as (N, L, C) is seen as (N, C, L): torch goes by the filter's strides."""
    for size in (1, 3):
        layer = nn.Conv1d(16, 32, size, bias=False).to(dtype)
        if is_filter_last:
            weight = layer.weight.data
            layer.weight.data = weight.transpose(1, 2).contiguous().transpose(1, 2)
        x = torch.randn(batch, 20, 16).to(dtype).transpose(1, 2)
        dy = torch.randn(layer(x).shape)
        torchs = gradients(layer, x, dy)
        for chunk in {1, batch}:
            plan = plan_by_hand(layer, x.clone().requires_grad_(), chunk, algorithm)
            with ucudnn.installed(plan):
                ours = gradients(layer, x, dy)
            assert [mine.stride() for mine in ours] == [theirs.stride() for theirs in torchs]
            for mine, theirs in zip(ours, torchs, strict=True):
                assert (mine - theirs).norm() < torch.finfo(dtype).eps ** 0.75 * theirs.norm()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("shape", [(1, 4, 9, 8), (5, 1, 9, 8), (5, 4, 3, 3), (1, 1, 3, 3)], ids=str)
@pytest.mark.parametrize("is_last", [False, True])
def test_strides_that_are_ambiguous(plan_by_hand, algorithm, shape, is_last):
    layer = nn.Conv2d(shape[1], 6, 3, bias=False)
    x = torch.randn(shape)
    if is_last:
        layer, x = (value.to(memory_format=torch.channels_last) for value in (layer, x))
    dy = torch.randn(layer(x).shape)
    torchs = gradients(layer, x, dy)
    plan = plan_by_hand(layer, x.clone().requires_grad_(), 1, algorithm)
    with ucudnn.installed(plan):
        ours = gradients(layer, x, dy)
    assert [mine.stride() for mine in ours] == [theirs.stride() for theirs in torchs]


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "gemm"])
@pytest.mark.parametrize("chunk", [2, 5])
def test_a_default_device_has_no_part_in_it(plan_by_hand, algorithm, chunk):
    layer = nn.Conv2d(4, 6, 1 if algorithm == "gemm" else 3, stride=2)
    dy = torch.randn(layer(X).shape)
    planned, truth = copy.deepcopy(layer), gradients(layer, X, dy)
    plan = plan_by_hand(layer, X.clone().requires_grad_(), chunk, algorithm)
    ucudnn.convert_(planned, plan)
    with torch.device("meta"):
        found = [gradients(planned, X, dy)]
        with ucudnn.installed(plan):
            found.append(gradients(layer, X, dy))
    for results in found:
        for mine, theirs in zip(results, truth, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def lazily_negated(tensor):
    """A view of which the memory holds the negated elements."""
    found = torch.complex(tensor, -tensor).conj().imag
    assert found.is_neg()
    return found


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_operands_that_are_not_their_memory(plan_by_hand, algorithm):
    layer = nn.Conv2d(4, 6, 3)
    dy = torch.randn(layer(X).shape)
    planned, truth = copy.deepcopy(layer), gradients(layer, X, dy)
    plan = plan_by_hand(layer, X.clone().requires_grad_(), 2, algorithm)
    ucudnn.convert_(planned, plan)
    zeros = torch._efficientzerotensor(dy.shape)
    with ucudnn.installed(plan):
        for module in (layer, planned):
            for x, gradient in ((lazily_negated(X), dy), (X, lazily_negated(dy))):
                for mine, theirs in zip(gradients(module, x, gradient), truth, strict=True):
                    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
            assert not any(result.any() for result in gradients(module, X, zeros)[1:])


def test_function_modes_see_torchs_function(plan_by_hand):
    planned = nn.Conv2d(4, 6, 3)
    ucudnn.convert_(planned, plan_by_hand(planned, X))
    seen = []

    class Looking(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Looking():
        planned(X)
    assert torch.conv2d in seen


@pytest.mark.parametrize("make", [nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d])
def test_planned_layers_are_leaves_of_torch_fx(plan_by_hand, make):
    x = torch.randn(2, 4, 8) if make is nn.Conv1d else torch.randn(2, 4, 8, 8)
    model = nn.Sequential(make(4, 6, 3), nn.ReLU())
    planned = copy.deepcopy(model)
    ucudnn.convert_(planned, plan_by_hand(model, x))
    planned[0].register_forward_pre_hook(lambda _, inputs: (inputs[0] * 1,))
    operations = [
        [node.op for node in torch.fx.symbolic_trace(module).graph.nodes]
        for module in (model, planned)
    ]
    assert operations[0] == operations[1] == ["placeholder", "call_module", "call_module", "output"]
    traced = torch.fx.symbolic_trace(planned)
    torch.testing.assert_close(traced(x), functional.relu(model[0](x)), rtol=1e-4, atol=1e-4)
    assert vars(ucudnn.revert_(planned)[0]).keys() == vars(model[0]).keys()


@contextmanager
def onednn(enabled):
    """As `torch.backends.mkldnn.flags`, without its warning about another setting."""
    was = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(enabled)
    yield
    torch._C._set_mkldnn_enabled(was)


@pytest.mark.parametrize("before", [None, True, False])
@pytest.mark.parametrize("flags", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("algorithm", ["onednn", "onednn_nhwc"])
def test_no_plan_runs_onednn_while_it_is_switched_off(
    plan_by_hand, computed, algorithm, flags, before
):
    forward, backward = flags
    layer, x = (
        nn.Conv2d(24, 24, 3, stride=2, groups=24),
        torch.randn(3, 24, 9, 9, requires_grad=True),
    )
    plan = plan_by_hand(layer, x, 3, algorithm)
    planned = {one.problem.op for one in plan.kernels if set(one.algorithms) == {algorithm}}
    assert {"fprop", "wgrad"} & planned

    def step(layer, forward, backward):
        x.grad = None
        layer.zero_grad()
        with onednn(enabled=forward):
            y = layer(x)
        with onednn(enabled=backward):
            y.square().sum().backward()
        return y, x.grad, layer.weight.grad

    truth = step(copy.deepcopy(layer), False, False)
    layer = ucudnn.convert_(layer, plan).model
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if before is not None:
            step(layer, before, before)
        computed.clear()
        found = step(layer, forward, backward)
    # A call of which torch computes every pass is torch's in backward, too.
    assert set(computed) == (planned & {"fprop"} if forward else set())
    assert ["mkldnn.enabled is False" in str(one.message) for one in caught] == [True]
    for one, other in zip(found, truth, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_torchs_kernel_is_known_with_onednn_and_without():
    problem = Problem("fprop", 2, 16, 16, (9, 9), (3, 3))
    seen = []
    for enabled in (False, True):
        with onednn(enabled=enabled):
            seen.append(chosen_kernel(problem) == "onednn")
    assert seen == [False, True]
