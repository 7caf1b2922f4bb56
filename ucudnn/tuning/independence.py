"""Find out whether a module may run in micro-batches, by runs on its real arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from ucudnn.errors import first_line
from ucudnn.execution.micro_batching import has_samples
from ucudnn.execution.stepping import STEP_ERRORS, same_random_states, tensors_of

# Differences of two results up to these fractions of their largest value are tolerated, because
# sums in another order are rounded differently. The keys are bytes per element.
_TOLERATED = {8: 1e-9, 4: 1e-3, 2: 3e-2, 1: 0.2}
# Results of these types belong to no sample, so they must be the same for a batch and for a part of
# the batch.
_CONSTANTS = (int, float, complex, str, torch.Size, torch.dtype, torch.device, type(None))
_OF_ANY_MODULE = vars(nn.Module()).keys()


@dataclass(frozen=True, slots=True)
class Independence:
    """Whether a module may run in micro-batches, and whether its forward may be repeated.

    Args:
        reason: why its samples must stay together; "" if it may run in micro-batches.
        repeats: True if its forward may be repeated in backward.
        samples: number of samples in its arguments; 0 if they have none.
        shared: indices, among the leaves of its arguments, of tensors that all samples share.
    """

    reason: str = ""
    repeats: bool = False
    samples: int = 0
    shared: tuple[int, ...] = ()


def examined(
    model: nn.Module, step: Callable[[], object], sizes: Mapping[str, int]
) -> dict[str, Independence]:
    """Run a step, and find out which modules may run in micro-batches.

    Args:
        model: the model of the step.
        step: a function that runs the step.
        sizes: for each module to try, by name, the size of the micro-batch.
    """
    found: dict[str, Independence] = {}
    busy: list[_Probe] = []
    modules = dict(model.named_modules())
    with ExitStack() as stack:
        for name, size in sizes.items():
            hidden = vars(modules[name]).get("forward")
            probe = _Probe(modules[name], hidden, name, size, found, busy)
            modules[name].__dict__.update(forward=probe)
            stack.callback(probe.remove)
        step()
    return found


@dataclass
class _Probe:
    """Replaces a module's forward: it tests the module, and then calls the replaced forward."""

    module: nn.Module
    hidden: Callable[..., Any] | None
    name: str
    size: int
    found: dict[str, Independence]
    busy: list[_Probe]

    def remove(self) -> None:
        del self.module.forward
        if self.hidden is not None:
            self.module.__dict__.update(forward=self.hidden)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.hidden or type(self.module).forward.__get__(self.module)
        leaves, spec = tree_flatten((args, kwargs))

        def run(leaves: Sequence[Any]) -> Any:
            args, kwargs = tree_unflatten(leaves, spec)
            return forward(*args, **kwargs)

        # A module is not tried while a module around it is being tried. It is tried again in each
        # later call, until one shows a reason against micro-batches.
        if not self.busy and not self.found.get(self.name, Independence()).reason:
            self.busy.append(self)
            with torch.no_grad(), same_random_states():
                trial = _Trial(self.module, run, leaves)
                try:
                    self.found[self.name] = trial.finding(self.size)
                except STEP_ERRORS as error:
                    reason = f"it fails where samples are changed or missing ({first_line(error)})"
                    self.found[self.name] = Independence(reason, trial.repeats)
                finally:
                    trial.put_back()
                    self.busy.clear()
        return run(leaves)


