"""Every way to train within less memory, each at the best setting of its own sweep, and plans.

    python benchmarks/peers.py --out peers.json                     # four networks, four hours
    python benchmarks/peers.py segresnet --out peers.json           # goes on where it was cut off
    python benchmarks/peers.py resnet50 --budgets 0.5,0.3 --rounds 5
    python benchmarks/peers.py --compile --out peers_compiled.json  # seven networks, six hours

Ways of torch: eager and channels_last; a malloc that keeps large blocks; checkpoints of each block,
of whole stages, and selective ones, which keep what convolutions and products of matrices compute;
gradient accumulation, where samples are independent; torch.compile of the whole model, by
activation budgets, in both layouts, by both estimators. Each runs in a process of its own. Beside a
compiled way are its graphs and their nodes, so that one that is half compiled shows. The ways that
no other beats in both peak and time go into the race. Each of them meets a plan within its peak, by
its malloc, in the default layout or its own, and with a loop if it has one.

With --compile, plans may compile. Their rivals are eager and torch.compile, in both layouts, by all
activation budgets; one more plan, without a memory budget, meets the way with the largest peak; and
so do plans within less memory than torch.compile reaches.

Before a way runs, what it will take is predicted: foreseen by ucudnn; of a compiled way, the share
of the activations that its budget allows, in the time of eager. Before the race, who wins it is.
What was right and wrong is printed and kept. lightstream is no way here: its backward fails on a
CPU (1.0.7, torch 2.13).
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

import fit_the_step as fit
import torch
from fit_the_step import CASES, Case, Contestant, Losses, shape
from msgspec import to_builtins
from provenance import provenance
from torch import Tensor, nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import ucudnn
from ucudnn.advice import LARGE_THRESHOLD_TUNABLES
from ucudnn.backends.registry import identify
from ucudnn.cli.models import in_layout
from ucudnn.config import Config
from ucudnn.errors import UcudnnError, first_line
from ucudnn.measurement import Conditions
from ucudnn.plan import Plan

NETWORKS = ("segresnet", "convnext", "resnet50", "unet3d")
COMPILED_NETWORKS = (*NETWORKS[:3], "unet3d-batchnorm", "denoiser", "hifigan", "wav2vec2")
# Plans that meet the first way of the front: without a memory budget, and within these shares.
UNLIMITED = "plan"
SHARES = {"resnet50": ("45%",), "unet3d-batchnorm": ("60%",)}
# Samples of these depend on each other.
DEPENDENT = ("resnet50", "unet3d-batchnorm")
LAYOUTS = ("", "channels_last")
BUDGETS = (1.0, 0.7, 0.5, 0.35)
# A way beats another if it takes so much less of one, and no more of the other.
CLEARLY = 0.02
# A predicted peak, and a predicted time over eager's, are right if they are so near.
NEAR_PEAK, NEAR_TIME = 0.03, 0.1
# A way whose gradients' norm deviates by more than this from eager's computes something else.
OTHER = 0.05
# A plan may exceed its rival's peak by the loss and the like, so that it can do the same.
ROOM = 2**20
# What is kept of how plans compile, and of each way that they tried.
COMPILATION = ("seconds", "reason", "graphs", "nodes", "breaks", "left_out", "not_tried")
WAY = ("name", "peak_bytes", "time_ns")
Entry = Callable[[nn.Module, Tensor], Contestant]


class Way(NamedTuple):
    """A way by torch.

    Args:
        title: its name.
        entry: makes it, in its process.
        layout: "" or "channels_last".
        budget: the activation budget of a compiled way; 0: it is not compiled.
        environment: of its process.
        loops: it changes the training loop, so a plan may, too.
    """

    title: str
    entry: Entry
    layout: str = ""
    budget: float = 0.0
    environment: dict[str, str] = {}  # noqa: RUF012 - nothing changes it
    loops: bool = False


def checkpointed(
    members: Callable[[nn.Module], Iterable[nn.Module]],
    model: nn.Module,
    _: Tensor,
    **settings: Any,
) -> Contestant:
    """A copy of which some modules are checkpoints."""
    twin = copy.deepcopy(model)
    fit.recompute_(members(twin), **settings)
    return Contestant(twin)


def keeping_products() -> Any:
    """Contexts of a checkpoint that keeps what convolutions and products of matrices compute."""
    aten = torch.ops.aten
    products = [aten.convolution.default, aten.mm.default, aten.addmm.default, aten.bmm.default]
    return create_selective_checkpoint_contexts(products)


def stages_of(model: nn.Module) -> list[nn.Module]:
    """The outermost modules that are called and hold others, below containers of one child."""
    found = []
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            found += [one for one in child if any(one.children())]
        elif any(child.children()):
            found.append(child)
    return stages_of(found[0]) if len(found) == 1 else found


def accumulated(parts: int, model: nn.Module, x: Tensor) -> Contestant:
    """A loop over so many parts: a plan that asks for nothing else."""
    loop = Plan((), *identify("torch_cpu"), Conditions(), Config(), micro_batch=len(x) // parts)
    return Contestant(copy.deepcopy(model), loop)


def ways_of(name: str, case: Case, budgets: Sequence[float]) -> list[Way]:
    """The ways by torch, eager first."""
    eager = partial(fit.unchanged, False)
    blocks = partial(checkpointed, fit.blocks)
    selective = partial(blocks, context_fn=keeping_products)
    keeping = {"GLIBC_TUNABLES": LARGE_THRESHOLD_TUNABLES}
    found = [
        Way("eager", eager),
        Way("eager, channels_last", eager, "channels_last"),
        Way(fit.KEEPING, eager, environment=keeping),
        Way("checkpoint of each block", blocks),
        Way("checkpoint of each stage", partial(checkpointed, stages_of)),
        Way("selective checkpoint of each block", selective),
        Way("checkpoint of each block, channels_last", blocks, LAYOUTS[1]),
        Way("selective checkpoint of each block, channels_last", selective, LAYOUTS[1]),
    ]
    if name not in DEPENDENT:
        halves = [parts for parts in (2, 4) if parts <= case.shape[0]]
        found += [
            Way(f"accumulation of {parts} parts", partial(accumulated, parts), loops=True)
            for parts in halves
        ]
    for layout in LAYOUTS:
        for budget in budgets:
            title = f"torch.compile, budget {budget}" + f", {layout}" * bool(layout)
            found.append(Way(title, partial(fit.compiled, budget, "flops"), layout, budget))
    middle = sorted(budgets)[len(budgets) // 2]
    title = f"torch.compile, budget {middle}, channels_last, profiled"
    found.append(Way(title, partial(fit.compiled, middle, "profile"), LAYOUTS[1], middle))
    return found


def entered(case: Case, layout: str, entry: Entry) -> tuple[Contestant, Tensor]:
    """A way of a case, and its input."""
    model, x = fit.drawn(case)
    if layout:
        model, (x,) = in_layout(model), in_layout([x])
    return entry(model, x), x


def measured() -> dict[str, Any]:
    """Peak, time and gradients of this process's way, and the graphs that it consists of."""
    [(way, x)] = fit.SERVED
    began = time.monotonic()
    way.step(x)
    first_s = round(time.monotonic() - began, 1)
    times = [fit.served_ns() for _ in range(3)]
    gradients = fit.gradients(way, x)
    peak = fit.peak_bytes(way, x)
    return {
        "peak_bytes": peak,
        "step_ns": times,
        "gradient_norm": float(torch.stack([one.norm() for one in gradients]).norm()),
        "first_step_s": first_s,  # with compiling
        "graphs": fit.GRAPHS,
    }


