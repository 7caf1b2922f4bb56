"""The backend on processors with fewer instructions than this one, imitated in child processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
RUN_THERE = (
    "test_numerics.py::test_alone_agrees_with_float64",
    "test_numerics.py::test_every_algorithm_was_tried",
    "test_execute.py",
    "test_refusals.py",
)


@pytest.mark.nightly
def test_results_and_refusals_hold_on_a_poorer_processor(poorer_processor, pytestconfig):
    """Another processor runs other kernels; every algorithm is as accurate there."""
    child = subprocess.run(
        [
            *(sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("--config-file", str(pytestconfig.inipath), "--rootdir", str(pytestconfig.rootpath)),
            *(str(HERE / name) for name in RUN_THERE),
        ],
        # on a busy machine spinning threads only cost time
        env={**os.environ, **poorer_processor, "OMP_WAIT_POLICY": "passive"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stdout[-5000:]
