"""Race finalists as whole calls against torch's default; only a clear gain replaces the default."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucudnn.benchmark.statistics import median_ns, ratio_interval, spread_ns
from ucudnn.errors import UnsupportedError
from ucudnn.measurement import FailureKind, Measurement, MeasurementKey, Subject
from ucudnn.plan import Split, Timing
from ucudnn.verdict import WORTHWHILE_GAIN, is_faster

if TYPE_CHECKING:
    from ucudnn.benchmark.bench import Whole
    from ucudnn.kernels.measurer import KernelMeasurer
    from ucudnn.kernels.session import Session
    from ucudnn.problem import Problem


# Time in ns that a call of a planned layer takes on the host in addition to its kernel, measured by
# benchmarks/overhead.py. In this time the call looks up its plan and makes an autograd node in
# Python.
PLANNED_CALL_NS = 30_000


@dataclass(frozen=True, slots=True)
class Finalist:
    """A split of the whole batch with the samples of one race."""

    split: Split
    timing: Timing
    # In ns, one per round; the n-th samples of all finalists are from the same round.
    samples: tuple[int, ...]
    is_deterministic: bool = True
    is_perturbed: bool = False


def race_calls(
    session: Session,
    measurer: KernelMeasurer,
    problem: Problem,
    splits: Sequence[Split],
    has_bias: bool = False,
) -> list[Finalist] | None:
    """Time whole calls in interleaved rounds, or take the race from the cache if it is complete.

    Every call adds a bias if `has_bias`. None if there was too little memory for any of them.
    Raises UnsupportedError if no split could be run for another reason.
    """
    # Samples are compared in pairs of one round, so a race is recalled as a whole or run anew.
    recalled = recall_race(session, problem, splits, has_bias)
    if recalled is not None:
        return recalled
    keys = _keys(session, problem, splits, has_bias)
    wholes = measurer.bench.whole(splits, has_bias)
    listed = session.backend.candidates(problem)
    varying = {one.algorithm for one in listed if not one.is_deterministic}
    found = [
        # One nondeterministic chunk makes the whole call nondeterministic.
        _measured(
            key, whole, has_bias, varying.isdisjoint(chunk.algorithm for chunk in split.chunks)
        )
        for key, whole, split in zip(keys, wholes, splits, strict=True)
    ]
    for entry in found:
        # A call that ran out of memory is not kept as failed, because there may be more memory at
        # another time.
        if entry.failure != FailureKind.OUT_OF_MEMORY:
            session.keep(entry)
    # The race is written to the cache now, so that it is kept if tuning is interrupted.
    session.flush()
    finalists = _finalists(splits, found)
    if found and all(entry.failure == FailureKind.OUT_OF_MEMORY for entry in found):
        return None
    if splits and not finalists:
        raise UnsupportedError(f"a whole call could not be run to be timed: {found[0].reason}")
    return finalists


def recall_race(
    session: Session, problem: Problem, splits: Sequence[Split], has_bias: bool = False
) -> list[Finalist] | None:
    """The race of these splits from the cache; None if it is not there or no split could be run."""
    known = [session.find(key) for key in _keys(session, problem, splits, has_bias)]
    found = [session.reuse(entry) for entry in known if entry is not None]
    return None if len(found) < len(splits) else _finalists(splits, found) or None


def _keys(
    session: Session, problem: Problem, splits: Sequence[Split], has_bias: bool
) -> list[MeasurementKey]:
    """One key per split, with an identity of the race: other races' samples are not comparable."""
    # The texts are sorted, so that the same splits in another order have the same identity.
    texts = sorted(map(str, splits))
    identity = hashlib.sha256(f"{' | '.join(texts)} | {has_bias}".encode()).hexdigest()[:16]
    return [
        session.key(problem, "", subject=Subject.CALL, split=split, race=identity)
        for split in splits
    ]


