"""Steps whose normalisations are repeated by kept moments, beside moments that are computed again.

    python benchmarks/selective.py --out selective.json
    python benchmarks/selective.py segresnet dynunet --rounds 9

Times a training step of each network in three ways, in turn: as torch computes it, and twice with
the whole network recomputed selectively; once normalisations are computed again as torch computes
them, and once as a multiply-add by the mean and the deviation that they have kept.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from foresee_networks import NETWORKS, example
from provenance import provenance
from torch.utils._pytree import tree_map_only

from ucudnn.backends import open_backend
from ucudnn.execution import selective
from ucudnn.execution.micro_batching import segment_
from ucudnn.segment import Segment
from ucudnn.steps.run import run_step

# Networks with group, instance and batch norms.
SOME = ("segresnet", "denoiser", "autoencoder-kl", "dynunet", "unet", "highresnet")
SOME += ("resnet18", "densenet121", "unetr", "convnext")
WAYS = ("torch", "again", "kept")
EVERYWHERE = Segment("", None, recompute=False, selective=True)


def main() -> None:
    """Time steps of each network in turn."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("networks", nargs="*", help=f"of {', '.join(NETWORKS)}")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = {}
    for name in options.networks or SOME:
        found[name] = one = timed(name, options.rounds)
        shown = ", ".join(f"{key} {low:.3f} to {high:.3f}" for key, (low, _, high) in one.items())
        print(f"{name}: {shown}", flush=True)
        if options.out:
            document = {"provenance": provenance(), "networks": found}
            options.out.write_text(json.dumps(document, indent=1) + "\n")


@contextmanager
def moments_again() -> Iterator[None]:
    """Context in which no normalisation is repeated by the moments that it has kept."""
    with patch.object(selective, "_MULTIPLY_ADDS", {}):
        yield


def timed(name: str, rounds: int) -> dict[str, tuple[float, float, float]]:
    """Quartiles of ratios: both selective ways over torch, and the second over the first."""
    model, inputs = example(name)
    twin = copy.deepcopy(model)
    segment_(twin, [EVERYWHERE])
    backend = open_backend("torch_cpu")

    def step_ns(one: torch.nn.Module) -> int:
        one.zero_grad()
        fresh: Any = tree_map_only(torch.Tensor, torch.clone, inputs)
        return backend.elapsed_ns(lambda: run_step(one, fresh, True))

    ratios: dict[str, list[float]] = {"again": [], "kept": [], "kept over again": []}
    for number in range(rounds + 1):
        times = {}
        # Another way is the first one in each round.
        for way in (*WAYS[number % 3 :], *WAYS[: number % 3]):
            with moments_again() if way == "again" else nullcontext():
                times[way] = step_ns(model if way == "torch" else twin)
        if number:
            ratios["again"].append(times["again"] / times["torch"])
            ratios["kept"].append(times["kept"] / times["torch"])
            ratios["kept over again"].append(times["kept"] / times["again"])
    return {key: quartiles(some) for key, some in ratios.items()}


def quartiles(some: list[float]) -> tuple[float, float, float]:
    """The first quartile, the median and the third."""
    ordered, half = sorted(some), len(some) // 2
    return median(ordered[: half or 1]), median(ordered), median(ordered[-half or -1 :])


if __name__ == "__main__":
    main()
