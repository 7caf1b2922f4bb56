"""Geometries that every algorithm is tried on, and torch's own answer in float64."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import pytest
import torch

from ucudnn.backends import AbstractBackend, open_backend

GEOMETRIES = {
    "1d": {"input_size": (19,), "kernel_size": (3,), "padding": ((1, 1),)},
    "1d-pointwise": {"input_size": (19,), "kernel_size": (1,)},
    "1d-strided-dilated": {
        "input_size": (23,),
        "kernel_size": (3,),
        "stride": (2,),
        "dilation": (3,),
        "padding": ((2, 2),),
    },
    "2d": {"input_size": (13, 11), "kernel_size": (3, 3), "padding": ((1, 1), (1, 1))},
    "2d-rectangular-strided": {
        "input_size": (13, 11),
        "kernel_size": (3, 2),
        "stride": (2, 3),
        "padding": ((1, 1), (0, 0)),
    },
    "2d-pointwise": {"input_size": (13, 11), "kernel_size": (1, 1)},
    "2d-pointwise-strided": {"input_size": (13, 12), "kernel_size": (1, 1), "stride": (2, 2)},
    # As many places as the input has, but others.
    "2d-pointwise-padded-strided": {
        "input_size": (4, 4),
        "kernel_size": (1, 1),
        "stride": (2, 2),
        "padding": ((2, 2), (2, 2)),
    },
    "2d-dilated": {
        "input_size": (13, 11),
        "kernel_size": (3, 3),
        "dilation": (2, 1),
        "padding": ((2, 2), (1, 1)),
    },
    "2d-stride-above-kernel": {"input_size": (13, 11), "kernel_size": (2, 2), "stride": (4, 3)},
    "2d-kernel-above-input": {
        "input_size": (3, 3),
        "kernel_size": (5, 5),
        "padding": ((3, 3), (2, 2)),
    },
    "2d-tap-in-padding-alone": {
        "input_size": (1, 4),
        "kernel_size": (3, 2),
        "padding": ((1, 1), (0, 0)),
    },
    "3d-strided": {
        "input_size": (7, 6, 5),
        "kernel_size": (3, 3, 3),
        "stride": (2, 1, 2),
        "padding": ((1, 1), (1, 1), (1, 1)),
    },
    "3d-pointwise": {"input_size": (7, 6, 5), "kernel_size": (1, 1, 1)},
}
# Settings by which oneDNN, aten and MKL use no more instructions than an older processor has; a
# processor that lacks them anyway is not changed. There are none for ARM.
POORER_PROCESSORS = {
    "Cooper Lake": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "Cascade Lake": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"},
    "Haswell": {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
    "Nehalem": {
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    },
}
# Relative L2 error that sums of a hundred products of normal numbers stay under.
TOLERANCE_BY_DTYPE = {"float64": 1e-14, "float32": 1e-6, "bfloat16": 6e-3, "float16": 8e-4}


@pytest.fixture(scope="session")
def backend() -> AbstractBackend:
    return open_backend("torch_cpu")


@pytest.fixture(params=GEOMETRIES.values(), ids=GEOMETRIES.keys(), scope="session")
def geometry(request: pytest.FixtureRequest) -> dict[str, object]:
    return request.param


@pytest.fixture(scope="session", params=POORER_PROCESSORS.values(), ids=POORER_PROCESSORS.keys())
def poorer_processor(request: pytest.FixtureRequest) -> dict[str, str]:
    """Environment of a child process that computes as an older processor would."""
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("only x86 libraries imitate older processors")
    return request.param


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that torch allocates without a value holds NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def tolerance() -> dict[str, float]:
    return TOLERANCE_BY_DTYPE
