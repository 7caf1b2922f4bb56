"""Tuning within memory budgets: whether it keeps its time, and whether less memory costs more.

    python benchmarks/memory_budgets.py times --out budget_times.json        # ten minutes
    python benchmarks/memory_budgets.py falling --out budgets_falling.json   # an hour
    python benchmarks/memory_budgets.py falling --compiled --sequences 1     # compiled models

"times" tunes each network within half of torch's activations, or within what a refusal names, by
default and within several time budgets: the wall time may exceed a budget by one step. "falling"
asks for six falling budgets in turn. No peak may rise, none may exceed its budget, no plan may be
slower than one for more memory that fits, too, and the budget that a refusal names must be
accepted. Peaks are torch's allocator's own count of a step by the converted model, parameters and
inputs included. Each network has a process of its own, and an empty cache.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import random
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from foresee_networks import NETWORKS, example
from provenance import provenance
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import ucudnn
from ucudnn.backends import open_backend
from ucudnn.benchmark.statistics import ratio_interval
from ucudnn.errors import PlanError, first_line
from ucudnn.steps.race import race
from ucudnn.steps.run import run_step

TIMED = ("resnet18", "convnext", "denoiser", "hifigan", "unet", "vnet", "wav2vec2", "segresnet")
FALLING = (*TIMED, "mobilenetv2", "densenet121")
TIME_BUDGETS = (10.0, 30.0, 60.0, None)
BUDGETS, SEQUENCES = 6, 6
# A step may take so many times as long by chance; if it takes longer, plans are timed in turn.
NOISE = 1.1


def step_of(model: nn.Module, plan: ucudnn.Plan, inputs: Any) -> None:
    """A step by a plan, in micro-batches if it asks for them."""
    model.zero_grad()
    parts = inputs if isinstance(inputs, tuple) else (inputs,)
    for part in plan.micro_batches(*parts) if plan.micro_batch else [inputs]:
        run_step(model, tuple(part) if plan.micro_batch else part)


def peak_bytes(model: nn.Module, plan: ucudnn.Plan, inputs: Any) -> int:
    """The peak of a second step by the plan, counted by torch's allocator."""
    twin, backend = copy.deepcopy(model), open_backend("torch_cpu")
    ucudnn.convert_(twin, plan)
    step_of(twin, plan, inputs)
    twin.zero_grad()
    span = backend.span(lambda: step_of(twin, plan, inputs))
    tensors = [*model.parameters(), *model.buffers(), *tree_leaves(inputs)]
    storages = [one.untyped_storage() for one in tensors if isinstance(one, Tensor)]
    held = sum({one.data_ptr(): one.nbytes() for one in storages}.values())
    return held + span.peak_bytes


def share_of(model: nn.Module, inputs: Any) -> Callable[[float], int]:
    """The budget that leaves a share of what torch's step needs beside parameters and the like."""
    found = ucudnn.foresee(model, inputs)
    held = dict(found.held)
    least = sum(held.values()) + held.get("parameters", 0)  # with gradients
    return lambda share: round(least + share * max(0, found.peak_bytes - least))


def times(name: str, number: int) -> dict[str, Any]:
    """The wall time of tuning a network within half of torch's activations, as JSON values."""
    model, inputs = example(name)
    seconds = TIME_BUDGETS[number]
    row: dict[str, Any] = {"network": name, "asked_s": seconds}
    with tempfile.TemporaryDirectory() as cache:
        config = ucudnn.Config(
            memory_budget=share_of(model, inputs)(0.5), time_budget_s=seconds, cache=cache
        )
        began = time.monotonic()
        try:
            plan = ucudnn.tune(model, inputs, config)
        except PlanError as error:  # half is too little: the least that is enough
            row["refused"] = first_line(error)
            row["refused_s"] = round(time.monotonic() - began, 2)
            began = time.monotonic()
            plan = ucudnn.tune(model, inputs, replace(config, memory_budget=error.smallest_bytes))
        row["wall_s"] = round(time.monotonic() - began, 2)
        row["segments"] = len(plan.segments)
        assert plan.origin is not None
        seconds = float(plan.origin.budget)
    run = partial(run_step, model, inputs)
    run()
    row["step_s"] = round(open_backend("torch_cpu").elapsed_ns(run) / 1e9, 2)
    row["budget_s"] = seconds
    row["keeps"] = seconds is None or row["wall_s"] <= seconds + row["step_s"]
    return row


def by_torch(model: nn.Module) -> nn.Module:
    """The model, compiled; torch's type hints know it as a function."""
    compiled: Any = torch.compile(model)
    whole: nn.Module = compiled
    return whole


