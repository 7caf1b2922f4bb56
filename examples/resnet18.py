"""Tune ResNet-18 on this machine; print every kernel, the training step and the gradients' error.

python examples/resnet18.py --batch 32 --workspace-limit 16MiB
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Sequence

import torch
from models import resnet18
from rich.console import Console
from rich.progress import Progress as Bar
from rich.table import Table
from torch import Tensor, nn

import ucudnn
from ucudnn.backends.torch_cpu.allocator import (
    GLIBC_MMAP_THRESHOLD,
    LARGE_MMAP_THRESHOLD,
    describe_allocator,
    set_mmap_threshold,
)
from ucudnn.benchmark.statistics import median_ns, ratio_interval, spread_ns
from ucudnn.reports.text import plan_summary, plan_table
from ucudnn.tuning.progress import Progress
from ucudnn.units import format_ns

# A busy machine takes several times as long: then fewer rounds have to do.
LEAST_ROUNDS, ENOUGH_S = 3, 75
console = Console(width=170, soft_wrap=True, highlight=False)


def main() -> None:
    """Tune, convert, compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--workspace-limit", default="16MiB")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    images = torch.randn(arguments.batch, 3, 224, 224)
    labels = torch.randint(1000, (arguments.batch,))
    model = resnet18()
    config = ucudnn.Config(workspace_limit=arguments.workspace_limit)

    plan = tune(model, images, config)
    plan.save("resnet18.plan.json")
    planned = copy.deepcopy(model)
    conversion = ucudnn.convert_(planned, plan)
    console.print(f"Plan written to resnet18.plan.json. {conversion}.\n")

    compare_steps(model, planned, images, labels, arguments.rounds)
    compare_gradients(model, planned, images[:4], labels[:4])


def tune(model: nn.Module, images: Tensor, config: ucudnn.Config) -> ucudnn.Plan:
    """Tune with a progress bar, print the plan and what tuning cost."""
    start, last = time.monotonic(), None
    with Bar(console=console, transient=True) as bar:
        task = bar.add_task("tuning", total=None)

        def on_progress(event: Progress) -> None:
            nonlocal last
            last = event
            bar.update(task, description=event.kernel, completed=event.done, total=event.total)

        plan = ucudnn.tune(model, images, config, on_progress)
    assert last is not None
    console.print(plan_table(plan))
    console.print(plan_summary(plan))
    console.print(
        f"Tuning took {time.monotonic() - start:.0f} s: {last.measured} candidates measured, "
        f"{last.reused} found in the cache."
    )
    return plan


def training_step(model: nn.Module, images: Tensor, labels: Tensor) -> Callable[[], None]:
    """Forward, loss and backward as one call."""

    def step() -> None:
        model.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()

    return step


def compare_steps(
    model: nn.Module, planned: nn.Module, images: Tensor, labels: Tensor, rounds: int
) -> None:
    """Time whole training steps, interleaved in one run, under two settings of malloc."""
    last = copy.deepcopy(model).to(memory_format=torch.channels_last)
    last_images = images.to(memory_format=torch.channels_last)
    steps = {
        "eager": training_step(model, images, labels),
        "channels_last": training_step(last, last_images, labels),
        "ucudnn": training_step(planned, images, labels),
    }
    mallocs = {"as it comes": GLIBC_MMAP_THRESHOLD, "large mmap threshold": LARGE_MMAP_THRESHOLD}
    if not describe_allocator().startswith("glibc"):
        mallocs = {describe_allocator(): 0}
    samples = {(malloc, name): [] for malloc in mallocs for name in steps}
    began = time.monotonic()
    for number in range(rounds + 1):
        if number > LEAST_ROUNDS and time.monotonic() - began > ENOUGH_S:
            break
        for malloc, threshold in mallocs.items():
            if threshold:
                set_mmap_threshold(threshold)
            for name, step in steps.items():
                start = time.perf_counter_ns()
                step()
                if number:  # the first round warms up
                    samples[malloc, name].append(time.perf_counter_ns() - start)
    print_steps(samples, list(mallocs), list(steps), len(images))


def print_steps(
    samples: dict[tuple[str, str], list[int]],
    mallocs: Sequence[str],
    names: Sequence[str],
    batch: int,
) -> None:
    """One row per malloc and model, and the verdict."""
    table = Table(
        title=f"Training step (forward, loss, backward) of ResNet-18 at N={batch}, interleaved",
        caption="ratio: median over rounds of eager's time over this one's, with its 95 % interval",
    )
    for heading in ("malloc", "model", "step", "ratio to eager"):
        table.add_column(heading)
    for malloc in mallocs:
        for name in names:
            taken = samples[malloc, name]
            ratio, low, high = ratio_interval(samples[malloc, "eager"], taken)
            step = f"{format_ns(median_ns(taken))} ± {format_ns(spread_ns(taken))}"
            table.add_row(malloc, name, step, f"{ratio:.2f} ({low:.2f} to {high:.2f})")
    console.print(table)
    for malloc in mallocs:
        rivals = [name for name in names if name != "ucudnn"]
        best = min(rivals, key=lambda name, malloc=malloc: median_ns(samples[malloc, name]))
        ratio, low, high = ratio_interval(samples[malloc, "ucudnn"], samples[malloc, best])
        verdict = f"{best} and the plan differ by less than the noise"
        if low > 1:
            verdict = f"{best} is faster than the plan: where memory does not matter, use that"
        elif high < 1:
            verdict = f"the plan is faster than {best}, the best of the others"
        console.print(
            f"Malloc {malloc}: {verdict} (time of the plan over {best}: {ratio:.2f}, 95 % interval "
            f"{low:.2f} to {high:.2f})."
        )
    console.print()


def compare_gradients(model: nn.Module, planned: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Errors of all gradients of one step against the same step in float64."""
    exact = copy.deepcopy(model).double()
    training_step(exact, images.double(), labels)()
    errors = {}
    for name, network in (("torch float32", model), ("ucudnn float32", planned)):
        training_step(network, images, labels)()
        errors[name] = relative_error(network, exact)
    console.print(f"Relative error (L2) of all gradients at N={len(images)}, against float64:")
    for name, error in errors.items():
        console.print(f"  {name:<15} {error:.2e}")


def relative_error(network: nn.Module, exact: nn.Module) -> float:
    """Norm of the difference of all gradients over the norm of the exact ones."""
    pairs = zip(network.parameters(), exact.parameters(), strict=True)
    gradients = [(p.grad.double(), q.grad) for p, q in pairs if p.grad is not None]
    difference = sum(float((a - b).square().sum()) for a, b in gradients)
    return (difference / sum(float(b.square().sum()) for _, b in gradients)) ** 0.5


if __name__ == "__main__":
    main()
