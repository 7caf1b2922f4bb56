"""Whether what `ucudnn doctor --cliffs` proposes saves what it promises.

    python benchmarks/doctor_promise.py --out doctor_promise.json          # ResNet-18 and -50
    python benchmarks/doctor_promise.py resnet50 --rounds 15
    python benchmarks/doctor_promise.py --tiny --rounds 3                  # a minute, to try it

Each network is scanned in a process of its own. Its proposals are then applied: splits and
algorithms by the plan that the scan writes, malloc's threshold by GLIBC_TUNABLES, another layout by
a model in it. One process for each way to run computes steps, one of each way in every round, in
random order. Saved is the time that the calls of a cliff's kernel take in a step by torch's own
minus the time that they take with the remedy, in the same round; promised is what the scan said.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from argparse import RawTextHelpFormatter
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from networks import NETWORKS, Network
from provenance import provenance
from rich.console import Console
from rich.table import Table
from torch import nn

import ucudnn
from ucudnn.backends import open_backend
from ucudnn.benchmark.statistics import median_interval, median_ns
from ucudnn.cli.targets import Recipe
from ucudnn.cli.timed_steps import times_in_processes
from ucudnn.execution.override import Installation
from ucudnn.execution.runner import Runner
from ucudnn.execution.timing import KernelTimer
from ucudnn.plan import Plan
from ucudnn.problem import Problem
from ucudnn.tracing import trace_layers
from ucudnn.tuning.cliffs import find_cliffs, large_blocks_stay
from ucudnn.tuning.tuner import layers_by_problem
from ucudnn.units import format_ns

TORCH, PLAN, MALLOC, LAYOUT = "torch", "plan", "malloc", "channels_last"
TOLERATED = 0.2
console = Console(width=150, soft_wrap=True, highlight=False)


def tiny() -> nn.Module:
    """A strided 1x1 convolution between others, and large blocks."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 32, 1, stride=2), nn.ReLU()
    )


def network(name: str) -> Network:
    """A network by its name."""
    return Network(tiny, (4, 3, 192, 192)) if name == "tiny" else NETWORKS[name]


