"""Steps by the plan beside the fastest that torch has: eager, channels_last, torch.compile.

    python benchmarks/whole_steps.py --out whole_steps.json              # all networks
    python benchmarks/whole_steps.py resnet18 wavenet --mode inference --out whole_steps.json

Each network is tuned from an empty cache for the better of two layouts, in a process of its own.
From the same cache it is tuned once more as a compiled model: that plan is for plan+compile. Then
one step by every way is taken in each round, of training and of inference. What --out has already
is not taken anew, so that a run which was stopped goes on. Without --limit no workspace limit
restricts the plan. Needs transformers and monai (the extra `test`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from argparse import RawTextHelpFormatter
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from networks import NETWORKS
from rich.console import Console
from rich.table import Table
from torch import nn

import ucudnn
from ucudnn.backends import open_backend
from ucudnn.config import Config
from ucudnn.steps.bench import bench_steps
from ucudnn.steps.result import StepBench
from ucudnn.tuning.noise import noise_of
from ucudnn.units import format_bytes, format_ns

MODES = ("training", "inference")
console = Console(width=150, soft_wrap=True, highlight=False)


def main() -> None:
    """Measure each network of the command line in a child; print and keep what it says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=RawTextHelpFormatter)
    parser.add_argument("networks", nargs="*", help=f"default: all: {', '.join(NETWORKS)}")
    parser.add_argument("--mode", choices=MODES, help="default: both")
    parser.add_argument("--limit", help="workspace limit, such as 16MiB; default: none")
    parser.add_argument("--effort", default="normal")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    modes = [options.mode] if options.mode else list(MODES)
    if options.child:
        print(json.dumps(measured(options.networks[0], modes[0], options)))
        return
    done = options.out is not None and options.out.exists()
    found: list[dict[str, Any]] = json.loads(options.out.read_text()) if done else []
    for name in options.networks or NETWORKS:
        for mode in modes:
            if any((one["network"], one["mode"]) == (name, mode) for one in found):
                continue
            console.print(f"{name}, {mode}")
            found += child(name, mode, options)
            if options.out:
                options.out.write_text(json.dumps(found, indent=1) + "\n")
    console.print(table(found))


def child(name: str, mode: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """What a process of its own measures of a network; nothing if it failed."""
    command = [sys.executable, __file__, name, "--child", "--mode", mode]
    command += ["--effort", options.effort, "--rounds", str(options.rounds)]
    command += ["--limit", options.limit] if options.limit else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        console.print(f"{name}, {mode}: failed with exit status {done.returncode}")
        return []
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    console.print(StepBench.from_dict(result["bench"]).sentence())
    return [result]


def measured(name: str, mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """Tune one network and time its steps."""
    torch.manual_seed(0)
    network = NETWORKS[name]
    model, x = network.make().train(mode == "training"), torch.randn(network.shape)
    settings: dict[str, Any] = {"workspace_limit": options.limit, "effort": options.effort}
    if mode == "inference":
        model.requires_grad_(False)
        settings["ops"] = ("fprop",)
    with tempfile.TemporaryDirectory() as cache:
        began = time.monotonic()
        plan = ucudnn.tune(model, x, Config(**settings, layout="auto", cache=cache))
        seconds = time.monotonic() - began
        began = time.monotonic()
        compiled = ucudnn.tune(
            torch.compile(model), x, Config(**settings, layout="auto", cache=cache)
        )
        compiled_s = time.monotonic() - began
        sums = sums_by_layout(model, x, Config(**settings, step_race=False, cache=cache))
    bench = bench_steps(
        model,
        x,
        plan,
        compiled_plan=compiled,
        training=mode == "training",
        rounds=options.rounds,
    )
    return {
        "network": name,
        "mode": mode,
        "input": list(network.shape),
        "device": str(open_backend("auto").device()),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "limit": options.limit,
        "effort": options.effort,
        "tuned_s": round(seconds, 1),
        **described(plan),
        "plan_of_compiled": {"tuned_s": round(compiled_s, 1), **described(compiled)},
        "sums_ns": sums,
        "noise": noise_of(plan).to_dict(),
        "bench": bench.to_dict(),
    }


def described(plan: ucudnn.Plan) -> dict[str, Any]:
    """What a plan changes, and the races that decided it."""
    races = ("layout_race", "step_race", "compilation")
    found = {name: getattr(plan, name) for name in races}
    return {
        "kernels": len(plan.kernels),
        "changed": sum(not kernel.is_default for kernel in plan.kernels),
        "memory_format": plan.memory_format,
        **{name: race.to_dict() if race else None for name, race in found.items()},
    }


def sums_by_layout(model: nn.Module, x: torch.Tensor, config: Config) -> dict[str, int] | None:
    """Time of all kernels by plan in each layout, and in the better one for each kernel, in ns.

    The last bounds what layouts of single layers could save, copies between them not counted. Both
    layouts were tuned just now, so that the cache has nearly all of it. None in 1-D.
    """
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if x.dim() not in formats:
        return None
    of_layout = {"memory_format": formats[x.dim()]}
    last = deepcopy(model).to(**of_layout), x.to(**of_layout)
    times = [
        {
            replace(kernel.problem, layout="nchw"): kernel.timing.time_ns * len(kernel.layers)
            for kernel in ucudnn.tune(*one, config).kernels
        }
        for one in ((model, x), last)
    ]
    own, other = times
    if own.keys() != other.keys():
        return None
    better = sum(min(own[problem], other[problem]) for problem in own)
    return {"keep": sum(own.values()), "channels_last": sum(other.values()), "better": better}


def saved_by_segments(one: dict[str, Any], step_ns: int) -> str:
    """The bound by `sums_by_layout`, as a part of the step."""
    sums = one.get("sums_ns")
    if not sums:
        return "-"
    return f"{(min(sums['keep'], sums['channels_last']) - sums['better']) / step_ns:.1%}"


def table(found: list[dict[str, Any]]) -> Table:
    """All networks: the fastest without the plan over the fastest with it."""
    result = Table(title="Fastest step without a plan over the fastest with one")
    for heading in ("network", "mode", "tuned in", "changed", "layout", "without", "with", "ratio"):
        result.add_column(heading)
    result.add_column("peak: without, with")
    result.add_column("layouts of single layers save at most")
    for one in found:
        bench = StepBench.from_dict(one["bench"])
        other, planned = bench.fastest(is_planned=False), bench.fastest(is_planned=True)
        ratio = bench.ratio()
        if other is None or planned is None or ratio is None:
            result.add_row(one["network"], one["mode"], bench.sentence())
            continue
        middle, low, high = ratio
        # Rows of earlier versions have one plan for all ways.
        followed = one.get("plan_of_compiled", one) if planned.way.is_compiled else one
        result.add_row(
            one["network"],
            one["mode"],
            f"{followed['tuned_s']} s",
            f"{followed['changed']} of {followed['kernels']}",
            followed["memory_format"],
            f"{other.way.name} {format_ns(other.time_ns)}",
            f"{planned.way.name} {format_ns(planned.time_ns)}",
            f"{1 / middle:.2f} ({1 / high:.2f} to {1 / low:.2f})",
            f"{format_bytes(other.peak_bytes)}, {format_bytes(planned.peak_bytes)}",
            saved_by_segments(one, planned.time_ns),
        )
    return result


if __name__ == "__main__":
    main()
