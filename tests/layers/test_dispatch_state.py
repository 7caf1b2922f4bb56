"""Plans below the dispatcher: however torch comes to call a convolution, its numbers are right.

Every algorithm computes every kind of geometry, forward and backward, in each state in which the
dispatcher may enter `installed`; the truth is torch's own convolution in float64.
"""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

import ucudnn
from ucudnn.backends.torch_cpu.backend import ALGORITHMS
from ucudnn.config import Config
from ucudnn.execution.execute import Call, as_kernel

LAYERS = {
    "plain": (partial(nn.Conv2d, 4, 6, 3), (3, 4, 9, 8)),
    "one input channel": (partial(nn.Conv2d, 1, 8, 3), (3, 1, 9, 8)),
    "one output channel": (partial(nn.Conv2d, 8, 1, 3), (3, 8, 9, 8)),
    "depthwise": (partial(nn.Conv2d, 4, 4, 3, groups=4), (3, 4, 9, 8)),
    "wide depthwise": (partial(nn.Conv2d, 4, 4, 5, padding=2, groups=4), (3, 4, 9, 8)),
    "grouped": (partial(nn.Conv2d, 4, 6, 3, groups=2), (3, 4, 9, 8)),
    "strided": (partial(nn.Conv2d, 4, 6, 3, stride=(2, 1), padding=1), (3, 4, 9, 8)),
    "dilated": (partial(nn.Conv2d, 4, 6, 3, dilation=2, padding=2), (3, 4, 9, 8)),
    "batch of one": (partial(nn.Conv2d, 4, 4, 3), (1, 4, 9, 8)),
    "pointwise": (partial(nn.Conv2d, 4, 6, 1), (3, 4, 9, 8)),
    "1-D": (partial(nn.Conv1d, 1, 4, 9), (3, 1, 40)),
    "3-D": (partial(nn.Conv3d, 2, 3, 3, padding=1), (2, 2, 4, 5, 6)),
    "transposed": (partial(nn.ConvTranspose2d, 4, 1, 4, stride=2), (3, 4, 5, 4)),
}


