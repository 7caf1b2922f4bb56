"""Write the tables of docs/results.md and docs/memory.md anew from the results of benchmarks.

    python docs/make_tables.py docs/results.md
    python docs/make_tables.py docs/memory.md

A table stands between the lines `<!-- table NAME -->` and `<!-- end of table -->`. Reads
benchmarks/results/intel-xeon; what stands elsewhere in the page stays, and so does a table of which
there is no file.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from make_steps import NAME_BY_NETWORK

from ucudnn.races import StepMemory
from ucudnn.steps.result import StepBench
from ucudnn.units import format_bytes

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "intel-xeon"
NAMES = {
    **NAME_BY_NETWORK,
    "resnet18": "ResNet-18, N=32",
    "vgg11": "VGG-11, N=8",
    "efficientnet": "EfficientNet-B0, N=8",
}
TABLE = re.compile(r"(?<=<!-- table (\w{4}) -->\n\n).*?(?=\n\n<!-- end of table -->)", re.DOTALL)
Row = list[str]


def ratio(values: Iterable[float]) -> str:
    """A median with its interval."""
    middle, low, high = values
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def tuned() -> list[Row]:
    """Training steps by plan, from tuning_time.json; the largest gain first."""
    heading = [
        "network",
        "torch's step",
        "tuned in",
        "kernels changed",
        "torch's step over the plan's (95 %)",
        "the faster layout of torch over the plan's",
        "peak memory of tuning over a step's",
    ]
    found = json.loads((RESULTS / "tuning_time.json").read_text())
    found.sort(key=lambda one: -one["speed_up"][0])
    return [heading, *map(tuned_row, found)]


def tuned_row(one: dict[str, Any]) -> Row:
    """A network of tuning_time.json."""
    limit = f", within {one['limit'].replace('MiB', ' MiB')}" if one["limit"] else ""
    samples = sorted(one["samples_ns"]["torch"])
    return [
        NAMES[one["network"]] + limit,
        f"{samples[len(samples) // 2] / 1e6:.0f} ms",
        f"{one['seconds']:.0f} s",
        f"{one['changed']} of {one['kernels']}",
        ratio(one["speed_up"]),
        ratio(one["speed_up_over_fastest"]),
        f"{one['peak_of_tuning_bytes'] / one['peak_of_steps_bytes']:.2f}",
    ]


def stepped(mode: str) -> list[Row]:
    """Steps by all ways, from whole_steps.json; the largest gain first."""
    found = [
        (one, StepBench.from_dict(one["bench"]))
        for one in json.loads((RESULTS / "whole_steps.json").read_text())
        if one["mode"] == mode
    ]
    found.sort(key=lambda pair: (pair[1].ratio() or (1.0,))[0])
    names = [timed.way.name for timed in found[0][1].ways]
    heading = ["network", *names, "fastest without over fastest with a plan (95 %)", "peak"]
    return [heading, *(stepped_row(one, bench) for one, bench in found)]


def stepped_row(one: dict[str, Any], bench: StepBench) -> Row:
    """A network of whole_steps.json."""
    times = [f"{way.time_ns / 1e6:.0f} ms" if way.samples_ns else "-" for way in bench.ways]
    middle, low, high = bench.ratio() or (1.0, 1.0, 1.0)
    own, planned = bench.fastest(is_planned=False), bench.fastest(is_planned=True)
    assert own is not None
    assert planned is not None
    peaks = f"{format_bytes(own.peak_bytes)}, {format_bytes(planned.peak_bytes)}"
    return [NAMES[one["network"]], *times, ratio((1 / middle, 1 / high, 1 / low)), peaks]


# Cases of benchmarks/memory_budget.py, in the order of the table.
BUDGETED = {
    "resnet18": "ResNet-18, N=64, 224x224",
    "unet3d": "3-D U-Net, N=1, 64x64x64",
    "srcnn": "SRCNN (9-5-5), N=4, 512x512",
}


def budgeted() -> list[Row]:
    """Workspace in the peak of a step, from all files memory_budget*.json; none without any."""
    found: dict[str, StepMemory] = {}
    for file in sorted(RESULTS.glob("memory_budget*.json")):
        for one in json.loads(file.read_text()):
            # The first row is of torch without a plan.
            found[one["case"]] = StepMemory.from_dict(one["rows"][1]["memory"])
    if not found:
        return []
    rows = [["network", "step", "without workspace", "by torch's own", "workspace"]]
    for network, name in BUDGETED.items():
        kinds = [kind for kind in ("training", "inference") if f"{network}-{kind}" in found]
        for kind in kinds:
            memory = found[f"{network}-{kind}"]
            sizes = format_bytes(memory.own_peak_bytes), format_bytes(memory.torch_peak_bytes)
            share = f"{round(100 * memory.workspace_share)} %"
            rows.append([name if kind == kinds[0] else "", kind, *sizes, share])
    return rows


TABLES: dict[str, Callable[[], list[Row]]] = {
    "plan": tuned,
    "step": lambda: stepped("training"),
    "pass": lambda: stepped("inference"),
    "pays": budgeted,
}


def rewritten(page: str) -> str:
    """The page with its tables made anew."""

    def table(match: re.Match[str]) -> str:
        made = TABLES[match.group(1)]()
        if not made:
            return match.group()
        heading, *rows = made
        lines = [heading, ["---"] * len(heading), *rows]
        return "\n".join(f"| {' | '.join(cells)} |".replace("| --- ", "|---") for cells in lines)

    return TABLE.sub(table, page)


def main(path: str) -> None:
    """Write the tables of a page anew."""
    page = Path(path)
    page.write_text(rewritten(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
