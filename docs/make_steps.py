"""Draw the picture of README.md: training steps of several networks, by torch and by a plan.

    python docs/make_steps.py docs/steps.svg

Reads benchmarks/results/amd-epyc/tuning_time.json; the same file comes out every time.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "amd-epyc" / "tuning_time.json"
NAME_BY_NETWORK = {
    "depthwise31": "depthwise 31x31, N=4",
    "resnet50": "ResNet-50, N=16",
    "conformer": "conformer blocks, N=8",
    "mobilenetv2": "MobileNetV2, N=8",
    "wav2vec2": "wav2vec 2.0, N=2",
    "resnet18": "ResNet-18, N=32",
    "cifar10": "Caffe's CIFAR-10, N=1024",
    "alexnet": "AlexNet, N=128",
    "convnext": "ConvNeXt-T, N=4",
    "unet3d": "3-D U-Net, 64^3",
    "wavenet": "WaveNet, N=4",
    "hifigan": "HiFi-GAN, N=2",
    "conv1d": "one strided 1-D layer",
}
WIDTH, LEFT, RIGHT, TOP, ROW = 720, 190, 650, 56, 24
LEAST, MOST = 0.3, 1.3


def x(ratio: float) -> float:
    """The place of a ratio on the horizontal axis; one beyond its end is drawn there."""
    return LEFT + (RIGHT - LEFT) * (min(max(ratio, LEAST), MOST) - LEAST) / (MOST - LEAST)


def text(left: float, top: float, words: str, anchor: str = "middle") -> str:
    """A line of text."""
    return f'<text x="{left:.1f}" y="{top:.1f}" text-anchor="{anchor}">{words}</text>'


def row(number: int, network: dict[str, Any]) -> list[str]:
    """A network's name, its ratio, and the interval of that."""
    # The file has how many times as fast a step is.
    ratio, high, low = (1 / value for value in network["speed_up"])
    y = TOP + ROW * number + ROW / 2
    # an interval with 1 in it shows neither a gain nor a loss
    colour = "#1f77b4" if high < 1 else "#d62728" if low > 1 else "#999"
    return [
        text(LEFT - 10, y + 5, NAME_BY_NETWORK[network["network"]], "end"),
        f'<path d="M{x(low):.1f},{y}H{x(high):.1f}" stroke="{colour}" stroke-width="3"/>',
        mark(x(ratio), y, colour, is_beyond=ratio < LEAST),
        text(RIGHT + 35, y + 5, f"{ratio:.2f}"),
    ]


def mark(left: float, y: float, colour: str, is_beyond: bool) -> str:
    """A circle at a ratio, or an arrow to one beyond the end of the axis."""
    if is_beyond:
        return f'<path d="M{left + 5:.1f},{y - 6}v12l-12,-6z" fill="{colour}"/>'
    return f'<circle cx="{left:.1f}" cy="{y}" r="5" fill="{colour}"/>'


def axis(bottom: float) -> list[str]:
    """Vertical lines, the one where plan and torch take equally long the darkest."""
    lines = []
    for tenths in range(4, 14, 2):
        colour = "#222" if tenths == 10 else "#ddd"
        left = x(tenths / 10)
        lines.append(f'<path d="M{left:.1f},{TOP}V{bottom}" stroke="{colour}"/>')
        lines.append(text(left, bottom + 18, f"{tenths / 10}"))
    return lines


def draw() -> str:
    """The whole picture as SVG."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    networks = sorted(found, key=lambda one: one["speed_up"][0], reverse=True)
    bottom = TOP + ROW * len(networks)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 50}">',
        '<g font-family="sans-serif" font-size="14" fill="#222">',
        "<title>Training steps by torch's own convolutions and by a plan</title>",
        '<rect width="100%" height="100%" fill="#fff"/>',
        text(WIDTH / 2, 22, "Time of a training step: the plan's over torch's own (95 % interval)"),
        text(WIDTH / 2, 42, "CPU, 2 cores, no workspace limit; left of 1 the plan is faster"),
        *axis(bottom),
        *(line for number, network in enumerate(networks) for line in row(number, network)),
        text(WIDTH / 2, bottom + 40, "blue: faster beyond the noise; grey: no difference shown"),
        "</g>",
        "</svg>\n",
    ]
    return "\n".join(parts)


def main(path: str) -> None:
    """Write the picture to a file."""
    Path(path).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
