"""Forward passes of DeepBench's layers within µ-cuDNN's limits, with its published values.

    python benchmarks/limits_layers.py --out limits_layers.json

Takes the shapes of results/mucudnn-2018/deepbench_forward.csv, each once: those of at most 80 GFLOP
whose input and output take at most 512 MiB together. For every limit a layer is planned undivided
and with all sizes. All splits of a layer that differ, and torch's own, are then timed as whole
calls in turn.
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
import time
from math import prod
from pathlib import Path
from typing import Any

from found_limits import ALL, PUBLISHED, UNDIVIDED, layers_table, rendered
from provenance import provenance
from rich.console import Console

from ucudnn.axis import BatchAxis
from ucudnn.backends import open_backend
from ucudnn.benchmark.bench import LocalBench
from ucudnn.config import Config
from ucudnn.errors import PlanError
from ucudnn.kernels.tune import tune_problems
from ucudnn.problem import Problem
from ucudnn.split import Split

LIMITS = ("128MiB", "256MiB", "512MiB")
POLICIES = (UNDIVIDED, ALL)
MOST_FLOP, MOST_BYTES = 80e9, 512 << 20
console = Console(width=150, soft_wrap=True, highlight=False)


def main() -> None:
    """Plan and time the layers one by one; print and keep the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--batch", type=int, help="default: that of the file, 256")
    parser.add_argument("--first", type=int, help="only so many layers")
    parser.add_argument("--effort", default="quick")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    options = parser.parse_args()
    began = time.monotonic()
    document: dict[str, Any] = {"made": provenance(), "effort": options.effort, "layers": []}
    for name, problem, published in layers(options.batch)[: options.first]:
        console.print(f"{name}, {problem}")
        entry = {"name": name, "problem": str(problem), "published": published}
        document["layers"].append(entry | measured(problem, options.effort))
        document["wall_s"] = round(time.monotonic() - began, 1)
        if options.out:
            options.out.write_text(json.dumps(document, indent=1) + "\n")
    console.print(rendered("Undivided over divided", layers_table(document)))


def layers(batch: int | None = None) -> list[tuple[str, Problem, dict[str, float]]]:
    """Distinct layers within the bounds: name, forward pass, published ratio by limit."""
    found: dict[Problem, tuple[str, Problem, dict[str, float]]] = {}
    with (PUBLISHED / "deepbench_forward.csv").open() as lines:
        for row in csv.DictReader(lines):
            problem = problem_of(row)
            # The first of equal shapes: in the figure they differ by less than can be read off it.
            if is_small(problem) and problem not in found:
                asked = problem.with_batch(batch or problem.batch)
                ratios = {limit: float(row[f"speedup_{limit}"]) for limit in LIMITS}
                found[problem] = (row["source"], asked, ratios)
    return list(found.values())


def problem_of(row: dict[str, str]) -> Problem:
    """The forward pass of a line of the file."""
    sizes = {name: int(row[name]) for name in row if name in ["w", "h", "c", "n", "k", "kw", "kh"]}
    pad_h, pad_w = int(row["pad_h"]), int(row["pad_w"])
    return Problem(
        "fprop",
        sizes["n"],
        sizes["c"],
        sizes["k"],
        (sizes["h"], sizes["w"]),
        (sizes["kh"], sizes["kw"]),
        (int(row["stride_h"]), int(row["stride_w"])),
        ((pad_h, pad_h), (pad_w, pad_w)),
    )


def is_small(problem: Problem) -> bool:
    """True if the layer takes some seconds to tune, and its operands fit any machine."""
    flop = 2 * prod(problem.y_shape) * prod(problem.w_shape[1:])
    operands = prod(problem.x_shape) + prod(problem.y_shape)
    return flop <= MOST_FLOP and operands * problem.bytes_per_element <= MOST_BYTES


def measured(problem: Problem, effort: str) -> dict[str, Any]:
    """Splits by limit and policy, and what each distinct one takes as a whole call."""
    chosen: dict[str, dict[str, Split | None]] = {}
    with tempfile.TemporaryDirectory() as cache:
        for limit in LIMITS:
            settings = {"workspace_limit": limit, "effort": effort, "cache": cache}
            chosen[limit] = {
                policy: split_of(problem, Config(**settings, policy=policy)) for policy in POLICIES
            }
    own = Split.default(problem.batch)
    wanted = [one for by_policy in chosen.values() for one in by_policy.values() if one is not None]
    splits = list(dict.fromkeys([own, *wanted]))
    wholes = LocalBench(open_backend("auto"), BatchAxis(problem)).whole(splits)
    times = [
        {"split": str(split), "workspace_bytes": whole.workspace_bytes, "samples_ns": whole.samples}
        for split, whole in zip(splits, wholes, strict=True)
    ]
    places = {
        limit: {
            policy: None if split is None else splits.index(split)
            for policy, split in by_policy.items()
        }
        for limit, by_policy in chosen.items()
    }
    # The first one is torch's own; None: nothing fits.
    return {"splits": times, "chosen": places}


def split_of(problem: Problem, config: Config) -> Split | None:
    """The split of the whole batch by a plan; None if nothing fits the limit."""
    try:
        plan = tune_problems([("layer", problem)], config)
    except PlanError:
        return None
    return plan.split(problem)


if __name__ == "__main__":
    main()
