"""Training steps within half and a quarter of torch's memory, and a network whose layers gain.

python examples/demo.py
"""

from __future__ import annotations

import copy
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from models import classifier, conformer, segmenter
from rich.console import Console
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ucudnn
from ucudnn.backends import open_backend
from ucudnn.benchmark.statistics import median_ns, ratio_interval
from ucudnn.reports.text import simple_table
from ucudnn.units import format_bytes, format_ns

ROUNDS = 5
TUNING_S = 20.0
console = Console(soft_wrap=True, highlight=False)


class Task(NamedTuple):
    """What is trained: a network, a batch and its labels; and by which plans.

    Args:
        title: of the table.
        make: makes the network.
        images: the batch.
        labels: of the batch.
        plans: for each, a share of torch's peak, and whether it may be a loop.
    """

    title: str
    make: Callable[[], nn.Module]
    images: Tensor
    labels: Tensor
    plans: tuple[tuple[str, bool], ...] = tuple(product(("50%", "25%"), (False, True)))


def main() -> None:
    """Networks within less memory, a batch and a single volume, then one that gets faster."""
    torch.manual_seed(0)
    began = time.monotonic()
    console.print(
        f"Steps of two networks are tuned for {TUNING_S:.0f} s in each of nine ways, and compared "
        f"with torch's; then layers of a third. On two cores this takes three to six minutes.\n"
    )
    volumes = torch.randn(8, 1, 32, 32, 32), torch.randint(2, (8, 32, 32, 32))
    volume = torch.randn(1, 1, 64, 64, 64), torch.randint(2, (1, 64, 64, 64))
    images = torch.randn(16, 3, 128, 128), torch.randint(1000, (16,))
    small = partial(segmenter, 8)
    for task in (
        Task("Segmentation of volumes, 8 x 1 x 32 x 32 x 32", small, *volumes),
        # One volume has no micro-batches: it is divided into slabs of planes.
        Task("One volume, 1 x 1 x 64 x 64 x 64", small, *volume, (("50%", False),)),
        Task("Image classifier, 16 x 3 x 128 x 128", classifier, *images),
    ):
        with folded():
            within_less_memory(task)
    with folded():
        faster_layers()
    console.print(f"All of it took {time.monotonic() - began:.0f} s.")


@contextmanager
def shown(what: str) -> Iterator[None]:
    """Say what goes on, as a moving line or, where there is no terminal, as a line."""
    if not console.is_terminal:
        console.print(f"{what} ...")
    with console.status(what):
        yield


