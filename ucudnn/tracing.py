"""Find the convolutions of a model's forward and backward, without computing them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ucudnn.errors import ConfigError, ProblemError
from ucudnn.problem import BYTES_BY_DTYPE, OPS, Problem

_CONVOLUTION = torch.ops.aten.convolution.default
_CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default
_CHANNELS_LAST = (torch.channels_last, torch.channels_last_3d)
# What a model's own code raises when it does not like its input.
_MODEL_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError),
    *(NotImplementedError, RuntimeError, TypeError, ValueError),
)


def trace(model: nn.Module, example_inputs: Any) -> list[Problem]:
    """List every convolution that one training step would compute, in order, without computing it.

    Runs the model on fake tensors: no memory, no device; parameters, buffers, attributes and
    torch's random state are as before. Forward hooks see the fake tensors. A model none of whose
    parameters or inputs requires a gradient has no backward problems.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1))
    >>> [problem.op for problem in trace(model, torch.empty(4, 3, 9, 9))]
    ['fprop', 'fprop', 'dgrad', 'wgrad', 'wgrad']

    Args:
        model: any module; autocast that is active applies.
        example_inputs: a tensor, a tuple of positional inputs or a dict of keyword inputs.

    Raises:
        ConfigError: the model does not accept the inputs.
    """
    return [problem for _, problem in trace_layers(model, example_inputs)]


def trace_layers(model: nn.Module, example_inputs: Any) -> list[tuple[str, Problem]]:
    """Like `trace`, each problem with the name of the module that computes it."""
    recorder = _Recorder()
    # tensors that a model keeps outside its parameters and buffers are made fake on the way
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    names = {id(module): name for name, module in model.named_modules()}
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.random.fork_rng(devices=[]),
            _attributes_kept(model),
            fake_mode,
            _module_names(recorder, names),
            recorder,
        ):
            _step(model, example_inputs, fake_mode)
    except _MODEL_ERRORS as error:
        shapes = [tuple(leaf.shape) for leaf in _tensors(example_inputs)]
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"the model does not accept example inputs of shapes {shapes}: {reason}"
        ) from error
    return recorder.layers


def _step(model: nn.Module, example_inputs: Any, fake_mode: FakeTensorMode) -> None:
    def fake(tensor: Tensor) -> Tensor:
        return fake_mode.from_tensor(tensor).detach().requires_grad_(tensor.requires_grad)

    # functional_call swaps these in for the call, so the model's own tensors stay untouched
    state = {
        name: fake(tensor)
        for name, tensor in [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
    }
    if isinstance(example_inputs, Mapping):
        args, kwargs = (), tree_map_only(Tensor, fake, dict(example_inputs))
    else:
        several = isinstance(example_inputs, (tuple, list))
        args = tree_map_only(Tensor, fake, tuple(example_inputs) if several else (example_inputs,))
        kwargs = {}
    outputs = torch.func.functional_call(model, state, args, kwargs)
    losses = [tensor.abs().sum() for tensor in _tensors(outputs) if tensor.requires_grad]
    if losses:
        torch.autograd.backward(losses)


def _tensors(tree: Any) -> list[Tensor]:
    """The tensors of nested outputs: sequences, mappings such as a ModelOutput, dataclasses.

    >>> len(_tensors({"loss": torch.zeros(1), "rest": [torch.zeros(2), None]}))
    2
    """
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    elif is_dataclass(tree) and not isinstance(tree, type):
        tree = list(vars(tree).values())
    if isinstance(tree, (tuple, list)):
        return [tensor for branch in tree for tensor in _tensors(branch)]
    return []


@contextmanager
def _attributes_kept(model: nn.Module) -> Iterator[None]:
    """Put back what forward assigns to a module, which would be fake tensors here."""
    before = [(module, dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)


class _Recorder(TorchDispatchMode):
    """Notes every convolution that reaches the dispatcher, below autograd and autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[tuple[str, Problem]] = []
        self.modules: list[str] = []
        self._forward_names: dict[Problem, list[str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _CONVOLUTION:
            self._record_forward(*args)
        elif func is _CONVOLUTION_BACKWARD:
            self._record_backward(*args)
        return func(*args, **(kwargs or {}))

    def _record_forward(self, x: Tensor, w: Tensor, bias: Tensor | None, *geometry: Any) -> None:
        del bias
        problem = problem_of("fprop", x, w, *geometry)
        if problem is not None:
            name = self.modules[-1] if self.modules else ""
            self._forward_names.setdefault(problem, []).append(name)
            self.layers.append((name, problem))

    def _record_backward(
        self, dy: Tensor, x: Tensor, w: Tensor, bias_sizes: object, *geometry_and_mask: Any
    ) -> None:
        del dy, bias_sizes
        *geometry, mask = geometry_and_mask
        forward = problem_of("fprop", x, w, *geometry)
        if forward is None:
            return
        # backward meets the calls of one shape in the reverse order of forward
        names = self._forward_names.get(forward)
        name = names.pop() if names else ""
        for op, wanted in zip(OPS[1:], mask, strict=False):
            problem = problem_of(op, x, w, *geometry)
            if wanted and problem is not None:
                self.layers.append((name, problem))


@contextmanager
def _module_names(recorder: _Recorder, names: dict[int, str]) -> Iterator[None]:
    """Keep the stack of modules that are running, for as long as the context lasts."""

    def enter(module: nn.Module, inputs: object) -> None:
        del inputs
        recorder.modules.append(names.get(id(module), ""))

    def leave(module: nn.Module, inputs: object, output: object) -> None:
        del module, inputs, output
        recorder.modules.pop()

    handles = (
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, always_call=True),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def problem_of(
    op: str,
    x: Tensor,
    w: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool = False,
    output_padding: object = None,
    groups: int = 1,
) -> Problem | None:
    """The problem that an aten convolution with these arguments computes.

    >>> x, w = torch.empty(2, 3, 8, 8), torch.empty(4, 3, 3, 3)
    >>> print(problem_of("wgrad", x, w, [1, 1], [0, 0], [1, 1]))
    wgrad conv2d(3->4, k3, 8x8) at batch 2

    Returns:
        The problem, or None where it is not one that can be planned: transposed, empty, of a dtype
        that no backend computes, or impossible.
    """
    del output_padding
    dtype = str(x.dtype).removeprefix("torch.")
    if transposed or dtype not in BYTES_BY_DTYPE or x.dtype != w.dtype or x.dim() not in (3, 4, 5):
        return None
    if x.dim() != w.dim() or x.shape[1] != w.shape[1] * groups:
        return None
    rank = x.dim() - 2
    try:
        return Problem(
            op=op,
            batch=int(x.shape[0]),
            in_channels=int(x.shape[1]),
            out_channels=int(w.shape[0]),
            input_size=tuple(map(int, x.shape[2:])),
            kernel_size=tuple(map(int, w.shape[2:])),
            stride=_per_axis(stride, rank),
            padding=tuple((amount, amount) for amount in _per_axis(padding, rank)),
            dilation=_per_axis(dilation, rank),
            groups=int(groups),
            dtype=dtype,
            layout="nhwc" if is_channels_last(x) or is_channels_last(w) else "nchw",
        )
    except ProblemError:
        return None


def is_channels_last(tensor: Tensor) -> bool:
    """True where torch would treat the tensor as channels-last when it picks a layout.

    >>> is_channels_last(torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last))
    True
    """
    if tensor.dim() not in (4, 5) or tensor.is_contiguous():
        return False
    return tensor.is_contiguous(memory_format=_CHANNELS_LAST[tensor.dim() - 4])


def _per_axis(values: list[int], rank: int) -> tuple[int, ...]:
    sizes = tuple(map(int, values))
    return sizes * rank if len(sizes) == 1 else sizes
