"""DistributedDataParallel, started by torchrun."""

import torch
import torch.distributed as dist
from meter import STEPS, Meter, data, network
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
model, meter = DistributedDataParallel(network()), Meter()
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
