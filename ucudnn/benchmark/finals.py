"""Re-time finalists as whole plans beside torch's default; one wins only above the noise."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ucudnn.backends import AbstractBackend
from ucudnn.benchmark.kernel import KernelMeasurer, Session
from ucudnn.benchmark.protocol import interleave, whole_plan
from ucudnn.benchmark.statistics import median_ns, ratio_interval, spread_ns
from ucudnn.errors import UnsupportedError
from ucudnn.execute import bind
from ucudnn.measurement import Measurement, MeasurementKey
from ucudnn.plan import Split, Timing
from ucudnn.problem import Problem

# With nine pairs a 95 % interval of the median forgives one disturbed round at either end.
FINAL_ROUNDS = 9
ENOUGH_NS = 2_000_000_000
# Less than this is not worth leaving torch's own call for, however certain it is.
LEAST_GAIN = 0.02


@dataclass(frozen=True, slots=True)
class Finalist:
    """A split of the whole batch with the samples of one race.

    Args:
        split: what was run.
        timing: median, spread and workspace of the whole call.
        samples: times in ns, one per round; the n-th of every finalist is from the same round.
    """

    split: Split
    timing: Timing
    samples: tuple[int, ...]


def race(
    session: Session, measurer: KernelMeasurer, problem: Problem, splits: Sequence[Split]
) -> list[Finalist]:
    """Time whole plans in interleaved rounds, or take them from the cache where all of them are.

    The race belongs to the name of the measurement: samples of different races are no pairs.
    """
    names = sorted(str(split) for split in splits)
    identity = hashlib.sha256(" | ".join(names).encode()).hexdigest()[:8]
    keys = [session.key(problem, f"plan[{split}] in race {identity}") for split in splits]
    known = [session.cache.get(key) for key in keys]
    found = [session.reuse(entry) for entry in known if entry is not None]
    if len(found) < len(splits):
        found = _run(session, measurer, problem, list(zip(splits, keys, strict=True)))
    return [_finalist(split, entry) for split, entry in zip(splits, found, strict=True)]


def _run(
    session: Session,
    measurer: KernelMeasurer,
    problem: Problem,
    entries: Sequence[tuple[Split, MeasurementKey]],
) -> list[Measurement]:
    runs: list[Callable[[], Tensor]] = []
    workspaces: list[int] = []
    for split, _ in entries:
        run = whole_plan(measurer.ring, bind(session.backend, problem, split))
        parts = [(problem.with_batch(step.size), step.algorithm) for step in split.steps]
        workspaces.append(session.backend.workspace_bytes(run, parts))
        runs.append(run)
    samples = _timed(session.backend, runs, FINAL_ROUNDS, ENOUGH_NS)
    results = [
        session.keep(
            Measurement(key, "ok", median_ns(taken), spread_ns(taken), tuple(taken), workspace)
        )
        for (_, key), taken, workspace in zip(entries, samples, workspaces, strict=True)
    ]
    session.flush()
    return results


def _timed(
    backend: AbstractBackend, runs: Sequence[Callable[[], Tensor]], rounds: int, enough_ns: int
) -> list[list[int]]:
    try:
        return interleave(backend, runs, rounds, enough_ns)
    except RuntimeError as error:
        raise UnsupportedError(f"a whole call could not be run to be timed: {error}") from error


def _finalist(split: Split, entry: Measurement) -> Finalist:
    assert entry.time_ns is not None
    assert entry.spread_ns is not None
    assert entry.workspace_bytes is not None
    timing = Timing(entry.time_ns, entry.spread_ns, entry.workspace_bytes, len(entry.samples))
    return Finalist(split, timing, entry.samples)


def choose(finalists: Sequence[Finalist], limit: int | None) -> Finalist | None:
    """The winner within the limit: the fewest chunks, unless more are faster beyond the noise.

    A split pays for every chunk with thread barriers, and on a busy machine dearly: it must have
    earned them. Torch's default stands before any other that computes the batch undivided.

    >>> from ucudnn.plan import Step
    >>> def entry(name, *samples):
    ...     timing = Timing(median_ns(samples), 0, 0, len(samples))
    ...     return Finalist(Split("batch", (Step(8, name),)), timing, samples)
    >>> slow = entry("torch_default", *[100] * 9)
    >>> choose([slow, entry("gemm", *[90] * 9)], None).split.steps[0].algorithm
    'gemm'
    >>> choose([slow, entry("gemm", *[80, 120] * 4, 90)], None).split.steps[0].algorithm
    'torch_default'

    Returns:
        The winner, or None where no finalist is within the limit.
    """
    fitting = [
        entry for entry in finalists if limit is None or entry.timing.workspace_bytes <= limit
    ]
    winner = None
    for entry in sorted(fitting, key=_chunks_then_default):
        if winner is None or _faster(entry, winner):
            winner = entry
    return winner


def _chunks_then_default(entry: Finalist) -> tuple[int, bool, int]:
    return len(entry.split.steps), not entry.split.is_default, entry.timing.time_ns


def _faster(entry: Finalist, other: Finalist) -> bool:
    ratio, _, high = ratio_interval(entry.samples, other.samples)
    return high < 1 and ratio < 1 - LEAST_GAIN
