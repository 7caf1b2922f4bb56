"""Training of a small network for benchmarks/ranks_per_gpu.py; `ucudnn launch` starts its ranks.

The global batch is the same with any number of ranks. Each rank draws its images once: what is
compared is training, not loading of data.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import ucudnn
from ucudnn import distributed

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from models import resnet18, resnet50


def small(classes: int = 10) -> nn.Sequential:
    """A network for images of 32x32: many short kernels, between which a GPU waits for the host."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (32, 32, 64, 64, 128, 128):
        layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)]
        layers += [nn.ReLU(inplace=True)]
        if width == channels:
            layers.append(nn.MaxPool2d(2))
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, classes))


NETWORKS = {"small": small, "resnet18": resnet18, "resnet50": resnet50}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", choices=NETWORKS, default="small")
    parser.add_argument("--global-batch", type=int, default=64)
    parser.add_argument("--image", type=int, default=32)
    parser.add_argument("--steps", type=int, default=1_000_000, help="until it is stopped")
    parser.add_argument("--workspace-limit", help="tune with this limit; default: torch's layers")
    arguments = parser.parse_args()

    job = distributed.init()
    batch, rest = divmod(arguments.global_batch, job.size)
    if rest or not batch:
        raise SystemExit(f"--global-batch must be a multiple of the {job.size} ranks")
    torch.manual_seed(0)
    model = NETWORKS[arguments.network](10).to(job.device)
    images = torch.randn(batch, 3, arguments.image, arguments.image, device=job.device)
    labels = torch.randint(10, (batch,), device=job.device)
    if arguments.workspace_limit:
        config = ucudnn.Config(workspace_limit=arguments.workspace_limit)
        ucudnn.convert_(model, distributed.tune(model, images, config))
    replica = DistributedDataParallel(model)
    distributed.reduce_by_device(replica)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.01, momentum=0.9)
    for _ in range(arguments.steps):
        optimizer.zero_grad()
        cross_entropy(replica(images), labels).backward()
        optimizer.step()
        if job.device.type == "cuda":
            torch.cuda.synchronize()  # or steps that only wait in the queue would count
        distributed.count(batch)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
