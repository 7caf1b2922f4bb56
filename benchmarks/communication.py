"""Does `distributed.advise` name the fastest way to exchange gradients? On links of all kinds.

    python benchmarks/communication.py --out communication.json           # all cells, 40 minutes
    python benchmarks/communication.py --ranks 2 --links loopback --networks small

Every cell is a job of its own, on a link of `delayed_link.py`. Its ranks ask for advice, then run
steps by every way in turn; the slowest rank counts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from provenance import provenance
from torch import nn

from ucudnn import distributed
from ucudnn.distributed.exchange_advice import (
    BATCHES,
    DEFAULT_CAPS,
    PERIOD,
    ExchangeAdvice,
    ExchangeWay,
    Profile,
    capped,
)
from ucudnn.distributed.exchange_times import replica_by
from ucudnn.solvers import Link
from ucudnn.solvers.collectives import line, ring
from ucudnn.steps.run import run_step

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from models import resnet18

# Two of them without a rate: what the processors of this machine let through.
LINKS = ("loopback", "5ms,100GB/s", "1ms,200Mbit/s", "0.1ms,1Gbit/s")
RANKS = (2, 4)
LEAST_ROUNDS = 7


def small() -> nn.Module:
    """Three convolutions, 0.4 MB of gradients."""
    widths = (3, 32, 64, 128)
    layers = [
        nn.Sequential(nn.Conv2d(a, b, 3, stride=2, padding=1), nn.ReLU())
        for a, b in pairwise(widths)
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def wide() -> nn.Module:
    """Two convolutions and a large linear layer, 34 MB of gradients."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ReLU()),
        nn.Sequential(nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.ReLU()),
        nn.Flatten(),
        nn.Linear(16 * 16 * 16, 2048),
        nn.ReLU(),
        nn.Linear(2048, 10),
    )


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "small": (small, (16, 3, 64, 64)),
    "ResNet-18": (resnet18, (8, 3, 64, 64)),
    "large linear layer": (wide, (16, 3, 64, 64)),
}


def averaged(model: nn.Module, x: torch.Tensor) -> None:
    """Steps of one rank, then the mean of the parameters: local SGD."""
    for _ in range(PERIOD):
        run_step(model, x)
        model.zero_grad()
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    dist.all_reduce(flat)
    nn.utils.vector_to_parameters(flat / dist.get_world_size(), model.parameters())


def accumulated(replica: Any, x: torch.Tensor) -> None:
    """Several batches before gradients are exchanged."""
    for place in range(BATCHES):
        with nullcontext() if place == BATCHES - 1 else replica.no_sync():
            run_step(replica, x)
    replica.zero_grad()


def stepped(replica: Any, x: torch.Tensor) -> None:
    """One step."""
    run_step(replica, x)
    replica.zero_grad()


def runner(model: nn.Module, x: torch.Tensor, way: ExchangeWay) -> tuple[Callable[[], None], int]:
    """Steps by one way, and how many they are."""
    if way.name.startswith("average"):
        twin = replica_by(model, x, way)[0].module
        return partial(averaged, twin, x), PERIOD
    replica, batch = replica_by(model, x, way)
    if "batches" in way.name:
        return partial(accumulated, replica, batch), BATCHES
    return partial(stepped, replica, batch), 1


def cell(network: str, seconds: float, path: str) -> None:
    """In a rank: ask for advice, run all ways, and write both."""
    torch.manual_seed(0)
    job = distributed.init()
    make, shape = NETWORKS[network]
    model, x = make(), torch.randn(shape)
    advice = distributed.advise(model, x)
    contestants = [runner(model, x, way) for way in advice.ways]
    samples: list[list[int]] = [[] for _ in advice.ways]
    began, elapsed_s = time.monotonic(), 0.0
    while len(samples[0]) < LEAST_ROUNDS or elapsed_s < seconds:
        for (run, count), taken in zip(contestants, samples, strict=True):
            dist.barrier()
            start = time.perf_counter_ns()
            run()
            own = torch.tensor(
                [(time.perf_counter_ns() - start) / count, time.monotonic() - began],
                dtype=torch.float64,
            )
            dist.all_reduce(own, dist.ReduceOp.MAX)
            taken.append(int(own[0]))
            elapsed_s = float(own[1])
    if job.rank == 0:
        found = [
            {**asdict(way), "samples_ns": taken[2:]}  # DDP arranges its buckets anew after a step
            for way, taken in zip(advice.ways, samples, strict=True)
        ]
        own = advice.to_dict()
        Path(path).write_text(
            json.dumps(
                {
                    "network": network,
                    "ranks": dist.get_world_size(),
                    "profile": own["profile"],
                    "ways": found,
                }
            )
        )
    dist.barrier()
    # gloo may abort the exit of a process (pytorch#179291).
    os._exit(0)


