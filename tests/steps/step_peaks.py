"""Run under a counting malloc: print the peak of real training steps by each of several plans.

Arguments: the counting malloc, the kind of step ("training" or "inference"), then plan files; "-"
stands for torch's own convolutions. The network is `net` of this file, which the test tunes.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys

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
    is_training = sys.argv[2] == "training"
    plans = [None if path == "-" else ucudnn.Plan.load(path) for path in sys.argv[3:]]
    # What libraries keep after their first calls, and modules that are imported then, are no part
    # of a step: every plan is followed once before it counts.
    for counts in (False, True):
        for plan in plans:
            peak = peak_by(library, plan, is_training)
            if counts:
                sys.stdout.write(json.dumps(peak) + "\n")


def peak_by(library: ctypes.CDLL, plan: ucudnn.Plan | None, is_training: bool) -> int:
    """Bytes that a model, its input and a step need at their peak."""
    gc.collect()
    before = library.counted_live()
    model, x = net(), torch.randn(SHAPE)
    if plan is not None:
        ucudnn.convert_(model, plan)
    step(model, x, is_training)  # looks the plan up
    library.counted_reset()
    step(model, x, is_training)
    return library.counted_peak() - before


if __name__ == "__main__":
    main()
