"""Start of ranks by torchrun's own agent, which watches, restarts and stops them."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from ucudnn.distributed.affinity import cores
from ucudnn.distributed.launching.placement import Place, list_gpus, place
from ucudnn.distributed.launching.utilization import Sampler
from ucudnn.errors import ConfigError, RankError, UnsupportedError
from ucudnn.system import launched
from ucudnn.system.guard import Guard
from ucudnn.system.mps import CONTROL, MpsDaemon
from ucudnn.units import format_bytes

MPS_MODES = ("auto", "require", "off")
# Options of torchrun that say where ranks of several hosts meet.
_MEETING = ("--nnodes", "--rdzv", "--master", "--node", "--standalone")
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Launch:
    """Settings of a launch.

    Args:
        ranks_per_device: number of ranks that share a GPU, or the processor.
        mps: "auto" (where it can be had), "require" or "off".
        mps_percent: of a GPU's multiprocessors that one rank may use under MPS.
        mps_control: name or path of the control program of MPS.
        device_workspace: bytes of workspace that the ranks of a device may use together; each gets
            an equal part as its default workspace limit. None: no limit from here.
        torchrun_options: further options of torchrun, such as "--max-restarts=2".
        gpus: UUIDs of GPUs; None: those that torch sees.
        progress: folder where ranks count their samples, in a trial.

    Raises:
        ConfigError: a value that is not allowed.
    """

    ranks_per_device: int = 1
    mps: str = "auto"
    mps_percent: int = 100
    mps_control: str = CONTROL
    device_workspace: int | None = None
    torchrun_options: tuple[str, ...] = ()
    gpus: tuple[str, ...] | None = None
    progress: str | None = None

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


def launch(script: Sequence[str], settings: Launch, say: Say = lambda _: None) -> None:
    """Run a script in several ranks for each GPU, or for the processor, until all have ended.

    Whatever ends this process, also SIGKILL, ends the ranks and the MPS daemon, too.

    Args:
        script: the script and its arguments, as after `python`.
        settings: how many ranks there are and what they share.
        say: called with each sentence for the user.

    Raises:
        ConfigError: there is no script.
        UnsupportedError: MPS is required and is not to be had.
        RankError: a rank failed.
        SignalException: this process got a signal to end.
    """
    if not script:
        raise ConfigError("there is nothing to launch: give a script after --, as -- train.py")
    gpus = list_gpus() if settings.gpus is None else settings.gpus
    with ExitStack() as stack:
        guard = stack.enter_context(Guard(settings.mps_control))
        daemon = _start_mps(settings, gpus, guard.folder, say)
        places = place(
            settings.ranks_per_device,
            gpus,
            cores(),
            settings.device_workspace,
            daemon.client_environment if daemon else None,
            os.environ.get("OMP_NUM_THREADS"),
            settings.progress,
        )
        _tell(settings, gpus, places, say)
        document = json.dumps([asdict(one) for one in places])
        (guard.folder / "places.json").write_text(document, encoding="utf-8")
        sampler = stack.enter_context(Sampler(gpus, settings.ranks_per_device, say))
        _run(script, settings, guard.folder, len(places))
        sampler.conclude()
        if daemon and not daemon.is_alive():
            say("the MPS daemon ended before the ranks did; its log tells why")


def _start_mps(settings: Launch, gpus: Sequence[str], folder: Path, say: Say) -> MpsDaemon | None:
    """The daemon, answering; None where it is not needed or not to be had."""
    if settings.mps == "require" and not gpus:
        raise UnsupportedError("MPS shares a GPU, and torch sees none here; use --mps auto")
    if settings.mps == "off" or not gpus or settings.ranks_per_device == 1:
        return None
    daemon = MpsDaemon(folder, gpus, settings.mps_percent, settings.mps_control)
    try:
        daemon.start()
    except UnsupportedError as error:
        if settings.mps == "require":
            raise
        say(f"the ranks of a GPU take turns, without MPS: {error}")
        return None
    return daemon


def _tell(settings: Launch, gpus: Sequence[str], places: Sequence[Place], say: Say) -> None:
    """Say who shares what."""
    ranks = settings.ranks_per_device
    if gpus:
        by_mps = "CUDA_MPS_PIPE_DIRECTORY" in places[0].environment
        how = f", each with up to {settings.mps_percent} % of it by MPS" if by_mps else ""
        say(f"{ranks} rank(s) for each of {len(gpus)} GPU(s){how}")
    else:
        threads = places[0].environment["OMP_NUM_THREADS"]
        say(f"{ranks} rank(s) share the processor, with {threads} thread(s) each")
        if ranks > len(cores()):
            say(f"there are {len(cores())} cores for {ranks} ranks, some of which share one")
    if settings.device_workspace is not None:
        part = format_bytes(settings.device_workspace // ranks)
        say(f"workspace limit of each rank: {part} of {format_bytes(settings.device_workspace)}")


def has_meeting(torchrun_options: Sequence[str]) -> bool:
    """True if options say where ranks of several hosts meet.

    >>> has_meeting(["--max-restarts=2"]), has_meeting(["--nnodes=2", "--rdzv_id=7"])
    (False, True)

    Args:
        torchrun_options: options of torchrun.
    """
    return any(word.replace("_", "-").startswith(_MEETING) for word in torchrun_options)


def _run(script: Sequence[str], settings: Launch, folder: Path, ranks: int) -> None:
    """Run torchrun's agent in this process."""
    options = list(settings.torchrun_options)
    if not has_meeting(options):
        options.append("--standalone")
    words = [f"--nproc-per-node={ranks}", *options, "--no-python", sys.executable]
    words += [str(launched.__file__), str(folder), *script]
    try:
        with _one_thread():
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
def _one_thread() -> Iterator[None]:
    """Set OMP_NUM_THREADS, or else torchrun does, with a warning; each rank gets its own later."""
    is_given = "OMP_NUM_THREADS" in os.environ
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        yield
    finally:
        if not is_given:
            del os.environ["OMP_NUM_THREADS"]
