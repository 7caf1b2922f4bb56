"""What becomes of a cuDNN that fails, by stand-ins that do nothing else."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ucudnn.backends.cudnn import runtime
from ucudnn.backends.cudnn.api import Cudnn
from ucudnn.backends.cudnn.backend import CudnnBackend
from ucudnn.backends.cudnn.graph import views_of
from ucudnn.backends.cudnn.runtime import Runtime
from ucudnn.errors import UcudnnError, UnsupportedError
from ucudnn.problem import OPS, Problem
from ucudnn.split import DEFAULT_ALGORITHM

PROBLEM = Problem("fprop", 2, 4, 4, (9, 9), (3, 3))
# Says by a line that a descriptor is destroyed.
SOURCE = """
#include <stdlib.h>
#include <unistd.h>
int cudnnBackendCreateDescriptor(int kind, void **made) { *made = malloc(1); return 0; }
int cudnnBackendDestroyDescriptor(void *made) { return write(1, "destroyed\\n", 10) < 0; }
"""


def fill(_: object, reference: Any) -> int:
    """Make a descriptor or a handle that is no null pointer."""
    reference._obj.value = 1
    return 0


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Runtime]:
    """Make a runtime whose library finalizes nothing, but gives a status."""
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(runtime, "_current_stream", lambda _: 0)

    def make(status: int) -> Runtime:
        cudnn = Cudnn.__new__(Cudnn)
        cudnn.version = 91900
        cudnn.functions = SimpleNamespace(
            cudnnCreate=lambda reference: fill(None, reference),
            cudnnSetStream=lambda *_: 0,
            cudnnBackendCreateDescriptor=fill,
            cudnnBackendSetAttribute=lambda *_: 0,
            cudnnBackendFinalize=lambda _: status,
            cudnnBackendDestroyDescriptor=lambda _: 0,
            cudnnDestroy=lambda _: 0,
            cudnnGetErrorString=lambda _: b"STATUS",
            cudnnGetLastErrorString=lambda *_: None,
        )
        return Runtime(cudnn)

    return make


def test_a_plan_that_cannot_be_built_is_an_error_as_torch_raises_it(failing):
    """EXECUTION_FAILED_CUDART: no refusal, and nothing that ends all of tuning."""
    here = failing(5003)
    with pytest.raises(RuntimeError, match=r"STATUS \(5003\)") as caught:
        here.build_plan(0, PROBLEM, "eng1", 1.0, 0.0, views_of(PROBLEM))
    assert not isinstance(caught.value, UcudnnError)
    backend = CudnnBackend.__new__(CudnnBackend)
    backend.runtime, backend._index = here, 0
    assert "5003" in (backend.build_refusal(PROBLEM, "eng1") or "")


def test_a_plan_that_is_refused_is_a_miss(failing):
    with pytest.raises(UnsupportedError, match=r"does not compute .* STATUS \(3000\)"):
        failing(3000).build_plan(0, PROBLEM, "eng1", 1.0, 0.0, views_of(PROBLEM))


def test_descriptors_are_left_to_the_end_of_the_process(compiled, python):
    """The driver may be gone when Python destroys its last objects."""
    program = (
        "import sys\n"
        "from ucudnn.backends.cudnn.api import Cudnn, Descriptor\n"
        "from ucudnn.backends.cudnn.constants import DescriptorKind\n"
        "cudnn = Cudnn(sys.argv[1])\n"
        "kept = [Descriptor(cudnn, DescriptorKind.ENGINE) for _ in range(3)]\n"
        "del kept[0]\n"
    )
    done = python("-c", program, compiled(91900, SOURCE))
    assert (done.stdout, done.stderr) == ("destroyed\n", "")


HALF = {"dtype": "float16"}
TF32 = {"math": "tf32"}


@pytest.mark.parametrize(
    ("fields", "first", "after"),
    [
        (HALF, 90800, 91500),
        ({"dtype": "bfloat16"}, 90800, 91500),
        (TF32, 91002, 91600),
        # torch leaves these to every version of cuDNN
        ({}, None, None),
        ({**HALF, "layout": "nhwc"}, None, None),
        ({**HALF, "kernel_size": (1, 1, 1)}, None, None),
        ({**HALF, "input_size": (9, 9), "kernel_size": (3, 3)}, None, None),
        ({**TF32, "input_size": (9, 9), "kernel_size": (3, 3)}, None, None),
    ],
    ids=str,
)
@pytest.mark.parametrize("op", OPS)
def test_engines_of_versions_that_are_wrong_in_3d_are_refused(op, fields, first, after):
    sizes = {"input_size": (9,) * 3, "kernel_size": (3,) * 3, **fields}
    problem = Problem(op, 2, 4, 4, **sizes)
    backend = CudnnBackend.__new__(CudnnBackend)
    refused = []
    for version in (90701, 90800, 91001, 91002, 91400, 91500, 91501, 91600, 91900):
        backend.runtime = SimpleNamespace(cudnn=SimpleNamespace(version=version))
        assert backend.refusal(problem, DEFAULT_ALGORITHM) is None
        if (reason := backend.refusal(problem, "eng1")) is not None:
            assert "this version of cuDNN may compute wrong results" in reason
            refused.append(version)
    known = (90800, 91001, 91002, 91400, 91500, 91501)
    assert refused == [one for one in known if first and first <= one < after]
