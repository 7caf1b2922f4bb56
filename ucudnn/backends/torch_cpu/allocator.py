"""The malloc of this process, and glibc's setting that decides the cost of page faults.

glibc returns freed blocks above its mmap threshold (by default at most 32 MiB) to the operating
system, so every large temporary is paged in anew at each call.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

LARGE_THRESHOLD_TUNABLES = (
    "glibc.malloc.mmap_threshold=1073741824:glibc.malloc.trim_threshold=4294967296"
)
_GLIBC = "glibc"
# Allocators that users preload instead of glibc's; each has settings of its own.
_REPLACEMENTS = ("tcmalloc", "jemalloc", "mimalloc")


def describe_allocator() -> str:
    """Name the malloc of this process, and its mmap threshold if one was set.

    Returns:
        "glibc", "glibc,mmap_threshold=1073741824", "tcmalloc", "jemalloc", "mimalloc" or "system".
    """
    name, threshold = _allocator(), _threshold_of_environment()
    return name if name != _GLIBC or threshold is None else f"{name},mmap_threshold={threshold}"


def _allocator() -> str:
    maps = Path("/proc/self/maps")
    loaded = maps.read_text(errors="replace") if maps.exists() else ""
    for name in _REPLACEMENTS:
        if f"lib{name}" in loaded:
            return name
    # Other C libraries, such as musl's, do not have this function.
    return _GLIBC if hasattr(_c_library(), "gnu_get_libc_version") else "system"


def give_back_free_blocks() -> None:
    """Let glibc's malloc return the blocks that are free to the system.

    >>> give_back_free_blocks()
    """
    trim = getattr(_c_library(), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _threshold_of_environment() -> int | None:
    for setting in os.environ.get("GLIBC_TUNABLES", "").split(":"):
        name, _, value = setting.partition("=")
        if name == "glibc.malloc.mmap_threshold" and value.isdigit():
            return int(value)
    value = os.environ.get("MALLOC_MMAP_THRESHOLD_", "")
    return int(value) if value.isdigit() else None


def _c_library() -> ctypes.CDLL:
    # None stands for the process itself, where the C library is already loaded.
    return ctypes.CDLL(None)
