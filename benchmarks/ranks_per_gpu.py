"""Does it pay to put several ranks on one GPU, or on one processor? Samples per second of 1, 2, 4.

    python benchmarks/ranks_per_gpu.py results.json --network small --global-batch 256
    python benchmarks/ranks_per_gpu.py results.json --rounds 7 -- --workspace-limit 64MiB

Trains a network with a fixed global batch by `ucudnn launch` with 1, 2 and 4 ranks per device, on
a GPU with MPS and without (ranks then take turns), all in turn and in several rounds. Prints the
median and the range, the ratio to one rank in the same round, how busy the GPU was and how much of
its memory was used (both by NVML). Then lets `--ranks-per-gpu auto` choose, and says whether it
chose the best of those measured. What follows `--` goes to benchmarks/ranks_training.py.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import pynvml
from rich.console import Console
from rich.table import Table

import ucudnn
from ucudnn.distributed.counting import CANDIDATES, TrialTimes, find_ranks, measure_ranks
from ucudnn.distributed.launching import Launch, list_gpus

TRAINING = Path(__file__).with_name("ranks_training.py")


@dataclass
class Way:
    """One way to run: a number of ranks per device, with MPS or without.

    Args:
        mps: "require" or "off".
        ranks: per device.
        rates: samples per second, a trial each; None where it failed.
        busy: percent of the time in which a kernel ran on the GPU, a trial each.
        gib: of the GPU's memory in use, the most of each trial.
    """

    mps: str
    ranks: int
    rates: list[float | None] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    gib: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The number, and how its ranks share the device."""
        return f"{self.ranks}{' by MPS' if self.mps == 'require' else ''}"


class GpuWatch:
    """Samples of the first GPU's use while a trial runs."""

    def __init__(self, gpus: tuple[str, ...]) -> None:
        self.busy: list[float] = []
        self.gib: list[float] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=gpus[:1], daemon=True)
        self._gpus = gpus

    def __enter__(self) -> GpuWatch:
        if self._gpus:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._gpus:
            self._thread.join()

    def _watch(self, gpu: str) -> None:
        pynvml.nvmlInit()
        board = pynvml.nvmlDeviceGetHandleByUUID(gpu)
        while not self._ended.wait(0.5):
            self.busy.append(pynvml.nvmlDeviceGetUtilizationRates(board).gpu)
            self.gib.append(pynvml.nvmlDeviceGetMemoryInfo(board).used / 2**30)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("output", type=Path, help="JSON file, written after each trial")
    parser.add_argument("--network", default="small")
    parser.add_argument("--global-batch", type=int, default=64)
    parser.add_argument("--image", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0, help="in which a trial counts")
    parser.add_argument("--warmup", type=float, default=3.0)
    parser.add_argument("--no-auto", action="store_true", help="leave out --ranks-per-gpu auto")
    parser.add_argument("more", nargs="*", help="further options of ranks_training.py, after --")
    arguments = parser.parse_args()

    # One rank alone must have all cores, whatever the shell says.
    os.environ.pop("OMP_NUM_THREADS", None)
    gpus = list_gpus()
    times = TrialTimes(warmup_s=arguments.warmup, measure_s=arguments.seconds)
    script = [str(TRAINING), f"--network={arguments.network}", f"--image={arguments.image}"]
    script += [f"--global-batch={arguments.global_batch}", *arguments.more]
    ways = [Way("off", ranks) for ranks in CANDIDATES]
    if gpus:
        ways += [Way("require", ranks) for ranks in CANDIDATES if ranks > 1]
    console = Console(stderr=True)
    facts = describe(gpus, arguments)
    for number in range(arguments.rounds):
        # Forwards and backwards in turn, so that a drift of the machine favours none.
        for way in ways if number % 2 == 0 else reversed(ways):
            measure(way, script, gpus, times)
            console.print(f"round {number + 1}: {way.name} rank(s): {way.rates[-1]} samples/s")
            arguments.output.write_text(
                json.dumps({**facts, "ways": [asdict(one) for one in ways]}, indent=1)
            )
    Console().print(table(ways, arguments))
    if not arguments.no_auto:
        compare_with_auto(script, gpus, times, ways, arguments)


def measure(way: Way, script: list[str], gpus: tuple[str, ...], times: TrialTimes) -> None:
    settings = Launch(mps=way.mps, gpus=gpus)
    with GpuWatch(gpus) as watch:
        way.rates.append(measure_ranks(script, settings, way.ranks, times))
    # The last samples are of training; the first are of its start.
    late = slice(len(watch.busy) // 2, None)
    way.busy += [median(watch.busy[late])] if watch.busy else []
    way.gib += [max(watch.gib)] if watch.gib else []


def describe(gpus: tuple[str, ...], arguments: argparse.Namespace) -> dict[str, object]:
    backend = ucudnn.backends.open_backend()
    return {
        "device": str(backend.device()),
        "gpus": len(gpus),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "software": asdict(backend.software()),
        "load": os.getloadavg()[0],
        "arguments": {n: str(v) for n, v in vars(arguments).items() if n != "output"},
    }


def table(ways: list[Way], arguments: argparse.Namespace) -> Table:
    drawn = Table(title=f"{arguments.network}, global batch {arguments.global_batch}")
    for column in ("ranks", "samples/s", "range", "to 1 rank, median (range)", "busy", "memory"):
        drawn.add_column(column)
    first = ways[0].rates
    for way in ways:
        rates = [rate for rate in way.rates if rate is not None]
        if not rates:
            drawn.add_row(way.name, "failed")
            continue
        # Each against the trial of one rank in the same round.
        ratios = [a / b for a, b in zip(way.rates, first, strict=True) if a and b]
        drawn.add_row(
            way.name,
            f"{median(rates):.4g}",
            f"{min(rates):.4g} to {max(rates):.4g}",
            f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "",
            f"{median(way.busy):.0f} %" if way.busy else "",
            f"{max(way.gib):.1f} GiB" if way.gib else "",
        )
    return drawn


def compare_with_auto(
    script: list[str],
    gpus: tuple[str, ...],
    times: TrialTimes,
    ways: list[Way],
    arguments: argparse.Namespace,
) -> None:
    found = find_ranks(script, Launch(gpus=gpus), times, rounds=3)
    # On a GPU auto uses MPS wherever it can be had.
    compared = [way for way in ways if not gpus or way.ranks == 1 or way.mps == "require"]
    middle = {
        way.ranks: median(rate for rate in way.rates if rate is not None)
        for way in compared
        if any(way.rates)
    }
    best = max(middle, key=lambda ranks: middle[ranks])
    print(
        f"auto chose {found} rank(s) per device; the best of those measured is {best}, by which "
        f"{found} is {middle[found] / middle[best]:.3f} as fast"
    )
    document = json.loads(arguments.output.read_text())
    arguments.output.write_text(json.dumps({**document, "auto": found, "best": best}, indent=1))


if __name__ == "__main__":
    main()
