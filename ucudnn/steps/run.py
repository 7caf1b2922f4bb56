"""Run training steps on a copy of a model, so that the user's own model does not change."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from ucudnn.backends.tensors import PLAIN
from ucudnn.errors import UcudnnError, first_line
from ucudnn.execution.channels_last import lay_out_
from ucudnn.execution.compiling import (
    CompiledCall,
    compiled_as,
    is_compiled,
    original_of,
    room_to_compile,
    uncompiled,
)
from ucudnn.execution.micro_batching import batch_of, segment_
from ucudnn.execution.remembering import Remembered
from ucudnn.outcomes import Compilation
from ucudnn.segment import WHOLE, StepDivision
from ucudnn.steps.copying import copied

# Errors that a model's own code may raise for an input that it does not accept.
MODEL_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
# Errors that a step may raise if it could be traced but cannot be computed here.
STEP_ERRORS = (*MODEL_ERRORS, MemoryError, UcudnnError)


def not_computed(error: BaseException) -> str:
    """The reason to give where a step failed.

    >>> not_computed(RuntimeError("no memory"))
    'a step could not be computed (no memory)'
    """
    return f"a step could not be computed ({first_line(error)})"


def run_step(model: Callable[..., Any], inputs: Any, backward: bool = True) -> Any:
    """Run forward and backward, and return the outputs; parameters' gradients are added to `grad`.

    Inputs are a tensor, a tuple of positional inputs or a dict of keyword inputs. The loss is the
    sum of the absolute values of all outputs.

    >>> layer = nn.Linear(2, 1)
    >>> run_step(layer, torch.ones(3, 2)).shape, layer.bias.grad.abs()
    (torch.Size([3, 1]), tensor([3.]))
    """
    return run_with_leaves(model, inputs, backward)[0]


def run_with_leaves(
    model: Callable[..., Any], inputs: Any, backward: bool, is_smooth: bool = False
) -> tuple[Any, list[Tensor]]:
    """Run as `run_step`, or with the sum of squares as the loss; return the inputs' leaves, too."""
    # The inputs become new leaves: their gradients are computed, but not added to the `grad` of the
    # caller's tensors.
    own = tree_map_only(Tensor, _leaf, inputs)
    args, kwargs = _arguments(own)
    outputs = model(*args, **kwargs)
    # `abs` makes complex outputs real, as the loss of a backward pass must be.
    wanted = (tensor.abs() for tensor in tensors_of(outputs) if tensor.requires_grad)
    losses = [(tensor.square() if is_smooth else tensor).sum() for tensor in wanted]
    if losses and backward:
        torch.autograd.backward(losses)
    return outputs, [one for one in tree_leaves(own) if isinstance(one, Tensor)]


def parts_of(inputs: Any, micro_batch: int | None) -> Iterator[Any]:
    """Cut inputs into parts of `micro_batch` samples; None: all inputs are one part.

    A list with as many entries as there are samples is cut, too. A tensor whose first axis is not
    as long as the batch is not cut: every part has all of it.

    >>> [len(part) for part in parts_of(torch.ones(5, 3), 2)]
    [2, 2, 1]
    """
    if not micro_batch:
        yield inputs
        return
    count = batch_of(inputs)

    def is_list(one: Any) -> bool:
        return isinstance(one, list) and len(one) == count

    def part(where: slice, one: Any) -> Any:
        is_cut = is_list(one) or (isinstance(one, Tensor) and one.dim() and len(one) == count)
        return one[where] if is_cut else one

    for start in range(0, count, micro_batch):
        where = slice(start, start + micro_batch)
        yield tree_map(partial(part, where), inputs, is_leaf=is_list)


