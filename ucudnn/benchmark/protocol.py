"""How a candidate is timed: in the steady state that it will run in.

A chunk is timed inside a loop over consecutive chunks of operands larger than the last-level cache,
so that its input is cold and its workspace warm, as in training. Candidates of one size are timed
in interleaved rounds: what disturbs the machine disturbs all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from math import ceil, prod

import torch
from torch import Tensor

from ucudnn.backends import AbstractBackend, Executable
from ucudnn.errors import UnsupportedError
from ucudnn.execute import Call, empty_result, run_first
from ucudnn.problem import Problem
from ucudnn.units import format_bytes

# Part of every key: raise it when a change below makes new times incomparable with stored ones.
PROTOCOL = 1
ROUNDS = 5
# After one sample each, what takes longer than this times the best is not timed any further.
SCREEN_FACTOR = 3
# Chunks shorter than this are timed several at once: the clock and its call cost microseconds.
SAMPLE_NS = 4_000_000
# Twice the cache, so that a chunk has left it before its turn comes again.
_RING_CACHES = 2


@dataclass(frozen=True)
class Ring:
    """Operands larger than the last-level cache, from which chunks are taken in turn.

    Args:
        problem: with the number of samples as its batch.
        a: x for fprop and wgrad, dy for dgrad.
        b: w for fprop and dgrad, dy for wgrad.
        out: what chunks are written into (fprop, dgrad) or added to (wgrad).
    """

    problem: Problem
    a: Tensor
    b: Tensor
    out: Tensor

    @classmethod
    def allocate(cls, backend: AbstractBackend, problem: Problem) -> Ring:
        """Random operands of at least the problem's batch and twice the last-level cache.

        Raises:
            UnsupportedError: the machine has not enough free memory for them.
        """
        samples = ring_samples(problem, _RING_CACHES * backend.cache_bytes())
        whole = problem.with_batch(samples)
        shapes = (*whole.operand_shapes, whole.result_shape)
        needed = sum(prod(shape) for shape in shapes) * problem.bytes_per_element
        if needed > backend.memory_bytes():
            raise UnsupportedError(
                f"{problem} needs {format_bytes(needed)} of operands to be measured, and half of "
                f"the free memory is {format_bytes(backend.memory_bytes())}; use a smaller batch"
            )
        a, b = backend.operands(problem, samples)
        out = empty_result(whole, a).zero_()
        if problem.op == "wgrad":
            out = out.to(torch.promote_types(out.dtype, torch.float32))
        return cls(whole, a, b, out)

    def chunk(self, start: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """The operands of some samples, and where their result goes."""
        end = start + size
        if self.problem.op == "wgrad":
            return self.a[start:end], self.b[start:end], self.out
        return self.a[start:end], self.b, self.out[start:end]


def ring_samples(problem: Problem, least_bytes: int) -> int:
    """Samples whose operands and results fill at least this many bytes, and a whole batch.

    >>> ring_samples(Problem("fprop", 4, 1, 1, (256,), (1,)), 1 << 20)
    512
    """
    one = problem.with_batch(1)
    per_sample = (prod(one.x_shape) + prod(one.y_shape)) * problem.bytes_per_element
    return max(problem.batch, ceil(least_bytes / per_sample))


class ChunkLoop:
    """Runs one candidate in one role over the chunks of a ring, one after the other."""

    def __init__(self, ring: Ring, executable: Executable, size: int, role: str) -> None:
        self._ring = ring
        self._executable = executable
        self._size = size
        self._role = role
        self._start = 0
        self._chunks_per_sample = 1

    def run(self) -> Tensor | None:
        """Run the next chunk and return its result if it is a new tensor."""
        if self._start + self._size > self._ring.problem.batch:
            self._start = 0
        a, b, out = self._ring.chunk(self._start, self._size)
        self._start += self._size
        if self._role == "alone":
            return self._executable.alone(a, b)
        if self._ring.problem.op != "wgrad":
            self._executable.write(a, b, out)
        elif self._role == "first":
            return run_first(self._executable, a, b)
        else:
            self._executable.add(a, b, out)
        return None

    def screen_ns(self, backend: AbstractBackend) -> int:
        """Time of one chunk, taken once; sets how many chunks each later sample runs."""
        time_ns = max(1, backend.elapsed_ns(self.run))
        self._chunks_per_sample = max(1, min(64, SAMPLE_NS // time_ns))
        return time_ns

    def sample_ns(self, backend: AbstractBackend) -> int:
        """Mean time of one chunk over consecutive chunks."""
        count = self._chunks_per_sample
        return max(1, backend.elapsed_ns(lambda: self._run_times(count)) // count)

    def _run_times(self, count: int) -> None:
        for _ in range(count):
            self.run()


def whole_plan(ring: Ring, call: Call) -> Callable[[], Tensor]:
    """A function that runs a whole plan on the ring, a batch further each time."""
    batch, samples = call.problem.batch, ring.problem.batch
    starts = range(0, samples - batch + 1, batch)
    position = chain.from_iterable(repeat(starts))

    def run() -> Tensor:
        a, b, _ = ring.chunk(next(position), batch)
        return call(a, b)

    return run


def interleave(
    backend: AbstractBackend,
    runs: Sequence[Callable[[], object]],
    rounds: int,
    enough_ns: int | None = None,
    least_rounds: int = 5,
) -> list[list[int]]:
    """Time functions in turn, round after round, and return the samples of each in ns.

    The first round is a warm-up and is not returned.

    Args:
        backend: has the clock.
        runs: functions without arguments.
        rounds: how often each is timed.
        enough_ns: stop once this much was spent and `least_rounds` were timed; None: never.
        least_rounds: so many at least.
    """
    samples: list[list[int]] = [[] for _ in runs]
    spent = 0
    for number in range(rounds + 1):
        if enough_ns is not None and spent > enough_ns and number > least_rounds:
            break
        for taken, run in zip(samples, runs, strict=True):
            elapsed = max(1, backend.elapsed_ns(run))
            spent += elapsed
            if number:
                taken.append(elapsed)
    return samples