def falling(name: str, number: int, is_compiled: bool = False) -> dict[str, Any]:
    """Plans of one network within falling budgets, as JSON values."""
    chance = random.Random(f"{name} {number}")
    model, inputs = example(name)
    share = share_of(model, inputs)
    model = by_torch(model) if is_compiled else model
    shares = sorted((chance.uniform(0.1, 1.1) for _ in range(BUDGETS)), reverse=True)
    budgets = list(map(share, shares))
    rows, faults, plans = list[dict[str, Any]](), list[str](), list[ucudnn.Plan]()
    with tempfile.TemporaryDirectory() as cache:
        config = ucudnn.Config(effort="quick", time_budget_s=8.0, cache=cache)
        for budget in budgets:
            row: dict[str, Any] = {"budget": budget}
            try:
                plan, found = tuned(model, inputs, config, budget)
                row |= found
                plans.append(plan)
            except PlanError as error:
                row["refused"] = first_line(error)
                if error.smallest_bytes:
                    row["named"] = error.smallest_bytes
                    try:
                        _, row["accepted"] = tuned(model, inputs, config, error.smallest_bytes)
                    except PlanError as again:
                        faults.append(f"the named budget is refused: {first_line(again)}")
            rows.append(row)
    planned = [row for row in rows if "peak_bytes" in row]
    faults += [
        f"the peak exceeds {row['budget']}" for row in planned if row["peak_bytes"] > row["budget"]
    ]
    asked = [(row["named"], row["accepted"]) for row in rows if "accepted" in row]
    faults += [f"the peak exceeds {named}" for named, one in asked if one["peak_bytes"] > named]
    for (one, before), (other, after) in pairwise(zip(plans, planned, strict=True)):
        if after["tuned_peak_bytes"] > before["tuned_peak_bytes"]:
            faults.append(f"the peak rises at {after['budget']}")
        fits = before["tuned_peak_bytes"] <= after["budget"]
        if fits and after["tuned_ns"] > NOISE * before["tuned_ns"]:
            # Were both measured at a time, and not one of them in a busy moment?
            after["over_earlier"] = times_over(model, inputs, other, one)
            if after["over_earlier"][1] > 1:
                faults.append(f"a plan for more memory fits {after['budget']} and is faster")
    refusals = [row["budget"] for row in rows if "refused" in row]
    if refusals and any(row["budget"] < max(refusals) for row in planned):
        faults.append("less memory is accepted after a refusal")
    return {
        "network": name,
        "number": number,
        "torch_bytes": share(1.0),
        "rows": rows,
        "faults": faults,
    }


def tuned(
    model: nn.Module, inputs: Any, config: ucudnn.Config, budget: int
) -> tuple[ucudnn.Plan, dict[str, Any]]:
    """A plan within a budget, and what it takes."""
    began = time.monotonic()
    plan = ucudnn.tune(model, inputs, replace(config, memory_budget=budget))
    assert plan.memory is not None
    return plan, {
        "peak_bytes": peak_bytes(model, plan, inputs),
        # If layers are left out by chance, real steps differ, and the foreseen one has all layers.
        "tuned_peak_bytes": max(plan.memory.plan_peak_bytes, plan.memory.plan_foreseen_bytes),
        "tuned_ns": plan.memory.plan_ns,
        "segments": len(plan.segments),
        "compiled": plan.compiled,
        "wall_s": round(time.monotonic() - began, 1),
    }


def times_over(
    model: nn.Module, inputs: Any, one: ucudnn.Plan, other: ucudnn.Plan
) -> tuple[float, float, float]:
    """The time of steps by one plan over that by another, in turn, with its interval."""
    backend, runs = open_backend("torch_cpu"), []
    for plan in (one, other):
        twin = copy.deepcopy(model)
        ucudnn.convert_(twin, plan)
        runs.append(partial(backend.elapsed_ns, partial(step_of, twin, plan, inputs)))
    times = race(runs, lambda _: False, lambda _: False)
    return ratio_interval(*times)


def main() -> None:
    """Tune the networks, each in a process of its own, and write what was found after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("times", "falling"))
    parser.add_argument("networks", nargs="*", metavar="NETWORK")
    parser.add_argument("--sequences", type=int, default=SEQUENCES, help="for each network")
    parser.add_argument("--first", type=int, default=0, help="number of the first sequence")
    parser.add_argument("--compiled", action="store_true", help="falling: of compiled models")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if unknown := {*arguments.networks} - {*NETWORKS}:
        parser.error(f"{', '.join(sorted(unknown))}: not of {', '.join(NETWORKS)}")
    of_times = arguments.what == "times"
    work = times if of_times else partial(falling, is_compiled=arguments.compiled)
    first, count = (0, len(TIME_BUDGETS)) if of_times else (arguments.first, arguments.sequences)
    rows: list[dict[str, Any]] = []
    for name in arguments.networks or (TIMED if of_times else FALLING):
        for number in range(first, first + count):
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as own:
                rows.append(own.submit(work, name, number).result())
            print({k: v for k, v in rows[-1].items() if k != "rows"}, flush=True)
            if arguments.out is not None:
                found = {"rows": rows, "made": provenance()}
                arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
