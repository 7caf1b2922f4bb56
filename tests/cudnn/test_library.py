"""Which libcudnn is taken, and what one that will not do is told."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ucudnn.backends.cudnn import api as room
from ucudnn.backends.cudnn.api import Cudnn, find_library
from ucudnn.backends.cudnn.profile import DeviceProfile
from ucudnn.errors import UnsupportedError

H200 = Path(__file__).parents[2] / "benchmarks" / "devices" / "h200.json"


def test_a_library_too_old_for_profiles_is_refused(compiled):
    path = compiled(90700)
    cudnn = Cudnn(path)
    assert cudnn.version_text == "9.7.0"
    with pytest.raises(UnsupportedError, match=r"need cuDNN 9\.8 or newer, .* is 9\.7\.0"):
        DeviceProfile.load(H200).descriptor(cudnn)


def test_what_is_no_cudnn_is_refused(compiled, tmp_path):
    (tmp_path / "text.so").write_text("no library")
    for path in (compiled(None, "int x;"), tmp_path / "text.so", tmp_path / "missing.so"):
        with pytest.raises(UnsupportedError, match="cannot load cuDNN 9 from"):
            Cudnn(path)


def test_the_wheel_beside_torch_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "_mapped_library", lambda: None)
    path = tmp_path / "nvidia/cudnn/lib/libcudnn.so.9"
    path.parent.mkdir(parents=True)
    path.touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert find_library() == path


def test_without_any_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "_mapped_library", lambda: None)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(UnsupportedError, match="pip install --no-deps nvidia-cudnn-cu13"):
        find_library()


def test_what_is_loaded_comes_first(compiled, python, tmp_path):
    """A process never holds two: the one that torch has loaded is the one."""
    program = (
        "import ctypes, sys\n"
        "from ucudnn.backends.cudnn.api import find_library\n"
        "ctypes.CDLL(sys.argv[1])\n"
        "sys.path[:0] = [sys.argv[2]]\n"
        "print(find_library())"
    )
    other = tmp_path / "other"
    decoy = other / "nvidia/cudnn/lib/libcudnn.so.9"
    decoy.parent.mkdir(parents=True)
    decoy.touch()
    path = compiled(90700)
    assert python("-c", program, path, other).stdout.strip() == str(path)


def test_a_torch_with_its_own_cudnn_inside_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "_mapped_library", lambda: None)
    torch = SimpleNamespace(__version__="2.99", version=SimpleNamespace(cuda="13.0"))
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(UnsupportedError, match="torch 2.99 carries cuDNN inside itself"):
        find_library()