@contextmanager
def folded() -> Iterator[None]:
    """Tell warnings of ucudnn by their number, below the table that they are about."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ucudnn.errors.UcudnnWarning)
        yield
    kinds = Counter(one.category for one in caught)
    if kinds[ucudnn.errors.NoiseWarning]:
        console.print("This machine was busy while it tuned; another run may find other plans.")
    if kinds[ucudnn.errors.UntunedWarning] or kinds[ucudnn.errors.UnplannedWarning]:
        console.print(
            f"Some convolutions stay torch's own, because tuning had only {TUNING_S:.0f} s."
        )
    console.print()


def step(model: nn.Module, task: Task, plan: ucudnn.Plan | None = None) -> None:
    """Forward, loss and backward."""
    model.zero_grad()
    if plan is None:
        nn.functional.cross_entropy(model(task.images), task.labels).backward()
        return
    for part in plan.micro_batches(task.images, task.labels):
        loss = nn.functional.cross_entropy(model(part[0]), part[1])
        (loss * part.weight).backward()


def within_less_memory(task: Task) -> None:
    """Compare steps by torch, by its checkpoints and by plans: memory, time and gradients."""
    model = task.make()
    steps = {
        "torch": partial(step, model, task),
        "torch.utils.checkpoint": partial(step, checkpointed(model), task),
    }
    for share, loop in task.plans:
        config = ucudnn.Config(
            memory_budget=share, loop=loop, effort="quick", time_budget_s=TUNING_S
        )
        name = f"plan within {share}" + ", loop" * loop
        try:
            with shown(f"tuning: {task.title}, {name}"):
                plan = ucudnn.tune(model, task.images, config)
        except ucudnn.errors.PlanError as error:
            console.print(f"{name}: {str(error).splitlines()[0]}")
            continue
        planned = copy.deepcopy(model)
        ucudnn.convert_(planned, plan)
        steps[name] = partial(step, planned, task, plan)
    print_steps(task.title, steps, deviations(model, steps))


def checkpointed(model: nn.Module) -> nn.Module:
    """A copy of a sequence whose parts are recomputed one by one, as is usual with torch."""
    twin = copy.deepcopy(model)
    for part in twin.children():
        if any(part.children()):
            part.forward = partial(checkpoint, part.forward, use_reentrant=False)
    return twin


def deviations(model: nn.Module, steps: Mapping[str, partial[None]]) -> dict[str, float]:
    """Largest deviation of a gradient from that in float64, of the largest gradient."""
    first = next(iter(steps.values()))
    exact = copy.deepcopy(model).double()
    task: Task = first.args[1]
    step(exact, task._replace(images=task.images.double()))
    wanted = [p.grad for p in exact.parameters()]
    most = max(float(grad.abs().max()) for grad in wanted)
    found = {}
    for name, run in steps.items():
        run()
        pairs = zip(run.args[0].parameters(), wanted, strict=True)
        found[name] = max(float((p.grad - grad).abs().max()) for p, grad in pairs) / most
    return found


def peak_bytes(run: partial[None]) -> int:
    """Parameters, and the most that a step allocates beside them."""
    model: nn.Module = run.args[0]
    # Gradients that are there before it would be freed by the step.
    model.zero_grad()
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    return held + open_backend("torch_cpu").workspace_bytes(run, ())


def print_steps(
    title: str, steps: Mapping[str, partial[None]], errors: Mapping[str, float]
) -> None:
    """Run steps in turn, and print a row for each way."""
    backend = open_backend("torch_cpu")
    peaks = {name: peak_bytes(run) for name, run in steps.items()}
    samples: dict[str, list[int]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, run in steps.items():
            samples[name].append(backend.elapsed_ns(run))
    # The table fits 80 columns.
    table = simple_table(
        title,
        "peak: parameters, gradients, activations and workspace; ratios are to torch, of "
        f"{ROUNDS} steps in turn with their 95 % interval; error: deviation of the gradients from "
        "float64, largest over largest",
    )
    for heading in ("step by", "peak", "", "time", "ratio", "error"):
        table.add_column(heading, justify="left" if heading == "step by" else "right")
    for name, taken in samples.items():
        ratio, low, high = ratio_interval(taken, samples["torch"])
        table.add_row(
            name,
            format_bytes(peaks[name]),
            f"{peaks[name] / peaks['torch']:.0%}",
            format_ns(median_ns(taken)),
            f"{ratio:.2f} ({low:.2f} to {high:.2f})",
            f"{errors[name]:.0e}",
        )
    console.print(table)


def faster_layers() -> None:
    """Tune the layers of a network, and time its inference."""
    model, x = conformer().eval(), torch.randn(8, 512, 200)
    config = ucudnn.Config(ops=("fprop",), time_budget_s=TUNING_S)
    with shown("tuning: the layers of a conformer"):
        plan = ucudnn.tune(model, x, config)
    planned = copy.deepcopy(model)
    conversion = ucudnn.convert_(planned, plan)
    backend, samples = open_backend("torch_cpu"), {"torch": list[int](), "plan": list[int]()}
    with torch.no_grad():
        for number in range(4 * ROUNDS):
            for name, network in (("torch", model), ("plan", planned)):
                time_ns = backend.elapsed_ns(partial(network, x))
                if number:  # the first round warms up
                    samples[name].append(time_ns)
    ratio, low, high = ratio_interval(samples["plan"], samples["torch"])
    console.print(
        f"Inference of conformer blocks, 8 x 512 x 200: {format_ns(median_ns(samples['torch']))} "
        f"by torch, {format_ns(median_ns(samples['plan']))} by the plan, {ratio:.2f} ({low:.2f} "
        f"to {high:.2f}) times as long. {conversion}."
    )


if __name__ == "__main__":
    main()
