"""Batch-invariant plans: one algorithm and one micro-batch per kernel, at every batch. Pure.

A library may compute a sample in another order of sums, or by another kernel, where there are more
samples in the call. Where every chunk has the same size, the last one filled up with zeros, what is
computed of a sample cannot depend on how many samples there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ucudnn.benchmark.rounds import WORTHWHILE_GAIN
from ucudnn.errors import PlanError
from ucudnn.execution.remainder import padding_bytes
from ucudnn.measurement import Measurement, Role, role_of
from ucudnn.problem import Problem
from ucudnn.solvers import Item
from ucudnn.split import BY_BATCH, DEFAULT_ALGORITHM, KernelPlan, Split, Step, Timing
from ucudnn.system.documents import invariant_steps
from ucudnn.tuning.confirmation import Finalist
from ucudnn.tuning.items import chunk_items
from ucudnn.units import format_bytes

# So many micro-batches, those that are fastest by the sums of their chunks, race as whole calls.
_MOST_FINALISTS = 3
# The roles that the chunks of one size and algorithm need for a split: the whole batch in one
# chunk, or several.
UNIFORM_ROLES = ({Role.ALONE}, {Role.FIRST, Role.LATER})


def invariant_split(batch: int, micro_batch: int, algorithm: str) -> Split:
    """The split of a batch into chunks of one size, of which the last may be filled up.

    >>> print(invariant_split(7, 3, "gemm"))
    2x3 gemm + 1 gemm, padded to 3
    """
    full, rest = divmod(batch, micro_batch)
    sizes = [micro_batch] * full + ([rest] if rest else [])
    return Split("batch", tuple(Step(size, algorithm) for size in sizes), micro_batch)


def invariant_splits(
    problem: Problem, measurements: Sequence[Measurement], limit: int | None
) -> list[Split]:
    """Splits worth timing as wholes: the fastest algorithm of the fastest micro-batches.

    Args:
        problem: the kernel at its largest batch.
        measurements: timed candidates.
        limit: workspace in bytes that a split may use, padding included, None for any.
    """
    times: dict[int, tuple[int, str]] = {}
    for (size, algorithm), items in uniform_chunks(problem, measurements).items():
        if limit is None or _needed(problem, size, items) <= limit:
            time_ns = split_ns(problem, size, items)
            times[size] = min(times.get(size, (time_ns, algorithm)), (time_ns, algorithm))
    fastest = sorted(times, key=lambda size: (times[size][0], size))[:_MOST_FINALISTS]
    return [invariant_split(problem.batch, size, times[size][1]) for size in fastest]


def uniform_chunks(
    problem: Problem, measurements: Sequence[Measurement]
) -> dict[tuple[int, str], dict[Role, Item]]:
    """Items by micro-batch and algorithm, for each position in a split that one needs."""
    found: dict[tuple[int, str], dict[Role, Item]] = {}
    for position in Role:
        for item in chunk_items(problem, measurements, role_of(problem, position)):
            # The whole batch is one chunk, and any smaller one is followed by others.
            if (position == Role.ALONE) is (item.batch == problem.batch):
                found.setdefault((item.batch, item.algorithm), {})[position] = item
    return {chunk: items for chunk, items in found.items() if set(items) in UNIFORM_ROLES}


def uniform_ns(chunks: int, times: Mapping[Role, int]) -> int:
    """Time of a batch in chunks of one size, as the sum of its chunks.

    >>> uniform_ns(3, {Role.FIRST: 5, Role.LATER: 4})
    13

    Args:
        chunks: their number.
        times: of one chunk in ns, by position.
    """
    if Role.ALONE in times:
        return times[Role.ALONE]
    return times[Role.FIRST] + (chunks - 1) * times[Role.LATER]


def split_ns(problem: Problem, size: int, items: Mapping[Role, Item]) -> int:
    """Time of a kernel in chunks of one size, as the sum of its chunks.

    Args:
        problem: the kernel at its batch.
        size: of the chunks.
        items: of one chunk, by position.
    """
    times = {role: item.time_ns for role, item in items.items()}
    return uniform_ns(-(-problem.batch // size), times)


def _needed(problem: Problem, size: int, items: dict[Role, Item]) -> int:
    """Workspace of a split in bytes, also of a smaller batch whose last chunk is filled up."""
    chunk = max(item.workspace_bytes for item in items.values())
    return chunk + padding_bytes(problem.with_batch(size))


def choose_invariant(
    finalists: Sequence[Finalist], problem: Problem, limit: int | None, deterministic: bool
) -> Finalist | None:
    """The fastest batch-invariant split within the limit; of those that tie the smallest chunks.

    A batch that is smaller than a chunk takes as long as a full one, which smaller chunks avoid.

    Args:
        finalists: of one race.
        problem: the kernel at its largest batch.
        limit: bytes of workspace, None without a limit.
        deterministic: the winner's result must never vary.
    """
    possible = (
        _with_padding(entry, problem)
        for entry in finalists
        if entry.split.micro_batch and (entry.is_deterministic or not deterministic)
    )
    fitting = [one for one in possible if limit is None or one.timing.workspace_bytes <= limit]
    if not fitting:
        return None
    fastest = min(entry.timing.time_ns for entry in fitting)
    ties = [e for e in fitting if e.timing.time_ns <= (1 + WORTHWHILE_GAIN) * fastest]
    return min(ties, key=lambda entry: entry.split.micro_batch)


def _with_padding(entry: Finalist, problem: Problem) -> Finalist:
    """A finalist with the workspace of smaller batches, whose last chunk is filled up."""
    size, timing = entry.split.micro_batch, entry.timing
    # Where this batch has a remainder, its padding was measured.
    if problem.batch % size:
        return entry
    workspace = timing.workspace_bytes + padding_bytes(problem.with_batch(size))
    return replace(entry, timing=replace(timing, workspace_bytes=workspace))


def invariant_plan(
    problem: Problem,
    layers: tuple[str, ...],
    winner: Finalist,
    default: Timing | None,
    free: Timing | None,
    measurements: Sequence[Measurement],
    notes: tuple[str, ...],
) -> KernelPlan:
    """The plan of every batch by the micro-batch of the winner.

    Args:
        problem: the kernel at its largest batch.
        layers: names of the layers that run it.
        winner: a batch-invariant split of the largest batch.
        default: torch's own convolution.
        free: the fastest split of any kind.
        measurements: timed candidates.
        notes: what else is known.
    """
    size, algorithm = winner.split.micro_batch, winner.split.steps[0].algorithm
    items = uniform_chunks(problem, measurements).get((size, algorithm))
    return KernelPlan(
        problem=problem,
        layers=layers,
        algorithms=(algorithm,),
        alone=(BY_BATCH,) * problem.batch,
        last=invariant_steps(problem.batch, size),
        predicted_time_ns=split_ns(problem, size, items) if items else winner.timing.time_ns,
        timing=winner.timing,
        default=default,
        notes=notes,
        micro_batch=size,
        free=free,
    )


def invariant_by_torch(plan: KernelPlan, limit: int | None) -> KernelPlan | None:
    """Torch's own convolution of a full batch for every batch; None where its padding exceeds.

    Args:
        plan: of a kernel that is left to torch.
        limit: workspace in bytes, None for any.
    """
    timing, problem = plan.timing, plan.problem
    workspace = timing.workspace_bytes + padding_bytes(problem)
    if limit is not None and workspace > limit:
        return None
    return replace(
        plan,
        algorithms=(DEFAULT_ALGORITHM,),
        alone=(BY_BATCH,) * problem.batch,
        last=invariant_steps(problem.batch, problem.batch),
        slabs=(),
        timing=replace(timing, workspace_bytes=workspace),
        micro_batch=problem.batch,
        free=timing,
    )


def nothing_invariant_fits(
    problem: Problem, measurements: Sequence[Measurement], limit: int | None
) -> PlanError:
    """Error for a kernel of which no batch-invariant split is known within the limit.

    Args:
        problem: the kernel at its largest batch.
        measurements: all whose workspace is known.
        limit: workspace in bytes, None for any.
    """
    chunks = uniform_chunks(problem, measurements).items()
    needs = [(_needed(problem, *_sized(chunk)), *chunk[0]) for chunk in chunks]
    if limit is None or not needs:
        return PlanError(f"no batch-invariant split of {problem} could be run")
    least, size, algorithm = min(needs)
    return PlanError(
        f"no batch-invariant plan for {problem} fits workspace_limit={format_bytes(limit)}; the "
        f"smallest needs {format_bytes(least)} (micro-batch {size}, {algorithm}, with the padding "
        f"of a last chunk); raise the limit or leave batch_invariant out",
        least,
    )


def _sized(chunk: tuple[tuple[int, str], dict[Role, Item]]) -> tuple[int, dict[Role, Item]]:
    (size, _), items = chunk
    return size, items
