"""Kernels that are given back to torch, batches without a split, pools, races kept in files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ucudnn.config import Config
from ucudnn.errors import PlanError
from ucudnn.measurement import Conditions, Device, Software
from ucudnn.outcomes import StepRace
from ucudnn.plan import BY_SLABS, DEFAULT_ALGORITHM, KernelPlan, Plan, Timing
from ucudnn.problem import Problem

TIMING = Timing(time_ns=900, spread_ns=9, workspace_bytes=4096, samples=7)
DEFAULT = Timing(time_ns=1000, spread_ns=11, workspace_bytes=8192, samples=7)
# Batch 1 has no split within the limit; 3 is slabs, the others are in chunks of at most 2.
KERNEL = KernelPlan(
    problem=Problem("fprop", 5, 4, 4, (9, 9), (3, 3)),
    layers=("stem", "body.0"),
    algorithms=("onednn", "gemm"),
    alone=(-1, 0, BY_SLABS, -1, 1),
    last=((0, -1), (2, 0), (0, -1), (2, 1), (0, -1)),
    predicted_time_ns=800,
    timing=TIMING,
    default=DEFAULT,
    slabs=((4, 0), (3, 1)),
)


def plan(*kernels: KernelPlan, config: Config | None = None, race: StepRace | None = None) -> Plan:
    return Plan(
        kernels,
        Device("cpu", "Example CPU"),
        Software("2.13.0"),
        Conditions(),
        config or Config(),
        step_race=race,
    )


def test_a_batch_within_no_limit_says_so_also_through_the_plan() -> None:
    assert [KERNEL.covers(batch) for batch in range(7)] == [
        *(False, False, True, True, True, True, False)
    ]
    with pytest.raises(PlanError, match="has no plan for batch 1: nothing that was timed"):
        KERNEL.split(1)
    whole = plan(KERNEL)
    assert not whole.covers(KERNEL.problem.with_batch(1))
    assert whole.kernel(KERNEL.problem.with_batch(1)) is KERNEL


def test_a_plan_is_completed_by_splits_of_a_smaller_batch() -> None:
    whole = replace(
        KERNEL, alone=(-1, -1, -1, -1, 1), last=((0, -1),) * 5, slabs=(), algorithms=("gemm", "fft")
    )
    smaller = replace(
        KERNEL,
        problem=KERNEL.problem.with_batch(4),
        algorithms=("onednn", "gemm"),
        alone=(1, BY_SLABS, -1, -1),
        last=((1, 1), (0, -1), (2, 0), (1, 0)),
    )
    completed = whole.completed_by(smaller)
    assert completed.uncovered() == []
    for batch in range(1, 5):
        assert completed.split(batch) == smaller.split(batch)
    assert completed.split(5) == whole.split(5)
    # of a plan that has slabs already no others are taken
    assert replace(KERNEL, alone=(-1, -1, BY_SLABS, -1, 1)).completed_by(smaller).uncovered() == []
    assert KERNEL.with_default([1]).split(1).is_default
    assert KERNEL.completed_by(smaller).split(3) == KERNEL.split(3)


def test_given_back_at_every_batch() -> None:
    back = KERNEL.by_default(every_batch=True)
    for batch in range(1, 6):
        assert str(back.split(batch)) == f"{batch} {DEFAULT_ALGORITHM}"
    assert (back.timing, back.predicted_time_ns, back.slabs) == (DEFAULT, 1000, ())


def test_given_back_at_the_planned_batch_alone() -> None:
    back = KERNEL.by_default(every_batch=False)
    assert str(back.split(5)) == f"5 {DEFAULT_ALGORITHM}"
    for batch in range(2, 5):
        assert str(back.split(batch)) == str(KERNEL.split(batch))
    assert not back.covers(1)
    assert back.slabs == KERNEL.slabs
    whole = replace(KERNEL, alone=(-1, 0, 0, -1, BY_SLABS))
    assert whole.by_default(every_batch=False).slabs == ()


def test_a_pool_holds_every_call() -> None:
    config = Config(total_workspace="1MiB")
    assert plan(KERNEL, config=config).workspace_bytes == 2 * 4096
    assert plan(KERNEL).workspace_bytes == 4096
    assert plan().workspace_bytes == 0


def test_a_file_keeps_the_race_of_steps(tmp_path: Path) -> None:
    race = StepRace(110, 100, 0.91, 0.9, 0.92, 5, dropped=("a kernel",))
    for kept in (race, None):
        whole = plan(KERNEL, race=kept)
        whole.save(tmp_path / "plan.json")
        again = Plan.load(tmp_path / "plan.json")
        assert again.step_race == kept
        assert again.hash == whole.hash


def test_a_time_of_nothing_is_refused() -> None:
    with pytest.raises(PlanError, match="time_ns must be at least 1, got 0"):
        replace(TIMING, time_ns=0)
