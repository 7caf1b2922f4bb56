"""Commands on a simulated GPU, each in processes of its own.

SIMULATED_GPU_CUDNN names a libcudnn.so.9; `make simulated-gpu` sets it. Without it these tests are
skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ucudnn.layer_table import COLUMNS

# Modules of the simulated processes alone.
collect_ignore = ["device"]
DEVICE = Path(__file__).with_name("device")
HEADER = ",".join(COLUMNS)
TABLES = {
    "alexnet_ucudnn_csv": "conv2,8,4,1,9,9,8,1,3,3,0,1,1,1,1,1,1,1,1,1",
    "resnet50_n256": "layer1.0.conv1,8,8,1,6,6,8,1,1,1,0,0,0,1,1,1,1,1,1,1",
    "nnunet_3d_fullres_n2": "encoder.conv,2,8,8,8,8,8,3,3,3,1,1,1,1,1,1,1,1,1,1",
}
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder in which the stub of the driver is built, once for all tests."""
    return tmp_path_factory.mktemp("stubs")


@pytest.fixture
def faults(tmp_path: Path) -> Path:
    """Folder of failures to come."""
    folder = tmp_path / "faults"
    folder.mkdir()
    return folder


@pytest.fixture
def layers(tmp_path: Path) -> Path:
    """Folder of tables with the names of real ones and one small layer each."""
    folder = tmp_path / "layers"
    folder.mkdir()
    for name, line in TABLES.items():
        (folder / f"{name}.csv").write_text(f"{HEADER}\n{line}\n")
    return folder


@pytest.fixture
def simulated(repository: Path, stubs: Path, faults: Path, tmp_path: Path) -> Command:
    """A function that runs Python with some arguments in the checkout, on the simulated GPU.

    It fails where the command does, and returns the process with its output.
    """
    library = os.environ.get("SIMULATED_GPU_CUDNN")
    if library is None:
        pytest.skip("SIMULATED_GPU_CUDNN names no libcudnn.so.9; run `make simulated-gpu`")
    assert Path(library).is_file()
    environment = {
        **os.environ,
        "SIMULATED_GPU": str(repository / "benchmarks" / "devices" / "h200.json"),
        "SIMULATED_GPU_STUBS": str(stubs),
        "SIMULATED_GPU_FAULTS": str(faults),
        "SIMULATED_GPU_PATIENCE": "20",
        "PYTHONPATH": os.pathsep.join(map(str, (DEVICE, repository))),
        "OMP_NUM_THREADS": "1",
        "UCUDNN_CACHE": str(tmp_path / "cache"),
    }

    def run(
        *arguments: object, is_failing: bool = False, **more: str
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=repository,
            env={**environment, **more},
            capture_output=True,
            text=True,
            timeout=1200,
            check=False,
        )
        assert bool(done.returncode) == is_failing, done.stdout[-6000:] + done.stderr[-6000:]
        return done

    return run
