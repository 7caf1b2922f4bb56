"""Rows of splits.csv and timings.csv, which gpu_suite.py wrote."""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from ucudnn.benchmark.statistics import ratio_interval

BASELINES = ("undivided", "default", "benchmark")
_PROBLEM_COLUMNS = ("name", "op", "dtype", "layout", "batch")
_ROUNDS_COLUMNS = {name: f"{name}_rounds_us" for name in ("split", *BASELINES)}
SPLIT_COLUMNS = (
    *(*_PROBLEM_COLUMNS, "limit_mib", "axis", "chunk", "chunks", "workspace_mib", "predicted_us"),
    *("captured_us", "host_us_per_chunk", *_ROUNDS_COLUMNS.values()),
    *("default_extra_mib", "benchmark_extra_mib"),
)
TIMING_COLUMNS = (
    *_PROBLEM_COLUMNS,
    "algorithm",
    "workspace_bytes",
    "median_us",
    "error",
    "beta1_error",
)


@dataclass(frozen=True)
class Loop:
    """The best split of one problem within one limit, beside its three baselines.

    Args:
        problem: (name, op, dtype, layout, batch).
        limit_mib: workspace limit.
        axis: "batch" or "spatial".
        chunk: samples or rows of a chunk.
        chunks: 1 where undivided is best.
        workspace_mib: what the chunks need.
        predicted_us: number of chunks times the time of one; None where that was not measured.
        captured_us: the loop replayed from a CUDA graph; None where capture failed.
        host_us: host time per chunk.
        rounds_us: times of the rounds in which calls took turns: of "split" and the baselines.
        extra_mib: by baseline, memory that torch's choice takes beyond the result.
    """

    problem: tuple[str, str, str, str, int]
    limit_mib: int
    axis: str
    chunk: int
    chunks: int
    workspace_mib: float
    predicted_us: float | None
    captured_us: float | None
    host_us: float
    rounds_us: dict[str, tuple[float, ...]]
    extra_mib: dict[str, float]

    @property
    def eager_us(self) -> float:
        """Median time of the loop."""
        return median(self.rounds_us["split"])

    def gain(self, baseline: str) -> Gain | None:
        """The baseline's time over the loop's; None where there is no baseline."""
        times = self.rounds_us[baseline]
        return Gain(*ratio_interval(times, self.rounds_us["split"])) if times else None


class Gain(NamedTuple):
    """A ratio of times with its 95 % interval."""

    middle: float
    low: float
    high: float

    def is_won(self, least: float) -> bool:
        """True where the loop is faster beyond doubt, and by more than `least`."""
        return self.middle > 1 + least and self.low > 1

    def is_lost(self, least: float) -> bool:
        """True where it is slower likewise."""
        return self.middle < 1 - least and self.high < 1


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
    rounds = {
        name: tuple(map(float, row[column].split())) for name, column in _ROUNDS_COLUMNS.items()
    }
    return Loop(
        problem=problem_of(row),
        limit_mib=int(row["limit_mib"]),
        axis=row["axis"],
        chunk=int(row["chunk"]),
        chunks=int(row["chunks"]),
        workspace_mib=float(row["workspace_mib"]),
        predicted_us=float(row["predicted_us"]) if row["predicted_us"] else None,
        captured_us=float(row["captured_us"]) if row["captured_us"] else None,
        host_us=float(row["host_us_per_chunk"]),
        rounds_us=rounds,
        extra_mib={name: float(row[f"{name}_extra_mib"]) for name in ("default", "benchmark")},
    )


def read_timings(folder: Path) -> list[dict[str, str]]:
    """The rows of timings.csv, the last one of each configuration at each size."""
    rows = read_rows(folder / "timings.csv", TIMING_COLUMNS)
    keys = (*_PROBLEM_COLUMNS, "algorithm")
    return list({tuple(row[key] for key in keys): row for row in rows}.values())


def problem_of(row: dict[str, str]) -> tuple[str, str, str, str, int]:
    return (row["name"], row["op"], row["dtype"], row["layout"], int(row["batch"]))
