"""Time one kernel on a GPU: all engine configurations, then the calls that decide what they gain.

Configurations run chunk after chunk, as a loop over a batch does: undivided, and in micro-batches
of a half, a quarter and so on. A batch below SMALL_BATCH leaves little to divide: there the first
SLAB_CONFIGURATIONS that cuDNN proposes run in slabs of rows, too, as whole calls. The fastest of
many medians is fast by luck as well, and minutes lie between them. So the calls that are compared -
torch's default, cudnn.benchmark, per limit the best undivided configuration and the best split -
are timed anew, in ROUNDS rounds in which they take turns.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ucudnn.axis import AbstractAxis, BatchAxis, RowAxis
from ucudnn.backends.cudnn.engine import Configuration
from ucudnn.backends.cudnn.executable import DefaultExecutable
from ucudnn.backends.cudnn.gpu import keep_busy
from ucudnn.errors import UnsupportedError
from ucudnn.execution.execute import bind, empty_result
from ucudnn.plan import DEFAULT_ALGORITHM, Chunk, Split
from ucudnn.problem import Problem

if TYPE_CHECKING:
    from gpu_suite import Suite

MOST_WORKSPACE = 8 << 30
CHECKED_BATCH = 4  # float64 on the GPU is slow: a few samples show what an engine computes
TOO_SLOW = 8  # times the best so far: one sample is enough
SMALL_BATCH = 8
SLAB_COUNTS = (2, 4, 8)
SLAB_CONFIGURATIONS = 4
ROUNDS = 7
BLOCK_US = 1500  # calls of one round take about this long, so that clocks are read rarely
MOST_CALLS = 20
TIMINGS = (
    *("name", "op", "dtype", "layout", "batch", "algorithm", "workspace_bytes", "mode", "rank"),
    *("notes", "median_us", "min_us", "samples", "error", "beta1_error", "host_us"),
)
# columns that end in "rounds_us" hold a time per round, separated by spaces
SPLITS = (
    *("name", "op", "dtype", "layout", "batch", "limit_mib", "undivided_algorithm"),
    *("axis", "chunk", "chunks", "algorithm", "workspace_mib", "predicted_us"),
    *("split_rounds_us", "undivided_rounds_us", "default_rounds_us", "benchmark_rounds_us"),
    *("default_extra_mib", "benchmark_extra_mib", "captured_us", "host_us_per_chunk"),
)
Rows = list[tuple[object, ...]]


@dataclass
class Found:
    """Rows of one kernel for timings.csv and splits.csv."""

    timings: Rows = field(default_factory=list)
    splits: Rows = field(default_factory=list)


@dataclass(frozen=True)
class Choice:
    """A configuration at one size of chunks, timed.

    Args:
        axis: along which the kernel is divided.
        size: of a chunk, in units of the axis.
        configuration: of all chunks.
        call_us: of the whole call: measured, or the chunks' times added up.
        is_measured: True where it was measured.
    """

    axis: AbstractAxis
    size: int
    configuration: Configuration
    call_us: float
    is_measured: bool = False

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return -(-self.axis.extent // self.size)

    @property
    def split(self) -> Split:
        """All chunks."""
        return self.axis.split([Chunk(self.size, self.configuration.identity)] * self.chunks)


@dataclass(frozen=True)
class Operands:
    """Both operands of a kernel at its whole batch."""

    a: Tensor
    b: Tensor

    def samples(self, problem: Problem, start: int, size: int) -> tuple[Tensor, Tensor]:
        """The operands of some of the samples."""
        part = slice(start, start + size)
        return self.a[part], self.b[part] if problem.op == "wgrad" else self.b


def time_kernel(suite: Suite, columns: tuple[str, ...], problem: Problem) -> Found:
    """Time every configuration of a kernel at every size, then the calls that decide.

    Args:
        suite: where failures are noted.
        columns: of the kernel in both tables, before its batch.
        problem: the kernel at its whole batch.
    """
    found = Found()
    operands = suite.attempt(
        f"{problem} operands", lambda: Operands(*suite.backend.operands(problem, problem.batch))
    )
    if operands is None:
        return found
    choices: list[Choice] = []
    sizes = divisors(problem.batch, suite.options.min_batch)
    checked = next((size for size in sizes if size <= CHECKED_BATCH), sizes[-1])
    for size in sizes:
        chunk = problem.with_batch(size)
        expected = None
        if size == checked:
            first = operands.samples(problem, 0, size)
            expected = suite.attempt(f"{chunk} reference", partial(reference, chunk, *first))
        for choice, numbers in time_size(suite, problem, operands, size, expected):
            one = choice.configuration
            row = (one.workspace_bytes, one.mode, one.rank, "+".join(one.notes))
            found.timings.append((*columns, size, one.identity, *row, *numbers))
            choices.append(choice)
    choices += time_slabs(suite, problem, operands)
    choices = without_failing_calls(suite, problem, operands, choices)
    calls = suite.attempt(
        f"{problem} calls", lambda: compare_calls(suite, problem, operands, choices)
    )
    found.splits = [(*columns, problem.batch, *row) for row in calls or ()]
    return found


def divisors(batch: int, least: int) -> list[int]:
    """The batch, its half and so on, as far as they divide it.

    >>> divisors(12, 1), divisors(256, 64)
    ([12, 6, 3], [256, 128, 64])
    """
    sizes = [batch]
    while sizes[-1] % 2 == 0 and sizes[-1] // 2 >= least:
        sizes.append(sizes[-1] // 2)
    return sizes


def proposals(suite: Suite, problem: Problem) -> list[Configuration]:
    """The configurations that ucudnn would try, best first."""
    backend = suite.backend
    try:
        listed = backend.runtime.configurations(torch.cuda.current_device(), problem)
    except UnsupportedError:  # cuDNN has nothing
        return []
    able = []
    for one in listed:
        if not one.is_allowed(problem) or one.is_runtime_compiled:
            continue
        if one.workspace_bytes > MOST_WORKSPACE:
            suite.skipped["workspace over 8 GiB"] += 1
        elif backend.refusal(problem, one.identity) is None:
            able.append(one)
    return able


def time_size(
    suite: Suite, problem: Problem, operands: Operands, size: int, expected: Tensor | None
) -> Iterator[tuple[Choice, tuple[object, ...]]]:
    """Time configurations at one micro-batch size; each with its numbers for timings.csv."""
    chunk, axis = problem.with_batch(size), BatchAxis(problem)
    out = empty_result(problem, operands.a).zero_()
    fastest = float("inf")
    for one in proposals(suite, chunk):
        executable = suite.backend.executable(chunk, one.identity)
        run = chunk_runner(problem, executable, operands, out, size)

        def measured(
            executable: Any = executable, run: Callable[[], None] = run, fastest: float = fastest
        ) -> tuple[tuple[str, str], float, list[float]]:
            errors = ("", "")
            if expected is not None:
                errors = check(chunk, executable, operands.samples(problem, 0, size), expected)
            run()  # what is built at a first call
            host = host_us(run, 1)
            return errors, host, sample(run, fastest, host)

        done = suite.attempt(f"{chunk} {one.identity}", measured, label="run")
        if done is None:
            continue
        errors, host, samples = done
        median = statistics.median(samples)
        fastest = min(fastest, median)
        numbers = (f"{median:.2f}", f"{min(samples):.2f}", len(samples), *errors, f"{host:.2f}")
        yield Choice(axis, size, one, problem.batch // size * median), numbers


def time_slabs(suite: Suite, problem: Problem, operands: Operands) -> list[Choice]:
    """Time whole calls in slabs by the configurations that cuDNN proposes first."""
    axis, choices = RowAxis(problem), []
    if problem.batch >= SMALL_BATCH:
        return []
    sizes = axis.sizes("powers-of-two")
    for size in (axis.extent // count for count in SLAB_COUNTS if axis.extent % count == 0):
        if size not in sizes:
            continue
        part, fastest = axis.part(size), float("inf")
        for one in proposals(suite, part)[:SLAB_CONFIGURATIONS]:
            choice = Choice(axis, size, one, 0.0, is_measured=True)

            def measured(split: Split = choice.split, fastest: float = fastest) -> list[float]:
                call = bind(suite.backend, problem, split)
                return sample(partial(call, operands.a, operands.b), fastest)

            what = f"{problem} in slabs of {size} {one.identity}"
            samples = suite.attempt(what, measured, label="run in slabs")
            if samples is not None:
                median = statistics.median(samples)
                fastest = min(fastest, median)
                choices.append(replace(choice, call_us=median))
    return choices


def chunk_runner(
    problem: Problem, executable: Any, operands: Operands, out: Tensor, size: int
) -> Callable[[], None]:
    """A function that runs one chunk after the other, as a loop over a batch does."""
    starts = list(range(0, problem.batch, size))
    total = out.float() if problem.op == "wgrad" and problem.bytes_per_element < 4 else out
    turn = 0

    def run() -> None:
        nonlocal turn
        start = starts[turn % len(starts)]
        turn += 1
        first, second = operands.samples(problem, start, size)
        if problem.op != "wgrad":
            executable.write(first, second, out[start : start + size])
        elif size == problem.batch:
            executable.alone(first, second)
        else:
            executable.add(first, second, total)

    return run


def reference(problem: Problem, a: Tensor, b: Tensor) -> Tensor:
    """The result in float64, by torch's own kernels without cuDNN."""
    with torch.backends.cudnn.flags(enabled=False):
        return DefaultExecutable(replace(problem, math="strict")).alone(a.double(), b.double())


