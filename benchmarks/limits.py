"""Steps under workspace limits by each policy, as µ-cuDNN compares them.

    python benchmarks/limits.py alexnet --out limits.json
    python benchmarks/limits.py cifar10 --limits 64MiB --out limits.json       # appends

A plan is tuned for every limit and policy from an empty cache, in the model's own layout. Then a
step by torch and one by each plan are taken in each round, in random order. A kernel of which
nothing fits the limit is left to torch's own convolution, whatever that needs, and is counted.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from found_limits import rendered, steps_table
from networks import NETWORKS, example, shape_of
from provenance import provenance
from rich.console import Console
from torch import Tensor, nn

import ucudnn
from ucudnn.backends import AbstractBackend, open_backend
from ucudnn.config import POLICIES, Config
from ucudnn.execution.override import Installation
from ucudnn.execution.runner import Runner
from ucudnn.steps.run import Steps, undisturbed

console = Console(width=150, soft_wrap=True, highlight=False)


@dataclass
class Row:
    """Steps by one plan, or by torch's own convolutions.

    Args:
        limit: such as "64MiB"; "" for torch's own.
        policy: "" for torch's own.
        tuned_s: seconds of tuning.
        kernels: how many are planned.
        changed: of these, how many are not torch's own.
        divided: of these, how many run in several chunks.
        over_limit: kernels of which nothing fits the limit, so that they are torch's own.
        workspace_bytes: the most that a planned kernel needs.
        peak_bytes: peak of what torch allocates in a step, beyond what there is before it.
        samples_ns: times of steps, one per round.
    """

    limit: str = ""
    policy: str = ""
    tuned_s: float = 0.0
    kernels: int = 0
    changed: int = 0
    divided: int = 0
    over_limit: int = 0
    workspace_bytes: int = 0
    peak_bytes: int = 0
    samples_ns: tuple[int, ...] = ()


def main() -> None:
    """Tune one network for every limit and policy, race its steps, print and keep the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("network", choices=NETWORKS)
    parser.add_argument("--input", type=shape_of, help="shape; default: that of the network")
    parser.add_argument("--limits", default="8MiB,64MiB,512MiB", help="default: %(default)s")
    parser.add_argument("--policies", default=",".join(POLICIES), help="default: %(default)s")
    parser.add_argument("--effort", default="normal")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="a JSON file, to which the results are appended")
    options = parser.parse_args()
    made, began = provenance(), time.monotonic()
    shape = options.input or NETWORKS[options.network].shape
    rows = measured(options, *example(options.network, shape, is_training=True))
    entry = {"network": options.network, "input": list(shape), "effort": options.effort}
    entry |= {"wall_s": round(time.monotonic() - began, 1), "made": made}
    entry |= {"rows": [asdict(row) for row in rows]}
    if options.out:
        known = json.loads(options.out.read_text()) if options.out.exists() else []
        options.out.write_text(json.dumps([*known, entry], indent=1) + "\n")
    console.print(rendered("Training steps under limits", steps_table([entry], {})))


def measured(options: argparse.Namespace, model: nn.Module, x: Tensor) -> list[Row]:
    """One row for torch and one for each plan, with the times of interleaved steps."""
    rows, plans = [Row()], list[ucudnn.Plan | None]([None])
    for limit in options.limits.split(","):
        for policy in options.policies.split(","):
            console.print(f"{options.network} within {limit}, {policy}")
            row, plan = tuned(model, x, limit, policy, options.effort)
            rows.append(row)
            plans.append(plan)
    rows[0].workspace_bytes = own_workspace(plans)
    race(rows, plans, model, x, options.rounds)
    return rows


def tuned(
    model: nn.Module, x: Tensor, limit: str, policy: str, effort: str
) -> tuple[Row, ucudnn.Plan | None]:
    """A plan from an empty cache, None if nothing fits; what is known of it before its steps."""
    with tempfile.TemporaryDirectory() as cache:
        settings: dict[str, Any] = {"policy": policy, "effort": effort, "cache": cache}
        began = time.monotonic()
        try:
            plan = ucudnn.tune(model, x, Config(workspace_limit=limit, **settings))
        except ucudnn.PlanError:
            kernels = len(set(ucudnn.trace(model, x)))
            return Row(limit, policy, round(time.monotonic() - began, 1), over_limit=kernels), None
        seconds = time.monotonic() - began
    splits = [kernel.split(kernel.problem.batch) for kernel in plan.kernels]
    row = Row(
        limit,
        policy,
        round(seconds, 1),
        kernels=len(splits),
        changed=sum(not split.is_default for split in splits),
        divided=sum(len(split.chunks) > 1 for split in splits),
        over_limit=len(plan.left_out),
        workspace_bytes=plan.workspace_bytes,
    )
    return row, plan


def own_workspace(plans: list[ucudnn.Plan | None]) -> int:
    """The most workspace of torch's own convolutions, as far as some plan knows it."""
    kernels = [kernel for plan in plans if plan for kernel in plan.kernels]
    return max((one.default.workspace_bytes for one in kernels if one.default), default=0)


def race(
    rows: list[Row], plans: list[ucudnn.Plan | None], model: nn.Module, x: Tensor, rounds: int
) -> None:
    """Fill in peaks, and the times of one step by each plan per round."""
    backend = open_backend("auto")
    # Looks every call up once, as in a run that installs a plan once.
    runners = [Runner(plan) if plan else None for plan in plans]
    chance, taken = random.Random(0), [list[int]() for _ in rows]
    with undisturbed(model):
        step = Steps(model, x)
        for row, runner in zip(rows, runners, strict=True):
            with followed(runner, backend):
                step()
                row.peak_bytes = backend.workspace_bytes(step, ())
        for number in range(rounds + 1):
            for place in chance.sample(range(len(rows)), len(rows)):
                with followed(runners[place], backend):
                    time_ns = backend.elapsed_ns(step)
                # Round 0 warms up.
                if number:
                    taken[place].append(time_ns)
    for row, samples in zip(rows, taken, strict=True):
        row.samples_ns = tuple(samples)


def followed(runner: Runner | None, backend: AbstractBackend) -> Any:
    """A context in which convolutions follow a plan, or are torch's own."""
    return nullcontext() if runner is None else Installation(backend.device().type, runner)


if __name__ == "__main__":
    main()
