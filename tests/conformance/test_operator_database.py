"""PyTorch's own samples of the six convolutions, computed by force in every way that a plan can.

The samples and error inputs are those of torch.testing's database of operators. Compared with
torch's own convolution: outputs, gradients and second gradients, their strides and dtypes, and the
errors. `pytest --complete` tries all combinations; without it, a part that is drawn by chance.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("expecttest", reason="PyTorch's database of operators imports it")

OPERATORS = tuple(
    f"nn.functional.conv{kind}{rank}d" for kind in ("", "_transpose") for rank in (1, 2, 3)
)
DIVISIONS = ("whole", "single samples", "uneven batches", "single rows", "uneven rows")
ALGORITHMS = (
    "torch_default",
    "onednn",
    "onednn_nhwc",
    "onednn_float32",
    "slow_conv2d",
    "im2col_gemm",
    "gemm",
    "fft",
    "phases",
    "mixed",
)
WAYS = [way for way in product(DIVISIONS, ALGORITHMS) if way != ("whole", "torch_default")]
MEMORIES = ("contiguous", "channels_last", "noncontiguous", "expanded", "transposed")
# Relative L2 error that rounding explains. Integers are never planned; torch computes complex
# convolutions by real ones, which are.
# In half precision each chunk's part of a weight gradient is rounded, and parts may cancel.
TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 2e-2,
    torch.float16: 2e-3,
    torch.complex64: 1e-5,
    torch.int64: 0,
}
# Of one operator and dtype, without --complete.
SAMPLES, WAYS_PER_SAMPLE = 6, 4
MOST_REPORTED = 8

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # torch warns of its own padded copy, for an even kernel
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel"),
]
Forced = Callable[[str, str], AbstractContextManager[Counter[str]]]


@dataclass(frozen=True)
class Outcome:
    """One evaluation of an operator: its results by name, or the error that it raised."""

    results: dict[str, Tensor | None]
    error: str = ""


@pytest.fixture(scope="module")
def database() -> dict[str, Any]:
    """The entries of PyTorch's database, by name."""
    # on import it forbids everybody to set the flags of torch.backends
    with mock.patch("torch.backends.disable_global_flags"):
        from torch.testing._internal.common_methods_invocations import op_db

    return {entry.name: entry for entry in op_db if entry.name in OPERATORS}


def laid_out(value: Any, memory: str, dtype: torch.dtype | None) -> Any:
    """A copy of an argument that lies in memory as told; what is no tensor is left as it is.

    Its dtype is kept where none is told.
    """
    from torch.testing._internal.common_utils import noncontiguous_like

    if not isinstance(value, Tensor):
        return value
    tensor = value.detach().clone()
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if memory == "channels_last" and tensor.dim() in formats:
        tensor = tensor.contiguous(memory_format=formats[tensor.dim()])
    elif memory == "noncontiguous":
        tensor = noncontiguous_like(tensor)
    elif memory == "expanded" and tensor.dim() > 2:
        tensor = tensor[:1].expand(tensor.shape)
    elif memory == "transposed" and tensor.dim() > 2:
        tensor = tensor.transpose(1, -1).contiguous().transpose(1, -1)
    return tensor.to(dtype or tensor.dtype).requires_grad_(value.requires_grad)


def evaluate(entry: Any, sample: Any, memory: str, dtype: torch.dtype | None = None) -> Outcome:
    """The output, gradients and, in single and double precision, gradients of gradients."""
    x, *arguments = (laid_out(value, memory, dtype) for value in (sample.input, *sample.args))
    named = {name: laid_out(value, memory, dtype) for name, value in sample.kwargs.items()}
    results: dict[str, Tensor | None] = {}
    try:
        y = results["y"] = entry(x, *arguments, **named)
        leaves = [
            tensor
            for tensor in (x, *arguments, *named.values())
            if isinstance(tensor, Tensor) and tensor.requires_grad
        ]
        if leaves:
            results |= gradients(y, leaves, twice=torch.finfo(y.dtype).bits > 16)
    except (RuntimeError, ValueError, TypeError) as error:
        return Outcome({}, f"{type(error).__name__}: {error}".splitlines()[0])
    return Outcome(results)


