"""Count the samples that ranks compute, and find the fastest number of ranks per device."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from ucudnn import config
from ucudnn.errors import ConfigError, UcudnnError, UnsupportedError
from ucudnn.kernels.deadline import Deadline
from ucudnn.verdict import RANKS_GAIN

if TYPE_CHECKING:
    from ucudnn.distributed.launching import Launch, Say

CANDIDATES = (1, 2, 4)
# Seconds that a launcher has to end after SIGTERM; torchrun's agent in it gives the ranks 30 s.
_END_S = 60.0


def count(samples: int) -> None:
    """Count the samples of a training step that this rank has computed.

    `ucudnn launch --ranks-per-gpu auto` compares numbers of ranks by these counts. In any other run
    this function does nothing.

    >>> count(32)

    Args:
        samples: number of samples in this rank's part of the batch.

    Raises:
        ConfigError: the number is negative.
    """
    if samples < 0:
        raise ConfigError(f"samples must not be negative, got {samples}")
    folder = config.progress_folder()
    if folder is not None:
        path = Path(folder) / os.environ.get("RANK", "0")
        before = int(path.read_text().split()[0]) if path.exists() else 0
        new = path.with_suffix(".new")
        new.write_text(f"{before + samples} {time.monotonic_ns()}")
        new.rename(path)


class _Count(NamedTuple):
    samples: int
    clock_ns: int


def _counts(folder: Path) -> dict[str, _Count]:
    """Samples that each rank has counted, with the time of its last count."""
    paths = [path for path in folder.iterdir() if not path.suffix]
    return {path.name: _Count(*map(int, path.read_text().split())) for path in paths}


class TrialTimes(NamedTuple):
    """Times of a trial."""

    start_s: float = 600.0  # longest wait until all ranks have counted samples; they may tune first
    warmup_s: float = 3.0  # from the time when all ranks have counted to the measurement
    measure_s: float = 10.0  # duration of the measurement


def find_ranks(
    script: Sequence[str],
    settings: Launch,
    times: TrialTimes,
    rounds: int,
    say: Say = lambda _: None,
) -> int:
    """Find the number of ranks per device with which a script computes most samples per second.

    The script calls `ucudnn.distributed.count` after each step. Each round tries each number of
    ranks once.
    """
    if rounds < 1 or not times.measure_s > 0:
        raise ConfigError(
            f"trials need at least one round and some time, got {rounds} rounds of "
            f"{times.measure_s:g} s"
        )
    # Several hosts are refused, because each of them could find another number.
    if settings.has_meeting:
        raise ConfigError(
            "ranks per GPU are found on one host; find them there, then give the number on all "
            "hosts"
        )
    # The launcher is imported only here, because ranks import this module to count, and do not need
    # it.
    from ucudnn.distributed.launching import list_gpus

    gpus = list_gpus() if settings.gpus is None else settings.gpus
    listed = replace(settings, gpus=gpus)
    return search(lambda ranks: measure_ranks(script, listed, ranks, times), rounds, say)


def search(
    measure: Callable[[int], float | None], rounds: int = 3, say: Say = lambda _: None
) -> int:
    """Find the number of ranks with the most samples per second, by trials in several rounds.

    Each round tries all numbers of ranks, so that a slow drift of the machine favours none of them.
    The result is the smallest number whose median rate is within 3 % of the best.

    >>> search({1: 100.0, 2: 160.0, 4: 150.0}.get, rounds=1)
    2
    """
    rates: dict[int, list[float]] = {}
    tried: Sequence[int] = CANDIDATES
    for number in range(rounds):
        # Every second round goes backwards, so that no number always comes first.
        for ranks in sorted(tried, reverse=bool(number % 2)):
            rate = measure(ranks)
            text = "failed" if rate is None else f"{rate:.4g} samples/s"
            say(f"{ranks} rank(s) per device: {text}")
            if rate is not None:
                rates.setdefault(ranks, []).append(rate)
            # If a number of ranks fails, there is usually too little memory for it, and larger
            # numbers need even more.
            elif number == 0:
                break
        tried = tuple(rates)
    if not rates:
        raise UnsupportedError(
            f"the script does not run with {min(CANDIDATES)} rank(s) per device, or does not call "
            f"ucudnn.distributed.count after each step; its output above tells why"
        )
    middle = {ranks: median(taken) for ranks, taken in rates.items()}
    return min(
        ranks for ranks in middle if middle[ranks] >= (1 - RANKS_GAIN) * max(middle.values())
    )


def measure_ranks(
    script: Sequence[str], settings: Launch, ranks: int, times: TrialTimes
) -> float | None:
    """Samples per second of a script with `ranks` ranks per device; None if the script fails.

    The script's processes are stopped when the trial is over, unless they have ended before.
    """
    chosen = replace(settings, ranks_per_device=ranks)
    with tempfile.TemporaryDirectory(prefix="ucudnn-trial-") as folder:
        # The launcher is spawned, so that it inherits neither threads nor GPU state of this
        # process.
        launcher = multiprocessing.get_context("spawn").Process(
            target=_trial, args=(list(script), chosen, folder)
        )
        launcher.start()
        try:
            return _rate(launcher, Path(folder), ranks * max(1, len(settings.gpus or ())), times)
        finally:
            launcher.terminate()
            launcher.join(_END_S)
            launcher.kill()
            launcher.join()


def _trial(script: Sequence[str], settings: Launch, folder: str) -> None:
    """Launch ranks that count samples, in a process that `measure_ranks` stops."""
    from torch.distributed.elastic.multiprocessing import SignalException

    from ucudnn.distributed.launching import launch

    os.environ[config.PROGRESS] = folder
    try:
        launch(script, settings)
    except UcudnnError as error:
        sys.exit(str(error))
    except SignalException as error:
        sys.exit(128 + error.sigval)


def _rate(launcher: BaseProcess, folder: Path, ranks: int, times: TrialTimes) -> float | None:
    """Samples per second of all ranks together; None if a rank fails or counts no samples."""

    def all_count() -> bool:
        return len(_counts(folder)) == ranks

    _wait(launcher, times.start_s, all_count)
    if not all_count():
        return None
    # If the script ends during the warm-up, the rate is measured from the first counts on.
    begin = _counts(folder)
    if _wait(launcher, times.warmup_s):
        begin = _counts(folder)
        _wait(launcher, times.measure_s)
    end = _counts(folder)
    if launcher.exitcode not in (None, 0) or any(end[rank] == begin[rank] for rank in begin):
        return None
    return sum(
        (end[rank].samples - first.samples) * 1e9 / (end[rank].clock_ns - first.clock_ns)
        for rank, first in begin.items()
    )


def _wait(launcher: BaseProcess, seconds: float, event: Callable[[], bool] = lambda: False) -> bool:
    """Wait for an event for at most some seconds; False if the launcher has ended meanwhile."""
    deadline = Deadline.within(seconds)
    while not deadline.is_over and not event():
        if not launcher.is_alive():
            return False
        time.sleep(0.1)
    return True
