"""The command line, run in this process as a user would type it."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from by_hand import in_chunks, where_it_can

from ucudnn import cli
from ucudnn.cli import console
from ucudnn.config import Config

MODEL = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1))

def no_convolution():
    return nn.Linear(3, 3)

def no_module():
    return 3

def needs_arguments(width):
    return nn.Conv2d(3, width, 1)

made = net()

class Conditional(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.embedding = nn.Embedding(10, width)
        self.convolution = nn.Conv2d(3, width, 3)

    def forward(self, x, t):
        return self.convolution(x) + self.embedding(t)[:, :, None, None]

def volumes():
    return nn.Sequential(nn.Conv3d(4, 8, 3), nn.ReLU(), nn.Conv3d(8, 4, 1))

def of_values():
    class Model(nn.Conv1d):
        def forward(self, x):
            return super().forward(x) if x.sum() != 0 else x
    return Model(3, 4, 3)

def inputs():
    yield {"x": torch.rand(2, 3, 8, 8), "t": torch.tensor([3, 9])}
    yield torch.rand(4, 3, 6, 6), torch.tensor([0, 1, 2, 3])
"""

# Scripts that train when they are imported.
collect_ignore = ["unchanged"]

HEADER = (
    "name,n,c,d,h,w,k,kd,kh,kw,pad_d,pad_h,pad_w,stride_d,stride_h,stride_w,"
    "dil_d,dil_h,dil_w,groups"
)
LAYER = "conv1,8,3,1,12,12,4,1,3,3,0,1,1,1,1,1,1,1,1,1"


@dataclass(frozen=True)
class Result:
    """What a command left: its exit status and what it printed."""

    status: int
    out: str
    err: str


@pytest.fixture
def ucudnn(monkeypatch, capsys) -> Callable[..., Result]:
    """Run a command line; the terminal is wide, whatever it was when the console was made."""
    monkeypatch.setattr(console.out, "width", 220)

    def run(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["ucudnn", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "220")
        status = 0
        try:
            cli.main()
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        captured = capsys.readouterr()
        return Result(status, captured.out, captured.err)

    return run


@pytest.fixture
def model(tmp_path):
    """A Python file with functions that make models, as `file.py`."""
    path = tmp_path / "some_models.py"
    path.write_text(MODEL)
    return path


@pytest.fixture
def made(tmp_path) -> Callable[..., Path]:
    """A function that writes a plan of `net` for this machine, which nothing measured."""
    import torch

    from ucudnn.backends import open_backend
    from ucudnn.steps.tracing import trace_layers

    def make(name: str, chunk: int = 2, **settings: object) -> Path:
        space: dict[str, object] = {"__name__": "models"}
        exec(MODEL, space)
        config, backend = Config(**settings), open_backend("torch_cpu")
        layers = trace_layers(space["made"], torch.empty(8, 3, 12, 12), config.ops).layers
        algorithm_of = where_it_can(backend, "im2col_gemm", chunk)
        path = tmp_path / f"{name}.plan.json"
        in_chunks(backend, layers, chunk, algorithm_of, config).save(path)
        return path

    return make


@pytest.fixture
def output(tmp_path):
    """Where a plan is written."""
    return tmp_path / "plan.json"


@pytest.fixture
def table(tmp_path) -> Callable[..., object]:
    """Write a table of layers and return its path."""

    def write(*lines: str, header: str = HEADER):
        path = tmp_path / "layers.csv"
        path.write_text("\n".join([header, *(lines or (LAYER,))]) + "\n")
        return path

    return write


@pytest.fixture
def run(
    repository: Path, package: Path, tmp_path: Path
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs Python in an empty folder where ucudnn is installed, as its metadata say."""
    declared = tomllib.loads((repository / "pyproject.toml").read_text())["project"]["entry-points"]
    metadata = tmp_path / "site" / "ucudnn_here-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: ucudnn-here\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        "\n".join(
            f"[{group}]\n" + "\n".join(f"{name} = {value}" for name, value in entries.items())
            for group, entries in declared.items()
        )
    )
    folder = tmp_path / "work"
    folder.mkdir()
    path = os.pathsep.join([str(package.parent), str(metadata.parent)])

    def call(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *map(str, words)],
            check=False,
            capture_output=True,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
            text=True,
            timeout=300,
        )

    call.folder = folder  # type: ignore[attr-defined]
    return call
