"""Samples that a rank has computed, counted for whoever measures the speed of the job."""

from __future__ import annotations

import os
import time
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ucudnn import config
from ucudnn.errors import ConfigError

# One write of a fixed length replaces the last one whole.
_FORMAT = "{samples:20d} {clock_ns:20d}\n"


class Count(NamedTuple):
    """Samples that a rank has computed until some moment.

    Args:
        samples: their number.
        clock_ns: the moment, on the clock of the host.
    """

    samples: int
    clock_ns: int


class _Counter:
    """A file with the count of this rank."""

    def __init__(self, folder: str) -> None:
        path = Path(folder) / os.environ.get("RANK", "0")
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        self._samples = 0

    def add(self, samples: int) -> None:
        self._samples += samples
        text = _FORMAT.format(samples=self._samples, clock_ns=time.monotonic_ns())
        os.pwrite(self._file, text.encode(), 0)


@cache
def _counter(folder: str) -> _Counter:
    return _Counter(folder)


def count(samples: int) -> None:
    """Count the samples of a training step that this rank has computed.

    `ucudnn launch --ranks-per-gpu auto` compares numbers of ranks by it; otherwise it does nothing.

    >>> count(32)

    Args:
        samples: of this rank's part of the batch.

    Raises:
        ConfigError: a negative number.
    """
    if samples < 0:
        raise ConfigError(f"samples must not be negative, got {samples}")
    folder = config.progress_folder()
    if folder is not None:
        _counter(folder).add(samples)


def read_counts(folder: Path) -> dict[int, Count]:
    """The counts of all ranks that have counted, by rank.

    Args:
        folder: where they count.
    """
    counts = {}
    for path in folder.iterdir():
        numbers = path.read_text(encoding="ascii").split()
        # Empty between its creation and the first count.
        if numbers:
            counts[int(path.name)] = Count(int(numbers[0]), int(numbers[1]))
    return counts
