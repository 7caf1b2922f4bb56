"""Search for the number of ranks per device with the most samples per second."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from torch.distributed.elastic.multiprocessing import SignalException

from ucudnn.distributed.counting import Count, read_counts
from ucudnn.distributed.launching.agent import Launch, Say, has_meeting, launch
from ucudnn.distributed.launching.placement import list_gpus
from ucudnn.errors import ConfigError, UcudnnError, UnsupportedError

CANDIDATES = (1, 2, 4)
# More ranks need more memory, so they must gain more than this.
_TIE = 0.03
# Where the first trial of a number falls this far behind the best, larger ones are not tried.
_HOPELESS = 0.7
_PROGRAM = "from ucudnn.distributed.launching import search; search.run_trial()"
_POLL_S = 0.1
# Time in which ranks end after SIGTERM; torchrun's agent itself gives them 30 s.
_END_S = 60.0


@dataclass(frozen=True, slots=True)
class TrialTimes:
    """Times of a trial.

    Args:
        start_s: until all ranks have counted samples; they may tune first.
        warmup_s: from then on until samples are counted.
        measure_s: in which samples are counted.
    """

    start_s: float = 600.0
    warmup_s: float = 3.0
    measure_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Found:
    """Result of a search.

    Args:
        ranks_per_device: the number to use.
        rates: samples per second of every trial, by number of ranks per device.
    """

    ranks_per_device: int
    rates: dict[int, tuple[float, ...]]


def search(
    measure: Callable[[int], float | None],
    candidates: Sequence[int] = CANDIDATES,
    rounds: int = 3,
    say: Say = lambda _: None,
) -> Found:
    """Find the number of ranks with the most samples per second, by trials in several rounds.

    Rounds alternate between all numbers, so that a slow drift of the machine favours none. Of
    numbers within 3 % of the best median the smallest is chosen.

    >>> search({1: 100.0, 2: 160.0, 4: 150.0}.get, rounds=1).ranks_per_device
    2

    Args:
        measure: samples per second with a number of ranks; None where it fails.
        candidates: numbers to try.
        rounds: trials of each number.
        say: called with each result.

    Raises:
        UnsupportedError: not even the smallest number runs.
    """
    rates: dict[int, list[float]] = {}
    for ranks in sorted(candidates):
        rate = measure(ranks)
        if rate is None:
            # Most often memory has ended, which larger numbers need more of.
            say(f"{ranks} rank(s) per device: failed; larger numbers are not tried")
            break
        say(f"{ranks} rank(s) per device: {rate:.4g} samples/s")
        best = max((first for first, *_ in rates.values()), default=0.0)
        rates[ranks] = [rate]
        if rate < _HOPELESS * best:
            break
    if not rates:
        raise UnsupportedError(
            f"the script does not run with {min(candidates)} rank(s) per device, or does not call "
            f"ucudnn.distributed.count after each step; its output above tells why"
        )
    for number in range(1, rounds):
        # In turns forwards and backwards, so that nobody always comes first.
        for ranks in sorted(rates, reverse=bool(number % 2)):
            rate = measure(ranks)
            if rate is not None:
                rates[ranks].append(rate)
                say(f"{ranks} rank(s) per device: {rate:.4g} samples/s")
    middle = {ranks: median(taken) for ranks, taken in rates.items()}
    chosen = min(ranks for ranks in middle if middle[ranks] >= (1 - _TIE) * max(middle.values()))
    return Found(chosen, {ranks: tuple(taken) for ranks, taken in rates.items()})


def find_ranks(
    script: Sequence[str],
    settings: Launch,
    times: TrialTimes | None = None,
    rounds: int = 3,
    say: Say = lambda _: None,
) -> Found:
    """Find the number of ranks per device with which a script computes most samples per second.

    Args:
        script: it calls `ucudnn.distributed.count` after each step.
        settings: everything but the number of ranks.
        times: of each trial.
        rounds: trials of each number.
        say: called with each result.

    Raises:
        ConfigError: the job has several hosts, which could come to different results, or a number
            is not allowed.
        UnsupportedError: the script does not run, or counts no samples.
    """
    times = times or TrialTimes()
    if rounds < 1 or not times.measure_s > 0:
        raise ConfigError(
            f"trials need at least one round and some time, got {rounds} rounds of "
            f"{times.measure_s:g} s"
        )
    if has_meeting(settings.torchrun_options):
        raise ConfigError(
            "ranks per GPU are found on one host; find them there, then give the number on all "
            "hosts"
        )
    if settings.gpus is None:
        settings = replace(settings, gpus=list_gpus())

    def measure(ranks: int) -> float | None:
        return measure_ranks(script, settings, ranks, times)

    return search(measure, CANDIDATES, rounds, say)


def measure_ranks(
    script: Sequence[str], settings: Launch, ranks: int, times: TrialTimes
) -> float | None:
    """Samples per second of a script with some ranks per device; None where it fails.

    The script runs in processes that are stopped after some seconds, or end before that.

    Args:
        script: it calls `ucudnn.distributed.count` after each step.
        settings: everything but the number of ranks; its GPUs are listed.
        ranks: their number.
        times: of the trial.
    """
    with tempfile.TemporaryDirectory(prefix="ucudnn-trial-") as folder:
        given = replace(settings, ranks_per_device=ranks, progress=folder)
        words = [sys.executable, "-c", _PROGRAM, json.dumps(asdict(given)), *script]
        paths = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        # A launcher of its own, whose guard leaves nothing behind when it is stopped.
        launcher = subprocess.Popen(words, env={**os.environ, **paths})  # noqa: S603 - as above
        try:
            ranks_here = ranks * max(1, len(settings.gpus or ()))
            return _rate(launcher, Path(folder), ranks_here, times)
        finally:
            launcher.terminate()
            try:
                launcher.wait(_END_S)
            except subprocess.TimeoutExpired:
                launcher.kill()
                launcher.wait()


def run_trial() -> None:
    """Launch the ranks of a trial; the program that `measure_ranks` starts."""
    values = json.loads(sys.argv[1])
    values["torchrun_options"] = tuple(values["torchrun_options"])
    if values["gpus"] is not None:
        values["gpus"] = tuple(values["gpus"])
    try:
        launch(sys.argv[2:], Launch(**values))
    except SignalException as error:
        # Enough was measured.
        sys.exit(128 + error.sigval)
    except UcudnnError as error:
        sys.exit(str(error))


def _rate(
    launcher: subprocess.Popen[bytes], folder: Path, ranks: int, times: TrialTimes
) -> float | None:
    """Samples per second of all ranks, once all of them count; None where one fails."""

    def all_count() -> bool:
        return len(read_counts(folder)) == ranks

    _wait(launcher, times.start_s, all_count)
    if not all_count():
        return None
    # The steps of a script that ends early still count, if there are several.
    begin = read_counts(folder)
    if _wait(launcher, times.warmup_s, lambda: False):
        begin = read_counts(folder)
        _wait(launcher, times.measure_s, lambda: False)
    end = read_counts(folder)
    if launcher.poll() not in (None, 0) or any(end[rank] == begin[rank] for rank in begin):
        return None
    return sum(_rate_between(begin[rank], end[rank]) for rank in begin)


def _rate_between(begin: Count, end: Count) -> float:
    return (end.samples - begin.samples) * 1e9 / (end.clock_ns - begin.clock_ns)


def _wait(launcher: subprocess.Popen[bytes], seconds: float, event: Callable[[], bool]) -> bool:
    """Wait for an event or for some time; False if the launcher has ended meanwhile."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not event():
        if launcher.poll() is not None:
            return False
        time.sleep(_POLL_S)
    return True
