"""Any layer that follows any plan equals torch's own: outputs, gradients, second gradients.

Hypothesis draws the layer, its input and how they lie in memory; the plan is drawn too, and not
measured, so that every algorithm and split occurs. The truth is torch's float64, and the bound on
the error is in proportion to the sums of absolute values: what rounding can explain, not more.
`pytest --hypothesis-profile=thorough` draws twenty times as many.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ucudnn
from ucudnn.backends import Executable
from ucudnn.backends.torch_cpu.backend import TorchCpuBackend
from ucudnn.config import Config
from ucudnn.plan import Plan
from ucudnn.problem import Problem
from ucudnn.slabs import slabs

# torch warns of its own padded copy, for an even kernel
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel"),
]

KINDS = ("Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d")
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
# How a tensor lies in memory; the last two only where torch has channels-last.
MEMORIES = ("contiguous", "transposed", "sliced", "expanded", "offset", "channels_last")
BATCHES = st.integers(1, 6)
# Unit roundoff of what a result is rounded to, and of the sums before.
EPS = {torch.float64: 2**-52, torch.float32: 2**-23, torch.bfloat16: 2**-8}
# Roundings that a sum may suffer, in units of the sum of its absolute values.
SUMS = 12


# All three, which is training, is the most common.
GRADS = ((True, True, True),) * 3 + tuple(
    (x, w, b) for x in (False, True) for w in (False, True) for b in (False, True)
)


@dataclass(frozen=True)
class Call:
    """One use of one layer.

    Args:
        kind: the class in torch.nn.
        arguments: of its constructor.
        shape: of the input.
        dtype: of the layer and its input.
        memory: how the input, the weight and the output's gradient lie in memory.
        autocast: to bfloat16.
        needs_grad: which of the input, the weight and the bias want a gradient.
        seed: of all values.
    """

    kind: str
    arguments: dict[str, Any]
    shape: tuple[int, ...]
    dtype: torch.dtype
    memory: tuple[str, str, str]
    autocast: bool
    needs_grad: tuple[bool, bool, bool]
    seed: int

    def layer(self) -> nn.Module:
        """A new layer; equal calls give equal ones."""
        torch.manual_seed(self.seed)
        layer: nn.Module = getattr(nn, self.kind)(**self.arguments, dtype=self.dtype)
        if self.memory[1] == "channels_last":
            layer = layer.to(memory_format=FORMATS[layer.weight.dim()])
        for parameter, needed in zip(layer.parameters(), self.needs_grad[1:], strict=False):
            parameter.requires_grad_(needed)
        return layer

    def input(self) -> Tensor:
        """Its input."""
        x = values(self.shape, self.dtype, self.memory[0], self.seed + 1)
        return x.requires_grad_(self.needs_grad[0])

    def cast(self) -> AbstractContextManager[None]:
        """What its forward runs in."""
        return torch.autocast("cpu", torch.bfloat16, enabled=self.autocast)

    def run(self, layer: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor | None]:
        """The output and the gradients of the input, the weight and the bias."""
        for parameter in layer.parameters():
            parameter.grad = None
        with self.cast():
            y = layer(x)
        if any(self.needs_grad[: 1 + len(list(layer.parameters()))]):
            y.backward(values(y.shape, y.dtype, self.memory[2], self.seed + 2))
        return [y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]


def values(shape: tuple[int, ...], dtype: torch.dtype, memory: str, seed: int) -> Tensor:
    """Standard normal values that lie in memory as told."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    if memory == "transposed":
        order = [*shape[:1], *shape[1:][::-1]]
        return normal(*order).permute(0, *range(len(shape) - 1, 0, -1))
    if memory == "sliced":
        return normal(*shape, 2)[..., 1]
    if memory == "expanded":
        return normal(1, *shape[1:]).expand(shape)
    if memory == "offset":
        flat = normal(torch.Size(shape).numel() + 1)
        return flat[1:].view(shape)
    x = normal(*shape)
    return x.contiguous(memory_format=FORMATS[x.dim()]) if memory == "channels_last" else x


def per_axis(rank: int, values: st.SearchStrategy[int]) -> st.SearchStrategy[tuple[int, ...]]:
    """One value per spatial axis."""
    return st.tuples(*[values] * rank)


