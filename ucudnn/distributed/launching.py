"""Several ranks for each GPU, or for the processor, started by torchrun's agent.

torchrun starts, watches, restarts and stops the ranks. This module sets how many ranks share a
device, and their threads and workspace. It also starts NVIDIA's Multi-Process Service (MPS), which
lets kernels of several processes run on a GPU at once. `distributed.init` chooses a rank's GPU.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from ucudnn import config
from ucudnn.errors import ConfigError, RankError, UnsupportedError
from ucudnn.kernels.deadline import Deadline
from ucudnn.system.processes import start_python
from ucudnn.units import format_bytes

MPS_MODES = ("auto", "require", "off")
# Prefixes of torchrun's options that describe the meeting of ranks, for example on several hosts.
_MEETING = ("--nnodes", "--rdzv", "--master", "--node", "--standalone")
_LIST_GPUS = (
    "import torch\n"
    "for i in range(torch.cuda.device_count()):\n"
    "    print('GPU-' + str(torch.cuda.get_device_properties(i).uuid))"
)
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Launch:
    """Settings of a launch."""

    ranks_per_device: int = 1  # ranks that share a GPU, or the processor
    mps: str = "auto"  # "auto" (MPS where it can be started), "require" or "off"
    mps_percent: int = 100  # part of a GPU's multiprocessors that a rank may use, in %
    mps_control: str = "nvidia-cuda-mps-control"  # name or path of MPS's control program
    # Bytes of workspace for all ranks of a device together; each rank gets an equal part as its
    # default workspace limit. None: this launch sets no limit.
    device_workspace: int | None = None
    torchrun_options: tuple[str, ...] = ()  # such as "--max-restarts=2"
    gpus: tuple[str, ...] | None = None  # UUIDs; None: all GPUs that torch sees

    def __post_init__(self) -> None:
        if self.ranks_per_device < 1:
            raise ConfigError(f"ranks per device must be above 0, got {self.ranks_per_device}")
        if self.mps not in MPS_MODES:
            raise ConfigError(f"mps must be one of {', '.join(MPS_MODES)}, got {self.mps!r}")
        if not 1 <= self.mps_percent <= 100:
            raise ConfigError(f"mps_percent must be from 1 to 100, got {self.mps_percent}")
        if self.device_workspace is not None and self.device_workspace < self.ranks_per_device:
            raise ConfigError(
                f"a device workspace of {self.device_workspace} bytes leaves none to each of "
                f"{self.ranks_per_device} ranks"
            )

    @property
    def has_meeting(self) -> bool:
        """True if torchrun's options say where ranks meet, as they must in a job on several hosts.

        >>> Launch(torchrun_options=("--nnodes=2", "--rdzv_id=7")).has_meeting
        True
        """
        return any(one.replace("_", "-").startswith(_MEETING) for one in self.torchrun_options)


def launch(script: Sequence[str], settings: Launch, say: Say = lambda _: None) -> None:
    """Run a script in several ranks per device until all ranks have ended.

    `script` has the words that follow `python` in a command. torch's SignalException is raised if
    this process gets a signal to end.
    """
    if not script:
        raise ConfigError("there is nothing to launch: give a script after --, as -- train.py")
    gpus = list_gpus() if settings.gpus is None else settings.gpus
    per_device = settings.ranks_per_device
    ranks = per_device * max(1, len(gpus))
    limit = None
    if settings.device_workspace is not None:
        # All ranks get equal parts, because each step waits for the slowest rank, and all ranks
        # follow one plan.
        limit = settings.device_workspace // per_device
        whole = format_bytes(settings.device_workspace)
        say(f"workspace limit of each rank: {format_bytes(limit)} of {whole}")
    # If OMP_NUM_THREADS is not set, torch uses a thread for each core that this process may use.
    # The ranks divide these threads among themselves.
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, torch.get_num_threads() // ranks))
    variables = {**config.rank_variables(per_device, limit), "OMP_NUM_THREADS": threads}
    if gpus:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        say(f"{per_device} rank(s) for each of {len(gpus)} GPU(s)")
    else:
        say(f"{per_device} rank(s) share the processor, with {threads} thread(s) each")
    with ExitStack() as stack:
        stack.enter_context(_environment(variables))
        clients = _start_mps(stack, settings, gpus, say)
        stack.enter_context(_environment(clients))
        _run(script, settings, ranks)


def _run(script: Sequence[str], settings: Launch, ranks: int) -> None:
    """Run torchrun's agent in this process."""
    options = list(settings.torchrun_options)
    if not settings.has_meeting:
        options.append("--standalone")
    words = [f"--nproc-per-node={ranks}", *options, "--no-python", sys.executable, "-u", *script]
    try:
        torchrun.run(torchrun.parse_args(words))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        status = failure.exitcode
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with exit status {status}"
        raise RankError(
            f"rank {rank} ended {how}, and the others were stopped; its output above tells why",
            (rank,),
        ) from error


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables within the context; ranks that start in it inherit them."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def list_gpus() -> tuple[str, ...]:
    """UUIDs of the GPUs that torch sees, in its order."""
    if not torch.backends.cuda.is_built():
        return ()
    # The GPUs are listed in another process, so that the launcher never holds memory of a GPU.
    pipe = subprocess.PIPE
    with start_python(_LIST_GPUS, stdout=pipe, stderr=pipe, text=True) as child:
        listed, said = child.communicate()
    if child.returncode != 0:
        lines = said.strip().splitlines() or ["no message"]
        raise UnsupportedError(f"torch cannot list the GPUs of this machine: {lines[-1]}")
    return tuple(listed.split())


