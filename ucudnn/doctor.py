"""Facts of this machine that tuning depends on: device, versions, threads, malloc, cache."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter_ns

import torch

from ucudnn import cache as cache_room
from ucudnn.backends import open_backend
from ucudnn.backends.cudnn.api import Cudnn, CudnnError, Handle, find_library
from ucudnn.backends.cudnn.offline import has_driver
from ucudnn.backends.cudnn.profile import DeviceProfile
from ucudnn.backends.torch_cpu.machine import LARGE_THRESHOLD_TUNABLES
from ucudnn.errors import UnsupportedError
from ucudnn.measurement import Conditions, Device, Software
from ucudnn.units import format_ns

# Above 32 MiB, the most to which glibc raises its mmap threshold by itself: a block of this size is
# paged in anew at each allocation unless malloc was told otherwise.
_BLOCK_BYTES = 64 << 20
# The median of five ignores two rounds that something else disturbed.
_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Facts about this machine and process that a plan depends on.

    Args:
        device: the processor.
        software: versions.
        conditions: threads and malloc.
        load: number of processes that run or wait, averaged over the last minute.
        fresh_ns: time to fill a newly allocated block of 64 MiB, median of five.
        reused_ns: time to fill it again.
        cudnn: version and file of the libcudnn that would be used on a GPU, or why there is none.
        cache_path: where measurements are kept.
        cache_writable: whether they can be.
    """

    device: Device
    software: Software
    conditions: Conditions
    load: float
    fresh_ns: int
    reused_ns: int
    cudnn: str
    cache_path: str
    cache_writable: bool

    @property
    def advice(self) -> tuple[str, ...]:
        """Advice on faster convolutions or steadier times, one sentence each."""
        sentences = []
        # Plain "glibc": where a threshold was set, the name contains it.
        if self.conditions.allocator == "glibc" and self.fresh_ns > 1.5 * self.reused_ns:
            sentences.append(
                f"glibc's malloc returns large blocks to the operating system: a fresh 64 MiB "
                f"block costs {format_ns(self.fresh_ns)} to fill, one in use "
                f"{format_ns(self.reused_ns)}. To make every large convolution faster, with or "
                f"without a plan, start Python with GLIBC_TUNABLES={LARGE_THRESHOLD_TUNABLES} or "
                f"preload tcmalloc. The price is memory: the process keeps freed blocks and its "
                f"peak grows, which may be more than a plan saves."
            )
        if self.load > self.device.cores / 2:
            sentences.append(
                f"The machine is busy (load {self.load:.1f} on {self.device.cores} cores): times "
                f"taken now are noisy; tune when it is idle."
            )
        if not self.cache_writable:
            sentences.append(
                f"The cache {self.cache_path} cannot be written: measurements last as long as the "
                f"process; set UCUDNN_CACHE to a folder that can."
            )
        return tuple(sentences)


def diagnose(cache: str | None = None) -> Diagnosis:
    """Collect facts about this machine and process; takes under a second and changes nothing.

    Args:
        cache: folder of the measurement cache; None: the user's cache directory.
    """
    backend = open_backend("auto")
    # 4 bytes a float32. Its pages are there before it is timed, unlike those of a fresh block.
    block = torch.ones(_BLOCK_BYTES // 4)
    path = cache_room.default_path(cache)
    return Diagnosis(
        device=backend.device(),
        software=backend.software(),
        conditions=backend.conditions(),
        load=os.getloadavg()[0],
        fresh_ns=_median_ns(lambda: torch.ones(_BLOCK_BYTES // 4)),
        reused_ns=_median_ns(lambda: block.fill_(1)),
        cudnn=_describe_cudnn(),
        cache_path=str(path),
        cache_writable=_writable(path),
    )


def save_device_profile(path: str | os.PathLike[str]) -> DeviceProfile:
    """Write the profile of this machine's GPU, for `ucudnn enumerate` on machines without it.

    Args:
        path: the JSON file to write.

    Raises:
        UnsupportedError: there is no GPU here.
        ConfigError: the file cannot be written.
    """
    # cuDNN itself loads without a driver, as `ucudnn enumerate` needs it.
    if not has_driver():
        raise UnsupportedError(
            "a device profile is of the GPU here, and this machine has no NVIDIA driver; "
            "save it where the GPU is"
        )
    cudnn = Cudnn(find_library())
    try:
        with Handle(cudnn) as handle:
            profile = DeviceProfile.of_handle(cudnn, handle)
    # A driver alone is no GPU that cuDNN can use.
    except CudnnError as error:
        raise UnsupportedError(f"there is no GPU here to describe: {error}") from error
    profile.save(path)
    return profile


def _describe_cudnn() -> str:
    try:
        cudnn = Cudnn(find_library())
    except UnsupportedError as error:
        return str(error)
    return f"{cudnn.version_text} ({cudnn.path})"


def _median_ns(run: Callable[[], object]) -> int:
    times = []
    for _ in range(_ROUNDS):
        start = perf_counter_ns()
        run()
        times.append(perf_counter_ns() - start)
    return round(median(times))


def _writable(path: os.PathLike[str]) -> bool:
    """True if the folder, or its nearest existing parent, can be written."""
    # The cache makes its folder when it first writes, so it may not exist yet.
    folder = os.path.abspath(path)
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    return os.path.isdir(folder) and os.access(folder, os.W_OK)
