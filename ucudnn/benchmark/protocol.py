"""How a candidate is timed: in the steady state that it will run in.

A chunk is timed inside a loop over consecutive chunks of operands larger than the last-level cache,
so that its input is cold and its workspace warm, as in training. docs/measuring.md has the reasons.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from math import ceil, prod

import torch
from torch import Tensor

from ucudnn.backends import AbstractBackend, Executable
from ucudnn.errors import UnsupportedError
from ucudnn.execute import Call, empty_result, places, run_first
from ucudnn.problem import Problem
from ucudnn.slabs import row_count
from ucudnn.units import format_bytes

# Part of every key: raise it when a change below makes new times incomparable with stored ones.
PROTOCOL = 2


@dataclass(frozen=True, slots=True)
class Protocol:
    """The numbers of protocol 2: input cold, workspace warm, eager calls.

    >>> Protocol().target
    0.05

    Args:
        least_rounds: so many samples are taken of what stays in the race.
        most_rounds: no more than these.
        target: a 95 % interval of the median this wide, as a fraction, is narrow enough.
        enough_ns: time after which no more rounds begin, once there are the least.
        warm_ups: single runs before the first sample at most.
        stable: two runs that differ by no more than this fraction are warm.
        sample_ns: shorter chunks are timed several at once: the clock and its call cost
            microseconds.
        lapped: by round, how many times the best a candidate may take to stay in the race.
        lost_share: a round is disturbed in which a candidate had less than this fraction of the
            processor time per time that it had in its best round.
        repeats: so many disturbed rounds are repeated.
    """

    least_rounds: int = 5
    most_rounds: int = 9
    target: float = 0.05
    enough_ns: int = 500_000_000
    warm_ups: int = 4
    stable: float = 0.1
    sample_ns: int = 4_000_000
    lapped: tuple[float, ...] = (3.0, 1.5)
    lost_share: float = 0.8
    repeats: int = 5


# Whole plans are compared in pairs: with nine a 95 % interval forgives a disturbed one at either
# end. No finalist leaves the race, and a tie needs no narrow interval.
FINALS = Protocol(least_rounds=5, most_rounds=9, target=0.0, enough_ns=2_000_000_000, lapped=())
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

    def chunk(self, part: Problem, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Views of the operands and of the result for a chunk, the next ones for the next number.

        Args:
            part: the problem of the chunk: some samples, or some rows of some samples.
            number: from 0; where the ring ends it begins anew.
        """
        whole = self.problem
        turns = row_count(whole) // row_count(part)
        group, turn = divmod(number, turns)
        first = group % (whole.batch // part.batch) * part.batch
        samples = slice(first, first + part.batch), slice(None)
        x_rows = _window(part.input_size[0], whole.input_size[0], turn, turns)
        y_rows = _window(part.output_size[0], whole.output_size[0], turn, turns)
        a, b, out = places(whole, (*samples, x_rows), (*samples, y_rows))
        return self.a[a], self.b[b], self.out[out]


def _window(size: int, extent: int, turn: int, turns: int) -> slice:
    """Windows of an extent, from its begin to its end."""
    begin = (extent - size) * turn // max(turns - 1, 1)
    return slice(begin, begin + size)


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

    def __init__(self, ring: Ring, executable: Executable, part: Problem, role: str) -> None:
        self._ring = ring
        self._executable = executable
        self._part = part
        self._role = role
        self._numbers = count()
        self._chunks_per_sample = 1
        self._most_ns = 0

    def run(self) -> Tensor | None:
        """Run the next chunk and return its result if it is a new tensor."""
        a, b, out = self._ring.chunk(self._part, next(self._numbers))
        if self._role == "alone":
            return self._executable.alone(a, b)
        if self._ring.problem.op != "wgrad":
            self._executable.write(a, b, out)
        elif self._role == "first":
            return run_first(self._executable, a, b)
        else:
            self._executable.add(a, b, out)
        return None

    def warm_up(self, backend: AbstractBackend, protocol: Protocol) -> None:
        """Run until two times agree; sets how many chunks each sample runs."""
        before = time_ns = max(1, backend.elapsed_ns(self.run))
        for _ in range(protocol.warm_ups - 1):
            time_ns = max(1, backend.elapsed_ns(self.run))
            if abs(time_ns - before) <= protocol.stable * before:
                break
            before = time_ns
        self._chunks_per_sample = max(1, min(64, protocol.sample_ns // time_ns))
        self._most_ns = 4 * protocol.sample_ns

    def sample_ns(self, backend: AbstractBackend) -> int:
        """Mean time of one chunk over consecutive chunks."""
        times = self._chunks_per_sample
        elapsed_ns = backend.elapsed_ns(lambda: self._run_times(times))
        if elapsed_ns > self._most_ns:  # others keep the machine busy
            self._chunks_per_sample = max(1, times // 2)
        return max(1, elapsed_ns // times)

    def _run_times(self, times: int) -> None:
        for _ in range(times):
            self.run()


def whole_plan(ring: Ring, call: Call) -> Callable[[], Tensor]:
    """A function that runs a whole plan on the ring, a batch further each time."""
    numbers = count()

    def run() -> Tensor:
        a, b, _ = ring.chunk(call.problem, next(numbers))
        return call(a, b)

    return run
