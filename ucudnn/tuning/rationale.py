"""Reasons for the plan of each kernel, by the measurements of a cache. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ucudnn.axis import BatchAxis, RowAxis
from ucudnn.measurement import Measurement, Role, Subject
from ucudnn.plan import DEFAULT_ALGORITHM, KernelPlan, Plan, Timing
from ucudnn.problem import Problem
from ucudnn.reports.rationale import Rationale
from ucudnn.tuning.alternatives import alternatives
from ucudnn.tuning.batch_splits import BatchSplits
from ucudnn.tuning.fronts import pareto
from ucudnn.tuning.row_splits import RowSplits

# Measurements of the plan's machine, by their problem with a batch of 1.
_Known = dict[Problem, list[Measurement]]


def rationales(plan: Plan, measurements: Iterable[Measurement]) -> tuple[Rationale, ...]:
    """Find the front and the rejected alternatives of each kernel of a plan, in its order.

    >>> from ucudnn import Config
    >>> from ucudnn.measurement import Conditions, Device, Software
    >>> made = Timing(90, 0, 0, 9), Timing(100, 0, 64, 9)
    >>> problem = Problem("fprop", 1, 4, 4, (9,), (1,))
    >>> kernel = KernelPlan(problem, ("a",), ("gemm",), (0,), ((0, -1),), 90, *made)
    >>> plan = Plan((kernel,), Device("cpu", "any"), Software("2"), Conditions(), Config())
    >>> [one.reason for one in rationales(plan, [])[0].alternatives]
    ['takes 1.11 times as long']

    Args:
        plan: with the settings.
        measurements: of any kernels and machines, as a cache has them.
    """
    known: _Known = {}
    for entry in measurements:
        key = entry.key
        there = (key.device, key.software, replace(key.conditions, role=plan.conditions.role))
        if there == (plan.device, plan.software, plan.conditions):
            known.setdefault(key.problem.with_batch(1), []).append(entry)
    return tuple(_rationale(plan, kernel, known) for kernel in plan.kernels)


def _rationale(plan: Plan, kernel: KernelPlan, known: _Known) -> Rationale:
    problem = kernel.problem
    own = known.get(problem.with_batch(1), [])
    rejected = alternatives(plan, kernel, own)
    return Rationale(_front(problem, known), tuple(rejected), _channels_last(problem, known))


def _front(problem: Problem, known: _Known) -> tuple[tuple[int, int], ...]:
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
    # Algorithms that add a bias make splits of their own.
    for adds_bias in (False, True):
        usable = [
            entry
            for entry in timed
            if entry.adds_bias == adds_bias and entry.workspace_bytes is not None
        ]
        tables = (
            BatchSplits.of(samples, (), usable, _as_timed, None),
            RowSplits.of(rows, sizes, usable, _as_timed, None),
        )
        points += [point for table in tables for point in table.front()]
    return tuple((point.workspace_bytes, point.time_ns) for point in pareto(points))


def _as_timed(problem: Problem, algorithm: str) -> str:
    """A name for each size, so that no time stands for that of another size."""
    return f"{algorithm} at {problem.batch}"


def _channels_last(problem: Problem, known: _Known) -> Timing | None:
    """Torch's own convolution in channels_last, where that was timed."""
    if problem.rank == 1 or problem.layout == "nhwc":
        return None
    there = replace(problem, layout="nhwc")
    return next(filter(None, map(_timing, _default_of(there, known))), None)


def _default_of(problem: Problem, known: _Known) -> Sequence[Measurement]:
    return [
        entry
        for entry in known.get(problem.with_batch(1), [])
        if entry.key.subject == Subject.CHUNK
        and entry.key.problem == problem
        and entry.key.algorithm == DEFAULT_ALGORITHM
        and entry.key.conditions.role == Role.ALONE
    ]


def _timing(entry: Measurement) -> Timing | None:
    if entry.time_ns is None or entry.workspace_bytes is None:
        return None
    samples = len(entry.samples) or 1
    return Timing(entry.time_ns, entry.spread_ns or 0, entry.workspace_bytes, samples)
