"""Measurements of one kernel as items for the solver: what a chunk costs in each role."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod

from ucudnn.measurement import Measurement, Role, role_of
from ucudnn.problem import Problem
from ucudnn.solvers import Item
from ucudnn.split import DEFAULT_ALGORITHM

# Name of the implementation by which an algorithm runs a problem; None if it does not run it.
ImplementationOf = Callable[[Problem, str], str | None]


def items_by_role(
    problem: Problem, measurements: Sequence[Measurement], implementation_of: ImplementationOf
) -> dict[str, list[Item]]:
    """The input of the solver of splits: items by the position that their chunk may have."""
    alone = _single_items(problem, measurements, implementation_of)
    later = chunk_items(problem, measurements, Role.LATER)
    first = chunk_items(problem, measurements, role_of(problem, Role.FIRST))
    if problem.op == "wgrad":
        # What was timed for a first chunk of wgrad is also an upper bound for a chunk alone:
        # returning a gradient costs no more than beginning a sum with it.
        alone += first
    return {Role.ALONE: alone, Role.FIRST: first, Role.LATER: later}


def _single_items(
    problem: Problem, measurements: Sequence[Measurement], implementation_of: ImplementationOf
) -> list[Item]:
    """For each algorithm and batch the item of an undivided call: measured, or an upper bound.

    A batch that was not timed is assumed to cost at most as much as the next larger one, if both
    run the same implementation. A chunk alone costs at most as much as a chunk that is written into
    a larger result.
    """
    # A later chunk of wgrad is added to a sum, so its time does not bound that of a chunk alone.
    later = [] if problem.op == "wgrad" else chunk_items(problem, measurements, Role.LATER)
    # The items of `ALONE` come second, so that they replace those of the role `LATER`, which are
    # only upper bounds.
    items = [*later, *chunk_items(problem, measurements, Role.ALONE)]
    return list(_bounded(problem, items, range(1, problem.batch + 1), implementation_of))


def with_bounded(
    problem: Problem,
    items: Mapping[str, Sequence[Item]],
    implementation_of: ImplementationOf,
    sizes: Iterable[int],
) -> dict[str, list[Item]]:
    """The items, with upper bounds added for chunks of sizes that were not timed."""
    sizes = tuple(sizes)
    # Items in role `ALONE` cover all batches already, see `_single_items`.
    found: dict[str, list[Item]] = {Role.ALONE: list(items[Role.ALONE])}
    for role in (Role.FIRST, Role.LATER):
        timed = {(item.algorithm, item.batch) for item in items[role]}
        more = (
            item
            for item in _bounded(problem, items[role], sizes, implementation_of)
            if (item.algorithm, item.batch) not in timed
        )
        found[role] = [*items[role], *more]
    return found


def _bounded(
    problem: Problem,
    items: Iterable[Item],
    sizes: Iterable[int],
    implementation_of: ImplementationOf,
) -> Iterator[Item]:
    """Items of each algorithm at these sizes; an untimed size gets the next larger one's time.

    A larger size is used only if it runs the same implementation. If there are two items of one
    size, the last one is used.
    """
    costs: dict[str, dict[int, Item]] = {}
    for item in items:
        costs.setdefault(item.algorithm, {})[item.batch] = item
    sizes = set(sizes)
    for algorithm, by_batch in costs.items():
        # From the largest size down: with the same implementation, a chunk is assumed to need no
        # more time or workspace than the next larger one that was timed.
        bound = None
        for n in sorted(sizes | by_batch.keys(), reverse=True):
            bound = by_batch.get(n, bound)
            if bound is None:
                continue
            two = (problem.with_batch(size) for size in (n, bound.batch))
            if len({implementation_of(one, algorithm) for one in two}) == 1:
                yield Item(n, bound.workspace_bytes, bound.time_ns, algorithm, bound.rank)


def lists_of(problem: Problem, is_whole: bool, role: Role) -> tuple[Role, ...]:
    """Positions in a split that a chunk may have if it was timed in a role.

    >>> lists_of(Problem("fprop", 8, 4, 4, (9, 9), (3, 3)), False, Role.LATER)
    (<Role.FIRST: 'first'>, <Role.LATER: 'later'>)
    """
    if is_whole:
        return (Role.ALONE,)
    # A chunk of fprop or dgrad that was run in the role ALONE and is not the whole batch has no
    # position in a split: it ran only to extrapolate the workspace of the whole call.
    places = (Role.FIRST, Role.LATER)
    return tuple(place for place in places if role_of(problem, place) == role)


def rank_of(algorithm: str, is_deterministic: bool) -> int:
    """Rank of an item, the lower is preferred: deterministic algorithms, then torch's default."""
    return 2 * (not is_deterministic) + (algorithm != DEFAULT_ALGORITHM)


def held_bytes(problem: Problem, role: Role) -> int:
    """Bytes that a chunk needs beside its workspace: half-precision wgrad adds up in float32."""
    # Chunks of half-precision wgrad are added up in a float32 tensor, which the call holds until
    # its end. The measured workspace of a chunk does not include it.
    if problem.op == "wgrad" and problem.bytes_per_element < 4 and role != Role.ALONE:
        return 4 * prod(problem.w_shape)
    return 0


def chunk_items(
    problem: Problem,
    measurements: Sequence[Measurement],
    role: Role,
    size_by_part: Mapping[Problem, int] | None = None,
) -> list[Item]:
    """Items of the chunks measured in one role; their workspace includes `held_bytes`.

    With `size_by_part` only chunks of these problems are included, else only micro-batches.
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
                    # An item must have a time. A chunk that was run only for its workspace was not
                    # timed; its item serves only to find the smallest workspace, so any time will
                    # do.
                    time_ns=entry.time_ns or 1,
                    algorithm=algorithm,
                    rank=rank_of(algorithm, entry.is_deterministic),
                )
            )
    return items
