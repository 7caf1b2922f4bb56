"""Recover the sound entries of a damaged file, in a process that may crash or hang.

libhdf5 was seen to loop for ever on a damaged file. So only a child process opens damaged files,
with limits on its time and memory. It returns the entries that agree with their own checksums.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from ucudnn.cache.hdf5.codec import decode, encode
from ucudnn.cache.hdf5.envelope import verify, wrap
from ucudnn.cache.hdf5.files import read_file
from ucudnn.cache.table.builder import select_rows
from ucudnn.cache.table.checksum import checksums
from ucudnn.cache.table.table import Table
from ucudnn.errors import CacheError

_SECONDS = 60
_MEMORY_BYTES = 4 << 30


def salvage(path: Path, seconds: float = _SECONDS) -> Table | None:
    """The sound entries of a damaged file; None if the child crashed or its time was up.

    Args:
        path: the file; it stays as it is.
        seconds: time after which the child is killed.
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
        # A pipe would do for the data, but not if libhdf5 writes to standard output.
        content = read_file(target)
        verify(content)
        return decode(content)[0]


def main(source: Path, target: Path) -> int:
    """Entry point of the child process; exit status 0: the target was written."""
    # Processor time, too, because a loop in libhdf5 may outlive a parent that is killed.
    resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    try:
        table, _ = decode(read_file(source), only_possible=True)
    except CacheError:
        return 1
    table = select_rows(table, checksums(table) == table.rows["checksum"])
    target.write_bytes(wrap(encode(table)))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
