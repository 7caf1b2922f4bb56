"""A guard: a process that cleans up after a launcher, however the launcher ends.

Only another process can do so after SIGKILL. The guard holds the reading end of a pipe whose
writing end the launcher alone has, so it reads the end of the stream at the moment when the
launcher is gone. It then ends the ranks that are left with all their children, stops the MPS
daemon and removes the job's folder. A launcher that ends in order closes the pipe and waits, so
that there is one way of cleaning up.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from ucudnn.system.closing import AbstractClosable
from ucudnn.system.mps import CONTROL, MpsDaemon

_PROGRAM = "from ucudnn.system import guard; guard.main()"
# How long ranks may take to end by themselves after SIGTERM.
_GRACE_S = 5.0
_POLL_S = 0.05


class Guard(AbstractClosable):
    """The folder of a job and the process that cleans up after it.

    >>> with Guard() as guard:
    ...     folder = guard.folder
    >>> folder.exists()
    False

    Args:
        control: control program of the MPS daemon, should there be one.

    Attributes:
        folder: of this job alone, readable by this user alone.
    """

    def __init__(self, control: str = CONTROL) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ucudnn-launch-"))
        (self.folder / "ranks").mkdir()
        # It must find this very package, also where only `sys.path` leads there.
        paths = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-c", _PROGRAM, str(self.folder), control],
            stdin=subprocess.PIPE,
            # Signals to the launcher's process group, such as Ctrl-C, are not for the guard.
            start_new_session=True,
            env={**os.environ, **paths},
        )

    def close(self) -> None:
        """Clean up and wait for the end of it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    """Wait for the end of the launcher, then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # It ends right after the launcher anyway.
        signal.signal(number, signal.SIG_IGN)
    folder, control = Path(sys.argv[1]), sys.argv[2]
    sys.stdin.buffer.read()
    # A rank that starts only now does not find the folder to register in, and ends by itself.
    ranks = (folder / "ranks").rename(folder / "ended")
    end_groups([int(path.name) for path in ranks.iterdir() if _is_same(path)])
    MpsDaemon(folder, (), control=control).stop()
    shutil.rmtree(folder, ignore_errors=True)


def start_time(process: int) -> str | None:
    """Time when a process started, in ticks of the system's clock; None where there is none.

    >>> start_time(os.getpid()) is None
    False

    Args:
        process: its number.
    """
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    # Fields behind the name, which may hold brackets and blanks, see proc_pid_stat(5).
    return text.rpartition(")")[2].split()[19]


def _is_same(registered: Path) -> bool:
    """True unless the number of a rank that has ended belongs to another process by now."""
    # A rank that has ended may have left children in its group, whose number then is not reused.
    return start_time(int(registered.name)) in (None, registered.read_text(encoding="ascii"))


def end_groups(groups: list[int]) -> None:
    """End processes with all their children, by SIGTERM and after a while by SIGKILL.

    >>> end_groups([])

    Args:
        groups: numbers of process groups.
    """
    _signal(groups, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_S
    while time.monotonic() < deadline:
        groups = _signal(groups, 0)
        if not groups:
            return
        time.sleep(_POLL_S)
    _signal(groups, signal.SIGKILL)


def _signal(groups: list[int], number: int) -> list[int]:
    """Send a signal to process groups; those that there are."""
    found = []
    for group in groups:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)
            found.append(group)
    return found
