"""Memory of the simulated GPU: tensors that factories made, of this process and those beside it.

SIMULATED_GPU_MEMORY names a folder in which each process notes the most that it had allocated, in
bytes, in a file with its process id as name. Results of torch's operators are not counted.
"""

from __future__ import annotations

import os
from pathlib import Path
from threading import Lock
from types import SimpleNamespace

import torch
from torch.multiprocessing.reductions import StorageWeakRef

# The machine has no more for a GPU that is not there.
_MOST_FREE = 4 << 30
_lock = Lock()
_sizes: dict[StorageWeakRef, int] = {}
_here = SimpleNamespace(whole=0, peak=0, fraction=1.0)


def install(whole: int) -> None:
    """Let the device have so many bytes."""
    _here.whole = whole


def take(tensor: torch.Tensor) -> None:
    """Count a new tensor.

    Raises:
        torch.OutOfMemoryError: it exceeds the fraction of this process, or what is free.
    """
    storage = tensor.untyped_storage()
    size, reference = storage.nbytes(), StorageWeakRef(storage)
    with _lock:
        if size > _free() or _allocated() + size > _here.fraction * _here.whole:
            raise torch.OutOfMemoryError(f"CUDA out of memory: simulated, {size} bytes")
        _sizes[reference] = size
        if _allocated() > _here.peak:
            _here.peak = _allocated()
            _note(_here.peak)


def allocated(*_: object) -> int:
    """Bytes of the tensors that are still there."""
    with _lock:
        return _allocated()


def info(*_: object) -> tuple[int, int]:
    """Bytes that are free, and those of the device."""
    with _lock:
        return _free(), int(_here.whole)


def fraction(*_: object) -> float:
    """Of the device's memory, what this process may allocate."""
    return float(_here.fraction)


def set_fraction(value: float, *_: object) -> None:
    """Limit this process."""
    assert 0 <= value <= 1
    _here.fraction = value


def _allocated() -> int:
    for gone in [one for one in _sizes if one.expired()]:
        del _sizes[gone]
    return sum(_sizes.values())


def _free() -> int:
    folder = os.environ.get("SIMULATED_GPU_MEMORY")
    others = 0
    for path in Path(folder).iterdir() if folder else ():
        if path.name != str(os.getpid()) and Path("/proc", path.name).exists():
            others += int(path.read_text())
    return min(_MOST_FREE, max(0, _here.whole - others - _allocated()))


def _note(peak: int) -> None:
    folder = os.environ.get("SIMULATED_GPU_MEMORY")
    if folder:
        new = Path(folder).with_name(f"{os.getpid()}.new")
        new.write_text(str(peak))
        new.replace(Path(folder) / str(os.getpid()))