def served(case: Case, way: Way) -> Any:
    """A process that runs one way and nothing else."""
    server = fit.serving(partial(entered, case, way.layout, way.entry))
    with patch.dict(os.environ, way.environment):  # malloc reads it when the process starts
        server.submit(os.getpid).result()
    return server


class Book:
    """What was predicted and found of one network, in a file that is written after each way."""

    def __init__(self, name: str, case: Case, out: Path | None) -> None:
        self._out = out
        self._all = json.loads(out.read_text()) if out is not None and out.exists() else []
        same = [
            one for one in self._all if (one["network"], tuple(one["shape"])) == (name, case.shape)
        ]
        self._all = [one for one in self._all if one["network"] != name]
        fresh = {"network": name, "shape": case.shape, "made": provenance()}
        self.found: dict[str, Any] = {
            **(same[0] if same else {**fresh, "ways": {}, "plans": {}, "failed": {}, "race": {}})
        }
        self._all.append(self.found)
        self._began = time.monotonic() - self.found.get("wall_s", 0)

    def write(self) -> None:
        """Write the file: all or nothing."""
        self.found["wall_s"] = round(time.monotonic() - self._began)
        fit.save(self._out, self._all)


def predicted(case: Case, way: Way, eager: dict[str, Any]) -> dict[str, Any]:
    """Peak and time over eager's that a way is expected to take, before it has run."""
    if way.budget:
        held, peak = eager["held_bytes"], eager["predicted"]["peak_bytes"]
        return {"peak_bytes": round(held + way.budget * (peak - held)), "ratio": 1.0}
    contestant, x = entered(case, way.layout, way.entry)
    # A loop holds the whole batch, and runs a part of it at a time.
    size = len(x) if contestant.plan is None else contestant.plan.micro_batch
    found = ucudnn.foresee(Losses(contestant.model), x[:size])
    parts = len(x) // size
    first = eager.get("predicted", {}).get("time_ns", found.time_ns)
    return {
        "peak_bytes": found.peak_bytes + x.nbytes - x[:size].nbytes,
        "time_ns": found.time_ns,
        "ratio": parts * found.time_ns / first,
    }


