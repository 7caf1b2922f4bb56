"""Run under a counting malloc: print the peak of real training steps by each of several plans.

Arguments: the counting malloc, the kind of step ("training", "inference", or "one image" and a
number), then plan files; "-" stands for torch's own convolutions. The network is `net` of this
file, which the test tunes, or `of_one_image`.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from functools import partial
from typing import Any

import torch
from torch import nn

import ucudnn

SHAPE = (8, 3, 48, 48)


def net() -> nn.Module:
    """Convolutions of which each needs another workspace at another moment."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 16, 5, 2),
    )


class Block(nn.Module):
    """Two convolutions, a normalisation of some kind, and a shortcut."""

    def __init__(self, dims: int, width: int, norm: nn.Module) -> None:
        super().__init__()
        convolution = getattr(nn, f"Conv{dims}d")
        self.first, self.norm = convolution(width, width, 3, padding=1), norm
        self.second = convolution(width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape."""
        result: torch.Tensor = x + self.second(torch.relu(self.norm(self.first(x))))
        return result


def of_one_image(number: int) -> tuple[nn.Module, torch.Tensor]:
    """One of several networks, and one image or volume."""
    torch.manual_seed(number)
    dims, width = (3, 8) if number % 3 == 2 else (2, 16)
    norm: Any = (nn.Identity, partial(nn.GroupNorm, 2, width))[number % 2]
    convolution = getattr(nn, f"Conv{dims}d")
    blocks = [Block(dims, width, norm()) for _ in range(4 + number % 4)]
    head, tail = convolution(3, width, 3, padding=1), convolution(width, 2, 3, 2)
    size = (40, 24, 24) if dims == 3 else (128 + 8 * number, 96)
    return nn.Sequential(head, *blocks, tail), torch.randn(1, 3, *size)


def step(model: nn.Module, x: torch.Tensor, is_training: bool) -> None:
    """One step, as a training loop or a server would compute it."""
    if is_training:
        model.zero_grad()
        model(x).abs().sum().backward()
    else:
        with torch.no_grad():
            model(x)


def main() -> None:
    library = ctypes.CDLL(sys.argv[1])
    library.counted_live.restype = library.counted_peak.restype = ctypes.c_long
    kind = sys.argv[2]
    is_training = kind != "inference"
    plans = [None if path == "-" else ucudnn.Plan.load(path) for path in sys.argv[3:]]
    # What libraries keep after their first calls, and modules that are imported then, are no part
    # of a step: every plan is followed once before it counts.
    for counts in (False, True):
        for plan in plans:
            peak = peak_by(library, plan, kind, is_training)
            if counts:
                sys.stdout.write(json.dumps(peak) + "\n")


def peak_by(library: ctypes.CDLL, plan: ucudnn.Plan | None, kind: str, is_training: bool) -> int:
    """Bytes that a model, its input and a step need at their peak."""
    gc.collect()
    before = library.counted_live()
    if kind.startswith("one image"):
        model, x = of_one_image(int(kind.rpartition(" ")[2]))
    else:
        model, x = net(), torch.randn(SHAPE)
    if plan is not None:
        ucudnn.convert_(model, plan)
    step(model, x, is_training)  # looks the plan up
    library.counted_reset()
    step(model, x, is_training)
    return library.counted_peak() - before


if __name__ == "__main__":
    main()
