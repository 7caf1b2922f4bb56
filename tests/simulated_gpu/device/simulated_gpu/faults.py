"""Failures of the simulated GPU, each of which happens once.

The folder that SIMULATED_GPU_FAULTS names holds a file per failure: its name begins with the kind
("fault" or "hang" at a launch, "fail" when a plan is built), its text is the identity of an
engine configuration, or how it begins. Whoever meets it first takes the file away.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_broken: list[str] = []


def is_due(kind: str, identity: str) -> bool:
    """True once for every file of this kind that names the identity."""
    folder = os.environ.get("SIMULATED_GPU_FAULTS")
    for path in sorted(Path(folder).glob(f"{kind}*")) if folder else ():
        try:
            if identity.startswith(path.read_text().strip()):
                path.unlink()
                return True
        except FileNotFoundError:  # another process took it
            continue
    return False


def at_launch(identity: str) -> None:
    """Hang or fault where that is due; after a fault the device refuses everything."""
    if is_due("hang", identity):
        time.sleep(3600)
    if is_due("fault", identity):
        _broken.append("CUDA error: an illegal memory access was encountered")
    require_working()


def require_working() -> None:
    """Raise what CUDA raises once a kernel has faulted.

    Raises:
        RuntimeError: a launch of this process has faulted.
    """
    if _broken:
        raise RuntimeError(_broken[0])
