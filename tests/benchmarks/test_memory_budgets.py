"""What benchmarks/memory_budget.py concludes from its rows, and the table that is made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from types import ModuleType
from typing import Any

import pytest

from ucudnn.outcomes import StepMemory

MIB = 1 << 20


def row(budget: str, peak: int, planned: int, *steps: int) -> dict[str, Any]:
    memory = StepMemory(10 * MIB, 0, 0, 0, 0, 6 * MIB, 8 * MIB)
    more = {"planned_ns": planned, "samples_ns": list(steps)}
    return {"budget": budget, "memory": asdict(memory), "allocated_bytes": peak, **more}


TORCH = {"budget": "torch", "allocated_bytes": 99 * MIB, "samples_ns": [9, 9, 9]}


@pytest.fixture
def verdicts(script: Callable[[str], ModuleType]) -> Callable[..., list[str]]:
    return script("memory_budget").verdicts


def test_budgets_that_are_kept_and_times_that_fall(verdicts: Callable[..., list[str]]) -> None:
    rows = [TORCH, row("least", 10 * MIB, 9, 900, 901, 902), row("1/4", 9 * MIB, 9, 800, 801, 802)]
    assert [sentence.split(": ")[1] for sentence in verdicts(rows)] == ["yes."] * 4


def test_what_is_over_and_what_rises_is_named(verdicts: Callable[..., list[str]]) -> None:
    rows = [TORCH, row("least", 11 * MIB, 8, *[800] * 7), row("1/4", 9 * MIB, 9, *[900] * 7)]
    peak, planned, measured, clear = verdicts(rows)
    assert peak == "Peak within each of 2 budgets: no, least by 1.0 MiB."
    assert planned.endswith("no, least to 1/4 by 1 ns.")
    assert "no, least to 1/4 1.125" in measured
    assert "no, least to 1/4 1.125" in clear
    # noise: a median that rises, and an interval that says nothing
    rows[2]["samples_ns"] = [700, 700, 700, 801, 801, 801, 801]
    assert [sentence.split(": ")[1][:2] for sentence in verdicts(rows)[2:]] == ["no", "ye"]
