"""What ucudnn costs the host: per call, and as a share of a training step; and who owns workspace.

python benchmarks/overhead.py [--device cuda] [--batch 32] [--rounds 200]

Three tables. Calls on tiny convolutions, where the work is small against what surrounds it: the
layer of torch, the same converted, under `installed` with and without a plan of its own,
interleaved but for the first row, in time of the calling thread (run with OMP_NUM_THREADS=1 on a
busy machine).
A ResNet-50 step, and how many percent of it the overhead of planned calls is. Allocators: on a GPU
one workspace per stream against one per call, with expandable segments on and off, eager and
captured.
"""

from __future__ import annotations

import argparse
import copy
import os
import runpy
import subprocess
import sys
import time
from argparse import RawTextHelpFormatter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import ucudnn
from ucudnn.backends import open_backend
from ucudnn.benchmark.statistics import median_ns, ratio_interval, spread_ns
from ucudnn.config import Config
from ucudnn.plan import DEFAULT_ALGORITHM, KernelPlan, Plan, Timing
from ucudnn.steps.tracing import trace_layers
from ucudnn.units import format_ns

UNPLANNED_NS, PLANNED_SHARE = 5_000, 0.01  # what the project allows itself
CALLS = 50  # in one sample
PRISTINE = "torch.nn, before a plan was installed"
# A layer, and the context in which it is called.
Arm = tuple[nn.Module, Callable[[], AbstractContextManager[object]]]
console = Console(width=110, soft_wrap=True, highlight=False)


