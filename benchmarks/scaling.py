"""How far does data-parallel training scale? Predicted to 100,000 ranks, measured where ranks are.

torchrun --nproc-per-node 2 benchmarks/scaling.py --measure points-2.json
python benchmarks/scaling.py --link 30us,1.25GB/s points-2.json --picture scaling.html

Strong scaling divides one batch among the ranks, weak scaling gives each rank that batch. Formulas
replace the all-reduce of DistributedDataParallel, whose buckets and overlap stay. Each step waits
for the slowest of all ranks: computing is lognormal, with the coefficient of variation of --jitter.
Only the steps of --measure are measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from math import ceil, exp, log, log2, sqrt
from pathlib import Path
from statistics import NormalDist
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from ucudnn import distributed
from ucudnn.distributed.codecs import Codec, OneBit, TopK
from ucudnn.distributed.exchange_advice import DEFAULT_CAPS, Coded, Profile, capped, parse_link
from ucudnn.solvers import Link, collectives
from ucudnn.units import format_ns

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from models import resnet18

RANKS = [2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096, 16384, 100_000]
PER_NODE, PERIOD = 8, 8
DENSITIES = [0.1, 0.01, 0.001]


def tree(ranks: int, size_bytes: float, link: Link) -> float:
    """All-reduce up and down a binomial tree, with all bytes in each message."""
    return 2 * ceil(log2(ranks)) * link.message_ns(size_bytes)


def halving(ranks: int, size_bytes: float, link: Link) -> float:
    """All-reduce by recursive halving and doubling; exact for powers of two.

    The formula is from Thakur, Rabenseifner, Gropp, IJHPCA 2005.
    """
    bytes_sent = 2 * size_bytes * (ranks - 1) / ranks
    return 2 * ceil(log2(ranks)) * link.latency_ns + link.per_byte_ns * bytes_sent


def two_level(
    ranks: int, size_bytes: float, link: Link, per_node: int = 1, inside: Link | None = None
) -> float:
    """All-reduce in two levels: a tree within each node, and a ring of one rank per node.

    Args:
        ranks: number of ranks in all nodes.
        size_bytes: bytes of each rank that are added up.
        link: link between nodes.
        per_node: number of ranks in a node.
        inside: link between ranks of a node; None: the same link as between nodes.
    """
    nodes = ceil(ranks / per_node)
    return collectives.ring(nodes, size_bytes, link) + tree(per_node, size_bytes, inside or link)


def server(ranks: int, size_bytes: float, link: Link, shards: int = 1) -> float:
    """Parameter server: all ranks send gradients to each shard, and get parameters back.

    A shard receives one message after the other. Ranks begin with different shards, so that all
    shards are busy.

    Args:
        ranks: number of ranks, without the servers.
        size_bytes: bytes of all gradients of a rank.
        link: link between a rank and a server.
        shards: number of servers, each with a part of the parameters; at most as many as ranks.
    """
    return 2 * ranks * link.message_ns(size_bytes / shards)


COLLECTIVES: dict[str, collectives.Collective] = {
    "ring": collectives.ring,
    "tree": tree,
    "halving": halving,
    f"two levels of {PER_NODE}": lambda ranks, size, link: two_level(
        ranks, size, link, min(ranks, PER_NODE)
    ),
    "server": server,
    "server, a shard per rank": lambda ranks, size, link: server(ranks, size, link, ranks),
}
CODECS: dict[str, Codec] = {"top-k, 1 %": TopK(0.01), "one bit": OneBit()}


def slowest(ranks: int, jitter: float) -> float:
    """Expected time of the slowest rank over that of a median one (Blom's quantile)."""
    quantile = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0
    return exp(sqrt(log(1 + jitter**2)) * quantile)


def predict(
    profile: Profile, link: Link, ranks: int, is_strong: bool, jitter: float
) -> dict[str, int]:
    """Time of a step in ns for each way to exchange gradients, among some ranks.

    Args:
        profile: of a step of one rank with the whole batch.
        link: between ranks.
        ranks: of the job.
        is_strong: the batch is divided among them.
        jitter: coefficient of variation of computing.
    """
    timed_in, factor = profile.ranks, (ranks if is_strong else 1) / slowest(ranks, jitter)
    profile = profile.faster(factor)
    counts, total = capped(profile.sizes, DEFAULT_CAPS), profile.total_bytes
    found = {"no exchange": profile.compute_ns}
    for name, collective in COLLECTIVES.items():
        reduce = collectives.line(collective, ranks, link)
        found[name] = replace(profile, reduce=reduce).step_ns(counts)
    gather = collectives.line(collectives.gather, ranks, link)
    for name, codec in CODECS.items():
        ratio = codec.size_bytes(total // 4) / total
        coded = Coded(name, "", 3, ratio, 0, 0)
        known = next((one for one in profile.coded if one.name == name), coded)
        # Every rank decodes the messages of all.
        if ranks * ratio >= 2:  # `compress` adds whole gradients up from there on
            found[name] = found["ring"]
            continue
        known = replace(known, ratio=ratio, decode_ns=ranks * known.decode_ns // timed_in)
        found[name] = replace(profile, gather=gather).step_ns(counts, known)
    average_ns = collectives.ring(ranks, total, link) / PERIOD
    found[f"average every {PERIOD} steps"] = profile.compute_ns + round(average_ns)
    return found


def crossing(density: float, count: int, link: Link) -> int:
    """Ranks from which on gathering the largest numbers takes no less than a ring."""
    codec = TopK(density)
    for ranks in range(2, 100_000):
        sparse = collectives.gather(ranks, codec.size_bytes(count), link)
        if sparse >= collectives.ring(ranks, 4 * count, link):
            return ranks
    return 100_000


def measure(path: str, batch: int, image: int) -> None:
    """Write what `distributed.advise` finds in these ranks."""
    torch.manual_seed(0)
    job = distributed.init()
    images = torch.randn(batch, 3, image, image, device=job.device)
    advice = distributed.advise(resnet18().to(job.device), images)
    if job.rank == 0:
        Path(path).write_text(json.dumps(advice.to_dict(), indent=1) + "\n")
        Console(highlight=False).print(str(advice))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def read(document: dict[str, Any]) -> Profile:
    """The profile of an advice."""
    return msgspec.convert(document["profile"], Profile)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("points", nargs="*", help="files that --measure wrote")
    parser.add_argument("--measure", help="in ranks: measure, and write this file")
    parser.add_argument("--link", default="30us,1.25GB/s", help="latency and rate")
    parser.add_argument("--jitter", type=float, default=0.05)
    parser.add_argument("--plan", type=float, default=1.2, help="what a plan makes computing")
    parser.add_argument("--picture", help="file of a page with the curves; needs plotly")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--image", type=int, default=64)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.measure, arguments.batch, arguments.image)
    documents = [json.loads(Path(name).read_text()) for name in arguments.points]
    if documents:
        profile = read(documents[0])
    else:
        images = torch.randn(arguments.batch, 3, arguments.image, arguments.image)
        profile = distributed.advise(resnet18(), images, ranks=2, link=arguments.link).profile
    link = parse_link(arguments.link)
    console = Console(width=150, highlight=False)
    for is_strong in (False, True):
        title = "Strong scaling, speed-up" if is_strong else "Weak scaling, time of a step"
        rows = {p: predict(profile, link, p, is_strong, arguments.jitter) for p in RANKS}
        faster = profile.faster(arguments.plan)
        planned = {p: predict(faster, link, p, is_strong, arguments.jitter) for p in RANKS}
        table = Table(title=f"{title}, predicted for {arguments.link}, ResNet-18")
        for name in ("ranks", *rows[2], f"ring, plan {arguments.plan:g}x"):
            table.add_column(name, justify="right")
        alone = profile.compute_ns
        for ranks, times in rows.items():
            each = [*times.values(), planned[ranks]["ring"]]
            cells = [f"{alone / one:.1f}" if is_strong else format_ns(one) for one in each]
            table.add_row(f"{ranks:,}", *cells)
        console.print(table)
        if arguments.picture and not is_strong:
            draw(arguments.picture, rows, documents)
    for density in DENSITIES:
        ranks = crossing(density, profile.total_bytes // 4, link)
        console.print(f"top-k of {density:.1%} takes no less than a ring from {ranks:,} ranks on.")
    for document in documents:
        own = document["ways"][0]
        console.print(
            f"{document['profile']['ranks']} ranks, measured on their own link: a step takes "
            f"{format_ns(own['measured_ns'])}, predicted {format_ns(own['predicted_ns'])}."
        )


def draw(path: str, rows: dict[int, dict[str, int]], documents: list[dict[str, Any]]) -> None:
    """Predicted steps as dashed lines, measured ones as points."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for name in rows[2]:
        times = [one[name] / 1e9 for one in rows.values()]
        dashed = {"dash": "dash"}
        figure.add_scatter(x=list(rows), y=times, name=f"{name}, predicted", line=dashed)
    figure.add_scatter(
        x=[one["profile"]["ranks"] for one in documents],
        y=[one["ways"][0]["measured_ns"] / 1e9 for one in documents],
        name="measured, on the link that was there",
        mode="markers",
        marker={"size": 12},
    )
    axes = [{"type": "log", "title": title} for title in ("ranks", "s per step")]
    figure.update_layout(title="Weak scaling", xaxis=axes[0], yaxis=axes[1])
    figure.write_html(path, include_plotlyjs=True)


if __name__ == "__main__":
    main()
