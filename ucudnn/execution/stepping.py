"""Run training steps of a model without changing its parameters, gradients and buffers.

Steps of a compiled model run its original module, until `Steps.compile` is called.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import is_dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ucudnn.backends.tensors import in_channels_last
from ucudnn.errors import UcudnnError
from ucudnn.execution.compiling import (
    compiled_apart,
    is_compiled,
    original_of,
    room_to_compile,
    uncompiled,
)
from ucudnn.execution.layout import InputsFollow, axes_of
from ucudnn.execution.randomness import SameRandomNumbers, same_random_states, seed_all
from ucudnn.execution.snapshot import unchanged

# What a step may raise where it was traced but cannot be computed here.
STEP_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError),
    *(NotImplementedError, RuntimeError, TypeError, ValueError, UcudnnError),
)


class Stepper:
    """Runs forward and backward of a model, on fake tensors or on copies of its own.

    >>> model = nn.Linear(2, 1)
    >>> Stepper(model, torch.ones(3, 2)).run()
    >>> model.weight.grad is None
    True

    Args:
        model: any module; hooks and attributes that forward sets are not restored here.
        example_inputs: a tensor, a tuple of positional inputs or a dict of keyword inputs.
        fake_mode: to compute on fake tensors; None: on real ones.
        backward: run the backward pass too, where an output requires a gradient.
        memory_format: "keep", or "channels_last": like a model in that layout, with copies of its
            parameters and with inputs converted in each step.
    """

    def __init__(
        self,
        model: nn.Module,
        example_inputs: Any,
        fake_mode: FakeTensorMode | None = None,
        backward: bool = True,
        memory_format: str = "keep",
    ) -> None:
        self._model = model
        self._backward = backward
        self._fake_mode = fake_mode
        self.follow(None)
        self._is_last = memory_format == "channels_last"
        self._follow = InputsFollow(axes_of(model) if self._is_last else frozenset())
        # Duplicates stay: tied weights have several names, and functional_call needs each of them.
        # Keyed by id below, all names of one tensor get the same copy and so stay tied.
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._buffers = dict(model.named_buffers(remove_duplicate=False))
        # Buffers are always copied: batch norm writes its running statistics during forward.
        self._copies = {
            id(tensor): self._laid_out(self._own(tensor)) for tensor in self._buffers.values()
        }
        # real steps need no copy of the weights but for their layout: nothing is written to them
        leaf = self._laid_out if fake_mode is None else _as_it_is
        self._weights = {id(tensor): leaf(tensor) for tensor in self._parameters.values()}
        if isinstance(example_inputs, Mapping):
            args, kwargs = tuple[Any, ...](), dict(example_inputs)
        else:
            is_tuple = isinstance(example_inputs, tuple)
            args, kwargs = example_inputs if is_tuple else (example_inputs,), {}
        self._inputs = tree_map_only(Tensor, self._own, (args, kwargs))

    def _own(self, tensor: Tensor) -> Tensor:
        mode = self._fake_mode
        # `from_tensor` makes a fake tensor of the same shape and strides, without memory.
        copied = tensor.detach().clone() if mode is None else mode.from_tensor(tensor)
        return copied.detach().requires_grad_(tensor.requires_grad)

    def _fake(self, tensor: Tensor) -> Tensor:
        return self._laid_out(self._own(tensor))

    def _laid_out(self, tensor: Tensor) -> Tensor:
        if not self._is_last:
            return tensor
        return in_channels_last(tensor.detach()).requires_grad_(tensor.requires_grad)

    def follow(self, compiled: nn.Module | None, prefix: str = "") -> None:
        """Compute the steps of `run` by compiled code of the model; None: by the model again.

        Args:
            compiled: has the model's parameters and buffers.
            prefix: of their names there.
        """
        self._compiled, self._prefix = compiled, prefix

    def run(self) -> None:
        """Compute one step; gradients go to new tensors."""
        self._step(self._compiled)

    def results(self, nudge: float = 0.0) -> Results:
        """Compute one step and return its outputs and gradients.

        Args:
            nudge: change each weight by this fraction of itself, up or down at random.
        """
        # The gradient of a square changes little by rounding, that of `abs` jumps at zero.
        outputs, leaves = self._step(None, nudge, is_smooth=True)
        gradients = (leaf.grad for leaf in leaves.values())
        return Results(
            [tensor.detach() for tensor in tensors_of(outputs)],
            [gradient for gradient in gradients if gradient is not None],
        )

    def _step(
        self, compiled: nn.Module | None, nudge: float = 0.0, is_smooth: bool = False
    ) -> tuple[Any, dict[int, Tensor]]:
        leaf = _leaf if self._fake_mode is None else self._fake
        # What is no parameter torch.compile may take for an input, whose memory moves.
        leaf = leaf if compiled is None else _parameter
        weights = self._weights.items()
        leaves = {which: leaf(_nudged(tensor, nudge)) for which, tensor in weights}
        copies = leaves | self._copies
        tensors = self._parameters | self._buffers
        prefix = "" if compiled is None else self._prefix
        state = {f"{prefix}{name}": copies[id(tensor)] for name, tensor in tensors.items()}
        args, kwargs = self._follow.laid_out(tree_map_only(Tensor, _leaf, self._inputs))
        # functional_call swaps the copies in for the call
        outputs = torch.func.functional_call(compiled or self._model, state, args, kwargs)
        # `abs` makes complex outputs real, as the loss of a backward pass must be.
        wanted = (tensor.abs() for tensor in tensors_of(outputs) if tensor.requires_grad)
        losses = [(tensor.square() if is_smooth else tensor).sum() for tensor in wanted]
        if losses and self._backward:
            torch.autograd.backward(losses)
        return outputs, leaves


class Results(NamedTuple):
    """Outputs and gradients of a step.

    Args:
        outputs: of the model.
        gradients: of its parameters.
    """

    outputs: list[Tensor]
    gradients: list[Tensor]


class Steps:
    """One training step for each of several example inputs.

    Args:
        model: any module.
        example_inputs: as for `Stepper`, or a list of these.
        backward: run the backward pass too.
        memory_format: as for `Stepper`.
    """

    def __init__(
        self,
        model: nn.Module,
        example_inputs: Any,
        backward: bool = True,
        memory_format: str = "keep",
    ) -> None:
        self._model = model
        # Modules that are compiled are run as they were written until `compile`.
        self._is_held_back = self._has_compiled = is_compiled(model)
        # A list means several examples; positional inputs of one example are a tuple.
        several = example_inputs if isinstance(example_inputs, list) else [example_inputs]
        original = original_of(model)
        self._steppers = [
            Stepper(original, inputs, backward=backward, memory_format=memory_format)
            for inputs in several
        ]

    def __call__(self) -> None:
        """Compute all steps."""
        with uncompiled(self._is_held_back):
            for stepper in self._steppers:
                stepper.run()

    def compile(self) -> None:
        """Compute the steps by compiled code from now on, which this compiles, if it can be.

        It is compiled for this object alone: for its layout and its sizes of inputs.
        """
        self._is_held_back = False
        apart = compiled_apart(self._model)
        for stepper in self._steppers:
            stepper.follow(*apart)
        try:
            # Twice: what was compiled for the first of several sizes may be replaced at the second.
            for _ in range(2):
                self()
        except BaseException:
            self._uncompile()
            raise

    def _uncompile(self) -> None:
        self._is_held_back = self._has_compiled
        for stepper in self._steppers:
            stepper.follow(None)

    def results(self, nudge: float = 0.0) -> Results:
        """Compute all steps, uncompiled, with random numbers that are the same in every layout.

        Args:
            nudge: as for `Stepper.results`.
        """
        seed_all()
        with uncompiled(self._has_compiled), SameRandomNumbers():
            results = [stepper.results(nudge) for stepper in self._steppers]
        return Results(
            [tensor for one in results for tensor in one.outputs],
            [tensor for one in results for tensor in one.gradients],
        )


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Compute steps of a model within the context; it restores the model and random states."""
    with (
        # Tensors made inside inference mode cannot take part in autograd, even after it is left.
        torch.inference_mode(False),
        torch.enable_grad(),
        same_random_states(),
        room_to_compile(model),
        unchanged(original_of(model), None),
    ):
        yield


