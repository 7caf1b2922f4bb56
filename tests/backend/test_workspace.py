"""The workspace that the backend reports is the one that malloc sees."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from ucudnn.problem import Problem

HERE = Path(__file__).parent
MIB = 1 << 20


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    """Rows (geometry, op, dtype, algorithm, true bytes, reported bytes) from a child process."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to build the counting malloc")
    library = tmp_path_factory.mktemp("malloc") / "counting_malloc.so"
    source = HERE / "counting_malloc.c"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    child = subprocess.run(
        [sys.executable, HERE / "workspace_truth.py", library],
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in child.stdout.splitlines()]


def test_reported_workspace_is_the_true_one(truth):
    """Never less than the truth by more than a GEMM's own scratch; where it is more, a bound."""
    algorithms = {row[3] for row in truth}
    assert algorithms >= {
        "torch_default",
        "onednn_nhwc",
        "slow_conv2d",
        "im2col_gemm",
        "gemm",
        "fft",
    }
    for row in truth:
        _, op, dtype, algorithm, true, reported = row
        # oneDNN's bfloat16 matrix product reorders weights in scratch of its own
        slack = MIB // 5 + true // 20
        assert true <= reported + slack, row
        most = 1.05
        if op == "dgrad" and algorithm in ("torch_default", "slow_conv2d"):
            most = torch.get_num_threads()  # whose buffers are not all there at once, by chance
        elif op == "dgrad" and dtype == "float16":
            most = 1.3
        assert reported <= true * most + slack, row


def test_known_workspace_of_onednn(backend):
    """64x256x56x56, 1x1 filter: as large as x in channels-first, nothing in channels-last."""
    for layout, least, most in (("nchw", 195 * MIB, 197 * MIB), ("nhwc", 0, MIB)):
        problem = Problem("fprop", 64, 256, 64, (56, 56), (1, 1), layout=layout)
        if backend.candidates(problem)[0].notes != ("kernel=onednn",):
            pytest.skip("aten does not run oneDNN on this processor")
        a, b = backend.operands(problem, 64)
        run = partial(backend.executable(problem, "torch_default").alone, a, b)
        assert least <= backend.workspace_bytes(run, [(problem, "torch_default")]) <= most


def test_peak_counts_what_lives_at_the_same_time(backend):
    """An oracle of plain tensors: two temporaries in turn peak at the larger one."""

    def in_turn():
        torch.empty(3 * MIB, dtype=torch.uint8)
        torch.empty(5 * MIB, dtype=torch.uint8)
        return torch.empty(7, dtype=torch.uint8)

    def at_once():
        kept = [torch.empty(size * MIB, dtype=torch.uint8) for size in (3, 5)]
        del kept
        return torch.empty(7, dtype=torch.uint8)

    assert abs(backend.workspace_bytes(in_turn, []) - 5 * MIB) < 4096
    assert abs(backend.workspace_bytes(at_once, []) - 8 * MIB) < 4096
