"""What every solver takes: items, validated here so that solvers need not check again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ucudnn.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Item:
    """One way to compute a chunk of the batch: an algorithm at a micro-batch size, measured.

    >>> Item(batch=32, workspace_bytes=24 << 20, time_ns=410_000, algorithm="eng67_k2=20").rank
    0

    Args:
        batch: samples in the chunk.
        workspace_bytes: temporary memory that it needs.
        time_ns: what it takes.
        algorithm: name of the algorithm.
        rank: breaks ties, lower first; 0 for a deterministic algorithm, 1 for any other.

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
    """Refuse what is not an int of at least some value: floats, bools, strings, arrays.

    Raises:
        ConfigError: it is none; the message has the name, the rule and the value.
    """
    if type(value) is not int or value < least:
        raise ConfigError(f"{name} must be an int of at least {least}, got {value!r}")


def require_limit(name: str, value: object) -> None:
    """Refuse what is neither None (no limit) nor an int of at least 0.

    Raises:
        ConfigError: it is neither.
    """
    if value is not None:
        require_int(f"{name}, unless None for no limit,", value, 0)


def require_items(name: str, items: Iterable[Item]) -> tuple[Item, ...]:
    """The items as a tuple, after a look at each one's type.

    Raises:
        ConfigError: one is not an `Item`.
    """
    values = tuple(items)
    for value in values:
        if type(value) is not Item:
            raise ConfigError(f"{name} must hold ucudnn.solvers.Item values, got {value!r}")
    return values
