"""Where, when and by which command a result was made, for the JSON files of results."""

from __future__ import annotations

import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

import ucudnn
from ucudnn.backends import open_backend
from ucudnn.backends.torch_cpu.processor import LoadMeter, describe_allocator

LOAD_S = 0.5


def provenance() -> dict[str, Any]:
    """Command, time in UTC, versions, device and load of this process, as JSON values."""
    # Of a path only the last part: the folders of a machine say nothing to others.
    words = [Path(word).name if "/" in word else word for word in sys.argv[1:]]
    return {
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": str(open_backend("auto").device()),
        "cpu": cpu_model(),
        "threads": torch.get_num_threads(),
        "malloc": describe_allocator(),
        "load": round(load(), 2),
        "ucudnn": ucudnn.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def load() -> float:
    """Number of processors that other processes use, over half a second.

    The system's average of a minute has what this run did before.
    """
    meter = LoadMeter()
    time.sleep(LOAD_S)
    return meter.others()


def cpu_model() -> str:
    """Family, model and stepping of the processor where the system tells, else its name."""
    path, wanted = Path("/proc/cpuinfo"), ("model name", "cpu family", "model", "stepping")
    lines = path.read_text().splitlines() if path.exists() else []
    # A guest's processor may have no more of a name than its maker's; the numbers tell them apart.
    pairs = (line.partition(":")[::2] for line in reversed(lines))
    found = {name.strip(): value.strip() for name, value in pairs if name.strip() in wanted}
    return ", ".join(f"{name} {found[name]}" for name in wanted if name in found) or (
        platform.processor()
    )
