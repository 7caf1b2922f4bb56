"""What becomes of a cuDNN that fails, by a library that does nothing else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from ucudnn.backends.cudnn import runtime
from ucudnn.backends.cudnn.api import Cudnn
from ucudnn.backends.cudnn.backend import CudnnBackend
from ucudnn.backends.cudnn.graph import views_of
from ucudnn.backends.cudnn.runtime import Runtime
from ucudnn.errors import UcudnnError, UnsupportedError
from ucudnn.problem import Problem

PROBLEM = Problem("fprop", 2, 4, 4, (9, 9), (3, 3))
# Descriptors can be made, set and destroyed, which is printed; finalizing one has a given status.
SOURCE = """
#include <stdlib.h>
#include <unistd.h>
unsigned long cudnnGetVersion(void) {{ return 91900; }}
const char *cudnnGetErrorString(int status) {{ return "STATUS"; }}
void cudnnGetLastErrorString(char *text, unsigned long size) {{ text[0] = 0; }}
int cudnnCreate(void **handle) {{ *handle = malloc(1); return 0; }}
int cudnnDestroy(void *handle) {{ return 0; }}
int cudnnSetStream(void *handle, void *stream) {{ return 0; }}
int cudnnBackendCreateDescriptor(int kind, void **made) {{ *made = malloc(1); return 0; }}
int cudnnBackendDestroyDescriptor(void *made) {{ return write(1, "destroyed\\n", 10) < 0; }}
int cudnnBackendFinalize(void *made) {{ return {status}; }}
int cudnnBackendSetAttribute(void *made, int name, int kind, long count, void *values)
{{ return 0; }}
int cudnnBackendGetAttribute(void *made, int name, int kind, long most, long *count, void *values)
{{ return 0; }}
int cudnnBackendExecute(void *handle, void *plan, void *pack) {{ return {status}; }}
"""


@pytest.fixture
def failing(
    compiled: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> Callable[[int], Runtime]:
    """Make a runtime whose library fails with a status."""
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(runtime, "_current_stream", lambda _: 0)
    return lambda status: Runtime(Cudnn(compiled(SOURCE.format(status=status))))


def test_a_plan_that_cannot_be_built_is_an_error_as_torch_raises_it(failing) -> None:
    """EXECUTION_FAILED_CUDART: no refusal, and nothing that ends all of tuning."""
    here = failing(5003)
    with pytest.raises(RuntimeError, match=r"STATUS \(5003\)") as caught:
        here.build(0, PROBLEM, "eng1", 1.0, 0.0, views_of(PROBLEM))
    assert not isinstance(caught.value, UcudnnError)
    backend = CudnnBackend.__new__(CudnnBackend)
    backend.runtime, backend._index = here, 0
    assert "5003" in (backend.build_refusal(PROBLEM, "eng1") or "")


def test_a_plan_that_is_refused_is_a_miss(failing) -> None:
    with pytest.raises(UnsupportedError, match=r"does not compute .* STATUS \(3000\)"):
        failing(3000).build(0, PROBLEM, "eng1", 1.0, 0.0, views_of(PROBLEM))


def test_descriptors_are_left_to_the_end_of_the_process(compiled) -> None:
    """The driver may be gone when Python destroys its last objects."""
    program = (
        "import sys\n"
        "from ucudnn.backends.cudnn.api import Cudnn, Descriptor\n"
        "from ucudnn.backends.cudnn.constants import Kind\n"
        "cudnn = Cudnn(sys.argv[1])\n"
        "kept = [Descriptor(cudnn, Kind.ENGINE) for _ in range(3)]\n"
        "del kept[0]\n"
    )
    command = [sys.executable, "-c", program, str(compiled(SOURCE.format(status=0)))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("destroyed\n", "")
