"""Synthetic instances for the solvers' benchmark and picture: the same ones in every run.

60 engines per layer, each with its own tile size, start-up cost and workspace, and faster where the
workspace is larger. Sizes and counts are those of real networks, times are nobody's measurements.
Steps for the choice of segments have modules as they are or recomputed in micro-batches.
"""

from __future__ import annotations

import random
from math import prod
from pathlib import Path

from ucudnn.layer_table import read_rows
from ucudnn.problem import Problem
from ucudnn.solvers import Item, Node, Option, reuse

LAYERS = Path(__file__).parent / "layers"
ENGINES = 60
MIB = 1 << 20
# Workspaces as multiples of the operands: a part of one, one or more copies, transformed tiles.
COPIES = (0.1, 0.25, 0.5, 1, 1.5, 2, 4, 8)
# The layer of the first table: 256 channels, 3x3, 14x14.
LAYER = Problem("fprop", 1, 256, 256, (14, 14), (3, 3), padding=((1, 1), (1, 1)))
Front = list[tuple[int, int]]


def sizes(policy: str, batch: int) -> list[int]:
    """Micro-batch sizes that a policy allows."""
    if policy == "all":
        return list(range(1, batch + 1))
    if policy == "undivided":
        return [batch]
    return sorted({*(1 << power for power in range(batch.bit_length())), batch})


def engines(problem: Problem, policy: str, batch: int) -> list[Item]:
    """Synthetic measurements of one layer, the same in every run."""
    draw = random.Random(str(problem.with_batch(1)))
    one = problem.with_batch(1)
    outputs = prod(one.output_size)
    operands = 4 * (prod(one.x_shape) + prod(one.y_shape))
    filters = 4 * prod(one.w_shape)
    items = []
    for engine in range(ENGINES):
        large = engine % 4 > 0
        factor = draw.choice(COPIES) * large
        flops_per_ns = draw.uniform(500, 3000) * (1 + 3 * factor**0.5)
        start_ns, tile = draw.randint(2000, 15000), draw.choice([32, 64, 128])
        wave_ns = tile * one.flops / outputs / flops_per_ns
        fixed = int(filters * draw.choice([0, 1, 16 / 9, 4])) * large
        for size in sizes(policy, batch):
            waves = -(-size * outputs // (tile * 56))
            workspace = (int(factor * operands) * size + fixed) // 256 * 256
            items.append(Item(size, workspace, int(start_ns + waves * wave_ns), f"eng{engine}"))
    return items


def network(table: str, policy: str, batch: int) -> list[Front]:
    """The fronts of every kernel of a network; equal layers have equal ones."""
    front_by_problem: dict[Problem, Front] = {}
    fronts = []
    for place, (_, problem, *_) in enumerate(read_rows(LAYERS / table)):
        if place < 3 and problem.op == "dgrad":
            continue  # nothing needs the gradient of the images
        if problem not in front_by_problem:
            items = engines(problem, policy, batch)
            front_by_problem[problem] = reuse(items, batch).front(batch)
        fronts.append(front_by_problem[problem])
    return fronts


def step(modules: int, stage: int = 10) -> Node:
    """Stages of modules: as they are, or a module or stage recomputed in 7 sizes of micro-batch."""
    draw = random.Random(modules)
    leaves = []
    for _ in range(modules):
        output, copies = draw.randint(MIB // 2, 8 * MIB), draw.uniform(1, 6)
        leaves.append(recomputed(draw, output, int(output * copies), int(output * copies / 5)))
    stages = []
    for start in range(0, modules, stage):
        inside = leaves[start : start + stage]
        plain = [leaf.options[0] for leaf in inside]
        kept, time_ns = sum(o.kept_bytes for o in plain), sum(o.time_ns for o in plain)
        whole = recomputed(draw, inside[-1].options[1].kept_bytes, kept, time_ns)
        stages.append(Node(whole.options[1:], tuple(inside)))
    return Node(children=tuple(stages))


def recomputed(draw: random.Random, output: int, kept: int, time_ns: int) -> Node:
    """A module as it is, and recomputed in micro-batches of all, a half ... a 64th of the batch."""
    options = [Option(blocks(kept), blocks(kept + output), time_ns, 0)]
    for power in range(7):
        factor = 4 / 3 * (1 + power * power * draw.uniform(-0.015, 0.01))
        peak = blocks(2 * output + (kept >> power))
        options.append(Option(blocks(output), peak, int(time_ns * factor), 1 << power))
    return Node(tuple(options))


def arbitrary_step(modules: int) -> Node:
    """Modules with 8 options each, of which none is alike: where fronts become longest."""
    draw = random.Random(modules)
    nodes = []
    for _ in range(modules):
        kept = sorted(draw.randint(0, 50 * MIB) for _ in range(8))
        times = sorted((draw.randint(10**6, 10**7) for _ in range(8)), reverse=True)
        peaks = [bytes_ + draw.randint(0, 20 * MIB) for bytes_ in kept]
        nodes.append(Node(tuple(map(Option, kept, peaks, times, range(8)))))
    return Node(children=tuple(nodes))


def blocks(size: int) -> int:
    """Whole blocks of torch's allocator."""
    return -(-size // 512) * 512
