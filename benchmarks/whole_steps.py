"""Steps by the plan beside the fastest that torch has: eager, channels_last, torch.compile, malloc.

    python benchmarks/whole_steps.py --quick --out bench.json            # `make bench`
    python benchmarks/whole_steps.py --out whole_steps.json              # all networks, hours
    python benchmarks/whole_steps.py resnet18 wavenet --mode inference --out whole_steps.json

Each network is tuned from an empty cache for the better of two layouts, in a process of its own.
From the same cache it is tuned once more as a compiled model: that plan is for plan+compile. Then
one step by every way is taken in each round, of training and of inference. A second process, whose
malloc keeps large blocks, takes part in each round (malloc_steps.py). What --out has already is not
taken anew, so that a run which was stopped goes on. Without --limit no workspace limit restricts
the plan. Needs transformers and monai (the extra `test`).

--quick is for networks.QUICK with smaller inputs: 20 s of tuning with little effort, no more rounds
after 25 s of them, and no plan of the compiled model, so that plan+compile has the plan of plan.
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
from found_steps import WAYS, Found
from malloc_steps import steps_with_malloc
from msgspec import to_builtins
from networks import NETWORKS, QUICK, QUICK_SHAPES, example, shape_of
from provenance import provenance
from rich.console import Console
from rich.table import Table
from steps import bench_steps
from torch import nn

import ucudnn
from ucudnn.config import Config
from ucudnn.kernels.noise import noise_of
from ucudnn.units import format_bytes, format_ns

MODES = ("training", "inference")
console = Console(width=150, soft_wrap=True, highlight=False)


def main() -> None:
    """Measure each network of the command line in a child; print and keep what it says."""
    options = arguments()
    if options.child:
        print(json.dumps(measured(options.networks[0], options.mode, options)))
        return
    begun = time.monotonic()
    done = options.out is not None and options.out.exists()
    found: list[dict[str, Any]] = json.loads(options.out.read_text()) if done else []
    for name, mode in cases(options):
        if any((one["network"], one["mode"]) == (name, mode) for one in found):
            continue
        console.print(f"{name}, {mode}")
        # Before it begins: the load is that of others.
        made, turn = provenance(), time.monotonic()
        for one in child(name, mode, options):
            found.append({**one, "wall_s": round(time.monotonic() - turn, 1), "made": made})
        if options.out:
            options.out.write_text(json.dumps(found, indent=1) + "\n")
    console.print(table(found))
    console.print(f"{time.monotonic() - begun:.0f} s in all")


def arguments() -> argparse.Namespace:
    """Read the command line; --quick sets what it does not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=RawTextHelpFormatter)
    parser.add_argument("networks", nargs="*", help=f"default: all: {', '.join(NETWORKS)}")
    parser.add_argument("--quick", action="store_true", help="about 80 s for each network")
    parser.add_argument("--mode", choices=MODES, help="default: both")
    parser.add_argument("--input", help="shape, such as 8x3x224x224; default: that of each network")
    parser.add_argument("--limit", help="workspace limit, such as 16MiB; default: none")
    parser.add_argument("--effort", help="default: normal, or quick with --quick")
    parser.add_argument("--budget", type=float, help="seconds of tuning; default: by the effort")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--enough", type=float, help="seconds after which no more rounds begin")
    parser.add_argument("--ways", default=",".join(WAYS), help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    defaults = ("quick", 20.0, 25.0) if options.quick else ("normal", None, 90.0)
    for name, default in zip(("effort", "budget", "enough"), defaults, strict=True):
        if getattr(options, name) is None:
            setattr(options, name, default)
    return options


def cases(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Networks and modes in the order of their turns."""
    if options.quick:
        known = [case for case in QUICK if options.mode in (None, case[1])]
        return [case for case in known if not options.networks or case[0] in options.networks]
    modes = [options.mode] if options.mode else MODES
    return [(name, mode) for name in options.networks or NETWORKS for mode in modes]


def child(name: str, mode: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """What a process of its own measures of a network; nothing if it failed."""
    command = [sys.executable, __file__, name, "--child", "--mode", mode]
    for word in ("effort", "rounds", "enough", "ways", "budget", "limit", "input"):
        value = getattr(options, word)
        command += [] if value is None else [f"--{word}", str(value)]
    command += ["--quick"] if options.quick else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        console.print(f"{name}, {mode}: failed with exit status {done.returncode}")
        return []
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    console.print(Found(result).sentence())
    return [result]


def measured(name: str, mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """Tune one network and time its steps."""
    shape, is_training = shape_in(name, options), mode == "training"
    model, x = example(name, shape, is_training)
    settings: dict[str, Any] = {"workspace_limit": options.limit, "effort": options.effort}
    settings["time_budget_s"] = options.budget
    if not is_training:
        settings["ops"] = ("fprop",)
    with tempfile.TemporaryDirectory() as folder:
        cache, path = f"{folder}/cache", Path(folder, "plan.json")
        plan, seconds = tuned(model, x, settings, cache)
        compiled, more = plan, dict[str, Any]()
        if not options.quick:
            compiled, compiled_s = tuned(torch.compile(model), x, settings, cache)
            more["plan_of_compiled"] = {"tuned_s": compiled_s, **described(compiled)}
            more["sums_ns"] = sums_by_layout(
                model, x, Config(**settings, step_race=False, cache=cache)
            )
        plan.save(path)
        other = steps_with_malloc(name, shape, is_training, path, options.rounds)
    bench = bench_steps(
        model,
        x,
        (plan, compiled),
        [WAYS[way] for way in options.ways.split(",")],
        training=is_training,
        rounds=options.rounds,
        enough_s=options.enough,
        on_round=other.take_round if other else None,
    )
    return {
        "network": name,
        "mode": mode,
        "input": list(shape),
        "limit": options.limit,
        "effort": options.effort,
        "tuned_s": seconds,
        **described(plan),
        **more,
        "noise": noise_of(plan).to_dict(),
        "bench": bench.to_dict(),
        "malloc": other.result() if other else None,
    }


def tuned(
    model: Any, x: torch.Tensor, settings: dict[str, Any], cache: str
) -> tuple[ucudnn.Plan, float]:
    """The plan of a model for the better of two layouts, and the seconds that it took."""
    began = time.monotonic()
    plan = ucudnn.tune(model, x, Config(**settings, layout="auto", cache=cache))
    return plan, round(time.monotonic() - began, 1)


def shape_in(name: str, options: argparse.Namespace) -> tuple[int, ...]:
    """Shape of a network's input in this run."""
    if options.input:
        return shape_of(options.input)
    known = NETWORKS[name].shape
    return QUICK_SHAPES.get(name, known) if options.quick else known


def described(plan: ucudnn.Plan) -> dict[str, Any]:
    """What a plan changes, and the races that decided it."""
    races = ("layout_race", "step_race", "compilation")
    found = {name: getattr(plan, name) for name in races}
    return {
        "kernels": len(plan.kernels),
        "changed": sum(not kernel.is_default for kernel in plan.kernels),
        "memory_format": plan.memory_format,
        **{name: to_builtins(race) for name, race in found.items()},
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
    """All networks: the fastest with the plan over the fastest without it."""
    result = Table(title="Fastest step with a plan over the fastest without one")
    for heading in ("network", "mode", "tuned in", "changed", "layout", "without", "with", "ratio"):
        result.add_column(heading)
    result.add_column("peak: without, with")
    result.add_column("layouts of single layers save at most")
    for one in sorted(map(Found, found), key=lambda one: one.ratio()[0]):
        other, planned = one.fastest(is_planned=False), one.fastest(is_planned=True)
        if other is None or planned is None:
            result.add_row(one.values["network"], one.values["mode"], one.sentence())
            continue
        middle, low, high = one.ratio()
        result.add_row(
            f"{one.values['network']} {'x'.join(map(str, one.values['input']))}",
            one.values["mode"],
            f"{one.followed['tuned_s']} s",
            f"{one.followed['changed']} of {one.followed['kernels']}",
            one.followed["memory_format"],
            f"{other.name} {format_ns(other.steps.time_ns)}",
            f"{planned.name} {format_ns(planned.steps.time_ns)}",
            f"{middle:.2f} ({low:.2f} to {high:.2f})",
            f"{format_bytes(other.steps.peak_bytes)}, {format_bytes(planned.steps.peak_bytes)}",
            saved_by_segments(one.values, planned.steps.time_ns),
        )
    return result


if __name__ == "__main__":
    main()
