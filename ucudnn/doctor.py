"""Find out what tuning depends on here: device, versions, threads, malloc, load, cache."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ucudnn import cache as cache_room
from ucudnn.advice import LARGE_THRESHOLD_TUNABLES
from ucudnn.backends import open_backend
from ucudnn.backends.cudnn.api import Cudnn, CudnnError, Handle, find_library
from ucudnn.backends.cudnn.offline import has_driver
from ucudnn.backends.cudnn.profile import DeviceProfile
from ucudnn.backends.torch_cpu.processor import filling
from ucudnn.errors import UnsupportedError
from ucudnn.measurement import Conditions, Device, Software
from ucudnn.system.files import is_writable
from ucudnn.units import format_ns


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The state of this machine and of this process, as far as tuning depends on it."""

    device: Device
    software: Software
    conditions: Conditions
    load: float  # processes that were ready to run, on average of the last minute
    fresh_ns: int  # time to fill a newly allocated block of 64 MiB, median of five
    reused_ns: int  # time to fill an equal block that is in use already, median of five
    cudnn: str  # version and path of libcudnn, or the reason why there is none
    cache_path: str
    cache_writable: bool

    @property
    def advice(self) -> tuple[str, ...]:
        """Advice on what to change for faster convolutions, steadier times and a usable cache."""
        sentences = []
        # glibc's malloc takes blocks above its mmap threshold from the operating system. If this
        # threshold was set, as the advice below proposes, the allocator's name contains it, and is
        # not just "glibc".
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
    """Examine this machine and this process; takes under a second and changes nothing."""
    backend = open_backend("auto")
    path, block = cache_room.default_path(cache), filling()
    return Diagnosis(
        device=backend.device(),
        software=backend.software(),
        conditions=backend.conditions(),
        load=os.getloadavg()[0],
        fresh_ns=block.fresh_ns,
        reused_ns=block.reused_ns,
        cudnn=_describe_cudnn(),
        cache_path=str(path),
        cache_writable=is_writable(path),
    )


def save_device_profile(path: str | os.PathLike[str]) -> DeviceProfile:
    """Write the profile of this machine's GPU, for `ucudnn enumerate` on other machines."""
    # The driver is looked for first, because cuDNN can be loaded without a driver, as by
    # `ucudnn enumerate`.
    if not has_driver():
        raise UnsupportedError(
            "a device profile is of the GPU here, and this machine has no NVIDIA driver; "
            "save it where the GPU is"
        )
    cudnn = Cudnn(find_library())
    try:
        text = DeviceProfile.text_of_handle(cudnn, Handle(cudnn))
    # There may be a driver, but no GPU that cuDNN can use.
    except CudnnError as error:
        raise UnsupportedError(f"there is no GPU here to describe: {error}") from error
    profile = DeviceProfile.parse(text, "of this device")
    profile.save(path)
    return profile


def _describe_cudnn() -> str:
    try:
        cudnn = Cudnn(find_library())
    except UnsupportedError as error:
        return str(error)
    return f"{cudnn.version_text} ({cudnn.path})"
