"""Backends: the hardware seam. One module or package per backend, the contract in `_base`."""

from __future__ import annotations

from ucudnn.backends._base import AbstractBackend as AbstractBackend
from ucudnn.backends._base import Executable as Executable
from ucudnn.errors import ConfigError


def open_backend(name: str = "auto") -> AbstractBackend:
    """Start a backend by name; "auto" takes the one of the best device present.

    >>> open_backend("torch_cpu").name
    'torch_cpu'

    Raises:
        ConfigError: there is no backend of that name.
    """
    if name in ("auto", "torch_cpu"):
        from ucudnn.backends.torch_cpu import TorchCpuBackend

        return TorchCpuBackend()
    raise ConfigError(f"backend must be one of auto, torch_cpu, got {name!r}")
