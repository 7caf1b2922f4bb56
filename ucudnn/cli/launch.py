"""`ucudnn launch`: several ranks for each GPU, or for the cores of a CPU."""

from __future__ import annotations

import shlex
import signal
import sys
from dataclasses import replace
from typing import Annotated

import typer

from ucudnn.cli.console import SAYS_NO, fail, say, say_error
from ucudnn.errors import ConfigError, RankError
from ucudnn.units import parse_bytes


def launch(
    script: Annotated[list[str], typer.Argument(help="The script and its arguments, after --.")],
    ranks_per_gpu: Annotated[
        str, typer.Option(help="Ranks that share a GPU, or the processor: a number, or auto.")
    ] = "1",
    mps: Annotated[str, typer.Option(help="NVIDIA's MPS: auto, require or off.")] = "auto",
    mps_percent: Annotated[
        int, typer.Option(help="Percent of a GPU that a rank may use under MPS.")
    ] = 100,
    device_workspace: Annotated[
        str | None,
        typer.Option(help="Workspace of all ranks of a device, such as 512MiB; divided equally."),
    ] = None,
    torchrun: Annotated[
        str, typer.Option(help='Further options of torchrun, such as "--max-restarts=2".')
    ] = "",
    trial_seconds: Annotated[
        float, typer.Option(help="For auto: seconds in which a trial counts samples.")
    ] = 10.0,
    trial_rounds: Annotated[int, typer.Option(help="For auto: trials of each number.")] = 3,
) -> None:
    """Run a training script in several ranks for each GPU, or for the cores of a CPU.

    Example: ucudnn launch --ranks-per-gpu 2 -- examples/ddp_resnet.py
    """
    # torch is imported only now that the command line is read.
    from torch.distributed.elastic.multiprocessing import SignalException

    from ucudnn.distributed.counting import TrialTimes, find_ranks
    from ucudnn.distributed.launching import Launch, launch

    is_auto = ranks_per_gpu == "auto"
    if not is_auto and not ranks_per_gpu.isdecimal():
        raise ConfigError(f"--ranks-per-gpu must be a number or auto, got {ranks_per_gpu!r}")
    settings = Launch(
        ranks_per_device=1 if is_auto else int(ranks_per_gpu),
        mps=mps,
        mps_percent=mps_percent,
        device_workspace=parse_bytes(device_workspace, "--device-workspace")
        if device_workspace
        else None,
        torchrun_options=tuple(shlex.split(torchrun)),
    )
    try:
        if is_auto:
            # A signal ends the trial, too; later ones are the agent's.
            signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
            times = TrialTimes(measure_s=trial_seconds)
            found = find_ranks(script, settings, times, trial_rounds, say_error)
            say(f"--ranks-per-gpu {found} is used")
            settings = replace(settings, ranks_per_device=found)
        launch(script, settings, say_error)
    except SignalException as error:
        # As a shell reports a process that a signal has ended.
        sys.exit(128 + error.sigval)
    except RankError as error:
        fail(str(error), SAYS_NO)
