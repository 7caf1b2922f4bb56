"""A training script that any launcher starts: joins by `init`, trains, writes its weights down.

python started.py FOLDER [what]
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ucudnn import config, distributed


def main(folder: Path, what: str) -> None:
    """Train a small network in float64 on parts of one batch."""
    torch.set_num_threads(1)
    job = distributed.init(timeout_s=100)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if what == "die once" and attempt == "0":
        dist.barrier()  # all ranks have exchanged their addresses
        if job.rank == job.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(100, 5)]
    model = nn.Sequential(*layers).double()
    images, labels = torch.randn(8, 3, 9, 9, dtype=torch.float64), torch.randint(5, (8,))
    replica = DistributedDataParallel(model)
    if what == "by device":
        distributed.reduce_by_device(replica)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
    part = slice(job.rank * 8 // job.size, (job.rank + 1) * 8 // job.size)
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(replica(images[part]), labels[part]).backward()
        optimizer.step()
    weights = torch.cat([value.flatten() for value in model.state_dict().values()])
    said = {
        "rank": [job.rank, job.size, job.local_rank],
        "ranks per device": config.ranks_per_device(),
        "weights": hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
        "sum": weights.sum().item(),
        "cpus": sorted(os.sched_getaffinity(0)),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "attempt": attempt,
    }
    (folder / f"{job.rank}.json").write_text(json.dumps(said))
    dist.barrier()  # rank 0, which may hold the store, ends last
    # Threads of gloo that still hold Python objects may abort a normal exit (pytorch#179291).
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")
