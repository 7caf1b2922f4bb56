"""What tuning costs and wins: seconds, memory, and whole steps by the plan beside torch's own.

    python benchmarks/tuning_time.py                              # all networks, without a limit
    python benchmarks/tuning_time.py resnet18 --limit 16MiB --effort quick --out tuning_time.json
    python benchmarks/tuning_time.py --layout auto                # the plan decides the layout, too
    python benchmarks/tuning_time.py resnet50 --budget 60 --thorough        # what haste loses

Each network is tuned from an empty cache in a process of its own. Its step is raced by torch's own
convolutions as the model is and in channels_last, and by the plan, in turn, after the race that
tuning ends with; in these steps the layers that a plan changes are timed, too. Memory is the peak
of the process: after steps alone, and after tuning. With --thorough a plan of that effort, tuned
from another empty cache, takes part in the race, too. Needs transformers and monai (the extra
`test`).
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from msgspec import to_builtins
from networks import NETWORKS
from provenance import provenance
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import ucudnn
from ucudnn.backends import open_backend
from ucudnn.benchmark.statistics import median_ns, ratio_interval
from ucudnn.config import Config
from ucudnn.execution.observers import KernelTimer
from ucudnn.execution.override import Installation
from ucudnn.execution.runner import Runner
from ucudnn.kernels.noise import noise_of
from ucudnn.steps.run import Steps, undisturbed
from ucudnn.units import format_ns

# What tells apart the entries of a file of results.
SETTINGS = ("network", "limit", "effort", "budget_s", "layout")
console = Console(width=130, soft_wrap=True, highlight=False)


def main() -> None:
    """Measure the networks of the command line, each in a child; print and keep what they say."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("networks", nargs="*", help=f"default: all: {', '.join(NETWORKS)}")
    parser.add_argument("--limit", help="workspace limit, such as 16MiB; default: none")
    parser.add_argument("--effort", default="normal")
    parser.add_argument("--budget", type=float, help="seconds; default: that of the effort")
    parser.add_argument("--thorough", action="store_true", help="race a thorough plan, too")
    parser.add_argument("--layout", default="keep", help="keep or auto")
    parser.add_argument("--rounds", type=int, default=7, help="of the race of steps afterwards")
    parser.add_argument("--out", type=Path, help="a JSON file that the results are added to")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.networks or list(NETWORKS)
    if options.child:
        print(json.dumps(measured(names[0], options)))
        return
    found: list[dict[str, Any]] = []
    for name in names:
        command = [sys.executable, __file__, name, "--child", "--effort", options.effort]
        command += ["--rounds", str(options.rounds), "--layout", options.layout]
        command += ["--limit", options.limit] if options.limit else []
        command += ["--budget", str(options.budget)] if options.budget else []
        command += ["--thorough"] if options.thorough else []
        # Before it begins: the load is that of others.
        made, began = provenance(), time.monotonic()
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            console.print(f"{name}: failed with exit status {done.returncode}")
            continue
        wall_s = round(time.monotonic() - began, 1)
        found.append(json.loads(done.stdout.splitlines()[-1]) | {"wall_s": wall_s, "made": made})
        console.print(sentence(found[-1]))
        if options.out:
            add(found[-1], options.out)
    console.print(table(found, options))


def add(one: dict[str, Any], path: Path) -> None:
    """Add an entry to a file, in place of an older one of the same network and settings."""
    what = [one[name] for name in SETTINGS]
    kept = json.loads(path.read_text()) if path.exists() else []
    kept = [other for other in kept if [other[name] for name in SETTINGS] != what]
    path.write_text(json.dumps([*kept, one], indent=1) + "\n")


