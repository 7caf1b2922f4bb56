"""Reasons for each kernel's plan: its front, and the best rejected alternatives. Runs nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ucudnn.axis import BatchAxis, RowAxis
from ucudnn.kernels.splits import BatchSplits, RowSplits, pareto
from ucudnn.measurement import Measurement, Subject
from ucudnn.plan import KernelPlan, Plan, Split
from ucudnn.problem import Problem
from ucudnn.solvers.reuse import reuse_by_position
from ucudnn.units import format_bytes, format_ns

# The measurements of the plan's machine. Each key is a problem with its batch replaced by 1, so
# that the measurements of micro-batches of all sizes are under one key. Slabs of each number of
# rows have a key of their own.
_ByGeometry = dict[Problem, list[Measurement]]
# The statuses of those measurements that have a time.
_TIMED = ("ok", "screened")
# Ratios of times between 1 and this one are printed as 1.00.
_LONGER = 1.005
# The largest number of alternatives that a rationale lists.
_MOST = 8


@dataclass(frozen=True, slots=True)
class Alternative:
    """A way to compute a kernel that its plan does not take."""

    split: Split
    # Time of the whole call, or the sum of the times of its chunks; None if neither is known.
    time_ns: int | None
    # Workspace of the whole call or of its largest chunk; None if it is not known.
    workspace_bytes: int | None
    # The largest relative error (L2) of the split's chunks against float64; None: not known.
    error: float | None
    # True if the whole call was timed; False: `time_ns` is the sum of the times of its chunks.
    is_measured: bool
    # Why the plan does not take this way.
    reason: str

    @property
    def cells(self) -> tuple[str, ...]:
        """Split, time, workspace, error and reason, for tables."""
        about = "" if self.is_measured else "~"
        return (
            str(self.split),
            "-" if self.time_ns is None else f"{about}{format_ns(self.time_ns)}",
            "-" if self.workspace_bytes is None else format_bytes(self.workspace_bytes),
            "-" if self.error is None else f"{self.error:.1e}",
            self.reason,
        )


@dataclass(frozen=True, slots=True)
class Rationale:
    """What is known of a kernel beside its plan: its front and the rejected alternatives."""

    # (workspace in bytes, time in ns) of each split on the Pareto front, workspace rising. The time
    # of a split is the sum of the times of its chunks.
    front: tuple[tuple[int, int], ...] = ()
    # Fastest first.
    alternatives: tuple[Alternative, ...] = ()


def rationales(plan: Plan, measurements: Iterable[Measurement]) -> tuple[Rationale, ...]:
    """Find the front and the rejected alternatives of each kernel, in the order of the plan.

    >>> from ucudnn import Config
    >>> from ucudnn.measurement import Conditions, Device, Software
    >>> from ucudnn.split import Timing
    >>> made = Timing(90, 0, 0, 9), Timing(100, 0, 64, 9)
    >>> problem = Problem("fprop", 1, 4, 4, (9,), (1,))
    >>> kernel = KernelPlan(problem, ("a",), ("gemm",), (0,), ((0, -1),), 90, *made)
    >>> plan = Plan((kernel,), Device("cpu", "any"), Software("2"), Conditions(), Config())
    >>> [one.reason for one in rationales(plan, [])[0].alternatives]
    ['takes 1.11 times as long']
    """
    known: _ByGeometry = {}
    for entry in measurements:
        key = entry.key
        there = (key.device, key.software, replace(key.conditions, role=plan.conditions.role))
        if there == (plan.device, plan.software, plan.conditions):
            known.setdefault(key.problem.with_batch(1), []).append(entry)
    return tuple(
        Rationale(
            _front(kernel.problem, known),
            _alternatives(plan, kernel, known.get(kernel.problem.with_batch(1), [])),
        )
        for kernel in plan.kernels
    )


def _front(problem: Problem, known: _ByGeometry) -> tuple[tuple[int, int], ...]:
    """The front of all splits into chunks that were timed, along either axis."""
    samples, rows = BatchAxis(problem), RowAxis(problem)
    sizes = rows.sizes("powers-of-two")
    parts = [problem.with_batch(1), *(rows.part(size).with_batch(1) for size in sizes)]
    timed = [
        entry
        for part in dict.fromkeys(parts)
        for entry in known.get(part, [])
        if entry.key.subject == Subject.CHUNK and entry.status == "ok"
    ]
    points = []
    # The algorithms of a split either all add the bias or none does, so each kind has its own
    # splits.
    for adds_bias in (False, True):
        usable = [
            entry
            for entry in timed
            if entry.adds_bias == adds_bias and entry.workspace_bytes is not None
        ]
        tables = (
            BatchSplits(samples, (), usable, _as_timed, None),
            RowSplits(rows, sizes, usable, _as_timed, None),
        )
        points += [point for table in tables for point in table.front()]
    return tuple((point.workspace_bytes, point.time_ns) for point in pareto(points))


def _as_timed(problem: Problem, algorithm: str) -> str:
    """Another implementation for each batch, so that no batch takes the time of another one."""
    return f"{algorithm} at {problem.batch}"


def _alternatives(
    plan: Plan, kernel: KernelPlan, known: Sequence[Measurement]
) -> tuple[Alternative, ...]:
    """The best rejected alternatives of a kernel, fastest first; those that failed come last."""
    errors = {
        (entry.key.problem.batch, entry.key.algorithm): entry.error or 0.0
        for entry in known
        if entry.error is not None
    }
    varying = {e.key.algorithm for e in known if not e.is_deterministic}
    found: dict[Split, Alternative] = {}
    for one in (*_of_plan(kernel), *_raced(known), *_of_one_algorithm(kernel.problem, known)):
        # If a split occurs twice, the first one is kept: the whole call, whose time is more
        # reliable than a sum of chunks.
        found.setdefault(one.split, one)
    found.pop(kernel.split(kernel.problem.batch), None)
    judged = [
        replace(one, reason=_reason(one, plan, kernel, varying))
        for one in (replace(one, error=_error_of(one.split, errors)) for one in found.values())
    ]
    judged.sort(key=lambda one: (one.time_ns is None, one.time_ns or one.workspace_bytes or 0))
    return (*judged, *_failed(known, judged))[:_MOST]


def _of_plan(kernel: KernelPlan) -> Iterator[Alternative]:
    if kernel.default is not None:
        timing = kernel.default
        split = Split.default(kernel.problem.batch)
        yield Alternative(split, timing.time_ns, timing.workspace_bytes, None, True, "")


def _raced(known: Sequence[Measurement]) -> Iterator[Alternative]:
    for entry in known:
        if entry.key.split is not None and entry.status == "ok":
            size = entry.workspace_bytes
            yield Alternative(entry.key.split, entry.time_ns, size, None, True, "")


def _of_one_algorithm(problem: Problem, known: Sequence[Measurement]) -> Iterator[Alternative]:
    """Splits whose chunks share one algorithm: the fastest, and the one of least workspace."""
    chunks = [entry for entry in known if entry.key.subject == Subject.CHUNK]
    by_algorithm: dict[str, list[Measurement]] = {}
    for entry in chunks:
        if entry.status in _TIMED and entry.workspace_bytes is not None:
            by_algorithm.setdefault(entry.key.algorithm, []).append(entry)
    for entries in by_algorithm.values():
        table = BatchSplits(BatchAxis(problem), (), entries, _as_timed, None)
        reuse = reuse_by_position(table.items, problem.batch)
        least = reuse.smallest_bytes(problem.batch) if reuse else None
        if reuse is None or least is None:
            continue
        for limit in (None, least):
            split = Split("batch", reuse.split(problem.batch, limit))
            items = table.chunks(split) or ()
            workspace = max(item.workspace_bytes for item in items)
            time_ns = sum(item.time_ns for item in items)
            yield Alternative(split, time_ns, workspace, None, False, "")
    for entry in chunks:
        # An "untimed" candidate ran once, and its workspace was too large for timing it.
        if entry.status == "untimed" and entry.key.problem == problem:
            split = Split.undivided(problem.batch, entry.key.algorithm)
            yield Alternative(split, None, entry.workspace_bytes, None, False, "")


def _error_of(split: Split, errors: dict[tuple[int, str], float]) -> float | None:
    """The largest error of the chunks of a split; None if the error of a chunk is not known."""
    chunks = {(chunk.size, chunk.algorithm) for chunk in split.chunks}
    if split.axis == "spatial" or not chunks <= errors.keys():
        return None
    return max(errors[chunk] for chunk in chunks)


def _reason(one: Alternative, plan: Plan, kernel: KernelPlan, varying: set[str]) -> str:
    """Reason why an alternative was not chosen: the first of the reasons below that holds."""
    limit, most = plan.limit_bytes(kernel), plan.config.max_error
    ratio = None if one.time_ns is None else one.time_ns / kernel.timing.time_ns
    names = {chunk.algorithm for chunk in one.split.chunks}
    dropped = plan.step_race.dropped if plan.step_race else ()
    reasons = {
        f"needs more than the limit of {format_bytes(limit or 0)}": _is_above(
            one.workspace_bytes, limit
        ),
        f"its error is above max_error={most}": _is_above(one.error, most),
        "may give other bits in every run": plan.config.deterministic and names & varying,
        "was not timed": ratio is None,
        f"takes {ratio or 0:.2f} times as long": (ratio or 0) >= _LONGER,
        "steps were not faster with the plan of this kernel": str(kernel.problem) in dropped,
        "its parts add up to less, but it was not raced as a whole call": not one.is_measured,
        "is not faster beyond the noise": True,
    }
    return next(reason for reason, holds in reasons.items() if holds)


def _is_above(value: float | None, most: float | None) -> bool:
    return value is not None and most is not None and value > most


def _failed(known: Sequence[Measurement], others: Sequence[Alternative]) -> Iterator[Alternative]:
    """One alternative for each algorithm that failed and that no other alternative contains."""
    seen = {chunk.algorithm for one in others for chunk in one.split.chunks}
    for entry in known:
        name = entry.key.algorithm
        if entry.status == "failed" and name not in seen and entry.key.subject == Subject.CHUNK:
            seen.add(name)
            split = Split.undivided(entry.key.problem.batch, name)
            yield Alternative(split, None, entry.workspace_bytes, entry.error, False, entry.reason)
