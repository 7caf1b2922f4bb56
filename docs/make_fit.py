"""Draw the first picture of README.md: time of training steps over their peak memory.

    python docs/make_fit.py docs/fit.svg

Reads fit_the_step.json and peers.json in benchmarks/results/amd-epyc; the same file comes out every
time. Of a network that is in both, the second is drawn: every way at its best setting.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from make_steps import text

from ucudnn.benchmark.statistics import ratio_interval

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from peers import plan_within

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "amd-epyc"
NAMES = {
    "convnext": ("ConvNeXt-T", "#0072b2"),
    "segresnet": ("SegResNet 3-D", "#d55e00"),
    "denoiser": ("diffusion U-Net", "#009e73"),
    "hifigan": ("HiFi-GAN", "#cc79a7"),
    "wav2vec2": ("wav2vec 2.0", "#e69f00"),
    "resnet50": ("ResNet-50", "#56b4e9"),
    "unet3d": ("3-D U-Net", "#777"),
    "unet3d-batchnorm": ("3-D U-Net, BatchNorm", "#000"),
}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 500, 80, 520, 74, 440
# Multiples of torch's time. Every point lies between them; an interval may end beyond.
MOST_TIME, LEAST_TIME = 1.5, 0.5


def place(share: float, ratio: float) -> tuple[float, float]:
    """Where a share of torch's peak and a multiple of its time are drawn."""
    height = (ratio - LEAST_TIME) / (MOST_TIME - LEAST_TIME)
    return LEFT + (RIGHT - LEFT) * min(share, 1.1) / 1.1, BOTTOM - (BOTTOM - TOP) * height


def shape(title: str, x: float, y: float, colour: str) -> str:
    """A circle by segments, a diamond by a loop; torch's ways are open."""
    if title.startswith("loop"):
        return f'<path d="M{x:.1f},{y - 7:.1f}l7,7l-7,7l-7,-7z" fill="{colour}"/>'
    if title.startswith("segments"):
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="{colour}"/>'
    drawn = f'fill="none" stroke="{colour}" stroke-width="2"/>'
    if title.startswith("torch.compile"):
        return f'<path d="M{x:.1f},{y - 6:.1f}l6,11h-12z" {drawn}'
    if "checkpoint" in title:
        return f'<rect x="{x - 5:.1f}" y="{y - 5:.1f}" width="10" height="10" {drawn}'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" {drawn}'


def marks(network: str, ways: dict[str, Any]) -> list[str]:
    """The ways of a network, torch's own first."""
    torchs, *others = ways.items()
    found, colour = [], NAMES[network][1]
    for title, way in others:
        ratio, *ends = ratio_interval(way["samples_ns"], torchs[1]["samples_ns"])
        share = way["peak_bytes"] / torchs[1]["peak_bytes"]
        (x, y), (low, high) = place(share, ratio), (inside(one) for one in ends)
        line = f'<path d="M{x:.1f},{low:.1f}V{high:.1f}" stroke="{colour}" opacity="0.35"/>'
        found += [line, shape(title, x, y, colour)]
    return found


def every() -> dict[str, dict[str, Any]]:
    """The ways of each network."""
    fits, peers = (
        {one["network"]: one for one in json.loads((RESULTS / file).read_text(encoding="utf-8"))}
        for file in ("fit_the_step.json", "peers.json")
    )
    best = {network: met(one) for network, one in peers.items()}
    return {
        network: best.get(network, fits[network]["ways"]) for network in NAMES if network in fits
    }


def met(one: dict[str, Any]) -> dict[str, Any]:
    """The ways of a race of peers.json; a plan has the name of what it does."""
    found = dict(one["race"])
    for title, row in one["plans"].items():
        name = plan_within(title)
        if name in found:
            kind = "loop" if row["micro_batch"] else "segments"
            found[f"{kind}, {title}"] = found.pop(name)
    return found


def inside(ratio: float) -> float:
    """The height of the end of an interval, or of the edge beyond which it lies."""
    return place(0, min(max(ratio, LEAST_TIME), MOST_TIME))[1]


def axes() -> list[str]:
    """Lines at shares and ratios, darkest at torch's own."""
    lines = []
    for share in (0.25, 0.5, 0.75, 1.0):
        x, _ = place(share, 1)
        colour = "#222" if share == 1 else "#ddd"
        lines.append(f'<path d="M{x:.1f},{TOP}V{BOTTOM}" stroke="{colour}"/>')
        lines.append(text(x, BOTTOM + 18, f"{share:.0%}"))
    for tenths in (6, 8, 10, 12, 14):
        _, y = place(0, tenths / 10)
        colour = "#222" if tenths == 10 else "#ddd"
        lines.append(f'<path d="M{LEFT},{y:.1f}H{RIGHT}" stroke="{colour}"/>')
        lines.append(text(LEFT - 8, y + 5, f"{tenths / 10}", "end"))
    return lines


def legend(networks: list[str]) -> list[str]:
    """Colours of the networks, then the shapes of the ways."""
    lines, x = [], RIGHT + 25
    for number, network in enumerate(networks):
        name, colour = NAMES[network]
        y = TOP + 10 + 22 * number
        lines += [
            f'<circle cx="{x}" cy="{y}" r="6" fill="{colour}"/>',
            text(x + 14, y + 5, name, "start"),
        ]
    ways = ("segments", "loop", "torch.utils.checkpoint", "torch.compile", "other ways by torch")
    for number, title in enumerate(ways):
        y = TOP + 10 + 22 * (len(networks) + 1 + number)
        lines += [shape(title, x, y, "#222"), text(x + 14, y + 5, title, "start")]
    return lines


def draw() -> str:
    """The whole picture as SVG."""
    found = every()
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">',
        '<g font-family="sans-serif" font-size="14" fill="#222">',
        "<title>Time of a training step over its peak memory</title>",
        '<rect width="100%" height="100%" fill="#fff"/>',
        text(
            *(WIDTH / 2, 24),
            "Training steps of eight networks: less memory is further left, less time further down",
        ),
        text(
            WIDTH / 2,
            44,
            "left of and below each checkpoint (square) lies a plan (filled) of its colour;",
        ),
        text(
            *(WIDTH / 2, 62),
            "torch.compile is lower for ResNet-50, ConvNeXt-T and the 3-D U-Nets. "
            "CPU, 2 cores, 95 % intervals",
        ),
        *axes(),
        *(line for network, ways in found.items() for line in marks(network, ways)),
        *legend([*found]),
        text((LEFT + RIGHT) / 2, BOTTOM + 42, "peak memory of a step, of torch's"),
        f'<g transform="translate(24,{(TOP + BOTTOM) / 2}) rotate(-90)">',
        text(0, 0, "time of a step, over torch's"),
        "</g>",
        "</g>",
        "</svg>\n",
    ]
    return "\n".join(parts)


def main(path: str) -> None:
    """Write the picture to a file."""
    Path(path).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
