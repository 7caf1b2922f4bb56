"""What single operators need inside: each is measured once, alone, on real tensors."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from ucudnn.backends import AbstractBackend
from ucudnn.benchmark.failures import is_out_of_memory
from ucudnn.errors import first_line
from ucudnn.steps.run import batch_of

# Operators of at least this time are timed once, shorter ones in `_ROUNDS` rounds.
_LONG_NS, _ROUNDS = 10_000_000, 3
# Time of an operator that is too small to be measured.
SMALL_NS = 5_000
# Errors of an operator that is called alone.
_ERRORS = (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError, MemoryError)


class Inside(NamedTuple):
    """What one operator needs: bytes beside its operands and results, and time in ns."""

    workspace_bytes: int
    time_ns: int


class OperatorTable:
    """What operators need inside, measured one at a time and kept.

    Args:
        backend: backend of the device that computes them.
    """

    def __init__(self, backend: AbstractBackend) -> None:
        self._backend = backend
        self._known: dict[Hashable, Inside] = {}
        # Operators that could not be called alone, with the reason.
        self.failed: dict[str, str] = {}

    def inside(
        self,
        operator: Any,
        args: Any,
        kwargs: Any,
        way: Hashable = None,
        context: AbstractContextManager[object] | None = None,
        most_bytes: int | None = None,
    ) -> Inside:
        """What a call needs inside.

        Args:
            operator: an operator of torch's dispatcher.
            args: its arguments, with fake tensors.
            kwargs: its keyword arguments.
            way: tells calls apart that are computed in different ways.
            context: context in which it is computed.
            most_bytes: larger operands are cut: two calls with fewer samples show how the needs
                grow with the batch; None: no operand is cut, unless memory is short.
        """
        key = (operator, way, most_bytes, _settings(), *map(_key, tree_leaves((args, kwargs))))
        if key not in self._known:
            with context or nullcontext():
                self._known[key] = self._measured(operator, args, kwargs, most_bytes)
        return self._known[key]

    def _measured(self, operator: Any, args: Any, kwargs: Any, most_bytes: int | None) -> Inside:
        count = batch_of(args)
        size = sum(map(_bytes, tree_leaves((args, kwargs))))
        parts = 1
        while most_bytes is not None and size // parts > most_bytes and 4 * parts <= count:
            parts *= 2
        while True:
            try:
                if parts == 1:
                    return self._run(operator, args, kwargs)
                sizes = count // parts, count // (2 * parts)
                large, small = (
                    self._run(operator, *tree_map(partial(_cut, count, part), (args, kwargs)))
                    for part in sizes
                )
            except _ERRORS as error:
                # Some operators need values that are not known here, such as a range of indices.
                if not is_out_of_memory(error) or 8 * parts > count:
                    self.failed[str(operator)] = first_line(error)
                    return Inside(0, SMALL_NS)
                del error
                parts *= 2
                continue
            factor = (count - sizes[0]) / (sizes[0] - sizes[1])
            grown = (round(b + factor * (b - s)) for b, s in zip(large, small, strict=True))
            return Inside(*(max(0, one) for one in grown))

    def _run(self, operator: Any, args: Any, kwargs: Any) -> Inside:
        # What reaches an operator in a step has passed autocast; called alone, it would be cast
        # once more.
        with (
            _disable_current_modes(),
            torch.no_grad(),
            torch._C.DisableTorchFunction(),
            torch.autocast("cpu", enabled=False),
            torch.autocast("cuda", enabled=False),
        ):
            args, kwargs = tree_map(_real, (args, kwargs))
            run, results = partial(operator, *args, **kwargs), list[Any]()

            def elapsed_ns() -> int:
                results.clear()  # as in a step, the results lie in fresh memory
                return self._backend.elapsed_ns(lambda: results.append(run()))

            # The first call also looks up what is kept for later ones.
            times = [elapsed_ns()]
            results.clear()
            spans = self._backend.spans(lambda _: results.append(run()))
            assert spans is not None
            if times[0] < _LONG_NS:
                times = [elapsed_ns() for _ in range(_ROUNDS)]
        workspace = max(span.peak_bytes for span in spans) - spans[-1].end_bytes
        return Inside(max(0, workspace), sorted(times)[len(times) // 2])


@lru_cache
def operators_of(backend: AbstractBackend) -> OperatorTable:
    """The table of a backend, which all steps of this process share."""
    return OperatorTable(backend)


def _settings() -> Hashable:
    """Settings of torch that decide how an operator is computed."""
    backends = torch.backends
    return (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        backends.mkldnn.enabled,
        backends.cudnn.enabled,
        backends.cudnn.benchmark,
        backends.cudnn.deterministic,
        torch.get_float32_matmul_precision(),
    )


def _key(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return (*leaf.shape, leaf.stride(), leaf.dtype, leaf.device)
    return leaf if isinstance(leaf, (int, float, bool, str, type(None))) else repr(leaf)


def _real(leaf: Any) -> Any:
    """A tensor with memory of its own in place of a fake one; indices are 0, all else is 1."""
    if not isinstance(leaf, FakeTensor):
        return leaf
    sizes = zip(leaf.shape, leaf.stride(), strict=True)
    count = 1 + sum((size - 1) * stride for size, stride in sizes) if leaf.numel() else 0
    is_index = not (leaf.is_floating_point() or leaf.is_complex() or leaf.dtype == torch.bool)
    fill = torch.zeros if is_index else torch.ones
    return fill(count, dtype=leaf.dtype, device=leaf.device).as_strided(leaf.shape, leaf.stride())


def _bytes(leaf: Any) -> int:
    return leaf.numel() * leaf.element_size() if isinstance(leaf, Tensor) else 0


def _cut(count: int, size: int, leaf: Any) -> Any:
    """An argument of a call with `size` instead of `count` samples; strides stay."""
    if isinstance(leaf, FakeTensor) and leaf.dim() and len(leaf) == count:
        return leaf[:size]
    return leaf
