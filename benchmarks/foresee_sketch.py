"""A step on fake tensors, with what each operator needs inside: a sketch, until ucudnn has its own.

Operators that are new run once alone, on real tensors of their shapes.
"""

from __future__ import annotations

import time
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from ucudnn.backends import open_backend
from ucudnn.steps.copying import copied
from ucudnn.steps.run import run_step, same_random_states, seed_all

SMALL_BYTES = 1 << 20
SMALL_NS = 5000


class Alive(TorchDispatchMode):
    """Counts the bytes of storages that are alive, after each operator and inside it.

    Args:
        known: tensors that are counted elsewhere: parameters, buffers and inputs.
    """

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = self.time_ns = 0
        self._storages = weakref.WeakSet(one.untyped_storage() for one in known)
        self._costs: dict[Any, tuple[int, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator on fake tensors, and count its results."""
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func is torch.ops.prim.device.default:
            return found
        for one in tree_leaves(found):
            if isinstance(one, Tensor) and one.untyped_storage() not in self._storages:
                storage = one.untyped_storage()
                self._storages.add(storage)
                self._change(storage.nbytes())
                weakref.finalize(storage, self._change, -storage.nbytes())
        inside, time_ns = self._cost(func, args, kwargs)
        self.peak = max(self.peak, self.now + inside)
        self.time_ns += time_ns
        return found

    def _change(self, size: int) -> None:
        self.now += size

    def _cost(self, func: Any, args: Any, kwargs: Any) -> tuple[int, int]:
        leaves = tree_leaves((args, kwargs))
        fakes = [one for one in leaves if isinstance(one, FakeTensor)]
        if func.is_view or sum(one.nbytes for one in fakes) < SMALL_BYTES:
            return 0, SMALL_NS
        described = (
            (one.shape, one.stride(), one.dtype) if isinstance(one, Tensor) else str(one)
            for one in leaves
        )
        key = (func, *described)
        if key not in self._costs:
            with _disable_current_modes(), torch.no_grad():
                self._costs[key] = cost(func, args, kwargs)
        return self._costs[key]


def cost(func: Any, args: Any, kwargs: Any) -> tuple[int, int]:
    """Bytes that an operator needs beyond its results, and its time; 0 if it refuses these values.

    Its operands are ones.
    """
    args, kwargs = tree_map_only(FakeTensor, ones_like, (args, kwargs))
    results: list[Any] = []
    try:
        [span] = open_backend("torch_cpu").spans(lambda _: results.append(func(*args, **kwargs)))
        results.clear()  # as in a step, results are new memory
        began = time.perf_counter_ns()
        results.append(func(*args, **kwargs))
        return span.peak_bytes - span.end_bytes, time.perf_counter_ns() - began
    except (RuntimeError, TypeError, IndexError):
        return 0, 0


def ones_like(fake: FakeTensor) -> Tensor:
    """A real tensor of the same shape and strides."""
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype).fill_(1)


def foreseen_step(model: nn.Module, inputs: Any) -> tuple[int, int]:
    """The peak of a step in bytes, parameters and inputs included, and its time in ns."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    twin, fakes = copied(model, inputs, mode)
    leaves = [*twin.parameters(), *twin.buffers(), *tree_leaves(fakes)]
    known = [one for one in leaves if isinstance(one, Tensor)]
    storages = {id(one): one for one in (tensor.untyped_storage() for tensor in known)}
    with same_random_states(), mode, Alive(known) as alive:
        seed_all()
        run_step(twin, fakes, is_smooth=True)
    return sum(one.nbytes() for one in storages.values()) + alive.peak, alive.time_ns
