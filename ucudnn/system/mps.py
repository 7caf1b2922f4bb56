"""A private daemon of NVIDIA's Multi-Process Service (MPS), by its control program.

MPS lets processes run kernels on one GPU at the same time; without it they take turns. A daemon of
our own, with folders of its own, needs no rights and disturbs nobody.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

from ucudnn.errors import UnsupportedError

CONTROL = "nvidia-cuda-mps-control"
# Starting takes well under a second; a control program that waits for a daemon that hangs does not
# end at all.
_ANSWER_S = 10.0
_POLL_S = 0.1


class MpsDaemon:
    """The daemon of one folder, whether it runs or not.

    >>> daemon = MpsDaemon(Path("/tmp/job"), ["GPU-1"], percent=50)
    >>> daemon.client_environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]
    '50'

    Args:
        folder: a private one; the daemon makes its pipes and logs in there.
        gpus: UUIDs of the GPUs that it serves.
        percent: of each GPU's multiprocessors that one client may use.
        control: name or path of the control program.
    """

    def __init__(
        self, folder: Path, gpus: Sequence[str], percent: int = 100, control: str = CONTROL
    ) -> None:
        self._folder, self._control = folder, control
        self._environment = {
            "CUDA_MPS_PIPE_DIRECTORY": str(folder / "mps"),
            "CUDA_MPS_LOG_DIRECTORY": str(folder / "mps-log"),
        }
        self._gpus, self._percent = tuple(gpus), percent

    @property
    def pipes(self) -> Path:
        """Folder of the daemon's pipes."""
        return Path(self._environment["CUDA_MPS_PIPE_DIRECTORY"])

    @property
    def client_environment(self) -> dict[str, str]:
        """Variables by which a process becomes a client of this daemon."""
        percent = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(self._percent)}
        return {**self._environment, **percent}

    def start(self) -> None:
        """Start the daemon and wait until it answers.

        Raises:
            UnsupportedError: the control program is missing, refuses, or the daemon does not
                answer.
        """
        if shutil.which(self._control) is None:
            raise UnsupportedError(
                f"{self._control} is not on the PATH: it is a part of NVIDIA's driver, which a "
                f"container may lack; without MPS the ranks of a GPU take turns"
            )
        for path in self._environment.values():
            Path(path).mkdir(mode=0o700, exist_ok=True)
        # The daemon numbers its GPUs anew, so they are named by UUID.
        started = self._run(["-d"], "", {"CUDA_VISIBLE_DEVICES": ",".join(self._gpus)})
        status, said = started or (1, "it did not end")
        if status != 0:
            raise UnsupportedError(f"{self._control} -d is not allowed to start here: {said}")
        deadline = time.monotonic() + _ANSWER_S
        # Its folder also exists when it is dead: only an answer tells that it lives.
        while not self.is_alive():
            if time.monotonic() > deadline:
                words = self._last_words()
                raise UnsupportedError(
                    f"{self._control} -d started a daemon that does not answer: {words}"
                )
            time.sleep(_POLL_S)

    def _last_words(self) -> str:
        """The last line of the daemon's log."""
        path = Path(self._environment["CUDA_MPS_LOG_DIRECTORY"]) / "control.log"
        with suppress(OSError):
            lines = path.read_text(errors="replace").strip().splitlines()
            return lines[-1] if lines else "its log is empty"
        return "it wrote no log"

    def is_alive(self) -> bool:
        """True if the daemon answers."""
        answer = self._run([], "get_server_list\n")
        return answer is not None and answer[0] == 0

    def stop(self) -> bool:
        """End the daemon, by its own command or else by a signal; True if it is gone."""
        if not self.pipes.is_dir():
            return True
        self._run([], "quit\n")
        # It does not always end after clients were killed.
        return any(self._ends(number) for number in (0, signal.SIGTERM, signal.SIGKILL))

    def _ends(self, number: int) -> bool:
        """Send a signal, and look for a while if the daemon's process is there."""
        deadline = time.monotonic() + _ANSWER_S / 5
        process = self._process()
        if process is not None and number:
            with suppress(ProcessLookupError):
                os.kill(process, number)
        while process is not None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            process = self._process()
        return process is None

    def _process(self) -> int | None:
        """Number of the daemon's process, from the file that it writes; None where it has ended."""
        path = self.pipes / f"{CONTROL}.pid"
        try:
            process = int(path.read_text(encoding="ascii"))
            # The number may belong to another program by now.
            command = Path(f"/proc/{process}/cmdline").read_bytes()
        except (OSError, ValueError):
            return None
        return process if CONTROL.encode() in command else None

    def _run(
        self, arguments: list[str], text: str, more: Mapping[str, str] | None = None
    ) -> tuple[int, str] | None:
        """Exit status and last line of the control program; None where it does not end."""
        environment = {**os.environ, **self._environment, **(more or {})}
        # A daemon may keep the output of the program that starts it: a pipe would never end.
        with TemporaryFile("w+") as output, suppress(OSError, subprocess.TimeoutExpired):
            ended = subprocess.run(  # noqa: S603 - NVIDIA's program, with arguments of ours
                [self._control, *arguments],
                input=text,
                stdout=output,
                stderr=output,
                check=False,
                # Ctrl-C is for the ranks, not for the daemon.
                start_new_session=True,
                env=environment,
                text=True,
                timeout=_ANSWER_S,
            )
            output.seek(0)
            lines = output.read().strip().splitlines()
            return ended.returncode, lines[-1] if lines else f"exit status {ended.returncode}"
        return None