def sweep(book: Book, case: Case, ways: Iterable[Way]) -> None:
    """Predict and measure each way that the book does not have."""
    rows, failed = book.found["ways"], book.found["failed"]
    for way in ways:
        if way.title in rows or way.title in failed:
            continue
        try:
            row: dict[str, Any] = {"predicted": predicted(case, way, rows.get("eager", {}))}
            if way.title == "eager":
                model, x = fit.drawn(case)
                row["held_bytes"] = fit.held_bytes(model, x)
            book.found["next"] = {way.title: row}
            book.write()  # the prediction comes first
            with served(case, way) as server:
                row |= server.submit(measured).result()
        # What torch.compile raises is a RuntimeError, and so is a lack of memory.
        except (UcudnnError, RuntimeError) as error:
            failed[way.title] = first_line(error)
        else:
            rows[way.title] = row
            torchs = rows["eager"]
            share = row["peak_bytes"] / torchs["peak_bytes"]
            ratio = median(row["step_ns"]) / median(torchs["step_ns"])
            print(f"{book.found['network']}: {way.title}: {share:.0%} at {ratio:.2f}", flush=True)
        book.found.pop("next", None)
        book.write()


def computes_other(row: dict[str, Any], eager: dict[str, Any]) -> bool:
    """True if a way computes other gradients than eager."""
    return abs(row["gradient_norm"] / eager["gradient_norm"] - 1) > OTHER


def plan_within(title: str) -> str:
    """What a plan within the peak of a way is called in a race."""
    return title if title.startswith(UNLIMITED) else f"plan at the peak of {title}"


def front(rows: dict[str, dict[str, Any]]) -> list[str]:
    """The ways that no other beats, by falling peak; of those that are about equal, one.

    A way that computes other gradients is none of them.
    """
    kept = list[str]()
    sizes = {
        title: (row["peak_bytes"], median(row["step_ns"]))
        for title, row in rows.items()
        if not computes_other(row, rows["eager"])
    }
    for title in sorted(sizes, key=lambda one: sizes[one]):
        _, time_ns = sizes[title]
        # Those that are kept so far have smaller peaks.
        if all(time_ns < (1 - CLEARLY) * sizes[one][1] for one in kept):
            kept.append(title)
    return kept[::-1]


def plan_for(case: Case, layout: str, config: ucudnn.Config) -> ucudnn.Plan:
    """A plan of a case; called in a process of its own."""
    found, x = entered(case, layout, partial(fit.unchanged, False))
    return ucudnn.tune(found.model, x, config)


