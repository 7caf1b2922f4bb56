"""FSDP2, started by torchrun; its blocks are sharded, too."""

import torch
import torch.distributed as dist
from meter import STEPS, Meter, data, network
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

dist.init_process_group("gloo")
rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
layers = list(network())
model, meter = nn.Sequential(nn.Sequential(*layers[:3]), *layers[3:]), Meter()
fully_shard(model[0], mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
images, labels = data(rank)
for _ in range(STEPS):
    meter.step()
    optimizer.zero_grad()
    loss = cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    if rank == 0:
        print("loss", loss.item())
if rank == 0:
    meter.end()
dist.barrier()
dist.destroy_process_group()
