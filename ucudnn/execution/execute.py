"""The only loop that computes a split chunk by chunk; the benchmark times the same executables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ParamSpec, TypeVar

import torch
from torch import DispatchKey, DispatchKeySet, Tensor

from ucudnn.backends import AbstractBackend, BoundChunk, Executable, Launcher, add_bias
from ucudnn.backends.tensors import Slices, memory_format
from ucudnn.errors import UnsupportedError
from ucudnn.problem import Problem
from ucudnn.slabs import slabs
from ucudnn.split import Split

P = ParamSpec("P")
R = TypeVar("R")


def _keys_from_python_up() -> DispatchKeySet:
    """Dispatch keys that `as_kernel` excludes: of modes, subclasses, autograd and the like."""
    keys = torch._C._dispatch_keyset_full()
    # In the dispatcher's order, the keys after Python belong to backends. They are removed, which
    # leaves Python and all keys before it.
    keys -= torch._C._dispatch_keyset_full_after(DispatchKey.Python)
    # These three keys are not excluded, because torch resolves lazy tensors (conjugated, negated or
    # zero) by them. The memory of a lazy tensor does not have its values.
    for lazy in (DispatchKey.Conjugate, DispatchKey.Negative, DispatchKey.ZeroTensor):
        keys = keys.remove(lazy)
    return keys


# BackendSelect must be active, because it finds out the device of functions that have no tensor
# arguments, such as torch.empty.
_INCLUDED_KEYS = DispatchKeySet(DispatchKey.BackendSelect)
_EXCLUDED_KEYS = _keys_from_python_up()


def as_kernel(run: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function in the dispatch state in which torch calls the kernels of its operators.

    An algorithm calls torch's operators, which would otherwise inherit the caller's dispatch state.
    Under a dispatch mode, for example, torch does not resolve lazy conjugation and negation, and
    results would be silently wrong. While `run` is called here, lazy conjugation and negation are
    resolved, and modes, subclasses, transforms, autograd and autocast are inactive.

    >>> with torch.device("meta"):
    ...     as_kernel(torch.empty, 0).device
    device(type='cpu')
    """
    guard = torch._C._ForceDispatchKeyGuard(_INCLUDED_KEYS, _EXCLUDED_KEYS)
    with guard, torch._C.DisableTorchFunction():
        return run(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Call:
    """A problem's split with executables for its chunks; to call a `Call` computes the problem."""

    problem: Problem
    split: Split
    chunks: tuple[BoundChunk, ...]
    launcher: Launcher | None = None  # the backend's own way to compute all chunks

    def __call__(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute the problem; all splits of it give the same result, apart from rounding.

        The operands must be contiguous in the problem's layout. A bias (only in fprop and dgrad) is
        added to each chunk of the result, either by the executable itself or right after it, while
        the chunk is still in the processor's cache. A launcher may add it to the whole result.
        """
        if self.launcher is not None:
            launched = self.launcher(a, b, bias)
            if launched is not None:
                return launched
        if len(self.chunks) == 1:
            (only,) = self.chunks
            if self.split.axis == "spatial":  # the slab may read only some rows of a and b
                a, b = a[only.a], b[only.b]
            return only.executable.alone(a, b, bias)
        # Chunks of fprop and dgrad own disjoint slices of the result. Every chunk of wgrad
        # contributes to the whole filter gradient, so there the first chunk makes the result and
        # the others add to it.
        is_sum = self.problem.op == "wgrad"
        result = None if is_sum else empty_result(self.problem, a)
        for chunk in self.chunks:
            if result is None:
                result = chunk.executable.begin(a[chunk.a], b[chunk.b])
            elif is_sum:
                chunk.executable.add(a[chunk.a], b[chunk.b], result)
            else:
                chunk.executable.write(a[chunk.a], b[chunk.b], result[chunk.out], bias)
        assert result is not None
        return result.to(a.dtype)

    @property
    def parts(self) -> list[tuple[Problem, str]]:
        """The problem and the algorithm of each chunk, except chunks whose result is zero."""
        return [(chunk.problem, chunk.algorithm) for chunk in self.chunks if chunk.problem]


def bind(backend: AbstractBackend, problem: Problem, split: Split) -> Call:
    """Build the executables of a split; chunks that one executable can compute share it."""
    bound = list[BoundChunk]()
    # Chunks of the same algorithm share an executable, and what it has prepared in cuDNN, if they
    # are micro-batches or if they are slabs with equal problems.
    built: dict[tuple[Problem | None, str], Executable] = {}
    parts = _parts(problem, split)
    for chunk, (part, whole, x, y) in zip(split.chunks, parts, strict=True):
        key = (whole, chunk.algorithm)
        if key not in built:
            # Only slabs are checked here. A slab has its own input size and padding, which an
            # algorithm may refuse although it computes the whole problem. A micro-batch differs
            # from the whole problem only in its number of samples.
            reason = None
            if split.axis == "spatial" and whole:
                reason = backend.slab_refusal(whole, chunk.algorithm)
            if reason is not None:
                raise UnsupportedError(
                    f"{chunk.algorithm} does not compute the slab {whole}: {reason}"
                )
            built[key] = backend.executable(whole, chunk.algorithm) if whole else _Zero(problem)
        bound.append(BoundChunk(part, chunk.algorithm, built[key], *places(problem, x, y)))
    return Call(problem, split, tuple(bound), backend.launcher(problem, bound))


def build(backend: AbstractBackend, problem: Problem, split: Split) -> Call:
    """Build the executables of a split like `bind`, and check by trial that every chunk can run."""
    call = bind(backend, problem, split)
    # Chunks of the same problem and algorithm need one trial build; dict.fromkeys also keeps their
    # order, so that the error names the first chunk that fails.
    refusals = (backend.build_refusal(*part) for part in dict.fromkeys(call.parts))
    reason = next(filter(None, refusals), None)
    if reason is not None:
        raise UnsupportedError(reason)
    return call


def refusal_of(backend: AbstractBackend, problem: Problem, split: Split) -> str | None:
    """Reason why a backend refuses a chunk of a split; None if it refuses no chunk.

    Nothing is built, so the check is fast enough for every batch of a plan. A chunk that is not
    refused may still fail when it is built.
    """
    is_slabs = split.axis == "spatial"
    refusal = backend.slab_refusal if is_slabs else backend.refusal
    # Micro-batches of equal size and algorithm are alike, and a split may have hundreds of them, so
    # only one of each kind is checked.
    different = split if is_slabs else Split(split.axis, tuple(dict.fromkeys(split.chunks)))
    parts = (part for part, *_ in _parts(problem, different))
    for part, chunk in zip(parts, different.chunks, strict=True):
        algorithm = chunk.algorithm
        reason = refusal(part, algorithm) if part else None
        if reason is not None:
            return f"{algorithm} does not compute {part}: {reason}"
    return None


def _parts(
    problem: Problem, split: Split
) -> Iterator[tuple[Problem | None, Problem | None, Slices, Slices]]:
    """For each chunk: its problem, the problem of its executable, and its slices of x and of y."""
    sizes = [chunk.size for chunk in split.chunks]
    if split.axis == "batch":
        for begin, end in pairwise(accumulate(sizes, initial=0)):
            samples = (slice(begin, end),)
            # The executable of the whole problem computes any number of samples.
            yield problem.with_batch(end - begin), problem, samples, samples
    else:
        every = slice(None)
        for entry in slabs(problem, sizes):
            x, y = slice(*entry.x_rows), slice(*entry.y_rows)
            yield entry.problem, entry.problem, (every, every, x), (every, every, y)


def places(problem: Problem, x: Slices, y: Slices) -> tuple[Slices, Slices, Slices]:
    """The slices of operand a, operand b and the result that belong to a chunk's slices of x and y.

    >>> samples = (slice(0, 2),)
    >>> places(Problem("fprop", 4, 1, 1, (5,), (3,)), samples, samples)
    ((slice(0, 2, None),), (), (slice(0, 2, None),))
    """
    return {"fprop": (x, (), y), "dgrad": (y, (), x), "wgrad": (x, y, ())}[problem.op]


class _Zero(Executable):
    """Executable of a slab whose result is zero for any operands.

    In fprop and wgrad such a slab reads only padding; in dgrad no output depends on its rows of x.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    def alone(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        del b
        return add_bias(empty_result(self._problem, a).zero_(), bias)

    def write(self, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
        del a, b
        add_bias(out.zero_(), bias)

    def add(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        """Add nothing."""


def empty_result(problem: Problem, like: Tensor) -> Tensor:
    """A new tensor for the result of a problem, on the device and in the dtype of `like`."""
    return torch.empty(
        problem.result_shape,
        dtype=like.dtype,
        device=like.device,
        memory_format=memory_format(problem),
    )
