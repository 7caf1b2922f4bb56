"""What `trace` finds, against what a real step computes, and that it leaves the model alone."""

from __future__ import annotations

import logging
import signal

import pytest
import torch
from torch import nn
from torch.nn import functional

import ucudnn
from ucudnn.backends.aten import tf32_allowed
from ucudnn.backends.tensors import problem_of, uses_channels_last
from ucudnn.errors import ConfigError
from ucudnn.steps.tracing import trace_layers

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


class Mixed(nn.Module):
    """Modules, functional calls, a transposed convolution, pads and a shared layer."""

    def __init__(self, rank=2, dtype=torch.float32):
        super().__init__()
        convolution = (nn.Conv2d, nn.Conv3d)[rank - 2]
        transposed = (nn.ConvTranspose2d, nn.ConvTranspose3d)[rank - 2]
        self.rank = rank
        self.stem = convolution(3, 8, 3, padding=1, padding_mode="reflect", dtype=dtype)
        self.shared = convolution(8, 8, 3, padding="same", groups=2, dtype=dtype)
        self.again = self.shared
        # Of 4 channels in channels_last, torch 2.13 writes out of bounds without AVX-512.
        self.weight = nn.Parameter(torch.randn(6, 8, *[1] * rank, dtype=dtype))
        self.up = transposed(6, 5, 2, stride=2, dtype=dtype)

    def forward(self, x):
        call = (functional.conv2d, functional.conv3d)[self.rank - 2]
        x = torch.relu(self.again(self.shared(self.stem(x))))
        return self.up(call(x, self.weight, stride=2))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("last", ["nothing", "weights", "input", "both"])
@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_fake_step_finds_what_a_real_one_computes(rank, last, dtype, autocast):
    model, x = Mixed(rank, dtype), torch.randn(2, 3, *[8] * rank, dtype=dtype, requires_grad=True)
    form = FORMATS[rank + 2]
    if last in ("weights", "both"):
        model = model.to(memory_format=form)
    if last in ("input", "both"):
        x = x.detach().to(memory_format=form).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        traced, biased = trace_layers(model, x)
        assert (traced, biased) == trace_layers(model, x, real=True)
    assert len(traced) == 5 * 3
    assert [name for name, _ in traced[:5]] == ["stem", "shared", "shared", "", "up"]
    expected = "bfloat16" if autocast and dtype != torch.float64 else str(dtype)[6:]
    assert {problem.dtype for _, problem in traced} == {expected}


class Sequence(nn.Module):
    """Convolutions between linear layers, as in a transformer that reads images."""

    def __init__(self):
        super().__init__()
        self.linear, self.reduction = nn.Linear(4, 4), nn.Conv2d(4, 4, 2, stride=2)

    def forward(self, x):
        n, c, *size = x.shape
        sequence = self.linear(x.flatten(2).transpose(1, 2))
        return self.reduction(sequence.transpose(1, 2).reshape(n, c, *size))


@pytest.mark.parametrize("batch", [1, 2])
def test_a_batch_of_one_has_the_layout_that_torch_gives_it(batch):
    model, x = Sequence(), torch.randn(batch, 4, 8, 8)
    fake = ucudnn.trace(model, x)
    assert fake == ucudnn.trace(model, x, real=True)
    # the strides of a single sample say nothing, and torch takes them for those of channels first
    assert {problem.layout for problem in fake} == {"nchw" if batch == 1 else "nhwc"}


def test_where_a_bias_is_added():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.plain = nn.Conv2d(3, 4, 3, bias=False)
            self.biased = nn.Conv2d(4, 4, 3)
            self.up = nn.ConvTranspose2d(4, 2, 2)

        def forward(self, x):
            return self.up(self.biased(self.plain(x)))

    layers, biased = trace_layers(Net(), torch.empty(2, 3, 9, 9))
    assert {(name, problem.op) for name, problem in layers if problem in biased} == {
        ("biased", "fprop"),
        ("up", "dgrad"),
    }


def test_the_passes_that_are_asked_for():
    model, x = Mixed(), torch.empty(2, 3, 8, 8)
    forward = trace_layers(model, x, ("fprop",)).layers
    assert forward == trace_layers(model, x).layers[:5]
    # a transposed convolution's forward pass is the dgrad of the convolution it is the gradient of
    assert [problem.op for _, problem in forward] == ["fprop"] * 4 + ["dgrad"]
    weights = trace_layers(model, x, ("wgrad",)).layers
    assert [problem.op for _, problem in weights] == ["wgrad"] * 5


