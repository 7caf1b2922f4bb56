"""Use of GPUs over time by NVML, and whether sharing them can pay."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from statistics import median

import pynvml

from ucudnn.system.closing import AbstractClosable

# NVML averages over up to a second.
_INTERVAL_S = 1.0
# Of the time in which some kernel runs on the GPU: one rank that reaches it leaves few gaps.
_BUSY_PERCENT = 90
# Fewer samples are from the start of the job, when it loads data and compiles.
_FEWEST = 10


class Sampler(AbstractClosable):
    """A thread that samples how busy GPUs are, and says at the end what follows.

    >>> said = []
    >>> with Sampler([], 1, said.append) as sampler:
    ...     sampler.conclude()  # without a GPU there is nothing to say
    >>> said
    []

    Args:
        gpus: UUIDs.
        ranks: that share each of them.
        say: called with each sentence.
    """

    def __init__(self, gpus: Sequence[str], ranks: int, say: Callable[[str], None]) -> None:
        self._ranks, self._say = ranks, say
        self._samples: dict[str, list[int]] = {gpu: [] for gpu in gpus}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        if gpus:
            self._thread.start()

    def _sample(self) -> None:
        try:
            pynvml.nvmlInit()
            boards = {gpu: pynvml.nvmlDeviceGetHandleByUUID(gpu) for gpu in self._samples}
            while not self._ended.wait(_INTERVAL_S):
                for gpu, board in boards.items():
                    used = pynvml.nvmlDeviceGetUtilizationRates(board)
                    self._samples[gpu].append(int(used.gpu))
        except pynvml.NVMLError:
            # As in some containers; then there is nothing to say.
            return

    def conclude(self) -> None:
        """Say how busy the GPUs were."""
        self.close()
        for gpu, samples in self._samples.items():
            sentence = judge(gpu, samples, self._ranks)
            if sentence:
                self._say(sentence)

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()


def judge(gpu: str, samples: Sequence[int], ranks: int) -> str | None:
    """Sentence about the use of one GPU; None with too few samples.

    >>> judge("GPU-1", [20, 97, 98, 97, 96, 97, 98, 99, 97, 97], 1)
    'GPU-1 was busy 97 % of the time with 1 rank: more ranks can hardly pay'

    Args:
        gpu: its name.
        samples: percent of the time in which a kernel ran.
        ranks: that share it.
    """
    if len(samples) < _FEWEST:
        return None
    busy = round(median(samples))
    what = f"{gpu} was busy {busy} % of the time with {ranks} rank{'s' if ranks > 1 else ''}"
    if busy >= _BUSY_PERCENT:
        return f"{what}: more ranks can hardly pay"
    return f"{what}: try more, by --ranks-per-gpu auto"
