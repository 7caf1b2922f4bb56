"""What was measured on a GPU, as tables: prints them from the files of one results folder.

    python benchmarks/gpu_tables.py benchmarks/results/h200 > tables.md

Reads what gpu_suite.py left there: splits.csv (per layer and workspace limit the best undivided
kernel, torch's two defaults and the best micro-batches as a loop), timings.csv (every engine
configuration at every micro-batch size) and answers.json (versions, what was skipped). Then come
training steps and demonstrations with what they conclude (training_steps.py, demo_*.py,
l2_hypothesis.py). A loop is the time of one call, all its chunks, measured eagerly unless a table
says captured. A gain is the baseline's time over the loop's; "gains" and "loses" are layers beyond
--least-gain.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

from step_workers import load as load_steps
from step_workers import report as step_report

LEAST_GAIN = 0.02  # the least that a plan leaves torch's own call for
CHUNK_CLASSES = ((1, 1), (2, 4), (5, 16), (17, 64), (65, 1 << 30))
HEADINGS = {
    "undivided": "(a) best undivided kernel within the same limit",
    "default": "(b) torch's default, whatever workspace it takes",
    "benchmark": "(c) cudnn.benchmark, whatever workspace it takes",
}
_BASELINE_COLUMNS = {
    "undivided": "undivided_us",
    "default": "torch_default_us",
    "benchmark": "torch_benchmark_us",
}
_PROBLEM_COLUMNS = ("name", "op", "dtype", "layout", "batch")
SPLIT_COLUMNS = (
    *(*_PROBLEM_COLUMNS, "limit_mib", "micro_batch", "workspace_mib", "predicted_us", "eager_us"),
    *("captured_us", "host_us_per_chunk", *_BASELINE_COLUMNS.values(), "torch_benchmark_extra_mib"),
)
TIMING_COLUMNS = (*_PROBLEM_COLUMNS, "workspace_bytes", "median_us", "error", "beta1_error")


@dataclass(frozen=True)
class Loop:
    """The best micro-batches of one problem within one limit, beside its three baselines.

    Args:
        problem: (name, op, dtype, layout, batch).
        limit_mib: workspace limit.
        micro_batch: samples per chunk; `batch` where undivided is best.
        workspace_mib: what the chunks need.
        predicted_us: number of chunks times the time of one.
        eager_us: the loop, measured.
        captured_us: the loop replayed from a CUDA graph; None where capture failed.
        host_us: host time per chunk.
        baselines_us: by name; without "undivided" where nothing undivided fits.
        extra_mib: memory that cudnn.benchmark's choice takes beyond the result.
    """

    problem: tuple[str, str, str, str, int]
    limit_mib: int
    micro_batch: int
    workspace_mib: float
    predicted_us: float
    eager_us: float
    captured_us: float | None
    host_us: float
    baselines_us: dict[str, float]
    extra_mib: float

    @property
    def chunks(self) -> int:
        """Calls of the kernel."""
        return -(-self.problem[4] // self.micro_batch)

    def gain(self, baseline: str) -> float | None:
        """The baseline's time over the loop's; None where there is no baseline."""
        time = self.baselines_us.get(baseline)
        return None if time is None else time / self.eager_us


def read_rows(path: Path, needed: Sequence[str]) -> list[dict[str, str]]:
    """Rows of a CSV file that has these columns; ends the program with a sentence where not."""
    if not path.is_file():
        sys.exit(f"{path} is not there, and splits.csv needs it beside it")
    with path.open(newline="") as stream:
        reader = csv.DictReader(stream)
        missing = [name for name in needed if name not in (reader.fieldnames or ())]
        if missing:
            sys.exit(f"{path} lacks the columns {', '.join(missing)}; it is no probe's table")
        return list(reader)


def read_loops(folder: Path) -> list[Loop]:
    """The rows of splits.csv."""
    return [_loop(row) for row in read_rows(folder / "splits.csv", SPLIT_COLUMNS)]


def _loop(row: dict[str, str]) -> Loop:
    return Loop(
        problem=_problem(row),
        limit_mib=int(row["limit_mib"]),
        micro_batch=int(row["micro_batch"]),
        workspace_mib=float(row["workspace_mib"]),
        predicted_us=float(row["predicted_us"]),
        eager_us=float(row["eager_us"]),
        captured_us=float(row["captured_us"]) if row["captured_us"] else None,
        host_us=float(row["host_us_per_chunk"]),
        baselines_us={name: float(row[key]) for name, key in _BASELINE_COLUMNS.items() if row[key]},
        extra_mib=float(row["torch_benchmark_extra_mib"]),
    )


def _problem(row: dict[str, str]) -> tuple[str, str, str, str, int]:
    return (row["name"], row["op"], row["dtype"], row["layout"], int(row["batch"]))


def geometric_mean(values: Sequence[float]) -> float:
    """The mean of ratios.

    >>> round(geometric_mean([0.5, 2.0, 8.0]), 3)
    2.0
    """
    return exp(sum(map(log, values)) / len(values))


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed.

    >>> quantile([4.0, 1.0, 3.0, 2.0], 0.5)
    2.0
    """
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)]


