"""Registry of the backends: one entry for each, and the functions that look them up.

An entry holds what is known of a backend without importing it. `Config.backend` allows the names of
the entries, and also "auto" and "recorded".
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
    """What is known of a backend before it is imported."""

    name: str  # the name in `Config.backend` and in plan files
    device_type: str  # torch's name of the type of device
    dispatch_key: str  # torch's dispatch key for that type of device
    open: Callable[[], AbstractBackend]  # imports the backend and starts it


# Each function imports its backend when it is called, because importing this module must load
# neither torch nor cuDNN.
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
    """The entry of a backend; "auto" means cudnn if torch has an NVIDIA GPU, else torch_cpu.

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
    """Start a backend by name; "auto" means cudnn if torch has an NVIDIA GPU, else torch_cpu.

    >>> open_backend("torch_cpu").name
    'torch_cpu'

    Raises:
        ConfigError: there is no backend of that name.
        UnsupportedError: the backend's device or libraries are not on this machine.
    """
    return backend_entry(name).open()


def identify(name: str = "auto") -> tuple[Device, Software]:
    """The device and the library versions of a backend, found with as few imports as possible.

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

    # In a build for AMD GPUs, `is_available` can be true, too, but the CUDA version is None.
    return torch.cuda.is_available() and torch.version.cuda is not None
