"""GPUs beside cuDNN: their names, state and software, and memory for measuring.

Names and state have two sources: CUDA through torch, and the driver's management library (NVML). If
NVML is missing, as in some containers, fields that only NVML knows are empty.

Memory for measuring is from CuPy: torch's caching allocator neither holds nor counts it. Operands
of a benchmark are larger than the GPU's cache. From torch's allocator, they would change how its
blocks are split, and would count as workspace if they are allocated during a run. Without CuPy (the
extras cuda12 and cuda13) they come from torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from math import prod
from typing import Any, TypeVar

import pynvml
import torch
import torch.utils.dlpack
from torch import Tensor

from ucudnn.measurement import Device, Software

T = TypeVar("T")

# Reasons for a lower clock that come and go with load, heat and power: they disturb a measurement.
# The others - idle, clocks set by an administrator, synchronised boards - are how the GPU is.
_SLOWDOWNS = {
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake",
}


def slowdowns(reasons: int) -> tuple[str, ...]:
    """Names of NVML's reasons for a lower clock that perturb a measurement, from a bit mask.

    >>> slowdowns(0x01 | 0x04 | 0x40)
    ('sw_power_cap', 'hw_thermal_slowdown')
    """
    return tuple(name for bit, name in _SLOWDOWNS.items() if reasons & bit)


def cuda_device(index: int) -> Device:
    """The GPU with this number in this process."""
    properties = torch.cuda.get_device_properties(index)
    gpu = _gpu(index)
    limit, name = 0, ""
    if gpu is not None:
        # The power limit decides the clock under load; it belongs to the board, not to a slice. A
        # whole GPU is its own board.
        board = _ask(partial(pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, gpu), gpu)
        limit = _ask(partial(pynvml.nvmlDeviceGetEnforcedPowerLimit, board), 0)
        name = _ask(partial(pynvml.nvmlDeviceGetName, gpu), "")
    # NVML's name of a slice contains its profile, as in "... MIG 1g.10gb".
    profile = re.search(r"\bMIG (\S+)", name)
    return Device(
        type="cuda",
        name=properties.name,
        cores=properties.multi_processor_count,
        compute_capability=f"{properties.major}.{properties.minor}",
        memory_bytes=properties.total_memory,
        # NVML counts in milliwatts.
        power_limit_w=round(limit / 1000),
        mig=profile[1] if profile else "",
    )


def cuda_software(cudnn: str) -> Software:
    """Versions of torch, CUDA and the driver, beside that of cuDNN."""
    driver = _ask(pynvml.nvmlSystemGetDriverVersion, "") if _nvml() else ""
    return Software(
        torch=str(torch.__version__), cudnn=cudnn, cuda=torch.version.cuda or "", driver=driver
    )


def gpu_notes(index: int) -> tuple[str, ...]:
    """Clock, temperature, power, throttling and other processes of a GPU now, as far as known.

    It does not wait for kernels.
    """
    gpu = _gpu(index)
    if gpu is None:
        return ()
    sensor = pynvml.NVML_TEMPERATURE_GPU
    numbers = {
        "sm_clock_mhz": _ask(partial(pynvml.nvmlDeviceGetClockInfo, gpu, pynvml.NVML_CLOCK_SM), 0),
        "temperature_c": _ask(partial(pynvml.nvmlDeviceGetTemperature, gpu, sensor), 0),
        "power_w": round(_ask(partial(pynvml.nvmlDeviceGetPowerUsage, gpu), 0) / 1000),
    }
    # 0 stands for a number that NVML does not tell.
    said = [f"{name}={value}" for name, value in numbers.items() if value]
    reasons = _ask(partial(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, gpu), 0)
    said += [f"throttled={reason}" for reason in slowdowns(reasons)]
    processes = len(_ask(partial(pynvml.nvmlDeviceGetComputeRunningProcesses, gpu), ()))
    # One of them is this process.
    return (*said, f"processes={processes}") if processes > 1 else tuple(said)


def _ask(question: Callable[[], T], unknown: T) -> T:
    """The answer of NVML, or `unknown`: on a MIG slice or in a container some queries fail."""
    try:
        return question()
    except pynvml.NVMLError:
        return unknown


@cache
def _nvml() -> bool:
    """True if NVML is available; it is opened once per process."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    return True


@cache
def _gpu(index: int) -> Any:
    """NVML's handle, found by UUID, because CUDA_VISIBLE_DEVICES renumbers only CUDA's devices."""
    # torch gives the UUID without the prefix by which NVML tells a whole GPU from a slice.
    for kind in ("GPU", "MIG") if _nvml() else ():
        uuid = f"{kind}-{torch.cuda.get_device_properties(index).uuid}"
        found = _ask(partial(pynvml.nvmlDeviceGetHandleByUUID, uuid), None)
        if found is not None:
            return found
    return None


@cache
def _cupy() -> Any:
    try:
        import cupy
    except ImportError:
        return None
    return cupy


def empty_raw(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A new contiguous tensor in separate memory, which is freed with the tensor."""
    cupy = _cupy()
    if cupy is None:
        return torch.empty(shape, dtype=dtype, device=device)
    # Without CuPy's pool: memory that a pool keeps could not be allocated by torch.
    with cupy.cuda.Device(device.index), cupy.cuda.using_allocator(None):
        size = prod(shape) * dtype.itemsize  # bytes, because CuPy has no bfloat16
        try:
            owner = cupy.empty(size, dtype=cupy.uint8)
        except (RuntimeError, MemoryError):
            # Blocks that torch's allocator keeps and nothing uses are given back to torch alone.
            torch.cuda.empty_cache()
            owner = cupy.empty(size, dtype=cupy.uint8)
    return torch.utils.dlpack.from_dlpack(owner).view(dtype).view(shape)
