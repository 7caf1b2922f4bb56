"""Recover the sound entries of a damaged file, in a process that may crash or hang.

libhdf5 was seen to spin for ever on a damaged file, so only a child opens one, with limits on its
time and memory. Of what it can read, it gives back the entries that agree with their own checksums.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from ucudnn.cache.hdf5.codec import from_data, to_image
from ucudnn.cache.hdf5.envelope import framed, verify
from ucudnn.cache.hdf5.files import read_file
from ucudnn.cache.table.builder import checksums, only
from ucudnn.cache.table.table import Table
from ucudnn.errors import CacheError

_SECONDS = 60
_MEMORY_BYTES = 4 << 30


def salvage(path: Path, seconds: float = _SECONDS) -> Table | None:
    """The entries of a damaged file that are sound, None where there is no telling.

    Args:
        path: the file; it stays as it is.
        seconds: after which the child is killed.
    """
    # One thread: those of a large machine's BLAS alone reserve more memory than the child may have.
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    with TemporaryDirectory(prefix="ucudnn-salvage-") as folder:
        target = Path(folder, "sound.h5")
        command = [sys.executable, "-m", "ucudnn.cache.hdf5.recovery", str(path), str(target)]
        try:
            done = subprocess.run(  # noqa: S603 - our own module, with paths of ours
                command, check=False, capture_output=True, env=environment, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            return None
        if done.returncode:
            return None
        data = read_file(target)
        verify(data)
        return from_data(data)[0]


def main(source: Path, target: Path) -> int:
    """Entry point of the child process; exit status 0: the target was written."""
    resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    try:
        table, _ = from_data(read_file(source), only_possible=True)
    except CacheError:
        return 1
    table = only(table, checksums(table) == table.rows["checksum"])
    target.write_bytes(framed(to_image(table)))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
