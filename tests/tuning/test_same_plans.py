"""Replanned recordings: the same measurements lead to the same plans, version after version."""

from __future__ import annotations

import json
import shutil
from itertools import product
from pathlib import Path

import pytest

from ucudnn import cache as caches
from ucudnn.cache.exchange import read_entries
from ucudnn.config import Config
from ucudnn.errors import PlanError
from ucudnn.plan import Plan
from ucudnn.tuning.tuner import tune_problems

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "benchmarks" / "results"
EXPECTED = json.loads((HERE / "expected_plans.json").read_text())
TABLES = sorted(RESULTS.rglob("exhaustive.csv"))
LIMITS = (None, "1MiB", "4MiB", "16MiB")
POLICIES = ("powers-of-two", "all", "undivided")


def kernels(path):
    """Each recorded kernel at its largest batch."""
    largest = {}
    for entry in read_entries(str(path)):
        problem = entry.measurement.key.problem
        key = problem.with_batch(1)
        if key not in largest or largest[key].batch < problem.batch:
            largest[key] = problem
    return [(str(number), problem) for number, problem in enumerate(largest.values())]


def hash_or_refusal(layers, path, limit, policy):
    config = Config(backend="recorded", cache=path, workspace_limit=limit, policy=policy)
    try:
        return tune_problems(layers, config).hash
    except PlanError as error:
        return f"smallest: {error.smallest_bytes}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", sorted(RESULTS.rglob("exhaustive.csv")), ids=lambda p: p.parent.name
)
def test_a_recording_is_planned_as_ever(path):
    layers = kernels(path)
    found = {
        f"{limit}, {policy}": hash_or_refusal(layers, path, limit, policy)
        for limit, policy in product(LIMITS, POLICIES)
    }
    assert found == EXPECTED["recordings"][path.parent.name]


def test_files_of_earlier_versions_load_with_their_hash():
    for path in sorted((HERE / "earlier").glob("*.json")):
        assert Plan.load(path).hash == json.loads(path.read_text())["hash"]


def test_a_cache_of_earlier_versions_is_read(tmp_path):
    folder = tmp_path / "cache"
    shutil.copytree(HERE / "earlier" / "cache", folder)
    with caches.open(folder, "r") as cache:
        found = {
            f"{entry.key.problem} {entry.key.algorithm} {entry.key.conditions.role}": entry.time_ns
            for entry in cache
        }
    assert found == EXPECTED["cache"]
