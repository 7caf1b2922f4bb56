"""Train a small network in a loop of one's own; one line makes its convolutions follow a plan.

python examples/train_loop.py [--plan plan.json]

A plan can be made beforehand, on another machine of the same kind:
ucudnn tune examples/train_loop.py:network --input 16x3x32x32 --workspace-limit 256KiB -o plan.json
"""

from __future__ import annotations

import argparse
from argparse import RawTextHelpFormatter

import torch
from torch import nn
from torch.nn import functional

import ucudnn


def network() -> nn.Module:
    """Two convolutions for images of 3 channels in ten classes."""
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    )


def main() -> None:
    """Tune, train, print the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--plan", help="a plan's file; default: tune now")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    images, labels = torch.randn(16, 3, 32, 32), torch.randint(10, (16,))
    model = network()

    if arguments.plan:
        conversion = ucudnn.convert_(model, ucudnn.Plan.load(arguments.plan))
    else:
        conversion = ucudnn.tune_(model, images, ucudnn.Config(workspace_limit="256KiB"))
    print(conversion)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(arguments.steps):
        loss = functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
