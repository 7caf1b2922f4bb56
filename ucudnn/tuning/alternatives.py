"""Rejected alternatives to the plan of a kernel, and what each would cost. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ucudnn.measurement import Measurement, Role, Subject, positions, role_of
from ucudnn.plan import KernelPlan, Plan
from ucudnn.problem import Problem
from ucudnn.reports.rationale import Alternative
from ucudnn.solvers import Item
from ucudnn.split import DEFAULT_ALGORITHM, Split, Step
from ucudnn.tuning.items import chunk_items
from ucudnn.units import format_bytes

# Statuses of measurements with a time.
_TIMED = ("ok", "screened")
# A ratio of times that is not 1.00 when it is printed.
_SLOWER = 1.005
# The positions that a split into chunks of one size has: the whole batch in one, or several.
_POSITIONS = ({Role.ALONE}, {Role.FIRST, Role.LATER})


def alternatives(
    plan: Plan, kernel: KernelPlan, measurements: Iterable[Measurement], most: int = 8
) -> list[Alternative]:
    """The best rejected alternatives of a kernel, fastest first; those that failed come last.

    >>> from ucudnn import Config
    >>> from ucudnn.measurement import Conditions, Device, Software
    >>> from ucudnn.plan import Timing
    >>> made = Timing(90, 0, 0, 9), Timing(100, 0, 64, 9)
    >>> problem = Problem("fprop", 1, 4, 4, (9,), (1,))
    >>> kernel = KernelPlan(problem, ("a",), ("gemm",), (0,), ((0, -1),), 90, *made)
    >>> plan = Plan((kernel,), Device("cpu", "any"), Software("2"), Conditions(), Config())
    >>> [(str(one.split), one.reason) for one in alternatives(plan, kernel, [])]
    [('1 torch_default', 'takes 1.11 times as long')]

    Args:
        plan: with the settings.
        kernel: one of its kernels.
        measurements: of any kernels and machines, as a cache has them.
        most: the number of alternatives to give.
    """
    known = [entry for entry in measurements if _belongs(entry, plan, kernel.problem)]
    errors = {
        (entry.key.problem.batch, entry.key.algorithm): entry.error or 0.0
        for entry in known
        if entry.error is not None
    }
    varying = {e.key.algorithm for e in known if not e.is_deterministic}
    found: dict[Split, Alternative] = {}
    for one in (*_of_plan(kernel), *_raced(known), *_uniform(kernel.problem, known)):
        # Whole calls come first: a measured time is better than a sum.
        found.setdefault(one.split, one)
    found.pop(kernel.split(kernel.problem.batch), None)
    judged = [
        replace(one, reason=_reason(one, plan, kernel, varying))
        for one in (replace(one, error=_error_of(one.split, errors)) for one in found.values())
    ]
    judged.sort(key=lambda one: (one.time_ns is None, one.time_ns or one.workspace_bytes or 0))
    return [*judged, *_failed(known, judged)][:most]


def _belongs(entry: Measurement, plan: Plan, problem: Problem) -> bool:
    """True for a measurement of a kernel's chunks or calls on the machine of the plan."""
    key = entry.key
    there = (key.device, key.software, replace(key.conditions, role=plan.conditions.role))
    is_kernel = key.problem.with_batch(problem.batch) == problem
    return is_kernel and there == (plan.device, plan.software, plan.conditions)


def _of_plan(kernel: KernelPlan) -> Iterator[Alternative]:
    """Torch's own convolution, which the plan was raced against."""
    if kernel.default is not None:
        timing = kernel.default
        split = _undivided(kernel.problem, DEFAULT_ALGORITHM)
        yield Alternative(split, timing.time_ns, timing.workspace_bytes, None, True, "")


def _raced(known: Sequence[Measurement]) -> Iterator[Alternative]:
    for entry in known:
        if entry.key.split is not None and entry.status == "ok":
            size = entry.workspace_bytes
            yield Alternative(entry.key.split, entry.time_ns, size, None, True, "")


