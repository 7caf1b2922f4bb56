"""Backends: the hardware seam. One module or package per backend, the contract in `_base`."""

from __future__ import annotations

from ucudnn.backends._base import AbstractBackend as AbstractBackend
from ucudnn.backends._base import Activity as Activity
from ucudnn.backends._base import Cost as Cost
from ucudnn.backends._base import Executable as Executable
from ucudnn.backends._base import Roofline as Roofline
from ucudnn.errors import ConfigError


def open_backend(name: str = "auto") -> AbstractBackend:
    """Start a backend by name; "auto" takes the one of the best device present.

    >>> open_backend("torch_cpu").name
    'torch_cpu'

    Raises:
        ConfigError: there is no backend of that name.
        UnsupportedError: its device or its libraries are not here.
    """
    if name == "cudnn" or (name == "auto" and sees_a_gpu()):
        from ucudnn.backends.cudnn.backend import CudnnBackend

        return CudnnBackend()
    if name in ("auto", "torch_cpu"):
        from ucudnn.backends.torch_cpu import TorchCpuBackend

        return TorchCpuBackend()
    raise ConfigError(f"backend must be one of auto, torch_cpu, cudnn, got {name!r}")


def sees_a_gpu() -> bool:
    """True if torch has an NVIDIA GPU in this process."""
    import torch

    return torch.cuda.is_available() and torch.version.cuda is not None