class AllLayers(nn.Module):
    """All geometries side by side, so that one step, or one compilation, has them all."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([make() for make, _ in LAYERS.values()])

    def forward(self, *inputs):
        return [layer(x) for layer, x in zip(self.layers, inputs, strict=True)]


class Looking(TorchDispatchMode):
    """A mode that changes nothing, and remembers which operators it saw."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.add(function._schema.name)
        return function(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def case():
    """The model, its inputs, and all results and gradients in float64."""
    torch.manual_seed(0)
    model = AllLayers()
    inputs = [torch.randn(shape) for _, shape in LAYERS.values()]
    return model, inputs, step(copy.deepcopy(model).double(), [x.double() for x in inputs])


def step(model, inputs, run=None):
    """Outputs, then gradients by inputs and by parameters."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = model(*inputs) if run is None else run(*inputs)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else outputs
    model.zero_grad()
    sum(y.square().sum() for y in outputs).backward()
    return [y.detach() for y in outputs], [tensor.grad for tensor in (*inputs, *model.parameters())]


def assert_right(found, truth):
    for ours, theirs in zip(found, truth, strict=True):
        for ours_one, theirs_one in zip(ours, theirs, strict=True):
            error = (ours_one - theirs_one).norm() / theirs_one.norm()
            assert error < 1e-5


def eager(model, inputs):
    return step(model, inputs)


def in_a_mode(model, inputs):
    with Looking() as mode:
        found = step(model, inputs)
    assert {"aten::convolution", "aten::convolution_backward"} <= mode.seen
    assert not {"aten::bmm", "aten::_fft_r2c", "aten::mkldnn_convolution"} & mode.seen
    return found


def in_nested_modes(model, inputs):
    with Looking(), torch.device("meta"), Looking():
        return step(model, inputs)


def under_a_flop_counter(model, inputs):
    with FlopCounterMode(display=False) as counter:
        found = step(model, inputs)
    assert counter.get_total_flops() > 0
    return found


def selectively_checkpointed(model, inputs, policy=CheckpointPolicy.MUST_SAVE):
    contexts = partial(create_selective_checkpoint_contexts, lambda *_, **__: policy)
    run = partial(checkpoint, model, use_reentrant=False, context_fn=contexts)
    return step(model, inputs, run)


def recomputed(model, inputs):
    return selectively_checkpointed(model, inputs, CheckpointPolicy.MUST_RECOMPUTE)


def transformed(model, inputs):
    names, parameters = zip(*model.named_parameters(), strict=True)

    def loss(*tensors):
        inputs, parameters = tensors[: len(LAYERS)], tensors[len(LAYERS) :]
        by_name = dict(zip(names, parameters, strict=True))
        outputs = torch.func.functional_call(model, by_name, inputs)
        return sum(y.square().sum() for y in outputs), outputs

    tensors = [*inputs, *(parameter.detach() for parameter in parameters)]
    every = tuple(range(len(tensors)))
    gradients, outputs = torch.func.grad(loss, argnums=every, has_aux=True)(*tensors)
    return outputs, gradients


WAYS = (
    eager,
    in_a_mode,
    in_nested_modes,
    under_a_flop_counter,
    selectively_checkpointed,
    recomputed,
    transformed,
)


@pytest.fixture
def algorithms_run(monkeypatch):
    """The algorithms that plans ran so far."""
    seen = set()
    run = Call.__call__

    def spy(self, *operands):
        seen.update(algorithm for _, algorithm in self.parts)
        return run(self, *operands)

    monkeypatch.setattr(Call, "__call__", spy)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
# The models are in float32, which `onednn_float32` leaves to `onednn`.
@pytest.mark.parametrize("algorithm", sorted({*ALGORITHMS} - {"onednn_float32"}))
def test_every_algorithm_in_every_state(case, plan_by_hand, algorithms_run, algorithm, way):
    model, inputs, truth = case
    for chunk in (1, 2, 3):
        plan = planned(plan_by_hand, model, inputs, chunk, algorithm)
        with ucudnn.installed(plan):
            assert_right(way(model, inputs), truth)
    assert algorithm in algorithms_run


def planned(plan_by_hand, model, inputs, chunk, algorithm):
    needed = tuple(x.clone().requires_grad_() for x in inputs)
    return plan_by_hand(model, needed, chunk, algorithm, Config(unplanned="error"))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_algorithms_may_use_lazy_views(case, plan_by_hand, monkeypatch, way):
    """The negated imaginary part of a conjugate is the imaginary part, if both are resolved."""
    model, inputs, truth = case
    run = Call.__call__

    def lazily(self, *operands):
        result = run(self, *operands)
        assert torch.complex(result, result).conj().imag.is_neg()
        return -torch.complex(result, result).conj().imag.mul(1)

    monkeypatch.setattr(Call, "__call__", lazily)
    with ucudnn.installed(planned(plan_by_hand, model, inputs, 1, "onednn")):
        assert_right(way(model, inputs), truth)


class TestAsKernel:
    """Nothing of the caller's acts inside, and the caller's state is as before afterwards."""

    def test_no_mode_and_no_subclass_looks_on(self):
        calls = []

        class Functions(TorchFunctionMode):
            def __torch_function__(self, function, types, args=(), kwargs=None):
                calls.append(function)
                return function(*args, **(kwargs or {}))

        class Subclass(torch.Tensor):
            @classmethod
            def __torch_function__(cls, function, types, args=(), kwargs=None):
                calls.append(function)
                return super().__torch_function__(function, types, args, kwargs)

        x = torch.ones(2).as_subclass(Subclass)
        with Looking() as mode, Functions():
            as_kernel(lambda: x.mul(x).sum())
            assert not calls
            assert not mode.seen
            x.mul(x)
        assert calls
        assert mode.seen == {"aten::mul"}

    def test_an_exception_restores_the_state(self):
        before = torch._C._dispatch_tls_local_exclude_set().raw_repr()
        with pytest.raises(ZeroDivisionError):
            as_kernel(lambda: 1 // 0)
        assert torch._C._dispatch_tls_local_exclude_set().raw_repr() == before
        assert torch._C._is_torch_function_enabled()


# Inductor's first import defines functions of torch.jit
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_compiled_by_inductor(plan_by_hand, algorithms_run, monkeypatch, tmp_path):
    """One layer, which takes Inductor less time than all."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model, inputs = nn.Conv1d(1, 4, 9), [torch.randn(3, 1, 40)]
    truth = step(copy.deepcopy(model).double(), [x.double() for x in inputs])
    torch._dynamo.reset()
    try:
        with ucudnn.installed(planned(plan_by_hand, model, inputs, 3, "fft")):
            run = torch.compile(model)
            for _ in range(2):
                assert_right(step(model, inputs, run), truth)
    finally:
        torch._dynamo.reset()
    assert algorithms_run == {"fft"}