def _uniform(problem: Problem, known: Sequence[Measurement]) -> Iterator[Alternative]:
    """The fastest split of each algorithm into chunks of one size, and that of least workspace."""
    chunks = [entry for entry in known if entry.key.subject == Subject.CHUNK]
    timed = [
        entry for entry in chunks if entry.status in _TIMED and entry.workspace_bytes is not None
    ]
    by_algorithm: dict[str, list[Alternative]] = {}
    for (size, algorithm), items in _uniform_chunks(problem, timed).items():
        # A remainder would be another chunk, whose time is not known.
        if problem.batch % size == 0:
            summed = _summed(problem.batch // size, Step(size, algorithm), items)
            by_algorithm.setdefault(algorithm, []).append(summed)
    for listed in by_algorithm.values():
        yield min(listed, key=lambda one: (one.time_ns or 0, one.workspace_bytes or 0))
        yield min(listed, key=lambda one: (one.workspace_bytes or 0, one.time_ns or 0))
    yield from _run_once(problem, chunks)


def _uniform_chunks(
    problem: Problem, measurements: Sequence[Measurement]
) -> dict[tuple[int, str], dict[Role, Item]]:
    """Items by size and algorithm, for each position in a split that one needs."""
    found: dict[tuple[int, str], dict[Role, Item]] = {}
    for position in Role:
        for item in chunk_items(problem, measurements, role_of(problem, position)):
            # The whole batch is one chunk, and any smaller one is followed by others.
            if (position == Role.ALONE) is (item.batch == problem.batch):
                found.setdefault((item.batch, item.algorithm), {})[position] = item
    return {chunk: items for chunk, items in found.items() if set(items) in _POSITIONS}


def _summed(count: int, step: Step, items: Mapping[Role, Item]) -> Alternative:
    """A split into equal chunks, by what its chunks take."""
    times = [items[position].time_ns for position in positions(count)]
    workspace = max(item.workspace_bytes for item in items.values())
    return Alternative(Split("batch", (step,) * count), sum(times), workspace, None, False, "")


def _run_once(problem: Problem, chunks: Sequence[Measurement]) -> Iterator[Alternative]:
    """Algorithms that were run for their workspace, which was too much to go on."""
    for entry in chunks:
        if entry.status == "untimed" and entry.key.problem == problem:
            split = _undivided(problem, entry.key.algorithm)
            yield Alternative(split, None, entry.workspace_bytes, None, False, "")


def _undivided(problem: Problem, algorithm: str) -> Split:
    return Split("batch", (Step(problem.batch, algorithm),))


def _error_of(split: Split, errors: dict[tuple[int, str], float]) -> float | None:
    """The largest error of the steps of a split, None where one is not known."""
    steps = {(step.size, step.algorithm) for step in split.steps}
    if split.axis == "spatial" or not steps <= errors.keys():
        return None
    return max(errors[step] for step in steps)


def _reason(one: Alternative, plan: Plan, kernel: KernelPlan, varying: set[str]) -> str:
    """Reason why an alternative is not the plan: the first of these that holds."""
    limit, most = plan.limit_bytes(kernel), plan.config.max_error
    ratio = None if one.time_ns is None else one.time_ns / kernel.timing.time_ns
    names = {step.algorithm for step in one.split.steps}
    dropped = plan.step_race.dropped if plan.step_race else ()
    reasons = {
        f"needs more than the limit of {format_bytes(limit or 0)}": _is_above(
            one.workspace_bytes, limit
        ),
        f"its error is above max_error={most}": _is_above(one.error, most),
        "may give other bits in every run": plan.config.deterministic and names & varying,
        "was not timed": ratio is None,
        f"takes {ratio or 0:.2f} times as long": (ratio or 0) >= _SLOWER,
        "steps were not faster with the plan of this kernel": str(kernel.problem) in dropped,
        "its parts add up to less, but it was not raced as a whole call": not one.is_measured,
        "is not faster beyond the noise": True,
    }
    return next(reason for reason, holds in reasons.items() if holds)


def _is_above(value: float | None, most: float | None) -> bool:
    return value is not None and most is not None and value > most


def _failed(known: Sequence[Measurement], others: Sequence[Alternative]) -> Iterator[Alternative]:
    """Each algorithm that failed, once, where nothing else is known of it."""
    seen = {step.algorithm for one in others for step in one.split.steps}
    for entry in known:
        name = entry.key.algorithm
        if entry.status == "failed" and name not in seen and entry.key.subject == Subject.CHUNK:
            seen.add(name)
            split = _undivided(entry.key.problem, name)
            yield Alternative(split, None, entry.workspace_bytes, entry.error, False, entry.reason)
