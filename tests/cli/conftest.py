"""The command line, run in this process as a user would type it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from ucudnn import cli
from ucudnn.cli import console

MODEL = """
from torch import nn

def net():
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1))

def no_convolution():
    return nn.Linear(3, 3)

def no_module():
    return 3

def needs_arguments(width):
    return nn.Conv2d(3, width, 1)
"""

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
def table(tmp_path) -> Callable[..., object]:
    """Write a table of layers and return its path."""

    def write(*lines: str, header: str = HEADER):
        path = tmp_path / "layers.csv"
        path.write_text("\n".join([header, *(lines or (LAYER,))]) + "\n")
        return path

    return write