def table(title: str, columns: str, rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table, or a sentence where it is empty."""
    rows = list(rows)
    if not rows:
        return f"### {title}\n\nNothing was measured for this.\n"
    lines = [f"### {title}", "", f"| {columns} |", "|---" * (columns.count("|") + 1) + "|"]
    lines += [f"| {' | '.join(map(str, row))} |" for row in rows]
    return "\n".join(lines) + "\n"


def grouped(loops: Iterable[Loop], key: Callable[[Loop], Any]) -> Iterator[tuple[Any, list[Loop]]]:
    """Loops by a key, in its order."""
    for value, members in groupby(sorted(loops, key=key), key):
        yield value, list(members)


def _kind(loop: Loop) -> tuple[str, str, str, int]:
    _, op, dtype, layout, _ = loop.problem
    return dtype, layout, op, loop.limit_mib


def gains(loops: Sequence[Loop], baseline: str, least: float) -> str:
    """Per dtype, layout, op and limit: how the loop compares to one baseline."""
    rows = []
    for kind, members in grouped(loops, _kind):
        by_layer = {one.problem[0]: gain for one in members if (gain := one.gain(baseline))}
        alone = len(members) - len(by_layer)
        rows.append((*kind, len(members), *_gain_cells(by_layer, least), alone or ""))
        if baseline == "benchmark":
            extra = median(one.extra_mib for one in members)
            own = median(one.workspace_mib for one in members)
            rows[-1] = (*rows[-1][:-1], f"{extra:.0f}", f"{own:.0f}")
    last = "no undivided kernel fits" if baseline == "undivided" else "no baseline"
    if baseline == "benchmark":
        last = "its memory, median MiB | ours, median MiB"
    columns = "dtype | layout | op | limit MiB | layers | geo-mean | best | worst | gains | loses"
    return table(f"Gain over {HEADINGS[baseline]}", f"{columns} | {last}", rows)


def _gain_cells(by_layer: dict[str, float], least: float) -> tuple[str, ...]:
    if not by_layer:
        return ("", "", "", "", "")
    best, worst = (pick(by_layer, key=by_layer.__getitem__) for pick in (max, min))
    share = 100 / len(by_layer)
    return (
        f"{geometric_mean(list(by_layer.values())):.2f}x",
        f"{by_layer[best]:.2f}x {best}",
        f"{by_layer[worst]:.2f}x {worst}",
        f"{share * sum(gain > 1 + least for gain in by_layer.values()):.0f} %",
        f"{share * sum(gain < 1 - least for gain in by_layer.values()):.0f} %",
    )


def by_chunks(loops: Sequence[Loop]) -> Iterator[tuple[str, list[Loop]]]:
    """Loops by classes of their number of chunks, each with a label."""
    for low, high in CHUNK_CLASSES:
        members = [one for one in loops if low <= one.chunks <= high]
        if members:
            label = str(low) if low == high else f"{low} to {high}" if high < 1 << 30 else f"{low}+"
            yield label, members


def quantile_cells(values: Sequence[float], digits: int) -> list[str]:
    """The 10 %, 50 % and 90 % quantiles; empty where there are no values."""
    shares = (0.1, 0.5, 0.9)
    return [f"{quantile(values, share):.{digits}f}" if values else "" for share in shares]


def predictions(loops: Sequence[Loop]) -> str:
    """Measured over predicted time of a loop, by its number of chunks."""
    rows = []
    for label, members in by_chunks(loops):
        ratios = [one.eager_us / one.predicted_us for one in members]
        rows.append((label, len(ratios), *quantile_cells(ratios, 2)))
    columns = "chunks | loops | 10 % | median | 90 %"
    return table("Measured over predicted time of a loop", columns, rows)


def host_costs(loops: Sequence[Loop]) -> str:
    """Host time per chunk, and how many loops are long enough per chunk to hide it."""
    rows = []
    for layout, members in grouped(
        (one for one in loops if one.chunks > 1), lambda one: f"{one.problem[2]} {one.problem[3]}"
    ):
        host = [one.host_us for one in members]
        hidden = sum(one.eager_us / one.chunks >= 10 * one.host_us for one in members)
        share = f"{100 * hidden / len(members):.0f} %"
        rows.append((layout, len(members), *quantile_cells(host, 1), share))
    columns = "dtype, layout | loops | 10 % us | median us | 90 % us | chunk at least 10x that long"
    return table("Host time per chunk", columns, rows)


def captures(loops: Sequence[Loop]) -> str:
    """Eager over captured time of a loop, by its number of chunks."""
    rows = []
    for label, members in by_chunks(loops):
        ratios = [one.eager_us / one.captured_us for one in members if one.captured_us]
        failed = len(members) - len(ratios)
        rows.append((label, len(members), *quantile_cells(ratios, 2), failed))
    columns = "chunks | loops | 10 % | median | 90 % | not captured"
    return table("Eager over captured time of a loop", columns, rows)


def errors(timings: Sequence[dict[str, str]]) -> str:
    """Relative errors against float64 per dtype and op, and of backward-filter with beta 1."""
    rows = []
    key = lambda row: (row["dtype"], row["layout"], row["op"])  # noqa: E731
    for kind, members in groupby(sorted(timings, key=key), key):
        cells = list(members)
        plain = [float(row["error"]) for row in cells if _is_number(row["error"])]
        added = [float(row["beta1_error"]) for row in cells if _is_number(row["beta1_error"])]
        refused = sum(bool(row["beta1_error"]) for row in cells) - len(added)
        if plain:
            worst = f"{max(added):.1e}" if added else ""
            rows.append(
                (*kind, len(plain), f"{median(plain):.1e}", f"{max(plain):.1e}", worst, refused)
            )
    columns = "dtype | layout | op | checked | median error | worst | worst at beta 1 | no beta 1"
    return table("Relative error against float64", columns, rows)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def against_unlimited(
    loops: Sequence[Loop], timings: Sequence[dict[str, str]], least: float
) -> str:
    """Divided loops against the fastest undivided kernel of any workspace."""
    undivided: dict[tuple[str, str, str, str, int], tuple[float, int]] = {}
    for row in timings:
        time = (float(row["median_us"]), int(row["workspace_bytes"]))
        problem = _problem(row)
        undivided[problem] = min(time, undivided.get(problem, time))
    rows = []
    for (dtype, layout, op), members in grouped(
        (one for one in loops if one.chunks > 1 and one.problem in undivided),
        lambda one: _kind(one)[:3],
    ):
        fastest = {  # of all limits
            problem: min(same, key=lambda one: one.eager_us)
            for problem, same in grouped(members, lambda one: one.problem)
        }
        by_layer = {p[0]: undivided[p][0] / one.eager_us for p, one in fastest.items()}
        needs = median(undivided[p][1] / 2**20 for p in fastest)
        own = median(one.workspace_mib for one in fastest.values())
        cells = _gain_cells(by_layer, least)
        rows.append((dtype, layout, op, len(by_layer), *cells, f"{needs:.0f}", f"{own:.0f}"))
    columns = "dtype | layout | op | divided layers | geo-mean | best | worst | gains | loses"
    memory = "its workspace, median MiB | ours, median MiB"
    return table(
        "Divided loops over the fastest undivided kernel of any workspace",
        f"{columns} | {memory}",
        rows,
    )


def extremes(loops: Sequence[Loop], baseline: str, count: int) -> str:
    """The layers that lose most and those that gain most, as many of each."""
    judged = sorted(
        ((gain, one) for one in loops if (gain := one.gain(baseline))), key=lambda pair: pair[0]
    )
    half = min(count, -(-len(judged) // 2))
    chosen = judged[:half] + judged[max(half, len(judged) - half) :]
    rows = [
        (
            f"{gain:.2f}x",
            *one.problem[:4],
            one.limit_mib,
            f"{one.chunks}x{one.micro_batch}",
            f"{one.eager_us:.0f}",
            f"{one.baselines_us[baseline]:.0f}",
        )
        for gain, one in chosen
    ]
    columns = "gain | layer | op | dtype | layout | limit MiB | chunks | loop us | baseline us"
    return table(f"Worst and best over {HEADINGS[baseline]}", columns, rows)


def answers(folder: Path) -> str:
    """Versions, lists by handle against lists by profile, and what was skipped."""
    path = folder / "answers.json"
    if not path.is_file():
        return ""
    found = json.loads(path.read_text())
    skipped = sorted(found.pop("skipped", {}).items(), key=lambda pair: -pair[1])
    lines = ["### What the device answered", ""]
    for name, value in found.items():
        text = f"{value[0]} of {value[1]}" if name.startswith("lists_by") else value
        lines.append(f"- {name.replace('_', ' ')}: {text}")
    lines += [f"- skipped, {count}x: {reason}" for reason, count in skipped]
    return "\n".join(lines) + "\n"


def report(folder: Path, least: float, count: int) -> Iterator[str]:
    """Every table of a results folder."""
    if (folder / "splits.csv").exists():
        yield from kernel_tables(folder, least, count)
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text())
        if isinstance(document, dict):
            if document.get("format") == "ucudnn-steps":
                yield "\n".join((f"## {path.stem}\n", *step_report(load_steps(path))))
            elif "says" in document:
                yield f"## {path.stem}\n"
            yield from document.get("says", ())


def kernel_tables(folder: Path, least: float, count: int) -> Iterator[str]:
    """The tables of a probe's files."""
    loops = read_loops(folder)
    timings = read_rows(folder / "timings.csv", TIMING_COLUMNS)
    yield answers(folder)
    for baseline in HEADINGS:
        yield gains(loops, baseline, least)
    yield against_unlimited(loops, timings, least)
    yield predictions(loops)
    yield host_costs(loops)
    yield captures(loops)
    yield errors(timings)
    for baseline in HEADINGS:
        yield extremes(loops, baseline, count)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="such as benchmarks/results/h200")
    parser.add_argument("--least-gain", type=float, default=LEAST_GAIN)
    parser.add_argument("--rows", type=int, default=15, help="layers among the worst and the best")
    arguments = parser.parse_args(argv)
    parts = list(report(arguments.folder, arguments.least_gain, arguments.rows))
    if not parts:
        sys.exit(f"{arguments.folder} has no results; name the folder of one device's results")
    print("\n".join(parts))


if __name__ == "__main__":
    main()