def check(
    problem: Problem, executable: Any, operands: tuple[Tensor, Tensor], expected: Tensor
) -> tuple[str, str]:
    """Relative errors: of a result written over NaN, and of one added to ones (wgrad)."""
    a, b = operands
    if problem.op != "wgrad":
        found = empty_result(problem, a).fill_(torch.nan)
        executable.write(a, b, found)
        return f"{relative_error(found, expected):.3g}", ""
    found = executable.alone(a, b)
    dtype = torch.promote_types(a.dtype, torch.float32)
    total = torch.ones_like(found, dtype=dtype)
    executable.add(a, b, total)
    return f"{relative_error(found, expected):.3g}", f"{relative_error(total - 1, expected):.3g}"


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def sample(
    run: Callable[[], object], fastest_us: float = float("inf"), ahead_us: float = 0.0
) -> list[float]:
    """Times of consecutive runs in microseconds: some milliseconds of them, one if it is slow.

    Given the host's time of a run, `ahead_us`, they are those of the device alone.
    """
    run()
    first = elapsed_us(run, 1, ahead_us)[0]
    if first > TOO_SLOW * fastest_us + 50:
        return [first]
    return elapsed_us(run, max(5, min(40, int(4000 / max(first, 1.0)))), ahead_us)


def elapsed_us(run: Callable[[], object], count: int, ahead_us: float = 0.0) -> list[float]:
    """Times between events on the stream that is current, which may wait for the host first."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    if ahead_us:
        keep_busy(round(1000 * count * ahead_us))
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    events[-1].synchronize()
    return [begin.elapsed_time(end) * 1e3 for begin, end in pairwise(events)]


def block_us(run: Callable[[], object], count: int) -> float:
    """Mean time of some runs, after one that is not counted: its caches are the previous call's."""
    run()
    return sum(elapsed_us(run, count)) / count


