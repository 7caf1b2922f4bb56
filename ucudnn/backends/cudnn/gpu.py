"""What is known of GPUs without cuDNN: names, state and software; and memory for measuring.

Names and state have two sources: CUDA through torch, and the driver's management library (NVML). If
NVML is missing, as in some containers, fields that only NVML knows are empty.

Memory for measuring comes from CuPy, so that torch's caching allocator neither holds nor counts it.
The operands of a benchmark are larger than the GPU's cache. If they came from torch's allocator,
they would change how it splits its blocks, and would count as workspace if they were allocated
during a run. Without CuPy (the extras cuda12 and cuda13), the operands come from torch. So they do
if the user limits torch's memory, because CuPy does not know that limit.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any, TypeVar

import pynvml
import torch
import torch.utils.dlpack
from torch import Tensor

from ucudnn.measurement import Device, Software

T = TypeVar("T")

# NVML's reasons for a lower clock that come and go with load, heat and power, and so disturb a
# measurement. NVML's other reasons are normal: idle, clocks set by an administrator, synchronised
# boards.
_SLOWDOWNS = {
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake",
}


def keep_busy(lead_ns: int) -> None:
    """Keep the current stream busy until the host is about `lead_ns` ahead.

    Then the device runs the kernels that follow one right after the other.
    """
    # At least 0.2 ms, because 0 is passed for what was never launched before. At most 10 ms: if a
    # run waits for the device by itself, its time on the host has this wait, too, and would double
    # from one time to the next.
    wait_ns = min(max(2 * lead_ns, 200_000), 10_000_000)
    # torch waits for a number of clock cycles. No GPU has many more than 2 in a nanosecond; one
    # that has fewer waits longer.
    torch.cuda._sleep(2 * wait_ns)


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
        # The power limit decides the clock under load. It belongs to the board, so for a MIG slice
        # the board is looked up; for a whole GPU, `board` is the GPU itself.
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
    """Versions of torch, CUDA and the driver, together with the given version of cuDNN."""
    driver = _ask(pynvml.nvmlSystemGetDriverVersion, "") if _nvml() else ""
    return Software(
        torch=str(torch.__version__), cudnn=cudnn, cuda=torch.version.cuda or "", driver=driver
    )


def gpu_notes(index: int) -> tuple[str, ...]:
    """Clock, temperature, power, throttling and processes of a GPU now, as far as known.

    Reading them does not wait for kernels.
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
    # 0 stands for a number that NVML does not report.
    said = [f"{name}={value}" for name, value in numbers.items() if value]
    reasons = _ask(partial(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, gpu), 0)
    said += [f"throttled={reason}" for reason in slowdowns(reasons)]
    processes = len(_ask(partial(pynvml.nvmlDeviceGetComputeRunningProcesses, gpu), ()))
    # This process is counted, too: alone it needs no note.
    return (*said, f"processes={processes}") if processes > 1 else tuple(said)


def _ask(question: Callable[[], T], unknown: T) -> T:
    """NVML's answer to a query; `unknown` if the query fails, as on MIG slices or in containers."""
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
    """NVML's handle of a GPU, found by UUID: CUDA_VISIBLE_DEVICES renumbers only CUDA's devices."""
    # torch gives the UUID without NVML's prefix, which is "GPU" for a whole GPU, "MIG" for a slice.
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


def empty_raw(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A new tensor of one axis, in memory from CuPy where that may be used, else from torch."""
    cupy = _cupy()
    if cupy is None or torch.cuda.get_per_process_memory_fraction(device) < 1:
        return torch.empty(count, dtype=dtype, device=device)
    # CuPy's pool is switched off, because torch could not allocate the memory that the pool keeps.
    with cupy.cuda.Device(device.index), cupy.cuda.using_allocator(None):
        size = count * dtype.itemsize  # bytes, because CuPy has no bfloat16
        try:
            owner = cupy.empty(size, dtype=cupy.uint8)
        except (RuntimeError, MemoryError):
            # torch's allocator keeps unused blocks, which only torch can use. They are freed here.
            torch.cuda.empty_cache()
            owner = cupy.empty(size, dtype=cupy.uint8)
    return torch.utils.dlpack.from_dlpack(owner).view(dtype)
