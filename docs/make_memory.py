"""Draw the picture of docs/memory.md: what a step holds at each moment, whole and in segments.

    python docs/make_memory.py docs/step_memory.svg

Reads benchmarks/results/amd-epyc/step_memory.json; the same file comes out every time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from make_steps import text

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "amd-epyc" / "step_memory.json"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM, GAP = 720, 400, 70, 700, 56, 320, 30
COLUMNS = 250  # in which a step is drawn
# Kinds of blocks, from below, with their colours.
KINDS = {
    "kept and recomputed activations": "#0072b2",
    "gradients, and what backward computes": "#e69f00",
    "inside operators": "#999",
}


def kind_of(name: str) -> str:
    """The kind of a block, from the name of what allocated it."""
    activations, gradients, inside = KINDS
    return (
        inside if name.startswith(inside[:6]) else gradients if name == "backward" else activations
    )


def levels(blocks: Sequence[Any], kind: str) -> list[int]:
    """Bytes of the blocks of a kind after each event."""
    last = max(max(one[2:]) for one in blocks) + 1
    changes = [0] * (last + 2)
    for name, size, begin, end in blocks:
        if kind_of(name) == kind:
            changes[begin] += size
            changes[end or last] -= size
    found, now = [], 0
    for change in changes:
        now += change
        found.append(now)
    return found


def fullest(layers: Sequence[Sequence[int]]) -> list[list[int]]:
    """These levels at the fullest moment of each of so many parts of the step."""
    totals = [sum(column) for column in zip(*layers, strict=True)]
    size = len(totals) / COLUMNS
    parts = [range(round(n * size), round((n + 1) * size)) for n in range(COLUMNS)]
    moments = [max(part, key=totals.__getitem__) for part in parts if part]
    return [[layer[moment] for moment in moments] for layer in layers]


def across(begin: float, unit: float, value: float) -> float:
    """The place of a value on an axis."""
    return begin + unit * value


def area(
    low: Sequence[int],
    high: Sequence[int],
    x: Callable[[float], float],
    y: Callable[[float], float],
) -> str:
    """A path around the area between two levels."""
    there = [f"{x(n):.1f},{y(v):.1f}" for n, v in enumerate(high)]
    back = [f"{x(n):.1f},{y(v):.1f}" for n, v in reversed([*enumerate(low)])]
    return "M" + "L".join(there + back) + "z"


def draw() -> str:
    """The whole picture as SVG."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    held, (torchs, plans) = found["held_bytes"], found["peaks_bytes"]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">',
        '<g font-family="sans-serif" font-size="14" fill="#222">',
        "<title>Memory of a training step, whole and in segments</title>",
        '<rect width="100%" height="100%" fill="#fff"/>',
        text(WIDTH / 2, 22, "What a training step of SegResNet holds, from forward to the end of"),
        text(
            WIDTH / 2,
            41,
            "backward: by torch (left), and by a plan within half of its peak (right)",
        ),
    ]
    y = partial(across, BOTTOM, -(BOTTOM - TOP - 20) / torchs)
    for mib in range(0, torchs >> 20, 50):
        parts.append(f'<path d="M{LEFT},{y(mib << 20):.1f}H{RIGHT}" stroke="#ddd"/>')
        parts.append(text(LEFT - 8, y(mib << 20) + 5, f"{mib} MiB", "end"))
    # Each step has half of the width, whatever the number of its events.
    width = (RIGHT - LEFT - GAP) / 2
    for place, (blocks, peak) in enumerate(zip(found["steps"], (torchs, plans), strict=True)):
        begin = LEFT + place * (width + GAP)
        layers = fullest([levels(blocks, kind) for kind in KINDS])
        low = [held] * len(layers[0])
        x = partial(across, begin, width / (len(low) - 1))
        parts.append(f'<path d="{area([0] * len(low), low, x, y)}" fill="#555"/>')
        for layer, colour in zip(layers, KINDS.values(), strict=True):
            high = [a + b for a, b in zip(low, layer, strict=True)]
            parts.append(f'<path d="{area(low, high, x, y)}" fill="{colour}"/>')
            low = high
        parts.append(
            f'<path d="M{begin:.1f},{y(peak):.1f}h{width:.1f}" stroke="#222" stroke-dasharray="4"/>'
        )
        parts.append(text(begin + width / 2, y(peak) - 6, f"peak {peak / 2**20:.0f} MiB"))
    kinds = [("parameters and input", "#555"), *KINDS.items()]
    for number, (name, colour) in enumerate(kinds):
        left, top = LEFT + 320 * (number % 2), BOTTOM + 26 + 22 * (number // 2)
        parts.append(f'<rect x="{left}" y="{top - 11}" width="12" height="12" fill="{colour}"/>')
        parts.append(text(left + 20, top, name, "start"))
    return "\n".join([*parts, "</g>", "</svg>\n"])


def main(path: str) -> None:
    """Write the picture to a file."""
    Path(path).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