def _finalists(splits: Sequence[Split], found: Sequence[Measurement]) -> list[Finalist]:
    return [
        Finalist(split, entry.timing, entry.samples, entry.is_deterministic, entry.is_perturbed)
        for split, entry in zip(splits, found, strict=True)
        if entry.status == "ok" and entry.timing is not None
    ]


def _measured(
    key: MeasurementKey, whole: Whole, has_bias: bool, is_deterministic: bool
) -> Measurement:
    # A failure is cached like a time, so that a second tune takes the race from the cache instead
    # of running it.
    if whole.result.failure:
        kind, reason = whole.result.failure
        return Measurement(key, "failed", reason=reason, failure=kind, adds_bias=has_bias)
    samples, state = whole.result.samples, whole.result.state
    return Measurement(
        key,
        "ok",
        median_ns(samples),
        spread_ns(samples),
        tuple(samples),
        whole.workspace_bytes,
        notes=state.notes,
        is_deterministic=is_deterministic,
        adds_bias=has_bias,
        load=state.load,
    )


def choose(
    finalists: Sequence[Finalist],
    limit: int | None,
    overhead_ns: int = 0,
    deterministic: bool = False,
) -> Finalist | None:
    """The winner within the limit: torch's default, unless another split is clearly faster.

    Of finalists that tie with the fastest, the one with the least workspace wins; if several need
    as little, the one with the fewest chunks, and then a deterministic one. A finalist ties if the
    fastest is not clearly faster, and if the finalist takes at most 2 % longer by the median. With
    wide intervals, the first condition alone would let much slower calls tie. `overhead_ns` is
    added to all times that are compared with those of torch's default.

    >>> from ucudnn.plan import Chunk
    >>> def entry(name, *samples):
    ...     timing = Timing(median_ns(samples), 0, 0, len(samples))
    ...     return Finalist(Split("batch", (Chunk(8, name),)), timing, samples)
    >>> slow = entry("torch_default", *[100] * 9)
    >>> choose([slow, entry("gemm", *[90] * 9)], None).split.chunks[0].algorithm
    'gemm'
    >>> choose([slow, entry("gemm", *[80, 120] * 4, 90)], None).split.chunks[0].algorithm
    'torch_default'
    """
    fitting = [
        entry
        for entry in finalists
        if (limit is None or entry.timing.workspace_bytes <= limit)
        and (entry.is_deterministic or not deterministic)
    ]
    default = next((entry for entry in fitting if entry.split.is_default), None)
    # If no finalist is clearly faster than torch's own convolution, only torch's own is left.
    if default is not None:
        faster = [entry for entry in fitting if _is_faster(entry, default, overhead_ns)]
        fitting = faster or [default]
    if not fitting:
        return None
    fastest = min(fitting, key=lambda entry: entry.timing.time_ns)
    return min((entry for entry in fitting if _ties(entry, fastest)), key=_thrift)


def _thrift(entry: Finalist) -> tuple[int, int, bool, int]:
    timing = entry.timing
    # Time comes last, because the times of calls that tie differ only by noise.
    chunks = len(entry.split.chunks)
    return timing.workspace_bytes, chunks, not entry.is_deterministic, timing.time_ns


def _ties(entry: Finalist, fastest: Finalist) -> bool:
    # Both conditions are required: with wide intervals even a much slower call is not clearly
    # slower, and without the condition on the ratio it would tie.
    ratio, _, _ = ratio_interval(entry.samples, fastest.samples)
    return ratio <= 1 + WORTHWHILE_GAIN and not _is_faster(fastest, entry)


def _is_faster(entry: Finalist, other: Finalist, overhead_ns: int = 0) -> bool:
    """True if `entry` takes less time than `other`, beyond the noise and by enough to matter."""
    # Timed calls do not look up their plan, but calls in training do. torch's own convolution needs
    # no lookup, so the overhead is added to the times of `entry` only.
    samples = [time_ns + overhead_ns for time_ns in entry.samples]
    return is_faster(ratio_interval(samples, other.samples), WORTHWHILE_GAIN)
