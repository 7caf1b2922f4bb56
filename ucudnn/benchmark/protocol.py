"""Timing of a candidate in the steady state in which it runs during training.

A chunk is timed in a loop over consecutive chunks of operands that are larger than the last-level
cache. So, as in training, its input is not in the caches, its workspace is, and the result of every
call is new memory. docs/measuring.md gives the reasons.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from math import ceil, inf, prod

import torch
from torch import Tensor

from ucudnn.backends import AbstractBackend, Elapsed, Executable
from ucudnn.backends.tensors import Slices
from ucudnn.benchmark.failures import CANDIDATE_ERRORS, CandidateError, free_after, is_out_of_memory
from ucudnn.execution.execute import Call, empty_result, places
from ucudnn.measurement import FailureKind, Role
from ucudnn.problem import Problem
from ucudnn.slabs import row_count
from ucudnn.units import format_sizes

# This number is part of every key in the cache. Raise it if a change of this module makes new times
# incomparable with stored ones.
PROTOCOL = 6


@dataclass(frozen=True, slots=True)
class Protocol:
    """The parameters of protocol 6: input cold, workspace warm, result new, eager calls.

    >>> Protocol().target
    0.05
    """

    # Least and largest number of samples of a candidate that stays in the race.
    least_rounds: int = 5
    most_rounds: int = 9
    # The 95 % interval of the median is narrow enough if its width is at most this fraction of the
    # median.
    target: float = 0.05
    # After `least_rounds`, no more rounds begin once all rounds together have taken this long.
    enough_ns: int = 500_000_000
    # Largest number of single runs to warm up, before the first sample. Warm-up ends earlier if the
    # times of two successive runs differ by no more than the fraction `stable`.
    warm_ups: int = 4
    stable: float = 0.1
    # A sample should take at least this long, because reading the clock costs microseconds. If a
    # run takes less time, a sample consists of several runs.
    sample_ns: int = 4_000_000
    # One factor for each of the first rounds: a candidate whose time is more than this many times
    # the best one leaves the race.
    lapped: tuple[float, ...] = (3.0, 1.5)
    # A candidate's share is its processor time per elapsed time. A round is perturbed if a
    # candidate was interrupted and had less than this fraction of its share in its best round.
    lost_share: float = 0.8
    # Largest number of perturbed rounds that are repeated.
    repeats: int = 5
    # True: the rounds end, though not before `least_rounds`, as soon as every other candidate is
    # clearly faster or clearly no faster than the first one.
    stops_when_decided: bool = False


# Whole calls are compared by pairs of samples. With nine pairs the 95 % interval leaves out the
# smallest and the largest ratio, which may be perturbed. `lapped` is empty, so that no finalist
# leaves the race: a pair needs a sample of each. `target` is 0, so that a narrow interval does not
# end the race.
FINALS = Protocol(least_rounds=5, most_rounds=9, target=0.0, enough_ns=2_000_000_000, lapped=())
# The operands are twice as large as the cache, so that the data of a chunk has left the cache
# before it is used again.
_RING_CACHES = 2
# Least number of runs in a sample of later chunks. The first run takes longer than the next ones,
# because the caches are full of other data. So does the first later chunk of a call.
_LEAST_CHUNKS = 4
# A run that is shorter than this is easily perturbed, because other processes get time slices of
# about this length.
_SHORT_NS = 20_000_000
# A candidate whose first timed run takes longer than this many times its fastest rival is not run
# again.
_TOO_SLOW = 1.5
# A run that takes at least this long is certainly a long one: a short run would not take so long
# even if another process got the processor meanwhile.
_LONG_NS = 50_000_000


@dataclass(frozen=True)
class Ring:
    """Rotating buffers: operands that exceed the last-level cache; chunks are taken in turn.

    If there is too little memory for whole calls, the ring has operands for calls on fewer samples.
    Their chunks are computed like those of a whole call.
    """

    problem: Problem  # the call of which the chunks are parts, at the batch that memory allows
    samples: int  # number of samples in the operands, at least the problem's batch
    a: Tensor  # x for fprop and wgrad, dy for dgrad
    b: Tensor  # w for fprop and dgrad, dy for wgrad
    total: Tensor | None  # what chunks of wgrad are added to

    @classmethod
    def allocate(cls, backend: AbstractBackend, problem: Problem) -> Ring:
        """Random operands that fill twice the last-level cache, and hold a whole batch at least.

        If they do not fit the memory, they hold half of the samples, or a quarter and so on. Raises
        an error for lack of memory if a single sample does not fit.
        """
        samples, room = ring_samples(problem, backend.cache_bytes()), backend.memory_bytes()
        while True:
            part = problem.with_batch(min(samples, problem.batch))
            try:
                return cls._within(backend, part, samples, room)
            except CANDIDATE_ERRORS as error:
                if samples == 1 or not is_out_of_memory(error):
                    raise
                free_after(error)
            samples = part.batch if samples > part.batch else samples // 2

    @classmethod
    def _within(cls, backend: AbstractBackend, problem: Problem, samples: int, room: int) -> Ring:
        shapes = (*problem.with_batch(samples).operand_shapes, problem.result_shape)
        needed = sum(prod(shape) for shape in shapes) * problem.bytes_per_element
        if needed > room:
            need, half = format_sizes(needed, room)
            raise CandidateError(
                f"{problem} needs {need} of operands to be measured, and half of what is available "
                f"is {half}",
                FailureKind.OUT_OF_MEMORY,
            )
        a, b = backend.operands(problem, samples)
        total = empty_total(problem, a).zero_() if problem.op == "wgrad" else None
        return cls(problem, samples, a, b, total)

    def operands(self, part: Problem, number: int) -> tuple[Tensor, Tensor]:
        """Views of the operands for a chunk, or for a call; `places` explains the arguments."""
        a, b, _ = self.places(part, number)
        return self.a[a], self.b[b]

    def places(self, part: Problem, number: int) -> tuple[Slices, Slices, Slices]:
        """The parts of both operands and of a call's result that a chunk uses.

        The chunk consists of some samples, or of some rows of some samples. Chunks are numbered
        from 0; the one after the last is the first one again. Raises an error for lack of memory if
        the ring has fewer samples than the chunk.
        """
        if part.batch > self.problem.batch:
            raise CandidateError(
                f"there is memory for the operands of {self.problem.batch} samples only, and "
                f"{part} needs more",
                FailureKind.OUT_OF_MEMORY,
            )
        turns = row_count(self.problem) // row_count(part)
        group, turn = divmod(number, turns)
        x_rows = _window(part.input_size[0], self.problem.input_size[0], turn, turns)
        y_rows = _window(part.output_size[0], self.problem.output_size[0], turn, turns)
        # The ring has at least as many samples as a call. The operands of consecutive chunks go
        # through all samples of the ring. The result has the size of one call, so after each call
        # its parts begin anew.
        samples, place = (
            (_turn(part.batch, batch, group), slice(None))
            for batch in (self.samples, self.problem.batch)
        )
        a, b, _ = places(self.problem, (*samples, x_rows), (*samples, y_rows))
        *_, out = places(self.problem, (*place, x_rows), (*place, y_rows))
        return a, b, out

    def chunks_per_call(self, part: Problem) -> int:
        """Number of chunks of this size that fill the result of a call."""
        turns = row_count(self.problem) // row_count(part)
        return turns * (self.problem.batch // part.batch)

    def bias(self) -> Tensor:
        """A bias: one element per channel of the result."""
        return self.a.new_ones(self.problem.result_shape[1])

    def result(self) -> Tensor:
        """Tensor for the results of a call's chunks: a new one to write into; for wgrad the sum."""
        return empty_result(self.problem, self.a) if self.total is None else self.total


