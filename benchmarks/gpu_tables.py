"""Print the measurements of a GPU as one page of tables, from the files of one results folder.

    python benchmarks/gpu_tables.py benchmarks/results/h200 > tables.md

Reads what gpu_suite.py left there: splits.csv (per layer and workspace limit the best undivided
configuration, torch's two defaults and the best split, timed in turn), timings.csv (every engine
configuration at every micro-batch size) and answers.json (versions, what was skipped). Then come
training steps and demonstrations with what they conclude (training_steps.py, demo_*.py,
l2_hypothesis.py). The page ends with what was won, lost and not run.

A loop is one call of the best split, all its chunks, measured eagerly unless a table says captured.
A gain is the median over rounds of a baseline's time over the loop's; "gains" and "loses" are
layers beyond --least-gain whose 95 % interval does not contain 1. Where undivided is best, the loop
is the undivided call itself, and its gain over that is 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

from gpu_loops import Gain, Loop, problem_of, read_loops, read_timings
from gpu_summary import FILES, summary
from step_workers import load as load_steps
from step_workers import report as step_report

from ucudnn.benchmark.statistics import spread_ns

BENCHMARK_LIMIT = (
    "cudnn.benchmark tries the first 10 configurations of cuDNN's list (torch's benchmark_limit).\n"
)
LEAST_GAIN = 0.02  # the least that a plan leaves torch's own call for
MOST_SKIPPED = 20  # kinds of failures that are shown
CHUNK_CLASSES = ((1, 1), (2, 4), (5, 16), (17, 64), (65, 1 << 30))
HEADINGS = {
    "undivided": "(a) best undivided configuration within the same limit",
    "default": "(b) torch's default, whatever workspace it takes",
    "benchmark": "(c) cudnn.benchmark, whatever workspace it takes",
}


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
        divided = sum(one.chunks > 1 for one in members)
        row = (*kind, len(members), divided, *_gain_cells(by_layer, least))
        if baseline == "undivided":
            rows.append((*row, len(members) - len(by_layer) or ""))
        else:
            extra = median(one.extra_mib[baseline] for one in members)
            own = median(one.workspace_mib for one in members)
            rows.append((*row, f"{extra:.0f}", f"{own:.0f}"))
    last = "its memory, median MiB | ours, median MiB"
    if baseline == "undivided":
        last = "no undivided configuration fits"
    columns = "dtype | layout | op | limit MiB | layers | divided | geo-mean | best | worst"
    text = table(f"Gain over {HEADINGS[baseline]}", f"{columns} | gains | loses | {last}", rows)
    return text + ("\n" + BENCHMARK_LIMIT if baseline == "benchmark" and rows else "")


def _gain_cells(by_layer: dict[str, Gain], least: float) -> tuple[str, ...]:
    if not by_layer:
        return ("", "", "", "", "")
    best, worst = (pick(by_layer, key=by_layer.__getitem__) for pick in (max, min))
    share = 100 / len(by_layer)
    return (
        f"{geometric_mean([gain.middle for gain in by_layer.values()]):.2f}x",
        f"{by_layer[best].middle:.2f}x {best}",
        f"{by_layer[worst].middle:.2f}x {worst}",
        f"{share * sum(gain.is_won(least) for gain in by_layer.values()):.0f} %",
        f"{share * sum(gain.is_lost(least) for gain in by_layer.values()):.0f} %",
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
        ratios = [one.eager_us / one.predicted_us for one in members if one.predicted_us]
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


def launches(timings: Sequence[dict[str, str]]) -> str:
    """Host time of one engine's launch, and how many engines take the device less than that."""
    rows = []
    key = lambda row: (row["dtype"], row["layout"])  # noqa: E731
    # tables of before this column was written have times that include the host's
    measured = [row for row in timings if row.get("host_us")]
    for kind, members in groupby(sorted(measured, key=key), key):
        cells = [(float(row["host_us"]), float(row["median_us"])) for row in members]
        shorter = sum(device < host for host, device in cells)
        share = f"{100 * shorter / len(cells):.0f} %"
        rows.append((*kind, len(cells), *quantile_cells([host for host, _ in cells], 1), share))
    columns = "dtype | layout | engines | 10 % us | median us | 90 % us | device takes less"
    return table("Host time to launch one engine", columns, rows)


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
        problem = problem_of(row)
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
        by_layer = {}
        for problem, one in fastest.items():
            ratio = undivided[problem][0] / one.eager_us  # of times that were not taken in turn
            by_layer[problem[0]] = Gain(ratio, ratio, ratio)
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
            f"{gain.middle:.2f}x ({gain.low:.2f} to {gain.high:.2f})",
            *one.problem[:4],
            one.limit_mib,
            f"{one.chunks}x{one.chunk}{' rows' if one.axis == 'spatial' else ''}",
            _time(one.rounds_us["split"]),
            _time(one.rounds_us[baseline]),
        )
        for gain, one in chosen
    ]
    columns = "gain | layer | op | dtype | layout | limit MiB | chunks | loop us | baseline us"
    return table(f"Worst and best over {HEADINGS[baseline]}", columns, rows)


