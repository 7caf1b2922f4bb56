"""Train ResNet-18 with its parameters sharded over the ranks (FSDP2), by one plan.

torchrun --standalone --nproc-per-node 2 examples/fsdp2.py
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from models import Residual, resnet18
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import ucudnn
from ucudnn import distributed


def main() -> None:
    """Convert first: `fully_shard` changes the classes that `convert_` looks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=8, help="samples of each rank")
    parser.add_argument("--image", type=int, default=64, help="height and width")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--workspace-limit", default="16MiB")
    parser.add_argument("--policy", default="powers-of-two")
    arguments = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = resnet18().to(device)
    images = torch.randn(arguments.batch, 3, arguments.image, arguments.image, device=device)
    config = ucudnn.Config(workspace_limit=arguments.workspace_limit, policy=arguments.policy)
    conversion = ucudnn.convert_(model, distributed.tune(model, images, config))
    if rank == 0:
        print(f"{ranks} ranks: {conversion}")

    mesh = init_device_mesh(device.type, (ranks,))
    for module in model.modules():
        if isinstance(module, Residual):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(arguments.steps):
        labels = torch.randint(1000, (arguments.batch,), device=device)
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
