"""What single operators need inside: each is measured once, alone, on real tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from ucudnn.backends import AbstractBackend
from ucudnn.backends.tensors import repeat_into
from ucudnn.backends.torch_cpu.processor import hold_free_blocks
from ucudnn.benchmark.failures import free_after, is_out_of_memory
from ucudnn.errors import first_line
from ucudnn.execution.micro_batching import batch_of

# Operators of at least this time are timed once, shorter ones in `_ROUNDS` rounds.
_LONG_NS, _ROUNDS = 10_000_000, 3
# The least samples of which a part shows how the needs grow with the batch.
_LEAST_CUT = 4
# Time of an operator that is too small to be measured.
SMALL_NS = 5_000
# Called with memory that it has not written itself, such an operator may end the process.
_UNSAFE = ("mkldnn_rnn_layer",)
# Arguments by which operators are told the number of samples, or a shape that begins with it.
_COUNTS, _SHAPES = ("N",), ("size", "input_size", "input_sizes", "self_sizes")
# Errors of an operator that is called alone.
_ERRORS = (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError, MemoryError)


class TensorSpec(NamedTuple):
    """A tensor that an operator returns."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    storage_bytes: int

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """The description of a tensor."""
        size = tensor.untyped_storage().nbytes()
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, size)

    def extended(self, count: int, batch: int) -> TensorSpec:
        """This result of `count` samples as one of a batch, whose samples follow one another."""
        if self.shape[:1] != (count,) or self.stride[0] < max(self.stride):
            return self
        size = self.storage_bytes * batch // count
        return self._replace(shape=(batch, *self.shape[1:]), storage_bytes=size)


class Inside(NamedTuple):
    """What one operator needs: bytes beside its operands and results, and time in ns."""

    workspace_bytes: int
    time_ns: int
    # What it really returns, which some operators do not on fake tensors; empty: not known.
    results: tuple[TensorSpec, ...] = ()
    # Why it could not be called alone; empty: it could.
    failure: str = ""


