"""Whether a module may run in micro-batches: shown on its real arguments, not by its type."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ucudnn.benchmark.failures import first_line
from ucudnn.execution.randomness import same_random_states
from ucudnn.execution.stepping import STEP_ERRORS

# Of the largest value of a result, by bytes of an element: sums of another order are rounded in
# another way.
_TOLERATED = {8: 1e-9, 4: 1e-3, 2: 3e-2, 1: 0.2}


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found of a module.

    Args:
        reason: why its samples must stay together; "" if it may run in micro-batches.
        repeats: True if its forward may be repeated in backward.
        samples: of its arguments; 0 if they have none.
        shared: places of tensors among the leaves of its arguments that all samples share.
    """

    reason: str = ""
    repeats: bool = False
    samples: int = 0
    shared: tuple[int, ...] = ()


def examined(
    model: nn.Module, step: Callable[[], object], sizes: Mapping[str, int]
) -> dict[str, Finding]:
    """Run a step, and find out which modules may run in micro-batches.

    Args:
        model: whose step it is.
        step: runs it.
        sizes: by name of a module the micro-batch with which it is tried.
    """
    found: dict[str, Finding] = {}
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
    """A forward that also computes what tells whether samples depend on each other."""

    module: nn.Module
    hidden: Callable[..., Any] | None
    name: str
    size: int
    found: dict[str, Finding]
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

        # Trials are not tried. Of a module that runs several times the first failure counts.
        if not self.busy and not self.found.get(self.name, Finding()).reason:
            self.busy.append(self)
            with torch.no_grad(), same_random_states():
                trial = _Trial(self.module, run, leaves)
                try:
                    self.found[self.name] = trial.finding(self.size)
                except STEP_ERRORS as error:
                    reason = f"it fails on part of a batch ({first_line(error)})"
                    self.found[self.name] = Finding(reason, repeats=True)
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
        self._buffers = [
            (one._buffers, name, buffer)
            for one in module.modules()
            for name, buffer in one._buffers.items()
            if buffer is not None
        ]
        self._random = _random_states()
        self._count = next((len(leaf) for leaf in leaves if _has_samples(leaf)), 0)
        self._split = {
            n for n, leaf in enumerate(leaves) if _has_samples(leaf) and len(leaf) == self._count
        }
        self._is_random = False

    def finding(self, size: int) -> Finding:
        """Whether the module may run in micro-batches of a size."""
        given = [_copy(leaf) for leaf in self._leaves]
        whole, spec = self._results(given)
        self._is_random = any(map(_differ, self._random, _random_states()))
        if any(map(_differ, self._leaves, given)):
            return Finding("it writes to its arguments")
        is_updated = any(_differ(own, buffers[name]) for buffers, name, own in self._buffers)
        again, _ = self._results(map(_copy, self._leaves))
        if not whole or any(map(_is_other, whole, again)):
            what = "its results are no tensors" if not whole else "it computes something else again"
            return Finding(what)
        reason = "it updates its buffers" if is_updated else self._dependence(size, whole, spec)
        shared = (n for n, leaf in enumerate(self._leaves) if _has_samples(leaf))
        return Finding(reason, True, self._count, tuple(n for n in shared if n not in self._split))

    def _dependence(self, size: int, whole: Sequence[Tensor], spec: TreeSpec) -> str:
        """Why samples must stay together; "" if they need not."""
        if self._count < 2:
            return "its arguments have one sample" if self._count else "it has no samples"
        if any(not _has_samples(one) or len(one) != self._count for one in whole):
            return "its results are not one for each sample"
        # All other samples are no numbers, and one must be what it was.
        kept = self._count // 2
        alone, _ = self._results(self._parts(partial(_all_but, kept)))
        if any(_is_other(a[kept], b[kept]) for a, b in zip(whole, alone, strict=True)):
            return "its samples depend on each other"
        size = min(size, self._count - 1)
        for where in (slice(0, size), slice(self._count - size, self._count)):
            part, part_spec = self._results(self._parts(partial(_cut, where)))
            wanted = [one[where] for one in whole]
            is_other = part_spec != spec or [a.shape for a in part] != [b.shape for b in wanted]
            # Part of a batch draws other random numbers.
            if is_other or not (self._is_random or not any(map(_is_other, wanted, part))):
                return "part of a batch gives other results"
        return ""

    def _parts(self, change: Callable[[Tensor], Tensor]) -> list[Any]:
        return [
            change(leaf) if n in self._split else _copy(leaf) for n, leaf in enumerate(self._leaves)
        ]

    def _results(self, leaves: Any) -> tuple[list[Tensor], TreeSpec]:
        """Tensors that the module returns, of a call with the same buffers and random numbers."""
        for buffers, name, own in self._buffers:
            buffers[name] = own.clone()
        _set_random_states(self._random)
        found, spec = tree_flatten(self._run([*leaves]))
        return [leaf for leaf in found if isinstance(leaf, Tensor)], spec

    def put_back(self) -> None:
        """Leave the buffers as they were."""
        for buffers, name, own in self._buffers:
            buffers[name] = own


def _has_samples(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def _copy(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _cut(where: slice, leaf: Tensor) -> Tensor:
    return leaf[where].detach().clone()


def _all_but(kept: int, leaf: Tensor) -> Tensor:
    """A batch in which one sample is left, and others are no numbers or, if integers, that one."""
    if leaf.is_floating_point() or leaf.is_complex():
        others = torch.full_like(leaf, float("nan"))
        others[kept] = leaf[kept]
        return others
    return leaf[kept].expand_as(leaf).clone()


def _differ(a: Any, b: Any) -> bool:
    """True if tensors are not the same, bit for bit."""
    if not isinstance(a, Tensor):
        return False
    return not torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


def _is_other(a: Tensor, b: Tensor) -> bool:
    """True if results differ by more than rounding."""
    if not a.is_floating_point() or not a.numel():
        return not torch.equal(a, b)
    most = a.abs().nan_to_num(0.0, 0.0, 0.0).max().item() * _TOLERATED[a.element_size()]
    return not torch.allclose(a, b, rtol=0.0, atol=most, equal_nan=True)


def _random_states() -> list[Tensor]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states


def _set_random_states(states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)
