"""The malloc of this process, and glibc's setting that decides the cost of page faults.

glibc returns freed blocks above its mmap threshold (by default at most 32 MiB) to the operating
system, so every large temporary is paged in anew at each call.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from ucudnn.errors import UnsupportedError

GLIBC_MMAP_THRESHOLD = 32 << 20  # the largest that glibc adapts to by itself
LARGE_MMAP_THRESHOLD = 1 << 30
LARGE_THRESHOLD_TUNABLES = (
    "glibc.malloc.mmap_threshold=1073741824:glibc.malloc.trim_threshold=4294967296"
)
# Parameters of mallopt, from glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_GLIBC = "glibc"
# Allocators that users preload instead of glibc's; each has settings of its own.
_REPLACEMENTS = ("tcmalloc", "jemalloc", "mimalloc")
_threshold_set_here: list[int] = []


def describe_allocator() -> str:
    """Name the malloc of this process, and its mmap threshold if one was set.

    Returns:
        "glibc", "glibc,mmap_threshold=1073741824", "tcmalloc", "jemalloc", "mimalloc" or "system".
    """
    name = _allocator()
    threshold = _threshold_set_here[-1] if _threshold_set_here else _threshold_of_environment()
    return name if name != _GLIBC or threshold is None else f"{name},mmap_threshold={threshold}"


def _allocator() -> str:
    maps = Path("/proc/self/maps")
    loaded = maps.read_text(errors="replace") if maps.exists() else ""
    for name in _REPLACEMENTS:
        if f"lib{name}" in loaded:
            return name
    # Other C libraries, such as musl's, do not have this function.
    return _GLIBC if hasattr(_c_library(), "gnu_get_libc_version") else "system"


def set_mmap_threshold(threshold_bytes: int) -> None:
    """Set glibc's mmap threshold of this process, and its trim threshold to twice as much.

    Args:
        threshold_bytes: blocks of at least this size are returned to the operating system when
            freed.

    Raises:
        UnsupportedError: the process does not run on glibc's malloc, or it refuses the value.
    """
    library = _c_library()
    if _allocator() != _GLIBC:
        raise UnsupportedError(
            f"only glibc's malloc has an mmap threshold, this process runs {describe_allocator()}"
        )
    trim = min(2 * threshold_bytes, 2**31 - 1)  # the ratio that glibc itself keeps
    accepted = library.mallopt(_M_MMAP_THRESHOLD, threshold_bytes)
    if not accepted or not library.mallopt(_M_TRIM_THRESHOLD, trim):
        raise UnsupportedError(f"glibc's malloc refuses mmap_threshold={threshold_bytes}")
    _threshold_set_here[:] = [threshold_bytes]


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