class OperatorTable:
    """What operators need inside, measured one at a time and kept.

    Args:
        backend: backend of the device that computes them.
        known: what is known already; new measurements are added.
    """

    def __init__(self, backend: AbstractBackend, known: dict[Hashable, Inside]) -> None:
        self._backend = backend
        self._known = known
        # For each device, memory that is written before an operator is timed.
        self._others: dict[torch.device, Tensor] = {}

    def inside(
        self,
        operator: Any,
        args: Any,
        kwargs: Any,
        way: Hashable,
        most_bytes: int | None,
        is_weight: Callable[[Tensor], bool],
    ) -> Inside:
        """What a call needs inside.

        Args:
            operator: an operator of torch's dispatcher.
            args: its arguments, with fake tensors.
            kwargs: its keyword arguments.
            way: tells calls apart that are computed in different ways.
            most_bytes: larger operands are cut: two calls with fewer samples show how the needs
                grow with the batch; None: no operand is cut, unless memory is short.
            is_weight: tells which of the tensors have no samples, and are never cut.
        """
        if any(one in str(operator) for one in _UNSAFE):
            return Inside(0, SMALL_NS, failure="it takes memory of its own kind")
        tensors = [one for one in tree_leaves(args) if isinstance(one, Tensor)]
        count = batch_of([one for one in tensors if not is_weight(one)])
        size = sum(map(_bytes, tree_leaves((args, kwargs))))
        parts = 1
        if most_bytes is not None and size > most_bytes and count >= _LEAST_CUT:
            parts = -(-size // most_bytes)
        while True:
            try:
                if parts == 1:
                    return self._known_of(operator, args, kwargs, way)
                # Powers of two, so that several batches have the same parts.
                large = 1 << max(1, (count // parts).bit_length() - 1)
                cuts = (partial(_cut, count, part, is_weight) for part in (large, large // 2))
                sizes = (partial(_cut_sizes, operator, count, n) for n in (large, large // 2))
                found, half = (
                    self._known_of(
                        operator, tree_map(cut, shorten(args)), tree_map(cut, kwargs), way
                    )
                    for cut, shorten in zip(cuts, sizes, strict=True)
                )
            except _ERRORS as error:
                # Some operators need values that are not known here, such as a range of indices.
                if not is_out_of_memory(error) or 2 * parts > count or count < _LEAST_CUT:
                    return Inside(0, SMALL_NS, failure=first_line(error))
                free_after(error)
                del error
                parts *= 2
                continue
            factor = (count - large) / (large - large // 2)
            pairs = zip(found[:2], half[:2], strict=True)
            size, time_ns = (max(0, round(b + factor * (b - s))) for b, s in pairs)
            results = [one.extended(large, count) for one in found.results]
            return Inside(size, time_ns, tuple(results))

    def _known_of(self, operator: Any, args: Any, kwargs: Any, way: Hashable) -> Inside:
        # What a forward returns is kept for the backward.
        is_kept = torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1
        key = (operator, way, is_kept, _settings(), *map(_key, tree_leaves((args, kwargs))))
        if key not in self._known:
            self._known[key] = self._run(operator, args, kwargs, is_kept)
        return self._known[key]

    def _run(self, operator: Any, args: Any, kwargs: Any, is_kept: bool) -> Inside:
        # What reaches an operator in a step has passed autocast; called alone, it would be cast
        # once more.
        with (
            _disable_current_modes(),
            torch.no_grad(),
            torch._C.DisableTorchFunction(),
            torch.autocast("cpu", enabled=False),
            torch.autocast("cuda", enabled=False),
        ):
            try:
                return self._timed(operator, tree_map(_noise, (args, kwargs)), is_kept)
            except _ERRORS as error:
                if is_out_of_memory(error):
                    raise
            # Some operators refuse values: a standard deviation is not negative.
            return self._timed(operator, tree_map(_ones, (args, kwargs)), is_kept)

    def _timed(self, operator: Any, arguments: Any, is_kept: bool) -> Inside:
        backend, results, times = self._backend, list[Any](), list[int]()
        args, kwargs = arguments
        operands = [one for one in tree_leaves(arguments) if isinstance(one, Tensor)]
        others = [self._other(device) for device in {one.device for one in operands}]
        # On a CPU, what is kept lies in memory that the system gives out page by page, when it is
        # first written to. On a GPU, torch's allocator gives out memory that it had before.
        is_on_cpu = backend.device().type == "cpu"
        is_new = is_kept and is_on_cpu
        # Blocks that steps of this process have freed would spare large results their new pages.
        held = hold_free_blocks() if is_on_cpu else []

        def call() -> int:
            if not is_new:
                results.clear()
            for other in others:
                other.zero_()  # in a step, most of what an operator reads has left the caches
            return backend.elapsed_ns(lambda: results.append(operator(*args, **kwargs)))

        try:
            call()  # also looks up what is kept for later calls
        except RuntimeError as error:
            if not held or not is_out_of_memory(error):
                raise
            held.clear()  # there is no other memory for it
            call()
        results.clear()
        span = backend.span(lambda: times.append(call()))
        if times[0] < _LONG_NS:
            results.clear()
            times = [call() for _ in range(_ROUNDS)]
        del held
        workspace = span.peak_bytes - span.end_bytes
        tensors = [one for one in tree_leaves(results[-1]) if isinstance(one, Tensor)]
        is_plain = all(one.layout is torch.strided for one in tensors)
        found = tuple(map(TensorSpec.of, tensors)) if is_plain else ()
        return Inside(max(0, workspace), sorted(times)[len(times) // 2], found)

    def _other(self, device: torch.device) -> Tensor:
        """Memory that fills half of a device's last cache when it is written."""
        if device not in self._others:
            empty = partial(torch.empty, self._backend.cache_bytes() // 2, dtype=torch.uint8)
            # As in a step, glibc's malloc keeps freed blocks once one that is as large was freed.
            empty(device=device)
            self._others[device] = empty(device=device)
        return self._others[device]


_known: dict[Hashable, dict[Hashable, Inside]] = {}


def operators_of(backend: AbstractBackend) -> OperatorTable:
    """A table for a step on a device; what is measured is kept for all steps of this process."""
    return OperatorTable(backend, _known.setdefault((backend.name, backend.device()), {}))


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


@cache
def _drawn() -> Tensor:
    """Random values that are repeated, because drawing all would take longer than timing."""
    generator = torch.Generator().manual_seed(0)  # the user's random state stays as it is
    return torch.randn(1 << 16, generator=generator, dtype=torch.float32, device="cpu")


def _noise(leaf: Any) -> Any:
    """A tensor with memory of its own in place of a fake one: random values; indices are 0.

    Operators that compare values, such as pooling, take longer if the outcome cannot be predicted.
    """
    if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
        return _ones(leaf)
    memory = torch.empty(_extent(leaf), dtype=leaf.dtype, device=leaf.device)
    repeat_into(memory, _drawn().to(leaf.device, leaf.dtype))
    return memory.as_strided(leaf.shape, leaf.stride())


def _ones(leaf: Any) -> Any:
    """A tensor with memory of its own in place of a fake one; indices are 0, all else is 1."""
    if not isinstance(leaf, Tensor):
        return leaf
    if not isinstance(leaf, FakeTensor) and not leaf.is_floating_point():
        return leaf.detach().clone()
    is_index = not (leaf.is_floating_point() or leaf.is_complex() or leaf.dtype == torch.bool)
    fill = torch.zeros if is_index else torch.ones
    memory = fill(_extent(leaf), dtype=leaf.dtype, device=leaf.device)
    return memory.as_strided(leaf.shape, leaf.stride())


def _extent(tensor: Tensor) -> int:
    """Number of elements of memory that a tensor spans."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in sizes) if tensor.numel() else 0


def _bytes(leaf: Any) -> int:
    return leaf.numel() * leaf.element_size() if isinstance(leaf, Tensor) else 0


def _cut(count: int, size: int, is_weight: Callable[[Tensor], bool], leaf: Any) -> Any:
    """An argument of a call with `size` instead of `count` samples; strides stay.

    A vector stays whole: it may have an element for each channel.
    """
    has_rows = isinstance(leaf, FakeTensor) and leaf.dim() > 1 and len(leaf) == count
    return leaf[:size] if has_rows and not is_weight(leaf) else leaf


def _cut_sizes(operator: Any, count: int, size: int, args: Any) -> Any:
    """Positional arguments with `size` in place of the number of samples."""
    named = zip(operator._schema.arguments, args, strict=False)
    return tuple(_cut_size(one.name, count, size, value) for one, value in named)


def _cut_size(name: str, count: int, size: int, value: Any) -> Any:
    if name in _COUNTS and value == count:
        return size
    if name in _SHAPES and isinstance(value, (list, tuple)) and list(value[:1]) == [count]:
        return [size, *value[1:]]
    return value