def main() -> None:
    """Print the three tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=32, help="of the ResNet-50 step")
    parser.add_argument("--image", type=int, default=224, help="its height and width")
    parser.add_argument("--rounds", type=int, default=200, help="of the tiny calls")
    parser.add_argument("--steps", type=int, default=5, help="of ResNet-50")
    parser.add_argument("--workspace", choices=("call", "stream"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.workspace:
        run_workspaces(arguments)
        return
    console.print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, ", end="")
    console.print(str(open_backend("auto").device()))
    overhead_ns = compare_calls(arguments)
    compare_step(arguments, overhead_ns)
    compare_allocators(arguments)


def plan_by_hand(model: nn.Module, inputs: Tensor) -> Plan:
    """Every kernel undivided by a kernel that torch itself would run, but through the plan."""
    backend = open_backend("auto")
    timing = Timing(time_ns=1, spread_ns=0, workspace_bytes=0, samples=1)
    kernels = {}
    for name, problem in trace_layers(model, inputs).layers:
        names = [candidate.algorithm for candidate in backend.candidates(problem)]
        # the first is cuDNN's first choice, as torch's; the last would be its slowest
        chosen = next(algorithm for algorithm in names if algorithm != DEFAULT_ALGORITHM)
        if backend.refusal(problem, "onednn") is None:
            chosen = "onednn"  # left out of the candidates, being torch's own choice
        kernels[problem] = KernelPlan(
            problem=problem,
            layers=(name,),
            algorithms=(chosen,),
            alone=(0,) * problem.batch,
            last=((0, 0),) * problem.batch,
            predicted_time_ns=1,
            timing=timing,
            default=timing,
        )
    return Plan(
        kernels=tuple(kernels.values()),
        device=backend.device(),
        software=backend.software(),
        conditions=backend.conditions(),
        config=Config(),
        backend=backend.name,
    )


def compare_calls(arguments: argparse.Namespace) -> int:
    """Time tiny calls, interleaved; return what a planned layer costs more, with its backward."""
    layer = nn.Conv2d(16, 16, 3, padding=1).to(arguments.device)
    x = torch.randn(4, 16, 8, 8, device=arguments.device)
    plan = plan_by_hand(layer, x.clone().requires_grad_())
    other = plan_by_hand(nn.Conv2d(8, 8, 5).to(arguments.device), x[:, :8])
    # From the first plan that is installed, torch's operators go through Python.
    pristine: dict[str, Arm] = {PRISTINE: (layer, nullcontext)}
    earlier = [time_arms(pristine, x, arguments, backward) for backward in (False, True)]
    converted = ucudnn.convert_(copy.deepcopy(layer), plan).model
    arms: dict[str, Arm] = {
        "torch.nn": (layer, nullcontext),
        "torch.nn again: the noise": (layer, nullcontext),
        "converted": (converted, nullcontext),
        "installed, planned": (layer, lambda: ucudnn.installed(plan)),
        "installed, not planned": (layer, lambda: ucudnn.installed(other)),
    }
    table = Table(title=f"Tiny calls, conv2d(16->16, k3, 8x8) N=4, on {arguments.device}")
    for heading in ("call", "forward", "more than torch.nn", "with backward", "more than torch.nn"):
        table.add_column(heading)
    later = [time_arms(arms, x, arguments, backward) for backward in (False, True)]
    forward, both = (one | other for one, other in zip(earlier, later, strict=True))
    more = {}
    for name in (PRISTINE, *arms):
        cells = []
        for samples in (forward, both):
            difference = paired(samples["torch.nn"], samples[name])
            more[name, samples is both] = difference[0]
            taken = f"{format_ns(median_ns(samples[name]))} ± {format_ns(spread_ns(samples[name]))}"
            cells += [
                taken,
                "{:+.2f} us ({:+.2f} to {:+.2f})".format(*(d / 1e3 for d in difference)),
            ]
        table.add_row(name, *cells)
    console.print(table)
    unplanned = more["installed, not planned", False]
    passing = -more[PRISTINE, False]
    console.print(
        f"From the first plan that is installed until the process ends, a convolution takes "
        f"{passing / 1e3:.2f} us more."
    )
    console.print(
        f"An unplanned convolution under `installed` costs {unplanned / 1e3:.2f} us more; allowed "
        f"are {UNPLANNED_NS / 1e3:.0f} us: {'kept' if unplanned < UNPLANNED_NS else 'NOT kept'}.\n"
    )
    return max(0, more["converted", True])


def time_arms(
    arms: dict[str, Arm], x: Tensor, arguments: argparse.Namespace, backward: bool
) -> dict[str, list[int]]:
    """Nanoseconds of one call, per round and arm; every arm once a round."""
    samples: dict[str, list[int]] = {name: [] for name in arms}
    inputs = x.clone().requires_grad_(backward)
    for number in range(arguments.rounds + 2):
        for name, (layer, context) in arms.items():
            with context(), torch.set_grad_enabled(backward):
                layer(inputs)  # looks the plan up
                synchronize(arguments.device)
                # time of this thread: what other processes take meanwhile is not the host's cost
                start = time.thread_time_ns()
                for _ in range(CALLS):
                    y = layer(inputs)
                    if backward:
                        torch.autograd.grad(y, (inputs, *layer.parameters()), y.detach())
                taken = time.thread_time_ns() - start
                synchronize(arguments.device)
            if number >= 2:  # the first rounds warm up
                samples[name].append(taken // CALLS)
    return samples


def paired(ours: list[int], theirs: list[int]) -> tuple[int, int, int]:
    """Median of the differences within rounds, and its 95 % interval by order statistics."""
    differences = sorted(b - a for a, b in zip(ours, theirs, strict=True))
    count = len(differences)
    reach = int(0.98 * count**0.5) + 1
    middle = count // 2
    return (
        differences[middle],
        differences[max(0, middle - reach)],
        differences[min(count - 1, middle + reach)],
    )


def synchronize(device: str) -> None:
    """Wait for the device, where it runs by itself."""
    if device == "cuda":
        torch.cuda.synchronize()


def resnet50(arguments: argparse.Namespace) -> tuple[nn.Module, Tensor]:
    """The network and a batch of images."""
    models = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "models.py"))
    size = (arguments.batch, 3, arguments.image, arguments.image)
    return models["resnet50"]().to(arguments.device), torch.randn(size, device=arguments.device)


def compare_step(arguments: argparse.Namespace, overhead_ns: int) -> None:
    """Time a ResNet-50 step and say what share of it the planned calls' overhead is."""
    model, images = resnet50(arguments)
    calls = sum(isinstance(module, nn.Conv2d) for module in model.modules())
    planned = ucudnn.convert_(copy.deepcopy(model), plan_by_hand(model, images)).model
    steps = {"torch.nn": model, "converted, undivided": planned}
    samples: dict[str, list[int]] = {name: [] for name in steps}
    for number in range(arguments.steps + 1):
        for name, network in steps.items():
            taken = time_step(network, images, arguments.device)
            if number:
                samples[name].append(taken)
    table = Table(title=f"Training step of ResNet-50, N={arguments.batch}, interleaved")
    for heading in ("model", "step", "ratio to torch.nn"):
        table.add_column(heading)
    for name, taken in samples.items():
        ratio, low, high = ratio_interval(taken, samples["torch.nn"])
        step = f"{format_ns(median_ns(taken))} ± {format_ns(spread_ns(taken))}"
        table.add_row(name, step, f"{ratio:.3f} ({low:.3f} to {high:.3f})")
    console.print(table)
    share = overhead_ns * calls / median_ns(samples["torch.nn"])
    console.print(
        f"{calls} planned layers x {overhead_ns / 1e3:.2f} us = {share:.3%} of the step; allowed "
        f"is {PLANNED_SHARE:.0%}: {'kept' if share <= PLANNED_SHARE else 'NOT kept'}.\n"
    )


