"""One training step of a model that leaves its parameters, gradients and buffers as they were."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ucudnn.errors import UcudnnError
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
        model: any module; hooks and what forward stores in attributes are not its concern.
        example_inputs: a tensor, a tuple of positional inputs or a dict of keyword inputs.
        fake_mode: to compute on fake tensors; None: on real ones.
        backward: run the backward pass too, where an output requires a gradient.
    """

    def __init__(
        self,
        model: nn.Module,
        example_inputs: Any,
        fake_mode: FakeTensorMode | None = None,
        backward: bool = True,
    ) -> None:
        self._model = model
        self._backward = backward
        self._fake_mode = fake_mode
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._buffers = dict(model.named_buffers(remove_duplicate=False))
        self._copies = {id(tensor): self._own(tensor) for tensor in self._buffers.values()}
        if isinstance(example_inputs, Mapping):
            args, kwargs = tuple[Any, ...](), dict(example_inputs)
        else:
            is_tuple = isinstance(example_inputs, tuple)
            args, kwargs = example_inputs if is_tuple else (example_inputs,), {}
        self._inputs = tree_map_only(Tensor, self._own, (args, kwargs))

    def _own(self, tensor: Tensor) -> Tensor:
        mode = self._fake_mode
        copied = tensor.detach().clone() if mode is None else mode.from_tensor(tensor)
        return copied.detach().requires_grad_(tensor.requires_grad)

    def run(self) -> None:
        """Compute one step; gradients go to tensors that nobody else holds."""
        # a real step needs no second copy of the weights: nothing is written to them
        leaf = _leaf if self._fake_mode is None else self._own
        copies = {id(tensor): leaf(tensor) for tensor in self._parameters.values()}
        copies |= self._copies
        tensors = self._parameters | self._buffers
        state = {name: copies[id(tensor)] for name, tensor in tensors.items()}
        args, kwargs = tree_map_only(Tensor, _leaf, self._inputs)
        # functional_call swaps the copies in for the call
        outputs = torch.func.functional_call(self._model, state, args, kwargs)
        losses = [tensor.abs().sum() for tensor in tensors_of(outputs) if tensor.requires_grad]
        if losses and self._backward:
            torch.autograd.backward(losses)


class Steps:
    """One training step for each of several example inputs.

    Args:
        model: any module.
        example_inputs: as for `Stepper`, or a list of such.
        backward: run the backward pass too.
    """

    def __init__(self, model: nn.Module, example_inputs: Any, backward: bool = True) -> None:
        several = example_inputs if isinstance(example_inputs, list) else [example_inputs]
        self._steppers = [Stepper(model, inputs, backward=backward) for inputs in several]

    def __call__(self) -> None:
        """Compute them."""
        for stepper in self._steppers:
            stepper.run()


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Let steps of a model be computed inside; afterwards it and the random state are as before."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.random.fork_rng(),
        unchanged(model, None),
    ):
        yield


def reason_against_steps(model: nn.Module, inputs: Any, device_type: str) -> str:
    """Reason why no step can be run on a kind of device, "" where some can be."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    places = {tensor.device.type for tensor in tensors}
    if places != {device_type}:
        return f"it is for {device_type} and tensors are on {', '.join(sorted(places))}"
    if any(type(tensor) not in (Tensor, nn.Parameter) for tensor in tensors):
        return "parameters or inputs are no plain tensors"
    return ""


def _leaf(tensor: Tensor) -> Tensor:
    """A new leaf on the same memory, without a gradient."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors of nested outputs: sequences, mappings such as a ModelOutput, dataclasses.

    >>> len(tensors_of({"loss": torch.zeros(1), "rest": [torch.zeros(2), None]}))
    2
    """
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    elif is_dataclass(tree) and not isinstance(tree, type):
        tree = list(vars(tree).values())
    if isinstance(tree, (tuple, list)):
        return [tensor for branch in tree for tensor in tensors_of(branch)]
    return []