def chosen(one: dict[str, Any]) -> str:
    """The way that is advised by what the ranks of a cell have measured."""
    return msgspec.convert(one, ExchangeAdvice).chosen.name


def held_out(cells: list[dict[str, Any]]) -> None:
    """Predict torch's own step among more ranks by a line through the times of two ranks."""
    for one in cells:
        of_two = [
            other
            for other in cells
            if (other["network"], other["link"], other["ranks"]) == (one["network"], one["link"], 2)
        ]
        if one["ranks"] == 2 or not of_two:
            continue
        profile, two = (msgspec.convert(cell["profile"], Profile) for cell in (one, of_two[0]))
        # Between two ranks, a ring takes two latencies, and the time of all bytes once.
        per_byte_ns, fixed_ns = np.polyfit(two.reduce.sizes, two.reduce.times_ns, 1)
        curve = line(ring, one["ranks"], Link(max(0.0, fixed_ns / 2), max(0.0, per_byte_ns)))
        profile = replace(profile, reduce=curve, contention=two.contention)
        one["held_out_ns"] = profile.step_ns(capped(profile.sizes, DEFAULT_CAPS))


def main() -> None:
    """Run the cells one after another, and write what was found after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=[*RANKS])
    parser.add_argument("--links", nargs="+", default=[*LINKS])
    parser.add_argument("--networks", nargs="+", default=[*NETWORKS], choices=[*NETWORKS])
    parser.add_argument("--seconds", type=float, default=20, help="at least, for steps of a job")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cell", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cell:
        cell(arguments.cell[0], arguments.seconds, arguments.cell[1])
    found: list[dict[str, Any]] = []
    began, made = time.monotonic(), provenance()
    for link in arguments.links:
        for network in arguments.networks:
            for ranks in arguments.ranks:
                with tempfile.TemporaryDirectory() as folder:
                    path = Path(folder) / "cell.json"
                    own = ["--seconds", f"{arguments.seconds}", "--cell", network, str(path)]
                    place = ["--ranks", f"{ranks}", "--link", link, "--"]
                    launcher = str(Path(__file__).parent / "delayed_link.py")
                    command = [sys.executable, launcher, *place, sys.executable, __file__, *own]
                    subprocess.run(command, check=False)
                    if not path.exists():
                        print(f"{network}, {ranks} ranks, {link}: failed", flush=True)
                        continue
                    found.append({"link": link, **json.loads(path.read_text())})
                held_out(found)
                print(describe(found[-1]), flush=True)
                if arguments.out is not None:
                    wall_s = round(time.monotonic() - began)
                    document = {"made": made, "wall_s": wall_s, "cells": found}
                    arguments.out.write_text(json.dumps(document, indent=1) + "\n")


def median(samples: list[int]) -> float:
    """In ms."""
    return sorted(samples)[len(samples) // 2] / 1e6


def describe(one: dict[str, Any]) -> str:
    """A line for a cell, and one for each of its ways."""
    lines = [f"{one['network']}, {one['ranks']} ranks, {one['link']}: {chosen(one)}"]
    lines += [
        f"  {way['name']:32} {median(way['samples_ns']):8.1f} ms, predicted "
        f"{way['predicted_ns'] / 1e6:8.1f}"
        for way in one["ways"]
    ]
    own_ns = one["ways"][0]["measured_ns"]
    lines.append(f"  torch's step, in the rounds of the prediction: {own_ns / 1e6:.1f} ms")
    if "held_out_ns" in one:
        held_out_ns = one["held_out_ns"]
        error = held_out_ns / own_ns - 1
        lines.append(f"  predicted from two ranks: {held_out_ns / 1e6:.1f} ms, {error:+.1%}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