def test_several_input_sizes_in_a_list():
    model = nn.Conv2d(3, 4, 3)
    inputs = [
        torch.empty(2, 3, 9, 9),
        (torch.empty(4, 3, 8, 7),),
        {"input": torch.empty(1, 3, 5, 5)},
    ]
    sizes = [(p.op, p.batch, p.input_size) for p in ucudnn.trace(model, inputs)]
    expected = [(2, (9, 9)), (4, (8, 7)), (1, (5, 5))]
    assert sizes == [(op, *one) for one in expected for op in ("fprop", "wgrad")]


class Gated(nn.Module):
    """Its course depends on values."""

    def __init__(self):
        super().__init__()
        self.small, self.large = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x):
        return self.norm(self.large(x) if x.sum() > 0 else self.small(x)) * torch.rand(1)


@pytest.mark.slow
def test_a_real_step_where_values_decide():
    model, x = Gated(), torch.ones(2, 3, 9, 9)
    with pytest.raises(ConfigError, match="use real=True"):
        ucudnn.trace(model, x)
    assert [p.kernel_size for p in ucudnn.trace(model, x, real=True)] == [(3, 3)] * 2
    assert [p.kernel_size for p in ucudnn.trace(model, -x, real=True)] == [(1, 1)] * 2
    plan = ucudnn.tune(model, x, ucudnn.Config(policy="undivided"), real=True)
    assert {kernel.problem.kernel_size for kernel in plan.kernels} == {(3, 3)}


@pytest.mark.slow
def test_a_hook_that_needs_values_needs_a_real_step():
    model, means = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1)), []
    model[0].register_forward_hook(lambda *call: means.append(call[-1].mean().item()))
    model[1].register_forward_pre_hook(lambda *call: (call[-1][0][:1],))
    with pytest.raises(ConfigError, match="use real=True"):
        ucudnn.trace(model, torch.empty(2, 3, 9, 9))
    problems = ucudnn.trace(model, torch.randn(2, 3, 9, 9), real=True)
    assert [problem.batch for problem in problems] == [2, 1, 1, 1, 2]
    assert not means
    model(torch.randn(2, 3, 9, 9))
    assert len(means) == 1


def test_shared_modules_and_parameters():
    layer = nn.Conv2d(3, 3, 1)
    model = nn.Sequential(layer, layer, nn.Conv2d(3, 3, 1))
    model[2].weight = layer.weight
    assert len(ucudnn.trace(model, torch.empty(2, 3, 4, 4))) == 3 + 5


class TestLayouts:
    """The rule by which torch picks a layout, against its own answer and its results."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    @pytest.mark.parametrize("transposed", [False, True])
    @pytest.mark.parametrize("groups", [1, 3])
    @pytest.mark.parametrize("rank", [2, 3])
    def test_on_a_cpu(self, rank, groups, transposed, dtype):
        geometry = ([1] * rank, [0] * rank, [1] * rank, transposed, [0] * rank, groups)
        shape = (3, 9 // groups) if transposed else (9, 3 // groups)
        for form_x in (torch.contiguous_format, FORMATS[rank + 2]):
            for form_w in (torch.contiguous_format, FORMATS[rank + 2]):
                x = torch.randn(2, 3, *[6] * rank, dtype=dtype).contiguous(memory_format=form_x)
                w = torch.randn(*shape, *[2] * rank, dtype=dtype).contiguous(memory_format=form_w)
                y = torch.convolution(x, w, None, *geometry)
                last = y.is_contiguous(memory_format=FORMATS[rank + 2])
                assert uses_channels_last(x, w, geometry) == last

    def test_as_on_a_gpu(self):
        geometry = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
        x, w = torch.randn(2, 3, 6, 6), torch.randn(4, 3, 2, 2)
        last = w.to(memory_format=torch.channels_last)
        assert uses_channels_last(x, last, geometry, "cuda")
        assert not uses_channels_last(x.double(), last.double(), geometry, "cuda")

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_a_trace_for_a_gpu_hands_on_the_layout_that_one_gives(self, dtype):
        model = nn.Sequential(nn.Conv3d(3, 4, 3), nn.ReLU(), nn.Conv3d(4, 4, 1)).to(dtype)
        model[0].to(memory_format=torch.channels_last_3d)
        x = torch.empty(2, 3, 6, 6, 6, dtype=dtype)
        layouts = {problem.layout for problem in ucudnn.trace(model, x, device_type="cuda")}
        assert layouts == {"nhwc" if dtype == torch.float32 else "nchw"}


class TestTf32:
    """Read through both of torch's interfaces, whichever was used."""

    @pytest.fixture(autouse=True)
    def _restored(self):
        before = torch.backends.cudnn.conv.fp32_precision
        yield
        torch.backends.cudnn.conv.fp32_precision = before

    def test_it_is_in_the_problem_for_float32_on_a_gpu(self):
        model, x = nn.Conv2d(3, 4, 3), torch.empty(2, 3, 6, 6)
        for precision, math in (("ieee", "strict"), ("tf32", "tf32")):
            torch.backends.cudnn.conv.fp32_precision = precision
            assert tf32_allowed() == (math == "tf32")
            traced = ucudnn.trace(model, x, device_type="cuda")
            assert {problem.math for problem in traced} == {math}
            assert {problem.math for problem in ucudnn.trace(model, x)} == {"strict"}
            half = ucudnn.trace(model.bfloat16(), x.bfloat16(), device_type="cuda")
            assert {problem.math for problem in half} == {"strict"}
            model.float()

    def test_the_older_switch(self, monkeypatch):
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
        assert not tf32_allowed()


