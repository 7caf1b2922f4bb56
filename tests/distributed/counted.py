"""Two ranks in a network of their own, whose bytes are counted: what a step sends by the kernel."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import sys
import tempfile
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ucudnn import distributed

STEPS = 5
_IS_UP = 0x8914, 0x1  # SIOCSIFFLAGS, IFF_UP


def sent_on_loopback() -> int:
    (line,) = (one for one in Path("/proc/net/dev").read_text().splitlines() if " lo:" in one)
    return int(line.split(":")[1].split()[8])


def train(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    replica = DistributedDataParallel(nn.Linear(2000, 500))
    compression = distributed.compress(replica, distributed.TopK(0.02))
    x = torch.ones(2, 2000)

    def step() -> None:
        replica(x).sum().backward()

    step()  # DDP arranges its buckets anew, and compares them
    step()
    dist.barrier()
    before = sent_on_loopback(), compression.sent_bytes
    dist.barrier()
    for _ in range(STEPS):
        step()
    dist.barrier()
    if rank == 0:
        kernel = sent_on_loopback() - before[0]
        ours = compression.sent_bytes - before[1]
        sys.stdout.write(json.dumps({"kernel": kernel, "ours": ours}))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _IS_UP[0], struct.pack("16sh", b"lo", _IS_UP[1]))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder:
        ranks = [get_context("fork").Process(target=train, args=(n, folder)) for n in range(2)]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join()
