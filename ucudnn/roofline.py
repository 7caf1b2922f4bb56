"""Least time of a computation on a machine, from what it does at least."""

from __future__ import annotations

from typing import NamedTuple


class Cost(NamedTuple):
    """What a candidate does at least."""

    operations: int
    traffic_bytes: int
    workspace_bytes: int


class Roofline(NamedTuple):
    """The speed of a machine."""

    operations_per_s: float
    bytes_per_s: float

    def time_ns(self, cost: Cost) -> int:
        """The least time in ns of a computation."""
        seconds = max(
            cost.operations / self.operations_per_s, cost.traffic_bytes / self.bytes_per_s
        )
        return int(seconds * 1e9)