@st.composite
def arguments_of(draw: st.DrawFn, kind: str) -> dict[str, Any]:
    """Arguments of a layer: groups up to depthwise with multipliers, bias, every padding."""
    rank = int(kind[-2])
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    widths = st.integers(1, 3).map(lambda width: width * groups)
    arguments = {
        "in_channels": draw(widths),
        "out_channels": draw(widths),
        "kernel_size": draw(per_axis(rank, st.integers(1, {1: 7, 2: 5, 3: 3}[rank]))),
        "stride": draw(per_axis(rank, st.sampled_from([1, 1, 2, 3]))),
        "padding": draw(per_axis(rank, st.integers(0, 2))),
        "dilation": draw(per_axis(rank, st.sampled_from([1, 1, 2]))),
        "groups": groups,
        "bias": draw(st.booleans()),
    }
    if "Transpose" in kind:
        # with more, which a dilation allows, it is no gradient of a convolution: never planned
        choices = [st.integers(0, stride - 1) for stride in arguments["stride"]]
        return {**arguments, "output_padding": draw(st.tuples(*choices))}
    arguments["padding_mode"] = draw(
        st.sampled_from(["zeros", "zeros", "zeros", "reflect", "replicate", "circular"])
    )
    named = draw(st.sampled_from([None, None, None, "same", "valid"]))
    if named == "same":
        arguments["stride"] = (1,) * rank
    return {**arguments, "padding": named} if named else arguments


