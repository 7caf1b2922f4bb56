"""Real cuDNN without a GPU, in a child process per version.

CUDNN_TEST_FOLDERS names folders that `pip install --target` filled with nvidia-cudnn wheels; `make
cudnn` sets it. Without it these tests are skipped; with it they fail where cuDNN does not load.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDERS = [
    Path(name) for name in os.environ.get("CUDNN_TEST_FOLDERS", "").split(os.pathsep) if name
]
WITHOUT = "CUDNN_TEST_FOLDERS names no folder with an nvidia-cudnn wheel; `make cudnn` makes some"
H200 = Path(__file__).parents[2] / "benchmarks" / "devices" / "h200.json"


class Inside:
    """A process with stubs in place of the driver, in which functions of inside.py are called."""

    def __init__(self, library: Path, cache: Path) -> None:
        self.library = library
        self._child = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("inside.py"), library, H200, cache],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, function: str, **arguments: Any) -> Any:
        """Call a function with JSON values; fail where it raises."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(json.dumps([function, arguments]) + "\n")
        self._child.stdin.flush()
        line = self._child.stdout.readline()
        assert line, f"the process with {self.library} died: {self._child.wait()}"
        outcome, value = json.loads(line)
        assert outcome == "value", value
        return value

    def close(self) -> None:
        with self._child:
            self._child.kill()


@pytest.fixture(scope="session")
def stub_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the stubs are built, once for all tests."""
    return tmp_path_factory.mktemp("user-cache")


@pytest.fixture(scope="session", params=FOLDERS or [None], ids=lambda path: path and path.name)
def library(request: pytest.FixtureRequest) -> Path:
    """A libcudnn.so.9; each version in turn."""
    if request.param is None:
        pytest.skip(WITHOUT)
    path = request.param / "nvidia/cudnn/lib/libcudnn.so.9"
    assert path.is_file(), f"{request.param} holds no nvidia-cudnn wheel"
    return path


@pytest.fixture(scope="session")
def inside(library: Path, stub_cache: Path) -> Iterator[Inside]:
    """The process with this version."""
    process = Inside(library, stub_cache)
    yield process
    process.close()


@pytest.fixture(scope="session")
def newest(stub_cache: Path) -> Iterator[Inside]:
    """The process with the first folder's version, for what one version shows."""
    if not FOLDERS:
        pytest.skip(WITHOUT)
    process = Inside(FOLDERS[0] / "nvidia/cudnn/lib/libcudnn.so.9", stub_cache)
    yield process
    process.close()


# The functions that loading a library looks for, beside its version.
NAMES = (
    *("cudnnGetErrorString", "cudnnGetLastErrorString", "cudnnCreate", "cudnnDestroy"),
    *("cudnnSetStream", "cudnnBackendCreateDescriptor", "cudnnBackendDestroyDescriptor"),
    *("cudnnBackendFinalize", "cudnnBackendSetAttribute", "cudnnBackendGetAttribute"),
    "cudnnBackendExecute",
)


@pytest.fixture
def compiled(tmp_path: Path) -> Callable[..., Path]:
    """Build a libcudnn.so.9 of a version; functions that its C source has not do nothing.

    Without a version it is the source alone.
    """

    def build(version: int | None, source: str = "") -> Path:
        path = tmp_path / "nvidia/cudnn/lib/libcudnn.so.9"
        path.parent.mkdir(parents=True)
        lines = [source]
        if version is not None:
            lines += [f"unsigned long cudnnGetVersion(void) {{ return {version}; }}"]
            lines += [f"int {name}(void) {{ return 0; }}" for name in NAMES if name not in source]
        command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)]
        subprocess.run(command, input="\n".join(lines), text=True, check=True)
        return path

    return build
