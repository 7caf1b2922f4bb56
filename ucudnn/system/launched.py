"""First program of a launched rank: takes its place, then becomes the user's script.

It is run by its path, without the package, so that nothing is imported before a rank is bound to
its cores: `python launched.py FOLDER SCRIPT ...`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main() -> None:
    """Register with the guard, bind to cores, set variables, run the script."""
    folder, *command = sys.argv[1:]
    try:
        place = json.loads((Path(folder) / "places.json").read_text(encoding="utf-8"))
        # The guard kills the process groups of all registered ranks once the launcher has ended.
        # The time of its start tells this process from a later one with the same number.
        started = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19]
        (Path(folder) / "ranks" / str(os.getpid())).write_text(started, encoding="ascii")
    except OSError:
        # The launcher has ended, and its guard has cleaned up.
        sys.exit(f"ucudnn launch: {folder} is gone, so the launcher has ended; ending, too")
    mine = place[int(os.environ["LOCAL_RANK"])]
    if mine["cpus"]:
        os.sched_setaffinity(0, mine["cpus"])
    os.environ.update(mine["environment"])
    # Unbuffered as under torchrun, so that the lines of several ranks do not wait for each other.
    os.execv(sys.executable, [sys.executable, "-u", *command])  # noqa: S606 - the user's script


if __name__ == "__main__":
    main()
