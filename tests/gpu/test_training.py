"""Models on a GPU by a plan: the same losses and gradients, in every precision that trains."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from by_hand import in_chunks
from torch import nn
from torch.backends import cudnn

import ucudnn
from ucudnn.backends.cudnn.executable import EngineCall
from ucudnn.backends.cudnn.runtime import Runtime
from ucudnn.config import Config
from ucudnn.execution.micro_batching import segment_
from ucudnn.kernels.tune import tune_problems
from ucudnn.plan import DEFAULT_ALGORITHM
from ucudnn.problem import OPS
from ucudnn.segment import Segment
from ucudnn.steps.tracing import trace_layers

SHAPE = (8, 16, 20, 20)


@pytest.fixture
def model(backend):
    """Smooth: where a ReLU has its kink, rounding changes a gradient altogether."""
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(16, 32, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(32, 32, 3, padding=1, groups=2, bias=False),
        nn.GELU(),
        nn.ConvTranspose2d(32, 8, 2, stride=2),
    ]
    return nn.Sequential(*layers).cuda()


@pytest.fixture
def inputs(backend):
    """They need a gradient, as in `step`: what is traced is what is computed."""
    return torch.randn(SHAPE, device="cuda", requires_grad=True)


def split_plan(backend, layers, chunk=3):
    """A plan that splits every kernel into chunks of cuDNN's first engine, whatever is fastest."""

    def engine_of(problem):
        found = [one.algorithm for one in backend.candidates(problem.with_batch(chunk))]
        return next(algorithm for algorithm in found if algorithm != DEFAULT_ALGORITHM)

    return in_chunks(backend, layers, chunk, engine_of, Config(backend="cudnn"))


def step(model, inputs, dtype=None):
    """The loss, and the gradients of inputs and parameters."""
    inputs = inputs.detach().requires_grad_()
    for parameter in model.parameters():
        parameter.grad = None
    with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
        # gradients of a mean are too small for float16
        loss = model(inputs).float().square().mean() * 2**16
    loss.backward()
    return [loss.detach(), inputs.grad, *(parameter.grad for parameter in model.parameters())]


def assert_alike(found, expected, tolerance):
    for one, other in zip(found, expected, strict=True):
        error = (one.double() - other.double()).norm() / other.double().norm()
        assert error < tolerance


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(None, 3e-3), (torch.float16, 1e-2), (torch.bfloat16, 6e-2)]
)
def test_a_split_step_computes_what_float64_computes(
    backend, model, inputs, dtype, tolerance, layout
):
    expected = step(copy.deepcopy(model).double(), inputs.double())
    model, inputs = model.to(memory_format=layout), inputs.to(memory_format=layout)
    with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
        layers = trace_layers(model, inputs.detach().requires_grad_()).layers
    plan = split_plan(backend, layers)
    assert not any(kernel.is_default for kernel in plan.kernels)
    ucudnn.convert_(model, plan)
    assert_alike(step(model, inputs, dtype), expected, tolerance)


@pytest.fixture
def launched(monkeypatch):
    """The engines that are launched: whatever is missing is torch's own."""
    engines, launch = [], Runtime.launch

    def noting(self, device, launches):
        engines.extend(plan for plan, _ in launches)
        launch(self, device, launches)

    monkeypatch.setattr(Runtime, "launch", noting)
    return engines


@pytest.mark.parametrize("before", [None, True, False])
@pytest.mark.parametrize("flags", [(False, False), (True, False), (False, True)])
def test_no_plan_runs_cudnn_while_it_is_switched_off(
    backend, model, inputs, launched, flags, before
):
    layer, x = model[0], inputs.detach().requires_grad_()
    expected = step(copy.deepcopy(layer).double(), x.double())
    plan = split_plan(backend, trace_layers(layer, x).layers)
    planned = ucudnn.convert_(layer, plan).model

    def run(forward, backward):
        for tensor in (x, *planned.parameters()):
            tensor.grad = None
        with cudnn.flags(enabled=forward):
            loss = planned(x).square().mean() * 2**16
        with cudnn.flags(enabled=backward):
            loss.backward()
        return [loss.detach(), x.grad, *(parameter.grad for parameter in planned.parameters())]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if before is not None:
            run(before, before)
        launched.clear()
        found = run(*flags)
    said = "cudnn.enabled is False: torch's own convolution computes it"
    assert [said in str(one.message) for one in caught] == [True]
    # A call of which torch computes every pass is torch's in backward, too.
    assert len(launched) == (3 if flags[0] else 0)
    assert_alike(found, expected, 3e-3)


