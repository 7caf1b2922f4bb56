"""Train ResNet-18 on random images in several ranks that tune together and follow one plan.

torchrun --standalone --nproc-per-node 2 examples/ddp_resnet.py
mpirun -np 2 python examples/ddp_resnet.py
ucudnn launch --ranks-per-gpu 2 -- examples/ddp_resnet.py --global-batch 16
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from models import resnet18
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import ucudnn
from ucudnn import distributed


def main() -> None:
    """Join the job, tune, convert, wrap, train: in this order."""
    arguments = parse_arguments()
    job = distributed.init()  # whoever started this rank; it also chooses the device
    batch = arguments.batch
    if arguments.global_batch:
        batch, rest = divmod(arguments.global_batch, job.size)
        if rest or not batch:
            raise SystemExit(f"--global-batch must be a multiple of the {job.size} ranks")
    shape = (batch, 3, arguments.image, arguments.image)

    torch.manual_seed(0)  # the same model everywhere
    model = resnet18().to(job.device)
    plan = make_plan(model, torch.randn(shape, device=job.device), arguments)
    conversion = ucudnn.convert_(model, plan)
    if job.rank == 0 and not job.is_trial:
        print(f"{job.size} ranks follow plan {plan.hash[:12]}: {conversion}")
        if arguments.save:
            plan.save(arguments.save)

    replica = DistributedDataParallel(model)
    distributed.reduce_by_device(replica)  # ranks that share a GPU first
    if arguments.frozen_norm:
        freeze_norm(model)
    train(replica, job, shape, arguments)
    dist.barrier()
    dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=8, help="samples of each rank")
    parser.add_argument("--global-batch", type=int, help="or of all ranks together")
    parser.add_argument("--image", type=int, default=64, help="height and width")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--frozen-norm", action="store_true", help="no statistics of the batch")
    parser.add_argument("--workspace-limit", help="of each rank; default: the environment's, 16MiB")
    parser.add_argument("--policy", default="powers-of-two")
    parser.add_argument("--plan", help="follow this file instead of tuning; all ranks read it")
    parser.add_argument("--save", help="where rank 0 writes the plan")
    return parser.parse_args()


def make_plan(model: nn.Module, images: Tensor, arguments: argparse.Namespace) -> ucudnn.Plan:
    if arguments.plan:
        return distributed.load(arguments.plan)
    # `ucudnn launch --device-workspace` gives each rank its limit in the environment.
    limit = arguments.workspace_limit or ucudnn.Config().workspace_limit or "16MiB"
    config = ucudnn.Config(workspace_limit=limit, policy=arguments.policy)
    return distributed.tune(model, images, config)


def freeze_norm(model: nn.Module) -> None:
    """With fixed statistics a sample's result does not depend on the others of its rank."""
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.eval()


def train(
    replica: DistributedDataParallel,
    job: distributed.Job,
    shape: tuple[int, ...],
    arguments: argparse.Namespace,
) -> None:
    optimizer = torch.optim.SGD(replica.parameters(), lr=arguments.lr, momentum=0.9)
    batch, generator = shape[0], torch.Generator().manual_seed(1)
    # All ranks draw the same batch, of which each computes its part.
    part = slice(job.rank * batch, (job.rank + 1) * batch)
    for step in range(arguments.steps):
        whole = torch.randn(batch * job.size, *shape[1:], generator=generator)
        classes = torch.randint(1000, (batch * job.size,), generator=generator)
        images, labels = whole[part].to(job.device), classes[part].to(job.device)
        optimizer.zero_grad()
        loss = cross_entropy(replica(images), labels)
        loss.backward()
        optimizer.step()
        distributed.count(batch)  # for `ucudnn launch --ranks-per-gpu auto`
        mean = loss.detach() / job.size
        dist.all_reduce(mean)
        if job.rank == 0:
            print(f"step {step}: loss {mean.item():.5f}")


if __name__ == "__main__":
    main()
