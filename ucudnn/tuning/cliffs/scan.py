"""Scan for cliffs: each convolution alone, and beside it whatever computes the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from time import monotonic

import torch

from ucudnn.backends import AbstractBackend
from ucudnn.backends.torch_cpu.allocator import GLIBC_MMAP_THRESHOLD
from ucudnn.benchmark.statistics import median_ns
from ucudnn.errors import UnsupportedError
from ucudnn.execution.execute import bind
from ucudnn.problem import Problem
from ucudnn.split import DEFAULT_ALGORITHM, KernelPlan, Split, Step, Timing
from ucudnn.tuning.cliffs.found import CHANNELS_LAST, Cliff
from ucudnn.tuning.cliffs.remedies import remedied_kernel

# A remedy must be this many times faster: less is worth tuning for, and is no cliff.
LEAST_RATIO = 1.5
# Rounds in which torch's own and the best remedies take turns.
_ROUNDS, _MOST_REMEDIES = 5, 2
# Many implementations count elements with 32 bits.
_MOST_ELEMENTS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class _Remedy:
    """Something that computes the same.

    Args:
        problem: with the layout and dtype of the remedy.
        split: that computes it.
        said: what to do, for a sentence.
    """

    problem: Problem
    split: Split
    said: str


class Scan:
    """Times convolutions and what could replace them, until the time is over.

    Attributes:
        own_ns: time of a call of each convolution that was scanned, by torch.
        own_bytes: workspace of these calls.

    Args:
        backend: of the device.
        until: end of the scan, by the monotonic clock in seconds.
    """

    def __init__(self, backend: AbstractBackend, until: float) -> None:
        self._backend = backend
        self._until = until
        self.own_ns: dict[Problem, int] = {}
        self.own_bytes: dict[Problem, int] = {}
        self._operands: dict[Problem, tuple[torch.Tensor, torch.Tensor]] = {}

    def cliffs(self, problem: Problem, layers: tuple[str, ...]) -> list[Cliff]:
        """The cliff of a convolution, if it is on one."""
        self._operands.clear()
        own = _Remedy(problem, _undivided(problem, DEFAULT_ALGORITHM), "torch's own convolution")
        own_ns = self._shortest_ns(own)
        if own_ns is None:
            return []
        self.own_ns[problem], self.own_bytes[problem] = own_ns, self._workspace(own)
        tried = self._timed(self._undivided_remedies(problem, own_ns))
        # Scanning every algorithm at every size would take minutes: the fastest are divided.
        names = [remedy.split.steps[0].algorithm for _, remedy in tried[:_MOST_REMEDIES]]
        tried += self._timed(self._splits(problem, dict.fromkeys([DEFAULT_ALGORITHM, *names])))
        # Of what takes as long, the one with the fewest chunks.
        tried.sort(key=lambda entry: (entry[0], len(entry[1].split.steps)))
        best = [remedy for time_ns, remedy in tried if time_ns * LEAST_RATIO <= own_ns]
        best = best[:_MOST_REMEDIES]
        if not best:
            return []
        own_ns, *times = self._in_turn([own, *best])
        self.own_ns[problem] = own_ns
        time_ns, remedy = min(zip(times, best, strict=True), key=lambda one: one[0])
        if time_ns * LEAST_RATIO > own_ns:
            return []
        sizes = self.own_bytes[problem], self._workspace(remedy)
        kind = self._kind(problem, remedy)
        split = remedy.split if remedy.problem == problem else None
        return [Cliff(problem, layers, kind, remedy.said, own_ns, time_ns, *sizes, split)]

    def kernels(
        self, layers: Mapping[Problem, tuple[str, ...]], found: Iterable[Cliff]
    ) -> tuple[KernelPlan, ...]:
        """Plans of all kernels that were scanned, by the splits of cliffs and else by torch."""
        by_problem = {cliff.problem: cliff for cliff in found if cliff.split is not None}
        kernels = []
        for problem, own_ns in self.own_ns.items():
            default = Timing(own_ns, 0, self.own_bytes[problem], _ROUNDS)
            cliff, own = by_problem.get(problem), _undivided(problem, DEFAULT_ALGORITHM)
            split, timing = own, default
            if cliff is not None and cliff.split is not None:
                split = cliff.split
                timing = Timing(cliff.remedied_ns, 0, cliff.remedied_bytes, _ROUNDS)
            kernels.append(remedied_kernel(problem, layers[problem], split, timing, default))
        return tuple(kernels)

    def _timed(self, remedies: Iterator[_Remedy]) -> list[tuple[int, _Remedy]]:
        """Algorithms that can be run, with their shortest times, the fastest first."""
        found = [(self._shortest_ns(remedy), remedy) for remedy in remedies]
        timed = [(time_ns, remedy) for time_ns, remedy in found if time_ns is not None]
        return sorted(timed, key=lambda entry: entry[0])

    def release(self) -> None:
        """Free the operands of the last convolution."""
        self._operands.clear()

    def again_ns(self, problem: Problem) -> int | None:
        """Time of torch's own convolution now; None if it cannot be run, or the time is over."""
        own = _Remedy(problem, _undivided(problem, DEFAULT_ALGORITHM), "")
        self._operands.clear()
        # The first run takes its blocks from the system, later ones may find them.
        return None if self._shortest_ns(own) is None else self._in_turn([own])[0]

    def _undivided_remedies(self, problem: Problem, own_ns: int) -> Iterator[_Remedy]:
        """Other algorithms, layouts and dtypes that compute the batch at once."""
        for candidate in self._backend.candidates(problem)[1:]:
            name = candidate.algorithm
            if self._may_be_faster(problem, name, own_ns):
                yield _Remedy(problem, _undivided(problem, name), f"the algorithm {name}")
        if problem.rank > 1 and problem.layout == "nchw":
            last = replace(problem, layout="nhwc")
            yield _Remedy(last, _undivided(last, DEFAULT_ALGORITHM), CHANNELS_LAST)
        if problem.bytes_per_element == 2:
            single = replace(problem, dtype="float32")
            yield _Remedy(single, _undivided(single, DEFAULT_ALGORITHM), "float32")

    def _splits(self, problem: Problem, names: Iterable[str]) -> Iterator[_Remedy]:
        """Micro-batches of powers of two that fill the batch."""
        batch = problem.batch
        sizes = [1 << k for k in range(batch.bit_length()) if 1 << k < batch]
        for size in (size for size in sizes if batch % size == 0):
            part = problem.with_batch(size)
            for name in names:
                if self._backend.refusal(part, name) is None:
                    split = Split("batch", (Step(size, name),) * (batch // size))
                    yield _Remedy(problem, split, f"the split {split}")

    def _may_be_faster(self, problem: Problem, algorithm: str, own_ns: int) -> bool:
        cost = self._backend.cost(problem, algorithm)
        if cost is None:
            return True
        roofline = self._backend.roofline(problem.dtype)
        least_ns = 0 if roofline is None else roofline.time_ns(cost)
        fits = cost.workspace_bytes <= self._backend.memory_bytes()
        return fits and least_ns * LEAST_RATIO <= own_ns

    def _kind(self, problem: Problem, remedy: _Remedy) -> str:
        """Cause of the cost of a convolution, by the remedy that removes it."""
        shapes = (*problem.operand_shapes, problem.result_shape)
        (first, *_), kernel = remedy.split.steps, self._backend.kernel
        part = problem.with_batch(first.size)
        switches = first.algorithm == DEFAULT_ALGORITHM and kernel(
            part, DEFAULT_ALGORITHM
        ) != kernel(problem, DEFAULT_ALGORITHM)
        largest = max(self.own_bytes[problem], problem.result_bytes)
        kinds = {
            "2^31 elements": max(map(prod, shapes)) > _MOST_ELEMENTS,
            "dtype": remedy.problem.dtype != problem.dtype,
            "strided data gradient": problem.op == "dgrad" and max(problem.stride) > 1,
            "layout copy": remedy.problem.layout != problem.layout,
            "heuristics switch": len(remedy.split.steps) > 1 and switches,
            # A split of the same kernel has smaller blocks, and nothing else.
            "allocator threshold": len(remedy.split.steps) > 1
            and first.algorithm == DEFAULT_ALGORITHM
            and largest >= GLIBC_MMAP_THRESHOLD,
            "slow kernel": True,
        }
        return next(kind for kind, holds in kinds.items() if holds)

    def _shortest_ns(self, remedy: _Remedy) -> int | None:
        """The shorter time of two runs; None if it cannot be run, or the time is over."""
        if monotonic() >= self._until:
            return None
        try:
            call, _ = self._call(remedy)
            return max(1, min(self._backend.elapsed_ns(call) for _ in range(2)))
        # What cannot run by itself, as for lack of memory, is no remedy.
        except (RuntimeError, MemoryError, UnsupportedError):
            return None

    def _workspace(self, remedy: _Remedy) -> int:
        return self._backend.workspace_bytes(*self._call(remedy))

    def _in_turn(self, remedies: list[_Remedy]) -> list[int]:
        """Medians of several rounds."""
        calls = [self._call(remedy)[0] for remedy in remedies]
        samples: list[list[int]] = [[] for _ in calls]
        for _ in range(_ROUNDS):
            for taken, call in zip(samples, calls, strict=True):
                taken.append(max(1, self._backend.elapsed_ns(call)))
        return [median_ns(taken) for taken in samples]

    def _call(
        self, remedy: _Remedy
    ) -> tuple[Callable[[], torch.Tensor], list[tuple[Problem, str]]]:
        call = bind(self._backend, remedy.problem, remedy.split)
        # Drawing them takes longer than many a convolution: those of one layout and dtype are kept.
        if remedy.problem not in self._operands:
            drawn = self._backend.operands(remedy.problem, remedy.problem.batch)
            self._operands[remedy.problem] = drawn
        return partial(call, *self._operands[remedy.problem]), call.parts


def _undivided(problem: Problem, algorithm: str) -> Split:
    return Split("batch", (Step(problem.batch, algorithm),))
