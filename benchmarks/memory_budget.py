"""Whole steps within memory budgets: the allocator's peak, the process's, and the time.

    python benchmarks/memory_budget.py --out memory_budget.json            # all six cases
    python benchmarks/memory_budget.py resnet18-training --effort quick --rounds 3
    python benchmarks/memory_budget.py --tiny                              # a minute, to try it

ResNet-18 (N=64, 224x224), a 3-D U-Net (N=1, 64x64x64) and SRCNN (N=4, 512x512; Dong et al., ECCV
2014), in which workspace is much of the peak; training and inference. Each case is tuned without a
limit, with as little memory as possible and with three budgets between the least possible
and what torch takes. Then each plan, and torch without one, takes steps in a process
of its own: what torch's allocator handed out at its peak, with parameters, momentum and inputs, and
the high-water mark of the process. Times are of steps in turn, in one more process. A training step
is forward, loss, backward and SGD with momentum. At the end of a case it says whether the peak kept
each budget, and whether planned and measured times fell as the budget grew.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec import to_builtins
from provenance import provenance
from rich.console import Console
from rich.table import Table
from step_models import UNet3d
from torch import Tensor, nn

import ucudnn
from ucudnn.backends.torch_cpu.workspace import allocated_spans
from ucudnn.benchmark.statistics import median_ns, ratio_interval
from ucudnn.execution.stepping import tensors_of
from ucudnn.units import format_ns

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from models import resnet18

console = Console(width=150, soft_wrap=True, highlight=False)
TORCH = "torch"


class Case(NamedTuple):
    """A network, its input, and whether it is trained."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    is_training: bool


def cases(tiny: bool) -> dict[str, Case]:
    """All cases by name, or small ones of the same names."""
    image, volume, large = (64, 3, 224, 224), (1, 1, 64, 64, 64), (4, 3, 512, 512)
    widths: tuple[int, ...] = (32, 64, 128, 256, 320)
    if tiny:
        image, volume, large = (8, 3, 64, 64), (1, 1, 16, 16, 16), (4, 3, 48, 48)
        widths = (8, 16)
    found = {}
    for kind in ("training", "inference"):
        found[f"resnet18-{kind}"] = Case(resnet18, image, kind == "training")
        found[f"unet3d-{kind}"] = Case(lambda: UNet3d(widths), volume, kind == "training")
        found[f"srcnn-{kind}"] = Case(srcnn, large, kind == "training")
    return found


def srcnn() -> nn.Module:
    """Three wide convolutions of a large image: the 9-5-5 variant."""
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 9, padding=4), nn.ReLU(inplace=True)),
        *(nn.Conv2d(64, 32, 5, padding=2), nn.ReLU(inplace=True)),
        nn.Conv2d(32, 3, 5, padding=2),
    )


class Loop:
    """A model with its optimiser, as a training loop or a server has them."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.case = case
        self.model = case.make().train(case.is_training)
        self.x = torch.randn(case.shape)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=0.9)

    def step(self) -> None:
        """One step; the gradients are freed at its end."""
        if not self.case.is_training:
            with torch.no_grad():
                self.model(self.x)
            return
        sum(one.abs().sum() for one in tensors_of(self.model(self.x))).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def held_bytes(self) -> int:
        """Parameters, buffers, input and the optimiser's state."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [*self.model.parameters(), *self.model.buffers(), self.x, *states]
        return sum(one.numel() * one.element_size() for one in tensors if isinstance(one, Tensor))


