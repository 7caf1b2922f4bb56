"""Tune ResNet-18 on this machine in the better of two layouts; print kernels, steps and errors.

python examples/resnet18.py --batch 32 --workspace-limit 16MiB
python examples/resnet18.py --workspace-limit none
"""

from __future__ import annotations

import argparse
import copy
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from models import resnet18
from rich.console import Console
from rich.progress import Progress as Bar
from rich.table import Table
from torch import Tensor, nn

import ucudnn
from ucudnn.backends import open_backend
from ucudnn.backends.torch_cpu.machine import (
    GLIBC_MMAP_THRESHOLD,
    LARGE_MMAP_THRESHOLD,
    describe_allocator,
    set_mmap_threshold,
)
from ucudnn.benchmark.statistics import median_ns, ratio_interval, spread_ns
from ucudnn.outcomes import TOLERATED
from ucudnn.reports.text import layout_table, plan_summary, plan_table, plan_verdict
from ucudnn.tuning.progress import Progress
from ucudnn.units import format_bytes, format_ns

PLAN = "resnet18.plan.json"
# A busy machine takes several times as long: then fewer rounds have to do.
LEAST_ROUNDS, ENOUGH_S = 3, 75
AS_IT_COMES = "as it comes"
# By malloc and model: times of steps in ns.
Samples = dict[tuple[str, str], list[int]]
console = Console(width=170, soft_wrap=True, highlight=False)


def main() -> None:
    """Tune, convert, compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--workspace-limit", default="16MiB", help="of each kernel, or none")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=120, help="for tuning")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    images = torch.randn(arguments.batch, 3, 224, 224)
    labels = torch.randint(1000, (arguments.batch,))
    model = resnet18()
    limit = None if arguments.workspace_limit == "none" else arguments.workspace_limit
    config = ucudnn.Config(workspace_limit=limit, layout="auto", time_budget_s=arguments.seconds)

    plan = tune(model, images, config)
    plan.save(PLAN)
    planned = copy.deepcopy(model)
    conversion = ucudnn.convert_(planned, plan)
    console.print(f"Plan written to {PLAN}. {conversion}.\n")

    samples = compare_steps(model, planned, images, labels, arguments.rounds)
    compare_gradients(model, planned, images[:4], labels[:4])
    console.print(f"\n{recommendation(plan, samples)}")


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
    if plan.layout_race is not None and plan.layout_race.contestants:
        console.print(layout_table(plan.layout_race))
    for sentence in plan_verdict(plan):
        console.print(sentence, markup=False)
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
) -> Samples:
    """Time whole training steps, interleaved in one run, under two settings of malloc."""
    last = copy.deepcopy(model).to(memory_format=torch.channels_last)
    last_images = images.to(memory_format=torch.channels_last)
    steps = {
        "eager": training_step(model, images, labels),
        "channels_last": training_step(last, last_images, labels),
        "ucudnn": training_step(planned, images, labels),
    }
    peaks = {name: (allocated_peak(step), high_water(step)) for name, step in steps.items()}
    mallocs = {AS_IT_COMES: GLIBC_MMAP_THRESHOLD, "large mmap threshold": LARGE_MMAP_THRESHOLD}
    if not describe_allocator().startswith("glibc"):
        mallocs = {AS_IT_COMES: 0}
    samples: Samples = {(malloc, name): [] for malloc in mallocs for name in steps}
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
    print_steps(samples, peaks, list(mallocs), len(images))
    return samples


def allocated_peak(step: Callable[[], None]) -> str:
    """Peak of the memory that torch allocates in a step, beyond what there is before it."""
    return format_bytes(open_backend("torch_cpu").workspace_bytes(step, ()))


def high_water(step: Callable[[], None]) -> str:
    """The most memory that the process has in a step, where the system says so."""
    marks = Path("/proc/self/clear_refs")
    if not marks.exists():
        return "-"
    marks.write_text("5")  # resets the mark
    step()
    status = Path("/proc/self/status").read_text()
    return format_bytes(int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) << 10)


def print_steps(
    samples: Samples, peaks: Mapping[str, tuple[str, str]], mallocs: Sequence[str], batch: int
) -> None:
    """One row per malloc and model."""
    table = Table(
        title=f"Training step (forward, loss, backward) of ResNet-18 at N={batch}, interleaved",
        caption="ratio: median over rounds of eager's time over this one's, with its 95 % "
        "interval; peaks of a step, malloc as it comes: what torch allocates, what the process has",
    )
    for heading in ("malloc", "model", "step", "ratio to eager", "allocated", "process"):
        table.add_column(heading)
    for malloc in mallocs:
        for name in peaks:
            taken = samples[malloc, name]
            ratio, low, high = ratio_interval(samples[malloc, "eager"], taken)
            step = f"{format_ns(median_ns(taken))} ± {format_ns(spread_ns(taken))}"
            said = peaks[name] if malloc == AS_IT_COMES else ("", "")
            table.add_row(malloc, name, step, f"{ratio:.2f} ({low:.2f} to {high:.2f})", *said)
    console.print(table)
    console.print()


def recommendation(plan: ucudnn.Plan, samples: Samples) -> str:
    """What to do, in one line."""
    mine = samples[AS_IT_COMES, "ucudnn"]
    rivals = {name: samples[AS_IT_COMES, name] for name in ("eager", "channels_last")}
    best = min(rivals, key=lambda name: median_ns(rivals[name]))
    ratio, low, high = ratio_interval(mine, rivals[best])
    said = f"a step takes {ratio:.2f} ({low:.2f} to {high:.2f}) times as long as by {best}"
    limit = plan.config.limit_bytes
    if low <= 1 + TOLERATED:
        how = f"ucudnn.convert_(model, ucudnn.Plan.load('{PLAN}'))"
        return f"Use the plan, by {how}: {said}, the faster of the others."
    if limit is not None:
        return (
            f"The limit of {format_bytes(limit)} costs time: {said}, which takes more workspace. "
            f"Where memory does not matter, run this again with --workspace-limit none."
        )
    return f"Use {best} here, or tune again with more --seconds: by the plan {said}."


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
