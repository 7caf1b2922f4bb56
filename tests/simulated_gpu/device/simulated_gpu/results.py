"""Keep what a simulated GPU wrote away from the results of real ones."""

from __future__ import annotations

import os
import sys

_RESULTS = os.path.join("benchmarks", "results")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def protect() -> None:
    """Forbid this process to change anything in benchmarks/results of any checkout."""
    sys.addaudithook(_refuse)


def _refuse(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open":
        path, mode, flags = arguments
        is_write = isinstance(mode, str) and set(mode) & set("wax+")
        paths = [path] if is_write or (isinstance(flags, int) and flags & _WRITES) else []
    elif event in ("os.mkdir", "os.rename", "os.link", "os.symlink"):
        paths = list(arguments[:2])
    else:
        return
    for path in paths:
        if isinstance(path, (str, os.PathLike)) and _RESULTS in os.path.realpath(path):
            raise PermissionError(f"a simulated GPU has no results: {path} must not be written")
