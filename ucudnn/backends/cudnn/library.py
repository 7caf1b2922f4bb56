"""Choice of libcudnn: torch's if torch is loaded, so that a process never loads two."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ucudnn.errors import UnsupportedError

# The major version is part of the name: cuDNN keeps its C interface within one.
_FILE = "libcudnn.so.9"
# Where the nvidia-cudnn wheels put it, and torch wheels that bring their own.
_WHEEL_FOLDERS = ("nvidia/cudnn/lib", "torch/lib")


def find_library() -> Path:
    """Find the libcudnn that torch has loaded or would load, without loading it.

    It is the file that this process has mapped. If there is none and no CUDA build of torch is
    loaded, it is the one of the nvidia-cudnn wheel beside torch, or of the environment's library
    folder.

    Raises:
        UnsupportedError: there is none.
    """
    mapped = _mapped_library()
    if mapped is not None:
        return mapped
    torch = sys.modules.get("torch")
    if torch is not None and torch.version.cuda is not None:
        raise UnsupportedError(
            f"torch {torch.__version__} carries cuDNN inside itself, where nothing else can call "
            f"it; install a torch that depends on the nvidia-cudnn wheel"
        )
    folders = [Path(entry or os.curdir, folder) for entry in sys.path for folder in _WHEEL_FOLDERS]
    for folder in (*folders, Path(sys.prefix, "lib")):
        if (folder / _FILE).is_file():
            return (folder / _FILE).resolve()
    raise UnsupportedError(
        f"no {_FILE} is installed here; install torch for CUDA, or cuDNN alone: "
        f"pip install --no-deps nvidia-cudnn-cu13"
    )


def _mapped_library() -> Path | None:
    maps = Path("/proc/self/maps")
    if maps.exists():
        for line in maps.read_text(errors="replace").splitlines():
            # A line of /proc/self/maps ends in the absolute path of the file, if it has one.
            path = line.partition("/")[2]
            if path.rpartition("/")[2].startswith(_FILE):
                return Path("/", path)
    return None
