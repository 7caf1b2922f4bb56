"""Names of this CPU and its software in measurements and plans, and sizes of its memory."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import torch

from ucudnn.backends.torch_cpu.instructions import onednn_isa_limit
from ucudnn.measurement import Device, Software

_CPUINFO = Path("/proc/cpuinfo")
# Limit, use and statistics of this container's memory, versions 2 and 1.
_CONTROL_GROUPS = (
    tuple(f"sys/fs/cgroup/memory.{name}" for name in ("max", "current", "stat")),
    tuple(
        f"sys/fs/cgroup/memory/memory.{name}"
        for name in ("limit_in_bytes", "usage_in_bytes", "stat")
    ),
)
# Buffers of a benchmark are made larger than the cache: an overstated size costs memory and time.
_MOST_CACHE_BYTES = 64 << 20
_DEFAULT_CACHE_BYTES = 32 << 20  # a large last-level cache; too large only costs memory


def cpu_device() -> Device:
    """The processor: its model, the vector instructions that torch and oneDNN use, its cores."""
    isa, limit = torch.backends.cpu.get_cpu_capability(), onednn_isa_limit()
    return Device(
        type="cpu",
        name=_cpu_name(),
        isa=f"{isa} (oneDNN: {limit})" if limit else isa,
        cores=os.cpu_count() or 1,
    )


def cpu_software() -> Software:
    """Versions of torch and of the oneDNN inside it."""
    # torch has no function for the version; its build summary names it, still by oneDNN's old name.
    match = re.search(r"MKL-DNN v([\d.]+)", torch.__config__.show())
    return Software(torch=torch.__version__, onednn=match[1] if match else "")


def last_level_cache_bytes() -> int:
    """Size of the largest cache of the first processor; 32 MiB if the system does not tell."""
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        match = re.fullmatch(r"(\d+)([KMG])", path.read_text().strip())
        if match:
            sizes.append(int(match[1]) << {"K": 10, "M": 20, "G": 30}[match[2]])
    return max(sizes) or _DEFAULT_CACHE_BYTES


def usable_cache_bytes() -> int:
    """Size of the last-level cache, at most 64 MiB.

    Virtual machines report the cache of the whole processor, which they share with others.
    """
    return min(last_level_cache_bytes(), _MOST_CACHE_BYTES)


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Memory that can be allocated without swapping and within a container's limit.

    Args:
        root: where proc and sys are mounted.
    """
    meminfo = root / "proc/meminfo"
    match = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text() if meminfo.exists() else "")
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    free = [int(match[1]) << 10 if match else physical]
    for limit, used, statistics in _CONTROL_GROUPS:
        if (root / limit).exists() and (root / used).exists():
            text = (root / limit).read_text().strip()  # "max" where there is none
            if text.isdigit():
                in_use = int((root / used).read_text()) - _idle_bytes(root / statistics)
                free.append(max(int(text) - in_use, 0))
    return min(free)


def _idle_bytes(path: Path) -> int:
    """Bytes of cached files in a container's memory, which the system drops when needed."""
    text = path.read_text() if path.exists() else ""
    match = re.search(r"^(?:total_)?inactive_file (\d+)$", text, re.MULTILINE)
    return int(match[1]) if match else 0


def _cpu_name() -> str:
    match = None
    if _CPUINFO.exists():
        match = re.search(r"^model name\s*:\s*(.+)$", _CPUINFO.read_text(), re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()
