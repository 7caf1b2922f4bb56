"""A step that does not fit the memory of the machine is tuned there, without being run by torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.process
@pytest.mark.parametrize(
    "names", ["groups", pytest.param("half batches volumes loop", marks=pytest.mark.nightly)]
)
def test_a_plan_is_found_whose_real_step_runs_there(names, python):
    """In a process whose address space is limited to a part of what torch's step needs."""
    settings = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    lines = python(HERE / "fitting.py", *names.split(), **settings).stdout.splitlines()
    rows = [json.loads(line) for line in lines]
    assert {row["network"] for row in rows} == set(names.split())
    for row in rows:
        assert "error" not in row, row
        # Real steps stay within the budget, by torch's profiler.
        assert 0 < row["peak"] <= row["budget"]
        assert row["peak"] == pytest.approx(row["planned"], rel=0.01)
        # There, torch's step is foreseen to the byte, and was never run.
        assert row["foreseen"] == row["needed"]
        assert "was not run" in row["race"]
        assert not row["torch runs"]
