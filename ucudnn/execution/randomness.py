"""Process-wide state that steps of a model may change: random states, and settings of torch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

_SEED = 0
_CUDNN_FLAGS = ("enabled", "benchmark", "deterministic")


@contextmanager
def same_random_states(on_devices: bool = True) -> Iterator[None]:
    """Restore the random states of torch, Python and NumPy when the context ends.

    >>> with same_random_states():
    ...     inside = random.random()
    >>> random.random() == inside
    True

    Args:
        on_devices: restore those of GPUs, too.
    """
    pythons, numpys = random.getstate(), np.random.get_state()
    try:
        # `None` stands for all GPUs; with an empty list only the state of the CPU is kept.
        with torch.random.fork_rng(devices=None if on_devices else []):
            yield
    finally:
        random.setstate(pythons)
        np.random.set_state(numpys)


# Settings of torch that code of models sets, each with a function that reads it.
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
)


@contextmanager
def same_settings() -> Iterator[None]:
    """Restore settings of torch when the context ends: default dtype, threads, precision, cuDNN's.

    >>> with same_settings():
    ...     torch.set_default_dtype(torch.float64)
    >>> torch.get_default_dtype()
    torch.float32
    """
    before = [read() for read, _ in _SETTINGS]
    cudnn = torch.backends.cudnn
    flags = {name: getattr(cudnn, name) for name in _CUDNN_FLAGS}
    try:
        yield
    finally:
        for (read, write), value in zip(_SETTINGS, before, strict=True):
            if read() != value:
                write(value)
        for name, value in flags.items():
            if getattr(cudnn, name) != value:
                setattr(cudnn, name, value)


def seed_all() -> None:
    """Seed the generators of torch, of Python and of NumPy with one fixed number."""
    torch.manual_seed(_SEED)
    random.seed(_SEED)
    np.random.seed(_SEED)


class SameRandomNumbers(TorchDispatchMode):
    """Gives each element of a tensor the same random number in any layout of the tensor.

    torch draws random numbers in the order of memory, so dropout would otherwise drop other
    elements in channels_last.

    >>> x = torch.ones(2, 3, 4, 4)
    >>> found = []
    >>> for one in (x, x.to(memory_format=torch.channels_last)):
    ...     seed_all()
    ...     with SameRandomNumbers():
    ...         found.append(torch.nn.functional.dropout(one))
    >>> torch.equal(*found)
    True
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, with tensors in one order of memory if it draws numbers."""
        del types
        # torch tags every operator that reads a generator, so no list of operators is needed here.
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        plain = tree_map_only(Tensor, Tensor.contiguous, args)
        result = func(*plain, **(kwargs or {}))
        # In-place operators such as `bernoulli_` wrote into the contiguous copies, so the caller's
        # tensors still need the values.
        if not func._schema.is_mutable:
            return result
        for given, used in zip(args, plain, strict=True):
            if isinstance(given, Tensor) and given is not used:
                given.copy_(used)
        # An in-place operator returns its argument: callers expect the tensor that they passed.
        return args[0] if result is plain[0] else result