def main() -> None:
    """Run the cases of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("cases", nargs="*", help=f"default: all: {', '.join(cases(False))}")
    parser.add_argument("--effort", default="normal")
    parser.add_argument("--rounds", type=int, default=7, help="of steps in turn")
    parser.add_argument("--tiny", action="store_true", help="small networks")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    parser.add_argument(
        "--show", nargs="+", type=Path, metavar="FILE", help="print files of --out, measure nothing"
    )
    parser.add_argument("--child", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.cases or list(cases(options.tiny))
    if options.child:
        print(json.dumps(child(cases(options.tiny)[names[0]], options)))
        return
    found = []
    if options.show:
        for file in options.show:
            for one in json.loads(file.read_text()):
                report(one)
        return
    for name in names:
        found.append(measured(name, options))
        report(found[-1])
        if options.out:
            options.out.write_text(json.dumps(found, indent=1) + "\n")


def measured(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Plans of one case and what their steps take."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [name, "--effort", options.effort, "--rounds", str(options.rounds)]
        arguments += ["--tiny"] if options.tiny else []
        plans = asked(arguments, "tune", folder)
        who = [TORCH, *(plan["path"] for plan in plans)]
        peaks = {one: asked(arguments, "peak", one) for one in who}
        samples = asked(arguments, "time", *who)
    rows = [{"budget": "torch", **peaks[TORCH], "samples_ns": samples[TORCH]}]
    for plan in plans:
        # A folder that is gone by now says nothing to a reader.
        path = plan.pop("path")
        rows.append({**plan, **peaks[path], "samples_ns": samples[path]})
    return {"case": name, "rows": rows, "made": provenance()}


def asked(arguments: Sequence[str], *work: str) -> Any:
    """The answer of a process of its own."""
    command = [sys.executable, __file__, *arguments, "--child", *work]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def child(case: Case, options: argparse.Namespace) -> Any:
    """Do one piece of work in this process."""
    what, *rest = options.child
    if what == "tune":
        return tuned(case, options, Path(rest[0]))
    if what == "peak":
        return peaks_of(case, rest[0])
    return raced(case, rest, options.rounds)


def tuned(case: Case, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Plans for five budgets, the least possible first."""
    loop = Loop(case)
    loop.step()  # so that the optimiser has a state

    def tune(budget: int | str) -> ucudnn.Plan:
        ops = ("fprop", "dgrad", "wgrad") if case.is_training else ("fprop",)
        settings = {"effort": options.effort, "cache": str(folder / "cache"), "ops": ops}
        return ucudnn.tune(
            loop.model, loop.x, ucudnn.Config(memory_budget=budget, step_race=False, **settings)
        )

    # From the smallest to the largest, so that what fits a smaller budget is in the cache when a
    # larger one is planned.
    least = smallest(tune)
    low, torchs = least.memory.budget_bytes, least.memory.torch_peak_bytes
    budgets = {f"{part}/4": low + max(0, torchs - low) * part // 4 for part in (1, 2, 3)}
    plans = {"least": least, **{name: tune(size) for name, size in budgets.items()}}
    plans["unlimited"] = tune("1024GiB")
    found = []
    for number, (budget, plan) in enumerate(plans.items()):
        path = folder / f"{number}.plan.json"
        plan.save(path)
        row = {"budget": budget, "path": str(path), "memory": to_builtins(plan.memory)}
        row["changed"] = sum(not kernel.is_default for kernel in plan.kernels)
        row["planned_ns"] = sum(one.timing.time_ns * len(one.layers) for one in plan.kernels)
        found.append({**row, "kernels": len(plan.kernels), "says": str(plan.memory)})
    return found


def smallest(tune: Callable[[int], ucudnn.Plan]) -> ucudnn.Plan:
    """The plan for the least possible budget: each refusal names one that suffices."""
    budget = 0
    while True:
        try:
            return tune(budget)
        except ucudnn.PlanError as error:
            if error.smallest_bytes is None or error.smallest_bytes <= budget:
                raise
            budget = error.smallest_bytes


def peaks_of(case: Case, path: str) -> dict[str, int]:
    """Peaks of a step by a plan: what the allocator handed out, and what the process had."""
    loop = Loop(case)
    with nullcontext() if path == TORCH else ucudnn.installed(ucudnn.Plan.load(path)):
        loop.step()
        spans = allocated_spans(lambda _: loop.step())
        held = loop.held_bytes()
        # 5 resets the high-water mark of this process, see proc(5).
        Path("/proc/self/clear_refs").write_text("5")
        loop.step()
        status = Path("/proc/self/status").read_text().splitlines()
    mark = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM:"))
    return {"allocated_bytes": held + spans[0].peak_bytes, "process_bytes": mark}


def raced(case: Case, paths: Sequence[str], rounds: int) -> dict[str, list[int]]:
    """Times in ns of steps by torch and by the plans, one of each per round."""
    loop = Loop(case)
    plans = {path: None if path == TORCH else ucudnn.Plan.load(path) for path in paths}
    samples: dict[str, list[int]] = {path: [] for path in paths}
    chance = random.Random(0)
    for number in range(rounds + 1):
        for path in chance.sample(list(paths), len(paths)):
            plan = plans[path]
            with nullcontext() if plan is None else ucudnn.installed(plan):
                # An installation looks its calls up in its first step.
                loop.step()
                began = time.perf_counter_ns()
                loop.step()
                if number:
                    samples[path].append(time.perf_counter_ns() - began)
    return samples


def mebibytes(size: int) -> str:
    """So that budgets of a GiB that differ by a little are told apart."""
    return f"{size / 2**20:.1f} MiB"


def report(found: dict[str, Any]) -> None:
    """Print one case."""
    table = Table(title=found["case"])
    for heading in ("budget", "bytes", "changed", "allocated", "process", "step", "over torch's"):
        table.add_column(heading, justify="right")
    torchs = found["rows"][0]["samples_ns"]
    for row in found["rows"]:
        ratio, low, high = ratio_interval(row["samples_ns"], torchs)
        memory = row.get("memory")
        table.add_row(
            row["budget"],
            mebibytes(memory["budget_bytes"]) if memory else "",
            f"{row['changed']} of {row['kernels']}" if memory else "",
            mebibytes(row["allocated_bytes"]),
            mebibytes(row["process_bytes"]),
            format_ns(median_ns(row["samples_ns"])),
            f"{ratio:.2f} ({low:.2f} to {high:.2f})",
        )
    console.print(table)
    console.print(found["rows"][1]["says"])
    for sentence in verdicts(found["rows"]):
        console.print(sentence)


def verdicts(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Sentences on a case: whether peaks kept their budgets, and times fell as budgets grew."""
    planned = [row for row in rows if row.get("memory")]
    over = [
        f"{row['budget']} by {mebibytes(row['allocated_bytes'] - row['memory']['budget_bytes'])}"
        for row in planned
        if row["allocated_bytes"] > row["memory"]["budget_bytes"]
    ]
    said = [f"Peak within each of {len(planned)} budgets: {_yes_unless(over)}."]
    # The recorded file has none.
    if all("planned_ns" in row for row in planned):
        rises = [
            f"{one['budget']} to {other['budget']} by "
            f"{format_ns(other['planned_ns'] - one['planned_ns'])}"
            for one, other in pairwise(planned)
            if other["planned_ns"] > one["planned_ns"]
        ]
        said.append(f"Planned times of all convolutions never rise: {_yes_unless(rises)}.")
    rises, clear = [], []
    for one, other in pairwise(planned):
        ratio, low, high = ratio_interval(other["samples_ns"], one["samples_ns"])
        text = f"{one['budget']} to {other['budget']} {ratio:.3f} ({low:.3f} to {high:.3f})"
        rises += [text] if ratio > 1 else []
        clear += [text] if low > 1 else []
    said.append(f"Medians of measured steps never rise: {_yes_unless(rises)}.")
    said.append(f"No measured step rises beyond its 95 % interval: {_yes_unless(clear)}.")
    return said


def _yes_unless(exceptions: Sequence[str]) -> str:
    return f"no, {', '.join(exceptions)}" if exceptions else "yes"


if __name__ == "__main__":
    main()