def is_cramped(
    kind: str, arguments: dict[str, Any], extents: list[int], sizes: tuple[int, ...]
) -> bool:
    """Where torch's bfloat16 kernels read foreign memory on a CPU with AVX-512, or crash.

    That is where a filter is larger than the input, an element of it meets none, or a stride above
    one has one place.
    """
    padding = arguments["padding"]
    if padding == "same":
        padding = tuple((extent - 1) // 2 for extent in extents)
    elif padding == "valid":
        padding = (0,) * len(sizes)
    axes = zip(sizes, extents, padding, arguments["stride"], arguments["dilation"], strict=True)
    for axis, (size, extent, amount, stride, dilation) in enumerate(axes):
        inputs, places = size, (size + 2 * amount - extent) // stride + 1
        if "Transpose" in kind:
            more = arguments["output_padding"][axis]
            inputs, places = (size - 1) * stride - 2 * amount + extent + more, size
        met = {
            tap
            for place in range(places)
            for tap in range(0, extent, dilation)
            if 0 <= place * stride - amount + tap < inputs
        }
        if (
            extent > inputs
            or (places == 1 and stride > 1)
            or len(met) < len(range(0, extent, dilation))
        ):
            return True
    return False


@st.composite
def calls(draw: st.DrawFn, kind: str, batches: st.SearchStrategy[int] = BATCHES) -> Call:
    """Any call of a kind of layer that torch accepts."""
    arguments = draw(arguments_of(kind))
    rank = int(kind[-2])
    extents = [
        dilation * (kernel - 1) + 1
        for dilation, kernel in zip(arguments["dilation"], arguments["kernel_size"], strict=True)
    ]
    if "Transpose" in kind:
        # padding that would leave no output is for torch to refuse
        least = [
            max(1, -((extent - 2 * padding - 1) // stride) + 1)
            for extent, padding, stride in zip(
                extents, arguments["padding"], arguments["stride"], strict=True
            )
        ]
    elif arguments.get("padding_mode") == "zeros" and isinstance(arguments["padding"], tuple):
        least = [
            max(1, extent - 2 * padding)
            for extent, padding in zip(extents, arguments["padding"], strict=True)
        ]
    else:
        least = [max(extent, 3) for extent in extents]
    most = {1: 12, 2: 5, 3: 2}[rank]
    sizes = tuple(size + draw(st.integers(0, most)) for size in least)
    batch = draw(batches)
    # torch 2.13 itself, on a CPU, gets cramped problems in bfloat16 wrong, ...
    cramped = is_cramped(kind, arguments, extents, sizes)
    autocast = not cramped and draw(st.sampled_from([False, False, True]))
    dtypes = [torch.float32, torch.float64, torch.bfloat16]
    dtype = draw(st.sampled_from(dtypes[: 1 if autocast else 2 if cramped else 3]))
    # ... and dW of a bfloat16 ConvTranspose3d in channels-last, ...
    is_half = autocast or dtype == torch.bfloat16
    last = rank > 1 and not (is_half and kind == "ConvTranspose3d")
    # ... and reads beyond a channels-last filter of one channel where the input is not contiguous
    several = (
        arguments["out_channels" if "Transpose" in kind else "in_channels"] > arguments["groups"]
    )
    memories = st.sampled_from(MEMORIES if last else MEMORIES[:-1])
    filters = st.sampled_from(
        ["contiguous", "channels_last"] if last and several else ["contiguous"]
    )
    return Call(
        kind=kind,
        arguments=arguments,
        shape=(batch, arguments["in_channels"], *sizes),
        dtype=dtype,
        memory=(draw(memories), draw(filters), draw(memories)),
        autocast=autocast,
        needs_grad=draw(st.sampled_from(GRADS)),
        seed=draw(st.integers(0, 2**16)),
    )


def assert_right(call: Call, results: list[Tensor | None]) -> None:
    truths, magnitudes = exact(call, absolute=False), exact(call, absolute=True)
    rounded = torch.bfloat16 if call.autocast else call.dtype
    summed = torch.promote_types(rounded, torch.float32)
    x, w = (tensor.detach().double().norm() for tensor in (call.input(), call.layer().weight))
    dy = values(truths[0].shape, rounded, call.memory[2], call.seed + 2).double().norm()
    names = ("y", "dx", "dw", "db")[: len(results)]
    # the error of a Fourier transform is in proportion to the norms of what is convolved
    norms = (x * w, dy * w, x * dy, dy)[: len(results)]
    for name, result, truth, sums, norm in zip(
        names, results, truths, magnitudes, norms, strict=True
    ):
        if truth is None:
            assert result is None, f"{name} was not asked for"
            continue
        assert result is not None, f"{name} is missing"
        assert result.shape == truth.shape, name
        assert result.dtype == (rounded if name == "y" else call.dtype), name
        if not result.numel():
            continue
        # once for the sum, once for the bias that is added to it
        bound = 2 * EPS[rounded] * sums.max() + SUMS * EPS[summed] * max(sums.max(), norm)
        error = (result.double() - truth).abs().max()
        assert error <= bound, f"{name}: error {error:.2e}, rounding explains {bound:.2e}"


def exact(call: Call, absolute: bool) -> list[Tensor | None]:
    """The call in float64; or its sums of absolute values, which errors are in proportion to."""
    layer, x = call.layer(), call.input().detach()
    if call.autocast:
        layer, x = layer.to(torch.bfloat16), x.to(torch.bfloat16)
    layer, x = copy.deepcopy(layer).double(), x.double()
    with torch.no_grad():
        if absolute:
            x = x.abs()
            for parameter in layer.parameters():
                parameter.abs_()
    x = x.clone().requires_grad_(call.needs_grad[0])
    y = layer(x)
    if y.requires_grad:
        rounded = torch.bfloat16 if call.autocast else call.dtype
        dy = values(y.shape, rounded, call.memory[2], call.seed + 2).double()
        y.backward(dy.abs() if absolute else dy)
    return [y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]


@contextmanager
def layer_of(way: str, layer: nn.Module, plan: Plan) -> Iterator[nn.Module]:
    """A layer that follows a plan: converted, or untouched where plans are installed."""
    if way == "converted":
        yield ucudnn.convert_(layer, plan).model
    else:
        with ucudnn.installed(plan):
            yield layer


def plan_of(
    call: Call, random_plan: Callable[..., Plan], data: st.DataObject, config: Config | None = None
) -> Plan:
    """A plan drawn for a call; where it does not cover what the call does, that is an error."""
    chance = data.draw(st.randoms(use_true_random=False))
    with call.cast():
        return random_plan(call.layer(), call.input(), chance, config)


ways = pytest.mark.parametrize("way", ["converted", "installed"])
kinds = pytest.mark.parametrize("kind", KINDS)
# Two ways, six kinds and seven tests: a few of each make hundreds of each kind.
most = settings(max_examples=settings.default.max_examples * 2 // 5)
some = settings(max_examples=settings.default.max_examples // 8)


@ways
@kinds
@most
@given(st.data())
def test_outputs_and_gradients(way, kind, random_plan, data):
    call = data.draw(calls(kind))
    plan = plan_of(call, random_plan, data)
    with layer_of(way, call.layer(), plan) as layer:
        results = call.run(layer, call.input())
    assert_right(call, results)
    assert_alike(results, call.run(call.layer(), call.input()))


def assert_alike(results: list[Tensor | None], torchs: list[Tensor | None]) -> None:
    """The same kind of tensors as torch's own: presence, dtype, shape, memory format."""
    for ours, theirs in zip(results, torchs, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
            if ours.dim() in FORMATS:
                formats = (torch.contiguous_format, FORMATS[ours.dim()])
                held = [[t.is_contiguous(memory_format=f) for f in formats] for t in (ours, theirs)]
                assert held[0] == held[1]


@ways
@kinds
@some
@given(st.data())
def test_inference(way, kind, random_plan, data):
    call = replace(data.draw(calls(kind)), needs_grad=(False,) * 3)
    plan = plan_of(call, random_plan, data)
    mode = data.draw(st.sampled_from([torch.no_grad, torch.inference_mode]))
    with layer_of(way, call.layer().eval(), plan) as layer, mode():
        results = call.run(layer, call.input())
    assert_right(call, results)


@ways
@kinds
@some
@given(st.data())
def test_every_smaller_batch_follows_the_same_plan(way, kind, random_plan, data):
    call = data.draw(calls(kind))
    plan = plan_of(call, random_plan, data)
    batch = data.draw(st.integers(1, call.shape[0]))
    smaller = replace(call, shape=(batch, *call.shape[1:]))
    # torch may compute one sample by another kernel in another layout, which is another problem
    outputs = [each.run(each.layer(), each.input())[0] for each in (call, smaller)]
    assume(len({y is not None and y.is_contiguous() for y in outputs}) == 1)
    with layer_of(way, call.layer(), plan) as layer:
        results = smaller.run(layer, smaller.input())
    assert_right(smaller, results)


@ways
@kinds
@some
@given(st.data())
def test_no_samples_at_all(way, kind, random_plan, data):
    call = data.draw(calls(kind))
    plan = plan_of(call, random_plan, data)
    empty = replace(call, shape=(0, *call.shape[1:]), memory=("contiguous",) * 3)
    with layer_of(way, call.layer(), plan) as layer:
        results = empty.run(layer, empty.input())
    for ours, theirs in zip(results, empty.run(empty.layer(), empty.input()), strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)


@ways
@kinds
@some
@given(st.data())
def test_a_shape_without_a_plan_is_torchs_own_bit_for_bit(way, kind, random_plan, data):
    call = data.draw(calls(kind))
    plan = plan_of(call, random_plan, data, Config())
    planned = max(kernel.problem.batch for kernel in plan.kernels)
    larger = replace(call, shape=(planned + 1, *call.shape[1:]))
    with layer_of(way, call.layer(), plan) as layer:
        assume(type(layer) is not type(call.layer()) or way == "installed")
        with pytest.warns(UserWarning, match="has no plan: torch's own convolution computes it"):
            results = larger.run(layer, larger.input())
    for ours, theirs in zip(results, larger.run(larger.layer(), larger.input()), strict=True):
        assert ours is None or torch.equal(ours, theirs)


@ways
@kinds
@some
@given(st.data())
def test_gradients_of_gradients(way, kind, random_plan, data):
    call = data.draw(calls(kind, batches=st.integers(1, 3)))
    memory = ("contiguous",) * 3
    call = replace(call, dtype=torch.float64, autocast=False, memory=memory, needs_grad=(True,) * 3)
    plan = plan_of(call, random_plan, data, Config())
    with layer_of(way, call.layer(), plan) as layer, warnings.catch_warnings():
        # second derivatives are convolutions of other shapes
        warnings.filterwarnings("ignore", message=".*has no plan")
        inputs = (call.input(), *layer.parameters())

        def function(x: Tensor, *parameters: Tensor) -> Tensor:
            names = [name for name, _ in layer.named_parameters()]
            return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), x)

        assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
        assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


class Spy(Executable):
    """Passes on to an executable and notes each chunk that it computes."""

    def __init__(self, inner: Executable, note: Callable[[int], None]) -> None:
        self._inner, self._note = inner, note

    def alone(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        self._note(len(a))
        return self._inner.alone(a, b, bias)

    def write(self, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
        self._note(len(a))
        self._inner.write(a, b, out, bias)

    def add(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        self._note(len(a))
        self._inner.add(a, b, out)


@contextmanager
def chunks_computed() -> Iterator[list[tuple[str, str, int]]]:
    """The operation, algorithm and size of each chunk that the backend computes meanwhile."""
    seen: list[tuple[str, str, int]] = []
    build = TorchCpuBackend.executable

    def spying(self: TorchCpuBackend, problem: Problem, algorithm: str) -> Executable:
        executable = build(self, problem, algorithm)
        return Spy(executable, lambda size: seen.append((problem.op, algorithm, size)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchCpuBackend, "executable", spying)
        yield seen


@ways
@kinds
@some
@given(st.data())
def test_the_plan_is_what_computes(way, kind, random_plan, data):
    call = data.draw(calls(kind))
    plan = plan_of(call, random_plan, data)
    with chunks_computed() as seen, layer_of(way, call.layer(), plan) as layer:
        call.run(layer, call.input())
    with call.cast():
        problems = ucudnn.trace(call.layer(), call.input())
    assert seen == [chunk for problem in problems for chunk in chunks_of(problem, plan)]


def chunks_of(problem: Problem, plan: Plan) -> list[tuple[str, str, int]]:
    """What a plan makes the backend compute; nothing where that is torch's own or all padding."""
    split = plan.split(problem)
    if split.is_default:
        return []
    if split.axis == "batch":
        return [(problem.op, chunk.algorithm, chunk.size) for chunk in split.chunks]
    parts = slabs(problem, [chunk.size for chunk in split.chunks])
    return [
        (problem.op, chunk.algorithm, problem.batch)
        for chunk, part in zip(split.chunks, parts, strict=True)
        if part.problem is not None
    ]
