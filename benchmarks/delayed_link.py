"""Run ranks of a job on one machine as if a slow link were between them.

    python benchmarks/delayed_link.py --ranks 2 --link 1ms,200Mbit/s -- python train.py

Each rank has a network namespace of its own, with one TUN device; a router in this process passes
the packets on. A rank sends at the rate of the link, and a packet arrives by the delay after it was
sent. It takes Linux and root. `--link loopback` starts the ranks without all that.
"""

from __future__ import annotations

import argparse
import fcntl
import heapq
import os
import selectors
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence

from ucudnn.distributed.exchange_advice import parse_link
from ucudnn.solvers import Link

# Of linux/if_tun.h: the request that names a device, and a device of IP packets without a header.
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
# Large packets: Python passes few of them on in time.
MTU, PORT = 65_000, 29_533
NETWORK, DEVICE = "10.77.0", "tun0"


def inside(channel: int, rank: int, command: Sequence[str]) -> None:
    """In a new network namespace: make the device, hand it to the router, become the command."""
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    for words in (
        "link set lo up",
        f"addr add {NETWORK}.{rank + 1}/24 dev {DEVICE}",
        f"link set {DEVICE} mtu {MTU} up",
    ):
        subprocess.run(["ip", *words.split()], check=True)
    with socket.socket(fileno=channel) as ours:
        socket.send_fds(ours, [b"."], [device])
    os.close(device)
    os.execvp(command[0], command)


def environment(rank: int, ranks: int, address: str, device: str) -> dict[str, str]:
    """What torch.distributed reads."""
    return os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": device,
        "OMP_NUM_THREADS": "1",
    }


def start(ranks: int, command: list[str]) -> tuple[list[subprocess.Popen[bytes]], list[int]]:
    """Processes of all ranks, and their devices."""
    jobs, devices = [], []
    for rank in range(ranks):
        ours, theirs = socket.socketpair()
        own = [sys.executable, __file__, "--inside", f"{theirs.fileno()},{rank}", "--"]
        jobs.append(
            subprocess.Popen(
                ["unshare", "--net", *own, *command],
                env=environment(rank, ranks, f"{NETWORK}.1", DEVICE),
                pass_fds=[theirs.fileno()],
            )
        )
        theirs.close()
        with ours:
            _, found, *_ = socket.recv_fds(ours, 1, 1)
        os.set_blocking(found[0], False)
        devices += found
    return jobs, devices


def route(devices: Sequence[int], link: Link, jobs: Sequence[subprocess.Popen[bytes]]) -> None:
    """Pass packets on until the jobs are over."""
    waiting: list[tuple[float, int, int, bytes]] = []
    free_ns, count = [0.0] * len(devices), 0
    with selectors.DefaultSelector() as selector:
        for sender, device in enumerate(devices):
            selector.register(device, selectors.EVENT_READ, sender)
        while any(job.poll() is None for job in jobs):
            now = time.perf_counter_ns()
            wait_s = (waiting[0][0] - now) / 1e9 if waiting else 0.1
            for key, _ in selector.select(max(0.0, min(wait_s, 0.1))):
                packet, now = os.read(key.fd, 1 << 16), time.perf_counter_ns()
                target = packet[19] - 1  # of an IPv4 address its last byte
                if packet[0] >> 4 != 4 or not 0 <= target < len(devices):
                    continue
                free_ns[key.data] = max(now, free_ns[key.data]) + len(packet) * link.per_byte_ns
                due = free_ns[key.data] + link.latency_ns
                count += 1  # of equal times the first goes first
                heapq.heappush(waiting, (due, count, target, packet))
            while waiting and waiting[0][0] <= time.perf_counter_ns():
                _, _, target, packet = heapq.heappop(waiting)
                try:
                    os.write(devices[target], packet)
                except OSError:  # the rank has gone
                    continue


def run(ranks: int, link: str, command: list[str]) -> int:
    """The largest exit status of the ranks."""
    if link == "loopback":
        places = (environment(rank, ranks, "127.0.0.1", "lo") for rank in range(ranks))
        jobs = [subprocess.Popen(command, env=place) for place in places]
    else:
        jobs, devices = start(ranks, command)
        route(devices, parse_link(link), jobs)
    return max(abs(job.wait()) for job in jobs)


def main() -> None:
    """Run the command in all ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--link", default="loopback", help="LATENCY,RATE of a message")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    command = arguments.command[1:]  # after "--"
    if arguments.inside:
        channel, rank = map(int, arguments.inside.split(","))
        inside(channel, rank, command)
    if arguments.link != "loopback" and os.geteuid():
        sys.exit("skipped: network namespaces take root")
    sys.exit(run(arguments.ranks, arguments.link, command))


if __name__ == "__main__":
    main()
