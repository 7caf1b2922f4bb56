"""Whether what `ucudnn doctor --cliffs` proposes saves what it promises.

    python benchmarks/doctor_promise.py --out doctor_promise.json          # ResNet-18 and -50
    python benchmarks/doctor_promise.py resnet50 --rounds 25
    python benchmarks/doctor_promise.py --tiny --rounds 3                  # a minute, to try it

Each network is scanned in a process of its own, as by `ucudnn doctor`. Its proposals are then
applied: splits and algorithms by the plan that the scan writes, malloc's threshold by
GLIBC_TUNABLES, another layout by a model in it. One process for each computes training steps, one
of each in every round, in random order. Promised is what the scan says that a remedy saves of a
step. Saved is, for splits, the time that their kernels take by torch minus their own in the same
round; for the others, which change the whole step, the difference of the two steps.
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
from typing import Any, NamedTuple

import torch
from networks import NETWORKS, Network
from provenance import provenance
from rich.console import Console
from rich.table import Table
from torch import nn

import ucudnn
from ucudnn.backends import open_backend
from ucudnn.benchmark.statistics import median_interval, midmean_ns
from ucudnn.cli.targets import Recipe
from ucudnn.cli.timed_steps import times_in_processes
from ucudnn.execution.override import Installation
from ucudnn.execution.runner import Runner
from ucudnn.execution.timing import KernelTimer
from ucudnn.plan import Plan
from ucudnn.problem import Problem
from ucudnn.tracing import trace_layers
from ucudnn.tuning.cliffs import find_cliffs, large_blocks_stay
from ucudnn.tuning.cliffs.found import CHANNELS_LAST, DTYPE, MALLOC, SPLITS, TORCH
from ucudnn.tuning.tuner import layers_by_problem
from ucudnn.units import format_ns

TUNABLES = "GLIBC_TUNABLES="
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
    parser.add_argument("--rounds", type=int, default=15)
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
    if way == CHANNELS_LAST:
        model, x = (one.to(memory_format=torch.channels_last) for one in (model, x))
    runner = Runner(Plan.load(folder / "cliffs.plan.json")) if way == SPLITS else None
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


def measured(name: str, rounds: int) -> dict[str, Any]:
    """The cliffs of a network, and the times of its kernels and steps with and without them."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(command(name, "scan", folder), check=True)
        scanned = json.loads(Path(folder, "cliffs.json").read_text())
        # Another dtype would be another model.
        cliffs = [one for one in scanned["found"] if one["kind"] != "dtype"]
        ways = [way for way in scanned["saved_ns"] if way != DTYPE]
        settings = [one["remedy"] for one in cliffs if one["remedy"].startswith(TUNABLES)]
        tunables = settings[0].removeprefix(TUNABLES) if settings else ""
        running = {way: Contestant(name, way, folder, tunables) for way in (TORCH, *ways)}
        taken = in_turn(running, rounds)
        for one in running.values():
            one.end()
    for number, cliff in enumerate(cliffs):
        cliff["samples_ns"] = {
            way: [one["kernels_ns"][number] for one in times] for way, times in taken.items()
        }
    steps = {way: [one["step_ns"] for one in times] for way, times in taken.items()}
    what = {"network": name, "input": list(network(name).shape), "made": provenance()}
    found = {key: scanned[key] for key in ("saved_ns", "steps_ns", "failures", "unlisted")}
    return {**what, "promised": found, "cliffs": cliffs, "steps_ns": steps}


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
    """A promise, and what was saved: the mean of the middle half, the interval of the median."""

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
        """True if it is within a fifth of what was promised."""
        return abs(self.ratio - 1) <= TOLERATED

    def cells(self) -> tuple[str, ...]:
        """For a table."""
        low, high = self.low_ns / self.promised_ns, self.high_ns / self.promised_ns
        return (
            *(format_ns(self.promised_ns), signed(self.saved_ns)),
            f"{self.ratio:.2f} ({low:.2f} to {high:.2f})",
            "yes" if self.is_kept else "no",
        )


def kept(own_ns: list[int], remedied_ns: list[int], promised_ns: int) -> Kept:
    """Compare a promise with the times of torch's own and of a remedy, round by round."""
    saved = [own - remedied for own, remedied in zip(own_ns, remedied_ns, strict=True)]
    return Kept(promised_ns, midmean_ns(saved), *median_interval(saved))


def kept_by(found: dict[str, Any], way: str) -> Kept:
    """What one remedy saved of a step."""
    promised_ns = found["promised"]["saved_ns"][way]
    if way != SPLITS:
        return kept(found["steps_ns"][TORCH], found["steps_ns"][way], promised_ns)
    samples = [one["samples_ns"] for one in found["cliffs"] if one["split"] is not None]
    own, remedied = (
        [sum(ns) for ns in zip(*(one[who] for one in samples), strict=True)]
        for who in (TORCH, SPLITS)
    )
    return kept(own, remedied, promised_ns)


def signed(time_ns: int) -> str:
    """A time that may be negative."""
    return f"-{format_ns(-time_ns)}" if time_ns < 0 else format_ns(time_ns)


def report(found: dict[str, Any]) -> None:
    """Print one network: the kernels on cliffs, and what each remedy saved."""
    title = f"{found['network']}, {'x'.join(map(str, found['input']))}"
    kernels = Table("kernel", "kind", "remedy", "by the scan", "in these steps", title=title)
    for cliff in found["cliffs"]:
        way = way_of(cliff)
        scanned = [cliff[key] * len(cliff["layers"]) for key in ("time_ns", "remedied_ns")]
        taken = [midmean_ns(cliff["samples_ns"][one]) for one in (TORCH, way)]
        both = (" to ".join(map(format_ns, times)) for times in (scanned, taken))
        kernels.add_row(str(Problem.from_dict(cliff["problem"])), cliff["kind"], way, *both)
    console.print(kernels)
    steps = Table("remedy", "promised", "saved", "ratio (95 %)", "within 20 %")
    for way in found["promised"]["saved_ns"]:
        if way != DTYPE:
            steps.add_row(way, *kept_by(found, way).cells())
    console.print(steps)
    own = format_ns(midmean_ns(found["steps_ns"][TORCH]))
    console.print(f"A step by torch's own convolutions takes {own}.")


def way_of(cliff: dict[str, Any]) -> str:
    """The way to run that applies a cliff's remedy."""
    if cliff["split"] is not None:
        return SPLITS
    return MALLOC if cliff["remedy"].startswith(TUNABLES) else CHANNELS_LAST


if __name__ == "__main__":
    main()
