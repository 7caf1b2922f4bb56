"""Do micro-batches in backward delay the gradient buckets? When each is ready, before and after.

torchrun --standalone --nproc-per-node 2 benchmarks/ddp_overlap.py

DistributedDataParallel sends a bucket of gradients as soon as its last one is there, while backward
goes on with earlier layers. A planned layer returns its weight gradient when all micro-batches are
summed up, so a bucket is late by what the plan costs more, and early by what it saves. Steps of
both models alternate; times are from the beginning of backward, of the slowest rank.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import ucudnn
from ucudnn import distributed
from ucudnn.benchmark.statistics import median_ns, ratio_interval, spread_ns
from ucudnn.distributed.exchange_times import Moment
from ucudnn.units import format_ns

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from models import resnet18


class Watch:
    """A model in DistributedDataParallel that notes when its buckets become ready."""

    def __init__(self, model: nn.Module, bucket_mib: float) -> None:
        self.model = DistributedDataParallel(model, bucket_cap_mb=bucket_mib)
        self._device_type = next(model.parameters()).device.type
        self._moments: list[Moment] = []

        # DDP asks for the name `bucket`, and for no annotations where they are kept as text
        def hook(state, bucket):  # noqa: ARG001 - as DDP calls it
            self._moments.append(Moment(self._device_type))
            # sent as DDP would, while backward goes on
            work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
            return work.get_future().then(lambda done: done.value()[0])

        self.model.register_comm_hook(None, hook)

    def step(self, images: Tensor, labels: Tensor) -> list[int]:
        """Times in ns from the start of backward to each bucket, and to the end."""
        self.model.zero_grad()
        loss = cross_entropy(self.model(images), labels)
        dist.barrier()
        self._moments.clear()
        start = Moment(self._device_type)
        loss.backward()
        self._moments.append(Moment(self._device_type))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return [moment.since_ns(start) for moment in self._moments]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=16, help="samples of each rank")
    parser.add_argument("--image", type=int, default=112, help="height and width")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--bucket-mib", type=float, default=4)
    parser.add_argument("--workspace-limit", default="8MiB")
    arguments = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    torch.manual_seed(0)
    model = resnet18().to(device)
    images = torch.randn(arguments.batch, 3, arguments.image, arguments.image, device=device)
    labels = torch.randint(1000, (arguments.batch,), device=device)
    config = ucudnn.Config(workspace_limit=arguments.workspace_limit)
    plan = distributed.tune(model, images, config)
    planned = copy.deepcopy(model)
    conversion = ucudnn.convert_(planned, plan)

    watches = [Watch(one, arguments.bucket_mib) for one in (model, planned)]
    for watch in watches:  # DDP arranges its buckets anew after the first step
        for _ in range(3):
            watch.step(images, labels)
    rows: list[list[list[int]]] = [[], []]
    for _ in range(arguments.rounds):
        for taken, watch in zip(rows, watches, strict=True):
            times = torch.tensor(watch.step(images, labels), device=device)
            dist.all_reduce(times, dist.ReduceOp.MAX)
            taken.append(times.tolist())
    if dist.get_rank() == 0:
        report(plan, conversion, rows, arguments.rounds)
    dist.barrier()
    sys.stdout.flush()
    # a normal exit may abort while threads of gloo still hold the hooks' futures (pytorch#179291)
    os._exit(0)


def report(plan: ucudnn.Plan, conversion: object, rows: list[list[list[int]]], rounds: int) -> None:
    console = Console(width=110, highlight=False)
    console.print(
        f"ResNet-18 on {dist.get_world_size()} ranks of {plan.device}, torch "
        f"{plan.software.torch}, {torch.get_num_threads()} threads each.\n{conversion}."
    )
    table = Table(title=f"Time from the start of backward, {rounds} rounds, median ± quartiles")
    for name in ("bucket", "torch", "planned", "planned / torch (95 % interval)"):
        table.add_column(name, justify="left" if name == "bucket" else "right")
    columns = zip(*(zip(*taken, strict=True) for taken in rows), strict=True)
    for number, (before, after) in enumerate(columns, start=1):
        name = "end of backward" if number == len(rows[0][0]) else str(number)
        ratio, low, high = ratio_interval(after, before)
        cells = [
            f"{format_ns(median_ns(taken))} ± {format_ns(spread_ns(taken))}"
            for taken in (before, after)
        ]
        table.add_row(name, *cells, f"{ratio:.2f} ({low:.2f} to {high:.2f})")
    console.print(table)


if __name__ == "__main__":
    main()