def best_plan(case: Case, way: Way, config: ucudnn.Config) -> tuple[str, ucudnn.Plan]:
    """The fastest plan as foreseen, and the layout of its model: the default one or the way's."""
    found, errors = dict[str, ucudnn.Plan](), list[UcudnnError]()
    # Compiling takes its time, and tries both layouts of a model in the default one.
    layouts = [""] if config.compile == "auto" else dict.fromkeys(("", way.layout))
    for layout in layouts:
        with patch.dict(os.environ, way.environment), fit.process() as own:
            try:
                found[layout] = own.submit(plan_for, case, layout, config).result()
            except UcudnnError as error:
                errors.append(error)
    if not found:
        raise errors[-1]
    return min(found.items(), key=lambda one: step_ns(one[1]))


def compilation_of(plan: ucudnn.Plan) -> dict[str, Any]:
    """What is kept of how a plan compiles, and of the ways that were tried."""
    found = to_builtins(plan.compilation) or {}
    ways = [{key: one[key] for key in WAY} for one in found.get("ways", ())]
    return {**{key: found[key] for key in COMPILATION if key in found}, "ways": ways}


def step_ns(plan: ucudnn.Plan) -> int:
    """The time of a step by a plan: foreseen, or of compiled steps as it was measured."""
    memory, race = plan.memory, plan.step_race
    if memory is None:
        return race.plan_ns if race is not None else 0
    return memory.plan_foreseen_ns or memory.plan_ns


def planned(book: Book, case: Case, rivals: Sequence[Way], config: ucudnn.Config) -> None:
    """Plans within the peaks of the rivals, with who is expected to be faster."""
    rows, plans = book.found["ways"], book.found["plans"]
    budgets: dict[str, Any] = {
        one.title: rows[one.title]["peak_bytes"] + ROOM
        for one in rivals
        if rows[one.title]["peak_bytes"] <= rows["eager"]["peak_bytes"]
    }
    if config.compile == "auto":
        budgets[UNLIMITED] = None
        shares = SHARES.get(book.found["network"], ())
        budgets |= {f"{UNLIMITED} within {share}": share for share in shares}
    ways = {one.title: one for one in rivals}
    for title, budget in budgets.items():
        if title in plans:
            continue
        way = ways.get(title, next(iter(ways.values())))
        within = replace(config, memory_budget=budget, loop=way.loops)
        try:
            layout, plan = best_plan(case, way, within)
        except UcudnnError as error:
            plans[title] = {"refused": first_line(error)}
            book.write()
            continue
        memory, race = plan.memory, plan.step_race
        ratio = step_ns(plan) / rows["eager"]["predicted"]["time_ns"]
        rival = median(rows[way.title]["step_ns"]) / median(rows["eager"]["step_ns"])
        peak = (memory.plan_foreseen_bytes or memory.plan_peak_bytes) if memory else 0
        plans[title] = {
            "predicted": {
                "peak_bytes": peak or (race.plan_peak_bytes if race is not None else 0),
                "ratio": ratio,
                "is_faster": ratio < rival,
            },
            "tuning_s": plan.origin.seconds,
            "layout": layout,  # of the model that was tuned
            "memory_format": plan.memory_format,
            "micro_batch": plan.micro_batch,
            "compiled": plan.compiled,
            "compilation": compilation_of(plan),
            **fit.described(plan),
            "plan": plan.to_dict(),
        }
        book.write()
        print(f"{book.found['network']}: {plan_within(title)}", flush=True)


def raced(book: Book, case: Case, ways: dict[str, Way], rounds: int) -> None:
    """Times of the ways of the front and of the plans, in turn."""
    from msgspec import convert

    entries: dict[str, Way] = {"eager": ways["eager"]}
    for title in book.found["front"]:
        entries[title] = ways[title]
    for title, row in book.found["plans"].items():
        if "plan" in row:
            config = ucudnn.Config.from_dict(row["plan"]["config"])
            plan = convert({**row["plan"], "config": config}, ucudnn.Plan)
            name = plan_within(title)
            follow = partial(fit.following, plan, False)
            rival = ways[title if title in ways else book.found["front"][0]]
            entries[name] = rival._replace(title=name, entry=follow, layout=row["layout"])
    race = book.found["race"]
    with ExitStack() as stack:
        servers = {name: stack.enter_context(served(case, way)) for name, way in entries.items()}
        for name, server in servers.items():
            if name not in race:
                found = server.submit(measured).result()
                kept = {key: found[key] for key in ("peak_bytes", "gradient_norm")}
                race[name] = {**kept, "samples_ns": []}
        for _ in range(rounds - min(len(row["samples_ns"]) for row in race.values())):
            for name, server in servers.items():
                race[name]["samples_ns"].append(fit.step_ns(server))
            book.write()