class _Trial:
    """Repeats one call of a module, with the buffers and the random numbers of that call."""

    def __init__(
        self, module: nn.Module, run: Callable[[Sequence[Any]], Any], leaves: Sequence[Any]
    ) -> None:
        self._run = run
        self._leaves = leaves
        self._modules = [*module.named_modules()]
        self._buffers = [
            (one._buffers, name, buffer)
            for _, one in self._modules
            for name, buffer in one._buffers.items()
            if buffer is not None
        ]
        self._attributes = [(vars(one), {**vars(one)}) for _, one in self._modules]
        generators = (one for _, had in self._attributes for one in had.values())
        self._generators = [
            (one, one.get_state()) for one in generators if isinstance(one, torch.Generator)
        ]
        self._random = _random_states()
        self._count = next((len(leaf) for leaf in leaves if has_samples(leaf)), 0)
        self._split = {
            n for n, leaf in enumerate(leaves) if has_samples(leaf) and len(leaf) == self._count
        }
        self._is_random = False
        # True once it is known that a repeated call gives the same results.
        self.repeats = False

    def finding(self, size: int) -> Independence:
        """Find out whether the module may run in micro-batches of this size."""
        given = [_copy(leaf) for leaf in self._leaves]
        whole, spec = self._results(given)
        left = self._left()
        self._is_random = any(map(_differ, self._random, _random_states()))
        if any(map(_is_written, self._leaves, given)):
            return Independence("it writes to its arguments")
        is_updated = any(_differ(own, buffers[name]) for buffers, name, own in self._buffers)
        again, _ = self._results(map(_copy, self._leaves))
        if not tensors_of(whole):
            return Independence("its results are no tensors")
        if _are_other(whole, again):
            return Independence("it computes something else again")
        if changed := _changed(left, self._left()):
            return Independence(f"it changes its attribute {changed!r} each time")
        self.repeats = True
        reason = "it updates its buffers" if is_updated else ""
        reason = reason or self._dependence(size, whole, spec, left)
        shared = (n for n, leaf in enumerate(self._leaves) if has_samples(leaf))
        return Independence(
            reason, True, self._count, tuple(n for n in shared if n not in self._split)
        )

    def _dependence(
        self, size: int, whole: Sequence[Any], spec: TreeSpec, left: Mapping[str, Any]
    ) -> str:
        """The reason why samples must stay together; "" if there is none."""
        if self._count < 2:
            return "its arguments have one sample" if self._count else "it has no samples"
        if not all(self._is_divisible(one) for one in whole):
            return "its results are not one for each sample"
        # All samples but one are replaced by NaN, or negated: the result of the unchanged sample
        # must stay the same.
        for kept, change in ((self._count // 2, _no_numbers), (0, torch.neg)):
            alone, _ = self._results(self._parts(partial(_all_but, kept, change)))
            if _are_other(_at(slice(kept, kept + 1), whole), _at(slice(kept, kept + 1), alone)):
                return "its samples depend on each other"
        # The last micro-batch of a batch may be a single sample, so that size is tried, too.
        size = min(size, self._count - 1)
        for where in (slice(0, size), slice(self._count - 1, self._count)):
            part, part_spec = self._results(self._parts(partial(_cut, where)))
            # A part of the batch draws other random numbers than the whole. So of random results
            # only the sizes are compared.
            if part_spec != spec or _are_other(_at(where, whole), part, only_sizes=self._is_random):
                return "part of a batch gives other results"
            how = {"only_sizes": self._is_random, "only_tensors": True}
            if changed := _changed(left, self._left(), **how):
                return f"its attribute {changed!r} is that of the batch"
        return ""

    def _is_divisible(self, result: Any) -> bool:
        return isinstance(result, _CONSTANTS) or (
            has_samples(result) and len(result) == self._count
        )

    def _parts(self, change: Callable[[Tensor], Tensor]) -> list[Any]:
        return [
            change(leaf) if n in self._split else _copy(leaf) for n, leaf in enumerate(self._leaves)
        ]

    def _results(self, leaves: Any) -> tuple[list[Any], TreeSpec]:
        """Results of one more call, with the buffers and random numbers of the original call."""
        for buffers, name, own in self._buffers:
            buffers[name] = own.clone()
        torch.set_rng_state(self._random[0])
        for state in self._random[1:]:
            torch.cuda.set_rng_state(state)
        return tree_flatten(self._run([*leaves]))

    def _left(self) -> dict[str, list[Any]]:
        """Copies of what the call left in plain attributes of the modules, by name."""
        return {
            f"{prefix}.{name}" if prefix else name: [
                _copy(one)
                for one in tree_leaves(value)
                if isinstance(one, (Tensor, *_CONSTANTS)) and not isinstance(one, nn.Parameter)
            ]
            for prefix, module in self._modules
            for name, value in vars(module).items()
            if name not in _OF_ANY_MODULE
        }

    def put_back(self) -> None:
        """Leave buffers, attributes and generators as they were."""
        for buffers, name, own in self._buffers:
            buffers[name] = own
        for attributes, had in self._attributes:
            for name in attributes.keys() - had.keys():
                del attributes[name]
            attributes.update(had)
        for generator, state in self._generators:
            generator.set_state(state)


def _copy(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _cut(where: slice, leaf: Tensor) -> Tensor:
    return leaf[where].detach().clone()


def _at(where: slice, results: Sequence[Any]) -> list[Any]:
    return [one[where] if isinstance(one, Tensor) else one for one in results]


def _no_numbers(leaf: Tensor) -> Tensor:
    return torch.full_like(leaf, float("nan"))


def _all_but(kept: int, change: Callable[[Tensor], Tensor], leaf: Tensor) -> Tensor:
    """A batch in which all samples but `kept` are changed: integers to copies of that sample."""
    if leaf.is_floating_point() or leaf.is_complex():
        others = change(leaf.detach())
        others[kept] = leaf[kept]
        return others
    return leaf[kept].expand_as(leaf).clone()


def _is_written(before: Any, after: Any) -> bool:
    """True if a copy of an argument was written to, even if its values stayed the same."""
    if not isinstance(after, Tensor):
        return False
    return bool(not after.is_inference() and after._version) or _differ(before, after)


def _differ(a: Any, b: Any) -> bool:
    """True if a tensor differs from another value in any element; NaN counts as 0."""
    if not isinstance(a, Tensor):
        return False
    if not isinstance(b, Tensor) or a.dtype != b.dtype:
        return True
    return not torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


def _changed(before: Mapping[str, list[Any]], now: Mapping[str, list[Any]], **how: bool) -> str:
    """Name of an attribute that has another value now than before; "" if there is none."""
    names = (name for name, one in now.items() if _are_other(before.get(name, []), one, **how))
    return next(names, "")


def _are_other(
    a: Sequence[Any], b: Sequence[Any], *, only_sizes: bool = False, only_tensors: bool = False
) -> bool:
    """True if values differ by more than rounding."""
    if only_tensors:
        a, b = ([one for one in found if isinstance(one, Tensor)] for found in (a, b))
    return len(a) != len(b) or any(_is_other(x, y, only_sizes) for x, y in zip(a, b, strict=True))


def _is_other(a: Any, b: Any, only_sizes: bool) -> bool:
    if isinstance(a, _CONSTANTS):
        return bool(a != b)
    if not isinstance(a, Tensor):
        # Objects such as dataclasses may hold tensors, which are compared.
        held, others = tensors_of(a), tensors_of(b)
        return _are_other(held, others, only_sizes=only_sizes)
    if not isinstance(b, Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        return True
    if only_sizes or not a.numel():
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return not torch.equal(a, b)
    largest = a.abs().nan_to_num(0.0, 0.0, 0.0).max().item()
    most = largest * _TOLERATED.get(a.abs().element_size(), 0.0)
    return not torch.allclose(a, b, rtol=0.0, atol=most, equal_nan=True)


def _random_states() -> list[Tensor]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states
