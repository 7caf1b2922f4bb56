"""Stubs in place of the NVIDIA driver: built once, and only where nothing can use a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch  # noqa: F401 - what stubs must never meet

from ucudnn.backends.cudnn.offline import build_stubs, list_configurations, load_stubs
from ucudnn.backends.cudnn.profile import DeviceProfile
from ucudnn.errors import UnsupportedError
from ucudnn.problem import Problem

H200 = Path(__file__).parents[2] / "benchmarks" / "devices" / "h200.json"
PROBLEM = Problem("fprop", 2, 4, 4, (9, 9), (3, 3))
STUBS = {"libcuda.so.1", "libcublasLt.so.12", "libcublasLt.so.13"}


def mapped() -> str:
    return Path("/proc/self/maps").read_text()


def test_without_a_compiler_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnsupportedError, match="needs a C compiler, .*install gcc or clang"):
        build_stubs(tmp_path)
    assert not list((tmp_path / "stubs").iterdir())


def test_what_a_compiler_says_is_passed_on(tmp_path, monkeypatch):
    compiler = tmp_path / "bin" / "cc"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\necho no space left >&2\nexit 4\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{compiler.parent}:/usr/bin:/bin")
    with pytest.raises(UnsupportedError, match="could not build libcuda.so.1, .*no space left"):
        build_stubs(tmp_path)
    assert not list((tmp_path / "stubs").iterdir())


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UnsupportedError, match="cannot build the stub .* set XDG_CACHE_HOME"):
        build_stubs(tmp_path / "file")


def test_several_processes_may_build_at_once_and_later_ones_need_not(tmp_path, monkeypatch):
    program = (
        "import sys; from pathlib import Path\n"
        "from ucudnn.backends.cudnn.offline import build_stubs\n"
        "print(build_stubs(Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    folders = {child.communicate()[0].strip() for child in children}
    assert [child.returncode for child in children] == [0] * 6
    monkeypatch.setenv("PATH", "")
    folder = build_stubs(tmp_path)
    assert folders == {str(folder)}
    assert {path.name for path in folder.iterdir()} == STUBS
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_process_with_torch_never_gets_a_stub(tmp_path):
    assert "torch" in sys.modules
    with pytest.raises(UnsupportedError, match="must not enter a process that has loaded torch"):
        load_stubs(tmp_path)
    assert str(tmp_path) not in mapped()
    assert not (tmp_path / "stubs").exists()


def test_after_the_stubs_nothing_that_uses_a_gpu_can_be_imported(inside):
    for name in ("torch", "cupy"):
        assert inside("import_of", name=name) == "ModuleNotFoundError"


def test_cudnn_says_that_there_is_no_device(inside):
    _, name, is_refusal = inside("error_of_opening_the_device")
    assert name == "CUDNN_STATUS_NOT_INITIALIZED"
    assert not is_refusal


def test_one_libcudnn_is_loaded(inside, library):
    loaded = [name for name in inside("loaded_libraries") if "libcudnn" in name]
    assert loaded
    assert {Path(name).parent for name in loaded} == {library.parent}


def test_asking_from_a_process_with_torch_loads_neither_stub_nor_cudnn(
    library, stub_cache, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(stub_cache))
    listed = list(list_configurations([PROBLEM], DeviceProfile.load(H200), library))
    assert listed[0].configurations
    assert "/stubs/" not in mapped()
    assert str(library.parent) not in mapped()


def test_a_child_that_dies_is_reported_with_what_it_said(library, monkeypatch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import os; os.write(2, b'struck'); os._exit(9)")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(UnsupportedError, match="ended with status 9: struck"):
        list(list_configurations([PROBLEM], DeviceProfile.load(H200), library))


def test_a_library_that_cannot_be_loaded_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UnsupportedError, match="cannot load cuDNN 9 from /no/such.so"):
        list(list_configurations([PROBLEM], DeviceProfile.load(H200), Path("/no/such.so")))