def main() -> None:
    """Scan, apply and time each network of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=RawTextHelpFormatter)
    parser.add_argument("networks", nargs="*", help="default: resnet18 resnet50")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--tiny", action="store_true", help="one small network")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.networks or (["tiny"] if options.tiny else ["resnet18", "resnet50"])
    if options.child:
        what, folder = options.child
        if what == "scan":
            scan(names[0], Path(folder))
        else:
            serve(names[0], what, Path(folder))
        return
    found = []
    for name in names:
        found.append(measured(name, options.rounds))
        report(found[-1])
        if options.out:
            options.out.write_text(json.dumps(found, indent=1) + "\n")


def command(name: str, what: str, folder: str) -> list[str]:
    """A child of this script."""
    return [sys.executable, __file__, name, "--child", what, folder]


def made(name: str) -> nn.Module:
    """The model of a network, for the processes of the scan."""
    torch.manual_seed(0)
    return network(name).make()


def scan(name: str, folder: Path) -> None:
    """Find the cliffs of a network, and write them and the plan that removes them."""
    shape, backend = network(name).shape, open_backend("auto")
    layers = layers_by_problem(trace_layers(made(name), torch.randn(shape)).layers, ucudnn.Config())
    words = ("x".join(map(str, shape)),)
    recipe = Recipe(f"{__file__}:made", words, args=json.dumps([name]))
    time_steps = partial(times_in_processes, recipe, "auto")
    found = find_cliffs(layers, backend, large_blocks_stay, time_steps=time_steps)
    assert found.plan is not None
    found.plan.save(folder / "cliffs.plan.json")
    (folder / "cliffs.json").write_text(json.dumps(found.to_dict()))


class Contestant:
    """A process that computes steps in one way, on request."""

    def __init__(self, name: str, way: str, folder: str, tunables: str) -> None:
        environment = dict(os.environ)
        if way == MALLOC:
            environment["GLIBC_TUNABLES"] = tunables
        self._process = subprocess.Popen(
            command(name, way, folder),
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self) -> dict[str, Any]:
        """Times in ns of a step, and of the kernels of all cliffs in it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print("step", file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("a process that computes steps has ended")
        times: dict[str, Any] = json.loads(answer)
        return times

    def end(self) -> None:
        """Let the process end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve(name: str, way: str, folder: Path) -> None:
    """Compute a step for each line that comes."""
    model, backend = made(name), open_backend("auto")
    x = torch.randn(network(name).shape)
    if way == LAYOUT:
        model, x = (one.to(memory_format=torch.channels_last) for one in (model, x))
    runner = Runner(Plan.load(folder / "cliffs.plan.json")) if way == PLAN else None
    found = json.loads((folder / "cliffs.json").read_text())["found"]
    problems = [Problem.from_dict(one["problem"]) for one in found if one["kind"] != "dtype"]
    for _ in sys.stdin:
        timer = KernelTimer(backend.elapsed_ns, runner)
        with Installation(backend.device().type, timer):
            began = time.perf_counter_ns()
            model(x).sum().backward()
            step_ns = time.perf_counter_ns() - began
        model.zero_grad()
        kernels = [time_of(timer, problem) for problem in problems]
        print(json.dumps({"step_ns": step_ns, "kernels_ns": kernels}), flush=True)


def time_of(timer: KernelTimer, problem: Problem) -> int:
    """Time of all calls of a kernel in a step, in whichever layout."""
    either = (problem, replace(problem, layout="nhwc"))
    return sum(timer.times_ns.get(one, 0) for one in dict.fromkeys(either))


def way_of(cliff: dict[str, Any]) -> str:
    """The way to run that applies a cliff's remedy."""
    if cliff["split"] is not None:
        return PLAN
    return LAYOUT if cliff["remedy"] == LAYOUT else MALLOC


def measured(name: str, rounds: int) -> dict[str, Any]:
    """The cliffs of a network, and the times of its kernels and steps with and without them."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(command(name, "scan", folder), check=True)
        scanned = json.loads(Path(folder, "cliffs.json").read_text())
        # Another dtype would be another model.
        cliffs = [one for one in scanned["found"] if one["kind"] != "dtype"]
        ways = sorted({way_of(one) for one in cliffs})
        settings = [one["remedy"] for one in cliffs if way_of(one) == MALLOC]
        tunables = settings[0].partition("=")[2] if settings else ""
        running = {way: Contestant(name, way, folder, tunables) for way in (TORCH, *ways)}
        taken = in_turn(running, rounds)
        for one in running.values():
            one.end()
    for number, cliff in enumerate(cliffs):
        pair = (TORCH, way_of(cliff))
        cliff["samples_ns"] = {
            way: [one["kernels_ns"][number] for one in taken[way]] for way in pair
        }
    steps = {way: [one["step_ns"] for one in times] for way, times in taken.items()}
    made = {"network": name, "input": list(network(name).shape), "made": provenance()}
    return {**made, "unlisted": scanned["unlisted"], "cliffs": cliffs, "steps_ns": steps}


def in_turn(running: dict[str, Contestant], rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Times of steps by all ways; the first round does not count."""
    samples: dict[str, list[dict[str, Any]]] = {way: [] for way in running}
    chance = random.Random(0)
    for number in range(rounds + 1):
        for way in chance.sample(list(running), len(running)):
            times = running[way].ask()
            if number:
                samples[way].append(times)
    return samples


class Kept(NamedTuple):
    """A promise, and what was saved, with the 95 % interval of the median."""

    promised_ns: int
    saved_ns: int
    low_ns: int
    high_ns: int

    @property
    def ratio(self) -> float:
        """Saved over promised."""
        return self.saved_ns / self.promised_ns

    @property
    def is_kept(self) -> bool:
        """True if the median is within a fifth of what was promised."""
        return abs(self.ratio - 1) <= TOLERATED

    def cells(self) -> tuple[str, ...]:
        """For a table."""
        low, high = self.low_ns / self.promised_ns, self.high_ns / self.promised_ns
        return (
            *(format_ns(self.promised_ns), signed(self.saved_ns)),
            f"{self.ratio:.2f} ({low:.2f} to {high:.2f})",
            "yes" if self.is_kept else "no",
        )


def kept(samples: dict[str, list[int]], way: str, promised_ns: int) -> Kept:
    """Compare a promise with the times of torch's own and of a remedy, round by round."""
    pairs = zip(samples[TORCH], samples[way], strict=True)
    saved = [own - remedied for own, remedied in pairs]
    return Kept(promised_ns, round(median(saved)), *median_interval(saved))


def signed(time_ns: int) -> str:
    """A time that may be negative."""
    return f"-{format_ns(-time_ns)}" if time_ns < 0 else format_ns(time_ns)


def report(found: dict[str, Any]) -> None:
    """Print one network: each cliff by itself, and steps with all of them."""
    table = Table(title=f"{found['network']}, {'x'.join(map(str, found['input']))}")
    for heading in ("what", "remedy", "promised", "saved", "ratio (95 %)", "within 20 %"):
        table.add_column(heading)
    promised: dict[str, int] = {}
    for cliff in found["cliffs"]:
        way = way_of(cliff)
        promised[way] = promised.get(way, 0) + cliff["saved_ns"]
        one = kept(cliff["samples_ns"], way, cliff["saved_ns"])
        what = f"{cliff['kind']}: {Problem.from_dict(cliff['problem'])}"
        remedy = "malloc keeps blocks" if way == MALLOC else cliff["remedy"]
        table.add_row(what, remedy, *one.cells())
    # Another layout changes all of a step.
    promised.pop(LAYOUT, None)
    for way, total in promised.items():
        table.add_row("a step", f"all of {way}", *kept(found["steps_ns"], way, total).cells())
    console.print(table)
    own = format_ns(median_ns(found["steps_ns"][TORCH]))
    console.print(f"A step by torch's own convolutions takes {own}.")


if __name__ == "__main__":
    main()
