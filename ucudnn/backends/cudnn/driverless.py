"""Stub libraries in place of the NVIDIA driver, for a child process that only plans.

cuDNN loads libcuda and libcublasLt even if it runs nothing. Without a driver, stubs of both are
built once with the system's C compiler in the user's cache folder (as Triton builds its launcher),
and loaded before cuDNN. A process with the stubs cannot use a GPU, and frameworks that try would
fail with misleading errors. So importing them is blocked.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from ucudnn.errors import UnsupportedError

_DRIVER = "libcuda.so.1"
# Frameworks that would call the stub as if it were the driver.
_USERS_OF_A_DRIVER = ("torch", "cupy", "jax", "tensorflow")
# Any C compiler will do: the stubs are plain C without headers.
_COMPILERS = ("cc", "gcc", "clang")


class _Stub(NamedTuple):
    """A library to build: its file name, its source and what the source asks for."""

    file: str
    source: str
    options: tuple[str, ...] = ()


_CUBLASLT = tuple(
    _Stub(f"libcublasLt.so.{major}", "libcublasLt.c", (f"-DVERSION={major}0000",))
    for major in (12, 13)  # of CUDA; cuDNN asks for the one that it was built for
)
_STUBS = (_Stub(_DRIVER, "libcuda.c"), *_CUBLASLT)


def has_driver() -> bool:
    """True if this machine has an NVIDIA driver; it is loaded, but not started."""
    try:
        ctypes.CDLL(_DRIVER)
    except OSError:
        return False
    return True


def load_stubs(cache: Path | None = None) -> None:
    """Load the stub libraries into this process, which must only plan.

    From then on importing torch, CuPy, JAX or TensorFlow fails here.

    Args:
        cache: folder to build them in; None: the user's cache folder.

    Raises:
        UnsupportedError: a library that may use a GPU is loaded, or the stubs cannot be built.
    """
    loaded = [name for name in _USERS_OF_A_DRIVER if sys.modules.get(name) is not None]
    if loaded:
        raise UnsupportedError(
            f"the stub of the NVIDIA driver must not enter a process that has loaded "
            f"{', '.join(loaded)}; plan in a child process"
        )
    folder = build_stubs(cache)
    for name in _USERS_OF_A_DRIVER:
        sys.modules[name] = None  # type: ignore[assignment]  # how Python marks what must not load
    for stub in _STUBS:
        ctypes.CDLL(str(folder / stub.file), mode=ctypes.RTLD_GLOBAL)


def build_stubs(cache: Path | None = None) -> Path:
    """Build the stub libraries if they do not exist yet, and return their folder.

    Args:
        cache: folder to build in; None: the user's cache folder.

    Raises:
        UnsupportedError: there is no C compiler, it fails, or the folder cannot be written.
    """
    if cache is None:
        from platformdirs import user_cache_path

        cache = user_cache_path("ucudnn", appauthor=False)
    sources = files("ucudnn.backends.cudnn") / "stubs"
    texts = {stub.source: (sources / stub.source).read_text() for stub in _STUBS}
    # A folder per content and architecture: a new version of the package, or a home folder shared
    # by machines of two architectures, builds its own.
    digest = hashlib.sha256(repr((texts, _STUBS, os.uname().machine)).encode()).hexdigest()
    folder = cache / "stubs" / digest[:16]
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Beside the final folder, because a rename is atomic only within a file system.
        building = Path(tempfile.mkdtemp(prefix="building-", dir=folder.parent))
    except OSError as error:
        raise UnsupportedError(
            f"cannot build the stub of the NVIDIA driver in {folder.parent}: {error.strerror}; "
            f"set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    try:
        for stub in _STUBS:
            _compile(stub, texts[stub.source], building)
        _publish(building, folder)
    finally:
        # After a rename there is nothing left to remove; after a failure there is half a build.
        shutil.rmtree(building, ignore_errors=True)
    return folder


def _publish(building: Path, folder: Path) -> None:
    """Rename a complete folder into place, unless another process was first."""
    try:
        building.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def _compile(stub: _Stub, source: str, folder: Path) -> None:
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise UnsupportedError(
            f"planning for a GPU on a machine without an NVIDIA driver needs a C compiler, and "
            f"none of {', '.join(_COMPILERS)} is on the PATH; install gcc or clang"
        )
    done = subprocess.run(  # noqa: S603 - the system's compiler, on a source of ours
        [
            *(compiler, "-shared", "-fPIC", "-O1", *stub.options, "-x", "c", "-"),
            *(f"-Wl,-soname,{stub.file}", "-o", str(folder / stub.file)),
        ],
        input=source,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise UnsupportedError(
            f"{compiler} could not build {stub.file}, which stands in for the NVIDIA driver: "
            f"{done.stderr.strip() or f'exit status {done.returncode}'}"
        )