def interleaved(
    blocks: Mapping[Hashable, Callable[[int], float]], rounds: int = ROUNDS
) -> dict[Hashable, list[float]]:
    """Times per round of calls that take turns.

    Args:
        blocks: functions of a number of runs that return the mean time of one.
        rounds: times per call.
    """
    counts = {}
    for name, block in blocks.items():
        block(1)  # what is built, tried out or allocated at a first call
        counts[name] = max(1, min(MOST_CALLS, int(BLOCK_US / max(1.0, block(1)))))
    samples: dict[Hashable, list[float]] = {name: [] for name in blocks}
    for _ in range(rounds):
        for name, block in blocks.items():
            samples[name].append(block(counts[name]))
    return samples


def without_failing_calls(
    suite: Suite, problem: Problem, operands: Operands, choices: list[Choice]
) -> list[Choice]:
    """The choices but for those whose whole call fails: each call that decides is run by itself.

    In the comparison a call that faults or hangs would cost the kernel its rows.
    """
    passed: set[Split] = set()
    while True:
        pairs = (best_within(choices, limit) for limit in suite.limits_mib)
        deciding = {one.split for pair in pairs if pair for one in pair if one} - passed
        if not deciding:
            return choices
        for split in deciding:

            def run(split: Split = split) -> bool:
                bind(suite.backend, problem, split)(operands.a, operands.b)
                torch.cuda.synchronize()
                return True

            if suite.attempt(f"{problem} call {split}", run, label="run a call"):
                passed.add(split)
            else:
                choices = [one for one in choices if one.split != split]


