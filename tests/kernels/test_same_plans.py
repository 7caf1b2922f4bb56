"""Replanned recordings: the same measurements lead to the same decisions, version after version.

`python tests/kernels/test_same_plans.py` writes the decisions anew, for a change that means to
change them.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from ucudnn.cache.schema import read_entries
from ucudnn.config import Config
from ucudnn.errors import PlanError
from ucudnn.kernels.tune import tune_problems

HERE = Path(__file__).parent
RECORDINGS = sorted((HERE.parents[1] / "benchmarks" / "results").rglob("exhaustive.csv"))
DECISIONS = HERE / "decisions.json"
LIMITS = (None, "1MiB", "2MiB", "4MiB", "8MiB", "16MiB", "32MiB")
POLICIES = ("powers-of-two", "all", "undivided")
POOLS = ("8MiB", "32MiB", "64MiB")


def kernels(path):
    """Each recorded kernel at its largest batch."""
    largest = {}
    for entry in read_entries(str(path)):
        problem = entry.measurement.key.problem
        key = problem.with_batch(1)
        if key not in largest or largest[key].batch < problem.batch:
            largest[key] = problem
    return [(str(number), problem) for number, problem in enumerate(largest.values())]


def decided(layers, path, **settings):
    """Per kernel: workspace, predicted time and the split of every batch; or what was refused."""
    try:
        config = Config(backend="recorded", cache=str(path), unplanned="error", **settings)
        plan = tune_problems(layers, config)
    except PlanError as error:
        return f"smallest: {error.smallest_bytes} bytes"
    return {
        str(kernel.problem): [
            kernel.timing.workspace_bytes,
            kernel.predicted_time_ns,
            "; ".join(
                str(kernel.split(batch)) if kernel.covers(batch) else "none"
                for batch in range(kernel.problem.batch, 0, -1)
            ),
        ]
        for kernel in plan.kernels
    }


def decisions(path):
    layers = kernels(path)
    separate = {
        f"{limit}, {policy}": decided(layers, path, workspace_limit=limit, policy=policy)
        for limit, policy in product(LIMITS, POLICIES)
    }
    shared = {
        f"{total} in all, {policy}": decided(layers, path, total_workspace=total, policy=policy)
        for total, policy in product(POOLS, POLICIES)
    }
    return separate | shared


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ucudnn.errors.UntunedWarning")  # a pool may leave kernels out
@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.parent.name)
def test_a_recording_is_planned_as_ever(path):
    assert decisions(path) == json.loads(DECISIONS.read_text())[path.parent.name]


if __name__ == "__main__":
    found = {path.parent.name: decisions(path) for path in RECORDINGS}
    DECISIONS.write_text(json.dumps(found, indent=1) + "\n")