@pytest.mark.parametrize("op", OPS)
def test_what_an_engine_refuses_on_any_operands_is_torchs(
    backend, model, inputs, launched, monkeypatch, op
):
    expected = step(copy.deepcopy(model).double(), inputs.double())
    plan = split_plan(backend, trace_layers(model, inputs).layers)
    ucudnn.convert_(model, plan)
    step(model, inputs)
    launch, launches = EngineCall.launch, len(launched)
    refused = []

    def refusing(call, *arguments):
        if call._problem.op != op:
            return launch(call, *arguments)
        refused.append(call)
        return "no engine for these strides"

    monkeypatch.setattr(EngineCall, "launch", refusing)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            launched.clear()
            assert_alike(step(model, inputs), expected, 3e-3)
    said = "no engine for these strides: torch's own convolution computes it"
    assert [said in str(one.message) for one in caught] == [True] * 3  # one per layer
    assert 0 < len(launched) < launches
    # the whole call, then a chunk as it lies and on copies
    assert len(refused) == 3 * 3


def test_tuning_on_the_gpu_and_training_by_the_plan(backend, model, inputs, tmp_path):
    reference = copy.deepcopy(model)
    # whole steps of such small kernels decide otherwise each time, and no recording has them
    config = Config(workspace_limit="1MiB", cache=tmp_path, step_race=False)
    plan = ucudnn.tune(model, inputs, config)
    assert plan.backend == "cudnn"
    assert plan.device == backend.device()
    assert plan.workspace_bytes <= 1 << 20
    ucudnn.convert_(model, plan)
    assert_alike(step(model, inputs), step(reference, inputs), 3e-3)
    again = []
    assert ucudnn.tune(reference, inputs, config, again.append).hash == plan.hash
    assert again[-1].measured == 0
    recorded = Config(workspace_limit="1MiB", cache=tmp_path, backend="recorded")
    traced = trace_layers(reference, inputs)
    replayed = tune_problems(traced.layers, recorded, biased=traced.biased)
    for kernel in plan.kernels:
        assert replayed.split(kernel.problem) == plan.split(kernel.problem)


def test_a_grad_scaler_sees_no_false_infinity(backend):
    """Each chunk's gradient is 98304, the sum of both is 0: float16 holds the sum alone."""
    layer = nn.Conv2d(1, 1, 1, bias=False).cuda().half()
    x = torch.full((2, 1, 96, 128), 8.0, device="cuda", dtype=torch.float16)
    x[1].neg_()
    layers = trace_layers(layer, x).layers
    ucudnn.convert_(layer, split_plan(backend, layers, chunk=1))
    layer(x).sum().backward()
    assert layer.weight.grad.isfinite().all()
    assert layer.weight.grad.abs().item() == 0.0


@pytest.mark.parametrize("size", [None, 3])
def test_an_offloaded_segment(backend, model, inputs, size):
    plan = split_plan(backend, trace_layers(model, inputs).layers)
    ucudnn.convert_(model, plan)
    expected = step(model, inputs)
    segment = Segment("", size, recompute=False, offload=True)
    ucudnn.convert_(model, replace(plan, segments=(segment,)))
    assert_alike(step(model, inputs), expected, 1e-5)


@pytest.mark.hardware("memory statistics")
def test_what_an_offloaded_segment_keeps_is_on_the_host(backend, model, inputs):
    kept = []
    for segments in ((), (Segment("", None, recompute=False, offload=True),)):
        segment_(model, segments)
        before = torch.cuda.memory_allocated()
        loss = model(inputs).square().mean()
        kept.append(torch.cuda.memory_allocated() - before)
        loss.backward()
    assert kept[1] < kept[0] / 2


@pytest.mark.hardware("graphs")
def test_a_captured_training_step(backend, model, inputs):
    plan = split_plan(backend, trace_layers(model, inputs).layers)
    ucudnn.convert_(model, plan)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            expected = step(model, inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(model, inputs)
    graph.replay()
    torch.cuda.synchronize()
    assert_alike(found, expected, 1e-5)


# torch's compiler imports a deprecated module of torch, and begins with an empty graph
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The CUDA Graph is empty")
@pytest.mark.hardware("graphs")
def test_a_compiled_step_that_replays_graphs_follows_the_plan(backend, model, inputs):
    """Calls of the plan are captured: nothing that they keep may be memory of the graphs."""
    plan = split_plan(backend, trace_layers(model, inputs).layers)
    expected = step(model, inputs)
    compiled = torch.compile(model, mode="reduce-overhead")
    with ucudnn.installed(plan):
        for _ in range(4):  # warms up, captures and replays
            torch.compiler.cudagraph_mark_step_begin()
            found = step(compiled, inputs)
        assert_alike(found, expected, 3e-3)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, partial(nn.InstanceNorm2d, affine=True)])
def test_a_channel_without_deviation_has_torchs_gradients_where_norms_are_repeated(backend, norm):
    """Nothing is left of it, so that ReLU's gradient is 0; a residue would let it through."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(16, 32, 1), norm(32), nn.ReLU(), nn.Conv2d(32, 8, 3, padding=1)
    ).cuda()
    twin = copy.deepcopy(model)
    segment_(twin, [Segment("", None, recompute=False, selective=True)])
    x = torch.full((4, 16, 48, 48), 0.3, device="cuda")
    for one in (model, twin):
        one(x).square().sum().backward()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
