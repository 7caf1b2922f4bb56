"""The Pareto curve of a network: its time over the memory that its kernels may use, exactly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ucudnn.errors import ConfigError
from ucudnn.solvers._base import Front, require_front, require_int


class CurveKernel(NamedTuple):
    """One kernel of a network.

    Args:
        front: its choices, as (workspace in bytes, time in ns).
        calls: how often it runs in a step.
        live_bytes: memory beside its workspace when it runs; 0 for a curve over workspace alone.
    """

    front: Sequence[tuple[int, int]]
    calls: int = 1
    live_bytes: int = 0


def network_curve(kernels: Iterable[CurveKernel]) -> Front:
    """Find the least time of a network for every size of the memory that all its kernels share.

    Kernels run one after the other, each in what the others leave free: within a size each takes
    its fastest choice whose workspace and live memory fit, whatever the others do. So the time
    changes only where a choice of some kernel begins to fit.

    >>> a, b = CurveKernel([(0, 9), (8, 5)], calls=2), CurveKernel([(4, 7)], live_bytes=2)
    >>> network_curve([a, b])
    ((6, 25), (8, 17))

    Args:
        kernels: all of the network.

    Returns:
        (Memory in bytes, time in ns) of all points that no other one beats in both, memory rising.

    Raises:
        ConfigError: no kernel, a kernel without a choice, or a number that is no int in range.
    """
    listed = list(kernels)
    if not listed:
        raise ConfigError("kernels must not be empty; pass one per kernel of the network")
    steps: list[tuple[int, int]] = []
    least, total = 0, 0
    for place, (front, calls, live_bytes) in enumerate(listed):
        require_front(place, tuple(front))
        require_int("calls of a kernel", calls, 1)
        require_int("live_bytes of a kernel", live_bytes, 0)
        fastest: int | None = None
        for workspace, time_ns in sorted(front):
            if fastest is None:
                least, total = max(least, workspace + live_bytes), total + calls * time_ns
            elif time_ns < fastest:
                steps.append((workspace + live_bytes, calls * (fastest - time_ns)))
            else:
                continue
            fastest = time_ns
    # Below `least` some kernel has no choice at all; what fits there already counts from there on.
    points = {least: total}
    for size, saved_ns in sorted(steps):
        total -= saved_ns
        points[max(size, least)] = total
    return tuple(points.items())
