"""Fixtures of tests on a GPU; without one they are skipped, each by its name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch

from ucudnn.backends.cudnn.backend import CudnnBackend
from ucudnn.problem import Problem

# Relative L2 error that sums of some hundred products of normal numbers stay under. A tensor core
# rounds the factors of a float32 product to the ten bits of TF32.
# Some engines add partial sums in the precision of the result.
TOLERANCE_BY_DTYPE = {"float64": 1e-13, "float32": 2e-6, "bfloat16": 1e-2, "float16": 2e-3}
TF32_TOLERANCE = 1e-3

SIZES = {
    "1d": {"input_size": (34,), "kernel_size": (3,), "padding": ((1, 1),)},
    "2d": {"input_size": (14, 12), "kernel_size": (3, 3), "padding": ((1, 1), (1, 1))},
    "2d-pointwise": {"input_size": (13, 11), "kernel_size": (1, 1)},
    "2d-strided": {
        "input_size": (15, 13),
        "kernel_size": (3, 2),
        "stride": (2, 2),
        "padding": ((1, 1), (0, 0)),
    },
    "2d-dilated": {
        "input_size": (13, 14),
        "kernel_size": (3, 3),
        "dilation": (2, 2),
        "padding": ((2, 2), (2, 2)),
    },
    "1d-asymmetric": {"input_size": (34,), "kernel_size": (3,), "padding": ((1, 0),)},
    "2d-asymmetric": {"input_size": (12, 12), "kernel_size": (3, 3), "padding": ((0, 2), (1, 0))},
    "3d": {"input_size": (8, 10, 9), "kernel_size": (3, 3, 3), "padding": ((1, 1), (1, 1), (1, 1))},
    "3d-asymmetric": {
        "input_size": (6, 9, 8),
        "kernel_size": (3, 3, 3),
        "padding": ((0, 1), (1, 1), (1, 1)),
    },
}
CHANNELS = {"dense": (16, 24, 1), "odd": (3, 5, 1), "grouped": (16, 32, 4), "depthwise": (8, 8, 8)}
KINDS = [
    *((dtype, "nchw", "strict") for dtype in TOLERANCE_BY_DTYPE),
    *((dtype, "nhwc", "strict") for dtype in TOLERANCE_BY_DTYPE),
    *(("float32", layout, "tf32") for layout in ("nchw", "nhwc")),
]


@pytest.fixture(scope="session")
def backend() -> CudnnBackend:
    if not torch.cuda.is_available():
        pytest.skip("it needs an NVIDIA GPU, and torch sees none here")
    # Float64 references are computed on the CPU: each worker of pytest-xdist uses its share of it.
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, torch.get_num_threads() // workers))
    return CudnnBackend()


@pytest.fixture(autouse=True)
def _skip_what_cannot_be_simulated(request: pytest.FixtureRequest, backend: CudnnBackend) -> None:
    marked = request.node.get_closest_marker("hardware")
    if marked is not None and torch.cuda.get_device_name() == "simulated":
        pytest.skip(f"a simulated GPU has no {marked.args[0]}")


@pytest.fixture(autouse=True)
def _end_where_the_gpu_is_broken(backend: CudnnBackend) -> Iterator[None]:
    """End the process after a kernel that faulted: in its context every other test would fail."""
    yield
    if backend.is_broken():
        if "PYTEST_XDIST_WORKER" in os.environ:  # the others go on, and a new one takes its place
            os._exit(1)
        pytest.exit("a kernel has faulted and this process can use the GPU no more", returncode=1)


@pytest.fixture(scope="session")
def geometries() -> dict[str, dict[str, object]]:
    """Sizes and channels of small layers, by name."""
    return {
        f"{size} {width}": {
            **fields,
            "in_channels": channels[0],
            "out_channels": channels[1],
            "groups": channels[2],
        }
        for size, fields in SIZES.items()
        for width, channels in CHANNELS.items()
    }


@pytest.fixture(params=KINDS, ids="-".join)
def kind(request: pytest.FixtureRequest) -> tuple[str, str, str]:
    """A dtype, a layout and a math."""
    found: tuple[str, str, str] = request.param
    return found


@pytest.fixture(scope="session")
def tolerance() -> Callable[[Problem], float]:
    return lambda problem: (
        TF32_TOLERANCE if problem.math == "tf32" else TOLERANCE_BY_DTYPE[problem.dtype]
    )
