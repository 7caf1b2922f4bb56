"""Tune steps that do not fit the memory there is: run in a process whose address space is limited.

Arguments: names of networks of `NETWORKS`. In the environment, MALLOC_MMAP_THRESHOLD_ must be
small, so that what is freed leaves the address space. For each network and each share of torch's
peak, a line of JSON says what was found there: the budget, and the peaks of real steps.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import resource
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ucudnn
from ucudnn.backends import open_backend
from ucudnn.benchmark.failures import is_out_of_memory
from ucudnn.steps.run import run_step
from ucudnn.units import format_bytes

MIB = 1 << 20
# Bytes of address space beside those of the step: stacks of threads, and what libraries map.
BESIDE = 96 * MIB


def blocks(norm: Callable[[int], nn.Module], count: int) -> nn.Module:
    """Convolutions with a norm and an activation function."""
    found = []
    for number in range(count):
        width = 16 if number else 3
        found.append(nn.Sequential(nn.Conv2d(width, 16, 3, padding=1), norm(16), nn.SiLU()))
    return nn.Sequential(*found, nn.Conv2d(16, 3, 1))


def volume() -> nn.Module:
    """A small network for volumes."""
    layers: list[nn.Module] = []
    for number in range(5):
        layers += [nn.Conv3d(8 if number else 1, 8, 3, padding=1), nn.InstanceNorm3d(8), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv3d(8, 2, 1))


# Network, shape of its inputs, shares of torch's peak that the machine has, more settings.
NETWORKS: dict[
    str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...], dict[str, Any]]
] = {
    "groups": (lambda: blocks(lambda n: nn.GroupNorm(4, n), 5), (48, 3, 96, 96), (4,), {}),
    "half": (lambda: blocks(lambda n: nn.GroupNorm(4, n), 8), (48, 3, 96, 96), (2,), {}),
    "batches": (lambda: blocks(nn.BatchNorm2d, 12), (32, 3, 96, 96), (3,), {}),
    "volumes": (volume, (16, 1, 48, 48, 48), (3,), {}),
    "loop": (
        lambda: blocks(lambda n: nn.GroupNorm(4, n), 8),
        (48, 3, 96, 96),
        (4,),
        {"loop": True},
    ),
}


def used_bytes() -> int:
    """Bytes of the address space of this process."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def peak_of(step: Callable[[], object]) -> int:
    """The most that a step allocates, by torch's profiler."""
    gc.collect()
    return open_backend("torch_cpu").span(step).peak_bytes


def step_by(plan: ucudnn.Plan, model: nn.Module, x: Tensor) -> Callable[[], None]:
    """A training step by a plan, as a user would write it."""

    def step() -> None:
        model.zero_grad()
        for (part,) in plan.micro_batches(x):
            run_step(model, part)

    return step


def torch_runs(model: nn.Module, x: Tensor) -> bool:
    """True if there is memory for its forward alone, in a child."""
    child = os.fork()
    if child == 0:
        try:
            model(x)
        except RuntimeError as error:
            os._exit(1 if is_out_of_memory(error) else 2)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 1)
    return status == 0


def found_in(
    model: nn.Module, x: Tensor, share: int, needed: int, **settings: Any
) -> dict[str, Any]:
    """Tune and run a step where there is room for a part of torch's step."""
    budget = needed // share
    limit = used_bytes() + budget + BESIDE
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    row: dict[str, Any] = {"budget": budget, "needed": needed, "torch runs": torch_runs(model, x)}
    try:
        row["foreseen"] = ucudnn.foresee(model, x).peak_bytes
        config = ucudnn.Config(memory_budget=budget, time_budget_s=30, effort="quick", **settings)
        plan = ucudnn.tune(model, x, config)
    except (RuntimeError, MemoryError, ucudnn.UcudnnError) as error:
        return {**row, "error": f"{format_bytes(budget)}: {error}"}
    twin = copy.deepcopy(model)
    if plan.kernels or plan.segments:  # a loop may be all that the plan says
        ucudnn.convert_(twin, plan)
    held = sum(one.nbytes for one in (*twin.parameters(), *twin.buffers(), x))
    row["peak"] = held + peak_of(step_by(plan, twin, x))
    race = plan.step_race
    row |= {"planned": plan.memory.plan_peak_bytes, "race": race.reason if race else ""}
    return row


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        make, shape, shares, settings = NETWORKS[name]
        torch.manual_seed(0)
        model, x = make(), torch.randn(shape)
        # Without a limit, before there is one: threads start, libraries are loaded.
        small = ucudnn.Config(memory_budget="100%", effort="quick", time_budget_s=3)
        ucudnn.tune(model, x[:1], small)
        needed = ucudnn.foresee(model, x).peak_bytes
        for share in shares:
            row = found_in(model, x, share, needed, **settings)
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
            sys.stdout.write(json.dumps({"network": name, "share": share, **row}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
