"""A seeded part of benchmarks/cache_torture.py: kills, crowds, damage, bad disks."""

from __future__ import annotations

import pytest

PARTS = ("kill", "crowd", "corrupt", "disk", "lookup", "versions")


@pytest.mark.nightly
@pytest.mark.parametrize("part", PARTS)
def test_nothing_is_lost_doubled_or_wrong(part, repository, python, pytestconfig):
    fraction = "0.1" if pytestconfig.getoption("complete") else "0.02"
    script = repository / "benchmarks" / "cache_torture.py"
    result = python(script, "--fraction", fraction, "--seed", "5", "--only", part)
    assert "0 failures" in result.stdout
    if "CAP_SYS_ADMIN" in result.stdout:
        pytest.skip("mounting a small disk and a read-only one needs CAP_SYS_ADMIN")