@pytest.mark.parametrize(("padding", "planned"), [(1, True), (2, False)])
def test_an_output_padding_of_a_stride_is_no_gradient_of_a_convolution(padding, planned):
    x, w = torch.empty(2, 4, 5), torch.empty(4, 3, 3)
    problem = problem_of("fprop", x, w, [2], [0], [3], True, [padding], 1)
    assert (problem is not None) == planned
    if problem is not None:
        y = functional.conv_transpose1d(x, w, stride=2, dilation=3, output_padding=padding)
        assert problem.result_shape == y.shape


def test_a_trace_is_the_same_where_anomalies_are_detected():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1))
    x = torch.randn(2, 3, 8, 8)
    truth = ucudnn.trace(model, x)
    with torch.autograd.set_detect_anomaly(True):
        assert ucudnn.trace(model, x) == truth
        assert ucudnn.trace(model, x, real=True) == truth
        assert torch.is_anomaly_enabled()


@pytest.mark.parametrize("call", [ucudnn.trace, ucudnn.tune, ucudnn.advise])
def test_a_shape_in_place_of_inputs_is_said_to_be_one(call) -> None:
    with pytest.raises(ConfigError, match=r"for a shape give torch.empty\(2, 3, 9, 9\)"):
        call(torch.nn.Conv2d(3, 4, 3), (2, 3, 9, 9))


@pytest.mark.parametrize("call", [ucudnn.tune, ucudnn.advise])
def test_settings_in_a_dict_are_refused(call) -> None:
    with pytest.raises(ConfigError, match="config must be a ucudnn.Config"):
        call(torch.nn.Conv2d(3, 4, 3), torch.empty(2, 3, 9, 9), {"policy": "all"})


@pytest.mark.slow
def test_shapes_that_do_not_fit_are_one_error_and_no_log_of_torch():
    class Odd(nn.Conv2d):
        def forward(self, x):
            return torch.cat([super().forward(x), x], 1)

    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(handler)
    try:
        with pytest.raises(ConfigError, match=r"does not accept .* \[\(2, 3, 9, 9\)\]"):
            ucudnn.trace(Odd(3, 3, 3), torch.empty(2, 3, 9, 9))
        assert said == []
        assert logger.level == logging.NOTSET
    finally:
        logger.removeHandler(handler)


_steps: list[str] = []


class Interrupting(nn.Conv2d):
    """Presses Ctrl-C while its step is traced."""

    presses = 0

    def forward(self, x):
        _steps.append("begun")
        for _ in range(self.presses):
            signal.raise_signal(signal.SIGINT)
        result = super().forward(x)
        _steps.append("computed")
        return result


@pytest.mark.slow
@pytest.mark.parametrize(("presses", "steps"), [(1, ["begun", "computed"]), (2, ["begun"])])
def test_an_interrupt_takes_effect_when_the_trace_is_over_and_a_second_one_at_once(presses, steps):
    """Torch ends the process where one arrives in some of its calls of Python."""
    before, model = signal.getsignal(signal.SIGINT), Interrupting(3, 4, 3)
    model.presses = presses
    _steps.clear()
    with pytest.raises(KeyboardInterrupt):
        ucudnn.trace(model, torch.ones(1, 3, 9, 9))
    assert _steps == steps
    assert signal.getsignal(signal.SIGINT) is before
    model.presses = 0
    assert len(ucudnn.trace(model, torch.ones(1, 3, 9, 9))) == 2


@pytest.mark.slow
def test_a_process_that_is_interrupted_while_it_traces_goes_on(python):
    """Each of 10 traces is interrupted at a random moment, by a thread of the process."""
    code = """
import os, random, signal, threading, time, torch, ucudnn
model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
x = torch.ones(2, 3, 9, 9)
ucudnn.trace(model, x)
began = time.monotonic()
ucudnn.trace(model, x)
length, chance = time.monotonic() - began, random.Random(0)
for _ in range(10):
    try:
        after = chance.uniform(0, length)
        threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT)).start()
        until = time.monotonic() + 1 + length
        while time.monotonic() < until:
            ucudnn.trace(model, x)
    except KeyboardInterrupt:
        continue
    raise SystemExit("it was not interrupted")
"""
    assert python("-c", code).stderr == ""