def _turn(size: int, batch: int, number: int) -> slice:
    """The samples of the chunk with this number; chunks begin anew at the end of the batch."""
    begin = number % (batch // size) * size
    return slice(begin, begin + size)


def empty_total(problem: Problem, like: Tensor) -> Tensor:
    """A new tensor for a sum of weight gradients, in the precision that chunks are added in."""
    total = empty_result(problem, like)
    return total.to(torch.promote_types(total.dtype, torch.float32))


def _window(size: int, extent: int, turn: int, turns: int) -> slice:
    """One of several windows of an extent, spread evenly from its beginning to its end."""
    # Windows may overlap, because slabs also read rows beyond their own (the halo).
    begin = (extent - size) * turn // max(turns - 1, 1)
    return slice(begin, begin + size)


def ring_samples(problem: Problem, cache_bytes: int) -> int:
    """Number of samples whose inputs and outputs fill a cache twice; at least a whole batch.

    >>> ring_samples(Problem("fprop", 4, 1, 1, (256,), (1,)), 1 << 19)
    512
    """
    one = problem.with_batch(1)
    # The filter is not counted: all chunks use the same one, and as in a call it may stay in the
    # cache.
    per_sample = (prod(one.x_shape) + prod(one.y_shape)) * problem.bytes_per_element
    return max(problem.batch, ceil(_RING_CACHES * cache_bytes / per_sample))


class AbstractLoop(ABC):
    """Something to time in its steady state: runs follow each other without a pause."""

    @property
    def least_times(self) -> int:
        """The least number of runs in a sample."""
        return 1

    @abstractmethod
    def prepare(self, times: int) -> Callable[[], None]:
        """Prepare the next runs, and return a function that only runs them, one after the other."""


class ChunkLoop(AbstractLoop):
    """Runs one candidate in one role on the chunks of a ring, one after the other."""

    def __init__(self, ring: Ring, executable: Executable, part: Problem, role: Role) -> None:
        self._ring = ring
        self._executable = executable
        self._part = part
        self._role = role
        self._numbers = count()
        self._chunks_per_call = ring.chunks_per_call(part)

    @property
    def least_times(self) -> int:
        """`_LEAST_CHUNKS` for later chunks, or as many as a call has; 1 in any other role."""
        return min(self._chunks_per_call, _LEAST_CHUNKS) if self._role == Role.LATER else 1

    def prepare(self, times: int) -> Callable[[], None]:
        """Compute the views of the next chunks beforehand, as `execute.bind` does for a call."""
        numbers = islice(self._numbers, times)
        return partial(self._run, [self._ring.places(self._part, number) for number in numbers])

    def _run(self, chunks: Sequence[tuple[Slices, Slices, Slices]]) -> None:
        """Run chunks, and allocate and free memory for their results as a call would.

        malloc may take a large block from the system for each result and give it back afterwards.
        Then the first chunk that writes to a page takes longer, here as in a call.
        """
        ring, executable, result = self._ring, self._executable, None
        is_sum = ring.problem.op == "wgrad"
        for turn, (a, b, out) in enumerate(chunks):
            if self._role == Role.ALONE:
                executable.alone(ring.a[a], ring.b[b])
            elif self._role == Role.FIRST:
                executable.begin(ring.a[a], ring.b[b])
            else:
                if turn % self._chunks_per_call == 0:
                    # The old result is freed first, so that two results are never in memory at the
                    # same time.
                    result = None
                    result = ring.result()
                assert result is not None
                if is_sum:
                    executable.add(ring.a[a], ring.b[b], result)
                else:
                    executable.write(ring.a[a], ring.b[b], result[out])


class WholeLoop(AbstractLoop):
    """Runs whole calls on a ring, each on the next batch; with a bias if there is one."""

    def __init__(self, ring: Ring, call: Call, bias: Tensor | None = None) -> None:
        self._ring = ring
        self._call = call
        self._bias = bias
        self._numbers = count()

    def once(self) -> Tensor:
        """Run one call and return its result."""
        a, b = self._ring.operands(self._call.problem, next(self._numbers))
        return self._call(a, b, self._bias)

    def prepare(self, times: int) -> Callable[[], None]:
        """Prepare the operands of the next calls; each result is freed before the next call."""
        ring, problem = self._ring, self._call.problem
        operands = [ring.operands(problem, number) for number in islice(self._numbers, times)]

        def run() -> None:
            for a, b in operands:
                self._call(a, b, self._bias)

        return run


class Sampler:
    """Times the runs of a loop; if a run is short, several runs are timed at once."""

    def __init__(self, loop: AbstractLoop, backend: AbstractBackend) -> None:
        self._loop = loop
        self._backend = backend
        self._times = loop.least_times
        self._most_ns = 0
        self._once_ns = 0
        # Of one run, when it was last timed.
        self._last = Elapsed(0, 0)

    def once_ns(self) -> int:
        """The time of one run."""
        self._once_ns = max(1, self._elapsed_ns(1))
        return self._once_ns

    def _elapsed_ns(self, times: int) -> int:
        device_ns, host_ns = self._last
        # Where a run takes the device longer than the host, the host gets ahead by itself.
        lead_ns = host_ns + (times - 1) * max(0, host_ns - device_ns)
        elapsed = self._backend.elapsed_apart(self._loop.prepare(times), lead_ns)
        self._last = Elapsed(elapsed.device_ns // times, elapsed.host_ns // times)
        return elapsed.device_ns

    def shortest_ns(self, before_ns: int = 0, rival_ns: float = inf) -> int:
        """Time of one run; for a short run, which is easily perturbed, the shortest of three.

        `before_ns` is the time of an earlier run outside of the loop. If that run was long, its
        time is returned, and nothing is run. `rival_ns` is the time of the fastest rival. A run
        that takes much longer on the device is not repeated, unless it blocks the host: there,
        another process may have perturbed it.
        """
        if before_ns >= _LONG_NS:
            self._once_ns = before_ns
            return before_ns
        first = self.once_ns()
        # The device may have waited for the host, which in the first run also builds plans of cuDNN
        # and takes memory from the system.
        if first >= min(_SHORT_NS, _TOO_SLOW * rival_ns + self._last.host_ns):
            return first
        return min(first, self.once_ns(), self.once_ns())

    def warm_up(self, protocol: Protocol) -> None:
        """Run until two successive times agree, and set the number of runs in a sample.

        After a long run no further one is needed, because the time until caches are filled is a
        small part of it. A very long run whose time is known is not repeated at all.
        """
        known_ns = self._once_ns
        before = time_ns = known_ns if known_ns >= _LONG_NS else self.once_ns()
        for _ in range(protocol.warm_ups - 1 if before < _SHORT_NS else 0):
            time_ns = self.once_ns()
            if abs(time_ns - before) <= protocol.stable * before:
                break
            before = time_ns
        # A sample has so many runs that it takes about `Protocol.sample_ns`, which is long compared
        # with reading the clock. But it has at most 64 runs.
        times = protocol.sample_ns // max(time_ns, self._last.host_ns)
        self._times = max(self._loop.least_times, min(64, times))
        # A sample that takes longer than this was perturbed; the method `sample_ns` then shortens
        # the next ones.
        self._most_ns = 4 * protocol.sample_ns

    def sample_ns(self) -> int:
        """Mean time of a run over consecutive ones."""
        times = self._times
        elapsed_ns = self._elapsed_ns(times)
        # After a sample that took too long, the next ones have fewer runs: other processes keep the
        # machine busy, and short samples are less likely to be perturbed.
        if elapsed_ns > self._most_ns:
            self._times = max(self._loop.least_times, times // 2)
        return max(1, elapsed_ns // times)
