"""Lazy measuring on recorded tables: how little it measures, and how good its plans are."""

from __future__ import annotations

import random
from math import comb
from pathlib import Path

import pytest

from ucudnn.benchmark.protocol import FINALS
from ucudnn.benchmark.statistics import median_ns
from ucudnn.kernels.choose import Finalist, choose
from ucudnn.plan import Chunk, Split, Timing

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
TABLES = sorted(RESULTS.rglob("exhaustive.csv"))
GPU_TABLES = sorted(RESULTS.rglob("timings.csv"))
TRIALS = 200


@pytest.fixture
def tuning_cost(script):
    """The script that made the tables and replays them."""
    return script("tuning_cost")


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.parent.name)
def test_few_measurements_and_plans_as_good(path, tuning_cost):
    table = tuning_cost.Table(path)
    on_gpu = table.backend.device().type == "cuda"
    most, regret = (0.10, 0.01) if on_gpu else (0.15, 0.02)
    same = path.with_name("same_twice.csv")
    if same.exists():
        regret = max(regret, tuning_cost.a_a_interval(tuning_cost.Table(same).entries))
    found = [tuning_cost.replay(table, problem) for problem in table.kernels]
    assert len(found) >= 4
    assert sum(one.measured for one in found) <= most * sum(one.candidates for one in found)
    for one in found:
        assert one.regret <= regret, one
        assert one.gap <= 0.02, one  # what lazy measuring stops at


# The runs were counted when every candidate took part in a race.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit_mib", "most", "runs_before"),
    [
        pytest.param(8, 0.3, 16_316, marks=pytest.mark.nightly),
        (64, 0.15, 14_828),
        pytest.param(None, 0.15, 11_481, marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("path", GPU_TABLES, ids=lambda path: path.parent.name)
def test_within_a_limit_few_engines_of_a_gpu_are_run(
    path, limit_mib, most, runs_before, tuning_cost
):
    table = tuning_cost.GpuTable(path)
    limit = None if limit_mib is None else limit_mib << 20
    found = [tuning_cost.replay(table, problem, limit) for problem in table.kernels]
    assert len(found) == 15
    # an engine whose stated workspace exceeds the limit is not run at all
    assert sum(one.measured for one in found) <= most * sum(one.candidates for one in found)
    assert sum(one.looks.count + one.races.count for one in found) <= 0.55 * runs_before
    for one in found:
        assert one.regret == 0, one


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.parent.name)
def test_the_same_algorithm_under_two_names_is_a_tie(path, tuning_cost):
    """A/A: neither name wins more often than a coin, and the tool does not call it a win."""
    entries = tuning_cost.Table(path.with_name("same_twice.csv")).entries
    first, second = (entry.samples for entry in sorted(entries, key=lambda e: e.key.algorithm))
    pairs = list(zip(first, second, strict=True))
    chance = random.Random(0)
    faster = claimed = 0
    for _ in range(TRIALS):
        drawn = [chance.choice(pairs) for _ in range(FINALS.most_rounds)]
        drawn = [pair if chance.random() < 0.5 else pair[::-1] for pair in drawn]
        one, other = (
            _finalist(name, samples)
            for name, samples in zip("ab", zip(*drawn, strict=True), strict=True)
        )
        faster += one.timing.time_ns < other.timing.time_ns
        default = _finalist("torch_default", other.samples)
        claimed += choose([default, one], None) is one
    low, high = _binomial_interval(TRIALS, 0.99)
    assert low <= faster <= high
    # the one-sided error of the 95 % interval of the median of nine pairs, with room for chance
    wrong = sum(comb(9, k) for k in range(2)) / 2**9
    assert claimed <= TRIALS * wrong + 3 * (TRIALS * wrong) ** 0.5


def _finalist(name: str, samples: tuple[int, ...]) -> Finalist:
    timing = Timing(median_ns(samples), 0, 0, len(samples))
    return Finalist(Split("batch", (Chunk(8, name),)), timing, tuple(samples))


def _binomial_interval(trials: int, confidence: float) -> tuple[int, int]:
    """The numbers of wins of a fair coin that all but the outer tails hold."""
    tail, low = 0.0, 0
    while tail + comb(trials, low) / 2**trials <= (1 - confidence) / 2:
        tail += comb(trials, low) / 2**trials
        low += 1
    return low, trials - low