def gradients(y: Tensor, leaves: list[Tensor], twice: bool) -> dict[str, Tensor | None]:
    """Gradients by all leaves, then those of a sum of these gradients by the leaves and dy."""
    dy = some_values(y, 1).requires_grad_(twice)
    once = torch.autograd.grad(y, leaves, dy, create_graph=twice, allow_unused=True)
    found = {f"gradient {index}": gradient for index, gradient in enumerate(once)}
    if twice:
        by = [some_values(gradient, 2) for gradient in once if gradient is not None]
        given = [gradient for gradient in once if gradient is not None]
        second = torch.autograd.grad(given, [*leaves, dy], by, allow_unused=True)
        found |= {f"second gradient {index}": gradient for index, gradient in enumerate(second)}
    return found


def some_values(like: Tensor, seed: int) -> Tensor:
    """The same for equal shapes, whatever the dtype is, but for rounding."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(like.shape, generator=generator, dtype=torch.float64)
    return values.to(like.dtype)


def differences(ours: Outcome, torchs: Outcome, truth: Outcome, tolerance: float) -> Iterator[str]:
    """Where an outcome is not as torch's; numbers may be as far from the truth as torch's are."""
    if ours.error or torchs.error:
        if ours.error != torchs.error:
            yield f"{ours.error or 'no error'}, torch {torchs.error or 'none'}"
        return
    assert ours.results.keys() == torchs.results.keys()
    for name, result in ours.results.items():
        other, exact = torchs.results[name], truth.results[name]
        if result is None or other is None:
            if result is not other:
                yield f"{name} is {'missing' if result is None else 'not wanted'}"
            continue
        facts, others = described(result), described(other)
        if facts != others:
            yield f"{name} is {facts}, torch's {others}"
        elif exact is not None and result.numel():
            bound = max(tolerance, 2 * error_of(other, exact))
            if not error_of(result, exact) <= bound:
                yield f"{name} is off by {error_of(result, exact):.1e}, may be {bound:.1e}"


def described(tensor: Tensor) -> tuple[Any, ...]:
    """What torch's result has in common with ours beside its numbers."""
    leaf = tensor.requires_grad, tensor.is_leaf, tensor._is_view()
    # along an axis of one element any stride addresses the same memory, and torch's kernels differ
    strides = [s if n > 1 else None for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.dtype, tuple(tensor.shape), strides, leaf


def error_of(result: Tensor, exact: Tensor) -> float:
    """The relative L2 error; infinite where there are numbers that are none."""
    result, exact = result.detach(), exact.detach()
    error = (result.to(exact.dtype) - exact).norm() / exact.norm().clamp_min(1e-30)
    return float(error) if error.isfinite() else float("inf")


def wide(dtype: torch.dtype) -> torch.dtype:
    """The precision of the truth."""
    return torch.complex128 if dtype.is_complex else torch.float64


@pytest.mark.parametrize("dtype", TOLERANCES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("name", OPERATORS)
def test_samples(name: str, dtype: torch.dtype, database, forced: Forced, request):
    entry, chance = database[name], random.Random(f"{name} {dtype}")
    differentiable = dtype.is_floating_point or dtype.is_complex
    samples = list(entry.sample_inputs("cpu", dtype, requires_grad=differentiable))
    cases, ways = list(product(samples, MEMORIES)), [WAYS] * len(samples) * len(MEMORIES)
    if not request.config.getoption("--complete"):
        cases = chance.sample(cases, SAMPLES)
        ways = [chance.sample(WAYS, WAYS_PER_SAMPLE) for _ in cases]
    found, used = [], Counter[str]()
    for (sample, memory), ways_of_case in zip(cases, ways, strict=True):
        torchs = evaluate(entry, sample, memory, dtype)
        truth = evaluate(entry, sample, memory, wide(dtype))
        for way in ways_of_case:
            with forced(*way) as planned:
                ours = evaluate(entry, sample, memory, dtype)
            used += planned
            for difference in differences(ours, torchs, truth, TOLERANCES[dtype]):
                found.append(f"{way} {memory} {difference}: {sample}")
    assert not found, f"{len(found)} differences:\n" + "\n".join(found[:MOST_REPORTED])
    assert bool(used) == differentiable


@pytest.mark.parametrize("name", OPERATORS[:3])
def test_errors_are_torchs(name: str, database, forced: Forced):
    entry = database[name]
    refused = [case.sample_input for case in entry.error_inputs("cpu")]
    assert refused
    for sample in refused:
        torchs = evaluate(entry, sample, "contiguous")
        assert torchs.error
        for way in WAYS:
            with forced(*way):
                assert evaluate(entry, sample, "contiguous") == torchs
