"""Measurements of one kernel as items for the solver: what a chunk costs in each role. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod

from ucudnn.measurement import Measurement
from ucudnn.plan import DEFAULT_ALGORITHM
from ucudnn.problem import Problem
from ucudnn.solvers import Item

# Which kernel an algorithm runs a problem by, None where it does not.
KernelOf = Callable[[Problem, str], str | None]


def items_by_role(
    problem: Problem,
    measurements: Sequence[Measurement],
    kernel_of: KernelOf,
) -> dict[str, list[Item]]:
    """Items for `reuse`, by role: "alone", "first", "later".

    Args:
        problem: the kernel at its largest batch.
        measurements: of its micro-batches and of others.
        kernel_of: name of the implementation by which an algorithm runs a problem, or None.
    """
    alone = _single_items(problem, measurements, kernel_of)
    later = chunk_items(problem, measurements, "later")
    if problem.op != "wgrad":
        # The first chunk writes into its slice of the result as every other one does.
        first = later
    else:
        first = chunk_items(problem, measurements, role_of_first(problem))
        # To return a gradient costs no more than to begin a sum with it.
        alone += first
    return {"alone": alone, "first": first, "later": later}


def _single_items(
    problem: Problem,
    measurements: Sequence[Measurement],
    kernel_of: KernelOf,
) -> list[Item]:
    """Times of each algorithm for each batch alone, or upper bounds.

    A batch that was not timed costs at most as much as the next larger one with the same
    implementation. A chunk alone costs at most as much as one that is written into a larger result.
    """
    costs: dict[str, dict[int, Item]] = {}
    # "alone" comes second: what was timed so replaces the bound from the other role.
    for role in ("later", "alone"):
        for item in chunk_items(problem, measurements, role):
            # A later chunk of a weight gradient is added to a sum, which bounds no other operation.
            if role == "alone" or problem.op != "wgrad":
                costs.setdefault(item.algorithm, {})[item.batch] = item
    every = range(1, problem.batch + 1)
    return [
        item
        for by_batch in costs.values()
        for item in _bounded(problem, by_batch, every, kernel_of)
    ]


def with_bounded(
    problem: Problem, items: Mapping[str, list[Item]], kernel_of: KernelOf, sizes: Iterable[int]
) -> dict[str, list[Item]]:
    """The items, with upper bounds for chunks of other sizes.

    Args:
        problem: the kernel at its largest batch.
        items: of the timed chunks, by role.
        kernel_of: name of the implementation by which an algorithm runs a problem, or None.
        sizes: allowed sizes of chunks.
    """
    sizes = tuple(sizes)
    # Items in role "alone" cover all batches already, see `_single_items`.
    found = {"alone": items["alone"]}
    for role in ("first", "later"):
        costs: dict[str, dict[int, Item]] = {}
        for item in items[role]:
            costs.setdefault(item.algorithm, {})[item.batch] = item
        more = (
            item
            for by_batch in costs.values()
            for item in _bounded(problem, by_batch, sizes, kernel_of)
            if item.batch not in by_batch
        )
        found[role] = [*items[role], *more]
    return found


def _bounded(
    problem: Problem, by_batch: Mapping[int, Item], sizes: Iterable[int], kernel_of: KernelOf
) -> Iterator[Item]:
    """Times of one algorithm at some sizes; an untimed size has the time of the next larger one.

    This holds only if both run the same implementation.
    """
    # From the largest size down: a smaller chunk of one implementation is taken to need no more
    # time or workspace than the next larger one that was timed.
    bound = None
    timed = sorted(by_batch, reverse=True)
    for n in sorted({*sizes, *timed}, reverse=True):
        bound = by_batch.get(n, bound)
        if bound is None:
            continue
        algorithm = bound.algorithm
        kernels = (kernel_of(problem.with_batch(size), algorithm) for size in {n, bound.batch})
        if len(set(kernels)) == 1:
            yield Item(n, bound.workspace_bytes, bound.time_ns, algorithm, bound.rank)


def lists_of(op: str, is_whole: bool, role: str) -> tuple[str, ...]:
    """Positions in a split that a chunk may have if it was timed in a role.

    >>> lists_of("fprop", False, "later")
    ('first', 'later')

    Args:
        op: of the problem.
        is_whole: whether the chunk is the whole batch.
        role: in which it was timed.
    """
    if is_whole:
        return ("alone",)
    if op != "wgrad":
        # One that was timed alone though it is not the whole is no part of any split: it was run to
        # extrapolate the workspace of the whole.
        return ("first", "later") if role == "later" else ()
    return ("later",) if role == "later" else ("first",)


def role_of_first(problem: Problem) -> str:
    """The role in which the first of several chunks is timed."""
    if problem.op != "wgrad":
        return "later"
    # in full precision it runs exactly as a lone one does
    return "alone" if problem.bytes_per_element >= 4 else "first"


def rank_of(algorithm: str, notes: Sequence[str]) -> int:
    """Rank that breaks ties, lower first: 0 for deterministic algorithms and torch's default."""
    return 2 * ("nondeterministic" in notes) + (algorithm != DEFAULT_ALGORITHM)


def held_bytes(problem: Problem, role: str) -> int:
    """Memory in addition to the workspace of a chunk: half-precision wgrad adds up in float32."""
    # Workspace of a chunk is measured without the tensor that it adds to, which the call holds
    # until its end.
    if problem.op == "wgrad" and problem.bytes_per_element < 4 and role != "alone":
        return 4 * prod(problem.w_shape)
    return 0


def chunk_items(
    problem: Problem,
    measurements: Sequence[Measurement],
    role: str,
    size_by_part: Mapping[Problem, int] | None = None,
) -> list[Item]:
    """Items of one role, with all memory that they need.

    Args:
        problem: the kernel at its largest batch.
        measurements: of chunks along any axis.
        role: the role in which they were timed.
        size_by_part: size of each problem whose measurements count; None: micro-batches count.
    """
    total = held_bytes(problem, role)
    items = []
    for entry in measurements:
        part = entry.key.problem
        if size_by_part is None:
            # Measurements may be of slabs, too, whose spatial sizes differ from those of the
            # problem.
            size = part.batch if part.with_batch(problem.batch) == problem else None
        else:
            size = size_by_part.get(part)
        if size is not None and entry.key.conditions.role == role:
            assert entry.workspace_bytes is not None
            algorithm = entry.key.algorithm
            items.append(
                Item(
                    batch=size,
                    workspace_bytes=entry.workspace_bytes + total,
                    # Items need a time. What was run for its workspace alone has none, and is used
                    # only to find the smallest workspace.
                    time_ns=entry.time_ns or 1,
                    algorithm=algorithm,
                    rank=rank_of(algorithm, entry.notes),
                )
            )
    return items