def cropped(tensor: Tensor) -> Tensor:
    """Half of each spatial axis of a tensor that has any."""
    halves = (slice(None if size % 2 else size // 2) for size in tensor.shape[2:])
    return tensor[(slice(None), slice(None), *halves)] if tensor.dim() > 2 else tensor


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return inputs if isinstance(inputs, tuple) else (inputs,), {}


def _leaf(tensor: Tensor) -> Tensor:
    """A new leaf tensor on the same memory, without a gradient."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


class Steps:
    """Runs a training step for each of several example inputs, on a copy of the model.

    Running statistics, and other state that forward() updates in the copy, carry over to later
    steps. If `example_inputs` is a list, it holds several examples; otherwise it is one example.

    Attributes:
        model: the copy of the model.
        inputs: the copies of the examples.
        backward: True: a step is forward and backward; False: forward, without a graph.
        memory_format: layout of the model, "keep" as it is.
        division: how steps are divided and compiled.
        run: the copy, or its compiled call.
        compilation: how they were compiled; None if that was not tried.
    """

    def __init__(
        self,
        model: nn.Module,
        example_inputs: Any,
        backward: bool = True,
        memory_format: str = "keep",
        division: StepDivision = WHOLE,
    ) -> None:
        self._model = model
        self.backward, self.memory_format, self.division = backward, memory_format, division
        # Even if torch.compile compiled the user's model, steps run uncompiled until `compile` is
        # called.
        self._is_held_back = self._has_compiled = is_compiled(model)
        # The positional inputs of a single example are a tuple, so a list means several examples.
        examples = example_inputs if isinstance(example_inputs, list) else [example_inputs]
        self.model, self.inputs = copied(original_of(model), examples)
        segment_(self.model, division.segments)
        if memory_format == "channels_last":
            lay_out_(self.model)
        self.run: Callable[..., Any] = self.model
        self.compilation: Compilation | None = None

    def __call__(self) -> None:
        """Run one step for each example."""
        with uncompiled(self._is_held_back), gradient_mode(self.backward):
            for inputs in self.inputs:
                for part in parts_of(inputs, self.division.micro_batch):
                    run_step(self.run, part, self.backward)
                drop_gradients(self.model)

    @property
    def batch(self) -> int:
        """Samples of the first example."""
        return batch_of(self.inputs[0])

    def forward(self, samples: int, *, is_cropped: bool = False) -> None:
        """Run forward on the first samples of each example, or on half of each spatial axis."""
        with uncompiled(self._is_held_back):
            for inputs in self.inputs:
                part = next(parts_of(inputs, samples))
                if is_cropped:
                    part = tree_map_only(Tensor, cropped, part)
                run_step(self.run, part, backward=False)

    def divide(self, division: StepDivision) -> None:
        """Divide all further steps into micro-batches and segments as `division` says.

        Further steps run uncompiled until `compile` is called.
        """
        self.division, self.run, self._is_held_back = division, self.model, self._has_compiled
        segment_(self.model, division.segments)

    def compile(self) -> None:
        """Compile the steps; from now on they run compiled code.

        Only this object runs the compiled code, which is made for its layout and its input sizes.
        If compiling fails, the error is raised, and later steps run uncompiled.
        """
        compiled = self.division.compiled
        self._is_held_back, self.run = False, compiled_as(self._model, self.model)
        if compiled is not None:
            self.run = CompiledCall(self.model, compiled, self._model)
        try:
            # All steps are run twice: code that was compiled for the first of several input sizes
            # may be replaced by other code at the second size.
            for _ in range(2):
                with Remembered(self.model, "the model", updates=False):
                    self()
        except BaseException:
            self._is_held_back, self.run = self._has_compiled, self.model
            raise

    @property
    def is_compiled(self) -> bool:
        """True if steps run compiled code."""
        return self.run is not self.model or (self._has_compiled and not self._is_held_back)

    @torch.no_grad()
    def restore(self) -> None:
        """Give parameters and buffers of the copy the values of those of the user's model."""
        model = original_of(self._model)
        for of in (nn.Module.named_parameters, nn.Module.named_buffers):
            own = dict(of(self.model))
            for name, one in of(model):
                if name in own:
                    own[name].copy_(one)


def drop_gradients(model: nn.Module) -> None:
    """Set the gradients of all parameters to None."""
    for parameter in model.parameters():
        parameter.grad = None


@torch.no_grad()
def nudge_(model: nn.Module, nudge: float) -> None:
    """Change each parameter by this fraction of itself, up or down at random."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            # The signs come from a generator of their own, so that the model draws the same random
            # numbers as without a nudge.
            chance = torch.Generator(parameter.device).manual_seed(0)
            size, device = parameter.shape, parameter.device
            signs = torch.randint(2, size, generator=chance, device=device) * 2 - 1
            parameter.copy_(parameter * (1 + nudge * signs))


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Context in which to run steps of a model; it restores random states."""
    with (
        # Inference mode is left, because tensors made inside it could not take part in autograd.
        torch.inference_mode(False),
        torch.enable_grad(),
        same_random_states(),
        room_to_compile(model),
    ):
        yield


def gradient_mode(is_training: bool) -> AbstractContextManager[object]:
    """Context in which to run a step: `torch.no_grad()` for an inference, else an empty one."""
    return nullcontext() if is_training else torch.no_grad()


def reason_against_steps(model: nn.Module, inputs: Any, device_type: str) -> str:
    """Reason why no step of a model can be run on a kind of device; "" if steps can be run."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    places = {tensor.device.type for tensor in tensors}
    if places != {device_type}:
        return f"steps run on {device_type}, and tensors are on {', '.join(sorted(places))}"
    if any(type(tensor) not in PLAIN for tensor in tensors):
        return "parameters or inputs are no plain tensors"
    is_in_job = dist.is_available() and dist.is_initialized()
    # A SyncBatchNorm would wait for the other ranks, which may run no step now, or another number
    # of steps.
    if is_in_job and any(type(one) is nn.SyncBatchNorm and one.training for one in model.modules()):
        return "a SyncBatchNorm computes with all ranks"
    return ""


def cloned(leaf: Any) -> Any:
    """A copy of a tensor, without its graph; anything else as it is."""
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors in nested sequences, mappings (such as a ModelOutput) and dataclasses.

    >>> len(tensors_of({"loss": torch.zeros(1), "rest": [torch.zeros(2), None]}))
    2
    """
    if isinstance(tree, Tensor):
        return [tree]
    # torch's pytree is not used: an object whose class was not registered with it counts as a leaf
    # there, and its tensors are not found.
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    elif is_dataclass(tree) and not isinstance(tree, type):
        tree = [getattr(tree, one.name) for one in fields(tree)]
    if isinstance(tree, (tuple, list)):
        return [tensor for branch in tree for tensor in tensors_of(branch)]
    return []


@contextmanager
def same_random_states(on_devices: bool = True) -> Iterator[None]:
    """Restore the random states of torch, Python and NumPy when the context ends.

    >>> with same_random_states():
    ...     inside = random.random()
    >>> random.random() == inside
    True
    """
    pythons, numpys = random.getstate(), np.random.get_state()
    try:
        # `None` stands for all GPUs; with an empty list only the state of the CPU is kept.
        with torch.random.fork_rng(devices=None if on_devices else []):
            yield
    finally:
        random.setstate(pythons)
        np.random.set_state(numpys)