def measured(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Tune one network from an empty cache, and race its steps."""
    torch.manual_seed(0)
    network = NETWORKS[name]
    model, x = network.make().train(), torch.randn(network.shape)
    with undisturbed(model):
        step = Steps(model, x)
        step()
        step_ns = open_backend("auto").elapsed_ns(step)
    step_peak = peak_bytes()
    settings = {"workspace_limit": options.limit, "layout": options.layout}
    hasty = Config(**settings, effort=options.effort, time_budget_s=options.budget)
    plan, seconds = tuned(model, x, hasty)
    plans, tuning_peak, thorough_s = {"plan": plan}, peak_bytes(), None
    if options.thorough:
        plans["thorough"], thorough_s = tuned(model, x, Config(**settings, effort="thorough"))
    times = raced(model, x, plans, options.rounds)
    samples, layers = times["steps"], times["layers"]
    fastest = min(("torch", "channels_last"), key=lambda which: median_ns(samples[which]))
    return {
        "network": name,
        "limit": options.limit,
        "effort": options.effort,
        "first_step_ns": step_ns,
        "budget_s": options.budget,
        "seconds": seconds,
        "thorough_seconds": thorough_s,
        "kernels": len(plan.kernels),
        "changed": sum(not kernel.is_default for kernel in plan.kernels),
        "step_race": to_builtins(plan.step_race),
        "layout": options.layout,
        "memory_format": plan.memory_format,
        "samples_ns": samples,
        "speed_up": ratio_of(samples, "torch"),
        "fastest_of_torch": fastest,
        "speed_up_over_fastest": ratio_of(samples, fastest),
        "thorough_over_plan": ratio_of(samples, "thorough") if options.thorough else None,
        "layers_ns": layers,
        "saved_ms": {who: saved_ms(layers, who) for who in plans},
        "peak_of_steps_bytes": step_peak,
        "peak_of_tuning_bytes": tuning_peak,
        "noise": noise_of(plan).to_dict(),
    }


def tuned(model: nn.Module, x: Tensor, config: Config) -> tuple[ucudnn.Plan, float]:
    """A plan tuned from an empty cache, and how many seconds that took."""
    with tempfile.TemporaryDirectory() as cache:
        began = time.monotonic()
        plan = ucudnn.tune(model, x, replace(config, cache=cache))
        return plan, round(time.monotonic() - began, 1)


def raced(
    model: nn.Module, x: Tensor, plans: Mapping[str, ucudnn.Plan], rounds: int
) -> dict[str, dict[str, list[int]]]:
    """Times in ns of steps by torch in both layouts and by plans, one of each per round.

    In each step the layers that some plan changes are timed, too: small gains are hidden by the
    noise of whole steps.
    """
    # They look every call up once, as in a run that installs a plan once.
    runners = {who: Runner(plan) for who, plan in plans.items()}
    ways = {"torch": "keep", "channels_last": "channels_last"}
    ways |= {who: plan.memory_format for who, plan in plans.items()}
    kernels = [kernel for plan in plans.values() for kernel in plan.kernels]
    changed = {kernel.problem.w_shape for kernel in kernels if not kernel.is_default}
    times: dict[str, dict[str, list[int]]] = {"steps": {}, "layers": {}}
    elapsed_ns = open_backend("auto").elapsed_ns
    chance = random.Random(0)
    with undisturbed(model):
        steps = {which: Steps(model, x, memory_format=which) for which in set(ways.values())}
        for number in range(rounds + 1):
            for who in chance.sample(list(ways), len(ways)):
                timer = KernelTimer(elapsed_ns, runners.get(who), changed)
                with Installation("cpu", timer):
                    time_ns = elapsed_ns(steps[ways[who]])
                if number:
                    times["steps"].setdefault(who, []).append(time_ns)
                    times["layers"].setdefault(who, []).append(sum(timer.times_ns.values()))
    return times


def saved_ms(layers_ns: Mapping[str, Sequence[int]], who: str) -> list[float]:
    """What a plan saves in the layers of a step, with the least and the most of the rounds."""
    pairs = zip(layers_ns["torch"], layers_ns[who], strict=True)
    saved = sorted((torchs - planned) / 1e6 for torchs, planned in pairs)
    return [round(value, 1) for value in (median(saved), saved[0], saved[-1])]


def ratio_of(samples: dict[str, list[int]], who: str) -> list[float]:
    """How many times as long as by the plan a step takes, with its 95 % interval."""
    return [round(value, 3) for value in ratio_interval(samples[who], samples["plan"])]


def peak_bytes() -> int:
    """The most memory that this process has had so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return 0


def sentence(one: dict[str, Any]) -> str:
    """One network in a line."""
    ratio, low, high = one["speed_up"]
    over, least, most = one["speed_up_over_fastest"]
    saved, least_saved, most_saved = one["saved_ms"]["plan"]
    memory = one["peak_of_tuning_bytes"] / one["peak_of_steps_bytes"]
    beside = ""
    if one["thorough_over_plan"]:
        times, lowest, highest = one["thorough_over_plan"]
        more, least_ms, most_ms = one["saved_ms"]["thorough"]
        beside = (
            f"; a thorough plan, tuned in {one['thorough_seconds']} s, takes {times:.3f} "
            f"({lowest:.3f} to {highest:.3f}) times as long as the plan, and saves {more} ms "
            f"({least_ms} to {most_ms}) in the layers"
        )
    return (
        f"{one['network']}: tuned in {one['seconds']} s, {one['changed']} of {one['kernels']} "
        f"kernels changed, {one['memory_format']}; torch's step over the plan's {ratio:.3f} "
        f"({low:.3f} to {high:.3f}), that of the faster layout {over:.3f} ({least:.3f} to "
        f"{most:.3f}); {saved} ms ({least_saved} to {most_saved}) are saved in the layers; "
        f"peak of tuning {memory:.2f} times that of steps{beside}"
    )


def table(found: list[dict[str, Any]], options: argparse.Namespace) -> Table:
    """All networks."""
    limit = options.limit or "none"
    result = Table(title=f"effort {options.effort}, workspace limit {limit}, empty cache")
    headings = ("network", "torch's step", "tuned in", "changed", "layout", "torch over plan")
    headings += ("faster layout of torch over plan", "ms saved in the layers", "memory")
    for heading in headings:
        result.add_column(heading)
    for one in found:
        ratios = (one["speed_up"], one["speed_up_over_fastest"])
        result.add_row(
            one["network"],
            format_ns(median_ns(one["samples_ns"]["torch"])),
            f"{one['seconds']} s",
            f"{one['changed']} of {one['kernels']}",
            one["memory_format"],
            *(f"{ratio:.3f} ({low:.3f} to {high:.3f})" for ratio, low, high in ratios),
            "{} ({} to {})".format(*one["saved_ms"]["plan"]),
            f"{one['peak_of_tuning_bytes'] / one['peak_of_steps_bytes']:.2f}",
        )
    return result


if __name__ == "__main__":
    main()
