"""Registry of the backends: one entry for each, and the functions that look them up.

An entry holds what is known of a backend without importing it. `Config.backend` allows the same
names, and "auto" and "recorded".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucudnn.errors import ConfigError

if TYPE_CHECKING:
    from ucudnn.backends._base import AbstractBackend
    from ucudnn.measurement import Device, Software


@dataclass(frozen=True, slots=True)
class BackendEntry:
    """A backend before it is imported."""

    name: str  # as in `Config.backend` and in plan files
    device_type: str  # as torch calls it
    dispatch_key: str  # of torch's kernels for that type
    open: Callable[[], AbstractBackend]  # imports the backend and starts it


# Imported inside: importing this module must load neither torch nor cuDNN.
def _open_torch_cpu() -> AbstractBackend:
    from ucudnn.backends.torch_cpu.backend import TorchCpuBackend

    return TorchCpuBackend()


def _open_cudnn() -> AbstractBackend:
    from ucudnn.backends.cudnn.backend import CudnnBackend

    return CudnnBackend()


# Plan files hold these names, so they must not change.
_ENTRIES = (
    BackendEntry("torch_cpu", "cpu", "CPU", _open_torch_cpu),
    BackendEntry("cudnn", "cuda", "CUDA", _open_cudnn),
)
BACKENDS = {entry.name: entry for entry in _ENTRIES}


def backend_entry(name: str = "auto") -> BackendEntry:
    """The entry of a backend; "auto": the backend of the best device present.

    >>> backend_entry("cudnn").device_type
    'cuda'
    """
    if name == "auto":
        return BACKENDS["cudnn" if sees_a_gpu() else "torch_cpu"]
    if name not in BACKENDS:
        raise ConfigError(f"backend must be one of auto, {', '.join(BACKENDS)}, got {name!r}")
    return BACKENDS[name]


def entry_for_device(device_type: str) -> BackendEntry:
    """The entry of the backend that runs on a kind of device.

    >>> entry_for_device("cpu").name
    'torch_cpu'
    """
    # Each kind of device has exactly one backend.
    (found,) = [entry for entry in BACKENDS.values() if entry.device_type == device_type]
    return found


def open_backend(name: str = "auto") -> AbstractBackend:
    """Start a backend by name; "auto": the backend of the best device present.

    >>> open_backend("torch_cpu").name
    'torch_cpu'

    Raises:
        ConfigError: there is no backend of that name.
        UnsupportedError: its device or its libraries are not on this machine.
    """
    return backend_entry(name).open()


def identify(name: str = "auto") -> tuple[Device, Software]:
    """The device and the versions of a backend, of which as little as possible is imported.

    >>> identify("torch_cpu")[0].type
    'cpu'
    """
    entry = backend_entry(name)
    if entry.name == "torch_cpu":
        from ucudnn.backends.torch_cpu import processor

        return processor.cpu_device(), processor.cpu_software()
    backend = entry.open()
    return backend.device(), backend.software()


def sees_a_gpu() -> bool:
    """True if torch has an NVIDIA GPU in this process."""
    import torch

    # A build for AMD GPUs answers is_available, too, and has no CUDA version.
    return torch.cuda.is_available() and torch.version.cuda is not None