def _start_mps(
    stack: ExitStack, settings: Launch, gpus: Sequence[str], say: Say
) -> Mapping[str, str]:
    """Start MPS if ranks need it and it can run; return the variables by which ranks use it."""
    if settings.mps == "require" and not gpus:
        raise UnsupportedError("MPS shares a GPU, and torch sees none here; use --mps auto")
    if settings.mps == "off" or not gpus or settings.ranks_per_device == 1:
        return {}
    try:
        folders = stack.enter_context(mps_daemon(settings.mps_control))
    except UnsupportedError as error:
        if settings.mps == "require":
            raise
        say(f"the ranks of a GPU take turns, without MPS: {error}")
        return {}
    say(f"each rank may use up to {settings.mps_percent} % of its GPU by MPS")
    return {**folders, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(settings.mps_percent)}


@contextmanager
def mps_daemon(control: str, answer_s: float = 10.0) -> Iterator[dict[str, str]]:
    """Run a private MPS daemon for the visible GPUs; it needs no special rights.

    Yields environment variables with the daemon's folders, by which processes find the daemon.
    """
    if shutil.which(control) is None:
        raise UnsupportedError(
            f"{control} is not on the PATH: it is a part of NVIDIA's driver, which a container may "
            f"lack"
        )
    with TemporaryDirectory(prefix="ucudnn-mps-", ignore_cleanup_errors=True) as folder:
        names = {"CUDA_MPS_PIPE_DIRECTORY": "pipes", "CUDA_MPS_LOG_DIRECTORY": "log"}
        folders = {variable: str(Path(folder) / name) for variable, name in names.items()}
        for path in folders.values():
            Path(path).mkdir(mode=0o700)
        try:
            status, said = _control([control, "-d"], "", folders, answer_s)
            if status != 0:
                raise UnsupportedError(f"{control} -d is not allowed to start here: {said}")
            deadline = Deadline.within(answer_s)
            while _control([control], "get_server_list\n", folders, answer_s)[0] != 0:
                if deadline.is_over:
                    raise UnsupportedError(f"{control} -d started a daemon that does not answer")
                time.sleep(0.1)
            yield folders
        finally:
            # A time limit (-t) is given, because after clients were killed the daemon may not end
            # by itself.
            _control([control], f"quit -t {answer_s:.0f}\n", folders, 2 * answer_s)


def _control(
    command: Sequence[str], text: str, folders: Mapping[str, str], timeout_s: float
) -> tuple[int, str]:
    """Run MPS's control program; return its exit status and the last line of its output."""
    # The output goes to a file, because the daemon that the program starts may hold a pipe open, so
    # that reading it would never end.
    with TemporaryFile("w+") as output:
        try:
            status = subprocess.run(  # noqa: S603 - NVIDIA's program, with arguments of ours
                command,
                input=text,
                stdout=output,
                stderr=output,
                check=False,
                # Ctrl-C is for the ranks, not for the daemon.
                start_new_session=True,
                env={**os.environ, **folders},
                text=True,
                timeout=timeout_s,
            ).returncode
        except (OSError, subprocess.TimeoutExpired) as error:
            return 1, f"it did not end ({type(error).__name__})"
        output.seek(0)
        lines = output.read().strip().splitlines()
        return status, lines[-1] if lines else f"exit status {status}"