def compare_calls(
    suite: Suite, problem: Problem, operands: Operands, choices: Sequence[Choice]
) -> Rows:
    """Time the calls that decide; per limit a row for splits.csv, without the kernel's columns."""
    chosen = {limit: best_within(choices, limit) for limit in suite.limits_mib}
    splits = {one.split for pair in chosen.values() if pair for one in pair if one}
    whole = Split.default(problem.batch)
    calls = {split: bind(suite.backend, problem, split) for split in splits}
    runs = {split: partial(call, operands.a, operands.b) for split, call in calls.items()}
    own = partial(bind(suite.backend, problem, whole), operands.a, operands.b)
    blocks: dict[Hashable, Callable[[int], float]] = {
        split: partial(block_us, run) for split, run in runs.items()
    }
    blocks["default"] = partial(block_us, own)
    # torch keeps the kernel of a shape per thread, whatever the flag said when it was chosen: in
    # this thread it would run the default's
    with ThreadPoolExecutor(1) as thread:

        def tried_out(measure: Callable[..., float], *arguments: Any) -> float:
            torch.backends.cudnn.benchmark = True
            try:
                return thread.submit(measure, *arguments).result()
            finally:
                torch.backends.cudnn.benchmark = False

        parts = [(problem, DEFAULT_ALGORITHM)]
        extra = [
            suite.backend.workspace_bytes(own, parts),
            tried_out(suite.backend.workspace_bytes, own, parts),
        ]
        blocks["benchmark"] = lambda count: tried_out(block_us, own, count)
        samples = interleaved(blocks)
    text = {name: " ".join(f"{one:.2f}" for one in taken) for name, taken in samples.items()}
    more = {
        split: (captured_us(suite, run), f"{host_us(run) / len(split.chunks):.2f}")
        for split, run in runs.items()
    }
    rows: Rows = []
    for limit, pair in chosen.items():
        if pair is None:
            suite.skipped["nothing fits the limit"] += 1
            continue
        undivided, best = pair
        rows.append(
            (
                *(limit, undivided.configuration.identity if undivided else ""),
                *(best.axis.name, best.split.chunks[0].size, best.chunks),
                best.configuration.identity,
                f"{best.configuration.workspace_bytes / 2**20:.1f}",
                "" if best.is_measured else f"{best.call_us:.2f}",
                *(text[best.split], text[undivided.split] if undivided else ""),
                *(text["default"], text["benchmark"]),
                *(f"{one / 2**20:.1f}" for one in extra),
                *more[best.split],
            )
        )
    return rows


def best_within(choices: Sequence[Choice], limit_mib: int) -> tuple[Choice | None, Choice] | None:
    """The fastest undivided choice within a limit, if any, and the fastest of all."""
    within = [one for one in choices if one.configuration.workspace_bytes <= limit_mib << 20]
    if not within:
        return None
    undivided = [one for one in within if one.chunks == 1]
    fastest = lambda some: min(some, key=lambda one: one.call_us)  # noqa: E731
    return (fastest(undivided) if undivided else None), fastest(within)


def host_us(run: Callable[[], object], count: int = 5) -> float:
    """Time to enqueue a call on the host, median over an idle device."""
    times = []
    for _ in range(count):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        times.append((time.perf_counter() - began) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def captured_us(suite: Suite, run: Callable[[], object]) -> str:
    """Time of a call that is replayed from a CUDA graph; empty where it cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    gc.collect()  # freeing memory in the middle of a capture would end it
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError as error:
        suite.skipped[f"capture: {str(error).splitlines()[0][:100]}"] += 1
        return ""
    return f"{statistics.median(sample(graph.replay)):.2f}"
