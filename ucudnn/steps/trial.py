"""Repeat one call of a module, and compare what it computes.

Each time the module has the arguments, the state and the random numbers of the call. Nothing of a
repetition is left in the module.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ucudnn.execution.nesting import Nest, put_together, take_apart
from ucudnn.execution.remembering import Remembered, left_by
from ucudnn.execution.slabs import in_slabs
from ucudnn.segment import Segment
from ucudnn.steps.run import cloned, tensors_of
from ucudnn.steps.same_numbers import seed_extremes

# Differences of two results up to these fractions of their largest value are tolerated, because
# sums in another order are rounded differently. The keys are bytes per element.
_TOLERATED = {8: 1e-9, 4: 1e-3, 2: 3e-2, 1: 0.2}
# Gradients differ by more: rounding may move the input of a ReLU across zero, or change the maximum
# of a pool. So they are compared by their norm, up to this power of the coarsest relative rounding.
_POWER = 0.25
# Values of these types are compared as they are.
CONSTANTS = (int, float, complex, str, torch.Size, torch.dtype, torch.device, type(None))


class Run(NamedTuple):
    """What one call of a module computed, and what it left."""

    results: list[Any]
    nest: Nest
    left: dict[str, list[Any]]
    # For each tensor among the arguments, the leaf to which its gradient belongs.
    leaves: list[Tensor]
    # The copies of the arguments that were given, and what they hold after the call.
    given: list[Any]
    after: list[Any]


class Trial:
    """Repeats one call of a module, with the state and the random numbers of that call.

    Attributes:
        arguments: of the call, as (args, kwargs).
        leaves: these, taken apart.
        weights: gradients of the results, for backward passes.
        initial: what was in attributes and variables before the call.
        random: the states of torch's random numbers before the call.
        is_updating: True if a run has updated buffers.
        draws_outside: True if a run has drawn from the generators of Python or NumPy.
        draws_of_its_own: True if a run has drawn from a generator of the module.
        forces: True: gradients are computed of arguments that have none, too, to see more.

    Args:
        module: the module.
        forward: its forward.
        arguments: of the call.
        is_training: True: backward is run, too.
    """

    def __init__(
        self, module: nn.Module, forward: Callable[..., Any], arguments: Any, is_training: bool
    ) -> None:
        self.module, self._forward, self.arguments = module, forward, arguments
        self.is_training = is_training
        self.leaves, _ = take_apart(arguments)
        self._modules = [*module.named_modules()]
        self._buffers = [
            (one._buffers, name, buffer)
            for _, one in self._modules
            for name, buffer in one._buffers.items()
            if buffer is not None
        ]
        self._parameters = [one for one in module.parameters() if one.requires_grad]
        self._before = Remembered(module, "it", updates=True, arguments=self.leaves)
        self.random = random_states()
        self.weights: list[Tensor | None] = []
        self.is_updating = self.draws_outside = self.draws_of_its_own = False
        self.forces = True
        self.initial = self._left()

    def run(
        self,
        arguments: Any,
        outside: int | None = None,
        seed: int | None = None,
        is_second: bool = False,
        is_copy: bool = False,
        slabs: Segment | None = None,
    ) -> Run:
        """One more call, with the state and random numbers of the original call.

        Args:
            arguments: of the call, as (args, kwargs).
            is_second: True: call twice, and return what the second call computes.
            is_copy: True: the arguments are a copy already.
            outside: 1 or 2: other numbers of Python and NumPy, small or large ones.
            seed: other random numbers of torch, Python and NumPy.
            slabs: run the module in slabs as this segment says.
        """
        leaves, nest = take_apart(arguments)
        bases: dict[int, Tensor] = {}
        given = [self._copied(one, bases, is_copy) for one in leaves]
        with self._before:
            self._put_back_torchs()
            if outside is not None:
                seed_extremes(outside - 1)
            if seed is not None:
                torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
            numbers = self._before.numbers()
            if is_second:
                own = put_together([*map(cloned, leaves)], nest)
                self._forward(*own[0], **own[1])
                self._before.draw_from(numbers)
                self._put_back_torchs()
            own = put_together(given, nest)
            if slabs is None:
                result = self._forward(*own[0], **own[1])
            else:
                result = in_slabs(slabs, lambda one: self._forward(*one[0], **one[1]), own)
            after, _ = take_apart(own)
            results, result_nest = take_apart(result)
            self.is_updating |= any(
                differ(was, buffers.get(name)) for buffers, name, was in self._buffers
            )
            left = self._left()
            pairs = zip(numbers, self._before.numbers(), strict=True)
            drawn = [pickle.dumps(a) != pickle.dumps(b) for a, b in pairs]
            self.draws_outside |= any(drawn[:2])
            self.draws_of_its_own |= any(drawn[2:])
        return Run(results, result_nest, left, [*bases.values()], given, after)

    def _put_back_torchs(self) -> None:
        """Put back the random states of torch; those of Python and NumPy are in `_before`."""
        torch.set_rng_state(self.random[0])
        for state in self.random[1:]:
            torch.cuda.set_rng_state(state)

    def _left(self) -> dict[str, list[Any]]:
        return {
            what: values
            for name, module in self._modules
            for what, values in left_by(module, name).items()
        }

    def _copied(self, leaf: Any, bases: dict[int, Tensor], is_copy: bool) -> Any:
        """A copy of an argument, whose gradient is that of a new leaf in `bases`."""
        if not isinstance(leaf, Tensor):
            return leaf
        base = bases.get(id(leaf))
        if base is None:
            base = leaf.detach()
            base = bases[id(leaf)] = base if is_copy else base.clone()
            if self.is_training and torch.is_grad_enabled() and is_real(base):
                base.requires_grad_(self.forces or leaf.requires_grad)
        # What is no leaf for the module, stays none.
        return base if leaf.is_leaf or not base.requires_grad else base.clone()

    def with_gradients(self, run: Run) -> tuple[Run, list[Any]]:
        """A run without its graph, which takes memory, and its gradients."""
        gradients = self.gradients(run)
        results = [one.detach() if isinstance(one, Tensor) else one for one in run.results]
        return run._replace(results=results), gradients

    def gradients(self, run: Run, weights: Sequence[Tensor | None] | None = None) -> list[Any]:
        """Gradients of the arguments and parameters of a run; None where there is none."""
        wanted = [*run.leaves, *self._parameters]
        if not self.is_training:
            return [None] * len(wanted)
        weights = self.weights if weights is None else weights
        pairs = [
            (one, weight)
            for one, weight in zip(run.results, weights, strict=True)
            if isinstance(one, Tensor) and one.requires_grad and weight is not None
        ]
        needed = [n for n, one in enumerate(wanted) if one.requires_grad]
        gradients: list[Any] = [None] * len(wanted)
        if pairs and needed:
            found = torch.autograd.grad(
                [one for one, _ in pairs],
                [wanted[n] for n in needed],
                [weight for _, weight in pairs],
                # A tensor that is no argument may belong to the graph of the step.
                retain_graph=True,
                allow_unused=True,
            )
            for n, one in zip(needed, found, strict=True):
                gradients[n] = one
        return gradients

    def eps(self, run: Run) -> float:
        """The coarsest relative rounding in a run."""
        dtypes = {one.dtype for one in run.results if isinstance(one, Tensor)}
        dtypes |= {one.dtype for one in self._parameters}
        kinds = {one.device.type for one in run.results if isinstance(one, Tensor)}
        dtypes |= {torch.get_autocast_dtype(k) for k in kinds if torch.is_autocast_enabled(k)}
        return max(
            torch.finfo(one).eps for one in dtypes if one.is_floating_point or one.is_complex
        )


def is_real(tensor: Tensor) -> bool:
    """True if a tensor has real or complex numbers."""
    return tensor.is_floating_point() or tensor.is_complex()


def weights_of(result: Any) -> Tensor | None:
    """Gradients of a result, for a backward pass: a number for each element."""
    if not isinstance(result, Tensor) or not is_real(result):
        return None
    chance = torch.Generator(result.device).manual_seed(0)
    drawn = torch.randn(result.shape, generator=chance, dtype=result.dtype, device=result.device)
    return torch.empty_like(result).copy_(drawn)


def at(where: slice, results: Sequence[Any]) -> list[Any]:
    """Some samples of each result."""
    return [one[where] if isinstance(one, Tensor) else one for one in results]


def differ(a: Any, b: Any) -> bool:
    """True if a tensor differs from another value in any element; NaN counts as 0."""
    if not isinstance(a, Tensor):
        return False
    if not isinstance(b, Tensor) or a.dtype != b.dtype:
        return True
    return not torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


def name_of_change(before: Mapping[str, list[Any]], now: Mapping[str, list[Any]]) -> str:
    """Name of what has another value now than before; "" if there is nothing."""
    names = (name for name, one in now.items() if are_other(before.get(name, []), one))
    return next(names, "")


def are_other(a: Sequence[Any], b: Sequence[Any], *, only_sizes: bool = False) -> bool:
    """True if values differ by more than rounding."""
    return len(a) != len(b) or any(_is_other(x, y, only_sizes) for x, y in zip(a, b, strict=True))


def _is_other(a: Any, b: Any, only_sizes: bool) -> bool:
    if isinstance(a, CONSTANTS):
        return bool(a != b) and not (a != a and b != b)  # noqa: PLR0124 - NaN
    if not isinstance(a, Tensor):
        # Objects may hold tensors, which are compared.
        held, others = tensors_of(a), tensors_of(b)
        return are_other(held, others, only_sizes=only_sizes)
    if not isinstance(b, Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        return True
    if only_sizes or not a.numel():
        return False
    if not is_real(a):
        return not torch.equal(a, b)
    largest = a.detach().abs().nan_to_num(0.0, 0.0, 0.0).max().item()
    most = largest * _TOLERATED.get(a.abs().element_size(), 0.0)
    return not torch.allclose(a, b, rtol=0.0, atol=most, equal_nan=True)


def are_other_gradients(a: Sequence[Any], b: Sequence[Any], eps: float) -> bool:
    """True if gradients differ by more than rounding."""
    scale = max((_size(one) for one in a if one is not None), default=0.0)
    for one, other in zip(a, b, strict=True):
        if one is None and other is None:
            continue
        zero = torch.zeros(())
        size = 0.0 if one is None else _size(one)
        difference = _size((zero if one is None else one) - (zero if other is None else other))
        # A gradient that is 0 but for rounding has no size of its own.
        if not difference <= eps**_POWER * max(size, scale * eps**_POWER):
            return True
    return False


def _size(gradient: Tensor) -> float:
    """Root of the mean square of a gradient."""
    found = gradient.detach().to_dense() if gradient.layout is not torch.strided else gradient
    return float(found.abs().double().square().mean().sqrt()) if found.numel() else 0.0


def random_states() -> list[Tensor]:
    """The states of torch's generators, that of the GPU included."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states