def judged(book: Book) -> list[str]:
    """What was predicted right and wrong, as sentences."""
    rows, race = book.found["ways"], book.found["race"]
    torchs = rows["eager"]
    peaks = times = right_peaks = right_times = 0
    for row in rows.values():
        ratio = median(row["step_ns"]) / median(torchs["step_ns"])
        peaks, times = peaks + 1, times + (row is not torchs)
        right_peaks += abs(row["predicted"]["peak_bytes"] / row["peak_bytes"] - 1) <= NEAR_PEAK
        right_times += row is not torchs and abs(row["predicted"]["ratio"] / ratio - 1) <= NEAR_TIME
    lines = [
        f"peaks of torch's ways: {right_peaks} of {peaks} within {NEAR_PEAK:.0%}",
        f"times of torch's ways: {right_times} of {times} within {NEAR_TIME:.0%}",
    ]
    won = right = count = near = 0
    for title, row in book.found["plans"].items():
        name = plan_within(title)
        if name not in race:
            continue
        rival = title if title in race and title != name else book.found["front"][0]
        pairs = zip(race[name]["samples_ns"], race[rival]["samples_ns"], strict=True)
        is_faster = median(one / other for one, other in pairs) < 1
        count, won = count + 1, won + is_faster
        right += is_faster == row["predicted"]["is_faster"]
        near += abs(row["predicted"]["peak_bytes"] / race[name]["peak_bytes"] - 1) <= NEAR_PEAK
    lines.append(f"peaks of plans: {near} of {count} within {NEAR_PEAK:.0%}")
    lines.append(f"winners: {right} of {count} right; plans are faster in {won}")
    return lines


def compared(
    book: Book, case: Case, ways: dict[str, Way], config: ucudnn.Config, rounds: int
) -> None:
    """All of a network, from where its book ends."""
    sweep(book, case, ways.values())
    book.found["front"] = front(book.found["ways"])
    planned(book, case, [ways[title] for title in book.found["front"]], config)
    raced(book, case, ways, rounds)
    book.found["predictions"] = judged(book)
    for row in book.found["plans"].values():
        row.pop("plan", None)  # thousands of lines
    book.write()


def main() -> None:
    """Run the networks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "networks", nargs="*", metavar="NETWORK", help="default: four, or with --compile seven"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shape", type=shape, help="of the inputs, such as 4,1,32,32,32")
    parser.add_argument(
        "--budgets", type=lambda text: tuple(map(float, fit.listed(text))), default=BUDGETS
    )
    parser.add_argument(
        "--time-budget-s", type=float, default=240, help="for tuning each plan, in both layouts"
    )
    parser.add_argument("--compile", action="store_true", help="let plans compile")
    parser.add_argument("--compile-budget-s", type=float, default=400, help="for each plan")
    arguments = parser.parse_args()
    if unknown := {*arguments.networks} - {*CASES}:
        parser.error(f"networks must be of {', '.join(CASES)}, got {', '.join(sorted(unknown))}")
    # Within the peak of a rival in the default layout, a plan for channels_last may be faster.
    config = ucudnn.Config(effort="quick", layout="auto", time_budget_s=arguments.time_budget_s)
    if arguments.compile:
        config = replace(config, compile="auto", compile_budget_s=arguments.compile_budget_s)
    default = COMPILED_NETWORKS if arguments.compile else NETWORKS
    for name in arguments.networks or default:
        case = CASES[name]._replace(**({"shape": arguments.shape} if arguments.shape else {}))
        book = Book(name, case, arguments.out)
        if "predictions" not in book.found:
            ways = ways_of(name, case, arguments.budgets)
            if arguments.compile:
                ways = [way for way in ways if way.budget or way.entry.func is fit.unchanged]
                ways = [way for way in ways if not way.environment]
            compared(book, case, {way.title: way for way in ways}, config, arguments.rounds)
        for line in book.found["predictions"]:
            print(f"{name}: {line}", flush=True)


if __name__ == "__main__":
    main()
