"""Reuse agrees with the recursion that mu-cuDNN published, for every batch and every limit.

A second implementation of the paper's dynamic program over Pareto sets (CLUSTER 2018),
written from its formulation: the desirable set of n holds what no other configuration dominates, of
the undivided kernels of n and of a kernel of b <= n / 2 joined to the desirable set of n - b.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from ucudnn.solvers import Item, reuse

Points = list[tuple[int, int]]


def desirable(points: Points) -> Points:
    """By rising workspace, those with less time than all before."""
    kept: Points = []
    for workspace_bytes, time_ns in sorted(points):
        if not kept or time_ns < kept[-1][1]:
            kept.append((workspace_bytes, time_ns))
    return kept


def released(items: Sequence[Item], batch: int) -> list[Points]:
    kernels: dict[int, Points] = {}
    for item in items:
        kernels.setdefault(item.batch, []).append((item.workspace_bytes, item.time_ns))
    kernels = {size: desirable(points) for size, points in kernels.items()}
    table: list[Points] = [[]]
    for n in range(1, batch + 1):
        table.append(
            desirable(
                [
                    *kernels.get(n, []),
                    *(
                        (max(workspace, rest_workspace), time_ns + rest_ns)
                        for size in kernels
                        if 2 * size <= n
                        for workspace, time_ns in kernels[size]
                        for rest_workspace, rest_ns in table[n - size]
                    ),
                ]
            )
        )
    return table


def engines(seed: int, sizes: Sequence[int], count: int) -> list[Item]:
    """Engines with a start-up cost, waves of blocks and a workspace that is linear in the batch."""
    draw = random.Random(seed)
    items = []
    for engine in range(count):
        wave, per_wave = draw.randint(1, 12), draw.randint(300, 3000)
        start, memory = draw.randint(0, 2000), draw.randint(0, 1 << 20) * (engine % 4 > 0)
        for size in sizes:
            noise = draw.randint(0, 50)
            time_ns = start + per_wave * -(-size // wave) // (1 + (memory > 0)) + noise
            items.append(Item(size, memory * size, time_ns + 1, f"eng{engine}"))
    return items


@pytest.mark.parametrize("seed", range(4))
def test_all_sizes(seed: int) -> None:
    items = engines(seed, range(1, 65), 10)
    table, expected = reuse(items, 64), released(items, 64)
    assert len(expected[64]) > 5
    assert [table.front(n) for n in range(1, 65)] == expected[1:]


@pytest.mark.parametrize("seed", range(4))
def test_powers_of_two(seed: int) -> None:
    items = engines(seed, [2**power for power in range(9)], 60)
    table, expected = reuse(items, 256), released(items, 256)
    assert [table.front(n) for n in range(1, 257)] == expected[1:]


@pytest.mark.parametrize("seed", range(20))
def test_arbitrary_times(seed: int) -> None:
    draw = random.Random(seed)
    items = [
        Item(draw.randint(1, 24), draw.randint(0, 30), draw.randint(1, 200), "any")
        for _ in range(draw.randint(1, 80))
    ]
    table, expected = reuse(items, 48), released(items, 48)
    assert [table.front(n) for n in range(1, 49)] == expected[1:]
