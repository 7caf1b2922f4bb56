"""Plans made by hand: kernels that an algorithm computes undivided, on a device that is none.

And costs of algorithms, for the scripted backend of tests/tuning.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from ucudnn.config import Config
from ucudnn.measurement import Conditions, Device, Software
from ucudnn.plan import KernelPlan, Plan, Timing
from ucudnn.problem import Problem

MIB = 1 << 20
MS = 1_000_000


def linear(
    ms_per_sample: float, mib_per_sample: float = 0.0, fixed_ms: float = 0.0
) -> Callable[[int], tuple[int, int]]:
    """Time in ns and workspace in bytes of a chunk, which grow with it."""
    return lambda size: (
        int((fixed_ms + ms_per_sample * size) * MS),
        int(mib_per_sample * size * MIB),
    )


def kernel(
    size: int,
    *,
    batch: int = 2,
    width: int = 1,
    layout: str = "nchw",
    timing: Timing = Timing(10, 0, 0, 5),  # noqa: B008 - it never changes
    default: Timing = Timing(20, 0, 4 * MIB, 5),  # noqa: B008
    **more: Any,
) -> KernelPlan:
    """A forward pass of images of one size by gemm, whose default takes 4 MiB."""
    fields = {
        "problem": Problem("fprop", batch, 2, 2, (size, size), (width, width), layout=layout),
        "layers": ("layer",),
        "algorithms": ("gemm",),
        "alone": (0,) * batch,
        "last": ((0, -1),) * batch,
        "predicted_time_ns": timing.time_ns,
        "timing": timing,
        "default": default,
    }
    return KernelPlan(**{**fields, **more})


def signed(document: dict[str, Any], path: Path) -> Path:
    """A file of a plan with the checksum of what it holds, as whoever edits one could write it."""
    rest = {name: value for name, value in document.items() if name != "checksum"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps({**rest, "checksum": sha256(text.encode()).hexdigest()}))
    return path


def plan_of(*kernels: KernelPlan, config: Config | None = None, **more: Any) -> Plan:
    """A plan of these kernels."""
    made_on = Device("cpu", "scripted"), Software("0"), Conditions()
    return Plan(kernels, *made_on, config or Config(), **more)