def gradient_mode(is_training: bool) -> AbstractContextManager[object]:
    """Context in which a step is computed: an inference keeps nothing for a backward pass."""
    return nullcontext() if is_training else torch.no_grad()


def reason_against_steps(model: nn.Module, inputs: Any, device_type: str) -> str:
    """Reason why no step can be run on a kind of device; "" if steps can be run."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    places = {tensor.device.type for tensor in tensors}
    if places != {device_type}:
        return f"it is for {device_type} and tensors are on {', '.join(sorted(places))}"
    if any(type(tensor) not in (Tensor, nn.Parameter) for tensor in tensors):
        return "parameters or inputs are no plain tensors"
    is_in_job = dist.is_available() and dist.is_initialized()
    # It would wait for ranks that run no step now, or another number of steps.
    if is_in_job and any(type(one) is nn.SyncBatchNorm and one.training for one in model.modules()):
        return "a SyncBatchNorm computes with all ranks"
    return ""


def _nudged(tensor: Tensor, nudge: float) -> Tensor:
    if not nudge or not tensor.is_floating_point():
        return tensor
    # A generator of its own: the nudge must not consume the numbers that the model draws.
    chance = torch.Generator(tensor.device).manual_seed(0)
    signs = torch.randint(2, tensor.shape, generator=chance, device=tensor.device) * 2 - 1
    nudged = (tensor.detach() * (1 + nudge * signs)).to(tensor.dtype)
    return nudged.requires_grad_(tensor.requires_grad)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _leaf(tensor: Tensor) -> Tensor:
    """A new leaf tensor on the same memory, without a gradient."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _parameter(tensor: Tensor) -> Tensor:
    """A new parameter on the same memory, without a gradient."""
    return nn.Parameter(tensor.detach(), tensor.requires_grad)


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors of nested outputs: sequences, mappings such as a ModelOutput, dataclasses.

    >>> len(tensors_of({"loss": torch.zeros(1), "rest": [torch.zeros(2), None]}))
    2
    """
    if isinstance(tree, Tensor):
        return [tree]
    # torch's own pytree takes classes that are not registered with it for leaves.
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    elif is_dataclass(tree) and not isinstance(tree, type):
        tree = list(vars(tree).values())
    if isinstance(tree, (tuple, list)):
        return [tensor for branch in tree for tensor in tensors_of(branch)]
    return []
