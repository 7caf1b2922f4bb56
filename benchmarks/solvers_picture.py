"""Draw the picture of docs/solvers.md: fronts of one layer under the three policies.

    python benchmarks/solvers_picture.py docs/solvers_front.svg

Times are synthetic (solvers_instances.py); the same file comes out every time.
"""

from __future__ import annotations

import sys
from math import log2
from pathlib import Path

from solvers_instances import LAYER, Front, engines  # beside this script

from ucudnn.solvers import reuse

MIB = 1 << 20
BATCH = 256
LIMIT_MIB = 32
COLOUR_BY_POLICY = {"undivided": "#777777", "powers-of-two": "#1f77b4", "all": "#d62728"}
WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 700, 40, 340
LARGEST_MIB, SLOWEST_US = 1024, 400


def x(workspace_bytes: float) -> float:
    """Logarithmic from 1 MiB up; what needs less stands at the left edge."""
    share = log2(max(workspace_bytes / MIB, 1)) / log2(LARGEST_MIB)
    return LEFT + (RIGHT - LEFT) * share


def y(time_ns: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * time_ns / 1000 / SLOWEST_US


def front(policy: str) -> Front:
    return reuse(engines(LAYER, policy, BATCH), BATCH).front(BATCH)


def curve(points: Front, colour: str) -> str:
    """A staircase: every point is the best up to the next."""
    path = f"M{x(points[0][0]):.1f},{y(points[0][1]):.1f}"
    for workspace_bytes, time_ns in points[1:]:
        path += f"H{x(workspace_bytes):.1f}V{y(time_ns):.1f}"
    return f'<path d="{path}H{RIGHT}" fill="none" stroke="{colour}" stroke-width="2"/>'


def text(left: float, top: float, words: str, anchor: str = "middle", colour: str = "#222") -> str:
    return (
        f'<text x="{left:.1f}" y="{top:.1f}" text-anchor="{anchor}" fill="{colour}">{words}</text>'
    )


def axes() -> list[str]:
    lines = [f'<path d="M{LEFT},{TOP}V{BOTTOM}H{RIGHT}" fill="none" stroke="#222"/>']
    for power in range(0, 11, 2):
        label = "up to 1" if power == 0 else str(1 << power)
        lines.append(text(x(MIB << power), BOTTOM + 20, label))
    for time_us in range(0, SLOWEST_US + 1, 100):
        lines.append(text(LEFT - 10, y(time_us * 1000) + 5, str(time_us), "end"))
        lines.append(f'<path d="M{LEFT},{y(time_us * 1000):.1f}H{RIGHT}" stroke="#ddd"/>')
    lines.append(text((LEFT + RIGHT) / 2, BOTTOM + 45, "workspace limit in MiB"))
    lines.append(text(LEFT, TOP - 15, "time in us for N=256", "start"))
    return lines


def legend(fronts: dict[str, Front]) -> list[str]:
    limit = x(LIMIT_MIB * MIB)
    lines = [f'<path d="M{limit:.1f},{TOP}V{BOTTOM}" stroke="#222" stroke-dasharray="4 4"/>']
    lines.append(text(limit + 10, TOP + 15, f"within {LIMIT_MIB} MiB:", "start"))
    for place, (policy, points) in enumerate(fronts.items(), start=1):
        best = min(time_ns for workspace, time_ns in points if workspace <= LIMIT_MIB * MIB)
        words = f"{policy} {best / 1000:.0f} us, front of {len(points)}"
        lines.append(
            text(limit + 10, TOP + 15 + 20 * place, words, "start", COLOUR_BY_POLICY[policy])
        )
    return lines


def main(path: str) -> None:
    fronts = {policy: front(policy) for policy in COLOUR_BY_POLICY}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">',
        '<g font-family="sans-serif" font-size="14">',
        "<title>Time of one convolution layer over its workspace limit, by policy</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        *axes(),
        *(curve(points, COLOUR_BY_POLICY[policy]) for policy, points in fronts.items()),
        *legend(fronts),
        "</g>",
        "</svg>\n",
    ]
    Path(path).write_text("\n".join(parts), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