def time_step(model: nn.Module, images: Tensor, device: str) -> int:
    """Nanoseconds of forward and backward."""
    model.zero_grad()
    synchronize(device)
    start = time.perf_counter_ns()
    model(images).square().mean().backward()
    synchronize(device)
    return time.perf_counter_ns() - start


def compare_allocators(arguments: argparse.Namespace) -> None:
    """Run ResNet-50 with a workspace per call or per stream, in a process per allocator setting."""
    if arguments.device != "cuda":
        console.print("Allocators: skipped, there is no GPU.")
        return
    for expandable in (False, True):
        for owner in ("call", "stream"):
            options = ["--batch", str(arguments.batch), "--image", str(arguments.image)]
            subprocess.run(
                [sys.executable, __file__, "--workspace", owner, *options],
                env={**os.environ, "PYTORCH_ALLOC_CONF": f"expandable_segments:{expandable}"},
                check=True,
            )


def run_workspaces(arguments: argparse.Namespace) -> None:
    """Steps of ResNet-50 whose convolutions each want a workspace as large as their output."""
    model, images = resnet50(arguments)
    kept = torch.empty(0, dtype=torch.uint8, device=arguments.device)

    def hook(_layer: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal kept
        size = output.nbytes
        if arguments.workspace == "call":
            torch.empty(size, dtype=torch.uint8, device=output.device)
        elif kept.nbytes < size:
            kept = torch.empty(size, dtype=torch.uint8, device=output.device)

    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(hook)
    taken = [time_step(model, images, arguments.device) for _ in range(arguments.steps + 2)][2:]
    eager_bytes = torch.cuda.max_memory_reserved()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(images).square().mean().backward()
    replays = []
    for _ in range(arguments.steps):
        synchronize(arguments.device)
        start = time.perf_counter_ns()
        graph.replay()
        synchronize(arguments.device)
        replays.append(time.perf_counter_ns() - start)
    console.print(
        f"{os.environ['PYTORCH_ALLOC_CONF']}, a workspace per {arguments.workspace}: eager step "
        f"{format_ns(median_ns(taken))} ± {format_ns(spread_ns(taken))}, reserved "
        f"{eager_bytes >> 20} MiB; captured {format_ns(median_ns(replays))}, with its pool "
        f"{torch.cuda.max_memory_reserved() >> 20} MiB"
    )


if __name__ == "__main__":
    main()
