"""How long the solvers take at the sizes that matter, beside the bars that they are to stay under.

    python benchmarks/solvers.py            # about a minute
    python benchmarks/solvers.py --highs    # and what HiGHS takes for the same divisions

Times of algorithms are synthetic (solvers_instances.py). The numbers in brackets are those of the
released mu-cuDNN (its dynamic program compiled with -O2, and its GLPK model) on instances of the
same sizes; they were measured before and are only repeated here.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from solvers_instances import LAYER, MIB, Front, arbitrary_step, engines, network, step  # beside

import ucudnn
from ucudnn.solvers import Division, divide, reuse, segment


def timed(run: Callable[[], Any], repeats: int) -> tuple[Any, list[float]]:
    """The result of the last run, and what each took in ms."""
    taken, result = [], None
    for _ in range(repeats):
        start = time.perf_counter()
        result = run()
        taken.append((time.perf_counter() - start) * 1e3)
    return result, taken


def report(name: str, bar_ms: float, taken: list[float], notes: str) -> bool:
    """Print one line; True where the median is within the bar."""
    median = statistics.median(taken)
    within = median <= bar_ms
    spread = f"{min(taken):.1f} to {max(taken):.1f}"
    print(
        f"| {name} | {bar_ms:g} ms | {median:.1f} ms | {spread}, {len(taken)} runs | "
        f"{'yes' if within else 'NO'} | {notes} |"
    )
    return within


def reuse_bars() -> bool:
    """The dynamic program, one kernel, all limits and batches at once."""
    passed = True
    for policy, batch, bar_ms, released in (
        ("powers-of-two", 256, 3, "[11 ms]"),
        ("powers-of-two", 1024, 10, "[143 ms]"),
        ("all", 256, 30, "[0.55 s]"),
        ("all", 1024, 150, "[116 s]"),
        ("all", 4096, 2000, ""),
    ):
        items = engines(LAYER, policy, batch)
        table, taken = timed(lambda items=items, n=batch: reuse(items, n), 5 if batch > 256 else 15)
        used = len(set(table.history.last.tolist()))
        front = len(table.front(batch))
        notes = f"{len(items)} items, {used} accepted, front of {front} {released}"
        passed &= report(f"reuse, {policy}, N={batch}", bar_ms, taken, notes)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 // MIB
    print(f"\nPeak memory of this process after N=4096: {peak} MiB (bar 500 MiB).\n")
    return passed and peak < 500


def divide_bars(with_highs: bool) -> bool:
    """The integer program, whole networks, forward and backward."""
    passed = True
    for name, table, batch, bar_ms, released in (
        ("ResNet-50", "resnet50_n64.csv", 64, 30, "[GLPK 30 ms]"),
        ("ResNet-152", "resnet152_n1024.csv", 1024, 1000, "[GLPK unproven after 40 s]"),
    ):
        fronts = network(table, "all", batch)
        count = sum(map(len, fronts))
        for share in (1, 8, 64):
            total = share * MIB * len(fronts)
            found, taken = timed(lambda f=fronts, t=total: divide(f, t, "exact"), 5)
            notes = f"{len(fronts)} kernels, {count} choices, gap {found.gap_ns} ns {released}"
            if with_highs:
                notes += "; " + highs(fronts, total, found)
            passed &= report(f"divide, {name}, N={batch}, {share} MiB each", bar_ms, taken, notes)
    sharing(fronts)
    return passed


def segment_bars() -> bool:
    """Segments of whole steps, every limit at once."""
    passed = True
    for name, root, resolution in (
        ("300 modules in stages, exact", step(300), 1),
        ("300 modules in stages, 1 MiB", step(300), MIB),
        ("1000 modules in stages, 1 MiB", step(1000), MIB),
        ("300 arbitrary modules, 1 MiB", arbitrary_step(300), MIB),
    ):
        table, taken = timed(lambda r=root, b=resolution: segment(r, b), 5)
        notes = f"{len(table.options)} options, front of {len(table.front())}"
        passed &= report(f"segment, {name}", 1000, taken, notes)
    return passed


def sharing(fronts: list[Front]) -> None:
    """Print what one workspace for all kernels gives beside a part for every kernel."""
    print("\n| ResNet-152, N=1024 | memory | time |\n|---|---|---|")
    for each in (8, 64):
        total = each * MIB * len(fronts)
        own_ns = divide(fronts, total, "exact").time_ns
        shared_ns = sum(
            min(time_ns for workspace, time_ns in front if workspace <= each * MIB)
            for front in fronts
        )
        print(f"| shared | {each} MiB | {shared_ns / 1e6:.1f} ms |")
        print(f"| divided | {total // MIB} MiB | {own_ns / 1e6:.1f} ms |")


def highs(fronts: list[Front], total_bytes: int, exact: Division) -> str:
    """What HiGHS takes, and whether it agrees."""
    found, taken = timed(lambda: divide(fronts, total_bytes, "highs"), 1)
    agrees = "agrees" if found.time_ns == exact.time_ns else f"finds {found.time_ns} ns"
    return f"HiGHS {agrees} in {taken[0]:.0f} ms"


def machine() -> str:
    """The processor's name as the system gives it, and how many of it."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [
            line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        name = models[0].partition(":")[2].strip() if models else name
    return f"{name}, {os.cpu_count()} CPUs, {platform.system()}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--highs", action="store_true", help="time HiGHS on the same divisions")
    arguments = parser.parse_args()
    print(
        f"{machine()}; Python {platform.python_version()}, numpy {np.__version__}, "
        f"PuLP {version('pulp')}, HiGHS {version('highspy')}, ucudnn {ucudnn.__version__}; "
        f"medians, one process, other load not excluded.\n"
    )
    print("| instance | bar | measured | spread | within | size [released mu-cuDNN] |")
    print("|---|---|---|---|---|---|")
    passed = reuse_bars()
    print("| instance | bar | measured | spread | within | size |")
    print("|---|---|---|---|---|---|")
    passed &= segment_bars()
    print()
    print("| instance | bar | measured | spread | within | size [released mu-cuDNN] |")
    print("|---|---|---|---|---|---|")
    passed &= divide_bars(arguments.highs)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
