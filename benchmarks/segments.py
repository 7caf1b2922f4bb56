"""Does a layout for single layers pay? Convolutions of a step in both layouts, and with the copies.

    python benchmarks/segments.py unet3d --rounds 5

Where a layer that resets the layout follows each convolution (InstanceNorm, view), a segment is one
convolution: its operands are copied to channels_last and its result is copied back. Times each
convolution of a training step by torch in three ways, in turn: as the model is, in channels_last
without the copies, and with them. Prints the sums over the step, and the sum of the better of the
first and the last way for each convolution, which is what such segments could gain.
"""

from __future__ import annotations

import argparse
from argparse import RawTextHelpFormatter
from collections.abc import Callable
from statistics import median

import torch
from networks import NETWORKS
from torch import Tensor

import ucudnn
from ucudnn.backends import open_backend
from ucudnn.problem import Problem

FORMATS = {2: torch.channels_last, 3: torch.channels_last_3d}


def main() -> None:
    """Time the convolutions of one network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=RawTextHelpFormatter)
    parser.add_argument("network", choices=list(NETWORKS))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    network = NETWORKS[options.network]
    traced = ucudnn.trace(network.make().train(), torch.randn(network.shape))
    totals = [0.0] * 3
    better = 0.0
    for problem in dict.fromkeys(traced):
        calls = traced.count(problem)
        times = [calls * one for one in timed(problem, options.rounds)]
        totals = [a + b for a, b in zip(totals, times, strict=True)]
        better += min(times[0], times[2])
        print(f"{problem}: {', '.join(f'{one / 1e6:.1f}' for one in times)} ms")
    names = ("as it is", "channels_last", "channels_last with copies")
    for name, total in zip(names, totals, strict=True):
        print(f"{name}: {total / 1e6:.0f} ms")
    print(f"the better of the first and the last for each: {better / 1e6:.0f} ms")


def timed(problem: Problem, rounds: int) -> list[float]:
    """Medians in ns of the three ways, in turn."""
    backend = open_backend("torch_cpu")
    own = backend.executable(problem, "torch_default")
    operands = backend.operands(problem, problem.batch)
    layout = FORMATS[problem.rank]
    copies = tuple(one.contiguous(memory_format=layout) for one in operands)

    def with_copies() -> Tensor:
        a, b = (one.contiguous(memory_format=layout) for one in operands)
        return own.alone(a, b).contiguous()

    ways: list[Callable[[], Tensor]] = [
        lambda: own.alone(*operands),
        lambda: own.alone(*copies),
        with_copies,
    ]
    samples: list[list[int]] = [[], [], []]
    for number in range(rounds + 1):
        for way, taken in zip(ways, samples, strict=True):
            time_ns = backend.elapsed_ns(way)
            if number:  # the first round warms up
                taken.append(time_ns)
    return [median(taken) for taken in samples]


if __name__ == "__main__":
    main()
