"""The workspace that the backend reports is the one that malloc sees."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ucudnn.backends.torch_cpu.processor import has_instructions
from ucudnn.problem import BYTES_BY_DTYPE

# Prints rows (geometry, op, dtype, algorithm, kernel, true bytes, reported).
TRUTH = Path(__file__).with_name("workspace_truth.py")
MIB = 1 << 20


def slack(true):
    """Scratch of a float32 matrix product in each thread, which no limit counts."""
    return torch.get_num_threads() * MIB // 5 + true // 20


def check(row, is_native):
    """Reported is never less than true by more than a GEMM's own scratch, nor much more than it.

    Without instructions for the dtype the scratch of each thread is not seen: a bound is reported.
    """
    _, _, _, algorithm, kernel, true, reported = row
    assert true <= reported + slack(true), row
    most = 1.05 * true
    if not is_native and algorithm not in ("im2col_gemm", "gemm", "fft"):
        # float32 copies of a sample's matrices, the largest 4 MiB, in each thread
        most = torch.get_num_threads() * (true + 5 * MIB)
    elif kernel.startswith("slow_conv"):  # threads' buffers are not all there at once, by chance
        most = torch.get_num_threads() * true
    assert reported <= most + slack(true), row


@pytest.mark.process
@pytest.mark.parametrize(
    "dtypes",
    [("float32", "bfloat16"), pytest.param(tuple(BYTES_BY_DTYPE), marks=pytest.mark.nightly)],
    ids=["usual", "all"],
)
def test_reported_workspace_is_the_true_one(under_malloc, dtypes):
    rows = under_malloc(TRUTH, *dtypes)
    algorithms = {row[3] for row in rows}
    assert algorithms >= {"torch_default", "slow_conv2d", "im2col_gemm", "gemm", "fft"}
    assert algorithms >= {"phases", "diagonal_gemm"}
    for row in rows:
        computed = "float32" if row[3] == "onednn_float32" else row[2]
        check(row, has_instructions(computed))


@pytest.mark.nightly
def test_a_poorer_processor_takes_no_more_than_is_reported(under_malloc, poorer_processor):
    """There half precision, or all, is computed in scratch that only a bound is known of."""
    # with AVX-512 float32 is computed as above
    has_avx512 = poorer_processor["ONEDNN_MAX_CPU_ISA"].startswith("AVX512")
    dtypes = ["bfloat16", "float16"] if has_avx512 else ["float32", "bfloat16", "float16"]
    rows = under_malloc(TRUTH, *dtypes, **poorer_processor)
    # the imitation works: no such processor computes float16
    assert not any(row[2] == "float16" and row[4] == "onednn" for row in rows)
    for row in rows:
        check(row, is_native=False)
