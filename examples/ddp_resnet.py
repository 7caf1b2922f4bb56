"""Train ResNet-18 on random images in several ranks that tune together and follow one plan.

torchrun --standalone --nproc-per-node 2 examples/ddp_resnet.py
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from models import resnet18
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import ucudnn
from ucudnn import distributed


def main() -> None:
    """Join the job, tune, convert, wrap, train: in this order."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=8, help="samples of each rank")
    parser.add_argument("--image", type=int, default=64, help="height and width")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--workspace-limit", default="16MiB")
    parser.add_argument("--policy", default="powers-of-two")
    parser.add_argument("--plan", help="follow this file instead of tuning; all ranks read it")
    parser.add_argument("--save", help="where rank 0 writes the plan")
    arguments = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)  # the same model everywhere
    model = resnet18().to(device)
    images = torch.randn(arguments.batch, 3, arguments.image, arguments.image, device=device)

    if arguments.plan:
        plan = distributed.load(arguments.plan)
    else:
        config = ucudnn.Config(workspace_limit=arguments.workspace_limit, policy=arguments.policy)
        plan = distributed.tune(model, images, config)
    conversion = ucudnn.convert_(model, plan)
    if rank == 0:
        print(f"{ranks} ranks follow plan {plan.hash[:12]}: {conversion}")
        if arguments.save:
            plan.save(arguments.save)

    replica = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator(device).manual_seed(rank)  # other images everywhere
    for step in range(arguments.steps):
        images.normal_(generator=generator)
        labels = torch.randint(1000, (arguments.batch,), generator=generator, device=device)
        optimizer.zero_grad()
        loss = cross_entropy(replica(images), labels)
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
