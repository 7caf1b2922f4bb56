"""Fronts and rejected alternatives of all kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ucudnn import cache as caches
from ucudnn.config import Config
from ucudnn.measurement import Measurement
from ucudnn.problem import Problem
from ucudnn.tuning.rationale import rationales
from ucudnn.tuning.tuner import tune_problems

MS, MIB = 1_000_000, 1 << 20
PROBLEM = Problem("fprop", 8, 2, 2, (9, 9), (1, 1))
OTHER = replace(PROBLEM, out_channels=3)


def cost(ms_per_sample, mib_per_sample):
    return lambda size: (int(ms_per_sample * size * MS), int(mib_per_sample * size * MIB))


@pytest.fixture
def planned(scripted, tmp_path):
    """A plan of two kernels that are split because of the limit, and its settings."""
    scripted(torch_default=cost(3, 0.5), fast=cost(1, 2), near=cost(1.2, 0.25))
    config = Config(workspace_limit="4MiB", cache=str(tmp_path / "cache"), effort="thorough")
    return tune_problems([("a", PROBLEM), ("b", OTHER)], config), config


def known(plan, config):
    with caches.open(config.cache, "r") as cache:
        return rationales(plan, cache), list(cache)


def test_a_front_is_that_of_all_splits_of_what_was_timed(planned):
    plan, config = planned
    found, entries = known(plan, config)
    for kernel, one in zip(plan.kernels, found, strict=True):
        chunks = {
            (entry.key.problem.batch, entry.time_ns, entry.workspace_bytes)
            for entry in entries
            if entry.key.problem.with_batch(8) == kernel.problem
            and (entry.key.subject, entry.status) == ("chunk", "ok")
        }
        assert one.front == brute_force(8, chunks)
        assert one.alternatives[0].time_ns <= one.alternatives[1].time_ns


def brute_force(batch, chunks):
    """Least times of all splits of a batch by the workspace that they may use."""
    limits = sorted({workspace for _, _, workspace in chunks})
    front = []
    for limit in limits:
        best = [0] + [None] * batch
        for n in range(1, batch + 1):
            times = [
                best[n - size] + time_ns
                for size, time_ns, workspace in chunks
                if workspace <= limit and size <= n and best[n - size] is not None
            ]
            best[n] = min(times, default=None)
        if best[batch] is not None and (not front or best[batch] < front[-1][1]):
            front.append((limit, best[batch]))
    return tuple(front)


def test_without_measurements_there_is_what_the_plan_knows(planned):
    plan, _ = planned
    for one in rationales(plan, []):
        assert (one.front, one.channels_last) == ((), None)
        assert [str(other.split) for other in one.alternatives] == ["8 torch_default"]


def test_measurements_of_another_machine_are_no_part_of_it(planned):
    plan, config = planned
    elsewhere = replace(plan, software=replace(plan.software, torch="9"))
    assert all(not one.front for one in known(elsewhere, config)[0])


def test_torch_in_channels_last_is_found(planned):
    plan, config = planned
    entries = known(plan, config)[1]
    own = next(
        entry
        for entry in entries
        if (entry.key.problem, entry.key.algorithm) == (PROBLEM, "torch_default")
        and (entry.key.subject, str(entry.key.conditions.role)) == ("chunk", "alone")
    )
    there = replace(own.key, problem=replace(PROBLEM, layout="nhwc"))
    entry = Measurement(there, "ok", 7 * MS, 1 * MS, (7 * MS,) * 3, workspace_bytes=MIB)
    found = rationales(plan, [entry])[plan.kernels.index(plan.kernel(PROBLEM))].channels_last
    assert (found.time_ns, found.workspace_bytes, found.samples) == (7 * MS, MIB, 3)