def _time(rounds_us: Sequence[float]) -> str:
    """The median and the interquartile range."""
    return f"{median(rounds_us):.0f} ± {spread_ns(rounds_us):.0f}"


def answers(folder: Path) -> str:
    """Versions, lists by handle against lists by profile, and what was skipped."""
    path = folder / "answers.json"
    if not path.is_file():
        return ""
    found = json.loads(path.read_text())
    skipped = sorted(found.pop("skipped", {}).items(), key=lambda pair: -pair[1])[:MOST_SKIPPED]
    found.pop("not_reached", None)  # the summary tells
    lines = ["### What the device answered", ""]
    for name, value in found.items():
        text = f"{value[0]} of {value[1]}" if name.startswith("lists_by") else value
        lines.append(f"- {name.replace('_', ' ')}: {text}")
    lines += [f"- skipped, {count}x: {reason}" for reason, count in skipped]
    return "\n".join(lines) + "\n"


def device_name(folder: Path) -> str:
    """The GPU's name, as the first of these files that is there has it."""
    names = []
    if (folder / "answers.json").exists():
        names.append(json.loads((folder / "answers.json").read_text()).get("gpu"))
    for run in load_steps(folder / "training_steps.json"):
        names.append(run.setup.get("machine", {}).get("device"))
    return next(filter(None, names), "a device that no file names")


def report(folder: Path, least: float, count: int) -> Iterator[str]:
    """Every table of a results folder, then what they say together."""
    loops: list[Loop] = []
    if (folder / "splits.csv").exists():
        loops = read_loops(folder)
        yield from kernel_tables(folder, loops, least, count)
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text())
        if isinstance(document, dict):
            if document.get("format") == "ucudnn-steps":
                yield "\n".join((f"## {path.stem}\n", *step_report(load_steps(path))))
            elif "says" in document:
                yield f"## {path.stem}\n"
            yield from document.get("says", ())
    won = {
        (dtype, limit): [[one.gain(name) for one in members] for name in HEADINGS]
        for (dtype, limit), members in grouped(loops, lambda one: (one.problem[2], one.limit_mib))
    }
    yield from summary(folder, device_name(folder), won, least)


def kernel_tables(folder: Path, loops: Sequence[Loop], least: float, count: int) -> Iterator[str]:
    """The tables of layers."""
    timings = read_timings(folder)
    yield answers(folder)
    for baseline in HEADINGS:
        yield gains(loops, baseline, least)
    yield against_unlimited(loops, timings, least)
    yield predictions(loops)
    yield host_costs(loops)
    yield launches(timings)
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
    if not any((arguments.folder / name).exists() for name in FILES):
        sys.exit(f"{arguments.folder} has no results; name the folder of one device's results")
    print("\n".join(report(arguments.folder, arguments.least_gain, arguments.rows)))


if __name__ == "__main__":
    main()
