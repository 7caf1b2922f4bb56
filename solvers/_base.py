"""Inputs and results of solvers, validated when they are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from ucudnn.errors import ConfigError, PlanError
from ucudnn.units import format_bytes

Integers = NDArray[Any]  # int64, or object (Python's ints) where a sum might not fit in 64 bits
# The sum of two numbers up to `SAFE` fits in 64 bits.
SAFE = 1 << 61


@dataclass(frozen=True, slots=True)
class Item:
    """One way to compute a chunk: an algorithm at a chunk size, with its time and workspace.

    >>> Item(batch=32, workspace_bytes=24 << 20, time_ns=410_000, algorithm="eng67_k2=20").rank
    0

    Args:
        batch: size of the chunk: its samples; for a slab its rows, in units of the row axis.
        workspace_bytes: temporary memory in bytes that the chunk needs.
        time_ns: time of the chunk in ns.
        algorithm: name of the algorithm.
        rank: breaks ties between equally fast splits; lower ranks are preferred.

    Raises:
        ConfigError: a number is not an int or out of range, or the algorithm has no name.
    """

    batch: int
    workspace_bytes: int
    time_ns: int
    algorithm: str
    rank: int = 0

    def __post_init__(self) -> None:
        require_int("batch of an item", self.batch, 1)
        require_int("workspace_bytes of an item", self.workspace_bytes, 0)
        require_int("time_ns of an item", self.time_ns, 1)
        require_int("rank of an item", self.rank, 0)
        if type(self.algorithm) is not str or not self.algorithm:
            raise ConfigError(
                f"algorithm of an item must be a non-empty string, got {self.algorithm!r}"
            )


def require_int(name: str, value: object, least: int) -> None:
    """Raise a ConfigError unless the value is an int, and no bool, of at least `least`."""
    # `isinstance` would accept True, which is a mistake of the caller here.
    if type(value) is not int or value < least:
        raise ConfigError(f"{name} must be an int of at least {least}, got {value!r}")


def require_limit(name: str, value: object) -> None:
    """Raise a ConfigError unless the value is None (no limit) or an int of at least 0."""
    if value is not None:
        require_int(f"{name}, unless None for no limit,", value, 0)


def require_items(name: str, items: Iterable[Item]) -> tuple[Item, ...]:
    """The items as a tuple; a ConfigError if any is not an `Item`."""
    # Make a tuple first, because callers may pass a generator, which can be read only once.
    values = tuple(items)
    for value in values:
        if type(value) is not Item:
            raise ConfigError(f"{name} must hold ucudnn.solvers.Item values, got {value!r}")
    return values


# The choices of one kernel as (workspace in bytes, time in ns), in the caller's order. `Division`
# names a choice by its index in this tuple.
Points = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool of memory, and the fronts of the kernels among which it is divided.

    >>> Pool((((0, 9), (8, 5)), ((4, 7),)), total_bytes=12).smallest_bytes
    4
    """

    fronts: tuple[Points, ...]
    total_bytes: int

    def __post_init__(self) -> None:
        require_int("total_bytes", self.total_bytes, 0)
        if not self.fronts:
            raise ConfigError("fronts must not be empty; pass one front per kernel")
        for kernel, front in enumerate(self.fronts):
            require_front(kernel, front)
        # A pool that cannot hold the smallest workspaces has no division. This is checked here,
        # once for all solvers.
        if self.smallest_bytes > self.total_bytes:
            raise PlanError(
                f"the pool must hold the smallest workspaces of {len(self.fronts)} kernel(s), "
                f"{self.smallest_bytes} bytes ({format_bytes(self.smallest_bytes)}), got "
                f"total_bytes={self.total_bytes}; raise it, or let the kernels share by running "
                f"one after the other",
                self.smallest_bytes,
            )

    @property
    def smallest_bytes(self) -> int:
        """The sum of every kernel's smallest workspace."""
        return sum(min(front)[0] for front in self.fronts)

    def divided(self, choice: Iterable[int], lower_bound_ns: int, solver: str) -> Division:
        """The division of these choices, one per kernel, with its sums of time and workspace."""
        picked = tuple(choice)
        # The sums are computed here, in Python's ints, because a solver's own sums may be scaled or
        # floats.
        points = [front[place] for front, place in zip(self.fronts, picked, strict=True)]
        return Division(
            choice=picked,
            time_ns=sum(time_ns for _, time_ns in points),
            workspace_bytes=sum(workspace_bytes for workspace_bytes, _ in points),
            lower_bound_ns=lower_bound_ns,
            solver=solver,
        )


def require_front(kernel: int, front: Points) -> None:
    """Raise a ConfigError if a front is empty or holds anything but pairs of ints in range."""
    if not front:
        raise ConfigError(f"front {kernel} must have at least one (workspace_bytes, time_ns)")
    # Lists are refused, because fronts must be hashable: `Choices.of` puts them into a set.
    for point in front:
        if type(point) is not tuple or len(point) != 2:
            raise ConfigError(
                f"front {kernel} must hold (workspace_bytes, time_ns) pairs, got {point!r}"
            )
        require_int(f"workspace_bytes in front {kernel}", point[0], 0)
        require_int(f"time_ns in front {kernel}", point[1], 1)


@dataclass(frozen=True, slots=True)
class Division:
    """One choice per kernel, with a lower bound of the time of any division.

    >>> Division((0, 2), 100, 64, 98, "exact").gap_ns
    2

    Args:
        choice: index into each kernel's front.
        time_ns: sum of the kernels' times.
        workspace_bytes: sum of the kernels' workspaces, which fits in the pool.
        lower_bound_ns: lower bound of the time of any division; equal to `time_ns` if this
            division is proven optimal.
        solver: name of the solver that found it.
    """

    choice: tuple[int, ...]
    time_ns: int
    workspace_bytes: int
    lower_bound_ns: int
    solver: str

    @property
    def gap_ns(self) -> int:
        """Upper bound of the time that another division could save; 0 if none can be faster."""
        return self.time_ns - self.lower_bound_ns


# A solver of the division problem, a multiple-choice knapsack. Every result obeys this law: it has
# one choice per kernel; the workspaces add up to at most the size of the pool; the time is the sum
# of the kernels' times; and no division is faster than the lower bound.
Divider = Callable[[Pool], Division]


def undominated(points: Sequence[tuple[int, int]]) -> list[int]:
    """Indices of the points that no other point dominates, by ascending workspace.

    >>> undominated([(8, 5), (0, 9), (8, 7), (16, 5)])
    [1, 0]

    Of equal points the first is kept.
    """
    kept: list[int] = []
    # The points are taken by rising workspace, then rising time. So a point is dominated unless it
    # is faster than all points before it.
    for index in sorted(range(len(points)), key=lambda i: (*points[i], i)):
        if not kept or points[index][1] < points[kept[-1]][1]:
            kept.append(index)
    return kept
