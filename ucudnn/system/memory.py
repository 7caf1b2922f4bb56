"""Memory of this process as the operating system counts it."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path

_STATUS = Path("/proc/self/status")
_MARKS = Path("/proc/self/clear_refs")


def high_water_bytes(run: Callable[[], object]) -> int | None:
    """Run once and return the most memory that the process gained meanwhile; None if unknown.

    This is what a container's limit counts: it includes what the allocator holds back from the
    system and what libraries allocate by themselves. Linux alone tells it.

    >>> grown = high_water_bytes(lambda: b"x" * (64 << 20))
    >>> grown is None or grown > 60 << 20
    True

    Args:
        run: what to measure.
    """
    try:
        gc.collect()
        give_back_free_blocks()
        # Linux sets the high-water mark to what the process has now (proc(5), clear_refs).
        _MARKS.write_text("5")
        before = _read("VmRSS")
        run()
        return max(0, _read("VmHWM") - before)
    except (OSError, ValueError):
        run()
        return None


def give_back_free_blocks() -> None:
    """Let glibc's malloc return the blocks that are free to the system.

    >>> give_back_free_blocks()
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _read(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    if found is None:
        raise ValueError(f"{_STATUS} has no {name}")
    return int(found[1]) << 10
